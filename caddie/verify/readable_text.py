"""Can a user's scorer read the held-out text in its sandbox, where Python and all packages can be read?"""

import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from caddie.data.corpus import Corpus
from caddie.data.documents import LIBRARY_SUFFIXES, LIBRARY_TEXT
from caddie.verify.held_out import held_out_documents
from caddie.verify.sandbox import runtime_paths

_LINE_BYTES = 32
"""Shortest line that is looked for; shorter ones stand in many texts."""
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
    missing, total, found = Counter[bytes](), 0, 0
    for document in documents:
        total += len(document)
        for line in document.split(b"\n"):
            missing[line] += len(line) if len(line) >= _LINE_BYTES else 0
    for text in texts:
        found += sum(missing.pop(line) for line in missing.keys() & text.split(b"\n"))
        if found > _MOST_FOUND * total:
            return True
    return False


def _library_texts() -> Iterator[bytes]:
    """Yield the sources and texts of Python's library and of the installed packages."""
    for folder in {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}:
        for path in Path(folder).rglob("*"):
            if path.suffix in LIBRARY_SUFFIXES and path.is_file() and os.access(path, os.R_OK):
                yield path.read_bytes()
