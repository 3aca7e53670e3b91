"""Attention: positions of a row exchange information."""

from abc import abstractmethod
from typing import Annotated, Literal

import torch
from torch import Tensor

from caddie.config import Config, Positive, Range
from caddie.config.schedules import IntSchedule
from caddie.errors import UserError
from caddie.model.context import Context
from caddie.model.gates import HeadGate
from caddie.model.linear import Dense, LinearMap
from caddie.model.parameters import Constant, Part
from caddie.model.rope import PlainRoPE, RoPE
from caddie.model.values import ValueResidual
from caddie.ops import normed_rotation, xsa


class Attention(Config):
    """Socket: attention of a layer."""

    @abstractmethod
    def build(self, width: int, layer: int) -> Part:
        """Return the module of `layer`; its forward takes the normed stream (B, T, width) and the context.

        The output has the same width, at the context's query positions alone.
        """

    @abstractmethod
    def value_width(self, width: int) -> int:
        """Return the number of value channels of a position, over all heads."""


class GroupedQueryAttention(Attention):
    """Causal grouped-query attention with QK norm, RoPE and a learned gain per query head (the contest's baseline).

    Grouped queries (GQA): arXiv 2305.13245; QK norm: arXiv 2010.04245; rotary positions (RoPE): arXiv 2104.09864.
    """

    heads: Annotated[int, Range(1, 1024)] = 8
    """Query heads; the width is divided among them."""
    key_value_heads: Annotated[int, Range(1, 1024)] = 4
    """Key and value heads, each shared by an equal number of query heads."""
    query_gain: Positive = 1.5
    """Initial factor on the normed queries; attention logits are at most this factor times √(head size)."""
    rope: RoPE = PlainRoPE()
    """Rotary position embedding."""
    linear: LinearMap = Dense()
    """Kind of the projection matrices."""
    fused: bool = False
    """True for one matrix that projects to queries, keys and values together."""
    scope: Literal["row", "document"] = "row"
    """Earlier positions that a query attends to: its whole row, or its own document alone."""
    longest: IntSchedule | None = None
    """Tokens after which a longer document is cut, with scope `document`; none for no cuts.

    In the record at 1.0576 it grows: 1,024 for a tenth of the run, 2,048 until 70 %, then 3,072.
    """
    window: IntSchedule | None = None
    """Sliding window: number of latest positions that a query attends to, its own included, or none for all."""
    value_residual: ValueResidual | None = None
    """Value residual: mix of the values of layer 0 into this layer's, or none. Layer 0 itself has nothing to mix in."""
    xsa: bool = False
    """True for exclusive self-attention (XSA): each head's output loses its projection on the position's own value."""
    xsa_gate: float | None = None
    """Initial a of a gate learned per head: XSA removes the share tanh(a), at 0 nothing; or none to remove all."""
    gate: HeadGate | None = None
    """Gate on each head's output, or none."""

    def build(self, width: int, layer: int) -> Part:
        """Return the module; raises `UserError` if the heads do not divide the width or each other."""
        if width % self.heads or (width // self.heads) % 2:
            raise UserError(f"a width of {width} does not divide into {self.heads} heads of even size")
        if self.heads % self.key_value_heads:
            raise UserError(f"{self.heads} heads cannot share {self.key_value_heads} key_value_heads equally")
        return _GroupedQueryAttention(self, width, layer)

    def value_width(self, width: int) -> int:
        return width // self.heads * self.key_value_heads


class _GroupedQueryAttention(Part):
    def __init__(self, config: GroupedQueryAttention, width: int, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.head_size = width // config.heads
        self.rope, self.rope_dims = config.rope.as_text(), config.rope.rotated_dims(self.head_size)
        values = config.value_width(width)
        self.sizes = [width, values, values]
        if config.fused:
            self.query_key_value = config.linear.build(width, sum(self.sizes))
        else:
            self.query, self.key, self.value = (config.linear.build(width, size) for size in self.sizes)
        self.output = config.linear.build_output(width, width)
        self.gain = self.declare("gain", (config.heads,), "scalar", Constant(value=config.query_gain))
        self.xsa_gate: Tensor | None = None
        if config.xsa and config.xsa_gate is not None:
            self.xsa_gate = self.declare("xsa_gate", (config.heads,), "scalar", Constant(value=config.xsa_gate))
        self.value_residual = config.value_residual.build() if config.value_residual and layer else None
        self.gate = config.gate.build(width, config.heads) if config.gate else None

    def forward(self, h: Tensor, context: Context) -> Tensor:
        config = self.config
        query_positions = context.query_positions(h)
        if config.fused:
            q, k, v = torch.split(self.query_key_value(h), self.sizes, dim=-1)
            q = context.query_positions(q)
            if context.value_input is not None:
                v = self.query_key_value(context.value_input)[..., -self.sizes[-1] :]
        else:
            q, k = self.query(query_positions), self.key(h)
            v = self.value(h if context.value_input is None else context.value_input)
        if (added := context.values.get(self.layer)) is not None:
            v = v + added
        q, k, v = (x.view(*x.shape[:2], -1, self.head_size).transpose(1, 2) for x in (q, k, v))  # (B, heads, T, D)
        if self.value_residual is not None and context.first_values is not None:
            v = self.value_residual(v, context.first_values)
        elif config.value_residual and context.first_values is None:
            context.first_values = v
        cosine, sine = context.rope(self.rope, self.rope_dims)
        last = slice(h.shape[1] - query_positions.shape[1], None)  # the query positions
        q = normed_rotation(q, cosine[last], sine[last], self.gain)
        k = normed_rotation(k, cosine, sine)
        visible = context.visible(config.scope, config.longest, config.window)
        y = context.attention(q, k, v, visible)
        if config.xsa:
            y = xsa(y, v[:, :, last], None if self.xsa_gate is None else self.xsa_gate.tanh())
        if self.gate is not None:
            y = y * self.gate(query_positions).transpose(1, 2)[..., None]
        return self.output(y.transpose(1, 2).reshape(query_positions.shape))
