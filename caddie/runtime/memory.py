"""Memory of the process: peak use, and reuse of freed memory."""

from __future__ import annotations

import ctypes
import resource
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Parameters of `mallopt` in glibc (man 3 mallopt)."""
_LARGEST_MMAP_THRESHOLD = 32 << 20
"""Maximum of glibc on 64 bits; larger blocks are mapped and unmapped one by one."""


def keep_freed_memory(most: int = 1 << 30) -> bool:
    """Keep up to `most` freed bytes in the process for reuse. Return True if the C library allows it (glibc does).

    Otherwise the memory of a large tensor goes back to the system and returns page by page, each zeroed. A training
    step on a CPU met 7,000 to 9,000 such pages, an eighth to a fifth of its time (`docs/performance.md`). New threads
    then share one heap, because glibc keeps 64 MiB at most of each heap of their own.
    """
    try:  # found in the running interpreter: the audit hook of `verify` reports libraries that are loaded
        mallopt = ctypes.pythonapi.mallopt
    except AttributeError:  # another C library
        return False
    settings = {_ARENA_MAX: 1, _MMAP_THRESHOLD: _LARGEST_MMAP_THRESHOLD, _TRIM_THRESHOLD: most}
    return all(mallopt(name, value) for name, value in settings.items())


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory so far: of this process's tensors on a GPU, otherwise resident memory."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
