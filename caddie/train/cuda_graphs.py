"""CUDA graphs: the work of a micro-batch is recorded once and replayed by one launch instead of one for each kernel.

That pays if kernels are shorter than their launches, as in small models. A replay reads and writes the memory of the
recording. So inputs are copied there, gradients accumulate in fixed memory, and all other numbers that change over a
run are tensors. Not yet measured on a GPU; `bench/gpu.py` times it.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence

import torch
from torch import Tensor, nn

Replay = Callable[[], object]
Recorder = Callable[[Callable[[], object]], Replay]
"""Function that records work without doing it, and returns the function that replays it."""


def recorder(device: torch.device) -> Recorder | None:
    """Return the recorder of a GPU, or None on a CPU, which has no launches to save."""
    if device.type != "cuda":
        return None
    pool = torch.cuda.graph_pool_handle()  # shared: no recording keeps anything in it

    def record(work: Callable[[], object]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads go on copying batches, outside of the recording.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                work()
        except Exception as error:  # the error of ending the recording says less than its cause
            raise error.__context__ or error from None
        return graph.replay

    return record


class Recordings:
    """Recordings by key, of work that adds to the gradients of parameters and returns nothing."""

    def __init__(self, parameters: Iterable[nn.Parameter], record: Recorder) -> None:
        self._parameters = list(parameters)
        self._record = record
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._recordings: dict[Hashable, tuple[tuple[Tensor, ...], list[nn.Parameter], Replay]] = {}
        """Tensors that a replay reads, the parameters that get a gradient from it, and the replay."""

    def __len__(self) -> int:
        return len(self._recordings)

    def run(self, key: Hashable, inputs: tuple[Tensor, ...], work: Callable[..., None]) -> None:
        """Do `work(*inputs)`, replayed from the second call of a key on; the shapes of a key's inputs are fixed.

        The first call does the work and then records it: kernels have been compiled and tables made by then.
        """
        if key not in self._recordings:
            work(*inputs)
            reached = [parameter for parameter in self._parameters if parameter.grad is not None]
            self._place(reached)
            fixed = tuple(tensor.clone() for tensor in inputs)
            self._recordings[key] = fixed, reached, self._record(lambda: work(*fixed))
            return
        fixed, reached, replay = self._recordings[key]
        self._place(reached)
        for place, tensor in zip(fixed, inputs, strict=True):
            place.copy_(tensor)
        replay()

    def _place(self, parameters: Sequence[nn.Parameter]) -> None:
        """Move these gradients to the memory that recordings add to; gradients that are None begin at zero."""
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
