"""The contest's FineWeb on the hub, as a corpus: shards of one tokenizer, or the documents that they were made of."""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from caddie.data import published
from caddie.data.corpus import VALIDATION_TEXT, Corpus, Existing, document_hash, look_up
from caddie.data.documents import find
from caddie.data.hub import Snapshot, on_disk, on_hub
from caddie.data.prepare import SAMPLE_BYTES, content_of, make_corpus
from caddie.data.shards import open_shard
from caddie.data.splits import FirstHeldOut, Text
from caddie.data.tokenizers import CaseOps, RawBytes, SentencePieceFile, TokenizerSource
from caddie.errors import UserError, suggest
from caddie.files import expanded, file_sha256
from caddie.runtime.progress import Progress

HELD_OUT = 50_000
"""Number of documents of every validation set: the first ones of the documents' file."""
DOCUMENTS, DOCUMENTS_FACTS = "docs_selected.jsonl", "docs_selected.source_manifest.json"


@dataclass(frozen=True)
class Variant:
    """The contest's text under one tokenizer, as a repository holds it."""

    dataset: str
    """Folder of the shards."""
    vocabulary: int
    tokenizer: str | None
    """Name of the model file; None for bytes."""
    repository: str = "willdepueoai/parameter-golf"
    caseops: bool = False
    """True if capitals are marks and side-cars state the bytes of the held-out text."""

    def source(self, model: Path | None) -> TokenizerSource:
        """Return the source of the tokenizer, whose model file was fetched."""
        if model is None:
            return RawBytes()
        file = SentencePieceFile(path=str(model))
        return CaseOps(of=file) if self.caseops else file


def _sentencepiece(vocabulary: int, **settings: Any) -> Variant:
    return Variant(f"fineweb10B_sp{vocabulary}", vocabulary, f"fineweb_{vocabulary}_bpe.model", **settings)


VARIANTS = {
    "byte260": Variant("fineweb10B_byte260", 260, None),
    "sp1024": _sentencepiece(1024),
    "sp2048": _sentencepiece(2048),
    "sp4096": _sentencepiece(4096, repository="kevclark/parameter-golf"),
    "sp8192": _sentencepiece(8192, repository="kevclark/parameter-golf"),
    "caseops8192": Variant(
        "fineweb10B_sp8192_lossless_caps_caseops_v1_reserved",
        8192,
        "fineweb_8192_bpe_lossless_caps_caseops_v1_reserved.model",
        "romeerp/parameter-golf-caseops-v1",
        caseops=True,
    ),
}
"""Named sources. The table pins no commit; a download keeps to the commit that it got first."""


@dataclass(frozen=True)
class Place:
    """Repository, revision or local copy to fetch from, in place of the variant's own."""

    repository: str | None = None
    revision: str | None = None
    local: Path | None = None
    """A copy on disk."""
    bars: bool = False
    """True to show huggingface_hub's progress bars."""

    def snapshot(self, variant: Variant, folder: Path) -> Snapshot:
        """Return the files, to be fetched into `folder` unless they are on disk."""
        if self.local is not None:
            return on_disk(self.local)
        repository, revision = self.repository or variant.repository, self.revision or "main"
        return on_hub(repository, revision, folder, bars=self.bars)


def fetch_fineweb(name: str, train_shards: int, folder: Path, progress: Progress, place: Place = Place()) -> Corpus:
    """Return the corpus of the first `train_shards` shards (100 million tokens, 200 MB each) and all validation shards.

    `name` is one of `VARIANTS`, or spN for any number of ids in a repository or copy that `place` names. Raises
    `UserError` if a file cannot be fetched or is damaged, the variant has fewer shards, or its validation set is not
    the contest's 50,000 documents.
    """
    other_place = place.repository or place.local
    if name not in VARIANTS and not (other_place and re.fullmatch(r"sp[1-9]\d*", name)):
        others = "" if other_place else "; a --repository or --local of yours may have spN for other N"
        known = f"{', '.join(VARIANTS)} and documents{suggest(name, VARIANTS)}"
        raise UserError(f"no variant {name}; there are {known}{others}")
    if (expanded(folder) / VALIDATION_TEXT).exists():
        raise UserError(
            f"{folder} holds a corpus of another text, which runs may need; name another folder, or delete it"
        )
    variant = VARIANTS.get(name) or _sentencepiece(int(name[2:]))
    snapshot = place.snapshot(variant, folder)
    training, validation, sidecars = (_shards(snapshot, variant, kind) for kind in ("train", "val", "val_bytes"))
    if train_shards > len(training):
        raise UserError(f"{snapshot.name} has {len(training)} training shards of {name}, not {train_shards}")
    if not validation or (variant.caseops and len(sidecars) != len(validation)):
        raise UserError(
            f"{snapshot.name} has {len(validation)} validation shards of {name} and {len(sidecars)} side-cars"
        )
    models = [path for path in snapshot.sizes if Path(path).name == variant.tokenizer]
    if variant.tokenizer and not models:
        raise UserError(f"{snapshot.name} has no file {variant.tokenizer}, the tokenizer of {name}")
    names = [*validation, *(sidecars if variant.caseops else []), *training[:train_shards]]
    snapshot.check_room([*models[:1], *names])
    source = variant.source(snapshot.fetch(models[0], progress) if models else None)
    bos = source.build(variant.vocabulary, list).bos
    held_out = 0
    for number, path in enumerate(names, 1):
        fetched = snapshot.fetch(path, progress, f" ({number} of {len(names)})")
        held_out += int((open_shard(fetched) == bos).sum()) if number <= len(validation) else 0
        if number == len(validation) and held_out != HELD_OUT:
            raise UserError(
                f"{fetched.parent} holds out {held_out:,} documents, and the contest {HELD_OUT:,}: a part of its"
                " validation set, or another"
            )
    return published.describe(
        fetched.parent, folder, source, variant.vocabulary, progress, train_shards, origin=snapshot.origin
    )


