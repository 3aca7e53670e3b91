"""Prepare text as a corpus folder, written under a temporary name and renamed when it is complete."""

import gzip
import hashlib
import json
import lzma
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import brotli
import numpy as np
import zstandard

from caddie.data import corpus, published
from caddie.data import documents as sources
from caddie.data.corpus import Corpus, Existing
from caddie.data.manifest import MANIFEST, TOKENIZER, Manifest, Shard, Split, SplitName, TokenizerEntry
from caddie.data.shards import Tokens, write_shard
from caddie.data.splits import FirstHeldOut, Plan, Text, divide, identity
from caddie.data.tokenizers import CaseOps, HuggingFaceFile, SentencePieceFile, TiktokenFile, Tokenizer, TokenizerSource
from caddie.errors import UserError, count
from caddie.files import expanded, file_sha256, making, regular_bytes
from caddie.runtime.progress import Progress

SHARD_TOKENS = 100_000_000
BATCH_BYTES = 1 << 22
REPORT_BYTES = 1 << 26
PREFIXES: dict[SplitName, str] = {"train": "train", "validation": "val"}
SAMPLE_BYTES = 1 << 24
COMPRESSED_BYTES = 4_000_000
Planned = tuple[SplitName, bytes]
OWN_SHARDS = tuple(f"{prefix}_{'[0-9]' * 6}.bin" for prefix in PREFIXES.values())
OWN_FILES = (*OWN_SHARDS, MANIFEST, TOKENIZER, corpus.DOCUMENTS, corpus.VALIDATION_TEXT)


def prepare(
    source: str | Path | None,
    *,
    folder: Path,
    tokenizer_source: TokenizerSource,
    vocabulary: int,
    validation_fraction: float,
    progress: Progress,
    held_out_only: bool = False,
    column: str | None = None,
    existing: Existing = "replace",
) -> Corpus:
    """Return the corpus of a source (see `documents.find`), prepared in `folder` unless it is there already.

    `existing` decides about a corpus there of another text, or of this one before it changed.

    A source that is itself a corpus is loaded; a folder of published shards (`*_train_*.bin`, `*_val_*.bin`) is
    described in place. With `held_out_only` the training documents are split off and hashed, but neither encoded nor
    written: enough to score on, and to prove what was held out. Raises `UserError` for a source, tokenizer, vocabulary
    or fraction that cannot be used.
    """
    path = expanded(source) if source is not None else None
    if path and column is not None and (corpus.is_corpus(path) or published.is_published(path)):
        raise UserError(f"{path} holds tokens, and a column is named; leave it out")
    if path and corpus.is_corpus(path):
        return Corpus.load(path)
    if path and published.is_published(path):
        return published.describe(path, folder, tokenizer_source, vocabulary, progress, existing=existing)
    if not 0 < validation_fraction < 1:
        raise UserError(f"the validation fraction must lie between 0 and 1, not be {validation_fraction:g}")
    settings = [content_of(tokenizer_source), vocabulary, validation_fraction]
    text = Text(sources.find(source, column), corpus.document_hash, settings)
    folder, ready = corpus.look_up(folder, text.inputs, existing, progress)
    if ready:
        return ready
    sizes, duplicates = text.survey(progress)
    plan = Plan(text, divide(sizes, validation_fraction, text.source, duplicates), duplicates)
    progress.note(f"tokenizer: {type(tokenizer_source).__name__} with {vocabulary:,} ids")
    tokenizer = tokenizer_source.build(vocabulary, lambda: plan.sample(SAMPLE_BYTES / sum(sizes.values())))
    unwritten = None
    if held_out_only:
        trained_on = [key for key, split in plan.splits.items() if split == "train"]
        size = sum(sizes[key] for key in trained_on)
        others = f"{count(len(trained_on), 'document')} of {size:,} bytes"
        progress.note(f"encoding the held-out documents; the others, {others}, are left alone")
        unwritten = Split(len(trained_on), 0, size, 0, 0, corpus.set_sha256(trained_on), shards=()), trained_on
        plan = replace(plan, splits={key: split for key, split in plan.splits.items() if split == "validation"})
    made = make_corpus(plan, tokenizer, folder, progress, unwritten, validation_fraction=validation_fraction)
    if not held_out_only and made.manifest.train.source_bytes < made.manifest.validation.source_bytes:
        progress.note("more text is held out than trained on; give more documents, or lower data.validation_fraction")
    return made


