"""Techniques one by one: each change from the baseline to the best record, and from there to champion, reverted alone.

The changes are those of `caddie diff`, so a technique that is added to a recipe is ablated without a word here.
Settings that work only together are one technique (`TOGETHER`). Twins are those of the ladder (`NAME_scale32`), whose
scores come out in the order of the records. They make all the steps in 600 seconds of eight H100, so what a technique
costs in time is paid in steps. FLOPs count matrix products only, so the time of other techniques is by their records'
logs.

Scores are without test-time training and n-gram tilt, which take a third of a run; these two are set against the
record's whole scoring. champion trains as the record does and is packed into as many bytes, so its runs and the
record's packings share one training per random seed. Two changes are left out: calibration, for which twins have little
text, and rotary channels, since all sixteen of a twin's head turn in either recipe.

    caddie study studies/ablations/study.py --data train_open.jsonl.xz --workers 2 --keep-checkpoints
"""

from __future__ import annotations

from collections.abc import Iterator

from caddie.config import Diff
from caddie.lab.study import BASE, Entry, ModelledSeconds, Study
from caddie.lab.variations import ablate
from caddie.recipes.catalog import find
from caddie.recipes.published import speeds
from caddie.recipes.recipe import Recipe
from caddie.recipes.shrink import AT_SCALE_COMPILED

RECORD, CHAMPION = "ngram_tilt", "champion"
CAP: Diff = {"pack.policy": None, "pack.cap_bytes": 161_896}
"""The file of the best record's twin with random seed 1, as in the ladder."""
PLAIN: Diff = {"score.ttt": None, "score.tilt": None}
"""Scoring of the base."""
WHOLE = "whole scoring"
"""Label of the record with both."""
UNSEEN = "model.block.attention.rope.dims"
"""Setting that changes nothing in a twin."""
TOGETHER = {
    "document attention": ("model.block.attention.scope", "model.block.attention.longest"),
    "norms scaled by depth": ("model.block.attention_norm", "model.block.mlp_norm"),
    "momentum warm-up": ("train.optimizers.matrix.momentum",),
    "AdamW of embeddings": ("train.optimizers.embedding",),
    "AdamW of gates": ("train.optimizers.gate",),
    "AdamW of scalars": ("train.optimizers.scalar",),
}
"""Technique to the beginnings of its settings' paths."""


def ratio(before: str, after: str) -> float:
    """Return the time of a record's step as a multiple of another's."""
    return speeds()[before].step_ms / speeds()[after].step_ms


WITHOUT = {
    "model.block.attention.xsa": 1 - 11 / 7 * (1 - ratio("parallel_muon", "exclusive_everywhere")),
    "model.block.attention.gate": ratio("three_phases", "narrow_gates"),
    "model.embedding.smear": ratio("sparse_gates", "document_smear"),
}
"""Time of a step without a technique, as a multiple of that with it. XSA was added to seven of eleven layers."""


def technique(path: str) -> str:
    """Return the label of the entry without the technique that a setting belongs to, by default the setting."""
    return "without " + next((name for name, begins in TOGETHER.items() if path.startswith(begins)), path)


def taken_back(recipe: Recipe, origin: Recipe) -> Iterator[tuple[str, Entry]]:
    """Yield label and entry of each technique that a recipe has and another lacks."""
    found = dict[str, Entry]()
    for reverted in ablate(recipe, origin).entries.values():
        first, *others = reverted.diff
        if first == UNSEEN:
            continue
        label, cost = technique(first), WITHOUT.get(first)
        diff = {**found[label].diff, **reverted.diff} if label in found else reverted.diff
        found[label] = Entry(diff=diff, against=technique(others[0]) if others else BASE, step_cost=cost)
    yield from found.items()


def scorings(plain: Recipe, whole: Recipe) -> Iterator[tuple[str, Entry]]:
    """Yield the record's whole scoring, and it without each of its adaptive parts."""
    parts = plain.settings.diff(whole.settings)
    yield WHOLE, Entry(diff=parts, kind="scoring")
    for part in parts:
        rest = {path: value for path, value in parts.items() if path != part}
        yield technique(part), Entry(diff=rest, against=WHOLE, kind="scoring")


def packings(base: Recipe, champion: Recipe, record: Recipe) -> Iterator[tuple[str, Entry]]:
    """Yield champion, which trains as the record does, and it without each of its own parts."""
    yield CHAMPION, Entry(diff=base.settings.diff(champion.settings), kind="bundle")
    for label, entry in taken_back(champion, record):
        diff = base.settings.diff(champion.but(entry.diff).settings)
        yield f"{CHAMPION} {label}", Entry(diff=diff, against=CHAMPION, kind="quantization")


record, baseline, champion = (
    find(f"{name}_scale32").but({**AT_SCALE_COMPILED, "train.precision": "float32", "score.stride": 128})
    for name in (RECORD, "baseline", CHAMPION)
)
base = record.but(PLAIN)
study = Study(
    name="ablations",
    why="What is each technique of the best record and of champion worth?",
    base=base,
    entries={
        **dict(scorings(base, record)),
        **dict(packings(base, champion.but({**PLAIN, **CAP}), base.but(CAP))),
        **dict(taken_back(base, baseline)),
    },
    budget=ModelledSeconds(seconds=600),
    margin=0.002,
)
