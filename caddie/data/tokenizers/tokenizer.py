"""Tokenizer socket: methods of every tokenizer, and the sources that build one."""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from caddie.config import Config
from caddie.errors import UserError
from caddie.files import reason

Ids = npt.NDArray[np.uint16]
Sample = Callable[[], Sequence[bytes]]
"""Draws training documents, for a tokenizer that learns."""
MARK = "\u2581"
"""SentencePiece's mark for a space."""
MOST_IDS = 65_536
"""Ids that a shard of uint16 can hold."""
_BATCH = 256  # documents


@dataclass(frozen=True)
class ByteTable:
    """Three values per id, (vocabulary,), from which the contest counts the bytes of a token stream."""

    base_bytes: npt.NDArray[np.int64]
    """Bytes without one leading space."""
    has_leading_space: npt.NDArray[np.bool_]
    is_boundary: npt.NDArray[np.bool_]
    """True for control, unknown and unused ids, after which a leading space counts no byte."""


class Tokenizer(ABC):
    """Encodes documents as ids below `vocabulary`. Token streams put the id `bos` before every document.

    `token_bytes` are the bytes of each id on its own. Use `decode` and `byte_lengths` for text: the meaning of an id
    may depend on its context.
    """

    kind: ClassVar[str]
    vocabulary: int
    bos: int
    token_bytes: tuple[bytes, ...]
    table: ByteTable

    @abstractmethod
    def encode_many(self, documents: Sequence[bytes]) -> list[Ids]:
        """Return the ids of each document, uint16 without BOS."""

    @abstractmethod
    def serialize(self) -> bytes:
        """Return the bytes that an artifact stores, for `deserialize`."""

    def encode(self, data: bytes) -> Ids:
        """Return the ids of one document, uint16 without BOS."""
        return self.encode_many([data])[0]

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> bytes:
        """Return the bytes of any ids, such as ids sampled from a model; control ids have none."""
        return b"".join(map(self.token_bytes.__getitem__, np.asarray(ids, np.int64).tolist()))

    def byte_lengths(self, ids: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the bytes of text of each id, int64 (ids,), 0 for BOS; their sum is the length of `decode(ids)`.

        A stream may hold several documents, each after a BOS. In a stream that begins within a document, the first
        lengths may be wrong if the meaning of ids depends on earlier ids.
        """
        return self._lengths[np.asarray(ids, np.int64)]

    @cached_property
    def _lengths(self) -> npt.NDArray[np.int64]:
        return np.array([len(text) for text in self.token_bytes], np.int64)

    def table_bytes(self, ids: npt.NDArray[Any]) -> int:
        """Return the bytes by the contest's table method; the first id is context only.

        They equal the length of the decoded text for the contest's models, but not for all: a second space within a
        piece counts three bytes and a space after BOS none.
        """
        before, after = ids[:-1], ids[1:]
        spaces = self.table.has_leading_space[after] & ~self.table.is_boundary[before]
        return int(self.table.base_bytes[after].sum() + spaces.sum())

    @cached_property
    def prefixes(self) -> npt.NDArray[np.int64]:
        """Id that spells the longest proper prefix of each id's bytes, int64 (vocabulary,); -1 if no id spells one.

        The space before a word is part of its bytes. If ids have equal bytes the last one counts: SentencePiece
        models encode text by it, not by the byte id.
        """
        ids = {piece: index for index, piece in enumerate(self.token_bytes)}
        shorter = ((piece[:end] for end in range(len(piece) - 1, 0, -1)) for piece in self.token_bytes)
        return np.array([next((ids[piece] for piece in pieces if piece in ids), -1) for pieces in shorter], np.int64)

    @cached_property
    def sha256(self) -> str:
        """Hexadecimal SHA-256 of kind and content."""
        return hashlib.sha256(self.kind.encode() + b"\0" + self.serialize()).hexdigest()


class TextTokenizer(Tokenizer):
    """A tokenizer by a library that takes text alone.

    Bytes that the library cannot represent get byte ids. If some byte has no id, bytes that are not UTF-8 become
    U+FFFD.
    """

    _byte_ids: Ids | None
    """Id of each byte, (256,)."""
    _raw = re.compile("([\udc80-\udcff]+)")
    """Pattern, of one group, of text that the library cannot represent: at least bytes that are not UTF-8."""

    def _set_size(self, vocabulary: int, of: str) -> None:
        """Set the number of ids; `UserError` for more than a shard can hold (`of` begins its last clause)."""
        if vocabulary > MOST_IDS:
            raise UserError(f"a tokenizer may have {MOST_IDS:,} ids; {of} {vocabulary:,}")
        self.vocabulary = vocabulary

    def _set_pieces(self, by_id: Mapping[int, bytes], of: str) -> None:
        """Set the bytes of each id, b"" for ids in between; in the contest's table an id without bytes is a boundary.

        `UserError` for too many ids, as by `_set_size`.
        """
        self._set_size(max(by_id) + 1, of)
        pieces = [by_id.get(index, b"") for index in range(self.vocabulary)]
        self.token_bytes, self._byte_ids = tuple(pieces), byte_ids(pieces)
        self.table = ByteTable(
            np.array([len(piece.removeprefix(b" ")) for piece in pieces]),
            np.array([piece.startswith(b" ") for piece in pieces]),
            np.array([not piece for piece in pieces]),
        )

    @abstractmethod
    def _encode_texts(self, texts: list[str]) -> list[Ids]:
        """Return the ids of each text."""

    def encode_many(self, documents: Sequence[bytes]) -> list[Ids]:
        batches = (documents[start : start + _BATCH] for start in range(0, len(documents), _BATCH))
        return [ids for batch in batches for ids in self._encode_batch(batch)]

    def _encode_batch(self, documents: Sequence[bytes]) -> Iterator[Ids]:
        if self._byte_ids is None:
            yield from self._encode_texts([document.decode(errors="replace") for document in documents])
            return
        # Text at even indices, bytes that the library cannot represent at odd ones.
        split = [self._raw.split(document.decode(errors="surrogateescape")) for document in documents]
        encoded = iter(self._encode_texts([text for runs in split for text in runs[::2]]))
        for runs in split:
            parts = [next(encoded)]
            for between in runs[1::2]:
                values = np.frombuffer(between.encode(errors="surrogateescape"), np.uint8)
                parts += [self._byte_ids[values], next(encoded)]
            yield np.concatenate(parts) if len(parts) > 1 else parts[0]


T = TypeVar("T", bound=Tokenizer)


class TokenizerSource(Config):
    """Source of a tokenizer."""

    @abstractmethod
    def build(self, vocabulary: int, sample: Sample) -> Tokenizer:
        """Return a tokenizer of `vocabulary` ids, learnt from the training documents of `sample` if need be.

        Raises `UserError` for a vocabulary that the source cannot have.
        """

    def _made(self, vocabulary: int, make: Callable[[], T]) -> T:
        """Return the tokenizer of `make`; `UserError`, which names `path`, if it fails or has another number of ids."""
        name = getattr(self, "path", type(self).__name__)
        try:
            tokenizer = make()
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise UserError(f"no tokenizer in {name!r}: {reason(error)}") from None
        if tokenizer.vocabulary != vocabulary:
            raise UserError(f"{name} has {tokenizer.vocabulary} ids; set model.vocabulary={tokenizer.vocabulary}")
        return tokenizer


def byte_ids(token_bytes: Sequence[bytes]) -> Ids | None:
    """Return the id of each byte, (256,); None if a byte has no id of its own."""
    found = {piece: index for index, piece in enumerate(token_bytes) if len(piece) == 1}
    return np.array([found[bytes([byte])] for byte in range(256)], np.uint16) if len(found) == 256 else None
