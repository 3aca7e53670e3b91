"""The lock of a run folder: one process at a time writes there, and one that lost the lock cannot.

The lock file names its holder and is locked by `flock`, so it is free again whenever the process ends. Each holder
writes into a hidden folder of its own and renames the finished file into place. A process that takes the run folder
over first deletes this hidden folder. A process that hung and resumes can therefore neither write nor rename anything.
No check precedes a write, so there is no race.
"""

import json
import os
import platform
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from caddie.errors import UserError
from caddie.files import open_flags, process_name, read_file, reason, staged

LOCK = ".lock"
_STAGING, _GONE = ".writing-", ".removed-"
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Holder:
    """A process that writes to a run folder, as its lock file names it."""

    host: str
    pid: int
    name: str
    """Name by `process_name`, which no other process has: PIDs are used again."""
    since: str
    """Time at which it took the lock."""

    @property
    def alive(self) -> bool | None:
        """True if the process still runs, None if it is of another machine."""
        import psutil

        if self.host != platform.node():
            return None
        try:
            return self.name == process_name(self.pid)
        except (psutil.Error, ValueError, OverflowError):  # a file may name any number
            return False


def this_process(pid: int | None = None) -> Holder:
    """Return this process, or another of this machine, as the holder of a lock from now on."""
    number = pid or os.getpid()
    return Holder(platform.node(), number, process_name(number), time.strftime("%Y-%m-%d %H:%M:%S"))


def read_holder(said: Mapping[str, Any]) -> Holder:
    """Return the holder that a file states; `ValueError`, `TypeError`, `KeyError` or `OverflowError` if it is none."""
    return Holder(str(said["host"])[:255], int(said["pid"]), str(said["name"])[:200], str(said["since"])[:40])


def holder(folder: Path) -> Holder | None:
    """Return the last process that took the lock of a run folder and has not given it back; None for none."""
    try:
        return read_holder(json.loads(read_file(folder / LOCK)[:4096]))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):  # `UserError`, a `ValueError`, for no file
        return None


def is_lock(name: str) -> bool:
    """True for the names of the files and folders by which a run folder is held."""
    return name == LOCK or name.startswith((_STAGING, _GONE))


@contextmanager
def locked(folder: Path, patience_seconds: float = 0.0) -> Iterator[None]:
    """Hold the lock of a run folder, which is made if it is missing, and remove what killed processes left there.

    With `patience_seconds`, wait that long for another holder to end, then take the lock from it: the caller has given
    it up. Without, a held lock is a `UserError` that names the holder.
    """
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _acquire(folder, patience_seconds)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({reason(error)}); name another folder") from None
    staging = folder / f"{_STAGING}{secrets.token_hex(8)}"
    try:
        for left in folder.glob(f"{_STAGING}*"):
            gone = left.with_name(f"{_GONE}{secrets.token_hex(8)}")
            left.rename(gone)  # at once, for its owner may be about to write there
        for gone in folder.glob(f"{_GONE}*"):
            shutil.rmtree(gone, ignore_errors=True)
        staging.mkdir()
        with staged(folder, staging):
            yield
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if _is(lock, folder / LOCK):
            with suppress(PermissionError):  # Windows removes no open file
                (folder / LOCK).unlink()
        os.close(lock)
        with suppress(OSError):  # unless something was written
            for place in made:
                place.rmdir()


def _acquire(folder: Path, patience_seconds: float) -> int:
    """Return the descriptor of the lock file, locked."""
    me = this_process()
    path, deadline, held = folder / LOCK, 0.0, None
    while True:
        lock = os.open(path, open_flags("O_RDWR", "O_CREAT", "O_CLOEXEC", "O_NOFOLLOW"), 0o666)
        try:
            _lock(lock)
        except BlockingIOError:
            if (inode := os.fstat(lock).st_ino) != held:  # another holder than at the last look
                held, deadline = inode, time.monotonic() + patience_seconds
            os.close(lock)
            if time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            elif patience_seconds:
                path.unlink(missing_ok=True)  # the holder keeps a lock on a file that has no path any more
            else:
                who = holder(folder)
                by = f"process {who.pid} on {who.host} since {who.since}" if who else "another process"
                what = f"{folder} is in use by {by}; wait for it, stop it or name another folder with --out"
                raise UserError(what) from None
            continue
        if not _is(lock, path):  # its holder removed the file meanwhile
            os.close(lock)
            continue
        with suppress(OSError):  # a full disk: it is locked all the same
            os.ftruncate(lock, 0)
            os.write(lock, json.dumps(asdict(me)).encode())
        return lock


def _lock(descriptor: int) -> None:
    """Lock an open file; `BlockingIOError` if another process holds it. Windows has no `flock`, and locks nothing."""
    with suppress(ImportError):
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is(descriptor: int, path: Path) -> bool:
    """True if a path still names an open file."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False
