"""One layer of the residual stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from caddie.config import Config, Technique
from caddie.model.attention import Attention, GroupedQueryAttention
from caddie.model.context import Context
from caddie.model.input_mix import ResidualMix, StreamMix
from caddie.model.linear import Delta, adapted
from caddie.model.mlp import MLP, ReluSquared
from caddie.model.norm import Norm, RMSNorm
from caddie.model.parameters import Constant, Part


@dataclass(frozen=True, kw_only=True)
class Block(Config):
    """The embedded input mixed in, then attention and MLP, each on the normed stream and scaled per channel."""

    techniques: ClassVar = {
        "parallel": Technique(
            "Attention and MLP need not wait for each other, and quantization hurts less.",
            "GPT-J; openai/parameter-golf #1412 and #1493 (layers 7 to 10)",
            "before quantization equal, the gap smaller on all three seeds (#1412)",
        )
    }

    residual_mix: ResidualMix | None = StreamMix()
    """How the embedded input enters, or none."""
    attention: Attention | None = GroupedQueryAttention()
    """The attention of the layer, or none."""
    attention_norm: Norm = RMSNorm()
    """How attention reads the stream."""
    mlp: MLP = ReluSquared()
    """The MLP of the layer."""
    mlp_norm: Norm = RMSNorm()
    """How the MLP reads the stream."""
    parallel: bool = False
    """Whether attention and MLP read the same stream, or the MLP the one that attention wrote."""

    def build(self, width: int, layer: int = 0, depth: int = 1, own_mlps: int = 0) -> BlockModule:
        """The module of `layer` of `depth`, with that many MLPs for later runs of it in one forward."""
        return BlockModule(self, width, layer, depth, own_mlps)


class BlockModule(Part):
    """The layer: the stream (B, T, width) and the embedded input x0 of the same shape to the stream.

    The deltas add to the outputs of attention and MLP what they compute from the normed stream.
    """

    def __init__(self, config: Block, width: int, layer: int, depth: int, own_mlps: int) -> None:
        super().__init__()
        self.parallel = config.parallel
        self.mix = (
            self.declare("mix", (2, width), "scalar", config.residual_mix.initial(layer, depth))
            if config.residual_mix
            else None
        )
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
        """One layer of the stream, at the positions asked for."""
        x = self.mixed(x, x0)
        if self.parallel:
            query_positions = context.query_positions(x)
            return query_positions + self.attention_output(x, context) + self.mlp_output(query_positions, context)
        x = context.query_positions(x) + self.attention_output(x, context)
        return x + self.mlp_output(x, context)

    def mixed(self, x: Tensor, x0: Tensor) -> Tensor:
        """a·x + b·x0."""
        if self.mix is None:
            return x
        mix = self.mix.to(x.dtype)
        return torch.addcmul(mix[0] * x, mix[1], x0)

    def attention_output(self, x: Tensor, context: Context) -> Tensor:
        """What attention adds to the stream; zero where the layer has none."""
        if self.attention is None:
            return x.new_zeros(())
        h = self.attention_norm(x)
        y = adapted(self.attention(h, context), self.attention_delta, context.query_positions(h))
        return self.attention_scale.to(x.dtype) * y

    def mlp_output(self, x: Tensor, context: Context) -> Tensor:
        """What the MLP adds to the stream."""
        h = self.mlp_norm(x)
        mlp = self.later_mlps[context.pass_index - 1] if context.pass_index and self.later_mlps else self.mlp
        return self.mlp_scale.to(x.dtype) * adapted(mlp(h), self.mlp_delta, h)
