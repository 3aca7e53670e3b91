"""Score a study's artifacts on text that no run and no choice among runs has seen.

Whoever tries many things and keeps what scores best on the held-out text has fitted that text a little. So an automated
search is judged on other documents, once, when all its runs are over.
"""

from __future__ import annotations

from pathlib import Path

from caddie.data.corpus import Corpus
from caddie.data.prepare import prepare_validation
from caddie.errors import UserError, count
from caddie.files import write_json
from caddie.lab.job import finished
from caddie.lab.rows import RESULTS, Row, read_holdout
from caddie.lab.runner import keep, plan
from caddie.lab.study import Study
from caddie.pack import artifact as artifacts
from caddie.report.run_files import ARTIFACT, HOLDOUT
from caddie.run.stages import held_out_text
from caddie.runtime.distributed import local_device
from caddie.runtime.progress import SILENT, Progress
from caddie.score import score, use_quickest_threads


def score_holdout(
    study: Study, data: str | None, text: str, *, results: Path, runs: Path = Path("runs"), progress: Progress = SILENT
) -> list[Row]:
    """Score every finished run of a study on the documents of `text` that its own text does not have.

    Returns the study's rows with `holdout` in bits per byte. `progress` gets a `runs` event for each run. Raises
    `UserError` while runs are left to do, and if `text` has no new document.
    """
    planned = plan(study, data, runs, progress, results=results)
    if left := sum(not run.over for run in planned):
        what = f"{left} of {len(planned)} runs of {study.name} are left to do"
        raise UserError(f"{what}; the holdout comes after the last")
    if gone := sum(run.row is not None for run in planned):
        what = f"the artifacts of {count(gone, 'run')} are not here, only rows in {results / RESULTS}"
        raise UserError(f"{what}; score them where they are, or run the study again with another --out")
    corpora: dict[Path, Corpus] = {}
    chosen = [run for run in planned if finished(run.folder)]
    for number, run in enumerate(chosen, 1):
        if run.corpus not in corpora:
            own = Corpus.load(run.corpus)
            place = own.folder.with_name(f"{own.folder.name}-holdout")
            corpora[run.corpus] = prepare_validation(
                text, folder=place, tokenizer=own.tokenizer(), against=own, unseen=True, progress=progress
            )
        corpus = corpora[run.corpus]
        documents = corpus.manifest.validation.document_set_sha256
        kept = read_holdout(run.folder)
        bits = kept["holdout"] if kept["holdout_documents"] == documents else None
        if bits is None:
            artifact = artifacts.load(run.folder / ARTIFACT, local_device())
            held_out = held_out_text(corpus)
            use_quickest_threads(artifact.model, held_out, artifact.scoring)
            bits = score(artifact.model, held_out, artifact.scoring).bits_per_byte
            write_json(run.folder / HOLDOUT, {"bits_per_byte": bits, "documents": documents})
        line = f"{run.label}, seed {run.seed}  {bits:.4f} bpb"
        progress.step({"event": "runs", "done": number, "total": len(chosen), "text": line})
    return keep(study, planned, results)
