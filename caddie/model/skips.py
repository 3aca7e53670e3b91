"""U-Net connections from early layers to late ones."""

from abc import abstractmethod

import torch
from torch import Tensor

from caddie.config import Config
from caddie.model.parameters import Constant, Part


class Skips(Config):
    """Socket: connection from an early layer's output to a late layer's input.

    The first half of the passes save their outputs. Each later pass first mixes in the latest saved output that is
    left. With depth recurrence a layer does so once for each pass.
    """

    @abstractmethod
    def build(self, count: int, width: int) -> Part:
        """Return the module of `count` connections; forward(number, x, saved) adds the saved output to the stream x."""


class UNet(Skips):
    """U-Net: x ← x + w·saved, w by channel, initially 1 (arXiv 1505.04597, as in the contest's baseline)."""

    def build(self, count: int, width: int) -> Part:
        return _UNet(count, width, gated=False)


class GatedUNet(Skips):
    """Gated U-Net: x ← σ(γ)·x + (1 - σ(γ))·w·saved, γ by channel, initially 0, so the two start half and half."""

    def build(self, count: int, width: int) -> Part:
        return _UNet(count, width, gated=True)


class _UNet(Part):
    def __init__(self, count: int, width: int, gated: bool) -> None:
        super().__init__()
        self.weight = self.declare("weight", (count, width), "scalar", Constant(value=1.0))
        self.gate = self.declare("gate", (count, width), "scalar", Constant(value=0.0)) if gated else None

    def forward(self, number: int, x: Tensor, saved: Tensor) -> Tensor:
        saved = self.weight[number].to(x.dtype) * saved
        return x + saved if self.gate is None else torch.lerp(saved, x, torch.sigmoid(self.gate[number]).to(x.dtype))
