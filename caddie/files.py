"""Atomic writes: a file appears complete or not at all."""

import errno
import hashlib
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
from functools import cache
from pathlib import Path

from caddie.errors import UserError

_UNFINISHED = re.compile(r"\.caddie-(.+)-[0-9a-f]{16}\.tmp")
"""Name of an unfinished file: a process, as `process_name` names it, and a random number."""
_OWN: set[Path] = set()
"""Unfinished files that `replacing` is writing in this process."""
_STAGED: dict[Path, Path] = {}
"""Folder to its staging folder: there this process writes the files for it."""
_ABANDONED_SECONDS = 3600.0
"""Age at which an unfinished file counts as abandoned if its process cannot be looked up here."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` if the block succeeds and is removed if it fails.

    Raises `UserError` that names `path` if the system refuses to write (no space, no permission), or if `path` is no
    regular file, such as a broken link or a device: the rename would replace it.
    """
    temporary = unfinished(path)
    try:
        if os.path.lexists(path) and not path.is_file():  # a rename would replace even a device such as /dev/null
            raise OSError(errno.EEXIST, "it exists and is not a regular file")
        _OWN.add(temporary)
        try:
            yield temporary
            with temporary.open("r+b") as file:  # open for writing: Windows requires that for fsync
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
def making(folder: Path, replaces: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that becomes `folder` if the block succeeds and is removed if it fails.

    Raises `UserError` that names `folder` if the system refuses to write, or if it exists and `replaces` is false.
    """
    if os.path.lexists(folder) and not replaces:
        raise UserError(f"{folder} exists; name a new folder")
    partial, old = unfinished(folder), unfinished(folder)
    try:
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        _OWN.add(partial)
        try:
            partial.mkdir()
            yield partial
            if replaces and folder.exists():
                folder.rename(old)
            partial.rename(folder)
        finally:
            if not folder.exists() and old.exists():  # the block ended between the two renames
                old.rename(folder)
            for left in (partial, old):
                shutil.rmtree(left, ignore_errors=True)
            _OWN.discard(partial)
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise UserError(str(error).replace(str(partial), str(folder))) from None
        raise UserError(f"{folder}: cannot be written ({reason(error)}); name another folder") from None


@contextmanager
def staged(folder: Path, staging: Path) -> Iterator[None]:
    """Let `replacing` write files for `folder` in `staging`, on the same disk, and move them when they are complete.

    Once another process has removed `staging`, `replacing` can write nothing more to `folder`.
    """
    key = folder.resolve()
    _STAGED[key] = staging
    try:
        yield
    finally:
        del _STAGED[key]


def remove_unfinished() -> None:
    """Remove the unfinished files and folders of this process, which is about to end without unwinding."""
    for temporary in _OWN.copy():
        shutil.rmtree(temporary, ignore_errors=True) if temporary.is_dir() else temporary.unlink(missing_ok=True)


def write_file(path: Path, data: bytes) -> None:
    """Write a file, complete or not at all; `UserError` if the system refuses."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path, value: object) -> None:
    """Write a value as JSON, complete or not at all; its folder is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, (json.dumps(value, indent=1) + "\n").encode())


def unfinished(path: Path) -> Path:
    """Return a new hidden path beside `path`, or in its staging folder, for an unfinished file of this process.

    Removes unfinished files that killed processes left beside `path`: they would fill the disk.
    """
    folder = _STAGED.get(path.parent.resolve(), path.parent) if _STAGED else path.parent
    for left in path.parent.glob(".caddie-*.tmp"):
        with suppress(OSError):  # its process may finish it meanwhile
            if (named := _UNFINISHED.fullmatch(left.name)) and _abandoned(left, named[1]):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    return folder / f".caddie-{process_name(os.getpid())}-{secrets.token_hex(8)}.tmp"


def _abandoned(left: Path, process: str) -> bool:
    """True if the process of `left` has ended or, if unknown here, after `_ABANDONED_SECONDS` without a write."""
    numbers, _, life = process.rpartition(".")
    if numbers == _pid_namespace():
        return process != process_name(int(life.partition("-")[0]))
    return time.time() - max(one.stat().st_mtime for one in (left, *left.rglob("*"))) > _ABANDONED_SECONDS


def process_name(number: int) -> str:
    """Return a name that no other process ever has, whatever the clock says: PID namespace, PID and start time.

    The start time is 0 for a process that has ended.
    """
    import psutil

    try:  # in ticks since the system began: psutil adds the wall clock to them
        state, *fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        start = 0 if state == "Z" else int(fields[18])  # a container without an init keeps zombies
    except (OSError, ValueError, IndexError):
        start = round(psutil.Process(number).create_time()) if psutil.pid_exists(number) else 0
    return f"{_pid_namespace()}.{number}-{start}"


@cache
def _pid_namespace() -> str:
    """Return the PID namespace of this process (boot and inode), or the host's name where the system has neither.

    Containers may share a host name and a disk, but each counts its PIDs on its own.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"
    return platform.node()


def expanded(path: str | Path) -> Path:
    """Return a path with the home folder in place of `~` or `~USER`; an unknown `~USER` stays as it is."""
    return Path(os.path.expanduser(path))  # `Path.expanduser` raises RuntimeError for an unknown user


def check_utf8(path: Path) -> None:
    """Raise `UserError` for a path that is not UTF-8, which no JSON file can name."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(f"{path}: the name is not UTF-8; rename it") from None


def check_new_file(path: Path, option: str = "--out") -> None:
    """Raise `UserError` before any work if no new file can be made at `path`; `option` is the option that names it."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file with {option}")
    if os.path.lexists(path):
        raise UserError(f"{path} exists; name another file with {option} or remove it")
    if not path.absolute().parent.is_dir():
        raise UserError(f"no folder {path.parent}; make it, or name another file with {option}")
    check_writable(path.absolute().parent, option)


