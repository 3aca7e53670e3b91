"""A row for every run of tokens, found by a hash."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from caddie.config import Config, Count, Range
from caddie.model.context import Context
from caddie.model.linear import Linear
from caddie.parameters import Constant, FanIn, Part

FACTORS = (36_313, 27_191, 51_497)
"""What a token's id, the one before it and the one before that are multiplied by."""


@dataclass(frozen=True, kw_only=True)
class HashedNGrams(Config):
    """Rows that runs of tokens share by hash, projected to the stream and scaled.

    BigramHash of openai/parameter-golf, 2026-03-20_Int6_MLP3x_SmearGate_BigramHash_MuonWD_SWA; the idea: hash
    embeddings, arXiv 1709.03933. The rows start at zero, so the projection and the scale, which do not, get their first
    gradient at step 2; a run that was never seen keeps adding nothing.
    """

    buckets: Annotated[int, Range(2, 1 << 24)] = 16_384
    """Number of rows; the last is that of positions with too few tokens before them."""
    dims: Count | None = None
    """Channels of a row, or none for rows as wide as the stream that are not projected."""

    def build(self, order: int, width: int) -> NGramTable:
        """The module for runs of `order` tokens, two or three."""
        return NGramTable(self, order, width)


class NGramTable(Part):
    """A table (buckets, dims) and its way into the stream."""

    def __init__(self, config: HashedNGrams, order: int, width: int) -> None:
        super().__init__()
        self.order = order
        self.weight = self.declare("weight", (config.buckets, config.dims or width), "embedding", Constant(value=0.0))
        self.projection = Linear(config.dims, width, FanIn()) if config.dims else None
        self.scale = self.declare("scale", (), "scalar", Constant(value=0.05))

    def forward(self, context: Context) -> Tensor:
        """What each run adds to the stream, (B, T, width)."""
        rows = F.embedding(buckets(context, self.order, len(self.weight)), self.weight).to(context.dtype)
        return self.scale.to(context.dtype) * (rows if self.projection is None else self.projection(rows))


def buckets(context: Context, order: int, count: int) -> Tensor:
    """Bucket of the run of `order` tokens that ends at each position, (B, T).

    Ids times factors, combined by exclusive or in 32-bit integers that wrap around, modulo count - 1. A run that would
    reach beyond the start of its row or document goes to the last bucket.
    """
    token = context.ids.int() + 1  # so that 0, which stands before a start, is no token
    hashed = FACTORS[0] * (token - 1)
    for factor in FACTORS[1:order]:
        token = context.previous(token)
        hashed = hashed ^ (factor * (token - 1))
    return torch.where(token > 0, hashed % (count - 1), count - 1)
