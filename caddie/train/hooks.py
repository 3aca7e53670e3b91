"""The timed part of a run, and what it does between its steps: log, save, forecast, measure held-out text."""

from __future__ import annotations

import json
import math
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

from caddie.config.schedules import TrainProgress, value_at
from caddie.data.loaders import Batch
from caddie.data.shards import Tokens
from caddie.errors import CheckFailed, UserError
from caddie.files import reason
from caddie.report.run_files import LOG
from caddie.runtime.cpu_share import BUSY_SHARE, CpuShare
from caddie.runtime.progress import Event, Progress
from caddie.train.checkpoint import cpu_share_in, open_log, position_in, restore, save_tensors
from caddie.train.prefetch import AsyncScalar
from caddie.train.size_forecast import Forecaster
from caddie.train.trainer import Batches, Trainer

LOG_SECONDS = 0.5
"""Least seconds between two `step` events, but for the first ten steps and the last."""
HELD_OUT_TIMES, HELD_OUT_SHARE = 50, 0.01
"""Most measurements of held-out text during training, and the largest part of its time that they take together."""
BUSY_SECONDS = 2.0
"""Time after which a run warns of a busy machine."""
HELD_OUT_BATCH_TOKENS = 8192
"""Tokens of held-out text that are measured at once: less memory than a step takes."""


