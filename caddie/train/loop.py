"""Training against the clock."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from caddie.config.schedules import Budget, TrainProgress, value_at
from caddie.data.loaders import TrainingData
from caddie.errors import CheckFailed, UserError
from caddie.files import reason
from caddie.model import GPT
from caddie.report.run_files import CHECKPOINT, LOG, WEIGHTS
from caddie.runtime.distributed import Ranks
from caddie.runtime.memory import peak_bytes
from caddie.runtime.progress import SILENT, Event, Progress
from caddie.train.checkpoint import checkpoint_identity, open_log, position_in, restore, save_tensors, weights_identity
from caddie.train.prefetch import AsyncScalar, prefetch
from caddie.train.size_forecast import Forecaster
from caddie.train.trainer import Batches, Train, Trainer
from caddie.train.warmup import warm_up

LOG_SECONDS = 0.5
"""Least seconds between two `step` events, but for the first ten steps and the last."""


@dataclass(frozen=True)
class Trained:
    """The end of a training run."""

    weights: dict[str, Tensor]
    """Weights to pack: the average where there is one, else those of the last step."""
    last: dict[str, Tensor]
    """Weights of the last step."""
    steps: int
    tokens: int
    seconds: float
    warmup_seconds: float
    warmup_steps: int
    """Steps that the warm-up made and undid."""
    final_loss: float
    precision: str
    threads: int
    cpu_share: float | None
    """Share of its threads' time that this process had while it trained, 1 where nothing else ran; None where nothing
    was left to train, and on a GPU, for which threads only wait."""
    peak_bytes: int
    """Most memory taken by the end of training: of the GPU, or of this process."""


class Interrupted(Exception):
    """The run was asked to stop; `number` is the signal. Its checkpoint is on disk."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"stopped after step {step:,}")
        self.number = number


def train(
    gpt: GPT,
    config: Train,
    data: TrainingData,
    *,
    seed: int,
    folder: Path,
    ranks: Ranks = Ranks(),
    progress: Progress = SILENT,
    forecaster: Forecaster | None = None,
) -> Trained:
    """Train on `data` until the budget is spent, from the checkpoint in `folder` if there is one.

    Leaves log, checkpoint and weights in `folder`, which must exist. A checkpoint of other data, settings or seed is a
    `UserError`, and so are data that were changed meanwhile. `forecaster` predicts the artifact on the way; only the
    first process uses it.

    Raises `Interrupted` after SIGINT or SIGTERM and `CheckFailed` when the loss is no longer finite; in both cases the
    checkpoint in `folder` is good.
    """
    budget = config.budget
    trainer = Trainer(gpt, config, seed, ranks)
    stream = config.loader.build(
        data.shards, tokens=trainer.micro_tokens, sequence_length=config.longest_row, seed=seed, bos=data.bos
    )
    shape = stream.micro_batch(0).inputs.shape
    begin = time.perf_counter()
    execution, warmup_steps = warm_up(trainer, budget, shape, progress)
    warmed = time.perf_counter() - begin
    identity = checkpoint_identity(gpt, config, data, seed)
    with closing(_Log(folder, data.bits_per_nat, ranks.first, progress)) as log:
        run = _Run(trainer, budget, folder / CHECKPOINT, identity, log, forecaster if ranks.first else None)
        run.restore()
        compiled, recorded = trainer.compiled, trainer.recordings is not None
        chosen = {**execution._asdict(), "compiled": compiled, "cuda_graphs": recorded}
        begun = {"event": "start", "step": run.at.step, "seconds": run.at.seconds}
        before = {"warmup_steps": warmup_steps, "warmup_seconds": round(warmed, 3)}
        log.write({**begun, **chosen, "attention": trainer.attention(shape[1]), **before})
        for text in trainer.notes:
            log.note(text)
        if forecaster is not None:
            forecaster.learned = trainer.views.by_name.keys()
        run.forecast.off_the_clock()
        ranks.wait()
        wall, busy, first = time.perf_counter(), time.process_time(), run.at.step
        with _signals() as received, prefetch(stream, trainer.indices(run.position), ranks.device, data.bos) as batches:
            run.to_the_end(batches, data.bos, received)
        wall, busy = time.perf_counter() - wall, time.process_time() - busy
        run.forecast.off_the_clock()
        log.write({"event": "end", "step": run.at.step, "seconds": run.at.seconds, "loss": run.loss})
    last = {name: parameter.detach().clone() for name, parameter in trainer.parameters.items()}
    trained = Trained(
        weights=trainer.average.result() if trainer.average else last,
        last=last,
        steps=run.at.step,
        tokens=run.position * trainer.micro_tokens,
        seconds=run.at.seconds,
        warmup_seconds=warmed,
        warmup_steps=warmup_steps,
        final_loss=run.loss,
        precision=execution.precision,
        threads=execution.threads,
        cpu_share=min(1.0, busy / (wall * execution.threads))
        if run.at.step > first and not trainer.asynchronous
        else None,
        peak_bytes=peak_bytes(ranks.device),
    )
    if data.check_unchanged is not None:
        data.check_unchanged()
    if ranks.first:
        save_tensors(folder / WEIGHTS, trained.weights, weights_identity(gpt, config, data.documents_sha256))
    return trained


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