def prepare_validation(
    source: str | Path | None,
    *,
    folder: Path,
    tokenizer: Tokenizer,
    against: Corpus,
    progress: Progress,
    unseen: bool = False,
    column: str | None = None,
    existing: Existing = "replace",
) -> Corpus:
    """Return a corpus for scoring only: every document is held out, except those that `against` trains on.

    With `unseen`, the documents that `against` validates on are left out too. Figures and document hashes of the
    training split are copied from `against`. Raises `UserError` if no document is left, or if the source is a
    corpus, whose manifest would be read as text.
    """
    if source is not None and (corpus.is_corpus(expanded(source)) or holds_own_shards(expanded(source))):
        raise UserError(f"{source} is a corpus, and a text is needed; name the text that it was made from")
    train = against.manifest.train
    settings = [tokenizer.sha256, train.document_set_sha256, *(["unseen"] if unseen else [])]
    text = Text(sources.find(source, column), identity(tokenizer, against), settings)
    folder, ready = corpus.look_up(folder, text.inputs, existing, progress)
    if ready:
        return ready
    trained_on = corpus.read_hashes(against.folder, "train")
    seen = trained_on | corpus.read_hashes(against.folder, "validation") if unseen else trained_on
    sizes, duplicates = text.survey(progress)
    if against.manifest.hashed == "documents" and max(sizes.values()) > sources.UNCUT_BYTES:
        seen = seen | _seen_in_pieces(text, seen)
    plan = Plan(text, {key: "validation" for key in sizes if key not in seen}, duplicates)
    if not plan.splits:
        seen_in = "the training or the held-out text" if unseen else "the training text"
        raise UserError(f"{text.source.description}: every document is in {seen_in}; name another text")
    unwritten, removed = (replace(train, shards=()), trained_on), len(sizes) - len(plan.splits)
    if removed:
        progress.note(f"{removed:,} of {len(sizes):,} documents left out: they are in {against.folder}'s text")
    fields: dict[str, Any] = {"hashed": against.manifest.hashed, "training_documents_removed": removed}
    return make_corpus(plan, tokenizer, folder, progress, unwritten, **fields)


def _seen_in_pieces(text: Text, seen: set[bytes]) -> set[bytes]:
    """Return the hashes of long documents with a piece in `seen`: a text of one document had been cut into pieces."""
    long = (document for document in text.source.documents() if len(document) > sources.UNCUT_BYTES)
    return {text.identity(one) for one in long if not seen.isdisjoint(map(text.identity, sources.cut(one)))}


def make_corpus(
    plan: Plan | FirstHeldOut,
    tokenizer: Tokenizer,
    folder: Path,
    progress: Progress,
    unwritten: tuple[Split, Iterable[bytes]] | None = None,
    train_shards: int | None = None,
    **fields: Any,
) -> Corpus:
    """Write a corpus whose manifest has these `fields`, count its held-out text, and return it.

    `unwritten` holds the training split and its document hashes if training documents are not written. `train_shards`
    is the most training shards to write; None writes all.
    """
    check_corpus_folder(folder)
    with making(folder, replaces=True) as partial:
        training = _Writer(partial / PREFIXES["train"], tokenizer, plan.text.identity, train_shards)
        validation = _Writer(partial / PREFIXES["validation"], tokenizer, plan.text.identity)
        writers = {"train": training, "validation": validation}
        held_out: list[bytes] = []
        for batch in _batches(plan.documents(), progress):
            for name, writer in writers.items():
                writer.add([document for split, document in batch if split == name])
            held_out += [document for split, document in batch if split == "validation"]
            if training.full:
                break
        splits = {name: writer.split() for name, writer in writers.items()}
        for name, made in splits.items():
            if made.documents:
                documents = count(made.documents, "document")
                progress.note(f"{name}: {documents}, {made.source_bytes:,} bytes, {made.tokens:,} tokens")
        lines = _held_out_lines(held_out, splits["validation"], plan.text.source.description)
        packed = zstandard.ZstdCompressor(level=9).compress("".join(lines).encode())
        (partial / corpus.VALIDATION_TEXT).write_bytes(packed)
        train, trained_on = unwritten or (splits["train"], training.hashes)
        figures = [(len(one.hashes), one.changed, one.source_bytes, one.normalized_bytes) for one in writers.values()]
        manifest = Manifest(
            name=plan.text.source.name,
            source=plan.text.source.description,
            origin=plan.text.source.snapshot.origin if plan.text.source.snapshot else None,
            inputs=plan.text.inputs,
            tokenizer=TokenizerEntry.of(tokenizer, *map(sum, zip(*figures, strict=True))),
            train=train,
            validation=splits["validation"],
            hashed="documents",
            duplicates_removed=plan.duplicates,
            byte_source="documents",
            validation_compressors=_compressed(b"".join(held_out)),
        )
        corpus.write(partial, replace(manifest, **fields), tokenizer, trained_on, validation.hashes)
    return corpus.load_counted(folder)


def content_of(tokenizer_source: TokenizerSource) -> object:
    """Return the identity of a tokenizer source: its settings, the hash of its model file, or both."""
    if isinstance(tokenizer_source, CaseOps):
        return ["CaseOps", content_of(tokenizer_source.of)]
    if not isinstance(tokenizer_source, SentencePieceFile | HuggingFaceFile | TiktokenFile):
        return tokenizer_source.to_json()
    try:
        content = hashlib.sha256(regular_bytes(Path(tokenizer_source.path))).hexdigest()
    except (OSError, ValueError):
        content = None  # `build` meets the same error and reports it, unless the path names an encoding
    if isinstance(tokenizer_source, SentencePieceFile):
        return content
    return [content, tokenizer_source.to_json() if content is None else tokenizer_source.but(path="").to_json()]


