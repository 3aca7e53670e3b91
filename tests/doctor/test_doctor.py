"""The doctor: every question against made-up machines, the rules, the verdict, and this machine for real."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from caddie.cli import app
from caddie.config.schedules import PiecewiseConstant
from caddie.doctor import estimates, examination, findings, host, nvidia, pace, processes
from caddie.doctor.asking import Answer, output, within
from caddie.doctor.estimates import REFERENCES, Estimate, estimate, expected
from caddie.doctor.findings import Accelerators, Finding, OpenRun
from caddie.doctor.host import Disk, Memory
from caddie.doctor.pace import Pace
from caddie.doctor.processes import Activity, Process
from caddie.errors import CheckFailed, UserError
from caddie.model.flops import flops_per_token
from caddie.recipes.catalog import find

GIB = 1 << 30

SLEEP = f"{shlex.quote(sys.executable)} -S -c 'import time; time.sleep(30)'"
"""What a shell can be told to wait with on any machine."""


def levels(found: list[Finding]) -> list[str]:
    return [finding.level for finding in found]


# Questions


def test_a_question_is_answered_fails_or_is_left_behind() -> None:
    def fail() -> int:
        raise OSError(5, "Input/output\nerror")

    assert within(5, lambda: 7) == Answer(7)
    assert within(5, lambda: None) == Answer(None)
    assert within(5, fail) == Answer(None, "OSError: [Errno 5] Input/output error")
    began = time.monotonic()
    assert within(0.05, lambda: time.sleep(0.5)) == Answer(None, "no answer within 0.05 seconds")
    assert time.monotonic() - began < 0.4


def test_a_program_that_hangs_fails_or_floods_is_ended() -> None:
    assert output(["/bin/sh", "-c", "echo one; echo two >&2"], 5) == "one\n"
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"/bin/sh gave no answer within 0\.1 seconds"):
        output(["/bin/sh", "-c", f"{SLEEP} & {SLEEP}"], 0.1)  # the child that holds the pipe is ended too
    assert time.monotonic() - began < 5
    with pytest.raises(ValueError, match="failed with status 9"):
        output(["/bin/sh", "-c", "echo partly; exit 9"], 5)
    with pytest.raises(ValueError, match="printed more than 4,194,304 bytes"):
        output([sys.executable, "-S", "-c", "while True: print('y' * 999)"], 20)
    with pytest.raises(FileNotFoundError):
        output(["no-such-program"], 5)


# The host


def write(root: Path, **files: str) -> Path:
    """Files below a folder; `__` in a name is a slash, `_dot_` a dot."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_processor_and_its_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(host.sys, "platform", "linux")
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
    assert host.processor(proc, groups).speedups == ("asimd", "bf16")
    assert host.processor(tmp_path / "none", groups).speedups is None


def test_memory_and_its_limits(tmp_path: Path) -> None:
    proc = write(tmp_path / "proc", meminfo="MemTotal: 4000 kB\nMemFree: 10 kB\nMemAvailable:  3000 kB\n")
    groups = tmp_path / "groups"
    write(proc, self__cgroup="0::/box\n")
    assert host.memory(proc, groups) == Memory(4_096_000, 3_072_000)
    write(groups, box__memory_dot_max="1000000\n", box__memory_dot_current="400000\n")
    assert host.memory(proc, groups) == Memory(1_000_000, 600_000)
    write(groups, box__memory_dot_max="9223372036854771712\n")
    assert host.memory(proc, groups) == Memory(4_096_000, 3_072_000)
    write(proc, meminfo="\0garbled")
    monkeyed = host.memory(proc, groups)
    assert monkeyed.available is None


