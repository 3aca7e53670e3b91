"""Techniques one by one: every line from the baseline to the best record, and from there to champion, taken back alone.

The lines are those of `caddie diff`, so a technique that is added to a recipe is asked after without a word here. Twins
make all the steps, in 600 seconds of eight H100: what a line costs there in time is paid in steps. The report has what
each is worth in bits per byte and bytes, and the time of a step. `study` is of the best record, `champion` of caddie's
own recipe, with the best record's bytes for each weight. Lines of calibration are left out: twins have little text
for it. FLOPs do not see what makes no products, so its time is by the logs of the records that brought it.

    caddie study studies/ablations/study.py:champion --data train_open.jsonl.xz --background
"""

from __future__ import annotations

from dataclasses import replace

from caddie.config import Diff
from caddie.lab.study import ModelledSeconds, Study
from caddie.lab.variations import ablate
from caddie.recipes.catalog import find
from caddie.recipes.published import speeds
from caddie.recipes.shrink import AT_SCALE, small_cap

RECORD = "ngram_tilt"


def ratio(before: str, after: str) -> float:
    """Return the time of a record's step as a multiple of another's."""
    return speeds()[before].step_ms / speeds()[after].step_ms


WITHOUT = {
    "model.block.attention.xsa": 1 - 11 / 7 * (1 - ratio("parallel_muon", "exclusive_everywhere")),
    "model.block.attention.gate": ratio("three_phases", "narrow_gates"),
    "model.embedding.smear": ratio("sparse_gates", "document_smear"),
}
"""Time of a step without a technique, as a multiple of that with it. XSA was added to seven of eleven layers."""


def lines(name: str, origin: str, sizes: Diff) -> Study:
    """Return the study of the lines from one recipe to another; `sizes` are settings of both twins."""
    recipe, before = (find(f"{one}_scale").but({**AT_SCALE, **sizes}) for one in (name, origin))
    found = ablate(
        recipe,
        before,
        name=f"ablations-{name}",
        why=f"What is each line of {name} worth?",
        budget=ModelledSeconds(seconds=600),
        margin=0.002,
    )
    costs = {label: WITHOUT.get(next(iter(entry.diff))) for label, entry in found.entries.items()}
    return replace(found, entries={label: replace(one, step_cost=costs[label]) for label, one in found.entries.items()})


study = lines(RECORD, "baseline", {})
cap = small_cap(find(RECORD), find(f"{RECORD}_scale"))
champion = lines("champion", RECORD, {"pack.policy": None, "pack.cap_bytes": cap})
