"""The interface of array codecs, and what their streams have in common."""

import zlib
from abc import abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

from caddie.config import Config
from caddie.errors import UserError

Array = npt.NDArray[Any]
Shape = tuple[int, ...]

ENTROPY_MODEL = 0
"""First byte of a stream of `EntropyModel`."""
PACKED = 1
"""First byte of a stream of `Packed`, plus a number for its layout and codec."""
CHECKSUM_BITS = 24
"""Bits of the array's CRC-32 in each stream, so that one damaged stream in 16 million passes."""


class ArrayCodec(Config):
    """Socket: lossless coding of arrays of numbers as bytes; `decode` reads them without the settings.

    An array may have any shape and strides. Its elements are booleans, integers or floating-point numbers of 8, 16, 32
    or 64 bits; `UserError` for others. Every bit is restored, also in NaNs. The same array gives the same bytes on
    every machine.
    """

    @abstractmethod
    def encode(self, array: Array, like: bytes = b"") -> bytes:
        """Return the stream of the array's elements, without dtype and shape.

        `like` is the stream of a similar array, whose settings are reused instead of chosen by trial.
        """


def checksum(array: Array) -> int:
    """Return the first `CHECKSUM_BITS` bits of the array's CRC-32."""
    return zlib.crc32(array.astype(array.dtype.newbyteorder("<")).tobytes()) >> 32 - CHECKSUM_BITS


def checked(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in little-endian order; `UserError` for other than numbers of 8 to 64 bits."""
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise UserError(f"an array of {dtype} cannot be coded; make it one of integers or floating-point numbers")
    return dtype.newbyteorder("<")


def damaged(dtype: np.dtype[Any], shape: Shape) -> UserError:
    """Return the error for a stream that does not hold such an array."""
    size = " x ".join(map(str, shape)) or "one"
    return UserError(f"the bytes are not one whole array of {size} {dtype.name}; copy or download the file again")
