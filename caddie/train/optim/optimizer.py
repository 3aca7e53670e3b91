"""Socket of optimizers, and the updaters that they build."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from caddie.config import Config
from caddie.config.schedules import NonNegativeNumber, TrainProgress
from caddie.runtime.distributed import Ranks


class Optimizer(Config):
    """Socket: optimizer."""

    lr: NonNegativeNumber
    """Learning rate, before the run's learning-rate schedule multiplies it."""

    @abstractmethod
    def build(self, parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> Updater:
        """Return the updater of these parameters."""


class Updater(ABC):
    """Optimizer with its state. Each rank holds a part of the gradient; the whole gradient is the sum over the ranks.

    All ranks make the same calls in the same order: `launch`, `squares`, `step`. A step may be left out, as when the
    gradient is not finite; the next `launch` starts over. From `launch` to the end of the step the parameters'
    gradients belong to the updater, so gradient clipping takes the norm from `squares`: a rank holds only a part.
    """

    @abstractmethod
    def launch(self) -> None:
        """Start to sum the gradients over the ranks; `step` calls this if nobody did."""

    @abstractmethod
    def squares(self) -> Tensor:
        """Return the sum of squares of the whole gradient: 0-dimensional, float32, equal on every rank."""

    @abstractmethod
    def step(self, train_progress: TrainProgress, lr_scale: float, gradient_scale: Tensor | None = None) -> None:
        """Update every parameter once, with the learning rate at `train_progress` times `lr_scale`.

        The gradient is multiplied by `gradient_scale` (0-dimensional) first, if there is one.
        """

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return everything that must survive a restart, by name, whole on every rank: the tensors, not copies.

        All ranks call it together, to gather what is sharded. Names and shapes do not depend on the number of ranks.
        """


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of all elements of all tensors: 0-dimensional, float32."""
    return nn.utils.get_total_norm(tensors).float().square()
