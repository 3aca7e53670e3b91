"""The doctor: every question against made-up machines, the rules, the verdict, and this machine for real."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest
import torch
from click.testing import CliRunner
from conftest import call

from caddie.cli import app
from caddie.config.schedules import PiecewiseConstant
from caddie.doctor import checks, estimates, examination, gpus, host, pace, processes
from caddie.doctor.checks import Finding, OpenRun
from caddie.doctor.estimates import REFERENCES, Estimate, estimate, expected
from caddie.doctor.examination import call_within
from caddie.doctor.gpus import Accelerators, driver_gpus
from caddie.doctor.host import Disk
from caddie.doctor.pace import Pace
from caddie.doctor.processes import Activity, Process
from caddie.errors import CheckFailed, UserError
from caddie.model import GPT
from caddie.model.flops import flops_per_token
from caddie.recipes.catalog import find
from caddie.run.run_lock import this_process
from caddie.runtime.memory import Memory, memory
from caddie.train.memory import MemoryEstimate
from caddie.train.settings import Train
from caddie.train.stage_memory import estimate_stages

GIB = 1 << 30

SLEEP = f"{shlex.quote(sys.executable)} -S -c 'import time; time.sleep(30)'"
"""What a shell can be told to wait with on any machine."""


def levels(found: list[Finding]) -> list[str]:
    return [finding.level for finding in found]


# Questions


def test_a_question_is_answered_fails_or_is_left_behind() -> None:
    def fail() -> int:
        raise OSError(5, "Input/output\nerror")

    assert call_within(5, lambda: 7) == (7, "")
    assert call_within(5, lambda: None) == (None, "")
    assert call_within(5, fail) == (None, "OSError: [Errno 5] Input/output error")
    began = time.monotonic()
    assert call_within(0.05, lambda: time.sleep(0.5)) == (None, "no answer within 0.05 seconds")
    assert time.monotonic() - began < 0.4


# The host


def write(root: Path, **files: str) -> Path:
    """Files below a folder; `__` in a name is a slash, `_dot_` a dot."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def on_cores(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system say that this process may run on so many cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)


def test_a_processor_and_its_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cores(8, monkeypatch)
    info = "processor\t: 0\nmodel name\t: Xeon (R) 8480+\nflags\t\t: fpu avx2 avx512f amx_bf16 amx_tile\n"
    proc = write(tmp_path / "proc", cpuinfo=info, self__cgroup="0::/jobs/one\n")
    groups = tmp_path / "groups"
    assert host.processor(proc, groups) == host.Processor("Xeon (R) 8480+", 8, ("avx2", "avx512f", "amx_bf16"))
    write(groups, jobs__one__cpu_dot_max="max 100000\n", jobs__cpu_dot_max="250000 100000\n")
    assert host.processor(proc, groups).cores == 2.5
    write(proc, self__cgroup="4:cpu,cpuacct:/old\n1:name=systemd:/x\n")
    write(groups, cpu__old__cpu_dot_cfs_quota_us="300000\n", cpu__old__cpu_dot_cfs_period_us="100000\n")
    assert host.processor(proc, groups).cores == 3
    write(groups, cpu__old__cpu_dot_cfs_quota_us="-1\n")
    assert host.processor(proc, groups).cores == 8
    write(proc, cpuinfo="Features : asimd bf16 crc32\n")
    assert host.processor(proc, groups).instruction_sets == ("asimd", "bf16")
    assert host.processor(tmp_path / "none", groups).instruction_sets is None


def test_memory_and_its_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SimpleNamespace(total=4_096_000, available=3_072_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    assert memory(proc, groups) == Memory(4_096_000, 3_072_000)
    write(proc, self__cgroup="0::/box\n")
    assert memory(proc, groups) == Memory(4_096_000, 3_072_000)
    write(groups, box__memory_dot_max="1000000\n", box__memory_dot_current="400000\n")
    assert memory(proc, groups) == Memory(1_000_000, 600_000)
    write(groups, memory_dot_max="500000\n", memory_dot_current="450000\n")
    assert memory(proc, groups) == Memory(500_000, 50_000), "a group around its own"
    write(groups, memory_dot_max="1000000\n", memory_dot_current="950000\n")
    assert memory(proc, groups) == Memory(1_000_000, 50_000), "of the same limit, with less left"
    write(groups, memory_dot_max="2000000\n", memory_dot_current="1950000\n")
    assert memory(proc, groups) == Memory(1_000_000, 50_000), "of a larger limit, with less left"
    write(groups, memory_dot_max="max\n", box__memory_dot_max="9223372036854771712\n")
    assert memory(proc, groups) == Memory(4_096_000, 3_072_000)
    write(proc, self__cgroup="5:memory:/old\n")
    write(groups, memory__old__memory_dot_limit_in_bytes="2000000", memory__old__memory_dot_usage_in_bytes="500000")
    assert memory(proc, groups) == Memory(2_000_000, 1_500_000)


def test_the_disk_of_a_folder_is_that_of_the_innermost_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spaced = str(tmp_path / "a b")
    mounts = [("/", "ext4"), (spaced, "ext3"), (spaced, "nfs4"), (f"{tmp_path}/a", "btrfs")]
    found = [SimpleNamespace(mountpoint=mountpoint, fstype=kind) for mountpoint, kind in mounts]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: found)
    (tmp_path / "a b").mkdir()
    disk = host.disk(tmp_path / "a b" / "not" / "there")
    assert (disk.kind, disk.network) == ("nfs4", True)
    assert disk.free_bytes > 0
    assert host.disk(tmp_path).kind == "ext4"
    found.clear()
    assert host.disk(tmp_path).kind is None


