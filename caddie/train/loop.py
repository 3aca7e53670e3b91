"""Training against the clock."""

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from caddie.config.schedules import TrainProgress, value_at
from caddie.data.loaders import Batch, TrainingData, hold_out
from caddie.errors import UserError, count
from caddie.model import GPT
from caddie.report.run_files import CHECKPOINT, WEIGHTS
from caddie.runtime.cpu_share import CpuShare
from caddie.runtime.distributed import Ranks
from caddie.runtime.interrupt import saves_on_interrupt
from caddie.runtime.memory import peak_bytes
from caddie.runtime.progress import SILENT, Progress
from caddie.train.checkpoint import (
    checkpoint_identity,
    cpu_share_in,
    earlier_budgets,
    position_in,
    restore,
    save_tensors,
    weights_identity,
)
from caddie.train.hooks import BackgroundJobs, BusyMachine, Checkpoint, ForecastHook, HeldOut, Log, held_out_batches
from caddie.train.prefetch import AsyncScalar, prefetch
from caddie.train.settings import Train
from caddie.train.size_forecast import Forecaster
from caddie.train.trainer import Batches, Trainer
from caddie.train.warmup import warm_up

_COUNTED_BATCHES = 32
"""Micro-batches whose documents are counted before training."""


@dataclass(frozen=True)
class Trained:
    """Result of training."""

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
    """Share of its threads' time that training got, over all parts of an interrupted run; 1 if nothing else ran, None
    on a GPU, where threads only wait."""
    earlier_budgets: tuple[str, ...]
    """Other budgets under which the run trained before it was interrupted; its first steps had their schedules."""
    peak_bytes: int
    """Peak memory by the end of training: of the GPU, or of this process."""


