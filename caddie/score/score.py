"""The score: what the model pays for every token, over the bytes of the text."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal

import numpy as np
import torch

from caddie.config import Config, Count, Range, show
from caddie.data.tokenizers import Tokenizer
from caddie.model import Model
from caddie.report.units import bits_per_byte, nats_per_byte, nats_per_token
from caddie.runtime.autotune import quickest, thread_counts
from caddie.runtime.distributed import Ranks
from caddie.runtime.progress import SILENT, Progress
from caddie.score.frozen import Frozen
from caddie.score.loop import Losses, layout_of, run
from caddie.score.scorer import Scorer
from caddie.score.ttt_sgd import TestTimeTraining
from caddie.score.user_scorer import load_scorer
from caddie.score.windows import Window, check_windows

KINDS = ("plain", "sliding", "adaptive", "user")
"""Scores of an artifact, from the simplest to the one that counts."""
CACHED_TOKENS = 4096
"""Tokens of a batch on a CPU. With 2,048 a model of 128 channels is 7 % slower at a stride of 128; with 16,384 it was
slower by a quarter to a half while freed memory was not yet kept (`docs/log.md`)."""


@dataclass(frozen=True, kw_only=True)
class Scoring(Config):
    """How an artifact is scored; it travels inside the artifact."""

    sequence_length: Annotated[int, Range(1, 1 << 20)] = 1024
    """Tokens of a window."""
    stride: Annotated[int, Range(1, 1 << 20)] = 64
    """Tokens by which the sliding window moves; the sequence length gives plain scoring."""
    batch_tokens: Count = 65_536
    """Tokens of the windows that are run at once."""
    precision: Literal["float32", "bfloat16", "float64"] = "float32"
    """Number format of the forward pass; sums are always float64."""
    ttt: TestTimeTraining | None = None
    """Test-time training on what was scored, or none."""

    @property
    def plain(self) -> Scoring:
        """The same without overlap and adaptation."""
        return self.but({"stride": self.sequence_length, "ttt": None})

    @property
    def rows(self) -> int:
        """Windows that are run at once."""
        return max(1, self.batch_tokens // self.sequence_length)

    def scorer(self, model: Model, bos: int) -> Scorer:
        """The scorer of a model, or a `UserError`; `model` itself is never changed."""
        dtype = getattr(torch, self.precision)
        if self.ttt is not None:
            return self.ttt.build(model, bos, self.sequence_length, self.stride, dtype)
        return Frozen(model, bos, self.sequence_length, self.stride, dtype)


@dataclass(frozen=True)
class Text:
    """Held-out tokens, each document begun by `bos`, and the bytes that they stand for.

    `source_bytes` are those of the documents as found; `normalized_bytes` of what decodes from the tokens; and
    `table_bytes` by the contest's table. The first token is context only; predicting a `bos` counts no bytes.
    """

    tokens: np.ndarray
    bos: int
    source_bytes: int
    normalized_bytes: int
    table_bytes: int


@dataclass(frozen=True)
class Score:
    """The cost of a text under a model."""

    nats: float
    tokens: int
    source_bytes: int
    normalized_bytes: int
    table_bytes: int
    sequence_length: int
    stride: int
    ttt: str | None
    seconds: float

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of the source text: the score."""
        return bits_per_byte(self.nats, self.source_bytes)

    def to_json(self) -> dict[str, float]:
        """All fields, and the rates that follow from them."""
        return {
            "bits_per_byte": self.bits_per_byte,
            "bits_per_normalized_byte": bits_per_byte(self.nats, self.normalized_bytes),
            "bits_per_table_byte": bits_per_byte(self.nats, self.table_bytes),
            "nats_per_token": nats_per_token(self.nats, self.tokens),
            "nats_per_byte": nats_per_byte(self.nats, self.source_bytes),
            **asdict(self),
        }


