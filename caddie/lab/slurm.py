"""Run jobs on a Slurm cluster through submitit (https://github.com/facebookincubator/submitit)."""

import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from caddie.errors import UserError
from caddie.lab.executors import Ended, finish, start, stop, why_it_died

POLL_SECONDS = 10.0
"""Seconds between two checks of the jobs."""
LOST = ("NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "REQUEUED", "REVOKED")
"""States of jobs that Slurm ended for its own reasons; they are begun again."""


class Slurm:
    """Executor of a Slurm cluster: one Slurm job for each job of a study.

    A job that is preempted or out of time is asked to write a checkpoint. It continues when Slurm starts it again.
    """

    def __init__(
        self,
        partition: str = "",
        *,
        workers: int,
        cores_each: int,
        gpus_each: int = 0,
        minutes: int = 240,
        logs: Path = Path("runs") / "slurm",
        engine: Literal["slurm", "local", "debug"] = "slurm",
    ) -> None:
        """`workers` is the most jobs at once, `minutes` the time limit of a submission; `logs` gets submitit's files.

        Other engines than Slurm are for tests: `local` is processes of this machine, `debug` this process.
        """
        if cores_each < 1:
            raise UserError("Slurm must be told what a run takes; give --cores, and --gpus if it takes any")
        try:
            import submitit
        except ImportError:
            raise UserError("Slurm is reached through submitit; install it with: pip install submitit") from None
        try:
            self._executor = submitit.AutoExecutor(folder=logs / "%j", cluster=engine)
        except RuntimeError:
            raise UserError("Slurm is not here (no srun); run this on a machine that submits jobs") from None
        self._executor.update_parameters(
            name="caddie",
            timeout_min=minutes,
            cpus_per_task=cores_each,
            gpus_per_node=gpus_each,
            slurm_partition=partition or None,
            slurm_array_parallelism=workers,
        )
        self._task = _Task(str(Path.cwd()), cores_each, gpus_each)
        self.workers = workers

    def run(self, jobs: Sequence[Path]) -> Iterator[Ended | None]:
        """Yield each job as it ends, and None every `POLL_SECONDS` while none does."""
        submitted = self._executor.map_array(self._task, [str(job.resolve()) for job in jobs])
        waiting = dict(zip(submitted, jobs, strict=True))
        try:
            while waiting:
                ended = [job for job in waiting if job.done()]
                yield from ((waiting.pop(job), _outcome(job)) for job in ended)
                if not ended:
                    yield None
                    time.sleep(POLL_SECONDS)
        finally:
            for job in waiting:
                job.cancel()


def _outcome(ended: Any) -> str | None:
    if ended.exception() is None:
        return ended.result()  # type: ignore[no-any-return]
    lost = ended.state.startswith(LOST)
    return None if lost else f"its Slurm job ended as {ended.state}; see {ended.paths.stderr}"


@dataclass
class _Task:
    """Callable of a Slurm job."""

    folder: str
    threads: int
    gpus: int
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def __call__(self, job: str) -> str | None:
        """Run a job. Returns the reason why its process died, or None."""
        # Slurm signals every process of a job; only this one reacts, by `checkpoint`.
        before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        self.process = start(Path(job), Path(self.folder), self.threads, self.gpus)
        signal.signal(signal.SIGUSR2, before)
        return why_it_died(finish(self.process))

    def checkpoint(self, job: str) -> Any:
        """Stop the job, which saves its training, and return the submission that goes on with it."""
        from submitit.helpers import DelayedSubmission

        if self.process:
            stop(self.process)
        return DelayedSubmission(_Task(self.folder, self.threads, self.gpus), job)
