"""Decompress weights from the sections of an artifact: the inverse of `compress`."""

from collections.abc import Mapping
from contextlib import closing

import torch
from torch import Tensor, nn

from caddie.errors import UserError
from caddie.model.parameters import assign
from caddie.pack.coding import DecodeJob, ProcessPool
from caddie.pack.quantize import Quantizer

PREFIX = "weights/"
"""Prefix of the names of sections with weights; the parameter's name follows."""
LENGTH_BYTES = 4
"""Bytes of the little-endian length before each array of a section."""
_UNFIT = "the artifact's weights do not fit its model"


def decompress(model: nn.Module, rules: Mapping[str, Quantizer], sections: Mapping[str, bytes]) -> dict[str, Tensor]:
    """Return the weights that `compress` stored, float32; `UserError` for missing, extra or wrongly sized sections."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    stored = {name.removeprefix(PREFIX) for name in sections if name.startswith(PREFIX)}
    if stored != set(shapes):
        odd = sorted(stored ^ set(shapes))[0]
        raise UserError(f"{_UNFIT}: {odd} is {'missing' if odd in shapes else 'unknown'}")
    chosen = assign(rules, model, "quantizers")
    streams, spare = list[DecodeJob](), {}
    for name, quantizer in chosen.items():
        data = sections[PREFIX + name]
        for key, (dtype, shape) in quantizer.layout(shapes[name]).items():
            length, data = int.from_bytes(data[:LENGTH_BYTES], "little"), data[LENGTH_BYTES:]
            if length > len(data):
                raise UserError(f"{_UNFIT}: {name} ends within its {key}")
            streams.append(DecodeJob(data[:length], dtype, shape))
            data = data[length:]
        spare[name] = len(data)
    weights = {}
    with ProcessPool(torch.get_num_threads()) as pool, closing(pool.decode(streams)) as decoded:
        for name, quantizer in chosen.items():
            arrays = {}
            for key in quantizer.layout(shapes[name]):
                try:
                    arrays[key] = next(decoded)
                except UserError as error:
                    raise UserError(f"the {key} of the artifact's {name}: {error}") from None
            if spare[name]:
                raise UserError(f"{_UNFIT}: {name} has {spare[name]:,} bytes too many")
            weights[name] = quantizer.dequantize(arrays, shapes[name])
            if not bool(torch.isfinite(weights[name]).all()):
                raise UserError(f"the artifact's {name} has values that are not finite")
    return weights
