"""Splits of a text's documents into training and validation, without duplicates, by each document's hash alone."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from caddie.data import corpus
from caddie.data.corpus import Corpus
from caddie.data.documents import UNCUT_BYTES, Source
from caddie.data.manifest import SplitName
from caddie.data.tokenizers import Tokenizer
from caddie.errors import UserError, count
from caddie.runtime.progress import Progress

FORMAT = 1
"""Part of every fingerprint; raise it when the same inputs give another corpus."""


@dataclass(frozen=True)
class Text:
    """A source of documents to prepare with these settings; documents with the same `identity` are duplicates."""

    source: Source
    identity: Callable[[bytes], bytes]
    settings: Sequence[object]

    @cached_property
    def inputs(self) -> str:
        """Hexadecimal SHA-256 of text and settings: equal for equal corpora."""
        former = None  # in place of a former limit, so that old corpora still match
        parts = [FORMAT, self.source.fingerprint(), former, *self.settings]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def survey(self, progress: Progress) -> tuple[dict[bytes, int], int]:
        """Return the bytes of each document by its hash, and the number of duplicates."""
        progress.note(f"reading {self.source.description}")
        skipped: list[Path] = []
        sizes: dict[bytes, int] = {}
        number = 0
        for document in self.source.documents(skipped, progress):
            sizes[self.identity(document)] = len(document)
            number += 1
        if not sizes:
            raise UserError(f"{self.source.description}: no documents; give text")
        if skipped:
            first = ", ".join(path.name for path in skipped[:3])
            progress.note(f"skipped, not text: {count(len(skipped), 'file')}, {first}{', …' if skipped[3:] else ''}")
        total, duplicates = sum(sizes.values()), number - len(sizes)
        documents, dropped = count(len(sizes), "document"), count(duplicates, "duplicate")
        progress.note(f"{documents}, {total:,} bytes; {dropped} dropped")
        return sizes, duplicates


@dataclass(frozen=True)
class Plan:
    """The split of every document that is kept, by its hash."""

    text: Text
    splits: dict[bytes, SplitName]
    duplicates: int

    def documents(self) -> Iterator[tuple[SplitName, bytes]]:
        """Yield each planned document once, with its split."""
        left = dict(self.splits)
        for document in self.text.source.documents():
            split = left.pop(self.text.identity(document), None)
            if split is not None:
                yield split, document
        if left:
            raise UserError(f"{self.text.source.description}: changed while it was read; prepare it again")

    def sample(self, fraction: float) -> list[bytes]:
        """Return about this fraction of the training documents, at most all, spread evenly over them."""
        chosen, credit = [], 1.0
        for split, document in self.documents():
            if split == "train":
                if credit >= 1.0:
                    chosen.append(document)
                    credit -= 1.0
                credit += fraction
        return chosen


@dataclass
class FirstHeldOut:
    """A split by order, read once: the first `held_out` documents of a text are for validation, all others to train on.

    It keeps the hashes of the documents read so far, and no text.
    """

    text: Text
    held_out: int
    duplicates: int = 0
    """Documents dropped so far because the same bytes came before."""

    def documents(self) -> Iterator[tuple[SplitName, bytes]]:
        """Yield each document once, with its split; `UserError` unless the text has more than `held_out` documents."""
        seen: set[bytes] = set()
        self.duplicates = number = 0
        for number, document in enumerate(self.text.source.documents(), 1):
            if (key := self.text.identity(document)) in seen:
                self.duplicates += 1
            else:
                seen.add(key)
                yield "validation" if number <= self.held_out else "train", document
        if number <= self.held_out:
            held_out = f"and the first {self.held_out:,} are held out"
            found = f"{self.text.source.description} has {count(number, 'document')}"
            raise UserError(f"{found}, {held_out}; fetch it again")

    def sample(self, size: int) -> list[bytes]:
        """Return the first training documents, about `size` bytes of them."""
        chosen: list[bytes] = []
        for split, document in self.documents():
            if split == "train":
                chosen.append(document)
                size -= len(document)
                if size <= 0:
                    break
        return chosen


def identity(tokenizer: Tokenizer, against: Corpus) -> Callable[[bytes], bytes]:
    """Return the hash that identifies documents: of bytes, or of ids if the other corpus has no text."""
    if against.manifest.hashed == "documents":
        return corpus.document_hash
    if against.manifest.tokenizer.sha256 != tokenizer.sha256:
        raise UserError(f"the corpus in {against.folder} can be compared only under its own tokenizer")
    bos = np.array([tokenizer.bos], "<u2").tobytes()
    return lambda document: corpus.document_hash(bos + tokenizer.encode(document).astype("<u2").tobytes())


def divide(sizes: dict[bytes, int], fraction: float, source: Source, duplicates: int) -> dict[bytes, SplitName]:
    """Hold out the documents with hashes below the fraction; always the lowest and never the highest.

    `sizes` maps document hashes to bytes. Raises `UserError` for fewer than two documents.
    """
    if len(sizes) < 2:
        again = f" (duplicates dropped: {duplicates:,})" if duplicates else ""
        raise UserError(
            f"{source.description}: one document{again}, and two or more are needed; give JSON lines (.jsonl), a folder"
            f" of files, or a text of more than {UNCUT_BYTES >> 10} KiB with line ends, at which it is cut"
        )
    lowest, highest = min(sizes), max(sizes)
    bound = int(fraction * (1 << 64)).to_bytes(8, "big")
    return {key: "validation" if key != highest and (key == lowest or key[:8] < bound) else "train" for key in sizes}
