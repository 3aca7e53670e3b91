"""The sandbox gives a program what it was given and nothing else, and the audit hook sees what a process reads."""

import ctypes
import json
import mmap
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import sysconfig
import textwrap
import time
import urllib.request
import venv
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from caddie.errors import UserError
from caddie.files import absolute
from caddie.pack.artifact import load
from caddie.verify import sandbox as module
from caddie.verify.audit_hook import watch_reads
from caddie.verify.sandbox import Outcome, run_in_sandbox

MIB = 1 << 20
PACKAGE = Path(module.__file__).parent.parent


def run(code: str, *arguments: object, memory: int = 512 * MIB, seconds: float = 20.0, **settings: Any) -> Outcome:
    """`python -c CODE ARGUMENTS`, in the sandbox."""
    return run_in_sandbox(textwrap.dedent(code), *arguments, memory_bytes=memory, seconds=seconds, **settings)


def answer(outcome: Outcome) -> Any:
    """What the code printed as JSON."""
    assert (outcome.returncode, outcome.stderr, outcome.stopped) == (0, b"", None)
    return json.loads(outcome.stdout)


@pytest.mark.long
def test_errors_are_watched_as_they_come() -> None:
    seen: list[bytes] = []
    code = """
        import sys, time
        for word in ("one", "two"):
            print(word, file=sys.stderr, flush=True)
            time.sleep(0.3)
    """
    assert run(code, watch=seen.append).returncode == 0
    assert {b"one\n", b"one\ntwo\n"} <= set(seen)


@pytest.fixture
def marker() -> str:
    """A word that no other command line has."""
    return f"sealed-{os.getpid()}-{time.monotonic_ns()}"


def alive(marker: str) -> list[int]:
    """Processes that have a word in their command line."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in file.read_bytes().split(b"\0"):
                found.append(int(file.parent.name))
        except OSError:
            continue
    return found


def soon(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Return True if a condition holds within so many seconds."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


# What it can reach


REACH = """
    import json, socket, sys
    refused = []
    def attempt(family, kind, address):
        try:
            with socket.socket(family, kind) as end:
                end.settimeout(2)
                end.connect(address)
                end.send(b"hello")
        except OSError as error:
            refused.append(error.strerror)
    attempt(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", int(sys.argv[1])))
    attempt(socket.AF_UNIX, socket.SOCK_STREAM, sys.argv[2].replace("@", chr(0)))
    attempt(socket.AF_INET, socket.SOCK_DGRAM, ("192.0.2.1", 9))
    print(json.dumps([refused, [name for _, name in socket.if_nameindex()]]))
"""


def test_there_is_no_network(namespaces: None) -> None:
    name = f"@caddie-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(name.replace("@", "\0"))
        local.listen()
        arguments = [str(server.getsockname()[1]), name]
        ordinary = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(REACH), *arguments], capture_output=True, check=True
        )
        assert len(json.loads(ordinary.stdout)[0]) <= 1  # where there is no route, the last alone is refused
        refused, interfaces = answer(run(REACH, *arguments))
    assert refused == ["Network is unreachable", "Connection refused", "Network is unreachable"]
    assert interfaces == ["lo"]  # and even that one is down


OUTLIVES = """
    import ctypes, errno, fcntl, json, os, resource, struct
    library, found = ctypes.CDLL(None, use_errno=True), {}
    def call(name, *arguments):
        ctypes.set_errno(0)
        found[name] = [getattr(library, name)(*arguments) >= 0, errno.errorcode.get(ctypes.get_errno())]
    key = ctypes.c_long(1)
    call("shmget", 0x51AB, 4096, 0o1666)
    call("msgget", 0x78, 0o1666)
    call("semget", 0x79, 1, 0o1666)
    call("setpriority", 0, os.getppid(), 5)
    call("sched_setaffinity", os.getppid(), 8, ctypes.byref(ctypes.c_ulong(1)))
    call("posix_fadvise", 0, 0, 0, 4)
    found["posix_fadvise"][0] = library.posix_fadvise(0, 0, 0, 4) == 0  # it returns the error
    number = {"x86_64": (240, 248), "aarch64": (180, 217)}[os.uname().machine]
    call("syscall", ctypes.c_long(number[0]), b"left", 0o102, 0o600, None)
    found["mq_open"] = found.pop("syscall")
    call("syscall", ctypes.c_long(number[1]), b"user", b"left", b"1", ctypes.c_long(1), ctypes.c_long(-2))
    found["add_key"] = found.pop("syscall")
    call("prlimit", os.getppid(), 8, None, ctypes.create_string_buffer(16))
    call("flock", 0, 1)
    for name in ("F_OFD_SETLK", "F_SETLK", "F_SETLEASE", "F_NOTIFY", "F_SETSIG"):
        try:
            found[name] = [True, fcntl.fcntl(0, getattr(fcntl, name, 37), struct.pack("hhqqi4x", 0, 0, 0, 1, 0))]
        except OSError as error:
            found[name] = [False, errno.errorcode[error.errno]]
    hint = ctypes.c_uint64(2)
    call("fcntl", 0, 1036, ctypes.byref(hint))
    found["F_SET_RW_HINT"] = found.pop("fcntl")
    copy = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 9)  # what Python and its libraries need
    fcntl.fcntl(copy, fcntl.F_SETFL, fcntl.fcntl(copy, fcntl.F_GETFL) | os.O_NONBLOCK)
    assert fcntl.fcntl(copy, fcntl.F_GETFD) == fcntl.FD_CLOEXEC
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[0] - 1, limits[1]))  # its own are its own affair
    print(json.dumps(found))
