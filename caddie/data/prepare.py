"""Turns text into a corpus folder: held-out documents, a tokenizer, token shards, and the manifest last.

Bytes are always those of the documents; the count of the contest's table method stands beside them. The folder is
filled under another name and takes its own when it is complete.
"""

from __future__ import annotations

import gzip
import json
import lzma
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import brotli
import numpy as np
import zstandard

from caddie.data import corpus, published
from caddie.data import documents as sources
from caddie.data.corpus import Corpus, Manifest, RoundTripFigures, Shard, Split, SplitName, TokenizerEntry
from caddie.data.loaders import Tokens, write_shard
from caddie.data.splits import Plan, Text, divide, identity
from caddie.data.tokenizers import CaseOps, SentencePieceFile, Tokenizer, TokenizerSource
from caddie.errors import UserError
from caddie.files import unfinished
from caddie.runtime.progress import Progress

SHARD_TOKENS = 100_000_000
BATCH_BYTES = 1 << 22
REPORT_BYTES = 1 << 26
PREFIXES: dict[SplitName, str] = {"train": "train", "validation": "val"}
SAMPLE_BYTES = 1 << 24
COMPRESSED_BYTES = 4_000_000
OWN_SHARDS = tuple(f"{prefix}_{'[0-9]' * 6}.bin" for prefix in PREFIXES.values())
OWN_FILES = (*OWN_SHARDS, corpus.MANIFEST, corpus.TOKENIZER, corpus.DOCUMENTS, corpus.VALIDATION_TEXT)


def prepare(
    source: str | Path | None,
    *,
    folder: Path,
    tokenizer_source: TokenizerSource,
    vocabulary: int,
    validation_fraction: float,
    progress: Progress,
    limit_bytes: int | None = None,
) -> Corpus:
    """The corpus of a source (see `sources.find`), made in `folder` unless it is there already.

    A source that is itself a corpus is loaded; a folder of published shards (`*_train_*.bin`, `*_val_*.bin`) is
    described where it lies. `limit_bytes` ends a text early. `UserError` says what is wrong with what was given.
    """
    path = Path(source).expanduser() if source is not None else None
    if path and corpus.is_corpus(path):
        return Corpus.load(path)
    if path and published.is_published(path):
        return published.describe(path, folder, tokenizer_source, vocabulary, progress)
    if not 0 < validation_fraction < 1:
        raise UserError(f"the validation fraction must lie between 0 and 1, not be {validation_fraction:g}")
    folder = folder.expanduser().resolve()
    text = Text(sources.find(source), limit_bytes, corpus.document_hash)
    inputs = text.fingerprint([_content(tokenizer_source), vocabulary, validation_fraction])
    found = corpus.reusable(folder, inputs)
    if found:
        return found
    sizes, duplicates = text.survey(progress)
    plan = Plan(text, inputs, divide(sizes, validation_fraction, text.source, duplicates), duplicates)
    progress.note(f"tokenizer: {type(tokenizer_source).__name__} with {vocabulary:,} ids")
    tokenizer = tokenizer_source.build(vocabulary, lambda: plan.sample(SAMPLE_BYTES / sum(sizes.values())))
    with _new_folder(folder) as partial:
        manifest = replace(_write(plan, tokenizer, partial, progress), validation_fraction=validation_fraction)
        corpus.write_hashes(partial, plan.hashes("train"), plan.hashes("validation"))
        corpus.write_manifest(partial, manifest)
    return Corpus.load(folder)


def prepare_validation(
    source: str | Path | None,
    *,
    folder: Path,
    tokenizer: Tokenizer,
    against: Corpus | None,
    progress: Progress,
    limit_bytes: int | None = None,
    unseen: bool = False,
) -> Corpus:
    """A corpus for scoring alone: every document is held out, except those that `against` trains on.

    With `unseen` those that it validates on are left out too. The training split's figures and document hashes are
    copied from `against`; without it nothing is known of training, and `Corpus.check_disjoint` says so.
    """
    folder = folder.expanduser().resolve()
    text = Text(sources.find(source), limit_bytes, identity(tokenizer, against))
    train = against.manifest.train if against else None
    inputs = text.fingerprint([tokenizer.sha256, train and train.document_set_sha256, *(["unseen"] if unseen else [])])
    found = corpus.reusable(folder, inputs)
    if found:
        return found
    known = corpus.read_hashes(against.folder, "train") if against else set()
    seen = known | corpus.read_hashes(against.folder, "validation") if against and unseen else known
    sizes, duplicates = text.survey(progress)
    plan = Plan(text, inputs, {key: "validation" for key in sizes if key not in seen}, duplicates)
    if not plan.splits:
        seen_in = "the training or the held-out text" if unseen else "the training text"
        raise UserError(f"{text.source.description}: every document is in {seen_in}; name another text")
    with _new_folder(folder) as partial:
        manifest = replace(
            _write(plan, tokenizer, partial, progress),
            train=train and replace(train, shards=()),
            hashed=against.manifest.hashed if against else "documents",
            training_documents_removed=len(sizes) - len(plan.splits),
        )
        corpus.write_hashes(partial, known, plan.hashes("validation"))
        corpus.write_manifest(partial, manifest)
    return Corpus.load(folder)


def _content(tokenizer_source: TokenizerSource) -> object:
    """What names a tokenizer source: its settings, or the hash of the model it names."""
    if isinstance(tokenizer_source, CaseOps):
        return ["CaseOps", _content(tokenizer_source.of)]
    if not isinstance(tokenizer_source, SentencePieceFile):
        return tokenizer_source.to_json()
    try:
        return corpus.file_sha256(Path(tokenizer_source.path))
    except (OSError, ValueError):
        return None  # the same trouble meets `build`, which has the words for it


