"""Proxy ladder: compare differences between small runs with those between large ones, by kind of change.

Small runs stand for large ones only where that was measured. So the same study runs at several scales, and each smaller
one is compared with the largest: how often a difference has the same sign, and whether the ranks agree.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from caddie.errors import UserError
from caddie.files import write_file
from caddie.lab.agreement import transfer
from caddie.lab.report import Results, markdown_table, signed
from caddie.lab.runner import run_study
from caddie.lab.search import invalid_reason
from caddie.lab.study import Study
from caddie.report.tables import crop, number, printable, table

PAGE = "ladder.md"
NO_KIND = "no kind named"
ALL_KINDS = "all kinds"
_NAMES = ["kind of change", "entries", "same sign", "95 % interval", "decided", "Spearman", "Kendall"]


@dataclass(frozen=True)
class Ladder:
    """A study at several scales; as `str`, tables for a terminal."""

    study: Study
    scales: Mapping[str, Results]
    """Smallest first."""
    folder: Path
    """Folder of `ladder.md`."""

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Results as JSON values: each smaller scale against the largest, and every entry at every scale."""
        verdicts = {scale: _judged(found) for scale, found in self.scales.items()}
        kinds = {label: entry.kind or NO_KIND for label, entry in self.study.entries.items()}
        *smaller, largest = verdicts
        steps = []
        for small in smaller:
            found = transfer(verdicts[small], verdicts[largest], kinds)
            if len(found) > 1:
                found += transfer(verdicts[small], verdicts[largest], dict.fromkeys(kinds, ALL_KINDS))
            steps.append({"small": small, "large": largest, "kinds": found})
        return {
            "study": self.study.name,
            "scales": list(verdicts),
            "results": [str(found.folder) for found in self.scales.values()],
            "steps": steps,
            "entries": [
                {
                    "label": label,
                    "kind": kind,
                    "at": {
                        scale: {name: judged[label][name] for name in ("difference", "word")}
                        for scale, judged in verdicts.items()
                        if label in judged
                    },
                }
                for label, kind in kinds.items()
            ],
        }

    def markdown(self) -> str:
        """Return the results as Markdown."""
        facts = self.facts
        parts = [f"# {facts['study']} at {len(facts['scales'])} scales"]
        for step in facts["steps"]:
            parts += [
                f"## How well {step['small']} predicts {step['large']}",
                markdown_table(_NAMES, list(map(_row, step["kinds"]))),
            ]
        rows = []
        for one in facts["entries"]:
            found = [one["at"].get(scale) for scale in facts["scales"]]
            at = [f"{signed(result['difference'])} {result['word']}" if result else "-" for result in found]
            rows.append([one["label"], one["kind"], *at])
        parts += ["## Differences in bits per byte, negative is better"]
        parts += [markdown_table(["entry", "kind of change", *facts["scales"]], rows)]
        return "\n\n".join(parts) + "\n"

    def __str__(self) -> str:
        lines: list[str] = []
        for step in self.facts["steps"]:
            rows = [[crop(str(cell), 20) for cell in _row(one)] for one in step["kinds"]]
            lines += [f"how well {step['small']} predicts {step['large']}", *table(rows, _NAMES).split("\n"), ""]
        return "\n".join(printable(line) for line in lines[:-1])


def ladder(study: Study, data: str | None = None, *, folder: str | Path | None = None, **how: Any) -> Ladder:
    """Run a study at each of its scales, and write `ladder.md` beside a folder of results for each.

    `how` holds further arguments of `run_study`. Raises `UserError` for a study of fewer than two scales.
    """
    if len(study.scales) < 2:
        raise UserError(
            f"{study.name} has {len(study.scales)} scales and a ladder needs two, smallest first; "
            'write Study(scales={"small": {...}, "large": {...}}), diffs of the base'
        )
    folder = Path(folder or Path("runs", study.name))
    studies = {scale: study.at(scale) for scale in study.scales}
    for scale, one in studies.items():  # check every scale before the smallest one runs
        for label in one.labels:
            if why := invalid_reason(one.recipe(label), {}):
                raise UserError(f"{label} at {scale}: {why}")
    found = {scale: run_study(one, data, folder=folder / scale, **how) for scale, one in studies.items()}
    made = Ladder(study, found, folder)
    write_file(folder / PAGE, made.markdown().encode(errors="replace"))
    return made


def _judged(found: Results) -> dict[str, Mapping[str, Any]]:
    """Return the verdict on each entry that has a score and a rival with one, in the study's order."""
    judged = {one["label"]: one for one in found.facts["verdicts"] if one["difference"] is not None}
    return {label: judged[label] for label in found.study.entries if label in judged}


def _row(one: Mapping[str, Any]) -> list[object]:
    signs, decided = one["signs"], one["decided"]
    low, high = signs["interval"]
    return [
        one["kind"],
        len(one["labels"]),
        f"{signs['count']} of {signs['of']}",
        f"{low:.0%} to {high:.0%}",
        f"{decided['count']} of {decided['of']}" if decided["of"] else "-",
        *(number(one[name], ".2f") for name in ("spearman", "kendall")),
    ]
