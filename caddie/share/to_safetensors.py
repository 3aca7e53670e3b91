"""Export to safetensors: dequantized weights by name, and their settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from caddie.files import making, write_json
from caddie.pack.artifact import Artifact, load

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
TOKENIZER = "tokenizer.model"
"""File with what the artifact stores of its tokenizer."""


def to_safetensors(path: Path, out: Path) -> Path:
    """Write a new folder with the weights, float32 by name, their settings, and the tokenizer; return it."""
    artifact = load(path)
    with making(out) as folder:
        save_file(weights(artifact), folder / WEIGHTS, {"format": "pt"})
        write_json(folder / CONFIG, settings(artifact))
        (folder / TOKENIZER).write_bytes(artifact.tokenizer.serialize())
    return out


def weights(artifact: Artifact, prefix: str = "") -> dict[str, Tensor]:
    """Return name, after `prefix`, to tensor of all weights as scoring uses them; tied ones stand once.

    The random constants of some models, which an artifact draws anew, are among them.
    """
    tensors = {**artifact.model.state_dict(), **dict(artifact.model.named_buffers())}
    return {prefix + name: tensor.contiguous().cpu() for name, tensor in tensors.items()}


def settings(artifact: Artifact) -> dict[str, Any]:
    """Return the settings of model and scoring and the manifest, as JSON values."""
    return {
        "gpt": artifact.model.config.to_json(),
        "score": artifact.scoring.to_json(),
        "manifest": artifact.manifest.to_json(),
        "artifact_sha256": artifact.sha256,
    }
