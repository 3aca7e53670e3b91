"""What a run leaves on disk while it trains, so that it can go on: tensors and a few words, all of it or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from caddie.errors import UserError
from caddie.files import replacing

CHECKPOINT = "checkpoint.safetensors"
"""Name of the checkpoint in a run folder."""


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors as a safetensors file, all of it or nothing."""
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        try:
            save_file(held, temporary, metadata)
        except SafetensorError as error:  # its own class for what the system refused
            raise OSError(str(error)) from None


def restore(path: Path, tensors: Mapping[str, Tensor], identity: Mapping[str, str]) -> dict[str, str]:
    """Copy the checkpoint at `path` into `tensors`; what was written beside them.

    A checkpoint that does not say `identity` of itself, or is no good, is a `UserError`.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = dict(file.metadata() or {})
            if any(metadata.get(key) != value for key, value in identity.items()):
                raise UserError(f"{path} is of another recipe, text or seed; name another --out or remove it")
            for name, tensor in tensors.items():
                tensor.data.copy_(file.get_tensor(name))
            return metadata
    except UserError:
        raise
    except (SafetensorError, KeyError, OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{path} is not a readable checkpoint ({error}); remove it to start anew") from None
