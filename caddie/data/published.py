"""Corpora of token shards without their text: bytes are counted from tokens, and ids identify documents."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from caddie.data import corpus
from caddie.data.corpus import Corpus, Manifest, Shard, Split, TokenizerEntry
from caddie.data.shards import open_shard, split_documents
from caddie.data.tokenizers import Tokenizer, TokenizerSource
from caddie.errors import UserError
from caddie.runtime.progress import Progress

PATTERNS = {"train": "*_train_*.bin", "validation": "*_val_*.bin"}
CHUNK_TOKENS = 1 << 22
FORMAT = 2
"""Part of every fingerprint; raise it when the same shards give another corpus."""


def is_published(folder: Path) -> bool:
    """True if a folder holds shards named as the contest names them."""
    return folder.is_dir() and any(_shards(folder, pattern) for pattern in PATTERNS.values())


def describe(
    shards: Path,
    folder: Path,
    tokenizer_source: TokenizerSource,
    vocabulary: int,
    progress: Progress,
    train_shards: int | None = None,
) -> Corpus:
    """Describe the shards in the folder `shards`: write tokenizer, document hashes and manifest to `folder`.

    Only the first `train_shards` training shards are used, or all if None. Raises `UserError` if a split is missing, a
    shard is damaged, or the tokenizer does not fit.
    """
    shards, folder = shards.expanduser().resolve(), folder.expanduser().resolve()
    paths = {name: _shards(shards, pattern) for name, pattern in PATTERNS.items()}
    for name, present in paths.items():
        if not present:
            raise UserError(f"{shards}: no {name} shards; there must be some named {PATTERNS[name]}")
    paths["train"] = paths["train"][:train_shards]
    tokenizer = tokenizer_source.build(vocabulary, _no_text)
    state = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for group in paths.values() for path in group]
    inputs = hashlib.sha256(json.dumps([FORMAT, tokenizer.sha256, state]).encode()).hexdigest()
    if found := corpus.reusable(folder, inputs):
        return found
    train, train_hashes = _split(paths["train"], folder, tokenizer, progress)
    validation, validation_hashes = _split(paths["validation"], folder, tokenizer, progress)
    by_table = all(split.table_bytes == split.normalized_bytes for split in (train, validation))
    manifest = Manifest(
        name=shards.name,
        source=str(shards),
        inputs=inputs,
        tokenizer=TokenizerEntry.of(tokenizer, None),
        train=train,
        validation=validation,
        hashed="tokens",
        overlap=len(train_hashes & validation_hashes),
        byte_source="table" if by_table else "tokens",
    )
    if manifest.overlap:
        progress.note(f"{manifest.overlap:,} validation documents are training documents too")
    folder.mkdir(parents=True, exist_ok=True)
    corpus.write(folder, manifest, tokenizer, train_hashes, validation_hashes)
    return corpus.load_counted(folder)


def _shards(folder: Path, pattern: str) -> list[Path]:
    # Shards of byte counts may lie beside the token shards.
    return sorted(path for path in folder.glob(pattern) if "_bytes_" not in path.name)


def _no_text() -> NoReturn:
    raise UserError("token shards need the tokenizer they were made with; name its SentencePiece model file")


def _split(paths: Sequence[Path], folder: Path, tokenizer: Tokenizer, progress: Progress) -> tuple[Split, set[bytes]]:
    opened = [open_shard(path) for path in paths]
    described: list[Shard] = []
    table_bytes, last = 0, np.empty(0, np.uint16)
    for path, tokens in zip(paths, opened, strict=True):
        if int(tokens.max()) >= tokenizer.vocabulary:
            raise UserError(f"{path}: token {int(tokens.max())}, but the tokenizer has {tokenizer.vocabulary} ids")
        for begin in range(0, len(tokens), CHUNK_TOKENS):
            chunk = np.concatenate([last, tokens[begin : begin + CHUNK_TOKENS]])
            table_bytes += tokenizer.table_bytes(chunk)
            last = chunk[-1:]
        file = str(path.relative_to(folder) if path.is_relative_to(folder) else path)
        described.append(Shard(file, len(tokens), corpus.file_sha256(path)))
        progress.note(f"{path.name}: {len(tokens):,} tokens")
    hashes, decoded_bytes = [], 0
    for ids in split_documents(opened, tokenizer.bos):
        hashes.append(corpus.document_hash(ids.tobytes()))
        decoded_bytes += int(tokenizer.byte_lengths(ids)[1:].sum())  # the first is BOS, or context only
    sizes = (sum(map(len, opened)), decoded_bytes, decoded_bytes, table_bytes)
    return Split(len(hashes), *sizes, corpus.set_sha256(hashes), tuple(described)), set(hashes)
