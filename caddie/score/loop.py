"""The scoring loop: compute logits, gather the losses of the targets, then let the scorer learn."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, compress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from caddie.errors import CheckFailed
from caddie.runtime.distributed import Ranks
from caddie.score.scorer import Layout, Scorer, ScoringBatch, Step, Stream, as_int, nats
from caddie.score.windows import Window

Losses = npt.NDArray[np.float64]
_QUEUED = 16  # batches per worker, so that none waits long for the others
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def layout_of(tokens: npt.NDArray[np.uint16], bos: int, per_document: bool) -> Layout:
    """Return the stretches of a text: its documents, each up to the prediction of the next `bos`, or the whole text."""
    begins = np.zeros(1, np.int64)
    if per_document:
        begins = np.append(begins, np.flatnonzero(tokens[1:-1] == bos) + 1)
    return Layout(begins, np.append(begins[1:], len(tokens) - 1))


def run(
    scorer: Scorer,
    tokens: npt.NDArray[np.uint16],
    layout: Layout,
    rows: int,
    on_window: Callable[[Window, Losses], None],
    device: torch.device | str = "cpu",
    workers: int = 1,
    ranks: Ranks = Ranks(),
    *,
    vocabulary: int,
    on_logits: Callable[[Sequence[Window], Tensor], None] | None = None,
) -> None:
    """Score every prediction of the layout once; call `on_window` with each window and its losses in nats, float64.

    Batches have at most `rows` windows, and no row's inputs hold a target of another row. If a scorer may remember
    its inputs, each window is scored before the scorer sees the next one of its stretch. `workers` threads, which
    divide PyTorch's threads among them, run the batches of a stateless scorer. If the scorer can share its work, its
    batches are divided among `ranks`, and every rank gets all losses; else every rank scores everything. `on_logits`
    gets the windows and logits of each batch that this process runs, in its worker's thread. Raises `CheckFailed` for a
    plan that leaves predictions out, repeats some, goes back or shows targets too soon, and for logits that are not a
    plain tensor of `vocabulary` floats for each target.
    """
    stream, together = Stream(tokens, layout), as_int(scorer.together)
    stateless = bool(scorer.stateless)
    may_overlap = stateless or bool(scorer.fixed_between_updates)

    def losses_of(batch: ScoringBatch) -> Tensor:
        targets = torch.from_numpy(stream.next_tokens(batch.windows)).to(device)
        inputs = torch.from_numpy(batch.inputs).to(device)
        answer = scorer.logits(inputs, batch.slots, targets.shape[1])
        logits = plain_logits(answer, (*targets.shape, vocabulary), targets.device)
        if on_logits is not None:
            on_logits(batch.windows, logits)
        return nats(logits, targets)

    several = ranks.world > 1 and bool(scorer.share(ranks))
    least = _QUEUED * workers * ranks.world if stateless else 0
    with _mapping(workers) as each:

        def losses_of_all(batches: Iterable[ScoringBatch]) -> Iterator[Losses]:
            launched: Iterable[Tensor] = each(losses_of, batches)
            if torch.device(device) != torch.device("cpu"):  # launch all batches on a GPU before waiting for any
                launched = list(launched)
            return (losses.cpu().double().numpy() for losses in launched)

        plan = (_fixed(step, stream, may_overlap) for step in scorer.plan(layout, rows))
        for steps, batches in _queued(plan, lambda step: same_shape_batches(step, stream, rows, together), least):
            if several:
                owners = [as_int(owner) for owner in scorer.owners(batches, ranks.world)]
                if len(owners) != len(batches) or not set(owners) <= set(range(ranks.world)):
                    given = f"each of {len(batches):,} batches to one of {ranks.world:,} processes"
                    raise CheckFailed(f"the scorer does not give {given}")
                losses = _shared(losses_of_all, batches, [owner == ranks.rank for owner in owners], ranks)
            else:
                losses = losses_of_all(batches)
            for batch, of_batch in zip(batches, losses, strict=True):
                for window, of_window in zip(batch.windows, of_batch, strict=True):
                    on_window(window, of_window)
            for window in chain.from_iterable(step.windows for step in steps):
                stream.mark(window)
            scorer.update(batches, stream.prefix)
    stream.check_complete()


def plain_logits(answer: object, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a scorer's logits without a graph; `CheckFailed` unless they are dense floats of this shape and device.

    A subclass, or a method set on the tensor itself, could make up any loss. So the result is a new tensor, made by the
    class's own method.
    """
    if type(answer) is not Tensor:
        raise CheckFailed(f"the scorer returned a {type(answer).__name__} instead of a plain torch.Tensor")
    logits = Tensor.detach(answer)
    if logits.layout != torch.strided:
        raise CheckFailed(f"the scorer returned logits with the layout {logits.layout}, not dense ones")
    if logits.dtype not in _FLOATS:
        known = ", ".join(map(str, _FLOATS))
        raise CheckFailed(f"the scorer returned logits of {logits.dtype}; it must be one of {known}")
    if logits.device != device:
        raise CheckFailed(f"the scorer returned logits on {logits.device} for inputs on {device}")
    if tuple(logits.shape) != shape:
        raise CheckFailed(f"the scorer returned logits of shape {tuple(logits.shape)} instead of {shape}")
    return logits