class _Writer:
    """Encodes the documents of one split into shards, each of which begins with a document."""

    def __init__(self, folder: Path, prefix: str, tokenizer: Tokenizer) -> None:
        self.folder, self.prefix, self.tokenizer = folder, prefix, tokenizer
        self.shards: list[Shard] = []
        self.pieces: list[Tokens] = []
        self.held = self.tokens = self.documents = self.changed = 0
        self.source_bytes = self.normalized_bytes = self.table_bytes = 0

    def add(self, documents: list[bytes]) -> None:
        for document, ids in zip(documents, self.tokenizer.encode_many(documents), strict=True):
            decoded = self.tokenizer.decode(ids)
            self.documents += 1
            self.changed += decoded != document
            self.source_bytes += len(document)
            self.normalized_bytes += len(decoded)
            piece = np.concatenate([np.array([self.tokenizer.bos], np.uint16), ids])
            self.table_bytes += self.tokenizer.table_bytes(piece)
            if self.pieces and self.held + len(piece) > SHARD_TOKENS:
                self._flush()
            self.pieces.append(piece)
            self.held += len(piece)

    def split(self, hashes: list[bytes]) -> Split:
        self._flush()
        counted = (self.documents, self.tokens, self.source_bytes, self.normalized_bytes, self.table_bytes)
        return Split(*counted, corpus.set_sha256(hashes), tuple(self.shards))

    def _flush(self) -> None:
        path = self.folder / f"{self.prefix}_{len(self.shards):06d}.bin"
        write_shard(path, np.concatenate(self.pieces))
        self.shards.append(Shard(path.name, self.held, corpus.file_sha256(path)))
        self.tokens += self.held
        self.pieces, self.held = [], 0


def _write(plan: Plan, tokenizer: Tokenizer, folder: Path, progress: Progress) -> Manifest:
    """Everything but the document hashes and the manifest, which is returned."""
    (folder / corpus.TOKENIZER).write_bytes(tokenizer.serialize())
    writers = {name: _Writer(folder, PREFIXES[name], tokenizer) for name in sorted(set(plan.splits.values()))}
    held_out: list[bytes] = []
    for batch in _batches(plan.documents(), progress):
        for name, writer in writers.items():
            writer.add([document for split, document in batch if split == name])
        held_out += [document for split, document in batch if split == "validation"]
    splits = {name: writer.split(plan.hashes(name)) for name, writer in writers.items()}
    for name, split in splits.items():
        progress.note(f"{name}: {split.documents:,} documents, {split.source_bytes:,} bytes, {split.tokens:,} tokens")
    lines = (json.dumps({"text": document.decode()}) + "\n" for document in held_out)
    packed = zstandard.ZstdCompressor(level=9).compress("".join(lines).encode())
    (folder / corpus.VALIDATION_TEXT).write_bytes(packed)
    return Manifest(
        version=corpus.VERSION,
        name=plan.text.source.name,
        source=plan.text.source.description,
        inputs=plan.inputs,
        tokenizer=TokenizerEntry.of(tokenizer, _round_trip(list(writers.values()))),
        train=splits.get("train"),
        validation=splits["validation"],
        hashed="documents",
        duplicates_removed=plan.duplicates,
        training_documents_removed=0,
        overlap=0,
        byte_source="documents",
        validation_compressors=_compressed(b"".join(held_out)),
        validation_fraction=None,
    )


def _batches(
    documents: Iterator[tuple[SplitName, bytes]], progress: Progress
) -> Iterator[list[tuple[SplitName, bytes]]]:
    """Some 4 MB of documents at a time, with a report every 64 MB."""
    batch: list[tuple[SplitName, bytes]] = []
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


def _round_trip(writers: list[_Writer]) -> RoundTripFigures:
    return RoundTripFigures(
        documents=sum(writer.documents for writer in writers),
        changed_documents=sum(writer.changed for writer in writers),
        source_bytes=sum(writer.source_bytes for writer in writers),
        decoded_bytes=sum(writer.normalized_bytes for writer in writers),
    )


_XZ = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}


def _compressed(data: bytes) -> dict[str, int] | None:
    """What general compressors at their strongest make of the held-out text, as a yardstick."""
    if len(data) > COMPRESSED_BYTES:
        return None
    compressors: dict[str, Callable[[bytes], bytes]] = {
        "gzip -9": lambda text: gzip.compress(text, 9),
        # As large a dictionary as the text finds as much; the preset's takes 0.7 GB and a twentieth of a second.
        "xz -9e": lambda text: lzma.compress(text, filters=[{**_XZ, "dict_size": min(max(4096, len(text)), 64 << 20)}]),
        "zstd -22": lambda text: zstandard.ZstdCompressor(level=22).compress(text),
        "brotli -11": lambda text: bytes(brotli.compress(text, quality=11)),
    }
    with ThreadPoolExecutor() as executor:
        sizes = executor.map(lambda compress: len(compress(data)), compressors.values())
        return dict(zip(compressors, sizes, strict=True))


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill that takes the place of `folder` when all went well, and vanishes when not."""
    if folder.is_dir():
        foreign = [path.name for path in folder.iterdir() if not any(map(path.match, OWN_FILES))]
        if foreign:
            raise UserError(f"{folder} holds other files, such as {sorted(foreign)[0]}; name an empty folder")
    elif folder.exists():
        raise UserError(f"{folder} is a file; name a folder")
    partial, old = unfinished(folder), unfinished(folder)
    try:
        partial.mkdir(parents=True)
        yield partial
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror})") from None
    except UserError as error:
        raise UserError(str(error).replace(str(partial), str(folder))) from None
    finally:
        for leftover in (partial, old):
            shutil.rmtree(leftover, ignore_errors=True)