def test_the_disk_of_a_folder_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    spaced = str(tmp_path / "a b").replace(" ", "\\040")
    mounts = f"/dev/vda / ext4 rw 0 0\nhost:/x {spaced} nfs4 rw 0 0\ngarbled\nnone {tmp_path}/a btrfs rw 0 0\n"
    proc = write(tmp_path / "proc", self__mounts=mounts)
    (tmp_path / "a b").mkdir()
    found = host.disk(tmp_path / "a b" / "not" / "there", proc)
    assert (found.kind, found.network) == ("nfs4", True)
    assert found.free_bytes > 0
    assert host.disk(tmp_path, proc).kind == "ext4"
    assert host.disk(tmp_path, tmp_path / "none").kind is None


@pytest.mark.parametrize(
    ("kind", "network"),
    [
        *[(kind, True) for kind in ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "9p", "fuse", "fuse.sshfs")],
        *[(kind, False) for kind in ("ext4", "overlay", "tmpfs", "fuse.fuse-overlayfs", "fusectl", "fuseblk", "xfs")],
    ],
)
def test_network_disks_are_known_by_their_kind(kind: str, network: bool) -> None:
    assert Disk("x", 0, kind).network is network


def test_the_compile_cache_is_where_pytorch_keeps_it() -> None:
    place = Path(torch.__file__).parent / "_inductor" / "runtime" / "cache_dir_utils.py"
    theirs = runpy.run_path(str(place))  # alone, without the compiler, which takes a second to import
    assert str(host.compile_cache({})) == theirs["default_cache_dir"]()
    assert host.compile_cache({"TORCHINDUCTOR_CACHE_DIR": "/x/y"}) == Path("/x/y")


# Processes


def stat(pid: int, title: str, parent: int, ticks: int) -> str:
    return f"{pid} ({title}) S {parent} 1 1 0 -1 4194304 9 0 0 0 {ticks} 0 0 0 20 0 1 0 99 0 0\n"


Table = dict[int, tuple[str, int, tuple[int, int], str]]
"""Process to title, parent, ticks at both looks, and command line."""


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Activity]:
    """What is seen of a made-up table during two seconds; each core has so many idle ticks of 200."""

    def seen(table: Table, idle: tuple[int, ...] = (200, 50), own: int = 10) -> Activity:
        proc = tmp_path / "proc"

        def write_table(place: int) -> None:
            for pid, (title, parent, ticks, command) in table.items():
                name = f"{pid}__"
                write(proc, **{f"{name}stat": stat(pid, title, parent, ticks[place]), f"{name}cmdline": command})
            cores = [f"cpu{i} {place * (200 - n)} 0 0 {place * n} 0 0 0 0 0 0" for i, n in enumerate(idle)]
            write(proc, stat="cpu  1 2 3 4 5\n" + "\n".join(cores) + "\ncpu9\nintr 7\n")

        clock = iter((100.0, 102.0))
        made_up = SimpleNamespace(sleep=lambda seconds: write_table(1), perf_counter=lambda: next(clock))
        monkeypatch.setattr(processes, "time", made_up)
        monkeypatch.setattr(processes.os, "sysconf", lambda name: 100)
        monkeypatch.setattr(processes, "_allowed", lambda: set(range(len(idle))))
        write_table(0)
        found = processes.activity(proc, 2.0, own)
        assert found is not None
        return found

    return seen


def test_busy_processes_are_those_of_others(look: Callable[..., Activity]) -> None:
    found = look(
        {
            1: ("init", 0, (5, 5), "/sbin/init\0"),
            10: ("python", 1, (0, 200), "/usr/bin/python3\0-m\0caddie\0doctor\0"),
            11: ("child", 10, (0, 200), "child\0"),
            20: ("a) b (c", 1, (100, 300), "/opt/x/python3.11\0-u\0train.py\0--token\0secret\0"),
            21: ("kworker/0:1", 2, (0, 50), ""),
            22: ("idle", 1, (7, 7), "idle\0"),
        }
    )
    assert [(process.pid, process.cores, process.name) for process in found.processes] == [
        (20, 1.0, "python3.11 train.py"),
        (21, 0.25, "kworker/0:1"),
        (1, 0.0, "init"),
        (22, 0.0, "idle"),
    ]
    assert found.idle_cores == 1.25
    rules = findings.processor_findings(found, 2, 1)
    assert levels(rules) == ["warning"]
    assert rules[0].what == "python3.11 train.py (process 20) uses 1.0 cores"
    assert rules[0].mend.endswith("kill 20")
    assert "secret" not in json.dumps([finding.what for finding in rules])


