"""The scoring loop: compute logits, gather the losses of the targets, then let the scorer learn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, compress, islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from caddie.errors import CheckFailed
from caddie.runtime.distributed import Ranks
from caddie.score.scorer import Layout, Scorer, ScoringBatch, Step, Stream, nats
from caddie.score.windows import Window

Losses = npt.NDArray[np.float64]
_BLOCK = 1 << 22  # tokens that are searched for documents at once
_QUEUED = 16  # batches per worker, so that none waits long for the others


def layout_of(tokens: npt.NDArray[np.uint16], bos: int, per_document: bool) -> Layout:
    """Return the stretches of a text: its documents, each up to the prediction of the next `bos`, or the whole text."""
    predictions = len(tokens) - 1
    begins = [np.zeros(1, np.int64)]
    if per_document:
        for block in range(0, predictions, _BLOCK):
            positions = np.flatnonzero(tokens[block : min(block + _BLOCK, predictions)] == bos) + block
            begins.append(positions[positions > 0])
    starts = np.concatenate(begins)
    return Layout(starts, np.append(starts[1:], predictions))


def run(
    scorer: Scorer,
    tokens: npt.NDArray[np.uint16],
    layout: Layout,
    rows: int,
    on_window: Callable[[Window, Losses], None],
    device: torch.device | str = "cpu",
    workers: int = 1,
    ranks: Ranks = Ranks(),
) -> None:
    """Score every prediction of the layout once; call `on_window` with each window and its losses in nats, float64.

    Batches have at most `rows` windows. `workers` threads, which divide PyTorch's threads among them, run the batches
    of a stateless scorer. If the scorer can share its work, its batches are divided among `ranks`, and every rank gets
    all losses; else every rank scores everything. Raises `CheckFailed` for a plan that leaves predictions out, repeats
    some or goes back, and for logits of the wrong type or shape.
    """
    stream = Stream(tokens, layout)

    def losses_of(batch: ScoringBatch) -> Losses:
        targets = torch.from_numpy(stream.next_tokens(batch.windows)).to(device)
        inputs = torch.from_numpy(batch.inputs).to(device)
        logits = scorer.logits(inputs, batch.slots, targets.shape[1])
        if type(logits) is not Tensor:  # a subclass could compute any loss it likes
            raise CheckFailed(f"the scorer returned a {type(logits).__name__} instead of a plain torch.Tensor")
        logits = logits.detach()
        if logits.shape[:-1] != targets.shape:
            shape, wanted = tuple(logits.shape), tuple(targets.shape)
            raise CheckFailed(f"the scorer returned logits of shape {shape} for targets of shape {wanted}")
        found: Losses = nats(logits, targets).cpu().double().numpy()
        return found

    several = ranks.world > 1 and scorer.share(ranks)
    steps_at_once = ranks.world * _QUEUED if several and scorer.stateless else 1
    with _mapping(workers) as each:
        plan = iter(scorer.plan(layout, rows if workers == 1 else rows * workers * _QUEUED))
        while steps := [_fixed(step) for step in islice(plan, steps_at_once)]:
            shaped = (same_shape_batches(step, stream, rows, scorer.together) for step in steps)
            batches = tuple(chain.from_iterable(shaped))
            if several:
                owners = list(scorer.owners(batches, ranks.world))
                if len(owners) != len(batches) or not set(owners) <= set(range(ranks.world)):
                    given = f"each of {len(batches):,} batches to one of {ranks.world:,} processes"
                    raise CheckFailed(f"the scorer does not give {given}")
                losses = _shared(each, losses_of, batches, [owner == ranks.rank for owner in owners], ranks)
            else:
                losses = each(losses_of, batches)
            for batch, of_batch in zip(batches, losses, strict=True):
                for window, of_window in zip(batch.windows, of_batch, strict=True):
                    on_window(window, of_window)
            for window in chain.from_iterable(step.windows for step in steps):
                stream.mark(window)
            scorer.update(batches, stream.prefix)
    stream.check_complete()


def _fixed(step: Step) -> Step:
    """Copy a scorer's step, so that it cannot change it afterwards."""
    windows = tuple(Window(int(window.start), int(window.first), int(window.end)) for window in step.windows)
    return Step(windows, tuple(step.slots))


def _shared(
    each: Callable[..., Any], losses_of: Any, batches: Sequence[ScoringBatch], mine: Sequence[bool], ranks: Ranks
) -> Iterator[Losses]:
    """Yield the losses of all batches, of which each process computes its own; the same to the bit in all processes."""
    sizes = [sum(window.end - window.first for window in batch.windows) for batch in batches]
    total = torch.zeros(sum(sizes), dtype=torch.float64)  # adding zeros changes nothing
    parts = total.split_with_sizes(sizes)
    own = each(losses_of, list(compress(batches, mine)))
    for part, losses in zip(compress(parts, mine), own, strict=True):
        part.copy_(torch.from_numpy(losses).flatten())
    ranks.sum([total])
    for batch, part in zip(batches, parts, strict=True):
        yield part.view(len(batch.windows), -1).numpy()


@contextmanager
def _mapping(workers: int) -> Iterator[Callable[..., Any]]:
    """Yield `map`, or the same by several threads, each with its share of PyTorch's threads."""
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
    """Yield the windows of a step in batches of one shape, of slots that are `together`, of at most `rows` windows."""
    shapes: dict[tuple[int, int, int], list[int]] = {}
    for index, (window, slot) in enumerate(zip(step.windows, step.slots, strict=True)):
        part = slot // together if together else 0
        shapes.setdefault((window.first - window.start, window.end - window.start, part), []).append(index)
    for (context, _, _), members in shapes.items():
        for begin in range(0, len(members), rows):
            indices = members[begin : begin + rows]
            windows = tuple(step.windows[index] for index in indices)
            yield ScoringBatch(windows, tuple(step.slots[index] for index in indices), stream.inputs(windows), context)
