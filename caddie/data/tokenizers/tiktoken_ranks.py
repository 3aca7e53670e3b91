"""Tokenizers of tiktoken: merges of bytes by rank, and a pattern that cuts text into words. They lose nothing."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from caddie.data.tokenizers.tokenizer import (
    MOST_IDS,
    Ids,
    Sample,
    Tokenizer,
    TokenizerSource,
    byte_ids,
    encode_around,
    of_size,
    table_of,
)
from caddie.errors import UserError, first_line
from caddie.files import reason

_RAW = re.compile("([\udc80-\udcff]+)")


class TiktokenTokenizer(Tokenizer):
    """Ranks, one a line: a token in base64 and its id. A line of JSON before them holds the pattern.

    BOS is the id after the last. Raises `UserError` if the library is missing, for ranks that cannot be read or lack a
    byte, a pattern that is none, and more than 65,536 ids.
    """

    kind = "tiktoken"

    def __init__(self, data: bytes) -> None:
        try:
            head, _, lines = data.partition(b"\n")
            self._pattern = str(json.loads(head)["pattern"])
            pairs = [line.split() for line in lines.splitlines()]
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise UserError(f"not a file of ranks, or a damaged one ({first_line(error)})") from None
        self._ranks, self.bos = ranks, max(ranks.values(), default=0) + 1
        self.vocabulary = self.bos + 1
        if min(ranks.values(), default=-1) < 0 or len(set(ranks.values())) < len(ranks):
            raise UserError("these ranks are below 0, or two tokens have one; take the whole file")
        if self.vocabulary > MOST_IDS:
            raise UserError(f"a tokenizer may have {MOST_IDS:,} ids; these ranks and BOS are {self.vocabulary:,}")
        pieces = [b""] * self.vocabulary
        for token, rank in ranks.items():
            pieces[rank] = token
        found = byte_ids(pieces)
        if found is None:
            raise UserError("these ranks lack a byte; take the whole file")
        self.token_bytes, self.table, self._byte_ids = tuple(pieces), table_of(pieces), found
        self._library = _load(self._pattern, ranks)

    def encode_many(self, documents: Sequence[bytes]) -> list[Ids]:
        """Return the ids of each document; names of special tokens within it are text."""
        return list(encode_around(_RAW, self._byte_ids, documents, self._encode_texts))

    def _encode_texts(self, texts: list[str]) -> list[Ids]:
        try:
            return [np.array(ids, np.uint16) for ids in self._library.encode_ordinary_batch(texts)]
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library is no Exception
            raise UserError(f"these ranks cannot encode the text ({first_line(error)})") from None

    def serialize(self) -> bytes:
        """Return pattern and ranks."""
        ordered = sorted(self._ranks.items(), key=lambda pair: pair[1])
        lines = [b"%s %d" % (base64.b64encode(token), rank) for token, rank in ordered]
        return b"\n".join([json.dumps({"pattern": self._pattern}).encode(), *lines])


def _load(pattern: str, ranks: dict[bytes, int]) -> Any:
    try:
        return _library().Encoding("caddie", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    except UserError:
        raise
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise UserError(f"tiktoken does not take these ranks or this pattern ({first_line(error)})") from None


def _library() -> Any:
    try:
        import tiktoken
    except ImportError:
        raise UserError("this tokenizer needs tiktoken; run: pip install 'caddie[tokenizers]'") from None
    return tiktoken


class TiktokenFile(TokenizerSource):
    """Ranks of tiktoken; lossless."""

    path: str
    """Path of a file of ranks (`.tiktoken`), or the name of an encoding that the library fetches, such as gpt2."""
    pattern: str = ""
    """Regular expression of the words of a text; by default the encoding's own, or that of GPT-2 for a file."""

    def build(self, vocabulary: int, sample: Sample) -> TiktokenTokenizer:
        """Return the tokenizer of the file or the encoding."""
        try:
            tokenizer = TiktokenTokenizer(self.data())
        except (OSError, ValueError) as error:
            raise UserError(f"no tokenizer in {self.path!r}: {reason(error)}") from None
        return of_size(tokenizer, vocabulary, self.path)

    def data(self) -> bytes:
        """Return pattern and ranks, as `TiktokenTokenizer` takes them."""
        library, path = _library(), Path(self.path)
        if self.path in library.list_encoding_names() and not path.exists():
            try:
                encoding = library.get_encoding(self.path)
            except Exception as error:  # whichever the HTTP library raises
                offline = "without a network, copy the file of ranks from elsewhere and name its path"
                raise UserError(f"its ranks cannot be fetched ({first_line(error)}); {offline}") from None
            pattern, ranks = encoding._pat_str, encoding._mergeable_ranks
            lines = [b"%s %d" % (base64.b64encode(token), rank) for token, rank in ranks.items()]
        else:
            if (data := path.read_bytes()).startswith(b"{"):
                return data
            from tiktoken_ext.openai_public import r50k_pat_str

            pattern, lines = r50k_pat_str, data.splitlines()
        return b"\n".join([json.dumps({"pattern": self.pattern or pattern}).encode(), *lines])
