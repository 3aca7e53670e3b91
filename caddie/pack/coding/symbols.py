"""Code symbols under given probabilities as one stream, with constriction's entropy coder.

The coder is ANS (J. Duda, arXiv 0902.0271; R. Bamler, arXiv 2201.01741). Its `Categorical` scales weights by
(2^24 - symbols) / (sum of weights), which is 1 here: weights are integers with that sum, so all arithmetic is exact.
"""

from abc import ABC, abstractmethod
from typing import Any

import constriction
import numpy as np
import numpy.typing as npt

from caddie.pack.coding.array_codec import CHECKSUM_BITS
from caddie.pack.coding.priors import PER_OCTAVE, Integers, log2

Symbols = npt.NDArray[np.int32]

PRECISION_BITS = 24
"""Bits of the coder's probabilities."""
BYTES = np.full((1, 256), (1 << PRECISION_BITS) // 256 - 1, np.int64)
"""Weights under which all bytes have the same probability."""
_ONE = np.ones(1, np.int64)


class SymbolCoder(ABC):
    """Interface of writer, reader and meter, so that one function encodes, decodes and measures."""

    @abstractmethod
    def code(self, symbols: Symbols, weights: Integers, counts: Integers) -> None:
        """Write the symbols (n,), or read into them: counts[0] of them under weights[0], and so on.

        `weights` are (groups, symbols); symbol i has the probability (weights[., i] + 1) / 2^24.
        """

    def byte(self, value: int = 0) -> int:
        """Write a byte, or read it; return it."""
        symbol = np.array([value], np.int32)
        self.code(symbol, BYTES, _ONE)
        return int(symbol.item())

    def number(self, size: int, value: int = 0) -> int:
        """Write or read a signed integer of `size` bytes; return it."""
        parts = value.to_bytes(size, "little", signed=True)
        return int.from_bytes(bytes([self.byte(part) for part in parts]), "little", signed=True)


def _model(weights: Integers) -> Any:
    return constriction.stream.model.Categorical(weights.astype(np.float64), perfect=False)


class Writer(SymbolCoder):
    """Keeps symbols until `finish`: ANS is a stack, so the last symbol is coded first and the first is read first."""

    def __init__(self) -> None:
        self._groups: list[tuple[Symbols, Integers]] = []

    def code(self, symbols: Symbols, weights: Integers, counts: Integers) -> None:
        self._groups += zip(np.split(symbols, counts[:-1].cumsum()), weights, strict=True)

    def finish(self, seal: int) -> bytes:
        """Return the stream; the coder starts in the state `seal`, which a reader finds at the end."""
        coder = constriction.stream.stack.AnsCoder(np.array([seal], np.uint32))
        for symbols, weights in reversed(self._groups):
            coder.encode_reverse(symbols, _model(weights))
        return bytes(coder.get_compressed().astype("<u4").tobytes().rstrip(b"\0"))


class Reader(SymbolCoder):
    """Reads the stream of a `Writer` under the same weights; raises `Damaged` if it is empty or ends too early."""

    def __init__(self, data: bytes) -> None:
        if not data or data[-1] == 0:  # the coder refuses a last word of zero
            raise Damaged
        words = np.frombuffer(data.ljust(-(-len(data) // 4) * 4, b"\0"), "<u4").astype(np.uint32)
        self._coder = constriction.stream.stack.AnsCoder(words)

    def code(self, symbols: Symbols, weights: Integers, counts: Integers) -> None:
        start = 0
        for each, count in zip(weights, counts.tolist(), strict=True):
            # The rest of a whole stream is never shorter than its seal.
            if self._coder.num_valid_bits() < CHECKSUM_BITS:
                raise Damaged
            symbols[start : start + count] = self._coder.decode(_model(each), count)
            start += count

    def finish(self, seal: int) -> None:
        """Raise `Damaged` unless only the state in which the writer started is left."""
        if self._coder.get_compressed().tolist() != [seal]:
            raise Damaged


class Meter(SymbolCoder):
    """Measures the length of a stream, in 1 / PER_OCTAVE bits, without coding."""

    def __init__(self) -> None:
        self.size = 0

    def code(self, symbols: Symbols, weights: Integers, counts: Integers) -> None:
        logs = log2(weights[np.arange(len(counts)).repeat(counts), symbols] + 1)
        self.size += len(symbols) * PRECISION_BITS * PER_OCTAVE - int(logs.sum())


class Damaged(Exception):
    """A stream is damaged or not whole."""
