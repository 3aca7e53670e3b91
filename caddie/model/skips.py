"""Connections from early layers to late ones."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from caddie.config import Config, Technique
from caddie.model.parameters import Constant, Part


@dataclass(frozen=True, kw_only=True)
class Skips(Config):
    """Socket: how the saved output of an early layer returns.

    The first half of the layers, in the order in which they run, save their outputs; each later one first takes the
    last one left. With depth recurrence a layer saves and takes as often as it runs.
    """

    @abstractmethod
    def build(self, count: int, width: int) -> Part:
        """The module for `count` connections; forward(number, x, saved) is the stream with saved output `number`."""


@dataclass(frozen=True, kw_only=True)
class UNet(Skips):
    """x ← x + w·saved, w by channel, 1 at the start (U-Net, arXiv 1505.04597, as in the contest's baseline)."""

    techniques: ClassVar = {
        "": Technique(
            "Late layers see what early ones saw.",
            "arXiv 1505.04597; modded-nanogpt; openai/parameter-golf, the baseline and all after it",
        )
    }

    def build(self, count: int, width: int) -> Part:
        """The module."""
        return _UNet(count, width)


@dataclass(frozen=True, kw_only=True)
class GatedUNet(Skips):
    """x ← σ(γ)·x + (1 - σ(γ))·w·saved, γ by channel, 0 at the start, so the two begin half and half."""

    techniques: ClassVar = {
        "": Technique(
            "A channel chooses between the stream and what was saved, instead of adding both.",
            "openai/parameter-golf #1204, #1218 and all records after it",
            "in bundles only",
        )
    }

    def build(self, count: int, width: int) -> Part:
        """The module."""
        return _GatedUNet(count, width)


class _UNet(Part):
    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight = self.declare("weight", (count, width), "scalar", Constant(value=1.0))

    def forward(self, number: int, x: Tensor, saved: Tensor) -> Tensor:
        return x + self.weight[number].to(x.dtype) * saved


class _GatedUNet(Part):
    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight = self.declare("weight", (count, width), "scalar", Constant(value=1.0))
        self.gate = self.declare("gate", (count, width), "scalar", Constant(value=0.0))

    def forward(self, number: int, x: Tensor, saved: Tensor) -> Tensor:
        return torch.lerp(self.weight[number].to(x.dtype) * saved, x, torch.sigmoid(self.gate[number]).to(x.dtype))
