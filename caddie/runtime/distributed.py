"""Data-parallel processes: launch, ranks, and the collectives that training needs.

Reads torchrun's environment variables, `CADDIE_LAUNCHED` and `CUDA_VISIBLE_DEVICES`. Elsewhere `lab/executors.py` reads
the GPUs and threads that a user allows, `data/hub.py` the place of the hub's token, and `run/run.py` `SHARES_CORES`.
"""

import ctypes
import hashlib
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from caddie.errors import UserError, first_line
from caddie.runtime.child_process import child_environment

SHARES_CORES = "CADDIE_SHARES_CORES"
"""Set if `OMP_NUM_THREADS` is a process's share, made by `launch`, and not the user's setting."""
_PARENT_DEATH_SIGNAL = 1  # of prctl(2)
_GRACE_SECONDS = 5.0
"""Time for the other processes to report an error of their own after one has failed."""
SAME_MISTAKE_SECONDS = 2.0
"""Time that the other processes wait for the first process to report a mistake that all have met."""
_BEAT_SECONDS, _SILENT_BEATS = 2.0, 15
"""Time between two heartbeats, and how many may be missing before a process counts as frozen or gone."""
_NCCL_LOST = ("ncclRemoteError", "communicator was aborted", "c10d key-value store")
"""Parts of NCCL's messages after another process has ended."""


class _Sum:
    """An all-reduce of several tensors, as one flat tensor for each dtype."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._pending: list[tuple[dist.Work, Tensor, list[Tensor]]] = []

    def begin(self) -> None:
        for dtype in dict.fromkeys(tensor.dtype for tensor in self.tensors):  # in the same order everywhere
            group = [tensor for tensor in self.tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in group])
            self._pending.append((dist.all_reduce(flat, async_op=True), flat, group))

    @torch.no_grad()
    def finish(self) -> None:
        for work, flat, group in self._pending:
            work.wait()
            parts = flat.split_with_sizes([tensor.numel() for tensor in group])
            torch._foreach_copy_(group, [part.view_as(one) for part, one in zip(parts, group, strict=True)])
        self._pending.clear()


@dataclass(frozen=True)
class Ranks:
    """This process's number among `world` processes, and its device."""

    rank: int = 0
    world: int = 1
    device: torch.device = torch.device("cpu")
    local_rank: int | None = None
    """Its number among the processes of its machine; None for one machine alone."""
    _together: list[_Sum] = field(default_factory=list, compare=False, repr=False)
    """Sums that wait to be exchanged as one, inside `together`."""

    @property
    def first(self) -> bool:
        """True for the process that writes and reports."""
        return self.rank == 0

    @property
    def started(self) -> int:
        """Processes that have started and joined; one where a run of several is only examined."""
        return self.world if dist.is_initialized() else 1

    @property
    def first_here(self) -> bool:
        """True for the first process of each machine."""
        return (self.rank if self.local_rank is None else self.local_rank) == 0

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all processes, in one exchange per dtype."""
        self.begin_sum(tensors)()

    def begin_sum(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Begin to replace each tensor by its sum over all processes. Every process must call the result, to wait."""
        if self.world == 1:
            return lambda: None
        one = self._together[-1] if self._together else _Sum()
        one.tensors += tensors
        if not self._together:
            one.begin()
        return one.finish

    @contextmanager
    def together(self) -> Iterator[None]:
        """Exchange all sums begun in the block at its end, as one per dtype: a small one is mostly start-up."""
        one = _Sum()
        self._together.append(one)
        try:
            yield
        finally:
            self._together.remove(one)
        one.begin()

    def share(self, count: int) -> slice:
        """Return this process's slice of `count` items; `count` is a multiple of `world`."""
        size = count // self.world
        return slice(self.rank * size, (self.rank + 1) * size)

    def begin_reduce_scatter(self, stack: Tensor) -> Callable[[], Tensor]:
        """Begin to sum `stack` (a multiple of `world`, ...) over all processes.

        Returns a function, which may be called again: it waits and returns this process's share. With gloo this costs
        as much as an all-reduce, with NCCL half.
        """
        if self.world == 1:
            return lambda: stack
        mine = torch.empty_like(stack[self.share(len(stack))])
        return _begin("reduce_scatter_single", "reduce_scatter_tensor", mine, stack)

    def begin_all_gather(self, mine: Tensor) -> Callable[[], Tensor]:
        """Begin to gather the shares of all processes, which have one shape.

        Returns a function, which may be called again: it waits and returns the shares stacked in rank order.
        """
        if self.world == 1:
            return lambda: mine
        stack = mine.new_empty((self.world * len(mine), *mine.shape[1:]))
        return _begin("all_gather_single", "all_gather_into_tensor", stack, mine.contiguous())

    def maximum(self, *values: float) -> list[float]:
        """Return the maximum of each value over all processes, so that all decide the same. Runs on the CPU."""
        if self.world == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        found: list[float] = tensor.tolist()
        return found

    def minimum(self, *values: float) -> list[float]:
        """Return the minimum of each value over all processes."""
        return [-value for value in self.maximum(*(-value for value in values))]

    def any(self, found: bool) -> bool:
        """Return True if something was found in one of the processes, so that all decide the same."""
        return bool(self.maximum(float(found))[0])

    def agree(self, facts: object) -> bool:
        """Return True if all processes have the same `facts`, by their representation."""
        number = int(hashlib.sha256(repr(facts).encode()).hexdigest()[:12], 16)
        most, least = self.maximum(number, -number)
        return most == -least

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Run the block in turns: the first process, then the first of each other machine, then all others.

        So what the block writes to disk is written once if machines share the disk, else once on each machine. After
        its block, a process waits until the first of each machine has had its turn.
        """
        before = 0 if self.first else 1 if self.first_here else 2
        for _ in range(before):
            self.wait()
        yield
        for _ in range(2 - before):
            self.wait()

    def wait(self) -> None:
        """Wait for all processes, on the CPU: GPUs stay idle, which they would not in NCCL's barrier."""
        self.maximum(0.0)


