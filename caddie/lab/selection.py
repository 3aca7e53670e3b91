"""Greedy forward selection: the entries of a study that are better together, added one by one.

A record of the contest found nine of its settings this way; each was kept because it improved on those before
(openai/parameter-golf, records/track_10min_16mb/2026-04-27_SP8192_LQER_SparseGate_BOSSmearFix_9HpStack_1.0611).
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from caddie.config import show
from caddie.errors import UserError
from caddie.lab.report import Results, p_value, problem, signed
from caddie.lab.runner import run_study
from caddie.lab.search import invalid_reason
from caddie.lab.study import BASE, Study
from caddie.recipes.recipe import Recipe
from caddie.report.display import Display
from caddie.report.tables import crop, printable, table
from caddie.runtime.progress import Progress


@dataclass(frozen=True)
class Selection:
    """Result of greedy forward selection; as `str`, a table for a terminal."""

    study: Study
    rounds: Sequence[Results]
    """Results of each round, whose base has the entries chosen before it."""
    chosen: Sequence[str]
    """Labels in the order in which they were chosen."""
    recipe: Recipe
    """The study's base with all that was chosen."""

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Result as JSON values: the verdict that chose each, the last verdicts on those left, and the whole diff."""
        verdicts = [{one["label"]: one for one in found.facts["verdicts"]} for found in self.rounds]
        diff = self.study.recipe(BASE).settings.diff(self.recipe.settings)
        return {
            "study": self.study.name,
            "chosen": [found[label] for label, found in zip(self.chosen, verdicts, strict=False)],
            "left": [one for found in verdicts[len(self.chosen) :] for one in found.values()],
            "diff": {path: show(value) for path, value in diff.items()},
            "rounds": [str(found.folder) for found in self.rounds],
        }

    def __str__(self) -> str:
        facts, rows = self.facts, []
        for number, (one, found) in enumerate(zip(facts["chosen"], self.rounds, strict=False), 1):
            interval = " to ".join(map(signed, one["interval"]))
            tried = len(found.study.entries)
            rows.append([number, crop(one["label"], 24), signed(one["difference"]), interval, p_value(one["q"]), tried])
        lines = [table(rows, ["round", "chosen", "difference", "95 % interval", "q", "of"])] if rows else []
        left = [("not valid" if problem(one) else one["word"], one["label"]) for one in facts["left"]]
        lines += [f"{why:<12}{label}" for why, label in left] or ["nothing is left to add"]
        lines += [f"changes     {path}={value}" for path, value in facts["diff"].items()]
        return "\n".join(printable(line) for part in lines for line in part.split("\n"))


def select(
    study: Study,
    data: str | None = None,
    *,
    folder: str | Path | None = None,
    progress: Progress | None = None,
    **how: Any,
) -> Selection:
    """Greedy forward selection: add the best of the entries that are better than what is chosen so far, until none is.

    Each round is a study NAME-roundN of all entries left, with results in `folder`/roundN. Its base has what is chosen
    so far, and every entry is compared with it, whatever its `against`. An entry that does not fit that base is left
    out; one whose artifacts fail verification or are over their cap is not chosen. `how` holds further arguments of
    `run_study`. Raises `UserError` for a stated `step_cost`.
    """
    if any(entry.step_cost is not None for entry in study.entries.values()):
        raise UserError(
            "a stated step_cost holds beside one rival alone, and selection adds entries up; leave step_cost out"
        )
    folder, base, left = Path(folder or Path("runs", study.name)), study.base, dict(study.entries)
    progress, rounds, chosen = progress or Display(stream=sys.stdout), list[Results](), list[str]()
    while True:
        recipe = replace(study, base=base, entries={}).recipe(BASE)
        for label in list(left):
            if why := invalid_reason(recipe, left[label].diff):
                progress.note(f"left out  {label}: {why}")
                del left[label]
        if not left:
            return Selection(study, rounds, chosen, recipe)
        number = len(rounds) + 1
        this = replace(
            study,
            name=f"{study.name}-round{number}",
            why=f"Greedy selection, round {number}: which is best on top of {', '.join(chosen) or 'the base'}?",
            base=base,
            entries={label: replace(entry, against=BASE, claim=None) for label, entry in left.items()},
            scales={},
        )
        rounds.append(run_study(this, data, folder=folder / f"round{number}", progress=progress, **how))
        better = [one for one in rounds[-1].facts["verdicts"] if one["word"] == "better" and not problem(one)]
        if not better:
            return Selection(study, rounds, chosen, recipe)
        chosen.append(min(better, key=lambda one: one["difference"])["label"])
        base = base.but(left.pop(chosen[-1]).diff)
