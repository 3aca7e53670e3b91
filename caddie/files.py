"""Atomic writes: a file appears complete or not at all."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from caddie.errors import UserError

_UNFINISHED = re.compile(r"\.caddie-(.*)-(\d+)-[0-9a-f]{16}\.tmp")
"""Name of an unfinished file: machine, process id and a random number."""
_ABANDONED_SECONDS, _ENDED_SECONDS = 3600.0, 60.0
"""Age at which an unfinished file is abandoned: in general, and if its process has ended."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` if the block succeeds and is removed if it fails.

    Raises `UserError` that names `path` if the system refuses to write (no space, no permission).
    """
    temporary = unfinished(path)
    try:
        if path.exists() and not path.is_file():  # a rename would replace even a device such as /dev/null
            raise OSError(errno.EEXIST, "it exists and is not a regular file")
        try:
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"cannot write {path}: {reason(error)}") from error


def write_json(path: Path, value: object) -> None:
    """Write a value as JSON, complete or not at all; its folder is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n")


def unfinished(path: Path) -> Path:
    """Return a new hidden path beside `path` for an unfinished file of this process.

    Removes those that killed processes have left there, which would fill the disk.
    """
    for left in path.parent.glob(".caddie-*.tmp"):
        with suppress(OSError):  # its process may finish it meanwhile
            if (named := _UNFINISHED.fullmatch(left.name)) and _abandoned(left, named[1], int(named[2])):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    return path.parent / f".caddie-{platform.node()}-{os.getpid()}-{secrets.token_hex(8)}.tmp"


def _abandoned(left: Path, machine: str, process: int) -> bool:
    """True if it was not written to for long, or for a while if its process has ended.

    Containers may share a name and a disk but not process ids, so a missing process alone does not suffice.
    """
    import psutil

    may_run = machine != platform.node() or psutil.pid_exists(process)
    idle_seconds = time.time() - max(one.stat().st_mtime for one in (left, *left.rglob("*")))
    return idle_seconds > (_ABANDONED_SECONDS if may_run else _ENDED_SECONDS)


def reason(error: Exception) -> str:
    """Return the system's message, without error number and file name."""
    return (isinstance(error, OSError) and error.strerror) or str(error)
