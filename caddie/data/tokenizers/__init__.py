"""Bytes to ids and back: raw bytes, SentencePiece, SentencePiece behind CaseOps, and other libraries' files."""

import io
import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from caddie.config import Count
from caddie.data.tokenizers import bpe, caseops
from caddie.data.tokenizers.library_files import HuggingFaceFile, HuggingFaceTokenizer, TiktokenFile, TiktokenTokenizer
from caddie.data.tokenizers.tokenizer import MARK, ByteTable, Ids, Sample, TextTokenizer, Tokenizer, TokenizerSource
from caddie.errors import UserError
from caddie.files import regular_bytes

_SHORT = 4096  # characters


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes; 256 is BOS."""

    kind = "bytes"
    vocabulary = 257
    bos = 256
    first: ClassVar[int] = 0
    """Id of the byte 0."""

    def __init__(self) -> None:
        values = [index - self.first for index in range(self.vocabulary)]
        self.token_bytes = tuple(bytes([value]) if 0 <= value < 256 else b"" for value in values)
        byte = np.array(list(map(bool, self.token_bytes)))
        self.table = ByteTable(byte.astype(np.int64), np.zeros_like(byte), ~byte)

    def encode_many(self, documents: Sequence[bytes]) -> list[Ids]:
        return [np.frombuffer(document, np.uint8) + np.uint16(self.first) for document in documents]

    def serialize(self) -> bytes:
        return b""


class ByteTokenizer260(ByteTokenizer):
    """Bytes as the contest numbers them: ids 4 to 259 are the bytes, 1 is BOS, and 0, 2 and 3 stand for nothing."""

    kind = "bytes260"
    vocabulary = 260
    bos = 1
    first = 4


class SentencePieceTokenizer(TextTokenizer):
    """A SentencePiece model.

    A `lossless` model (identity normalization, white space kept, byte fallback) uses byte ids for text that
    SentencePiece cannot represent. Any other model encodes text as SentencePiece does, and bytes that are not UTF-8 as
    U+FFFD, which the contest's models turn into a space. Raises `UserError` for a model that cannot be read, has more
    than 65,536 ids or has no BOS id.
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
        self._set_size(count, "this SentencePiece model has")
        self._processor, self.bos = processor, processor.bos_id()
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
        self.lossless = len(byte_ids) == 256 and _has_identity_normalizer(model)
        self._byte_ids = np.array([byte_ids[byte] for byte in range(256)], np.uint16) if self.lossless else None
        # A space without a piece of its own would fall back to the three bytes of the mark.
        self._raw = re.compile(f"([{bpe.RAW}]+)" if MARK in texts else f"([ {bpe.RAW}]+)")

    def _encode_texts(self, texts: list[str]) -> list[Ids]:
        # All cores: 10 MB/s on two, 6 on one (1,024 ids, November 2026). Every call starts threads anew, which takes
        # as long as encoding a short text.
        if sum(map(len, texts)) > _SHORT:
            encoded = self._processor.encode(texts, out_type=int, num_threads=-1)
        else:
            encoded = [self._processor.encode(text, out_type=int) for text in texts]
        return [np.array(ids, np.uint16) for ids in encoded]

    def serialize(self) -> bytes:
        return self._model