def test_garbled_processes_are_passed_over(look: Callable[..., Activity], tmp_path: Path) -> None:
    write(
        tmp_path / "proc", **{"77__stat": "77 (cut", "78__stat": "", "79__stat": "79 (x) S one two", "abc__stat": "1"}
    )
    assert [process.pid for process in look({20: ("x", 1, (0, 0), "x\0")}).processes] == [20]
    assert processes.activity(tmp_path / "none") is None


def test_cores_must_be_left_for_every_process() -> None:
    quiet = Activity((), 3.7)
    assert levels(findings.processor_findings(quiet, 4, 4)) == ["ok"]
    assert levels(findings.processor_findings(quiet, 4, 5)) == ["problem"]
    assert levels(findings.processor_findings(quiet, 2, 3)) == ["problem"], "a container with two of the cores"
    assert levels(findings.processor_findings(Activity((), None), 2, 2)) == ["ok"]
    crowd = Activity(tuple(Process(pid, 1, 0.9, ("x",), "x") for pid in range(100, 110)), 50.0)
    found = findings.processor_findings(crowd, 64, 1)
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
    assert processes.left_over(everybody) == [orphan]
    found = findings.processor_findings(Activity(tuple(everybody), 8.0), 8, 1)
    assert [(one.level, one.mend) for one in found][-1] == ("warning", "kill 30")


@given(st.dictionaries(st.integers(1, 30), st.integers(0, 30)), st.integers(1, 30))
def test_a_family_is_closed_and_ends_even_in_circles(parents: dict[int, int], pid: int) -> None:
    found = processes.family(parents, pid)
    assert pid in found
    assert all((child in found) == (parent in found) for child, parent in parents.items() if child != pid)


def test_runs_are_told_apart_by_who_works_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from run_folder import make_result, write_run

    root, proc = tmp_path / "runs", tmp_path / "proc"
    step = json.dumps({"event": "step", "step": 3, "seconds": 1.0, "loss": 2.0, "progress": 0.5}) + "\n"
    for name in ("trains", "hangs", "ended", "named"):
        write(root / name, **{"log_dot_jsonl": step})
    write_run(root / "done", make_result())
    old = time.time() - 3600
    for path in [root / "hangs", root / "ended", *root.glob("hangs/*"), *root.glob("ended/*")]:
        os.utime(path, (old, old))
    run = ("python", "-m", "caddie", "run", "tiny", "--out", "runs/named")
    (proc / "5" / "fd").mkdir(parents=True)
    (proc / "5" / "cwd").symlink_to(tmp_path)
    (proc / "6" / "fd").mkdir(parents=True)
    (proc / "6" / "cwd").symlink_to("/")
    (proc / "6" / "fd" / "3").symlink_to(root / "hangs" / "log.jsonl")
    (proc / "6" / "fd" / "4").symlink_to(root / "trains" / "log.jsonl")
    ours = [Process(5, 1, 1.0, run, "python"), Process(6, 1, 1.0, run, "python"), Process(7, 1, 1.0, run, "python")]
    at_work_in = processes.at_work_in
    monkeypatch.setattr(processes, "at_work_in", lambda folder, found: at_work_in(folder, found, proc))
    found = {one.folder.name: one for one in examination.open_runs(root, Activity(tuple(ours), 1.0))}
    assert {name: ([p.pid for p in one.processes], one.stale) for name, one in found.items()} == {
        "trains": ([6], False),
        "hangs": ([6], True),
        "ended": ([], True),
        "named": ([5], False),
    }
    rules = findings.run_findings(list(found.values()))
    assert sorted((one.level, one.what.split()[0].rpartition("/")[2]) for one in rules) == [
        ("problem", "hangs"),
        ("warning", "1"),
        ("warning", "named"),
        ("warning", "trains"),
    ]
    assert levels(findings.run_findings([])) == ["ok"]
    assert examination.open_runs(tmp_path / "none", None) == []


