"""SmearGate: a share of the previous token in every token."""

from abc import abstractmethod

import torch
from torch import Tensor

from caddie.config import Config
from caddie.model.context import Context
from caddie.model.linear import Linear
from caddie.model.parameters import Constant, Part
from caddie.ops import rms_norm

GATE_CHANNELS = 12
"""Leading channels of a token that gate `TokenSmear`."""


class Smear(Config):
    """Socket: mix of the previous token into each token. The first token of a row or document has none."""

    @abstractmethod
    def build(self, width: int) -> Part:
        """Return the module; its forward takes tokens (B, T, width) and a context and returns them smeared, normed."""


class ChannelSmear(Smear):
    """SmearGate by channel: norm, then x_t ← (1 - σ(γ)) x_t + σ(γ) x_{t-1}, γ learned for each channel from 0.

    In the records it also mixes across documents.
    """

    def build(self, width: int) -> Part:
        return _ChannelSmear(width)


class TokenSmear(Smear):
    """SmearGate by token: x_t ← x_t + λ σ(w · x_t[:12]) x_{t-1}, then norm; λ and w start at 0.

    w gets its first gradient at step 2.
    """

    def build(self, width: int) -> Part:
        return _TokenSmear(width)


class _ChannelSmear(Part):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = self.declare("gate", (width,), "scalar", Constant(value=0.0))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x = rms_norm(x)
        return torch.lerp(x, context.previous(x), torch.sigmoid(self.gate).to(x.dtype))


class _TokenSmear(Part):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = Linear(min(GATE_CHANNELS, width), 1, Constant(value=0.0), role="scalar")
        self.scale = self.declare("scale", (), "scalar", Constant(value=0.0))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        share = self.scale.to(x.dtype) * torch.sigmoid(self.gate(x[..., :GATE_CHANNELS]))
        return rms_norm(x + share * context.previous(x))
