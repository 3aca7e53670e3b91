"""Embeddings: token ids to the residual stream, with hashed n-grams and a share of the previous token (SmearGate)."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from caddie.config import Channels, Config, Range, Technique, known
from caddie.model.context import Context
from caddie.model.linear import Linear
from caddie.model.parameters import Constant, FanIn, Initial, Normal, Part
from caddie.ops import rms_norm

FACTORS = (36_313, 27_191, 51_497)
"""Hash factors of a token's id, of the one before it and of the one before that."""
GATE_CHANNELS = 12
"""Leading channels of a token that gate `TokenSmear`."""


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
        signs=Technique(
            "Runs that share a row are told apart, each reading it with signs of its own.",
            "modded-nanogpt #299",
            "with three times the rows at a quarter of their width 1.3 of 80 seconds less (modded-nanogpt #299)",
        ),
    )

    buckets: Annotated[int, Range(2, 1 << 24)] = 16_384
    """Number of rows; the last is for positions with too few tokens before them."""
    dims: Channels | None = None
    """Channels of a row; none for rows as wide as the stream, without projection."""
    initial: Initial = FanIn()
    """Initial values of the projection; at zero neither it nor the rows would ever learn. Public scripts end up with an
    orthogonal one, times 1/√(2·layers) in public system 002 and 1 in 000 and ARG."""
    signs: Annotated[int, Range(1, 1 << 20)] | None = None
    """Sign trick: rows of fixed random signs, 8,192 in modded-nanogpt #299, or none.

    A row of the table is multiplied by the row of signs whose number is the exclusive or of the n-gram's ids, modulo
    `signs`. The signs are drawn whenever the model is made, and take no bytes.
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
            signs: Tensor = self.get_buffer("signs")
            rows = rows * F.embedding(sign_rows(tokens, len(signs)), signs).sign().to(context.dtype)
        return self.scale.to(context.dtype) * (rows if self.projection is None else self.projection(rows))


def ngrams(context: Context, order: int) -> list[Tensor]:
    """Return the n-gram of `order` tokens that ends at each position, latest first, each (B, T) in 32 bits.

    A token that would stand before the start of its row or document is -1.
    """
    tokens = [context.ids.int() + 1]  # so that 0, which stands before a start, is no token
    while len(tokens) < order:
        tokens.append(context.previous(tokens[-1]))
    return [token - 1 for token in tokens]


def buckets(tokens: Sequence[Tensor], count: int) -> Tensor:
    """Return the bucket of each n-gram, (B, T).

    Ids times factors, combined by exclusive or in 32-bit integers that wrap around, modulo count - 1. An n-gram that
    would reach beyond the start of its row or document goes to the last bucket.
    """
    hashed = functools.reduce(torch.bitwise_xor, map(torch.mul, tokens, FACTORS))
    return torch.where(tokens[-1] >= 0, hashed % (count - 1), count - 1)


def sign_rows(tokens: Sequence[Tensor], count: int) -> Tensor:
    """Return the row of signs of each n-gram, (B, T): the exclusive or of its ids, modulo `count`.

    It is row 0 if the n-gram would reach beyond the start of its row or document.
    """
    return torch.where(tokens[-1] >= 0, functools.reduce(torch.bitwise_xor, tokens) % count, 0)


class Smear(Config):
    """Socket: mix of the previous token into each token. The first of a row or a document has none."""

    @abstractmethod
    def build(self, width: int) -> Part:
        """Return the module; its forward takes tokens (B, T, width) and a context and returns them smeared, normed."""


class ChannelSmear(Smear):
    """SmearGate by channel: norm, then x_t ← (1 - σ(γ)) x_t + σ(γ) x_{t-1}, γ learned for each channel from 0.

    In the records it also mixes across documents.
    """

    techniques = known(
        "Each token carries a share of the one before, by channel, before the first layer.",
        "openai/parameter-golf, 2026-03-19_smeargate_orthoinit_muonwd to #1204, public systems 000 and 002",
        "in bundles only; none from 4,096 ids on",
    )

    def build(self, width: int) -> Part:
        """Return the module."""
        return _ChannelSmear(width)


class TokenSmear(Smear):
    """SmearGate by token: x_t ← x_t + λ σ(w · x_t[:12]) x_{t-1}, then norm; λ and w start at 0.

    w gets its first gradient at step 2.
    """

    techniques = known(
        "The token itself decides how much of the one before it needs.",
        "modded-nanogpt; openai/parameter-golf #1667, where it never learned, #1851 and the record at 1.0611",
        "in bundles only; smearing across documents seemed to gain 0.0025, a leak (#1797)",
    )

    def build(self, width: int) -> Part:
        """Return the module."""
        return _TokenSmear(width)


class _ChannelSmear(Part):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = self.declare("gate", (width,), "scalar", Constant(value=0.0))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x = rms_norm(x)
        return torch.lerp(x, context.previous(x), torch.sigmoid(self.gate).to(x.dtype))


class _TokenSmear(Part):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = Linear(min(GATE_CHANNELS, width), 1, Constant(value=0.0), role="scalar")
        self.scale = self.declare("scale", (), "scalar", Constant(value=0.0))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        share = self.scale.to(x.dtype) * torch.sigmoid(self.gate(x[..., :GATE_CHANNELS]))
        return rms_norm(x + share * context.previous(x))


class Embedding(Config):
    """Socket: embedding of token ids."""

    @abstractmethod
    def build(self, vocabulary: int, width: int) -> TokenTable:
        """Return the module; its forward takes a context and returns the stream (B, T, width)."""


class TokenEmbedding(Embedding):
    """Table with a row for each id, normed. Small initial values keep the first logits of a tied head near zero."""

    techniques = known(
        initial=Technique(
            "`Overtone` starts the table with a falling spectrum.",
            "openai/parameter-golf, 2026-03-19_SlidingWindow_FP16Emb_10L_MuonWD_OvertoneInit",
            "in a bundle only",
        ),
        dims=Technique(
            "A large vocabulary at a fraction of its parameters.",
            "ALBERT, arXiv 1909.11942; openai/parameter-golf, the ternary record (254 of 768)",
            "frees 4 MB at 8,192 ids; at 1,024 ids +0.053 to +0.063 (#363)",
        ),
        bigrams=Technique(
            "Pairs of tokens are known before the first layer.",
            "arXiv 1709.03933; openai/parameter-golf, smeargate to #1204, public systems 000 and 002",
            "1.1446 to 1.1426 with 10,240 rows (INT5), -0.0009 from 2,048 to 3,072 rows (#549); no gain at 8,192 ids",
        ),
        trigrams=Technique("The same for three tokens.", "openai/parameter-golf #609", "+0.002 to +0.0049 (#609)"),
        smear=Technique(
            "Each token carries a share of the one before.",
            "modded-nanogpt; openai/parameter-golf, 2026-03-19_smeargate, public systems 000 and 002, the record "
            "at 1.0611",
            "in bundles only",
        ),
    )

    initial: Initial = Normal(std=0.005)
    """Initial values of the rows."""
    dims: Channels | None = None
    """Channels of a row, projected to the stream and, for a tied head, back; none for rows as wide as the stream."""
    bigrams: HashedNGrams | None = None
    """BigramHash: hashed rows of the last two tokens, added before the norm, or none."""
    trigrams: HashedNGrams | None = None
    """Hashed rows of the last three tokens, added before the norm, or none."""
    smear: Smear | None = None
    """SmearGate: mix of the previous token into each token, or none."""

    def build(self, vocabulary: int, width: int) -> TokenTable:
        """Return the module."""
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
