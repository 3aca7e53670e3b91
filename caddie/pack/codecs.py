"""General-purpose compressors of bytes, safe to run on a file from a stranger.

`decode` needs the length of the original and none of a codec's settings: a codec with its defaults reads a stream of
any level. Streams have no header, checksum or magic number, for the container has them already.
"""

import lzma
import zlib
from abc import abstractmethod
from contextlib import suppress
from typing import Annotated, Any

import brotli
import zstandard

from caddie.config import Config, Range, known
from caddie.errors import UserError

_DICTIONARY_BYTES = 64 << 20  # largest dictionary of Lzma, that of its highest preset
_ZSTD_RATIO = 1 << 15  # highest ratio of Zstd: a block of 128 KiB in four bytes
_PIECE_BYTES = 1 << 16  # bytes of Brotli's output at a time: its decoder overshoots a limit in proportion
_RAW_DEFLATE = -15
_MAGICLESS = zstandard.FORMAT_ZSTD1_MAGICLESS


class Codec(Config):
    """A lossless compressor of bytes. Every setting has a default and matters to `encode` only."""

    @abstractmethod
    def encode(self, data: bytes) -> bytes:
        """Return `data` compressed; the same bytes each time."""

    def decode(self, data: bytes, size: int) -> bytes:
        """Return the original of `size` bytes, in memory proportional to it; `UserError` for any other stream."""
        result = None
        with suppress(zlib.error, lzma.LZMAError, zstandard.ZstdError, brotli.error):
            result = self._decode(data, size)
        if result is None or len(result) != size:
            raise UserError(f"the bytes are not one whole {type(self).__name__} stream of {size:,} bytes")
        return result

    @abstractmethod
    def _decode(self, data: bytes, size: int) -> bytes | None:
        """Return the original, or of a longer one at least a byte more than `size`; None for what is not one stream."""


class Stored(Codec):
    """The bytes as they are, for data that is compressed already."""

    def encode(self, data: bytes) -> bytes:
        """Return `data`."""
        return data

    def _decode(self, data: bytes, size: int) -> bytes | None:
        return data


class Zlib(Codec):
    """Raw deflate (RFC 1951): quick, with the least overhead on a few bytes."""

    techniques = known(
        "Part of every Python; for int8 weights it was better than lzma.",
        "openai/parameter-golf, the baseline; public system 003",
        "lzma for zlib: a larger file (public system 003)",
    )

    level: Annotated[int, Range(0, 9)] = 9
    """Effort, from 0 (none) to 9."""

    def encode(self, data: bytes) -> bytes:
        """Return `data` deflated."""
        return zlib.compress(data, self.level, wbits=_RAW_DEFLATE)

    def _decode(self, data: bytes, size: int) -> bytes | None:
        return _decompressed(zlib.decompressobj(wbits=_RAW_DEFLATE), data, size)


class Lzma(Codec):
    """Raw LZMA2, the coder inside xz: it stores incompressible data, which LZMA1 would grow by 1.4 %."""

    techniques = known(
        "Quantized weights of 6 bits in bytes, to 99.7 % of their empirical entropy.",
        "openai/parameter-golf #609, 2026-03-23_LeakyReLU_LegalTTT_ParallelMuon (#549)",
    )

    preset: Annotated[int, Range(0, 9)] = 9
    """Effort, from 0 to 9."""
    extreme: bool = True
    """Search harder at the same preset; decoding is as quick."""

    def encode(self, data: bytes) -> bytes:
        """Return `data` compressed."""
        effort = self.preset | (lzma.PRESET_EXTREME if self.extreme else 0)
        return lzma.compress(data, lzma.FORMAT_RAW, filters=_lzma_filters(len(data), preset=effort))

    def _decode(self, data: bytes, size: int) -> bytes | None:
        return _decompressed(lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=_lzma_filters(size)), data, size)


class Zstd(Codec):
    """Zstandard (RFC 8878), its frames without the magic number."""

    techniques = known(
        "Smaller than zlib for weights of 6 bits that lie in bytes.",
        "openai/parameter-golf, the five-bit record and public system 002",
    )

    level: Annotated[int, Range(1, 22)] = 22
    """Effort, from 1 to 22."""

    def encode(self, data: bytes) -> bytes:
        """Return `data` compressed; no bytes stay no bytes."""
        if not data:
            return b""
        settings = {"source_size": len(data), "format": _MAGICLESS}
        parameters = zstandard.ZstdCompressionParameters.from_level(self.level, **settings)
        return zstandard.ZstdCompressor(compression_params=parameters).compress(data)

    def _decode(self, data: bytes, size: int) -> bytes | None:
        if not size:  # the library reads no further than the header of an empty frame
            return data
        # The decoder allocates the size that the frame claims and no window, so the claim is checked first.
        claim = zstandard.get_frame_parameters(data, format=_MAGICLESS).content_size
        if claim != size or claim > len(data) * _ZSTD_RATIO:
            return None
        return zstandard.ZstdDecompressor(format=_MAGICLESS).decompress(data, allow_extra_data=False)


class Brotli(Codec):
    """Brotli (RFC 7932), the best on short text."""

    techniques = known(
        "The last byte codec of the records, behind the shuffle of bytes by `Packed`.",
        "openai/parameter-golf #1218, 2026-04-01_Vocab4096_MLPMult4_WD085",
        "5.9 % smaller than lzma on the weights of one fork",
    )

    quality: Annotated[int, Range(0, 11)] = 11
    """Effort, from 0 to 11."""

    def encode(self, data: bytes) -> bytes:
        """Return `data` compressed."""
        return bytes(brotli.compress(data, quality=self.quality, lgwin=24))

    def _decode(self, data: bytes, size: int) -> bytes | None:
        stream, result = brotli.Decompressor(), bytearray()
        piece = stream.process(data, output_buffer_limit=_PIECE_BYTES)
        while piece and len(result) <= size:
            result += piece
            piece = b"" if stream.is_finished() else stream.process(b"", output_buffer_limit=_PIECE_BYTES)
        return bytes(result) if stream.is_finished() else None


def _lzma_filters(size: int, **settings: int) -> list[dict[str, Any]]:
    dictionary = min(max(size, 4096), _DICTIONARY_BYTES)
    return [{"id": lzma.FILTER_LZMA2, "dict_size": dictionary, **settings}]


def _decompressed(stream: Any, data: bytes, size: int) -> bytes | None:
    result: bytes = stream.decompress(data, size + 1)  # one byte more tells a longer stream from a whole one
    return result if stream.eof and not stream.unused_data else None
