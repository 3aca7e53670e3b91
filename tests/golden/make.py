"""Write the compact set of the public scripts' numbers, `tests/golden/parity`, from a full one: make.py FOLDER.

Everything is compressed by xz. Of a system's results only those that a test reads are kept, large ones in samples.
Weights were drawn by PyTorch's generator, one parameter after the other in the order of their names; where drawing them
again gives the same numbers, the seed and each matrix's gain are kept in their place.
"""

import argparse
import json
import lzma
import math
import re
import sys
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
from parity import SYSTEMS, facts, tensors, weights

TARGET = Path(__file__).resolve().parent / "parity"
SEEDS = range(1000, 1300)
VECTOR = 512
"""Parameters of at most so many elements are kept as they are."""
KEPT = {"x0": 512, "logits": 2048}
"""Elements that are kept of a result, by the last part of its name."""
GRADIENT, PARAMETER = 48, 24
"""Elements that are kept of a gradient and of a parameter after training."""
UNREAD = r"(.*\.)?(exec\d+_.*|last_attention.*|final_hidden|fused_ce\..*)"


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(f"{path.name}.xz").write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))


def write_json(path: Path, content: Any) -> None:
    write(path, json.dumps(content, separators=(",", ":")).encode())


def thinned(name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
    """Return a result's name and elements in the compact set, None if no test reads it."""
    if re.fullmatch(UNREAD, name):
        return None
    last = name.rpartition(".")[2]
    if last in KEPT and tensor.numel() > KEPT[last]:
        stride = tensor.numel() // KEPT[last] | 1  # odd, so that it meets every column
        return f"{name}_every_{stride}", tensor.flatten()[::stride].clone()
    if match := re.fullmatch(r"((?:\w+\.)?)grad(?:_every_(\d+))?\.(.+)", name):
        if tensor.numel() > GRADIENT and not name.startswith("ttt"):
            stride = -(-tensor.numel() // GRADIENT)
            whole = stride * int(match[2] or 1)
            return f"{match[1]}grad_every_{whole}.{match[3]}", tensor.flatten()[::stride].clone()
    if re.match(r"train\d+_", name):
        return name, tensor.flatten()[:PARAMETER].clone()
    return name, tensor


def write_weights(folder: Path, found: dict[str, Tensor]) -> None:
    """Keep the seed and the gains if some seed draws these weights, the weights themselves if not."""
    first = sorted(found)[0]
    for seed in SEEDS:
        drawn = torch.randn(found[first].shape, generator=torch.Generator().manual_seed(seed))
        if torch.corrcoef(torch.stack([drawn.flatten(), found[first].float().flatten()]))[0, 1] > 0.999:
            break
    else:
        write(folder / "weights.safetensors", safetensors.torch.save(found))
        return
    generator = torch.Generator().manual_seed(seed)
    matrices = {}
    for name in sorted(found):
        drawn, value = torch.randn(found[name].shape, generator=generator), found[name]
        if value.numel() > VECTOR:
            gain = float((value.double() * drawn.double()).sum() / drawn.double().square().sum())
            choices = [(round(gain, 3), 1), (round(gain * math.sqrt(value.shape[-1]), 3), value.shape[-1])]
            for rounded, inputs in choices:
                if torch.equal((drawn * rounded / math.sqrt(inputs)).half(), value):
                    matrices[name] = (list(value.shape), rounded, inputs)
    write_json(folder / "weights.json", {"seed": seed, "matrices": matrices})
    vectors = {name: value for name, value in found.items() if name not in matrices}
    write(folder / "vectors.safetensors", safetensors.torch.save(vectors))
    again = weights(folder)
    assert again.keys() == found.keys()
    assert all(torch.equal(again[name], found[name]) for name in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    source: Path = parser.parse_args().folder
    for path in sorted((source / "components").rglob("*")):
        target = TARGET / path.relative_to(source)
        if path.suffix == ".json":
            write_json(target, facts(path.with_suffix("")))
        elif path.suffix == ".safetensors":
            write(target, path.read_bytes())
    for system in SYSTEMS:
        folder, target = source / system, TARGET / system
        config = facts(folder / "config")
        write_json(target / "config.json", {k: v for k, v in config.items() if not k.startswith("parameter_")})
        write(target / "tokens.safetensors", (folder / "tokens.safetensors").read_bytes())
        pairs = [thinned(name, tensor) for name, tensor in sorted(tensors(folder / "expected").items())]
        write(target / "expected.safetensors", safetensors.torch.save(dict(pair for pair in pairs if pair)))
        write_weights(target, weights(folder))
        if (folder / "lora_weights.safetensors").exists():
            write(target / "lora_weights.safetensors", (folder / "lora_weights.safetensors").read_bytes())
    size = sum(path.stat().st_size for path in TARGET.rglob("*.xz"))
    print(f"{size:,} bytes in {TARGET}")


if __name__ == "__main__":
    main()
