"""Log, checkpoint, size forecast, held-out loss and busy-machine warning between the steps of a run."""

import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from caddie.config.schedules import TrainProgress
from caddie.data.loaders import Batch
from caddie.data.shards import Tokens
from caddie.errors import CheckFailed, UserError
from caddie.files import reason
from caddie.report.run_files import LOG
from caddie.runtime.cpu_share import BUSY_SHARE, CpuShare
from caddie.runtime.progress import Event, Progress
from caddie.train.checkpoint import open_log, save_tensors
from caddie.train.size_forecast import Forecaster
from caddie.train.trainer import Trainer

LOG_SECONDS = 0.5
"""Least seconds between two `step` events; the first ten steps and the last are always written."""
HELD_OUT_TIMES, HELD_OUT_SHARE = 50, 0.01
"""Most measurements of held-out text during training, and the largest part of its time that all of them may take."""
BUSY_SECONDS = 2.0
"""Seconds of training after which a run may warn of a busy machine."""
HELD_OUT_BATCH_TOKENS = 8192
"""Tokens of held-out text that are measured at once: less memory than a step takes."""


class BackgroundJobs:
    """Jobs on one background thread, one after the other (run inline on a CPU)."""

    def __init__(self, asynchronous: bool) -> None:
        self._executor = ThreadPoolExecutor(1, "background") if asynchronous else None
        self._jobs: deque[Future[None]] = deque()

    @property
    def busy(self) -> bool:
        """True while a job is left; raises the exception of a finished job."""
        while self._jobs and self._jobs[0].done():
            self._jobs.popleft().result()
        return bool(self._jobs)

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` after all earlier jobs."""
        if self._executor is None:
            job()
        else:
            self._jobs.append(self._executor.submit(job))

    def wait(self) -> None:
        """Wait for all jobs; raises the exception of a failed job."""
        while self._jobs:
            self._jobs.popleft().result()


class Log:
    """Passes events on to `progress`; the first process also writes them to `log.jsonl`."""

    def __init__(self, folder: Path, bits_per_nat: float | None, first: bool, progress: Progress) -> None:
        self._path = folder / LOG
        self._file = open_log(self._path) if first else open(os.devnull, "a")  # noqa: SIM115
        self._bits_per_nat, self._progress = bits_per_nat, progress

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # the failed write was reported before
            self._file.close()

    def write(self, event: Event) -> None:
        """Write an event; losses in nats per token get bits per byte beside them. A note stays on the display."""
        if self._bits_per_nat is not None:
            rates = {"loss": "bits_per_byte", "gap": "gap_bits_per_byte"}
            rated = {rates[name]: event[name] * self._bits_per_nat for name in rates if name in event}
            event = {**event, **rated}
        try:
            self._file.write(json.dumps(event) + "\n")
        except OSError as error:
            raise UserError(f"cannot write {self._path}: {reason(error)}; free space, and start it again") from None
        if event["event"] == "note":
            self._progress.note(event["text"])
        else:
            self._progress.step(event)

    def note(self, text: str) -> None:
        """Write a note."""
        self.write({"event": "note", "text": text})

    def begin(self, trainer: Trainer, at: TrainProgress, position: int) -> None:
        """Start to measure the speed and to count compiled graphs."""
        self._trainer, self._logged, self._position = trainer, at, position
        self._graphs = int(trainer.ranks.maximum(trainer.graphs())[0])

    def step(self, done: TrainProgress, position: int, loss: float, lr_scale: float, graphs: int) -> None:
        """Write a `step` event for the step just read, if one is due; `graphs` is the largest count of a process."""
        tokens = self._trainer.micro_tokens
        span = done.seconds - self._logged.seconds
        if span < LOG_SECONDS and done.step > 10 and done.progress < 1.0:
            return
        if graphs > self._graphs:
            self.note(f"recompiled {graphs - self._graphs} graphs on the clock; a shape was not warmed up")
            self._graphs = graphs
        self.write(
            {
                "event": "step",
                "step": done.step,
                "seconds": round(done.seconds, 4),
                "progress": round(done.progress, 6),
                "loss": loss,
                "tokens": position * tokens,
                "tokens_per_second": round((position - self._position) * tokens / max(span, 1e-9), 1),
                "lr_scale": round(lr_scale, 6),
            }
        )
        self._logged, self._position = done, position


class Checkpoint:
    """Saves the run every `checkpoint_seconds`."""

    def __init__(self, trainer: Trainer, background: BackgroundJobs, path: Path, identity: dict[str, str]) -> None:
        self.trainer, self.background, self.path, self.identity = trainer, background, path, identity
        self.earlier_budgets: tuple[str, ...] = ()
        """Other budgets that the run had before it was interrupted."""

    def due(self, done: TrainProgress) -> bool:
        """True if the last checkpoint is old enough."""
        return done.seconds - self.saved.seconds >= self.trainer.config.checkpoint_seconds

    def save(self, at: TrainProgress, position: int, loss: float, cpu_share: float | None) -> None:
        """Write the checkpoint whole or not at all; all launched steps must be done, with finite losses."""
        trainer = self.trainer
        finite = torch.stack([tensor.isfinite().all() for tensor in trainer.parameters.values()]).tolist()
        if broken := [name for name, good in zip(trainer.parameters, finite, strict=True) if not good]:
            self.background.wait()
            trainer.ranks.wait()  # the first process writes the checkpoint that the error names
            if not at.step:
                raise CheckFailed(f"{broken[0]} was not finite before the first step; give it finite initial values")
            raise self.diverged(f"{broken[0]} was not finite after step {at.step:,}, though its gradient was")
        self.saved = at
        state = trainer.state()
        if trainer.ranks.first:
            where = {"step": at.step, "seconds": at.seconds, "position": position, "loss": loss, "cpu_share": cpu_share}
            words = {name: repr(value) for name, value in where.items()}
            words["budgets"] = ", ".join((*self.earlier_budgets, str(trainer.config.budget)))
            if trainer.asynchronous:  # the next steps change the tensors while they are written
                state = {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}
            self.background.submit(lambda: save_tensors(self.path, state, {**self.identity, **words}))

    def diverged(self, why: str) -> CheckFailed:
        """Return the error for a run that ends without a new checkpoint; it names the previous checkpoint."""
        return CheckFailed(
            f"{why}; the weights of step {self.saved.step:,} are in {self.path}; lower train.optimizers.*.lr or set "
            "train.clip_norm, under another --out"
        )


class ForecastHook:
    """Forecasts the artifact now and then, from the present gradients and weights."""

    def __init__(self, trainer: Trainer, background: BackgroundJobs, log: Log, forecaster: Forecaster | None) -> None:
        self.trainer, self.background, self.log = trainer, background, log
        self.forecaster, self.due = forecaster, False
        self.events: deque[dict[str, Any]] = deque()  # events of the background that are not yet written

    def before_step(self, at: TrainProgress) -> None:
        """Observe the gradients of the next step if a forecast is due."""
        self.due = self.forecaster is not None and not self.background.busy and self.forecaster.due(at)
        self.trainer.observe = self.forecaster.observe if self.due and self.forecaster else None

    def after_step(self, at: TrainProgress) -> None:
        """Forecast if that is due and cheap enough, and write the finished events."""
        if self.due and self.forecaster and self.forecaster.affordable(at):
            self._forecast(self.forecaster, at)
        self._write()

    def off_the_clock(self, at: TrainProgress) -> None:
        """Forecast anew while the clock stands still, and wait for it."""
        if self.forecaster is not None:
            self._forecast(self.forecaster, at, anew=True)
            self.background.wait()
            self._write()

    def _forecast(self, forecaster: Forecaster, at: TrainProgress, anew: bool = False) -> None:
        trainer = self.trainer
        weights: Mapping[str, Tensor] = trainer.average.weights if trainer.average else trainer.parameters
        if trainer.asynchronous:  # the next steps change the tensors themselves
            weights = {name: tensor.detach().clone() for name, tensor in weights.items()}
        self.background.submit(lambda: self.events.extend(forecaster.events(weights, at, anew)))

    def _write(self) -> None:
        while self.events:
            self.log.write(self.events.popleft())


class BusyMachine:
    """Warns within the first seconds if other programs take the time of this process's threads."""

    def __init__(self, trainer: Trainer, log: Log) -> None:
        self.log, self.due = log, not trainer.asynchronous  # on a GPU threads only wait

    def after_step(self, cpu: CpuShare) -> None:
        """Warn once, after `BUSY_SECONDS`, if the machine is busy."""
        if not self.due or cpu.seconds < BUSY_SECONDS:
            return
        self.due, share = False, cpu.share
        if share < BUSY_SHARE:
            fewer = ", or start again with OMP_NUM_THREADS=1" if cpu.threads > 1 else ""
            said = f"this machine is busy: training gets {share:.0%} of its threads' time"
            self.log.note(f"{said}; end other programs{fewer}")


class HeldOut:
    """Measures the loss on held-out training text now and then, in the first process, on the clock.

    On a GPU it waits for the steps that were launched, at most fifty times per run.
    """

    def __init__(self, trainer: Trainer, log: Log, batches: Sequence[Batch], bos: int) -> None:
        """Measure on `batches` of text whose documents begin with `bos`; without batches, measure nothing."""
        self.trainer, self.log, self.batches, self.bos = trainer, log, batches, bos
        self._measured, self._spent, self._cost = -1, 0.0, 0.0

    def after_step(self, at: TrainProgress) -> None:
        """Measure at every fiftieth of the budget, unless all measuring would exceed a hundredth of the time so far."""
        affordable = self._spent + self._cost <= HELD_OUT_SHARE * at.seconds
        if self.batches and affordable and int(at.progress * HELD_OUT_TIMES) > self._measured and at.progress < 1.0:
            self._spent += self._measure(at)

    def off_the_clock(self, at: TrainProgress) -> None:
        """Measure while the clock stands still."""
        if self.batches:
            self._measure(at)

    def _measure(self, at: TrainProgress) -> float:
        """Write a `held_out` event, and return the seconds that it took."""
        trainer = self.trainer
        if trainer.ranks.device.type == "cuda":
            torch.cuda.synchronize(trainer.ranks.device)  # so that the time of launched steps does not count
        begin = time.perf_counter()
        loss = trainer.loss(self.batches, at, self.bos)
        self._cost, self._measured = time.perf_counter() - begin, int(at.progress * HELD_OUT_TIMES)
        where = {"step": at.step, "seconds": round(at.seconds, 4), "progress": round(at.progress, 6)}
        tokens = sum(batch.inputs.size for batch in self.batches)
        self.log.write({"event": "held_out", **where, "loss": loss, "tokens": tokens})
        return self._cost


def held_out_batches(tokens: Tokens, length: int) -> list[Batch]:
    """Return a text's whole rows of `length` tokens, in batches; `UserError` if the text is shorter than a row."""
    count = (len(tokens) - 1) // length
    if not count:
        raise UserError(f"train.held_out_tokens must be more than the {length:,} tokens of a row, not {len(tokens):,}")
    ids = tokens[: count * length + 1].astype(np.int64)
    inputs, targets = ids[:-1].reshape(count, length), ids[1:].reshape(count, length)
    step = max(1, HELD_OUT_BATCH_TOKENS // length)
    return [Batch(inputs[first : first + step], targets[first : first + step]) for first in range(0, count, step)]
