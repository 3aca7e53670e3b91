"""Timing in turns: contenders work in blocks, one after the other, so that what disturbs a machine disturbs all alike.

A contender may live in a process of its own, which sleeps between its blocks; its memory is then its own too.
"""

import resource
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

import torch

from caddie.errors import UserError
from caddie.runtime.distributed import local_device

Lap = dict[str, float]
"""Seconds of one repetition by part; `whole` is their sum."""
WHOLE = "whole"
P = ParamSpec("P")
T = TypeVar("T")


class Contender(Protocol):
    """What takes its turn. `facts` are known once it is ready, all but `peak_bytes`, which grows."""

    facts: dict[str, Any]

    def block(self, seconds: float) -> list[Lap]:
        """Repetitions that fill about so many seconds, one at least."""

    def close(self) -> None:
        """Free what it holds."""


class Stopwatch:
    """Cuts a repetition into parts by marks: the clock on a CPU, events on a GPU, so that nothing waits inside."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.marks: list[tuple[str, Any]] = []

    def mark(self, part: str) -> None:
        """What follows belongs to `part`, until the next mark; the last mark of all is the end."""
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self.marks.append((part, event))
        else:
            self.marks.append((part, time.perf_counter()))

    def laps(self, first: str) -> list[Lap]:
        """The repetitions so far, each begun by the part `first`; the marks are forgotten."""
        if self.on_gpu:
            torch.cuda.synchronize()
        laps: list[Lap] = []
        for (part, begin), (_, end) in pairwise(self.marks):
            seconds = begin.elapsed_time(end) / 1e3 if self.on_gpu else end - begin
            if part == first:
                laps.append({WHOLE: 0.0})
            laps[-1][part] = laps[-1].get(part, 0.0) + seconds
            laps[-1][WHOLE] += seconds
        self.marks.clear()
        return laps


class Repeated(ABC):
    """A contender that does the same again and again; `once` marks its parts on the watch, beginning with `first`."""

    first = "forward"

    def __init__(self, threads: int | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.device = local_device()
        self.watch = Stopwatch(self.device)
        self.facts: dict[str, Any] = {}
        self._pace: float | None = None

    @abstractmethod
    def once(self) -> None:
        """One repetition."""

    def block(self, seconds: float) -> list[Lap]:
        """As many repetitions as fit by the pace of the block before; a GPU is waited for at the end alone."""
        if self._pace is None:  # to warm up, and to know how many fit
            self._pace = statistics.median(lap[WHOLE] for lap in self._laps(2))
        laps = self._laps(max(1, round(seconds / self._pace)))
        self._pace = max(1e-6, statistics.median(lap[WHOLE] for lap in laps))
        self.facts["peak_bytes"] = peak_bytes(self.device)
        return laps

    def _laps(self, count: int) -> list[Lap]:
        for _ in range(count):
            self.once()
        self.watch.mark("end")
        return self.watch.laps(self.first)

    def close(self) -> None:  # noqa: B027, most hold nothing
        """Free what it holds."""


class Apart:
    """A contender made by `make(*given)` in a process of its own; its mistakes are raised here."""

    def __init__(self, make: Callable[P, Contender], *given: P.args, **named: P.kwargs) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        self.facts: dict[str, Any] = self._answer(_make, make, *given, **named)

    def block(self, seconds: float) -> list[Lap]:
        """A block in the other process."""
        laps, self.facts = self._answer(_block, seconds)
        return laps

    def close(self) -> None:
        """End the process."""
        self._pool.shutdown()

    def _answer(self, function: Callable[..., T], *given: Any, **named: Any) -> T:
        try:
            return _result(self._pool.submit(function, *given, **named))
        except Exception:
            self.close()
            raise


_HERE: list[Contender] = []
"""In a process of its own: the contender."""


def _make(make: Callable[..., Contender], *given: Any, **named: Any) -> dict[str, Any]:
    _HERE.append(make(*given, **named))
    return _HERE[0].facts


def _block(seconds: float) -> tuple[list[Lap], dict[str, Any]]:
    laps = _HERE[0].block(seconds)
    return laps, _HERE[0].facts


def apart(function: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
    """What the function gives in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return _result(pool.submit(function, *given, **named))


def _result(job: Future[T]) -> T:
    try:
        return job.result()
    except BrokenProcessPool:
        raise UserError("the process that was measured has ended, as it does when memory is short") from None


def in_turns(contenders: Sequence[Contender], seconds: float, rounds: int) -> list[list[list[Lap]]]:
    """For each contender its laps in each round; each has about `seconds` in all, after a round that does not count."""
    for contender in contenders:
        contender.block(0.0)
    found: list[list[list[Lap]]] = [[] for _ in contenders]
    for _ in range(rounds):
        for contender, laps in zip(contenders, found, strict=True):
            laps.append(contender.block(seconds / rounds))
    return found


def medians(rounds: Sequence[Sequence[Lap]]) -> Lap:
    """The median of each part over all laps."""
    laps = [lap for laps in rounds for lap in laps]
    return {part: statistics.median(lap.get(part, 0.0) for lap in laps) for part in laps[0]}


def ratio(ours: Sequence[Sequence[Lap]], theirs: Sequence[Sequence[Lap]]) -> float:
    """How many times longer they take: the median over the rounds, in each of which both had their turn."""
    pairs = zip(ours, theirs, strict=True)
    return statistics.median(medians([b])[WHOLE] / medians([a])[WHOLE] for a, b in pairs)


def peak_bytes(device: torch.device) -> int | None:
    """Most memory that was taken so far: of the GPU by its tensors, else what was resident of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    # What getrusage tells counts the process that this one was forked from; the system's own page does not.
    return resident_peak("self") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_peak(process: int | str) -> int | None:
    """Most bytes that were resident of a process, where the system tells (Linux)."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)