class _Run:
    """The timed part of a run, and its position.

    On a GPU the loss of a step is read when the next step has been launched, so that the device always has work. Then
    times, losses and signals are known one step late: schedules count time up to the step before, and a run goes on for
    one step after its time is over or its loss is no longer finite. Checkpoints and the end of the run wait for the
    device. On a CPU each step is read before the next.
    """

    def __init__(
        self,
        trainer: Trainer,
        budget: Budget,
        checkpoint: Path,
        identity: dict[str, str],
        log: _Log,
        forecaster: Forecaster | None,
    ) -> None:
        self.trainer, self.config, self.budget, self.log = trainer, trainer.config, budget, log
        self.background = BackgroundJobs(trainer.asynchronous)
        self.checkpoint = _Checkpoint(self, checkpoint, identity)
        self.forecast = _Forecast(self, forecaster)
        self.at = self.done = TrainProgress(0, 0.0, budget)
        """Before the next step, and after the last step whose loss was read."""
        self.position = 0  # micro-batches that all processes together have read
        self.loss = math.nan
        self.pending: deque[tuple[int, int, float, AsyncScalar]] = deque()
        """Launched steps whose losses have not been read: steps and micro-batches done, learning-rate scale, loss."""
        self.received: Sequence[int] = ()
        self.signalled, self.began = 0, 0.0

    def restore(self) -> None:
        """Go on from the checkpoint if there is one."""
        if self.trainer.ranks.maximum(float(self.checkpoint.path.exists()))[0]:  # all alike: they read it together
            found = restore(self.checkpoint.path, self.trainer.state(), self.checkpoint.identity)
            step, self.position, seconds, self.loss = position_in(self.checkpoint.path, found)
            self.at = self.done = TrainProgress(step, seconds, self.budget)

    def to_the_end(self, batches: Batches, bos: int, received: Sequence[int]) -> None:
        """Step until the budget is spent or a signal comes."""
        self.received = received
        self.log.begin(self)
        self.checkpoint.save()
        self.began = time.perf_counter() - self.at.seconds
        while self.at.progress < 1.0 and not self.signalled:
            self.forecast.before_step()
            self.step(batches, bos)
            self.forecast.after_step()
            if not self.signalled:
                self.checkpoint.after_step()
        self.checkpoint.save()
        self.background.wait()
        number = int(self.trainer.ranks.maximum(float(max(received, default=0)))[0])
        if number:  # a signal may also have come in the last step or while its end was saved
            raise Interrupted(number, self.at.step)

    def step(self, batches: Batches, bos: int) -> None:
        """Launch a step, and read the losses of those before it."""
        trainer, at = self.trainer, self.at
        lr_scale = value_at(self.config.lr_schedule, at)
        loss = trainer.launch(batches, at, bos)
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
                raise CheckFailed(
                    f"the loss or its gradient was {loss} at step {step - 1:,}; the weights of step "
                    f"{self.checkpoint.saved.step:,} are in {self.checkpoint.path}; lower train.optimizers.*.lr or set "
                    "train.clip_norm, under another --out"
                )
            seconds = time.perf_counter() - self.began
            seconds, signalled = self.trainer.ranks.maximum(seconds, float(max(self.received, default=0)))
            self.done, self.loss, self.signalled = TrainProgress(step, seconds, self.budget), loss, int(signalled)
            self.log.step(self, position, lr_scale)


class _Log:
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

    def begin(self, run: _Run) -> None:
        """Start counting the speed and compiled graphs from here."""
        self._logged, self._position, self._graphs = run.at, run.position, run.trainer.graphs()

    def step(self, run: _Run, position: int, lr_scale: float) -> None:
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


class _Checkpoint:
    """Saves the run every `checkpoint_seconds`."""

    def __init__(self, run: _Run, path: Path, identity: dict[str, str]) -> None:
        self.run, self.path, self.identity = run, path, identity

    def after_step(self) -> None:
        """Save if one is due."""
        if self.run.done.seconds - self.saved.seconds >= self.run.config.checkpoint_seconds:
            self.save()

    def save(self) -> None:
        """Write the checkpoint whole or not at all, after all launched steps are done and found good."""
        run, trainer = self.run, self.run.trainer
        run.read_losses(0)
        run.at = self.saved = run.done
        state = trainer.state()
        if trainer.ranks.first:
            where = {"step": run.at.step, "seconds": run.at.seconds, "position": run.position, "loss": run.loss}
            words = {name: repr(value) for name, value in where.items()}
            if trainer.asynchronous:  # the next steps change the tensors while they are written
                state = {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}
            run.background.submit(lambda: save_tensors(self.path, state, {**self.identity, **words}))


class _Forecast:
    """Predicts the artifact now and then, from gradients and weights at hand."""

    def __init__(self, run: _Run, forecaster: Forecaster | None) -> None:
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
        weights: Mapping[str, Tensor] = trainer.average.result() if trainer.average else trainer.parameters
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


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the signals that ask the run to stop; a second one of a kind acts as usual."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: object) -> None:
        received.append(number)
        signal.signal(number, before[number])

    for number in before:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