def test_many_runs_that_ended_are_one_line() -> None:
    (found,) = findings.run_findings([OpenRun(Path(f"runs/a b{n}"), True, ()) for n in range(9)])
    assert found.what == "9 runs ended without a result: runs/a b0, runs/a b1, runs/a b2, ..."
    assert "--out 'runs/a b0'" in found.mend


# GPUs


def card(index: int = 0, used: int = 4, reasons: str = "", held: str = "", kind: str = "event") -> str:
    return f"""<gpu id="00000000:{index:02}:00.0"><product_name>NVIDIA H100 80GB HBM3</product_name>
    <uuid>GPU-0000-{index}</uuid><clocks_{kind}_reasons>
    <clocks_{kind}_reason_gpu_idle>Active</clocks_{kind}_reason_gpu_idle>
    <clocks_{kind}_reason_hw_slowdown>Not Active</clocks_{kind}_reason_hw_slowdown>{reasons}
    </clocks_{kind}_reasons><fb_memory_usage><total>81559 MiB</total><reserved>551 MiB</reserved>
    <used>{used} MiB</used></fb_memory_usage><temperature><gpu_temp>88 C</gpu_temp></temperature>
    <clocks><graphics_clock>1 MHz</graphics_clock><sm_clock>1200 MHz</sm_clock></clocks>
    <max_clocks><sm_clock>1980 MHz</sm_clock></max_clocks><processes>{held}</processes></gpu>"""


def log(*cards: str) -> str:
    head = '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n'
    return f"{head}<nvidia_smi_log><driver_version>580.95.05</driver_version>{''.join(cards)}</nvidia_smi_log>"


HELD = """<process_info><gpu_instance_id>N/A</gpu_instance_id><pid>4711</pid><type>C</type>
<process_name>/v/bin/python</process_name><used_memory>20000 MiB</used_memory></process_info>
<process_info><pid>12</pid><process_name>[Not Found]</process_name><used_memory>N/A</used_memory></process_info>"""


def test_cards_are_read_whatever_the_driver_knows() -> None:
    (one,) = nvidia.parse(log(card()))
    assert (one.name, one.driver, one.memory_mib, one.used_mib) == ("NVIDIA H100 80GB HBM3", "580.95.05", 81559, 4)
    assert (one.celsius, one.clock_mhz, one.fastest_mhz, one.uuid) == (88, 1200, 1980, "GPU-0000-0")
    assert (one.slowdowns, one.holders, one.held_by_setting) == ((), (), False)
    (bare,) = nvidia.parse(log("<gpu><product_name>Tesla</product_name><fb_memory_usage/></gpu>"))
    assert (bare.name, bare.memory_mib, bare.clock_mhz, bare.uuid) == ("Tesla", None, None, "")
    assert nvidia.parse(log()) == []
    assert len(nvidia.parse("a warning first\n" + log(*(card(n) for n in range(8))))) == 8
    assert levels(findings.gpu_findings([one])) == ["ok"]
    assert findings.gpu_findings([]) == []


@pytest.mark.parametrize("kind", ["event", "throttle"])
def test_clocks_held_down_are_a_problem(kind: str) -> None:
    hot = f"<clocks_{kind}_reason_hw_thermal_slowdown>Active</clocks_{kind}_reason_hw_thermal_slowdown>"
    (one,) = nvidia.parse(log(card(3, reasons=hot, kind=kind)))
    (found,) = findings.gpu_findings([replace(one, index=3)])
    assert (found.level, one.slowdowns) == ("problem", ("hw_thermal_slowdown",))
    assert found.what == "GPU 3 lowers its clocks to 1200 MHz of 1980 (hw_thermal_slowdown, 88 °C)"
    assert len(findings.slowdown_findings([one] * 5)) == 1, "of several looks each reason once"
    setting = (
        f"<clocks_{kind}_reason_applications_clocks_setting>Active</clocks_{kind}_reason_applications_clocks_setting>"
    )
    (found,) = findings.gpu_findings(nvidia.parse(log(card(reasons=setting, kind=kind))))
    assert (found.level, "nvidia-smi -i 0 -rac" in found.mend) == ("warning", True)


