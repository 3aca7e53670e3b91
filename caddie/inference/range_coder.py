"""An arithmetic coder: symbols to bytes and back, under the probabilities of a model's logits.

The decoder must rebuild the encoder's probabilities to the last bit, perhaps on another machine, from logits that agree
to about 1e-13. So logits are rounded to a grid of 64 steps per nat, which costs 1e-5 nats per symbol, and integer
weights are looked up in a table of 2**32 * exp(-steps / 64) from the highest logit down, at least 1 each. All that
follows is integer arithmetic.

A logit within `MARGIN` of the border between two steps could round to the other step on another machine. The encoder
writes the side of each such logit, in about 7 bytes; there are about 4 in 2e9 logits. So machines whose logits differ
by less than the margin always decode the same. A larger difference of d nats spoils a file with probability 64 d for
each logit.

The coder is a range coder (G. N. N. Martin, "Range encoding", 1979) with 96 bits of state. The library constriction
takes about as long (`bench/coder.py`), but its 24-bit probabilities cost more, and it rounds weights in floating point,
so files would depend on how a version of the library does that.
"""

from collections.abc import Iterator
from decimal import Context, Decimal, localcontext
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from caddie.errors import UserError

MARGIN = 2.0**-36
"""Largest difference allowed between the logits of encoder and decoder, in nats: 1.5e-11."""

Logits = npt.NDArray[np.floating[Any]]
Symbols = npt.NDArray[np.integer[Any]]

_STEPS = 64  # per nat
# Borders lie at thirds of a step, which no short binary fraction equals; logits from half precision are such fractions.
_SHIFT = 1 / 3
_LARGEST = float(1 << 20)  # nats; logits, infinite ones too, are clipped to this
_WEIGHT_BITS = 32
_BLOCK = 8192  # logits; part of the format, since those close to a border are listed by block
_COUNTS = 1 << 40  # shares of the interval; all but a few mean "no logit is close to a border"
_STATE_BITS, _WORD_BITS = 96, 32
_WORD_MASK = (1 << _WORD_BITS) - 1
_LEAST_RANGE = 1 << (_STATE_BITS - _WORD_BITS)
_STATE_BYTES, _WORD_BYTES = _STATE_BITS // 8, _WORD_BITS // 8


class Encoder:
    """Encodes symbols as one stream of bytes."""

    def __init__(self) -> None:
        # Until `finish`, a word may have one more bit: a carry to the word before it.
        self._words: list[int] = []
        self._low, self._range = 0, 1 << _STATE_BITS

    def encode(self, symbols: Symbols, logits: Logits) -> None:
        """Append symbols, int (rows,), each under its own row of logits, float64 (rows, vocabulary).

        Rows may be of different texts. The decoder must be called with the same rows. Any symbol can be written, even
        one with a logit of minus infinity. Raises `UserError` for a logit that is NaN or a symbol without a logit.
        """
        vocabulary = logits.shape[1]
        if not ((symbols >= 0) & (symbols < vocabulary)).all():
            raise UserError(f"a symbol is not among the {vocabulary:,} that these logits are for")
        for rows in _blocks(logits):
            places = _places(logits[rows])
            away = places - np.rint(places)
            close = np.flatnonzero(np.abs(away) < MARGIN * _STEPS)
            self._narrow(*_count(len(close), places.size), _COUNTS)
            for sides in (2 * close + (away.flat[close] >= 0)).tolist():
                self._narrow(sides, 1, 2 * places.size)

            sums, columns = _sums(places), symbols[rows].astype(np.intp)
            starts, ends = (sums[np.arange(len(sums)), columns + step].tolist() for step in (0, 1))
            for start, end, total in zip(starts, ends, sums[:, -1].tolist(), strict=True):
                self._narrow(start, end - start, total)

    def finish(self) -> bytes:
        """Return the stream, at most 1 byte longer than the symbols need; empty for no symbols.

        It ends where the decoder stops reading, zeros included: a decoder that reads further has a damaged stream.
        """
        value = _roundest(self._low, self._range)
        state = [value >> _STATE_BITS - _WORD_BITS, value >> _WORD_BITS & _WORD_MASK, value & _WORD_MASK]
        words = np.array([*self._words, *state], np.uint64)
        while (carries := words >> _WORD_BITS).any():
            words &= _WORD_MASK
            words[:-1] += carries[1:]
        # The decoder reads missing bytes of the state as zeros.
        return words.astype(">u4").tobytes().rstrip(b"\0").ljust(_WORD_BYTES * len(self._words), b"\0")

    def _narrow(self, start: int, size: int, total: int) -> None:
        """Narrow the interval to `size` of its `total` shares, from `start` on."""
        share = self._range // total
        self._low += share * start
        self._range = share * size
        while self._range < _LEAST_RANGE:
            self._words.append(self._low >> _STATE_BITS - _WORD_BITS)
            self._low = self._low % _LEAST_RANGE << _WORD_BITS
            self._range <<= _WORD_BITS


