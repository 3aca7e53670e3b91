"""Where the time of a training step goes: its share by part of the model, forward and backward together.

The model runs uncompiled, with a range of the profiler around each part; the innermost range has an operation. What
runs backward belongs to the part whose forward made it, which autograd's sequence numbers tell. On a GPU the time is
that of the kernels, and the kernels of the compiled step are told apart by name in a second table.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from contenders import OurSteps
from torch import nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function

from caddie.model import BlockModule, Linear, Model
from caddie.model.context import Context
from caddie.model.linear import RandomLinear

EMBEDDING, PROJECTIONS, ATTENTION, MLP = "embedding", "attention projections", "attention", "MLP"
ELEMENTWISE, HEAD, OPTIMIZER = "norms, rotation, residuals", "head and loss", "optimizer"
REST = "data, gradient sums, Python"
PARTS = (EMBEDDING, PROJECTIONS, ATTENTION, MLP, ELEMENTWISE, HEAD, OPTIMIZER, REST)
_RANGE = "part of the model: "
_BACKWARD = "autograd::engine::evaluate_function"
_KINDS = (
    (ATTENTION, r"flash|fmha|sdpa|attention"),
    ("products", r"gemm|cutlass|nvjet|xmma|cublas|splitk|wgmma|triton_tem|_mm_|matmul"),
    ("other Triton kernels", r"triton|cross_entropy|softcap|squared"),
    ("copies and memory", r"memcpy|memset|copy"),
)
"""Kernels of a compiled step by what their names have, the first match."""


def shares(name: str, settings: tuple[str, ...], threads: int | None, steps: int, at: int = 0) -> dict[str, Any]:
    """Milliseconds of a step by part; on a GPU also by kind of kernel in the compiled step."""
    uncompiled = (*settings, "train.compile=never")
    found: dict[str, Any] = {"parts": _by_part(OurSteps(name, uncompiled, threads, at), steps)}
    if torch.cuda.is_available():
        found["kernels"] = _by_kind(OurSteps(name, settings, threads, at), steps)
    return found


def _by_part(contender: OurSteps, steps: int) -> dict[str, float]:
    on_gpu = contender.device.type == "cuda"
    with ranges(contender):
        contender.once()
        with _profiled(on_gpu) as seen:
            for _ in range(steps):
                contender.once()
    contender.close()
    spent = assigned(list(seen.events()), on_gpu)  # type: ignore[no-untyped-call]
    return {part: spent.get(part, 0.0) / 1e3 / steps for part in PARTS}


def _by_kind(contender: OurSteps, steps: int) -> dict[str, float]:
    contender.block(0.0)
    with _profiled(True) as seen:
        for _ in range(steps):
            contender.once()
    contender.close()
    spent: dict[str, float] = defaultdict(float)
    for event in seen.events():  # type: ignore[no-untyped-call]
        if event.device_type == DeviceType.CUDA:
            spent[kind(event.name)] += event.self_device_time_total / 1e3 / steps
    return dict(spent)


def kind(kernel: str) -> str:
    """What a kernel does, by its name."""
    return next((found for found, pattern in _KINDS if re.search(pattern, kernel.lower())), "other kernels")


@contextmanager
def _profiled(on_gpu: bool) -> Iterator[profile]:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as seen:
        yield seen
        if on_gpu:
            torch.cuda.synchronize()


@contextmanager
def ranges(contender: OurSteps) -> Iterator[None]:
    """Ranges around the parts of the contender's model, its loss and its optimizers."""
    model, trainer = contender.trainer.model, contender.trainer
    handles = [handle for module, part in _modules(model) for handle in _around(module, part)]
    first = next(iter(trainer.updaters.values()))
    opened = ExitStack()

    def step(*given: Any, **named: Any) -> Any:
        with opened:  # from the first exchange of gradients to the end of the step
            return launch_step(*given, **named)

    def exchange() -> None:
        opened.enter_context(record_function(_RANGE + OPTIMIZER))
        launch_exchange()

    launch_step, launch_exchange = trainer.launch, first.launch
    replaced = [
        (Context, "attention", _ranged(Context.attention, ATTENTION)),
        (model.head, "uncapped", _ranged(model.head.uncapped, HEAD)),
        (trainer, "forward", _ranged(trainer.forward, HEAD)),
        (trainer, "launch", step),
        (first, "launch", exchange),
    ]
    with ExitStack() as patches:
        for owner, name, function in replaced:
            patches.enter_context(patch.object(owner, name, function))
        yield
    for handle in handles:
        handle.remove()


def _modules(model: Model) -> Iterator[tuple[nn.Module, str]]:
    """Each module that has a part of its own, and which."""
    yield model, ELEMENTWISE
    yield model.embedding, EMBEDDING
    if model.value_embedding is not None:
        yield model.value_embedding, EMBEDDING
    yield model.head, HEAD
    for block in model.blocks:
        assert isinstance(block, BlockModule)
        for mlp in (block.mlp, *block.later_mlps):
            yield mlp, MLP
        if block.attention is not None:
            for part in block.attention.modules():
                if isinstance(part, Linear | RandomLinear):
                    yield part, PROJECTIONS


def _around(module: nn.Module, part: str) -> list[Any]:
    """A range around each forward of a module."""
    opened: list[record_function] = []

    def enter(*given: Any) -> None:
        opened.append(record_function(_RANGE + part))
        opened[-1].__enter__()  # type: ignore[no-untyped-call]

    def leave(*given: Any) -> None:
        opened.pop().__exit__(None, None, None)

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]


def _ranged(function: Callable[..., Any], part: str) -> Callable[..., Any]:
    def within(*given: Any, **named: Any) -> Any:
        with record_function(_RANGE + part):
            return function(*given, **named)

    return within


def assigned(events: list[Any], on_gpu: bool) -> dict[str, float]:
    """Microseconds by part: of kernels on a GPU, else of the processor; what belongs to no part is the rest."""
    ours = [event for event in events if event.device_type == DeviceType.CPU]
    by_number: dict[int, str] = {}
    for event in sorted(ours, key=lambda one: float(one.time_range.start)):
        # An operation that makes no node sees the number of the next one, so the last to see it has made it.
        if event.sequence_nr >= 0 and (part := _range_of(event)) is not None:
            by_number[event.sequence_nr] = part
    spent: dict[str, float] = defaultdict(float)
    for event in ours:
        part = _range_of(event)
        if part is None and (node := _node_of(event)) is not None:
            part = by_number.get(node.sequence_nr)
        spent[part or REST] += event.self_device_time_total if on_gpu else event.self_cpu_time_total
    return dict(spent)


def _range_of(event: Any) -> str | None:
    """The part whose range is the innermost around an event."""
    while event is not None:
        if event.name.startswith(_RANGE):
            return str(event.name.removeprefix(_RANGE))
        event = event.cpu_parent
    return None


def _node_of(event: Any) -> Any:
    """The node of the backward that an event runs for."""
    while event is not None and not event.name.startswith(_BACKWARD):
        event = event.cpu_parent
    return event
