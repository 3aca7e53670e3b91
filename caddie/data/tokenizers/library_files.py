"""Tokenizers of other libraries: a `tokenizer.json` of Hugging Face, and ranks of tiktoken.

Pieces of a `tokenizer.json` are read as its decoder reads them: bytes written as characters (ByteLevel), marks for
spaces (Metaspace), bytes as `<0x41>` (ByteFallback), words without `##` (WordPiece). Text that its normalizer changes
is lost, and counted. tiktoken loses nothing: it would skip text that the pattern of its ranks does not match, so such
a pattern is refused.
"""

import base64
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from caddie.data.tokenizers.tokenizer import MARK, Ids, Sample, TextTokenizer, TokenizerSource
from caddie.errors import UserError, first_line
from caddie.files import regular_bytes

_BEGINS = ("<s>", "<bos>", "<|begin_of_text|>", "<|endoftext|>", "[BOS]", "[CLS]")
"""Usual names of the token before a document."""
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTE_OF = {
    **{chr(byte): byte for byte in _PRINTED},
    **{chr(256 + place): byte for place, byte in enumerate(sorted({*range(256)} - {*_PRINTED}))},
}
"""Byte of each ByteLevel character: a printable byte has its own character, any other one from U+0100 on."""


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn errors of a tokenizer's library into a `UserError` that begins with `what`, or names a missing library."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, UserError):
        raise
    except ImportError as error:
        raise UserError(f"this tokenizer needs {error.name}; run: pip install {error.name}") from None
    except BaseException as error:  # a panic of the library is no Exception
        raise UserError(f"{what} ({first_line(error)})") from None


class HuggingFaceTokenizer(TextTokenizer):
    """A `tokenizer.json`, whose key `bos_token` (or else a usual name) says which token comes before a document.

    Special tokens within a text are text. Raises `UserError` if the library is missing, or for a file that it cannot
    read, that has more than 65,536 ids or no BOS.
    """

    kind = "hugging_face"

    def __init__(self, data: bytes) -> None:
        with library_errors("not a tokenizer.json, or a damaged one"):
            import tokenizers

            value: Any = json.loads(data)
            begin = value.pop("bos_token", None)
            value |= {"truncation": None, "padding": None, "post_processor": None}
            self._library = tokenizers.Tokenizer.from_str(json.dumps(value))
            self._library.encode_special_tokens = True
            vocabulary = self._library.get_vocab(with_added_tokens=True)
            added = {token["content"] for token in value["added_tokens"]}
            decoders = {inner["type"] for inner in _decoders(value["decoder"])}
        begin = begin or next((name for name in _BEGINS if name in vocabulary), None)
        if not isinstance(begin, str) or begin not in vocabulary:
            raise UserError('this tokenizer.json has no token for the start of a document; name one by bos="..."')
        self._value, self._begin, self.bos = value, begin, vocabulary[begin]
        pieces = {
            index: token.encode() if token in added and not _is_byte(token, decoders) else _piece(token, decoders)
            for token, index in vocabulary.items()
        }
        unknown = vocabulary.get(value["model"].get("unk_token") or "", value["model"].get("unk_id"))
        if unknown is not None:
            pieces[unknown] = b""  # it stands for text that it does not spell
        self._set_pieces({**pieces, self.bos: b""}, "this tokenizer.json has")
        # If the library encodes text that spells BOS as BOS itself, the text is cut inside that spelling.
        self._cut = re.compile(f"(?<={re.escape(begin[:1])})(?={re.escape(begin[1:])})")

    def _encode_texts(self, texts: list[str]) -> list[Ids]:
        encoded = self._encoded(texts)
        for place, text in enumerate(texts):
            if self.bos in encoded[place]:
                encoded[place] = np.concatenate(self._encoded(self._cut.split(text)))
                if self.bos in encoded[place]:
                    raise UserError(f"this tokenizer.json makes {self._begin} of text; name another token by bos=")
        return encoded

    def _encoded(self, texts: list[str]) -> list[Ids]:
        with library_errors("this tokenizer.json cannot encode the text"):
            batch = self._library.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.uint16) for encoding in batch]

    def serialize(self) -> bytes:
        """Return the file as compact JSON, with `bos_token`."""
        return json.dumps({**self._value, "bos_token": self._begin}, separators=(",", ":")).encode()


