"""Adaptive entropy coding of integer matrices by row and column scale.

Quantized weights are close to independent Gaussians, so neighbours do not predict one another. Scales do: columns
differ (a good quantizer gives each its own step), rows differ somewhat. So the expected magnitude of an integer is
(mean magnitude of its row so far) x (magnitude of its column so far, relative to all columns), each shrunk to the usual
value while data are few. It is rounded to one of 64 contexts. Each context counts the integers seen in it, on top of a
prior (`priors`). Three bytes of settings are stored beside the integers.

Integers are coded in tiles that grow from small to large, so that probabilities adapt soon. Within a tile probabilities
are constant, and the integers of each context are coded in one call.
"""

from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import pairwise, product
from math import isqrt, prod
from typing import Any, NamedTuple

import numpy as np

from caddie.pack.codecs import Brotli
from caddie.pack.coding import priors
from caddie.pack.coding.array_codec import CHECKSUM_BITS, ENTROPY_MODEL, Array, ArrayCodec, Shape, checksum, damaged
from caddie.pack.coding.packed import Packed, matrix_shape
from caddie.pack.coding.priors import FRACTION_BITS, LARGEST, PER_OCTAVE, Integers, log2
from caddie.pack.coding.symbols import BYTES, PRECISION_BITS, Damaged, Meter, Reader, SymbolCoder, Symbols, Writer

_PRIOR_COUNT = 200  # weight of the prior, in integers seen
_MOST_COUNT = 1 << 16  # sum of a context's counts above which they are halved
_LEAST_TILE, _LARGEST_TILE = 64, 1 << 15  # elements
_GROWTH = 4  # a tile is as high and wide as a quarter of what is above and left of it
_LEAST_COLUMNS = 4  # of a tile
_RECENT_ROWS = 16  # the usual magnitude is the mean over about this many rows
_TRIAL = 1 << 15  # elements on which settings are tried
_RUNS = 4  # runs of successive rows in that sample
_MOST_ELEMENTS = 1 << 31
_MOST_COUNTED = 1 << 16  # range up to which a median is found by counting


class _Settings(NamedTuple):
    """Settings that the encoder chooses for an array; all combinations fit in a byte."""

    layout: int = 0
    """0: as it is; 1: transposed; 2: differences from the row before."""
    columns: int = 1
    """Index in `_TRUST`: weight of the usual magnitude in a column's estimate, in rows."""
    rows: int = 1
    """Index in `_TRUST`: weight of the usual magnitude in a row's estimate, in columns."""
    skewed: int = 0
    """1 if an integer and its negative are counted apart."""
    centered: int = 0
    """1 if the median was subtracted."""


_TRUST = (1, 4, 16, 64)
_MOVES = ("columns", -1), ("columns", 1), ("rows", -1), ("rows", 1), ("skewed", 1)
_CHOICES = [_Settings(*choice) for choice in product(range(3), range(4), range(4), range(2), range(2))]


class EntropyModel(ArrayCodec):
    """Adaptive contexts of row and column scale with an ANS coder, for integers of up to 32 bits.

    Floating-point numbers and integers of 64 bits are written by `Packed`. One damaged stream in 2^24 is not noticed.
    """

    def encode(self, array: Array, like: bytes = b"") -> bytes:
        """Return the stream with settings by trial (`_best`), or with those of `like`."""
        if not can_code(array.dtype) or array.size >= _MOST_ELEMENTS:
            return Packed(codec=Brotli(), columns=True, shuffle=True).encode(array)
        matrix = array.astype(np.int64).reshape(matrix_shape(array.shape))
        writer, center_bytes = Writer(), array.itemsize + 1
        _write(matrix, _settings_of(like) or _best(matrix, center_bytes), writer, center_bytes)
        return bytes([ENTROPY_MODEL]) + writer.finish(_seal(array))


def can_code(dtype: np.dtype[Any]) -> bool:
    """Return True for integers of up to 32 bits."""
    return dtype.kind in "biu" and dtype.itemsize <= 4


def _best(matrix: Integers, center_bytes: int) -> _Settings:
    """Return settings by search on a sample, but choose the layout by the coded size of the whole matrix.

    A sample has too few rows to show the cost of learning the scales of all rows and columns.
    """
    sample, vector = _sample(matrix), matrix.shape[1] == 1
    best = _searched(sample, _Settings(), (("layout", 2 if vector else 1), *_MOVES), center_bytes)
    if len(sample) == len(matrix):
        return best
    others = [layout for layout in ((0, 2) if vector else (0, 1, 2)) if layout != best.layout]
    turned = [_Settings(layout, best.rows, best.columns) for layout in others]
    found = min([best, *turned], key=lambda settings: _size(matrix, settings, center_bytes))
    return best if found is best else _searched(sample, found, _MOVES, center_bytes)


