"""From the stream to log-odds over the vocabulary."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from caddie.config import Config, Positive
from caddie.model.embedding import TokenTable
from caddie.ops import rms_norm, softcap
from caddie.parameters import Part


@dataclass(frozen=True, kw_only=True)
class Head(Config):
    """Socket: how the stream becomes logits."""

    @abstractmethod
    def build(self, vocabulary: int, width: int) -> Part:
        """The module; its forward takes the stream (B, T, width) and the embedding, and returns (B, T, vocabulary)."""


@dataclass(frozen=True, kw_only=True)
class TiedHead(Head):
    """The embedding's own table read the other way (arXiv 1608.05859), softly capped."""

    softcap: Positive | None = 30.0
    """Bound of the logits, or none."""

    def build(self, vocabulary: int, width: int) -> Part:
        """The module."""
        return _TiedHead(self.softcap)


class _TiedHead(Part):
    def __init__(self, cap: float | None) -> None:
        super().__init__()
        self.cap = cap

    def forward(self, x: Tensor, embedding: TokenTable) -> Tensor:
        logits = F.linear(rms_norm(x), embedding.weight.to(x.dtype))
        return logits if self.cap is None else softcap(logits, self.cap)
