"""Studies in the background, and the state of any study: `driver.json` beside its runs, written as each run ends.

A background study is the same command in a session of its own, so it outlives its terminal. After a shutdown of the
machine the file names a process that is gone: the study counts as stopped, and the same command continues it.
"""

import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from caddie.errors import UserError
from caddie.files import write_json
from caddie.lab.measured import spent
from caddie.lab.study_lock import driving
from caddie.report.read import known_number, read_object
from caddie.report.run_files import DRIVER
from caddie.report.tables import duration
from caddie.run.run_lock import Holder, read_holder, this_process
from caddie.runtime.child_process import child_environment

NICE = 10
"""Niceness of a background study: other work of the machine goes first."""
STUDY_LOG = "study.log"
"""Log of a background study, beside its results."""


@dataclass(frozen=True)
class StudyState:
    """State of a study: how many runs are over, and the process that does the others."""

    study: str
    results: str
    """Folder of the study's results."""
    done: int
    """Runs that are over, the failed ones too."""
    failed: int
    total: int
    seconds_left: float | None
    """Estimated seconds, None before the first run has ended."""
    driver: Holder

    @property
    def state(self) -> Literal["finished", "running", "stopped", "elsewhere"]:
        """State: `finished` if all runs are over, else that of the process; `elsewhere` if it is on another machine."""
        if self.done >= self.total:
            return "finished"
        return {True: "running", False: "stopped", None: "elsewhere"}[self.driver.alive]  # type: ignore[return-value]

    def to_json(self) -> dict[str, Any]:
        """Return the fields and `state` as JSON values."""
        return {**asdict(self), "state": self.state}

    def write(self, folder: Path) -> None:
        """Write `driver.json` to the folder of the study's runs."""
        write_json(folder / DRIVER, asdict(self))

    def __str__(self) -> str:
        by = f"process {self.driver.pid} on {self.driver.host} since {self.driver.since}"
        left = f", {duration(self.seconds_left)} left" if self.seconds_left and self.state != "finished" else ""
        failed = f", {self.failed:,} failed (--retry runs them again)" if self.failed else ""
        return f"{self.study}: {self.state}, {self.done:,} of {self.total:,} runs{failed}{left} ({by})"


def read_state(folder: Path) -> StudyState | None:
    """Return the state of the study whose runs are in a folder, or None if none was begun there."""
    try:
        found: Mapping[str, Any] = read_object(folder / DRIVER)
        driver = read_holder(found["driver"])
        counts = int(found["done"]), int(found.get("failed", 0)), int(found["total"])
        if not 0 <= counts[1] <= counts[0] <= counts[2] < 1 << 40:
            return None
        return StudyState(
            str(found["study"])[:100], str(found["results"]), *counts, known_number(found["seconds_left"]), driver
        )
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def seconds_left(rows: Iterable[Mapping[str, Any]], left: int, workers: int) -> float | None:
    """Estimate the seconds for `left` more runs, `workers` at once, each as long as the mean finished run."""
    known = [spent(row) for row in rows if row["state"] == "finished"]
    return fmean(known) * left / workers if known else None


def begin(study: str, runs: Path, results: Path, arguments: Sequence[str], total: int) -> StudyState:
    """Begin `caddie ARGUMENTS`, which does the `total` runs of a study, in a session of its own; return its state.

    It prints to `study.log` in `results`. Without a GPU each run has one thread, unless OMP_NUM_THREADS is set: next to
    other programs, two threads of a small step wait for each other dozens of times longer than they work, and the
    number of threads changes the last bits. Raises `UserError` if a process is already running the study.
    """
    import torch

    _stopped_state(runs / study)
    results.mkdir(parents=True, exist_ok=True)
    threads = {} if torch.cuda.is_available() else {"OMP_NUM_THREADS": "1"}
    with driving(runs / study), (results / STUDY_LOG).open("ab") as output:
        before = _stopped_state(runs / study)  # another may have begun it since
        process = subprocess.Popen(
            [sys.executable, "-m", "caddie", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=threads | child_environment(),
        )
        done, failed, left = 0, 0, None
        if before and before.done < total:  # else the study has fewer runs now, or failed ones are run again
            done, failed, left = before.done, before.failed, before.seconds_left
        begun = StudyState(study, str(results.resolve()), done, failed, total, left, this_process(process.pid))
        begun.write(runs / study)
    return begun


def _stopped_state(runs: Path) -> StudyState | None:
    """Return the state of a study, or None before its first start; `UserError` if it is running on this machine."""
    state = read_state(runs)
    if state is not None and state.driver.alive:
        raise UserError(f"{state}; wait for it, or stop it: kill {state.driver.pid}")
    return state
