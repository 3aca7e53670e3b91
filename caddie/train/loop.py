"""Training against the clock."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from caddie.config.schedules import Budget, TrainProgress, value_at
from caddie.errors import CheckFailed
from caddie.model import GPT
from caddie.runtime.distributed import Ranks
from caddie.runtime.memory import peak_bytes
from caddie.train.checkpoint import CHECKPOINT, restore, save_tensors
from caddie.train.prefetch import AsyncScalar, prefetch
from caddie.train.size_forecast import Forecaster
from caddie.train.trainer import Batches, Train, Trainer
from caddie.train.warmup import warm_up

Event = dict[str, Any]
"""What the log and the display are told."""


@dataclass(frozen=True)
class Trained:
    """The end of a run: `weights` are those handed on, `last` those of the last step."""

    weights: dict[str, Tensor]
    last: dict[str, Tensor]
    steps: int
    tokens: int
    seconds: float
    warmup_seconds: float
    final_loss: float
    precision: str
    threads: int
    cpu_share: float | None
    """Part of the time of its threads that this process had while it trained, 1 where nothing else ran; None where it
    had nothing left to train, and on a GPU, for which threads only wait."""
    peak_bytes: int
    """Most memory that was taken by the end of training: of the GPU, or of this process."""


class Interrupted(Exception):
    """The run was asked to stop; `number` is the signal. Its checkpoint is on disk."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"stopped after step {step:,}")
        self.number = number


def train(
    gpt: GPT,
    config: Train,
    shards: list[np.ndarray],
    *,
    bos: int,
    seed: int,
    folder: Path,
    data: str = "",
    ranks: Ranks = Ranks(),
    watch: Callable[[Event], None] = lambda event: None,
    forecaster: Forecaster | None = None,
) -> Trained:
    """Train on the shards until the budget is spent, from the checkpoint in `folder` if there is one.

    `data` names the training data; a checkpoint of other data, settings or seed is refused. `forecaster` says on the
    way what the artifact would be; only the first process has a use for it.

    Raises `Interrupted` after SIGINT or SIGTERM and `CheckFailed` when the loss is no longer finite; in both cases the
    checkpoint in `folder` is good.
    """
    budget = config.budget
    trainer = Trainer(gpt, config, seed, ranks)
    stream = config.loader.build(
        shards, tokens=trainer.micro_tokens, sequence_length=config.longest_row, seed=seed, bos=bos
    )
    begin = time.perf_counter()
    execution = warm_up(trainer, budget, stream.micro_batch(0).inputs.shape)
    warmed = time.perf_counter() - begin
    settings = config.but(seconds=None, steps=1)  # a run may go on with a larger budget
    identity = {"model": gpt.key(), "train": settings.key(), "seed": str(seed), "data": data}
    run = _Run(trainer, budget, folder / CHECKPOINT, identity, watch, forecaster if ranks.first else None)
    run.restore()
    watch(
        {
            "event": "start",
            "step": run.moment.step,
            "seconds": run.moment.seconds,
            **execution._asdict(),
            "compiled": trainer.compiled,
            "cuda_graphs": trainer.recordings is not None,
            "attention": trainer.attention(stream.micro_batch(0).inputs.shape[1]),
        }
    )
    for text in trainer.notes:
        watch({"event": "note", "text": text})
    if forecaster is not None:
        forecaster.learned = trainer.views.by_name.keys()
    run.forecast(anew=True)
    ranks.wait()
    wall, busy = time.perf_counter(), time.process_time()
    step = run.moment.step
    with _signals() as received, prefetch(stream, trainer.indices(run.position), ranks.device, bos) as batches:
        run.to_the_end(batches, bos, received)
    wall, busy = time.perf_counter() - wall, time.process_time() - busy
    run.forecast(anew=True)
    last = {name: parameter.detach().clone() for name, parameter in trainer.parameters.items()}
    return Trained(
        weights=trainer.average.result() if trainer.average else last,
        last=last,
        steps=run.moment.step,
        tokens=run.position * trainer.micro_tokens,
        seconds=run.moment.seconds,
        warmup_seconds=warmed,
        final_loss=run.loss,
        precision=execution.precision,
        threads=execution.threads,
        cpu_share=min(1.0, busy / (wall * execution.threads))
        if run.moment.step > step and not trainer.asynchronous
        else None,
        peak_bytes=peak_bytes(ranks.device),
    )


