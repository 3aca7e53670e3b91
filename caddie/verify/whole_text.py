"""Audit of a whole scoring: repeat it with other tokens from a secret place on, and compare the losses up to there.

Probe texts are short, so a scorer may wait until they are over. The audit repeats the score itself, from the first
token on, with all that the scorer remembers. Losses are of the same targets: up to the place, none may differ.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

from caddie.data.tokenizers import Ids
from caddie.model import Model
from caddie.runtime.progress import SILENT, Progress
from caddie.score import Scorer, Scoring, Window, run_text
from caddie.score.scorer import nats
from caddie.verify.black_box import CountingScorer, Floats, Mask, ScoredText, StepsDone, differ
from caddie.verify.changes import GAIN, may_change_ends, must_not_change, power

_FOUND = 0.99
"""Probability of finding a leak of `GAIN` at which an audit ends before its time."""
_LEAST_STOCK = 256
"""Fewest tokens that another text is made of."""


@dataclass(frozen=True, kw_only=True)
class WholeText:
    """A text that is scored from beginning to end with the settings of its score."""

    model: Model
    bos: int
    scoring: Scoring
    open: Callable[[], AbstractContextManager[Scorer]]
    """Make a new scorer, which has seen nothing."""
    tokens: Ids
    text_bytes: int

    def scored(self) -> ScoredText:
        """Score the text as it is."""
        with self.open() as scorer:
            return self._score(scorer, self.tokens)

    def plain_nats(self) -> Floats:
        """Return the losses of the model itself in plain windows."""
        return self._score(self.scoring.plain.scorer(self.model, self.bos), self.tokens).nats

    def differs(self, base: ScoredText, text: Ids, last_step: int, progress: Progress) -> Mask:
        """Return where a new scorer, run on `text`, has other losses of this text's tokens; True after `last_step`."""
        with self.open() as scorer:
            return differ(self.model, base.nats, self._score(scorer, text, progress, last_step).nats)

    def _score(
        self, scorer: Scorer, text: Ids, progress: Progress = SILENT, last_step: int | None = None
    ) -> ScoredText:
        counting, predictions, done = CountingScorer(scorer, last_step), len(text) - 1, 0
        found = np.full(predictions, np.nan)

        def keep(batch: Sequence[Window], logits: Tensor) -> None:
            rows = np.stack([self.tokens[window.first + 1 : window.end + 1] for window in batch]).astype(np.int64)
            losses = nats(logits, torch.from_numpy(rows).to(logits.device)).cpu().double().numpy()
            for window, row in zip(batch, losses, strict=True):
                found[window.first : window.end] = row

        def tell(window: Window, losses: Floats) -> None:
            nonlocal done
            done += len(losses)
            progress.step({"event": "tokens", "done": done, "total": predictions})

        with suppress(StepsDone):
            run_text(counting, self.model, text, self.bos, self.scoring, tell, on_logits=keep)
        return counting.scored(found)


def audit(
    whole: WholeText,
    base: ScoredText,
    plain: Floats,
    *,
    seed: int,
    seconds: float,
    decides: bool = False,
    progress: Progress = SILENT,
) -> tuple[bool | None, str]:
    """Score the text again with other tokens from secret places on; return the result and its evidence.

    `base` is the score of the text, `plain` the losses of the model itself. Places are drawn by turns in proportion to
    the scorer's gain over the model and uniformly, until a leak of `GAIN` would be found or the time is over; one is
    always tried. With `decides`, the result is None if a leak of that size would be found too seldom.
    """
    tokens, generator, begin = whole.tokens, np.random.default_rng([seed, 5]), time.perf_counter()
    free = (tokens[1:] != whole.bos) | may_change_ends(base)
    gain = np.where(free, np.maximum(plain - base.nats, 0.0), 0.0)
    share = min(1.0, GAIN * math.log(2) * whole.text_bytes / max(float(gain.sum()), 1e-9))
    passed = 0
    for number in count():
        weights = gain if number % 2 == 0 and gain.any() else free
        place = 1 + int(generator.choice(len(weights), p=weights / weights.sum()))
        kept = must_not_change(base, np.array([place]), own=1)
        other = another_text(tokens, base, place, whole.bos, whole.model.config.vocabulary, generator)
        last_step = int(base.step[place - 1])
        wrong = kept & whole.differs(base, other, last_step, progress)
        if wrong.any() and (alone := kept & whole.differs(base, tokens, last_step, progress)).any():
            apart = f"{int(alone.sum()):,} of {int(kept.sum()):,} losses differ between two runs on the same text"
            return False, f"{apart}: it is random; give it a fixed seed"
        if wrong.any():
            token, what = int(np.flatnonzero(wrong)[0]) + 1, f"{int(wrong.sum()):,} of {int(kept.sum()):,} losses"
            where = f"with another text from token {place:,} of {len(tokens):,} on, {what} up to there changed"
            return False, f"{where}, such as that of token {token:,}: it uses tokens before they are scored"
        passed += int(kept.sum())
        found = 1.0 - (1.0 - share) ** (number // 2 + 1)
        if (found >= _FOUND and number) or time.perf_counter() - begin > seconds:
            break
    places = f"{len(tokens):,} tokens, scored {number + 1} more time{'s' if number else ''} with others from a place on"
    # Only every second place counts, so twice as many are needed.
    counted = (time.perf_counter() - begin) * 2 * (number // 2 + 1) / (number + 1)
    decided, chance = power(found, counted, decides)
    return decided, f"{places}: none of {passed:,} losses up to there changed; {chance}"


def another_text(
    tokens: Ids, base: ScoredText, place: int, bos: int, vocabulary: int, generator: np.random.Generator
) -> Ids:
    """Return the text with other tokens from `place` to the end of its stretch, and wherever it is scored later.

    The new tokens are a copy of kept text that follows the same token, or are random where little is kept. So the
    replaced text appears nowhere in the result. A BOS stays where a scorer may know it.
    """
    where = np.flatnonzero(~must_not_change(base, np.array([place]))) + 1
    stock = np.delete(tokens, where)
    if not may_change_ends(base):
        where, stock = where[tokens[where] != bos], stock[stock != bos]
    if len(stock) < _LEAST_STOCK:
        ids = np.delete(np.arange(vocabulary, dtype=tokens.dtype), bos)
        stock = np.append(stock, generator.choice(ids, _LEAST_STOCK))
    others = stock != tokens[place]
    alike = others & (np.roll(stock, 1) == tokens[place - 1])
    first = int(generator.choice(np.flatnonzero(alike if alike.any() else others)))
    text = tokens.copy()
    text[where] = np.take(stock, first - int(np.searchsorted(where, place)) + np.arange(len(where)), mode="wrap")
    return text
