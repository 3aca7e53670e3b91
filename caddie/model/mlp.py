"""Multilayer perceptrons (MLPs)."""

from abc import abstractmethod
from typing import Annotated

import torch.nn.functional as F
from torch import Tensor

from caddie.config import Config, Range
from caddie.model.linear import Dense, LinearMap
from caddie.model.parameters import Part
from caddie.ops import squared


class MLP(Config):
    """Socket: MLP of a layer."""

    hidden: Annotated[int, Range(1, 1 << 20)] = 1024
    """Hidden channels."""
    linear: LinearMap = Dense()
    """Kind of the matrices."""

    @abstractmethod
    def build(self, width: int) -> Part:
        """Return the module; its forward takes the normed stream (B, T, width) and keeps the shape."""


class ReluSquared(MLP):
    """ReLU²: W2 relu(W1 x)² (Primer, arXiv 2109.08668)."""

    def build(self, width: int) -> Part:
        return _Squared(self, width, 0.0)


class LeakyReluSquared(MLP):
    """LeakyReLU²: W2 leaky_relu(W1 x)², u² above zero and (slope·u)² below."""

    slope: Annotated[float, Range(0.0, 1.0)] = 0.5
    """Slope below zero, before the square."""

    def build(self, width: int) -> Part:
        return _Squared(self, width, self.slope)


class SwiGLU(MLP):
    """SwiGLU: W2 (silu(W1 x) · W3 x) (arXiv 2002.05202)."""

    def build(self, width: int) -> Part:
        return _SwiGLU(self, width)


class _Squared(Part):
    def __init__(self, config: MLP, width: int, slope: float) -> None:
        super().__init__()
        self.slope = slope
        self.up = config.linear.build(width, config.hidden)
        self.down = config.linear.build_output(config.hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(squared(self.up(x), self.slope))


class _SwiGLU(Part):
    def __init__(self, config: MLP, width: int) -> None:
        super().__init__()
        self.up = config.linear.build(width, config.hidden)
        self.gate = config.linear.build(width, config.hidden)
        self.down = config.linear.build_output(config.hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))
