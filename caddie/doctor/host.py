"""What this machine is: processor, memory, disks and the environment; None for what the system does not tell.

Where a container has less than the machine, what counts is its own: control groups of both versions are read.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from caddie.doctor.asking import output

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
SPEEDUPS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
"""Flags of processors that decide how fast matrix products and bfloat16 are; of x86, then of ARM."""
NETWORK_DISKS = re.compile(
    r"nfs|cifs|smb|lustre|beegfs|ceph|gluster|gpfs|9p$|afs|wekafs|fuse(?!ctl|blk|\.lxcfs|\..*overlay)"
)
"""Kinds of file systems that another machine answers for; cloud providers mount theirs through FUSE."""


@dataclass(frozen=True)
class Processor:
    """The CPU, as far as this process may use it."""

    name: str | None
    cores: float
    """Those that this process may run on, or the time of so many that its container is given."""
    speedups: tuple[str, ...] | None
    """Those of `SPEEDUPS` that it has."""


def processor(proc: Path = PROC, groups: Path = GROUPS) -> Processor:
    """The CPU of this machine."""
    allowed: float = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quotas = [int(most) / int(period) for most, period in _cpu_limits(proc, groups) if int(most) > 0 < int(period)]
    text = _text(proc / "cpuinfo")
    if text is None:
        brand = output(["sysctl", "-n", "machdep.cpu.brand_string"], 5.0) if sys.platform == "darwin" else ""
        return Processor(brand.strip() or platform.processor() or None, min([allowed, *quotas]), None)
    name = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.*\S)", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)", text, re.MULTILINE)
    known = set(flags[1].split()) if flags else set()
    return Processor(
        name[1] if name else platform.machine() or None,
        min([allowed, *quotas]),
        tuple(flag for flag in SPEEDUPS if flag in known) if flags else None,
    )


@dataclass(frozen=True)
class Memory:
    """Main memory, bytes."""

    total: int | None
    available: int | None


def memory(proc: Path = PROC, groups: Path = GROUPS) -> Memory:
    """Memory of this machine, or of its container where that has less."""
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB", _text(proc / "meminfo") or "", re.MULTILINE))
    total, available = (1024 * int(found[name]) if name in found else None for name in ("MemTotal", "MemAvailable"))
    if total is None and sys.platform == "darwin":
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for most, used in _memory_limits(proc, groups):
        if total is not None and int(most) < total:
            total, left = int(most), int(most) - int(used)
            available = left if available is None else min(left, available)
    return Memory(total, available)


@dataclass(frozen=True)
class Disk:
    """The disk that a folder lies on, or would lie on."""

    folder: str
    free_bytes: int
    kind: str | None
    """Of its file system, as `ext4` or `nfs4`."""

    @property
    def network(self) -> bool:
        """Whether another machine answers for it."""
        return self.kind is not None and NETWORK_DISKS.match(self.kind) is not None


def disk(folder: Path, proc: Path = PROC) -> Disk:
    """The disk of a folder; of the nearest one above it where it does not exist yet."""
    real = Path(os.path.realpath(folder))
    there = next(path for path in (real, *real.parents) if path.exists())
    best, kind = -1, None
    for line in (_text(proc / "self" / "mounts") or "").splitlines():
        parts = line.split(" ")
        if len(parts) < 3:
            continue
        place = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), parts[1])
        if len(place) >= best and (there == Path(place) or Path(place) in there.parents):
            best, kind = len(place), parts[2]  # of two mounts at one place the later hides the former
    return Disk(str(folder), shutil.disk_usage(there).free, kind)


def environment() -> dict[str, str]:
    """The environment, to be looked at by the doctor; it decides nothing in caddie."""
    return dict(os.environ)


def compile_cache(variables: Mapping[str, str]) -> Path:
    """Where PyTorch keeps what it compiled."""
    named = variables.get("TORCHINDUCTOR_CACHE_DIR")
    user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    return Path(named) if named else Path(tempfile.gettempdir()) / f"torchinductor_{user}"


def _text(path: Path) -> str | None:
    """The beginning of a file of the system, or None where there is none."""
    try:
        with path.open("rb") as file:
            return file.read(1 << 20).decode("utf-8", "replace")
    except OSError:
        return None


def _own_groups(proc: Path, groups: Path, controller: str) -> Iterator[Path]:
    """Folders that may limit this process: its control group and those around it, of version 2, then of version 1."""
    for line in (_text(proc / "self" / "cgroup") or "").splitlines():
        number, _, place = line.partition(":")
        names, _, place = place.partition(":")
        if number == "0" or controller in names.split(","):
            root = groups if number == "0" else groups / controller
            own = root / place.lstrip("/")
            yield from (path for path in (own, *own.parents) if path == root or root in path.parents)


def _cpu_limits(proc: Path, groups: Path) -> Iterator[tuple[str, str]]:
    for folder in _own_groups(proc, groups, "cpu"):
        if found := re.fullmatch(r"(\d+) (\d+)\s*", _text(folder / "cpu.max") or ""):
            yield found[1], found[2]
        quota, period = ((_text(folder / f"cpu.cfs_{name}_us") or "").strip() for name in ("quota", "period"))
        if quota.isdigit() and period.isdigit():
            yield quota, period


def _memory_limits(proc: Path, groups: Path) -> Iterator[tuple[str, str]]:
    for folder in _own_groups(proc, groups, "memory"):
        for limit, usage in (("max", "current"), ("limit_in_bytes", "usage_in_bytes")):
            most, used = ((_text(folder / f"memory.{name}") or "").strip() for name in (limit, usage))
            if most.isdigit() and used.isdigit():
                yield most, used
