"""Estimated arithmetic of a model, in floating-point operations (FLOPs) per token; a multiply-add counts as two."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import cast

from torch import nn

from caddie.config.schedules import IntSchedule, TrainProgress, int_at, progress_at
from caddie.model import GPT, BlockModule, Linear
from caddie.model.attention import Attention
from caddie.model.ngrams import NGramTable
from caddie.model.parameters import Part


@dataclass(frozen=True)
class Flops:
    """FLOPs of a training step per token: 6 for each weight, 12 for each channel and position attended to."""

    products: int
    """Elements of the matrices that multiply a token; a layer's count once for each of its passes."""
    attention: float
    """Width times the mean number of positions that a query attends to, summed over all passes of attention."""

    @property
    def per_token(self) -> float:
        """FLOPs of forward and backward together."""
        return 3 * (2.0 * self.products + 4.0 * self.attention)  # a backward makes twice the products of a forward


def flops_per_token(gpt: GPT, sequence_length: IntSchedule, progress: float = 1.0) -> float:
    """Return FLOPs per token of a training step, forward and backward, at that progress of the run; see `count`."""
    return count(gpt, sequence_length, progress).per_token


def count(gpt: GPT, sequence_length: IntSchedule, progress: float = 1.0, documents: float | None = None) -> Flops:
    """Count the FLOPs of a training step per token at that progress of the run.

    It counts matrix products, once for each pass of their layer, and the two products of attention over the mean number
    of positions that a query attends to. It leaves out norms, rotations, elementwise work and the optimizer. Where
    documents bound attention, `documents` is that mean in the text at hand; if None, rows count in full. Windows and
    pieces of `longest` tokens count exactly. The convention is PaLM's (arXiv 2204.02311, appendix B), with causal
    attention.
    """
    train_progress = progress_at(progress)
    length = int_at(sequence_length, train_progress)
    model = gpt.outline()
    tied = model.embedding.weight.numel() if model.head.table is None else 0  # a tied head multiplies by it
    products, attended = _products(model) - _products(model.blocks) + tied, 0.0
    for layer, passes in Counter(gpt.order(progress)).items():
        block = cast(BlockModule, model.blocks[layer])
        products += passes * (_products(block) - _products(block.later_mlps))  # a pass runs one MLP
        if (attention := gpt.blocks[layer].attention) is not None:
            attended += passes * gpt.width * _mean_visible(attention, length, train_progress, documents)
    return Flops(products, attended)


def _mean_visible(attention: Attention, length: int, train_progress: TrainProgress, documents: float | None) -> float:
    """Return the mean number of positions that a query of a row of `length` tokens attends to, its own included."""
    by_document, longest = getattr(attention, "scope", "row") == "document", getattr(attention, "longest", None)
    if by_document and longest is not None:
        length = min(length, int_at(longest, train_progress))
    window = getattr(attention, "window", None)
    width = length if window is None else min(length, int_at(window, train_progress))
    mean = width - width * (width - 1) / (2 * length)  # the first `width` queries see 1, 2, ... positions
    return min(mean, documents) if by_document and documents is not None else mean


def _products(module: nn.Module) -> int:
    """Return the number of elements of all matrices in a module, learned or fixed, that multiply a token."""
    elements = 0
    for part in module.modules():
        if isinstance(part, Linear):
            elements += part.weight.numel()
        elif isinstance(part, Part) and not isinstance(part, NGramTable):  # its constants are looked up
            elements += sum(math.prod(part.get_buffer(name).shape) for name in part.constants)
    return elements
