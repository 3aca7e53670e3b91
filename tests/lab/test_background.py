"""A study in the background: begun once, told of, ended with its process, and gone on with."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from conftest import call
from test_kill import ENTRIES, Watched, check_log
from tiny_study import write_study

from caddie.errors import UserError
from caddie.lab.background import StudyState, begin, read_state, seconds_left
from caddie.lab.study_lock import driving
from caddie.run.run_lock import Holder, this_process

STATE = StudyState("rates", "results", 1, 0, 3, 7200.0, Holder("another machine", 1, "x-1", "then"))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    STATE.write(tmp_path / "runs")
    found = read_state(tmp_path / "runs")
    assert found == STATE
    assert str(found) == "rates: elsewhere, 1 of 3 runs, 2.0 h left (process 1 on another machine since then)"
    assert replace(STATE, driver=this_process()).state == "running"
    assert replace(STATE, driver=replace(this_process(), name="x-1")).state == "stopped", "a number used again"
    done = replace(STATE, done=3)
    assert (done.state, "left" in str(done)) == ("finished", False)
    assert "3 of 3 runs, 2 failed (--retry runs them again) (process" in str(replace(done, failed=2))
    assert STATE.to_json()["state"] == "elsewhere"


@pytest.mark.parametrize(
    "change",
    [
        {"done": "x"},
        {"done": None},
        {"failed": 2},
        {"driver": 3},
        {"driver": {}},
        {"seconds_left": "long"},
        {"total": 1e999},
    ],
)
def test_a_file_that_is_no_state(change: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "driver.json").write_text(json.dumps(STATE.to_json() | change))
    found = read_state(tmp_path)
    assert found is None or found.seconds_left is None
    (tmp_path / "driver.json").write_text("[")
    assert read_state(tmp_path) is None
    assert read_state(tmp_path / "none") is None


@pytest.mark.parametrize("pid", [-5, 0, 1 << 70])
def test_no_process_has_such_a_number(pid: int) -> None:
    assert replace(this_process(), pid=pid).alive is False


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system keeps the start of a process by the clock")
def test_a_process_lives_on_when_the_clock_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the clock by five seconds, as a laptop does that wakes."""
    driver, boot = this_process(), psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot + 5.0)
    assert driver.alive is True


def test_the_time_left_is_that_of_the_runs_before() -> None:
    rows = [{"label": "a", "state": "finished", "total_seconds": seconds} for seconds in (3600.0, 7200.0)]
    rows.append({"label": "b", "state": "failed"})
    assert seconds_left(rows, left=8, workers=2) == 4 * 5400.0
    assert seconds_left(rows[2:], left=8, workers=2) is None


def test_a_study_that_somebody_is_at_is_not_begun_again(tmp_path: Path) -> None:
    replace(STATE, driver=this_process()).write(tmp_path / "runs" / "rates")
    with pytest.raises(UserError, match=rf"rates: running, 1 of 3 .*; wait for it, or stop it: kill {os.getpid()}"):
        begin("rates", tmp_path / "runs", tmp_path / "results", ["recipes"], 3)
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("state", [None, STATE])
def test_a_study_whose_lock_is_held_is_not_begun_and_keeps_its_state(state: StudyState | None, tmp_path: Path) -> None:
    """A driver that still prepares the text, or runs on another machine, is not in the state."""
    if state:
        state.write(tmp_path / "runs" / "rates")
    with (
        driving(tmp_path / "runs" / "rates"),
        pytest.raises(UserError, match="another process is running a study named rates"),
    ):
        begin("rates", tmp_path / "runs", tmp_path / "results", ["recipes"], 3)
    assert read_state(tmp_path / "runs" / "rates") == state


def test_a_study_that_has_become_smaller_begins_with_a_state_that_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen", lambda *arguments, **how: SimpleNamespace(pid=os.getpid()))
    replace(STATE, done=3, total=3).write(tmp_path / "runs" / "rates")
    begun = begin("rates", tmp_path / "runs", tmp_path / "results", ["recipes"], 2)
    assert (begun.done, begun.total) == (0, 2)
    assert read_state(tmp_path / "runs" / "rates") == begun


