"""Embeddings: token ids to the residual stream."""

from __future__ import annotations

from abc import abstractmethod

import torch.nn.functional as F
from torch import Tensor

from caddie.config import Channels, Config
from caddie.model.context import Context
from caddie.model.linear import Linear
from caddie.model.ngrams import HashedNGrams, NGramTable
from caddie.model.parameters import FanIn, Initial, Normal, Part
from caddie.model.smear import Smear
from caddie.ops import rms_norm


class Embedding(Config):
    """Socket: embedding of token ids."""

    @abstractmethod
    def build(self, vocabulary: int, width: int) -> TokenTable:
        """Return the module; its forward takes a context and returns the stream (B, T, width)."""


class TokenEmbedding(Embedding):
    """Table with a row for each id, normed. Small initial values keep the first logits of a tied head near zero."""

    initial: Initial = Normal(std=0.005)
    """Initial values of the rows."""
    dims: Channels | None = None
    """Channels of a row, projected to the stream and, for a tied head, back; none for the stream's width."""
    bigrams: HashedNGrams | None = None
    """BigramHash: hashed rows of the last two tokens, added before the norm, or none."""
    trigrams: HashedNGrams | None = None
    """Hashed rows of the last three tokens, added before the norm, or none."""
    smear: Smear | None = None
    """SmearGate: mix of the previous token into each token, or none."""

    def build(self, vocabulary: int, width: int) -> TokenTable:
        return TokenTable(self, vocabulary, width)


class TokenTable(Part):
    """Table (vocabulary, dims), which a tied head shares, with the optional n-grams and smear."""

    def __init__(self, config: TokenEmbedding, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weight = self.declare("weight", (vocabulary, config.dims or width), "embedding", config.initial)
        self.projection = Linear(config.dims, width, FanIn()) if config.dims else None
        self.bigrams = NGramTable(config.bigrams, 2, width) if config.bigrams else None
        self.trigrams = NGramTable(config.trigrams, 3, width) if config.trigrams else None
        self.smear = config.smear.build(width) if config.smear else None

    def forward(self, context: Context) -> Tensor:
        """Return the normed stream, (B, T, width)."""
        x = F.embedding(context.ids, self.weight).to(context.dtype)
        if self.projection is not None:
            x = self.projection(x)
        if self.bigrams is not None:
            context.bigrams = self.bigrams(context)
            x = x + context.bigrams
        if self.trigrams is not None:
            x = x + self.trigrams(context)
        return rms_norm(x) if self.smear is None else self.smear(x, context)
