"""Symbols under given odds as one stream, by an entropy coder from a library.

The coder is constriction's ANS (J. Duda, arXiv 0902.0271; R. Bamler, arXiv 2201.01741). Its `Categorical` computes
odds by a factor (2**24 - symbols) / (sum of weights), which is 1 here: weights are integers with that sum, so that
all it computes is exact.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import constriction
import numpy as np
import numpy.typing as npt

from caddie.pack.coding.array_codec import CHECKSUM_BITS
from caddie.pack.coding.priors import PER_OCTAVE, Integers, log2

Symbols = npt.NDArray[np.int32]

PRECISION_BITS = 24
"""Of the coder's probabilities."""
BYTES = np.full((1, 256), ((1 << PRECISION_BITS) - 256) // 256, np.int64)
"""Weights under which all bytes are alike."""
_ONE = np.ones(1, np.int64)


class SymbolCoder(ABC):
    """Writes or reads: the same program runs through both."""

    fills_in: ClassVar[bool] = False
    """Whether it changes the symbols that it is given."""

    @abstractmethod
    def code(self, symbols: Symbols, weights: Integers, counts: Integers) -> None:
        """Write the symbols, or fill them in: counts[0] of them under weights[0], and so on.

        Symbol i has odds of weights[., i] + 1 in 2**24.
        """

    def byte(self, value: int = 0) -> int:
        """Write a byte, or read it and give it back."""
        symbol = np.array([value], np.int32)
        self.code(symbol, BYTES, _ONE)
        return int(symbol[0])

    def number(self, size: int, value: int = 0) -> int:
        """A number of that many bytes."""
        parts = value.to_bytes(size, "little", signed=True)
        return int.from_bytes(bytes([self.byte(part) for part in parts]), "little", signed=True)


def _model(weights: Integers) -> Any:
    return constriction.stream.model.Categorical(weights.astype(np.float64), perfect=False)


class Writer(SymbolCoder):
    """Keeps what it is given until `finish`: the coder starts with the last symbol, so that a reader gets the first."""

    def __init__(self) -> None:
        self._groups: list[tuple[Symbols, Integers]] = []

    def code(self, symbols: Symbols, weights: Integers, counts: Integers) -> None:
        """Keep them."""
        self._groups += zip(np.split(symbols, counts[:-1].cumsum()), weights, strict=True)

    def finish(self, seal: int) -> bytes:
        """The stream; the coder starts in the state `seal`, which a reader finds at the end."""
        coder = constriction.stream.stack.AnsCoder(np.array([seal], np.uint32))
        for symbols, weights in reversed(self._groups):
            coder.encode_reverse(symbols, _model(weights))
        words: npt.NDArray[np.uint32] = coder.get_compressed()
        return words.astype("<u4").tobytes().rstrip(b"\0")


class Reader(SymbolCoder):
    """Reads what a `Writer` wrote, under the same weights; `Damaged` where the stream ends too early."""

    fills_in = True

    def __init__(self, data: bytes) -> None:
        words = np.frombuffer(data.ljust(-(-len(data) // 4) * 4, b"\0"), "<u4").astype(np.uint32)
        # The coder takes no last word of zero.
        self.damaged = not len(words) or data[-1] == 0
        self._coder = constriction.stream.stack.AnsCoder(words[:0] if self.damaged else words)

    def code(self, symbols: Symbols, weights: Integers, counts: Integers) -> None:
        """Fill them in."""
        start = 0
        for each, count in zip(weights, counts.tolist(), strict=True):
            # What is left of a stream is never less than its seal.
            self.damaged |= self._coder.num_valid_bits() < CHECKSUM_BITS
            if self.damaged:
                raise Damaged
            symbols[start : start + count] = self._coder.decode(_model(each), count)
            start += count

    def finish(self, seal: int) -> None:
        """`Damaged` unless nothing is left but the state in which the writer started."""
        if self._coder.get_compressed().tolist() != [seal]:
            raise Damaged


class Meter(SymbolCoder):
    """Counts what a stream would take, in 1 / PER_OCTAVE bits."""

    def __init__(self) -> None:
        self.size = 0

    def code(self, symbols: Symbols, weights: Integers, counts: Integers) -> None:
        """Add up what they take."""
        logs = log2(weights[np.arange(len(counts)).repeat(counts), symbols] + 1)
        self.size += len(symbols) * PRECISION_BITS * PER_OCTAVE - int(logs.sum())


class Damaged(Exception):
    """A stream that nothing wrote, or that is not whole."""
