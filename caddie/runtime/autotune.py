"""Choose thread count and compilation for a CPU.

Threads are chosen by measurement, because on a busy core a second thread costs more than it brings.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch

Choice = TypeVar("Choice")
T = TypeVar("T")
P = ParamSpec("P")


def thread_counts() -> list[int]:
    """Return the thread counts worth trying: one, and PyTorch's default."""
    return sorted({1, torch.get_num_threads()})


def quickest(choices: Sequence[Choice], work: Callable[[Choice], object], seconds: float = 0.5) -> Choice:
    """Return the choice with the lowest time for `work`, each tried at least twice and all for `seconds` in total.

    Choices take turns, so that a slow moment of the machine affects all of them. The first runs once before, to warm
    up. A choice three times slower than the best is dropped after two tries, or after one longer than `seconds`.
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
"""Compile time for one shape of a step: 29 to 55 s of two cores for small models, `bench/compiling.py`."""
COMPILED_GAIN = 0.2
"""Assumed gain in steps of a compiled run: 0.17 to 0.43 of the steps without, `bench/compiling.py`."""


def worth_compiling(seconds: float, shapes: int) -> bool:
    """True if a run of `seconds` gains more than the time to compile `shapes` shapes."""
    return COMPILED_GAIN * seconds > COMPILE_SECONDS * shapes


def allow_graphs(count: int) -> None:
    """Let PyTorch compile `count` graphs of a function; beyond its limit it silently runs uncompiled code."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, count)


def compiled_here(function: Callable[P, T]) -> Callable[P, T]:
    """Compile a function with `torch.compile` for fixed shapes, apart from code cached for other instruction sets.

    PyTorch's cache key lacks the vector width of its C++ code. If machines share the cache folder, or
    `ATEN_CPU_CAPABILITY` changes, code for longer vectors would write past the end.
    """
    from torch.compiler import config

    capability = torch.backends.cpu.get_cpu_capability()
    if not config.cache_key_tag.endswith(capability):
        config.cache_key_tag += capability
    return torch.compile(function, dynamic=False)
