"""Training against the clock."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from caddie.data.loaders import Batch, TrainingData, hold_out
from caddie.errors import UserError
from caddie.model import GPT
from caddie.report.run_files import CHECKPOINT, WEIGHTS
from caddie.runtime.distributed import Ranks
from caddie.runtime.interrupt import saves_on_interrupt
from caddie.runtime.memory import peak_bytes
from caddie.runtime.progress import SILENT, Progress
from caddie.train.checkpoint import checkpoint_identity, save_tensors, weights_identity
from caddie.train.hooks import Log, Run, held_out_batches
from caddie.train.prefetch import prefetch
from caddie.train.settings import Train
from caddie.train.size_forecast import Forecaster
from caddie.train.trainer import Trainer
from caddie.train.warmup import warm_up


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
    """Share of its threads' time that training had, interrupted or not, 1 where nothing else ran; None on a GPU, for
    which threads only wait."""
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
    stream = config.loader.build(
        shards, tokens=trainer.micro_tokens, sequence_length=config.longest_row, seed=seed, bos=data.bos
    )
    shape = stream.micro_batch(0).inputs.shape
    begin = time.perf_counter()
    execution, warmup_steps = warm_up(trainer, shape, progress)
    warmed = time.perf_counter() - begin
    identity = checkpoint_identity(gpt, config, data, seed)
    with closing(Log(folder, data.bits_per_nat, ranks.first, progress)) as log:
        measured = (forecaster, held_out) if ranks.first else (None, [])
        run = Run(trainer, folder / CHECKPOINT, identity, log, *measured, data.bos)
        run.restore()
        if run.at.progress >= 1.0:
            log.note(f"training is done, at step {run.at.step:,}")
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
        run.forecast.off_the_clock()
        run.held_out.off_the_clock()
        ranks.wait()
        with (
            saves_on_interrupt(),
            _signals() as received,
            prefetch(stream, trainer.indices(run.position), ranks.device, data.bos) as batches,
        ):
            if number := run.to_the_end(batches, received):
                raise Interrupted(number, run.at.step)
        share = run.cpu_share
        run.forecast.off_the_clock()
        run.held_out.off_the_clock()
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
        peak_bytes=peak_bytes(ranks.device),
    )
    if data.check_unchanged is not None:
        data.check_unchanged()
    if ranks.first:
        save_tensors(folder / WEIGHTS, trained.weights, weights_identity(gpt, config, data.documents_sha256))
    return trained


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