class PendingStep(NamedTuple):
    """A step that was launched: what there is to say when it is done."""

    step: int
    position: int
    lr_scale: float
    loss: AsyncScalar


class BackgroundJobs:
    """Work that no step waits for: one after the other in a thread where the device works on its own, else at once."""

    def __init__(self, late: bool) -> None:
        self._executor = ThreadPoolExecutor(1, "behind") if late else None
        self._works: deque[Future[None]] = deque()

    @property
    def busy(self) -> bool:
        """Whether there is work left; what was wrong with the work done is raised."""
        while self._works and self._works[0].done():
            self._works.popleft().result()
        return bool(self._works)

    def do(self, work: Callable[[], None]) -> None:
        """Do this after what there is to do."""
        if self._executor is None:
            work()
        else:
            self._works.append(self._executor.submit(work))

    def wait(self) -> None:
        """Until all is done."""
        while self._works:
            self._works.popleft().result()


class _Run:
    """The timed part of a run, and where it stands.

    Where the device works on its own, a step is looked at when the next one has been launched, so that the device
    always has work. Then times, losses and signals are known one step late: schedules count time up to the step before,
    and a run goes on for one step after its time is over or its loss is no longer finite. What is saved and the end of
    the run are waited for. On a CPU every step is looked at before the next.
    """

    def __init__(
        self,
        trainer: Trainer,
        budget: Budget,
        checkpoint: Path,
        identity: dict[str, str],
        watch: Callable[[Event], None],
        forecaster: Forecaster | None,
    ) -> None:
        self.trainer = trainer
        self.forecaster = forecaster
        self.config = trainer.config
        self.budget = budget
        self.checkpoint = checkpoint
        self.identity = identity
        self.watch = watch
        self.moment = self.done = self.saved = self.logged = TrainProgress(0, 0.0, budget)
        """Before the next step; after the last step that was looked at, that was saved, that was logged."""
        self.position = self.read = 0
        """Micro-batches read by the steps launched, and by those logged, of all processes together."""
        self.loss = math.nan
        self.graphs = trainer.graphs()
        self.flying: deque[PendingStep] = deque()
        self.received: Sequence[int] = ()
        self.signalled = 0
        self.began = 0.0
        self.behind = BackgroundJobs(trainer.asynchronous)
        self.pending_events: deque[Event] = deque()

    def restore(self) -> None:
        """Go on from the checkpoint if there is one."""
        if self.trainer.ranks.maximum(float(self.checkpoint.exists()))[0]:  # all alike, for they read it together
            found = restore(self.checkpoint, self.trainer.state(), self.identity)
            self.moment = self.done = TrainProgress(int(found["step"]), float(found["seconds"]), self.budget)
            self.position, self.loss = int(found["position"]), float(found["loss"])

    def save(self) -> None:
        """Write the checkpoint, all of it or nothing, once all that was launched is done and found good."""
        self._look(0)
        self.moment = self.saved = self.done
        state = self.trainer.state()
        if self.trainer.ranks.first:
            where = {"step": self.moment.step, "seconds": self.moment.seconds, "position": self.position}
            words = {name: repr(value) for name, value in {**where, "loss": self.loss}.items()}
            late = self.trainer.asynchronous  # then the next steps change the tensors while they are written
            held = {name: tensor.to("cpu", copy=True) for name, tensor in state.items()} if late else state
            self.behind.do(lambda: save_tensors(self.checkpoint, held, {**self.identity, **words}))

    def to_the_end(self, batches: Batches, bos: int, received: Sequence[int]) -> None:
        """Step until the budget is spent."""
        trainer = self.trainer
        self.logged, self.read, self.received = self.moment, self.position, received
        self.save()
        self.began = time.perf_counter() - self.moment.seconds
        while self.moment.progress < 1.0:
            lr_scale = value_at(self.config.lr_schedule, self.moment)
            due = self.forecaster is not None and not self.behind.busy and self.forecaster.due(self.moment)
            trainer.observe = self.forecaster.observe if due and self.forecaster else None
            loss = trainer.launch(batches, self.moment, bos)
            trainer.forget_gradients()
            self.position += self.config.micro_batches_at(self.moment)
            self.flying.append(PendingStep(self.moment.step + 1, self.position, lr_scale, loss))
            self._look(1 if trainer.asynchronous else 0)
            self.moment = TrainProgress(self.moment.step + 1, self.done.seconds, self.budget)
            trainer.watch(self.moment, lr_scale)
            if due and self.forecaster and self.forecaster.affordable(self.moment):
                self.forecast()
            self._tell()
            if self.signalled:
                break
            if self.done.seconds - self.saved.seconds >= self.config.checkpoint_seconds:
                self.save()
        self.save()
        self.behind.wait()
        number = int(trainer.ranks.maximum(float(max(received, default=0)))[0])
        if number:  # a signal may also have come in the last step or while its end was saved
            raise Interrupted(number, self.moment.step)

    def _look(self, flying: int) -> None:
        """Wait until no more than so many steps are under way, and take in what the others gave."""
        while len(self.flying) > flying:
            step, position, lr_scale, late = self.flying.popleft()
            loss = late.read()
            if not math.isfinite(loss):
                self.behind.wait()
                raise CheckFailed(
                    f"the loss or its gradient was {loss} at step {step - 1:,}; the weights of step "
                    f"{self.saved.step:,} are in {self.checkpoint}; lower train.optimizers.*.lr or set "
                    "train.clip_norm, under another --out"
                )
            seconds = time.perf_counter() - self.began
            seconds, signalled = self.trainer.ranks.maximum(seconds, float(max(self.received, default=0)))
            self.done, self.loss, self.signalled = TrainProgress(step, seconds, self.budget), loss, int(signalled)
            if seconds - self.logged.seconds >= 0.5 or step <= 10 or self.done.progress >= 1.0:
                self._log(position, lr_scale)

    def forecast(self, anew: bool = False) -> None:
        """Say what the artifact would be; `anew` where the clock stands still."""
        if (forecaster := self.forecaster) is None:
            return
        average, moment = self.trainer.average, self.moment
        weights: Mapping[str, Tensor] = average.result() if average else self.trainer.parameters
        if self.trainer.asynchronous:  # the next steps change the tensors themselves
            weights = {name: tensor.detach().clone() for name, tensor in weights.items()}

        def look() -> None:
            for event in forecaster.events(weights, moment, anew):
                self.pending_events.append({**event, "step": moment.step, "progress": round(moment.progress, 6)})

        self.behind.do(look)
        if anew:
            self.behind.wait()
        self._tell()

    def _tell(self) -> None:
        while self.pending_events:
            self.watch(self.pending_events.popleft())

    def _log(self, position: int, lr_scale: float) -> None:
        moment, tokens = self.done, self.trainer.micro_tokens
        span = max(moment.seconds - self.logged.seconds, 1e-9)
        if (graphs := self.trainer.graphs()) > self.graphs:
            text = f"recompiled {graphs - self.graphs} graphs on the clock; a shape was not warmed up"
            self.watch({"event": "note", "text": text})
            self.graphs = graphs
        self.watch(
            {
                "event": "step",
                "step": moment.step,
                "seconds": round(moment.seconds, 4),
                "progress": round(moment.progress, 6),
                "loss": self.loss,
                "tokens": position * tokens,
                "tokens_per_second": round((position - self.read) * tokens / span, 1),
                "lr_scale": round(lr_scale, 6),
            }
        )
        self.logged, self.read = moment, position


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Signals that asked the run to stop, as they come; a second one of a kind acts as usual."""
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
