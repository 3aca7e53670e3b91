"""A corpus folder: token shards, their tokenizer, and a manifest that says exactly what they are.

A folder without a manifest is an unfinished preparation. What a manifest claims can be checked: shards by their hashes,
and the separation of training and validation by the document hashes kept beside them.
"""

from __future__ import annotations

import hashlib
import io
import json
import typing
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import numpy.typing as npt

from caddie.config import coerce
from caddie.data import documents as sources
from caddie.data.loaders import Tokens, open_shard
from caddie.data.tokenizers import Tokenizer, deserialize
from caddie.errors import UserError
from caddie.files import replacing

VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.bin"
DOCUMENTS = "documents.npz"
VALIDATION_TEXT = "validation.jsonl.zst"
HASH_BYTES = 16
SplitName = Literal["train", "validation"]


@dataclass(frozen=True)
class Shard:
    """One token file."""

    file: str
    """Path from the corpus folder, or absolute where the shard lies elsewhere."""
    tokens: int
    sha256: str


@dataclass(frozen=True)
class Split:
    """Training or validation: how much there is of it, counted in three kinds of bytes."""

    documents: int
    tokens: int
    """Including the BOS of every document."""
    source_bytes: int
    """Bytes of the documents, counted as `Manifest.byte_source` says."""
    normalized_bytes: int
    """Bytes of the documents after encoding and decoding."""
    table_bytes: int
    """Bytes by the contest's table method."""
    document_set_sha256: str
    """Hash of the sorted document hashes: names the set, whatever the order."""
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class RoundTripFigures:
    """What the tokenizer loses over all documents."""

    documents: int
    changed_documents: int
    source_bytes: int
    decoded_bytes: int


@dataclass(frozen=True)
class TokenizerEntry:
    """The tokenizer of a corpus."""

    kind: str
    file: str
    vocabulary: int
    bos: int
    sha256: str
    round_trip: RoundTripFigures | None
    """None where only shards are known."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, round_trip: RoundTripFigures | None) -> TokenizerEntry:
        """The entry of a tokenizer kept in the corpus folder."""
        return cls(tokenizer.kind, TOKENIZER, tokenizer.vocabulary, tokenizer.bos, tokenizer.sha256, round_trip)


@dataclass(frozen=True)
class Manifest:
    """Everything known about a corpus."""

    version: int
    name: str
    source: str
    inputs: str
    """Fingerprint of what the corpus was made from."""
    tokenizer: TokenizerEntry
    train: Split | None
    """None where a validation text was prepared without knowledge of a training text."""
    validation: Split
    hashed: Literal["documents", "tokens"]
    """Whether a document hash is of its bytes, or of its ids as little-endian uint16, BOS included."""
    duplicates_removed: int
    """Documents dropped because the same bytes came before."""
    training_documents_removed: int
    """Validation documents dropped because another corpus trains on them."""
    overlap: int
    """Document hashes in both splits; 0 unless the shards came from elsewhere."""
    byte_source: Literal["documents", "table", "tokens"]
    """What `source_bytes` counts: the documents; or, where only shards are known, what the tokens decode to, which is
    called `table` where the contest's table agrees with it."""
    validation_compressors: dict[str, int] | None
    """Compressed bytes of the concatenated validation documents, per compressor; None above 4 MB."""
    validation_fraction: float | None
    """Part of the documents that was held out by hash; None where the split came from elsewhere."""


