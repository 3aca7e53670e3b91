"""What a CPU is given: threads by measurement, since a second on a busy core costs more than it brings; a compiler."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch

Choice = TypeVar("Choice")
T = TypeVar("T")
P = ParamSpec("P")


def thread_counts() -> list[int]:
    """The numbers of threads worth a try: one, and as many as PyTorch takes by itself."""
    return sorted({1, torch.get_num_threads()})


def quickest(choices: Sequence[Choice], work: Callable[[Choice], object], seconds: float = 0.5) -> Choice:
    """The choice whose best time at `work` is the least, each tried twice and for so many `seconds` in all.

    Choices take turns, so that a slow moment of the machine hits all alike. The first runs once before, to warm up. One
    that was three times as slow as the best is not run again: after two tries, or after one of more than `seconds`.
    """
    if len(choices) == 1:
        return choices[0]
    work(choices[0])
    least = dict.fromkeys(choices, math.inf)
    rounds, start = 0, time.perf_counter()
    while rounds < 2 or time.perf_counter() - start < seconds:
        best = min(least.values())
        for choice in choices:
            if least[choice] <= 3 * best or (rounds < 2 and least[choice] < seconds):
                begin = time.perf_counter()
                work(choice)
                least[choice] = min(least[choice], time.perf_counter() - begin)
        rounds += 1
    return min(choices, key=least.__getitem__)


COMPILE_SECONDS = 50.0
"""What the compiler takes for one shape of a step: 29 to 55 s of two cores for small models, `bench/compiling.py`."""
COMPILED_GAIN = 0.2
"""So many more steps a compiled run is taken to make, of those that it would make else: 0.17 to 0.43 (there)."""


def worth_compiling(seconds: float, shapes: int) -> bool:
    """Whether a run of that many seconds could win back the time of compiling so many shapes before its clock."""
    return COMPILED_GAIN * seconds > COMPILE_SECONDS * shapes


def allow_graphs(count: int) -> None:
    """Have PyTorch compile so many graphs of a function; beyond its limit it runs uncompiled, without an error."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, count)


def compiled_here(function: Callable[P, T]) -> Callable[P, T]:
    """The function by `torch.compile`, for fixed shapes; graphs kept from a CPU with other instructions are not taken.

    PyTorch's cache keeps C++ that walks along memory in steps of a vector, but not how long the vectors were. Where
    folders are shared by machines, or `ATEN_CPU_CAPABILITY` is set once, longer ones would write past the end.
    """
    from torch.compiler import config

    capability = torch.backends.cpu.get_cpu_capability()
    if not config.cache_key_tag.endswith(capability):
        config.cache_key_tag += capability
    return torch.compile(function, dynamic=False)
