"""Run the jobs of a study in processes of this machine, each on cores or GPUs of its own.

A worker of a cluster starts a process for each job too, so a run has none of the cluster's libraries and signal
handlers. A run that dies does not end the worker, which can report why.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from caddie.config import Count, coerce
from caddie.errors import UserError
from caddie.report.run_files import OUTPUT
from caddie.runtime.child_process import child_environment
from caddie.runtime.interrupt import SIGKILL, when_input_ends

GRACE_SECONDS = 20.0
"""Seconds that a run has to write its checkpoint when it must stop."""
TICK_SECONDS = 1.0
"""Seconds between two chances for a caller to show progress."""
POLL_SECONDS = 0.2
"""Seconds between two checks of a job; a waiting system call would keep a cluster's engine from interrupting it."""


Ended = tuple[Path, str | None]
"""A job that ended, and the reason why its process died early, or None."""


class Executor(Protocol):
    """Runner of jobs. Their results are in run folders, which all machines see."""

    @property
    def workers(self) -> int:
        """Jobs at once."""

    def run(self, jobs: Sequence[Path]) -> Iterator[Ended | None]:
        """Yield each job as it ends, and None now and then while none does."""


class Local:
    """Processes of this machine, each pinned to its share of the cores and to GPUs of its own."""

    def __init__(self, workers: int = 1, gpus_each: int = 0) -> None:
        """`gpus_each` is the number of GPUs of a run; 0 takes one where there are any."""
        import torch

        from caddie.runtime.distributed import allowed_cores

        workers = coerce(workers, Count, "workers")
        gpus, cores = torch.cuda.device_count(), sorted(allowed_cores())
        self._gpus_each = gpus_each or min(gpus, 1)
        self.workers = workers
        if gpus and workers * self._gpus_each > gpus:
            need = f"{workers} workers of {self._gpus_each} GPUs need more than {gpus} GPUs"
            raise UserError(f"{need}; lower --workers or --gpus")
        if workers > len(cores):
            raise UserError(f"{workers} workers on {len(cores)} cores would disturb one another; ask for fewer")
        threads = len(cores) // workers
        self._cores = [cores[slot * threads : (slot + 1) * threads] for slot in range(workers)]

    def run(self, jobs: Sequence[Path]) -> Iterator[Ended | None]:
        """Yield each job as it ends, and None every `TICK_SECONDS` while none does."""
        waiting, busy = list(reversed(jobs)), dict[int, tuple[subprocess.Popen[bytes], Path]]()
        ticked = time.monotonic()
        try:
            while waiting or busy:
                for slot in range(self.workers):
                    if waiting and slot not in busy:
                        job = waiting.pop()
                        if not job.parent.exists():  # it was removed; the study writes it again
                            yield job, None
                            continue
                        busy[slot] = self._begin(job, slot), job
                for slot, (process, job) in list(busy.items()):
                    if process.poll() is not None:
                        del busy[slot]
                        stop(process)
                        yield job, why_it_died(process.returncode)
                time.sleep(0.05)
                if time.monotonic() - ticked >= TICK_SECONDS:
                    yield None
                    ticked = time.monotonic()
        finally:
            for process, _ in busy.values():
                process.terminate()
            for process, _ in busy.values():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_SECONDS)
                stop(process)

    def _begin(self, job: Path, slot: int) -> subprocess.Popen[bytes]:
        cores, gpus = self._cores[slot], range(slot * self._gpus_each, (slot + 1) * self._gpus_each)
        visible = {}
        if gpus:
            seen = os.environ.get("CUDA_VISIBLE_DEVICES")  # those that this process was given, by number or name
            names = seen.split(",") if seen else list(map(str, range(gpus.stop)))
            visible = {"CUDA_VISIBLE_DEVICES": ",".join(names[gpus.start : gpus.stop])}
        threads, asked = len(cores), os.environ.get("OMP_NUM_THREADS", "")
        if asked.isdigit():  # the user's own limit, for each process
            threads = min(threads, int(asked) * max(1, len(gpus)))
        process = start(job, Path.cwd(), threads, len(gpus), session=True, **visible)
        if pin := getattr(os, "sched_setaffinity", None):  # Linux alone has it
            with suppress(ProcessLookupError):
                pin(process.pid, cores)
        return process


def start(
    job: Path, folder: Path, threads: int, gpus: int, *, session: bool = False, **variables: str
) -> subprocess.Popen[bytes]:
    """Begin a job in a working folder, on `threads` threads and on `gpus` of the GPUs that this process sees.

    The job ends when this process ends. With `session`, Ctrl-C reaches the job only through this process.
    """
    environment = {**child_environment(), "OMP_NUM_THREADS": str(max(1, threads // max(1, gpus))), **variables}
    with (job.parent / OUTPUT).open("ab") as output:
        process = subprocess.Popen(
            [*command(job, gpus), "--with-parent"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=session,
        )
    if session:
        share_niceness(process.pid)
    return process


def share_niceness(leader: int) -> None:
    """Give the session of a process the niceness of this one. Linux shares CPU time among sessions first (sched(7))."""
    if nice := getattr(os, "nice", None):  # Windows has none
        with suppress(OSError):
            Path(f"/proc/{leader}/autogroup").write_text(str(nice(0)))


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


def command(job: Path, gpus: int = 0) -> list[str]:
    """Return the command line that runs a job, here or on another machine."""
    return [sys.executable, "-m", "caddie", "trial", str(job), *(["--gpus", str(gpus)] if gpus > 1 else [])]


def end_with_parent() -> None:
    """End this process by SIGTERM soon after its parent, which holds the other end of its standard input."""

    def end() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_SECONDS)
        os._exit(1)

    when_input_ends(end)


def why_it_died(status: int | None) -> str | None:
    """Return the reason why a process died, from its exit status; None if it ended well or was stopped."""
    if not status:
        return None
    number = -status if status < 0 else status - 128  # Python reports -signal, a shell 128 + signal
    if number in (signal.SIGTERM, signal.SIGINT):
        return None
    if 0 < number < signal.NSIG:
        return f"its process was ended by signal {number}" + (", out of memory?" if number == SIGKILL else "")
    return f"its process ended with status {status}; see {OUTPUT} in its folder"
