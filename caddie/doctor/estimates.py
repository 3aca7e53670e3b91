"""What a run would come to here, and how fast machines of this kind are known to be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from caddie.config.schedules import TrainProgress, int_at
from caddie.model.flops import flops_per_token
from caddie.recipes.catalog import find
from caddie.recipes.recipe import Recipe
from caddie.train.trainer import Train

_CELLS = 1000


@dataclass(frozen=True)
class Reference:
    """A rate that somebody measured."""

    device: str
    """Pattern of the device's name."""
    recipe: str
    tokens_per_second: float
    """Of one process, before layers are looped."""
    source: str
    date: str


_LOGS = "openai/parameter-golf, records/track_10min_16mb/"
REFERENCES = (
    Reference("H100", "baseline", 524_288 / 43.54e-3 / 8, _LOGS + "2026-03-17_NaiveBaseline, 8 GPUs", "2026-03-17"),
    Reference("H200", "lower_lr", 524_288 / 41.60e-3 / 8, _LOGS + "2026-03-18_LowerLR, 8 GPUs", "2026-03-18"),
    Reference("H100", "single_gpu", 524_288 / 338e-3, "seed 001, one GPU, FlashAttention 3", "2026-03"),
    Reference(
        "H100",
        "exclusive_everywhere",
        786_432 / 86.63e-3 / 8,
        _LOGS + "2026-03-25_ValCalib_GPTQ_XSA_BigramHash3072, 8 GPUs",
        "2026-03-25",
    ),
    Reference(
        "H100",
        "three_layer_recurrence",
        786_432 / 102.0e-3 / 8,
        _LOGS + "2026-04-09_SP8192_3LayerRecur_ParResid_QK525_LegalTTT, 8 GPUs",
        "2026-04-09",
    ),
    Reference(
        "H100", "document_attention", 786_432 / 95.8e-3 / 8, _LOGS + "2026-04-10_VarLenAttn, 8 GPUs", "2026-04-10"
    ),
    Reference(
        "H100",
        "best_record",
        786_432 / 96.3e-3 / 8,
        _LOGS + "2026-04-27_SP8192_LQER_SparseGate_BOSSmearFix_9HpStack_1.0611, 8 GPUs",
        "2026-04-27",
    ),
    Reference(
        "AMD EPYC, 2 cores,.*bf16",
        "baseline_mini",
        21_070,
        "docs/performance.md, two cores, a shared host",
        "2026-11-22",
    ),
    Reference(
        "AMD EPYC, 2 cores, avx2$",
        "tiny",
        29_700,
        "docs/results/2026-11-22-two-cores-avx2.md, a shared host",
        "2026-11-22",
    ),
)
"""Public logs of eight GPUs count what they exchange, so one process alone should be a little faster."""


@dataclass(frozen=True)
class Expected:
    """What a machine of this kind should do."""

    tokens_per_second: float
    reference: Reference
    scaled: bool
    """Whether the reference is of another model, and its rate was scaled by the arithmetic of a token."""


def expected(device: str, recipe: Recipe) -> Expected | None:
    """The rate of one process of the recipe on a device of this name; None where nobody measured such a device.

    A GPU goes by its name, a CPU by `NAME, N cores, FLAGS`. A rate for the same model is taken as it is; else that of
    the model whose FLOPs per token are nearest, times the ratio of both, which is good for a factor of two or so.
    """
    known = [(one, find(one.recipe)) for one in REFERENCES if re.search(rf"\b{one.device}\b", device)]
    for reference, other in known:
        if other.model == recipe.model and other.train.sequence_length == recipe.train.sequence_length:
            return Expected(reference.tokens_per_second, reference, False)
    if not known:
        return None
    ratios = {reference: _work(other) / _work(recipe) for reference, other in known}
    nearest = min(ratios, key=lambda reference: max(ratios[reference], 1 / ratios[reference]))
    return Expected(nearest.tokens_per_second * ratios[nearest], nearest, True)


def _work(recipe: Recipe) -> float:
    return flops_per_token(recipe.model, recipe.train.sequence_length, 0.0)


@dataclass(frozen=True)
class Estimate:
    """What training would come to; without the warm-up, packing and scoring."""

    steps: int
    tokens: int
    seconds: float | None
    """None for a budget of steps at no known pace."""


def estimate(train: Train, processes: int, pace: Sequence[tuple[float, float]] | None) -> Estimate | None:
    """Steps, tokens and seconds at a pace, which is progress from which on it holds to seconds per token of a process.

    None for a budget with seconds at no known pace. A step at progress p spends max(1 / steps, seconds(p) / budget) of
    the budget, of which this is the sum.
    """
    budget = train.budget
    if pace is None and budget.seconds is not None:
        return None
    steps = tokens = seconds = 0.0
    for cell in range(_CELLS):
        part = (cell + 0.5) / _CELLS
        moment = TrainProgress(round(part * (budget.steps or 0)), part * (budget.seconds or 0.0), budget)
        batch = int_at(train.batch_tokens, moment)
        step = 0.0
        if pace is not None:
            step = [each for begin, each in pace if begin <= part][-1] * batch / processes
        spent = max(1 / budget.steps if budget.steps else 0.0, step / budget.seconds if budget.seconds else 0.0)
        count = 1 / _CELLS / spent
        steps, tokens, seconds = steps + count, tokens + count * batch, seconds + count * step
    return Estimate(round(steps), round(tokens), None if pace is None else seconds)
