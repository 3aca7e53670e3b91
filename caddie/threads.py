"""What a CPU is given: threads by measurement, since a second on a busy core costs more than it brings; a compiler."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Choice = TypeVar("Choice")


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


COMPILE_SECONDS = 60.0
"""What the compiler takes for one shape of a step: 30 to 60 s of one core for small models, 2026-11-21."""
COMPILED_GAIN = 0.1
"""The part of a step that compiled graphs may save beside the operations written by hand (`docs/performance.md`)."""


def worth_compiling(seconds: float, shapes: int) -> bool:
    """Whether a run of that many seconds could win back the time of compiling so many shapes."""
    return COMPILED_GAIN * seconds > COMPILE_SECONDS * shapes
