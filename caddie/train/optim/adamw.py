"""AdamW, from PyTorch."""

from collections.abc import Callable, Mapping
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from caddie.config import Positive, Range
from caddie.config.schedules import NonNegativeNumber, TrainProgress, value_at
from caddie.runtime.distributed import Ranks
from caddie.train.optim.optimizer import Optimizer, Updater, sum_of_squares

Decay = Annotated[float, Range(0.0, 0.999999)]
"""Decay of a running mean. At 1 the mean would stay zero, and AdamW would divide it by zero."""


class AdamW(Optimizer):
    """AdamW: Adam with decoupled weight decay (arXiv 1412.6980, 1711.05101)."""

    beta1: Decay = 0.9
    """Decay of the running mean of the gradient."""
    beta2: Decay = 0.95
    """Decay of the running mean of the squared gradient."""
    epsilon: Positive = 1e-8
    """Number added to the root of the mean squared gradient."""
    weight_decay: NonNegativeNumber = 0.0
    """Weight decay: fraction of the weight, times the learning rate, taken off at each step."""

    def build(self, parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> Updater:
        return _AdamWUpdater(self, parameters, ranks)


class _AdamWUpdater(Updater):
    def __init__(self, config: AdamW, parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> None:
        self.config = config
        self.parameters = dict(parameters)
        self.ranks = ranks
        self.finish_sum: Callable[[], None] | None = None
        self.moments = {
            name: {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
            for name, parameter in self.parameters.items()
        }

    def launch(self) -> None:
        self.finish_sum = self.ranks.begin_sum(self._gradients())

    def squares(self) -> Tensor:
        self._wait()
        return sum_of_squares(self._gradients()).to(self.ranks.device)

    @torch.no_grad()
    def step(self, train_progress: TrainProgress, lr_scale: float, gradient_scale: Tensor | None = None) -> None:
        self._wait()
        if gradients := self._gradients():
            if gradient_scale is not None:
                torch._foreach_mul_(gradients, gradient_scale)
            moving = [name for name, parameter in self.parameters.items() if parameter.grad is not None]
            keys = ("exp_avg", "exp_avg_sq", "step")
            first, second, steps = ([self.moments[name][key] for name in moving] for key in keys)
            # The function and not the class, whose first use imports PyTorch's compiler, a second of every process.
            adamw(
                [self.parameters[name] for name in moving],
                gradients,
                first,
                second,
                [],
                steps,
                fused=True,
                amsgrad=False,
                beta1=self.config.beta1,
                beta2=self.config.beta2,
                lr=value_at(self.config.lr, train_progress) * lr_scale,
                weight_decay=value_at(self.config.weight_decay, train_progress),
                eps=self.config.epsilon,
                maximize=False,
            )
        self.finish_sum = None

    def state(self) -> dict[str, Tensor]:
        return {f"{name}/{key}": tensor for name, kept in self.moments.items() for key, tensor in kept.items()}

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]

    def _wait(self) -> None:
        if self.finish_sum is None:
            self.launch()
        assert self.finish_sum is not None
        self.finish_sum()
