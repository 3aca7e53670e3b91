"""Arrays coded side by side, by processes: threads gain nothing, since the coder holds Python's lock.

Each process reads jobs from its standard input and writes streams or arrays to its standard output, and ends when its
input does. They are started neither by `multiprocessing`, which would run a user's own script a second time, nor by a
fork, which PyTorch's threads would not survive. What a process cannot do, as with a codec of the user's own, or where
none can be started, is done here.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np

from caddie.config import coerce
from caddie.errors import UserError
from caddie.pack.coding.array_codec import Array, ArrayCodec, Shape
from caddie.pack.coding.smallest import decode

Result = TypeVar("Result")

_WORTH = 1 << 21
"""Elements which others would have to take over for it to be worth starting them: about half a second of coding."""
_TRIED = 1 << 18
"""Elements gone through at most to try settings, for an array unlike any other: eight times a trial's."""
_PACKAGES = Path(__file__).absolute().parent.parent.parent.parent
_LAUNCHER = "import sys; sys.path.append(sys.argv[1]); from caddie.pack.coding import process_pool as s; s.serve()"
_LENGTHS = struct.Struct("<QQQ")


class Plain(NamedTuple):
    """An array to encode, after the stream of one much like it, if there is one."""

    array: Array
    like: bytes = b""

    @property
    def elements(self) -> int:
        """How many will be gone through, about."""
        return self.array.size + (0 if self.like else min(8 * self.array.size, _TRIED))


class Coded(NamedTuple):
    """A stream to decode."""

    data: bytes
    dtype: np.dtype[Any]
    shape: Shape

    @property
    def elements(self) -> int:
        """How many will be gone through."""
        return int(np.prod(self.shape, dtype=np.int64))


class Coders:
    """Encodes and decodes arrays with so many processes, this one among them where they are not worth starting.

    What comes out is the same to the bit, however many there are. To be closed, as by `with`.
    """

    def __init__(self, processes: int = 1) -> None:
        self.processes = processes
        self._started: list[subprocess.Popen[bytes]] = []
        self._idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()

    def __enter__(self) -> Coders:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._started:
            process.kill()
            process.communicate()
        self._started.clear()

    def encode(self, codec: ArrayCodec, arrays: Sequence[Plain]) -> list[bytes]:
        """The streams of all arrays, in their order; errors are those of `codec`."""

        def ask(process: subprocess.Popen[bytes], job: Plain) -> bytes:
            kind = {"codec": codec.to_json(), "dtype": job.array.dtype.str, "shape": job.array.shape}
            return _ask(process, kind, job.array.tobytes(), job.like)

        return [*self._all(arrays, ask, lambda job: codec.encode(job.array, job.like))]

    def decode(self, streams: Sequence[Coded]) -> Generator[Array]:
        """The arrays of all streams, one after the other; errors are those of `decode`."""

        def ask(process: subprocess.Popen[bytes], job: Coded) -> Array:
            data = _ask(process, {"dtype": job.dtype.str, "shape": job.shape}, job.data)
            return np.frombuffer(bytearray(data), job.dtype).reshape(job.shape)

        return self._all(streams, ask, lambda job: decode(*job))

    def _all(
        self,
        jobs: Sequence[Any],
        ask: Callable[[subprocess.Popen[bytes], Any], Result],
        here: Callable[[Any], Result],
    ) -> Generator[Result]:
        if not self._worthwhile([job.elements for job in jobs]):
            yield from map(here, jobs)
            return

        def do(job: Any) -> Result:
            process = self._idle.get()
            try:
                return ask(process, job)
            except (OSError, EOFError):
                return here(job)
            finally:
                self._idle.put(process)

        pool = ThreadPoolExecutor(self.processes)
        try:
            # The largest first: what is left at the end is short.
            order = sorted(range(len(jobs)), key=lambda number: -jobs[number].elements)
            done = {number: pool.submit(do, jobs[number]) for number in order}
            for number in range(len(jobs)):
                yield done.pop(number).result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _worthwhile(self, elements: Iterable[int]) -> bool:
        """Whether processes are there, or were worth starting and are there now."""
        counts = [*elements]
        if self._started or self.processes < 2 or len(counts) < 2:
            return bool(self._started)
        if sum(counts) - max(*counts, sum(counts) // self.processes) < _WORTH:
            return False
        command = [sys.executable, "-P", "-c", _LAUNCHER, str(_PACKAGES)]
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # there are no matrices to multiply
        with suppress(OSError):
            for _ in range(self.processes):
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
                self._started.append(process)
                self._idle.put(process)
        return bool(self._started)


def _ask(process: subprocess.Popen[bytes], kind: dict[str, Any], data: bytes, like: bytes = b"") -> bytes:
    """What a process makes of a job; `OSError` or `EOFError` if it has ended or ends over it."""
    assert process.stdin is not None
    assert process.stdout is not None
    _send(process.stdin, json.dumps(kind).encode(), data, like)
    result, error, _ = _receive(process.stdout)
    if error:
        raise UserError(error.decode())
    return result


def _send(to: IO[bytes], *parts: bytes) -> None:
    to.write(_LENGTHS.pack(*map(len, parts)))
    for part in parts:
        to.write(part)
    to.flush()


def _receive(source: IO[bytes]) -> list[bytes]:
    lengths = _LENGTHS.unpack(_whole(source, _LENGTHS.size))
    return [_whole(source, length) for length in lengths]


def _whole(source: IO[bytes], length: int) -> bytes:
    data = source.read(length)
    if len(data) < length:
        raise EOFError
    return data


def serve() -> None:
    """What each process runs: one job after the other."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it was interrupted too, and ends it
    source, to = sys.stdin.buffer, sys.stdout.buffer
    with suppress(EOFError, BrokenPipeError):
        while True:
            kind, data, like = _receive(source)
            settings = json.loads(kind)
            dtype, shape = np.dtype(settings["dtype"]), tuple(settings["shape"])
            # A codec that is not known here is the end of this process.
            codec = coerce(settings["codec"], ArrayCodec, "codec") if "codec" in settings else None
            try:
                if codec:
                    result = codec.encode(np.frombuffer(data, dtype).reshape(shape), like)
                else:
                    result = decode(data, dtype, shape).tobytes()
            except UserError as error:
                _send(to, b"", str(error).encode(), b"")
            else:
                _send(to, result, b"", b"")