class CaseOpsTokenizer(Tokenizer):
    """A SentencePiece model of text encoded by CaseOps (`caseops`).

    It is lossless if the model is. `decode` accepts any ids and drops a mark that precedes no letter. `table` is the
    model's and counts marks as text, so its figure is too high.
    """

    kind = "caseops"

    def __init__(self, of: SentencePieceTokenizer) -> None:
        self.of = of
        self.vocabulary, self.bos, self.token_bytes, self.table = of.vocabulary, of.bos, of.token_bytes, of.table

    def encode_many(self, documents: Sequence[bytes]) -> list[Ids]:
        return self.of.encode_many([caseops.encode(document) for document in documents])

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> bytes:
        return b"".join(caseops.decode(self.of.decode(run)) for run in self._documents(ids))

    def byte_lengths(self, ids: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the bytes of text of each id, int64 (ids,); a mark has none unless it is text itself."""
        runs = ([self.token_bytes[index] for index in run.tolist()] for run in self._documents(ids))
        return np.concatenate([caseops.byte_lengths(pieces) for pieces in runs])

    def _documents(self, ids: Sequence[int] | npt.NDArray[Any]) -> list[npt.NDArray[np.int64]]:
        # Split at BOS: the end of a document and the start of the next could together form a mark.
        stream = np.asarray(ids, np.int64)
        return np.split(stream, np.flatnonzero(stream == self.bos))

    def serialize(self) -> bytes:
        return self.of.serialize()


def deserialize(kind: str, data: bytes) -> Tokenizer:
    """Return the tokenizer of this kind from the `data` of its `serialize`; `UserError` if that fails."""
    by_content = (SentencePieceTokenizer, HuggingFaceTokenizer, TiktokenTokenizer)
    if made := next((cls for cls in by_content if cls.kind == kind), None):
        return made(data)
    if kind == CaseOpsTokenizer.kind:
        return CaseOpsTokenizer(SentencePieceTokenizer(data))
    for byte_tokenizer in (ByteTokenizer, ByteTokenizer260):
        if kind == byte_tokenizer.kind and not data:
            return byte_tokenizer()
    raise UserError(f"no tokenizer of kind {kind!r} with {len(data):,} bytes")


def _has_identity_normalizer(model: bytes) -> bool:
    """True if a model's normalizer changes nothing but spaces, which become marks."""
    normalizer = dict(_fields(model)).get(3, b"")
    settings = dict(_fields(normalizer)) if isinstance(normalizer, bytes) else {}
    rules, dummy_prefix, collapses, marks = settings.get(2), settings.get(3, 1), settings.get(4, 1), settings.get(5, 1)
    return not rules and not dummy_prefix and not collapses and bool(marks)


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of the fields of a valid protocol buffer message."""
    rest = io.BytesIO(message)

    def number() -> int:
        value = shift = 0
        for (byte,) in iter(lambda: rest.read(1), b""):
            value, shift = value | (byte & 127) << shift, shift + 7
            if byte < 128:
                break
        return value

    while rest.tell() < len(message):
        field, wire = divmod(number(), 8)
        yield field, number() if wire == 0 else rest.read(number() if wire == 2 else {1: 8, 5: 4}.get(wire, 0))


class RawBytes(TokenizerSource):
    """Every byte is an id; the vocabulary has 257 ids, or 260 with the contest's numbering."""

    def build(self, vocabulary: int, sample: Sample) -> Tokenizer:
        if vocabulary == ByteTokenizer260.vocabulary:
            return ByteTokenizer260()
        return self._made(vocabulary, ByteTokenizer)


class SentencePieceSource(TokenizerSource):
    """Source of a SentencePiece model."""

    @abstractmethod
    def build(self, vocabulary: int, sample: Sample, symbols: Sequence[str] = ()) -> SentencePieceTokenizer:
        """Return the model; if it is trained here, each character of `symbols` is a piece and part of no other one."""


class SentencePieceFile(SentencePieceSource):
    """A SentencePiece model file."""

    path: str
    """Path of the model file."""

    def build(self, vocabulary: int, sample: Sample, symbols: Sequence[str] = ()) -> SentencePieceTokenizer:
        return self._made(vocabulary, lambda: SentencePieceTokenizer(regular_bytes(Path(self.path))))


class SentencePieceBPE(SentencePieceSource):
    """Byte pair encoding trained on the training text, lossless and deterministic."""

    sample_bytes: Count = 4_000_000
    """Bytes of training text to learn from."""

    def build(self, vocabulary: int, sample: Sample, symbols: Sequence[str] = ()) -> SentencePieceTokenizer:
        return SentencePieceTokenizer(bpe.train(sample(), vocabulary, self.sample_bytes, symbols))


class CaseOps(TokenizerSource):
    """CaseOps: capitals as marks before small letters, then a SentencePiece model; lossless if the model is.

    The model is trained on text with marks, each a piece of its own; so should be a model file (#1729).
    """

    of: SentencePieceSource = SentencePieceBPE()
    """Source of the SentencePiece model."""

    def build(self, vocabulary: int, sample: Sample) -> CaseOpsTokenizer:
        model = self.of.build(vocabulary, lambda: list(map(caseops.encode, sample())), caseops.SYMBOLS)
        return CaseOpsTokenizer(model)
