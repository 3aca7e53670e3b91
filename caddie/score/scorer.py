"""The scorer interface: return next-token logits; targets are revealed only after they are scored."""

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from caddie.errors import CheckFailed
from caddie.model import Cache
from caddie.runtime.distributed import Ranks
from caddie.score.windows import Window

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """Positions of the stretches of text that are scored left to right, each on its own; no tokens.

    Stretch i has the predictions `begins[i]` to `ends[i]`, both int64 (stretches,); its first token is context only.
    """

    begins: Positions
    ends: Positions

    def __post_init__(self) -> None:
        for name in ("begins", "ends"):  # scorers get these arrays; one over bytes can never be made writable
            fixed = np.frombuffer(np.asarray(getattr(self, name), np.int64).tobytes(), np.int64)
            object.__setattr__(self, name, fixed)

    @property
    def edges(self) -> list[tuple[int, int]]:
        """Beginning and end of each stretch."""
        return list(zip(self.begins.tolist(), self.ends.tolist(), strict=True))

    @property
    def predictions(self) -> int:
        """Number of predictions in all stretches."""
        return int((self.ends - self.begins).sum())


class Step(NamedTuple):
    """Windows that are scored before the next update; `slots` give the index of the scorer state for each."""

    windows: Sequence[Window]
    slots: Sequence[int]


class ScoringBatch(NamedTuple):
    """Windows of one shape, scored in one forward; the first `context` predictions of each are not scored.

    `inputs`, int64 (rows, n), are the tokens of the windows without the last target.
    """

    windows: Sequence[Window]
    slots: Sequence[int]
    inputs: Positions
    context: int


class ScoredPrefix:
    """The scored part of the text, the only view of it that scorers get."""

    def __init__(self, tokens: npt.NDArray[Any], layout: Layout, done: Positions) -> None:
        self._tokens = tokens
        self.layout = layout
        self._done = done  # of each stretch, the first prediction that has not been scored

    def tokens(self, start: int, end: int) -> Positions:
        """Return tokens `start` to `end` of one stretch, int64; `CheckFailed` if one has not been scored yet."""
        start, end = as_int(start), as_int(end)
        if not 0 <= start <= end <= self._done[self.stretch(start)] + 1:
            raise CheckFailed(f"the scorer asks for tokens {start:,} to {end:,}, which have not all been scored")
        return np.asarray(self._tokens[start:end], np.int64)

    def targets(self, windows: Sequence[Window]) -> Positions:
        """Return the targets of scored windows of one shape, int64 (rows, scored)."""
        rows = []
        for window in windows:
            start, first, end = map(as_int, (window.start, window.first, window.end))
            rows.append(self.tokens(start, end + 1)[first + 1 - start :])
        return np.stack(rows)

    def is_last(self, window: Window) -> bool:
        """True if the window is the last of its stretch."""
        return bool(self.layout.ends[self.stretch(as_int(window.start))] == as_int(window.end))

    def stretch(self, position: int) -> int:
        """Return the number of the stretch that has the prediction `position`."""
        return int(np.searchsorted(self.layout.begins, position, side="right")) - 1


