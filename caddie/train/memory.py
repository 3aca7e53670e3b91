"""Memory that training needs: a cheap upper bound and, where it does not decide, the bytes of a traced step.

A trace counts every tensor that the trainer's own step makes, as long as it lives, so no part needs a formula.
Small models are traced on real tensors, large ones on PyTorch's fake tensors, which have shapes and no memory; both
give the same bytes.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from caddie.config.schedules import all_values
from caddie.data.loaders import PackedDocuments
from caddie.errors import UserError
from caddie.model import GPT
from caddie.model.flops import flops_per_token
from caddie.runtime.distributed import Ranks
from caddie.runtime.memory import GIB, MMAP_THRESHOLD, free_bytes, out_of_memory
from caddie.runtime.progress import SILENT, Phases, Progress
from caddie.train.prefetch import DeviceBatch
from caddie.train.settings import Train
from caddie.train.trainer import Trainer

_REAL_FLOPS = 2e11
"""Most FLOPs traced on real tensors: two seconds, the time that fake tensors take to import the compiler."""
_LIBRARIES = 64 << 20
"""Bytes of the code that PyTorch loads for its first step, and of the memory that its kernels keep."""
_HOLES = 0.65
"""Fragmentation of the heap by a step on a CPU: bytes lost for each byte of its blocks there.

PyTorch asks for aligned blocks, for which glibc needs a little more than the block, so a freed place is too small for
the next block of that size. Larger blocks are mapped one by one and leave no holes (`docs/log.md`).
"""
_READY_BATCHES = 8
"""Micro-batches in memory: those between the shards and the step, and those of the warm-up."""
_STATE_BYTES, _ACTIVATION_BYTES = 64, 4.0
"""Upper bounds: bytes per weight, and bytes per token and (FLOPs of a step per token / width). The shipped
recipes need 16 to 41 and 0.8 to 2.5 (`docs/log.md`)."""
_PLENTY = 0.5
"""Part of the free memory below which a bound is enough and nothing is traced."""
_SAFE = 2 / 3
"""Part of the free memory that an advised setting may take; packing and scoring come later (`stage_memory.py`)."""
_BOS = 1


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one process at the peak of training."""

    process: int
    """The program itself, before the model is built."""
    state: int
    """Weights, optimizers' state and averages, and the warm-up's copy of them."""
    step: int
    """Bytes that a step makes beside the state: gradients, activations, logits, updates, data."""
    traced: bool = True
    """False for an upper bound."""

    @property
    def total(self) -> int:
        """Sum of the three."""
        return self.process + self.state + self.step

    def __str__(self) -> str:
        return f"{'about' if self.traced else 'less than'} {self.total / GIB:,.1f} GiB"

    def needed(self, ranks: Ranks) -> int:
        """Return the bytes that must fit: on a CPU of all processes, on a GPU `state`, which compiling never saves."""
        return self.state if ranks.device.type == "cuda" else ranks.world * self.total


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that operations make, while they live, and of holes in the heap.

    Every number read from a tensor is 1.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.holes = 0.0
        """Bytes of holes for each byte of a block in the heap."""
        self._seen: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else every operation would ask the compiler, which takes seconds to import

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            return arguments[0].dtype == torch.bool or 1  # as if the loss were finite and the gradients equal
        result = function(*arguments, **(named or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()) not in self._seen:
                self._seen[storage] = None
                count = storage.nbytes()
                count += round(self.holes * count) if count < MMAP_THRESHOLD else 0
                self.now += count
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, count)
        return result

    def _free(self, count: int) -> None:
        self.now -= count


