"""Trainer: model, optimizers and average, and the steps that change them."""

import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from caddie.config import schedules
from caddie.config.schedules import TrainProgress, int_at, progress_at, value_at
from caddie.data.loaders import Batch, Integers
from caddie.errors import UserError
from caddie.model import GPT, GroupedQueryAttention, build
from caddie.model.context import reach
from caddie.model.parameters import assign
from caddie.ops import float8_linear, multiplies_float8, product_dtype
from caddie.ops.attention import choose, segment_bucket
from caddie.runtime.autotune import compiled_here
from caddie.runtime.distributed import Ranks
from caddie.runtime.memory import keep_freed_memory
from caddie.train.averaging import Average
from caddie.train.cuda_graphs import Recordings
from caddie.train.optim import Updater
from caddie.train.prefetch import AsyncScalar, DeviceBatch
from caddie.train.qat import Views
from caddie.train.settings import Train

Batches = Iterator[Batch | DeviceBatch]
"""Micro-batches in the order of the steps that read them."""


@dataclass(frozen=True)
class Shape:
    """Shape of a step, which decides its compiled graph; a run has a few, all of which are warmed up."""

    stage: int
    """Stage of the model: passes of each layer, and window of attention."""
    sequence_length: int
    """Tokens per row."""
    quantized: bool
    """True while weights are fake-quantized."""
    prefixed: bool
    """True while prefixes of the targets are predicted too."""


class Execution(NamedTuple):
    """Precision and thread count of the steps."""

    precision: str
    """Number format of the forward."""
    threads: int
    """Threads of PyTorch's operations."""


