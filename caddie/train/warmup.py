"""The warm-up before the clock starts: every kind of step once, the quickest way to compute it, and all undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product, repeat

import numpy as np
import torch
from torch import Tensor

from caddie.config.schedules import Budget, TrainProgress
from caddie.data.loaders import Batch
from caddie.errors import UserError, first_line
from caddie.ops import product_dtype
from caddie.runtime.autotune import allow_graphs, quickest, thread_counts, worth_compiling
from caddie.train.cuda_graphs import Recordings, recorder
from caddie.train.trainer import Execution, Trainer

_WILD = 1e4
"""A weight of this size means that the learning rates are far too high."""


def warm_up(trainer: Trainer, budget: Budget, rows: tuple[int, int]) -> Execution:
    """Run every shape on random tokens (`rows` of micro-batches), choose how to compute by measurement, undo the rest.

    With a budget of steps alone nothing that changes a bit is chosen by the clock, so such a run repeats. A parameter
    that no gradient reaches in any shape is a `UserError`; three steps are enough for it to come.
    """
    timed = budget.seconds is not None and trainer.ranks.device.type == "cpu" and trainer.ranks.world == 1
    saved = {name: tensor.clone() for name, tensor in trainer.state().items()}
    moments = list(trainer.shapes(budget).values())
    if trainer.compiled:
        allow_graphs(4 * len(moments))
    still = set(trainer.parameters)

    def step(moment: TrainProgress) -> None:
        _step(trainer, moment, rows, still)

    def run(execution: Execution) -> None:
        trainer.use(execution)
        step(moments[0])

    compiled, forward = trainer.compiled, trainer.forward
    if timed:  # a graph is compiled anew for each number of threads, which would count as the time of the step
        trainer.compile(False)
    chosen = quickest(_executions(trainer, timed), run, _patience(budget))
    trainer.use(chosen)
    trainer.compile(compiled, forward)
    _choose_compiling(trainer, timed, budget, moments, rows, lambda: step(moments[0]))
    _choose_recording(trainer, moments, rows)
    for moment in moments:
        for _ in range(trainer.config.warmup_steps):
            step(moment)
    checked = trainer.config.warmup_steps >= 3
    for part in (0.25, 0.5, 0.75):  # at the moments above an optimizer's own rate may be zero
        for _ in range(3 if checked and (still or _unmoved(trainer, saved)) else 0):
            step(trainer.moment(part, budget))
    # A run that diverges has dead channels too, and says so itself when it does.
    tame = all(bool((parameter.abs() < _WILD).all()) for parameter in trainer.parameters.values())
    unmoved = _unmoved(trainer, saved)
    for name, tensor in trainer.state().items():
        tensor.data.copy_(saved[name])
    if checked and tame and still:
        raise UserError(
            f"no gradient reaches {_some(still)}: nothing that the loss depends on reads it, or two factors start"
            " at zero; train.warmup_steps=0 trains it anyway"
        )
    if checked and tame and unmoved:
        raise UserError(
            f"{_some(unmoved)} never move: look at the rates of train.optimizers, or set train.warmup_steps=0"
        )
    return chosen


def _patience(budget: Budget) -> float:
    """Seconds for a choice that the whole run will be computed by: a fiftieth of it, half a second to three."""
    return min(max(0.5, 0.02 * (budget.seconds or 0.0)), 3.0)


def _executions(trainer: Trainer, timed: bool) -> list[Execution]:
    """The ways to compute a step that are worth a try; one where nothing is timed."""
    asked, on_gpu = trainer.config.precision, trainer.ranks.device.type == "cuda"
    if not timed:
        return [Execution(asked if asked != "auto" else "bfloat16" if on_gpu else "float32", torch.get_num_threads())]
    has_brain_products = product_dtype(trainer.ranks.device, torch.bfloat16) == torch.bfloat16
    precisions = [asked] if asked != "auto" else ["bfloat16", "float32"] if has_brain_products else ["float32"]
    return [Execution(*choice) for choice in product(precisions, thread_counts())]


def _choose_compiling(
    trainer: Trainer,
    timed: bool,
    budget: Budget,
    moments: Sequence[TrainProgress],
    rows: tuple[int, int],
    step: Callable[[], None],
) -> None:
    """Where compiling is left to the program, see that it works on all ranks, and on a CPU that it pays.

    A CPU waits for its compiler before the first step, so it is asked only where that much could be won back in the
    budget, and what it made is kept only if it is the faster. Nothing is compiled where nothing is timed.
    """
    if trainer.config.compile != "auto" or not (trainer.compiled or (trainer.compilable and timed)):
        return
    choose = not trainer.compiled
    if choose and not worth_compiling(budget.seconds or 0.0, len(moments)):
        return
    trainer.compile(True)
    allow_graphs(4 * len(moments))
    if _fails_compiled(trainer, moments[:1], rows):
        return
    if choose:
        forward = trainer.forward

        def run(compiled: bool) -> None:
            trainer.compile(compiled, forward)
            step()

        trainer.compile(quickest([True, False], run, _patience(budget)), forward)
    if trainer.compiled:
        _fails_compiled(trainer, moments[1:], rows)


def _fails_compiled(trainer: Trainer, moments: Sequence[TrainProgress], rows: tuple[int, int]) -> bool:
    """Whether the compiler is broken at one of the moments, in which case the model runs without it, and says so."""
    for moment in moments:
        if failure := _failure(trainer, moment, rows):
            trainer.compile(False)
            trainer.notes.append(f"compiling failed, so the model runs uncompiled: {failure}")
            return True
    return False


def _choose_recording(trainer: Trainer, moments: Sequence[TrainProgress], rows: tuple[int, int]) -> None:
    """Where a GPU may replay what it is told, record every shape on all ranks; where it may choose, see that it pays.

    A recording that fails is a `UserError`: the driver breaks off what was recorded, and PyTorch's memory is then in no
    state to go on in.
    """
    asked, record = trainer.config.cuda_graphs, recorder(trainer.ranks.device)
    if asked == "always" and record is None:
        raise UserError("train.cuda_graphs=always needs a GPU; auto takes them where there is one")
    if asked == "never" or record is None:
        return
    recordings = trainer.recordings = Recordings(trainer.parameters.values(), record)
    for moment in moments:  # the first time records, if a step is one micro-batch, and the second replays
        if failure := _failure(trainer, moment, rows) or _failure(trainer, moment, rows):
            raise UserError(f"train.cuda_graphs={asked}: recording failed; set never: {failure}")
    if asked == "auto":

        def run(choice: Recordings | None) -> None:
            trainer.recordings = choice
            _gradients(trainer, moments[0], rows)

        try:
            trainer.recordings = quickest([recordings, None], run)
        except torch.OutOfMemoryError:
            raise UserError("train.cuda_graphs=auto: no memory to try both ways; set always or never") from None


def _failure(trainer: Trainer, moment: TrainProgress, rows: tuple[int, int]) -> str:
    """What was wrong with the gradients of a step on any rank, in a line; empty where nothing was.

    It makes no step: a rank that failed within one would leave the others waiting for what it sends.
    """
    failure = ""
    try:
        _gradients(trainer, moment, rows)
    except UserError:
        raise
    except Exception as error:  # compilers and drivers may fail in any way
        failure = first_line(error)
    anywhere = trainer.ranks.maximum(float(bool(failure)))[0]  # all are asked, whatever happened here
    return failure or ("in another process" if anywhere else "")


def _gradients(trainer: Trainer, moment: TrainProgress, rows: tuple[int, int]) -> None:
    """Those of a step on random tokens, waited for and forgotten."""
    try:
        trainer.gradients(_batches(trainer, rows), moment, bos=-1).item()
    finally:
        trainer.forget_gradients()


def _unmoved(trainer: Trainer, saved: Mapping[str, Tensor]) -> set[str]:
    """Parameters that are to the bit what was saved."""
    return {name for name, now in trainer.parameters.items() if torch.equal(now, saved[f"weights/{name}"])}


def _step(trainer: Trainer, moment: TrainProgress, rows: tuple[int, int], still: set[str]) -> None:
    """One step on random tokens; parameters that a gradient reached are no longer `still`."""
    trainer.step(_batches(trainer, rows), moment, bos=-1, lr_scale=1.0)  # at rate 0 nothing would move
    trainer.watch(moment, 1.0)
    for name in list(still):
        gradient = trainer.parameters[name].grad
        if gradient is not None and bool(gradient.any()):
            still.discard(name)
    trainer.forget_gradients()


def _batches(trainer: Trainer, rows: tuple[int, int]) -> Iterator[Batch]:
    """Random tokens without end."""
    ids = np.random.default_rng(trainer.seed).integers(0, trainer.vocabulary, (2, *rows))
    return repeat(Batch(ids[0], ids[1]))


def _some(names: set[str]) -> str:
    """The first of the names, and how many there are."""
    return f"{', '.join(sorted(names)[:3])} ({len(names)} in all)"
