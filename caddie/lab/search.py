"""Searches: settings drawn at random, or proposed by a sampler that learns from the runs before.

A search is a study that grows: it can be stopped at any moment and continued, and no run is done twice.
Random search: Bergstra and Bengio, "Random search for hyper-parameter optimization" (JMLR 13, 2012). Samplers and
pruners are Optuna's: Akiba et al., "Optuna: a next-generation hyperparameter optimization framework" (KDD 2019).
"""

import hashlib
import json
import math
import os
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

from caddie.config import Count, Diff, Seed, coerce, show
from caddie.errors import UserError
from caddie.files import write_json
from caddie.lab.executors import Ended, Executor
from caddie.lab.job import Run
from caddie.lab.measured import Row
from caddie.lab.report import Results
from caddie.lab.runner import plan, run_study
from caddie.lab.study import BASE, Entry, Study
from caddie.lab.study_lock import alone
from caddie.lab.variations import labelled, read_values
from caddie.recipes.recipe import Recipe
from caddie.report.charts import is_finite
from caddie.report.display import Display
from caddie.report.read import read_steps
from caddie.report.run_files import LOG, STOP
from caddie.run.run import check_recipe
from caddie.runtime.progress import Progress

JOURNAL = "search.jsonl"
SAMPLERS = {"tpe": "TPESampler", "gp": "GPSampler", "nsgaii": "NSGAIISampler", "random": "RandomSampler"}
"""Samplers and their classes in Optuna; tpe learns from as few as ten trials."""
PRUNERS = {"none": "NopPruner", "median": "MedianPruner", "hyperband": "HyperbandPruner"}
LOG_FROM = 10
"""Least ratio of high to low from which on a positive range has a logarithmic scale."""
ATTEMPTS, REPEATS = 100, 40
"""Most draws for a trial, and most repeated proposals in a row, before the space counts as exhausted."""
_REPEATED = "repeated"
"""Mark in the journal of a trial whose settings had been tried before."""
PARTS = 10
"""Parts of a run at whose ends a pruner may stop it."""


@dataclass(frozen=True)
class Between:
    """Range of numbers, integers if both ends are; `LOW..HIGH` on the command line."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not -1e300 < self.low < self.high < 1e300:
            raise UserError(f"{self} is no range; write LOW..HIGH, as in 0.01..0.1")

    def __str__(self) -> str:
        return f"{show(self.low)}..{show(self.high)}"

    @property
    def whole(self) -> bool:
        """True for a range of integers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def log(self) -> bool:
        """True for a logarithmic scale."""
        return 0 < LOG_FROM * self.low <= self.high

    def at(self, part: float) -> float:
        """Return the quantile `part` of the range."""
        low, high = (self.low - 0.5, self.high + 0.5) if self.whole else (self.low, self.high)
        return self.near(low * (high / low) ** part if self.log else low + part * (high - low))

    def near(self, number: float) -> float:
        """Round a number to four digits, which are enough to tell trials apart, within the range."""
        return min(self.high, max(self.low, round(number) if self.whole else float(f"{number:.4g}")))


Values = Between | Sequence[object]
"""Range, or list of values of any type."""
Space = Mapping[str, Values]
"""Path to its possible values."""


def read_space(text: str) -> tuple[str, Values]:
    """Parse `PATH=LOW..HIGH` or `PATH=V1,V2,...` from a command line."""
    path, _, values = text.partition("=")
    low, _, high = values.partition("..")
    try:
        ends = [int(end) if re.fullmatch(r"[-+]?\d+", end) else float(end) for end in (low, high)]
    except ValueError:
        return read_values(text)
    return path, Between(*ends)


def draw(recipe: Recipe, space: Space, trials: int, seed: int = 0) -> dict[str, Entry]:
    """Return label to entry of `trials` different draws. More trials with the same seed begin with the same draws.

    A draw that is no possible recipe, or the recipe itself, is drawn again. Raises `UserError` where that does not end.
    """
    if not space or not all(isinstance(values, Between) or values for values in space.values()):
        raise UserError("a search needs a path and values for it, as in train.optimizers.matrix.lr=0.01..0.1")
    chance, seen, entries, reason = random.Random(seed), set[str](), dict[str, Entry](), ""
    for _ in range(ATTEMPTS * trials):
        diff = {path: _pick(values, chance.random()) for path, values in space.items()}
        label = labelled(diff)
        if label not in seen:
            seen.add(label)
            if why := invalid_reason(recipe, diff):
                reason = why
            elif recipe.but(diff).settings != recipe.settings:
                entries[label] = Entry(diff=diff)
        if len(entries) == trials:
            return entries
    if not entries and reason:
        raise UserError(reason)
    more = f"another is not possible: {reason}" if reason else "there are no more"
    raise UserError(f"{trials} different trials were asked for and {len(entries)} found; {more}")


def _pick(values: Values, part: float) -> object:
    return values.at(part) if isinstance(values, Between) else values[int(part * len(values))]