@pytest.mark.parametrize(
    ("kind", "network"),
    [
        *[(kind, True) for kind in ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "9p", "fuse", "fuse.sshfs")],
        *[(kind, False) for kind in ("ext4", "overlay", "tmpfs", "fuse.fuse-overlayfs", "fusectl", "fuseblk", "xfs")],
    ],
)
def test_network_disks_are_known_by_their_kind(kind: str, network: bool) -> None:
    assert Disk("x", 0, kind).network is network


def test_the_compile_cache_is_where_pytorch_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Path(torch.__file__).parent / "_inductor" / "runtime" / "cache_dir_utils.py"
    theirs = runpy.run_path(str(place))  # alone, without the compiler, which takes a second to import
    assert str(host.compile_cache({})) == theirs["default_cache_dir"]()
    monkeypatch.setattr(host.getpass, "getuser", lambda: {}["a user without a name"])
    assert host.compile_cache({}).name == f"torchinductor_uid_{os.getuid()}"
    assert host.compile_cache({"TORCHINDUCTOR_CACHE_DIR": "/x/y"}) == Path("/x/y")


# Processes


Table = dict[int, tuple[str | None, int | None, float | None, list[str] | None]]
"""Process to title, parent, percent of a core, and command line, as psutil has them; None for what it may not see."""


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Activity]:
    """Returns what is seen of a made-up table of processes on cores that are so many percent busy."""

    def seen(table: Table, busy: tuple[float, ...] = (0.0, 75.0)) -> Activity:
        calls: list[object] = []
        own = [SimpleNamespace(pid=pid) for pid, (_, parent, _, _) in table.items() if parent == 10]
        this = SimpleNamespace(pid=10, children=lambda recursive: own)

        def process_iter(names: list[str]) -> Iterator[SimpleNamespace]:
            calls.append(names)
            for pid, (title, parent, percent, command) in table.items():
                known = {"pid": pid, "ppid": parent, "name": title, "cpu_percent": percent, "cmdline": command}
                known["status"] = psutil.STATUS_RUNNING if title == "waits for a core" else psutil.STATUS_SLEEPING
                yield SimpleNamespace(info={name: known[name] for name in names})

        def cpu_percent(seconds: float, percpu: bool) -> list[float]:
            assert percpu
            calls.append(seconds)
            return list(busy)

        monkeypatch.setattr(psutil, "process_iter", process_iter)
        monkeypatch.setattr(psutil, "cpu_percent", cpu_percent)
        monkeypatch.setattr(psutil, "Process", lambda: this)
        monkeypatch.setattr(processes, "allowed_cores", lambda: {0, 1})
        found = processes.activity(2.0)
        assert calls[:2] == [["cpu_percent"], 2.0]
        assert len(calls) == 3
        assert "cpu_percent" in calls[2]
        return found

    return seen


def test_busy_processes_are_those_of_others(look: Callable[..., Activity]) -> None:
    found = look(
        {
            1: ("init", 0, 0.0, ["/sbin/init"]),
            10: ("python", 1, 100.0, ["/usr/bin/python3", "-m", "caddie", "doctor"]),
            11: ("child", 10, 100.0, ["child"]),
            20: ("a) b (c", 1, 100.0, ["/opt/x/python3.11", "-u", "-X", "dev", "train.py", "--token", "secret"]),
            21: ("kworker/0:1", 2, 25.0, []),
            22: ("idle", 1, 0.0, ["idle"]),
        },
        (0.0, 75.0, 0.0, 0.0),  # of which this process may use two
    )
    assert [(process.pid, process.cores, process.name) for process in found.processes] == [
        (20, 1.0, "python3.11 train.py"),
        (21, 0.25, "kworker/0:1"),
        (1, 0.0, "init"),
        (22, 0.0, "idle"),
    ]
    assert found.idle_cores == 1.25
    rules = checks.check_cores(found, 2, 1)
    assert levels(rules) == ["warning"]
    assert rules[0].what == "python3.11 train.py (process 20) uses 1.0 cores"
    assert rules[0].fix.endswith("kill 20")
    assert "secret" not in json.dumps([finding.what for finding in rules])


def test_what_may_not_be_seen_of_a_process_does_not_stop(look: Callable[..., Activity]) -> None:
    found = look({10: ("x", 1, 0.0, ["x"]), 77: (None, None, None, None)}, ())
    assert [(process.pid, process.cores, process.name) for process in found.processes] == [(77, 0.0, "")]
    assert found.idle_cores is None


def test_who_waits_for_a_core_is_not_idle(look: Callable[..., Activity]) -> None:
    command = ["/v/bin/python", "-m", "caddie", "run", "tiny"]
    found = look({20: ("waits for a core", 1, 0.0, command), 21: ("sleeps", 1, 0.0, command)})
    assert [process.pid for process in processes.orphans(found.processes)] == [21]


@pytest.mark.long
def test_a_process_at_work_is_seen_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [])  # so that a child counts as a stranger
    with subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) as busy:
        try:
            (found,) = [process for process in processes.activity().processes if process.pid == busy.pid]
        finally:
            busy.kill()
    assert 0 < found.cores < 1.5
    assert (found.parent, found.name) == (os.getpid(), Path(sys.executable).name)
    assert found.arguments[1:] == ("-S", "-c", "while True: pass")


def test_cores_must_be_left_for_every_process() -> None:
    quiet = Activity((), 3.7)
    assert levels(checks.check_cores(quiet, 4, 4)) == ["ok"]
    (short,) = checks.check_cores(quiet, 4, 5)
    assert (short.level, short.fix) == ("problem", "wait until other work ends, or give fewer --gpus")
    assert checks.check_cores(Activity((), 0.0), 4, 1)[0].fix == "wait until other work ends"
    assert levels(checks.check_cores(quiet, 2, 3)) == ["problem"], "a container with two of the cores"
    assert levels(checks.check_cores(Activity((), None), 2, 2)) == ["ok"]
    crowd = Activity(tuple(Process(pid, 1, 0.9, ("x",), "x") for pid in range(100, 110)), 50.0)
    found = checks.check_cores(crowd, 64, 1)
    assert levels(found) == ["warning"] * 6
    assert found[-1].what == "5 more processes use 4.5 cores"


