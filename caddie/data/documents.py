"""Documents (non-empty UTF-8 bytes) from text, JSON lines, Parquet, folders, the hub, or Python's library."""

import hashlib
import io
import json
import lzma
import os
import platform
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from caddie.data.hub import HUB, Snapshot, on_hub
from caddie.errors import UserError, first_line
from caddie.files import check_utf8, expanded, file_sha256, reason
from caddie.runtime.progress import SILENT, Progress

LIBRARY = "stdlib"
LIBRARY_TEXT = "the standard library of Python"
"""Beginning of the description of that source."""
LIBRARY_SUFFIXES = (".py", ".txt", ".rst")
# Debian ships neither tests nor a site; the others differ from one build of Python to the next.
LIBRARY_SKIPPED = re.compile(r"site-packages|dist-packages|__pycache__|tests?|idle_test|config-.*|_sysconfigdata.*")
NAME_OF_ROWS = re.compile(r"[^/]+\.(parquet|(jsonl|ndjson)(\.(gz|xz|zst))?)", re.IGNORECASE)
PARQUET, ROWS = ".parquet", 256
CONVERTED = "refs/convert/parquet"
DOWNLOADS = Path("data") / "hub"
"""Folder of files from the hub, below the working directory."""
OWN_FOLDERS = (
    {"manifest.json", "documents.npz"},
    {"tokenizer.bin", "validation.jsonl.zst"},
    {"recipe.json", "log.jsonl"},
)
"""Files that mark the folder of a corpus, of a corpus without manifest, and of a run; such a folder is no text."""
HASHED_BYTES = 1 << 28
"""Most bytes of a source that every command hashes before it begins; this takes about a second."""
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
    column: str | None = None
    """Column of Parquet, or key of JSON lines, that holds the text, in place of "text"."""
    snapshot: Snapshot | None = None
    """Fetches each file of a data set on the hub when it is first read."""

    def documents(
        self, skipped: list[Path] | None = None, progress: Progress = SILENT, *, whole: bool = False
    ) -> Iterator[bytes]:
        """Yield every document in order; files that are not text are added to `skipped`.

        A text file is one document. So is each line of JSON lines (.jsonl, .ndjson), by the key "text", and each row of
        Parquet (.parquet), by the column "text" or the only column of text. A single document of more than 64 KiB is
        `cut`, unless `whole` is set. Files may be compressed (.gz, .xz, .zst). Raises `UserError`, which names file and
        line, for input that cannot be read.
        """
        found = self._texts(skipped, progress)
        first, second = next(found, None), next(found, None)
        if first is not None and second is None and len(first) > UNCUT_BYTES and not whole:
            yield from cut(first)
        else:
            yield from filter(None, (first, second))
            yield from found

    def _texts(self, skipped: list[Path] | None, progress: Progress) -> Iterator[bytes]:
        """Yield the documents, without cutting a single one."""
        names = self._names_on_hub()
        if self.snapshot:
            self.snapshot.check_room(names)
        for number, path in enumerate(self.files):
            if self.snapshot:
                self.snapshot.fetch(names[number], progress, f" ({number + 1} of {len(names)})")
            if _is_rows(path):
                yield from (_parquet if path.suffix.lower() == PARQUET else _json_lines)(path, self.column)
                continue
            text = _text(path)
            if text is None and not self.tolerant:
                shards = "; of shards, name the folder" if path.suffix == ".bin" else ""
                raise UserError(f"{path}: not UTF-8 text; give text, JSON lines (.jsonl) or a folder of them{shards}")
            if text is None and skipped is not None:
                skipped.append(path)
            if text:
                yield text

    def _names_on_hub(self) -> list[str]:
        return [path.relative_to(self.snapshot.folder).as_posix() for path in self.files] if self.snapshot else []

    def fingerprint(self) -> str:
        """Return a hexadecimal SHA-256 of the name and content of every file, so that a copy is the same text.

        Files of more than `HASHED_BYTES` together are identified by path, size and time, files on the hub by commit.
        """
        named = () if self.column is None else (self.column,)
        if self.snapshot:
            return hashlib.sha256(repr((self.snapshot.origin, self._names_on_hub(), *named)).encode()).hexdigest()
        try:
            states = [(path, path.stat()) for path in self.files]
            if sum(state.st_size for _, state in states) <= HASHED_BYTES:
                text = "".join(f"{path.name}\0{file_sha256(path)}\0" for path in self.files)
            else:
                text = "".join(f"{path}\0{state.st_size}\0{state.st_mtime_ns}\0" for path, state in states)
        except OSError as error:
            raise UserError(
                f"{error.filename}: cannot be read ({reason(error)}); save it again or leave it out"
            ) from None
        return hashlib.sha256("\0".join([text, *named]).encode(errors="surrogateescape")).hexdigest()


