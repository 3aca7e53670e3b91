"""Record what this process opens, lists, loads and starts, by Python's audit events (PEP 578)."""

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from caddie.verify.sandbox import runtime_paths


@contextmanager
def watch_reads(allowed: Iterable[Path] = ()) -> Iterator[list[str]]:
    """Record in a list of phrases what this process uses in the block beyond `allowed` and Python's own files.

    `allowed` are files, or folders with their contents. Python's own files are those that the sandbox holds and
    this process's entries in /proc. Folders of `sys.path` may be listed, and entries of `sys.path` that do not exist
    may be opened for reading. Other threads are recorded as well.

    Native code may open files without an audit event (safetensors, SentencePiece, `torch.from_file`), and further
    reads of an open file raise none. An empty list is evidence, not proof; the proof is `caddie.verify.sandbox`.
    """
    with suppress(FileNotFoundError):
        tempfile.gettempdir()  # opens files once; else PyTorch's first optimizer would in the block
    own = [*runtime_paths(), "/proc/self", *map(str, allowed)]
    watch = _Watch(tuple(map(os.path.realpath, own)), [])
    watches = _watches()
    watches.append(watch)
    try:
        yield watch.touched
    finally:
        watches.remove(watch)


_FILES = {
    "open": "opened",
    "mmap.__new__": "mapped",
    "os.listdir": "listed",
    "os.scandir": "listed",
    "import": "imported",
    "ctypes.dlopen": "loaded",
    "sqlite3.connect": "opened",
}
"""Events whose argument is a file or a folder: a path, or the number of an open file."""
_DESCRIPTORS = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"  # the sandbox has no /dev/fd
_PROCESSES = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty"}


@dataclass(frozen=True, eq=False)
class _Watch:
    allowed: tuple[str, ...]
    touched: list[str]

    def see(self, event: str, arguments: tuple[Any, ...]) -> None:
        phrase = None
        if event in _FILES:
            phrase = self._file(event, arguments)
        elif event in _PROCESSES:
            phrase = " ".join(["started a process:", event, *map(str, arguments[:1])])
        elif event.startswith("socket.") and event != "socket.gethostname":
            named = [str(argument) for argument in arguments if isinstance(argument, (str, bytes, tuple))]
            phrase = " ".join(["used the network:", event, *named[:1]])
        if phrase and phrase not in self.touched:
            self.touched.append(phrase)

    def _file(self, event: str, arguments: tuple[Any, ...]) -> str | None:
        named = arguments[1 if event == "import" else 0]
        if event == "ctypes.dlopen" and "/" not in os.fsdecode(named or ""):
            return f"loaded {named or 'the C library'} through ctypes"  # the linker searches its own path for it
        if named == -1 or (event == "import" and named is None):  # memory without a file; a module that is not native
            return None
        path = os.path.realpath(f"{_DESCRIPTORS}/{named}" if isinstance(named, int) else os.fsdecode(named or "."))
        own = any(path == one or path.startswith(one + "/") for one in self.allowed)
        # Python opens a `sys.path` entry that is no folder as an archive; an editable install's entry does not exist.
        read = event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        sought = _FILES[event] == "listed" or (read and not os.path.lexists(path))
        sought = sought and any(path == os.path.realpath(folder or ".") for folder in sys.path)
        return None if own or sought else f"{_FILES[event]} {path}"


@cache
def _watches() -> list[_Watch]:
    """Return the active watches. Their audit hook is set at the first call and stays: hooks cannot be removed."""
    watches: list[_Watch] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        for watch in watches:
            watch.see(event, arguments)

    sys.addaudithook(hook)
    return watches