class Corpus:
    """A prepared corpus. Scoring needs neither the training shards nor their documents."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest

    @classmethod
    def load(cls, folder: Path) -> Corpus:
        """The corpus in a folder; `UserError` if there is none, or none this program can read."""
        path = folder / MANIFEST
        try:
            text = path.read_text()
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"no corpus in {folder}; make one with: caddie data PATH --out {folder}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: cannot be read ({error})") from None
        return cls(folder, parse(text, path))

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, checked against its hash."""
        entry = self.manifest.tokenizer
        try:
            data = (self.folder / entry.file).read_bytes()
        except OSError as error:
            raise UserError(f"{self.folder / entry.file}: cannot read the tokenizer ({error.strerror})") from None
        tokenizer = deserialize(entry.kind, data)
        if (tokenizer.sha256, tokenizer.bos, tokenizer.vocabulary) != (entry.sha256, entry.bos, entry.vocabulary):
            raise UserError(f"{self.folder / entry.file}: not the tokenizer of the manifest; prepare the data again")
        return tokenizer

    def train_shards(self) -> list[Tokens]:
        """The training shards, memory-mapped."""
        if self.manifest.train is None or not self.manifest.train.shards:
            raise UserError(f"the corpus in {self.folder} is for validation only; name one to train on")
        return [self.open(shard) for shard in self.manifest.train.shards]

    def validation_tokens(self) -> Tokens:
        """The validation stream."""
        shards = [self.open(shard) for shard in self.manifest.validation.shards]
        return shards[0] if len(shards) == 1 else np.concatenate(shards)

    def validation_documents(self) -> list[bytes]:
        """The validation documents as they were; `UserError` where only shards are known or the file has changed."""
        if self.manifest.byte_source != "documents":
            raise UserError(f"the corpus in {self.folder} was made from token shards and has no text")
        documents = list(sources.documents(self.folder / VALIDATION_TEXT))
        if len(documents) != self.manifest.validation.documents:
            raise UserError(f"{self.folder / VALIDATION_TEXT}: not the text of the manifest; prepare the data again")
        return documents

    def check_counts(self) -> None:
        """Count the held-out bytes again, from the documents and from the tokens; `UserError` where they differ."""
        split, tokenizer = self.manifest.validation, self.tokenizer()
        tokens = self.validation_tokens() if split.shards else np.empty(0, np.uint16)
        if (
            not 0 < len(tokens) == split.tokens
            or min(split.source_bytes, split.normalized_bytes, split.table_bytes) < 1
        ):
            raise UserError(f"the manifest of {self.folder} does not count its validation text; prepare the data again")
        if int(tokens.max()) >= tokenizer.vocabulary:
            raise UserError(f"{self.folder} holds out ids over {tokenizer.vocabulary - 1:,}; prepare the data again")
        counts = {"table_bytes": tokenizer.table_bytes(tokens)}
        counts["normalized_bytes"] = int(tokenizer.byte_lengths(tokens)[1:].sum())  # the first is context only
        counts["source_bytes"] = counts["normalized_bytes"]
        if self.manifest.byte_source == "documents":
            documents = self.validation_documents()
            counts["source_bytes"] = sum(map(len, documents))
            pieces = [np.append(np.uint16(tokenizer.bos), ids) for ids in tokenizer.encode_many(documents)]
            if not np.array_equal(np.concatenate(pieces), tokens):
                raise UserError(f"{self.folder}: the held-out tokens are not those of the held-out documents")
        if self.manifest.hashed == "documents":
            hashes = [document_hash(document) for document in documents]
            if len(set(hashes)) < len(hashes):
                raise UserError(f"{self.folder / VALIDATION_TEXT} holds a document twice; prepare the data again")
        else:
            hashes = [document_hash(run.tobytes()) for run in runs([tokens], tokenizer.bos)]
        if len(hashes) != split.documents or set_sha256(hashes) != split.document_set_sha256:
            raise UserError(f"{self.folder} holds out other documents than its manifest says; prepare the data again")
        for name, count in counts.items():
            stated = getattr(split, name)
            if count != stated:
                raise UserError(
                    f"{self.folder / MANIFEST} states {stated:,} {name} for validation; there are {count:,}"
                )

    def overlap(self) -> int:
        """Documents in both splits, from the document hashes; `UserError` where these are not the manifest's."""
        train = self.manifest.train
        if train is None:
            raise UserError(f"the corpus in {self.folder} knows no training documents; prepare it against a corpus")
        hashes = {name: read_hashes(self.folder, name) for name in get_args(SplitName)}
        for name, split in (("train", train), ("validation", self.manifest.validation)):
            if set_sha256(hashes[name]) != split.document_set_sha256:
                raise UserError(f"{self.folder / DOCUMENTS}: not the {name} documents of the manifest")
        return len(hashes["train"] & hashes["validation"])

    def check_disjoint(self) -> None:
        """Raise `UserError` unless the document hashes are the manifest's and no document is in both splits."""
        overlap = self.overlap()
        if overlap:
            raise UserError(
                f"{overlap:,} of {self.manifest.validation.documents:,} validation documents in {self.folder}"
                " are training documents too; a score on them means little"
            )

    def check_shards(self, split: SplitName) -> None:
        """Hash the shards of a split again; `UserError` names the first that has changed."""
        chosen = self.manifest.train if split == "train" else self.manifest.validation
        for shard in chosen.shards if chosen else ():
            self.open(shard)
            if file_sha256(self.folder / shard.file) != shard.sha256:
                raise UserError(f"{self.folder / shard.file}: changed since it was prepared; prepare the data again")

    def open(self, shard: Shard) -> Tokens:
        """The tokens of a shard; `UserError` if they are not as many as the manifest says."""
        tokens = open_shard(self.folder / shard.file)
        if len(tokens) != shard.tokens:
            raise UserError(
                f"{self.folder / shard.file}: {len(tokens):,} tokens, but the manifest says {shard.tokens:,};"
                " prepare the data again"
            )
        return tokens


