"""The socket that every optimizer fits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from caddie.config import Config
from caddie.config.schedules import NonNegativeNumber, TrainProgress
from caddie.runtime.distributed import Ranks


@dataclass(frozen=True, kw_only=True)
class Optimizer(Config):
    """Socket: how parameters follow their gradients."""

    lr: NonNegativeNumber
    """Learning rate, before the run's learning-rate schedule multiplies it."""

    @abstractmethod
    def build(self, parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> Updater:
        """The updater of these parameters."""


class Updater(ABC):
    """An optimizer at work. Each rank holds its own part of the gradient; the whole gradient is the sum over the ranks.

    All ranks make the same calls in the same order: `launch`, `squares`, `step`. A step may be left out, as when the
    gradient is not finite; the next `launch` starts anew. From `launch` to the end of the step the parameters'
    gradients belong to the updater, so a norm to clip by comes from `squares`: what a rank holds is only a part.
    """

    @abstractmethod
    def launch(self) -> None:
        """Begin to bring the gradients of the parameters together over the ranks; `step` does it if nobody did."""

    @abstractmethod
    def squares(self) -> Tensor:
        """Sum of squares of the whole gradient of these parameters: 0-dimensional, float32, the same on every rank."""

    @abstractmethod
    def step(self, moment: TrainProgress, lr_scale: float, gradient_scale: Tensor | None = None) -> None:
        """Update every parameter once, with the learning rate at `moment` times `lr_scale`.

        The gradient is multiplied by `gradient_scale` (0-dimensional) first, or taken as it is.
        """

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Everything that must survive a restart, by name, whole on every rank; the tensors themselves, not copies.

        All ranks call it together, for what is shared out among them is brought together here. Its names and shapes
        do not depend on the number of ranks.
        """


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of squares of all elements of all tensors: 0-dimensional, float32."""
    return nn.utils.get_total_norm(tensors).float().square()
