"""From ids to the stream."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from caddie.config import Config, NonNegative
from caddie.model.context import Context
from caddie.ops import rms_norm
from caddie.parameters import Normal, Part


@dataclass(frozen=True, kw_only=True)
class Embedding(Config):
    """Socket: how ids enter the stream."""

    @abstractmethod
    def build(self, vocabulary: int, width: int) -> TokenTable:
        """The module; its forward takes a context and returns the stream (B, T, width)."""


class TokenTable(Part):
    """A table (vocabulary, width), which a tied head shares."""

    def __init__(self, vocabulary: int, width: int, std: float) -> None:
        super().__init__()
        self.weight = self.declare("weight", (vocabulary, width), "embedding", Normal(std=std))

    def forward(self, context: Context) -> Tensor:
        """Normed rows of the table, (B, T, width)."""
        return rms_norm(F.embedding(context.ids, self.weight).to(context.dtype))


@dataclass(frozen=True, kw_only=True)
class TokenEmbedding(Embedding):
    """One row for each id, normed. The small start keeps the first logits of a tied head near zero."""

    std: NonNegative = 0.005
    """Standard deviation of the initial rows."""

    def build(self, vocabulary: int, width: int) -> TokenTable:
        """The module."""
        return TokenTable(vocabulary, width, self.std)
