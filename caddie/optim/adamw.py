"""AdamW, from PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from caddie.config import Fraction, Positive
from caddie.distributed import Ranks
from caddie.optim.optimizer import Optimizer, Updater
from caddie.schedules import Moment, NonNegativeNumber, value_at


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay (arXiv 1412.6980, 1711.05101)."""

    beta1: Fraction = 0.9
    """Decay of the mean gradient."""
    beta2: Fraction = 0.95
    """Decay of the mean squared gradient."""
    epsilon: Positive = 1e-8
    """Added to the root of the mean squared gradient."""
    weight_decay: NonNegativeNumber = 0.0
    """Fraction of the weight, times the learning rate, taken off at each step."""

    def build(self, parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> Updater:
        """The updater of these parameters."""
        return _AdamWUpdater(self, parameters)


class _AdamWUpdater(Updater):
    def __init__(self, config: AdamW, parameters: Mapping[str, nn.Parameter]) -> None:
        self.config = config
        self.parameters = dict(parameters)
        self.inner = torch.optim.AdamW(
            self.parameters.values(), lr=0.0, betas=(config.beta1, config.beta2), eps=config.epsilon, fused=True
        )
        for parameter in self.parameters.values():  # what PyTorch would make at the first step, so it can be restored
            self.inner.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def step(self, moment: Moment, lr_scale: float) -> None:
        group = self.inner.param_groups[0]
        group["lr"] = value_at(self.config.lr, moment) * lr_scale
        group["weight_decay"] = value_at(self.config.weight_decay, moment)
        self.inner.step()

    def state(self) -> dict[str, Tensor]:
        return {
            f"{name}/{key}": tensor
            for name, parameter in self.parameters.items()
            for key, tensor in self.inner.state[parameter].items()
        }