def test_others_on_a_gpu_are_a_problem() -> None:
    found = findings.gpu_findings(nvidia.parse(log(card(held=HELD, used=20_100))))
    assert levels(found) == ["problem", "problem"]
    assert found[0].what == "python (process 4711) holds 20,000 MiB of GPU 0"
    assert found[1].what == "[Not Found] (process 12) holds memory of GPU 0"
    desk = HELD.replace("20000", "300").replace("/v/bin/python", "/usr/bin/Xorg --key secret")
    found = findings.gpu_findings(nvidia.parse(log(card(held=desk, used=900))))
    assert (levels(found), found[0].what) == (["warning", "problem"], "Xorg (process 4711) holds 300 MiB of GPU 0")
    screen = desk.partition("</process_info>")[0].replace("<type>C<", "<type>G<") + "</process_info>"
    assert levels(findings.gpu_findings(nvidia.parse(log(card(held=screen))))) == ["ok"]
    (unseen,) = findings.gpu_findings(nvidia.parse(log(card(used=30_000))))
    assert unseen.what.startswith("30,000 MiB of GPU 0 are held by a program out of sight")


@pytest.mark.parametrize(
    "text", ["", "NVIDIA-SMI has failed because it couldn't communicate", "<a", "<b></b>", log(card())[:-30], "\0" * 99]
)
def test_garbled_answers_are_not_known(text: str) -> None:
    with pytest.raises(ValueError, match="nvidia-smi printed"):
        nvidia.parse(text)