def _queued(
    plan: Iterable[Step], batches_of: Callable[[Step], Iterable[ScoringBatch]], least: int
) -> Iterator[tuple[list[Step], list[ScoringBatch]]]:
    """Yield the steps one by one with their batches, or several at once until there are `least` batches."""
    steps: list[Step] = []
    batches: list[ScoringBatch] = []
    for step in plan:
        steps.append(step)
        batches += batches_of(step)
        if len(batches) >= least:
            yield steps, batches
            steps, batches = [], []
    if steps:
        yield steps, batches


def _fixed(step: Step, stream: Stream, may_overlap: bool) -> Step:
    """Copy a scorer's step into plain ints, which can neither change afterwards nor override comparisons.

    Successive windows of a stretch always overlap: even one that begins where the other ends reads its last target. So
    a step may have only one window of each stretch, unless they `may_overlap` because the scorer keeps nothing of its
    inputs. A scorer that remembers would know targets of one window from the inputs of the other, in either order.
    """
    try:
        windows = tuple(Window(*map(as_int, (window.start, window.first, window.end))) for window in step.windows)
        slots = tuple(map(as_int, step.slots))
    except (AttributeError, TypeError) as error:
        raise CheckFailed(f"the scorer's plan has a step that is none: {error}") from error
    if len(windows) != len(slots):
        raise CheckFailed(f"the scorer's plan has {len(windows):,} windows and {len(slots):,} slots in a step")
    shown = set[int]()
    for window in windows:
        stretch = stream.stretch_of(window)
        if stretch in shown and not may_overlap:
            read = f"window {window.start:,} to {window.end:,} reads targets of another window of its step"
            raise CheckFailed(f"the scorer's plan shows it targets before they are scored: {read}")
        shown.add(stretch)
    return Step(windows, slots)


def _shared(
    losses_of_all: Callable[[Iterable[ScoringBatch]], Iterator[Losses]],
    batches: Sequence[ScoringBatch],
    mine: Sequence[bool],
    ranks: Ranks,
) -> Iterator[Losses]:
    """Yield the losses of all batches, bit-identical in all processes; each process computes only its own batches."""
    sizes = [sum(window.end - window.first for window in batch.windows) for batch in batches]
    total = torch.zeros(sum(sizes), dtype=torch.float64)  # adding zeros changes nothing
    parts = total.split_with_sizes(sizes)
    own = losses_of_all(compress(batches, mine))
    for part, losses in zip(compress(parts, mine), own, strict=True):
        part.copy_(torch.from_numpy(losses).flatten())
    ranks.sum([total])
    for batch, part in zip(batches, parts, strict=True):
        yield part.view(len(batch.windows), -1).numpy()


@contextmanager
def _mapping(workers: int) -> Iterator[Callable[..., Any]]:
    """Yield `map`, or a `map` over worker threads, each with its share of PyTorch's threads."""
    if workers == 1:
        yield map
        return
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads // workers,))
    try:
        yield pool.map
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # some libraries keep one number for the whole process


def same_shape_batches(step: Step, stream: Stream, rows: int, together: int = 0) -> Iterator[ScoringBatch]:
    """Yield a step's windows in batches of one shape, of at most `rows` windows, from one group of `together` slots.

    Windows of one stretch share a batch only if each begins after the last target of the one before.
    """
    shapes: dict[tuple[int, int, int], list[list[int]]] = {}
    growing: dict[tuple[int, int, int], deque[tuple[list[int], dict[int, int]]]] = {}
    for index, (window, slot) in enumerate(zip(step.windows, step.slots, strict=True)):
        part, stretch = slot // together if together else 0, stream.stretch(window.start)
        shape = window.first - window.start, window.end - window.start, part
        queue = growing.setdefault(shape, deque())
        # The batch that has waited longest for a row: if it overlaps the window, those behind it do as well.
        if queue and window.start > queue[0][1].get(stretch, -1):
            members, ends = queue.popleft()
        else:
            members, ends = [], {}
            shapes.setdefault(shape, []).append(members)
        members.append(index)
        ends[stretch] = window.end
        if len(members) < rows:
            queue.append((members, ends))
    for (context, _, _), batches in shapes.items():
        for members in batches:
            windows = tuple(step.windows[index] for index in members)
            yield ScoringBatch(windows, tuple(step.slots[index] for index in members), stream.inputs(windows), context)
