"""Studies across machines: a real Ray cluster that loses one, and Slurm's jobs, warned and begun again."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Ended
from tiny_study import begin_study, events, write_study

from caddie.errors import UserError
from caddie.lab import executors as attached
from caddie.lab import slurm
from caddie.lab.cluster import Cluster, Stopped, _do, share
from caddie.lab.executors import TICK_SECONDS
from caddie.lab.slurm import Slurm

# What engines themselves leave open is not ours.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
needs_submitit = pytest.mark.skipif(importlib.util.find_spec("submitit") is None, reason="submitit is not installed")

RATE, HALVES = {"train.optimizers.matrix.lr": 0.01}, {"pack.quantizers.matrix": "Float16"}
ENTRIES = {"rate": RATE, "halves": HALVES, "both": RATE | HALVES}


def wait_until(happened: Any, seconds: float = 60.0) -> Any:
    """What `happened` gives as soon as it is true."""
    end = time.monotonic() + seconds
    while not (found := happened()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
    return found


# A job in a process of its own


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job that is a script: what it holds is what `trial` does."""
    path = tmp_path / "job.json"
    monkeypatch.setattr(attached, "command", lambda job, gpus: [sys.executable, str(job), str(gpus)])
    monkeypatch.setattr(attached, "POLL_SECONDS", 0.01)
    return path


def test_a_job_gets_its_threads_and_folder(script: Path, tmp_path: Path) -> None:
    script.write_text("import os, sys; print(os.environ['OMP_NUM_THREADS'], os.getcwd(), sys.argv[1:]); sys.exit(3)")
    assert attached.finish(attached.start(script, tmp_path, threads=5, gpus=2)) == 3
    assert (tmp_path / "output.txt").read_text() == f"2 {tmp_path} ['2', '--with-parent']\n"


def test_what_ends_the_waiting_stops_the_job(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script.write_text("import time; time.sleep(60)")
    process = attached.start(script, tmp_path, threads=1, gpus=0)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(attached, "time", SimpleNamespace(sleep=interrupt))
    with pytest.raises(KeyboardInterrupt):
        attached.finish(process)
    assert process.returncode == -signal.SIGTERM
    assert attached.why_it_died(process.returncode) is None
    assert attached.why_it_died(-signal.SIGKILL) is not None


# Ray


class Lost(Exception):
    """In the place of what Ray raises when retries are used up."""


class PretendedRay(SimpleNamespace):
    """The few calls that are made of Ray; a task is done when it is waited for."""

    def __init__(self) -> None:
        failed = type("RayTaskError", (Lost,), {"cause": None})
        super().__init__(
            exceptions=SimpleNamespace(RayTaskError=failed, RayError=Lost), cancelled=[], asked={}, ends={}, waits=0
        )

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, Any]]:
        node = {"Alive": True, "Resources": {"CPU": 4.0, "GPU": 1.0}}
        return [node, node, {"Alive": False, "Resources": {"CPU": 64.0}}]

    def remote(self, function: object) -> PretendedRay:
        return self

    def options(self, **asked: object) -> SimpleNamespace:
        self.asked = asked
        return SimpleNamespace(remote=lambda job, *given: (job, *given))

    def wait(self, waiting: list[Any], timeout: float, **options: object) -> tuple[list[Any], list[Any]]:
        self.waits += 1
        return ([], waiting) if self.waits % 2 and timeout == TICK_SECONDS else (waiting[-1:], waiting[:-1])

    def get(self, task: tuple[str, ...]) -> object:
        end = self.ends.get(Path(task[0]).name)
        if isinstance(end, Lost):
            raise end
        return end

    def cancel(self, task: tuple[str, ...]) -> None:
        self.cancelled.append(Path(task[0]).name)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> PretendedRay:
    pretended = PretendedRay()
    monkeypatch.setitem(sys.modules, "ray", pretended)
    return pretended


def task_failed(ray: PretendedRay, cause: Exception) -> Exception:
    error: Exception = ray.exceptions.RayTaskError("a traceback")
    error.cause = cause  # type: ignore[attr-defined]
    return error


def test_every_end_of_a_task(ray: PretendedRay) -> None:
    jobs = [Path(name) for name in ("well", "died", "stopped", "lost")]
    ray.ends = {"died": "its process died", "stopped": task_failed(ray, Stopped()), "lost": Lost("no node\ntraceback")}
    cluster = Cluster()
    assert cluster.workers == 2
    assert list(cluster.run(jobs)) == [
        None,
        (Path("lost"), "its machine was lost 6 times; no node"),
        None,
        (Path("stopped"), None),
        None,
        (Path("died"), "its process died"),
        None,
        (Path("well"), None),
    ]
    assert (ray.asked["num_cpus"], ray.asked["num_gpus"], ray.cancelled) == (4, 1, [])


