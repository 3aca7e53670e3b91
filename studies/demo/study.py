"""The demo: what learns most in 60 seconds of two cores, tried on a text that is not its own?

    python studies/demo/text.py packages.jsonl
    caddie study studies/demo/study.py --data packages.jsonl --workers 2
    caddie study studies/demo/study.py --out runs/demo_text    # once, on the demo's own text

No clock decides: the base makes `BASE_STEPS`, and an entry as many as its measured step cost allows. What the n-gram
tilt adds to scoring and checking is charged to training (`CHARGE`), so that `make demo` takes as long as before. What
was measured so far, on one seed: `docs/log.md`.
"""

from __future__ import annotations

from caddie.config import Diff
from caddie.config.schedules import PiecewiseConstant
from caddie.lab.modelled import step_time
from caddie.lab.study import Entry, ModelledSeconds, Study
from caddie.model import HashedNGrams
from caddie.recipes.catalog import find
from caddie.score.ngram_tilt import NGramTilt
from caddie.train.optim.adamw import AdamW

BASE_STEPS = 1660
"""Steps of the demo in 60 seconds of two cores with nothing else at work (58,202 tokens/s)."""
CHARGE = 60 / 50
"""Time with the tilt's ten seconds of scoring and checking over that without."""
RATE, BETA2 = "train.optimizers.embedding.lr", "train.optimizers.embedding.beta2"
TABLE = "train.optimizers.*bigrams.weight"
"""Optimizer of the table of pairs alone."""


base = find("tiny").but({"train.precision": "bfloat16", "train.compile": "never"})  # what the clock would choose
tilt: Diff = {"score.tilt": NGramTilt(order=6, boost=3.5)}
gentler: Diff = {
    RATE: 0.028,
    BETA2: 0.99,
    "train.optimizers.matrix.lr": 0.03,
    TABLE: AdamW(lr=0.028, beta1=0.5, beta2=0.99),
}

study = Study(
    name="demo",
    why="What learns most in 60 seconds of two cores?",
    base=base,
    entries={
        "tilt": Entry(
            diff=tilt,
            step_cost=CHARGE,
            kind="scoring",
            why="Source code repeats itself over longer distances than a window.",
        ),
        "gentler Adam": Entry(
            diff=gentler,
            step_cost=1.0,
            kind="optimizer",
            why="The four changes below that were better alone, together.",
        ),
        "tilt, gentler Adam": Entry(diff={**tilt, **gentler}, step_cost=CHARGE, kind="combination"),
        "embedding rate 0.028": Entry(diff={RATE: 0.028}, step_cost=1.0, kind="optimizer"),
        "embedding beta2 0.99": Entry(
            diff={BETA2: 0.99},
            step_cost=1.0,
            kind="optimizer",
            why="Most rows are read rarely.",
        ),
        "table beta1 0.5": Entry(
            diff={TABLE: AdamW(lr=0.04, beta1=0.5)},
            step_cost=1.0,
            kind="optimizer",
            why="A row that is read rarely should not drift for ten steps after it was.",
        ),
        "matrix rate 0.03": Entry(diff={"train.optimizers.matrix.lr": 0.03}, step_cost=1.0, kind="optimizer"),
        "MLP of 256": Entry(diff={"model.block.mlp.hidden": 256}, step_cost=1.09, kind="architecture"),
        "triples": Entry(
            diff={"model.embedding.trigrams": HashedNGrams(buckets=32_768)}, step_cost=1.13, kind="architecture"
        ),
        "rows of 512 at the end": Entry(
            diff={
                "train.sequence_length": PiecewiseConstant(values=(256, 512), begins=(0.6,)),
                "score.sequence_length": 512,
            },
            step_cost=1.054,
            kind="schedule",
            why="Windows of twice the length see twice the past.",
        ),
        "steps of 4,096 tokens": Entry(diff={"train.batch_tokens": 4096}, step_cost=1.68, kind="schedule"),
    },
    budget=ModelledSeconds(seconds=BASE_STEPS * step_time(base).milliseconds / 1e3),
    margin=0.001,
)
