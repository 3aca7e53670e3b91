"""Memory of the process: how much it took, and what tensors leave behind kept for the next, where that can be told."""

from __future__ import annotations

import ctypes
import resource
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Numbers of the settings of `mallopt` in glibc (man 3 mallopt)."""
_LARGEST_MMAP_THRESHOLD = 32 << 20
"""The most that glibc takes on 64 bits; larger blocks are mapped and given back one by one."""


def keep_freed_memory(most: int = 1 << 30) -> bool:
    """Have the process keep up to `most` bytes that were freed, and say whether it will: glibc alone can be told.

    Else the system takes the memory of a large tensor back when it is freed and hands it out again page by page, each
    wiped: a training step on a CPU that makes and drops the same tensors every time met 7,000 to 9,000 such pages, an
    eighth to a fifth of its time (`docs/performance.md`). From now on new threads share one heap, because of each of
    those that glibc makes for them it keeps 64 MiB at most.
    """
    try:  # found in the running interpreter: the audit hook of `verify` reports libraries that are loaded
        mallopt = ctypes.pythonapi.mallopt
    except AttributeError:  # another C library: nothing to be set, nothing lost
        return False
    asked = {_ARENA_MAX: 1, _MMAP_THRESHOLD: _LARGEST_MMAP_THRESHOLD, _TRIM_THRESHOLD: most}
    return all(mallopt(name, value) for name, value in asked.items())


def peak_bytes(device: torch.device) -> int:
    """Most memory that was taken so far: of a GPU by this process's tensors, else what was resident of the process."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
