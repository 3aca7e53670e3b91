"""Windows of text: context, and the predictions that are scored."""

from collections.abc import Iterator
from typing import NamedTuple

from caddie.errors import UserError


class Window(NamedTuple):
    """A window that scores predictions `first` to `end` with context from `start` on.

    Prediction p predicts token p + 1 from tokens up to p, so the window reads tokens `start` to `end`.
    """

    start: int
    first: int
    end: int


def check_windows(length: int, stride: int, predictions: int | None = None) -> None:
    """Raise `UserError` for a stride that does not fit the length, or for fewer `predictions` than one window has."""
    if not 1 <= stride <= length:
        raise UserError(f"score.stride must be from 1 to score.sequence_length ({length:,}), not {stride:,}")
    if predictions is not None and predictions < length:
        most = max(1, predictions)
        shorter = f" score.stride={most}" if stride > most else ""
        raise UserError(
            f"the validation text has {predictions + 1:,} tokens, too few for one window of {length:,}; "
            f"give more text or set score.sequence_length={most}{shorter}"
        )


def windows(begin: int, end: int, length: int, stride: int) -> Iterator[Window]:
    """Yield windows of at most `length` tokens that score each prediction from `begin` to `end` once, in order.

    The first window scores all its predictions. Each later one begins `stride` after the one before and scores its last
    `stride` predictions, each with at least `length - stride` tokens of context. A stride of `length` gives plain,
    non-overlapping scoring.
    """
    first, start = begin, begin
    while first < end:
        stop = min(start + length, end)
        yield Window(start, first, stop)
        first, start = stop, start + stride
