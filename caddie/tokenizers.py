"""Bytes to ids and back: raw bytes, or SentencePiece.

A tokenizer with SentencePiece's identity settings, as `SentencePieceBPE` trains, gives back every byte string exactly.
A foreign model keeps its own ids for ordinary text, so published shards are reproduced, and `round_trip` says what it
loses.
"""

from __future__ import annotations

import hashlib
import io
import random
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from caddie.config import Config, Count
from caddie.errors import UserError

Ids = npt.NDArray[np.uint16]

MARK = "\u2581"
"""What SentencePiece writes for a space."""
MOST_IDS = 65_536
_RESERVED = 4 + 256  # pad, BOS, EOS, unknown and the bytes
_COVERAGE = 0.999  # of the characters of the text; the rest are left to byte ids
_BATCH = 256  # documents
_LONGEST = 10_000  # characters of training text that SentencePiece takes as one sentence
# What SentencePiece cannot carry: NUL, a literal mark, and bytes that are not UTF-8 (surrogates from surrogateescape).
_RAW = "\0\u2581\udc80-\udcff"
# And what its trainer skips: a tab, and its own sign for the unknown.
_UNTRAINED = re.compile(f"[\t\u2585{_RAW}]+")


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
    """Turns documents into ids below `vocabulary`. Streams put the id `bos` before every document."""

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
        """The bytes the ids stand for; control ids stand for none."""
        return b"".join(map(self.token_bytes.__getitem__, np.asarray(ids, np.int64).tolist()))

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
        if count > MOST_IDS:
            raise UserError(f"a tokenizer may have {MOST_IDS:,} ids; this SentencePiece model has {count:,}")
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
        self._raw = re.compile(f"([{_RAW}]+)" if MARK in texts else f"([ {_RAW}]+)")

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
        # All cores: 10 MB/s on two, 6 on one (1,024 ids, November 2026).
        return [np.array(ids, np.uint16) for ids in self._processor.encode(texts, out_type=int, num_threads=-1)]

    def serialize(self) -> bytes:
        """The model file."""
        return self._model


def deserialize(kind: str, data: bytes) -> Tokenizer:
    """The tokenizer of that kind whose `serialize` gave `data`, or a `UserError`."""
    if kind == SentencePieceTokenizer.kind:
        return SentencePieceTokenizer(data)
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


@dataclass(frozen=True)
class RoundTrip:
    """What encoding and decoding did to some documents."""

    documents: int
    changed_documents: int
    source_bytes: int
    decoded_bytes: int
    examples: tuple[tuple[str, str], ...]
    """Up to three excerpts around a first difference, before and after."""


def round_trip(tokenizer: Tokenizer, documents: Sequence[bytes]) -> RoundTrip:
    """Measure what a tokenizer loses; a lossless one changes no document."""
    decoded = [tokenizer.decode(ids) for ids in tokenizer.encode_many(documents)]
    changed = [(before, after) for before, after in zip(documents, decoded, strict=True) if before != after]
    return RoundTrip(
        documents=len(documents),
        changed_documents=len(changed),
        source_bytes=sum(map(len, documents)),
        decoded_bytes=sum(map(len, decoded)),
        examples=tuple(_excerpts(before, after) for before, after in changed[:3]),
    )


def _excerpts(before: bytes, after: bytes) -> tuple[str, str]:
    a, b = before.decode(errors="backslashreplace"), after.decode(errors="backslashreplace")
    same = next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    window = slice(max(0, same - 16), same + 24)
    return a[window], b[window]


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
class SentencePieceFile(TokenizerSource):
    """A SentencePiece model that exists."""

    path: str
    """The model file."""

    def build(self, vocabulary: int, sample: Callable[[], Sequence[bytes]]) -> Tokenizer:
        """The model as it is."""
        try:
            tokenizer = SentencePieceTokenizer(Path(self.path).read_bytes())
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"no tokenizer in {self.path!r}: {reason}") from None
        return _of_size(tokenizer, vocabulary, self.path)


@dataclass(frozen=True, kw_only=True)
class SentencePieceBPE(TokenizerSource):
    """Byte pair encoding trained on the training text, lossless and the same for the same text."""

    sample_bytes: Count = 4_000_000
    """Bytes of training text to learn from."""

    def build(self, vocabulary: int, sample: Callable[[], Sequence[bytes]]) -> Tokenizer:
        """Train on documents drawn from `sample`."""
        room = vocabulary - _RESERVED
        if not 0 < room <= MOST_IDS - _RESERVED:
            raise UserError(f"SentencePieceBPE needs model.vocabulary from 261 to 65536, not {vocabulary}")
        texts = [data.decode(errors="surrogateescape") for data in _draw(sample(), self.sample_bytes)]
        counts = Counter(_UNTRAINED.sub("", "".join(texts)))
        largest = _RESERVED
        for characters in (max(1, room // 2), room):  # all of them where the text has too few pairs
            sentences = _sentences(texts, _alphabet(counts, characters))
            model, largest = _train(sentences, vocabulary) if sentences else (b"", largest)
            if model:
                return SentencePieceTokenizer(model)
        advice = f"set model.vocabulary to at most {largest}, or " if largest > _RESERVED else ""
        raise UserError(f"too little training text for a vocabulary of {vocabulary}; {advice}use RawBytes")


def _draw(documents: Sequence[bytes], size: int) -> Iterator[bytes]:
    """Documents in a fixed random order, `size` bytes of them at most."""
    for index in random.Random(0).sample(range(len(documents)), min(len(documents), size)):
        document = documents[index][:size]
        yield document
        size -= len(document)
        if not size:
            return


def _alphabet(counts: Counter[str], most: int) -> str:
    """The commonest characters, enough for `_COVERAGE` of the text and at most `most`."""
    ordered = sorted(counts, key=lambda character: (-counts[character], character))
    covered = np.cumsum([counts[character] for character in ordered])
    enough = int(np.searchsorted(covered, _COVERAGE * counts.total())) + 1
    return "".join(ordered[: min(enough, most)])


def _sentences(texts: list[str], alphabet: str) -> list[str]:
    """The runs of these characters, cut to a length the trainer takes; it would drop characters by rules of its own."""
    outside = re.compile(f"[^{re.escape(alphabet)}]+") if alphabet else re.compile(".+", re.DOTALL)
    runs = (run for text in texts for run in outside.split(text) if run.strip("\r\n"))
    return [run[start : start + _LONGEST] for run in runs for start in range(0, len(run), _LONGEST)]


def _train(sentences: list[str], vocabulary: int) -> tuple[bytes, int]:
    """The model file, or an empty one and the largest vocabulary that these sentences can make."""
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocabulary,
            normalization_rule_name="identity",
            character_coverage=1.0,
            byte_fallback=True,
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            split_by_unicode_script=False,  # 0.7 % more bytes per token on web text, 3 % on Python (November 2026)
            max_sentence_length=8 * _LONGEST,
            pad_id=0,
            bos_id=1,
            eos_id=2,
            unk_id=3,
            num_threads=1,
            minloglevel=3,
        )
    except RuntimeError as error:
        largest = re.search(r"too high .* <= (\d+)", str(error))
        if not largest:
            raise
        return b"", int(largest[1])
    return model.getvalue(), vocabulary


def _of_size(tokenizer: Tokenizer, vocabulary: int, name: str) -> Tokenizer:
    if tokenizer.vocabulary != vocabulary:
        raise UserError(f"{name} has {tokenizer.vocabulary} ids; set model.vocabulary={tokenizer.vocabulary}")
    return tokenizer