def find(source: str | Path | None, column: str | None = None) -> Source:
    """Return the source at a path, on the hub for `hf:NAME[:SPLIT]`, or Python's standard library for None or `stdlib`.

    `column` names the column of Parquet, or the key of JSON lines, that holds the text. Raises `UserError` if the
    source is missing or has no files, or if a column is named for neither Parquet nor JSON lines.
    """
    found = _found(source)
    if column is not None and not any(map(_is_rows, found.files)):
        raise UserError(
            f"{found.description}: a column is named, and there is no Parquet and no JSON lines; leave it out"
        )
    return replace(found, column=column)


def _found(source: str | Path | None) -> Source:
    if source is None or str(source) == LIBRARY:
        root = Path(sysconfig.get_path("stdlib"))
        files = tuple(path for path in _walk(root, LIBRARY_SKIPPED) if path.suffix in LIBRARY_SUFFIXES)
        if not files:
            raise UserError(f"{root}: this Python has no library sources; name a text instead")
        return Source(LIBRARY, f"{LIBRARY_TEXT} {platform.python_version()}", files, tolerant=True)
    if str(source).startswith(HUB):
        return _data_set(str(source)[len(HUB) :])
    named = expanded(source)
    path = named.resolve()
    if path.is_file() and (_is_rows(named) or named.suffix.lower() in _UNPACKERS):
        path = named.parent.resolve() / named.name  # the hub's cache links to files named by hash
    check_utf8(path)
    if path.is_dir():
        files = tuple(_walk(path, re.compile(r"\..*")))
        if not files:
            raise UserError(f"{path}: the folder holds no files; give a text file, JSON lines or a folder of them")
        return Source(path.name, str(path), files, tolerant=True)
    if not path.is_file():
        if named.exists():  # the resolved path of a pipe does not exist
            raise UserError(f"{source}: not a regular file; save the text in one")
        raise UserError(
            f"{source}: no such file or folder; give text, JSON lines, Parquet, a folder, {HUB}NAME or {LIBRARY}"
        )
    return Source(path.name.partition(".")[0], str(path), (path,), tolerant=False)


def _data_set(name: str) -> Source:
    """Return the source of a data set on the hub, NAME or NAME:SPLIT, whose files are kept in `DOWNLOADS`.

    A split is the folder of its files or the start of their names; by default it is `train`, or all files if there is
    no `train`. For a data set without files of text, the hub's conversion to Parquet is used.
    """
    repository, _, split = name.partition(":")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", repository):
        raise UserError(f"{HUB}{name}: no data set; name one as {HUB}OWNER/NAME or {HUB}OWNER/NAME:SPLIT")
    folder = DOWNLOADS / repository.replace("/", "--")
    snapshot = on_hub(repository, "main", folder)
    if not any(map(_is_rows, snapshot.sizes)):
        snapshot = on_hub(repository, CONVERTED, folder.with_name(f"{folder.name}--parquet"))
    rows = list(filter(_is_rows, snapshot.sizes))
    wanted = re.compile(rf"(.*/)?{re.escape(split or 'train')}([/._-].*)?")
    files = list(filter(wanted.fullmatch, rows))
    part = split or ("train" if files else "all files")
    files = files or ([] if split else rows)
    files = [path for path in files if path.lower().endswith(PARQUET)] or files
    if not files:
        there = f"its files are {', '.join(rows[:4])}{', …' if len(rows) > 4 else ''}" if rows else "it has no rows"
        raise UserError(f"{repository} has no split {split}: {there}")
    commit = snapshot.origin.commit[:12] if snapshot.origin else ""
    description = f"{repository} at {commit}, {part}"
    paths = tuple(snapshot.folder / path for path in sorted(files))
    return Source(repository.rpartition("/")[2], description, paths, tolerant=False, snapshot=snapshot)


def _is_rows(path: str | Path) -> bool:
    return NAME_OF_ROWS.fullmatch(Path(path).name) is not None


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
    """Yield the files below a folder in order, without corpora and runs; links to folders are followed, once each.

    Raises `UserError` for a folder that cannot be read.
    """
    seen = set(map(str, Path(os.path.realpath(root)).parents))  # a link may lead up

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read ({reason(error)})")

    for folder, folders, files in os.walk(root, onerror=refuse, followlinks=True):
        if (place := os.path.realpath(folder)) in seen:
            folders.clear()
            continue
        seen.add(place)
        if Path(folder) != root and any(names <= {*files} for names in OWN_FOLDERS):  # as below `--data .`
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not skipped.fullmatch(name))
        for name in sorted(files):
            path = Path(folder, name)
            if not skipped.fullmatch(name) and path.is_file():
                yield path


