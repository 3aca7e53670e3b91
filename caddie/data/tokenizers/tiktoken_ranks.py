"""Tokenizers of tiktoken: merges of bytes by rank, and a pattern that cuts text into words.

They lose nothing: the library skips text that the pattern does not match, and such a pattern is refused.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np

from caddie.data.tokenizers.tokenizer import Ids, Sample, TextTokenizer, TokenizerSource, library_errors
from caddie.errors import UserError
from caddie.files import regular_bytes


class TiktokenTokenizer(TextTokenizer):
    """Ranks, one a line: a token in base64 and its id. A line of JSON before them holds the pattern.

    BOS is the id after the last; names of special tokens within a text are text. Raises `UserError` if the library is
    missing, for ranks that cannot be read or lack a byte, a pattern that is none, and more than 65,536 ids.
    """

    kind = "tiktoken"

    def __init__(self, data: bytes) -> None:
        with library_errors("not a file of ranks, or a damaged one"):
            head, _, lines = data.partition(b"\n")
            self._pattern = str(json.loads(head)["pattern"])
            pairs = [line.split() for line in lines.splitlines()]
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
        self._ranks, self.bos = ranks, max(ranks.values(), default=0) + 1
        if min(ranks.values(), default=-1) < 0 or len(set(ranks.values())) < len(ranks):
            raise UserError("these ranks are below 0, or two tokens have one; take the whole file")
        self._set_pieces({rank: token for token, rank in ranks.items()} | {self.bos: b""}, "these ranks and BOS are")
        if self._byte_ids is None:
            raise UserError("these ranks lack a byte; take the whole file")
        with library_errors("tiktoken does not take these ranks or this pattern"):
            import tiktoken

            self._library = tiktoken.Encoding("caddie", pat_str=self._pattern, mergeable_ranks=ranks, special_tokens={})

    def _encode_texts(self, texts: list[str]) -> list[Ids]:
        with library_errors("these ranks cannot encode the text"):
            # A batch starts threads, which take longer than a single text.
            each = map(self._library.encode_ordinary, texts)
            encoded = self._library.encode_ordinary_batch(texts) if len(texts) > 1 else each
            found = [np.array(ids, np.uint16) for ids in encoded]
        if any(self._lengths[ids].sum() != len(text.encode()) for text, ids in zip(texts, found, strict=True)):
            raise UserError("the pattern of these ranks leaves out parts of the text; take one that matches all of it")
        return found

    def serialize(self) -> bytes:
        """Return pattern and ranks."""
        ordered = sorted(self._ranks.items(), key=lambda pair: pair[1])
        lines = [b"%s %d" % (base64.b64encode(token), rank) for token, rank in ordered]
        return b"\n".join([json.dumps({"pattern": self._pattern}).encode(), *lines])


class TiktokenFile(TokenizerSource):
    """Ranks of tiktoken; lossless."""

    path: str
    """Path of a file of ranks (`.tiktoken`), or the name of an encoding that the library fetches, such as gpt2."""
    pattern: str = ""
    """Regular expression of the words of a text; by default the encoding's own, or that of GPT-2 for a file."""

    def build(self, vocabulary: int, sample: Sample) -> TiktokenTokenizer:
        """Return the tokenizer of the file or the encoding."""
        return self._made(vocabulary, lambda: TiktokenTokenizer(self.data()))

    def data(self) -> bytes:
        """Return pattern and ranks, as `TiktokenTokenizer` takes them."""
        path = Path(self.path)
        offline = "without a network, copy the file of ranks from elsewhere and name its path"
        with library_errors(f"its ranks cannot be fetched; {offline}"):
            import tiktoken

            named = self.path in tiktoken.list_encoding_names() and not path.exists()
            encoding = tiktoken.get_encoding(self.path) if named else None
        if encoding:
            pattern, ranks = encoding._pat_str, encoding._mergeable_ranks
            lines = [b"%s %d" % (base64.b64encode(token), rank) for token, rank in ranks.items()]
        else:
            if (data := regular_bytes(path)).startswith(b"{"):
                return data
            from tiktoken_ext.openai_public import r50k_pat_str

            pattern, lines = r50k_pat_str, data.splitlines()
        return b"\n".join([json.dumps({"pattern": self.pattern or pattern}).encode(), *lines])
