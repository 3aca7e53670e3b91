"""General-purpose compressors of bytes, safe to run on a file from a stranger.

`decode` needs the length of the original and none of a codec's settings: a codec with its defaults reads a stream of
any level. Streams have no header, checksum or magic number, for the container has them already.
"""

import lzma
import zlib
from abc import abstractmethod
from typing import Annotated, Any

import brotli
import zstandard

from caddie.config import Config, Range
from caddie.errors import UserError

_DICTIONARY_BYTES = 64 << 20  # largest dictionary of Lzma, that of its highest preset
_ZSTD_RATIO = 1 << 15  # highest ratio of Zstd: a block of 128 KiB in four bytes
_PIECE_BYTES = 1 << 16  # bytes of Brotli's output per call: its decoder overshoots a limit in proportion to it
_RAW_DEFLATE = -15
_MAGICLESS = zstandard.FORMAT_ZSTD1_MAGICLESS


class Codec(Config):
    """A lossless compressor of bytes. Every setting has a default and matters to `encode` only."""

    @abstractmethod
    def encode(self, data: bytes) -> bytes:
        """Return `data` compressed; the same bytes each time."""

    @abstractmethod
    def decode(self, data: bytes, size: int) -> bytes:
        """Return the original of `size` bytes, in memory proportional to it; `UserError` for any other stream."""


class Stored(Codec):
    """The bytes as they are, for data that is compressed already."""

    def encode(self, data: bytes) -> bytes:
        return data

    def decode(self, data: bytes, size: int) -> bytes:
        return _whole(self, data, size, True)


class Zlib(Codec):
    """Raw deflate (RFC 1951): quick, with the least overhead on a few bytes."""

    level: Annotated[int, Range(0, 9)] = 9
    """Effort, from 0 (none) to 9."""

    def encode(self, data: bytes) -> bytes:
        return zlib.compress(data, self.level, wbits=_RAW_DEFLATE)

    def decode(self, data: bytes, size: int) -> bytes:
        return _decompressed(self, zlib.decompressobj(wbits=_RAW_DEFLATE), data, size)


class Lzma(Codec):
    """Raw LZMA2, the coder inside xz: it stores incompressible data, which LZMA1 would grow by 1.4 %."""

    preset: Annotated[int, Range(0, 9)] = 9
    """Effort, from 0 to 9."""
    extreme: bool = True
    """Search harder at the same preset; decoding is as quick."""

    def encode(self, data: bytes) -> bytes:
        effort = self.preset | (lzma.PRESET_EXTREME if self.extreme else 0)
        return lzma.compress(data, lzma.FORMAT_RAW, filters=_lzma_filters(len(data), preset=effort))

    def decode(self, data: bytes, size: int) -> bytes:
        return _decompressed(self, lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=_lzma_filters(size)), data, size)


class Zstd(Codec):
    """Zstandard (RFC 8878), its frames without the magic number."""

    level: Annotated[int, Range(1, 22)] = 22
    """Effort, from 1 to 22."""

    def encode(self, data: bytes) -> bytes:
        """Return `data` compressed; empty for empty data."""
        if not data:
            return b""
        settings = {"source_size": len(data), "format": _MAGICLESS}
        parameters = zstandard.ZstdCompressionParameters.from_level(self.level, **settings)
        return zstandard.ZstdCompressor(compression_params=parameters).compress(data)

    def decode(self, data: bytes, size: int) -> bytes:
        if not size:  # the library reads no further than the header of an empty frame
            return _whole(self, data, 0, True)
        try:
            # The decoder allocates the size that the frame claims and no window, so the claim is checked first.
            claim = zstandard.get_frame_parameters(data, format=_MAGICLESS).content_size
            if claim != size or claim > len(data) * _ZSTD_RATIO:
                raise _damaged(self, size)
            stream = zstandard.ZstdDecompressor(format=_MAGICLESS)
            return _whole(self, stream.decompress(data, allow_extra_data=False), size, True)
        except zstandard.ZstdError as error:
            raise _damaged(self, size) from error


class Brotli(Codec):
    """Brotli (RFC 7932), the best on short text."""

    quality: Annotated[int, Range(0, 11)] = 11
    """Effort, from 0 to 11."""

    def encode(self, data: bytes) -> bytes:
        return bytes(brotli.compress(data, quality=self.quality, lgwin=24))

    def decode(self, data: bytes, size: int) -> bytes:
        stream, result = brotli.Decompressor(), bytearray()
        try:
            piece = stream.process(data, output_buffer_limit=_PIECE_BYTES)
            while piece and len(result) <= size:
                result += piece
                piece = b"" if stream.is_finished() else stream.process(b"", output_buffer_limit=_PIECE_BYTES)
        except brotli.error as error:
            raise _damaged(self, size) from error
        return _whole(self, bytes(result), size, stream.is_finished())


def _lzma_filters(size: int, **settings: int) -> list[dict[str, Any]]:
    dictionary = min(max(size, 4096), _DICTIONARY_BYTES)
    return [{"id": lzma.FILTER_LZMA2, "dict_size": dictionary, **settings}]


def _decompressed(codec: Codec, stream: Any, data: bytes, size: int) -> bytes:
    try:
        result = stream.decompress(data, size + 1)  # one byte more reveals a stream that is too long
    except (zlib.error, lzma.LZMAError) as error:
        raise _damaged(codec, size) from error
    return _whole(codec, result, size, stream.eof and not stream.unused_data)


def _whole(codec: Codec, result: bytes, size: int, finished: bool) -> bytes:
    if len(result) != size or not finished:
        raise _damaged(codec, size)
    return result


def _damaged(codec: Codec, size: int) -> UserError:
    return UserError(f"the bytes are not one whole {type(codec).__name__} stream of {size:,} bytes")
