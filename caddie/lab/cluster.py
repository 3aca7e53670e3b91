"""Run jobs on the machines of a Ray cluster (https://docs.ray.io), which the user starts."""

import logging
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from caddie.errors import UserError
from caddie.files import reason
from caddie.lab.executors import GRACE_SECONDS, TICK_SECONDS, Ended, finish, start, why_it_died

RETRIES = 5
"""Most restarts of a job after its machine was lost."""
START = "start one with: ray start --head, and on each other machine: ray start --address=THIS_MACHINE:6379"
ANSWER_SECONDS = 5.0
"""Seconds that a cluster has to answer."""


class Stopped(Exception):
    """Raised if something other than the study stopped a job: its machine may be about to go."""


class Cluster:
    """Executor of a Ray cluster: one Ray task for each job.

    A task whose machine is lost starts again on another, from the run's last checkpoint. If the machine only seemed
    lost, the run's lock keeps the two tasks apart.
    """

    def __init__(self, address: str = "", *, gpus_each: int = 0, cores_each: int = 0) -> None:
        """`address` is that of a cluster that this machine belongs to, by default the one that was started here.

        A run takes `gpus_each` GPUs, where 0 is one if any machine has GPUs, and `cores_each` cores, where 0 is all
        cores of the smallest machine or, with GPUs, the smallest equal share of a machine's cores among its runs.
        """
        try:
            import ray
        except ImportError:
            raise UserError("a Ray cluster needs Ray; install it with: pip install ray") from None
        self._ray: Any = ray
        if not ray.is_initialized():
            try:
                if address:  # Ray itself would try for minutes
                    host, _, port = address.rpartition(":")
                    socket.create_connection((host, port), timeout=ANSWER_SECONDS).close()
                ray.init(address=address or "auto", logging_level=logging.ERROR, log_to_driver=False)
                # Ray's messages about lost machines would still go to standard output, where the study prints results.
                self._ray._private.worker._worker_logs_enabled = False
            except (OSError, RuntimeError, ValueError) as error:
                missing = f"at {address}: {reason(error)}" if address else f"runs here; {START}"
                raise UserError(f"no Ray cluster {missing}") from None
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        self._gpus_each = gpus_each or int(any(node.get("GPU", 0) for node in nodes))
        self._cores_each, self.workers = share(nodes, self._gpus_each, cores_each)

    def run(self, jobs: Sequence[Path]) -> Iterator[Ended | None]:
        """Yield each job as it ends, and None every `TICK_SECONDS` while none does."""
        retries = {"max_retries": RETRIES, "retry_exceptions": [Stopped]}
        task = self._ray.remote(_do).options(
            num_cpus=self._cores_each, num_gpus=self._gpus_each, scheduling_strategy="SPREAD", **retries
        )
        given = str(Path.cwd()), self._cores_each, self._gpus_each
        waiting = {task.remote(str(job.resolve()), *given): job for job in jobs}
        try:
            while waiting:
                ended, _ = self._ray.wait(list(waiting), timeout=TICK_SECONDS)
                yield (waiting.pop(ended[0]), self._outcome(ended[0])) if ended else None
        finally:
            for reference in waiting:
                self._ray.cancel(reference)
            if waiting:
                self._ray.wait(list(waiting), num_returns=len(waiting), timeout=GRACE_SECONDS)

    def _outcome(self, ended: Any) -> str | None:
        errors = self._ray.exceptions
        try:
            return self._ray.get(ended)  # type: ignore[no-any-return]
        except errors.RayTaskError as error:
            if isinstance(error.cause, Stopped):
                return None
            raise UserError(f"a machine of the cluster cannot do jobs: {error.cause}") from None
        except errors.RayError as error:
            return f"its machine was lost {RETRIES + 1} times; {str(error).splitlines()[0]}"


def share(nodes: Sequence[dict[str, float]], gpus_each: int, cores_each: int) -> tuple[int, int]:
    """Return the cores of a run and the number of runs at once. `nodes` are the Ray resources of each machine."""
    able = [node for node in nodes if node.get("CPU", 0) >= max(1, cores_each) and node.get("GPU", 0) >= gpus_each]
    if not able:
        wanted = f"{max(1, cores_each)} cores and {gpus_each} GPUs"
        raise UserError(f"no machine of the cluster has {wanted}; lower --cores or --gpus")
    at_once = [int(node["GPU"]) // gpus_each if gpus_each else 1 for node in able]
    cores_each = cores_each or max(1, min(int(node["CPU"]) // runs for node, runs in zip(able, at_once, strict=True)))
    fit = [int(node["CPU"]) // cores_each for node in able]
    return cores_each, sum(map(min, fit, at_once)) if gpus_each else sum(fit)


def _do(job: str, folder: str, threads: int, gpus: int) -> str | None:
    """Run a job on this machine. Returns the reason why its process died, or None."""
    if not Path(job).exists():
        raise UserError(f"{socket.gethostname()} does not see {job}; all machines must share this folder")
    status = finish(start(Path(job), Path(folder), threads, gpus))
    if status and why_it_died(status) is None:
        raise Stopped(f"status {status}")
    return why_it_died(status)
