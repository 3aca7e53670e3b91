"""Holding a program to what it was given: a sealed process.

`sealed` runs Python in a process of its own. On Linux that process lives in fresh user, mount, network, process and
IPC namespaces (see the manual pages namespaces(7), user_namespaces(7), pivot_root(2) and mount_setattr(2)), for which
neither root nor another program is needed: its root folder is an empty one in memory, into which Python, its packages,
caddie and the files named are mounted to be read, and nothing can be written. There is no GPU in it and no folder for
temporary files; PyTorch needs none to load an artifact, score and adapt. Not there either: packages that were
installed for one user alone, and files that only root's privileges can read. Linux 5.12 is needed, and leave to make
namespaces, which many containers and some distributions refuse; elsewhere the process is a plain one, and says so.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

from caddie.errors import UserError

_PACKAGE = Path(__file__).absolute().parent.parent
_LOOK_SECONDS = 0.05
"""How often time, memory and output are looked at."""
_LAST_WORDS_SECONDS = 1.0
"""How long the pipes of a process that was killed may stay open: in a plain one a grandchild may hold them."""
_MIB = 1 << 20
_CLOSED, _OFFLINE, _PLAIN = "closed", "offline", "plain"
_LAUNCHER = "import sys; sys.path.append(sys.argv[1]); from caddie.runtime.sandbox import _enter; _enter(*sys.argv[2:])"
_OUTSIDE = "/.outside"
"""Where the launcher keeps the whole disk while it picks from it."""
_READY = "ready"

# Constants of Linux, the same on every processor that PyTorch supports.
_NEW_MOUNT, _NEW_IPC, _NEW_USER, _NEW_PROCESS, _NEW_NETWORK = 0x20000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
_NO_SETUID, _NO_DEVICES, _NO_PROGRAMS, _BIND, _RECURSIVE, _PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_DETACH = 2
_DEATH_SIGNAL, _NO_NEW_PRIVILEGES = 1, 38
_MOUNT_SETATTR, _HERE, _ALL_BELOW, _READ_ONLY = 442, -100, 0x8000, 1
_NOBODY = 65534


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a process ended, and what held while it ran."""

    returncode: int
    """Its exit status; 128 and the signal's number where a signal ended it, as shells have it."""
    stdout: bytes
    stderr: bytes
    stopped: str | None
    """Which limit it was killed at, as a sentence; none if it ended by itself."""
    timed_out: bool
    """Whether that was the limit of time."""
    sealed: bool
    """Whether network and disk were both closed to it."""
    seal: str
    """How it was sealed, or what was refused, for people to read."""
    peak_bytes: int
    """Most resident memory seen, of it, its children and the launcher (some 25 MiB); one looks every 50 ms, so it is 0
    for what ends sooner."""


def sealed(
    command: Sequence[str],
    *,
    readable: Iterable[Path] = (),
    stdin: bytes = b"",
    memory_bytes: int,
    seconds: float,
    output_bytes: int = 64 * _MIB,
) -> Outcome:
    """Run `python COMMAND` (as in `["-m", "caddie", "verify", ...]`) where it can read `readable` and nothing else.

    `readable` are files or folders; the working folder is the root, so `command` names them by absolute paths.
    `memory_bytes` is resident memory of the process and its children together, `seconds` is wall-clock time, and
    `output_bytes` holds for standard output and standard error each; over a limit, all its processes are killed.
    Of the environment it is handed `PATH`, `LANG` and `OMP_NUM_THREADS` alone; sealed or not, it can neither make a
    file longer nor leave a core dump. `UserError` if a path cannot be read; whatever the process does is an `Outcome`.
    """
    paths = [str(path.absolute()) for path in readable]
    for path in paths:
        if not os.access(path, os.R_OK):
            raise UserError(f"cannot read {path}; the sealed process needs it")
    levels, reason = [_CLOSED, _OFFLINE, _PLAIN], ""
    if sys.platform != "linux":
        levels, reason = [_PLAIN], "more needs Linux"
    limits = {
        "time": f"it was stopped because it ran for more than {seconds:g} seconds",
        "memory": f"it was stopped because it took more than {memory_bytes / _MIB:,.0f} MiB of memory",
        "output": f"it was stopped because it wrote more than {output_bytes / _MIB:,.3g} MiB",
    }
    strangers = _processes()  # whoever was there before is none of its children
    for level in levels:
        process, said = _launch(level, paths, command)
        with process:
            try:
                ready, _, refusal = said.partition("\n")
                if refusal or not ready.startswith(_READY):
                    reason = f"the system refuses more ({refusal or 'its launcher failed'})"
                    continue
                out, err, limit, peak_bytes = _attend(process, strangers, stdin, memory_bytes, seconds, output_bytes)
            finally:
                _kill(process)
        status = process.returncode
        return Outcome(
            returncode=status if status >= 0 else 128 - status,
            stdout=out[:output_bytes],
            stderr=err[:output_bytes],
            stopped=limits[limit] if limit else None,
            timed_out=limit == "time",
            sealed=level == _CLOSED,
            seal=_sentence(level, len(paths), reason, ready.removeprefix(_READY)),
            peak_bytes=peak_bytes,
        )
    raise UserError(f"cannot start a process of its own for {' '.join(command)}: {reason}")