"""


@pytest.mark.long
@pytest.mark.parametrize("refused", ["", "_unshare"])
def test_nothing_can_be_left_for_a_later_process(refused: str, namespaces: None, refuse: Callable[..., None]) -> None:
    if refused:  # seccomp needs no namespace
        refuse(refused)
    outcome = run(OUTLIVES)
    assert outcome.isolated == (not refused)
    found = answer(outcome)
    assert found.pop("posix_fadvise")[0] is False
    assert found == {name: [False, "EPERM"] for name in found}
    assert len(found) == 15


def test_a_sandbox_without_seccomp_says_so(namespaces: None, refuse: Callable[..., None]) -> None:
    refuse("_REFUSED", "{}")
    outcome = run("")
    assert outcome.isolated
    machine = os.uname().machine
    said = f"without seccomp, so state may outlive a process: it is not known for {machine}"
    assert outcome.isolation.endswith(f"(Linux namespaces; {said})")


def test_a_path_that_goes_up_is_read_in_a_closed_sandbox(namespaces: None, tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "given").write_text("given")
    path = absolute(tmp_path / "deep" / "er" / ".." / ".." / "given")
    code = "import sys; print(open(sys.argv[1]).read())"
    outcome = run(code, path, readable=[tmp_path / "deep" / ".." / "given"])
    assert outcome.isolated
    assert outcome.stdout.strip() == b"given"


def test_only_what_was_named_can_be_read(namespaces: None, tmp_path: Path) -> None:
    for name in ("given", "behind", "secret"):
        (tmp_path / name).write_text(name)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inner").write_text("inner")
    (tmp_path / "link").symlink_to("behind")
    code = """
        import json, os, sys
        from pathlib import Path
        import caddie.errors
        folder, package, home = map(Path, sys.argv[1:])
        read = {name: (folder / name).read_text() for name in ("given", "link", "folder/inner")}
        seen = [str(path) for path in (folder / "secret", home, Path("/proc/1/root/etc/passwd")) if os.access(path, 4)]
        beside = os.listdir(package.parent) if "site-packages" not in str(package) else ["caddie"]
        assert Path(caddie.errors.__file__).parent == package
        print(json.dumps([read, sorted(os.listdir(folder)), seen, beside, sorted(os.listdir("/dev")), os.getcwd()]))
    """
    given = [tmp_path / "given", tmp_path / "folder", tmp_path / "link"]
    outcome = run(code, tmp_path, PACKAGE, Path.home() / ".ssh", readable=given)
    read, listed, seen, beside, devices, here = answer(outcome)
    assert read == {"given": "given", "link": "behind", "folder/inner": "inner"}
    assert listed == ["behind", "folder", "given", "link"]  # what a link leads to is there, too
    assert seen == []
    # Python itself and the folder for temporary files may lie beside the package.
    around = {tmp_path.relative_to(PACKAGE.parent).parts[0]} if tmp_path.is_relative_to(PACKAGE.parent) else set()
    assert set(beside) <= {"caddie", Path(sys.prefix).name} | around
    assert devices == ["null", "random", "urandom", "zero"]
    assert here == "/"
    assert outcome.isolation == (
        "no network, no writable disk, only Python, caddie and 3 named paths readable (Linux namespaces)"
    )


def test_nothing_can_be_written(namespaces: None, tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.write_text("given")
    code = """
        import ctypes, json, os, resource, sys
        from pathlib import Path
        given, package = map(Path, sys.argv[1:])
        libc = ctypes.CDLL(None)
        done = []
        def attempt(name, action):
            try:
                action()
                done.append(name)
            except (OSError, ValueError):
                pass
        def everything(when):
            for path in (given, given.parent / "new", package / "new", package / "errors.py", Path("/new"),
                         Path("/tmp/new"), Path("/dev/shm/new"), Path("/dev/new"), Path("/proc/self/comm")):
                attempt(f"{when}: write {path}", lambda: path.open("ab").write(b"x"))
            attempt(f"{when}: mode", lambda: given.chmod(0o777))
            attempt(f"{when}: times", lambda: os.utime(given))
            attempt(f"{when}: remove", given.unlink)
            attempt(f"{when}: memory", lambda: os.write(os.memfd_create("x"), b"x"))
            attempt(f"{when}: limit", lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1)))
        def remount():
            return libc.mount(None, bytes(given), None, ctypes.c_ulong(4096 | 32), None)
        everything("first")
        Path("/dev/null").write_text("this may be written")
        assert remount() < 0
        # With new namespaces come new powers, but none over what was mounted before.
        assert libc.unshare(0x10000000 | 0x20000) == 0
        assert remount() < 0
        everything("again")
        print(json.dumps(done))
    """
    assert answer(run(code, given, PACKAGE, readable=[given])) == []
    assert given.read_text() == "given"
    assert os.listdir(tmp_path) == ["given"]


def test_what_goes_in_and_what_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/the/path")
    monkeypatch.setenv("SECRET", "secret")
    code = """
        import json, os, sys
        data = sys.stdin.buffer.read()
        sys.stdout.buffer.write(data[::-1])
        print(json.dumps([len(data), dict(os.environ), sys.argv[1:]]), file=sys.stderr)
        sys.exit(7)
    """
    data = bytes(range(256)) * 1000  # more than a pipe holds
    outcome = run(code, "a b", "'", stdin=data)
    assert (outcome.returncode, outcome.stdout, outcome.stopped) == (7, data[::-1], None)
    size, environment, arguments = json.loads(outcome.stderr)
    assert size == len(data)
    assert environment["PATH"] == "/the/path"
    known = {"PATH", "LANG", "LC_CTYPE", "OMP_NUM_THREADS", "PYTHONPATH", "PYTHONHASHSEED"}
    assert set(environment) <= known | {"TORCHINDUCTOR_CACHE_DIR", "CUDA_VISIBLE_DEVICES"}
    assert arguments == ["a b", "'"]


def test_a_signal_ends_it_as_in_a_shell() -> None:
    assert run("import os, signal; os.kill(os.getpid(), signal.SIGTERM)").returncode == 128 + signal.SIGTERM


def test_what_cannot_be_read_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*absent; the sandbox needs it"):
        run("", readable=[tmp_path / "absent"])


STEP = "torch.optim.AdamW([weight], lr=0.1).step()"
"""Its class imports PyTorch's compiler, more than a second's work."""


@pytest.mark.long
@pytest.mark.parametrize("step", ["", pytest.param(STEP, marks=pytest.mark.slow)], ids=["", "an optimizer"])
def test_an_artifact_writes_and_a_weight_learns(step: str, namespaces: None, tiny_run: Any) -> None:
    """Whatever PyTorch loads when it is first asked, it finds in there; and it touches nothing else."""
    code = f"""
        import json, sys
        from pathlib import Path
        import torch  # which looks for CUDA's libraries all over the path where it was built for them
        from caddie.verify.audit_hook import watch_reads
        with watch_reads([Path(sys.argv[1])]) as touched:
            import caddie
            from caddie.inference.sample import sample
            sample(caddie.load(Path(sys.argv[1])), tokens=2)
            weight = torch.ones(1, requires_grad=True)
            weight.square().backward()
            weight.data -= 0.1 * weight.grad
            {step}
        print(json.dumps([touched, weight.item()]))
    """
    outcome = run(code, tiny_run.artifact, readable=[tiny_run.artifact], memory=2048 * MIB, seconds=120)
    assert answer(outcome) == [[], pytest.approx(0.8 * (1 - 0.1 * 0.01) - 0.1 if step else 0.8)]
    assert 64 * MIB < outcome.peak_bytes < 2048 * MIB


# Where packages are


def test_packages_are_found_wherever_this_process_found_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any folder of its path that packages were installed in; a checkout or a working folder is not shown."""
    for name, beside in (("installed", "x-1.0.dist-info"), ("checkout", "x.egg-info"), ("here", "data")):
        (tmp_path / name / beside).mkdir(parents=True)
        (tmp_path / name / f"x_{name}.py").write_text("")
    monkeypatch.chdir(tmp_path / "here")
    folders = ["", *map(str, (tmp_path / "here", tmp_path / "checkout", tmp_path / "installed"))]
    monkeypatch.setattr(sys, "path", [*folders, *sys.path])
    module.runtime_paths.cache_clear()
    code = """
        import importlib, json
        found = []
        for name in ("x_installed", "x_checkout", "x_here", "numpy"):
            try:
                importlib.import_module(name)
                found.append(name)
            except ModuleNotFoundError:
                pass
        print(json.dumps(found))
    """
    try:
        assert answer(run(code)) == ["x_installed", "numpy"]
    finally:
        module.runtime_paths.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["PYTHONPATH", ".pth", "for one user"])
