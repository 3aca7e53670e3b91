"""Run a study; finished runs are not run again, whatever ended the last attempt.

    from caddie import Entry, Steps, Study, find, run_study

    study = Study(name="depth", base=find("baseline_mini"), budget=Steps(steps=200),
                  entries={"deeper": Entry(diff={"model.depth": 6})})
    run_study(study, "text.jsonl", workers=2)

A run is over when its folder holds `result.json` or `error.json`. Both are written whole or not at all, so a process
that is killed can neither lose a finished run nor count one twice. `results.jsonl` is rewritten from the folders after
every job. It keeps the row of a finished run whose folder is gone, so a study goes on from committed rows, on another
machine too. Rows of finished runs that an edited study no longer has go to `earlier.jsonl`.
"""

import errno
import hashlib
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from caddie.config.userfile import user_files
from caddie.data.corpus import Corpus
from caddie.errors import UserError, count
from caddie.files import write_json
from caddie.lab.background import StudyState, seconds_left
from caddie.lab.executors import Executor, Local
from caddie.lab.job import Run, finished, has_reusable_training, write_job
from caddie.lab.measured import processors
from caddie.lab.report import Results
from caddie.lab.rows import (
    EARLIER,
    RESULTS,
    STUDY,
    Row,
    failure,
    finished_rows,
    keep_earlier,
    outcome,
    read_study,
    row,
    write_rows,
)
from caddie.lab.study import Study
from caddie.lab.study_lock import driving
from caddie.recipes.recipe import Recipe
from caddie.report.display import Display, loss_line
from caddie.report.read import Log, busy_machine, pick, read_json, read_result
from caddie.report.run_files import CHECKPOINT, ERROR, LOG, PARTS, RECIPE, RESULT, STOP, TASK
from caddie.report.tables import duration
from caddie.run.resolve_corpus import open_corpus
from caddie.run.result import processor_name
from caddie.run.run import check_recipe
from caddie.run.run_folder import write_error
from caddie.run.run_lock import Holder, this_process
from caddie.runtime.progress import SILENT, Progress

ATTEMPTS = 3
"""Starts of a job before its runs count as failed."""
_TEXTS = ("train_documents", "validation_documents", "tokenizer")


def run_study(
    study: Study,
    data: str | None = None,
    *,
    workers: int = 1,
    folder: str | Path | None = None,
    runs: str | Path = Path("runs"),
    executor: Executor | None = None,
    price: float | None = None,
    progress: Progress | None = None,
    retry: bool = False,
    command: str = "",
    total: int | None = None,
    keep_checkpoints: bool = True,
) -> Results:
    """Do the runs of a study that are not over on the text at `data`, write its reports, and return the results.

    `workers` runs go on at once on this machine, unless an `executor` is given. Results go to `folder`. `runs` holds
    the folders of all studies; a run of another study with the same settings, seed and texts is reused. `retry` repeats
    failed runs. The report shows `command` as the one typed. `progress`, by default plain lines, gets
    a `runs` event for each run that ends, out of `total`, by default the runs of the study. Without `keep_checkpoints`,
    the checkpoint of a finished run is removed once no remaining run needs its training. Raises `UserError` for a study
    that cannot run; everything that can be checked early is checked before the first run.
    """
    runs = Path(runs)
    results, executor = Path(folder or Path("runs", study.name)), executor or Local(workers)
    progress = progress or Display(stream=sys.stdout)
    check_results(study, results)
    planned = plan(study, data, runs, progress, results=results)
    with driving(runs / study.name):
        for run in planned if retry else ():
            for name in (STOP, ERROR):  # in this order: without its error a run is not over
                (run.folder / name).unlink(missing_ok=True)
        total = total or len(planned)
        in_progress = _StudyInProgress(study, planned, results, runs / study.name, executor, total, progress)
        rows = in_progress.drive(command, keep_checkpoints)
    found = Results(study, rows, results, price)
    found.write()
    return found


def check_results(study: Study, results: Path) -> None:
    """Raise `UserError` if a folder of results is another study's."""
    if (results / STUDY).exists() and read_study(results / STUDY)["name"] != study.name:
        raise UserError(f"{results} holds the results of another study; name another folder with --out")