@pytest.mark.parametrize(
    ("command", "expected_verb"),
    [
        (("/v/python", "-m", "caddie", "run", "tiny"), "run"),
        (("/v/bin/python3", "/v/bin/caddie", "study", "x.py"), "study"),
        (("/v/bin/caddie", "trial", "job.json"), "trial"),
        (("/v/bin/caddie", "board"), None),
        (("/v/bin/caddie", "--help"), None),
        (("vim", "caddie", "x"), None),
        (("grep", "-m", "caddies", "x"), None),
        (("python", "-c", "import caddie; caddie.run('tiny')"), None),
        ((), None),
    ],
)
def test_our_own_verbs_are_known(command: tuple[str, ...], expected_verb: str | None) -> None:
    process = Process(1, 1, 0.0, command, "t")
    assert process.verb == expected_verb
    assert expected_verb is None or process.name == f"caddie {expected_verb}"


def test_what_is_left_over_is_idle_and_orphaned() -> None:
    def ours(pid: int, parent: int, cores: float = 0.0) -> Process:
        return Process(pid, parent, cores, ("python", "-m", "caddie", "run", "tiny"), "python")

    orphan, waits, works = ours(30, 1), ours(40, 1), ours(41, 40, 0.9)
    has_parent, other = ours(50, 7), Process(60, 1, 0.0, ("sleep", "9"), "sleep")
    everybody = [orphan, waits, works, has_parent, other]
    assert processes.orphans(everybody) == [orphan]
    assert processes.orphans([waits, ours(41, 40)]) == [], "a busy machine gives low priorities nothing for seconds"
    found = checks.check_cores(Activity(tuple(everybody), 8.0), 8, 1)
    assert [(one.level, one.fix) for one in found][-1] == ("warning", "kill 30")


@pytest.mark.long
def test_this_process_and_all_that_descend_from_it_are_no_others() -> None:
    waits = "import sys; sys.stdin.read()"
    starts = f"import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', '{waits}']); print(flush=True)"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-S", "-c", f"{starts}; {waits}"], **pipes) as child:
        assert child.stdout is not None
        child.stdout.readline()
        (grandchild,) = psutil.Process(child.pid).children()
        others = {process.pid for process in processes.activity().processes}
        assert grandchild.is_running()
        child.communicate()
    assert others
    assert not {os.getpid(), child.pid, grandchild.pid} & others


def test_runs_are_told_apart_by_the_process_that_holds_them(tmp_path: Path) -> None:
    from run_folder import make_result, write_run

    root = tmp_path / "runs"
    step = json.dumps({"event": "step", "step": 3, "seconds": 1.0, "loss": 2.0, "progress": 0.5}) + "\n"
    for name in ("trains", "hangs", "ended", "far", "gone", "killed", "failed"):
        write(root / name, **{"log_dot_jsonl": step})
    here = asdict(this_process())
    for name in ("trains", "hangs"):
        write(root / name, **{"_dot_lock": json.dumps(here)})
    for name in ("far", "gone"):
        write(root / name, **{"_dot_lock": json.dumps(here | {"host": "elsewhere", "pid": 7})})
    write(root / "killed", **{"_dot_lock": json.dumps(here | {"name": "a process that was killed"})})
    write(root, **{"failed__error_dot_json": "{}"})
    write_run(root / "done", make_result())
    old = time.time() - 3600
    for path in (path for name in ("hangs", "ended", "gone") for path in [*(root / name).iterdir(), root / name]):
        os.utime(path, (old, old))
    found = {one.folder.name: one for one in examination.open_runs(root)}
    assert {name: (one.holder and one.holder.pid, one.stale) for name, one in found.items()} == {
        "trains": (os.getpid(), False),
        "hangs": (os.getpid(), True),
        "ended": (None, True),
        "far": (7, False),
        "gone": (None, True),
        "killed": (None, False),
    }
    said = {
        one.what.replace(str(root), "runs"): (one.level, one.fix) for one in checks.check_runs(list(found.values()))
    }
    pid, wait = os.getpid(), "wait until it ends, or stop it: kill"
    hangs = f"runs/hangs has not been written to for minutes, but process {pid} still holds it"
    (ended,) = (what for what in said if what.startswith("3 runs ended without a result"))
    assert said == {
        f"runs/trains is in use by process {pid}": ("warning", f"{wait} {pid}"),
        hangs: ("problem", f"kill {pid}"),
        "runs/far is in use by process 7 on elsewhere": ("warning", f"{wait} 7 on elsewhere"),
        ended: ("warning", said[ended][1]),
    }
    assert levels(checks.check_runs([])) == ["ok"]
    assert examination.open_runs(tmp_path / "none") == []


def test_many_runs_that_ended_are_one_line() -> None:
    (found,) = checks.check_runs([OpenRun(Path(f"runs/a b{n}"), True, None) for n in range(9)])
    assert found.what == "9 runs ended without a result: runs/a b0, runs/a b1, runs/a b2, ..."
    assert "--out 'runs/a b0'" in found.fix


# GPUs


MIB = 1 << 20