def _decoders(decoder: Any) -> Iterator[Any]:
    if decoder:
        yield decoder
        for inner in decoder.get("decoders", ()):
            yield from _decoders(inner)


def _is_byte(token: str, decoders: set[str]) -> bool:
    """Return True for a token that the library decodes to one byte, even if it is an added one."""
    return "ByteFallback" in decoders and re.fullmatch("<0x[0-9A-F]{2}>", token) is not None


def _piece(token: str, decoders: set[str]) -> bytes:
    """Return the bytes of a token of the model."""
    if "ByteLevel" in decoders and all(character in _BYTE_OF for character in token):
        return bytes(_BYTE_OF[character] for character in token)
    if _is_byte(token, decoders):
        return bytes([int(token[3:5], 16)])
    if "WordPiece" in decoders:
        return (token[2:] if token.startswith("##") else f" {token}").encode()
    if "BPEDecoder" in decoders:
        return token.replace("</w>", " ").encode()
    return token.replace(MARK, " ").encode()


class HuggingFaceFile(TokenizerSource):
    """A tokenizer of Hugging Face; lossless if it works on bytes and has no normalizer."""

    path: str
    """Path of its `tokenizer.json`."""
    bos: str = ""
    """Token put before every document; by default the file's `bos_token`, or a token with a usual name."""

    def build(self, vocabulary: int, sample: Sample) -> HuggingFaceTokenizer:
        return self._made(vocabulary, lambda: HuggingFaceTokenizer(self.data()))

    def data(self) -> bytes:
        """Return the file, with `bos` as its `bos_token` if it is set."""
        data = regular_bytes(Path(self.path))
        return json.dumps({**json.loads(data), "bos_token": self.bos}).encode() if self.bos else data


class TiktokenTokenizer(TextTokenizer):
    """Ranks, one a line: a token in base64 and its id. A line of JSON before them holds the pattern.

    BOS is the id after the last; names of special tokens within a text are text. Raises `UserError` if the library is
    missing, for ranks that cannot be read or lack a byte, for an invalid pattern, and for more than 65,536 ids.
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
            raise UserError("a rank is below 0, or two tokens share one; take the whole file")
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
        return _with_pattern(self._pattern, self._ranks)


def _with_pattern(pattern: str, ranks: Mapping[bytes, int]) -> bytes:
    ordered = sorted(ranks.items(), key=lambda pair: pair[1])
    lines = [b"%s %d" % (base64.b64encode(token), rank) for token, rank in ordered]
    return b"\n".join([json.dumps({"pattern": pattern}).encode(), *lines])


class TiktokenFile(TokenizerSource):
    """Ranks of tiktoken; lossless."""

    path: str
    """Path of a file of ranks (`.tiktoken`), or the name of an encoding that the library fetches, such as gpt2."""
    pattern: str = ""
    """Regular expression that splits a text into words; by default the encoding's own, or GPT-2's for a file."""

    def build(self, vocabulary: int, sample: Sample) -> TiktokenTokenizer:
        return self._made(vocabulary, lambda: TiktokenTokenizer(self.data()))

    def data(self) -> bytes:
        """Return pattern and ranks, as `TiktokenTokenizer` takes them."""
        path = Path(self.path)
        offline = "without a network, copy the file of ranks from elsewhere and name its path"
        with library_errors(f"its ranks cannot be fetched; {offline}"):
            import tiktoken

            if self.path in tiktoken.list_encoding_names() and not path.exists():
                encoding = tiktoken.get_encoding(self.path)
                return _with_pattern(self.pattern or encoding._pat_str, encoding._mergeable_ranks)
        if (data := regular_bytes(path)).startswith(b"{"):
            return data
        from tiktoken_ext.openai_public import r50k_pat_str

        return json.dumps({"pattern": self.pattern or r50k_pat_str}).encode() + b"\n" + data
