"""A sandbox for a Python program: no network, no writable disk, no GPU, and nothing to read but what it was given.

On Linux (5.12 or later, and only with the right to make namespaces, which many containers refuse) the program runs in
fresh user, mount, network, process and IPC namespaces: see namespaces(7), user_namespaces(7), pivot_root(2) and
mount_setattr(2). Neither root nor another program is needed. Files that only root's privileges can read are missing
inside. Elsewhere the process is a plain one; `isolation` says so.
"""

import json
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import IO

import psutil

from caddie.errors import UserError, count
from caddie.files import absolute
from caddie.verify.sandbox_launcher import CLOSED, OFFLINE, PLAIN, READY

_PACKAGE = Path(__file__).absolute().parent.parent
_POLL_SECONDS = 0.05
"""Time between two looks at the clock, the memory and the output."""
_PIPE_SECONDS = 1.0
"""Time for which the pipes of a killed process may stay open: in a plain one a grandchild may hold them."""
_MIB = 1 << 20
_LAUNCHER = "import sys; sys.path.append(sys.argv[1]); from sandbox_launcher import enter; enter(*sys.argv[2:])"
"""Imports the launcher alone: nothing else of caddie or of installed packages is loaded before the program starts."""

_BEGIN = "import sys; sys.modules['dill'] = None; "
"""Put before a program: PyTorch imports dill where it is installed, which fails without a folder to write to."""


class NoSandbox(UserError):
    """The system has no sandbox, or Python lacks a package there that this process has."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Exit of a sandboxed process, and the isolation that held while it ran."""

    returncode: int
    """Exit status; 128 plus the signal's number if a signal ended it, as in a shell."""
    stdout: bytes
    stderr: bytes
    stopped: str | None
    """Sentence that names the limit it was killed at; None if it ended by itself."""
    isolated: bool
    """True if it had neither network nor disk."""
    isolation: str
    """Sentence that describes the isolation, or what the system refused."""
    peak_bytes: int
    """Peak resident memory, sampled every 50 ms, with children and launcher (some 25 MiB); 0 if it ended sooner."""


@dataclass(frozen=True, kw_only=True)
class Sandboxed:
    """A running process in a sandbox."""

    process: Popen[bytes]
    isolated: bool
    """True if it has neither network nor disk."""
    isolation: str
    """Sentence that describes the isolation, or what the system refused."""
    others: set[int]
    """Processes that were there before and still are; none of them is its child."""

    def resident_bytes(self) -> int:
        """Return the memory of the process, its children and the launcher.

        `others` are not read: the files of a thousand processes would take 30 ms at each look.
        """
        parents, sizes, numbers = {}, {}, set(psutil.pids())
        self.others.intersection_update(numbers)  # a child may get the number of one that has ended
        for number in numbers - self.others:
            with suppress(psutil.Error):  # it may have ended meanwhile
                process = psutil.Process(number)
                parents[number], sizes[number] = process.ppid(), process.memory_info().rss
        family, found = set[int](), {self.process.pid} & set(parents)
        while found:
            family |= found
            found = {number for number, parent in parents.items() if parent in found}
        return sum(sizes[number] for number in family)


@contextmanager
def open_sandbox(
    code: str, *arguments: object, readable: Iterable[Path] = (), stdin: int = PIPE
) -> Iterator[Sandboxed]:
    """Start `python -c CODE ARGUMENTS` where it can read `readable` and nothing else; kill its processes in the end.

    `readable` are files or folders; the working folder is the root, so paths among the `arguments` must be absolute.
    `stdin` is its standard input, as for `Popen`; both outputs are pipes. Of this environment it gets only `PATH`,
    `LANG` and `OMP_NUM_THREADS`. Even a plain process can neither make a file longer nor leave a core dump. Raises
    `UserError` if a path cannot be read or no process can be started, and `NoSandbox` on Windows.
    """
    command, paths = [code, *map(str, arguments)], [str(absolute(path)) for path in readable]
    if getattr(os, "fork", None) is None:
        raise NoSandbox("this system has no sandbox; verify the file on Linux or macOS, or in WSL")
    if absent := [path for path in paths if not os.access(path, os.R_OK)]:
        raise UserError(f"cannot read {absent[0]}; the sandbox needs it")
    on_linux = sys.platform == "linux"
    levels, reason = ([CLOSED, OFFLINE, PLAIN], "") if on_linux else ([PLAIN], "more needs Linux")
    others = set(psutil.pids())
    for level in levels:
        process, report = _launch(level, paths, command, stdin)
        with process:
            try:
                ready, _, refusal = report.partition("\n")
                if refusal or not ready.startswith(READY):
                    reason = f"the system refuses more ({refusal or 'its launcher failed'})"
                    continue
                isolation = _describe(level, len(paths), reason, ready.removeprefix(READY))
                yield Sandboxed(process=process, isolated=level == CLOSED, isolation=isolation, others=others)
                return
            finally:
                _kill(process)
    raise UserError(f"cannot start a process of its own for -c {' '.join(command)}: {reason}")


