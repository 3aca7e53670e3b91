"""One of two processes is killed or stands still: the other ends soon and says so."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection

import pytest
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
