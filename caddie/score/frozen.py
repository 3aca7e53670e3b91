"""Plain and sliding-window scoring with a fixed model."""

from collections.abc import Iterator, Sequence
from itertools import islice

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
        most = rows * apart if len(per_stretch) == 1 else 1
        while batch := [window for stretch in per_stretch for window in islice(stretch, most)]:
            yield Step(batch, [0] * len(batch))

    @torch.inference_mode()
    def logits(self, inputs: Tensor, slots: Sequence[int], last: int, cache: Cache | None = None) -> Tensor:
        return self._forward(inputs, last, cache)
