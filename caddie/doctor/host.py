"""Processor, disks and environment of this machine, or of its container where that has less.

psutil reads most of it. This module adds the processor's name and the limits of containers.
"""

import getpass
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from caddie.runtime.distributed import allowed_cores
from caddie.runtime.memory import GROUPS, PROC, group_limits, system_text

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


def processor(proc: Path = PROC, groups: Path = GROUPS) -> Processor:
    """Return the CPU of this machine."""
    limits = group_limits(proc, groups, "cpu", ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    cores = min([len(allowed_cores()), *(quota / period for quota, period, _ in limits if quota and period)])
    text = system_text(proc / "cpuinfo")
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
    if named := variables.get("TORCHINDUCTOR_CACHE_DIR"):
        return Path(named)
    try:
        user = getpass.getuser()
    except (KeyError, ImportError, OSError):  # a container's user without a name
        user = f"uid_{os.getuid()}" if os.name == "posix" else "unknown_user"
    user = re.sub(r'[\\/:*?"<>|]', "_", user)
    return Path(tempfile.gettempdir()) / f"torchinductor_{user}"