class _Writer:
    """Encodes the documents of one split into shards; each shard begins with a document."""

    def __init__(
        self, prefix: Path, tokenizer: Tokenizer, identity: Callable[[bytes], bytes], most: int | None = None
    ) -> None:
        self.prefix, self.tokenizer, self.identity, self.most = prefix, tokenizer, identity, most
        self.shards: list[Shard] = []
        self.hashes: list[bytes] = []
        self.pieces: list[Tokens] = []
        self.pending = self.changed = self.source_bytes = self.normalized_bytes = self.table_bytes = 0

    @property
    def full(self) -> bool:
        return self.most is not None and len(self.shards) >= self.most

    def add(self, documents: list[bytes]) -> None:
        for document, ids in zip(documents, self.tokenizer.encode_many(documents), strict=True):
            piece = np.append(np.uint16(self.tokenizer.bos), ids)
            if self.pieces and self.pending + len(piece) > SHARD_TOKENS:
                self._flush()
            if self.full:
                break
            decoded = self.tokenizer.decode(ids)
            self.hashes.append(self.identity(document))
            self.changed += decoded != document
            self.source_bytes += len(document)
            self.normalized_bytes += len(decoded)
            self.table_bytes += self.tokenizer.table_bytes(piece)
            self.pieces.append(piece)
            self.pending += len(piece)

    def split(self) -> Split:
        if self.pieces:
            self._flush()
        sizes = (sum(shard.tokens for shard in self.shards), self.source_bytes, self.normalized_bytes, self.table_bytes)
        return Split(len(self.hashes), *sizes, corpus.set_sha256(self.hashes), tuple(self.shards))

    def _flush(self) -> None:
        path = Path(f"{self.prefix}_{len(self.shards):06d}.bin")
        write_shard(path, np.concatenate(self.pieces))
        self.shards.append(Shard(path.name, self.pending, file_sha256(path)))
        self.pieces, self.pending = [], 0


def _batches(documents: Iterator[Planned], progress: Progress) -> Iterator[list[Planned]]:
    """Yield some 4 MB of documents at a time, with a note every 64 MB."""
    batch: list[Planned] = []
    size = total = 0
    for split, document in documents:
        batch.append((split, document))
        size += len(document)
        if size >= BATCH_BYTES:
            yield batch
            if (total + size) // REPORT_BYTES > total // REPORT_BYTES:
                progress.note(f"{(total + size) / 1e6:,.0f} MB encoded")
            total, size, batch = total + size, 0, []
    yield batch


def _held_out_lines(documents: list[bytes], split: Split, name: str) -> list[str]:
    """Return held-out documents as JSON lines; `UserError` for what `Corpus.validation_documents` would refuse."""
    if split.source_bytes > corpus.TOKEN_BYTES * split.tokens:
        raise UserError(
            f"{name}: {split.tokens:,} tokens stand for {split.source_bytes:,} bytes of held-out text, more than"
            f" {corpus.TOKEN_BYTES:,} each, which is not scored; take a tokenizer that keeps its text"
        )
    lines = [json.dumps({"text": document.decode()}) + "\n" for document in documents]
    if (longest := max(map(len, lines), default=0)) > sources.LONGEST_LINE:
        raise UserError(
            f"{name}: a held-out document takes {longest:,} bytes as a line of JSON, and {sources.LONGEST_LINE:,} can"
            " be read again; cut it into documents"
        )
    return lines


def _compressed(data: bytes) -> dict[str, int] | None:
    """Return the bytes of the held-out text under general compressors at their strongest, for comparison."""
    if len(data) > COMPRESSED_BYTES:
        return None
    # A dictionary as large as the text finds as much as the preset's, which takes 0.7 GB and a twentieth of a second.
    xz = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": min(max(4096, len(data)), 64 << 20)}
    compressors: dict[str, Callable[[bytes], bytes]] = {
        "gzip -9": lambda text: gzip.compress(text, 9),
        "xz -9e": lambda text: lzma.compress(text, filters=[xz]),
        "zstd -22": lambda text: zstandard.ZstdCompressor(level=22).compress(text),
        "brotli -11": lambda text: bytes(brotli.compress(text, quality=11)),
    }
    with ThreadPoolExecutor() as executor:
        sizes = executor.map(lambda compress: len(compress(data)), compressors.values())
        return dict(zip(compressors, sizes, strict=True))


def holds_own_shards(folder: Path) -> bool:
    """True if a folder holds shards that `make_corpus` wrote, with or without the rest of their corpus."""
    return any(any(folder.glob(name)) for name in OWN_SHARDS)


def check_corpus_folder(folder: Path) -> None:
    """Raise `UserError` for a folder that may not be replaced: it holds other files than a corpus does."""
    if folder.is_dir():
        if foreign := sorted(path.name for path in folder.iterdir() if not any(map(path.match, OWN_FILES))):
            raise UserError(f"{folder} holds other files, such as {foreign[0]}; name an empty folder")
    elif folder.exists():
        raise UserError(f"{folder} is a file; name a folder")
