"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from caddie.errors import UserError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path that takes the place of `path` when the block ends well and is removed when it does not.

    What the system refuses (no space, no permission) is a `UserError` that names `path`.
    """
    temporary = path.parent / f".{secrets.token_hex(8)}.tmp"
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


def reason(error: Exception) -> str:
    """What the system says, without number and file name."""
    return (isinstance(error, OSError) and error.strerror) or str(error)
