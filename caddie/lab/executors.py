"""Where the jobs of a study run: in processes of this machine, each on cores or GPUs of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Protocol

from caddie.errors import UserError

GRACE_SECONDS = 20.0
"""What a run is given to write its checkpoint when it is asked to stop."""


class Executor(Protocol):
    """Does jobs; what comes of them is in their runs' folders, which all machines see."""

    @property
    def workers(self) -> int:
        """Jobs at once."""

    def run(self, jobs: Sequence[Path]) -> Iterator[tuple[Path, str | None]]:
        """Each job as it ends, with why its process died before it did, or None."""


@dataclass(frozen=True)
class _Busy:
    process: ForkServerProcess
    job: Path
    slot: int
    alive: Connection
    """Closed when this process ends, however it does."""


class Local:
    """Processes of this machine, each pinned to its share of the cores and to GPUs of its own."""

    def __init__(self, workers: int = 1, gpus_each: int = 0) -> None:
        """`gpus_each` is the number of GPUs of a run; 0 takes one where there are any."""
        import torch

        gpus = torch.cuda.device_count()
        gpus_each = gpus_each or min(gpus, 1)
        if gpus and workers * gpus_each > gpus:
            raise UserError(f"{workers} workers of {gpus_each} GPUs were asked for, and this machine has {gpus}")
        self._gpus_each, self._workers = gpus_each, workers
        cores = _cores()
        if workers > len(cores):
            raise UserError(f"{workers} workers on {len(cores)} cores would disturb one another; ask for fewer")
        threads = len(cores) // workers
        self._cores = [cores[slot * threads : (slot + 1) * threads] for slot in range(workers)]

    @property
    def workers(self) -> int:
        """Jobs at once."""
        return self._workers

    def run(self, jobs: Sequence[Path]) -> Iterator[tuple[Path, str | None]]:
        """Each job as it ends, with why its process died before it did, or None."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["caddie.lab.trial"])  # a process then begins with torch loaded
        waiting, slots = list(reversed(jobs)), list(range(self._workers))
        busy: list[_Busy] = []
        try:
            while waiting or busy:
                while waiting and slots:
                    job, slot = waiting.pop(), slots.pop()
                    theirs, ours = context.Pipe(duplex=False)
                    process = context.Process(target=_work, args=(job, self._cores[slot], self._devices(slot), theirs))
                    process.start()
                    theirs.close()
                    busy.append(_Busy(process, job, slot, ours))
                ended = wait([one.process.sentinel for one in busy])
                for one in [one for one in busy if one.process.sentinel in ended]:
                    busy.remove(one)
                    one.process.join()
                    one.alive.close()
                    slots.append(one.slot)
                    yield one.job, death(one.process.exitcode)
        finally:
            for one in busy:
                one.process.terminate()
            for one in busy:
                one.process.join()
                one.alive.close()

    def _devices(self, slot: int) -> list[int]:
        return list(range(slot * self._gpus_each, (slot + 1) * self._gpus_each))


def _cores() -> list[int]:
    """The cores that this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)
    return sorted(allowed(0)) if allowed else list(range(os.cpu_count() or 1))


def _work(job: Path, cores: list[int], devices: list[int], parent: Connection) -> None:
    """Do a job in a process of its own, which is gone when its parent is."""
    import torch

    from caddie.lab.trial import run_job
    from caddie.train import Interrupted

    _end_with(parent)
    with (job.parent / "output.txt").open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    if pin := getattr(os, "sched_setaffinity", None):  # Linux alone has it
        pin(0, cores)
    torch.set_num_threads(len(cores))
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
    if len(devices) > 1:
        from caddie.distributed import launch

        raise SystemExit(launch(len(devices), ["trial", str(job)]))
    try:
        run_job(job)
    except Interrupted as error:
        raise SystemExit(128 + error.number) from None


def _end_with(parent: Connection) -> None:
    """Stop this process soon after the one at the other end of a connection is gone, as if it had been asked to."""

    def wait() -> None:
        with suppress(EOFError, OSError):
            parent.recv()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_SECONDS)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def death(status: int | None) -> str | None:
    """Why a process died, from its exit status; None where it ended well or was asked to stop."""
    if not status or status in (-signal.SIGTERM, 128 + signal.SIGTERM, 128 + signal.SIGINT):
        return None
    if status < 0:
        return f"its process was ended by signal {-status}" + (", out of memory?" if status == -signal.SIGKILL else "")
    return f"its process ended with status {status}; see output.txt in its folder"
