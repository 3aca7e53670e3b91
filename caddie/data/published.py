"""Corpora of token shards without their text: tokens or side-cars give the bytes, and ids identify documents."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import numpy as np

from caddie.data import corpus
from caddie.data.corpus import Corpus, Existing
from caddie.data.hub import Origin
from caddie.data.manifest import Manifest, Shard, Split, TokenizerEntry
from caddie.data.shards import open_shard, split_documents
from caddie.data.tokenizers import Tokenizer, TokenizerSource
from caddie.errors import UserError
from caddie.files import check_utf8, expanded, file_sha256
from caddie.runtime.progress import Progress

PATTERNS = {"train": "*_train_*.bin", "validation": "*_val_*.bin"}
SIDECARS = "*_val_bytes_*.bin"
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
    origin: Origin | None = None,
    existing: Existing = "replace",
) -> Corpus:
    """Describe the shards in the folder `shards`: write tokenizer, document hashes and manifest to `folder`.

    Only the first `train_shards` training shards are used, or all if None. Held-out bytes are those of the side-cars
    (`*_val_bytes_*.bin`) if there are any, else those that the tokens decode to. Raises `UserError` if a split is
    missing, a shard is damaged, or the tokenizer or a side-car does not fit.
    """
    shards = expanded(shards).resolve()
    check_utf8(shards)
    paths = {name: _shards(shards, pattern) for name, pattern in PATTERNS.items()}
    for name, present in paths.items():
        if not present:
            raise UserError(f"{shards}: no {name} shards; there must be some named {PATTERNS[name]}")
    paths["train"] = paths["train"][:train_shards]
    sidecars = sorted(shards.glob(SIDECARS), key=_numbered)
    _check_no_gap(paths["validation"])
    _check_no_gap(sidecars)
    tokenizer = tokenizer_source.build(vocabulary, _no_text)
    files = [*paths["train"], *paths["validation"], *sidecars]
    state = [corpus.file_state(path) for path in files]
    made_from = [FORMAT, tokenizer.sha256, state, *([asdict(origin)] if origin else [])]
    inputs = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()
    folder, ready = corpus.look_up(folder, inputs, existing, progress)
    if ready:
        return ready
    train, train_hashes = _split(paths["train"], folder, tokenizer, progress)
    validation, validation_hashes = _split(paths["validation"], folder, tokenizer, progress)
    if sidecars:
        validation = _counted_by(sidecars, validation, folder)
        progress.note(
            f"held-out bytes by the side-cars: {validation.source_bytes:,}; the tokens decode to"
            f" {validation.normalized_bytes:,}"
        )
    by_table = all(split.table_bytes == split.normalized_bytes for split in (train, validation))
    manifest = Manifest(
        name=shards.name,
        source=str(shards),
        origin=origin,
        inputs=inputs,
        tokenizer=TokenizerEntry.of(tokenizer),
        train=train,
        validation=validation,
        hashed="tokens",
        overlap=len(train_hashes & validation_hashes),
        byte_source="sidecar" if sidecars else "table" if by_table else "tokens",
    )
    if manifest.overlap:
        progress.note(f"{manifest.overlap:,} validation documents are training documents too")
    folder.mkdir(parents=True, exist_ok=True)
    corpus.write(folder, manifest, tokenizer, train_hashes, validation_hashes)
    return corpus.load_counted(folder)


def _shards(folder: Path, pattern: str) -> list[Path]:
    # Side-cars lie beside the token shards.
    return sorted((path for path in folder.glob(pattern) if "_bytes_" not in path.name), key=_numbered)


def _numbered(path: Path) -> tuple[str, int]:
    """Return name and number of a shard, to sort by: a document may end in the next shard, so the order matters."""
    name = path.stem.rstrip("0123456789")
    return name, int(path.stem[len(name) :] or 0)


def _check_no_gap(held_out: Sequence[Path]) -> None:
    """Raise `UserError` if the numbers of the held-out shards have a gap."""
    for one, other in pairwise(held_out):
        (name, number), (next_name, next_number) = _numbered(one), _numbered(other)
        if name == next_name and next_number > number + 1:
            missing = f"between {one.name} and {other.name} held-out shards are missing"
            raise UserError(f"{one.parent}: {missing}; copy or fetch them again")


def _counted_by(sidecars: Sequence[Path], validation: Split, folder: Path) -> Split:
    """Return the split with the bytes of its side-cars: one count per id; the first id is context only."""
    counts = [open_shard(path) for path in sidecars]
    if (found := sum(map(len, counts))) != validation.tokens:
        raise UserError(
            f"{sidecars[0]}: {found:,} byte counts for {validation.tokens:,} held-out tokens; fetch both again"
        )
    source_bytes = sum(int(part.sum(dtype=np.int64)) for part in counts) - int(counts[0][0])
    shards = tuple(_entry(path, len(part), folder) for path, part in zip(sidecars, counts, strict=True))
    return replace(validation, source_bytes=source_bytes, byte_counts=shards)


def _entry(path: Path, count: int, folder: Path) -> Shard:
    file = str(path.relative_to(folder) if path.is_relative_to(folder) else path)
    return Shard(file, count, file_sha256(path))


def _no_text() -> NoReturn:
    raise UserError("token shards need the tokenizer they were made with; name its SentencePiece model file")


def _split(paths: Sequence[Path], folder: Path, tokenizer: Tokenizer, progress: Progress) -> tuple[Split, set[bytes]]:
    opened = [open_shard(path) for path in paths]
    described: list[Shard] = []
    for path, tokens in zip(paths, opened, strict=True):
        if int(tokens.max()) >= tokenizer.vocabulary:
            raise UserError(f"{path}: token {int(tokens.max())}, but the tokenizer has {tokenizer.vocabulary} ids")
        described.append(_entry(path, len(tokens), folder))
        progress.note(f"{path.name}: {len(tokens):,} tokens")
    hashes, decoded_bytes, table_bytes = [], 0, 0
    for ids in split_documents(opened, tokenizer.bos):
        hashes.append(corpus.document_hash(ids.tobytes()))
        decoded_bytes += int(tokenizer.byte_lengths(ids)[1:].sum())  # the first is BOS, or context only
        table_bytes += tokenizer.table_bytes(ids)  # here too the first is context only, and BOS has no bytes
    sizes = (sum(map(len, opened)), decoded_bytes, decoded_bytes, table_bytes)
    return Split(len(hashes), *sizes, corpus.set_sha256(hashes), tuple(described)), set(hashes)
