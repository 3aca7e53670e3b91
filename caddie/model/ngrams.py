"""A row for every run of tokens, found by a hash."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from caddie.config import Channels, Config, Range, Technique
from caddie.model.context import Context
from caddie.model.linear import Linear
from caddie.model.parameters import Constant, FanIn, Initial, Part

FACTORS = (36_313, 27_191, 51_497)
"""What a token's id, the one before it and the one before that are multiplied by."""


@dataclass(frozen=True, kw_only=True)
class HashedNGrams(Config):
    """Rows that runs of tokens share by hash, projected to the stream and scaled.

    BigramHash of openai/parameter-golf, 2026-03-20_Int6_MLP3x_SmearGate_BigramHash_MuonWD_SWA; the idea: hash
    embeddings, arXiv 1709.03933. The rows start at zero, so the projection and the scale, which do not, get their first
    gradient at step 2; a run that was never seen keeps adding nothing.
    """

    techniques: ClassVar = {
        "": Technique(
            "Frequent runs of tokens are known without any layer's work.",
            "arXiv 1709.03933; openai/parameter-golf smeargate to #1204, seeds 000 and 002",
            "in bundles only; +0.020 in the ternary record's model",
        ),
        "buckets": Technique(
            "Fewer runs share a row.",
            "openai/parameter-golf: 1,536 to 10,240",
            "10,240 rows -0.002 (INT5); 8,192 for 4,096 +0.0001 (#375); 10,240 with layers that repeat 0 (#363)",
        ),
    }

    buckets: Annotated[int, Range(2, 1 << 24)] = 16_384
    """Number of rows; the last is that of positions with too few tokens before them."""
    dims: Channels | None = None
    """Channels of a row, or none for rows as wide as the stream that are not projected."""
    initial: Initial = FanIn()
    """Where the projection starts. At zero it would never learn, nor would the rows. The scripts' code reads as if it
    did; a later pass makes it orthogonal, by 1/√(2·layers) in seed 002 and by 1 in seed 000 and ARG."""

    def build(self, order: int, width: int) -> NGramTable:
        """The module for runs of `order` tokens, two or three."""
        return NGramTable(self, order, width)


class NGramTable(Part):
    """A table (buckets, dims) and its way into the stream."""

    def __init__(self, config: HashedNGrams, order: int, width: int) -> None:
        super().__init__()
        self.order = order
        self.weight = self.declare("weight", (config.buckets, config.dims or width), "embedding", Constant(value=0.0))
        self.projection = Linear(config.dims, width, config.initial) if config.dims else None
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
