"""Find the corpus of a recipe and a text, of an artifact to score, or of `caddie data`."""

import hashlib
import json
import shlex
from collections.abc import Collection
from itertools import accumulate, islice
from pathlib import Path

from caddie.data.corpus import DOCUMENTS, Corpus, Existing, is_corpus
from caddie.data.documents import LIBRARY, find
from caddie.data.fineweb import VARIANTS, Place, fetch_documents, fetch_fineweb
from caddie.data.hub import HUB
from caddie.data.manifest import MANIFEST
from caddie.data.prepare import check_corpus_folder, holds_own_shards, prepare, prepare_validation
from caddie.data.round_trip_audit import Rule, audit
from caddie.data.shards import split_documents
from caddie.data.tokenizers import (
    CaseOps,
    HuggingFaceFile,
    RawBytes,
    SentencePieceFile,
    TiktokenFile,
    Tokenizer,
    TokenizerSource,
    deserialize,
)
from caddie.errors import UserError, check_kind
from caddie.files import expanded, regular_bytes, write_file
from caddie.pack import artifact as artifacts
from caddie.pack.artifact import AS_ARTIFACT, Artifact
from caddie.recipes.catalog import shipped
from caddie.recipes.recipe import Data, Recipe
from caddie.report.read import pick, read_json
from caddie.report.run_files import RECIPE
from caddie.runtime.distributed import Ranks
from caddie.runtime.progress import SILENT, Progress

FOR_ANY_TEXT = ("tiny", "small")
"""The recipes that are not for the contest's text."""
CORPORA = Path("data")
"""Folder of prepared texts, below the working directory."""
AUDIT_BYTES = 1 << 22
"""Bytes of held-out documents that the round-trip audit reads, which takes some seconds."""


def open_corpus(
    recipe: Recipe,
    source: str | Path | None,
    progress: Progress = SILENT,
    folder: Path | None = None,
    ranks: Ranks = Ranks(),
    column: str | None = None,
) -> Corpus:
    """Return the corpus of a text under the recipe's tokenizer, prepared once and found again afterwards.

    Of several processes the first prepares it and the others wait; without a shared disk, the first of each machine
    does. `column` names the column of the text in Parquet and JSON lines. Raises `UserError` for a text that cannot be
    read or does not fit the recipe.
    """
    with ranks.turn():
        check_source(source)
        data, size = recipe.data, recipe.model.vocabulary
        settings: list[object] = [data.tokenizer.to_json(), size, data.validation_fraction]
        corpus = prepare(
            source,
            folder=folder or _corpus_folder(source, settings, column),
            tokenizer_source=data.tokenizer,
            vocabulary=size,
            validation_fraction=data.validation_fraction,
            progress=progress,
            column=column,
            existing="keep" if folder is None else "refuse",
        )
        if (vocabulary := corpus.manifest.tokenizer.vocabulary) != size:
            raise UserError(
                f"the tokenizer of {corpus.folder} has {vocabulary:,} ids; set model.vocabulary={vocabulary}"
            )
        if isinstance(data.tokenizer, CaseOps) != ((kind := corpus.tokenizer().kind) == "caseops"):
            progress.note(
                f"the recipe has the tokenizer {type(data.tokenizer).__name__}, but the corpus was made with {kind}"
            )
        corpus.train_shards()
        corpus.check_shards("train")
        corpus.check_shards("validation")
    return corpus


def check_source(source: str | Path | None) -> None:
    """Raise `UserError` for a text that does not exist, or for a corpus that lost its manifest.

    Such a corpus would be read as a folder of text, held-out documents included.
    """
    check_kind(source, (str, Path, type(None)), "the text", "name a file, a folder or a corpus, or leave it out")
    if source == "":
        raise UserError("the path of the text is empty; name a text, or leave it out for Python's own library")
    folder = expanded(source) if source is not None else None
    if folder is None or is_corpus(folder):
        return
    if holds_own_shards(folder):
        raise UserError(f"{source} is a corpus without its {MANIFEST} or {DOCUMENTS}; prepare the data again")
    find(source)


def _corpus_folder(source: str | Path | None, settings: list[object], column: str | None = None) -> Path:
    place = str(source or LIBRARY)
    if source and not place.startswith(HUB):
        place = str(expanded(source).resolve())
    key = [place, *settings, *([column] if column else [])]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:8]
    return CORPORA / f"{Path(place).name.split('.')[0].replace(':', '-') or 'root'}-{digest}"


