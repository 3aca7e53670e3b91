"""From the stream to log-odds over the vocabulary."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from caddie.config import Config, Positive
from caddie.model.embedding import TokenTable
from caddie.model.linear import Delta, adapted
from caddie.ops import rms_norm, softcap
from caddie.parameters import Part


@dataclass(frozen=True, kw_only=True)
class Head(Config):
    """Socket: how the stream becomes logits."""

    @abstractmethod
    def build(self, vocabulary: int, width: int) -> HeadModule:
        """The module."""


class HeadModule(Part):
    """Takes the stream (B, T, width) and the embedding, and returns logits (B, T, vocabulary).

    The delta adds to the logits, before they are capped, what it computes from the normed stream.
    """

    def __init__(self) -> None:
        super().__init__()
        self.delta: Delta | None = None


@dataclass(frozen=True, kw_only=True)
class TiedHead(Head):
    """The embedding's own table read the other way (arXiv 1608.05859), softly capped."""

    softcap: Positive | None = 30.0
    """Bound of the logits, or none."""

    def build(self, vocabulary: int, width: int) -> HeadModule:
        """The module."""
        return _TiedHead(self.softcap)


class _TiedHead(HeadModule):
    def __init__(self, cap: float | None) -> None:
        super().__init__()
        self.cap = cap

    def forward(self, x: Tensor, embedding: TokenTable) -> Tensor:
        h = rms_norm(x)
        logits = adapted(F.linear(h, embedding.weight.to(x.dtype)), self.delta, h)
        return logits if self.cap is None else softcap(logits, self.cap)