def _shards(snapshot: Snapshot, variant: Variant, kind: str) -> list[str]:
    """Return the paths of the shards of a kind in order; `UserError` if one is missing or the repository has others."""
    found = [re.fullmatch(rf"(.*/)?{variant.dataset}/fineweb_{kind}_(\d+)\.bin", path) for path in snapshot.sizes]
    matches = sorted((match for match in found if match), key=lambda match: int(match[2]))
    missing = [number for number, match in enumerate(matches) if int(match[2]) != number]
    if missing:
        raise UserError(
            f"{snapshot.name} lacks shard {missing[0]} of {kind} in {variant.dataset}; copy or fetch it again"
        )
    if kind == "train" and not matches:
        others = sorted({match[1] for path in snapshot.sizes if (match := re.search(r"fineweb10B_([^/]+)/", path))})
        has = f"has {', '.join(others)}" if others else "has no such shards"
        raise UserError(f"{snapshot.name} {has}, not {variant.dataset}; name another --repository or --local")
    return [match[0] for match in matches]


def fetch_documents(
    train_shards: int,
    folder: Path,
    downloads: Path,
    tokenizer_source: TokenizerSource,
    vocabulary: int,
    progress: Progress,
    place: Place = Place(),
    existing: Existing = "replace",
) -> Corpus:
    """Return a corpus of the contest's documents under any tokenizer: bytes are counted from the documents.

    The first 50,000 are held out, as the contest does; training takes `train_shards` shards of 100 million tokens from
    the rest, in the order of the file. The corpus is written to `folder`; `existing` is for another text's corpus
    there. The documents are kept in `downloads`. Raises `UserError` if they do not match their side-car. Memory holds
    the validation text, a shard, and about 0.2 kB per document.
    """
    snapshot = place.snapshot(VARIANTS["sp1024"], downloads)
    paths = {Path(path).name: path for path in snapshot.sizes}
    if not {DOCUMENTS, DOCUMENTS_FACTS} <= set(paths):
        raise UserError(f"{snapshot.name} has no {DOCUMENTS} with its {DOCUMENTS_FACTS}; name another repository")
    names = [paths[DOCUMENTS_FACTS], paths[DOCUMENTS]]
    snapshot.check_room(names)
    facts, documents = (snapshot.fetch(name, progress) for name in names)
    origin = snapshot.origin
    settings = [content_of(tokenizer_source), vocabulary, "first", HELD_OUT, train_shards, origin and asdict(origin)]
    text = Text(find(documents), document_hash, settings)
    folder, ready = look_up(folder, text.inputs, existing, progress)
    if ready:
        return ready
    _check_documents(documents, facts, progress)
    plan = FirstHeldOut(text, HELD_OUT)
    progress.note(f"tokenizer: {type(tokenizer_source).__name__} with {vocabulary:,} ids")
    tokenizer = tokenizer_source.build(vocabulary, lambda: plan.sample(SAMPLE_BYTES))
    return make_corpus(plan, tokenizer, folder, progress, train_shards=train_shards, origin=origin)


def _check_documents(documents: Path, facts: Path, progress: Progress) -> None:
    """Raise `UserError` unless the documents match their side-car."""
    try:
        stated: Any = json.loads(facts.read_text())
        sha256, held_out = str(stated["docs_sha256"]), stated.get("docs_val", HELD_OUT)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{facts}: no side-car with docs_sha256 ({error!r}); delete it and fetch it again") from None
    if held_out != HELD_OUT:
        raise UserError(f"{facts} holds out {held_out} documents, and the contest {HELD_OUT:,}")
    progress.note(f"reading {documents.name}, {documents.stat().st_size / 1e9:,.1f} GB, to compare its SHA-256")
    if file_sha256(documents) != sha256:
        raise UserError(f"{documents} is not the file that {facts.name} describes; delete both and fetch them again")
