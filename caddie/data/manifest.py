"""Manifest of a corpus: one JSON file that states its parts, with hashes and counts to check all of them."""

from __future__ import annotations

import json
import typing
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from caddie.config import Range, coerce
from caddie.data.hub import Origin
from caddie.data.tokenizers import Tokenizer
from caddie.errors import UserError
from caddie.files import reason, regular_bytes

VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.bin"
SplitName = Literal["train", "validation"]
_ADDED = {"origin", "byte_counts"}
"""Fields that manifests of earlier versions lack."""


@dataclass(frozen=True)
class Shard:
    """A token file, its length and its hash."""

    file: str
    """Path relative to the corpus folder, or absolute for a shard elsewhere."""
    tokens: int
    sha256: str


HashKind = Literal["documents", "tokens"]


@dataclass(frozen=True)
class Split:
    """Sizes of the training or validation split, in documents, tokens and three kinds of bytes."""

    documents: int
    tokens: int
    """Including the BOS of every document; 0 for training documents that were not encoded."""
    source_bytes: int
    """Bytes of the documents; `Manifest.byte_source` says how they were counted."""
    normalized_bytes: int
    """Bytes of the documents after encoding and decoding."""
    table_bytes: int
    """Bytes by the contest's table method."""
    document_set_sha256: str
    """Hash of the sorted document hashes: equal for equal sets of documents."""
    shards: tuple[Shard, ...]
    byte_counts: tuple[Shard, ...] = ()
    """Side-cars of the shards: bytes of the source text that each id accounts for, in the shards' format."""


@dataclass(frozen=True)
class RoundTripFigures:
    """Losses of the tokenizer over all documents."""

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
    """None for shards without their text."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, *figures: int) -> TokenizerEntry:
        """Return the entry of a tokenizer stored in the corpus folder; `figures` make its `RoundTripFigures`."""
        round_trip = RoundTripFigures(*figures) if figures else None
        return cls(tokenizer.kind, TOKENIZER, tokenizer.vocabulary, tokenizer.bos, tokenizer.sha256, round_trip)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Contents of `manifest.json`."""

    version: int = VERSION
    name: str
    source: str
    origin: Origin | None = None
    """Repository of the shards or the documents; None if they were not fetched from the hub."""
    inputs: str
    """Fingerprint of text and settings that the corpus was made from."""
    tokenizer: TokenizerEntry
    train: Split
    """Without shards where the text is for validation alone."""
    validation: Split
    hashed: HashKind
    """Content that is hashed for each document: its bytes, or its ids as little-endian uint16 with BOS."""
    duplicates_removed: int = 0
    """Documents dropped because the same bytes came before."""
    training_documents_removed: int = 0
    """Validation documents dropped because another corpus trains on them."""
    overlap: int = 0
    """Document hashes in both splits; 0 unless the shards came from elsewhere."""
    byte_source: Literal["documents", "table", "tokens", "sidecar"]
    """Text that `source_bytes` counts: the documents or, for shards without text, the decoded tokens (`tokens`).

    `table`: the decoded tokens, and the contest's byte table agrees. `sidecar`: held-out bytes are those of
    `Split.byte_counts`."""
    validation_compressors: dict[str, int] | None = None
    """Compressed bytes of the concatenated validation documents, per compressor; None above 4 MB."""
    validation_fraction: float | None = None
    """Fraction of the documents held out by hash; None if the split came with the shards."""

    @property
    def training_set(self) -> str:
        """Hash of the set of training documents, as an artifact states it: after `tokens:` if ids were hashed."""
        return "tokens:" * (self.hashed == "tokens") + self.train.document_set_sha256


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of the corpus in a folder; `UserError` if it holds none that can be read."""
    path, again = folder / MANIFEST, "prepare the data again"
    try:
        value = json.loads(regular_bytes(path).decode())
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"no corpus in {folder}; make one with: caddie data PATH --out {folder}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({reason(error)}); {again}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}); {again}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a manifest; {again}")
    if (version := value.get("version")) != VERSION:
        raise UserError(f"{path}: manifest version {version}, and this program reads {VERSION}; {again}")
    try:
        manifest = typing.cast(Manifest, _read(value, Manifest, "manifest"))
    except UserError as error:
        raise UserError(f"{path}: {error}; {again}") from None
    if manifest.hashed == "documents" != manifest.byte_source:
        raise UserError(f"{path}: bytes of {manifest.byte_source} beside hashes of documents; {again}")
    if bool(manifest.validation.byte_counts) != (manifest.byte_source == "sidecar"):
        raise UserError(f"{path}: bytes of {manifest.byte_source}, which do not fit its side-cars; {again}")
    return manifest


def _read(value: object, annotation: Any, name: str) -> object:
    """Convert JSON to a dataclass, a tuple of them, an optional one, or a type that `coerce` supports."""
    arguments = get_args(annotation)
    if type(None) in arguments:
        return None if value is None else _read(value, next(a for a in arguments if a is not type(None)), name)
    if get_origin(annotation) is tuple and isinstance(value, list):
        return tuple(_read(item, arguments[0], f"{name}.{index}") for index, item in enumerate(value))
    if not is_dataclass(annotation):
        if isinstance(value, str) and value != value.replace("\0", "").encode(errors="ignore").decode():
            raise UserError(f"{name} must be text without null bytes or lone surrogates")  # as a file's name is
        return coerce(value, Annotated[int, Range(0, 1 << 50)] if annotation is int else annotation, name)
    names = {field.name for field in fields(annotation)}
    if not isinstance(value, dict) or set(value) | _ADDED & names != names:
        raise UserError(f"{name} must have exactly {', '.join(sorted(names))}")
    hints = typing.get_type_hints(annotation)
    read = {key: _read(item, hints[key], f"{name}.{key}") for key, item in value.items()}
    return typing.cast(type, annotation)(**read)