def run_in_sandbox(
    code: str,
    *arguments: object,
    readable: Iterable[Path] = (),
    stdin: bytes = b"",
    memory_bytes: int,
    seconds: float,
    output_bytes: int = 64 * _MIB,
    watch: Callable[[bytes], object] | None = None,
) -> Outcome:
    """Run `python -c CODE ARGUMENTS` in a sandbox to its end: see `open_sandbox`.

    `memory_bytes` limits the resident memory of the process and its children together, `seconds` the wall-clock time,
    and `output_bytes` standard output and standard error each; over a limit, all its processes are killed. Twenty
    times a second `watch` gets the standard error so far. Raises `UserError` if a path cannot be read; whatever the
    process does is an `Outcome`.
    """
    peak_bytes, limit, done = 0, None, False
    wrote_too_much = f"wrote more than {output_bytes / _MIB:,.3g} MiB"
    with open_sandbox(code, *arguments, readable=readable) as sandboxed:
        process, end = sandboxed.process, time.monotonic() + seconds
        # At its timeout, `communicate` would forget the input that it has not sent yet.
        pipe, process.stdin = process.stdin, None
        threading.Thread(target=_feed, args=(pipe, stdin), daemon=True).start()
        while not done:
            try:
                out, err = process.communicate(timeout=_POLL_SECONDS)
                done = True
            except TimeoutExpired as running:
                out, err = running.stdout or b"", running.stderr or b""
                if watch:
                    watch(err)
            peak_bytes = max(peak_bytes, sandboxed.resident_bytes())
            if max(len(out), len(err)) > output_bytes:
                limit = wrote_too_much
            elif peak_bytes > memory_bytes:
                limit = f"took more than {memory_bytes / _MIB:,.0f} MiB of memory"
            elif not done and time.monotonic() > end:
                limit = f"ran for more than {seconds:g} seconds"
            if not done and (limit or process.poll() is not None):
                _kill(process)
                with suppress(TimeoutExpired):  # a process outside the group still holds the pipes
                    out, err = process.communicate(timeout=_PIPE_SECONDS)
                done = True
    if limit is None and max(len(out), len(err)) > output_bytes:  # it ended before it was looked at
        limit = wrote_too_much
    return Outcome(
        returncode=process.returncode if process.returncode >= 0 else 128 - process.returncode,
        stdout=out[:output_bytes],
        stderr=err[:output_bytes],
        stopped=limit and f"it was stopped because it {limit}",
        isolated=sandboxed.isolated,
        isolation=sandboxed.isolation,
        peak_bytes=peak_bytes,
    )


def _describe(level: str, paths: int, reason: str, missing: str) -> str:
    if level == CLOSED:
        given = f"only Python, caddie and {count(paths, 'named path')} readable"
        return f"no network, no writable disk, {given} (Linux namespaces{missing})"
    disk = "the disk as usual, except that no file can be made longer"
    network = (
        "no network (Linux namespaces)," if level == OFFLINE else "plain subprocess, with the network as usual and"
    )
    return f"{network} {disk}: {reason}{missing}"


def _launch(level: str, readable: Sequence[str], command: Sequence[str], stdin: int) -> tuple[Popen[bytes], str]:
    """Start the process. Return it and the launcher's report: `READY` as the command begins, or what was refused."""
    reading, writing = os.pipe()
    paths = {path: os.path.realpath(path) for path in [*runtime_paths(), *readable]}
    program = [sys.executable, "-P", "-s", "-B", "-c", _BEGIN + command[0], *command[1:]]
    arguments = [str(Path(__file__).absolute().parent), level, str(writing), json.dumps(paths), json.dumps(program)]
    with open(reading, encoding="utf-8") as report:
        try:
            process = Popen(
                [sys.executable, "-I", "-S", "-B", "-c", _LAUNCHER, *arguments],
                env=_environment(),
                cwd="/",
                stdin=stdin,
                stdout=PIPE,
                stderr=PIPE,
                pass_fds=[writing],
                start_new_session=True,
            )
        finally:
            os.close(writing)
        return process, report.read()


def _environment() -> dict[str, str]:
    # With its first optimizer PyTorch wants a folder to exist for compiled code, though nothing is compiled.
    folder = "/proc" if Path("/proc").exists() else "/"
    variables = {name: os.environ[name] for name in ("PATH", "LANG", "OMP_NUM_THREADS") if name in os.environ}
    # The program runs the same code, wherever this one found it: in a checkout, in another environment, in the home.
    known = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    if more := [folder for folder in (str(_PACKAGE.parent), *_package_folders()) if folder not in known]:
        variables["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(more))
    # A scorer may key tables by Python's hash of strings, which is random in each process unless it has a seed.
    variables["PYTHONHASHSEED"] = "0"
    return {**variables, "TORCHINDUCTOR_CACHE_DIR": folder, "CUDA_VISIBLE_DEVICES": ""}


def _package_folders() -> list[str]:
    """Return the folders of `sys.path` in which packages are installed.

    A checkout is not one of them, nor is the working folder, unless packages were loaded from it.
    """
    loaded, working = Path(psutil.__file__).absolute().parents[1], Path.cwd()
    folders = [Path(entry).absolute() for entry in sys.path if entry]
    folders = [folder for folder in folders if folder == loaded or folder != working]
    kinds = ("*.dist-info", "torch", "numpy")
    return [str(folder) for folder in folders if any(next(folder.glob(kind), None) for kind in kinds)]


@cache
def runtime_paths() -> tuple[str, ...]:
    """Return the paths that Python, PyTorch and caddie need: interpreter, libraries, packages, devices, processors."""
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
    paths += map(Path, _package_folders())
    return tuple(dict.fromkeys(str(path.absolute()) for path in paths if path.exists()))


def _feed(pipe: IO[bytes], data: bytes) -> None:
    with suppress(BrokenPipeError), pipe:  # the process need not read
        pipe.write(data)


def _kill(process: Popen[bytes]) -> None:
    """Kill the whole process group; when the first process of a namespace dies, all others die too."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
