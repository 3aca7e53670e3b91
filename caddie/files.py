"""Files that appear whole or not at all."""

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
"""Hidden names: of the machine, and of the process."""
_FORSAKEN_SECONDS, _GONE_SECONDS = 3600.0, 60.0
"""Nobody is at work on what was not written to for so long; and if its process is gone, for so long."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path that takes the place of `path` when the block ends well and is removed when it does not.

    What the system refuses (no space, no permission) is a `UserError` that names `path`.
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
    """Write a value as JSON, whole or not at all, in a folder that is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n")


def unfinished(path: Path) -> Path:
    """A new hidden path beside `path` for what this process has not finished.

    What was left there by a process that was killed is removed, which else would fill the disk.
    """
    for left in path.parent.glob(".caddie-*.tmp"):
        with suppress(OSError):  # whoever writes it may finish it meanwhile
            if (named := _UNFINISHED.fullmatch(left.name)) and _forsaken(left, named[1], int(named[2])):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    return path.parent / f".caddie-{platform.node()}-{os.getpid()}-{secrets.token_hex(8)}.tmp"


def _forsaken(left: Path, machine: str, process: int) -> bool:
    """Whether nobody is at work on it: it was not written to for long, or for a while by a process that is gone.

    Containers may share a name and a disk, but not their processes, so that one is gone does not suffice.
    """
    idle_seconds = time.time() - max(one.stat().st_mtime for one in (left, *left.rglob("*")))
    return idle_seconds > (_FORSAKEN_SECONDS if machine != platform.node() or _runs(process) else _GONE_SECONDS)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is there, and another user's
    return True


def reason(error: Exception) -> str:
    """What the system says, without number and file name."""
    return (isinstance(error, OSError) and error.strerror) or str(error)
