"""Test if a user's scorer can read the held-out text in its sandbox, which shows Python and all packages."""

import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from caddie.data.corpus import Corpus
from caddie.data.documents import LIBRARY_SUFFIXES, LIBRARY_TEXT
from caddie.verify.held_out import held_out_documents
from caddie.verify.sandbox import runtime_paths

_LEAST_BYTES = 32
"""Shortest piece of text that is looked for; shorter ones stand in many texts."""
_MOST_FOUND = 0.001
"""Share of the text that may stand in readable files; knowing it lowers the score by that share at most."""


def is_readable(corpus: Corpus) -> bool:
    """Return True if the sandbox holds a corpus, the file that it was made of, or lines of its held-out text."""
    readable = [Path(os.path.realpath(path)) for path in runtime_paths()]
    source, held_out = corpus.manifest.source, corpus.manifest.validation
    files = [corpus.folder / shard.file for shard in (*held_out.shards, *held_out.byte_counts)]
    places = [*files, corpus.folder, *([Path(source)] if os.path.isabs(source) else [])]
    real = [Path(os.path.realpath(place)) for place in places]
    held = any(place.is_relative_to(path) for place in real for path in readable)
    if held or source.startswith(LIBRARY_TEXT):  # a tokenizer that loses line ends leaves no lines to find
        return True
    return _stands_in(held_out_documents(corpus), _library_texts())


def _stands_in(documents: Iterable[bytes], texts: Iterable[bytes]) -> bool:
    """Return True if the texts hold lines of the documents that are more than `_MOST_FOUND` of all bytes."""
    missing, total, found, firsts = Counter[bytes](), 0, 0, set[bytes]()
    for document in documents:
        total += len(document)
        lines = document.split(b"\n")
        for at, line in enumerate(lines):
            if line and len(piece := _piece(lines, at)) >= _LEAST_BYTES:
                missing[piece] += len(line)
                firsts |= {line} if piece != line else set()
    for text in texts:
        lines = text.split(b"\n")
        joined = [_piece(lines, at) for at, line in enumerate(lines) if line in firsts] if firsts else []
        found += sum(missing.pop(piece) for piece in missing.keys() & chain(lines, joined))
        if found > _MOST_FOUND * total:
            return True
    return False


def _piece(lines: Sequence[bytes], at: int) -> bytes:
    """Return a line, and as many after it as `_LEAST_BYTES` take."""
    piece = lines[at]
    while len(piece) < _LEAST_BYTES and (at := at + 1) < len(lines):
        piece += b"\n" + lines[at]
    return piece


def _library_texts() -> Iterator[bytes]:
    """Yield the sources and texts of Python's library and of the installed packages."""
    for folder in {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}:
        for path in Path(folder).rglob("*"):
            if path.suffix in LIBRARY_SUFFIXES and path.is_file() and os.access(path, os.R_OK):
                yield path.read_bytes()
