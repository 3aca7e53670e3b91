"""Asynchronous transfers between host and device: batches ahead of use, losses back."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from caddie.data.loaders import Batch, Stream, prefetched


class AsyncScalar:
    """Number that is copied to the host asynchronously, after all that was launched before it.

    On a CPU it is there at once.
    """

    def __init__(self, number: Tensor) -> None:
        self._number, self._event = number.detach(), None
        if number.is_cuda:
            self._number = torch.empty_like(self._number, device="cpu", pin_memory=True)
            self._number.copy_(number, non_blocking=True)
            # A thread that waits leaves its core to others.
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> float:
        """Wait for the number, and so for all that was launched before it, and return it."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._number)


@dataclass(frozen=True)
class DeviceBatch:
    """`Batch` on the device: inputs, and the targets one token later, both (rows, sequence length)."""

    inputs: Tensor
    targets: Tensor
    begun: int
    """Documents that begin in the inputs, counted on the host."""
    copied: torch.cuda.Event | None = None
    """End of the copy to the device, if one is needed."""


class Uploads:
    """Copies of batches to a device ahead of use, on a stream of their own; on a CPU nothing is copied."""

    def __init__(self, device: torch.device, bos: int) -> None:
        self._device, self._bos = device, bos
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def send(self, batch: Batch) -> DeviceBatch:
        """Start to copy a batch, from any thread; `take` it before using it."""
        inputs, targets = torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets)
        begun = batch.begun(self._bos)
        if self._stream is None:
            return DeviceBatch(inputs, targets, begun)
        # A new thread is on GPU 0; without the device, leaving a stream would open a context there for every process.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            inputs, targets = (t.pin_memory().to(self._device, non_blocking=True) for t in (inputs, targets))
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return DeviceBatch(inputs, targets, begun, event)

    def take(self, batch: DeviceBatch) -> DeviceBatch:
        """Return the batch for later launches of this thread; the device waits for the copy, this thread does not."""
        if batch.copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(batch.copied)
            for tensor in (batch.inputs, batch.targets):
                tensor.record_stream(stream)  # its memory is reused only after this batch was used
        return batch


@contextmanager
def prefetch(stream: Stream, indices: Iterable[int], device: torch.device, bos: int) -> Iterator[Iterator[DeviceBatch]]:
    """Yield the stream's micro-batches of these indices on the device; a thread makes and copies them, four ahead.

    `bos` is the id that begins every document.
    """
    uploads = Uploads(device, bos)
    with prefetched(lambda index: uploads.send(stream.micro_batch(index)), indices, 4) as uploading:
        yield map(uploads.take, uploading)