def card(index: int = 0, used: int = 4, reasons: int = 0, held: tuple[Any, ...] = (), **other: Any) -> dict[str, Any]:
    """Answers of NVML about one GPU, by the end of the function's name; functions without an answer are refused."""
    return {
        "Name": "NVIDIA H100 80GB HBM3",
        "UUID": f"GPU-0000-{index}",
        "MemoryInfo": SimpleNamespace(total=81559 * MIB, used=used * MIB),
        "Temperature": 88,
        "ClockInfo": 1200,
        "MaxClockInfo": 1980,
        "CurrentClocksEventReasons": reasons | pynvml.nvmlClocksEventReasonGpuIdle,
        "ComputeRunningProcesses": list(held),
        "GraphicsRunningProcesses": [],
        **other,
    }


def holder(pid: int, mib: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=None if mib is None else mib * MIB)


HELD = (holder(4711, 20_000), holder(12, None))
NAMES = {4711: "/v/bin/python --token secret", 5: "/usr/bin/Xorg --key secret"}


class Nvml:
    """NVML with made-up GPUs, in place of the library's functions; constants and exceptions are the library's."""

    def __init__(self, *cards: dict[str, Any]) -> None:
        self.cards, self.open = cards, 0

    def __getattr__(self, name: str) -> Any:
        key = name.removeprefix("nvmlDeviceGet")
        if key == name:
            return getattr(pynvml, name)

        def ask(card: dict[str, Any], *arguments: object) -> Any:
            if key not in card:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return card[key]

        return ask

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95.05"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        return self.cards[index]

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        if pid not in NAMES:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return NAMES[pid]


def read(*cards: dict[str, Any]) -> list[gpus.Gpu]:
    """Return the findings of the doctor on these cards."""
    nvml = Nvml(*cards)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpus, "pynvml", nvml)
        found = driver_gpus()
    assert nvml.open == 0
    assert found is not None
    return found


def test_cards_are_read_whatever_the_driver_knows() -> None:
    (one,) = read(card())
    assert (one.name, one.driver, one.memory_mib, one.used_mib) == ("NVIDIA H100 80GB HBM3", "580.95.05", 81559, 4)
    assert (one.celsius, one.clock_mhz, one.fastest_mhz, one.uuid) == (88, 1200, 1980, "GPU-0000-0")
    assert (one.slowdowns, one.holders, one.held_by_setting) == ((), (), False)
    (bare,) = read({"Name": "Tesla"})
    assert (bare.name, bare.memory_mib, bare.clock_mhz, bare.uuid) == ("Tesla", None, None, "")
    assert (bare.slowdowns, bare.holders, bare.held_by_setting) == ((), (), False)
    assert read() == []
    assert [one.index for one in read(*(card(n) for n in range(8)))] == list(range(8))
    assert levels(checks.check_gpus([one])) == ["ok"]
    assert checks.check_gpus([]) == []


@pytest.mark.parametrize("kind", ["Event", "Throttle"])
def test_clocks_held_down_are_a_problem(kind: str) -> None:
    def held(reason: int) -> gpus.Gpu:
        known = card(reasons=reason)
        reasons = known.pop("CurrentClocksEventReasons")
        return read({**known, f"CurrentClocks{kind}Reasons": reasons})[0]

    one = replace(held(pynvml.nvmlClocksEventReasonHwThermalSlowdown), index=3)
    (found,) = checks.check_gpus([one])
    assert (found.level, one.slowdowns) == ("problem", ("hw_thermal_slowdown",))
    assert found.what == "GPU 3 lowers its clocks to 1200 MHz of 1980 (hw_thermal_slowdown, 88 °C)"
    assert len(checks.check_clocks([one] * 5)) == 1, "of several looks each reason once"
    (found,) = checks.check_gpus([held(pynvml.nvmlClocksEventReasonApplicationsClocksSetting)])
    assert (found.level, "nvidia-smi -i 0 -rac" in found.fix) == ("warning", True)


def test_others_on_a_gpu_are_a_problem() -> None:
    found = checks.check_gpus(read(card(held=HELD, used=20_100)))
    assert levels(found) == ["problem", "problem"]
    assert found[0].what == "python (process 4711) holds 20,000 MiB of GPU 0"
    assert found[1].what == "[Not Found] (process 12) holds memory of GPU 0"
    desk = (holder(5, 300), holder(12, None))
    found = checks.check_gpus(read(card(held=desk, used=900)))
    assert (levels(found), found[0].what) == (["warning", "problem"], "Xorg (process 5) holds 300 MiB of GPU 0")
    screen = card(GraphicsRunningProcesses=[desk[0]])
    assert levels(checks.check_gpus(read(screen))) == ["ok"]
    both = card(GraphicsRunningProcesses=[desk[0]], held=desk[:1])
    assert levels(checks.check_gpus(read(both))) == ["warning"], "it computes as well"
    (unseen,) = checks.check_gpus(read(card(used=30_000)))
    assert unseen.what.startswith("30,000 MiB of GPU 0 are held by an unseen program")


