"""Documents, non-empty runs of UTF-8 bytes, from a text file, JSON lines, a folder of both, or Python's library."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import os
import platform
import re
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import zstandard

from caddie.errors import UserError

LIBRARY = "stdlib"
LIBRARY_SUFFIXES = (".py", ".txt", ".rst")
# Debian ships neither tests nor a site; the others differ from one build of Python to the next.
LIBRARY_SKIPPED = re.compile(r"site-packages|dist-packages|__pycache__|tests?|idle_test|config-.*|_sysconfigdata.*")
LINES = (".jsonl", ".ndjson")
COMPRESSED = (".gz", ".xz", ".zst")
UNCUT_BYTES = 1 << 16
PIECE_BYTES = 1 << 14
BLANK_LINE, LINE_END = re.compile(rb"\n[ \t\r]*\n"), re.compile(rb"\n")


@dataclass(frozen=True)
class Source:
    """The files of a text, with its name and description."""

    name: str
    description: str
    files: tuple[Path, ...]
    tolerant: bool
    """True if files that are not text are skipped, as in a folder; else they are an error."""

    def documents(self, skipped: list[Path] | None = None) -> Iterator[bytes]:
        """Yield every document in order; files that are not text are added to `skipped`.

        A file is one document, and so is each line of JSON lines (.jsonl, .ndjson), under the key "text". A document of
        more than 64 KiB that has none beside it is `cut`. Files may be compressed (.gz, .xz, .zst). Raises `UserError`,
        which names file and line, for what cannot be read.
        """
        found = self._texts(skipped)
        first, second = next(found, None), next(found, None)
        if first is not None and second is None and len(first) > UNCUT_BYTES:
            yield from cut(first)
        else:
            yield from filter(None, (first, second))
            yield from found

    def _texts(self, skipped: list[Path] | None) -> Iterator[bytes]:
        """Yield the documents before a lone one is cut."""
        for path in self.files:
            if (Path(path.stem) if path.suffix in COMPRESSED else path).suffix in LINES:
                yield from _json_lines(path)
                continue
            text = _text(path)
            if text is None and not self.tolerant:
                shards = "; of shards, name the folder" if path.suffix == ".bin" else ""
                raise UserError(f"{path}: not UTF-8 text; give text, JSON lines (.jsonl) or a folder of them{shards}")
            if text is None and skipped is not None:
                skipped.append(path)
            if text:
                yield text

    def fingerprint(self) -> str:
        """Return a hexadecimal SHA-256 of the path, size and time of every file."""
        states = ((path, path.stat()) for path in self.files)
        text = "".join(f"{path}\0{state.st_size}\0{state.st_mtime_ns}\0" for path, state in states)
        return hashlib.sha256(text.encode()).hexdigest()


def find(source: str | Path | None) -> Source:
    """Return the source at a path, or Python's standard library for None or `stdlib`; `UserError` if it is missing."""
    if source is None or str(source) == LIBRARY:
        root = Path(sysconfig.get_path("stdlib"))
        files = tuple(path for path in _walk(root, LIBRARY_SKIPPED) if path.suffix in LIBRARY_SUFFIXES)
        if not files:
            raise UserError(f"{root}: this Python has no library sources; name a text instead")
        return Source(LIBRARY, f"the standard library of Python {platform.python_version()}", files, tolerant=True)
    path = Path(source).expanduser().resolve()
    if path.is_dir():
        files = tuple(_walk(path, re.compile(r"\..*")))
        if not files:
            raise UserError(f"{path}: the folder holds no files; give a text file, JSON lines or a folder of them")
        return Source(path.name, str(path), files, tolerant=True)
    if not path.is_file():
        if Path(source).expanduser().exists():  # a pipe's resolved path does not
            raise UserError(f"{source}: not a regular file; save the text in one")
        raise UserError(f"{source}: no such file or folder; give a text file, JSON lines, a folder, or {LIBRARY}")
    return Source(path.name.partition(".")[0], str(path), (path,), tolerant=False)


def cut(text: bytes) -> Iterator[bytes]:
    """Yield pieces of 16 KiB or somewhat more that end at a blank line or, if none is near, at the end of a line."""
    begin = 0
    while len(text) - begin > PIECE_BYTES:
        least = begin + PIECE_BYTES
        found = BLANK_LINE.search(text, least, begin + UNCUT_BYTES) or LINE_END.search(text, least)
        if found is None:
            break
        yield text[begin : found.end()]
        begin = found.end()
    if begin < len(text):
        yield text[begin:]


def _walk(root: Path, skipped: re.Pattern[str]) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not skipped.fullmatch(name))
        for name in sorted(files):
            path = Path(folder, name)
            if not skipped.fullmatch(name) and path.is_file():
                yield path


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".zst":
        return io.BufferedReader(_ZstdReader(path.open("rb")))
    openers: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
    return cast(BinaryIO, openers.get(path.suffix, open)(path, "rb"))


class _ZstdReader(io.RawIOBase):
    """Reads a .zst file; unlike zstandard's own reader, it raises `EOFError` for a truncated one."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.pieces, self.ready = file, self._pieces(), b""

    def _pieces(self) -> Iterator[bytes]:
        frame = None
        while coded := self.file.read(1 << 16):
            while coded:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(coded)
                coded, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
        if frame:
            raise EOFError("the file ends in the middle")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.ready = self.ready or next(filter(None, self.pieces), b"")
        count = min(len(buffer), len(self.ready))
        buffer[:count], self.ready = self.ready[:count], self.ready[count:]
        return count

    def close(self) -> None:
        self.file.close()
        super().close()


UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error, zstandard.ZstdError)


def _text(path: Path) -> bytes | None:
    """Return the content of a file, or None if it is not UTF-8 text."""
    try:
        with _open(path) as file:
            text = file.read(8192)
            if b"\0" in text:
                return None
            text += file.read()
        text.decode()
    except UnicodeDecodeError:
        return None
    except UNREADABLE as error:
        raise UserError(f"{path}: cannot be read ({error}); save it again or leave it out") from None
    return None if b"\0" in text else text


def _json_lines(path: Path) -> Iterator[bytes]:
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip() and (text := _json_text(line, f"{path}:{number}")):
                    yield text
    except UNREADABLE as error:
        raise UserError(f"{path}:{number + 1}: cannot be read ({error}); save it again or leave it out") from None


def _json_text(line: bytes, where: str) -> bytes:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f'{where}: not JSON ({error}); each line must be an object with the key "text"') from None
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise UserError(f'{where}: no text; each line must be an object with the key "text"')
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: half a surrogate pair at character {error.start} cannot be written as UTF-8"
        ) from None
