"""The work of a micro-batch recorded once as a CUDA graph and replayed: one launch instead of one for each kernel.

That pays where kernels are shorter than their launches, as in small models. A replay reads and writes the memory that
the recording met: so inputs are copied there, gradients are added up in memory of their own, and whatever else changes
over a run stands in tensors. Not yet measured on a GPU; `bench/gpu.py` times it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

Replay = Callable[[], object]
Recorder = Callable[[Callable[[], object]], Replay]
"""Takes down what the given work does, without any effect of it, and gives what does it again."""


def recorder(device: torch.device) -> Recorder | None:
    """The recorder of a GPU, or none on a CPU, which waits for each of its kernels anyway."""
    if device.type != "cuda":
        return None
    pool = torch.cuda.graph_pool_handle()  # one for all: no recording leaves anything in it that another may not use

    def record(work: Callable[[], object]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads go on copying batches, which is nothing to this one's recording.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                work()
        except Exception as error:  # that the recording could not be ended either says less than why
            raise error.__context__ or error from None
        return graph.replay

    return record


class _Recording(NamedTuple):
    held: tuple[Tensor, ...]
    """Where it reads what it is given."""
    reached: Sequence[nn.Parameter]
    """Parameters that get a gradient from it; which these are depends on the shape of the step."""
    replay: Replay


class Recordings:
    """Recorded work by key. It adds to the gradients of parameters and gives back nothing."""

    def __init__(self, parameters: Iterable[nn.Parameter], record: Recorder) -> None:
        self._parameters = list(parameters)
        self._record = record
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._recordings: dict[Hashable, _Recording] = {}

    def run(self, key: Hashable, given: tuple[Tensor, ...], work: Callable[..., None]) -> None:
        """Do `work(*given)`, whose tensors have the same shapes for the same key; replayed from the second time on.

        The first time it is done and then recorded: kernels have been compiled and tables made by then.
        """
        recording = self._recordings.get(key)
        if recording is None:
            work(*given)
            reached = [parameter for parameter in self._parameters if parameter.grad is not None]
            self._place(reached)
            held = tuple(tensor.clone() for tensor in given)
            self._recordings[key] = _Recording(held, reached, self._record(lambda: work(*held)))
            return
        self._place(recording.reached)
        for mine, tensor in zip(recording.held, given, strict=True):
            mine.copy_(tensor)
        recording.replay()

    def _place(self, parameters: Sequence[nn.Parameter]) -> None:
        """Have these gradients lie where recordings add to them; those that were forgotten begin at zero."""
        begun = []
        for parameter in parameters:
            if (place := self._gradients.get(parameter)) is None:
                place = self._gradients[parameter] = torch.zeros_like(parameter)
            if parameter.grad is None:
                begun.append(place)
            elif parameter.grad is not place:
                place.copy_(parameter.grad)
            parameter.grad = place
        if begun:
            torch._foreach_zero_(begun)
