"""SmearGate: a share of the previous token in every token."""

from abc import abstractmethod

import torch
from torch import Tensor

from caddie.config import Config, known
from caddie.model.context import Context
from caddie.model.linear import Linear
from caddie.model.parameters import Constant, Part
from caddie.ops import rms_norm

GATE_CHANNELS = 12
"""Leading channels of a token that gate `TokenSmear`."""


class Smear(Config):
    """Socket: mix of the previous token into each token. The first of a row or a document has none."""

    @abstractmethod
    def build(self, width: int) -> Part:
        """Return the module; its forward takes tokens (B, T, width) and a context and returns them smeared, normed."""


class ChannelSmear(Smear):
    """SmearGate by channel: norm, then x_t ← (1 - σ(γ)) x_t + σ(γ) x_{t-1}, γ learned for each channel from 0.

    In the records it also mixes across documents.
    """

    techniques = known(
        "Each token carries a share of the one before, by channel, before the first layer.",
        "openai/parameter-golf, 2026-03-19_smeargate_orthoinit_muonwd to #1204, public systems 000 and 002",
        "in bundles only; none from 4,096 ids on",
    )

    def build(self, width: int) -> Part:
        return _ChannelSmear(width)


class TokenSmear(Smear):
    """SmearGate by token: x_t ← x_t + λ σ(w · x_t[:12]) x_{t-1}, then norm; λ and w start at 0.

    w gets its first gradient at step 2.
    """

    techniques = known(
        "The token itself decides how much of the one before it needs.",
        "modded-nanogpt; openai/parameter-golf #1667, where it never learned, #1851 and the record at 1.0611",
        "in bundles only; smearing across documents seemed to gain 0.0025, a leak (#1797)",
    )

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