def open_for_scoring(
    artifact: Artifact, source: str | Path | None, progress: Progress = SILENT, ranks: Ranks = Ranks()
) -> Corpus:
    """Return the corpus to score an artifact on; no held-out document of it is a training document of the artifact.

    A text is split again as for training; `UserError` unless that gives the same training documents. Of several
    processes the first prepares it and the others wait.
    """
    check_kind(artifact, Artifact, "the artifact", AS_ARTIFACT)
    with ranks.turn():
        tokenizer, manifest = artifact.tokenizer, artifact.manifest
        check_source(source)
        if source is not None and is_corpus(expanded(source)):
            corpus = Corpus.load(expanded(source))
        else:
            fraction = manifest.validation_fraction or Data().validation_fraction
            corpus = prepare(
                source,
                folder=_corpus_folder(source, [tokenizer.sha256, fraction]),
                tokenizer_source=_tokenizer_source(tokenizer),
                vocabulary=tokenizer.vocabulary,
                validation_fraction=fraction,
                progress=progress,
                held_out_only=True,
            )
        if corpus.manifest.tokenizer.sha256 != tokenizer.sha256:
            raise UserError(
                f"{corpus.folder} was tokenized by another tokenizer than the artifact's; "
                f"make one with: caddie data TEXT --tokenizer {artifact.path} --against CORPUS --out DIR"
            )
        stated, known = manifest.train_documents_sha256, corpus.manifest
        unstated = stated == known.train.document_set_sha256 and corpus.shows_hashed_tokens()  # of an earlier version
        if stated != known.training_set and not unstated:
            own = pick(read_json(artifact.path.parent / RECIPE), "corpus")
            named = f"score on the run's own, --data {shlex.quote(own)}, or " if isinstance(own, str) else ""
            raise UserError(
                f"the artifact may have been trained on this text; {named}make a corpus without its "
                f"training documents: caddie data TEXT --tokenizer {artifact.path} --against TRAINING_CORPUS --out DIR"
            )
        corpus.check_disjoint()
        corpus.check_shards("validation")
    return corpus


_FILES: dict[str, tuple[str, type[SentencePieceFile | HuggingFaceFile | TiktokenFile]]] = {
    "sentencepiece": (".model", SentencePieceFile),
    "caseops": (".model", SentencePieceFile),
    "hugging_face": (".json", HuggingFaceFile),
    "tiktoken": (".tiktoken", TiktokenFile),
}
"""Kind of tokenizer to the suffix of its file and the class that reads it."""


def _tokenizer_source(tokenizer: Tokenizer) -> TokenizerSource:
    data = tokenizer.serialize()
    if not data:
        return RawBytes()
    suffix, source = _FILES[tokenizer.kind]
    path = CORPORA / "tokenizers" / f"{tokenizer.sha256[:16]}{suffix}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, data)
    file = source(path=str(path))
    return CaseOps(of=file) if isinstance(file, SentencePieceFile) and tokenizer.kind == "caseops" else file


def describe(corpus: Corpus) -> str:
    """Describe a corpus in one line: its size, and what its tokenizer loses."""
    manifest = corpus.manifest
    trip = manifest.tokenizer.round_trip
    if trip is None:
        counters = {"table": "the contest's table", "sidecar": "the side-cars"}
        counted_by = counters.get(manifest.byte_source, "the tokens")
        kept = f"bytes by {counted_by} (no text)"
    elif trip.changed_documents:
        rules = sum(rule.lossy for rule in audit(corpus.tokenizer()))
        kept = (
            f"lossy tokenizer: {rules} rules, {trip.changed_documents:,} of {trip.documents:,} documents change,"
            f" their length by {trip.decoded_bytes - trip.source_bytes:+,} bytes"
        )
    else:
        kept = "lossless tokenizer"
    sizes = f"{manifest.train.source_bytes:,} bytes to train on, {manifest.validation.source_bytes:,}"
    return f"{manifest.name}: {sizes} held out; {kept}"


def audit_corpus(corpus: Corpus) -> list[Rule]:
    """Audit a tokenizer's round trip, on the first `AUDIT_BYTES` of held-out text if the corpus has it."""
    tokenizer = corpus.tokenizer()
    if corpus.manifest.byte_source != "documents":
        return audit(tokenizer)
    documents = corpus.validation_documents()
    count = sum(begin < AUDIT_BYTES for begin in accumulate(map(len, documents[:-1]), initial=0))
    encoded = split_documents([corpus.validation_tokens()], tokenizer.bos)
    return audit(tokenizer, documents[:count], [ids[1:] for ids in islice(encoded, count)])


