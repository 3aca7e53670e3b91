"""Checks that an artifact is what it says, made on the file alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from caddie.artifact import Artifact
from caddie.model import Model


@dataclass(frozen=True)
class Check:
    """One thing that was tried: whether it held, and what was seen."""

    name: str
    passed: bool
    evidence: str


def verify(artifact: Artifact, cap_bytes: int) -> list[Check]:
    """Every check on an artifact that has been read without an error (checksums, shapes and hashes held)."""
    generator = np.random.default_rng(0)
    length = artifact.scoring.sequence_length
    ids = torch.from_numpy(generator.integers(0, artifact.model.config.vocabulary, (2, min(length, 256))))
    before = _fingerprint(artifact.model)
    dtype = getattr(torch, artifact.scoring.precision)  # what is checked is the forward that scores
    with torch.inference_mode():
        first = artifact.model(ids, ids == artifact.tokenizer.bos, dtype).double()
        second = artifact.model(ids, ids == artifact.tokenizer.bos, dtype).double()
        return [
            Check("file is intact", True, f"every checksum holds; SHA-256 {artifact.sha256}"),
            _under_cap(artifact, cap_bytes),
            _parameters(artifact),
            _sums_to_one(first),
            _no_look_ahead(artifact, ids, first, dtype),
            Check(
                "two runs agree", bool((first == second).all()), f"largest difference {_largest(first - second):.1e}"
            ),
            Check("weights are unchanged by use", before == _fingerprint(artifact.model), "compared before and after"),
        ]


def _under_cap(artifact: Artifact, cap_bytes: int) -> Check:
    left = cap_bytes - artifact.file_bytes
    evidence = f"{artifact.file_bytes:,} of {cap_bytes:,} bytes, {abs(left):,} {'left' if left >= 0 else 'over'}"
    return Check("file is under the cap", left >= 0, evidence)


def _parameters(artifact: Artifact) -> Check:
    count = sum(parameter.numel() for parameter in artifact.model.parameters())
    stated = artifact.manifest.parameters
    return Check("parameter count is as stated", count == stated, f"{count:,} counted, {stated:,} stated")


def _sums_to_one(logits: Tensor) -> Check:
    """The probabilities that the scorer's cross-entropy would charge, added over every possible next token."""
    error = _largest(F.log_softmax(logits.float(), -1).double().exp().sum(-1) - 1.0)
    return Check("distributions sum to one", error < 1e-4, f"largest deviation {error:.1e}")


def _no_look_ahead(artifact: Artifact, ids: Tensor, logits: Tensor, dtype: torch.dtype) -> Check:
    """Change the tokens from the middle on: nothing before them may move."""
    middle = ids.shape[1] // 2
    changed = ids.clone()
    changed[:, middle:] = (changed[:, middle:] + 1) % artifact.model.config.vocabulary
    moved = artifact.model(changed, changed == artifact.tokenizer.bos, dtype).double() - logits
    past, future = _largest(moved[:, :middle]), _largest(moved[:, middle:])
    evidence = f"after a change from token {middle} on: before it {past:.1e}, after it {future:.1e}"
    return Check("no look-ahead", past == 0.0 and future > 0.0, evidence)


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _fingerprint(model: Model) -> list[float]:
    """Sums and absolute sums of every weight, in float64."""
    weights = [parameter.double() for parameter in model.parameters()]
    return [float(figure) for weight in weights for figure in (weight.sum(), weight.abs().sum())]
