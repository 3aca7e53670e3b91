"""The forward that scorers ask, compiled on a GPU where one shape takes long."""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from caddie.errors import first_line
from caddie.model import Cache, Model
from caddie.runtime.autotune import allow_graphs, compiled_here

Shape = tuple[int, int, int | None, bool]
COMPILE_SECONDS = 30.0
"""What the compiler takes for one shape, about."""


class Forward:
    """Logits of a model over windows of ids, as `Model` gives them.

    Nobody says beforehand how long a text is, so on a GPU a shape is compiled as soon as as much time has gone into it
    as compiling takes: at the worst that doubles the time. A compiler that fails is warned of and not asked again. Not
    yet measured on a GPU; on a CPU compiled scoring was 0 to 20 % faster, which is not worth its start (`docs/log.md`).
    """

    def __init__(self, model: Model, dtype: torch.dtype) -> None:
        self.model, self._dtype = model, dtype
        self._compiling = next(model.parameters()).device.type == "cuda"
        self._spent: defaultdict[Shape, float] = defaultdict(float)
        self._before: tuple[Shape, float] | None = None
        self._compiled: dict[Shape, Callable[[Tensor, Tensor], Tensor]] = {}

    def __call__(self, ids: Tensor, starts: Tensor, last: int | None = None, cache: Cache | None = None) -> Tensor:
        """Logits of the `last` positions, or of all, of ids (rows, n); `starts` is true where a document begins.

        With a cache the ids go on where those of the call before ended, and nothing is compiled.
        """

        def eager(ids: Tensor, starts: Tensor) -> Tensor:
            answer: Tensor = self.model(ids, starts, self._dtype, last=last, cache=cache)
            return answer

        if not self._compiling or cache is not None:
            return eager(ids, starts)
        rows, length = ids.shape
        shape, now = (rows, length, last, torch.is_grad_enabled()), time.perf_counter()
        if self._before is not None:  # until now the caller was busy with what it asked before
            self._spent[self._before[0]] += now - self._before[1]
        self._before = shape, now
        if self._spent[shape] < COMPILE_SECONDS:
            return eager(ids, starts)
        if shape not in self._compiled:
            self._compiled[shape] = compiled_here(eager)
            # The functions of all shapes are one to PyTorch, which lets a function have eight graphs.
            allow_graphs(8 * len(self._compiled))
        try:
            return self._compiled[shape](ids, starts)
        except Exception as error:  # a broken compiler may fail in any way, and the model runs without one
            self._compiling = False
            text = f"compiling failed, so scoring goes on uncompiled: {first_line(error)}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            return eager(ids, starts)