class Trainer:
    """Model, optimizers, average and QAT views, with the steps that change them.

    `prefixes` are the tokenizer's, for `train.prefix_loss`: the longest prefix of each id, -1 for none. Random tokens
    have no tokenizer; then id // 2 stands in.
    """

    def __init__(self, gpt: GPT, config: Train, seed: int, ranks: Ranks, prefixes: Integers | None = None) -> None:
        self.micro_tokens = config.micro_tokens(ranks.world)
        self.config, self.ranks, self.seed, self.vocabulary = config, ranks, seed, gpt.vocabulary
        if ranks.device.type == "cpu":
            keep_freed_memory()
        self.model = build(gpt, seed, ranks.device)
        self.parameters = dict(self.model.named_parameters())
        self.trained = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}
        """All parameters but those that the model's settings leave untrained."""
        chosen = assign({rule: rule for rule in config.optimizers}, self.model, "train.optimizers")
        self.updaters: dict[str, Updater] = {}
        for rule, optimizer in config.optimizers.items():
            if members := {name: parameter for name, parameter in self.trained.items() if chosen[name] == rule}:
                self.updaters[rule] = optimizer.build(members, ranks)
        self.average = Average(config.averaging, self.parameters) if config.averaging else None
        self.views = Views(config.qat, self.model)
        self.dtype = torch.float32
        self.asynchronous = ranks.device.type == "cuda"
        """True if the device runs asynchronously, so that the loss of a step is known only after it."""
        # Triton needs a C compiler to launch its kernels; on a CPU the kernels are C++.
        compilers = ("cc", "gcc", "clang") if ranks.device.type == "cuda" else ("c++", "g++", "clang++")
        compiler = any(map(shutil.which, compilers))
        if config.compile == "always" and not compiler:
            raise UserError(f"train.compile=always needs a compiler, one of {', '.join(compilers)}; install one")
        self.compilable = config.compile != "never" and compiler
        self.compile(config.compile == "always" or (self.compilable and ranks.device.type == "cuda"))
        self.notes: list[str] = []
        """Notes of the warm-up for the log and the display."""
        for part in config.float8:
            self.model.set_product(part, float8_linear)
        if config.float8 and not multiplies_float8(ranks.device):
            self.notes.append(
                "train.float8: this device has no float8 products, so they are emulated, which takes longer"
            )
        self.recordings: Recordings | None = None
        """CUDA graphs that replay micro-batches, or None if each kernel is launched."""
        self.count, self.losses = torch.ones((), device=ranks.device), torch.zeros((), device=ranks.device)
        """Micro-batches of the step, and this rank's part of their mean loss; tensors, as CUDA graphs need."""
        self.prefixes, self.prefix_loss = torch.zeros(0, device=ranks.device), torch.zeros((), device=ranks.device)
        """Table of prefixes, if they are predicted, and the factor on their loss; tensors, as graphs need."""
        if config.prefix_loss:
            table = np.arange(gpt.vocabulary) // 2 if prefixes is None else prefixes
            self.prefixes = torch.tensor(table, device=ranks.device)
        self.documents = 0
        """Documents per micro-batch that document attention has room for; a micro-batch with more makes more room."""
        self.observe: Callable[[Mapping[str, Tensor], float], None] | None = None
        """Called once after the next micro-batch with the parameters, which hold the gradients of its tokens alone, and
        the factor that makes their squares the Fisher information per token."""

    def use(self, execution: Execution) -> None:
        """Compute all further steps in this precision and with these threads."""
        self.dtype = getattr(torch, execution.precision)
        torch.set_num_threads(execution.threads)

    @cached_property
    def compiled_losses(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """Compiled `_losses`."""
        return compiled_here(self._losses)

    def compile(self, compiled: bool) -> None:
        """Run the model compiled from now on, or uncompiled."""
        self.compiled = compiled
        self.forward = self.compiled_losses if compiled else self._losses

    def _losses(
        self, inputs: Tensor, targets: Tensor, starts: Tensor, stage: int, segments: int = 0, prefixed: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the mean training objective, and the mean cross-entropy in it."""
        logits = self.model(inputs, starts, self.dtype, stage=stage, capped=False, segments=segments)
        weights = others = None
        if prefixed:
            prefixes = self.prefixes[targets]
            weights, others = self.prefix_loss * (prefixes >= 0), prefixes.clamp_min(0)
        objective, entropies = self.model.head.losses(logits, targets, self.config.z_loss, others, weights)
        return objective.mean(), entropies.mean()

    def shape(self, train_progress: TrainProgress) -> Shape:
        """Return the shape of the step at `train_progress`."""
        length = int_at(self.config.sequence_length, train_progress)
        prefixed = value_at(self.config.prefix_loss, train_progress) > 0.0
        return Shape(self.model.stage(train_progress.progress), length, self.views.active(train_progress), prefixed)

    def shapes(self) -> dict[Shape, TrainProgress]:
        """Return every shape of the run with the progress at which it first occurs, in order."""
        found: dict[Shape, TrainProgress] = {}
        strengths = [view.strength for view in self.config.qat.values()]
        numbers = (self.config.batch_tokens, self.config.sequence_length, self.config.prefix_loss, *strengths)
        begins = schedules.changes(number for number in numbers if isinstance(number, schedules.PiecewiseConstant))
        for fraction in sorted({*np.linspace(0.0, 1.0, 1000, endpoint=False).tolist(), *self.model.stages, *begins}):
            train_progress = progress_at(fraction, self.config.budget)
            if train_progress.progress < 1.0:  # else no step begins there
                found.setdefault(self.shape(train_progress), train_progress)
        return found

    def indices(self, position: int) -> Iterator[int]:
        """Return the indices of this rank's micro-batches from `position` on, without end."""
        return count(position + self.ranks.rank, self.ranks.world)

    def step(self, batches: Batches, train_progress: TrainProgress, bos: int, lr_scale: float | None = None) -> float:
        """Make one optimizer step and return its mean loss, NaN if the loss or the gradient is not finite.

        `lr_scale` replaces the learning-rate schedule.
        """
        return self.launch(batches, train_progress, bos, lr_scale).read()

    def launch(
        self, batches: Batches, train_progress: TrainProgress, bos: int, lr_scale: float | None = None
    ) -> AsyncScalar:
        """Launch one optimizer step and return the loss of `step`; reading it waits for the whole step.

        A step without a finite loss changes nothing, except on an asynchronous device: there the weights have changed
        before the loss is known, so read it before saving anything.
        """
        losses = self.gradients(batches, train_progress, bos)
        with self.ranks.together():
            for updater in self.updaters.values():
                updater.launch()
            arrive = self.ranks.begin_sum([losses])
        arrive()
        norm = torch.stack([updater.squares() for updater in self.updaters.values()]).sum().sqrt()
        mean = losses + 0.0 * norm
        if self.asynchronous or math.isfinite(float(mean)):
            clip = self.config.clip_norm
            scale = None if clip is None else (clip / (norm + 1e-6)).clamp(max=1.0)
            if lr_scale is None:
                lr_scale = value_at(self.config.lr_schedule, train_progress)
            for updater in self.updaters.values():
                updater.step(train_progress, lr_scale, scale)
        return AsyncScalar(mean)

    def gradients(self, batches: Batches, train_progress: TrainProgress, bos: int) -> Tensor:
        """Accumulate this rank's gradients of one step, without communication, and return its part of the mean loss."""
        shape = self.shape(train_progress)
        self.views.set(train_progress)
        batches_of_step = self.config.micro_batches_at(train_progress)
        self.count.fill_(batches_of_step)
        self.prefix_loss.fill_(value_at(self.config.prefix_loss, train_progress))
        self.losses.zero_()
        counts_segments = "varlen" in self.attention(shape.sequence_length)
        for _ in range(batches_of_step // self.ranks.world):
            batch = next(batches)
            tensors = self._tensors(batch, shape.sequence_length, bos)
            segments = 0
            if counts_segments:  # documents that begin in the batch, and one more for each row
                begun = batch.begun if isinstance(batch, DeviceBatch) else batch.begun(bos)
                segments = segment_bucket(max(begun, self.documents) + len(tensors[0]), tensors[0].numel())
            work = partial(self._micro_batch, shape.stage, segments, shape.prefixed)
            if self.recordings is None:
                work(*tensors)
            else:
                self.recordings.run((shape, segments), tensors, work)
            if self.observe is not None:  # the loss is a mean over the tokens; the Fisher information needs their sum
                self.observe(self.parameters, float(batches_of_step**2 * self.micro_tokens))
                self.observe = None
        return self.losses

    def _micro_batch(
        self, stage: int, segments: int, prefixed: bool, inputs: Tensor, targets: Tensor, starts: Tensor
    ) -> None:
        loss, entropy = self.forward(inputs, targets, starts, stage, segments, prefixed)
        (loss / self.count).backward()  # type: ignore[no-untyped-call]
        self.losses += entropy / self.count

    @torch.no_grad()
    def loss(self, batches: Iterable[Batch], train_progress: TrainProgress, bos: int) -> float:
        """Return the mean loss on batches of longest rows, in nats per token, uncompiled, as at `train_progress`.

        It waits for the device. Weights are fake-quantized as in a step at `train_progress`.
        """
        self.views.set(train_progress)
        stage, length, total, count = self.model.stage(train_progress.progress), self.config.longest_row, 0.0, 0
        counts_segments = "varlen" in self.attention(length)
        for batch in batches:
            inputs, targets, starts = self._tensors(batch, length, bos)
            segments = segment_bucket(batch.begun(bos) + len(inputs), inputs.numel()) if counts_segments else 0
            total += float(self._losses(inputs, targets, starts, stage, segments)[1]) * inputs.numel()
            count += inputs.numel()
        return total / count

    def attention(self, length: int) -> str:
        """Return the names of the attention backends for rows of `length` on this device, in the run's last step."""
        device, last, names = self.ranks.device, math.nextafter(1.0, 0.0), []  # at 1.0 the bounds may be for scoring
        for block in self.model.config.blocks:
            if isinstance(attention := block.attention, GroupedQueryAttention):
                documents = attention.scope == "document"
                window = reach(attention.longest if documents else None, attention.window, last, device)
                size = self.model.config.width // attention.heads
                names.append(choose(device, product_dtype(device, self.dtype), size, length, length, documents, window))
        return ", ".join(dict.fromkeys(names))

    def graphs(self) -> int:
        """Return the number of graphs that were compiled or recorded so far."""
        compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"] if self.compiled else 0
        return int(compiled) + (len(self.recordings) if self.recordings else 0)

    def zero_grad(self) -> None:
        """Free the gradients of the last step."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def update_average(self, train_progress: TrainProgress, lr_scale: float) -> None:
        """Update the average after a step with the factor `lr_scale` on its learning rates."""
        if self.average is not None:
            self.average.update(self.parameters, train_progress, lr_scale)

    def _tensors(self, batch: Batch | DeviceBatch, length: int, bos: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs, targets and document starts on the device, cut into rows of `length`."""
        inputs, targets = (torch.as_tensor(ids, device=self.ranks.device) for ids in (batch.inputs, batch.targets))
        columns = inputs.shape[1] * length // self.config.longest_row
        # A graph is compiled for strides. Rows cut from a longer text keep its strides; `view` gives new ones.
        inputs, targets = (t.contiguous().view(-1, columns) for t in (inputs, targets))
        return inputs, targets, inputs == bos

    def state(self) -> dict[str, Tensor]:
        """Return every tensor that a step changes, by name: the tensors, not copies. All ranks call it together."""
        states: dict[str, Mapping[str, Tensor]] = {"weights": self.parameters}
        states |= {f"optimizers/{rule}": updater.state() for rule, updater in self.updaters.items()}
        states |= {"average": self.average.state()} if self.average else {}
        return {f"{part}/{name}": tensor for part, state in states.items() for name, tensor in state.items()}