class Decoder:
    """Decodes the stream of an `Encoder`, under the same logits.

    A damaged stream gives wrong symbols or a `UserError`, at the latest once all its bytes are used up.
    """

    def __init__(self, data: bytes) -> None:
        self._data, self._read = data, _STATE_BYTES
        self._range = self._share = 1 << _STATE_BITS
        # Distance of the stream from the lower end of the interval.
        self._offset = int.from_bytes(data[:_STATE_BYTES].ljust(_STATE_BYTES, b"\0"), "big")

    def decode(self, logits: Logits) -> npt.NDArray[np.int64]:
        """Return the symbols, int64 (rows,), written under these logits, float64 (rows, vocabulary)."""
        return np.array([symbol for rows in _blocks(logits) for symbol in self._decode(logits[rows])], np.int64)

    def stream(self) -> bytes:
        """Return the stream that an encoder of the decoded symbols writes; data that differs is longer or damaged."""
        words = self._read - _STATE_BYTES
        state = int.from_bytes(self._data[words : self._read].ljust(_STATE_BYTES, b"\0"), "big")
        value = _roundest(state - self._offset, self._range) % (1 << _STATE_BITS)
        return self._data[:words].ljust(words, b"\0") + value.to_bytes(_STATE_BYTES, "big").rstrip(b"\0")

    def _decode(self, logits: Logits) -> Iterator[int]:
        places = _places(logits)
        place = self._find(_COUNTS)
        count = _COUNTS - place if place >= _COUNTS - places.size else 0
        self._narrow(*_count(count, places.size))
        for _ in range(count):
            sides = self._find(2 * places.size)
            self._narrow(sides, 1)
            close, above = divmod(sides, 2)
            places.flat[close] = np.rint(places.flat[close]) + (0.5 if above else -0.5)

        for sums in _sums(places):
            symbol = int(sums.searchsorted(self._find(int(sums[-1])), "right")) - 1
            start, end = sums[symbol : symbol + 2].tolist()
            self._narrow(start, end - start)
            yield symbol

    def _find(self, total: int) -> int:
        """Return the share, of `total`, that the stream lies in."""
        self._share = self._range // total
        place = self._offset // self._share
        if place >= total:
            raise UserError("the compressed stream is damaged, or was written under another model")
        return place

    def _narrow(self, start: int, size: int) -> None:
        """Narrow the interval to `size` of the shares, from `start` on."""
        self._offset -= self._share * start
        self._range = self._share * size
        while self._range < _LEAST_RANGE:
            word = self._data[self._read : self._read + _WORD_BYTES].ljust(_WORD_BYTES, b"\0")
            self._read += _WORD_BYTES
            if self._read > len(self._data) + _STATE_BYTES:
                raise UserError(
                    "the compressed stream ends before the tokens that it states; it was cut, or another machine "
                    "computes other probabilities than the one that compressed"
                )
            self._offset = self._offset << _WORD_BITS | int.from_bytes(word, "big")
            self._range <<= _WORD_BITS


def _roundest(low: int, size: int) -> int:
    """Return the number in [low, low + size) that ends with the most zero bytes."""
    shift = _STATE_BITS
    while (value := -(-low >> shift) << shift) >= low + size:
        shift -= 8
    return value


def _blocks(logits: Logits) -> Iterator[slice]:
    """Yield a few rows at a time: arrays of this size stay in the cache, which is four times as fast."""
    rows = max(1, _BLOCK // logits.shape[1])
    return (slice(start, start + rows) for start in range(0, len(logits), rows))


def _count(close: int, most: int) -> tuple[int, int]:
    """Return start and size of the shares that state the count of logits close to a border: `close` of `most`."""
    return (_COUNTS - close, 1) if close else (0, _COUNTS - most)


def _places(logits: Logits) -> npt.NDArray[np.float64]:
    """Return the logits in steps of the grid; whole numbers are borders."""
    places: npt.NDArray[np.float64] = np.clip(logits, -_LARGEST, _LARGEST, dtype=np.float64)
    places *= _STEPS
    places += _SHIFT
    if np.isnan(places.sum()):
        raise UserError("a logit is not a number: the model is damaged, or its training diverged")
    return places


def _sums(places: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return each row's cumulative weights, from 0, int64 (rows, vocabulary + 1); `places` is overwritten."""
    steps = np.floor(places, out=places)
    below = np.subtract(steps.max(axis=1, keepdims=True), steps, out=steps).astype(np.intp)
    sums = np.zeros((len(places), places.shape[1] + 1), np.int64)
    np.cumsum(_weights().take(below, mode="clip"), axis=1, out=sums[:, 1:])
    return sums


@cache
def _weights() -> npt.NDArray[np.int64]:
    """Return 2**32 * exp(-i / 64), rounded, for i from 0; the last is 1, and later ones would be 1 too."""
    weights = [1 << _WEIGHT_BITS]
    with localcontext(Context(prec=50)):
        while weights[-1] > 1:
            weights.append(round((Decimal(-len(weights)) / _STEPS).exp() * (1 << _WEIGHT_BITS)))
    return np.array(weights, np.int64)
