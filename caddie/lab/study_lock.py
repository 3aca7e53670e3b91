"""Locks for work that only one process may do: the runs in a study's folder, or a search."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from caddie.errors import UserError


@contextmanager
def alone(lock: Path, otherwise: str) -> Iterator[None]:
    """Hold a lock; if another process has it, raise a `UserError` that says `otherwise`."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(lock, timeout=0):
            yield
    except Timeout:
        raise UserError(otherwise) from None


def driving(runs: Path) -> AbstractContextManager[None]:
    """Hold the lock of the one process that does the runs in a study's folder; `UserError` if another has it."""
    otherwise = f"another process is running a study named {runs.name}; wait for it, stop it, or run this one in "
    otherwise += "another working directory or under another name (another --out is not enough)"
    return alone(runs / ".lock", otherwise)
