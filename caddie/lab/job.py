"""Run a job of a study: the runs of one training, each in a folder of its own.

A job and its results are files, so any machine that sees the folders can do it. Doing it twice does no harm: a
finished run is not run again, and a second process at the same job waits for the first. After `PATIENCE_SECONDS` the
first counts as hung: the second takes over, and the first can write nothing more (`run_lock`).
"""

import json
import shutil
import traceback
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from caddie.config.userfile import execute, user_files
from caddie.errors import CheckFailed, UserError
from caddie.files import replacing, write_json
from caddie.lab.executors import GRACE_SECONDS
from caddie.recipes.recipe import Recipe
from caddie.report.read import read_json
from caddie.report.run_files import CHECKPOINT, ERROR, JOB, LOG, RESULT, STOP, TASK
from caddie.run.dead_settings import check_settings_matter
from caddie.run.run import run
from caddie.run.run_folder import Pruned, write_error
from caddie.run.run_lock import locked
from caddie.runtime import distributed
from caddie.runtime.distributed import Ranks
from caddie.runtime.progress import Event, Progress

PATIENCE_SECONDS = GRACE_SECONDS + 10
"""Seconds to wait for another process at the same run. One that takes longer hangs, and its lock is taken."""


class _StopFile(Progress):
    """Progress of a run that raises `Pruned` once `stop.json` is in its folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / STOP

    def step(self, event: Event) -> None:
        if event["event"] in ("start", "step", "forecast", "end") and self._path.exists():
            raise Pruned(json.loads(self._path.read_text())["reason"])


@dataclass(frozen=True)
class Run:
    """One run of a study: label, seed and folder."""

    label: str
    seed: int
    key: str
    """Hash of settings, seed and texts: runs with the same key are the same run."""
    folder: Path
    recipe: Recipe
    corpus: Path
    bundle: bool = False
    """True if settings of the recipe may have no effect: see `Entry.kind`."""
    row: Mapping[str, Any] | None = None
    """Row of a finished run whose folder is gone or on another machine, from the study's results; else None."""

    @property
    def over(self) -> bool:
        """True if it is finished or has failed."""
        return self.row is not None or finished(self.folder) or (self.folder / ERROR).exists()


def finished(folder: Path) -> bool:
    """True if a run folder holds a result."""
    return (folder / RESULT).exists()


def write_job(runs: list[Run], study: Mapping[str, Any], trained: Run | None = None) -> Path:
    """Write and return the file of a job: runs of one seed and training. `study`, with its name, goes into each result.

    `trained` is a run that has done the training already.
    """
    trained = trained or runs[0]
    spec = {
        "corpus": str(runs[0].corpus.resolve()),
        "definitions": [
            {"path": str(file.path), "source": file.source.decode("latin-1")}  # as it was when the study began
            for file in user_files(*(run.recipe for run in runs))
        ],
        "seed": runs[0].seed,
        "study": {**study, "trained_with": trained.label},
        "trained": str(trained.folder.resolve()),
        "runs": [
            {
                "label": run.label,
                "folder": str(run.folder.resolve()),
                "recipe": run.recipe.to_json(),
                "bundle": run.bundle,
            }
            for run in runs
        ],
    }
    for one in runs:
        write_json(one.folder / TASK, {"study": study["study"], "label": one.label, "seed": one.seed, "key": one.key})
    write_json(runs[0].folder / JOB, spec)
    return runs[0].folder / JOB


def run_job(job: Path) -> None:
    """Do every run of a job that is not over. A run that fails leaves its reason in `error.json`.

    A run with `stop.json` in its folder ends as pruned, for the reason given there.

    Raises `Interrupted` after a signal to stop; the checkpoint is kept, so the job can go on. `UserError` for a file
    that is no job.
    """
    spec = read_json(job)
    if not isinstance(spec, dict) or not {"corpus", "definitions", "seed", "study", "trained", "runs"} <= spec.keys():
        raise UserError(f"{job} is no job of a study; name the {JOB} of a run folder")
    threads = torch.get_num_threads()
    with distributed.join() as ranks:
        for file in spec["definitions"]:
            execute(Path(file["path"]), file["source"].encode("latin-1"))
        for one in spec["runs"]:
            folder = Path(one["folder"])
            with locked(folder, PATIENCE_SECONDS) if ranks.first else nullcontext():
                ranks.wait()
                if not (finished(folder) or (folder / ERROR).exists()):
                    torch.set_num_threads(threads)  # the run before may have chosen fewer
                    _do(one, folder, spec, ranks)


def _do(one: Mapping[str, Any], folder: Path, spec: Mapping[str, Any], ranks: Ranks) -> None:
    by = _trainer(one, spec)
    trained = Path(by["folder"])
    if folder != trained and ranks.first and not (folder / CHECKPOINT).exists():
        for name in (LOG, CHECKPOINT):  # it begins where the other run of this training ended
            with replacing(folder / name) as temporary:
                shutil.copyfile(trained / name, temporary)
    ranks.wait()
    try:
        recipe = Recipe.from_json(one["recipe"])
        if ranks.first and not one.get("bundle"):
            check_settings_matter(recipe)
        run(
            recipe,
            spec["corpus"],
            seed=spec["seed"],
            folder=folder,
            ranks=ranks,
            progress=_StopFile(folder),
            study={**spec["study"], "label": one["label"], "trained_with": by["label"]},
        )
    except Exception as error:  # a study goes on when one of its runs fails or meets a defect
        lost = distributed.lost_another(error)  # the lost process left the reason, or is begun again
        if lost or not isinstance(error, (UserError, CheckFailed, Pruned)):
            traceback.print_exc()
        if not (lost or (folder / ERROR).exists()):  # it failed before it began
            write_error(folder, error)
        if lost or ranks.world > 1:  # others may wait for this process in vain
            raise SystemExit(1) from None


def _trainer(one: Mapping[str, Any], spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the run whose training a run of a job reuses: the first that can be reused, else itself."""
    known = {"folder": spec["trained"], "label": spec["study"]["trained_with"]}
    return next((run for run in (known, *spec["runs"]) if has_reusable_training(Path(run["folder"]))), one)


def has_reusable_training(folder: Path) -> bool:
    """True if a finished run still has the files from which another run of the same training starts."""
    return finished(folder) and (folder / CHECKPOINT).exists() and (folder / LOG).exists()