def _sentence(level: str, count: int, reason: str, missing: str) -> str:
    if level == _CLOSED:
        named = f"{count} named {'path' if count == 1 else 'paths'}"
        return f"no network, no writable disk, only Python, caddie and {named} readable (Linux namespaces{missing})"
    disk = "the disk as usual, but for files that cannot grow"
    if level == _OFFLINE:
        return f"no network (Linux namespaces), {disk}: {reason}"
    unlimited = "" if Path("/proc/self/stat").exists() else "; its memory is not limited"
    return f"plain subprocess, with the network as usual and {disk}: {reason}{unlimited}"


def _launch(level: str, readable: Sequence[str], command: Sequence[str]) -> tuple[subprocess.Popen[bytes], str]:
    """The process, and what its launcher said: `_READY` as the command took its place, and what was refused if any."""
    reading, writing = os.pipe()
    paths = {path: os.path.realpath(path) for path in [*interior(), *readable]}
    program = [sys.executable, "-P", "-s", "-B", *command]
    arguments = [str(_PACKAGE.parent), level, str(writing), json.dumps(paths), json.dumps(program)]
    with open(reading, encoding="utf-8") as report:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-c", _LAUNCHER, *arguments],
                env=_environment(),
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[writing],
                start_new_session=True,
            )
        finally:
            os.close(writing)
        return process, report.read()


def _environment() -> dict[str, str]:
    # With its first optimizer PyTorch wants a folder to exist for compiled code, though nothing is compiled.
    folder = "/proc" if Path("/proc").exists() else "/"
    handed = {name: os.environ[name] for name in ("PATH", "LANG", "OMP_NUM_THREADS") if name in os.environ}
    if str(_PACKAGE.parent) not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        handed["PYTHONPATH"] = str(_PACKAGE.parent)  # a checkout: what runs there is what runs here
    return {**handed, "TORCHINDUCTOR_CACHE_DIR": folder, "CUDA_VISIBLE_DEVICES": ""}


