"""Memory of the machine and of the process: what is free, peak use, and reuse of freed memory."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch

GIB = 1 << 30
PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Parameters of `mallopt` in glibc (man 3 mallopt)."""
MMAP_THRESHOLD = 32 << 20
"""Maximum of glibc on 64 bits; larger blocks are mapped and unmapped one by one."""


def keep_freed_memory() -> bool:
    """Keep up to 1 GiB of freed memory in the process for reuse. Return True if the C library allows it (glibc does).

    Otherwise the memory of a large tensor goes back to the system and returns page by page, each zeroed. A training
    step on a CPU met 7,000 to 9,000 such pages, an eighth to a fifth of its time (`docs/log.md`). New threads
    then share one heap, because glibc keeps at most 64 MiB of a thread's own heap.
    """
    try:  # found in the running interpreter: the audit hook of `verify` reports libraries that are loaded
        mallopt = ctypes.pythonapi.mallopt
    except AttributeError:  # another C library
        return False
    settings = {_ARENA_MAX: 1, _MMAP_THRESHOLD: MMAP_THRESHOLD, _TRIM_THRESHOLD: GIB}
    return all(mallopt(name, value) for name, value in settings.items())


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory so far: of this process's tensors on a GPU, otherwise resident memory."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        used = psutil.Process().memory_info()
        return int(getattr(used, "peak_wset", used.rss))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@dataclass(frozen=True)
class Memory:
    """Main memory, bytes."""

    total: int
    available: int


def memory(proc: Path = PROC, groups: Path = GROUPS) -> Memory:
    """Return the memory of this machine, or of its container where that has less."""
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    files = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for limit, used, folder in group_limits(proc, groups, "memory", *files):
        reclaimable = re.search(r"^inactive_file (\d+)$", system_text(folder / "memory.stat") or "", re.MULTILINE)
        used -= int(reclaimable[1]) if reclaimable else 0  # pages of files, which the system takes back
        total, available = min(total, limit), min(available, limit - used)
    return Memory(total, available)


def free_bytes(device: torch.device, processes: int = 1) -> int:
    """Return the bytes that `processes` like this one may use: the free ones and, on a CPU, those they already hold."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return memory().available + processes * int(psutil.Process().memory_info().rss)


def out_of_memory(error: BaseException) -> bool:
    """Return True if the system, or a GPU, refused memory; PyTorch has no class of its own for the former."""
    return isinstance(error, MemoryError) or "allocate" in str(error) or "out of memory" in str(error)


def system_text(path: Path) -> str | None:
    """Return the beginning of a system file, or None if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(1 << 20).decode("utf-8", "replace")
    except OSError:
        return None


def group_limits(
    proc: Path, groups: Path, controller: str, *layouts: tuple[str, ...]
) -> Iterator[tuple[int, int, Path]]:
    """Yield two numbers and their folder for the control group of this process and each group that contains it.

    A layout names the files that hold the two, in version 2 or in version 1. Groups without a limit yield nothing.
    """
    for line in (system_text(proc / "self" / "cgroup") or "").splitlines():
        version, _, rest = line.partition(":")
        controllers, _, place = rest.partition(":")
        if version != "0" and controller not in controllers.split(","):
            continue
        root = groups if version == "0" else groups / controller
        own = root / place.lstrip("/")
        for folder in (path for path in (own, *own.parents) if path.is_relative_to(root)):
            for names in layouts:
                text = " ".join(system_text(folder / name) or "" for name in names)
                if found := re.fullmatch(r"(\d+)\s+(\d+)\s*", text):
                    yield int(found[1]), int(found[2]), folder