def test_without_a_driver_there_are_no_gpus_and_a_broken_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(code: int) -> Any:
        def init() -> None:
            raise pynvml.NVMLError(code)

        return init

    nvml = Nvml(card())
    monkeypatch.setattr(gpus, "pynvml", nvml)
    nvml.nvmlInit = refuse(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert gpus.driver_gpus() is None
    nvml.nvmlInit = refuse(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    assert "Driver Not Loaded" in call_within(5, gpus.driver_gpus)[1]
    nvml.nvmlInit = lambda: time.sleep(0.5)
    assert call_within(0.05, gpus.driver_gpus) == (None, "no answer within 0.05 seconds")


NONE = Accelerators((), (), (), {"causal": "SDPA"})
HOPPER = Accelerators(
    ("NVIDIA H100",), ("0000-0",), ((9, 0),), {"causal": "SDPA (flash)", "documents": "FlexAttention"}
)


def test_missing_kernels_come_with_what_installs_them() -> None:
    rule = checks.check_kernels
    assert rule(NONE, None, 1, False, "2.13", None, False) == []
    (found,) = rule(HOPPER, [], 1, True, "2.13", "13.0", True)
    assert (found.level, "FlashAttention 3 is not installed") == ("warning", found.what)
    assert found.fix.endswith("/whl/cu130")
    quick = replace(HOPPER, attention={"causal": "FlashAttention 3"})
    assert rule(quick, [], 1, True, "2.13", "13.0", True) == []
    assert [one.what for one in rule(quick, [], 1, False, "2.13", "13.0", True)] == ["no cc, gcc or clang was found"]
    (found,) = rule(quick, [], 8, True, "2.13", "13.0", True)
    assert (found.level, found.fix) == ("problem", "--gpus 1")
    (found,) = rule(quick, [], 1, True, "2.13", "13.0", False)
    assert (found.what, found.fix) == ("Triton is not installed", "pip install triton")
    cards = read(card())
    (found,) = rule(NONE, cards, 1, True, "2.13.0+cpu", None, True)
    assert (found.level, found.what) == ("problem", "the driver has 1 GPU, and PyTorch 2.13.0+cpu sees none")
    assert "pip install" in found.fix
    assert "CUDA 13.0" in rule(NONE, cards, 1, True, "2.13.0", "13.0", True)[0].fix


# Environment, disks, memory


@pytest.mark.parametrize(
    ("name", "value", "gpu", "harm"),
    [
        ("NCCL_IB_DISABLE", "1", True, True),
        ("NCCL_IB_DISABLE", "0", True, False),
        ("NCCL_IB_DISABLE", "", True, False),
        ("NCCL_IB_DISABLE", "1", False, False),
        ("NCCL_NET", "Socket", True, True),
        ("NCCL_NET", "IB", True, False),
        ("CUDA_VISIBLE_DEVICES", "", True, True),
        ("CUDA_VISIBLE_DEVICES", "-1", True, True),
        ("CUDA_VISIBLE_DEVICES", "0,1", True, False),
        ("TORCH_COMPILE_DISABLE", "1", False, True),
        ("TORCHDYNAMO_DISABLE", "false", False, False),
        ("OMP_NUM_THREADS", "1", False, True),
        ("OMP_NUM_THREADS", "4", False, False),
        ("OMP_NUM_THREADS", "1", True, False),
        ("OMP_NUM_THREADS", "4,2", False, False),
        ("OMP_NUM_THREADS", "²", False, False),
        ("HOME", "/x", True, False),
    ],
)
def test_variables_that_harm(name: str, value: str, gpu: bool, harm: bool) -> None:
    (found,) = checks.check_environment({name: value}, gpu, 4)
    assert found.level == ("warning" if harm else "ok")
    assert not harm or (found.fix == f"unset {name}" and found.why)


def test_fewer_threads_do_no_harm_where_other_programs_work() -> None:
    def warned(threads: int, idle: float | None) -> bool:
        return levels(checks.check_environment({"OMP_NUM_THREADS": str(threads)}, False, 4, idle)) == ["warning"]

    assert warned(1, None)
    assert warned(1, 3.9)
    assert not warned(1, 1.2)
    assert not warned(2, 0.0)
    assert warned(5, 0.0)


def test_disks_and_memory_that_are_full() -> None:
    rule, plenty = checks.check_disks, Disk("w", 100 * GIB, "ext4")
    assert levels(rule(plenty, plenty, 10**7)) == ["ok"]
    assert levels(rule(replace(plenty, free_bytes=GIB // 2), plenty, 10**7)) == ["problem"]
    assert levels(rule(plenty, plenty, 4 * 10**9)) == ["problem"]
    assert levels(rule(plenty, replace(plenty, free_bytes=0, kind="nfs4"), 1)) == ["problem", "warning"]
    assert levels(checks.check_memory(Memory(8 * GIB, 4 * GIB))) == ["ok"]
    assert levels(checks.check_memory(Memory(8 * GIB, GIB // 2))) == ["problem"]


# References and estimates


def test_references_are_of_recipes_and_say_where_from() -> None:
    for one in REFERENCES:
        assert find(one.recipe).parameters
        assert one.tokens_per_second > 1000
        assert one.source
        assert re.match(r"20\d\d-\d\d", one.date)


def test_a_known_recipe_is_compared_with_its_own_rate_and_others_by_their_arithmetic() -> None:
    own = expected("NVIDIA H100 80GB HBM3", find("baseline"))
    assert own is not None
    assert (round(own.tokens_per_second), own.scaled) == (1_505_191, False)
    other = expected("NVIDIA H100 80GB HBM3", find("ten_layers"))
    assert other is not None
    assert other.scaled
    work = [flops_per_token(find(name).model, 1024, 0.0) for name in (other.reference.recipe, "ten_layers")]
    assert other.tokens_per_second == pytest.approx(other.reference.tokens_per_second * work[0] / work[1], rel=0.2)
    assert expected("NVIDIA A100-SXM4-80GB", find("baseline")) is None
    assert expected("AMD EPYC, 64 cores, avx2", find("tiny")) is None
    assert expected("AMD EPYC, 2 cores, avx2 avx512f", find("tiny")) is None
    narrow = expected("AMD EPYC, 2 cores, avx2", find("tiny"))
    wide = expected("AMD EPYC, 2 cores, avx2 avx512f avx512_bf16", find("tiny"))
    assert narrow is not None
    assert wide is not None
    assert not narrow.scaled
    assert wide.scaled  # from a larger model, the only one that was measured there since
    assert narrow.tokens_per_second < wide.tokens_per_second


def test_an_estimate_by_hand() -> None:
    train = find("tiny").train.but(seconds=60, steps=None, batch_tokens=2000)
    assert estimate(train, 1, [(0.0, 1e-4)]) == Estimate(300, 600_000, pytest.approx(60.0))
    assert estimate(train, 4, [(0.0, 1e-4)]) == Estimate(1200, 2_400_000, pytest.approx(60.0))
    # half the time at 0.2 s a step, half at 0.4 s
    assert estimate(train, 1, [(0.0, 1e-4), (0.5, 2e-4)]) == Estimate(225, 450_000, pytest.approx(60.0))
    steps = train.but(seconds=None, steps=100)
    assert estimate(steps, 1, [(0.0, 1e-4), (0.5, 2e-4)]) == Estimate(100, 200_000, pytest.approx(30.0))
    assert estimate(steps, 1, None) == Estimate(100, 200_000, None)
    both = train.but(steps=100)
    assert estimate(both, 1, [(0.0, 1e-4)]) == Estimate(100, 200_000, pytest.approx(20.0))
    assert estimate(both, 1, [(0.0, 1e-3)]) == Estimate(30, 60_000, pytest.approx(60.0))
    assert estimate(both, 1, None) is None
    assert estimate(train, 1, None) is None
    grows = train.but(batch_tokens=PiecewiseConstant(values=(1000, 3000), begins=(0.5,)), micro_batches=3)
    found = estimate(grows, 1, [(0.0, 1e-4)])
    assert found == Estimate(400, 600_000, pytest.approx(60.0))


PACE = Pace(((0.0, 1e-4),), 20, 3.0, "cpu, 1 thread", "bfloat16", 1, "SDPA", GIB, 1000)


def test_what_a_measurement_says() -> None:
    rule, reference = checks.check_pace, REFERENCES[0]

    def known(rate: float, scaled: bool = False) -> estimates.Expected:
        return estimates.Expected(rate, reference, scaled)

    many = Estimate(300, 1, 60.0)
    assert levels(rule(PACE, known(10_000), many, "x")) == ["ok"]
    assert levels(rule(PACE, known(11_000), many, "x")) == ["ok"]
    assert levels(rule(PACE, known(12_000), many, "x")) == ["warning"]
    assert levels(rule(PACE, known(21_000), many, "x")) == ["problem"]
    assert levels(rule(PACE, known(19_000, True), many, "x")) == ["ok"]
    assert levels(rule(PACE, known(99_000, True), many, "x")) == ["warning"]
    (found,) = rule(PACE, None, many, "GPU of tomorrow")
    assert found.what == "10,000 tokens per second; no reference for GPU of tomorrow"
    (found,) = rule(None, None, Estimate(19, 1, 60.0), "x")
    assert (found.level, found.what) == ("problem", "the budget ends after about 19 steps")
    (found,) = rule(None, None, Estimate(0, 1, 60.0), "x")
    assert (found.level, found.what) == ("problem", "the budget ends before the first step does")
    (found,) = rule("it was killed", None, None, "x")
    assert (found.level, found.what) == ("problem", "steps could not be timed: it was killed")
    assert rule(None, known(1.0), None, "x") == []


# The measurement

SMALL = (
    *("model.width=16", "model.depth=1", "model.block.attention.heads=2", "model.block.attention.key_value_heads=1"),
    *("model.block.mlp.hidden=16", "model.embedding.bigrams.buckets=64", "model.vocabulary=257"),
    *("train.batch_tokens=128", "train.sequence_length=32", "train.seconds=10", "pack.fit=none"),
)


def test_steps_are_timed_for_every_shape_and_every_share() -> None:
    recipe = pace.named("tiny", (*SMALL, "train.micro_batches=2", "train.steps=50"))
    recipe = recipe.but(
        {"train.seconds": None, "train.sequence_length": PiecewiseConstant(values=(16, 32), begins=(0.5,))}
    )
    found = pace.measure(recipe, 2, steps=3)
    assert [begin for begin, _ in found.seconds_per_token] == [0.0, pytest.approx(0.5, abs=0.02)]
    assert all(0 < seconds < 1 for _, seconds in found.seconds_per_token)
    assert (found.steps, found.precision, found.device) == (4, "float32", "cpu, 1 thread")
    assert found.warmup_seconds > 0
    assert found.peak_bytes > 10**7
    assert found.tokens_per_second == 1 / found.seconds_per_token[0][1]
    assert 5_000 < found.artifact_bytes < 50_000
    train = pace._share(recipe.train, 2)
    assert (train.batch_tokens, train.micro_batches) == (64, 1)
    stairs = PiecewiseConstant(values=(64, 128), begins=(0.5,))
    assert pace._share(recipe.train.but(batch_tokens=stairs), 2).batch_tokens == PiecewiseConstant(
        values=(32, 64), begins=(0.5,)
    )


def test_steps_that_would_take_too_long_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "PATIENCE_SECONDS", 1e-6)
    found = pace.measure(pace.named("tiny", SMALL), 1, steps=10**6)
    assert found.steps == 0
    assert found.tokens_per_second > 1


@pytest.mark.long
def test_the_compiler_is_not_timed_by_the_rough_look_that_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    timed, seen = pace._timed, list[str]()

    def watched(gpt: Any, train: Any, *given: Any) -> Any:
        seen.append(train.compile)
        return timed(gpt, train.but(compile="never"), *given)

    monkeypatch.setattr(pace, "_timed", watched)
    pace.measure(pace.named("tiny", (*SMALL, "train.compile=always")), 1, steps=2)
    assert seen == ["never", "always"]


def test_documents_are_random_and_begin_as_they_should() -> None:
    tokens = pace._documents(300, 60_000)
    begins = (tokens == 1).sum()
    assert tokens[0] == 1
    assert 60 < begins < 150
    assert tokens.min() == 1
    assert tokens.max() == 299


@pytest.mark.parametrize(
    ("status", "told", "noise", "says"),
    [
        (0, b'noise\n\n"the learning rate is wrong"\n', b"", "the learning rate is wrong"),
        (-9, b"", b"", "its process was ended by signal 9, as the system does when memory is short"),
        (-11, b"", b"", "its process was ended by signal 11"),
        (1, b"", b"Traceback\nImportError: no\x1b[31m torch\n", "its process failed with status 1: ImportError: no"),
        (0, b"", b"", "its process failed with status 0"),
        (0, b"[1]\n", b"", "its process failed with status 0"),
        (0, b'{"steps": 1}\n', b"", "its process failed with status 0"),
    ],
)
def test_a_measurement_that_fails_says_why(status: int, told: bytes, noise: bytes, says: str) -> None:
    found = pace._read(status, told, noise)
    assert isinstance(found, str)
    assert found.startswith(says)
    assert found.isprintable()


def test_a_measurement_comes_back_as_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def measure(recipe: Any, world: int) -> Pace:
        asked.append((recipe.name, recipe.train.seconds, world))
        return PACE

    monkeypatch.setattr(pace, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["-c", json.dumps(["tiny", ["train.seconds=7"], [], 2])])
    pace.main()
    assert asked == [("tiny", 7, 2)]
    assert pace._read(0, capsys.readouterr().out.encode(), b"") == PACE
    monkeypatch.setattr(pace, "measure", lambda recipe, world: (_ for _ in ()).throw(UserError("too wide")))
    pace.main()
    assert pace._read(0, capsys.readouterr().out.encode(), b"") == "too wide"


def test_the_process_that_measures_is_watched_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    popen = subprocess.Popen
    monkeypatch.setattr(pace, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(pace.subprocess, "Popen", lambda command, **given: popen(shlex.split(SLEEP), **given))
    monkeypatch.setattr(pace, "LONGEST_SECONDS", 0.2)
    began = time.monotonic()
    assert pace.measured("tiny", (), (), 1, lambda: looks.append(1)) == "it took more than 0 seconds"
    assert time.monotonic() - began < 5
    assert len(looks) >= 2


# The whole


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine of two cores on which nothing is wrong, and a measurement that takes no time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processes, "activity", lambda: Activity((), 2.0))
    monkeypatch.setattr(gpus, "driver_gpus", lambda: None)
    monkeypatch.setattr(host, "processor", lambda: host.Processor("AMD EPYC", 2, ("avx2",)))
    monkeypatch.setattr(host, "environment", dict)
    monkeypatch.setattr(host, "disk", lambda folder: Disk(str(folder), 50 * GIB, "ext4"))
    monkeypatch.setattr(examination, "memory", lambda: Memory(8 * GIB, 6 * GIB))
    monkeypatch.setattr(examination, "judge_memory", lambda *arguments: (MemoryEstimate(GIB, GIB, GIB), ""))
    seconds = 1 / 29_700
    monkeypatch.setattr(pace, "measured", lambda *asked: replace(PACE, seconds_per_token=((0.0, seconds),)))
    return


@pytest.mark.usefixtures("quiet")
def test_go_with_all_figures() -> None:
    found = examination.examine("tiny", ("train.seconds=120",), price=36.0)
    assert found.go
    assert levels(found.findings) == ["ok"] * 6
    assert found.estimate == Estimate(1740, pytest.approx(3_564_000, rel=1e-6), pytest.approx(120.0))
    assert found.cost == pytest.approx(36.0 * 123 / 3600)
    assert found.artifact_bytes == 1000
    text = found.text()
    assert max(map(len, text.splitlines())) <= 79
    assert text.splitlines()[-1] == "GO: no reason not to start tiny on this machine"
    assert "AMD EPYC, 2 cores, avx2" in text
    assert "29,700 tokens per second, 1.00 of the reference" in " ".join(text.split())
    assert "1.23 for warm-up and training" in text


@pytest.mark.usefixtures("quiet")
def test_no_go_names_the_first_problem_and_ends_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = read(card(held=HELD))
    monkeypatch.setattr(gpus, "driver_gpus", lambda: cards)
    monkeypatch.setattr(pace, "measured", lambda *asked: "its process was ended by signal 9")
    ended = CliRunner().invoke(app, ["doctor", "tiny", "--json", "--quiet", "--price", "2"])
    assert isinstance(ended.exception, CheckFailed)
    facts = json.loads(ended.stdout)
    assert facts["go"] is False
    assert [facts[key] for key in ("pace", "estimate", "cost")] == [None, None, None]
    assert [one["level"] for one in facts["findings"][:4]] == ["problem"] * 4
    assert all(one["why"] and one["fix"] for one in facts["findings"] if one["level"] == "problem")
    assert str(ended.exception).startswith("NO-GO: 4 problems, the first: the driver has 1 GPU")
    told = call("doctor", "tiny", "--quiet")
    assert (told.status, told.err, told.out.count("NO-GO")) == (1, "", 1)


@pytest.mark.usefixtures("quiet")
def test_what_is_not_known_is_said_and_does_not_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object) -> Any:
        raise OSError("stale file handle")

    for module, name in (
        (processes, "activity"),
        (gpus, "driver_gpus"),
        (host, "processor"),
        (host, "disk"),
        (examination, "memory"),
    ):
        monkeypatch.setattr(module, name, broken)
    monkeypatch.setattr(gpus, "torch_gpus", broken)
    found = examination.examine("tiny", quick=True)
    assert found.go
    assert levels(found.findings).count("warning") == 7
    assert found.expected is None
    assert found.estimate is None
    assert found.artifact_bytes == found.cap_bytes, "it fills its cap"
    text = found.text()
    assert "no reference" not in text
    assert text.count("not known") > 8
    json.dumps(found.to_json())


@pytest.mark.usefixtures("quiet")
def test_a_run_that_does_not_fit_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "training needs about 61.0 GiB, and this machine has 23.4 GiB free; train.micro_batches=64 needs about 9 GiB"
    monkeypatch.setattr(examination, "judge_memory", lambda *arguments: (MemoryEstimate(GIB, 30 * GIB, 30 * GIB), line))
    monkeypatch.setattr(pace, "measured", lambda *arguments: pytest.fail("it would be killed"))
    found = examination.examine("tiny")
    assert not found.go
    assert found.problems[0].what == "training needs about 61.0 GiB, and this machine has 23.4 GiB free"
    assert found.problems[0].fix == "train.micro_batches=64 needs about 9 GiB"


@pytest.mark.usefixtures("quiet")
def test_memory_is_that_by_which_a_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of a run are asked, of its settings, and what they say is shown."""
    asked, training = [], MemoryEstimate(GIB, 2 * GIB, 3 * GIB)

    def judged(gpt: GPT, train: Train, *rest: object) -> tuple[MemoryEstimate, str]:
        asked.append((gpt, train))
        return training, ""

    monkeypatch.setattr(examination, "judge_memory", judged)
    recipe = find("tiny").but({"train.micro_batches": 4, "pack.fit": None, "score.stride": 16})
    found = examination.examine("tiny", ("train.micro_batches=4", "pack.fit=none", "score.stride=16"), quick=True)
    assert (asked, found.memory) == ([(recipe.model, recipe.train)], training)
    stages = estimate_stages(recipe.model, recipe.pack, recipe.score)
    assert replace(found.stages, process=0) == replace(stages, process=0)
    assert f"{found.memory}; {found.stages}" in " ".join(found.text().split())


@pytest.mark.usefixtures("quiet")
def test_a_disk_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "SECONDS", 0.1)
    monkeypatch.setattr(host, "disk", lambda folder: time.sleep(0.6))
    monkeypatch.setattr(gpus, "torch_gpus", lambda: NONE)
    (found,) = [one for one in examination.examine("tiny", quick=True).findings if "working folder" in one.what]
    assert found.what == "disk of the working folder not known: no answer within 0.1 seconds"


@pytest.mark.usefixtures("quiet")
def test_cards_that_the_run_does_not_use_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = read(card(0, held=HELD), card(1), card(2, held=HELD))
    monkeypatch.setattr(gpus, "driver_gpus", lambda: cards)
    seen = Accelerators(("NVIDIA H100",) * 2, ("0000-1", "0000-2"), ((9, 0),) * 2, {"causal": "FlashAttention 3"})
    monkeypatch.setattr(gpus, "torch_gpus", lambda: seen)
    assert examination.examine("baseline", quick=True).go
    found = examination.examine("baseline", world=2, quick=True)
    assert [one.what.split(" holds")[0] for one in found.problems] == [
        "python (process 4711)",
        "[Not Found] (process 12)",
    ]
    monkeypatch.setattr(gpus, "torch_gpus", lambda: replace(seen, uuids=("", "")))
    assert len(examination.examine("baseline", quick=True).problems) == 4, "all, where the cards have no common name"


@pytest.mark.usefixtures("quiet")
def test_cards_that_grow_hot_while_steps_are_timed_count_if_the_run_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    hot = pynvml.nvmlClocksEventReasonHwThermalSlowdown
    looks = iter([read(card(0), card(1)), read(card(0), card(1, reasons=hot)), read(card(0, reasons=hot), card(1))])
    monkeypatch.setattr(gpus, "driver_gpus", lambda: next(looks))
    seen = Accelerators(("NVIDIA H100",), ("0000-1",), ((9, 0),), {"causal": "FlashAttention 3"})
    monkeypatch.setattr(gpus, "torch_gpus", lambda: seen)

    def measured(*asked: Any) -> Pace:
        asked[-1](), asked[-1]()
        return replace(PACE, seconds_per_token=((0.0, 1 / 29_700),))

    monkeypatch.setattr(pace, "measured", measured)
    found = [one.what[:5] for one in examination.examine("tiny").problems if "lowers its clocks" in one.what]
    assert found == ["GPU 1"]


@pytest.mark.usefixtures("quiet")
def test_the_verb_takes_what_run_takes() -> None:
    ended = CliRunner().invoke(
        app, ["doctor", "train.steps=40", "--seconds", "30", "--json", "--quiet"], standalone_mode=False
    )
    assert ended.exception is None
    facts = json.loads(ended.stdout)
    assert (facts["recipe"], facts["estimate"]["steps"], facts["go"]) == ("tiny", 40, True)
    for wrong in (
        ["no_such_recipe"],
        ["model.depth=2", "model.depth=3"],
        ["tiny", "train.sekunden=1"],
        ["tiny", "--gpus", "3"],
        ["--price", "inf"],
    ):
        ended = CliRunner().invoke(app, ["doctor", *wrong, "--quick", "--quiet"])
        assert isinstance(ended.exception, UserError | SystemExit), wrong
        assert not isinstance(ended.exception, SystemExit) or ended.exit_code == 2


@pytest.mark.long
def test_this_machine_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    found = examination.examine("tiny", quick=True)
    assert time.monotonic() - began < 3
    assert found.machine.versions["python"].startswith("3.")
    assert found.machine.accelerators is not None
    assert found.pace is None
    assert not list(tmp_path.iterdir()), "nothing is written"
    assert not [one for one in found.findings if "not known: " in one.what]
    if sys.platform == "linux":
        assert found.machine.processor is not None
        assert found.machine.memory is not None
        assert found.machine.memory.available
        assert found.machine.work is not None
        assert found.machine.work.kind
    assert json.loads(json.dumps(found.to_json()))["recipe"] == "tiny"
    print(found.text())
