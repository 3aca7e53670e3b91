"""The socket that every optimizer fits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from caddie.config import Config
from caddie.distributed import Ranks
from caddie.schedules import Moment, NonNegativeNumber


@dataclass(frozen=True, kw_only=True)
class Optimizer(Config):
    """Socket: how parameters follow their gradients."""

    lr: NonNegativeNumber
    """Learning rate, before the run's learning-rate schedule multiplies it."""

    @abstractmethod
    def build(self, parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> Updater:
        """The updater of these parameters."""


class Updater(ABC):
    """An optimizer at work. Gradients are the same on every rank when `step` is called."""

    @abstractmethod
    def step(self, moment: Moment, lr_scale: float) -> None:
        """Update every parameter once, with the learning rate at `moment` times `lr_scale`."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Everything that must survive a restart, by name; the tensors themselves, not copies."""
