"""The one loop that scores: ask, gather, add up, and only then let the scorer learn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import compress, islice
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
_BLOCK = 1 << 22  # tokens that are looked through at once
_AHEAD = 16  # batches that each worker has before it, so that none waits long for the others


def layout_of(tokens: npt.NDArray[np.uint16], bos: int, per_document: bool) -> Layout:
    """The stretches of a text: its documents, or the whole. A document ends with the prediction of the next `bos`."""
    predictions = len(tokens) - 1
    begins = [np.zeros(1, np.int64)]
    if per_document:
        for block in range(0, predictions, _BLOCK):
            found = np.flatnonzero(tokens[block : min(block + _BLOCK, predictions)] == bos) + block
            begins.append(found[found > 0])
    together = np.concatenate(begins)
    return Layout(together, np.append(together[1:], predictions))


def run(
    scorer: Scorer,
    tokens: npt.NDArray[np.uint16],
    layout: Layout,
    rows: int,
    tell: Callable[[Window, Losses], None],
    device: torch.device | str = "cpu",
    workers: int = 1,
    ranks: Ranks = Ranks(),
) -> None:
    """Score every prediction of the layout once; `tell` is given each window and the nats of its predictions, float64.

    Windows are run in batches of at most `rows`, and of a scorer without state as many batches at once as there are
    `workers`, who share PyTorch's threads. Where the scorer can share its work, its batches are dealt out among
    `ranks`, who are all told of all; else it is asked everything by each of them. A plan that leaves predictions out,
    takes some twice, or goes back is a `CheckFailed`.
    """
    stream = Stream(tokens, layout)

    def charge(question: ScoringBatch) -> Losses:
        targets = torch.from_numpy(stream.next_tokens(question.windows)).to(device)
        inputs = torch.from_numpy(question.inputs).to(device)
        logits = scorer.logits(inputs, question.slots, targets.shape[1])
        if type(logits) is not Tensor:  # a class of its own could charge what it likes
            raise CheckFailed(
                f"the scorer answers with a {type(logits).__name__} where a plain torch.Tensor was asked for"
            )
        logits = logits.detach()
        if logits.shape[:-1] != targets.shape:
            raise CheckFailed(
                f"the scorer answers in the shape {tuple(logits.shape)} where {tuple(targets.shape)} and the "
                "vocabulary were asked for"
            )
        losses: Losses = nats(logits, targets).cpu().double().numpy()
        return losses

    several = ranks.world > 1 and scorer.share(ranks)
    steps_at_once = ranks.world * _AHEAD if several and scorer.stateless else 1
    with _mapping(workers) as each:
        plan = iter(scorer.plan(layout, rows if workers == 1 else rows * workers * _AHEAD))
        while steps := [_fixed(step) for step in islice(plan, steps_at_once)]:
            batches = tuple(question for step in steps for question in equal(step, stream, rows, scorer.together))
            if several:
                mine = [owner == ranks.rank for owner in _owners(scorer, batches, ranks.world)]
                paid = _shared(each, charge, batches, mine, ranks)
            else:
                paid = each(charge, batches)
            for question, losses in zip(batches, paid, strict=True):
                for window, of_window in zip(question.windows, losses, strict=True):
                    tell(window, of_window)
            for step in steps:
                for window in step.windows:
                    stream.mark(window)
            scorer.update(batches, stream.past)
    stream.check_complete()


def _fixed(step: Step) -> Step:
    """What a scorer asked for, as it stands: what it changes afterwards counts for nothing."""
    windows = tuple(Window(int(window.start), int(window.first), int(window.end)) for window in step.windows)
    return Step(windows, tuple(step.slots))


def _owners(scorer: Scorer, batches: Sequence[ScoringBatch], world: int) -> list[int]:
    """Who answers each question; `CheckFailed` if that is nobody."""
    owners = list(scorer.owners(batches, world))
    if len(owners) != len(batches) or not set(owners) <= set(range(world)):
        raise CheckFailed(f"the scorer does not give each of {len(batches):,} questions to one of {world:,} processes")
    return owners


def _shared(
    each: Callable[..., Any],
    charge: Callable[[ScoringBatch], Losses],
    batches: Sequence[ScoringBatch],
    mine: Sequence[bool],
    ranks: Ranks,
) -> Iterator[Losses]:
    """The losses of all that is asked, of which each process charges its part; they are the same to the bit in all."""
    sizes = [sum(window.end - window.first for window in question.windows) for question in batches]
    together = torch.zeros(sum(sizes), dtype=torch.float64)  # adding zeros changes nothing
    parts = together.split_with_sizes(sizes)
    own = each(charge, list(compress(batches, mine)))
    for part, losses in zip(compress(parts, mine), own, strict=True):
        part.copy_(torch.from_numpy(losses).flatten())
    ranks.sum([together])
    for question, part in zip(batches, parts, strict=True):
        yield part.view(len(question.windows), -1).numpy()


@contextmanager
def _mapping(workers: int) -> Iterator[Callable[..., Any]]:
    """`map`, or the same by several workers at once, each with its share of PyTorch's threads."""
    if workers == 1:
        yield map
        return
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads // workers,))
    try:
        yield pool.map
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # which for some libraries is a number of the whole process


def equal(step: Step, stream: Stream, rows: int, together: int = 0) -> Iterator[ScoringBatch]:
    """The windows of a step in groups of one shape, and of so many neighbouring slots, at most `rows` at once."""
    shapes: dict[tuple[int, int, int], list[int]] = {}
    for index, (window, slot) in enumerate(zip(step.windows, step.slots, strict=True)):
        part = slot // together if together else 0
        shapes.setdefault((window.first - window.start, window.end - window.start, part), []).append(index)
    for (context, _, _), members in shapes.items():
        for begin in range(0, len(members), rows):
            chosen: Sequence[int] = members[begin : begin + rows]
            windows = tuple(step.windows[index] for index in chosen)
            yield ScoringBatch(windows, tuple(step.slots[index] for index in chosen), stream.inputs(windows), context)
