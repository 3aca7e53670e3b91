"""Training against the clock."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from caddie.checkpoint import CHECKPOINT, restore, save_tensors
from caddie.data import Batch, Prefetch
from caddie.distributed import Ranks
from caddie.errors import CheckFailed
from caddie.forecast import Forecaster
from caddie.model import GPT
from caddie.schedules import Budget, Moment, value_at
from caddie.trainer import Train, Trainer

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
    rehearsal_seconds: float
    final_loss: float
    precision: str
    threads: int
    cpu_share: float | None
    """Part of the time of its threads that this process had while it trained, 1 where nothing else ran; None where it
    had nothing left to train."""


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
    precision, threads = trainer.rehearse(budget, stream.micro_batch(0).inputs.shape)
    rehearsed = time.perf_counter() - begin
    settings = config.but(seconds=None, steps=1)  # a run may go on with a larger budget
    identity = {"model": gpt.key(), "train": settings.key(), "seed": str(seed), "data": data}
    run = _Run(trainer, budget, folder / CHECKPOINT, identity, watch, forecaster if ranks.first else None)
    run.restore()
    watch(
        {
            "event": "start",
            "step": run.moment.step,
            "seconds": run.moment.seconds,
            "precision": precision,
            "threads": threads,
            "attention": trainer.attention(stream.micro_batch(0).inputs.shape[1]),
        }
    )
    if forecaster is not None:
        forecaster.learned = trainer.views.by_name.keys()
    run.forecast(anew=True)
    ranks.wait()
    wall, busy = time.perf_counter(), time.process_time()
    with _signals() as received, Prefetch(stream.micro_batch, trainer.indices(run.position), ready=4) as batches:
        step = run.moment.step
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
        rehearsal_seconds=rehearsed,
        final_loss=run.loss,
        precision=precision,
        threads=threads,
        cpu_share=min(1.0, busy / (wall * threads)) if run.moment.step > step else None,
    )


class _Run:
    """The timed part of a run, and where it stands."""

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
        self.moment = Moment(0, 0.0, budget)
        self.position = 0
        """Micro-batches read, of all processes together."""
        self.loss = math.nan
        self.graphs = trainer.graphs()

    def restore(self) -> None:
        """Go on from the checkpoint if there is one."""
        if self.trainer.ranks.maximum(float(self.checkpoint.exists()))[0]:  # all alike, for they read it together
            found = restore(self.checkpoint, self.trainer.state(), self.identity)
            self.moment = Moment(int(found["step"]), float(found["seconds"]), self.budget)
            self.position, self.loss = int(found["position"]), float(found["loss"])

    def save(self) -> None:
        """Write the checkpoint, all of it or nothing."""
        state = self.trainer.state()
        if self.trainer.ranks.first:
            where = {"step": self.moment.step, "seconds": self.moment.seconds, "position": self.position}
            words = {name: repr(value) for name, value in {**where, "loss": self.loss}.items()}
            save_tensors(self.checkpoint, state, {**self.identity, **words})

    def to_the_end(self, batches: Iterator[Batch], bos: int, received: list[int]) -> None:
        """Step until the budget is spent."""
        ranks, trainer = self.trainer.ranks, self.trainer
        clock_began = time.perf_counter() - self.moment.seconds
        saved, logged, read = self.moment, self.moment, self.position
        self.save()
        while self.moment.progress < 1.0:
            lr_scale = value_at(self.config.lr_schedule, self.moment)
            due = self.forecaster is not None and self.forecaster.due(self.moment)
            trainer.observe = self.forecaster.observe if due and self.forecaster else None
            loss = trainer.step(batches, self.moment, bos)
            trainer.forget_gradients()
            if not math.isfinite(loss):
                raise CheckFailed(
                    f"the loss or its gradient was {loss} at step {self.moment.step:,}; the weights of step "
                    f"{saved.step:,} are in {self.checkpoint}; lower train.optimizers.*.lr or set train.clip_norm, "
                    "under another --out"
                )
            self.loss, self.position = loss, self.position + self.config.micro_batches_at(self.moment)
            seconds, signalled = ranks.maximum(time.perf_counter() - clock_began, float(max(received, default=0)))
            moment = self.moment = Moment(self.moment.step + 1, seconds, self.budget)
            trainer.watch(moment, lr_scale)
            if due and self.forecaster and self.forecaster.affordable(moment):
                self.forecast()
            if moment.seconds - logged.seconds >= 0.5 or moment.step <= 10 or moment.progress >= 1.0:
                self._log(logged, read, lr_scale)
                logged, read = moment, self.position
            if signalled and moment.progress < 1.0:
                self.save()
                ranks.wait()
                raise Interrupted(int(signalled), moment.step)
            if moment.seconds - saved.seconds >= self.config.checkpoint_seconds:
                self.save()
                saved = moment
        self.save()

    def forecast(self, anew: bool = False) -> None:
        """Say what the artifact would be; `anew` where the clock stands still."""
        if self.forecaster is not None:
            average, moment = self.trainer.average, self.moment
            weights = average.result() if average else self.trainer.parameters
            for event in self.forecaster.events(weights, moment, anew):
                self.watch({**event, "step": moment.step, "progress": round(moment.progress, 6)})

    def _log(self, before: Moment, read: int, lr_scale: float) -> None:
        moment, tokens = self.moment, self.trainer.micro_tokens
        span = max(moment.seconds - before.seconds, 1e-9)
        if (graphs := self.trainer.graphs()) > self.graphs:
            text = f"recompiled {graphs - self.graphs} graphs on the clock; a shape was not rehearsed"
            self.watch({"event": "note", "text": text})
            self.graphs = graphs
        self.watch(
            {
                "event": "step",
                "step": moment.step,
                "seconds": round(moment.seconds, 4),
                "progress": round(moment.progress, 6),
                "loss": self.loss,
                "tokens": self.position * tokens,
                "tokens_per_second": round((self.position - read) * tokens / span, 1),
                "lr_scale": round(lr_scale, 6),
            }
        )


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
