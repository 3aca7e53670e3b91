"""A corpus folder: token shards, their tokenizer and, written last, a manifest."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from caddie.data import documents as sources
from caddie.data.manifest import MANIFEST, TOKENIZER, HashKind, Manifest, Shard, Split, SplitName, read_manifest
from caddie.data.shards import Tokens, open_shard, read, split_documents
from caddie.data.tokenizers import Tokenizer, deserialize
from caddie.data.tokenizers.tokenizer import byte_ids
from caddie.errors import UserError
from caddie.files import expanded, file_sha256, open_regular, reason, regular_bytes, write_file
from caddie.runtime.progress import Progress

DOCUMENTS = "documents.npz"
VALIDATION_TEXT = "validation.jsonl.zst"
HASH_BYTES = 16
FileState = tuple[str, int, int]
Existing = Literal["replace", "keep", "refuse"]
"""Treatment of another text's corpus in the folder: written over, kept (the new one goes beside it), or an error."""
_MOST_STATED = 1.0005
"""Most bytes that side-cars may state per byte that the tokens decode to; the contest's tokenizers need 1.0003."""
TOKEN_BYTES = 4096
"""Most bytes of held-out text per token, on average."""
_DRAWN = 256
"""Number of random held-out documents whose hash of the other kind is looked up in the training documents' hashes."""


