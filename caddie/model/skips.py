"""Connections from early layers to late ones."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor

from caddie.config import Config
from caddie.parameters import Constant, Part


@dataclass(frozen=True, kw_only=True)
class Skips(Config):
    """Socket: which layers' outputs return, and how."""

    @abstractmethod
    def build(self, depth: int, width: int) -> SkipWeights:
        """The module."""


@dataclass(frozen=True, kw_only=True)
class UNet(Skips):
    """The first half of the layers push their outputs; each later layer first adds the last one left, by channel.

    After the U-Net (arXiv 1505.04597), as in the contest's baseline.
    """

    def build(self, depth: int, width: int) -> SkipWeights:
        """The module."""
        return SkipWeights(depth, width)


class SkipWeights(Part):
    """One row of channel weights for each returning layer."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.pushing = depth // 2
        self.weight = self.declare("weight", (self.pushing, width), "scalar", Constant(value=1.0))

    def enter(self, layer: int, x: Tensor, saved: list[Tensor]) -> Tensor:
        """The stream as it enters `layer`; takes the last saved output once the pushing half is over."""
        if layer < self.pushing or not saved:
            return x
        return x + self.weight[layer - self.pushing].to(x.dtype) * saved.pop()

    def leave(self, layer: int, x: Tensor, saved: list[Tensor]) -> None:
        """Save the output of a pushing layer."""
        if layer < self.pushing:
            saved.append(x)