def score(
    model: Model,
    text: Text,
    scoring: Scoring,
    progress: Progress = SILENT,
    *,
    scorer: Scorer | None = None,
    ranks: Ranks = Ranks(),
) -> Score:
    """Score every prediction of `text` exactly once, with the scorer of `scoring` unless another is given.

    That one must be new, since it may learn. `progress` gets `tokens` events. The sum is taken in
    float64, window after window, so it does not depend on the batch size except through the rounding of the forward.
    Processes that score together, each with the same model and text, share the work of all shipped scorers, and all
    get the score that one of them alone would find, to the bit where machines are of one kind and have as many threads.
    """
    begin = time.perf_counter()
    ttt = None if scorer else scoring.ttt
    predictions = len(text.tokens) - 1
    check_windows(scoring.sequence_length, scoring.stride, predictions)
    chosen = scorer or scoring.scorer(model, text.bos)
    nats, scored = 0.0, 0

    def tell(window: Window, losses: Losses) -> None:
        nonlocal nats, scored
        nats += float(losses.sum())
        scored += len(losses)
        progress.step({"event": "tokens", "done": scored, "total": predictions})

    device = next(model.parameters()).device
    # All plan alike, whatever threads each has.
    rows, workers = (-int(least) for least in ranks.maximum(*(-number for number in _batches(scoring, chosen, device))))
    run(chosen, text.tokens, layout_of(text.tokens, text.bos, chosen.per_document), rows, tell, device, workers, ranks)
    assert scored == predictions
    return Score(
        nats=nats,
        tokens=predictions,
        source_bytes=text.source_bytes,
        normalized_bytes=text.normalized_bytes,
        table_bytes=text.table_bytes,
        sequence_length=scoring.sequence_length,
        stride=scoring.stride,
        ttt=None if ttt is None else show(ttt),
        seconds=time.perf_counter() - begin,
    )


def _batches(scoring: Scoring, scorer: Scorer, device: torch.device) -> tuple[int, int]:
    """Windows of a batch, and batches at once: on a CPU those stay in the cache, each thread with one of its own."""
    if device.type != "cpu":
        return scoring.rows, 1
    workers = torch.get_num_threads() if scorer.stateless else 1
    rows = max(1, min(CACHED_TOKENS // scoring.sequence_length, scoring.rows // workers))
    return rows, min(workers, scoring.rows // rows)


def use_quickest_threads(model: Model, text: Text, scoring: Scoring, ranks: Ranks = Ranks()) -> None:
    """Give this process the number of threads that scores a first stretch of `text` quickest; nothing on a GPU.

    Of several processes all take the smallest of their numbers.
    """
    if next(model.parameters()).device.type != "cpu":
        return
    stretch = replace(text, tokens=text.tokens[: max(scoring.sequence_length, 8192) + 1])

    def work(threads: int) -> None:
        torch.set_num_threads(threads)
        score(model, stretch, scoring.plain)

    torch.set_num_threads(-int(ranks.maximum(-quickest(thread_counts(), work))[0]))


def score_kinds(
    model: Model,
    tokenizer: Tokenizer,
    text: Text,
    scoring: Scoring,
    scorer: str | None = None,
    progress: Progress = SILENT,
    ranks: Ranks = Ranks(),
) -> dict[str, Score]:
    """Score a text in each of the `KINDS` that `scoring` has, and by the user's `scorer` (`FILE.py:NAME`) if given."""
    kinds = {"plain": scoring.plain}
    if scoring.stride < scoring.sequence_length:
        kinds["sliding"] = scoring.but(ttt=None)
    if scoring.ttt is not None:
        kinds["adaptive"] = scoring
    scores = {}
    for kind, settings in kinds.items():
        progress.phase(kind)
        scores[kind] = score(model, text, settings, progress, ranks=ranks)
    if scorer is not None:
        progress.phase(scorer)
        loaded = load_scorer(scorer, model, tokenizer)
        scores["user"] = score(model, text, scoring.plain, progress, scorer=loaded, ranks=ranks)
    return scores
