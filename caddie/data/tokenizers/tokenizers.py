"""Bytes to ids and back: raw bytes, SentencePiece, or SentencePiece behind CaseOps.

A tokenizer with SentencePiece's identity settings, as `SentencePieceBPE` trains, gives back every byte string exactly.
A foreign model keeps its own ids for ordinary text, so published shards are reproduced, and `audit` names what it
loses.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from caddie.config import Config, Count, Technique
from caddie.data.tokenizers import bpe, caseops
from caddie.errors import UserError

Ids = npt.NDArray[np.uint16]

MARK = "\u2581"
"""What SentencePiece writes for a space."""
_BATCH = 256  # documents
_SHORT = 4096  # characters


@dataclass(frozen=True)
class ByteTable:
    """Three values per id, from which the contest counts the bytes that a token stream stands for.

    The bytes without one leading space; whether there is a leading space; and whether the id is control, unknown or
    unused, after which a leading space counts nothing.
    """

    base_bytes: npt.NDArray[np.int64]
    has_leading_space: npt.NDArray[np.bool_]
    is_boundary: npt.NDArray[np.bool_]


class Tokenizer(ABC):
    """Turns documents into ids below `vocabulary`. Streams put the id `bos` before every document.

    `token_bytes` is what each id writes. For the text itself ask `decode` and `byte_lengths`: a kind may read what its
    ids write in context.
    """

    kind: ClassVar[str]
    vocabulary: int
    bos: int
    token_bytes: tuple[bytes, ...]
    table: ByteTable

    @abstractmethod
    def encode_many(self, documents: Sequence[bytes]) -> list[Ids]:
        """The ids of each document, without BOS."""

    @abstractmethod
    def serialize(self) -> bytes:
        """What an artifact stores, for `deserialize`."""

    def encode(self, data: bytes) -> Ids:
        """The ids of one document, without BOS."""
        return self.encode_many([data])[0]

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> bytes:
        """The bytes the ids stand for; control ids stand for none. Any ids are taken, such as a model samples."""
        return b"".join(map(self.token_bytes.__getitem__, np.asarray(ids, np.int64).tolist()))

    def byte_lengths(self, ids: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Bytes of the text that each id accounts for, BOS none; their sum is the length of what `decode` gives.

        A stream may hold several documents, each begun by BOS. A stream that begins within a document may be off for
        its first ids where their meaning depends on those before.
        """
        return self._lengths[np.asarray(ids, np.int64)]

    @cached_property
    def _lengths(self) -> npt.NDArray[np.int64]:
        return np.array([len(text) for text in self.token_bytes], np.int64)

    def table_bytes(self, ids: npt.NDArray[Any]) -> int:
        """Bytes by the contest's table method; the first id is context only.

        Equal to the length of the decoded text for the contest's models. A second space within a piece counts three
        bytes and a space after BOS none, so for other models count the bytes of the text.
        """
        before, after = ids[:-1], ids[1:]
        spaces = self.table.has_leading_space[after] & ~self.table.is_boundary[before]
        return int(self.table.base_bytes[after].sum() + spaces.sum())

    @cached_property
    def sha256(self) -> str:
        """Names the tokenizer: equal for equal kind and content."""
        return hashlib.sha256(self.kind.encode() + b"\0" + self.serialize()).hexdigest()


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes; 256 is BOS."""

    kind = "bytes"
    vocabulary = 257
    bos = 256
    token_bytes = (*(bytes([byte]) for byte in range(256)), b"")

    def __init__(self) -> None:
        byte = np.arange(self.vocabulary) < self.bos
        self.table = ByteTable(byte.astype(np.int64), np.zeros_like(byte), ~byte)

    def encode_many(self, documents: Sequence[bytes]) -> list[Ids]:
        """The bytes themselves."""
        return [np.frombuffer(document, np.uint8).astype(np.uint16) for document in documents]

    def serialize(self) -> bytes:
        """Nothing to store."""
        return b""


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model file.

    `lossless` models (identity normalization, white space untouched, byte fallback) give what SentencePiece cannot
    carry as byte ids. Any other encodes text as SentencePiece does, and bytes that are not UTF-8 as U+FFFD, which the
    contest's models make a space.
    A model that cannot be read, has more than 65,536 ids or no BOS id is a `UserError`.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes) -> None:
        from sentencepiece import SentencePieceProcessor

        self._model = model
        try:
            processor = SentencePieceProcessor(model_proto=model)
            count = processor.get_piece_size() if model else 0
            pieces = [processor.id_to_piece(index) for index in range(count)]
        except (RuntimeError, ValueError):
            count = 0
        if not count:
            raise UserError(f"not a SentencePiece model, or a damaged one ({len(model):,} bytes)")
        if count > bpe.MOST_IDS:
            raise UserError(f"a tokenizer may have {bpe.MOST_IDS:,} ids; this SentencePiece model has {count:,}")
        self._processor, self.vocabulary, self.bos = processor, count, processor.bos_id()
        if self.bos < 0:
            raise UserError("this SentencePiece model has no BOS id; train it with --bos_id=1")

        ids = range(count)
        byte_ids = {int(pieces[index][1:-1], 16): index for index in ids if processor.is_byte(index)}
        fallback = {index: bytes([byte]) for byte, index in byte_ids.items()}
        boundary = [processor.is_control(i) or processor.is_unknown(i) or processor.is_unused(i) for i in ids]
        texts = ["" if boundary[index] or index in fallback else pieces[index] for index in ids]
        self.token_bytes = tuple(fallback.get(i, text.replace(MARK, " ").encode()) for i, text in enumerate(texts))
        self.table = ByteTable(
            np.array([int(i in fallback) or len(text.removeprefix(MARK).encode()) for i, text in enumerate(texts)]),
            np.array([text.startswith(MARK) for text in texts]),
            np.array(boundary),
        )
        self.lossless = len(byte_ids) == 256 and _keeps_text(model)
        self._byte_ids = np.array([byte_ids.get(byte, 0) for byte in range(256)], np.uint16)
        # Without a piece for it, a space would fall back to the three bytes of the mark.
        self._raw = re.compile(f"([{bpe.RAW}]+)" if MARK in texts else f"([ {bpe.RAW}]+)")

    def encode_many(self, documents: Sequence[bytes]) -> list[Ids]:
        """The ids of each document, a batch of documents at a time."""
        batches = (documents[start : start + _BATCH] for start in range(0, len(documents), _BATCH))
        encode = self._encode_exactly if self.lossless else self._encode_plainly
        return [ids for batch in batches for ids in encode(batch)]

    def _encode_plainly(self, documents: Sequence[bytes]) -> list[Ids]:
        return self._encode_texts([document.decode(errors="replace") for document in documents])

    def _encode_exactly(self, documents: Sequence[bytes]) -> Iterator[Ids]:
        # Text at the even places, what SentencePiece cannot carry at the odd ones.
        split = [self._raw.split(document.decode(errors="surrogateescape")) for document in documents]
        encoded = iter(self._encode_texts([text for runs in split for text in runs[::2]]))
        for runs in split:
            parts = [next(encoded)]
            for raw in runs[1::2]:
                parts += [self._byte_ids[np.frombuffer(raw.encode(errors="surrogateescape"), np.uint8)], next(encoded)]
            yield np.concatenate(parts) if len(parts) > 1 else parts[0]

    def _encode_texts(self, texts: list[str]) -> list[Ids]:
        # All cores: 10 MB/s on two, 6 on one (1,024 ids, November 2026). Threads begin anew with every call, and what
        # is short would take as long to wait for them as to be encoded.
        if sum(map(len, texts)) > _SHORT:
            found = self._processor.encode(texts, out_type=int, num_threads=-1)
        else:
            found = [self._processor.encode(text, out_type=int) for text in texts]
        return [np.array(ids, np.uint16) for ids in found]

    def serialize(self) -> bytes:
        """The model file."""
        return self._model


class CaseOpsTokenizer(Tokenizer):
    """CaseOps (`caseops`) before a SentencePiece model, and undone after it.

    Loses what the model loses. `decode` takes any ids: a mark that nothing follows which it could apply to vanishes.
    `table` is the model's and counts marks as text: its figure is too high.
    """

    kind = "caseops"

    def __init__(self, of: SentencePieceTokenizer) -> None:
        self.of = of
        self.vocabulary, self.bos, self.token_bytes, self.table = of.vocabulary, of.bos, of.token_bytes, of.table

    def encode_many(self, documents: Sequence[bytes]) -> list[Ids]:
        """The model's ids of each document with marks for its capitals."""
        return self.of.encode_many([caseops.encode(document) for document in documents])

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> bytes:
        """The bytes the ids stand for, document by document."""
        return b"".join(caseops.decode(self.of.decode(run), strict=False) for run in self._documents(ids))

    def byte_lengths(self, ids: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Bytes of the text that each id accounts for; marks none, except where they are text."""
        runs = ([self.token_bytes[index] for index in run.tolist()] for run in self._documents(ids))
        return np.concatenate([caseops.byte_lengths(pieces, strict=False) for pieces in runs])

    def _documents(self, ids: Sequence[int] | npt.NDArray[Any]) -> list[npt.NDArray[np.int64]]:
        # One after the other, or the end of a document and the beginning of the next could make a mark.
        stream = np.asarray(ids, np.int64)
        return np.split(stream, np.flatnonzero(stream == self.bos))

    def serialize(self) -> bytes:
        """The model file."""
        return self.of.serialize()


def deserialize(kind: str, data: bytes) -> Tokenizer:
    """The tokenizer of that kind whose `serialize` gave `data`, or a `UserError`."""
    if kind == SentencePieceTokenizer.kind:
        return SentencePieceTokenizer(data)
    if kind == CaseOpsTokenizer.kind:
        return CaseOpsTokenizer(SentencePieceTokenizer(data))
    if kind == ByteTokenizer.kind and not data:
        return ByteTokenizer()
    raise UserError(f"no tokenizer of kind {kind!r} with {len(data):,} bytes")


def _keeps_text(model: bytes) -> bool:
    """Whether a model's normalizer leaves text as it is, except for writing spaces as marks."""
    normalizer = dict(_fields(model)).get(3, b"")
    settings = dict(_fields(normalizer)) if isinstance(normalizer, bytes) else {}
    rules, dummy_prefix, collapses, marks = settings.get(2), settings.get(3, 1), settings.get(4, 1), settings.get(5, 1)
    return not rules and not dummy_prefix and not collapses and bool(marks)


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of the fields of a protocol buffer message, one that has been parsed without error."""
    place = 0

    def number() -> int:
        nonlocal place
        value = shift = 0
        while place < len(message):
            byte = message[place]
            value, shift, place = value | (byte & 127) << shift, shift + 7, place + 1
            if byte < 128:
                break
        return value

    while place < len(message):
        field, wire = divmod(number(), 8)
        if wire == 0:
            yield field, number()
        else:
            length = number() if wire == 2 else {1: 8, 5: 4}.get(wire, 0)
            place += length
            yield field, message[place - length : place]


@dataclass(frozen=True, kw_only=True)
class TokenizerSource(Config, ABC):
    """Where a tokenizer comes from."""

    @abstractmethod
    def build(self, vocabulary: int, sample: Callable[[], Sequence[bytes]]) -> Tokenizer:
        """A tokenizer of `vocabulary` ids; `sample` gives documents of the training text where they are needed."""


@dataclass(frozen=True, kw_only=True)
class RawBytes(TokenizerSource):
    """Every byte is an id."""

    def build(self, vocabulary: int, sample: Callable[[], Sequence[bytes]]) -> Tokenizer:
        """The `ByteTokenizer`."""
        return _of_size(ByteTokenizer(), vocabulary, "RawBytes")


@dataclass(frozen=True, kw_only=True)
class SentencePieceSource(TokenizerSource):
    """Where a SentencePiece model comes from."""

    @abstractmethod
    def build(
        self, vocabulary: int, sample: Callable[[], Sequence[bytes]], symbols: Sequence[str] = ()
    ) -> SentencePieceTokenizer:
        """The model; one that is trained has each of `symbols`, single characters, as a piece that no other has in
        it."""


@dataclass(frozen=True, kw_only=True)
class SentencePieceFile(SentencePieceSource):
    """A SentencePiece model that exists."""

    path: str
    """The model file."""

    def build(
        self, vocabulary: int, sample: Callable[[], Sequence[bytes]], symbols: Sequence[str] = ()
    ) -> SentencePieceTokenizer:
        """The model as it is."""
        try:
            tokenizer = SentencePieceTokenizer(Path(self.path).read_bytes())
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"no tokenizer in {self.path!r}: {reason}") from None
        return _of_size(tokenizer, vocabulary, self.path)


@dataclass(frozen=True, kw_only=True)
class SentencePieceBPE(SentencePieceSource):
    """Byte pair encoding trained on the training text, lossless and the same for the same text."""

    sample_bytes: Count = 4_000_000
    """Bytes of training text to learn from."""

    def build(
        self, vocabulary: int, sample: Callable[[], Sequence[bytes]], symbols: Sequence[str] = ()
    ) -> SentencePieceTokenizer:
        """Train on documents drawn from `sample`."""
        return SentencePieceTokenizer(bpe.train(sample(), vocabulary, self.sample_bytes, symbols))


@dataclass(frozen=True, kw_only=True)
class CaseOps(TokenizerSource):
    """Capitals as marks before small letters, in front of a SentencePiece model; lossless where the model is.

    A model that is trained learns from the marked text, each mark a piece of its own; so should one that exists have
    been (#1729). Raw bytes have no pieces to share, so they are no choice.
    """

    techniques: ClassVar = {
        "": Technique(
            "A word keeps its pieces where it begins a sentence or is cried out.",
            "openai/parameter-golf #1729, 2026-04-18_PR1626_CaseOps_Taper",
            "-0.0041 with a taper of the weight decay (#1729), for 18 % more tokens",
        ),
    }

    of: SentencePieceSource = SentencePieceBPE()
    """Where the model comes from."""

    def build(self, vocabulary: int, sample: Callable[[], Sequence[bytes]]) -> CaseOpsTokenizer:
        """The model of marked text, wrapped."""

        def marked() -> list[bytes]:
            return [caseops.encode(document) for document in sample()]

        return CaseOpsTokenizer(self.of.build(vocabulary, marked, caseops.SYMBOLS))


T = TypeVar("T", bound=Tokenizer)


def _of_size(tokenizer: T, vocabulary: int, name: str) -> T:
    if tokenizer.vocabulary != vocabulary:
        raise UserError(f"{name} has {tokenizer.vocabulary} ids; set model.vocabulary={tokenizer.vocabulary}")
    return tokenizer
