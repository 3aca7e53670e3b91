"""What a scorer is: it gives the odds of what comes next, and is told what came only when that has been charged."""

from __future__ import annotations

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
    """The stretches that are scored left to right, each from the text's first tokens on: no token, only where they lie.

    Stretch i makes the predictions `begins[i]` to `ends[i]`; its first token is context only.
    """

    begins: Positions
    ends: Positions

    def __post_init__(self) -> None:
        for name in ("begins", "ends"):  # scorers are handed them, and arrays over bytes stay as they are
            kept = np.frombuffer(np.asarray(getattr(self, name), np.int64).tobytes(), np.int64)
            object.__setattr__(self, name, kept)

    @property
    def predictions(self) -> int:
        """Predictions in all stretches together."""
        return int((self.ends - self.begins).sum())


class Step(NamedTuple):
    """Windows that are scored before the scorer may learn; `slots` number the state that each of them uses."""

    windows: Sequence[Window]
    slots: Sequence[int]


class ScoringBatch(NamedTuple):
    """Windows of one shape, put to the scorer at once: `context` predictions that are not scored, then those that are.

    `inputs` (rows, n) are the tokens of the windows but for the last target.
    """

    windows: Sequence[Window]
    slots: Sequence[int]
    inputs: Positions
    context: int


class ScoredPrefix:
    """The text as far as it has been scored. Scorers see it through this, so none sees ahead."""

    def __init__(self, tokens: npt.NDArray[Any], layout: Layout, done: Positions) -> None:
        self._tokens = tokens
        self.layout = layout
        self._done = done  # of each stretch, where its predictions have been scored up to

    def known(self, start: int, end: int) -> Positions:
        """Tokens `start` to `end`, all within one stretch; `CheckFailed` if one of them has not been scored yet."""
        if not 0 <= start <= end <= self._done[self._stretch(start)] + 1:
            raise CheckFailed(f"the scorer asks for tokens {start:,} to {end:,}, which have not all been scored")
        return np.asarray(self._tokens[start:end], np.int64)

    def targets(self, windows: Sequence[Window]) -> Positions:
        """What the scored predictions of windows of one shape were about, (rows, scored)."""
        return np.stack(
            [self.known(window.start, window.end + 1)[window.first + 1 - window.start :] for window in windows]
        )

    def over(self, window: Window) -> bool:
        """Whether the window ends its stretch."""
        return bool(self.layout.ends[self._stretch(window.start)] == window.end)

    def _stretch(self, position: int) -> int:
        return int(np.searchsorted(self.layout.begins, position, side="right")) - 1


class Stream(ScoredPrefix):
    """One pass over the text, as the loop sees it: it has every token, and keeps account of what was scored."""

    def __init__(self, tokens: npt.NDArray[Any], layout: Layout) -> None:
        super().__init__(tokens, layout, layout.begins.copy())
        self.past = ScoredPrefix(tokens, layout, self._done)
        """What scorers may see of it."""

    def inputs(self, windows: Sequence[Window]) -> Positions:
        """The tokens of equally long windows but for the last target, (rows, n)."""
        return np.stack([self._tokens[window.start : window.end] for window in windows]).astype(np.int64)

    def next_tokens(self, windows: Sequence[Window]) -> Positions:
        """What the scored predictions of windows of one shape are about, (rows, scored)."""
        return np.stack([self._tokens[window.first + 1 : window.end + 1] for window in windows]).astype(np.int64)

    def ready(self, window: Window) -> bool:
        """Whether everything before the window's first scored prediction has been scored."""
        return bool(self._done[self._stretch(window.start)] == window.first)

    def mark(self, window: Window) -> None:
        """Take a window as scored; `CheckFailed` unless it goes on exactly where its stretch ended."""
        stretch = self._stretch(window.start)
        if not (window.start <= window.first == self._done[stretch] < window.end <= self.layout.ends[stretch]):
            raise CheckFailed(
                f"the scorer's plan is not one pass from left to right: predictions {window.first:,} to "
                f"{window.end:,} after {self._done[stretch]:,} were scored"
            )
        self._done[stretch] = window.end

    def check_complete(self) -> None:
        """`CheckFailed` unless every prediction has been scored."""
        left = int((self.layout.ends - self._done).sum())
        if left:
            raise CheckFailed(f"the scorer's plan leaves {left:,} predictions out")


class Scorer(ABC):
    """Predicts tokens of a text and may learn from those it has been charged for.

    The loop asks for logits over the whole vocabulary and normalizes them itself, so that every answer is a
    distribution; it gathers the targets, which the scorer does not see; and it calls `update` when a step is paid for.
    """

    per_document = False
    """Whether every document is a stretch of its own, or the whole text is one."""
    in_order = False
    """Whether it learns along the whole text, so that cutting the text into stretches would make another score."""
    stateless = False
    """Whether an answer depends on the inputs alone, so that several may be made at once."""
    together = 0
    """Neighbouring slots that are asked in questions of their own, or 0 where any may be in one question."""

    @abstractmethod
    def plan(self, layout: Layout, rows: int) -> Iterator[Step]:
        """The order of scoring: each prediction of each stretch once, from left to right; about `rows` windows a step.

        Where a later step needs what `update` learnt, it is not taken from the iterator before the update.
        """

    @abstractmethod
    def logits(self, inputs: Tensor, slots: Sequence[int], last: int, cache: Cache | None = None) -> Tensor:
        """Log-odds (rows, last, vocabulary) of what follows each of the `last` positions of `inputs` (rows, n).

        Position t may depend on the inputs up to t alone. With a cache, the inputs go on where those of the call
        before ended, in the same rows.
        """

    def share(self, ranks: Ranks) -> bool:
        """Whether these processes can share the work from now on, so that each answers only what `owners` gives it.

        All of them are told of every update. What is charged must be the same to the bit as without sharing.
        """
        return self.stateless

    def owners(self, batches: Sequence[ScoringBatch], world: int) -> list[int]:
        """The number of the process, of so many, that answers each question."""
        return [number % world for number in range(len(batches))]

    def update(self, batches: Sequence[ScoringBatch], past: ScoredPrefix) -> None:
        """Learn from a step that has been scored; `past` gives its targets and all that was scored before."""
        return


def nats(logits: Tensor, targets: Tensor) -> Tensor:
    """What each of targets (rows, n) costs under logits (rows, n, vocabulary), in float32 or better."""
    exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
    flat = F.cross_entropy(logits.flatten(0, 1).to(exact), targets.flatten(), reduction="none")
    return flat.view(targets.shape)