def search(
    study: Study,
    space: Space,
    data: str | None = None,
    *,
    trials: int,
    executor: Executor,
    sampler: str = "tpe",
    pruner: str = "none",
    seed: int = 0,
    folder: str | Path | None = None,
    runs: str | Path = Path("runs"),
    retry: bool = False,
    progress: Progress | None = None,
    **how: Any,
) -> Results:
    """Search the settings of a study's base: each trial becomes an entry, proposed in view of the trials before.

    A batch has as many trials as `executor` runs at once. A trial runs all seeds of the study, and their mean bits per
    byte is minimized; a trial that fails or is not valid counts as bad, and so does an artifact that fails
    verification or is over its cap. Trials are kept in `search.jsonl`, an Optuna journal in the results' `folder`: the
    same search continues there, another starts from scratch. A pruner ends runs by their training loss;
    `caddie.lab.agreement` measures how well that predicts final scores. Run folders are made below `runs`. `how` holds
    further arguments of `run_study`.

    Raises `UserError` for a missing Optuna, an unknown sampler or pruner, and a space without a possible trial.
    """
    trials, seed, runs = coerce(trials, Count, "trials"), coerce(seed, Seed, "seed"), Path(runs)
    for name, given, known in (("sampler", sampler, SAMPLERS), ("pruner", pruner, PRUNERS)):
        if given not in known:
            raise UserError(f"no {name} {given}; there are {', '.join(known)}")
    drawn = draw(study.base, space, 1)  # a misspelt path is an error now
    replace(study, entries=drawn).recipe(next(iter(drawn)))
    folder = Path(folder or Path("runs", study.name))
    progress = progress or Display(stream=sys.stdout)
    how |= {"runs": runs, "progress": progress}
    held = f"{folder} is being searched by another process; wait for it or stop it"
    with _quiet_optuna() as optuna, alone(folder / f".{JOURNAL}", held):
        proposals = _Proposals(optuna, study, space, data, folder, runs, sampler, pruner, seed)
        entries, batch = proposals.earlier(), list[_Trial]()
        while True:
            grown = replace(study, entries={**study.entries, **entries})
            later = max(0, trials - len(proposals.finished()) - len(batch))
            total = (len(grown.labels) + later) * len(study.seeds)
            watched = _Watched(executor, batch, plan(grown, data, runs) if pruner != "none" else [])
            found = run_study(grown, data, executor=watched, folder=folder, retry=retry, total=total, **how)
            watched.look()  # report runs that another study had finished, too
            for trial in batch:
                proposals.tell(trial, [row for row in found.rows if row["label"] == trial.label])
            left = trials - len(proposals.finished())
            if left <= 0:
                return found
            proposed = [proposals.ask(progress) for _ in range(min(executor.workers, left))]
            batch = [trial for trial in proposed if trial is not None]
            if proposals.exhausted and not batch:
                progress.note(f"{len(proposals.finished())} of {trials} trials: the sampler proposes nothing new")
                trials = 0  # end with the results of what was tried
            entries |= {trial.label: trial.entry for trial in batch}
            retry = False


@contextmanager
def _quiet_optuna() -> Iterator[Any]:
    """Yield Optuna, with its messages about trials turned off."""
    try:
        optuna = import_module("optuna")
    except ImportError:
        raise UserError("this search needs optuna; run: pip install optuna") from None
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield optuna
    finally:
        optuna.logging.set_verbosity(before)


@dataclass(frozen=True)
class _Trial:
    """A trial of Optuna and the entry that it stands for."""

    trial: Any
    label: str
    entry: Entry
    reported: set[int] = field(default_factory=set)


