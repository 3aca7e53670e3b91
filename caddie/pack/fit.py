"""Choose the candidate that fills the budget of bytes."""

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from caddie.config import Config
from caddie.errors import UserError
from caddie.pack.candidates import Candidate, Candidates
from caddie.pack.quantize import Arrays, Quantizer, Rows

CLOSE = 0.998
"""Fraction of the cap from which a file counts as filling it."""
_AIM = 0.9993
_NOTHING_NATS = 1e-9  # predicted loss per token below which more bytes would buy nothing
_AS_GOOD = 1.1  # costs up to this many times the least one are equal within noise
_NARROW = 0.25  # octaves: precision to which the finest useful steps are found
_OCTAVES = 20.0  # largest change of the steps from their settings
_CANDIDATES = 16
_SHARES = 256


@dataclass(frozen=True)
class Fitted:
    """The chosen candidate."""

    candidate: Candidate
    curve: list[tuple[int, float]] = field(default_factory=list)
    """File bytes and predicted loss in nats per token, by size, of calibrated candidates whose steps are useful."""


class Fit(Config):
    """Socket: the choice among candidates."""

    @abstractmethod
    def fit(self, candidates: Candidates, quantizers: Mapping[str, Quantizer], cap_bytes: int) -> Fitted:
        """Return a candidate whose file has at most `cap_bytes` bytes; if none fits, the smallest found."""

    def check(self, quantizers: Iterable[Quantizer]) -> None:
        """Raise `UserError` if these quantizers leave nothing to choose; a run calls this before training."""


class FillCap(Fit):
    """Scale all steps by one factor, so that the file fills the cap to 0.2 % and never exceeds it.

    The file stays smaller once its predicted loss is below 1e-9 nats per token: more bytes would buy nothing.
    """

    def check(self, quantizers: Iterable[Quantizer]) -> None:
        if all(quantizer.coarser(2.0) == quantizer for quantizer in quantizers):
            raise UserError(
                "pack.fit: none of pack.quantizers has steps to choose; set one to Waterfilling or to rows "
                "with SigmaClip, or pack.fit=none"
            )

    def fit(self, candidates: Candidates, quantizers: Mapping[str, Quantizer], cap_bytes: int) -> Fitted:
        self.check(quantizers.values())
        seen: dict[float, Candidate] = {}
        place: float | None = 0.0
        while place is not None and abs(place) <= _OCTAVES and len(seen) < _CANDIDATES:
            now = candidates.make({name: quantizer.coarser(2.0**place) for name, quantizer in quantizers.items()})
            seen[place] = now
            useful = {where: one for where, one in seen.items() if not _too_fine(where, seen)}
            loss = now.predicted_loss
            enough = now.file_bytes >= CLOSE * cap_bytes or (loss is not None and loss < _NOTHING_NATS)
            if enough and place in useful and now.file_bytes <= cap_bytes:
                break
            place = _next(seen, useful, cap_bytes)
        size, fitting = attrgetter("file_bytes"), [one for one in useful.values() if one.file_bytes <= cap_bytes]
        best = max(fitting, key=size) if fitting else min(seen.values(), key=size)
        points = {(one.file_bytes, loss) for one in useful.values() if (loss := one.predicted_loss) is not None}
        return Fitted(best, sorted(points))


