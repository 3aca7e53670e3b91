"""Hashed n-gram embeddings."""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from caddie.config import Channels, Config, Range, Technique, known
from caddie.model.context import Context
from caddie.model.linear import Linear
from caddie.model.parameters import Constant, FanIn, Initial, Part

FACTORS = (36_313, 27_191, 51_497)
"""Hash factors of a token's id, of the one before it and of the one before that."""


class HashedNGrams(Config):
    """BigramHash: hashed n-gram embeddings, projected to the stream and scaled.

    The rows start at zero, so projection and scale, which do not, get their first gradient at step 2; an n-gram that
    never occurs in training keeps adding nothing.
    """

    techniques = known(
        "Frequent runs of tokens are known without any layer's work.",
        "hash embeddings, arXiv 1709.03933; openai/parameter-golf smeargate to #1204, public systems 000 and 002",
        "in bundles only; +0.020 in the ternary record's model",
        buckets=Technique(
            "Fewer runs share a row.",
            "openai/parameter-golf: 1,536 to 10,240",
            "10,240 rows -0.002 (INT5); 8,192 for 4,096 +0.0001 (#375); 10,240 with layers that repeat 0 (#363)",
        ),
    )

    buckets: Annotated[int, Range(2, 1 << 24)] = 16_384
    """Number of rows; the last is for positions with too few tokens before them."""
    dims: Channels | None = None
    """Channels of a row; none for rows as wide as the stream, without projection."""
    initial: Initial = FanIn()
    """Initial values of the projection; at zero neither it nor the rows would ever learn. Public scripts end up with an
    orthogonal one, times 1/√(2·layers) in public system 002 and 1 in 000 and ARG."""


class NGramTable(Part):
    """Table (buckets, dims) of n-grams of `order` tokens, two or three, with its projection and scale."""

    def __init__(self, config: HashedNGrams, order: int, width: int) -> None:
        super().__init__()
        self.order = order
        self.weight = self.declare("weight", (config.buckets, config.dims or width), "embedding", Constant(value=0.0))
        self.projection = Linear(config.dims, width, config.initial) if config.dims else None
        self.scale = self.declare("scale", (), "scalar", Constant(value=0.05))

    def forward(self, context: Context) -> Tensor:
        """Return the embedding of the n-gram that ends at each position, (B, T, width)."""
        rows = F.embedding(buckets(context, self.order, len(self.weight)), self.weight).to(context.dtype)
        return self.scale.to(context.dtype) * (rows if self.projection is None else self.projection(rows))


def buckets(context: Context, order: int, count: int) -> Tensor:
    """Return the bucket of the n-gram of `order` tokens that ends at each position, (B, T).

    Ids times factors, combined by exclusive or in 32-bit integers that wrap around, modulo count - 1. An n-gram that
    would reach beyond the start of its row or document goes to the last bucket.
    """
    token = context.ids.int() + 1  # so that 0, which stands before a start, is no token
    hashed = FACTORS[0] * (token - 1)
    for factor in FACTORS[1:order]:
        token = context.previous(token)
        hashed = hashed ^ (factor * (token - 1))
    return torch.where(token > 0, hashed % (count - 1), count - 1)
