"""One layer of the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from caddie.config import Config
from caddie.model.attention import Attention, GroupedQueryAttention
from caddie.model.context import Context
from caddie.model.linear import Delta, adapted
from caddie.model.mlp import MLP, ReluSquared
from caddie.ops import rms_norm
from caddie.parameters import Constant, Part, RowConstants


@dataclass(frozen=True, kw_only=True)
class Block(Config):
    """x ← a·x + b·x0, then attention and MLP, each on the normed stream and scaled per channel (contest baseline)."""

    attention: Attention = GroupedQueryAttention()
    """The attention of the layer."""
    mlp: MLP = ReluSquared()
    """The MLP of the layer."""

    def build(self, width: int) -> BlockModule:
        """The module."""
        return BlockModule(self, width)


class BlockModule(Part):
    """The layer: the stream (B, T, width) and the embedded input x0 of the same shape to the stream.

    The deltas add to the outputs of attention and MLP what they compute from the normed stream.
    """

    def __init__(self, config: Block, width: int) -> None:
        super().__init__()
        self.attention = config.attention.build(width)
        self.mlp = config.mlp.build(width)
        self.mix = self.declare("mix", (2, width), "scalar", RowConstants(values=(1.0, 0.0)))
        self.attention_scale = self.declare("attention_scale", (width,), "scalar", Constant(value=1.0))
        self.mlp_scale = self.declare("mlp_scale", (width,), "scalar", Constant(value=1.0))
        self.attention_delta: Delta | None = None
        self.mlp_delta: Delta | None = None

    def forward(self, x: Tensor, x0: Tensor, context: Context) -> Tensor:
        """One layer of the stream."""
        a, b = self.mix.to(x.dtype)
        x = a * x + b * x0
        h = rms_norm(x)
        x = x + self.attention_scale.to(x.dtype) * adapted(self.attention(h, context), self.attention_delta, h)
        h = rms_norm(x)
        return x + self.mlp_scale.to(x.dtype) * adapted(self.mlp(h), self.mlp_delta, h)
