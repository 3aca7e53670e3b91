"""The scorers' forward, compiled on a GPU for shapes that take long."""

import time
import warnings
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from caddie.errors import first_line
from caddie.model import Cache, Model
from caddie.ops.attention import segment_bucket
from caddie.runtime.autotune import allow_graphs, compiled_here

Shape = tuple[int | None, ...]
COMPILE_SECONDS = 30.0
"""Rough time to compile one shape."""


class Forward:
    """Logits of a model over windows of ids, as `Model` gives them; documents begin with `bos`.

    The length of the text is unknown here, so on a GPU a shape is compiled once it has run as long as compiling takes,
    which at worst doubles the time. A compiler that fails causes a warning and is not used again. Not measured
    on a GPU; on a CPU compiled scoring was 0 to 20 % faster, less than compiling takes (`docs/log.md`).
    """

    def __init__(self, model: Model, bos: int, dtype: torch.dtype) -> None:
        self.model, self._bos, self._dtype = model, bos, dtype
        self._compiling = next(model.parameters()).device.type == "cuda"
        self._counts = self._compiling and any(
            getattr(block.attention, "scope", "row") == "document" for block in model.config.blocks
        )
        self._spent: defaultdict[Shape, float] = defaultdict(float)
        self._before: tuple[Shape, float] | None = None
        self._compiled: dict[Shape, Callable[[Tensor, Tensor], Tensor]] = {}

    def __call__(
        self, ids: Tensor, last: int | None = None, cache: Cache | None = None, begun: int | None = None
    ) -> Tensor:
        """Return logits (rows, last or n, vocabulary) of ids, int64 (rows, n).

        With a cache the ids continue those of the previous call, and nothing is compiled. `begun` is at least the
        number of documents that begin in the windows; None counts them, which waits for the GPU.
        """
        (rows, length), starts = ids.shape, ids == self._bos
        counted: dict[str, int] = {}
        if self._counts and cache is None:  # FlashAttention has to know how many documents there may be
            begun = int(starts.sum()) if begun is None else begun
            counted = {"segments": segment_bucket(begun + rows, ids.numel())}

        def eager(ids: Tensor, starts: Tensor) -> Tensor:
            logits: Tensor = self.model(ids, starts, self._dtype, last=last, cache=cache, **counted)
            return logits

        if not self._compiling or cache is not None:
            return eager(ids, starts)
        shape, now = (rows, length, last, torch.is_grad_enabled(), *counted.values()), time.perf_counter()
        if self._before is not None:  # the time since then was spent on the previous shape
            self._spent[self._before[0]] += now - self._before[1]
        self._before = shape, now
        if self._spent[shape] < COMPILE_SECONDS:
            return eager(ids, starts)
        if shape not in self._compiled:
            self._compiled[shape] = compiled_here(eager)
            # PyTorch treats the functions of all shapes as one, whose limit is eight graphs.
            allow_graphs(8 * len(self._compiled))
        try:
            return self._compiled[shape](ids, starts)
        except Exception as error:  # a broken compiler may fail in any way, and the model runs without one
            self._compiling = False
            text = f"compiling failed, so scoring goes on uncompiled: {first_line(error)}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            return eager(ids, starts)
