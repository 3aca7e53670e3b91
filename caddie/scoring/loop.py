"""The one loop that scores: ask, gather, add up, and only then let the scorer learn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from caddie.errors import CheckFailed
from caddie.scoring.scorer import Asked, Layout, Scorer, Step, Stream, nats
from caddie.scoring.windows import Window

Losses = npt.NDArray[np.float64]
_BLOCK = 1 << 22  # tokens that are looked through at once


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
) -> None:
    """Score every prediction of the layout once; `tell` is given each window and the nats of its predictions, float64.

    A plan that leaves predictions out, takes some twice, or goes back is a `CheckFailed`.
    """
    stream = Stream(tokens, layout)
    for step in scorer.plan(layout, rows):
        asked = list(equal(step, stream, rows))
        for question in asked:
            targets = torch.from_numpy(stream.next_tokens(question.windows)).to(device)
            inputs = torch.from_numpy(question.inputs).to(device)
            logits = scorer.logits(inputs, question.slots, targets.shape[1]).detach()
            if logits.shape[:-1] != targets.shape:
                raise CheckFailed(
                    f"the scorer answers in the shape {tuple(logits.shape)} where {tuple(targets.shape)} and the "
                    "vocabulary were asked for"
                )
            for window, losses in zip(question.windows, nats(logits, targets).cpu().double().numpy(), strict=True):
                tell(window, losses)
        for window in step.windows:
            stream.mark(window)
        scorer.update(asked, stream.past)
    stream.check_complete()


def equal(step: Step, stream: Stream, rows: int) -> Iterator[Asked]:
    """The windows of a step in groups of one shape, at most `rows` at once."""
    shapes: dict[tuple[int, int], list[int]] = {}
    for index, window in enumerate(step.windows):
        shapes.setdefault((window.first - window.start, window.end - window.start), []).append(index)
    for (context, _), members in shapes.items():
        for begin in range(0, len(members), rows):
            chosen: Sequence[int] = members[begin : begin + rows]
            windows = [step.windows[index] for index in chosen]
            yield Asked(windows, [step.slots[index] for index in chosen], stream.inputs(windows), context)