@cache
def interior() -> tuple[str, ...]:
    """What Python, PyTorch and caddie read of themselves: libraries, interpreter, packages, devices, processors."""
    interpreter = Path(sys.executable)
    paths = [interpreter]
    while interpreter.is_symlink():  # a virtual environment may lead to its interpreter in several steps
        interpreter = interpreter.parent / interpreter.readlink()
        paths.append(interpreter)
    for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix):
        paths += [Path(prefix, name) for name in ("bin", "lib", "lib64", "pyvenv.cfg")]
    paths += [Path(prefix, name) for prefix in ("/", "/usr", "/usr/local") for name in ("lib", "lib64")]
    paths += [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [Path("/dev", name) for name in ("null", "zero", "random", "urandom")]
    paths += [Path("/etc/ld.so.cache"), Path("/sys/devices/system/cpu"), _PACKAGE]
    return tuple(dict.fromkeys(str(path.absolute()) for path in paths if path.exists()))


# Seen from outside


def _attend(
    process: subprocess.Popen[bytes],
    strangers: set[str],
    stdin: bytes,
    memory_bytes: int,
    seconds: float,
    output_bytes: int,
) -> tuple[bytes, bytes, str | None, int]:
    """Feed the process and watch its limits: its two outputs, the limit it was killed at, and its peak memory."""
    end, peak_bytes, limit, done = time.monotonic() + seconds, 0, None, False
    # `communicate` would forget what is still to be sent when its time is over.
    pipe, process.stdin = process.stdin, None
    threading.Thread(target=_feed, args=(pipe, stdin), daemon=True).start()
    while not done:
        try:
            out, err = process.communicate(timeout=_LOOK_SECONDS)
            done = True
        except subprocess.TimeoutExpired as late:
            out, err = late.stdout or b"", late.stderr or b""
        peak_bytes = max(peak_bytes, _resident_bytes(process.pid, strangers))
        if len(out) > output_bytes or len(err) > output_bytes:
            limit = "output"
        elif peak_bytes > memory_bytes:
            limit = "memory"
        elif not done and time.monotonic() > end:
            limit = "time"
        if not done and (limit or process.poll() is not None):
            _kill(process)
            with suppress(subprocess.TimeoutExpired):  # whoever still holds the pipes has left the group
                out, err = process.communicate(timeout=_LAST_WORDS_SECONDS)
            done = True
    if limit is None and max(len(out), len(err)) > output_bytes:  # it ended between two looks
        limit = "output"
    return out, err, limit, peak_bytes


def _feed(pipe: IO[bytes], data: bytes) -> None:
    with suppress(BrokenPipeError), pipe:  # who is not interested need not read
        pipe.write(data)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the whole group; in a namespace, the death of its first process is the death of all."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _processes() -> set[str]:
    """The numbers of all processes, as /proc names them; none where there is no such thing."""
    return {name for name in os.listdir("/proc") if name.isdigit()} if os.path.exists("/proc/self/stat") else set()


def _resident_bytes(first: int, strangers: set[str]) -> int:
    """Memory of a process and all below it but `strangers`, by proc_pid_stat(5); 0 where there is no such thing.

    Of a thousand strangers the files alone would take 30 ms at each look.
    """
    parents, pages = {}, {}
    for name in _processes() - strangers:
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # it may have ended meanwhile
            fields = file.read().rpartition(b")")[2].split()
            parents[int(name)], pages[int(name)] = int(fields[1]), int(fields[21])
    family, found = set[int](), {first} & set(parents)
    while found:
        family |= found
        found = {number for number, parent in parents.items() if parent in found}
    return sum(pages[number] for number in family) * resource.getpagesize()


# Seen from inside: what the launcher does before the command takes its place


def _enter(level: str, report: str, paths: str, command: str) -> None:
    """Close what `level` closes, say so, and become the command; or say what was refused."""
    pipe, missing = int(report), ""
    try:
        if level != _PLAIN:
            _unshare(_NEW_USER | _NEW_NETWORK | _NEW_PROCESS | _NEW_IPC | (_NEW_MOUNT if level == _CLOSED else 0))
            _fork(pipe)
            if level == _CLOSED:
                missing = _furnish(json.loads(paths))
            _fork(pipe)  # the first process of a namespace ignores most signals, so the command is the second
        if sys.platform == "linux":
            _system("prctl", _DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
            _system("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
            resource.setrlimit(limit, (0, 0))
        os.set_inheritable(pipe, False)
        os.write(pipe, f"{_READY}{missing}".encode())
        program, *arguments = json.loads(command)
        os.execv(program, [program, *arguments])
    except OSError as error:
        os.write(pipe, f"\n{error.filename or 'launcher'}: {error.strerror}".encode())
        os._exit(1)


def _unshare(namespaces: int) -> None:
    """Enter new namespaces as nobody, who keeps this user's files but loses every capability with the command."""
    user, group = os.getuid(), os.getgid()
    _system("unshare", namespaces)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{_NOBODY} {user} 1"), ("gid_map", f"{_NOBODY} {group} 1")):
        Path("/proc/self", name).write_text(text)


def _fork(pipe: int) -> None:
    """Go on in a child, which dies with this process; this process ends as the child does."""
    _system("prctl", _DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if child := os.fork():
        os.close(pipe)
        while True:
            ended, status = os.wait()  # orphans come here, too
            if ended == child:
                code = os.waitstatus_to_exitcode(status)
                os._exit(code if code >= 0 else 128 - code)


def _furnish(paths: Mapping[str, str]) -> str:
    """Make a root folder that holds `paths` and nothing else, read-only; what could not be had, in words.

    Each path is mounted where it really is, the value; a link leads there from where it was named, the key.
    """
    _mount(None, "/", None, _PRIVATE | _RECURSIVE)
    _mount("tmpfs", "/proc", "tmpfs", _NO_SETUID | _NO_DEVICES, "size=1m,mode=755")
    os.chdir("/proc")  # any folder would do: what it held comes to light again below `_OUTSIDE`
    os.mkdir(_OUTSIDE[1:])
    _system("pivot_root", b".", _OUTSIDE[1:].encode())
    os.chdir("/")
    for path in sorted(paths.values()):  # so that a folder comes before what is in it, and is mounted whole
        if not os.path.lexists(path):
            os.makedirs(path if os.path.isdir(_OUTSIDE + path) else os.path.dirname(path), exist_ok=True)
            if not os.path.isdir(path):
                os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
            _mount(_OUTSIDE + path, path, None, _BIND | _RECURSIVE)
    for path in sorted(paths):
        if not os.path.lexists(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.symlink(paths[path], path)
    missing = ""
    try:
        os.mkdir("/proc")
        _mount("proc", "/proc", "proc", _NO_SETUID | _NO_DEVICES | _NO_PROGRAMS)  # while the old one can be seen
    except OSError:
        missing = "; no /proc"
    _system("umount2", _OUTSIDE.encode(), _DETACH)
    os.rmdir(_OUTSIDE)
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY | _NO_SETUID)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    _system("syscall", ctypes.c_long(_MOUNT_SETATTR), _HERE, b"/", _ALL_BELOW, attributes, size)
    return missing


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, options)]
    _system("mount", *words[:3], ctypes.c_ulong(flags), words[3])


def _system(name: str, *arguments: Any) -> None:
    """A call of the C library; `OSError` with its name if the system refuses it."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
