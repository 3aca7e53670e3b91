"""The inside of the sandbox: close network and disk, then become the program. Needs the standard library alone."""

import ctypes
import errno
import json
import os
import signal
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CLOSED, OFFLINE, PLAIN = "closed", "offline", "plain"
"""Levels of isolation: no network and no disk; no network; neither."""
READY = "ready"
_OUTSIDE = "/.outside"
"""Place of the whole disk while the root folder is built from it."""

# Constants of Linux, the same on every processor that PyTorch supports.
_NEW_MOUNT, _NEW_IPC, _NEW_USER, _NEW_PROCESS, _NEW_NETWORK = 0x20000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
_NO_SETUID, _NO_DEVICES, _NO_PROGRAMS, _BIND, _RECURSIVE, _PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_DETACH = 2
_DEATH_SIGNAL, _NO_NEW_PRIVILEGES = 1, 38
_MOUNT_SETATTR, _HERE, _ALL_BELOW, _READ_ONLY = 442, -100, 0x8000, 1
_NOBODY = 65534
_SECCOMP, _FILTER = 22, 2  # of prctl(2) and seccomp(2)

_REFUSED = {
    "x86_64": (
        0xC000003E,
        "27 29-31 64-71 73 141-142 144 187 203 220-221 240-245 248-251 314 327 425-427 451 1073741824-4294967295",
        302,
        72,
    ),
    "aarch64": (0xC00000B7, "30 32 118-119 122 140 180-197 213 217-219 223 232 274 286 425-427 451", 261, 25),
}
"""Machine to its number for seccomp, the refused system calls, and two calls that are refused in part: prlimit64, whose
first argument must be 0, and fcntl, which may only copy a descriptor, and read and change its flags.

They could leave state in the sandbox that outlives a process: System V memory, semaphores and queues; POSIX queues;
keyrings; priorities, schedules and limits of another process; locks, leases and hints of files; pages in the disk's
cache, as far as one can ask for them without a clock; and io_uring, which would do all that unseen. The last range of
x86-64 is the x32 ABI.
"""


def enter(level: str, report: str, paths: str, command: str) -> None:
    """Close what `level` closes and become the command. Report `READY`, or what the system refused.

    `report` is the number of a pipe, `paths` and `command` are JSON.
    """
    import resource  # which Windows lacks, where this module is only imported

    pipe, missing = int(report), ""
    try:
        if level != PLAIN:
            _unshare(_NEW_USER | _NEW_NETWORK | _NEW_PROCESS | _NEW_IPC | (_NEW_MOUNT if level == CLOSED else 0))
            _fork(pipe)
            if level == CLOSED:
                missing = _build_root(json.loads(paths))
            _fork(pipe)  # the first process of a namespace ignores most signals, so the command is the second
        if sys.platform == "linux":
            _system("prctl", _DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
            _system("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
            missing += _refuse_what_outlives()
        for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
            resource.setrlimit(limit, (0, 0))
        os.set_inheritable(pipe, False)
        os.write(pipe, f"{READY}{missing}".encode())
        program, *arguments = json.loads(command)
        os.execv(program, [program, *arguments])
    except OSError as error:
        os.write(pipe, f"\n{error.filename or 'launcher'}: {error.strerror}".encode())
        os._exit(1)


def _unshare(namespaces: int) -> None:
    """Enter new namespaces as user nobody, who keeps this user's files but no capability once the command runs."""
    user, group = os.getuid(), os.getgid()
    _system("unshare", namespaces)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{_NOBODY} {user} 1"), ("gid_map", f"{_NOBODY} {group} 1")):
        Path("/proc/self", name).write_text(text)


def _fork(pipe: int) -> None:
    """Continue in a child, which dies with this process; this process ends with the child's exit status."""
    _system("prctl", _DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if child := os.fork():
        os.close(pipe)
        while True:
            ended, status = os.wait()  # orphans come here, too
            if ended == child:
                code = os.waitstatus_to_exitcode(status)
                os._exit(code if code >= 0 else 128 - code)


def _build_root(paths: Mapping[str, str]) -> str:
    """Make a read-only root folder that holds `paths` and nothing else. Return a note of what is missing.

    Each path is mounted at its real place, the value; a link leads there from the name that was given, the key.
    """
    _mount(None, "/", None, _PRIVATE | _RECURSIVE)
    _mount("tmpfs", "/proc", "tmpfs", _NO_SETUID | _NO_DEVICES, "size=1m,mode=755")
    os.chdir("/proc")  # any folder would do: its contents reappear below `_OUTSIDE`
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


def _refuse_what_outlives() -> str:
    """Refuse the system calls `_REFUSED` to this process and its children. Return a note if that fails."""
    import fcntl  # which Windows lacks

    machine, refused, limits, control = _REFUSED.get(os.uname().machine, (0, "", 0, 0))
    load, equal, at_least, above, give = 0x20, 0x15, 0x35, 0x25, 0x06
    number, machine_of, first_argument, second_argument = 0, 4, 16, 24  # offsets in `struct seccomp_data`
    allow, refuse = (give, 0, 0, 0x7FFF0000), (give, 0, 0, 0x50000 | errno.EPERM)
    # Each is (code, instructions to skip if true, and if false, operand): see seccomp(2).
    program = [(load, 0, 0, machine_of), (equal, 1, 0, machine), refuse, (load, 0, 0, number)]
    for numbers in refused.split():
        first, _, last = numbers.partition("-")
        program += [(at_least, 0, 2, int(first)), (above, 1, 0, int(last or first)), refuse]
    flags, copy = fcntl.F_SETFL, fcntl.F_DUPFD_CLOEXEC  # F_DUPFD to F_SETFL are 0 to 4
    program += [(equal, 0, 5, control), (load, 0, 0, second_argument), (above, 0, 2, flags), (equal, 1, 0, copy)]
    program += [refuse, allow]
    program += [(equal, 1, 0, limits), allow, (load, 0, 0, first_argument), (equal, 0, 1, 0), allow, refuse]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    pointer = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))
    try:
        if not machine:
            raise OSError(errno.ENOSYS, f"it is not known for {os.uname().machine}")
        _system("prctl", _SECCOMP, _FILTER, pointer, 0, 0)
    except OSError as error:
        return f"; without seccomp, so state may outlive a process: {error.strerror}"
    return ""


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, options)]
    _system("mount", *words[:3], ctypes.c_ulong(flags), words[3])


def _system(name: str, *arguments: Any) -> None:
    """Call a function of the C library; `OSError` with its name if the system refuses it."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