class Interrupted(KeyboardInterrupt):
    """Stop of a run by the signal `number`; its checkpoint is on disk.

    It is no `Exception`, so that it also ends a loop of runs that goes on after every `Exception`.
    """

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

    Leaves log, checkpoint and weights in `folder`, which must exist. `forecaster` forecasts the artifact during
    training; only the first process uses it.

    Raises `UserError` for a checkpoint of other data, settings or seed, and for data that changed during training.
    Raises `Interrupted` after SIGINT or SIGTERM and `CheckFailed` when the loss is no longer finite; in both cases the
    checkpoint in `folder` is good.
    """
    prefixes = None
    if config.prefix_loss:
        if data.prefixes is None:
            raise UserError("train.prefix_loss needs the tokenizer, which these training data do not have")
        prefixes = data.prefixes()
    trainer = Trainer(gpt, config, seed, ranks, prefixes)
    shards, held_out = data.shards, list[Batch]()
    if config.held_out_tokens is not None:
        shards, tail = hold_out(shards, config.held_out_tokens)
        held_out = held_out_batches(tail, config.longest_row)
    stream = config.stream(shards, seed, data.bos, ranks.world)
    shape = stream.micro_batch(0).inputs.shape
    if trainer.asynchronous:  # the warm-up's random tokens begin no documents: compile for this number
        trainer.documents = 2 * max(stream.micro_batch(index).begun(data.bos) for index in range(_COUNTED_BATCHES))
    begin = time.perf_counter()
    execution, warmup_steps = warm_up(trainer, shape, progress)
    warmed = time.perf_counter() - begin
    identity = checkpoint_identity(gpt, config, data, seed)
    with closing(Log(folder, data.bits_per_nat, ranks.first, progress)) as log:
        measured = (forecaster, held_out) if ranks.first else (None, [])
        run = TimedRun(trainer, folder / CHECKPOINT, identity, log, *measured, data.bos)
        run.restore()
        if run.at.progress >= 1.0:
            log.note(f"training was done before: {count(run.at.step, 'step')}")
            run.forecast.forecaster = None  # the log has the last forecast, and its gradients are gone
        compiled, recorded = trainer.compiled, trainer.recordings is not None
        chosen = {**execution._asdict(), "compiled": compiled, "cuda_graphs": recorded}
        begun = {"event": "start", "step": run.at.step, "seconds": run.at.seconds}
        before = {"warmup_steps": warmup_steps, "warmup_seconds": round(warmed, 3)}
        log.write({**begun, **chosen, "attention": trainer.attention(shape[1]), **before})
        for text in trainer.notes:
            log.note(text)
        if forecaster is not None:
            forecaster.learned = trainer.views.by_name.keys()
        run.off_the_clock()
        with (
            saves_on_interrupt(),
            _signals() as received,
            prefetch(stream, trainer.indices(run.position), ranks.device, data.bos) as batches,
        ):
            if number := run.to_the_end(batches, received):
                raise Interrupted(number, run.at.step)
        share = run.cpu_share
        run.off_the_clock()
        log.write({"event": "end", "step": run.at.step, "seconds": run.at.seconds, "loss": run.loss})
    last = {name: parameter.detach().clone() for name, parameter in trainer.parameters.items()}
    trained = Trained(
        weights=trainer.average.weights if trainer.average else last,
        last=last,
        steps=run.at.step,
        tokens=run.position * trainer.micro_tokens,
        seconds=run.at.seconds,
        warmup_seconds=warmed,
        warmup_steps=warmup_steps,
        final_loss=run.loss,
        precision=execution.precision,
        threads=execution.threads,
        cpu_share=share,
        earlier_budgets=run.checkpoint.earlier_budgets,
        peak_bytes=peak_bytes(ranks.device),
    )
    if data.check_unchanged is not None:
        data.check_unchanged()
    if ranks.first:
        save_tensors(folder / WEIGHTS, trained.weights, weights_identity(gpt, config, data.documents_sha256))
    return trained


class TimedRun:
    """Timed part of a run, and its position.

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
        """Step at which this process began, and CPU share and seconds of the run's earlier processes."""
        self.bos = bos
        self.checkpoint = Checkpoint(trainer, self.background, checkpoint, identity)
        self.forecast = ForecastHook(trainer, self.background, log, forecaster)
        self.held_out = HeldOut(trainer, log, held_out, bos)
        self.busy_machine = BusyMachine(trainer, log)
        self.pending: deque[tuple[int, int, float, AsyncScalar]] = deque()
        """Launched steps whose losses have not been read: steps and micro-batches done, learning-rate scale, loss."""
        self.received: Sequence[int] = ()
        self.signalled, self.began = 0, 0.0

    @property
    def cpu_share(self) -> float | None:
        """Share of its threads' time that training got, over all parts of the run; None without a step, or on a GPU."""
        share, seconds = self.earlier
        here = self.cpu.seconds if self.done.step > self.first else 0.0
        if self.trainer.asynchronous or not seconds + here:
            return None
        return (share * seconds + self.cpu.share * here) / (seconds + here)

    def restore(self) -> None:
        """Go on from the checkpoint if there is one."""
        if self.trainer.ranks.any(self.checkpoint.path.exists()):  # the same on all ranks: `state` is a collective
            found = restore(self.checkpoint.path, self.trainer.state(), self.checkpoint.identity)
            step, self.position, seconds, self.loss = position_in(self.checkpoint.path, found)
            self.at = self.done = TrainProgress(step, seconds, self.budget)
            earlier = self.checkpoint.earlier_budgets = earlier_budgets(self.checkpoint.path, found, self.budget)
            if earlier:
                self.log.note(f"its first {step:,} steps had the schedules of {' and then '.join(earlier)}")
            share, self.first = cpu_share_in(found), step
            self.earlier = (0.0, 0.0) if share is None else (share, seconds)

    def to_the_end(self, batches: Batches, received: Sequence[int]) -> int:
        """Step until the budget is spent or a signal comes; return the number of the signal, or 0."""
        self.received = received
        self.log.begin(self.trainer, self.at, self.position)
        self.save()
        self.background.wait()
        if self.at.progress < 1.0:
            batches = chain([next(batches)], batches)  # read the first off the clock: the disk may be cold
        self.trainer.ranks.wait()
        self.began = time.perf_counter() - self.at.seconds
        self.cpu = CpuShare(self.cpu.threads)
        while self.at.progress < 1.0 and not self.signalled:
            self.forecast.before_step(self.at)
            self.step(batches)
            self.forecast.after_step(self.at)
            self.held_out.after_step(self.at)
            self.busy_machine.after_step(self.cpu)
            if not self.signalled and self.checkpoint.due(self.done):
                self.save()
        self.read_losses(0)
        if self.signalled and self.at.progress < 1.0 <= self.done.progress:  # seen only now that the loss is read
            self.trainer.update_average(self.done, value_at(self.config.lr_schedule, self.done))
        self.save()
        self.at = self.done
        self.background.wait()
        # A signal may also have come in the last step or while its end was saved.
        return int(self.trainer.ranks.maximum(float(max(received, default=0)))[0])

    def step(self, batches: Batches) -> None:
        """Launch a step, and read the losses that are due."""
        trainer, at = self.trainer, self.at
        lr_scale = value_at(self.config.lr_schedule, at)
        loss = trainer.launch(batches, at, self.bos, lr_scale)
        trainer.zero_grad()
        self.position += self.config.micro_batches_at(at)
        self.pending.append((at.step + 1, self.position, lr_scale, loss))
        self.read_losses(1 if trainer.asynchronous else 0)
        self.at = TrainProgress(at.step + 1, self.done.seconds, self.budget)
        trainer.update_average(self.at, lr_scale)

    def off_the_clock(self) -> None:
        """Forecast and measure held-out text while the clock stands still."""
        self.forecast.off_the_clock(self.at)
        self.held_out.off_the_clock(self.at)

    def save(self) -> None:
        """Wait for all launched steps, and save a checkpoint."""
        self.read_losses(0)
        self.checkpoint.save(self.done, self.position, self.loss, self.cpu_share)

    def read_losses(self, pending: int) -> None:
        """Read and log losses until at most `pending` steps are pending; `CheckFailed` if a loss is not finite."""
        while len(self.pending) > pending:
            step, position, lr_scale, later = self.pending.popleft()
            loss = later.read()
            if not math.isfinite(loss):
                self.background.wait()
                self.trainer.ranks.wait()  # the first process writes the checkpoint that the error names
                raise self.checkpoint.diverged(f"the loss or its gradient was {loss} at step {step - 1:,}")
            seconds = time.perf_counter() - self.began
            here = (seconds, max(self.received, default=0), self.trainer.graphs())
            seconds, signalled, graphs = self.trainer.ranks.maximum(*here)
            self.done, self.loss, self.signalled = TrainProgress(step, seconds, self.budget), loss, int(signalled)
            self.log.step(self.done, position, loss, lr_scale, int(graphs))


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the signals that ask the run to stop; a second signal of the same kind acts as usual."""
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
