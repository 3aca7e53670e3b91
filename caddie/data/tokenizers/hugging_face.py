"""Tokenizers of Hugging Face: a `tokenizer.json`, encoded by the library `tokenizers`.

Pieces are read as the file's decoder reads them: bytes written as characters (ByteLevel), marks for spaces (Metaspace),
bytes as `<0x41>` (ByteFallback), words without `##` (WordPiece). What its normalizer changes is lost, and is counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from caddie.data.tokenizers.tokenizer import MARK, Ids, Sample, TextTokenizer, TokenizerSource, library_errors
from caddie.errors import UserError
from caddie.files import regular_bytes

_BEGINS = ("<s>", "<bos>", "<|begin_of_text|>", "<|endoftext|>", "[BOS]", "[CLS]")
"""Usual names of the token before a document."""
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTE_OF = {
    **{chr(byte): byte for byte in _PRINTED},
    **{chr(256 + place): byte for place, byte in enumerate(sorted({*range(256)} - {*_PRINTED}))},
}
"""Byte of each character of ByteLevel: itself where it can be printed, else one from U+0100 on."""


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
            index: token.encode() if token in added else _piece(token, decoders) for token, index in vocabulary.items()
        }
        unknown = _unknown(value["model"], vocabulary)  # stands for text that it does not spell
        self._set_pieces({**pieces, **dict.fromkeys(unknown, b""), self.bos: b""}, "this tokenizer.json has")
        # If a model takes text that spells BOS for BOS, the text is cut inside that spelling.
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


def _unknown(model: Any, vocabulary: Mapping[str, int]) -> list[int]:
    """Return the id of the unknown token, if the model has one."""
    found = vocabulary.get(model.get("unk_token") or "", model.get("unk_id"))
    return [] if found is None else [found]


def _decoders(decoder: Any) -> Iterator[Any]:
    if decoder:
        yield decoder
        for inner in decoder.get("decoders", ()):
            yield from _decoders(inner)


def _piece(token: str, decoders: set[str]) -> bytes:
    """Return the bytes of a token of the model."""
    if "ByteLevel" in decoders and all(character in _BYTE_OF for character in token):
        return bytes(_BYTE_OF[character] for character in token)
    if "ByteFallback" in decoders and re.fullmatch("<0x[0-9A-F]{2}>", token):
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
    """Token put before every document; by default that of the file, or one with a usual name."""

    def build(self, vocabulary: int, sample: Sample) -> HuggingFaceTokenizer:
        """Return the tokenizer of the file."""
        return self._made(vocabulary, lambda: HuggingFaceTokenizer(self.data()))

    def data(self) -> bytes:
        """Return the file, with `bos` as its `bos_token` if it is set."""
        data = regular_bytes(Path(self.path))
        return json.dumps({**json.loads(data), "bos_token": self.bos}).encode() if self.bos else data
