"""Averages of the weights over the run (EMA, SWA), which the run packs in place of the last weights."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from caddie.config import Config, Fraction, Positive, Range
from caddie.config.schedules import TrainProgress


class Averaging(Config):
    """Socket: average of the weights over the run."""

    counters: ClassVar[Mapping[str, float]] = {}  # initial values of the numbers that an average keeps beside weights

    @abstractmethod
    def share(self, train_progress: TrainProgress, lr_scale: float, counters: Mapping[str, Tensor]) -> float:
        """Return the share of the latest weights in the new average, 0 to 1, and update the counters."""


class Average:
    """Running average that starts at `weights`: a float32 copy and 0-dimensional float64 counters on the CPU."""

    def __init__(self, config: Averaging, weights: Mapping[str, Tensor]) -> None:
        self.config = config
        self.weights = {name: tensor.detach().float().clone() for name, tensor in weights.items()}
        """Average in float32; the latest weights while nothing has been collected."""
        self.counters = {name: torch.tensor(number, dtype=torch.float64) for name, number in config.counters.items()}

    @torch.no_grad()
    def update(self, weights: Mapping[str, Tensor], train_progress: TrainProgress, lr_scale: float) -> None:
        """Take in the weights after a step.

        `train_progress` is the progress after the step, so its step number counts the steps done; `lr_scale` is the
        factor on the learning rates in that step.
        """
        if share := self.config.share(train_progress, lr_scale, self.counters):
            new = [weights[name].detach().float() for name in self.weights]
            torch._foreach_lerp_(list(self.weights.values()), new, share)

    def state(self) -> dict[str, Tensor]:
        """Return everything that must survive a restart: the tensors, not copies, so that a restart can fill them."""
        weights = {f"weights/{name}": tensor for name, tensor in self.weights.items()}
        return weights | {f"counters/{name}": tensor for name, tensor in self.counters.items()}


class EMA(Averaging):
    """Exponential moving average (EMA): e ← decay·e + (1 - decay)·w after every step, no bias correction (#287 on).

    It starts at the initial weights and remembers the last 1/(1 - decay) steps, so `decay` must suit the number of
    steps; `ProgressEMA` suits any (Polyak and Juditsky 1992).
    """

    decay: Fraction = 0.997
    """Weight of the previous average in each step."""

    def share(self, train_progress: TrainProgress, lr_scale: float, counters: Mapping[str, Tensor]) -> float:
        return 1.0 - self.decay


class ProgressEMA(Averaging):
    """EMA by progress: e ← e + (1 - exp(-d/fraction))·(w - e) after a step that spent d of the budget.

    It starts at the initial weights. Its memory is the same in any run, however many steps the machine makes: with n
    equal steps this is `EMA` of decay exp(-1/(n·fraction)). The best decays known remember 4 to 8 % of the steps (#2005
    for short runs).
    """

    fraction: Annotated[float, Range(1e-6, 1.0)] = 0.05
    """Fraction of the budget that the average remembers."""

    counters = MappingProxyType({"progress": 0.0})

    def share(self, train_progress: TrainProgress, lr_scale: float, counters: Mapping[str, Tensor]) -> float:
        """Return 1 - exp(-d/fraction)."""
        spent = train_progress.progress - float(counters["progress"])
        counters["progress"].fill_(train_progress.progress)
        return -math.expm1(-max(0.0, spent) / self.fraction)  # progress falls when a run goes on with a larger budget


class SWA(Averaging):
    """Stochastic weight averaging (SWA): mean of snapshots evenly spaced in progress (Izmailov et al. 2018).

    The last snapshot is at the end. Records take one every 50 steps of the last 40 % of the warm-down (INT5), or only
    while the learning rate is below 0.2 of its peak ("tight", `lr_below`). Progress tells in advance which snapshots
    are the last, so this is also the mean of the last k checkpoints (LAWA, Kaddour 2022) without k copies: `snapshots`
    = k, `fraction` = k times their spacing. If steps are longer than the spacing, each step is a snapshot.
    """

    fraction: Annotated[float, Range(1e-6, 1.0)] = 0.2
    """Last fraction of the budget, which is averaged."""
    snapshots: Annotated[int, Range(1, 1_000_000)] = 24
    """Number of snapshots in that fraction."""
    lr_below: Positive | None = None
    """Collect only while the factor on the learning rates is below this, or none for the whole fraction."""

    counters = MappingProxyType({"collected": 0.0, "place": -math.inf})

    def share(self, train_progress: TrainProgress, lr_scale: float, counters: Mapping[str, Tensor]) -> float:
        """Return one over the number of snapshots when one is due, 1 before the first snapshot, else 0."""
        collected, before = counters["collected"], float(counters["place"])
        # Position relative to the end, in spacings of snapshots: 0 at the last snapshot, -1 at the one before.
        place = math.floor((train_progress.progress - 1.0) * self.snapshots / self.fraction + 1e-6)
        counters["place"].fill_(place)
        within = place > -self.snapshots and (self.lr_below is None or lr_scale < self.lr_below)
        if not within or place < before:  # progress falls when a run goes on with a larger budget
            collected.zero_()
            before = -math.inf
        due = within and place > before
        if not due and collected:
            return 0.0
        share = 1.0 / (1.0 + float(collected))
        collected += due
        return share


class TailEMA(Averaging):
    """EMA e over the last part of the run, mixed with the last weights w (tail EMA): (1 - weight)·w + weight·e.

    e starts at the weights at progress `begin`, then e ← e + (w - e)/steps after every step. The embedding is averaged
    too; the source leaves it out.
    """

    begin: Fraction = 0.89
    """Progress at which the average starts; before that, the average is the latest weights."""
    steps: Annotated[float, Range(1.0, 1e9)] = 150.0
    """Memory of the average, in steps."""
    weight: Fraction = 0.6
    """Share of the average in the result."""

    counters = MappingProxyType({"started": 0.0})

    def share(self, train_progress: TrainProgress, lr_scale: float, counters: Mapping[str, Tensor]) -> float:
        """Return 1 until `begin`, then 1/steps; at the end of the budget more, which mixes in the last weights.

        The mixture is not an EMA, so a run that goes on with a larger budget starts the average anew.
        """
        started = bool(counters["started"])
        counters["started"].fill_(self.begin <= train_progress.progress < 1.0)
        kept = 1.0 - 1.0 / self.steps if started else 0.0
        if train_progress.progress >= 1.0:
            kept *= self.weight
        return 1.0 - kept