def test_a_machine_that_cannot_do_jobs_ends_the_study(ray: PretendedRay, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"does not see {tmp_path}/job.json; all machines must share") as unseen:
        _do(str(tmp_path / "job.json"), str(tmp_path), 1, 0)
    ray.ends = {"b": task_failed(ray, unseen.value)}
    with pytest.raises(UserError, match=r"a machine of the cluster cannot do jobs: .* does not see"):
        list(Cluster().run([Path("a"), Path("b")]))
    assert ray.cancelled == ["a"]


def test_jobs_are_cancelled_when_the_study_stops(ray: PretendedRay) -> None:
    running = Cluster().run([Path("a"), Path("b"), Path("c")])
    assert next(running) is None
    assert next(running) == (Path("c"), None)
    running.close()  # type: ignore[attr-defined]
    assert ray.cancelled == ["a", "b"]


def test_the_share_of_a_run() -> None:
    small, large, gpus = {"CPU": 4.0}, {"CPU": 16.0}, {"CPU": 64.0, "GPU": 8.0}
    assert share([small, large], 0, 0) == (4, 5)
    assert share([small, large], 0, 6) == (6, 2)
    assert share([small, gpus, gpus], 1, 0) == (8, 16)
    assert share([gpus], 2, 0) == (16, 4)
    assert share([gpus], 2, 32) == (32, 2)
    for nodes, gpus_each, cores_each in (([], 0, 0), ([small], 1, 0), ([small], 0, 5), ([{"GPU": 1.0}], 1, 0)):
        with pytest.raises(UserError, match="no machine of the cluster has"):
            share(nodes, gpus_each, cores_each)


@needs_ray
def test_no_cluster_at_an_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(UserError, match=f"no Ray cluster at 127.0.0.1:{port}: Connection refused"):
        Cluster(f"127.0.0.1:{port}")


def test_engines_that_are_not_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in ("ray", "submitit"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=r"pip install ray"):
        Cluster()
    with pytest.raises(UserError, match=r"pip install submitit"):
        Slurm(workers=1, cores_each=1, logs=tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--on", "mars"], "--on takes local, ray[:ADDRESS] or slurm[:PARTITION], not mars"),
        (["--cores", "2"], "--cores is for --on ray and --on slurm"),
        (["--on", "ray", "--workers", "2"], "--workers is not for Ray"),
        (["--on", "slurm"], "Slurm must be told what a run takes"),
    ],
)
def test_words_of_the_command_line(
    caddie: Any, options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_study(tmp_path, ENTRIES, seeds=1, steps=3)
    ended: Ended = caddie("study", "study.py", "--data", "text.jsonl", *options)
    assert ended.status == 2
    assert said in ended.err
    assert ended.err.count("\n") == 1


# Slurm


@needs_submitit
def test_no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="Slurm is not here"):
        Slurm(workers=1, cores_each=1, logs=tmp_path)


@needs_submitit
def test_jobs_through_submitit(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "POLL_SECONDS", 0.01)
    logs = script.parent / "logs"
    script.write_text("")
    doomed = script.parent / "doomed" / "job.json"
    doomed.parent.mkdir()
    doomed.write_text("import os; os.kill(os.getpid(), 9)")
    executor = Slurm(workers=2, cores_each=1, logs=logs, engine="debug")
    assert executor.workers == 2
    assert dict(ended for ended in executor.run([script, doomed]) if ended) == {
        script: None,
        doomed: "its process was ended by signal 9, out of memory?",
    }


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ("NODE_FAIL", None),
        ("PREEMPTED", None),
        ("OUT_OF_MEMORY", "its Slurm job ended as OUT_OF_MEMORY; see err"),
        ("CANCELLED by 7", "its Slurm job ended as CANCELLED by 7; see err"),
    ],
)
def test_how_slurm_ends_jobs(state: str, why: str | None) -> None:
    job = SimpleNamespace(exception=lambda: Exception("gone"), state=state, paths=SimpleNamespace(stderr="err"))
    assert slurm._outcome(job) == why


