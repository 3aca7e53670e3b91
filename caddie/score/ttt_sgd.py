"""Score-first test-time training of all weights: score each chunk of the text, then train on it."""

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from itertools import groupby
from operator import itemgetter
from typing import Annotated, TypeVar

import numpy as np
import torch
from torch import Tensor

from caddie.config import Config, Fraction, NonNegative, Positive, Range
from caddie.errors import UserError
from caddie.model import Cache, Model
from caddie.runtime.distributed import Ranks
from caddie.score.forward import Forward
from caddie.score.scorer import Layout, Positions, ScoredPrefix, Scorer, ScoringBatch, Step, nats
from caddie.score.windows import Window, windows

Leaf = TypeVar("Leaf")
PARTS = 8
"""Parts that shared work is divided into for any number of processes: as many as a machine has GPUs."""
Rows = Annotated[int, Range(1, 4096)]
Tokens = Annotated[int, Range(1, 1 << 24)]


class TestTimeTraining(Config):
    """Base of test-time training methods: learning from scored tokens."""

    @abstractmethod
    def build(self, model: Model, bos: int, length: int, stride: int, dtype: torch.dtype) -> Scorer:
        """Return the scorer; `model` itself is never changed."""


class SGD(Config):
    """SGD with momentum on all weights; the learning rate decays from chunk to chunk as half a cosine."""

    lr: NonNegative = 0.005
    """Learning rate at the first chunk."""
    momentum: Fraction = 0.9
    """Momentum."""
    clip: Positive = 1.0
    """Largest norm of the gradient of all weights."""
    rows: Rows = 32
    """Rows of a step."""
    epochs: Annotated[int, Range(1, 100)] = 3
    """Passes over a chunk."""


class Learner:
    """A model with its SGD, trained on rows of tokens by one process or several.

    The parts of a batch are divided among the processes, and their gradients are summed in a fixed order. So weights
    are bit-identical in all processes, for any number of processes.
    """

    def __init__(self, model: Model, bos: int, sgd: SGD, dtype: torch.dtype, ranks: Ranks = Ranks()) -> None:
        self.model, self.ranks, self._sgd = model, ranks, sgd
        self.forward = Forward(model, bos, dtype)
        self._parameters = [parameter.requires_grad_() for parameter in model.parameters()]
        self._sizes = [parameter.numel() for parameter in self._parameters]
        self._momentum = self._parameters[0].new_zeros(sum(self._sizes))

    def learn(self, rows: Positions, chunk: int, chunks: int) -> None:
        """Train on rows (n, T + 1) of one chunk."""
        sgd = self._sgd
        lr = sgd.lr * 0.5 * (1 + math.cos(math.pi * chunk / max(chunks - 1, 1)))
        for begin in [*range(0, len(rows), sgd.rows)] * sgd.epochs:
            self._descend(self._gradient(rows[begin : begin + sgd.rows]), lr)

    def _gradient(self, batch: Positions) -> Tensor:
        """Return the gradient of the mean loss of a batch (n, T + 1), all weights in one vector."""
        parts = np.array_split(batch, _power_of_two(min(PARTS, len(batch))))
        busy = _power_of_two(min(len(parts), self.ranks.world))
        size, mine = len(parts) // busy, torch.zeros_like(self._momentum)
        if own := parts[self.ranks.rank * size :][:size]:
            mine = _in_pairs(own, lambda rows: self._part(rows, batch[:, 1:].size))
        return _in_pairs(self.ranks.begin_all_gather(mine[None])()[:busy].unbind(), lambda gradient: gradient)

    @torch.enable_grad()
    def _part(self, rows: Positions, predictions: int) -> Tensor:
        """Return the contribution of some rows to the gradient of a mean over `predictions`."""
        ids = torch.from_numpy(rows).to(self._momentum.device)
        loss = nats(self.forward(ids[:, :-1]), ids[:, 1:]).sum() / predictions
        gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True, materialize_grads=True)
        return torch.cat([gradient.flatten() for gradient in gradients])

    @torch.no_grad()
    def _descend(self, gradient: Tensor, lr: float) -> None:
        gradient *= (self._sgd.clip / (torch.linalg.vector_norm(gradient) + 1e-6)).clamp(max=1.0)
        self._momentum.mul_(self._sgd.momentum).add_(gradient)
        for parameter, step in zip(self._parameters, self._momentum.split_with_sizes(self._sizes), strict=True):
            parameter.sub_(step.view_as(parameter), alpha=lr)