@given(st.text(alphabet="<>/gpu_iduse 0123456789MiB", max_size=200))
def test_no_answer_of_the_driver_is_too_odd(text: str) -> None:
    try:
        found = nvidia.parse(log(f"<gpu>{text}</gpu>"))
    except ValueError:
        return
    assert len(found) >= 1


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a made-up `nvidia-smi` of this shell script first on the path."""

    def install(script: str) -> None:
        program = tmp_path / "bin" / "nvidia-smi"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")

    return install


def test_the_driver_is_asked_and_never_waited_for(
    driver: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log.xml").write_text(log(card()))
    driver(f'[ "$*" = "-q -x" ] && cat {tmp_path}/log.xml')
    found = nvidia.look()
    assert found is not None
    assert [one.name for one in found] == ["NVIDIA H100 80GB HBM3"]
    driver("exit 9")
    with pytest.raises(ValueError, match="failed with status 9"):
        nvidia.look()
    monkeypatch.setattr(nvidia, "SECONDS", 0.1)
    driver(SLEEP)
    with pytest.raises(TimeoutError):
        nvidia.look()
    monkeypatch.setattr(nvidia.shutil, "which", lambda name: None)
    assert nvidia.look() is None


NONE = Accelerators((), (), (), {"causal": "SDPA"})
HOPPER = Accelerators(
    ("NVIDIA H100",), ("0000-0",), ((9, 0),), {"causal": "SDPA (flash)", "documents": "FlexAttention"}
)


def test_missing_kernels_come_with_what_installs_them() -> None:
    rule = findings.kernel_findings
    assert rule(NONE, None, 1, False, "2.13", None, False) == []
    (found,) = rule(HOPPER, [], 1, True, "2.13", "13.0", True)
    assert (found.level, "FlashAttention 3 is not installed") == ("warning", found.what)
    assert found.mend.endswith("/whl/cu130")
    quick = replace(HOPPER, attention={"causal": "FlashAttention 3"})
    assert rule(quick, [], 1, True, "2.13", "13.0", True) == []
    assert [one.what for one in rule(quick, [], 1, False, "2.13", "13.0", True)] == ["no cc, gcc or clang was found"]
    (found,) = rule(quick, [], 8, True, "2.13", "13.0", True)
    assert (found.level, found.mend) == ("problem", "--gpus 1")
    (found,) = rule(quick, [], 1, True, "2.13", "13.0", False)
    assert (found.what, found.mend) == ("Triton is not installed", "pip install triton")
    cards = nvidia.parse(log(card()))
    (found,) = rule(NONE, cards, 1, True, "2.13.0+cpu", None, True)
    assert (found.level, found.what) == ("problem", "the driver has 1 GPU, and PyTorch 2.13.0+cpu sees none")
    assert "pip install" in found.mend
    assert "CUDA 13.0" in rule(NONE, cards, 1, True, "2.13.0", "13.0", True)[0].mend


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
        ("HOME", "/x", True, False),
    ],
)
def test_variables_that_harm(name: str, value: str, gpu: bool, harm: bool) -> None:
    (found,) = findings.environment_findings({name: value}, gpu, 4)
    assert found.level == ("warning" if harm else "ok")
    assert not harm or (found.mend == f"unset {name}" and found.why)


def test_disks_and_memory_that_are_full() -> None:
    rule, plenty = findings.disk_findings, Disk("w", 100 * GIB, "ext4")
    assert levels(rule(plenty, plenty, 10**7)) == ["ok"]
    assert levels(rule(replace(plenty, free_bytes=GIB // 2), plenty, 10**7)) == ["problem"]
    assert levels(rule(plenty, plenty, 4 * 10**9)) == ["problem"]
    assert levels(rule(plenty, replace(plenty, free_bytes=0, kind="nfs4"), 1)) == ["problem", "warning"]
    assert levels(findings.memory_findings(Memory(8 * GIB, 4 * GIB))) == ["ok"]
    assert levels(findings.memory_findings(Memory(8 * GIB, GIB // 2))) == ["problem"]
    assert findings.memory_findings(Memory(8 * GIB, None)) == []


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
    rule, reference = findings.pace_findings, REFERENCES[0]

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
    assert found.what == "10,000 tokens per second; no reference for GPU of tomorrow is known"
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
    monkeypatch.setattr(sys, "argv", ["-c", json.dumps(["tiny", ["train.seconds=7"], 2])])
    pace.answer()
    assert asked == [("tiny", 7, 2)]
    assert pace._read(0, capsys.readouterr().out.encode(), b"") == PACE
    monkeypatch.setattr(pace, "measure", lambda recipe, world: (_ for _ in ()).throw(UserError("too wide")))
    pace.answer()
    assert pace._read(0, capsys.readouterr().out.encode(), b"") == "too wide"


def test_the_process_that_measures_is_watched_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    popen = subprocess.Popen
    monkeypatch.setattr(pace, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(pace.subprocess, "Popen", lambda command, **given: popen(shlex.split(SLEEP), **given))
    monkeypatch.setattr(pace, "LONGEST_SECONDS", 0.2)
    began = time.monotonic()
    assert pace.measured("tiny", (), 1, lambda: looks.append(1)) == "it took more than 0 seconds"
    assert time.monotonic() - began < 5
    assert len(looks) >= 2


# The whole


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine of two cores on which nothing is wrong, and a measurement that takes no time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processes, "activity", lambda: Activity((), 2.0))
    monkeypatch.setattr(nvidia, "look", lambda: None)
    monkeypatch.setattr(host, "processor", lambda: host.Processor("AMD EPYC", 2, ("avx2",)))
    monkeypatch.setattr(host, "environment", dict)
    monkeypatch.setattr(host, "disk", lambda folder: Disk(str(folder), 50 * GIB, "ext4"))
    monkeypatch.setattr(host, "memory", lambda: Memory(8 * GIB, 6 * GIB))
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
    assert text.splitlines()[-1] == "GO: nothing speaks against tiny on this machine"
    assert "AMD EPYC, 2 cores, avx2" in text
    assert "29,700 tokens per second, 1.00 of the reference" in " ".join(text.split())
    assert "1.23 for warm-up and training" in text


@pytest.mark.usefixtures("quiet")
def test_no_go_names_the_first_problem_and_ends_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "look", lambda: nvidia.parse(log(card(held=HELD))))
    monkeypatch.setattr(pace, "measured", lambda *asked: "its process was ended by signal 9")
    ended = CliRunner().invoke(app, ["doctor", "tiny", "--json", "--quiet", "--price", "2"])
    assert isinstance(ended.exception, CheckFailed)
    facts = json.loads(ended.stdout)
    assert facts["go"] is False
    assert [facts[key] for key in ("pace", "estimate", "cost")] == [None, None, None]
    assert [one["level"] for one in facts["findings"][:4]] == ["problem"] * 4
    assert all(one["why"] and one["mend"] for one in facts["findings"] if one["level"] == "problem")
    assert str(ended.exception).startswith("NO-GO: 4 problems, the first: the driver has 1 GPU")


@pytest.mark.usefixtures("quiet")
def test_what_is_not_known_is_said_and_does_not_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object) -> Any:
        raise OSError("stale file handle")

    monkeypatch.setattr(processes, "activity", lambda: None)
    for module, name in ((nvidia, "look"), (host, "processor"), (host, "disk"), (host, "memory")):
        monkeypatch.setattr(module, name, broken)
    monkeypatch.setattr(examination, "accelerators", broken)
    found = examination.examine("tiny", quick=True)
    assert found.go
    assert levels(found.findings).count("warning") == 6
    assert found.expected is None
    assert found.estimate is None
    assert found.artifact_bytes == found.cap_bytes, "it fills its cap"
    text = found.text()
    assert "no reference" not in text
    assert text.count("not known") > 8
    json.dumps(found.to_json())


@pytest.mark.usefixtures("quiet")
def test_a_disk_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "SECONDS", 0.1)
    monkeypatch.setattr(host, "disk", lambda folder: time.sleep(0.6))
    monkeypatch.setattr(examination, "accelerators", lambda: NONE)
    (found,) = [one for one in examination.examine("tiny", quick=True).findings if "working folder" in one.what]
    assert found.what == "disk of the working folder not known: no answer within 0.1 seconds"


@pytest.mark.usefixtures("quiet")
def test_cards_that_the_run_does_not_use_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = nvidia.parse(log(card(0, held=HELD), card(1), card(2, held=HELD)))
    monkeypatch.setattr(nvidia, "look", lambda: cards)
    seen = Accelerators(("NVIDIA H100",) * 2, ("0000-1", "0000-2"), ((9, 0),) * 2, {"causal": "FlashAttention 3"})
    monkeypatch.setattr(examination, "accelerators", lambda: seen)
    assert examination.examine("baseline", quick=True).go
    found = examination.examine("baseline", world=2, quick=True)
    assert [one.what.split(" holds")[0] for one in found.problems] == [
        "python (process 4711)",
        "[Not Found] (process 12)",
    ]
    monkeypatch.setattr(examination, "accelerators", lambda: replace(seen, uuids=("", "")))
    assert len(examination.examine("baseline", quick=True).problems) == 4, "all, where the cards have no common name"


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


def test_this_machine_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    found = examination.examine("tiny", quick=True)
    assert time.monotonic() - began < 3
    assert found.here.versions["python"].startswith("3.")
    assert found.here.accelerators is not None
    assert found.pace is None
    assert not list(tmp_path.iterdir()), "nothing is written"
    assert not [one for one in found.findings if "not known: " in one.what]
    if sys.platform == "linux":
        assert found.here.processor is not None
        assert found.here.memory is not None
        assert found.here.memory.available
        assert found.here.work is not None
        assert found.here.work.kind
    assert json.loads(json.dumps(found.to_json()))["recipe"] == "tiny"
    print(found.text())
