"""Atomic writes: a file appears complete or not at all."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from caddie.errors import UserError

_UNFINISHED = re.compile(r"\.caddie-(.*)-(\d+)-[0-9a-f]{16}\.tmp")
"""Name of an unfinished file: machine, process id and a random number."""
_OWN: set[Path] = set()
"""Unfinished files that `replacing` is writing in this process."""
_STAGED: dict[Path, Path] = {}
"""Folder to the folder in which this process makes the files for it."""
_ABANDONED_SECONDS, _ENDED_SECONDS = 3600.0, 60.0
"""Age at which an unfinished file is abandoned: in general, and if its process has ended."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` if the block succeeds and is removed if it fails.

    Raises `UserError` that names `path` if the system refuses to write (no space, no permission), and for a link to
    nothing, which would be replaced.
    """
    temporary = unfinished(path)
    try:
        if os.path.lexists(path) and not path.is_file():  # a rename would replace even a device such as /dev/null
            raise OSError(errno.EEXIST, "it exists and is not a regular file")
        _OWN.add(temporary)
        try:
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
            _OWN.discard(temporary)
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"cannot write {path}: {reason(error)}") from error


@contextmanager
def staged(folder: Path, staging: Path) -> Iterator[None]:
    """Let `replacing` make files of a folder in `staging`, a folder on the same disk, until they are whole.

    Once somebody has removed `staging`, this process can write nothing more to the folder by `replacing`.
    """
    key = folder.resolve()
    _STAGED[key] = staging
    try:
        yield
    finally:
        del _STAGED[key]


def remove_unfinished() -> None:
    """Remove the unfinished files of this process, which is about to end without unwinding."""
    for temporary in _OWN.copy():
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    """Write a value as JSON, complete or not at all; its folder is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n")


def unfinished(path: Path) -> Path:
    """Return a new hidden path beside `path`, or in its staging folder, for an unfinished file of this process.

    Removes those that killed processes have left there, which would fill the disk.
    """
    folder = _STAGED.get(path.parent.resolve(), path.parent) if _STAGED else path.parent
    for left in path.parent.glob(".caddie-*.tmp"):
        with suppress(OSError):  # its process may finish it meanwhile
            if (named := _UNFINISHED.fullmatch(left.name)) and _abandoned(left, named[1], int(named[2])):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    return folder / f".caddie-{platform.node()}-{os.getpid()}-{secrets.token_hex(8)}.tmp"


def _abandoned(left: Path, machine: str, process: int) -> bool:
    """True if it was not written to for long, or for a while if its process has ended.

    Containers may share a name and a disk but not process ids, so a missing process alone does not suffice.
    """
    import psutil

    may_run = machine != platform.node() or psutil.pid_exists(process)
    idle_seconds = time.time() - max(one.stat().st_mtime for one in (left, *left.rglob("*")))
    return idle_seconds > (_ABANDONED_SECONDS if may_run else _ENDED_SECONDS)


def read_file(path: Path) -> bytes:
    """Return the bytes of a regular file; `UserError` at once for anything else, such as a device or a pipe."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            return file.read()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({reason(error)}); name a file that you may read") from None


def reason(error: Exception) -> str:
    """Return the system's message, without error number and file name."""
    return (isinstance(error, OSError) and error.strerror) or str(error)
