"""Peak memory of training beside its estimate, for several recipes on random tokens.

    python bench/memory.py [RECIPE[,PATH=VALUE]...]...

Each recipe makes a few steps in a process of its own, whose peak of resident memory the system counts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from caddie.config import assignments
from caddie.data.loaders import TrainingData
from caddie.recipes.catalog import find
from caddie.report.tables import table
from caddie.train.loop import train
from caddie.train.memory import estimate_memory

MIB = 1 << 20
CASES = (
    "tiny",
    "baseline_mini",
    "single_gpu_mini",
    "gold6_mini",
    "three_layer_recurrence_mini",
    "best_record_mini",
    "baseline,train.batch_tokens=16384,train.micro_batches=2",
    "best_record,train.batch_tokens=4096,train.micro_batches=1",
    "tiny,model.width=512,train.batch_tokens=32768",
)
"""The demo, twins of several records, and larger shapes that take minutes on two cores."""


def measure(case: str) -> None:
    """Train in this process and print the estimated and the measured bytes."""
    name, *settings = case.split(",")
    recipe = find(name).but(assignments(settings))
    config = recipe.train.but(seconds=None, steps=2, warmup_steps=1)
    tokens = config.micro_tokens(1)
    ids = np.random.default_rng(0).integers(2, recipe.model.vocabulary, 16 * (tokens + 1), dtype=np.uint16)
    ids[::600] = 1
    estimate = estimate_memory(recipe.model, config)
    with tempfile.TemporaryDirectory() as folder:
        trained = train(recipe.model, config, TrainingData([ids], 1), seed=0, folder=Path(folder))
    print(json.dumps([tokens, estimate.process, estimate.state, estimate.step, trained.peak_bytes]))


def main() -> None:
    """Measure each case in a process of its own and print a table."""
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2])
        return
    rows = []
    for case in sys.argv[1:] or CASES:
        done = subprocess.run([sys.executable, __file__, "--measure", case], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{case}: {done.stderr.strip().splitlines()[-1]}")
        tokens, *parts, peak = json.loads(done.stdout.splitlines()[-1])
        sizes = [f"{size / MIB:,.0f}" for size in (*parts, sum(parts), peak)]
        rows.append([case, f"{tokens:,}", *sizes, f"{sum(parts) / peak:.2f}"])
        print(*rows[-1], file=sys.stderr, flush=True)
    heads = ["recipe", "tokens of a micro-batch", "process", "state", "step", "estimate", "measured", "ratio"]
    print(table(rows, heads))


if __name__ == "__main__":
    main()