def _power_of_two(most: int) -> int:
    return 1 << (most.bit_length() - 1)


def _in_pairs(leaves: Sequence[Leaf], value: Callable[[Leaf], Tensor]) -> Tensor:
    """Return the sum of the values of 2^k leaves, as a tree: neighbours first, then neighbouring pairs."""
    if len(leaves) == 1:
        return value(leaves[0])
    half = len(leaves) // 2
    return _in_pairs(leaves[:half], value) + _in_pairs(leaves[half:], value)


def check_chunk(setting: str, chunk_tokens: int, length: int) -> None:
    """Raise `UserError` for chunks shorter than a row, which would train nothing."""
    if chunk_tokens < length:
        raise UserError(f"{setting} must be at least score.sequence_length ({length:,}), not {chunk_tokens:,}")


class ChunkSGD(TestTimeTraining):
    """Train all weights on each chunk of the text after it was scored, and keep them for the rest of the text.

    It follows the contest's rule on test-time training, openai/parameter-golf #1017, and its records #549 and #1493.
    """

    chunk_tokens: Tokens = 32_768
    """Predictions between two updates."""
    sgd: SGD = SGD()
    """The optimizer; its state lasts for the whole text."""

    def build(self, model: Model, bos: int, length: int, stride: int, dtype: torch.dtype) -> Scorer:
        return _ChunkSGD(self, model, bos, length, stride, dtype)


class _ChunkSGD(Scorer):
    in_order = True
    fixed_between_updates = True

    def __init__(self, config: ChunkSGD, model: Model, bos: int, length: int, stride: int, dtype: torch.dtype) -> None:
        check_chunk("score.ttt.chunk_tokens", config.chunk_tokens, length)
        self._chunk_tokens, self._length, self._stride = config.chunk_tokens, length, stride
        self._learner = Learner(copy.deepcopy(model), bos, config.sgd, dtype)

    def plan(self, layout: Layout, rows: int) -> Iterator[Step]:
        """Yield chunk after chunk, each with the windows whose first scored prediction lies in it."""
        self._per_stretch = max(self._length, self._chunk_tokens // max(1, len(layout.begins)))
        self._chunks = math.ceil(int((layout.ends - layout.begins).max(initial=0)) / self._per_stretch)

        def numbered(begin: int, end: int) -> Iterator[tuple[int, Window]]:
            for window in windows(begin, end, self._length, self._stride):
                yield (window.first - begin) // self._per_stretch, window

        by_chunk = merge(*(numbered(begin, end) for begin, end in layout.edges), key=itemgetter(0))
        for chunk, group in groupby(by_chunk, itemgetter(0)):
            self._chunk, chosen = chunk, [window for _, window in group]
            yield Step(chosen, [0] * len(chosen))

    def share(self, ranks: Ranks) -> bool:
        """Share the work: all processes have the same weights and divide windows and parts of a batch."""
        self._learner.ranks = ranks
        return True

    @torch.no_grad()
    def logits(self, inputs: Tensor, slots: Sequence[int], last: int, cache: Cache | None = None) -> Tensor:
        return self._learner.forward(inputs, last, cache)

    def update(self, batches: Sequence[ScoringBatch], prefix: ScoredPrefix) -> None:
        """Train on the complete rows of the chunk, unless it is the last."""
        if self._chunk == self._chunks - 1:
            return
        rows = []
        for stretch_begin, stretch_end in prefix.layout.edges:
            begin = stretch_begin + self._chunk * self._per_stretch
            end = min(begin + self._per_stretch, stretch_end)
            starts = range(begin, end - self._length + 1, self._length)
            rows += [prefix.tokens(start, start + self._length + 1) for start in starts]
        if rows:
            self._learner.learn(np.stack(rows), self._chunk, self._chunks)
