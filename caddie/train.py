"""Training against the clock."""

from __future__ import annotations

import math
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product, repeat
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from caddie.averaging import Average, Averaging
from caddie.config import Config, Count, Positive, Range
from caddie.data import Batch, Loader, Prefetch, SequentialStream
from caddie.distributed import Ranks
from caddie.errors import CheckFailed, UserError
from caddie.files import replacing
from caddie.model import GPT, build
from caddie.optim import AdamW, Muon, Optimizer, Updater
from caddie.parameters import assign
from caddie.schedules import Budget, Moment, Schedule, StepRamp, Warmdown, value_at
from caddie.threads import quickest, thread_counts

CHECKPOINT = "checkpoint.safetensors"
"""Name of the checkpoint in a run folder."""
Event = dict[str, Any]
"""What the log and the display are told."""


@dataclass(frozen=True, kw_only=True)
class Train(Config):
    """How a model is trained."""

    seconds: Annotated[float, Range(0.01, 1e8)] | None = None
    """Wall-clock budget. With `steps` set too, whichever runs out first ends the run."""
    steps: Count | None = None
    """Budget in optimizer steps."""
    batch_tokens: Count = 524_288
    """Tokens of one optimizer step."""
    micro_batches: Count = 8
    """Parts into which a step is cut, shared equally by the processes."""
    sequence_length: Count = 1024
    """Tokens of a row."""
    loader: Loader = SequentialStream()
    """Order of the data."""
    optimizers: Mapping[str, Optimizer] = field(
        default_factory=lambda: {
            "matrix": Muon(lr=0.04, momentum=StepRamp(start=0.85, end=0.95, steps=500)),
            "embedding": AdamW(lr=0.05),
            "head": AdamW(lr=0.008),
            "gate": AdamW(lr=0.04),
            "scalar": AdamW(lr=0.04),
        }
    )
    """Role or name pattern to optimizer; the last match wins."""
    lr_schedule: Schedule = Warmdown(fraction=0.2)
    """Factor on every learning rate."""
    clip_norm: Positive | None = None
    """Largest norm of the whole gradient, or none."""
    averaging: Averaging | None = None
    """Average of the weights that the run hands on, or none for the last weights."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the stream; auto takes bfloat16 on a GPU and the faster in the rehearsal on a CPU."""
    compile: Literal["auto", "always", "never"] = "auto"
    """Whether to compile the model; auto compiles on a GPU where there is a C compiler."""
    rehearsal_steps: Annotated[int, Range(0, 1000)] = 3
    """Steps on random tokens before the clock starts, undone afterwards."""
    checkpoint_seconds: Positive = 60.0
    """Training time between checkpoints."""

    @property
    def budget(self) -> Budget:
        """What may be spent, or a `UserError` when nothing is said."""
        return Budget(self.seconds, self.steps)

    def micro_tokens(self, world: int) -> int:
        """Tokens of a micro-batch when `world` processes share a step; parts that are not equal are a `UserError`."""
        if self.micro_batches % world:
            raise UserError(f"train.micro_batches ({self.micro_batches}) must be a multiple of the {world} processes")
        tokens, rest = divmod(self.batch_tokens, self.micro_batches)
        if rest or tokens % self.sequence_length:
            raise UserError(
                f"train.batch_tokens ({self.batch_tokens:,}) must be train.micro_batches ({self.micro_batches}) "
                f"times a multiple of train.sequence_length ({self.sequence_length:,})"
            )
        return tokens


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
) -> Trained:
    """Train on the shards until the budget is spent, from the checkpoint in `folder` if there is one.

    `data` names the training data; a checkpoint of other data, settings or seed is refused.

    Raises `Interrupted` after SIGINT or SIGTERM and `CheckFailed` when the loss is no longer finite; in both cases the
    checkpoint in `folder` is good.
    """
    budget = config.budget
    trainer = _Trainer(gpt, config, seed, ranks, data)
    stream = config.loader.build(
        shards, tokens=trainer.micro_tokens, sequence_length=config.sequence_length, seed=seed, bos=bos
    )
    begin = time.perf_counter()
    precision, threads = trainer.rehearse(budget, stream.micro_batch(0).inputs.shape)
    rehearsed = time.perf_counter() - begin
    start, loss = trainer.restore(folder / CHECKPOINT)
    watch({"event": "start", "step": start.step, "seconds": start.seconds, "precision": precision, "threads": threads})
    with _signals() as received, Prefetch(stream.micro_batch, trainer.indices(start.step), ready=4) as batches:
        run = _Loop(trainer, config, budget, folder, watch, received)
        moment, loss = run.to_the_end(start, loss, batches, bos)
    last = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    return Trained(
        weights=trainer.average.result() if trainer.average else last,
        last=last,
        steps=moment.step,
        tokens=moment.step * config.batch_tokens,
        seconds=moment.seconds,
        rehearsal_seconds=rehearsed,
        final_loss=loss,
        precision=precision,
        threads=threads,
    )


