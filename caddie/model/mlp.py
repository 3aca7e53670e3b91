"""The multilayer perceptron: what each position computes alone."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeGuard

import torch.nn.functional as F
from torch import Tensor

from caddie.config import Config, Range, Technique
from caddie.model.linear import Dense, Linear, LinearMap
from caddie.model.parameters import Part
from caddie.ops import choose, linear, squared, squared_mlp


@dataclass(frozen=True, kw_only=True)
class MLP(Config):
    """Socket: a function of each position."""

    hidden: Annotated[int, Range(1, 1 << 20)] = 1024
    """Hidden channels."""
    linear: LinearMap = Dense()
    """What the matrices are."""

    @abstractmethod
    def build(self, width: int) -> Part:
        """The module; its forward takes the normed stream (B, T, width) and keeps the shape."""


@dataclass(frozen=True, kw_only=True)
class ReluSquared(MLP):
    """W2 relu(W1 x)² (Primer, arXiv 2109.08668)."""

    techniques: ClassVar = {
        "": Technique(
            "The cheapest activation that trains well.",
            "arXiv 2109.08668; openai/parameter-golf, the baseline, seeds 001 to 004",
            "-0.024 against relu (the ternary record)",
        )
    }

    def build(self, width: int) -> Part:
        """The module."""
        return _Squared(self, width, 0.0)


@dataclass(frozen=True, kw_only=True)
class LeakyReluSquared(MLP):
    """W2 leaky_relu(W1 x)²: u² above zero and (slope·u)² below."""

    techniques: ClassVar = {
        "": Technique(
            "Negative inputs keep a gradient.",
            "openai/parameter-golf, 2026-03-23_LeakyReLU_LegalTTT_ParallelMuon and all records after it; seed 000",
            "-0.0021 (#549); slope 0.75 +0.0025 (#1125), 0.3 equal",
        )
    }

    slope: Annotated[float, Range(0.0, 1.0)] = 0.5
    """Slope below zero, before the square."""

    def build(self, width: int) -> Part:
        """The module."""
        return _Squared(self, width, self.slope)


@dataclass(frozen=True, kw_only=True)
class SwiGLU(MLP):
    """W2 (silu(W1 x) · W3 x) (arXiv 2002.05202)."""

    techniques: ClassVar = {
        "": Technique(
            "Gated channels learn more per step, at three products for two.",
            "arXiv 2002.05202; seed 003 tried it",
            "-0.0041 at equal steps (#1125's study); a net loss at equal time, 45 % slower on 8 GPUs (seed 003)",
        )
    }

    def build(self, width: int) -> Part:
        """The module."""
        return _SwiGLU(self, width)


class _Squared(Part):
    def __init__(self, config: MLP, width: int, slope: float) -> None:
        super().__init__()
        self.slope = slope
        self.up = config.linear.build(width, config.hidden)
        self.down = config.linear.build_output(config.hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        if choose("squared_mlp", x.device, x.dtype) != "plain" and _bare(self.up) and _bare(self.down):
            return squared_mlp(x, _seen(self.up, x), _seen(self.down, x), self.slope)
        y: Tensor = self.down(squared(self.up(x), self.slope))
        return y


def _bare(layer: Part) -> TypeGuard[Linear]:
    """Whether a layer is a plain product with its weight and nothing else, so that no one misses its being called."""
    if not isinstance(layer, Linear) or layer.normed or layer.delta is not None or layer.product is not linear:
        return False
    return not layer._forward_pre_hooks and not layer._forward_hooks


def _seen(layer: Linear, x: Tensor) -> Tensor:
    """The weight that a forward sees."""
    return (layer.weight if layer.view is None else layer.view(layer.weight)).to(x.dtype)


class _SwiGLU(Part):
    def __init__(self, config: MLP, width: int) -> None:
        super().__init__()
        self.up = config.linear.build(width, config.hidden)
        self.gate = config.linear.build(width, config.hidden)
        self.down = config.linear.build_output(config.hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y