def checked_recipes(study: Study) -> dict[str, Recipe]:
    """Return label to recipe; raises `UserError`, with the label, for all that can be known before training."""
    recipes = {label: study.recipe(label) for label in study.labels}
    for label, recipe in recipes.items():
        try:
            check_recipe(recipe)
        except UserError as error:
            raise UserError(f"{label}: {error}") from None
    return recipes


def plan(
    study: Study, data: str | None, runs: Path, progress: Progress = SILENT, *, results: Path | None = None
) -> list[Run]:
    """Return every run of a study, all labels with one seed before the next, so that a disturbance affects all labels.

    A finished run whose folder is gone gets its row from `results`, the folder of the study's results.
    """
    recipes = checked_recipes(study)
    corpora: dict[str, Corpus] = {}
    for recipe in recipes.values():
        if _text(recipe) not in corpora:
            corpora[_text(recipe)] = open_corpus(recipe, data, progress)
    found, rows = _finished(runs), finished_rows(results / EARLIER, results / RESULTS) if results else {}
    planned, places = [], dict[str, Path]()
    for seed in study.seeds:
        for label, recipe in recipes.items():
            corpus = corpora[_text(recipe)]
            key = _key(recipe, seed, _texts(corpus))
            slug = re.sub(r"[^\w.=-]+", "-", label).strip("-.")[:60]
            own = runs / study.name / f"{slug}-{key[:8]}-s{seed}"
            folder = places.setdefault(key, own if finished(own) else found.get(key, own))
            known = None if finished(folder) else rows.get(key)
            whole = _of_bundle(study, label)
            planned.append(Run(label, seed, key, folder, recipe, corpus.folder, whole, known))
    return planned


def _of_bundle(study: Study, label: str) -> bool:
    """True if a label or its rival is a `bundle`, so that settings in its diff may have no effect."""
    entry = study.entries.get(label)
    rival = study.entries.get(entry.against) if entry else None
    return "bundle" in {one.kind for one in (entry, rival) if one}


def _text(recipe: Recipe) -> str:
    """Return the key of all settings that decide a recipe's corpus."""
    return f"{recipe.data.key()}-{recipe.model.vocabulary}"


def _texts(corpus: Corpus) -> list[str]:
    """Return the hashes of texts and tokenizer that a result would have, in the order of `_TEXTS`."""
    manifest = corpus.manifest
    train = manifest.train.document_set_sha256 if manifest.train else ""
    return [train, manifest.validation.document_set_sha256, manifest.tokenizer.sha256]


def _key(recipe: Recipe, seed: int, texts: Sequence[str]) -> str:
    parts = [recipe.sha256, seed, *texts]
    parts += sorted(file.stated.sha256 for file in user_files(recipe))  # code of the user's own
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _finished(runs: Path) -> dict[str, Path]:
    """Return key to folder of every finished run of any study."""
    found = dict[str, Path]()
    for task in sorted(runs.glob(f"*/*/{TASK}")):
        if finished(task.parent):
            keys = pick(read_json(task), "key"), _key_by_now(task.parent)
            found |= {str(key): task.parent for key in keys if key}
    return found


def _key_by_now(folder: Path) -> str | None:
    """Return a finished run's key with newer settings at their defaults; None if its recipe or code is gone."""
    with suppress(UserError, OSError, ValueError, TypeError, KeyError):
        about, then = read_json(folder / RECIPE), read_result(folder / RESULT)["sha256"]
        recipe = Recipe.from_json(about["recipe"])
        if (about.get(PARTS) or []) != [asdict(file.stated) for file in user_files(recipe)]:
            return None  # its classes have changed since
        return _key(recipe, about["seed"], [then[name] for name in _TEXTS])
    return None


