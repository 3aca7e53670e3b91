"""From trained weights to the sections of an artifact."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from caddie.codecs import Codec, Zlib
from caddie.config import Config, Count
from caddie.container import Section
from caddie.errors import UserError
from caddie.model import GPT
from caddie.parameters import assign, declarations
from caddie.quantize import Float16, Quantizer, Rows

PREFIX = "weights/"
"""Sections of weights are named by this and the parameter's name."""


@dataclass(frozen=True, kw_only=True)
class Compress(Config):
    """How weights become bytes."""

    quantizers: Mapping[str, Quantizer] = field(
        default_factory=lambda: {
            "embedding": Rows(),
            "matrix": Rows(),
            "head": Rows(),
            "gate": Float16(),
            "scalar": Float16(),
        }
    )
    """Role or name pattern to quantizer; the last match wins."""
    codec: Codec = Zlib()
    """Compressor of the integers."""
    cap_bytes: Count = 16_000_000
    """Bytes that the artifact may have."""
    carry_source: bool = False
    """Whether the artifact carries the source that scores it. Off, because whoever scores it has this program, and the
    bytes would be taken from the weights; what the source would take is measured in any case."""


@dataclass(frozen=True)
class QuantizedTensor:
    """What became of one parameter; `relative_error` is that of its Frobenius norm."""

    name: str
    role: str
    shape: tuple[int, ...]
    quantizer: Quantizer
    relative_error: float


@dataclass(frozen=True)
class Compressed:
    """The weight sections of an artifact, in the model's order, and what happened to each tensor."""

    sections: list[Section]
    tensors: list[QuantizedTensor]


def compress(gpt: GPT, weights: Mapping[str, Tensor], config: Compress) -> Compressed:
    """Quantize and code every weight; weights of another model or not finite are a `UserError`."""
    with torch.device("meta"):
        model = gpt.build()
    roles = declarations(model)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name in sorted(shapes.keys() | weights.keys()):
        if name not in weights or tuple(weights[name].shape) != shapes.get(name):
            raise UserError(f"the weights are not those of this model: {name} does not fit; train again")
    sections, tensors = [], []
    for name, quantizer in assign(config.quantizers, model, "compress.quantizers").items():
        weight = weights[name]
        if not bool(torch.isfinite(weight).all()):
            raise UserError(
                f"{name} has values that are not finite; the training run diverged, lower its learning rates"
            )
        arrays = quantizer.quantize(weight)
        back = quantizer.dequantize(arrays, tuple(weight.shape))
        error = float((back - weight.float().cpu()).norm() / weight.float().norm().clamp_min(1e-30))
        data = b"".join(arrays[key].tobytes() for key in quantizer.layout(tuple(weight.shape)))
        sections.append(Section(PREFIX + name, data, config.codec))
        tensors.append(QuantizedTensor(name, roles[name].role, tuple(weight.shape), quantizer, error))
    return Compressed(sections, tensors)


def decompress(gpt: GPT, quantizers: Mapping[str, Quantizer], sections: Mapping[str, bytes]) -> dict[str, Tensor]:
    """The weights that `compress` stored; missing, spare or wrongly sized sections are a `UserError`."""
    with torch.device("meta"):
        model = gpt.build()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    stored = {name.removeprefix(PREFIX) for name in sections if name.startswith(PREFIX)}
    if stored != set(shapes):
        odd = sorted(stored ^ set(shapes))[0]
        raise UserError(
            f"the artifact's weights do not fit its model: {odd} is {'missing' if odd in shapes else 'unknown'}"
        )
    weights = {}
    for name, quantizer in assign(quantizers, model, "quantizers").items():
        arrays, data, offset = {}, sections[PREFIX + name], 0
        layout = quantizer.layout(shapes[name])
        expected = sum(math.prod(shape) * dtype.itemsize for dtype, shape in layout.values())
        if len(data) != expected:
            raise UserError(
                f"the artifact's weights do not fit its model: {name} has {len(data):,} bytes, not {expected:,}"
            )
        for key, (dtype, shape) in layout.items():
            arrays[key] = np.frombuffer(data, dtype, math.prod(shape), offset).reshape(shape)
            offset += arrays[key].nbytes
        weights[name] = quantizer.dequantize(arrays, shapes[name])
        if not bool(torch.isfinite(weights[name]).all()):
            raise UserError(f"the artifact's {name} has values that are not finite")
    return weights
