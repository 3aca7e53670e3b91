"""Estimated arithmetic of a model, in floating-point operations (FLOPs) per token; a multiply-add counts as two."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from caddie.config.schedules import Budget, IntSchedule, TrainProgress, int_at
from caddie.model import GPT, BlockModule, Linear, Model
from caddie.model.attention import Attention
from caddie.model.parameters import Part

TRAINING = 3
"""A backward costs twice a forward: one product for the gradient of the input, one for that of the weight."""


@dataclass(frozen=True)
class Flops:
    """What a token of a training step costs: 6 for each element of a product, 12 for each channel and position seen."""

    products: int
    """Elements of the matrices that a token is multiplied by, those of a layer as often as it runs."""
    attention: float
    """Width times the positions that a query sees on average, summed over the attentions that run."""

    @property
    def per_token(self) -> float:
        """FLOPs of forward and backward together."""
        return TRAINING * (2.0 * self.products + 4.0 * self.attention)

    @property
    def formula(self) -> str:
        """How the sum comes about."""
        return f"6 x {self.products:,} + 12 x {self.attention:,.0f} = {self.per_token / 1e6:,.2f} MFLOP per token"


def flops_per_token(gpt: GPT, sequence_length: IntSchedule, progress: float = 1.0) -> float:
    """FLOPs per token of a training step, forward and backward, when that much of the run is over; see `count`."""
    return count(gpt, sequence_length, progress).per_token


def count(gpt: GPT, sequence_length: IntSchedule, progress: float = 1.0, documents: float | None = None) -> Flops:
    """What a token of a training step costs when that much of the run is over.

    Matrix products, as often as their layer runs, and the two products of attention over the positions that a query
    sees on average; norms, rotations, gates' elementwise part and the optimizer are left out. Where documents bound
    attention, `documents` is the mean number of positions that a query sees in the text at hand; unknown, rows count in
    full; pieces of `longest` tokens and windows count exactly. The convention of PaLM (arXiv 2204.02311, appendix B),
    with causality.
    """
    moment = TrainProgress(0, progress, Budget(seconds=1.0))
    length = int_at(sequence_length, moment)
    with torch.device("meta"):
        model = gpt.build()
    once = _outside(model)
    runs = Counter(gpt.order(progress))
    looped = sum(_block(model.blocks[layer], number) for layer, number in runs.items())
    seen = 0.0
    for layer, number in runs.items():
        if (attention := gpt.block_of(layer).attention) is not None:
            visible = mean_visible(attention, length, moment)
            if documents is not None and getattr(attention, "scope", "row") == "document":
                visible = min(visible, documents)
            seen += number * gpt.width * visible
    return Flops(once + looped, seen)


def mean_visible(attention: Attention, length: int, moment: TrainProgress) -> float:
    """Positions that a query of a row of `length` tokens sees on average, itself included."""
    longest = getattr(attention, "longest", None)
    if getattr(attention, "scope", "row") == "document" and longest is not None:
        length = min(length, longest)
    window = getattr(attention, "window", None)
    width = length if window is None else min(length, int_at(window, moment))
    return width - width * (width - 1) / (2 * length)  # the first `width` queries see 1, 2, ... positions


def _block(block: nn.Module, runs: int) -> int:
    """Multiply-adds per token of a layer that runs so often in one forward."""
    assert isinstance(block, BlockModule)
    own = [_products(mlp) for mlp in block.later_mlps]
    mlp = _products(block.mlp)
    pass_index = sum(own[: runs - 1]) if own else mlp * (runs - 1)
    return (_products(block) - mlp - sum(own)) * runs + mlp + pass_index


def _outside(model: Model) -> int:
    """Multiply-adds per token of everything but the layers; a shared table is a product where the head reads it."""
    maps = [part.weight for part in model.head.modules() if isinstance(part, Linear)]
    untied = any(len(weight) == model.config.vocabulary for weight in maps)
    return _products(model) - _products(model.blocks) + (0 if untied else model.embedding.weight.numel())


def _products(module: nn.Module) -> int:
    """Elements of all matrices in a module that a token is multiplied by once, learned or fixed."""
    elements = 0
    for part in module.modules():
        if isinstance(part, Linear):
            elements += part.weight.numel()
        elif isinstance(part, Part):
            elements += sum(math.prod(part.get_buffer(name).shape) for name in part.constants)
    return elements
