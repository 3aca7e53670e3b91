"""The ladder of records: do twins that make all the steps come out in the order of the public scores?

Each rung is the twin of a record with all its steps, its own quantization and its own scoring, test-time training too
(`NAME_scale32`, `docs/studies.md`), compiled as records train, but in float32, for bfloat16 is slow where a processor
lacks it. Every rung has 600 seconds of eight H100, by its public step time. Each is set against the rung before it; the
claim is the difference of the public scores. Overlapping windows are 64 tokens apart where the twin's would be 8, for
an eighth of the time to score.
`wider` is the same at width 64, in bfloat16, where twins read a tenth of the tokens for each parameter.

The last rung is `champion`, which has no public score. A record's file is as large as its quantizers make it; the
champion's packer fills its cap, and 16,000,000 bytes hold the twin many times. So the twin's cap is the file of the
best record's twin with random seed 1. At width 64 the cap has as many bytes for each weight as that record has at
full size.
`champion` asks of the last two alone, with five random seeds. Its rows are of twins that read documents in the order of
the text, as their recipes do.

    caddie study studies/ladder/study.py --data train_open.jsonl.xz --background
    caddie study studies/ladder/study.py:champion --data train_open.jsonl.xz --workers 2 --keep-checkpoints
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from caddie.data.loaders import PackedDocuments
from caddie.lab.study import BASE, Claim, Entry, ModelledSeconds, Study
from caddie.pack.coding import Packed
from caddie.recipes.catalog import find, shipped
from caddie.recipes.recipe import Recipe
from caddie.recipes.shrink import AT_SCALE_COMPILED, small_cap

RUNGS = (
    "baseline",
    "ten_layers",
    "smear_and_bigrams",
    "exclusive_four",
    "partial_rotary",
    "parallel_muon",
    "exclusive_everywhere",
    "vocabulary_4096",
    "vocabulary_8192",
    "three_layer_recurrence",
    "document_attention",
    "longer_warmdown",
    "ngram_tilt",
    "champion",
)
RECORD, CHAMPION = RUNGS[-2:]
PRECISIONS = {"scale": "bfloat16", "scale32": "float32"}
CHAMPION_BYTES = {"scale": small_cap(find(RECORD), find(f"{RECORD}_scale")), "scale32": 161_896}
COMPARABLE = {"baseline": 1.2275}
"""Public scores on the contest's current validation text, where a recipe's first one is of another."""


def twin(name: str, suffix: str) -> Recipe:
    """Return the twin of a rung as it is trained and scored here, without a budget of its own."""
    recipe = find(f"{name}_{suffix}")
    diff = {**AT_SCALE_COMPILED, "train.precision": PRECISIONS[suffix], "score.stride": max(64, recipe.score.stride)}
    if name == CHAMPION:
        diff |= {"pack.policy": None, "pack.cap_bytes": CHAMPION_BYTES[suffix]}
    return recipe.but(diff)


def public(name: str) -> float | None:
    """Return the public score of a rung, or None."""
    return COMPARABLE.get(name, shipped()[name].published)


def ladder(suffix: str, name: str) -> Study:
    """Return the study of all rungs at one size."""
    first = shipped()[RUNGS[0]].public[0]
    current = replace(first, bits_per_byte=COMPARABLE[RUNGS[0]], note="on the contest's current validation text")
    base = replace(twin(RUNGS[0], suffix), public=(current,))
    entries = {}
    for before, rung in pairwise(RUNGS):
        score, last = public(rung), public(before)
        step = score - last if score and last else None
        source = f"openai/parameter-golf, {shipped()[rung].why}"
        entries[rung] = Entry(
            diff=base.settings.diff(twin(rung, suffix).settings),
            against=BASE if before == RUNGS[0] else before,
            kind="bundle",
            why=shipped()[rung].why,
            claim=None if step is None else Claim(word="better", difference=round(step, 4), source=source),
            public_score=score,
        )
    return Study(
        name=name,
        why="Do twins that make all the steps come out in the order of the public scores?",
        base=base,
        entries=entries,
        budget=ModelledSeconds(seconds=600),
        margin=0.002,
    )


study = ladder("scale32", "ladder")
wider = ladder("scale", "wider")
in_order = {"train.loader": PackedDocuments()}
record = twin(RECORD, "scale").but({**in_order, "pack.coding": Packed(shuffle=True)})  # its coding when rows were made
champion = Study(
    name="champion",
    why="Does champion beat the best record, in as many modelled seconds and no more bytes?",
    base=record,
    entries={
        CHAMPION: Entry(
            diff=record.settings.diff(twin(CHAMPION, "scale").but(in_order).settings),
            kind="bundle",
            why=shipped()[CHAMPION].why,
        )
    },
    seeds=(1, 2, 3, 4, 5),
    budget=study.budget,
    margin=0.002,
)
