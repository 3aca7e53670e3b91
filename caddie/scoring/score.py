"""The score: what the model pays for every token, over the bytes of the text."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Annotated, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from caddie.config import Config, Count, Range
from caddie.model import Model
from caddie.scoring.windows import Window, windows
from caddie.threads import quickest, thread_counts


@dataclass(frozen=True, kw_only=True)
class Scoring(Config):
    """How an artifact is scored; it travels inside the artifact."""

    sequence_length: Annotated[int, Range(1, 1 << 20)] = 1024
    """Tokens of a window."""
    stride: Annotated[int, Range(1, 1 << 20)] = 64
    """Tokens by which the sliding window moves; the sequence length gives plain scoring."""
    batch_tokens: Count = 65_536
    """Tokens of the windows that are run at once."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Number format of the forward pass; sums are always float64."""

    @property
    def plain(self) -> Scoring:
        """The same without overlap."""
        return self.but(stride=self.sequence_length)


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
    seconds: float

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of the source text: the score."""
        return self.nats / math.log(2) / self.source_bytes

    def to_json(self) -> dict[str, float]:
        """All fields, and the rates that follow from them."""
        return {
            "bits_per_byte": self.bits_per_byte,
            "bits_per_normalized_byte": self.nats / math.log(2) / self.normalized_bytes,
            "bits_per_table_byte": self.nats / math.log(2) / self.table_bytes,
            "nats_per_token": self.nats / self.tokens,
            "nats_per_byte": self.nats / self.source_bytes,
            **asdict(self),
        }


def score(
    model: Model,
    text: Text,
    scoring: Scoring,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Score:
    """Score every prediction of `text` exactly once.

    `report` is told of predictions done and in all. The sum is taken in float64, window after window, so it does not
    depend on the batch size except through the rounding of the forward pass.
    """
    begin = time.perf_counter()
    predictions = len(text.tokens) - 1
    plan = windows(predictions, scoring.sequence_length, scoring.stride)
    nats, scored = 0.0, 0
    for batch in _batches(plan, max(1, scoring.batch_tokens // scoring.sequence_length)):
        for window, losses in zip(batch, _losses(model, text, batch, scoring.precision), strict=True):
            nats += float(losses[window.first - window.start :].sum())
            scored += window.end - window.first
        report(scored, predictions)
    assert scored == predictions
    return Score(
        nats=nats,
        tokens=predictions,
        source_bytes=text.source_bytes,
        normalized_bytes=text.normalized_bytes,
        table_bytes=text.table_bytes,
        sequence_length=scoring.sequence_length,
        stride=scoring.stride,
        seconds=time.perf_counter() - begin,
    )


def use_quickest_threads(model: Model, text: Text, scoring: Scoring) -> None:
    """Give this process the number of threads that scores a first stretch of `text` quickest; nothing on a GPU."""
    if next(model.parameters()).device.type != "cpu":
        return
    stretch = replace(text, tokens=text.tokens[: max(scoring.sequence_length, 8192) + 1])

    def work(threads: int) -> None:
        torch.set_num_threads(threads)
        score(model, stretch, scoring.plain)

    torch.set_num_threads(quickest(thread_counts(), work))


def _batches(plan: list[Window], rows: int) -> Iterator[list[Window]]:
    """Windows in order, at most `rows` at once, all of one batch equally long."""
    for _, group in groupby(plan, key=lambda window: window.end - window.start):
        equal = list(group)
        for index in range(0, len(equal), rows):
            yield equal[index : index + rows]


@torch.inference_mode()
def _losses(model: Model, text: Text, batch: list[Window], precision: str) -> np.ndarray:
    """Nats of every prediction in the windows, float64 (rows, window length)."""
    device = next(model.parameters()).device
    tokens = np.stack([text.tokens[window.start : window.end + 1] for window in batch]).astype(np.int64)
    ids = torch.from_numpy(tokens).to(device)
    logits: Tensor = model(ids[:, :-1], ids[:, :-1] == text.bos, getattr(torch, precision))
    losses = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return losses.double().cpu().numpy().reshape(len(batch), -1)
