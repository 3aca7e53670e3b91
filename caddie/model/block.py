"""Transformer block: one layer of the residual stream."""

import torch
from torch import Tensor, nn

from caddie.config import Config
from caddie.model.attention import Attention, GroupedQueryAttention
from caddie.model.context import Context
from caddie.model.input_mix import ResidualMix, StreamMix
from caddie.model.linear import Delta, adapted
from caddie.model.mlp import MLP, ReluSquared
from caddie.model.norm import Norm, RMSNorm
from caddie.model.parameters import Constant, Part


class Block(Config):
    """Transformer block: input mix, then attention and MLP, each on the normed stream and scaled per channel."""

    residual_mix: ResidualMix | None = StreamMix()
    """Mix of the embedded input into the stream, or none."""
    attention: Attention | None = GroupedQueryAttention()
    """Attention of the layer, or none."""
    attention_norm: Norm = RMSNorm()
    """Norm before attention."""
    mlp: MLP = ReluSquared()
    """MLP of the layer."""
    mlp_norm: Norm = RMSNorm()
    """Norm before the MLP."""
    parallel: bool = False
    """Parallel residual: True if the MLP reads the same stream as attention, not the stream after attention."""


class BlockModule(Part):
    """Block that maps the stream (B, T, width) and the embedded input x0 of the same shape to the next stream.

    It is layer number `layer` of `depth`, with `own_mlps` further MLPs for repeated passes. Test-time training sets
    the deltas; they read the normed stream and add to the outputs of attention and MLP.
    """

    def __init__(self, config: Block, width: int, layer: int, depth: int, own_mlps: int) -> None:
        super().__init__()
        self.parallel = config.parallel
        mix = config.residual_mix
        self.mix = self.declare("mix", (2, width), "scalar", mix.initial(layer, depth)) if mix else None
        self.attention = config.attention.build(width, layer) if config.attention else None
        self.attention_norm = config.attention_norm.build(layer)
        if config.attention:
            self.attention_scale = self.declare("attention_scale", (width,), "scalar", Constant(value=1.0))
        self.mlp = config.mlp.build(width)
        self.later_mlps = nn.ModuleList(config.mlp.build(width) for _ in range(own_mlps))
        self.mlp_norm = config.mlp_norm.build(layer)
        self.mlp_scale = self.declare("mlp_scale", (width,), "scalar", Constant(value=1.0))
        self.attention_delta: Delta | None = None
        self.mlp_delta: Delta | None = None

    def forward(self, x: Tensor, x0: Tensor, context: Context) -> Tensor:
        """Return the stream after this layer, at the context's query positions."""
        x = self.mixed(x, x0)
        if self.parallel:
            query_positions = context.query_positions(x)
            return query_positions + self.attention_output(x, context) + self.mlp_output(query_positions, context)
        x = context.query_positions(x) + self.attention_output(x, context)
        return x + self.mlp_output(x, context)

    def mixed(self, x: Tensor, x0: Tensor) -> Tensor:
        """Return a·x + b·x0."""
        if self.mix is None:
            return x
        mix = self.mix.to(x.dtype)
        return torch.addcmul(mix[0] * x, mix[1], x0)

    def attention_output(self, x: Tensor, context: Context) -> Tensor:
        """Return the scaled output of attention for the stream, or zero if the layer has no attention."""
        if self.attention is None:
            return x.new_zeros(())
        h = self.attention_norm(x)
        y = adapted(self.attention(h, context), self.attention_delta, context.query_positions(h))
        return self.attention_scale.to(x.dtype) * y

    def mlp_output(self, x: Tensor, context: Context) -> Tensor:
        """Return the scaled output of the MLP for the stream."""
        h = self.mlp_norm(x)
        mlp = self.later_mlps[context.pass_index - 1] if context.pass_index and self.later_mlps else self.mlp
        return self.mlp_scale.to(x.dtype) * adapted(mlp(h), self.mlp_delta, h)