@dataclass
class _StudyInProgress:
    """State of a study that this process runs."""

    study: Study
    planned: list[Run]
    results: Path
    runs: Path
    """Folder of the study's runs."""
    executor: Executor
    total: int
    progress: Progress
    driver: Holder = field(default_factory=this_process)
    over: set[Path] = field(default_factory=set)
    rows: list[Row] = field(default_factory=list)
    told_busy: bool = False
    began: float = field(default_factory=time.time)
    ends: float = 0.0
    """Expected end of the last run, in seconds since 1970; 0 while that is not known."""
    logs: dict[Path, Log] = field(default_factory=dict)

    def drive(self, command: str, keep_checkpoints: bool) -> list[Row]:
        """Do the runs that are not over, and return a row for every run."""
        context = {"study": self.study.name, "workers": self.executor.workers}
        begun: Counter[Path] = Counter()
        self.over = {run.folder for run in self.planned if run.over}
        write_json(self.results / STUDY, {**self.study.to_json(), "command": command})
        if kept := sum(run.row is not None for run in self.planned):
            what = f"{count(kept, 'run')} finished elsewhere, by the rows in {self.results}"
            self.progress.note(f"{what}; to do them again here, name another folder with --out")
        keep_earlier(self.results, {run.key for run in self.planned}, self.progress)
        self._keep("done so far")
        self._tell_other_processor()
        while groups := _groups(self._left()):
            trained = {training_of(run): run for run in reversed(self.planned) if has_reusable_training(run.folder)}
            jobs = {write_job(group, context, trained.get(training_of(group[0]))): group for group in groups}
            for ended in self.executor.run(list(jobs)):
                if ended is None:
                    self._collect(groups)
                    self._show_running(groups)
                    continue
                job, reason = ended
                _check_disk(jobs[job])
                begun[job] += 1
                left = [run for run in jobs[job] if not run.over]
                if left == jobs[job] and (reason or begun[job] >= ATTEMPTS):
                    write_error(left[0].folder, reason or f"it was begun {ATTEMPTS} times and never ended")
                self._collect([jobs[job]])
                if not keep_checkpoints:
                    self._remove_checkpoints()
        if not keep_checkpoints:
            self._remove_checkpoints()
        self.rows = keep(self.study, self.planned, self.results, self.rows)
        return self.rows

    def _left(self) -> list[Run]:
        """Return the runs that are not over."""
        self._take_rows()
        return [run for run in self.planned if not run.over]

    def _take_rows(self) -> None:
        """Give rows to runs whose folder was removed or that another machine did meanwhile, so that they count."""
        rows = {str(row["key"]): row for row in self.rows if row["state"] == "finished"}
        with suppress(UserError):  # somebody may be merging the file
            rows |= finished_rows(self.results / RESULTS)
        self.planned = [run if run.over else replace(run, row=rows.get(run.key)) for run in self.planned]

    def _collect(self, groups: Iterable[list[Run]]) -> None:
        """Keep the rows of runs that ended since the last call."""
        for run in (run for group in groups for run in group):
            if run.folder not in self.over and run.over and (facts := row(self.study, run)) is not None:
                self.over.add(run.folder)
                self._keep(outcome(facts))
                self._tell_busy(facts)

    def _show_running(self, groups: Iterable[list[Run]]) -> None:
        """Show the progress of each group's current run, if it made a step since this process began."""
        first = (next((run for run in group if run.folder not in self.over), None) for group in groups)
        logs = [(run, log) for run in first if run and (log := self._log(run))]
        if not logs:
            return
        parts = [float(log.last["progress"]) for _, log in logs]
        (run, log), share = logs[0], parts[0]
        doing = "packing and scoring" if log.ended else f"{share:.0%} trained, {loss_line(log.last)}"
        text = f"{len(self.over)} of {self.total} runs  {run.label}, seed {run.seed}: {doing}"
        text += f"; {len(logs) - 1} more at work" if len(logs) > 1 else ""
        text += f"  {duration(left)} left" if (left := self.ends - time.time()) > 0 else ""
        done = (len(self.over) + sum(parts)) / self.total
        self.progress.step({"event": "running", "progress": min(done, 1.0), "text": text})

    def _log(self, run: Run) -> Log | None:
        """Return the log of a run that has made a step since this process began, or None."""
        path = run.folder / LOG
        with suppress(OSError, UserError):
            if path.stat().st_mtime >= self.began:
                self.logs[run.folder] = log = self.logs.get(run.folder, Log()).read(path)
                return log if {"progress", "loss"} <= log.last.keys() else None
        return None

    def _keep(self, text: str) -> None:
        """Write rows and state, and show how many runs are over and how long the others will take."""
        self._take_rows()
        self.rows = keep(self.study, self.planned, self.results, self.rows)
        done = sum(run.over for run in self.planned)
        left = seconds_left(self.rows, self.total - done, self.executor.workers)
        self.ends = time.time() + left if left else 0.0
        results, failed = str(self.results.resolve()), sum(row["state"] == "failed" for row in self.rows)
        StudyState(self.study.name, results, done, failed, self.total, left, self.driver).write(self.runs)
        text += f"  {duration(left)} left" if left else ""
        self.progress.step({"event": "runs", "done": done, "total": self.total, "text": text})

    def _tell_other_processor(self) -> None:
        """Report the random seeds whose labels would be compared between two processors."""
        here, seeds = processor_name(), sorted({run.seed for run in self.planned if not run.over})
        begun = {seed: processors(self.rows, seed) - {here} for seed in seeds}
        if which := ", ".join(f"{seed} ({' and '.join(sorted(names))})" for seed, names in begun.items() if names):
            why = "each rounds differently, so finish all labels of a seed on one kind"
            self.progress.note(f"seeds begun on another processor than this one ({here}): {which}; {why}")

    def _tell_busy(self, facts: Row) -> None:
        """Report once that other programs slow the runs down; a run reports it only in its own log."""
        if not self.told_busy and (busy := busy_machine({"training": facts})):
            self.told_busy = True
            fewer = ", or stop and start again with OMP_NUM_THREADS=1" if (facts["threads"] or 1) > 1 else ""
            self.progress.note(f"{facts['label']}, seed {facts['seed']}: {busy} End other programs{fewer}.")

    def _remove_checkpoints(self) -> None:
        """Remove the checkpoints of the study's finished runs whose training no other run needs."""
        needed = {training_of(run) for run in self.planned if not run.over}
        for run in self.planned:
            if run.folder.parent == self.runs and training_of(run) not in needed and finished(run.folder):
                (run.folder / CHECKPOINT).unlink(missing_ok=True)


