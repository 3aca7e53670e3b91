"""A run at a size of milliseconds: what a small copy of a recipe's model and training is, and what it reads."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from caddie.config.schedules import IntSchedule, PiecewiseConstant, all_values
from caddie.data.loaders import Stream
from caddie.data.shards import Tokens
from caddie.errors import UserError
from caddie.model import GPT, Block
from caddie.recipes.recipe import Recipe
from caddie.train.trainer import Train

_VOCABULARY, _WIDTH, _HIDDEN, _BUCKETS, _ROW = 96, 64, 48, 64, 64
"""The most that a copy has of ids, channels, hidden channels, hashed rows and tokens per row, where that divides."""
BOS = 1
"""Id that begins its documents."""
SmallCopy = tuple[GPT, Train]
"""Model and training of a small copy."""


def small_copy(recipe: Recipe) -> SmallCopy:
    """Model and training at a size of milliseconds, alike in depth, layers, heads' size and everything that is chosen.

    The bound of the gradient is brought down so far that it acts. Heads are fewer and the width with them, where the
    attention has fields of these names; windows and pieces of documents shrink with the rows.
    """
    scale = row_scale(recipe.train)
    longest = round(recipe.train.longest_row * scale)
    train = replace(
        recipe.train,
        sequence_length=_scaled(recipe.train.sequence_length, scale),
        batch_tokens=3 * longest,
        micro_batches=1,
        clip_norm=recipe.train.clip_norm and recipe.train.clip_norm * 1e-3,
        compile="never",
        cuda_graphs="never",
    )
    try:
        return _small(recipe.model, scale, _shared_heads(recipe.model)), train
    except UserError:  # an attention of the user's own may divide otherwise
        return _small(recipe.model, scale, 1), train


def spelled_out(gpt: GPT, train: Train) -> object:
    """What compares equal if every layer's block does, however it is put together."""
    blocks = [gpt.block_of(layer) for layer in range(gpt.depth)]
    return blocks, replace(gpt, block=Block(), layers={}), train


def row_scale(train: Train) -> float:
    """What the length of rows is multiplied by."""
    common = math.gcd(*all_values(train.sequence_length))
    return max(1, _ROW * common // train.longest_row) / common


def _scaled(number: IntSchedule, scale: float) -> IntSchedule:
    if isinstance(number, PiecewiseConstant):
        return replace(number, values=tuple(max(1, int(value * scale)) for value in number.values))
    return max(1, int(number * scale))  # so what is shorter than a row stays shorter


def _shared_heads(gpt: GPT) -> int:
    """The largest divisor of the width and of the numbers of heads of all layers that leaves a head's width or so."""
    attentions = (gpt.block_of(layer).attention for layer in range(gpt.depth))
    heads = (getattr(attention, "heads", 1) for attention in attentions if attention)
    return math.gcd(gpt.width, max(1, gpt.width // _WIDTH), *heads)


def _small(gpt: GPT, scale: float, fewer: int) -> GPT:
    block = _small_block(gpt.block, scale, fewer)
    different = {str(layer): gpt.block_of(layer) for layer in range(gpt.depth) if gpt.block_of(layer) != gpt.block}
    embedding = gpt.embedding
    for name in ("bigrams", "trigrams"):
        if held := getattr(embedding, name, None):
            embedding = replace(embedding, **{name: replace(held, buckets=min(held.buckets, _BUCKETS))})
    small = replace(
        gpt,
        vocabulary=min(gpt.vocabulary, _VOCABULARY),
        width=gpt.width // fewer,
        block=block,
        layers={layer: block.diff(_small_block(own, scale, fewer)) for layer, own in different.items()},
        embedding=embedding,
    )
    with torch.device("meta"):
        small.build()
    return small


def _small_block(block: Block, scale: float, fewer: int) -> Block:
    attention, mlp = block.attention, block.mlp
    if attention is not None:
        heads, shared = (getattr(attention, name, None) for name in ("heads", "key_value_heads"))
        new: dict[str, object] = {"heads": heads and heads // fewer}
        new["key_value_heads"] = shared and (shared // fewer if shared % fewer == 0 else 1)
        for name in ("window", "longest"):
            new[name] = (length := getattr(attention, name, None)) and _scaled(length, scale)
        attention = replace(attention, **{name: value for name, value in new.items() if value is not None})
    return replace(block, attention=attention, mlp=replace(mlp, hidden=min(mlp.hidden, _HIDDEN)))


def shards(vocabulary: int) -> list[Tokens]:
    """Random documents, some longer than a row."""
    random = np.random.default_rng(0)
    drawn = [random.integers(vocabulary, size=20_000).astype(np.uint16) for _ in range(3)]
    for shard in drawn:
        begins = np.cumsum(random.integers(3, 150, 300)) - 3
        shard[begins[begins < len(shard)]] = BOS
    return drawn


def stream(gpt: GPT, train: Train) -> Stream:
    """What a copy reads, in the order of its loader."""
    return train.loader.build(
        shards(gpt.vocabulary), tokens=train.micro_tokens(1), sequence_length=train.longest_row, seed=0, bos=BOS
    )
