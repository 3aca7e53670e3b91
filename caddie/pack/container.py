"""The file format of artifacts: named sections, each with its own codec, with checksums over every byte.

Layout, integers little-endian::

    bytes   what
        6   the word "caddie"
        2   format version, 1
        4   length of the table as packed here
        4   length of the table itself
        4   CRC-32 of the table itself
        .   the table, packed with Brotli
        .   the sections' stored bytes, one after the other, in the order of the table
       32   SHA-256 of everything before

The table is written by column, which compresses best: the count of sections (4 bytes); their stored lengths, their
raw lengths and the CRC-32s of their raw bytes (4 bytes each); their names, then the names of their codecs, in UTF-8
with a line feed after each.

A file from a stranger is refused or read within limits; nothing in it is executed. Checksums find damage, not
forgery.
"""

import hashlib
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from caddie.config import variants
from caddie.errors import UserError
from caddie.files import reason, regular_bytes, write_file
from caddie.pack.codecs import Brotli, Codec, Stored

MAGIC = b"caddie"
VERSION = 1
FILE_BYTES, RAW_BYTES, TABLE_BYTES, SECTIONS = 1 << 30, 2 << 30, 16 << 20, 65_536
"""Upper limits on a file's size and on the memory that reading it takes."""
_HEADER = struct.Struct("<6sHIII")
_DIGEST_BYTES = 32
_NAME_BYTES = 1024
_TABLE_CODEC = Brotli()
_DAMAGED = "the file is damaged; copy or make it again"


@dataclass(frozen=True)
class Section:
    """Bytes to store under a name, and their codec."""

    name: str
    data: bytes
    codec: Codec = Stored()


@dataclass(frozen=True)
class Entry:
    """One section's row of a file's table."""

    name: str
    codec: str
    stored_bytes: int
    raw_bytes: int


@dataclass(frozen=True)
class Contents:
    """Contents of a file. Its size less the sum of `stored_bytes` is the overhead of the format."""

    sections: dict[str, bytes]
    entries: list[Entry]
    file_bytes: int
    sha256: str = field(compare=False)
    """Hash of the whole file, as it was when the sections were read."""


def pack(sections: Sequence[Section]) -> bytes:
    """Return the bytes of a file with `sections`; the same sections give the same bytes."""
    stored = [section.data if isinstance(section.codec, Stored) else _encoded(section) for section in sections]
    codecs = [type(section.codec).__name__ for section in sections]
    names, lengths = [section.name for section in sections], [len(section.data) for section in sections]
    _check_entries([*map(Entry, names, codecs, map(len, stored), lengths)], RAW_BYTES)
    numbers = [*map(len, stored), *lengths, *(zlib.crc32(section.data) for section in sections)]
    words = "".join(f"{word}\n" for word in [*names, *codecs])
    table = struct.pack(f"<I{len(numbers)}I", len(sections), *numbers) + words.encode()
    _check_limit("table", len(table), TABLE_BYTES)
    packed = _TABLE_CODEC.encode(table)
    header = _HEADER.pack(MAGIC, VERSION, len(packed), len(table), zlib.crc32(table))
    blob = b"".join([header, packed, *stored])
    _check_limit("file", len(blob) + _DIGEST_BYTES, FILE_BYTES)
    return blob + hashlib.sha256(blob).digest()


def unpack(blob: bytes, raw_bytes: int = RAW_BYTES) -> Contents:
    """Return the contents of a file's bytes, at most `raw_bytes` decompressed; `UserError` names the fault."""
    _check_limit("file", len(blob), FILE_BYTES)
    table, position = _read_table(blob)
    entries, checksums = _parse_table(table, raw_bytes)
    _check_length(blob, position + sum(entry.stored_bytes for entry in entries) + _DIGEST_BYTES, exact=True)
    sections = {}
    for entry, checksum in zip(entries, checksums, strict=True):
        end = position + entry.stored_bytes
        sections[entry.name] = _read_section(entry, blob[position:end], checksum)
        position = end
    if hashlib.sha256(memoryview(blob)[:position]).digest() != blob[position:]:
        raise UserError(f"the checksum over the whole file does not match; {_DAMAGED}")
    return Contents(sections, entries, len(blob), hashlib.sha256(blob).hexdigest())


def write(path: str | os.PathLike[str], sections: Sequence[Section]) -> None:
    """Write `sections` to `path`: the whole file or, after a `UserError`, nothing."""
    blob = pack(sections)
    write_file(Path(path), blob)


