"""Score a study's artifacts on text that no run and no choice among runs has seen.

Choosing the best of many runs by their held-out text fits the choice to that text a little. So an automated search is
judged on other documents, once, when all its runs are over.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from caddie.data.corpus import Corpus
from caddie.data.prepare import prepare_validation
from caddie.errors import UserError, count
from caddie.files import file_sha256, write_json
from caddie.lab.job import Run, finished
from caddie.lab.rows import RESULTS, STUDY, Row, keep_earlier, read_holdout
from caddie.lab.runner import check_results, keep, plan
from caddie.lab.study import Study
from caddie.pack import artifact as artifacts
from caddie.report.run_files import ARTIFACT, HOLDOUT
from caddie.run.stages import held_out_text
from caddie.runtime.distributed import local_device
from caddie.runtime.progress import SILENT, Progress
from caddie.score import score, use_quickest_threads

ARTIFACTS = "artifacts"
"""Folder beside a study's rows, for artifacts whose run folders are gone."""


def score_holdout(
    study: Study, data: str | None, text: str, *, results: Path, runs: Path = Path("runs"), progress: Progress = SILENT
) -> list[Row]:
    """Score every finished run of a study on the documents of `text` that its own text does not have.

    A run whose folder is gone is scored by its file in `ARTIFACTS`. Returns the study's rows with `holdout` in bits per
    byte; they are written after each run. `progress` gets a `runs` event for each run. Raises `UserError` while runs
    are left to do, if `text` has no new document, and if an artifact is missing.
    """
    check_results(study, results)
    planned = plan(study, data, runs, progress, results=results)
    if left := sum(not run.over for run in planned):
        what = f"{left} of {len(planned)} runs of {study.name} are left to do"
        raise UserError(f"{what}; score the holdout when all are finished")
    corpora = {one: _unseen(one, text, progress) for one in {run.corpus for run in planned}}
    kept = {file_sha256(path): path for path in (results / ARTIFACTS).glob("*.caddie")}
    chosen = [place for place, run in enumerate(planned) if run.row is not None or finished(run.folder)]
    needed = [place for place in chosen if _known(planned[place])[1] != _documents(corpora[planned[place].corpus])]
    files = {place: file for place in needed if (file := _file(planned[place], kept))}
    if gone := len(needed) - len(files):
        what = f"the artifacts of {count(gone, 'run')} are not here, only rows in {results / RESULTS}"
        raise UserError(f"{what}; copy them to {results / ARTIFACTS}, or run the study again with another --out")
    if not (results / STUDY).exists():
        write_json(results / STUDY, study.to_json())
    keep_earlier(results, {run.key for run in planned}, progress)
    for number, place in enumerate(chosen, 1):
        run = planned[place]
        if place in files:
            corpus = corpora[run.corpus]
            progress.phase(f"{run.label}, seed {run.seed}")
            bits, documents = _bits(files[place], corpus, progress), _documents(corpus)
            if run.row is None:
                write_json(run.folder / HOLDOUT, {"bits_per_byte": bits, "documents": documents})
            else:
                run = planned[place] = replace(run, row={**run.row, "holdout": bits, "holdout_documents": documents})
            keep(study, planned, results)
        line = f"{run.label}, seed {run.seed}  {_known(run)[0]:.4f} bpb"
        progress.step({"event": "runs", "done": number, "total": len(chosen), "text": line})
    return keep(study, planned, results)


def _unseen(corpus: Path, text: str, progress: Progress) -> Corpus:
    own = Corpus.load(corpus)
    place = own.folder.with_name(f"{own.folder.name}-holdout")
    return prepare_validation(
        text, folder=place, tokenizer=own.tokenizer(), against=own, unseen=True, progress=progress
    )


def _documents(corpus: Corpus) -> str:
    return corpus.manifest.validation.document_set_sha256


def _known(run: Run) -> tuple[float | None, str | None]:
    """Return the holdout bits per byte of a finished run, and the hash of the holdout documents; None if not scored."""
    facts = read_holdout(run.folder) if run.row is None else run.row
    return facts.get("holdout"), facts.get("holdout_documents")


def _file(run: Run, kept: Mapping[str, Path]) -> Path | None:
    return run.folder / ARTIFACT if run.row is None else kept.get(run.row["sha256"].get("artifact"))


def _bits(file: Path, corpus: Corpus, progress: Progress) -> float:
    artifact, held_out = artifacts.load(file, local_device()), held_out_text(corpus)
    use_quickest_threads(artifact.model, held_out, artifact.scoring)
    return score(artifact.model, held_out, artifact.scoring, progress).bits_per_byte
