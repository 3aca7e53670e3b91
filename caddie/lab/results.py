"""Run a study from Python; its results show themselves as a table or a plot.

from caddie import Entry, Steps, Study, find, run_study

study = Study(name="depth", base=find("baseline_mini"), budget=Steps(steps=200),
              entries={"deeper": Entry(diff={"model.depth": 6})})
run_study(study, "text.jsonl", workers=2)
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from caddie.lab.executors import Executor, Local
from caddie.lab.findings import findings
from caddie.lab.report import signed, verdict_html, verdict_q, write_study_report
from caddie.lab.rows import Row
from caddie.lab.runner import StudyInProgress, alone, check_results, plan
from caddie.lab.study import Study
from caddie.report.display import Display
from caddie.report.run_files import ERROR, STOP
from caddie.report.tables import crop, printable, table
from caddie.runtime.progress import Progress


@dataclass(frozen=True)
class Results:
    """Results of a study: a table as text, a table and a plot in a notebook."""

    study: Study
    rows: Sequence[Row]
    """One for each run that is over."""
    folder: Path
    """Folder of `results.jsonl` and the reports."""
    price: float | None = None
    """Price of an hour of one GPU."""

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Verdicts, leaderboard, failures, notes and costs, as JSON values (see `caddie.lab.findings`)."""
        return findings(self.study.to_json(), self.rows, self.price)

    def write(self) -> list[Path]:
        """Write the report as a page, as Markdown and as CSV, and return their paths."""
        return write_study_report(self.folder, price=self.price)

    def _repr_html_(self) -> str:
        return verdict_html(self.facts)

    def __str__(self) -> str:
        facts, study, rows = self.facts, self.facts["study"], []
        claims = any(one["claim"] for one in facts["verdicts"])
        room = 24 + max(0, shutil.get_terminal_size().columns - 80)  # for the longest label on a wide terminal
        if base := next((one for one in facts["board"] if one["label"] == study["label"]), None):
            figures = [len(base["seeds"]), f"{base['mean']:.4f}", "", ""]
            rows.append([crop(base["label"], room), *figures, "the base", *([""] if claims else [])])
        for one in facts["verdicts"]:
            reach = one["interval"] and (one["interval"][1] - one["interval"][0]) / 2
            difference = signed(one["difference"]) + (f" ±{reach:.4f}" if reach else "")
            figures = [len(one["seeds"]), f"{one['mean']:.4f}", difference, verdict_q(one)]
            claimed = [one["claim"]["word"] if one["claim"] else ""] if claims else []
            rows.append([crop(one["label"], room), *figures, one["word"], *claimed])
        lines = [f"{study['name']}: {study['why']}" if study["why"] else study["name"], facts["found"]]
        if rows:
            names = ["entry", "seeds", "mean", "difference", "q", "verdict", *(["claimed"] if claims else [])]
            lines += ["", *table(rows, names).split("\n"), ""]
            lines.append("differences in bits per byte, negative is better; q is p adjusted for the number of entries")
        reasons: dict[str, list[str]] = {}
        for one in facts["verdicts"]:
            if one["reason"]:
                reasons.setdefault(one["reason"], []).append(one["label"])
        lines += [f"note    {', '.join(labels)}: {reason}" for reason, labels in reasons.items()]
        lines += [f"failed  {one['label']}: {one['error']}" for one in facts["failed"]]
        lines += [f"note    {one}" for one in facts["notes"]]
        return "\n".join(map(printable, lines))


def run_study(
    study: Study,
    data: str | None = None,
    *,
    workers: int = 1,
    folder: str | Path | None = None,
    runs: Path = Path("runs"),
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
    failed runs. The report shows `command` as the one typed. `progress` prints plain lines unless given; it gets a
    `runs` event for each run that ends, out of `total`, by default the runs of the study. Without `keep_checkpoints`,
    the checkpoint of a finished run is removed once no run left needs its training. Raises `UserError` for a study that
    cannot run, before the first run for all that can be checked by then.
    """
    results, executor = Path(folder or Path("runs", study.name)), executor or Local(workers)
    progress = progress or Display(stream=sys.stdout)
    check_results(study, results)
    planned = plan(study, data, runs, progress, results=results)
    otherwise = f"a study named {study.name} is being run by another process, whatever its --out; wait for it, "
    otherwise += "stop it, or run this one in another working directory or under a name of its own"
    with alone(runs / study.name / ".lock", otherwise):
        for run in planned if retry else ():
            for name in (STOP, ERROR):  # in this order, for without its error a run is not over
                (run.folder / name).unlink(missing_ok=True)
        total = total or len(planned)
        in_progress = StudyInProgress(study, planned, results, runs / study.name, executor.workers, total, progress)
        rows = in_progress.drive(executor, command, keep_checkpoints)
    found = Results(study, rows, results, price)
    found.write()
    return found