class PruneOnes(Fit):
    """Set integers of 1 and -1 to 0 until the file fits, those with the smallest steps first.

    All others stay the same, and a file that fits is not changed.
    """

    def check(self, quantizers: Iterable[Quantizer]) -> None:
        if not any(map(_prunable, quantizers)):
            raise UserError(
                "pack.fit: none of pack.quantizers has integers that PruneOnes prunes; set one to rows or GPTQ "
                "that are not packed, or pack.fit=none"
            )

    def fit(self, candidates: Candidates, quantizers: Mapping[str, Quantizer], cap_bytes: int) -> Fitted:
        """Return the candidate that fits with the fewest ones set to 0, in steps of 1/256 of all ones."""
        candidate = candidates.make(quantizers)
        if candidate.file_bytes <= cap_bytes:
            return Fitted(candidate)
        self.check(quantizers.values())
        arrays = {name: one.arrays for name, one in candidate.weights.items() if _prunable(one.quantizer)}
        ones = sum(int((abs(found["integers"]) == 1).sum()) for found in arrays.values())
        if not ones:
            return Fitted(candidate)
        few, many = 0, _SHARES
        best = candidates.changed(candidate, without_ones(arrays, ones))
        while many - few > 1 and best.file_bytes <= cap_bytes:
            middle = (few + many) // 2
            now = candidates.changed(candidate, without_ones(arrays, ones * middle // _SHARES))
            if now.file_bytes <= cap_bytes:
                many, best = middle, now
            else:
                few = middle
        return Fitted(best)


def _prunable(quantizer: Quantizer) -> bool:
    """True if the quantizer's arrays are those of `Rows`, not packed."""
    return isinstance(of := quantizer.dequantizer, Rows) and not of.packed


def without_ones(tensors: Mapping[str, Arrays], count: int) -> dict[str, Arrays]:
    """Return the arrays of `Rows` with `count` entries of 1 or -1 set to 0, those with the smallest steps.

    Each changes its weight by one step. Among equal steps the first entries are pruned; with fewer entries of 1 or -1
    than `count`, all are.
    """
    integers = {name: arrays["integers"].reshape(len(arrays["steps"]), -1) for name, arrays in tensors.items()}
    # All entries of a row cost the same, so it is enough to sort the rows, which are few.
    counts = np.concatenate([(abs(rows) == 1).sum(1) for rows in integers.values()])
    steps = np.concatenate([arrays["steps"] for arrays in tensors.values()])
    order = np.argsort(steps, kind="stable")
    before = np.cumsum(counts[order]) - counts[order]
    taken = np.zeros_like(counts)
    taken[order] = np.clip(count - before, 0, counts[order])
    found, begin = {}, 0
    for name, rows in integers.items():
        ones, here = abs(rows) == 1, taken[begin : begin + len(rows), None]
        begin += len(rows)
        kept = np.where(ones & (np.cumsum(ones, axis=1) <= here), 0, rows).astype(rows.dtype)
        found[name] = {**tensors[name], "integers": kept.reshape(tensors[name]["integers"].shape)}
    return found


def _cost(candidate: Candidate) -> float:
    """Return the predicted loss or, if unknown, the sum of squared relative errors."""
    loss = candidate.predicted_loss
    return sum(stored.relative_error**2 for stored in candidate.weights.values()) if loss is None else loss


def _too_fine(place: float, seen: Mapping[float, Candidate]) -> bool:
    """True if coarser steps cost less: with few bits per integer, finer steps clip more weights."""
    least = min(_cost(one) for where, one in seen.items() if where >= place)
    return _cost(seen[place]) > _AS_GOOD * least


def _next(seen: Mapping[float, Candidate], useful: Mapping[float, Candidate], cap_bytes: int) -> float | None:
    """Return the octave to try next, where a line through two neighbours meets the cap; None if no finer steps help.

    The logarithm of the file's size is almost linear in the octave.
    """
    excess = {place: math.log2(one.file_bytes / (_AIM * cap_bytes)) for place, one in seen.items()}
    fine = max((place for place, over in excess.items() if over > 0 or place not in useful), default=None)
    coarse = min((place for place in useful if excess[place] <= 0), default=None)
    if fine is not None and coarse is not None:
        if fine not in useful:
            return (fine + coarse) / 2 if coarse - fine > _NARROW else None
        share = excess[fine] / (excess[fine] - excess[coarse])
        return fine + (coarse - fine) * min(max(share, 0.02), 0.98)
    last, *before = list(seen)[::-1]
    slope = (excess[last] - excess[before[0]]) / (last - before[0]) if before else -0.7  # per octave
    step = -excess[last] / min(slope, -0.2)
    return last + max(min(1.1 * step, 6.0), -6.0) + math.copysign(0.02, step)