class Corpus:
    """A prepared corpus. Scoring needs neither the training shards nor their documents."""

    _counted: ClassVar[set[str]] = set()  # fingerprints of corpora whose held-out text this process has counted

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._hashed: dict[Shard, FileState] = {}
        """States of the shards that `check_shards` has read."""

    @classmethod
    def load(cls, folder: Path) -> Corpus:
        """Return the corpus in a folder; `UserError` if it holds none that can be read."""
        return cls(folder, read_manifest(folder))

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer; `UserError` if it is not the one of the manifest."""
        entry, path = self.manifest.tokenizer, self.folder / self.manifest.tokenizer.file
        try:
            data = regular_bytes(path)
        except OSError as error:
            raise UserError(f"{path}: cannot read the tokenizer ({reason(error)}); prepare the data again") from None
        tokenizer = deserialize(entry.kind, data)
        if (tokenizer.sha256, tokenizer.bos, tokenizer.vocabulary) != (entry.sha256, entry.bos, entry.vocabulary):
            raise UserError(f"{path}: not the tokenizer of the manifest; prepare the data again")
        return tokenizer

    def train_shards(self) -> list[Tokens]:
        """Return the training shards, memory-mapped; `UserError` if there are none."""
        if not self.manifest.train.shards:
            raise UserError(f"the corpus in {self.folder} is for validation only; name one to train on")
        return [self.open(shard) for shard in self.manifest.train.shards]

    def validation_tokens(self) -> Tokens:
        """Return the validation tokens, (n,), read into memory."""
        return self._joined(self.manifest.validation.shards)

    def _joined(self, shards: Sequence[Shard]) -> Tokens:
        opened = [self.open(shard) for shard in shards]
        return np.concatenate([np.empty(0, np.uint16), *(read(shard, 0, len(shard)) for shard in opened)])

    def validation_documents(self) -> list[bytes]:
        """Return the bytes of the validation documents; `UserError` without text, or if the file has changed."""
        if self.manifest.byte_source != "documents":
            raise UserError(f"the corpus in {self.folder} was made from token shards and has no text")
        split, path, documents = self.manifest.validation, self.folder / VALIDATION_TEXT, list[bytes]()
        if not path.is_file():
            raise UserError(f"{path}: the held-out text is missing; copy the corpus again, or prepare it again")
        left = min(split.source_bytes, TOKEN_BYTES * split.tokens)  # a stranger's file may unpack to any size
        for document in sources.find(path).documents(whole=True):
            documents.append(document)
            if (left := left - len(document)) < 0:
                break
        if len(documents) != split.documents or left < 0:
            raise UserError(f"{path}: not the text of the manifest; prepare the data again")
        return documents

    def document_bytes(self, tokens: Tokens) -> npt.NDArray[np.int64]:
        """Return the source bytes of each document of the held-out `tokens`, (documents,); the manifest has the sum."""
        if self.manifest.byte_source == "documents":
            return np.array([len(document) for document in self.validation_documents()])
        stated, tokenizer = self.manifest.validation.byte_counts, self.tokenizer()
        counts = self._joined(stated) if stated else tokenizer.byte_lengths(tokens)
        begins = np.union1d(0, np.flatnonzero(tokens[:-1] == tokenizer.bos))
        return np.add.reduceat(counts[1:].astype(np.int64), begins)  # the first token is context only

    def check_counts(self) -> None:
        """Count the held-out bytes, once per process for the same files; `UserError` unless the manifest is right."""
        fingerprint = self._fingerprint()
        if fingerprint not in self._counted:
            self.count_again()
            self._counted.add(fingerprint)

    def _fingerprint(self) -> str:
        """Digest of the manifest and of path, size and time of the files that `count_again` reads."""
        split = self.manifest.validation
        shards = [shard.file for shard in (*split.shards, *split.byte_counts)]
        paths = [self.folder.resolve() / name for name in (self.manifest.tokenizer.file, VALIDATION_TEXT, *shards)]
        there = filter(os.path.exists, paths)  # also False for a name too long for the file system
        state = [file_state(path) for path in there]
        return hashlib.sha256(repr((self.manifest, state)).encode()).hexdigest()

    def count_again(self) -> None:
        """Encode the held-out documents and count their bytes; `UserError` unless the manifest is right."""
        split, tokenizer, tokens = self.manifest.validation, self.tokenizer(), self.validation_tokens()
        least = min(len(tokens), split.source_bytes, split.normalized_bytes, split.table_bytes)
        if least < 1 or len(tokens) != split.tokens:
            raise UserError(f"{self.folder}: the manifest miscounts the held-out text; prepare the data again")
        if int(tokens.max()) >= tokenizer.vocabulary:
            raise UserError(f"{self.folder} has held-out ids above {tokenizer.vocabulary - 1:,}; prepare it again")
        decoded_bytes = int(tokenizer.byte_lengths(tokens)[1:].sum())  # the first is context only
        counts = dict.fromkeys(("source_bytes", "normalized_bytes"), decoded_bytes)
        counts["table_bytes"] = tokenizer.table_bytes(tokens)
        if split.byte_counts:
            stated = self._joined(split.byte_counts)
            if len(stated) != len(tokens):
                raise UserError(f"{self.folder}: {len(stated):,} byte counts for {len(tokens):,} held-out tokens")
            counts["source_bytes"] = int(stated[1:].sum(dtype=np.int64))
        if self.manifest.byte_source == "documents":
            documents = self.validation_documents()
            counts["source_bytes"] = sum(map(len, documents))
            encoded = [np.append(np.uint16(tokenizer.bos), ids) for ids in tokenizer.encode_many(documents)]
            if not np.array_equal(np.concatenate(encoded), tokens):
                raise UserError(f"{self.folder}: the held-out tokens are not those of the held-out documents")
        if self.manifest.hashed == "documents":
            hashes = [document_hash(document) for document in documents]
            if len(set(hashes)) < len(hashes):
                raise UserError(f"{self.folder / VALIDATION_TEXT} holds a document twice; prepare the data again")
        else:
            hashes = [document_hash(ids.tobytes()) for ids in split_documents([tokens], tokenizer.bos)]
        if len(hashes) != split.documents or set_sha256(hashes) != split.document_set_sha256:
            raise UserError(f"{self.folder} holds out other documents than its manifest says; prepare the data again")
        for name, count in counts.items():
            if count != (claimed := getattr(split, name)):
                path = self.folder / MANIFEST
                raise UserError(f"{path} states {claimed:,} {name} for validation; there are {count:,}")
        if split.byte_counts and split.source_bytes > _MOST_STATED * decoded_bytes:
            raise UserError(
                f"{self.folder}: its files of byte counts state {split.source_bytes:,} bytes for tokens that spell "
                f"{decoded_bytes:,}, so a score would be too low; prepare the data again from the documents"
            )

    def check_disjoint(self) -> None:
        """Raise `UserError` if a document is in both splits, or if the document hashes are not the manifest's."""
        validation = self.manifest.validation
        splits: dict[SplitName, Split] = {"train": self.manifest.train, "validation": validation}
        hashes = {name: read_hashes(self.folder, name) for name in splits}
        for name, split in splits.items():
            if set_sha256(hashes[name]) != split.document_set_sha256:
                raise UserError(f"{self.folder / DOCUMENTS}: not the {name} documents of the manifest")
        if overlap := len(hashes["train"] & hashes["validation"]):
            leaked = f"{overlap:,} of {validation.documents:,} validation documents in {self.folder}"
            raise UserError(f"{leaked} are training documents too; a score on them means little")
        other: HashKind = "tokens" if self.manifest.hashed == "documents" else "documents"
        tokenizer = self.tokenizer()
        documents = list(split_documents([self.validation_tokens()], tokenizer.bos))
        drawn = random.SystemRandom().sample(documents, min(_DRAWN, len(documents)))  # so nobody can prepare for them
        if overlap := sum(tokens_hash(tokenizer, ids, other) in hashes["train"] for ids in drawn):
            leaked = f"{overlap:,} of {len(drawn):,} validation documents drawn from {self.folder}"
            raise UserError(f"{leaked} are training documents too, by hashes of {other}; a score means little")

    def shows_hashed_tokens(self) -> bool:
        """Return True if a training shard proves that the hashes of training documents are hashes of their ids.

        A stranger's manifest may call hashes of text hashes of ids; no held-out document is ever found among them.
        """
        if self.manifest.hashed != "tokens" or not self.manifest.train.shards:
            return False
        shard, known = self.open(self.manifest.train.shards[0]), read_hashes(self.folder, "train")
        first = split_documents([read(shard, 0, min(len(shard), 1 << 20))], self.manifest.tokenizer.bos)
        return any(document_hash(ids.tobytes()) in known for ids in first)

    def check_spelled(self) -> None:
        """Raise `UserError` if the held-out text has characters that no tokens spell.

        One unknown token may stand for any of them; the score would then cover less than the text.
        """
        if self.manifest.byte_source != "documents":
            return
        tokenizer, bos = self.tokenizer(), self.manifest.tokenizer.bos
        empty = [number for number, piece in enumerate(tokenizer.token_bytes) if not piece and number != bos]
        if empty and (unknown := int(np.isin(self.validation_tokens(), empty).sum())):
            raise UserError(
                f"unknown-token ids are {unknown:,} of the held-out tokens and decode to nothing, so the score would "
                "be that of another text; take a tokenizer with an id for each byte"
            )
        if byte_ids(tokenizer.token_bytes) is not None:
            return
        alone = {piece.lstrip(b" ") for piece in tokenizer.token_bytes}
        held_out = set().union(*(document.decode(errors="surrogateescape") for document in self.validation_documents()))
        spelled = {one: one.encode(errors="surrogateescape") for one in held_out - {" "}}
        lacking = [
            one for one, data in spelled.items() if not (data in alone or all(bytes([byte]) in alone for byte in data))
        ]
        if lacking:
            some = ", ".join(map(ascii, sorted(lacking)[:3]))
            raise UserError(
                f"no tokens spell {len(lacking):,} characters of the held-out text, such as {some}, so its score would "
                "be that of another text; take a tokenizer with an id for each byte"
            )

    def check_shards(self, split: SplitName) -> None:
        """Hash the shards of a split; `UserError` names the first that has changed."""
        chosen = self.manifest.train if split == "train" else self.manifest.validation
        for shard in (*chosen.shards, *chosen.byte_counts):
            self.open(shard)
            path = self.folder / shard.file
            self._hashed[shard] = file_state(path)  # before it is read, so that a change meanwhile is seen
            if file_sha256(path) != shard.sha256:
                raise UserError(f"{path}: changed since it was prepared; prepare the data again")

    def check_unchanged(self) -> None:
        """Hash again the shards that were written since `check_shards`; `UserError` names one that has changed."""
        for shard, state in self._hashed.items():
            path = self.folder / shard.file
            if path.exists() and file_state(path) != state and file_sha256(path) != shard.sha256:
                raise UserError(f"{path} was changed while it was in use; prepare the data again, and start anew")

    def open(self, shard: Shard) -> Tokens:
        """Return the tokens of a shard; `UserError` if the manifest states another number."""
        tokens, stated = open_shard(path := self.folder / shard.file), f"the manifest says {shard.tokens:,}"
        if len(tokens) != shard.tokens:
            raise UserError(f"{path}: {len(tokens):,} tokens, but {stated}; prepare the data again")
        return tokens