@needs_submitit
@pytest.mark.slow
def test_a_slurm_job_that_is_preempted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Submitit's processes of this machine are warned as Slurm's are, and begun again as Slurm would."""
    from caddie.lab.runner import run_study
    from caddie.lab.study import find_study

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slurm, "POLL_SECONDS", 0.1)
    write_study(tmp_path, {}, seeds=1, steps=300)
    executor = Slurm(workers=1, cores_each=1, logs=tmp_path / "logs", engine="local")
    submit, submitted = executor._executor.map_array, []

    def remember(*given: Any) -> Any:
        submitted.extend(submit(*given))
        return list(submitted)

    monkeypatch.setattr(executor._executor, "map_array", remember)

    class Preempting:
        workers = 1

        def run(self, jobs: Any) -> Iterator[tuple[Path, str | None]]:
            ending = executor.run(jobs)

            def preempt() -> None:
                run = jobs[0].parent
                wait_until(lambda: any(event["event"] == "step" and event["step"] > 5 for event in events(run)))
                controller = submitted[0]._process.pid
                (warned,) = Path(f"/proc/{controller}/task/{controller}/children").read_text().split()
                os.kill(int(warned), signal.SIGUSR2)

            thread = threading.Thread(target=preempt)
            thread.start()
            yield from ending
            thread.join()

    found = run_study(
        find_study("study.py"), "text.jsonl", folder=tmp_path, executor=Preempting(), runs=tmp_path / "runs"
    )
    assert [row["state"] for row in found.rows] == ["finished"]
    (run,) = (path.parent for path in tmp_path.glob("runs/*/*/result.json"))
    starts = [event["step"] for event in events(run) if event["event"] == "start"]
    assert len(starts) == 2
    assert starts[1] > 5, "it goes on from the checkpoint that the warning made"


# A real cluster


def of_session(session: int) -> list[int]:
    """Processes of a session."""
    found = []
    for name in os.listdir("/proc"):
        with suppress(ProcessLookupError, ValueError, PermissionError):
            if os.getsid(int(name)) == session and Path("/proc", name, "cmdline").read_bytes():
                found.append(int(name))
    return found


class Machine:
    """A machine of a cluster: all processes of a session."""

    def __init__(self, *options: str) -> None:
        command = [str(Path(sys.executable).with_name("ray")), "start", *options, "--node-ip-address=127.0.0.1"]
        environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", **HASTE}
        process = subprocess.Popen(
            command, env=environment, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.session = process.pid
        said, _ = process.communicate()
        if process.returncode:
            self.send(signal.SIGKILL)
            raise AssertionError(said.decode())

    def send(self, number: int) -> None:
        for process in of_session(self.session):
            with suppress(ProcessLookupError):
                os.kill(process, number)

    def training(self) -> list[Path]:
        """Folders of runs that are in the middle of their training here, and have been saved."""
        folders = []
        for process in of_session(self.session):
            with suppress(OSError):
                words = Path("/proc", str(process), "cmdline").read_bytes().decode().split("\0")
                if "trial" in words:
                    folders.append(Path(words[words.index("trial") + 1]).parent)
        last = {folder: events(folder)[-1:] for folder in set(folders)}
        return [
            folder
            for folder, found in last.items()
            if found and found[0]["event"] == "step" and found[0]["seconds"] > 0.5
        ]


HASTE = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "2",
}
"""A machine that does not answer is given up within seconds."""


@pytest.fixture
def machines() -> Iterator[tuple[str, list[Machine]]]:
    """The address of a cluster, and its machines that do runs; what ends it leaves no process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address, begun = f"127.0.0.1:{port}", []
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:  # short: sockets
        head = f"--port={port} --num-cpus=0 --include-dashboard=false --temp-dir={folder}"
        try:
            begun.append(Machine("--head", *head.split()))
            begun += [Machine(f"--address={address}", "--num-cpus=1") for _ in range(2)]
            yield address, begun[1:]
        finally:
            for machine in begun:
                machine.send(signal.SIGCONT)
                machine.send(signal.SIGKILL)
            wait_until(lambda: not any(of_session(machine.session) for machine in begun))


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("loss", [signal.SIGKILL, signal.SIGSTOP])
def test_a_cluster_that_loses_a_machine(machines: tuple[str, list[Machine]], loss: int, tmp_path: Path) -> None:
    """One is killed, or stands still until it was given up and then goes on, in the middle of a run."""
    address, (first, _) = machines
    write_study(tmp_path, ENTRIES, seeds=2, steps=300, **{"train.checkpoint_seconds": 0.3})
    driver = begin_study(tmp_path, "--on", f"ray:{address}", "--quiet")
    try:
        hit = wait_until(first.training)
        first.send(loss)
        if loss == signal.SIGSTOP:
            time.sleep(10.0)
            first.send(signal.SIGCONT)
        assert driver.wait(480) == 0, (tmp_path / "printed.txt").read_text()
    finally:
        driver.kill()
        driver.wait()
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert sorted((row["label"], row["seed"]) for row in rows) == sorted(
        (label, seed) for label in ("base", *ENTRIES) for seed in (1, 2)
    )
    assert {row["state"] for row in rows} == {"finished"}
    runs = [path.parent for path in tmp_path.glob("runs/tiny/*/result.json")]
    assert len(runs) == 8
    assert json.loads((tmp_path / "found.json").read_text())["failed"] == [], "nothing else is printed"
    (one,) = hit
    begun = [event["step"] for event in events(one) if event["event"] == "start"]
    assert len(begun) == 2, "the loss hit a run in the middle of its training"
    assert 0 < begun[1] <= 300, "which went on from its checkpoint, or the end that a standing machine still reached"
    for run in runs:
        if run.name.startswith(("base", "rate")):  # the others begin with the log of one of these
            names = [event["event"] for event in events(run)]
            assert (names.count("start"), names.count("end")) == (2 if run == one else 1, 1)