_UNPACKERS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(wbits=31),
    ".xz": lzma.LZMADecompressor,
    ".zst": lambda: zstandard.ZstdDecompressor().decompressobj(),
}
"""Suffix to the maker of a decompressor for one part of a file; a file may have several parts."""


def _open(path: Path) -> BinaryIO:
    unpacker = _UNPACKERS.get(path.suffix.lower())
    return path.open("rb") if unpacker is None else io.BufferedReader(_Unpacked(path.open("rb"), unpacker))


class _Unpacked(io.RawIOBase):
    """Reads a compressed file of one part or several.

    A truncated file is an error here, unlike in zstandard's reader. So are bytes after a part that begin no other one,
    where lzma's reader silently drops the rest of the file. Zeros between parts are padding.
    """

    def __init__(self, file: BinaryIO, unpacker: Callable[[], Any]) -> None:
        self.file, self.unpacker, self.pieces, self.ready = file, unpacker, self._pieces(), memoryview(b"")

    def _pieces(self) -> Iterator[bytes]:
        part = self.unpacker()
        while coded := self.file.read(1 << 12):  # which may unpack to 32,768 times as much
            while coded := coded if part else coded.lstrip(b"\0"):
                part = part or self.unpacker()
                yield part.decompress(coded)
                coded, part = (part.unused_data, None) if part.eof else (b"", part)
        if part:
            raise EOFError("the file ends in the middle" if self.file.tell() else "the file is empty")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.ready = self.ready or memoryview(next(filter(None, self.pieces), b""))
        count = min(len(buffer), len(self.ready))
        buffer[:count], self.ready = self.ready[:count], self.ready[count:]
        return count

    def close(self) -> None:
        self.file.close()
        super().close()


LONGEST_LINE = 1 << 28
"""Most bytes of a line of JSON."""
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


def _parquet(path: Path, named: str | None) -> Iterator[bytes]:
    """Yield the texts of the column `named` of a Parquet file, else of "text" or the only one, some rows at a time."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"{path}: reading Parquet needs pyarrow; run: pip install pyarrow") from None
    try:
        with parquet.ParquetFile(path) as file:
            kinds = {field.name: field.type for field in file.schema_arrow}
            texts = [name for name, kind in kinds.items() if str(kind) in ("string", "large_string", "string_view")]
            column = named or (texts[0] if len(texts) == 1 and "text" not in kinds else "text")
            if column not in texts:
                found, single = ", ".join(texts) or "none", "" if named else ", and not a single one"
                lacks = f'no column "{column}" of text{single}'
                lacks = f'the column "{column}" is no text' if column in kinds else lacks
                raise UserError(f"{path}: {lacks}; of text are: {found} (data --column NAME)")
            for batch in file.iter_batches(ROWS, columns=[column]):
                values = batch.column(batch.schema.names.index(column))  # `a.b` may bring a part of a column `a` too
                yield from (text.encode() for text in values.to_pylist() if text)
    except (pyarrow.ArrowException, OSError, UnicodeError) as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)}); save it again or leave it out") from None


def _json_lines(path: Path, named: str | None) -> Iterator[bytes]:
    number, key = 0, named or "text"
    try:
        with _open(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), 1):
                if len(line) > LONGEST_LINE:
                    raise UserError(f"{path}:{number}: a line of more than {LONGEST_LINE:,} bytes; cut its text")
                if line.strip() and (text := _json_text(line, key, f"{path}:{number}")):
                    yield text
    except UNREADABLE as error:
        raise UserError(f"{path}:{number + 1}: cannot be read ({error}); save it again or leave it out") from None


def _json_text(line: bytes, key: str, where: str) -> bytes:
    try:
        value = json.loads(line)
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: byte {error.start + 1} is not UTF-8; save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:
        what = f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else error
        raise UserError(f'{where}: not JSON ({what}); each line must be an object with the key "{key}"') from None
    text = value.get(key) if isinstance(value, dict) else None
    if not isinstance(text, str):
        other = ", or name another by caddie data --column" if key == "text" else ""
        raise UserError(f'{where}: no text; each line must be an object with the key "{key}"{other}')
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: half a surrogate pair at character {error.start} cannot be written as UTF-8"
        ) from None
