"""Averages of the weights over the run: what is collected is what is packed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from caddie.config import Config, Fraction


@dataclass(frozen=True, kw_only=True)
class Averaging(Config):
    """Socket: which weights a run hands on."""

    @abstractmethod
    def build(self, weights: Mapping[str, Tensor]) -> Average:
        """An average that starts at these weights."""


class Average(ABC):
    """An average at work."""

    @abstractmethod
    def watch(self, weights: Mapping[str, Tensor]) -> None:
        """Take in the weights after a step."""

    @abstractmethod
    def result(self) -> dict[str, Tensor]:
        """The averaged weights, also what must survive a restart; the tensors themselves, not copies."""


@dataclass(frozen=True, kw_only=True)
class EMA(Averaging):
    """e ← decay·e + (1 - decay)·w after every step, in float32, from the initial weights, no bias correction.

    The last 1/(1 - decay) steps count most; about 5 % of the run's steps served the records (#287 on).
    """

    decay: Fraction = 0.997
    """Weight of the past."""

    def build(self, weights: Mapping[str, Tensor]) -> Average:
        """An average that starts at these weights."""
        return _ExponentialAverage(self.decay, weights)


class _ExponentialAverage(Average):
    def __init__(self, decay: float, weights: Mapping[str, Tensor]) -> None:
        self.decay = decay
        self.average = {name: tensor.detach().float().clone() for name, tensor in weights.items()}

    @torch.no_grad()
    def watch(self, weights: Mapping[str, Tensor]) -> None:
        new = [weights[name].detach().float() for name in self.average]
        torch._foreach_lerp_(list(self.average.values()), new, 1.0 - self.decay)

    def result(self) -> dict[str, Tensor]:
        return self.average
