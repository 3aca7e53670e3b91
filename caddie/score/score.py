"""Scores: the loss of every token of a text, divided by the bytes of the text."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from caddie.config import Config, Count, Range, show
from caddie.data.tokenizers import Ids
from caddie.errors import check_kind
from caddie.model import Model
from caddie.report.units import bits_per_byte, nats_per_byte, nats_per_token
from caddie.runtime.autotune import quickest, thread_counts
from caddie.runtime.distributed import Ranks
from caddie.runtime.progress import SILENT, Progress
from caddie.score.frozen import Frozen
from caddie.score.loop import Losses, layout_of, run
from caddie.score.ngram_tilt import NGramTilt
from caddie.score.scorer import Scorer
from caddie.score.ttt_sgd import TestTimeTraining
from caddie.score.windows import Window, check_windows

KINDS = {
    "plain": "windows side by side",
    "sliding": "windows that overlap, so that each token has a longer past",
    "adaptive": "what was scored helps with what follows",
    "user": "a scorer in a file of the user's",
}
"""Kinds of scores, and how each is computed; the last kind that an artifact has is its score."""
CACHED_TOKENS = 4096
"""Tokens of a batch on a CPU. With 2,048 a model of 128 channels is 7 % slower at a stride of 128; with 16,384 it was
slower by a quarter to a half while freed memory was not yet kept (`docs/log.md`)."""


class Scoring(Config):
    """Scoring settings, stored in the artifact."""

    sequence_length: Annotated[int, Range(1, 1 << 20)] = 1024
    """Tokens of a window."""
    stride: Annotated[int, Range(1, 1 << 20)] = 64
    """Tokens by which the sliding window advances; plain scoring if equal to the sequence length."""
    batch_tokens: Count = 65_536
    """Tokens of a batch of windows."""
    precision: Literal["float32", "bfloat16", "float64"] = "float32"
    """Number format of the forward pass; sums are always float64."""
    ttt: TestTimeTraining | None = None
    """Test-time training on scored tokens, or none."""
    tilt: NGramTilt | None = None
    """N-gram tilt by scored tokens, or none."""

    @property
    def plain(self) -> Scoring:
        """The same settings without overlap and adaptation."""
        return self.but({"stride": self.sequence_length, "ttt": None, "tilt": None})

    @property
    def rows(self) -> int:
        """Windows of a batch."""
        return max(1, self.batch_tokens // self.sequence_length)

    def scorer(self, model: Model, bos: int) -> Scorer:
        """Return a scorer that never changes the model; `UserError` if the model does not fit the settings."""
        dtype = getattr(torch, self.precision)
        build = Frozen if self.ttt is None else self.ttt.build
        scorer = build(model, bos, self.sequence_length, self.stride, dtype)
        return scorer if self.tilt is None else self.tilt.build(scorer)


@dataclass(frozen=True)
class Text:
    """Held-out tokens, each document after a `bos`, and their bytes.

    The first token is context only; predicting a `bos` counts no bytes.
    """

    tokens: np.ndarray
    """Ids, uint16 (n,)."""
    bos: int
    source_bytes: int
    """Bytes of the documents."""
    normalized_bytes: int
    """Bytes of the decoded tokens."""
    table_bytes: int
    """Bytes by the contest's table method."""


