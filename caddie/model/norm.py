"""Norms of the stream, as attention and MLP read it."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from caddie.config import Config, Positive, Technique
from caddie.ops import rms_norm


@dataclass(frozen=True, kw_only=True)
class Norm(Config):
    """Socket: how a layer reads the stream."""

    epsilon: Positive | None = None
    """Added to the mean square, or none for the machine epsilon of the dtype. Seed 001's attention has 1e-6."""

    @abstractmethod
    def scale(self, layer: int) -> float:
        """Factor on the normed stream in `layer`."""

    def build(self, layer: int) -> NormOf:
        """The norm of `layer`."""
        return NormOf(partial(rms_norm, epsilon=self.epsilon), self.scale(layer))


class NormOf:
    """x (..., width) to its norm, times a constant."""

    def __init__(self, norm: partial[Tensor], scale: float) -> None:
        self.norm = norm
        self.scale = scale

    def __call__(self, x: Tensor) -> Tensor:
        """The scaled norm."""
        return self.norm(x) if self.scale == 1.0 else self.norm(x) * self.scale


@dataclass(frozen=True, kw_only=True)
class RMSNorm(Norm):
    """x over its root mean square, with no learned gain (arXiv 1910.07467)."""

    def scale(self, layer: int) -> float:
        """1."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class DepthScaledNorm(Norm):
    """The same over the root of the layer's number, from 1: deep layers start with smaller inputs ("LN scale")."""

    techniques: ClassVar = {
        "": Technique(
            "Deep layers write less at the start, as in The Curse of Depth.",
            "arXiv 2502.05795; openai/parameter-golf #315, seeds 000 and 002, every record after it",
            "-0.0023 together with partial rotary positions (#315)",
        )
    }

    def scale(self, layer: int) -> float:
        """1/√(layer + 1), layers counted from 0."""
        return 1.0 / math.sqrt(layer + 1)
