"""Token shards in the contest's binary format: a header of 1,024 bytes, then ids as little-endian uint16."""

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from caddie.errors import UserError
from caddie.files import open_regular, replacing

Tokens = npt.NDArray[np.uint16]

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 1024


def write_shard(path: Path, tokens: Tokens) -> None:
    """Write a shard; the file appears complete or not at all."""
    assert tokens.dtype == np.dtype(np.uint16)
    assert 0 < len(tokens) < 1 << 31
    header = np.zeros(HEADER_BYTES // 4, "<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(header.tobytes())
        file.write(tokens.astype("<u2", copy=False).tobytes())


def open_shard(path: Path) -> Tokens:
    """Return the tokens of a shard, memory-mapped and read-only; `UserError` if the file is not a complete shard."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            header = file.read(HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise UserError(f"{path}: cannot read the shard ({error.strerror}); prepare or copy the data again") from None
    if len(header) < HEADER_BYTES:
        raise UserError(f"{path}: not a token shard; it has {len(header)} bytes and the header alone has 1,024")
    magic, version, count = np.frombuffer(header, "<i4", 3).tolist()
    if magic != MAGIC:
        raise UserError(f"{path}: not a token shard; it begins with {magic}, a shard with {MAGIC}")
    if version != VERSION:
        raise UserError(f"{path}: shard version {version}; this program reads version {VERSION}")
    if count < 1:
        raise UserError(f"{path}: the shard holds no tokens; prepare the data again")
    if size != (expected := HEADER_BYTES + 2 * count):
        raise UserError(f"{path}: {size:,} bytes, but its {count:,} tokens need {expected:,}; copy it again")
    return np.memmap(path, "<u2", "r", HEADER_BYTES, (count,)).view(np.ndarray)  # slices of memmap are slow


def read(shard: Tokens, begin: int, end: int) -> Tokens:
    """Return tokens `begin` to `end` of a shard; `UserError` if its file was cut short since it was opened.

    Without this check, reading a lost page would end the process by SIGBUS, without a message.
    """
    mapped: Any = shard
    while mapped is not None and not isinstance(mapped, np.memmap):  # a slice's base is the opened shard
        mapped = mapped.base
    if mapped is not None:
        whole = mapped.offset + mapped.nbytes
        if (size := mapped._mmap.size()) < whole:  # type: ignore[attr-defined]
            raise UserError(f"{mapped.filename} was cut short while it was in use, to {size:,} of {whole:,} bytes")
    return shard[begin:end]


def split_documents(shards: Sequence[Tokens], bos: int) -> Iterator[Tokens]:
    """Yield the documents of a token stream: each begins with `bos`, and may end in a later shard than it began in."""
    unfinished = np.empty(0, np.uint16)
    for mapped in shards:
        shard = read(mapped, 0, len(mapped))
        cuts = [*np.flatnonzero(shard == bos).tolist(), len(shard)]
        unfinished = np.concatenate([unfinished, shard[: cuts[0]]])
        for begin, end in pairwise(cuts):
            if len(unfinished):
                yield unfinished
            unfinished = shard[begin:end]
    if len(unfinished):
        yield unfinished