def make_corpus(
    source: str | None,
    recipe: Recipe,
    *,
    tokenizer: str | None,
    against: str | None,
    out: Path | None,
    progress: Progress,
    column: str | None = None,
    settings: Collection[str] = (),
) -> Corpus:
    """Return the corpus that `caddie data` makes: split as the recipe says or, with `against`, for scoring only.

    `against` is a corpus: all documents but its training documents are held out. `tokenizer` names an artifact or a
    tokenizer's file to use in place of the recipe's, `column` the column of the text, `settings` the given settings.
    """
    if out:
        check_corpus_folder(out)
    given_too = [name for name, value in (("--out", out), ("--tokenizer", tokenizer)) if value is not None]
    if source and against is None and (given_too or settings) and is_corpus(expanded(source)):
        leave = " and ".join([*given_too, *settings])
        raise UserError(f"{source} is a corpus already; leave out {leave}, or name the text that it was made from")
    if against is not None:
        other = Corpus.load(Path(against))
        given = _given_tokenizer(Path(tokenizer)) if tokenizer else other.tokenizer()
        return prepare_validation(
            source,
            folder=out or _corpus_folder(source, [given.sha256, against], column),
            tokenizer=given,
            against=other,
            progress=progress,
            column=column,
            existing="refuse" if out else "replace",
        )
    return open_corpus(_with_tokenizer(recipe, tokenizer), source, progress, out, column=column)


def fetch_corpus(
    variant: str,
    shards: int,
    recipe: Recipe,
    *,
    tokenizer: str | None,
    out: Path | None,
    place: Place,
    progress: Progress,
) -> Corpus:
    """Return the contest's text: published shards, or its documents under the tokenizer of the recipe or of a file."""
    if variant != "documents":
        return fetch_fineweb(variant, shards, out or fetched(variant), progress, place)
    recipe = _with_tokenizer(recipe, tokenizer)
    source, size = recipe.data.tokenizer, recipe.model.vocabulary
    downloads = fetched(variant)
    folder = out or _corpus_folder(downloads, [source.to_json(), size, shards])
    existing: Existing = "refuse" if out else "replace"
    return fetch_documents(shards, folder, downloads, source, size, progress, place, existing)


def fetched(variant: str) -> Path:
    """Return the folder that a variant of the contest's text is fetched into."""
    return CORPORA / f"fineweb-{variant}"


def contest_variant(recipe: Recipe) -> str | None:
    """Return the variant of the contest's shards that a recipe is for; None for a recipe for other text."""
    tokenizer = recipe.data.tokenizer
    kind = {CaseOps: "caseops", RawBytes: "byte"}.get(type(tokenizer), "sp")
    name = f"{kind}{recipe.model.vocabulary}"
    return name if name in VARIANTS and recipe.name in shipped() and recipe.name not in FOR_ANY_TEXT else None


def check_text_named(recipe: Recipe, source: str | None) -> None:
    """Raise `UserError`, with the command that fetches the text, if a recipe for the contest is given no text."""
    if source is None and (variant := contest_variant(recipe)):
        fetch = f"caddie data --fineweb {variant} --shards 80"
        raise UserError(
            f"{recipe.name} trains on the contest's text: fetch it with `{fetch}`, then add --data {fetched(variant)};"
            f" --data PATH takes any other text, and --data {LIBRARY} Python's own library"
        )


def _with_tokenizer(recipe: Recipe, tokenizer: str | None) -> Recipe:
    if tokenizer is None:
        return recipe
    given = _given_tokenizer(Path(tokenizer))
    return recipe.but({"model.vocabulary": given.vocabulary, "data.tokenizer": _tokenizer_source(given)})


def _given_tokenizer(path: Path) -> Tokenizer:
    kind = next((kind for kind, (suffix, _) in _FILES.items() if suffix == path.suffix), None)
    if kind is None:
        return artifacts.load_tokenizer(path)
    try:
        data = TiktokenFile(path=str(path)).data() if kind == "tiktoken" else regular_bytes(path)
        return deserialize(kind, data)
    except OSError as error:
        raise UserError(f"{path}: cannot read the tokenizer ({error.strerror}); name a {path.suffix} file") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
