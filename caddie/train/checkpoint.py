"""Files that training leaves in a run folder: checkpoint, weights, log."""

import math
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from caddie.config.schedules import Budget
from caddie.data.loaders import TrainingData
from caddie.errors import UserError
from caddie.files import replacing
from caddie.model import GPT
from caddie.train.settings import Train


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors as a safetensors file, whole or not at all."""
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode  # as the user's umask has it; the library lets nobody else read the file
        try:
            save_file(held, temporary, metadata)
            temporary.chmod(mode)
        except SafetensorError as error:  # the library's own class for errors of the system
            raise OSError(str(error)) from None


def restore(path: Path, tensors: Mapping[str, Tensor], identity: Mapping[str, str]) -> dict[str, str]:
    """Copy the checkpoint at `path` into `tensors` and return its metadata.

    Raises `UserError` if the checkpoint is damaged or its metadata differ from `identity`.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = dict(file.metadata() or {})
            if same := identity.items() <= metadata.items():
                for name, tensor in tensors.items():
                    tensor.data.copy_(file.get_tensor(name))
    except (SafetensorError, KeyError, OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{path} is not a readable checkpoint ({error}); remove it to start anew") from None
    if not same:
        raise UserError(f"{path} is of another recipe, text or seed; name another --out or remove it")
    return metadata


def position_in(path: Path, metadata: Mapping[str, str]) -> tuple[int, int, float, float]:
    """Return step, micro-batches, seconds and loss from a checkpoint's metadata; `UserError` if they are missing."""
    try:
        step, position = int(metadata["step"]), int(metadata["position"])
        seconds, loss = float(metadata["seconds"]), float(metadata["loss"])
    except (KeyError, ValueError):
        step = position = -1
    if not (0 <= step < 1 << 62 and 0 <= position < 1 << 62 and 0 <= seconds < math.inf):
        raise UserError(f"{path} is not a readable checkpoint (no step or position); remove it to start anew")
    return step, position, seconds, loss


def earlier_budgets(path: Path, metadata: Mapping[str, str], budget: Budget) -> tuple[str, ...]:
    """Return the earlier budgets under which the steps of a checkpoint were made, from its metadata.

    Raises `UserError` if the run has already spent the present budget under another.
    """
    before = tuple(filter(None, metadata.get("budgets", "").split(", ")))
    if not before or before[-1] == str(budget):
        return before[:-1]
    step, _, seconds, _ = position_in(path, metadata)
    if budget.progress(step, seconds) >= 1.0:
        raise UserError(
            f"{path.parent} has trained for {step:,} steps in {seconds:.1f} seconds; {budget} leaves nothing to train: "
            "name a larger budget, or another --out"
        )
    return before


def cpu_share_in(metadata: Mapping[str, str]) -> float | None:
    """Return the CPU share of the training up to a checkpoint; None on a GPU, or if an older version wrote it."""
    with suppress(KeyError, ValueError):
        if 0.0 <= (share := float(metadata["cpu_share"])) <= 1.0:
            return share
    return None


def load_weights(path: Path, identity: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the weights in a file; `UserError` if they are not those of `identity` (see `weights_identity`)."""
    try:
        with safe_open(path, "pt") as file:
            found = file.metadata()
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}); train again with: caddie train") from None
    if found != identity:
        raise UserError(f"{path} holds the weights of another model or text; train again with: caddie train")
    return weights


def checkpoint_identity(gpt: GPT, config: Train, data: TrainingData, seed: int) -> dict[str, str]:
    """Return the metadata that tie a checkpoint to its run; the budget is left out, so that it may grow."""
    settings = config.but(seconds=None, steps=1)
    return {"model": gpt.key(), "train": settings.key(), "seed": str(seed), "data": data.identity}


def weights_identity(gpt: GPT, config: Train, documents_sha256: str) -> dict[str, str]:
    """Return the metadata that tie weights to a model, its training and the training documents."""
    return {"model": gpt.key(), "train": config.key(), "data": documents_sha256}


def open_log(log: Path) -> IO[str]:
    """Open a log for appending, at the start of a line, after a copy has taken the old file's place.

    So a hung process that was given up and wakes again writes to the old file, which has no name any more.
    """
    with replacing(log) as temporary:
        before = log.read_bytes() if log.exists() else b""
        temporary.write_bytes(before if before.endswith(b"\n") or not before else before + b"\n")
        if sys.platform != "win32":
            return temporary.open("a", buffering=1)
    return log.open("a", buffering=1)  # Windows renames no open file