def write(
    folder: Path, manifest: Manifest, tokenizer: Tokenizer, train: Iterable[bytes], validation: Iterable[bytes]
) -> None:
    """Write the tokenizer, the document hashes of both splits and, last and in one piece, the manifest."""
    (folder / MANIFEST).unlink(missing_ok=True)
    (folder / TOKENIZER).write_bytes(tokenizer.serialize())
    write_hashes(folder, train, validation)
    write_file(folder / MANIFEST, (json.dumps(asdict(manifest), indent=2) + "\n").encode())


def load_counted(folder: Path) -> Corpus:
    """Return the corpus that this process has just written; its held-out text need not be counted again."""
    made = Corpus.load(folder)
    split = made.manifest.validation
    if min(split.source_bytes, split.normalized_bytes, split.table_bytes) > 0:
        made._counted.add(made._fingerprint())
    return made


def is_corpus(folder: Path) -> bool:
    """True if a folder holds a finished corpus."""
    return (folder / MANIFEST).is_file() and (folder / DOCUMENTS).is_file()


def reusable(folder: Path, inputs: str) -> Corpus | None:
    """Return the complete corpus in `folder` if it was made from these inputs."""
    try:
        found = Corpus.load(folder)
        for split in (found.manifest.train, found.manifest.validation):
            for shard in (*split.shards, *split.byte_counts):
                found.open(shard)
    except UserError:
        return None
    return found if found.manifest.inputs == inputs else None


