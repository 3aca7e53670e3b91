"""What codes an array, and what its streams have in common."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from dataclasses import dataclass
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
"""First byte of a stream of `Packed`, to which its layout and codec are added."""
CHECKSUM_BITS = 24
"""What each stream has of the array's CRC-32, so that one damaged stream in 16 million passes."""


@dataclass(frozen=True, kw_only=True)
class ArrayCodec(Config):
    """Socket: arrays of numbers as bytes, which `decode` reads without the settings.

    An array has any shape and strides, and elements that are booleans, integers or floating-point numbers of 8, 16, 32
    or 64 bits; `UserError` for others. Every bit of them comes back, also of what is not a number. The bytes are the
    same each time, on every machine.
    """

    @abstractmethod
    def encode(self, array: Array, like: bytes = b"") -> bytes:
        """The array's elements; dtype and shape are known to who reads them.

        With the stream of an array much `like` this one, what was found out by trial for that one is taken.
        """


def checksum(array: Array) -> int:
    """`CHECKSUM_BITS` bits that tell the array from a damaged one."""
    return zlib.crc32(array.astype(array.dtype.newbyteorder("<")).tobytes()) >> 32 - CHECKSUM_BITS


def checked(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype, its bytes in little-endian order; `UserError` for what is not a number of 8 to 64 bits."""
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise UserError(f"an array of {dtype} cannot be coded; make it one of integers or floating-point numbers")
    return dtype.newbyteorder("<")


def damaged(dtype: np.dtype[Any], shape: Shape) -> UserError:
    """What is wrong with a stream that does not hold such an array."""
    size = " x ".join(map(str, shape)) or "one"
    return UserError(f"the bytes are not one whole array of {size} {dtype.name}; take the file from its source again")
