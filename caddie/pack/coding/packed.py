"""Code arrays with a general-purpose compressor, in a layout that suits it."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from caddie.errors import UserError
from caddie.pack.codecs import Brotli, Codec, Lzma, Stored, Zlib, Zstd
from caddie.pack.coding.array_codec import CHECKSUM_BITS, PACKED, Array, ArrayCodec, Shape, checked, checksum, damaged

_CODECS: tuple[type[Codec], ...] = (Stored, Zlib, Lzma, Zstd, Brotli)
"""The index of a class is part of its streams' first byte."""
_CHECKSUM_BYTES = CHECKSUM_BITS // 8
_COLUMNS, _SHUFFLE, _SORT_ROWS, _LAYOUTS = 1, 2, 4, 8
STREAMS = range(PACKED, PACKED + _LAYOUTS * len(_CODECS))
"""First bytes of the streams of `Packed`."""


class Packed(ArrayCodec):
    """The array's bytes compressed by a `Codec`, after a checksum of the array."""

    codec: Codec = Brotli()
    """Compressor of the bytes, one of those in `caddie.pack.codecs`."""
    columns: bool = False
    """Write column after column instead of row after row; rows lie along the first axis."""
    shuffle: bool = False
    """Write the first bytes of all elements first, then all second bytes and so on (byte shuffle)."""
    sort_rows: bool = False
    """Order rows so that each is followed by the nearest row left. The order takes 2 or 4 bytes a row; time grows with
    the square of the rows."""

    def encode(self, array: Array, like: bytes = b"") -> bytes:
        dtype = checked(array.dtype)
        if type(self.codec) not in _CODECS:
            raise UserError(f"{type(self.codec).__name__} is not one of {', '.join(c.__name__ for c in _CODECS)}")
        layout = _COLUMNS * self.columns + _SHUFFLE * self.shuffle + _SORT_ROWS * self.sort_rows
        matrix = np.ascontiguousarray(array, dtype).reshape(matrix_shape(array.shape))
        order = b""
        if self.sort_rows:
            places = nearest_rows(matrix)
            order, matrix = places.astype(_order_dtype(len(matrix))).tobytes(), matrix[places]
        flat = np.ascontiguousarray(matrix.T if self.columns else matrix).ravel()
        data = flat.view(np.uint8).reshape(flat.size, dtype.itemsize).T.tobytes() if self.shuffle else flat.tobytes()
        kind = PACKED + layout + _LAYOUTS * _CODECS.index(type(self.codec))
        return bytes([kind]) + checksum(array).to_bytes(_CHECKSUM_BYTES, "little") + self.codec.encode(order + data)


def unpack(data: bytes, dtype: np.dtype[Any], shape: Shape) -> Array:
    """Return the array of a `Packed` stream; `UserError` for any other."""
    number, layout = divmod(data[0] - PACKED, _LAYOUTS)
    rows, columns = matrix_shape(shape)
    order_dtype = _order_dtype(rows)
    order_bytes = rows * order_dtype.itemsize if layout & _SORT_ROWS else 0
    # Decoding needs none of a codec's settings.
    found = _CODECS[number]().decode(data[1 + _CHECKSUM_BYTES :], order_bytes + math.prod(shape) * dtype.itemsize)
    flat = np.frombuffer(found, np.uint8, offset=order_bytes)
    if layout & _SHUFFLE:
        flat = np.ascontiguousarray(flat.reshape(dtype.itemsize, rows * columns).T).ravel()
    flat = flat.view(checked(dtype))
    matrix = flat.reshape(columns, rows).T if layout & _COLUMNS else flat.reshape(rows, columns)
    result = np.empty((rows, columns), dtype)
    order: Any = slice(None)
    if layout & _SORT_ROWS:
        order = np.frombuffer(found, order_dtype, rows)
        if not np.array_equal(np.sort(order), np.arange(rows)):
            raise damaged(dtype, shape)
    result[order] = matrix
    if checksum(result) != int.from_bytes(data[1 : 1 + _CHECKSUM_BYTES], "little"):
        raise damaged(dtype, shape)
    return result.reshape(shape)


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """Return the shape of an array as a matrix with rows along its first axis; a vector is one column."""
    return (shape[0] if shape else 1), math.prod(shape[1:])


def nearest_rows(matrix: Array) -> npt.NDArray[np.int64]:
    """Return an order of rows, (rows,): the first row, then always the row left that is nearest to the last (L1).

    On a tie, the first such row follows.
    """
    # Sums of small integers are exact, so that the order is the same everywhere.
    values = matrix.astype(np.int64 if matrix.dtype.kind in "biu" and matrix.dtype.itemsize < 8 else np.float64)
    left = np.arange(len(matrix))
    order, at = np.zeros_like(left), 0
    for place in range(len(matrix)):
        order[place], last = left[at], values[at]
        left, values = np.delete(left, at), np.delete(values, at, axis=0)
        if len(left):
            with np.errstate(invalid="ignore", over="ignore"):
                at = int(np.abs(values - last).sum(axis=1).argmin())
    return order


def _order_dtype(rows: int) -> np.dtype[Any]:
    return np.dtype("<u2" if rows <= 1 << 16 else "<u4")
