"""Plain and sliding-window scoring with a fixed model."""

from collections.abc import Iterator, Sequence
from itertools import islice, zip_longest

import torch
from torch import Tensor

from caddie.model import Cache, Model
from caddie.score.forward import Forward
from caddie.score.scorer import Layout, Scorer, Step
from caddie.score.windows import windows


class Frozen(Scorer):
    """Scores with a fixed model, in windows of `length` tokens that advance by `stride`."""

    stateless = True

    def __init__(self, model: Model, bos: int, length: int, stride: int, dtype: torch.dtype) -> None:
        self._length, self._stride, self._forward = length, stride, Forward(model, bos, dtype)

    def plan(self, layout: Layout, rows: int) -> Iterator[Step]:
        """Yield the windows of all stretches in order, the stretches side by side."""
        apart = self._length // self._stride + 1  # two windows of a stretch that are this far apart share no token
        per_stretch = [windows(begin, end, self._length, self._stride) for begin, end in layout.edges]
        if len(per_stretch) == 1:
            while batch := list(islice(per_stretch[0], rows * apart)):
                yield Step(batch, [0] * len(batch))
            return
        for column in zip_longest(*per_stretch):
            batch = [window for window in column if window is not None]
            yield Step(batch, [0] * len(batch))

    @torch.inference_mode()
    def logits(self, inputs: Tensor, slots: Sequence[int], last: int, cache: Cache | None = None) -> Tensor:
        return self._forward(inputs, last, cache)
