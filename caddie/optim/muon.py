"""Muon: momentum, orthogonalized, for matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from caddie.config import Range
from caddie.distributed import Ranks
from caddie.errors import UserError
from caddie.optim.optimizer import Optimizer, Updater
from caddie.schedules import Moment, NonNegativeNumber, value_at

CLASSIC = (3.4445, -4.7750, 2.0315)
"""Quintic coefficients that pull singular values toward 1 fastest from 0 (Jordan et al., Muon, 2024)."""


def newton_schulz(matrices: Tensor, steps: int) -> Tensor:
    """Near-orthogonal versions of matrices (..., rows, columns), in their dtype; singular values end near 1.

    Per step X ← aX + (bA + cA²)X with A = XXᵀ, on the wide orientation, after division by the Frobenius norm.
    """
    a, b, c = CLASSIC
    tall = matrices.shape[-2] > matrices.shape[-1]
    oriented = matrices.mT if tall else matrices
    x: Tensor = oriented / (torch.linalg.matrix_norm(oriented, keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


@dataclass(frozen=True, kw_only=True)
class Muon(Optimizer):
    """Nesterov momentum whose update is orthogonalized, scaled by sqrt(max(1, rows/columns)).

    Matrices of equal shape are orthogonalized as one batch; several ranks share the batches.
    """

    momentum: NonNegativeNumber = 0.95
    """Decay of the momentum buffer."""
    steps: Annotated[int, Range(1, 100)] = 5
    """Newton-Schulz iterations."""
    weight_decay: NonNegativeNumber = 0.0
    """Fraction of the weight, times the learning rate, taken off at each step."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Number format of the Newton-Schulz iterations."""

    def build(self, parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> Updater:
        """The updater of these matrices; anything but a matrix is a `UserError`."""
        for name, parameter in parameters.items():
            if parameter.ndim != 2:
                raise UserError(f"Muon updates matrices; give {name}, of shape {list(parameter.shape)}, to AdamW")
        return _MuonUpdater(self, parameters, ranks)


class _MuonUpdater(Updater):
    def __init__(self, config: Muon, parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> None:
        self.config = config
        self.ranks = ranks
        self.groups: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in parameters.values():
            self.groups.setdefault(parameter.shape, []).append(parameter)
        self.buffers = {shape: torch.zeros_like(torch.stack(list(group))) for shape, group in self.groups.items()}

    @torch.no_grad()
    def step(self, moment: Moment, lr_scale: float) -> None:
        lr = value_at(self.config.lr, moment) * lr_scale
        decay = 1.0 - lr * value_at(self.config.weight_decay, moment)
        momentum = value_at(self.config.momentum, moment)
        updates = {shape: self._update(shape, momentum) for shape in self.groups}
        self.ranks.sum(list(updates.values()))
        for shape, group in self.groups.items():
            scale = lr * max(1.0, shape[0] / shape[1]) ** 0.5
            for parameter, update in zip(group, updates[shape], strict=True):
                parameter.mul_(decay).add_(update.to(parameter.dtype), alpha=-scale)

    def _update(self, shape: torch.Size, momentum: float) -> Tensor:
        """Orthogonalized updates (matrices, rows, columns); several ranks do a part each, the rest stays zero."""
        gradients = torch.stack([_gradient(parameter) for parameter in self.groups[shape]])
        buffer = self.buffers[shape].mul_(momentum).add_(gradients)
        nesterov = gradients.add_(buffer, alpha=momentum).to(getattr(torch, self.config.precision))
        if self.ranks.world == 1:
            return newton_schulz(nesterov, self.config.steps)
        update = torch.zeros_like(nesterov)
        mine = slice(self.ranks.rank, None, self.ranks.world)
        if len(nesterov[mine]):
            update[mine] = newton_schulz(nesterov[mine], self.config.steps)
        return update

    def state(self) -> dict[str, Tensor]:
        return {f"momentum/{'x'.join(map(str, shape))}": buffer for shape, buffer in self.buffers.items()}


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