def _check_disk(runs: Iterable[Run]) -> None:
    """Raise `UserError` if a run ended because the disk is full: the next would too. It does not count as failed."""
    for run in runs:
        said = failure(run.folder)["error"] if (run.folder / ERROR).exists() else ""
        if any(os.strerror(number) in said for number in (errno.ENOSPC, errno.EDQUOT)):
            (run.folder / ERROR).unlink()
            raise UserError(f"{run.label}, seed {run.seed}: {said}; free disk space and give the same command again")


def _groups(left: Iterable[Run]) -> list[list[Run]]:
    """Group the runs of the same training and seed; the same run comes once."""
    groups: dict[object, dict[Path, Run]] = {}
    for run in left:
        groups.setdefault(training_of(run), {}).setdefault(run.folder, run)
    return [list(group.values()) for group in groups.values()]


def training_of(run: Run) -> object:
    """Return the key of a run's training: runs that share it train once."""
    return run.seed, run.corpus, run.recipe.model.key(), run.recipe.train.key()


def keep(study: Study, planned: list[Run], results: Path, known: Iterable[Row] = ()) -> list[Row]:
    """Write the rows of all runs that are over, by label and seed, and return them.

    Finished runs keep their `known` rows, because reading a log takes long.
    """
    before = {(one["label"], one["seed"]): one for one in known if one["state"] == "finished"}
    rows = list[Row]()
    for run in sorted(planned, key=lambda run: (study.labels.index(run.label), run.seed)):
        facts = (before.get((run.label, run.seed)) if finished(run.folder) else None) or row(study, run)
        if facts is not None:
            rows.append(facts)
    write_rows(results / RESULTS, rows)
    return rows
