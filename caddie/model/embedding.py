"""From ids to the stream."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from caddie.config import Config, NonNegative
from caddie.model.context import Context
from caddie.model.ngrams import HashedNGrams
from caddie.model.smear import Smear
from caddie.ops import rms_norm
from caddie.parameters import Normal, Part


@dataclass(frozen=True, kw_only=True)
class Embedding(Config):
    """Socket: how ids enter the stream."""

    @abstractmethod
    def build(self, vocabulary: int, width: int) -> TokenTable:
        """The module; its forward takes a context and returns the stream (B, T, width)."""


@dataclass(frozen=True, kw_only=True)
class TokenEmbedding(Embedding):
    """One row for each id, normed. The small start keeps the first logits of a tied head near zero."""

    std: NonNegative = 0.005
    """Standard deviation of the initial rows."""
    bigrams: HashedNGrams | None = None
    """Rows of the last two tokens, added before the norm, or none."""
    trigrams: HashedNGrams | None = None
    """Rows of the last three tokens, added before the norm, or none."""
    smear: Smear | None = None
    """How the token before enters, or none."""

    def build(self, vocabulary: int, width: int) -> TokenTable:
        """The module."""
        return TokenTable(self, vocabulary, width)


class TokenTable(Part):
    """A table (vocabulary, width), which a tied head shares, and what is added to its rows."""

    def __init__(self, config: TokenEmbedding, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weight = self.declare("weight", (vocabulary, width), "embedding", Normal(std=config.std))
        self.bigrams = config.bigrams.build(2, width) if config.bigrams else None
        self.trigrams = config.trigrams.build(3, width) if config.trigrams else None
        self.smear = config.smear.build(width) if config.smear else None

    def forward(self, context: Context) -> Tensor:
        """The normed stream, (B, T, width)."""
        x = F.embedding(context.ids, self.weight).to(context.dtype)
        for ngrams in (self.bigrams, self.trigrams):
            if ngrams is not None:
                x = x + ngrams(context)
        if self.smear is None:
            return rms_norm(x)
        smeared: Tensor = self.smear(x, context)
        return smeared