def test_each_kind_of_installation_runs_in_the_sandbox(kind: str, tmp_path: Path) -> None:
    """An interpreter whose own folders hold no package, with this one's packages and checkout elsewhere."""
    base = Path(sys.base_prefix, "bin", f"python{sys.version_info[0]}.{sys.version_info[1]}")
    packages, checkout = sysconfig.get_path("purelib"), str(PACKAGE.parent)
    venv.create(tmp_path / "venv", symlinks=True)
    python, environment = tmp_path / "venv" / "bin" / "python", {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    own = tmp_path / "venv" / "lib" / base.name / "site-packages"
    if kind == "PYTHONPATH":
        environment["PYTHONPATH"] = os.pathsep.join([checkout, packages])
    elif kind == ".pth":
        (own / "elsewhere.pth").write_text(f"{packages}\n{checkout}\n")
    else:
        python, environment["PYTHONUSERBASE"] = base, str(tmp_path)
        user = tmp_path / "lib" / base.name
        user.mkdir(parents=True)
        (user / "site-packages").symlink_to(packages)
        environment["PYTHONPATH"] = checkout
    code = """
        from caddie.verify.sandbox import run_in_sandbox
        code = "import torch, numpy, scipy, caddie.verify.verify; print('here')"
        print(run_in_sandbox(code, memory_bytes=4 << 30, seconds=120))
    """
    done = subprocess.run(
        [python, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, check=False
    )
    assert "stdout=b'here\\n'" in done.stdout, done


def test_a_sandbox_that_lacks_a_package_says_nothing_about_the_artifact(
    tiny_run: Any, caddie: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    verification = import_module("caddie.verify.verify")
    missing = Outcome(
        returncode=1,
        stdout=b"",
        stderr=b"Traceback\nModuleNotFoundError: No module named 'torch'\n",
        stopped=None,
        isolated=True,
        isolation="S",
        peak_bytes=0,
    )
    monkeypatch.setattr(verification, "run_in_sandbox", lambda *given, **limits: missing)
    verdict = verification.verify(load(tiny_run.artifact), 16_000_000)
    assert verdict.passed is None
    assert verdict.not_run == "ModuleNotFoundError: No module named 'torch' (S)"
    assert verification.verify(load(tiny_run.artifact), 1).passed is False, "the file is too large all the same"
    ended = caddie("verify", tiny_run.artifact, "--json", "--quiet")
    assert ended.status == 2
    assert ended.err.startswith("caddie: not verified, because the probes could not be run in a sandbox: ModuleNotF")
    assert json.loads(ended.out)["passed"] is None
    monkeypatch.setattr(verification, "run_in_sandbox", lambda *given, **limits: replace(missing, stderr=b"Killed\n"))
    assert verification.verify(load(tiny_run.artifact), 16_000_000).passed is False


# Limits


def strike(marker: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is up as soon as `count` processes have the marker, whatever the clock says."""
    clock = SimpleNamespace(monotonic=lambda: 1e9 if len(alive(marker)) == count else 0.0)
    monkeypatch.setattr(module, "time", clock)


CHILDREN = """
    import subprocess, sys, time
    sleep = [sys.executable, "-c", "import time; time.sleep(60)", sys.argv[1]]
    subprocess.Popen(sleep)
    if "daemon" in sys.argv:
        subprocess.Popen(sleep, start_new_session=True)
    print("started", flush=True)
    if "wait" in sys.argv:
        time.sleep(60)
"""


def test_too_long_is_the_end_of_all_its_processes(
    namespaces: None, marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = Path("/proc/self/mountinfo").read_text()
    left = run(CHILDREN, marker, "daemon")
    assert (left.returncode, left.stdout, left.stopped) == (0, b"started\n", None)
    assert not alive(marker)
    strike(marker, 3, monkeypatch)
    late = run(CHILDREN, marker, "daemon", "wait", seconds=0.5)
    assert late.stopped == "it was stopped because it ran for more than 0.5 seconds"
    assert late.returncode == 128 + signal.SIGKILL
    assert not alive(marker)
    assert Path("/proc/self/mountinfo").read_text() == mounts


def test_a_plain_one_ends_with_its_children_too(marker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.sys, "platform", "darwin")
    left = run(CHILDREN, marker)  # the child holds the pipes
    assert (left.returncode, left.stdout, left.stopped) == (0, b"started\n", None)
    assert soon(lambda: not alive(marker))
    strike(marker, 2, monkeypatch)
    late = run(CHILDREN, marker, "wait")
    assert late.returncode == 128 + signal.SIGKILL
    assert late.stopped == "it was stopped because it ran for more than 20 seconds"
    assert soon(lambda: not alive(marker))


@pytest.mark.long
def test_it_does_not_outlive_who_asked_for_it(marker: str) -> None:
    code = f"""
        from caddie.verify.sandbox import run_in_sandbox
        run_in_sandbox("import time; time.sleep(60)", "{marker}", memory_bytes=1 << 30, seconds=60)
    """
    asked = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    try:
        assert soon(lambda: bool(alive(marker)), 60.0)  # importing caddie.verify alone takes seconds
    finally:
        asked.kill()
        asked.wait()
    assert soon(lambda: not alive(marker))


@pytest.mark.long
def test_too_much_memory_is_the_end_also_in_a_child() -> None:
    code = """
        import os, time
        if not os.fork():
            memory = bytearray(200 << 20)
        time.sleep(60)
    """
    outcome = run(code, memory=150 * MIB)
    assert outcome.stopped == "it was stopped because it took more than 150 MiB of memory"
    assert outcome.returncode == 128 + signal.SIGKILL
    assert 150 * MIB < outcome.peak_bytes < 400 * MIB


def test_a_child_with_the_number_of_a_process_that_ended_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "memory = bytearray(b'1') * (64 << 20); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        this: Any = SimpleNamespace(pid=os.getpid())
        sandboxed = module.Sandboxed(process=this, isolated=True, isolation="", others={child.pid})
        both = [os.getpid(), child.pid]
        looks = []
        for running in (both, both, [os.getpid()], both):  # the other process ends, its number returns
            monkeypatch.setattr(psutil, "pids", lambda running=running: running)
            looks.append(sandboxed.resident_bytes())
        child.communicate(b"\n")
    assert max(looks[:3]) + 32 * MIB < looks[3]


@pytest.mark.long
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_too_much_output_is_the_end(stream: str) -> None:
    outcome = run(f"import sys\nwhile True: sys.{stream}.write('x' * 65536)", output_bytes=MIB)
    assert outcome.stopped == "it was stopped because it wrote more than 1 MiB"
    assert {"stdout": outcome.stdout, "stderr": outcome.stderr}[stream] == b"x" * MIB


def test_a_little_too_much_output_is_seen_as_well() -> None:
    assert run("print('x' * 100)", output_bytes=101).stopped is None
    assert run("print('x' * 101)", output_bytes=101).stopped is not None


def test_what_is_written_last_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the process ends when nobody looks."""
    communicate, late = subprocess.Popen.communicate, []

    def ended_meanwhile(self: Any, *given: Any, **options: Any) -> Any:
        if not late:
            late.append(self.wait())
            raise subprocess.TimeoutExpired(self.args, 0.0)
        return communicate(self, *given, **options)

    monkeypatch.setattr(subprocess.Popen, "communicate", ended_meanwhile)
    assert run("print('x' * 101)", output_bytes=101).stopped == "it was stopped because it wrote more than 9.63e-05 MiB"
    assert late == [0]


# Where it cannot be isolated


def test_elsewhere_than_on_linux_it_is_plain_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.sys, "platform", "darwin")
    outcome = run("print(1)")
    assert (outcome.returncode, outcome.stdout, outcome.isolated) == (0, b"1\n", False)
    assert outcome.isolation == (
        "plain subprocess, with the network as usual and the disk as usual, except that no file can be made longer: "
        "more needs Linux"
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("refused", "beginning"),
    [
        ("_unshare", "plain subprocess, with the network as usual and the disk as usual, "),
        ("_build_root", "no network (Linux namespaces), the disk as usual, "),
    ],
)
def test_what_the_system_refuses_is_said(
    refused: str, beginning: str, refuse: Callable[..., None], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Each step is refused inside the launcher itself; the next lower one is taken."""
    if refused == "_build_root":
        request.getfixturevalue("namespaces")
    refuse(refused)
    (tmp_path / "beside").write_text("beside")
    code = """
        import json, socket, sys
        from pathlib import Path
        try:
            Path(sys.argv[1], "new").write_text("x")
        except OSError as error:
            print(json.dumps([Path(sys.argv[1], "beside").read_text(), error.strerror, len(socket.if_nameindex())]))
    """
    outcome = run(code, tmp_path)
    beside, error, interfaces = answer(outcome)
    assert (beside, error) == ("beside", "File too large")
    assert interfaces == (len(socket.if_nameindex()) if refused == "_unshare" else 1)
    assert not outcome.isolated
    assert outcome.isolation.startswith(beginning)
    assert outcome.isolation.endswith(": the system refuses more (step: Refused)")


def test_a_command_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    patched = module._LAUNCHER.replace("; enter(", "; sys.argv[-1] = '[\"/absent\"]'; enter(")
    monkeypatch.setattr(module, "_LAUNCHER", patched)
    with pytest.raises(UserError, match=r"cannot start .* \(launcher: No such file or directory\)"):
        run("")


# The watch


def touches(action: Callable[[], object], *allowed: Path) -> list[str]:
    with watch_reads(allowed) as touched:
        try:
            action()
        except OSError:
            assert touched  # what fails has been tried
    return touched


def test_files_are_seen_however_they_are_opened(tmp_path: Path) -> None:
    file = tmp_path / "targets.npy"
    np.save(file, np.arange(5))
    base = sqlite3.connect(tmp_path / "base")
    base.close()
    link = tmp_path / "link"
    link.symlink_to(file)
    opened = [f"opened {file}"]
    assert touches(lambda: open(file).close()) == opened
    assert touches(lambda: open(os.fsencode(file), "ab").close()) == opened
    assert touches(lambda: os.close(os.open(file, os.O_RDONLY))) == opened
    assert touches(lambda: file.read_bytes()) == opened
    assert touches(lambda: link.read_bytes()) == opened
    assert touches(lambda: np.load(file)) == opened
    assert touches(lambda: np.fromfile(file, np.int64)) == opened
    assert touches(lambda: np.memmap(file, mode="r")) == [*opened, f"mapped {file}"]
    assert touches(lambda: sqlite3.connect(tmp_path / "base").close()) == [f"opened {tmp_path / 'base'}"]
    assert touches(lambda: open(f"/proc/self/root{file}").close()) == opened
    assert touches(lambda: os.listdir(tmp_path)) == [f"listed {tmp_path}"]
    assert touches(lambda: list(tmp_path.glob("*"))) == [f"listed {tmp_path}"]
    assert touches(lambda: (tmp_path / "absent").read_text()) == [f"opened {tmp_path / 'absent'}"]
    with file.open("rb") as before:
        assert touches(lambda: mmap.mmap(before.fileno(), 0, access=mmap.ACCESS_READ).close()) == [f"mapped {file}"]
        assert touches(lambda: open(before.fileno(), "rb", closefd=False).close()) == opened


def test_each_thing_is_named_once_and_only_while_watched(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with watch_reads() as outer, watch_reads([tmp_path]) as inner:
        for _ in range(3):
            file.read_text()
    file.with_name("other").touch()
    assert (outer, inner) == ([f"opened {file}"], [])


def test_an_entry_of_the_path_may_be_opened_if_it_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editable install has one, which Python opens as an archive when it looks for packages."""
    entry = tmp_path / "entry"
    assert touches(entry.read_text) == [f"opened {entry}"]
    monkeypatch.setattr(sys, "path", [*sys.path, str(entry)])
    with watch_reads() as touched, pytest.raises(FileNotFoundError):
        entry.read_text()
    assert touched == []
    assert touches(lambda: entry.write_text("")) == [f"opened {entry}"]
    assert touches(entry.read_text) == [f"opened {entry}"]


def test_allowed_is_the_path_and_what_is_below_it(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for name in ("a/file", "ab"):
        (tmp_path / name).touch()
    assert touches(lambda: (tmp_path / "a" / "file").read_text(), tmp_path / "a") == []
    assert touches(lambda: (tmp_path / "ab").read_text(), tmp_path / "a") == [f"opened {tmp_path / 'ab'}"]
    assert touches(lambda: (tmp_path / "a/../ab").read_text(), tmp_path / "a") == [f"opened {tmp_path / 'ab'}"]


def test_network_processes_and_libraries_are_seen() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        connect = f"used the network: socket.connect ('127.0.0.1', {port})"
        assert connect in touches(lambda: socket.create_connection(("127.0.0.1", port)))
        assert connect in touches(lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/"))
    ran = touches(lambda: subprocess.run([sys.executable, "-c", ""], check=True))
    assert ran[0] == f"started a process: subprocess.Popen {sys.executable}"
    assert touches(lambda: os.system("true")) == ["started a process: os.system b'true'"]
    assert touches(lambda: ctypes.CDLL(None)) == ["loaded the C library through ctypes"]
    assert touches(lambda: ctypes.CDLL("libc.so.6")) == ["loaded libc.so.6 through ctypes"]


def test_own_files_and_plain_work_are_not_seen() -> None:
    def work() -> None:
        import caddie.data.splits  # or another module that is seldom loaded yet

        torch.nn.Linear(4, 4)(torch.ones(1, 4)).sum().backward()
        Path(caddie.data.splits.__file__).read_text()
        Path(torch.__file__).read_text()
        Path("/dev/null").read_text()
        mmap.mmap(-1, 10).close()
        os.listdir(sys.path[0] or ".")

    assert touches(work) == []


@pytest.mark.long
def test_pytorch_finds_no_library_there_that_needs_a_folder_to_write_to() -> None:
    """Dill, which comes with lm-evaluation-harness, asks for the folder of temporary files as it is imported."""
    program = "import sys, torch.utils.data; print(sys.modules['dill'])"
    ended = run_in_sandbox(program, memory_bytes=4 << 30, seconds=60)
    assert (ended.stdout, ended.returncode) == (b"None\n", 0), ended.stderr


def test_the_working_folder_holds_no_packages_whatever_lies_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert str(tmp_path) not in module._package_folders()
    monkeypatch.setattr(psutil, "__file__", str(tmp_path / "psutil" / "__init__.py"))
    assert str(tmp_path) in module._package_folders()
