"""Warm-up before the clock starts: every shape of a step runs once, the fastest execution is chosen, all is undone."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product, repeat

import numpy as np
import torch
from torch import Tensor

from caddie.config.schedules import Budget, TrainProgress, progress_at
from caddie.data.loaders import Batch
from caddie.errors import UserError, first_line
from caddie.ops import product_dtype
from caddie.runtime.autotune import allow_graphs, quickest, thread_counts, worth_compiling
from caddie.runtime.progress import SILENT, Progress
from caddie.train.cuda_graphs import Recordings, recorder
from caddie.train.settings import Train
from caddie.train.trainer import Execution, Trainer

MAX_WARMUP_FRACTION = 0.1
"""Largest part of the budget, of its steps or of its seconds, that the steps of a warm-up may take."""
_LATE_STEP = 1 << 20
"""Step at which schedules in steps have ended, for checks of a run that has no budget of steps."""
_CHECKING_STEPS = 3
"""Steps after which a gradient has reached every parameter that is not dead: a factor that starts at zero blocks the
gradient of what comes before it until it has moved. A run with fewer warm-up steps is not checked."""


def warmup_steps(train: Train, shapes: int) -> int:
    """Return the steps that the warm-up makes in each of the run's `shapes`, as far as time allows.

    With a budget of steps the warm-up takes at most a tenth of it, but at least one step per shape, so that nothing is
    compiled on the clock.
    """
    if train.steps is None:
        return train.warmup_steps
    return min(train.warmup_steps, max(1, round(MAX_WARMUP_FRACTION * train.steps / shapes)))


def warm_up(trainer: Trainer, rows: tuple[int, int], progress: Progress = SILENT) -> tuple[Execution, int]:
    """Run every shape on random tokens, choose precision, threads, compilation and CUDA graphs, and undo the steps.

    Return the execution chosen and the number of steps. `rows` is the shape of micro-batches. With a budget of steps
    alone, no choice that changes results depends on the clock, so such a run is reproducible. Raises `UserError` for
    a parameter that no gradient reaches in any shape or that never moves, after up to nine more steps. Each step is
    reported to `progress`.
    """
    warming = _WarmUp(trainer, rows, progress)
    return warming.run(), warming.steps


class _WarmUp:
    def __init__(self, trainer: Trainer, rows: tuple[int, int], progress: Progress = SILENT) -> None:
        self.trainer = trainer
        self.budget = trainer.config.budget
        self.rows = rows
        self.timed = self.budget.seconds is not None and trainer.ranks.device.type == "cpu" and trainer.ranks.world == 1
        self.seconds = _choice_seconds(self.budget)
        self.points = list(trainer.shapes().values())
        self.progress, self.steps, self.planned, self.began = progress, 0, 0, time.perf_counter()
        self.unreached = set(trainer.trained)  # parameters that no gradient has reached so far

    def run(self) -> Execution:
        trainer, steps = self.trainer, warmup_steps(self.trainer.config, len(self.points))
        executions = self.executions()
        self.planned = steps * len(self.points) + _tries(executions)
        if untrained := trainer.parameters.keys() - trainer.trained.keys():
            self.progress.note(f"not trained, as the recipe says: {_some(untrained)}")
        saved = {name: tensor.clone() for name, tensor in trainer.state().items()}
        if trainer.compiled:
            allow_graphs(4 * len(self.points))
        chosen = self.choose_execution(executions)
        self.choose_compiling()
        self.choose_recording()
        for turn in range(steps):  # every shape once before any twice: time may run out
            for train_progress in self.points if turn == 0 or not self.out_of_time() else ():
                self.step(train_progress)
        checks = trainer.config.warmup_steps >= _CHECKING_STEPS
        for fraction in (0.25, 0.5, 0.75):  # at the points above an optimizer's own rate may be zero
            for _ in range(_CHECKING_STEPS):
                if checks and trainer.ranks.any(bool(self.unreached or self.unmoved(saved))):
                    at = progress_at(fraction, self.budget)
                    self.step(at if self.budget.steps else replace(at, step=_LATE_STEP))
        # A run that diverges, as weights of 1e4 show, has dead channels too, and reports that itself.
        tame = all(bool((parameter.abs() < 1e4).all()) for parameter in trainer.parameters.values())
        unmoved = self.unmoved(saved)
        for name, tensor in trainer.state().items():
            tensor.data.copy_(saved[name])
        still = unmoved - self.unreached  # a gradient reaches them; as they stay put, it may reach no others
        if checks and tame and self.unreached and not still:
            raise UserError(
                f"no gradient reaches {_some(self.unreached)}: nothing that the loss depends on reads it, or two"
                " factors start at zero; train.warmup_steps=0 trains it anyway"
            )
        if checks and tame and still:
            raise UserError(
                f"{_some(still)} never move: look at the rates of train.optimizers, or set train.warmup_steps=0"
            )
        return chosen

    def out_of_time(self) -> bool:
        """Return True on all ranks once the warm-up has taken its part of a budget of seconds."""
        if self.budget.seconds is None:
            return False  # nothing then depends on the clock
        seconds = self.trainer.ranks.maximum(time.perf_counter() - self.began)[0]
        return seconds > MAX_WARMUP_FRACTION * self.budget.seconds

    def choose_execution(self, executions: list[Execution]) -> Execution:
        """Choose precision and threads, measured on uncompiled steps if anything is timed.

        If trying all would take too large a part of the run, it takes the usual one: all threads, and bfloat16 where
        `auto` allows it.
        """
        trainer, compiled = self.trainer, self.trainer.compiled
        if self.timed:  # a graph is compiled anew for each number of threads, which would count as the time of the step
            trainer.compile(False)

        def run(execution: Execution) -> None:
            trainer.use(execution)
            self.step(self.points[0])

        if len(executions) > 1:
            usual, began = executions[len(thread_counts()) - 1], time.perf_counter()
            run(usual)
            all_tries_seconds = (time.perf_counter() - began) * _tries(executions)
            if all_tries_seconds > MAX_WARMUP_FRACTION * (self.budget.seconds or math.inf):
                executions = [usual]
        chosen = quickest(executions, run, self.seconds)
        trainer.use(chosen)
        trainer.compile(compiled)
        return chosen

    def executions(self) -> list[Execution]:
        precision, device = self.trainer.config.precision, self.trainer.ranks.device
        if not self.timed:
            quick = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
            auto = "bfloat16" if quick else "float32"
            return [Execution(auto if precision == "auto" else precision, torch.get_num_threads())]
        has_bfloat16 = product_dtype(device, torch.bfloat16) == torch.bfloat16
        auto_precisions = ["bfloat16", "float32"] if has_bfloat16 else ["float32"]
        precisions = auto_precisions if precision == "auto" else [precision]
        return [Execution(*choice) for choice in product(precisions, thread_counts())]

    def choose_compiling(self) -> None:
        """With compile=auto, check that compiling works on all ranks, and on a CPU that it pays.

        A CPU waits for its compiler before the first step. So compiling is tried only if that time could be won back
        within the budget, and kept only if it is faster. Nothing is compiled on a CPU if nothing is timed.
        """
        trainer = self.trainer
        if trainer.config.compile != "auto" or not (trainer.compiled or (trainer.compilable and self.timed)):
            return
        choose = not trainer.compiled
        if choose and not worth_compiling(self.budget.seconds or 0.0, len(self.points)):
            return
        trainer.compile(True)
        allow_graphs(4 * len(self.points))
        if self.compiling_fails(self.points[:1]):
            return
        if choose:

            def run(compiled: bool) -> None:
                trainer.compile(compiled)
                self.step(self.points[0])

            trainer.compile(quickest([True, False], run, self.seconds))
        if trainer.compiled:
            self.compiling_fails(self.points[1:])

    def compiling_fails(self, points: Sequence[TrainProgress]) -> bool:
        """Return True if compiling fails at one of the points; then the model runs uncompiled, with a note."""
        failure = next(filter(None, map(self.failure, points)), "")
        if failure:
            self.trainer.compile(False)
            self.trainer.notes.append(f"compiling failed, so the model runs uncompiled: {failure}")
        return bool(failure)

    def choose_recording(self) -> None:
        """On a GPU, record every shape as a CUDA graph on all ranks unless never; with auto, check that it pays.

        Raises `UserError` if a recording fails: the driver breaks off, and PyTorch's memory is in no state to go on.
        """
        trainer = self.trainer
        setting, record = trainer.config.cuda_graphs, recorder(trainer.ranks.device)
        if setting == "always" and record is None:
            raise UserError("train.cuda_graphs=always needs a GPU; auto takes them where there is one")
        if setting == "never" or record is None:
            return
        recordings = trainer.recordings = Recordings(trainer.parameters.values(), record)
        for train_progress in self.points:  # the first time records, if a step is one micro-batch; the second replays
            if failure := self.failure(train_progress) or self.failure(train_progress):
                raise UserError(f"train.cuda_graphs={setting}: recording failed; set never: {failure}")
        if setting == "auto":

            def run(choice: Recordings | None) -> None:
                trainer.recordings = choice
                self.gradients(self.points[0])

            slower = short = False
            try:
                slower = quickest([recordings, None], run) is None
            except torch.OutOfMemoryError:
                short = True
            if trainer.ranks.any(short):
                raise UserError("train.cuda_graphs=auto: no memory to try both ways; set always or never")
            trainer.recordings = None if trainer.ranks.any(slower) else recordings

    def failure(self, train_progress: TrainProgress) -> str:
        """Compute the gradients of a step and return the error of any rank in a line, empty if there is none.

        It makes no step: a rank that failed in a step would leave the others waiting for its part.
        """
        failure = ""
        try:
            self.gradients(train_progress)
        except UserError:
            raise
        except Exception as error:  # compilers and drivers may fail in any way
            failure = first_line(error)
        anywhere = self.trainer.ranks.any(bool(failure))  # a collective: every rank calls it
        return failure or ("in another process" if anywhere else "")

    def gradients(self, train_progress: TrainProgress) -> None:
        """Compute the gradients of a step on random tokens, wait for them and free them."""
        try:
            self.trainer.gradients(self.batches(), train_progress, bos=-1).item()
        finally:
            self.trainer.zero_grad()

    def step(self, train_progress: TrainProgress) -> None:
        """Make a step on random tokens, and note the parameters that a gradient reached."""
        trainer = self.trainer
        self.steps += 1
        least = "at least " if self.timed else ""  # trials are repeated until one is surely the quickest
        planned = f" of {least}{self.planned}" if self.steps <= self.planned else ""
        self.progress.step({"event": "doing", "text": f"warm-up, step {self.steps}{planned}"})
        trainer.step(self.batches(), train_progress, bos=-1, lr_scale=1.0)  # at rate 0 nothing would move
        trainer.update_average(train_progress, 1.0)
        for name in list(self.unreached):
            gradient = trainer.parameters[name].grad
            if gradient is not None and bool(gradient.any()):
                self.unreached.discard(name)
        trainer.zero_grad()

    def unmoved(self, saved: Mapping[str, Tensor]) -> set[str]:
        return {name for name, now in self.trainer.trained.items() if torch.equal(now, saved[f"weights/{name}"])}

    def batches(self) -> Iterator[Batch]:
        ids = np.random.default_rng(self.trainer.seed).integers(0, self.trainer.vocabulary, (2, *self.rows))
        return repeat(Batch(ids[0], ids[1]))


def _tries(executions: Sequence[Execution]) -> int:
    """Return the least number of steps that the choice between these executions takes."""
    return 2 + 2 * len(executions) if len(executions) > 1 else 0


def warmup_seconds(train: Train, shapes: int, step_seconds: float) -> float:
    """Return the seconds that the warm-up will take, of steps that take `step_seconds`, without compiling."""
    steps = warmup_steps(train, shapes) * shapes
    most = math.inf if train.seconds is None else max(MAX_WARMUP_FRACTION * train.seconds, step_seconds * shapes)
    return min(step_seconds * steps, most)


def _choice_seconds(budget: Budget) -> float:
    """Return the seconds for a choice that the whole run depends on: a fiftieth of the run, within 0.5 to 3."""
    return min(max(0.5, 0.02 * (budget.seconds or 0.0)), 3.0)


def _some(names: set[str]) -> str:
    return f"{', '.join(sorted(names)[:3])} ({len(names)} in all)"
