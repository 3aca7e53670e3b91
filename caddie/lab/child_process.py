"""Run a job of a cluster in a process of its own, which ends when the one that started it does.

The worker of an engine has the engine's libraries and signals, and a run has neither. So what ends a run ends no
worker, which can say why; and what ends a worker is the end of a machine.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from caddie.lab.executors import GRACE_SECONDS, command, death
from caddie.report.run_files import OUTPUT

POLL_SECONDS = 0.2
"""Seconds between two checks of a job; a waiting system call would keep an engine from interrupting it."""


def start(job: Path, folder: Path, threads: int, gpus: int) -> subprocess.Popen[bytes]:
    """Begin a job in a working folder, on `threads` threads and on `gpus` GPUs of those that this process sees."""
    processes = max(1, gpus)
    arguments = ["env", f"OMP_NUM_THREADS={max(1, threads // processes)}", *command(job, gpus), "--with-parent"]
    with (job.parent / OUTPUT).open("ab") as output:
        return subprocess.Popen(arguments, cwd=folder, stdin=subprocess.PIPE, stdout=output, stderr=output)


def finish(process: subprocess.Popen[bytes]) -> int:
    """Wait for a job and return its exit status. An exception that ends the waiting stops the job first."""
    try:
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
    finally:
        stop(process)
    return process.returncode


def stop(process: subprocess.Popen[bytes]) -> None:
    """Let a job write its checkpoint and end; kill it if it does not."""
    process.terminate()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdin:
        process.stdin.close()


def stopped(status: int) -> bool:
    """True if the exit status is that of a process that was ended by a signal to stop."""
    return status != 0 and death(status) is None