class Stream(ScoredPrefix):
    """The whole text with a record of the predictions scored so far; for the loop, not for scorers."""

    def __init__(self, tokens: npt.NDArray[Any], layout: Layout) -> None:
        super().__init__(tokens, layout, layout.begins.copy())
        self.prefix = ScoredPrefix(tokens, layout, self._done)
        """The part that scorers may read."""

    def inputs(self, windows: Sequence[Window]) -> Positions:
        """Return the tokens of equally long windows without the last target, int64 (rows, n)."""
        return np.stack([self._tokens[window.start : window.end] for window in windows]).astype(np.int64)

    def next_tokens(self, windows: Sequence[Window]) -> Positions:
        """Return the targets of windows of one shape, int64 (rows, scored)."""
        return np.stack([self._tokens[window.first + 1 : window.end + 1] for window in windows]).astype(np.int64)

    def ready(self, window: Window) -> bool:
        """True if all predictions of the stretch before those of the window have been scored."""
        return bool(self._done[self.stretch(window.start)] == window.first)

    def stretch_of(self, window: Window) -> int:
        """Return the number of the stretch that a window lies in; `CheckFailed` if in none, or if it scores nothing."""
        start, first, end = window
        stretch = self.stretch(start)
        stop = int(self.layout.ends[stretch])
        if not 0 <= start <= first < end <= stop:
            found = f"predictions {first:,} to {end:,} in a window from {start:,} on, of a text up to {stop:,}"
            raise CheckFailed(f"the scorer's plan is not one pass from left to right: {found}")
        return stretch

    def mark(self, window: Window) -> None:
        """Record a window as scored; `CheckFailed` unless it begins where the scored part of its stretch ends."""
        stretch = self.stretch_of(window)
        if window.first != self._done[stretch]:
            found = f"predictions {window.first:,} to {window.end:,} after {self._done[stretch]:,} were scored"
            raise CheckFailed(f"the scorer's plan is not one pass from left to right: {found}")
        self._done[stretch] = window.end

    def check_complete(self) -> None:
        """Raise `CheckFailed` unless every prediction has been scored."""
        if left := int((self.layout.ends - self._done).sum()):
            raise CheckFailed(f"the scorer's plan leaves {left:,} predictions out")


class Scorer(ABC):
    """Predicts the tokens of a text and may learn from those that have been scored.

    The loop normalizes the logits itself, so every prediction is a distribution over the vocabulary. It gathers the
    targets, which the scorer does not see, and calls `update` after a step is scored.
    """

    per_document = False
    """True if every document is a stretch of its own; else the whole text is one."""
    in_order = False
    """True if the scorer learns along the whole text, so that cutting it into stretches would change the score."""
    stateless = False
    """True if logits depend on the inputs only, so that several batches may run at once."""
    fixed_between_updates = False
    """True if logits depend on a row's inputs and on past updates alone. Then a step may have several windows of one
    stretch, although they contain each other's targets."""
    together = 0
    """Size of the groups of neighbouring slots that may share a batch; 0 if any slots may."""

    @abstractmethod
    def plan(self, layout: Layout, rows: int) -> Iterator[Step]:
        """Yield steps that score each prediction of each stretch once, left to right, in batches of `rows` windows.

        Unless the scorer is stateless, a step is taken from the iterator only after the update on the previous step.
        """

    @abstractmethod
    def logits(self, inputs: Tensor, slots: Sequence[int], last: int, cache: Cache | None = None) -> Tensor:
        """Return next-token logits (rows, last, vocabulary) of the `last` positions of `inputs`, int64 (rows, n).

        Logits at position t may depend on inputs up to t only. With a cache, the inputs continue those of the previous
        call, row by row.
        """

    def share(self, ranks: Ranks) -> bool:
        """Share the work among these processes from now on, each scoring the batches that `owners` gives it.

        Return True if the scorer can. Every process gets every update. Losses must be the same to the bit as without
        sharing.
        """
        return self.stateless

    def owners(self, batches: Sequence[ScoringBatch], world: int) -> list[int]:
        """Return the rank, below `world`, that scores each batch."""
        return [number % world for number in range(len(batches))]

    def update(self, batches: Sequence[ScoringBatch], prefix: ScoredPrefix) -> None:
        """Learn from the scored batches of a step; `prefix` has their targets and all text scored before."""
        return


def as_int(number: object) -> int:
    """Return a plain int, because a subclass may override comparisons; `TypeError` if it is not a whole number."""
    return int(operator.index(number))  # type: ignore[arg-type]


def nats(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the loss in nats of targets (rows, n) under logits (rows, n, vocabulary), in float32 or float64."""
    precision = torch.float64 if logits.dtype == torch.float64 else torch.float32
    flat = F.cross_entropy(logits.flatten(0, 1).to(precision), targets.flatten(), reduction="none")
    return flat.view(targets.shape)
