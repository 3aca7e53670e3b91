"""Tokenizer of a caddie artifact for Hugging Face transformers; it gives the same ids as the artifact."""

import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedTokenizer

from caddie.data.tokenizers import deserialize

TOKENIZER = "tokenizer.model"
"""File of the tokenizer, as the artifact stores it."""


class CaddieTokenizer(PreTrainedTokenizer):  # type: ignore[misc]
    """Tokenizer of one `kind`. A text begins with BOS; names of special tokens within it are text."""

    vocab_files_names: ClassVar = {"model_file": TOKENIZER}
    model_input_names: ClassVar = ["input_ids", "attention_mask"]

    def __init__(self, model_file: str, kind: str, **kwargs: Any) -> None:
        self._file = Path(model_file)
        self._tokenizer = deserialize(kind, self._file.read_bytes())
        self._names = _names(self._tokenizer.token_bytes)
        self._ids = {name: index for index, name in enumerate(self._names)}
        bos = self._names[self._tokenizer.bos]
        kwargs |= {"bos_token": bos, "eos_token": bos, "pad_token": bos, "split_special_tokens": True}
        super().__init__(model_file=model_file, kind=kind, special_tokens_pattern="bos", **kwargs)

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return self._tokenizer.vocabulary

    def get_vocab(self) -> dict[str, int]:
        """Return name to id."""
        return dict(self._ids)

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """Return the text of tokens; bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode([self._ids[token] for token in tokens]).decode("utf-8", "replace")

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        """Copy the tokenizer's file, and return its path."""
        path = Path(save_directory, f"{filename_prefix}-{TOKENIZER}" if filename_prefix else TOKENIZER)
        if path.resolve() != self._file.resolve():
            shutil.copyfile(self._file, path)
        return (str(path),)

    def _tokenize(self, text: str, **unused: Any) -> list[str]:
        return [self._names[index] for index in self._tokenizer.encode(text.encode(errors="replace")).tolist()]

    def _convert_token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self._names[index]


def _names(pieces: Sequence[bytes]) -> list[str]:
    """Return a name for each id, all different: its text if no other id has the same, else its number."""
    names = [piece.decode(errors="replace") for piece in pieces]
    alone = {name for name, count in Counter(names).items() if count == 1 and name and "\ufffd" not in name}
    return [name if name in alone else f"<|{index}|>" for index, name in enumerate(names)]