def look_up(folder: Path, inputs: str, existing: Existing, progress: Progress) -> tuple[Path, Corpus | None]:
    """Return the folder for the corpus of these inputs, and the corpus if it is there already.

    The folder is `folder`, or one beside it. A damaged corpus is replaced.
    """
    folder = expanded(folder).resolve()
    try:
        other = is_corpus(folder) and read_manifest(folder).inputs != inputs
    except UserError:
        other = False
    if not other or existing == "replace":
        return folder, reusable(folder, inputs)
    if existing == "refuse":
        was = "of another text, of this one before it or its settings changed, or of an earlier version"
        raise UserError(f"{folder} holds a corpus {was}, which runs may need; name another folder, or delete it")
    beside = folder.with_name(f"{folder.name}-{inputs[:8]}")
    if (ready := reusable(beside, inputs)) is None:
        progress.note(f"{folder} is of another text, setting or version; this corpus goes to {beside}")
    return beside, ready


def file_state(path: Path) -> FileState:
    """Return path, bytes and modification time in nanoseconds of a file; a write changes them."""
    status = path.stat()
    return str(path), status.st_size, status.st_mtime_ns


def document_hash(document: bytes) -> bytes:
    """Return the first 16 bytes of a document's SHA-256."""
    return hashlib.sha256(document).digest()[:HASH_BYTES]


def tokens_hash(tokenizer: Tokenizer, ids: Tokens, kind: HashKind) -> bytes:
    """Return the hash of a document's ids, which begin with BOS, or of the text that they decode to."""
    return document_hash(ids.tobytes() if kind == "tokens" else tokenizer.decode(ids[1:]))


def set_sha256(hashes: Iterable[bytes]) -> str:
    """Return the SHA-256 of a set of document hashes, independent of their order."""
    return hashlib.sha256(b"".join(sorted(set(hashes)))).hexdigest()


def write_hashes(folder: Path, train: Iterable[bytes], validation: Iterable[bytes]) -> None:
    """Write the document hashes of both splits, sorted, as uint8 (documents, 16) without pickle."""
    joined = (b"".join(sorted(set(hashes))) for hashes in (train, validation))
    arrays = [np.frombuffer(data, np.uint8).reshape(-1, HASH_BYTES) for data in joined]
    np.savez(folder / DOCUMENTS, allow_pickle=False, train=arrays[0], validation=arrays[1])


def read_hashes(folder: Path, split: SplitName) -> set[bytes]:
    """Return the document hashes of a split; `UserError` if they cannot be read."""
    path = folder / DOCUMENTS
    try:
        with os.fdopen(open_regular(path), "rb") as file, np.load(file, allow_pickle=False) as arrays:
            data = arrays[split].tobytes()
    except Exception as error:  # of many kinds, by NumPy, zipfile and tokenize, for a damaged file
        raise UserError(f"{path}: cannot read the document hashes ({error}); prepare the data again") from None
    return {data[begin : begin + HASH_BYTES] for begin in range(0, len(data), HASH_BYTES)}