def _sample(matrix: Integers) -> Integers:
    """Return evenly spaced runs of rows, about `_TRIAL` elements; a small matrix is returned whole.

    Rows differ along a matrix: the first rows of an embedding may belong to rare tokens.
    """
    if matrix.size <= _TRIAL or len(matrix) <= _RUNS:
        return matrix
    height = max(1, _TRIAL // _RUNS // matrix.shape[1])
    starts = np.arange(_RUNS) * (len(matrix) - height) // (_RUNS - 1)
    sample: Integers = matrix[(starts[:, None] + np.arange(height)).ravel()]
    return sample


def _searched(matrix: Integers, start: _Settings, moves: tuple[tuple[str, int], ...], center_bytes: int) -> _Settings:
    """Return settings by local search: each move is repeated while it makes the matrix shorter."""
    size = cache(lambda settings: _size(matrix, settings, center_bytes))
    best = start
    for field, step in moves:
        near = best._replace(**{field: getattr(best, field) + step})
        while near in _CHOICES and size(near) < size(best):
            best, near = near, near._replace(**{field: getattr(near, field) + step})
    return best


def _size(matrix: Integers, settings: _Settings, center_bytes: int) -> int:
    meter = Meter()
    _write(matrix, settings, meter, center_bytes)
    return meter.size


def _settings_of(stream: bytes) -> _Settings | None:
    """Return the settings of a stream; None for one of another codec."""
    if not stream or stream[0] != ENTROPY_MODEL:
        return None
    return _CHOICES[Reader(stream[1:]).byte()]


def _seal(array: Array) -> int:
    """Return the coder's initial state: a checksum of the array, which the reader finds at the end.

    Its highest bit tells a whole stream from one that ended too early.
    """
    return 1 << CHECKSUM_BITS | checksum(array)


def _write(values: Integers, settings: _Settings, coder: SymbolCoder, center_bytes: int) -> None:
    if not values.size:
        return
    if settings.layout == 2:
        center = int(values[0, 0])
        values = np.diff(values, axis=0, prepend=center)
    else:
        center = _median(values)
        values = (values.T if settings.layout == 1 else values) - center
    settings = settings._replace(centered=int(center != 0))
    coder.byte(_CHOICES.index(settings))
    if center:
        coder.number(center_bytes, center)
    most = min(int(np.abs(values).max()), LARGEST)
    if not coder.byte(most):
        return
    clipped = np.clip(values, -most, most).astype(np.int32)
    _code(clipped, most, _mean(coder.byte(_mean_code(clipped))), settings, coder)
    if most == LARGEST:
        beyond = np.abs(values[np.abs(clipped) == LARGEST]) - LARGEST
        size = coder.byte((int(beyond.max()).bit_length() + 7) // 8)
        rest = beyond.astype("<u8").view(np.uint8).reshape(beyond.size, 8)[:, :size]
        coder.code(rest.ravel().astype(np.int32), BYTES, np.array([rest.size]))


def read(data: bytes, dtype: np.dtype[Any], shape: Shape) -> Array:
    """Return the array of an `EntropyModel` stream; `UserError` for any other."""
    try:
        reader = Reader(data[1:])
        result = _read(matrix_shape(shape), reader, dtype.itemsize + 1).astype(dtype, order="C").reshape(shape)
        reader.finish(_seal(result))
    except Damaged:
        raise damaged(dtype, shape) from None
    return result


def _read(shape: tuple[int, int], coder: Reader, center_bytes: int) -> Array:
    if not prod(shape):
        return np.zeros(shape, np.int32)
    if (number := coder.byte()) >= len(_CHOICES):
        raise Damaged
    settings = _CHOICES[number]
    center = coder.number(center_bytes) if settings.centered else 0
    values: Array = np.zeros(shape[::-1] if settings.layout == 1 else shape, np.int32)
    if most := coder.byte():
        _code(values, most, _mean(coder.byte()), settings, coder)
    if most == LARGEST:
        if (size := coder.byte()) > 8:
            raise Damaged
        places = np.abs(values) == LARGEST
        rest = np.zeros((int(places.sum()), size), np.int32)
        coder.code(rest.ravel(), BYTES, np.array([rest.size]))
        beyond = np.pad(rest, ((0, 0), (0, 8 - size))).astype(np.uint8)
        values = values.astype(np.int64)
        values[places] += np.sign(values[places]) * beyond.view("<i8").ravel()
    if settings.layout == 2:
        values = values.cumsum(axis=0)
    values = values + np.int64(center) if center else values
    return values.T if settings.layout == 1 else values


def _median(values: Integers) -> int:
    """Return the median, the upper one of an even number of values."""
    least, half = int(values.min()), values.size // 2
    if int(values.max()) - least < _MOST_COUNTED:  # counting is many times as fast
        return least + int(np.searchsorted(np.bincount((values - least).ravel()).cumsum(), half, side="right"))
    return int(np.partition(values, half, axis=None)[half])


def _mean_code(values: Symbols) -> int:
    """Return the mean magnitude as a byte: half octaves above that of the first context."""
    mean = int(np.abs(values).sum(dtype=np.int64)) << FRACTION_BITS
    steps = int(log2(np.array(mean // values.size))) - (FRACTION_BITS - 8) * PER_OCTAVE
    return max(0, 2 * steps // PER_OCTAVE)


def _mean(code: int) -> int:
    return isqrt(1 << (2 * (FRACTION_BITS - 8) + min(code, 40)))


def _tiles(rows: int, columns: int) -> Iterator[tuple[int, int, list[int]]]:
    """Yield blocks of rows, [top, bottom), and the column borders of their tiles."""
    top = 0
    while top < rows:
        height = max(1, min(top // _GROWTH, 4 * _LARGEST_TILE // columns))
        bottom = rows if rows - top - height < height // 2 else top + height
        height = bottom - top
        borders = [0]
        while (left := borders[-1]) < columns:
            wide = max(_LEAST_COLUMNS, -(-_LEAST_TILE // height), left // _GROWTH)
            right = left + min(wide, max(1, _LARGEST_TILE // height))
            borders.append(columns if columns - right < wide // 2 else right)
        yield top, bottom, borders
        top = bottom


@lru_cache(maxsize=8)  # many trials for each array, and many arrays of the same few bits
def _prior(most: int) -> Integers:
    """Return prior counts of the integers from -most to most: (widths, contexts, integers)."""
    magnitudes = priors.priors()
    return np.concatenate([magnitudes[..., most:0:-1], magnitudes[..., : most + 1]], axis=2) * _PRIOR_COUNT


def _code(values: Symbols, most: int, mean: int, settings: _Settings, coder: SymbolCoder) -> None:
    """Write a matrix of integers from -most to most, or read into it; `mean` is the first guess of their magnitude."""
    (rows, columns), symbols, prior = values.shape, 2 * most + 1, _prior(most)
    column_trust, row_trust = _TRUST[settings.columns], _TRUST[settings.rows]
    counts, totals = np.zeros((priors.CONTEXTS, symbols), np.int64), np.zeros(priors.CONTEXTS, np.int64)
    # `mean`, `usual`, `ratios` and `scales` are fixed-point numbers; sums are of magnitudes.
    column_sums = np.zeros(columns, np.int64)
    above = 0  # sum of the means of all rows so far
    recent, recent_rows = 4 * mean, 4
    for top, bottom, borders in _tiles(rows, columns):
        usual = recent // recent_rows
        expected = column_trust * usual
        ratios = ((column_sums << FRACTION_BITS) + expected << FRACTION_BITS) // max(above + expected, 1)
        log_ratios = log2(ratios) - FRACTION_BITS * PER_OCTAVE
        row_sums = np.zeros(bottom - top, np.int64)
        passed = np.concatenate([[0], ratios.cumsum()])  # sums of the ratios so far
        for left, right in pairwise(borders):
            beside = passed[left] + (row_trust << FRACTION_BITS)
            scales = ((row_sums << FRACTION_BITS) + row_trust * usual << FRACTION_BITS) // beside
            places = priors.contexts(log2(scales)[:, None] + log_ratios[left:right]).ravel()
            tile = values[top:bottom, left:right]
            order, present = places.argsort(kind="stable"), np.bincount(places, minlength=priors.CONTEXTS)
            used = present.nonzero()[0]
            shares = prior[priors.width(top + column_trust, left + row_trust), used]
            weights = _weights(shares, counts[used], settings.skewed)
            flat = tile.ravel()[order] + np.int32(most)
            coder.code(flat, weights, present[used])
            np.add.at(counts.ravel(), places[order] * np.int64(symbols) + flat, 1)
            if isinstance(coder, Reader):
                back = np.empty_like(flat)
                back[order] = flat
                tile[...] = back.reshape(tile.shape) - np.int32(most)
            row_sums += np.abs(tile).sum(axis=1, dtype=np.int64)
            totals += present
            for context in (totals > _MOST_COUNT).nonzero()[0]:
                counts[context] >>= 1
                totals[context] = counts[context].sum()
        column_sums += np.abs(values[top:bottom]).sum(axis=0, dtype=np.int64)
        block = (int(row_sums.sum()) << FRACTION_BITS) // columns
        above += block
        recent, recent_rows = recent + block, recent_rows + bottom - top
        if recent_rows > _RECENT_ROWS:
            recent, recent_rows = recent * _RECENT_ROWS // recent_rows, _RECENT_ROWS


def _weights(prior: Integers, counts: Integers, skewed: int) -> Integers:
    """Return weights for the coder, (contexts, symbols), that sum to 2^24 - symbols in each context."""
    shares = prior + ((2 * counts if skewed else counts + counts[:, ::-1]) << priors.PRIOR_BITS - 1)
    free = (1 << PRECISION_BITS) - shares.shape[1]
    weights: Integers = shares * free // shares.sum(axis=1, keepdims=True)
    weights[:, weights.shape[1] // 2] += free - weights.sum(axis=1)
    return weights