class _Proposals:
    """Trials so far and the sampler of the next ones: an Optuna study in the journal of a folder.

    Its name is a hash of recipe, seeds, texts, space and pruner: scores are comparable only where these are the same.
    """

    def __init__(
        self,
        optuna: Any,
        study: Study,
        space: Space,
        data: str | None,
        folder: Path,
        runs: Path,
        sampler: str,
        pruner: str,
        seed: int,
    ) -> None:
        self._optuna, self.exhausted = optuna, False
        self._recipe, self._seeds, self._space = study.recipe(BASE), len(study.seeds), space
        self._sampler, self._seed = SAMPLERS[sampler], seed
        keys = [run.key for run in plan(replace(study, entries={}), data, runs)]
        shown = {path: str(values) if isinstance(values, Between) else show(values) for path, values in space.items()}
        longest = {"max_resource": PARTS * self._seeds} if pruner == "hyperband" else {}
        path = folder / JOURNAL
        if path.exists():  # a process that was killed may have left half a line
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self._journal = optuna.create_study(
            study_name=hashlib.sha256(json.dumps([keys, shown, pruner]).encode()).hexdigest()[:16],
            storage=optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path))),
            pruner=getattr(optuna.pruners, PRUNERS[pruner])(**longest),
            load_if_exists=True,
        )
        self._states = optuna.trial.TrialState

    def finished(self) -> list[Any]:
        """Return Optuna's trials that are over."""
        return [*self._journal.get_trials(states=(self._states.COMPLETE, self._states.PRUNED))]

    def earlier(self) -> dict[str, Entry]:
        """Return label to entry of the trials that are over; stopped ones are queued to come first."""
        for trial in self._journal.get_trials(states=(self._states.RUNNING,)):
            self._journal.enqueue_trial(trial.params)
            self._journal.tell(trial.number, state=self._states.FAIL)
        diffs = [self._diff(trial.params) for trial in self.finished()]
        return {labelled(diff): Entry(diff=diff) for diff in diffs if not invalid_reason(self._recipe, diff)}

    def ask(self, progress: Progress) -> _Trial | None:
        """Return the next trial, or None for one that is not possible, or if nothing new is proposed."""
        self.exhausted, every = False, self._journal.get_trials()
        known = [trial for trial in every if trial.state != self._states.FAIL]
        seen = {labelled(self._diff(trial.params)) for trial in known if trial.state != self._states.WAITING}
        repeated = sum(_REPEATED in trial.user_attrs for trial in every)
        for attempt in range(REPEATS):
            # A new sampler with the same seed would repeat its first draws. Stopped trials are queued and come first.
            seed = self._seed + len(known) + repeated + attempt
            sampler = self._sampler if attempt < REPEATS // 2 else SAMPLERS["random"]
            self._journal.sampler = getattr(self._optuna.samplers, sampler)(seed=seed)
            trial = self._journal.ask({path: self._distribution(values) for path, values in self._space.items()})
            diff = self._diff(trial.params)
            if labelled(diff) not in seen:
                break
            trial.set_user_attr(_REPEATED, True)
            self._journal.tell(trial, state=self._states.FAIL)  # samplers ignore failed trials
        else:
            self.exhausted = True
            return None
        if why := invalid_reason(self._recipe, diff):
            progress.note(f"left out  {labelled(diff)}: {why}")
            self._journal.tell(trial, state=self._states.PRUNED)
            return None
        return _Trial(trial, labelled(diff), Entry(diff=diff))

    def tell(self, trial: _Trial, rows: Sequence[Row]) -> None:
        """Record the mean of the valid scores. Without one for every seed, a trial is pruned: to samplers it is bad."""
        valid = [row for row in rows if False not in (row.get("verified"), row.get("under_cap"))]
        scores = [row["bits_per_byte"] for row in valid if is_finite(row.get("bits_per_byte"))]
        whole = len(scores) == self._seeds
        self._journal.tell(trial.trial, fmean(scores) if whole else None, None if whole else self._states.PRUNED)

    def _diff(self, chosen: Mapping[str, Any]) -> dict[str, object]:
        """Return the diff of Optuna's values: numbers of a range, or values of a list by their text."""
        return {
            path: values.near(value)
            if isinstance(values := self._space[path], Between)
            else next(one for one in values if show(one) == value)
            for path, value in chosen.items()
        }

    def _distribution(self, values: Values) -> Any:
        kinds = self._optuna.distributions
        if not isinstance(values, Between):
            return kinds.CategoricalDistribution([show(value) for value in values])
        kind = kinds.IntDistribution if values.whole else kinds.FloatDistribution
        return kind(values.low, values.high, log=values.log)


def invalid_reason(recipe: Recipe, diff: Diff) -> str:
    """Return the reason why a diff makes no valid recipe, or an empty text."""
    try:
        check_recipe(recipe.but(diff))
    except UserError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class _Watched:
    """Executor of a batch's runs that reports their training to Optuna, and stops the pruned ones."""

    executor: Executor
    batch: Sequence[_Trial]
    planned: Sequence[Run]

    @property
    def workers(self) -> int:
        return self.executor.workers

    def run(self, jobs: Sequence[Path]) -> Iterator[Ended | None]:
        for ended in self.executor.run(jobs):
            self.look()
            yield ended

    def look(self) -> None:
        for trial in self.batch:
            _look(trial, [run for run in self.planned if run.label == trial.label])


def _look(trial: _Trial, runs: Sequence[Run]) -> None:
    """Report a trial's logged losses to Optuna, and stop its runs if it is pruned."""
    for place, run in enumerate(runs):
        for part, cost in parts(read_steps(run.folder / LOG)).items():
            if (step := PARTS * place + part) in trial.reported:
                continue
            trial.reported.add(step)
            trial.trial.report(cost, step)
            if trial.trial.should_prune():
                reason = f"its training loss was {cost:.4f} bits per byte at {part / PARTS:.0%} of seed {run.seed}"
                for one in runs:
                    if not one.over and not (one.folder / STOP).exists():
                        write_json(one.folder / STOP, {"reason": reason})


def parts(steps: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Return tenth of a run to its mean training bits per byte, without the last, which may be unfinished."""
    costs: dict[int, list[float]] = {}
    for step in steps:
        costs.setdefault(math.ceil(PARTS * step["progress"]), []).append(step["bits_per_byte"])
    return {part: fmean(costs[part]) for part in sorted(costs)[:-1]}