class _Trainer:
    """The model, its optimizers and its average: all that a step changes and a checkpoint holds."""

    def __init__(self, gpt: GPT, config: Train, seed: int, ranks: Ranks, data: str = "") -> None:
        self.micro_tokens = config.micro_tokens(ranks.world)
        self.config = config
        self.ranks = ranks
        self.seed = seed
        self.vocabulary = gpt.vocabulary
        settings = config.but(seconds=None, steps=1)  # a run may go on with a larger budget
        self.identity = {"model": gpt.key(), "train": settings.key(), "seed": str(seed), "data": data}
        self.model = build(gpt, seed, ranks.device)
        self.parameters = dict(self.model.named_parameters())
        chosen = assign({rule: rule for rule in config.optimizers}, self.model, "train.optimizers")
        self.updaters: dict[str, Updater] = {}
        for rule, optimizer in config.optimizers.items():
            members = {name: self.parameters[name] for name in self.parameters if chosen[name] == rule}
            if members:
                self.updaters[rule] = optimizer.build(members, ranks)
        self.average: Average | None = config.averaging.build(self.parameters) if config.averaging else None
        self.dtype = torch.float32
        compiler = any(map(shutil.which, ("cc", "gcc", "clang")))  # Triton needs one to launch its kernels
        automatic = config.compile == "auto" and ranks.device.type == "cuda" and compiler
        compiled = config.compile == "always" or automatic
        self.forward: Callable[..., Tensor] = torch.compile(self._loss, dynamic=False) if compiled else self._loss

    def _loss(self, inputs: Tensor, targets: Tensor, starts: Tensor) -> Tensor:
        logits = self.model(inputs, starts, self.dtype)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def indices(self, step: int) -> Iterator[int]:
        """This rank's micro-batches from `step` on, without end."""
        index = step * self.config.micro_batches + self.ranks.rank
        while True:
            yield index
            index += self.ranks.world

    def step(self, batches: Iterator[Batch], moment: Moment, bos: int) -> float:
        """One optimizer step; the mean loss. When it or the gradient is not finite it is NaN and nothing changes."""
        losses = torch.zeros((), device=self.ranks.device)
        for _ in range(self.config.micro_batches // self.ranks.world):
            inputs, targets, starts = self._tensors(next(batches), bos)
            loss = self.forward(inputs, targets, starts) / self.config.micro_batches
            loss.backward()  # type: ignore[no-untyped-call]
            losses += loss.detach()
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        self.ranks.sum([losses, *gradients])
        norm = nn.utils.get_total_norm(gradients)
        mean = float(losses + 0.0 * norm)
        if math.isfinite(mean):
            if self.config.clip_norm is not None:
                nn.utils.clip_grads_with_norm_(self.parameters.values(), self.config.clip_norm, norm)
            scale = value_at(self.config.lr_schedule, moment)
            for updater in self.updaters.values():
                updater.step(moment, scale)
            if self.average is not None:
                self.average.watch(self.parameters)
        for parameter in self.parameters.values():
            parameter.grad = None
        return mean

    def _tensors(self, batch: Batch, bos: int) -> tuple[Tensor, Tensor, Tensor]:
        inputs, targets = (torch.from_numpy(array) for array in (batch.inputs, batch.targets))
        if batch.starts is None:
            starts = inputs == bos
        else:
            starts = torch.zeros(inputs.numel(), dtype=torch.bool)
            starts[torch.from_numpy(batch.starts.astype(np.int64))] = True
            starts = starts.view_as(inputs)
        if self.ranks.device.type == "cuda":
            return tuple(t.pin_memory().to(self.ranks.device, non_blocking=True) for t in (inputs, targets, starts))  # type: ignore[return-value]
        return inputs, targets, starts

    def rehearse(self, budget: Budget, shape: tuple[int, ...]) -> tuple[str, int]:
        """Run micro-batches of `shape` on random tokens, choose precision and threads by measurement, undo everything.

        With a budget of steps alone nothing is chosen by the clock, so such a run can be repeated to the bit.
        """
        on_gpu = self.ranks.device.type == "cuda"
        asked = self.config.precision
        timed = budget.seconds is not None and not on_gpu and self.ranks.world == 1
        if asked != "auto":
            precisions = [asked]
        else:
            precisions = ["bfloat16", "float32"] if timed else ["bfloat16" if on_gpu else "float32"]
        threads = thread_counts() if timed else [torch.get_num_threads()]
        saved = {name: tensor.clone() for name, tensor in self.state().items()}
        choices = list(product(precisions, threads))
        chosen = quickest(choices, lambda choice: self._rehearse_step(*choice, budget, shape))
        for _ in range(self.config.rehearsal_steps):
            self._rehearse_step(*chosen, budget, shape)
        self._use(*chosen)
        for name, tensor in self.state().items():
            tensor.data.copy_(saved[name])
        return chosen

    def _use(self, precision: str, threads: int) -> None:
        self.dtype = getattr(torch, precision)
        torch.set_num_threads(threads)

    def _rehearse_step(self, precision: str, threads: int, budget: Budget, shape: tuple[int, ...]) -> None:
        self._use(precision, threads)
        ids = np.random.default_rng(self.seed).integers(0, self.vocabulary, (2, *shape))
        self.step(repeat(Batch(ids[0], ids[1], None)), Moment(0, 0.0, budget), bos=-1)

    def state(self) -> dict[str, Tensor]:
        """Every tensor that a step changes, by name; the tensors themselves."""
        found: dict[str, Tensor] = {f"weights/{name}": tensor for name, tensor in self.parameters.items()}
        for rule, updater in self.updaters.items():
            found.update({f"optimizers/{rule}/{name}": tensor for name, tensor in updater.state().items()})
        if self.average is not None:
            found.update({f"average/{name}": tensor for name, tensor in self.average.result().items()})
        return found

    def save(self, path: Path, moment: Moment, loss: float) -> None:
        """Write the checkpoint, all of it or nothing."""
        if not self.ranks.first:
            return
        metadata = {**self.identity, "step": str(moment.step), "seconds": repr(moment.seconds), "loss": repr(loss)}
        save_tensors(path, self.state(), metadata)

    def restore(self, path: Path) -> tuple[Moment, float]:
        """Take back a checkpoint if there is one; the moment to go on from, and the last loss."""
        budget = self.config.budget
        if not path.exists():
            return Moment(0, 0.0, budget), math.nan
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                if any(metadata.get(key) != value for key, value in self.identity.items()):
                    raise UserError(f"{path} is of another recipe, text or seed; name another --out or remove it")
                for name, tensor in self.state().items():
                    tensor.data.copy_(file.get_tensor(name))
                moment = Moment(int(metadata["step"]), float(metadata["seconds"]), budget)
                return moment, float(metadata["loss"])
        except UserError:
            raise
        except (SafetensorError, KeyError, OSError, ValueError, RuntimeError) as error:
            raise UserError(f"{path} is not a readable checkpoint ({error}); remove it to start anew") from None


class _Loop:
    """The timed part of a run."""

    def __init__(
        self,
        trainer: _Trainer,
        config: Train,
        budget: Budget,
        folder: Path,
        watch: Callable[[Event], None],
        received: list[int],
    ) -> None:
        self.trainer = trainer
        self.config = config
        self.budget = budget
        self.checkpoint = folder / CHECKPOINT
        self.watch = watch
        self.received = received

    def to_the_end(self, start: Moment, loss: float, batches: Iterator[Batch], bos: int) -> tuple[Moment, float]:
        """Step until the budget is spent; the last moment and the last loss."""
        ranks, trainer = self.trainer.ranks, self.trainer
        clock_began = time.perf_counter() - start.seconds
        moment, saved, logged = start, start, start
        trainer.save(self.checkpoint, start, loss)
        while moment.progress < 1.0:
            lr_scale = value_at(self.config.lr_schedule, moment)
            loss = trainer.step(batches, moment, bos)
            if not math.isfinite(loss):
                raise CheckFailed(
                    f"the loss or its gradient was {loss} at step {moment.step:,}; the weights of step {saved.step:,} "
                    f"are in {self.checkpoint}; lower train.optimizers.*.lr or set train.clip_norm, under another --out"
                )
            seconds, signalled = ranks.maximum(time.perf_counter() - clock_began, float(max(self.received, default=0)))
            moment = Moment(moment.step + 1, seconds, self.budget)
            if moment.seconds - logged.seconds >= 0.5 or moment.step <= 10 or moment.progress >= 1.0:
                self._log(moment, logged, loss, lr_scale)
                logged = moment
            if signalled and moment.progress < 1.0:
                trainer.save(self.checkpoint, moment, loss)
                ranks.wait()
                raise Interrupted(int(signalled), moment.step)
            if moment.seconds - saved.seconds >= self.config.checkpoint_seconds:
                trainer.save(self.checkpoint, moment, loss)
                saved = moment
        trainer.save(self.checkpoint, moment, loss)
        return moment, loss

    def _log(self, moment: Moment, before: Moment, loss: float, lr_scale: float) -> None:
        tokens = self.config.batch_tokens
        span = max(moment.seconds - before.seconds, 1e-9)
        self.watch(
            {
                "event": "step",
                "step": moment.step,
                "seconds": round(moment.seconds, 4),
                "progress": round(moment.progress, 6),
                "loss": loss,
                "tokens": moment.step * tokens,
                "tokens_per_second": round((moment.step - before.step) * tokens / span, 1),
                "lr_scale": round(lr_scale, 6),
            }
        )


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors as a safetensors file, all of it or nothing."""
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        try:
            save_file(held, temporary, metadata)
        except SafetensorError as error:  # its own class for what the system refused
            raise OSError(str(error)) from None


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