def caddie(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "caddie", "study", "study.py", "--data", "text.jsonl", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def until(holds: Callable[[], object], seconds: float = 300.0) -> None:
    begin = time.monotonic()
    while not holds():
        assert time.monotonic() - begin < seconds
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--background", "--select"], "are for a study alone"),
        (["--status", "--holdout", "text.jsonl"], "are for a study alone"),
        (["--status"], "tiny was not begun here"),
        (["--background"], "odd: "),
        (["--background", "--data", "none.jsonl"], "none.jsonl"),
        (["--background", "--on", "nowhere"], "--on takes local"),
        (["--fraction", "0"], "0<x<=1"),
    ],
)
def test_what_is_wrong_is_told_before_it_begins(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    odd = {"odd": {"train.optimizers": {"embedding": "AdamW"}}} if message.startswith("odd") else {}
    write_study(tmp_path, odd, seeds=1, steps=1)
    ended = call("study", "study.py", "--data", "text.jsonl", *options)
    assert ended.status == 2
    assert message in ended.err.replace(" ", "") or message in ended.err
    assert len(ended.err.splitlines()) == 1
    assert not (tmp_path / "study.log").exists()


def test_the_status_tells_of_rows_that_came_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_study(tmp_path, {}, seeds=1, steps=1)
    row = {"label": "base", "seed": 1, "key": "a", "state": "finished"}
    (tmp_path / "results.jsonl").write_text(json.dumps(row) + "\n")
    ended = call("study", "study.py", "--data", "text.jsonl", "--status")
    assert ended.status == 2
    assert ended.err.endswith("results.jsonl has 1 of 1 run from elsewhere\n")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="reads /proc")
def test_a_background_study_is_killed_and_goes_on(tmp_path: Path) -> None:
    write_study(tmp_path, dict(list(ENTRIES.items())[:3]), seeds=2, steps=3)
    watched = Watched(tmp_path)
    begun = json.loads(caddie(tmp_path, "--background", "--workers", "1", "--json").stdout)
    pid = begun["driver"]["pid"]
    try:
        assert (begun["state"], begun["total"], begun["log"]) == ("running", 8, "study.log")
        assert os.getsid(pid) == pid, "the end of this terminal does not reach it"
        again = caddie(tmp_path, "--background")
        assert (again.returncode, f"kill {pid}" in again.stderr) == (2, True)
        until(watched.at_work)
        assert {psutil.Process(one).nice() for one in watched.at_work()} == {10}
        assert {psutil.Process(one).environ()["OMP_NUM_THREADS"] for one in watched.at_work()} == {"1"}
        until(watched.read_rows)
        watched.look()
        os.kill(pid, signal.SIGKILL)
        until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
        assert f"tiny: stopped, {len(watched.rows)} of 8 runs, " in caddie(tmp_path, "--status").stdout
    finally:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)
    begun = json.loads(caddie(tmp_path, "--background", "--json").stdout)
    assert begun["done"] >= 1
    until(lambda: not psutil.pid_exists(begun["driver"]["pid"]))
    watched.look()
    assert len(watched.rows) == len(watched.results) == 8
    assert caddie(tmp_path, "--status").stdout.startswith("tiny: finished, 8 of 8 runs (process ")
    assert not list(tmp_path.glob("runs/tiny/*/checkpoint.safetensors"))
    for path in watched.results:
        check_log(path.parent)
    assert " left\n" in (tmp_path / "study.log").read_text()
    assert (tmp_path / "report.html").exists()


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this system does not weigh sessions")
def test_a_session_of_its_own_is_as_nice_as_who_begins_it() -> None:
    program = """
import os, subprocess, sys
from pathlib import Path
from caddie.lab.executors import share_niceness
os.nice(7)
with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as begun:
    share_niceness(begun.pid)
    print(Path(f"/proc/{begun.pid}/autogroup").read_text())
    begun.kill()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout.split()[-2:] == ["nice", str(os.nice(0) + 7)], ended
