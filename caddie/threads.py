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


def quickest(choices: Sequence[Choice], work: Callable[[Choice], object], repeats: int = 2) -> Choice:
    """The choice whose best time at `work` is the least.

    The first choice runs once more than the others, to warm up; a choice twice as slow as the best so far is not run
    again, so that a choice that happens to be terrible costs one run.
    """
    best, least = choices[0], math.inf
    if len(choices) > 1:
        work(choices[0])
        for choice in choices:
            for _ in range(max(1, repeats)):
                begin = time.perf_counter()
                work(choice)
                seconds = time.perf_counter() - begin
                if seconds < least:
                    best, least = choice, seconds
                elif seconds > 2 * least:
                    break
    return best


COMPILE_SECONDS = 60.0
"""What the compiler takes for one shape of a step: 30 to 60 s of one core for small models, 2026-11-21."""
COMPILED_GAIN = 0.1
"""The part of a step that compiled graphs may save beside the operations written by hand (`docs/performance.md`)."""


def worth_compiling(seconds: float, shapes: int) -> bool:
    """Whether a run of that many seconds could win back the time of compiling so many shapes."""
    return COMPILED_GAIN * seconds > COMPILE_SECONDS * shapes
