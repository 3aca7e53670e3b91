"""Which predictions are read off which stretch of text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from caddie.errors import UserError


class Window(NamedTuple):
    """Predictions `first` to `end` are scored with the context that begins at `start`.

    Prediction p is that of token p + 1 from the tokens up to p, so the window reads tokens `start` to `end`.
    """

    start: int
    first: int
    end: int


def check_windows(length: int, stride: int, predictions: int | None = None) -> None:
    """Raise `UserError` for a stride that is no stride, or a text of `predictions` too short for one window."""
    if not 1 <= stride <= length:
        raise UserError(f"score.stride must be from 1 to score.sequence_length ({length:,}), not {stride:,}")
    if predictions is not None and predictions < length:
        raise UserError(
            f"the validation text has {predictions + 1:,} tokens, too few for one window of {length:,}; "
            f"give more text or set score.sequence_length={max(1, predictions)}"
        )


def windows(begin: int, end: int, length: int, stride: int) -> Iterator[Window]:
    """Windows of at most `length` tokens that score each prediction from `begin` to `end` once, in order.

    The first window scores all it holds; each later one begins `stride` after the one before and scores what is new,
    its last `stride` predictions, each with at least `length - stride` tokens of context. A stride of the whole length
    gives plain, non-overlapping scoring.
    """
    first, start = begin, begin
    while first < end:
        stop = min(start + length, end)
        yield Window(start, first, stop)
        first, start = stop, start + stride
