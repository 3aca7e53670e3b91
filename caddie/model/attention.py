"""Attention: where positions of a row exchange information."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Literal

from torch import Tensor

from caddie.config import Config, Positive, Range
from caddie.errors import UserError
from caddie.model.context import Context
from caddie.model.linear import Linear
from caddie.ops import attention, rms_norm, rotate
from caddie.parameters import Constant, FanIn, Part


@dataclass(frozen=True, kw_only=True)
class Attention(Config):
    """Socket: how positions of a row see each other."""

    @abstractmethod
    def build(self, width: int) -> Part:
        """The module; its forward takes the normed stream (B, T, width) and the context, and keeps the shape."""


@dataclass(frozen=True, kw_only=True)
class GroupedQueryAttention(Attention):
    """Causal attention with normed queries and keys and a learned gain per head, as in the contest's baseline.

    Grouped queries: arXiv 2305.13245; query-key norm: arXiv 2010.04245; rotary positions: arXiv 2104.09864.
    """

    heads: Annotated[int, Range(1, 1024)] = 8
    """Query heads; the width is divided among them."""
    key_value_heads: Annotated[int, Range(1, 1024)] = 4
    """Key and value heads, each shared by an equal number of query heads."""
    gain: Positive = 1.5
    """Initial factor on the normed queries; logits are bounded by it times the root of the head's size."""
    rotary_base: Positive = 10_000.0
    """Base of the rotary frequencies."""
    scope: Literal["row", "document"] = "row"
    """Whether a position sees its whole row's past or its own document's alone."""

    def build(self, width: int) -> Part:
        """The module, or a `UserError` when the heads do not divide."""
        if width % self.heads or (width // self.heads) % 2:
            raise UserError(f"a width of {width} does not divide into {self.heads} heads of even size")
        if self.heads % self.key_value_heads:
            raise UserError(f"{self.heads} heads cannot share {self.key_value_heads} key_value_heads equally")
        return _GroupedQueryAttention(self, width)


class _GroupedQueryAttention(Part):
    def __init__(self, config: GroupedQueryAttention, width: int) -> None:
        super().__init__()
        self.config = config
        self.head_size = width // config.heads
        key_value_width = config.key_value_heads * self.head_size
        self.query = Linear(width, width, FanIn())
        self.key = Linear(width, key_value_width, FanIn())
        self.value = Linear(width, key_value_width, FanIn())
        self.output = Linear(width, width, Constant(value=0.0))
        self.gain = self.declare("gain", (config.heads,), "scalar", Constant(value=config.gain))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        cosine, sine = context.rotary(self.head_size, self.config.rotary_base)
        q = rotate(rms_norm(self._heads(self.query(x))), cosine, sine) * self.gain.to(x.dtype)[:, None, None]
        k = rotate(rms_norm(self._heads(self.key(x))), cosine, sine)
        k, v = context.keys_and_values(k, self._heads(self.value(x)))
        y: Tensor = self.output(attention(q, k, v, context.mask(self.config.scope)).transpose(1, 2).reshape(x.shape))
        return y

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_size).transpose(1, 2)  # (B, heads, T, head size)
