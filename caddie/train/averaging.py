"""Averages of the weights over the run: what is collected is what the run hands on."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from caddie.config import Config, Fraction, Positive, Range, Technique
from caddie.config.schedules import TrainProgress


@dataclass(frozen=True, kw_only=True)
class Averaging(Config):
    """Socket: which weights a run hands on."""

    @abstractmethod
    def build(self, weights: Mapping[str, Tensor]) -> Average:
        """An average that starts at these weights."""


class Average(ABC):
    """An average at work: one float32 copy of the weights and, where needed, 0-dimensional counters on the CPU."""

    def __init__(self, weights: Mapping[str, Tensor], **counters: float) -> None:
        self.average = {name: tensor.detach().float().clone() for name, tensor in weights.items()}
        self.counters = {name: torch.tensor(number, dtype=torch.float64) for name, number in counters.items()}

    @abstractmethod
    def watch(self, weights: Mapping[str, Tensor], moment: TrainProgress, lr_scale: float) -> None:
        """Take in the weights after a step.

        `moment` is that after the step, so its number counts the steps done; `lr_scale` is the factor on the learning
        rates with which the step was made.
        """

    def result(self) -> dict[str, Tensor]:
        """The weights to hand on, in float32: the average, and the latest weights while nothing was collected."""
        return self.average

    def state(self) -> dict[str, Tensor]:
        """What must survive a restart; the tensors themselves, to be copied into."""
        weights = {f"weights/{name}": tensor for name, tensor in self.average.items()}
        return weights | {f"counters/{name}": tensor for name, tensor in self.counters.items()}

    @torch.no_grad()
    def _take(self, weights: Mapping[str, Tensor], share: float) -> None:
        """Move the average toward `weights` by `share` of the way."""
        new = [weights[name].detach().float() for name in self.average]
        torch._foreach_lerp_(list(self.average.values()), new, share)


@dataclass(frozen=True, kw_only=True)
class EMA(Averaging):
    """e ← decay·e + (1 - decay)·w after every step, from the initial weights, no bias correction (#287 on).

    It remembers the last 1/(1 - decay) steps, so `decay` must suit the number of steps; `ProgressEMA` suits any.
    """

    techniques: ClassVar = {
        "": Technique(
            "The mean of the last steps is better than any of them.",
            "Polyak and Juditsky 1992; openai/parameter-golf #287 on (0.997), L3 on (0.9965), seed 002",
            "-0.003 for SWA (#375); too long a memory hurts: +0.007 at 1,830 steps (a fork of #670), +0.077 "
            "at 850 (#1125)",
        ),
    }

    decay: Fraction = 0.997
    """Weight of the past."""

    def build(self, weights: Mapping[str, Tensor]) -> Average:
        """An average that starts at these weights."""
        return _StepAverage(self.decay, weights)


class _StepAverage(Average):
    def __init__(self, decay: float, weights: Mapping[str, Tensor]) -> None:
        super().__init__(weights)
        self.decay = decay

    def watch(self, weights: Mapping[str, Tensor], moment: TrainProgress, lr_scale: float) -> None:
        self._take(weights, 1.0 - self.decay)


@dataclass(frozen=True, kw_only=True)
class ProgressEMA(Averaging):
    """e ← e + (1 - exp(-d/fraction))·(w - e) after a step that spent d of the budget, from the initial weights.

    The same memory in any run, however many steps its machine makes: with n equal steps this is `EMA` of
    decay exp(-1/(n·fraction)). The best decays known remember 4 to 8 % of the steps (#2005 for short runs).
    """

    techniques: ClassVar = {
        "": Technique(
            "The same memory on a laptop and on eight GPUs.",
            "openai/parameter-golf #2005 for the length in short runs; counting progress is this project's",
            "as EMA in 1,000 to 3,000 steps: decay 0.990 -0.0117, 0.995 -0.006 (#2005)",
        ),
    }

    fraction: Annotated[float, Range(1e-6, 1.0)] = 0.05
    """Part of the budget that is remembered."""

    def build(self, weights: Mapping[str, Tensor]) -> Average:
        """An average that starts at these weights."""
        return _ProgressAverage(self.fraction, weights)


class _ProgressAverage(Average):
    def __init__(self, fraction: float, weights: Mapping[str, Tensor]) -> None:
        super().__init__(weights, progress=0.0)
        self.fraction = fraction

    def watch(self, weights: Mapping[str, Tensor], moment: TrainProgress, lr_scale: float) -> None:
        spent = max(0.0, moment.progress - float(self.counters["progress"]))  # a run may go on with a larger budget
        self.counters["progress"].fill_(moment.progress)
        self._take(weights, -math.expm1(-spent / self.fraction))


@dataclass(frozen=True, kw_only=True)
class SWA(Averaging):
    """Uniform mean of snapshots at equal distances of progress, the last one at the end (Izmailov et al. 2018).

    Records take one every 50 steps of the last 40 % of the warm-down (INT5), or only while the learning rate is below
    0.2 of its height ("tight", `lr_below`). Progress tells beforehand which snapshots will be the last, so this is
    also the mean of the last k checkpoints (LAWA, Kaddour 2022), without keeping k copies: `snapshots` = k, `fraction`
    = k times their distance. Where steps are longer than the distance there is one snapshot per step.
    """

    techniques: ClassVar = {
        "": Technique(
            "A plain mean of late snapshots, which need no decay.",
            "arXiv 1803.05407; LAWA, arXiv 2209.14981; openai/parameter-golf, "
            "2026-03-20_Int6_MLP3x_SmearGate_BigramHash_MuonWD_SWA, INT5",
            "-0.0006 over the last 40 % of the warm-down (INT5); from too early on +0.037 (#1125); LAWA "
            "+0.0024 (a fork of #670)",
        ),
    }

    fraction: Annotated[float, Range(1e-6, 1.0)] = 0.2
    """Part of the budget, at its end, that is averaged."""
    snapshots: Annotated[int, Range(1, 1_000_000)] = 24
    """Snapshots in that part."""
    lr_below: Positive | None = None
    """Collect only while the factor on the learning rates is below this, or none for the whole part."""

    def build(self, weights: Mapping[str, Tensor]) -> Average:
        """An average that starts at these weights."""
        return _SnapshotAverage(self, weights)


class _SnapshotAverage(Average):
    def __init__(self, config: SWA, weights: Mapping[str, Tensor]) -> None:
        super().__init__(weights, collected=0, place=-math.inf)
        self.config = config

    def watch(self, weights: Mapping[str, Tensor], moment: TrainProgress, lr_scale: float) -> None:
        config, collected, before = self.config, self.counters["collected"], float(self.counters["place"])
        # Distances between snapshots that lie behind the end: 0 at the last snapshot, -1 at the one before.
        place = math.floor((moment.progress - 1.0) * config.snapshots / config.fraction + 1e-6)
        self.counters["place"].fill_(place)
        within = place > -config.snapshots and (config.lr_below is None or lr_scale < config.lr_below)
        if not within:
            collected.zero_()
        due = within and place > before
        if due or not collected:  # until the first snapshot the average follows the weights
            self._take(weights, 1.0 / (1.0 + float(collected)))
            collected += due
