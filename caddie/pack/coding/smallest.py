"""Choice of an array's codec by trial, and decoding of any codec's stream."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from caddie.errors import UserError
from caddie.pack.codecs import Brotli, Zlib, Zstd
from caddie.pack.coding.array_codec import ENTROPY_MODEL, Array, ArrayCodec, checked
from caddie.pack.coding.entropy_model import EntropyModel, can_code, read
from caddie.pack.coding.packed import STREAMS, Packed, unpack


class Smallest(ArrayCodec):
    """The shortest of several codecs' streams; on a tie, the first."""

    of: tuple[ArrayCodec, ...] = (EntropyModel(), Packed(codec=Zstd(level=3), shuffle=True))
    """Codecs to try."""
    also: tuple[ArrayCodec, ...] = (Packed(codec=Zlib()), Packed(codec=Brotli(), shuffle=True), Packed(columns=True))
    """Slower codecs, also tried for arrays of at most `small_bytes`."""
    small_bytes: int = 1 << 12
    """Size of the largest array that `also` is tried for, in bytes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.of:
            raise UserError("Smallest has no codec to try; name one in `of`, as in Smallest(of=[EntropyModel()])")

    def encode(self, array: Array, like: bytes = b"") -> bytes:
        codecs = self.of + (self.also if array.nbytes <= self.small_bytes else ())
        return min((codec.encode(array, like) for codec in codecs), key=len)


def decode(data: bytes, dtype: npt.DTypeLike, shape: Sequence[int]) -> Array:
    """Return the array whose stream any `ArrayCodec` wrote, in memory proportional to the array.

    `UserError` for a damaged stream or other bytes.
    """
    dtype, shape = np.dtype(dtype), tuple(shape)
    checked(dtype)
    kind = data[0] if data else None
    if kind == ENTROPY_MODEL and can_code(dtype):
        return read(data, dtype, shape)
    if kind in STREAMS:
        return unpack(data, dtype, shape)
    raise UserError("the bytes are no coded array that this version knows; copy or download the file again")
