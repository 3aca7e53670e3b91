"""Peak memory of training beside its estimate, for several recipes on random tokens.

    python bench/memory.py [--stages] [RECIPE[,PATH=VALUE]...]...

With --stages it measures calibration with packing, and scoring, in place of training. Each recipe makes a few steps, or
one stage, in a process of its own, whose peak of resident memory the system counts.
"""

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from caddie.config import assignments
from caddie.data.loaders import TrainingData
from caddie.model import build
from caddie.pack.calibrate import calibrate
from caddie.pack.compress import compress
from caddie.recipes.catalog import find
from caddie.report.tables import table
from caddie.runtime.memory import peak_bytes
from caddie.score import Text, score
from caddie.train.loop import train
from caddie.train.memory import estimate_memory
from caddie.train.stage_memory import Stage, estimate_stages

MIB = 1 << 20
SCORED = 16_384
"""Predictions that are scored: the peak is that of a batch or of a group of documents."""
CASES = (
    "tiny",
    "baseline_mini",
    "single_gpu_mini",
    "gold6_mini",
    "three_layer_recurrence_mini",
    "longer_warmdown_mini",
    "baseline,train.batch_tokens=16384,train.micro_batches=2",
    "longer_warmdown,train.batch_tokens=4096,train.micro_batches=1",
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


def measure_stage(case: str, stage: Stage) -> None:
    """Pack or score an untrained model in this process and print the estimated and the measured bytes."""
    name, *settings = case.split(",")
    recipe = find(name).but(assignments(settings))
    length, chance = recipe.score.sequence_length, np.random.default_rng(0)
    ids = chance.integers(2, recipe.model.vocabulary, max(65_536, 8 * length) + 1, dtype=np.uint16)
    ids[::600] = 1
    model = build(recipe.model, 0)
    found = estimate_stages(recipe.model, recipe.pack, recipe.score, SCORED)
    if stage == "packing":
        weights = {key: weight.detach() for key, weight in model.named_parameters()}
        known = {}
        if recipe.pack.calibrated:
            known = calibrate(model, recipe.pack.calibration.batches(model, [ids], length=length, bos=1), bos=1)
        compress(recipe.model, weights, recipe.pack, known)
    else:
        score(model, Text(ids[: SCORED + 1], 1, SCORED, SCORED, SCORED), recipe.score)
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 * torch.get_num_threads()
    part = found.needed(stage) - found.process
    print(json.dumps([found.process, part, peak_bytes(torch.device("cpu")) + children]))


def answer(*arguments: str) -> list[Any]:
    """Run this script with the arguments in a process of its own and return what it measured."""
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True)
    if done.returncode:
        why = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise SystemExit(f"{arguments[1]}: {why[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_stages(cases: Sequence[str]) -> None:
    """Measure packing and scoring of each case in processes of their own and print a table."""
    rows = []
    for case in cases:
        for stage in ("packing", "scoring"):
            process, part, peak = answer("--stage", case, stage)
            sizes = [f"{size / MIB:,.0f}" for size in (process, part, process + part, peak)]
            rows.append([case, stage, *sizes, f"{(process + part) / peak:.2f}"])
            print(*rows[-1], file=sys.stderr, flush=True)
    print(table(rows, ["recipe", "stage", "process", "stage alone", "estimate", "measured", "ratio"]))


def main() -> None:
    """Measure each case in a process of its own and print a table."""
    if sys.argv[1:2] == ["--stage"]:
        measure_stage(*sys.argv[2:])
        return
    if sys.argv[1:2] == ["--stages"]:
        measure_stages(sys.argv[2:] or CASES[:1])
        return
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2])
        return
    rows = []
    for case in sys.argv[1:] or CASES:
        tokens, *parts, peak = answer("--measure", case)
        sizes = [f"{size / MIB:,.0f}" for size in (*parts, sum(parts), peak)]
        rows.append([case, f"{tokens:,}", *sizes, f"{sum(parts) / peak:.2f}"])
        print(*rows[-1], file=sys.stderr, flush=True)
    heads = ["recipe", "tokens of a micro-batch", "process", "state", "step", "estimate", "measured", "ratio"]
    print(table(rows, heads))


if __name__ == "__main__":
    main()
