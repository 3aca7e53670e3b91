"""Compressors that know training text, on the demo's held-out text: bits per byte by the bytes of what they know.

    python bench/compressors.py [--data TEXT] [--caps BYTES ...] [--only NAME ...] [--json FILE]

caddie's file holds a model of the training text. So a compressor may hold the beginning of that text: as much of it as
it packs into the cap, its dictionary. The held-out text costs what it lengthens the dictionary's own file by, which is
what a decoder that has unpacked the dictionary must be sent. With a cap of 0 nothing is known. PPMd needs
`pip install pyppmd`. Times are CPU seconds of one thread: of packing the dictionary, and of that and the text together.
"""

import argparse
import json
import lzma
import os
import platform
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import brotli
import zstandard

from caddie.cli.exits import end
from caddie.data.corpus import document_hash
from caddie.data.documents import find
from caddie.data.splits import divide
from caddie.doctor.host import processor
from caddie.errors import UserError
from caddie.files import write_file

CAPS = (0, 300_000, 1_000_000)
"""Bytes for what is known of the training text."""
WINDOW_BITS = 24
"""Logarithm of the bytes that LZMA and zstd look back, all of the demo's text; Brotli can no further."""
FITTED = 0.98
"""Least part of a cap that a dictionary fills, where there is text enough."""


def xz(data: bytes) -> int:
    """Return the bytes of xz at its strongest."""
    strongest = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << WINDOW_BITS}
    return len(lzma.compress(data, filters=[strongest]))


def zstd(data: bytes) -> int:
    """Return the bytes of zstd at its strongest."""
    strongest = zstandard.ZstdCompressionParameters.from_level(
        22, source_size=len(data), window_log=WINDOW_BITS, enable_ldm=True
    )
    return len(zstandard.ZstdCompressor(compression_params=strongest).compress(data))


def brotli_11(data: bytes) -> int:
    """Return the bytes of Brotli at its strongest."""
    return len(brotli.compress(data, quality=11, lgwin=WINDOW_BITS))


def ppmd(data: bytes, order: int = 16) -> int:
    """Return the bytes of PPMd, variant H, with contexts of up to `order` bytes and memory enough for all of them."""
    try:
        import pyppmd
    except ImportError:
        raise UserError("PPMd needs another package: pip install pyppmd") from None
    encoder = pyppmd.Ppmd7Encoder(order, 1 << 30)
    return len(encoder.encode(data)) + len(encoder.flush())


COMPRESSORS: Mapping[str, Callable[[bytes], int]] = {
    "xz -9e": xz,
    "zstd -22": zstd,
    "brotli -11": brotli_11,
    "PPMd, order 16": ppmd,
}


def split(source: str, fraction: float = 0.05) -> tuple[bytes, bytes]:
    """Return the training and the held-out text, split as `caddie` splits it; training documents in a random order."""
    found = find(source)
    documents = {document_hash(document): document for document in found.documents()}
    splits = divide({name: len(document) for name, document in documents.items()}, fraction, found, 0)
    train = [document for name, document in documents.items() if splits[name] == "train"]
    random.Random(0).shuffle(train)
    return b"".join(train), b"".join(one for name, one in documents.items() if splits[name] != "train")


def dictionary(compress: Callable[[bytes], int], text: bytes, cap: int) -> tuple[int, int]:
    """Return the bytes of `text`, from its beginning on, that pack into `cap`, and the bytes that they are packed into.

    All of the text where it fits, else at least `FITTED` of the cap is filled, or as near to it as ten tries come.
    """
    if cap == 0:
        return 0, 0
    best, taken = (0, 0), min(len(text), 4 * cap)
    for _ in range(10):
        size = compress(text[:taken])
        if best[1] < size <= cap:
            best = taken, size
        if size <= cap and (size >= FITTED * cap or taken == len(text)):
            break
        taken = min(len(text), int(taken * 0.99 * cap / size))
    return best


def row(name: str, train: bytes, held_out: bytes, cap: int) -> dict[str, Any]:
    """Measure a compressor with a dictionary of at most `cap` bytes."""
    compress, begin = COMPRESSORS[name], time.process_time()
    known, packed = dictionary(compress, train, cap)
    between = time.process_time()
    both = compress(train[:known] + held_out)
    return {
        "name": name,
        "cap_bytes": cap,
        "known_bytes": known,
        "file_bytes": packed,
        "held_out_bytes": len(held_out),
        "bits_per_byte": 8 * (both - packed) / len(held_out),
        "cpu_seconds": [round(between - begin, 1), round(time.process_time() - between, 1)],
        "threads": 1,
        "load": round(os.getloadavg()[0], 1),
        "machine": processor().name,
        "python": platform.python_version(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, and write the rows as JSON lines if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="stdlib", metavar="TEXT", help="stdlib, the demo's, unless named")
    parser.add_argument("--caps", type=int, nargs="+", default=CAPS, metavar="BYTES")
    parser.add_argument("--only", nargs="+", choices=COMPRESSORS, default=list(COMPRESSORS), metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="JSON lines to write")
    given = parser.parse_args(arguments)
    if min(given.caps) < 0:
        parser.error("--caps: bytes are at least 0")
    train, held_out = split(given.data)
    rows = []
    for cap in given.caps:
        for name in given.only:
            rows.append(row(name, train, held_out, cap))
            cells = [name, f"{cap:,}", f"{rows[-1]['known_bytes']:,}", f"{rows[-1]['bits_per_byte']:.4f}"]
            print(*cells, sep="\t", flush=True)
    if given.json:
        write_file(given.json, "".join(json.dumps(one) + "\n" for one in rows).encode())


if __name__ == "__main__":
    end(main)