def read(path: str | os.PathLike[str], most: Callable[[int], int] = lambda size: RAW_BYTES) -> Contents:
    """Return the contents of a file of `size` bytes, at most `most(size)` decompressed; `UserError` names the fault."""
    try:
        size = os.stat(path).st_size
        _check_limit("file", size, FILE_BYTES)
        return unpack(regular_bytes(Path(path)), min(RAW_BYTES, most(size)))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {reason(error)}; name an artifact, as RUN/artifact.caddie") from error


@lru_cache(maxsize=64)
def _encoded(section: Section) -> bytes:
    """Compress a section; cached, because fitting a file to its cap measures the same sections many times."""
    return section.codec.encode(section.data)


def _read_table(blob: bytes) -> tuple[bytes, int]:
    if not blob.startswith(MAGIC):
        raise UserError("this is not a caddie file; name an artifact, as RUN/artifact.caddie")
    _check_length(blob, _HEADER.size + _DIGEST_BYTES)
    _, version, packed_bytes, table_bytes, checksum = _HEADER.unpack_from(blob)
    if version > VERSION:
        raise UserError(f"the file has format version {version}, this caddie reads {VERSION}; upgrade caddie")
    if version != VERSION:
        raise UserError(f"there is no format version {version}; {_DAMAGED}")
    _check_limit("table", table_bytes, TABLE_BYTES)
    end = _HEADER.size + packed_bytes
    _check_length(blob, end + _DIGEST_BYTES)
    try:
        table = _TABLE_CODEC.decode(blob[_HEADER.size : end], table_bytes)
    except UserError as error:
        raise UserError(f"table: {error}; {_DAMAGED}") from error
    if zlib.crc32(table) != checksum:
        raise UserError(f"the checksum of the table does not match; {_DAMAGED}")
    return table, end


def _parse_table(table: bytes, raw_bytes: int) -> tuple[list[Entry], Sequence[int]]:
    count = int.from_bytes(table[:4], "little")
    _check_limit("list of sections", count, SECTIONS, "entries")
    columns = struct.Struct(f"<4x{3 * count}I")
    text = table[columns.size :]
    if len(table) < columns.size or text.count(b"\n") != 2 * count or text[-1:] not in (b"", b"\n"):
        raise UserError(f"the table does not hold what it says; {_DAMAGED}")
    numbers = columns.unpack_from(table)
    try:
        words = text.decode().split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"a name in the table is not UTF-8; {_DAMAGED}") from error
    names, codecs = words[:count], words[count : 2 * count]
    stored, raw, checksums = numbers[:count], numbers[count : 2 * count], numbers[2 * count :]
    entries = [Entry(*row) for row in zip(names, codecs, stored, raw, strict=True)]
    _check_entries(entries, raw_bytes)
    return entries, checksums


def _read_section(entry: Entry, stored: bytes, checksum: int) -> bytes:
    try:
        data = Codec.from_json(entry.codec).decode(stored, entry.raw_bytes)
    except UserError as error:
        raise UserError(f"section {entry.name}: {error}; {_DAMAGED}") from error
    except MemoryError as error:
        raise UserError(f"section {entry.name}: its {entry.raw_bytes:,} bytes do not fit in memory") from error
    if zlib.crc32(data) != checksum:
        raise UserError(f"section {entry.name}: the checksum does not match; {_DAMAGED}")
    return data


def _check_entries(entries: Sequence[Entry], raw_bytes: int) -> None:
    _check_limit("list of sections", len(entries), SECTIONS, "entries")
    _check_limit("raw data", sum(entry.raw_bytes for entry in entries), raw_bytes)
    known = variants(Codec)
    seen: set[str] = set()
    for entry in entries:
        name = entry.name
        if not name or not name.isprintable() or len(name.encode()) > _NAME_BYTES:
            raise UserError(f"{name[:40]!a} cannot name a section; use 1 to {_NAME_BYTES:,} printable bytes of UTF-8")
        if name in seen:
            raise UserError(f"two sections are named {name}")
        if entry.codec not in known:
            raise UserError(f"section {name} needs the codec {entry.codec[:40]!a}; upgrade caddie to read it")
        seen.add(name)


def _check_limit(what: str, size: int, limit: int, unit: str = "bytes") -> None:
    if size > limit:
        raise UserError(f"the {what} is {size:,} {unit} long, over the limit of {limit:,}")


def _check_length(blob: bytes, needed: int, exact: bool = False) -> None:
    if len(blob) < needed:
        raise UserError(f"the file is cut short: {len(blob):,} of at least {needed:,} bytes; copy it again")
    if exact and len(blob) > needed:
        raise UserError(f"{len(blob) - needed:,} bytes follow the end of the file's data; {_DAMAGED}")
