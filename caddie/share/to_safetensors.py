"""Export to safetensors: dequantized weights by name, and their settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from caddie.files import making, write_json
from caddie.pack.artifact import Artifact, load


def to_safetensors(path: Path, out: Path) -> Path:
    """Write a new folder with the weights, float32 by name, their settings, and the tokenizer; return it."""
    artifact = load(path)
    with making(out) as folder:
        write_model(artifact, folder, settings(artifact))
    return out


def write_model(artifact: Artifact, folder: Path, config: Mapping[str, Any], prefix: str = "") -> None:
    """Write the weights as scoring uses them, by `prefix` and name, `config.json`, and what is stored of the tokenizer.

    Tied weights stand once. The random constants of some models, which an artifact draws anew, are among them.
    """
    tensors = {**artifact.model.state_dict(), **dict(artifact.model.named_buffers())}
    named = {prefix + name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    write_json(folder / "config.json", config)
    (folder / "tokenizer.model").write_bytes(artifact.tokenizer.serialize())


def settings(artifact: Artifact) -> dict[str, Any]:
    """Return the settings of model and scoring and the manifest, as JSON values."""
    return {
        "gpt": artifact.model.config.to_json(),
        "score": artifact.scoring.to_json(),
        "manifest": artifact.manifest.to_json(),
        "artifact_sha256": artifact.sha256,
    }
