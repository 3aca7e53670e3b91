"""Transformer block: one layer of the residual stream, with its norms and its mix of the embedded input."""

import math
from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from caddie.config import Config, Positive, Technique, known
from caddie.model.attention import Attention, GroupedQueryAttention
from caddie.model.context import Context
from caddie.model.linear import Delta, adapted
from caddie.model.mlp import MLP, ReluSquared
from caddie.model.parameters import Constant, Initial, Part, RowConstants
from caddie.ops import rms_norm


class Norm(Config):
    """Socket: norm before attention or MLP."""

    epsilon: Positive | None = None
    """Added to the mean square; none for the machine epsilon of the dtype. Public system 001's attention has 1e-6."""

    @abstractmethod
    def scale(self, layer: int) -> float:
        """Return the factor on the normed stream in `layer`."""

    def build(self, layer: int) -> Callable[[Tensor], Tensor]:
        """Return the norm of `layer`, a function of the stream (..., width)."""
        epsilon, scale = self.epsilon, self.scale(layer)
        if scale == 1.0:
            return lambda x: rms_norm(x, epsilon)
        return lambda x: rms_norm(x, epsilon) * scale


class RMSNorm(Norm):
    """RMSNorm: x over its root mean square, without a learned gain (arXiv 1910.07467)."""

    def scale(self, layer: int) -> float:
        """Return 1."""
        return 1.0


class DepthScaledNorm(Norm):
    """RMSNorm over the root of the layer's number, from 1: deep layers start with smaller inputs ("LN scale")."""

    techniques = known(
        "Deep layers write less at the start, as in The Curse of Depth.",
        "arXiv 2502.05795; openai/parameter-golf #315, public systems 000 and 002, every record after it",
        "-0.0023 together with partial rotary positions (#315)",
    )

    def scale(self, layer: int) -> float:
        """Return 1/√(layer + 1), layers counted from 0."""
        return 1.0 / math.sqrt(layer + 1)


class ResidualMix(Config):
    """Socket: initial a and b of x ← a·x + b·x0; both are learned, by channel."""

    @abstractmethod
    def initial(self, layer: int, depth: int) -> Initial:
        """Return the initial a and b, the rows of (2, width), in `layer` of `depth`."""


class StreamMix(ResidualMix):
    """Start from the stream alone: a = 1, b = 0 (the contest's baseline)."""

    techniques = known(
        "Every layer can reach the token itself, however deep it stands.",
        "modded-nanogpt; openai/parameter-golf, the baseline and all after it (`resid_mix`; public system 002's"
        ' "layerwise residual mixing")',
    )

    def initial(self, layer: int, depth: int) -> Initial:
        """Return one and zero."""
        return RowConstants(values=(1.0, 0.0))


class PhaseMix(ResidualMix):
    """Start from the input in early layers, from the stream in late ones: a = σ(3(l/(depth - 1) - ½)), b = 1 - a."""

    techniques = known(
        "Early layers begin near the input, late ones near the stream.",
        "openai/parameter-golf, 2026-03-19_SlidingWindow_FP16Emb_10L_MuonWD_OvertoneInit",
        "in a bundle only",
    )

    def initial(self, layer: int, depth: int) -> Initial:
        """Return the phase of `layer` and its complement."""
        a = 1.0 / (1.0 + math.exp(-3.0 * (layer / max(depth - 1, 1) - 0.5)))
        return RowConstants(values=(a, 1.0 - a))


class Block(Config):
    """Transformer block: input mixed in, then attention and MLP, each on the normed stream and scaled per channel."""

    techniques = known(
        parallel=Technique(
            "Attention and MLP need not wait for each other, and quantization hurts less.",
            "GPT-J; openai/parameter-golf #1412 and #1493 (layers 7 to 10)",
            "before quantization equal, the gap smaller on all three seeds (#1412)",
        )
    )

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
    """Parallel residual: True if the MLP reads the same stream as attention, not the one that attention wrote."""


class BlockModule(Part):
    """Block that maps the stream (B, T, width) and the embedded input x0 of the same shape to the next stream.

    It is layer number `layer` of `depth`, with `own_mlps` further MLPs for repeated passes. The deltas are set by
    test-time training; they read the normed stream and add to the outputs of attention and MLP.
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
        """Return the output of attention for the stream, scaled; zero if the layer has none."""
        if self.attention is None:
            return x.new_zeros(())
        h = self.attention_norm(x)
        y = adapted(self.attention(h, context), self.attention_delta, context.query_positions(h))
        return self.attention_scale.to(x.dtype) * y

    def mlp_output(self, x: Tensor, context: Context) -> Tensor:
        """Return the output of the MLP for the stream, scaled."""
        h = self.mlp_norm(x)
        mlp = self.later_mlps[context.pass_index - 1] if context.pass_index and self.later_mlps else self.mlp
        return self.mlp_scale.to(x.dtype) * adapted(mlp(h), self.mlp_delta, h)
