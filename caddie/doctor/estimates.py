"""Estimates of a run's steps, tokens and seconds, and reference rates of known machines."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from caddie.config.schedules import TrainProgress, int_at
from caddie.model.flops import flops_per_token
from caddie.recipes.catalog import find
from caddie.recipes.recipe import Recipe
from caddie.train.settings import Train

_CELLS = 1000  # parts of the budget that an estimate adds up


@dataclass(frozen=True)
class Reference:
    """A measured training rate."""

    device: str
    """Pattern of the device name."""
    recipe: str
    tokens_per_second: float
    """Rate of one process, before depth recurrence begins."""
    source: str
    date: str


_LOGS = "openai/parameter-golf, records/track_10min_16mb/"
_AVX2 = "docs/results/2026-11-22-two-cores-avx2.md"
_AVX512 = "docs/results/2026-11-22-two-cores-avx512.md"


def _record(device: str, recipe: str, tokens: int, milliseconds: float, folder: str) -> Reference:
    """Return the rate of one of eight GPUs in a public log, given a step's tokens and milliseconds."""
    return Reference(device, recipe, tokens / milliseconds * 1e3 / 8, f"{_LOGS}{folder}, 8 GPUs", folder[:10])


REFERENCES = (
    _record("H100", "baseline", 524_288, 43.54, "2026-03-17_NaiveBaseline"),
    _record("H200", "lower_lr", 524_288, 41.60, "2026-03-18_LowerLR"),
    Reference("H100", "single_gpu", 524_288 / 338e-3, "public system 001, one GPU, FlashAttention 3", "2026-03"),
    _record("H100", "exclusive_everywhere", 786_432, 86.63, "2026-03-25_ValCalib_GPTQ_XSA_BigramHash3072"),
    _record("H100", "three_layer_recurrence", 786_432, 102.0, "2026-04-09_SP8192_3LayerRecur_ParResid_QK525_LegalTTT"),
    _record("H100", "document_attention", 786_432, 95.8, "2026-04-10_VarLenAttn"),
    _record("H100", "longer_warmdown", 786_432, 96.3, "2026-04-27_SP8192_LQER_SparseGate_BOSSmearFix_9HpStack_1.0611"),
    Reference("AMD EPYC, 2 cores,.*bf16", "baseline_mini", 21_070, f"{_AVX512}, a shared host", "2026-11-22"),
    Reference("AMD EPYC, 2 cores, avx2$", "tiny", 29_700, f"{_AVX2}, a shared host", "2026-11-22"),
)
"""Public logs of eight GPUs include communication, so one process alone should be a little faster."""


@dataclass(frozen=True)
class Expected:
    """The rate to expect of a machine."""

    tokens_per_second: float
    reference: Reference
    scaled: bool
    """True if the reference is of another model, scaled by FLOPs per token."""


def expected(device: str, recipe: Recipe) -> Expected | None:
    """Return the rate to expect of one process on a device of this name, or None if there is no reference for it.

    `device` is the name of a GPU, or `NAME, N cores, INSTRUCTION SETS` of a CPU. A reference of the same model is taken
    as it is. Otherwise the one nearest in FLOPs per token is scaled by their ratio, right to a factor of about two.
    """
    known = [(one, find(one.recipe)) for one in REFERENCES if re.search(rf"\b{one.device}\b", device)]
    for reference, other in known:
        if other.model == recipe.model and other.train.sequence_length == recipe.train.sequence_length:
            return Expected(reference.tokens_per_second, reference, False)
    if not known:
        return None
    ratios = {reference: _flops(other) / _flops(recipe) for reference, other in known}
    nearest = min(ratios, key=lambda reference: max(ratios[reference], 1 / ratios[reference]))
    return Expected(nearest.tokens_per_second * ratios[nearest], nearest, True)


def _flops(recipe: Recipe) -> float:
    return flops_per_token(recipe.model, recipe.train.sequence_length, 0.0)


@dataclass(frozen=True)
class Estimate:
    """Steps, tokens and seconds of training, without warm-up, packing and scoring."""

    steps: int
    tokens: int
    seconds: float | None
    """None for a budget of steps at an unknown pace."""


def estimate(train: Train, processes: int, pace: Sequence[tuple[float, float]] | None) -> Estimate | None:
    """Estimate a training run. `pace` is pairs of progress, and seconds per token of a process from there on.

    None for a budget of seconds at an unknown pace. A step at progress p uses max(1 / steps, seconds(p) / budget) of
    the budget, so the number of steps is the integral of its inverse over progress.
    """
    budget = train.budget
    if pace is None and budget.seconds is not None:
        return None
    steps = tokens = seconds = 0.0
    for cell in range(_CELLS):
        part = (cell + 0.5) / _CELLS
        progress = TrainProgress(round(part * (budget.steps or 0)), part * (budget.seconds or 0.0), budget)
        batch = int_at(train.batch_tokens, progress)
        step = [each for begin, each in pace or ((0.0, 0.0),) if begin <= part][-1] * batch / processes
        used = max(1 / budget.steps if budget.steps else 0.0, step / budget.seconds if budget.seconds else 0.0)
        count = 1 / _CELLS / used
        steps, tokens, seconds = steps + count, tokens + count * batch, seconds + count * step
    return Estimate(round(steps), round(tokens), None if pace is None else seconds)