def check_new_folder(folder: Path, option: str = "--out") -> None:
    """Raise `UserError` if no new folder can be made at `folder`, which `option` names; its parents may be missing."""
    if os.path.lexists(folder):
        raise UserError(f"{folder} exists; name a new folder with {option}")
    above = next(place for place in folder.absolute().parents if os.path.lexists(place))
    if not above.is_dir():
        raise UserError(f"{above} is not a folder; name another with {option}")
    check_writable(above, option)


def check_writable(folder: Path, option: str = "--out") -> None:
    """Raise `UserError` if nothing can be written in a folder; `option` is the option that names another."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{folder} cannot be written to; name another place with {option}")


def regular_bytes(path: Path) -> bytes:
    """Return the bytes of a regular file; `OSError` at once for anything else, such as a device or a pipe."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


def open_regular(path: Path, *flags: str) -> int:
    """Return a descriptor of a regular file; `OSError` at once for anything else. `flags` name more `os.open` flags."""
    descriptor = os.open(path, open_flags("O_RDONLY", "O_NONBLOCK", "O_CLOEXEC", *flags))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def read_file(path: Path) -> bytes:
    """Return the bytes of a regular file; `UserError` at once for anything else."""
    try:
        return regular_bytes(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({reason(error)}); name a file that you may read") from None


def open_flags(*names: str) -> int:
    """Return flags of `os.open` by name, less those that this system lacks, and `O_BINARY`.

    With `O_BINARY` Windows leaves the bytes as they are.
    """
    return sum(getattr(os, name, 0) for name in (*names, "O_BINARY"))


def reason(error: Exception) -> str:
    """Return the system's message, without error number and file name."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def absolute(path: Path) -> Path:
    """Return an absolute path without `..`; only to remove a `..`, links in the folder's path are resolved.

    A sandbox may lack the folders on the way.
    """
    return path.parent.resolve() / path.name if ".." in path.parts else path.absolute()


def file_sha256(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
