"""Between the host and a device that works on its own, without either waiting for the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from caddie.data.loaders import Batch, Prefetch, Stream


class AsyncScalar:
    """A number that the device will have computed. Its copy to the host is behind all that was launched before it.

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
        """The number, and with it the end of all that was launched before it."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._number)


@dataclass(frozen=True)
class DeviceBatch:
    """A `Batch` on the device: inputs, and the targets one token later, both (rows, sequence length)."""

    inputs: Tensor
    targets: Tensor
    begun: int
    """Documents that begin in the inputs, counted on the host."""


class Sent(NamedTuple):
    """A batch on its way, and what tells that it has come."""

    batch: DeviceBatch
    event: torch.cuda.Event | None


class Uploads:
    """Brings batches to a device ahead of their use, on a stream of their own; on a CPU they are where they are."""

    def __init__(self, device: torch.device, bos: int) -> None:
        self._device, self._bos = device, bos
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def send(self, batch: Batch) -> Sent:
        """Begin to copy a batch, from any thread."""
        inputs, targets = torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets)
        begun = batch.begun(self._bos)
        if self._stream is None:
            return Sent(DeviceBatch(inputs, targets, begun), None)
        with torch.cuda.stream(self._stream):  # which is this thread's alone
            inputs, targets = (t.pin_memory().to(self._device, non_blocking=True) for t in (inputs, targets))
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return Sent(DeviceBatch(inputs, targets, begun), event)

    def take(self, sent: Sent) -> DeviceBatch:
        """The batch, for what is launched from now on by this thread; the device waits for it, this thread does not."""
        if sent.event is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(sent.event)
            for tensor in (sent.batch.inputs, sent.batch.targets):
                tensor.record_stream(stream)  # its memory is not given to another batch before this one was used
        return sent.batch


@contextmanager
def prefetch(
    stream: Stream, indices: Iterable[int], device: torch.device, bos: int, ready: int = 4
) -> Iterator[Iterator[DeviceBatch]]:
    """The stream's micro-batches of these indices, on the device, made and sent by a thread `ready` ahead of use.

    `bos` is the id that begins every document.
    """
    uploads = Uploads(device, bos)
    with Prefetch(lambda index: uploads.send(stream.micro_batch(index)), indices, ready) as sent:
        yield map(uploads.take, sent)
