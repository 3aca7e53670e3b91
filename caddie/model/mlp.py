"""The multilayer perceptron: what each position computes alone."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated

import torch.nn.functional as F
from torch import Tensor

from caddie.config import Config, Range
from caddie.model.linear import Linear
from caddie.parameters import Constant, FanIn, Part


@dataclass(frozen=True, kw_only=True)
class MLP(Config):
    """Socket: a function of each position."""

    @abstractmethod
    def build(self, width: int) -> Part:
        """The module; its forward takes the normed stream (B, T, width) and keeps the shape."""


@dataclass(frozen=True, kw_only=True)
class ReluSquared(MLP):
    """W2 relu(W1 x)² (Primer, arXiv 2109.08668); W2 starts at zero, so the block starts as the identity."""

    hidden: Annotated[int, Range(1, 1 << 20)] = 1024
    """Hidden channels."""

    def build(self, width: int) -> Part:
        """The module."""
        return _ReluSquared(width, self.hidden)


class _ReluSquared(Part):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = Linear(width, hidden, FanIn())
        self.down = Linear(hidden, width, Constant(value=0.0))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.relu(self.up(x)).square())
        return y