def estimate_memory(gpt: GPT, train: Train, ranks: Ranks = Ranks()) -> MemoryEstimate:
    """Return the memory of one of the processes that train these settings.

    Steps are uncompiled; compiled ones need less. Packing and scoring come after training: see `stage_memory.py`.
    """
    micro, length = train.micro_tokens(ranks.world), train.longest_row
    group = train.loader.group if isinstance(train.loader, PackedDocuments) else 1
    shard = np.zeros(64 * group * (length + 1), np.uint16)
    shard[0] = _BOS
    stream = train.loader.build([shard], tokens=2 * length, sequence_length=length, seed=0, bos=_BOS)
    rows = 1 if len(stream.micro_batch(0).inputs) == 1 else micro // length
    parts = 2 if train.micro_batches > ranks.world else 1  # one part's gradients live in the next one's forward
    real = parts * micro * flops_per_token(gpt, length) < _REAL_FLOPS
    mode = nullcontext() if real else FakeTensorMode()
    process = psutil.Process().memory_info().rss + _LIBRARIES
    with mode, _LiveBytes() as live:
        trainer = Trainer(gpt, train.but(batch_tokens=parts * micro, micro_batches=parts, compile="never"), 0, Ranks())
        trainer.dtype = (
            torch.bfloat16 if ranks.device.type == "cuda" or train.precision == "bfloat16" else torch.float32
        )
        shapes = trainer.shapes()
        passes = trainer.model.orders
        shape = max(shapes, key=lambda one: (len(passes[one.stage]), one.sequence_length, one.quantized, one.prefixed))
        saved = [tensor.clone() for tensor in trainer.state().values()]
        live.holes = _HOLES if ranks.device.type == "cpu" else 0.0
        state, ids = live.now, torch.zeros(rows, micro // rows, dtype=torch.int64)
        trainer.step(repeat(DeviceBatch(ids, ids.clone(), 1)), shapes[shape], _BOS)
        del saved
    return MemoryEstimate(process, state, live.peak - state + _READY_BATCHES * 2 * 8 * micro)


def bound_memory(gpt: GPT, train: Train, ranks: Ranks = Ranks()) -> MemoryEstimate:
    """Return an upper bound, by counting weights and products.

    Each number that a step keeps for its backward costs one product over some width forward, and two backward.
    """
    model = gpt.outline()
    weights = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    products = flops_per_token(gpt, train.longest_row) / gpt.width
    step = round(_ACTIVATION_BYTES * train.micro_tokens(ranks.world) * products)
    return MemoryEstimate(psutil.Process().memory_info().rss + _LIBRARIES, _STATE_BYTES * weights, step, traced=False)


def judge_memory(gpt: GPT, train: Train, ranks: Ranks, progress: Progress = SILENT) -> tuple[MemoryEstimate, str]:
    """Return the memory of one process, and why training does not fit this machine, empty if it fits.

    A step is traced, which takes seconds, only where the bound comes near the memory that is free.
    """
    bound = bound_memory(gpt, train, ranks)
    if bound.needed(ranks) <= _PLENTY * free_bytes(ranks.device, ranks.started):
        return bound, ""
    progress.phase("estimate memory")
    estimate = estimate_memory(gpt, train, ranks)
    return estimate, shortage(estimate, gpt, train, ranks)


def shortage(estimate: MemoryEstimate, gpt: GPT, train: Train, ranks: Ranks = Ranks()) -> str:
    """Return one line that says why training of this estimate does not fit this machine, empty if it does.

    It names the smallest `train.micro_batches` that fits. It does not set that number itself: the order of the data may
    depend on it, and then a run would depend on what else the machine did. On a GPU only the memory that compiling
    cannot reduce is compared.
    """
    on_gpu, free = ranks.device.type == "cuda", free_bytes(ranks.device, ranks.started)
    if (need := estimate.needed(ranks)) <= free:
        return ""
    place = "GPU" if on_gpu else "machine"
    text = f"training needs about {need / GIB:,.1f} GiB, and this {place} has {free / GIB:,.1f} GiB free"
    smaller = None
    hopeless = estimate.step * train.micro_batches * ranks.world / max(1.0, _SAFE * free)
    counts = [] if on_gpu else list(_more_micro_batches(train, ranks.world))
    for count in [one for one in counts if one > hopeless or one == counts[-1]]:
        smaller = count, estimate_memory(gpt, train.but(micro_batches=count), ranks).needed(ranks)
        if smaller[1] <= free * (1 if count == counts[-1] else _SAFE):
            return f"{text}; train.micro_batches={count} needs about {smaller[1] / GIB:,.1f} GiB"
    least = f", and even train.micro_batches={smaller[0]} {smaller[1] / GIB:,.1f} GiB" if smaller else ""
    return f"{text}{least}; take a smaller model, or NAME_mini in place of NAME"


def _more_micro_batches(train: Train, world: int) -> Iterator[int]:
    """Yield larger numbers of micro-batches that the settings allow, each about twice the one before, then the most."""

    def allowed(count: int) -> bool:
        try:
            train.but(micro_batches=count).micro_tokens(world)
        except UserError:
            return False
        return True

    count, rows = train.micro_batches, max(all_values(train.batch_tokens)) // train.longest_row
    most = next(filter(allowed, range(rows, count, -1)), count)
    while count < most:
        count = next(filter(allowed, range(min(2 * count, most), most)), most)
        yield count


def raise_on_all_ranks(text: str, what: str, ranks: Ranks) -> None:
    """Raise `UserError` in the first process and end the others with status 2 if `text` is not empty in one of them."""
    if ranks.any(bool(text)):  # a collective: all processes refuse, or none
        if not ranks.first:
            raise SystemExit(2)
        raise UserError(text or f"{what} does not fit the memory of another process")


@contextmanager
def enough_memory(gpt: GPT, train: Train, ranks: Ranks, phases: Phases) -> Iterator[None]:
    """Refuse training that does not fit; if memory runs out in the block after all, say so in one line.

    Raises `UserError` in both cases. When several processes refuse, only the first raises it; the others end with
    status 2.
    """
    estimate, text = judge_memory(gpt, train, ranks, phases.progress)
    raise_on_all_ranks(text, "training", ranks)
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        phase = phases.current or "train"
        needs = f": training needs {estimate} by the estimate" if phase == "train" else ""
        advice = {
            "train": f"raise train.micro_batches ({train.micro_batches}), ",
            "calibrate": "lower pack.calibration.batch_tokens, ",
            "score": "lower score.batch_tokens, or with adapters score.ttt.documents, ",
        }.get(phase, "")
        raise UserError(
            f"not enough memory in the phase {phase}{needs}; {advice}take a smaller model, or end what else uses memory"
        ) from None