def _begin(name: str, older: str, output: Tensor, given: Tensor) -> Callable[[], Tensor]:
    """Begin a collective by its name, or its name before torch 2.13. The result waits for it and returns `output`."""
    work = (getattr(dist, name, None) or getattr(dist, older))(output, given, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return output

    return wait


def under_torchrun() -> bool:
    """True if this process was started as one of several."""
    return "WORLD_SIZE" in os.environ


def world_size(otherwise: int) -> int:
    """Return the number of processes started together, this one included; `otherwise` if WORLD_SIZE does not say."""
    with suppress(ValueError):
        return int(os.environ.get("WORLD_SIZE", otherwise))
    return otherwise


def is_first() -> bool:
    """True for the process that reports, also before it has joined the others and after."""
    return os.environ.get("RANK", "0") == "0"


def allowed_cores() -> set[int]:
    """Return the numbers of the cores that this process may run on; all of them where the system has no affinity."""
    allowed = getattr(os, "sched_getaffinity", None)
    return set(allowed(0) if allowed else range(os.cpu_count() or 1))


def local_device() -> torch.device:
    """Return the GPU of this process if there is one, else the CPU.

    Apple's GPU is for one process, and is taken only if the operations of a step run on it. Nothing was measured there.
    An empty `CUDA_VISIBLE_DEVICES`, or -1, hides it as it hides NVIDIA's.
    """
    if not torch.cuda.is_available():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        return torch.device("mps" if not (hidden or under_torchrun()) and _apple_gpu_works() else "cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


@cache
def _apple_gpu_works() -> bool:
    """True if there is an Apple GPU on which attention, its loss and their gradients run in float32."""
    if not torch.backends.mps.is_available():
        return False
    try:
        x = torch.randn(1, 2, 16, 8, device="mps", requires_grad=True)
        y = F.scaled_dot_product_attention(x, x, x, is_causal=True).flatten(0, 2)
        F.cross_entropy(y, torch.zeros(len(y), dtype=torch.int64, device="mps")).backward()  # type: ignore[no-untyped-call]
        torch._foreach_mul_([x.detach()], 0.5)
        return bool(x.grad is not None and x.grad.isfinite().all())
    except RuntimeError:  # `NotImplementedError` for an operation that PyTorch lacks there
        return False


@contextmanager
def join() -> Iterator[Ranks]:
    """Join the process group for the duration of the block; `UserError` if PyTorch cannot."""
    device = local_device()
    if not under_torchrun():
        yield Ranks(device=device)
        return
    try:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        raise UserError("RANK and WORLD_SIZE must both be whole numbers; start several processes with --gpus") from None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # The first process prepares, packs and scores while the others wait, which may take longer than any usual limit.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, rank=rank, world_size=world, timeout=timedelta(days=7))
    except (RuntimeError, ValueError) as error:
        raise UserError(f"process {rank} of {world} cannot join the others: {first_line(error)}") from error
    over = threading.Event()
    if world > 1:
        threading.Thread(target=_watch, args=(rank, world, over), daemon=True).start()
    together = False
    try:
        yield (ranks := Ranks(rank, world, device, int(os.environ.get("LOCAL_RANK", rank))))
        ranks.wait()
        together = True
    finally:
        over.set()
        if together or device.type != "cuda":  # NCCL waits here for the others and for all kernels, alone for ever
            dist.destroy_process_group()


def _watch(rank: int, world: int, over: threading.Event) -> None:
    """Send heartbeats to the other processes, and end this one if another is silent, until `over` is set.

    A process that is frozen, or whose machine is gone, closes no connection, so others would wait for it for ever.
    Missing heartbeats are counted only while this process runs, so a pause of the whole machine ends nobody.
    """
    heartbeats = {other: 0 for other in range(world) if other != rank}

    def exchange() -> None:
        with suppress(RuntimeError):  # the first process keeps the heartbeats of all
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
            while not over.wait(_BEAT_SECONDS):
                store.add(f"caddie/alive/{rank}", 1)
                heartbeats.update({other: store.add(f"caddie/alive/{other}", 0) for other in heartbeats})

    threading.Thread(target=exchange, daemon=True).start()  # it hangs if the first process is frozen
    before, missing = heartbeats.copy(), dict.fromkeys(heartbeats, 0)
    while max(missing.values()) < _SILENT_BEATS:
        if over.wait(_BEAT_SECONDS):
            return
        now = heartbeats.copy()
        missing = {other: missing[other] + 1 if now[other] == before[other] else 0 for other in now}
        before = now
    if over.wait(_GRACE_SECONDS):  # an exchange that failed for the same reason ends this process by itself
        return
    if sys.stderr is not None:
        silent, seconds = max(missing, key=lambda other: missing[other]), _BEAT_SECONDS * _SILENT_BEATS
        line = f"caddie: process {silent} of {world} has not answered for {seconds:.0f} s: it is frozen or gone\n"
        os.write(2, line.encode())
    os._exit(1)  # for the main thread waits where nothing else ends it


def lost_another(error: Exception) -> bool:
    """True if an exchange failed because another process has ended, which reports the reason itself."""
    if isinstance(error, dist.DistBackendError):  # any NCCL failure, also an old driver
        return any(text in str(error) for text in _NCCL_LOST)
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)  # gloo has no class for it, only its file name


def reported_elsewhere() -> bool:
    """True in a process of `launch`: `launch` reports a process that a signal ended; each reports its own errors."""
    return "CADDIE_LAUNCHED" in os.environ


def launch(world: int, arguments: Sequence[str]) -> int:
    """Run `python -m caddie ARGUMENTS` as `world` processes of this machine. Return the first failure's exit status.

    Only the first process keeps its standard output. If one fails, the others are killed; if a signal ended it, the
    signal is printed. On Linux they get SIGTERM if this process is killed. Raises `UserError` for more processes than
    GPUs.
    """
    if torch.cuda.is_available() and world > torch.cuda.device_count():
        raise UserError(f"--gpus {world} was asked for, and this machine has {torch.cuda.device_count()}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = child_environment()
    if "OMP_NUM_THREADS" not in shared:
        shared |= {"OMP_NUM_THREADS": str(max(1, len(allowed_cores()) // world)), SHARES_CORES: "1"}
    shared.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, min(32, len(allowed_cores()) // world))))
    shared.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no stack of C++ where another process has ended
    shared |= {"CADDIE_LAUNCHED": "1", "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    end_with_this = None
    if sys.platform == "linux":
        end_with_this = partial(ctypes.CDLL(None).prctl, _PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "caddie", *arguments],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=None if rank == 0 else subprocess.DEVNULL,
            start_new_session=True,  # so that Ctrl-C reaches each once, from here
            preexec_fn=end_with_this,
        )
        for rank in range(world)
    ]

    forwarded: list[int] = []

    def forward(number: int, frame: object) -> None:
        forwarded.append(number)
        for process in processes:
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        rank, status = _first_failure(processes)
        killed, status = status < 0, 128 - status if status < 0 else status  # a signal, as a shell reports it
        if killed or (rank and status > 128 and not forwarded):  # others than the first are silent when they stop
            print(f"caddie: process {rank} of {world} was ended by signal {status - 128}", file=sys.stderr)
        return status
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _first_failure(processes: Sequence[subprocess.Popen[bytes]]) -> tuple[int, int]:
    """Wait for all processes, or kill the others if one fails. Return rank and status of the cause, or zeros.

    A signal (negative status) counts as the cause first. A process that only lost another counts last: it ends with
    status 1, or with SIGABRT, by which NCCL ends it.
    """

    def failed() -> list[tuple[int, int]]:
        return [(rank, process.returncode) for rank, process in enumerate(processes) if process.poll()]

    deadline = math.inf
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        if failed():
            grace = 0.0 if processes[0].poll() == 2 else _GRACE_SECONDS  # a user's mistake, which it has reported
            deadline = min(deadline, time.monotonic() + grace)
        time.sleep(0.05)
    found = failed()
    for process in processes:
        process.kill()
    return min(found, key=lambda one: (one[1] in (1, -signal.SIGABRT), one[1] > 0), default=(0, 0))
