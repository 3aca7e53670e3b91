"""One of two processes is killed or stands still: the other ends soon and says so."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from conftest import write_text
from faults import SMALL
from processes import CONTEXT

from caddie.cli.exits import end
from caddie.runtime import distributed

FAULTS = {signal.SIGSTOP: "process {} of 2 has not answered for 2 s", signal.SIGKILL: "another process of this run"}


def waits(rank: int, lost: int, port: int, told: Connection, err: Connection) -> None:
    """Join two processes; the one that will be lost sleeps, and the other waits for it."""
    os.dup2(err.fileno(), 2)
    sys.stderr = open(2, "w", buffering=1)  # noqa: SIM115
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    distributed._BEAT_SECONDS, distributed._GRACE_SECONDS = 0.1, 0.5
    distributed._SILENT_BEATS = 20

    def work() -> None:
        with distributed.join() as ranks:
            ranks.wait()
            told.send(rank)
            if rank == lost:
                time.sleep(60)
            ranks.wait()

    end(work)


@pytest.mark.long
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_process_that_lost_another_ends_and_says_so(fault: signal.Signals, lost: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (told, tell), (read, err) = CONTEXT.Pipe(duplex=False), CONTEXT.Pipe(duplex=False)
    processes = [CONTEXT.Process(target=waits, args=(rank, lost, port, tell, err)) for rank in range(2)]
    try:
        for process in processes:
            process.start()
        assert {told.recv(), told.recv()} == {0, 1}
        time.sleep(0.5)  # both have shown that they live
        os.kill(processes[lost].pid or 0, fault)
        begin = time.monotonic()
        processes[1 - lost].join(30)
        assert processes[1 - lost].exitcode == 1
        print(f"after {time.monotonic() - begin:.1f} s")
        printed = os.read(read.fileno(), 1 << 16).decode()  # PyTorch warns too, unless `launch` told it not to
        lines = [line for line in printed.splitlines() if "caddie: " in line]
        assert len(lines) == 1
        assert lines[0].startswith("caddie: " + FAULTS[fault].format(lost))
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.long
def test_processes_that_stood_still_together_accuse_nobody() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (told, tell), (read, err) = CONTEXT.Pipe(duplex=False), CONTEXT.Pipe(duplex=False)
    processes = [CONTEXT.Process(target=waits, args=(rank, 0, port, tell, err)) for rank in range(2)]
    try:
        for process in processes:
            process.start()
        assert {told.recv(), told.recv()} == {0, 1}
        for number, seconds in ((signal.SIGSTOP, 3.0), (signal.SIGCONT, 1.0)):
            for process in processes:
                os.kill(process.pid or 0, number)
            time.sleep(seconds)
        assert all(process.is_alive() for process in processes)
        assert not read.poll(0)
    finally:
        for process in processes:
            process.kill()
            process.join()


def ranks_of(launcher: int) -> dict[int, int]:
    """Return rank to process of the processes that a launcher has started."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, KeyError):
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher:
                named = dict(one.partition("=")[::2] for one in (place / "environ").read_text().split("\0"))
                found[int(named["RANK"])] = int(place.name)
    return found


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
@pytest.mark.parametrize("lost", [0, 1])
def test_a_run_of_which_one_process_is_frozen_ends_within_a_minute(lost: int, tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    command = [sys.executable, "-m", "caddie", "train", "tiny", *SMALL, "train.steps=1000000", "train.micro_batches=2"]
    with subprocess.Popen(
        [*command, "--data", "text.txt", "--out", "run", "--gpus", "2", "--quiet"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        processes: dict[int, int] = {}
        try:
            log = tmp_path / "run" / "log.jsonl"
            while not (log.exists() and '"event": "step"' in log.read_text()):
                assert launcher.poll() is None
                time.sleep(0.1)
            time.sleep(5)  # both have shown that they live
            processes = ranks_of(launcher.pid)
            os.kill(processes[lost], signal.SIGSTOP)
            begin = time.monotonic()
            _, err = launcher.communicate(timeout=120)
            assert time.monotonic() - begin < 60
        finally:
            launcher.kill()
            for process in processes.values():
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
    assert launcher.returncode == 1
    assert err == f"caddie: process {lost} of 2 has not answered for 30 s: it is frozen or gone\n"
