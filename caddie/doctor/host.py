"""Processor, memory, disks and environment of this machine, or of its container where that has less.

psutil reads the machine, this module what psutil does not report: the processor's name and the limits of containers.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
"""Processor flags that decide the speed of matrix products and bfloat16: first those of x86, then those of ARM."""
NETWORK_DISKS = re.compile(
    r"nfs|cifs|smb|lustre|beegfs|ceph|gluster|gpfs|9p$|afs|wekafs|fuse(?!ctl|blk|\.lxcfs|\..*overlay)"
)
"""File systems that another machine serves; cloud providers mount theirs through FUSE."""


@dataclass(frozen=True)
class Processor:
    """The CPU, as far as this process may use it."""

    name: str | None
    cores: float
    """Cores that this process may run on, or the CPU time that its container gets, in cores."""
    instruction_sets: tuple[str, ...] | None
    """Its `INSTRUCTION_SETS`; None if unknown."""


def allowed_cores() -> set[int]:
    """Return the numbers of the cores that this process may run on."""
    if sys.platform == "linux":  # psutil has no affinity on macOS
        return set(psutil.Process().cpu_affinity())
    return set(range(psutil.cpu_count() or 1))


def processor(proc: Path = PROC, groups: Path = GROUPS) -> Processor:
    """Return the CPU of this machine."""
    limits = _limits(proc, groups, "cpu", ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    cores = min([len(allowed_cores()), *(quota / period for quota, period in limits if quota and period)])
    text = _read(proc / "cpuinfo")
    if text is None:
        brand = ""
        if sys.platform == "darwin":
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            brand = subprocess.run(command, capture_output=True, text=True, timeout=5.0).stdout.strip()
        return Processor(brand or platform.processor() or None, cores, None)
    name = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.*\S)", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)", text, re.MULTILINE)
    sets = tuple(flag for flag in INSTRUCTION_SETS if flag in flags[1].split()) if flags else None
    return Processor(name[1] if name else platform.machine() or None, cores, sets)


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
    for limit, used in _limits(proc, groups, "memory", *files):
        if limit < total:
            total, available = limit, min(available, limit - used)
    return Memory(total, available)


@dataclass(frozen=True)
class Disk:
    """The disk that a folder is on, or would be on."""

    folder: str
    free_bytes: int
    kind: str | None
    """File system, such as `ext4` or `nfs4`."""

    @property
    def network(self) -> bool:
        """True if another machine serves it."""
        return self.kind is not None and NETWORK_DISKS.match(self.kind) is not None


def disk(folder: Path) -> Disk:
    """Return the disk of a folder, or of its nearest parent that exists."""
    real = Path(os.path.realpath(folder))
    existing = next(path for path in (real, *real.parents) if path.exists())
    mounts = [mount for mount in psutil.disk_partitions(all=True) if existing.is_relative_to(mount.mountpoint)]
    # Of two mounts at one place the later hides the former.
    innermost = max(reversed(mounts), key=lambda mount: len(mount.mountpoint), default=None)
    return Disk(str(folder), psutil.disk_usage(str(existing)).free, innermost and innermost.fstype)


def environment() -> dict[str, str]:
    """Return the environment variables for the doctor to check; they decide nothing in caddie."""
    return dict(os.environ)


def compile_cache(variables: Mapping[str, str]) -> Path:
    """Return the folder where PyTorch keeps compiled code."""
    named = variables.get("TORCHINDUCTOR_CACHE_DIR")
    user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    return Path(named) if named else Path(tempfile.gettempdir()) / f"torchinductor_{user}"


def _read(path: Path) -> str | None:
    """Return the beginning of a system file, or None if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(1 << 20).decode("utf-8", "replace")
    except OSError:
        return None


def _limits(proc: Path, groups: Path, controller: str, *layouts: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Yield pairs of numbers from the control group of this process and all around it.

    A layout names the files that hold such a pair, in version 2 and in version 1. Groups without a limit yield nothing.
    """
    for line in (_read(proc / "self" / "cgroup") or "").splitlines():
        version, _, rest = line.partition(":")
        controllers, _, place = rest.partition(":")
        if version != "0" and controller not in controllers.split(","):
            continue
        root = groups if version == "0" else groups / controller
        own = root / place.lstrip("/")
        for folder in (path for path in (own, *own.parents) if path.is_relative_to(root)):
            for names in layouts:
                text = " ".join(_read(folder / name) or "" for name in names)
                if found := re.fullmatch(r"(\d+)\s+(\d+)\s*", text):
                    yield int(found[1]), int(found[2])