@dataclass(frozen=True)
class Score:
    """The loss of a text under a model, in nats, and the sizes that rates are computed from."""

    nats: float
    tokens: int
    source_bytes: int
    normalized_bytes: int
    table_bytes: int
    sequence_length: int
    stride: int
    ttt: str | None
    tilt: str | None
    seconds: float
    document_nats: Losses = field(repr=False, compare=False)
    """Loss of each document, (documents,), including the prediction of the next document's `bos`; sums to `nats`."""

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of the source text: the score."""
        return bits_per_byte(self.nats, self.source_bytes)

    def to_json(self) -> dict[str, float]:
        """Return all fields but those of single documents, and the rates computed from them."""
        sums = {name: value for name, value in asdict(self).items() if name != "document_nats"}
        return {
            "bits_per_byte": self.bits_per_byte,
            "bits_per_normalized_byte": bits_per_byte(self.nats, self.normalized_bytes),
            "bits_per_table_byte": bits_per_byte(self.nats, self.table_bytes),
            "nats_per_token": nats_per_token(self.nats, self.tokens),
            "nats_per_byte": nats_per_byte(self.nats, self.source_bytes),
            **sums,
        }


def score(
    model: Model,
    text: Text,
    scoring: Scoring,
    progress: Progress = SILENT,
    *,
    scorer: Scorer | None = None,
    ranks: Ranks = Ranks(),
    on_window: Callable[[Window, Losses], None] | None = None,
) -> Score:
    """Score every prediction of `text` exactly once, with the scorer of `scoring` unless a new one is given.

    `progress` gets `tokens` events, `on_window` each window with its losses. Losses are summed in float64, window after
    window, so the batch size changes only the rounding of the forward. `ranks` with the same model and text share the
    work of all shipped scorers; all get the score of a single process, bit-identical on machines of one kind with the
    same number of threads. Raises `UserError` for a text that is shorter than a window, `CheckFailed` for a scorer that
    breaks the rules.
    """
    check_kind(text, Text, "the text", "take it from a corpus, as caddie.held_out_text(corpus)")
    begin = time.perf_counter()
    predictions = len(text.tokens) - 1
    check_windows(scoring.sequence_length, scoring.stride, predictions)
    chosen = scorer or scoring.scorer(model, text.bos)
    nats, scored = 0.0, 0
    begins = layout_of(text.tokens, text.bos, per_document=True).begins
    document_nats = np.zeros(len(begins))

    def add(window: Window, losses: Losses) -> None:
        nonlocal nats, scored
        nats += float(losses.sum())
        scored += len(losses)
        document, beyond = np.searchsorted(begins, (window.first, window.end - 1), side="right")
        cuts = [0, *(begins[document:beyond] - window.first)]
        document_nats[document - 1 : beyond] += np.add.reduceat(losses, cuts)
        if on_window is not None:
            on_window(window, losses)
        progress.step({"event": "tokens", "done": scored, "total": predictions})

    run_text(chosen, model, text.tokens, text.bos, scoring, add, ranks)
    return Score(
        nats=nats,
        tokens=predictions,
        source_bytes=text.source_bytes,
        normalized_bytes=text.normalized_bytes,
        table_bytes=text.table_bytes,
        sequence_length=scoring.sequence_length,
        stride=scoring.stride,
        ttt=show(scoring.ttt) if scoring.ttt and not scorer else None,
        tilt=show(scoring.tilt) if scoring.tilt and not scorer else None,
        seconds=time.perf_counter() - begin,
        document_nats=document_nats,
    )


def run_text(
    scorer: Scorer,
    model: Model,
    tokens: Ids,
    bos: int,
    scoring: Scoring,
    on_window: Callable[[Window, Losses], None],
    ranks: Ranks = Ranks(),
    on_logits: Callable[[Sequence[Window], Tensor], None] | None = None,
) -> None:
    """Run a scorer over a text with the batches and threads that scoring uses: see `run`."""
    device, layout = next(model.parameters()).device, layout_of(tokens, bos, bool(scorer.per_document))
    # All ranks need the same batches, however many threads each has.
    sizes = rows_and_workers(scorer.stateless, scoring, device)
    rows, workers = map(int, ranks.minimum(*sizes))
    vocabulary = model.config.vocabulary
    run(scorer, tokens, layout, rows, on_window, device, workers, ranks, vocabulary=vocabulary, on_logits=on_logits)


def rows_and_workers(stateless: bool, scoring: Scoring, device: torch.device) -> tuple[int, int]:
    """Return the rows of a batch, and the number of threads, each running a batch; on a CPU a batch fits in cache."""
    if device.type != "cpu":
        return scoring.rows, 1
    workers = torch.get_num_threads() if stateless else 1
    rows = max(1, min(CACHED_TOKENS // scoring.sequence_length, scoring.rows // workers))
    return rows, min(workers, scoring.rows // rows)


def use_quickest_threads(model: Model, text: Text, scoring: Scoring, ranks: Ranks = Ranks()) -> None:
    """Set PyTorch's number of threads to the fastest in scoring the start of `text`; do nothing on a GPU.

    All ranks take the smallest number that any of them found.
    """
    if next(model.parameters()).device.type != "cpu":
        return
    stretch = replace(text, tokens=text.tokens[: max(scoring.sequence_length, 8192) + 1])

    def work(threads: int) -> None:
        torch.set_num_threads(threads)
        score(model, stretch, scoring.plain)

    torch.set_num_threads(int(ranks.minimum(quickest(thread_counts(), work))[0]))


def score_kinds(
    model: Model,
    text: Text,
    scoring: Scoring,
    scorer: Scorer | None = None,
    progress: Progress = SILENT,
    ranks: Ranks = Ranks(),
    on_window: Callable[[str, Window, Losses], None] | None = None,
) -> dict[str, Score]:
    """Return the scores of the `KINDS` that `scoring` has, and last the score of a user's `scorer` if given.

    The user's scorer runs first, because it is the likeliest to fail. `on_window` gets the kind, each window and its
    losses. Raises `UserError` for settings that do not fit each other before anything is scored.
    """
    check_windows(scoring.sequence_length, scoring.stride)
    scoring.scorer(model, text.bos)  # raises if the adaptation does not fit
    kinds = {"plain": scoring.plain} if scorer is None else {"user": scoring.plain, "plain": scoring.plain}
    if scoring.stride < scoring.sequence_length:
        kinds["sliding"] = scoring.but(ttt=None, tilt=None)
    if scoring.ttt is not None or scoring.tilt is not None:
        kinds["adaptive"] = scoring
    means = {"test-time training": scoring.ttt, "n-gram tilt": scoring.tilt}
    by, scores = " and ".join(name for name, part in means.items() if part is not None), {}
    for kind, settings in kinds.items():
        progress.phase(kind)
        progress.step({"event": "doing", "text": f"{KINDS[kind]}, by {by}" if kind == "adaptive" else KINDS[kind]})
        keep, own = on_window and partial(on_window, kind), scorer if kind == "user" else None
        scores[kind] = score(model, text, settings, progress, scorer=own, ranks=ranks, on_window=keep)
    return {kind: scores[kind] for kind in KINDS if kind in scores}