class BackgroundJobs:
    """Jobs on one background thread, one after the other (run inline on a CPU)."""

    def __init__(self, asynchronous: bool) -> None:
        self._executor = ThreadPoolExecutor(1, "background") if asynchronous else None
        self._jobs: deque[Future[None]] = deque()

    @property
    def busy(self) -> bool:
        """True while a job is left; raises what a finished one raised."""
        while self._jobs and self._jobs[0].done():
            self._jobs.popleft().result()
        return bool(self._jobs)

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` after those before it."""
        if self._executor is None:
            job()
        else:
            self._jobs.append(self._executor.submit(job))

    def wait(self) -> None:
        """Wait for all jobs; raises what one raised."""
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
        with suppress(OSError):  # what is still to be written was refused before
            self._file.close()

    def write(self, event: Event) -> None:
        """Write an event; losses in nats per token get bits per byte beside them."""
        if self._bits_per_nat is not None:
            rates = {"loss": "bits_per_byte", "gap": "gap_bits_per_byte"}
            rated = {rates[name]: event[name] * self._bits_per_nat for name in rates if name in event}
            event = {**event, **rated}
        self._write_line(event)
        self._progress.step(event)

    def note(self, text: str) -> None:
        """Write a line that stays."""
        self._write_line({"event": "note", "text": text})
        self._progress.note(text)

    def _write_line(self, event: Event) -> None:
        try:
            self._file.write(json.dumps(event) + "\n")
        except OSError as error:
            raise UserError(f"cannot write {self._path}: {reason(error)}; free space, and start it again") from None

    def begin(self, run: Run) -> None:
        """Start counting the speed and compiled graphs from here."""
        self._logged, self._position, self._graphs = run.at, run.position, run.trainer.graphs()

    def step(self, run: Run, position: int, lr_scale: float) -> None:
        """Write a `step` event of the step just read, if one is due."""
        done, tokens = run.done, run.trainer.micro_tokens
        span = done.seconds - self._logged.seconds
        if span < LOG_SECONDS and done.step > 10 and done.progress < 1.0:
            return
        if (graphs := run.trainer.graphs()) > self._graphs:
            self.note(f"recompiled {graphs - self._graphs} graphs on the clock; a shape was not warmed up")
            self._graphs = graphs
        self.write(
            {
                "event": "step",
                "step": done.step,
                "seconds": round(done.seconds, 4),
                "progress": round(done.progress, 6),
                "loss": run.loss,
                "tokens": position * tokens,
                "tokens_per_second": round((position - self._position) * tokens / max(span, 1e-9), 1),
                "lr_scale": round(lr_scale, 6),
            }
        )
        self._logged, self._position = done, position


class Checkpoint:
    """Saves the run every `checkpoint_seconds`."""

    def __init__(self, run: Run, path: Path, identity: dict[str, str]) -> None:
        self.run, self.path, self.identity = run, path, identity

    def after_step(self) -> None:
        """Save if one is due."""
        if self.run.done.seconds - self.saved.seconds >= self.run.config.checkpoint_seconds:
            self.save()

    def save(self) -> None:
        """Write the checkpoint whole or not at all, after all launched steps are done and found good."""
        run, trainer = self.run, self.run.trainer
        run.read_losses(0)
        if broken := [name for name, tensor in trainer.parameters.items() if not bool(tensor.isfinite().all())]:
            run.background.wait()
            raise self.stays(f"{broken[0]} was not finite after step {run.done.step:,}, though its gradient was")
        run.at = self.saved = run.done
        state = trainer.state()
        if trainer.ranks.first:
            where = {"step": run.at.step, "seconds": run.at.seconds, "position": run.position, "loss": run.loss}
            words = {name: repr(value) for name, value in {**where, "cpu_share": run.cpu_share}.items()}
            if trainer.asynchronous:  # the next steps change the tensors while they are written
                state = {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}
            run.background.submit(lambda: save_tensors(self.path, state, {**self.identity, **words}))

    def stays(self, why: str) -> CheckFailed:
        """Return the error of a run that ends without a new checkpoint; it names the one before."""
        return CheckFailed(
            f"{why}; the weights of step {self.saved.step:,} are in {self.path}; lower train.optimizers.*.lr or set "
            "train.clip_norm, under another --out"
        )


class Forecast:
    """Predicts the artifact now and then, from gradients and weights at hand."""

    def __init__(self, run: Run, forecaster: Forecaster | None) -> None:
        self.run, self.forecaster, self.due = run, forecaster, False
        self.events: deque[dict[str, Any]] = deque()  # events found in the background that are still to be written

    def before_step(self) -> None:
        """Have the gradients of the next step observed if a forecast is due."""
        self.due = self.forecaster is not None and not self.run.background.busy and self.forecaster.due(self.run.at)
        self.run.trainer.observe = self.forecaster.observe if self.due and self.forecaster else None

    def after_step(self) -> None:
        """Forecast if that is due and cheap enough, and write what was found."""
        if self.due and self.forecaster and self.forecaster.affordable(self.run.at):
            self._forecast()
        self._write()

    def off_the_clock(self) -> None:
        """Forecast anew while the clock stands still, and wait for it."""
        if self.forecaster is not None:
            self._forecast(anew=True)
            self.run.background.wait()
            self._write()

    def _forecast(self, anew: bool = False) -> None:
        forecaster, trainer, at = self.forecaster, self.run.trainer, self.run.at
        assert forecaster is not None
        weights: Mapping[str, Tensor] = trainer.average.weights if trainer.average else trainer.parameters
        if trainer.asynchronous:  # the next steps change the tensors themselves
            weights = {name: tensor.detach().clone() for name, tensor in weights.items()}

        def job() -> None:
            for event in forecaster.events(weights, at, anew):
                self.events.append({**event, "step": at.step, "progress": round(at.progress, 6)})

        self.run.background.submit(job)

    def _write(self) -> None:
        while self.events:
            event = self.events.popleft()
            if event["event"] == "note":
                self.run.log.note(event["text"])
            else:
                self.run.log.write(event)


class BusyMachine:
    """Warns within the first seconds if other programs take the time of this process's threads."""

    def __init__(self, run: Run) -> None:
        self.run, self.due = run, not run.trainer.asynchronous  # on a GPU threads only wait

    def after_step(self) -> None:
        """Warn once, if that is due."""
        cpu = self.run.cpu
        if not self.due or cpu.seconds < BUSY_SECONDS:
            return
        self.due, share = False, cpu.share
        if share < BUSY_SHARE:
            fewer = ", or start again with OMP_NUM_THREADS=1" if cpu.threads > 1 else ""
            said = f"this machine is busy: training gets {share:.0%} of its threads' time"
            self.run.log.note(f"{said}; end other programs{fewer}")


class HeldOut:
    """Measures the loss on held-out training text now and then, in the first process, on the clock.

    On a GPU it waits for the steps that were launched, at most fifty times a run.
    """

    def __init__(self, run: Run, batches: Sequence[Batch], bos: int) -> None:
        """`batches` are the text, whose documents begin with `bos`; without any, nothing is measured."""
        self.run, self.batches, self.bos = run, batches, bos
        self._measured, self._spent, self._cost = -1, 0.0, 0.0

    def after_step(self) -> None:
        """Measure at every fiftieth of the budget, unless all measuring would exceed a hundredth of the time so far."""
        at = self.run.at
        affordable = self._spent + self._cost <= HELD_OUT_SHARE * at.seconds
        if self.batches and affordable and int(at.progress * HELD_OUT_TIMES) > self._measured and at.progress < 1.0:
            self._spent += self._measure()

    def off_the_clock(self) -> None:
        """Measure while the clock stands still."""
        if self.batches:
            self._measure()

    def _measure(self) -> float:
        """Write a `held_out` event, and return the seconds that it took."""
        at, trainer = self.run.at, self.run.trainer
        if trainer.ranks.device.type == "cuda":
            torch.cuda.synchronize(trainer.ranks.device)  # so that launched steps are not counted as this
        begin = time.perf_counter()
        loss = trainer.loss(self.batches, at, self.bos)
        self._cost, self._measured = time.perf_counter() - begin, int(at.progress * HELD_OUT_TIMES)
        where = {"step": at.step, "seconds": round(at.seconds, 4), "progress": round(at.progress, 6)}
        tokens = sum(batch.inputs.size for batch in self.batches)
        self.run.log.write({"event": "held_out", **where, "loss": loss, "tokens": tokens})
        return self._cost


def held_out_batches(tokens: Tokens, length: int) -> list[Batch]:
    """Return whole rows of `length` tokens of a text, in batches; `UserError` if it is shorter than one."""
    count = (len(tokens) - 1) // length
    if not count:
        raise UserError(f"train.held_out_tokens must be more than the {length:,} tokens of a row, not {len(tokens):,}")
    ids = tokens[: count * length + 1].astype(np.int64)
    inputs, targets = ids[:-1].reshape(count, length), ids[1:].reshape(count, length)
    step = max(1, HELD_OUT_BATCH_TOKENS // length)
    return [Batch(inputs[first : first + step], targets[first : first + step]) for first in range(0, count, step)]


class Run:
    """The timed part of a run, and its position.

    On a GPU the loss of a step is read when the next step has been launched, so that the device always has work. Then
    times, losses and signals are known one step late: schedules count time up to the step before, and a run goes on for
    one step after its time is over or its loss is no longer finite. Checkpoints and the end of the run wait for the
    device. On a CPU each step is read before the next.
    """

    def __init__(
        self,
        trainer: Trainer,
        checkpoint: Path,
        identity: dict[str, str],
        log: Log,
        forecaster: Forecaster | None = None,
        held_out: Sequence[Batch] = (),
        bos: int = 0,
    ) -> None:
        self.trainer, self.config, self.budget, self.log = trainer, trainer.config, trainer.config.budget, log
        self.background = BackgroundJobs(trainer.asynchronous)
        self.at = self.done = TrainProgress(0, 0.0, self.budget)
        """Progress before the next step, and progress after the last step whose loss was read."""
        self.cpu = CpuShare(torch.get_num_threads())
        self.position, self.loss = 0, math.nan
        """Micro-batches that all processes together have read, and the loss that was read last."""
        self.first, self.earlier = 0, (0.0, 0.0)
        """Step at which this process began, and CPU share and seconds of the processes before that trained the run."""
        self.bos = bos
        self.checkpoint = Checkpoint(self, checkpoint, identity)
        self.forecast = Forecast(self, forecaster)
        self.held_out = HeldOut(self, held_out, bos)
        self.busy_machine = BusyMachine(self)
        self.pending: deque[tuple[int, int, float, AsyncScalar]] = deque()
        """Launched steps whose losses have not been read: steps and micro-batches done, learning-rate scale, loss."""
        self.received: Sequence[int] = ()
        self.signalled, self.began = 0, 0.0

    @property
    def cpu_share(self) -> float | None:
        """Share of its threads' time that training had, interrupted or not; None without a step, and on a GPU."""
        share, seconds = self.earlier
        here = self.cpu.seconds if self.done.step > self.first else 0.0
        if self.trainer.asynchronous or not seconds + here:
            return None
        return (share * seconds + self.cpu.share * here) / (seconds + here)

    def restore(self) -> None:
        """Go on from the checkpoint if there is one."""
        if self.trainer.ranks.any(self.checkpoint.path.exists()):  # all alike: `state` is a collective
            found = restore(self.checkpoint.path, self.trainer.state(), self.checkpoint.identity)
            step, self.position, seconds, self.loss = position_in(self.checkpoint.path, found)
            self.at = self.done = TrainProgress(step, seconds, self.budget)
            share, self.first = cpu_share_in(found), step
            self.earlier = (0.0, 0.0) if share is None else (share, seconds)

    def to_the_end(self, batches: Batches, received: Sequence[int]) -> int:
        """Step until the budget is spent or a signal comes; return the number of the signal, or 0."""
        self.received = received
        self.log.begin(self)
        self.checkpoint.save()
        self.began = time.perf_counter() - self.at.seconds
        self.cpu = CpuShare(self.cpu.threads)
        while self.at.progress < 1.0 and not self.signalled:
            self.forecast.before_step()
            self.step(batches)
            self.forecast.after_step()
            self.held_out.after_step()
            self.busy_machine.after_step()
            if not self.signalled:
                self.checkpoint.after_step()
        self.checkpoint.save()
        self.background.wait()
        # A signal may also have come in the last step or while its end was saved.
        return int(self.trainer.ranks.maximum(float(max(received, default=0)))[0])

    def step(self, batches: Batches) -> None:
        """Launch a step, and read the losses of those before it."""
        trainer, at = self.trainer, self.at
        lr_scale = value_at(self.config.lr_schedule, at)
        loss = trainer.launch(batches, at, self.bos, lr_scale)
        trainer.forget_gradients()
        self.position += self.config.micro_batches_at(at)
        self.pending.append((at.step + 1, self.position, lr_scale, loss))
        self.read_losses(1 if trainer.asynchronous else 0)
        self.at = TrainProgress(at.step + 1, self.done.seconds, self.budget)
        trainer.watch(self.at, lr_scale)

    def read_losses(self, pending: int) -> None:
        """Read and log losses until no more than so many steps are pending; `CheckFailed` if one is not finite."""
        while len(self.pending) > pending:
            step, position, lr_scale, later = self.pending.popleft()
            loss = later.read()
            if not math.isfinite(loss):
                self.background.wait()
                raise self.checkpoint.stays(f"the loss or its gradient was {loss} at step {step - 1:,}")
            seconds = time.perf_counter() - self.began
            seconds, signalled = self.trainer.ranks.maximum(seconds, float(max(self.received, default=0)))
            self.done, self.loss, self.signalled = TrainProgress(step, seconds, self.budget), loss, int(signalled)
            self.log.step(self, position, lr_scale)