def parse(text: str, path: Path) -> Manifest:
    """The manifest in a text, or a `UserError` that names the file and the field."""
    again = "prepare the data again"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}); {again}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a manifest; {again}")
    if value.get("version") != VERSION:
        raise UserError(f"{path}: manifest version {value.get('version')}, and this program reads {VERSION}; {again}")
    try:
        manifest = typing.cast(Manifest, _read(value, Manifest, "manifest"))
    except UserError as error:
        raise UserError(f"{path}: {error}; {again}") from None
    if manifest.hashed == "documents" != manifest.byte_source:
        raise UserError(f"{path}: bytes of {manifest.byte_source} beside hashes of documents; {again}")
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """The last step of a preparation; the file appears complete or not at all."""
    with replacing(folder / MANIFEST) as temporary:
        temporary.write_text(json.dumps(asdict(manifest), indent=2) + "\n")


def is_corpus(folder: Path) -> bool:
    """Whether a folder holds a finished preparation."""
    return (folder / MANIFEST).is_file() and (folder / DOCUMENTS).is_file()


def reusable(folder: Path, inputs: str) -> Corpus | None:
    """The complete corpus in `folder` if it was made from these inputs."""
    try:
        found = Corpus.load(folder)
        for split in (found.manifest.train, found.manifest.validation):
            for shard in split.shards if split else ():
                found.open(shard)
    except UserError:
        return None
    return found if found.manifest.inputs == inputs else None


def file_sha256(path: Path) -> str:
    """Hash of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def runs(shards: Sequence[Tokens], bos: int) -> Iterator[Tokens]:
    """The runs of tokens that begin with `bos`; a run may begin in one shard and end in the next."""
    open_run = np.empty(0, np.uint16)
    for shard in shards:
        begins = np.flatnonzero(shard == bos).tolist()
        if not begins:
            open_run = np.concatenate([open_run, shard])
            continue
        if len(open_run) or begins[0]:
            yield np.concatenate([open_run, shard[: begins[0]]])
        for begin, end in pairwise(begins):
            yield shard[begin:end]
        open_run = np.array(shard[begins[-1] :])
    if len(open_run):
        yield open_run


def document_hash(document: bytes) -> bytes:
    """The first 16 bytes of a document's SHA-256."""
    return hashlib.sha256(document).digest()[:HASH_BYTES]


def set_sha256(hashes: Iterable[bytes]) -> str:
    """The hash that names a set of document hashes."""
    return hashlib.sha256(b"".join(sorted(set(hashes)))).hexdigest()


def write_hashes(folder: Path, train: Iterable[bytes], validation: Iterable[bytes]) -> None:
    """Keep the document hashes of both splits, sorted, as (documents, 16) bytes without pickle."""
    arrays = {name: _array(hashes) for name, hashes in (("train", train), ("validation", validation))}
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    (folder / DOCUMENTS).write_bytes(buffer.getvalue())


def read_hashes(folder: Path, split: SplitName) -> set[bytes]:
    """The document hashes of a split."""
    path = folder / DOCUMENTS
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            data = arrays[split].tobytes()
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: cannot read the document hashes ({error})") from None
    return {data[begin : begin + HASH_BYTES] for begin in range(0, len(data), HASH_BYTES)}


def _array(hashes: Iterable[bytes]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"".join(sorted(set(hashes))), np.uint8).reshape(-1, HASH_BYTES)


def _read(value: object, annotation: Any, name: str) -> object:
    """`value` from JSON as a dataclass, a tuple or mapping of them, an optional one, or what `coerce` knows."""
    arguments = get_args(annotation)
    if type(None) in arguments:
        return None if value is None else _read(value, next(a for a in arguments if a is not type(None)), name)
    if get_origin(annotation) is tuple and isinstance(value, list):
        return tuple(_read(item, arguments[0], f"{name}.{index}") for index, item in enumerate(value))
    if not is_dataclass(annotation):
        return coerce(value, annotation, name)
    known = {field.name for field in fields(annotation)}
    if not isinstance(value, dict) or set(value) != known:
        raise UserError(f"{name} must have exactly {', '.join(sorted(known))}")
    hints = typing.get_type_hints(annotation)
    return typing.cast(type, annotation)(
        **{key: _read(item, hints[key], f"{name}.{key}") for key, item in value.items()}
    )
