"""Hashed n-gram embeddings."""

import functools
from collections.abc import Sequence
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from caddie.config import Channels, Config, Range
from caddie.model.context import Context
from caddie.model.linear import Linear
from caddie.model.parameters import Constant, FanIn, Initial, Normal, Part

FACTORS = (36_313, 27_191, 51_497)
"""Hash factors for the id of a token, of the one before it and of the one before that."""


class HashedNGrams(Config):
    """BigramHash: hashed n-gram embeddings, projected to the stream and scaled.

    The rows start at zero, so projection and scale, which do not, get their first gradient at step 2. A row that no
    n-gram of the training text hashes to keeps adding nothing.
    """

    buckets: Annotated[int, Range(2, 1 << 24)] = 16_384
    """Number of rows; the last is for positions with too few tokens before them."""
    dims: Channels | None = None
    """Channels of a row; none for rows as wide as the stream, without projection."""
    initial: Initial = FanIn()
    """Initial values of the projection; at zero neither it nor the rows would ever learn. Public scripts end up
    with an orthogonal one, times 1/√(2·layers) in public system 002 and times 1 in 000 and #1019."""
    signs: Annotated[int, Range(1, 1 << 20)] | None = None
    """Sign trick: number of rows of fixed random signs (8,192 in modded-nanogpt #299), or none.

    A row of the table is multiplied by a row of signs; the number of that row is the XOR of the n-gram's ids, modulo
    `signs`. The signs are drawn again whenever the model is made, so they take no bytes.
    """


class NGramTable(Part):
    """Table (buckets, dims) of n-grams of `order` tokens, two or three, with its projection and scale."""

    def __init__(self, config: HashedNGrams, order: int, width: int) -> None:
        super().__init__()
        self.order = order
        self.weight = self.declare("weight", (config.buckets, config.dims or width), "embedding", Constant(value=0.0))
        if config.signs:  # normal values, of which only the signs count
            self.constant("signs", (config.signs, config.dims or width), Normal(std=1.0))
        self.projection = Linear(config.dims, width, config.initial) if config.dims else None
        self.scale = self.declare("scale", (), "scalar", Constant(value=0.05))

    def forward(self, context: Context) -> Tensor:
        """Return the embedding of the n-gram that ends at each position, (B, T, width)."""
        tokens = ngrams(context, self.order)
        rows = F.embedding(buckets(tokens, len(self.weight)), self.weight).to(context.dtype)
        if "signs" in self.constants:
            signs = self.get_buffer("signs")
            rows = rows * F.embedding(sign_rows(tokens, len(signs)), signs).sign().to(context.dtype)
        return self.scale.to(context.dtype) * (rows if self.projection is None else self.projection(rows))


def ngrams(context: Context, order: int) -> list[Tensor]:
    """Return the n-gram of `order` tokens that ends at each position, latest first, each (B, T) in 32 bits.

    A token that would stand before the start of its row or document is -1.
    """
    tokens = [context.ids.int() + 1]  # from 1, so that 0 can stand before a start
    while len(tokens) < order:
        tokens.append(context.previous(tokens[-1]))
    return [token - 1 for token in tokens]


def buckets(tokens: Sequence[Tensor], count: int) -> Tensor:
    """Return the bucket of each n-gram, (B, T).

    The hash is the XOR of ids times factors, in 32-bit integers that wrap around, modulo count - 1. An n-gram that
    would reach beyond the start of its row or document goes to the last bucket.
    """
    hashed = functools.reduce(torch.bitwise_xor, map(torch.mul, tokens, FACTORS))
    return torch.where(tokens[-1] >= 0, hashed % (count - 1), count - 1)


def sign_rows(tokens: Sequence[Tensor], count: int) -> Tensor:
    """Return the row of signs of each n-gram, (B, T): the XOR of its ids, modulo `count`.

    It is row 0 if the n-gram would reach beyond the start of its row or document.
    """
    return torch.where(tokens[-1] >= 0, functools.reduce(torch.bitwise_xor, tokens) % count, 0)
