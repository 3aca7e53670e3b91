"""A pool of processes that encode and decode arrays; threads gain nothing, since the coder holds the GIL.

Each process answers jobs over its standard input, a socket, and ends when the socket closes, even if this process is
killed. They are plain subprocesses: `multiprocessing` runs a user's script twice, PyTorch's threads do not survive a
fork, and loky's processes outlive SIGKILL. Jobs that they cannot do, as with a user's own codec, run in this process.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import numpy as np

from caddie.config import coerce
from caddie.errors import UserError
from caddie.pack.coding.array_codec import Array, ArrayCodec, Shape
from caddie.pack.coding.smallest import decode
from caddie.runtime.child_process import child_environment

Result = TypeVar("Result")

_WORTH = 1 << 21
"""Least elements that other processes must take over to be worth starting: about half a second of coding."""
_TRIED = 1 << 18  # most elements read by all trials of settings on a sample of an array, eight trials
_LAYOUTS = 3  # layouts tried on the whole array
_LAUNCHER = "from caddie.pack.coding import process_pool; process_pool.serve()"


class EncodeJob(NamedTuple):
    """An array to encode, with the stream of a similar one if there is one."""

    array: Array
    like: bytes = b""

    @property
    def elements(self) -> int:
        """Approximate number of elements that coding reads, trials of settings included."""
        return self.array.size + (0 if self.like else min(8 * self.array.size, _TRIED + _LAYOUTS * self.array.size))


class DecodeJob(NamedTuple):
    """A stream to decode."""

    data: bytes
    dtype: np.dtype[Any]
    shape: Shape

    @property
    def elements(self) -> int:
        """Elements of the array."""
        return math.prod(self.shape)


class ProcessPool:
    """Encodes and decodes arrays in `processes` processes, or in this one if they are not worth starting.

    Results are bit-identical for any number of processes. Use it in a `with` statement.
    """

    def __init__(self, processes: int = 1) -> None:
        self.processes = processes
        self._started: list[subprocess.Popen[bytes]] = []
        self._idle: SimpleQueue[Connection] = SimpleQueue()

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._started:
            process.kill()
            process.wait()
        while not self._idle.empty():
            self._idle.get().close()
        self._started.clear()

    def encode(self, codec: ArrayCodec, arrays: Sequence[EncodeJob]) -> list[bytes]:
        """Return the streams of all arrays, in their order; errors are those of `codec.encode`."""

        def remote(process: Connection, job: EncodeJob) -> bytes:
            request = {"codec": codec.to_json(), "dtype": job.array.dtype.str, "shape": job.array.shape}
            return _request(process, request, job.array.tobytes(), job.like)

        return [*self._map(arrays, remote, lambda job: codec.encode(job.array, job.like))]

    def decode(self, streams: Sequence[DecodeJob]) -> Generator[Array]:
        """Yield the arrays of all streams, in their order; errors are those of `decode`."""

        def remote(process: Connection, job: DecodeJob) -> Array:
            data = _request(process, {"dtype": job.dtype.str, "shape": job.shape}, job.data)
            return np.frombuffer(bytearray(data), job.dtype).reshape(job.shape)

        return self._map(streams, remote, lambda job: decode(*job))

    def _map(
        self, jobs: Sequence[Any], remote: Callable[[Connection, Any], Result], local: Callable[[Any], Result]
    ) -> Generator[Result]:
        if not self._started:
            self._start([job.elements for job in jobs])
        if not self._started:
            yield from map(local, jobs)
            return

        def run(job: Any) -> Result:
            process = self._idle.get()
            try:
                return remote(process, job)
            except (OSError, EOFError):  # the process has ended
                return local(job)
            finally:
                self._idle.put(process)

        threads = ThreadPoolExecutor(self.processes)
        try:
            # Largest first, so that short jobs are left at the end.
            order = sorted(range(len(jobs)), key=lambda number: -jobs[number].elements)
            pending = {number: threads.submit(run, jobs[number]) for number in order}
            yield from (pending.pop(number).result() for number in range(len(jobs)))
        finally:
            threads.shutdown(cancel_futures=True)

    def _start(self, elements: list[int]) -> None:
        """Start the processes if they are worth it."""
        total = sum(elements)
        if total - max([*elements, total // self.processes]) < _WORTH:
            return
        null = subprocess.DEVNULL
        command = [sys.executable, "-c", _LAUNCHER]
        environment = {**child_environment(), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with suppress(OSError):
            for _ in range(self.processes):
                connection, far_end = Pipe()
                with far_end:
                    process = subprocess.Popen(
                        command, stdin=far_end.fileno(), stdout=null, stderr=null, env=environment
                    )
                self._started.append(process)
                self._idle.put(connection)


def _request(process: Connection, request: dict[str, Any], data: bytes, like: bytes = b"") -> bytes:
    """Return a process's answer to a job; `OSError` or `EOFError` if the process has ended or ends meanwhile."""
    for part in (json.dumps(request).encode(), data, like):
        process.send_bytes(part)
    error, result = process.recv_bytes(), process.recv_bytes()
    if error:
        raise UserError(error.decode())
    return result


def serve() -> None:
    """Answer one job after another until the socket is closed; this is the program of each process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends this process
    with suppress(EOFError, OSError), Connection(sys.stdin.fileno()) as parent:
        while True:
            request, data, like = json.loads(parent.recv_bytes()), parent.recv_bytes(), parent.recv_bytes()
            dtype, shape = np.dtype(request["dtype"]), tuple(request["shape"])
            # A codec that is not known here ends this process.
            codec = coerce(request["codec"], ArrayCodec, "codec") if "codec" in request else None
            error, result = "", b""
            try:
                if codec:
                    result = codec.encode(np.frombuffer(data, dtype).reshape(shape), like)
                else:
                    result = decode(data, dtype, shape).tobytes()
            except UserError as problem:
                error = str(problem)
            parent.send_bytes(error.encode())
            parent.send_bytes(result)
