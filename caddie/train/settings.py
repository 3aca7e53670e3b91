"""Settings of training."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Annotated, Literal

from caddie.config import Config, Count, NonNegative, Positive, Range
from caddie.config.schedules import (
    Budget,
    IntSchedule,
    NonNegativeNumber,
    NumberRange,
    Schedule,
    StepRamp,
    TrainProgress,
    Warmdown,
    all_values,
    int_at,
)
from caddie.data.loaders import Loader, SequentialStream, Stream
from caddie.data.shards import Tokens
from caddie.errors import UserError
from caddie.model import ModelPart
from caddie.train.averaging import Averaging
from caddie.train.optim import AdamW, Muon, Optimizer
from caddie.train.qat import QAT


class Train(Config):
    """Settings of training."""

    seconds: Annotated[float, Range(0.01, 1e8)] | None = None
    """Wall-clock budget in seconds. With `steps` set too, whichever runs out first ends training."""
    steps: Count | None = None
    """Budget in optimizer steps."""
    batch_tokens: IntSchedule = 524_288
    """Tokens per optimizer step; may change over the run."""
    micro_batches: Count = 8
    """Micro-batches of the largest step, shared equally by the processes; smaller steps have fewer."""
    sequence_length: IntSchedule = 1024
    """Tokens per row; may change over the run."""
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
    lr_schedule: Annotated[Schedule, NumberRange(0.0, 1e30)] = Warmdown(fraction=0.2)
    """Factor on every learning rate."""
    clip_norm: Positive | None = None
    """Largest norm of the whole gradient, or none."""
    z_loss: NonNegative = 0.0
    """Factor on the mean squared log of the softmax's denominator, added to the loss (PaLM, arXiv 2204.02311)."""
    prefix_loss: NonNegativeNumber = 0.0
    """Factor on the prefix-token loss, added to the loss: cross-entropy, from the same logits, of the longest other id
    that is a prefix of the target. A target without such an id adds nothing."""
    qat: Mapping[str, QAT] = field(default_factory=dict)
    """Role or name pattern to quantization-aware training (QAT) of linear weights; the last match wins."""
    averaging: Averaging | None = None
    """Average of the weights that the run packs, or none for the last weights."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the forward; auto is bfloat16 on a GPU of compute capability 8.0 or more, else float32.

    On a CPU with bfloat16 products, auto takes the faster of the two if `seconds` is set and one process trains.
    """
    float8: tuple[ModelPart, ...] = ()
    """Parts whose linear layers multiply in float8, forward and backward, in training alone.

    Activations and weights are rounded to e4m3 and gradients to e5m2, with one scale per tensor. On a device without
    float8 products the rounding is emulated, which shows its effect on the model and takes longer.
    """
    compile: Literal["auto", "always", "never"] = "auto"
    """Use of torch.compile; auto compiles on a GPU, and on a CPU if compiling pays within `seconds`."""
    cuda_graphs: Literal["auto", "always", "never"] = "never"
    """Use of CUDA graphs, which replay the recorded kernels of a micro-batch; auto takes the faster.

    Replays save kernel launches, which small models wait for, and take up to twice the memory of a micro-batch. The
    default is never until they have been measured on a GPU.
    """
    warmup_steps: Annotated[int, Range(0, 1000)] = 3
    """Steps on random tokens before the clock starts, for each shape of a step, undone afterwards.

    The learning rate has a warm-up of its own, `StepRamp`.
    """
    checkpoint_seconds: Positive = 60.0
    """Seconds of training between checkpoints."""
    held_out_tokens: Count | None = None
    """Tokens at the end of the training text to hold out of training, for a curve of their loss, or none.

    The first process measures the loss at most fifty times during training; that counts as training time and takes at
    most a hundredth of it. It also measures before and after, off the clock. The validation split is not touched.
    """

    @property
    def budget(self) -> Budget:
        """Budget of the run; raises `UserError` if neither seconds nor steps are set."""
        return Budget(self.seconds, self.steps)

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row of the run."""
        return max(all_values(self.sequence_length))

    def micro_tokens(self, world: int) -> int:
        """Return the tokens of a micro-batch of `world` processes; raises `UserError` if the parts are not equal."""
        batches, lengths = all_values(self.batch_tokens), all_values(self.sequence_length)
        tokens, rest = divmod(max(batches), self.micro_batches)
        if any(self.longest_row % length for length in lengths):
            raise UserError(f"train.sequence_length: {self.longest_row:,}, the longest row, must be a multiple of all")
        if rest or any(tokens % length for length in lengths):
            raise UserError(
                f"train.batch_tokens ({max(batches):,}) must be train.micro_batches ({self.micro_batches}) "
                f"times a multiple of train.sequence_length ({', '.join(f'{length:,}' for length in lengths)})"
            )
        if self.micro_batches % world:
            text = f"train.micro_batches ({self.micro_batches}) must be a multiple of the {world} processes"
            raise UserError(f"{text}; {math.lcm(self.micro_batches, world)} is one")
        for batch in batches:
            if batch % (tokens * world):
                raise UserError(
                    f"train.batch_tokens: {batch:,} must be a multiple of {tokens * world:,}, the tokens read at a "
                    f"time, as train.micro_batches ({self.micro_batches}) cuts the largest step"
                )
        return tokens

    def stream(self, shards: Sequence[Tokens], seed: int, bos: int, world: int = 1) -> Stream:
        """Return the micro-batches of `world` processes, in rows of the longest length."""
        tokens = self.micro_tokens(world)
        return self.loader.build(shards, tokens=tokens, sequence_length=self.longest_row, seed=seed, bos=bos)

    def micro_batches_at(self, train_progress: TrainProgress) -> int:
        """Return the micro-batches of the step at `train_progress`, of all processes together."""
        return int_at(self.batch_tokens, train_progress) * self.micro_batches // max(all_values(self.batch_tokens))
