"""Scoring: every prediction once, with its context, nothing seen ahead, and figures that follow from one sum."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import facts
from recording import Recorder
from torch import Tensor, nn

from caddie.config import Config, field_types, parse_assignment
from caddie.config.field_docs import descriptions
from caddie.data.tokenizers import ByteTokenizer
from caddie.errors import CheckFailed, UserError
from caddie.model import GPT, Cache, Model, build
from caddie.runtime.distributed import Ranks
from caddie.score import (
    KINDS,
    SGD,
    ChunkSGD,
    DocumentLoRA,
    GlobalSGD,
    Layout,
    Score,
    ScoredPrefix,
    Scorer,
    Scoring,
    ScoringBatch,
    Step,
    Stream,
    Text,
    Window,
    check_windows,
    layout_of,
    run,
    same_shape_batches,
    score,
    score_kinds,
    use_quickest_threads,
    windows,
)
from caddie.score.ngram_tilt import NGramTilt
from caddie.score.score import rows_and_workers

quick = settings(derandomize=True, deadline=None, max_examples=150)

BOS = 0
TINY = GPT(vocabulary=16, width=16, depth=2).but(
    {"block.attention.heads": 2, "block.attention.key_value_heads": 1, "block.mlp.hidden": 16}
)


def held_out_text(tokens: np.ndarray, source_bytes: int = 100) -> Text:
    return Text(tokens.astype(np.uint16), BOS, source_bytes, 2 * source_bytes, 4 * source_bytes)


def random_text(tokens: int, vocabulary: int = 16, seed: int = 0) -> Text:
    ids = np.random.default_rng(seed).integers(1, vocabulary, tokens)
    ids[::23] = BOS
    return held_out_text(ids)


def tiny_model(seed: int = 0) -> Model:
    """A model whose outputs depend on all of its context, not only the untrained one's logits near zero."""
    model = build(TINY, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model


class Known(nn.Module):
    """A model whose logits are those of a table, for tests whose answer is known by hand."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocabulary=vocabulary)
        self.table = nn.Parameter(torch.zeros(vocabulary))
        self.seen: list[tuple[Tensor, Tensor, torch.dtype]] = []

    def forward(
        self, ids: Tensor, starts: Tensor, dtype: torch.dtype, *, last: int, cache: Cache | None = None
    ) -> Tensor:
        self.seen.append((ids.clone(), starts.clone(), dtype))
        return self.answers(ids, dtype)[:, -last:]

    def answers(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return self.table.to(dtype).expand(*ids.shape, -1)


class Copier(Known):
    """Sure that what followed the last occurrence of the current token in its context follows again."""

    def answers(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        logits = torch.zeros(*ids.shape, len(self.table), dtype=dtype)
        for row, position in np.ndindex(*ids.shape):
            before = (ids[row, :position] == ids[row, position]).nonzero()
            if len(before):
                logits[row, position, ids[row, before[-1] + 1]] = 30.0
        return logits


# Windows


def plan_of(predictions: int, length: int, stride: int) -> list[tuple[int, int, int]]:
    return [tuple(window) for window in windows(0, predictions, length, stride)]


def test_windows_by_hand() -> None:
    assert plan_of(10, 4, 2) == [(0, 0, 4), (2, 4, 6), (4, 6, 8), (6, 8, 10)]
    assert plan_of(9, 4, 2) == [(0, 0, 4), (2, 4, 6), (4, 6, 8), (6, 8, 9)]
    assert plan_of(8, 4, 4) == [(0, 0, 4), (4, 4, 8)]
    assert plan_of(9, 4, 4) == [(0, 0, 4), (4, 4, 8), (8, 8, 9)]
    assert plan_of(4, 4, 1) == [(0, 0, 4)]
    assert plan_of(6, 4, 1) == [(0, 0, 4), (1, 4, 5), (2, 5, 6)]
    assert plan_of(1, 1, 1) == [(0, 0, 1)]
    assert plan_of(3, 4, 2) == [(0, 0, 3)], "a stretch may be shorter than a window"
    assert plan_of(0, 4, 2) == []
    assert [tuple(window) for window in windows(7, 13, 4, 2)] == [(7, 7, 11), (9, 11, 13)]


@quick
@given(st.integers(0, 9), st.integers(1, 40), st.integers(1, 40), st.integers(0, 300))
def test_every_prediction_is_scored_exactly_once_with_its_context(
    begin: int, length: int, stride: int, more: int
) -> None:
    stride = min(stride, length)
    end = begin + length + more
    plan = list(windows(begin, end, length, stride))
    scored = [position for window in plan for position in range(window.first, window.end)]
    assert scored == list(range(begin, end)), "each once, in order"
    for window in plan:
        assert begin <= window.start <= window.first < window.end <= end
        assert window.end - window.start <= length
        if window.start > begin:
            assert window.first - window.start >= length - stride
    assert len(plan) == 1 + math.ceil(more / stride), "no more windows than needed"


def test_a_long_text_has_its_windows_one_by_one() -> None:
    assert next(windows(0, 1 << 60, 1024, 64)) == (0, 0, 1024)


@pytest.mark.parametrize(("length", "stride"), [(4, 0), (4, 5), (4, -1), (1, 2)])
def test_a_stride_beyond_the_window_is_an_error(length: int, stride: int) -> None:
    with pytest.raises(UserError, match=r"^score\.stride must be from 1 to"):
        check_windows(length, stride)
    check_windows(length, 1)
    check_windows(length, length)
    with pytest.raises(UserError, match=r"^score\.stride must be from 1 to score\.sequence_length \(4\), not 5"):
        score(Known(16), random_text(100), Scoring(sequence_length=4, stride=5))  # type: ignore[arg-type]


@pytest.mark.parametrize("predictions", [0, 1, 31])
def test_a_text_shorter_than_a_window_says_what_to_do(predictions: int) -> None:
    most = max(1, predictions)
    wanted = rf"has {predictions + 1} tokens, too few .* of 32; .* score.sequence_length={most}"
    with pytest.raises(UserError, match=f"{wanted}$"):
        check_windows(32, 1, predictions)
    with pytest.raises(UserError, match=f"{wanted} score.stride={most}$"):  # else that would be the next mistake
        check_windows(32, 32, predictions)
    check_windows(32, 8, 32)
    check_windows(32, 8)


def test_windows_agree_with_the_public_scripts(parity: Path) -> None:
    """All of L3's lists are ours, but that we refuse a text shorter than one window where it scores nothing.

    S001 and its like score the same positions from the same windows, then the tail again and again; leaving out what
    was scored before gives our list. TERN leaves the tail out; ours begins with its list.
    """
    cases = facts(parity / "components" / "evaluation" / "sliding_windows")["cases"]
    compared = 0
    for case in cases["L3"]:
        expected = [tuple(window) for window in case["windows"]]
        if not expected:
            with pytest.raises(UserError, match="too few"):
                check_windows(case["window"], case["stride"], case["predictable_tokens"])
            continue
        assert plan_of(case["predictable_tokens"], case["window"], case["stride"]) == expected
        compared += 1
    assert compared == sum(bool(case["windows"]) for case in cases["L3"]) > 0
    for name in ("S001", "S002", "ARG"):
        for case in cases[name]:
            if case["predictable_tokens"] < case["window"]:
                continue
            new, done = [], 0
            for start, first, end in case["windows"]:
                if end > done:
                    new.append((start, max(first, done), end))
                    done = end
            assert plan_of(case["predictable_tokens"], case["window"], case["stride"]) == new
    for case in cases["TERN"]:
        if case["windows"]:
            plan = plan_of(case["predictable_tokens"], case["window"], case["stride"])
            expected = [tuple(window) for window in case["windows"]]
            assert plan[: len(expected)] == expected
            assert len(plan) - len(expected) <= 1


# Stretches


@pytest.mark.parametrize(
    ("tokens", "stretches"),
    [
        ([0, 5, 6, 0, 7, 8], [(0, 3), (3, 5)]),
        ([5, 6, 0, 7], [(0, 2), (2, 3)]),
        ([0, 0, 0, 5], [(0, 1), (1, 2), (2, 3)]),
        ([0, 5, 0], [(0, 2)]),
        ([0, 0], [(0, 1)]),
        ([5, 0], [(0, 1)]),
        ([5, 6, 7], [(0, 2)]),
        ([0, 5], [(0, 1)]),
    ],
    ids=[
        "a document ends with the prediction of the next",
        "the first token begins none",
        "empty documents",
        "a last document without predictions",
        "two beginnings",
        "only the last token is one",
        "no document at all",
        "one prediction",
    ],
)
def test_documents_are_stretches(tokens: list[int], stretches: list[tuple[int, int]]) -> None:
    ids = np.array(tokens, np.uint16)
    layout = layout_of(ids, BOS, per_document=True)
    assert layout.edges == stretches
    assert layout.predictions == len(tokens) - 1
    whole = layout_of(ids, BOS, per_document=False)
    assert (whole.begins.tolist(), whole.ends.tolist()) == ([0], [len(tokens) - 1])


@settings(quick, max_examples=50)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=40))
def test_stretches_share_out_all_predictions(tokens: list[int]) -> None:
    layout = layout_of(np.array(tokens, np.uint16), BOS, per_document=True)
    scored = [p for begin, end in zip(layout.begins, layout.ends, strict=True) for p in range(begin, end)]
    assert scored == list(range(len(tokens) - 1))
    expected = [0] + [p for p in range(1, len(tokens) - 1) if tokens[p] == BOS]
    assert layout.begins.tolist() == expected


# What a scorer may see


def two_stretches() -> tuple[np.ndarray, Layout]:
    tokens = np.array([0, 11, 12, 13, 0, 21, 22, 23, 24], np.uint16)
    return tokens, layout_of(tokens, BOS, per_document=True)


def test_what_was_not_scored_is_not_known() -> None:
    stream = Stream(*two_stretches())
    prefix = stream.prefix
    assert not isinstance(prefix, Stream)
    assert prefix.tokens(0, 1).tolist() == [0], "the first token of a stretch is context"
    assert prefix.tokens(4, 5).tolist() == [0]
    stream.mark(Window(0, 0, 2))
    assert prefix.tokens(0, 3).tolist() == [0, 11, 12]
    assert prefix.tokens(1, 1).tolist() == []
    assert prefix.targets([Window(0, 0, 2)]).tolist() == [[11, 12]]
    assert prefix.targets([Window(0, 0, 1), Window(0, 1, 2)]).tolist() == [[11], [12]]
    for start, end in [(0, 4), (2, 4), (3, 4), (4, 6), (5, 6), (6, 8), (0, 9), (0, -1), (3, -2), (-2, 9), (-1, 0)]:
        with pytest.raises(CheckFailed, match="not all been scored"):
            prefix.tokens(start, end)
    for window in [Window(0, 2, 3), Window(0, 0, 3), Window(2, 2, 4), Window(4, 4, 5)]:
        with pytest.raises(CheckFailed, match="not all been scored"):
            prefix.targets([window])
    stream.mark(Window(4, 4, 6))
    assert prefix.tokens(4, 7).tolist() == [0, 21, 22]
    stream.mark(Window(0, 2, 4))
    assert prefix.targets([Window(3, 3, 4)]).tolist() == [[0]], "the next document's first token was predicted"
    assert prefix.is_last(Window(0, 2, 4))
    assert not prefix.is_last(Window(4, 4, 6))


def test_a_window_is_ready_when_all_before_it_was_scored() -> None:
    stream = Stream(*two_stretches())
    assert stream.ready(Window(0, 0, 2))
    assert not stream.ready(Window(0, 2, 4))
    stream.mark(Window(0, 0, 2))
    assert stream.ready(Window(1, 2, 4))
    assert not stream.ready(Window(0, 0, 2))
    assert stream.ready(Window(4, 4, 5))
    assert stream.inputs([Window(0, 2, 4)]).tolist() == [[0, 11, 12, 13]]
    assert stream.next_tokens([Window(0, 2, 4)]).tolist() == [[13, 0]]


# The loop


class Planned(Scorer):
    """A scorer with a given plan that finds everything equally likely and writes down what happens."""

    fixed_between_updates = True

    def __init__(self, steps: Sequence[Sequence[tuple[int, int, int]]], vocabulary: int = 32) -> None:
        self.steps = [[Window(*window) for window in step] for step in steps]
        self.vocabulary = vocabulary
        self.events: list[tuple[Any, ...]] = []

    def plan(self, layout: Layout, rows: int) -> Iterator[Step]:
        for step in self.steps:
            self.events.append(("plan",))
            yield Step(step, range(len(step)))

    def logits(self, inputs: Tensor, slots: Sequence[int], last: int, cache: Cache | None = None) -> Tensor:
        self.events.append(("batches", inputs.tolist(), list(slots), last))
        return torch.zeros(len(inputs), last, self.vocabulary)

    def update(self, batches: Sequence[ScoringBatch], prefix: ScoredPrefix) -> None:
        self.events.append(("update", [window for question in batches for window in question.windows], prefix))

    def tell(self, window: Window, losses: np.ndarray) -> None:
        assert losses.dtype == np.float64
        assert losses.shape == (window.end - window.first,)
        self.events.append(("charged", window))


NINE = np.array([0, 11, 12, 13, 0, 21, 22, 23, 24], np.uint16)


def go(scorer: Planned, layout: Layout | None = None, rows: int = 2) -> list[tuple[Any, ...]]:
    run(scorer, NINE, layout or layout_of(NINE, BOS, per_document=False), rows, scorer.tell, vocabulary=32)
    return scorer.events


def test_a_step_is_charged_then_learnt_from_then_the_next_is_planned() -> None:
    events = go(Planned([[(0, 0, 2), (1, 2, 4)], [(2, 4, 6)], [(4, 6, 8)]]))
    assert [event[0] for event in events] == [
        *("plan", "batches", "charged", "batches", "charged", "update"),
        *("plan", "batches", "charged", "update"),
        *("plan", "batches", "charged", "update"),
    ]
    assert events[1] == ("batches", [[0, 11]], [0], 2)
    assert events[3] == ("batches", [[11, 12, 13]], [1], 2), "the last target is not among the inputs"
    assert events[5][1] == [(0, 0, 2), (1, 2, 4)]
    assert not isinstance(events[5][2], Stream), "the scorer is not handed the text itself"


def test_a_gpu_gets_all_batches_of_a_step_before_it_is_waited_for() -> None:
    scorer = Planned([[(0, 0, 2), (1, 2, 4)], [(2, 4, 6)], [(4, 6, 8)]])
    layout = layout_of(NINE, BOS, per_document=False)
    run(scorer, NINE, layout, 2, scorer.tell, torch.device("cpu", 0), vocabulary=32)
    assert [event[0] for event in scorer.events][:6] == ["plan", "batches", "batches", "charged", "charged", "update"]


def test_a_step_without_windows_is_a_step() -> None:
    events = go(Planned([[(0, 0, 4)], [], [(4, 4, 8)]]))
    learnt = [event[1] for event in events if event[0] == "update"]
    assert learnt == [[(0, 0, 4)], [], [(4, 4, 8)]]


def test_steps_of_a_scorer_without_state_are_scored_some_at_a_time() -> None:
    tokens = np.arange(1, 102, dtype=np.uint16)
    scorer = Planned([[(p, p, p + 1)] for p in range(100)], vocabulary=128)
    scorer.stateless = True
    layout = layout_of(tokens, BOS, per_document=False)
    run(scorer, tokens, layout, 2, scorer.tell, vocabulary=128)
    learnt = [window.first for event in scorer.events if event[0] == "update" for window in event[1]]
    assert learnt == list(range(100)), "each step once, the last ones too"
    planned_first = [event[0] for event in scorer.events].index("charged")
    assert planned_first < 50, "a long text is not planned to its end before any of it is scored"


def test_slots_that_are_together_share_a_batch() -> None:
    tokens = np.tile(np.array([BOS, 11, 12], np.uint16), 4)
    stream, slots = Stream(tokens, layout_of(tokens, BOS, per_document=True)), [0, 1, 2, 3]
    step = Step([Window(start, start, start + 2) for start in (0, 3, 6, 9)], slots)
    for together, wanted in ((0, [[0, 1, 2, 3]]), (2, [[0, 1], [2, 3]]), (1, [[0], [1], [2], [3]])):
        assert [list(batch.slots) for batch in same_shape_batches(step, stream, 9, together)] == wanted


def test_windows_of_one_shape_are_asked_together() -> None:
    both = [(0, 0, 2), (4, 4, 5), (0, 2, 4), (4, 5, 6), (5, 6, 7), (5, 7, 8)]
    events = go(Planned([both]), layout_of(NINE, BOS, per_document=True), rows=2)
    assert [event[1:] for event in events if event[0] == "batches"] == [
        ([[0, 11]], [0], 2),
        ([[0]], [1], 1),
        ([[0, 11, 12, 13]], [2], 2),
        ([[0, 21]], [3], 1),
        ([[21, 22]], [4], 1),
        ([[21, 22, 23]], [5], 1),
    ], "no row reads the target of another"
    three = [(0, 0, 4), (4, 4, 5), (4, 5, 6), (5, 6, 7), (6, 7, 8)]
    layout = layout_of(NINE, BOS, per_document=True)
    step = Step([Window(*window) for window in three], range(5))
    batches = list(same_shape_batches(step, Stream(NINE, layout), 2))
    assert [(list(question.slots), question.context) for question in batches] == [
        ([0], 0),
        ([1], 0),
        ([2], 1),
        ([3], 1),
        ([4], 1),
    ], "each of the last three reads a target of the one before"
    assert all(question.inputs.dtype == np.int64 for question in batches)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([[(0, 0, 4)], [(4, 4, 7)]], "leaves 1 predictions out"),
        ([], "leaves 8 predictions out"),
        ([[(0, 0, 4)], [(4, 5, 8)]], "predictions 5 to 8 after 4"),
        ([[(0, 0, 4)], [(2, 3, 8)]], "predictions 3 to 8 after 4"),
        ([[(0, 0, 4)], [(0, 0, 4)]], "predictions 0 to 4 after 4"),
        ([[(0, 0, 4), (0, 0, 4)]], "predictions 0 to 4 after 4"),
        ([[(4, 4, 8), (0, 0, 4)]], "predictions 4 to 8 after 0"),
        ([[(0, 0, 4)], [(5, 4, 8)]], "predictions 4 to 8 in a window from 5 on"),
        ([[(-1, 0, 4)], [(4, 4, 8)]], "predictions 0 to 4 in a window from -1 on"),
    ],
    ids=[
        *("the end", "everything", "skips", "overlaps", "repeats", "twice at once", "goes back", "starts too late"),
        "starts before the text",
    ],
)
def test_a_plan_that_is_not_one_pass_is_refused(steps: list[list[tuple[int, int, int]]], message: str) -> None:
    with pytest.raises(CheckFailed, match=message):
        go(Planned(steps))


def test_a_plan_that_leaves_its_stretch_is_refused() -> None:
    for steps in ([[(0, 0, 5)]], [[(4, 4, 8), (0, 0, 4), (0, 4, 8)]], [[(0, 4, 8)]]):
        with pytest.raises(CheckFailed, match="not one pass from left to right"):
            go(Planned(steps), layout_of(NINE, BOS, per_document=True))


@pytest.mark.parametrize(
    "step",
    [
        [(0, 7, 5)],
        [(0, -3, 5)],
        [(0, 0, 0)],
        [(-1, 0, 4)],
        [(90, 0, 95)],
        [(0, 0, 6), (4, 4, 10)],
    ],
    ids=["reversed", "negative", "empty", "before the text", "behind the text", "a row shorter than its neighbour"],
)
@pytest.mark.parametrize("per_document", [False, True])
def test_a_window_that_is_none_is_refused_before_the_scorer_is_asked(
    step: list[tuple[int, int, int]], per_document: bool
) -> None:
    scorer = Planned([step])
    with pytest.raises(CheckFailed, match=r"not one pass from left to right: predictions .* in a window from"):
        go(scorer, layout_of(NINE, BOS, per_document))
    assert scorer.events == [("plan",)]


# Targets that a row of the same step would show


class Remembering(Planned):
    """The same of a scorer that makes no promise about what it keeps."""

    fixed_between_updates = False


@pytest.mark.parametrize(
    "step",
    [
        [(0, 0, 2), (1, 2, 4)],
        [(0, 0, 2), (2, 2, 4)],
        [(0, 0, 2), (0, 2, 4), (4, 4, 8)],
    ],
    ids=["overlapping", "end to end", "two of one stretch beside another"],
)
def test_a_scorer_that_may_remember_gets_one_window_of_a_stretch(step: list[tuple[int, int, int]]) -> None:
    layout = layout_of(NINE, BOS, per_document=len(step) == 3)
    scorer = Remembering([step, [(3, 4, 8)]])
    with pytest.raises(CheckFailed, match=r"shows it targets before they are scored: window \d to \d reads") as error:
        go(scorer, layout)
    assert "\n" not in str(error.value)
    assert scorer.events == [("plan",)], "it was shown nothing"


def test_windows_of_several_stretches_are_asked_together() -> None:
    scorer = Remembering([[(0, 0, 2), (4, 4, 6)], [(1, 2, 4), (5, 6, 8)]])
    events = go(scorer, layout_of(NINE, BOS, per_document=True))
    assert [event[1] for event in events if event[0] == "batches"] == [
        [[0, 11], [0, 21]],
        [[11, 12, 13], [21, 22, 23]],
    ]


def test_windows_of_two_stretches_share_a_batch_in_any_order() -> None:
    layout, step = layout_of(NINE, BOS, per_document=True), Step([Window(4, 4, 6), Window(0, 0, 2)], [0, 1])
    assert [list(batch.slots) for batch in same_shape_batches(step, Stream(NINE, layout), 2)] == [[0, 1]]


@quick
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 5), st.lists(st.integers(1, 60), min_size=1, max_size=3))
def test_no_row_of_a_batch_reads_the_targets_of_another(
    length: int, stride: int, rows: int, stretches: list[int]
) -> None:
    ends = np.cumsum(stretches)
    layout = Layout(ends - stretches, ends)
    stream = Stream(np.arange(ends[-1] + 1), layout)
    plan = [list(windows(end - n, end, length, min(stride, length))) for end, n in zip(ends, stretches, strict=True)]
    step = Step([window for stretch in plan for window in stretch], range(sum(map(len, plan))))
    batches = list(same_shape_batches(step, stream, rows))
    assert sorted(slot for batch in batches for slot in batch.slots) == list(step.slots), "each once"
    for batch in batches:
        assert len(batch.windows) <= rows
        targets = [set(row.tolist()) - {int(end) for end in ends} for row in stream.next_tokens(batch.windows)]
        for number, inputs in enumerate(batch.inputs.tolist()):
            others = set().union(*targets[:number], *targets[number + 1 :])
            assert not others & set(inputs)


def test_batches_of_overlapping_windows_are_full() -> None:
    """The windows between two rows of a batch fill the other batches, so that speed does not suffer."""
    scorer = Scoring(sequence_length=8, stride=2).scorer(tiny_model(), BOS)
    layout = Layout(np.array([0]), np.array([8 + 2 * 5 * 4 * 3]))
    stream, rows = Stream(np.arange(layout.predictions + 1), layout), 4
    batches = [batch for step in scorer.plan(layout, rows) for batch in same_shape_batches(step, stream, rows)]
    assert sorted(len(batch.windows) for batch in batches) == [1, 1, 3, *[4] * 14], (
        "but for the first and the last windows"
    )


# The border


def answering(change: Any) -> Planned:
    """A scorer whose logits are changed before it returns them."""

    class Answers(Planned):
        def logits(self, inputs: Tensor, slots: Sequence[int], last: int, cache: Cache | None = None) -> Tensor:
            answer: Tensor = change(super().logits(inputs, slots, last))
            return answer

    return Answers([[(0, 0, 4)], [(4, 4, 8)]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda logits: None, r"returned a NoneType instead of a plain torch\.Tensor$"),
        (lambda logits: logits.numpy(), r"returned a ndarray instead of a plain torch\.Tensor$"),
        (lambda logits: logits.to_sparse(), r"logits with the layout torch\.sparse_coo, not dense ones$"),
        (lambda logits: logits.long(), r"logits of torch\.int64; it must be one of torch\.float16, "),
        (lambda logits: logits.to(torch.complex64), r"logits of torch\.complex64; it must be one of"),
        (lambda logits: logits.to("meta"), r"logits on meta for inputs on cpu$"),
        (lambda logits: logits[..., :25], r"logits of shape \(1, 4, 25\) instead of \(1, 4, 32\)$"),
        (lambda logits: logits[:, 1:], r"logits of shape \(1, 3, 32\) instead of \(1, 4, 32\)$"),
    ],
    ids=["nothing", "an array", "sparse", "integers", "complex", "another device", "fewer ids", "fewer positions"],
)
def test_answers_that_are_no_logits_are_refused_in_one_line(change: Any, message: str) -> None:
    with pytest.raises(CheckFailed, match=message) as error:
        go(answering(change))
    assert "\n" not in str(error.value)


def test_methods_set_on_a_tensor_are_not_called() -> None:
    """They could return a subclass, for which every loss is zero."""

    def with_methods(logits: Tensor) -> Tensor:
        for name in ("detach", "flatten", "to", "cpu", "view", "double"):
            setattr(logits, name, lambda *given, **named: pytest.fail("called"))
        return logits

    scorer, losses = answering(with_methods), []
    run(
        *(scorer, NINE, layout_of(NINE, BOS, per_document=False), 2, lambda window, found: losses.extend(found)),
        vocabulary=32,
    )
    assert losses == pytest.approx([math.log(32)] * 8)


class Liar(int):
    """A number that agrees to everything."""

    def _yes(self, *others: object) -> bool:
        return True

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _yes  # type: ignore[assignment]
    __hash__ = int.__hash__

    def __add__(self, other: int) -> Liar:
        return Liar(int(self) + other)

    __radd__ = __add__


def test_numbers_that_lie_when_compared_do_not_help() -> None:
    stream = Stream(*two_stretches())
    stream.mark(Window(0, 0, 1))
    for start, end in [(Liar(0), Liar(4)), (Liar(2), Liar(4)), (0, Liar(3))]:
        with pytest.raises(CheckFailed, match="not all been scored"):
            stream.prefix.tokens(start, end)
    with pytest.raises(CheckFailed, match="not all been scored"):
        stream.prefix.targets([Window(Liar(0), Liar(0), Liar(3))])
    assert not stream.prefix.is_last(Window(Liar(0), Liar(0), Liar(1)))
    for steps in ([[(Liar(0), Liar(2), Liar(4))]], [[(0, 0, 4)], [(Liar(4), Liar(6), Liar(8))]]):
        with pytest.raises(CheckFailed, match="not one pass from left to right"):
            go(Planned(steps))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (None, "has a step that is none: 'NoneType' object has no attribute 'windows'"),
        (Step([Window(0, 0, 8)], [0, 1]), "has 1 windows and 2 slots in a step"),
        (Step([Window(0.0, 0, 8)], [0]), "has a step that is none: 'float' object cannot be"),  # type: ignore[arg-type]
        (Step([(0, 0, 8)], [0]), "has a step that is none: 'tuple' object has no attribute"),  # type: ignore[list-item]
    ],
)
def test_steps_that_are_none_are_refused_in_one_line(step: Any, message: str) -> None:
    class Odd(Planned):
        def plan(self, layout: Layout, rows: int) -> Iterator[Step]:
            yield step

    with pytest.raises(CheckFailed, match=message):
        go(Odd([]))


def test_answers_of_another_shape_are_refused() -> None:
    class All(Planned):
        def logits(self, inputs: Tensor, slots: Sequence[int], last: int, cache: Cache | None = None) -> Tensor:
            return torch.zeros(*inputs.shape, self.vocabulary)

    with pytest.raises(CheckFailed, match=r"logits of shape \(1, 6, 32\) instead of \(1, 4, 32\)$"):
        go(All([[(0, 0, 4)], [(2, 4, 8)]]))


def test_an_answer_that_is_no_plain_tensor_is_refused() -> None:
    class Cheap(Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return (
                torch.zeros(4)
                if function is torch.nn.functional.cross_entropy
                else super().__torch_function__(function, types, args, kwargs or {})
            )

    class Subclass(Planned):
        def logits(self, inputs: Tensor, slots: Sequence[int], last: int, cache: Cache | None = None) -> Tensor:
            return super().logits(inputs, slots, last).as_subclass(Cheap)

    with pytest.raises(CheckFailed, match=r"returned a Cheap instead of a plain torch\.Tensor"):
        go(Subclass([[(0, 0, 4)], [(4, 4, 8)]]))


def test_what_a_scorer_changes_after_it_asked_counts_for_nothing() -> None:
    class Changes(Planned):
        def logits(self, inputs: Tensor, slots: Sequence[int], last: int, cache: Cache | None = None) -> Tensor:
            for step in self.steps:
                step[:] = [Window(0, 0, 8)]
            return super().logits(inputs, slots, last)

    with pytest.raises(CheckFailed, match="not one pass from left to right"):
        go(Changes([[(0, 0, 1)] * 8]))
    layout = layout_of(NINE, BOS, per_document=True)
    for positions in (layout.begins, layout.ends):
        with pytest.raises(ValueError, match="read-only"):
            positions[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            positions.setflags(write=True)


@pytest.mark.parametrize("owners", [[-1], [2], [], [0, 1]])
def test_a_question_that_nobody_answers_is_refused(owners: list[int]) -> None:
    class Shared(Planned):
        def share(self, ranks: Ranks) -> bool:
            return True

        def owners(self, batches: Sequence[ScoringBatch], world: int) -> list[int]:
            return owners

    scorer = Shared([[(0, 0, 4)], [(4, 4, 8)]])
    with pytest.raises(CheckFailed, match="does not give each of 1 batches to one of 2 processes"):
        run(scorer, NINE, layout_of(NINE, BOS, False), 2, scorer.tell, ranks=Ranks(rank=0, world=2), vocabulary=32)
    assert scorer.events == [("plan",)], "nothing was asked"


class Tilted(Planned):
    """Gives a logit to token 31, which never comes: an eighth of the token before."""

    def logits(self, inputs: Tensor, slots: Sequence[int], last: int, cache: Cache | None = None) -> Tensor:
        logits = super().logits(inputs, slots, last)
        logits[:, :, 31] = inputs[:, -last:] / 8
        return logits


class Divided(Tilted):
    def share(self, ranks: Ranks) -> bool:
        return True

    def owners(self, batches: Sequence[ScoringBatch], world: int) -> list[int]:
        return [0, 1, 1, 0]


class Stateless(Tilted):
    """Its batches are dealt out in turn."""

    stateless = True


class BesideAQuarter(Ranks):
    """One of two processes, the other of which finds a quarter of a nat everywhere."""

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Add what the other process found."""
        for tensor in tensors:
            tensor += 0.25


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("kind", "owners"), [(Divided, [0, 1, 1, 0]), (Stateless, [0, 1, 0, 1]), (Tilted, [None] * 4)])
def test_a_process_answers_what_it_is_given(kind: type[Planned], owners: list[int | None], rank: int) -> None:
    """Score every batch where the scorer cannot share (owner None), and its own elsewhere."""
    rows = [[(0, 0, 2), (4, 4, 6)], [(0, 2, 3), (4, 6, 7)], [(1, 3, 4)], [(6, 7, 8)]]  # of each batch
    scorer, paid = kind([list(chain(*rows))]), dict[tuple[int, int, int], list[float]]()
    tell, ranks = (lambda window, losses: paid.update({window: losses.tolist()})), BesideAQuarter(rank=rank, world=2)
    run(scorer, NINE, layout_of(NINE, BOS, per_document=True), 2, tell, ranks=ranks, vocabulary=32)
    expected = [math.log(31 + math.exp(token / 8)) for token in NINE.tolist()]
    assert list(paid) == list(chain(*rows))
    for windows_of_batch, owner in zip(rows, owners, strict=True):
        for window in windows_of_batch:
            wanted = [
                own * (owner in (rank, None)) + 0.25 * (owner is not None) for own in expected[slice(*window[1:])]
            ]
            assert paid[window] == pytest.approx(wanted)


def test_logits_are_shown_with_their_windows() -> None:
    shown: list[tuple[list[tuple[int, int, int]], list[float]]] = []
    run(
        *(Tilted([[(0, 0, 2), (4, 4, 6)], [(0, 2, 4), (4, 6, 8)]]), NINE, layout_of(NINE, BOS, per_document=True), 2),
        lambda window, losses: None,
        vocabulary=32,
        on_logits=lambda windows, logits: shown.append((list(windows), logits[:, :, 31].flatten().tolist())),
    )
    expected = (NINE / 8).tolist()
    assert shown == [
        ([(0, 0, 2), (4, 4, 6)], expected[0:2] + expected[4:6]),
        ([(0, 2, 4), (4, 6, 8)], expected[2:4] + expected[6:8]),
    ]


def test_a_scorer_promises_nothing_unless_it_says_so() -> None:
    assert not Scorer.per_document
    assert not Scorer.in_order
    assert not Scorer.stateless
    assert not Scorer.fixed_between_updates
    assert Scorer.together == 0
    scorer = Planned([])
    assert scorer.share(Ranks(0, 2)) is False


def test_looking_ahead_while_learning_is_refused() -> None:
    class Ahead(Planned):
        def update(self, batches: Sequence[ScoringBatch], prefix: ScoredPrefix) -> None:
            prefix.targets([Window(4, 4, 8)])

    with pytest.raises(CheckFailed, match="not all been scored"):
        go(Ahead([[(0, 0, 4)], [(4, 4, 8)]]))


def test_losses_and_sums_are_as_exact_as_the_answers() -> None:
    class Sure(Planned):
        def logits(self, inputs: Tensor, slots: Sequence[int], last: int, cache: Cache | None = None) -> Tensor:
            return torch.tensor([40.0, 0.0], dtype=torch.float64).expand(len(inputs), last, 2)

    text = held_out_text(np.zeros(1001, np.uint16))
    sure = Sure([[(p, p, p + 1)] for p in range(1000)])
    found = score(Known(2), text, Scoring(sequence_length=1, stride=1), scorer=sure)  # type: ignore[arg-type]
    assert found.nats == pytest.approx(1000 * math.log1p(math.exp(-40)), rel=1e-12), "float32 would find it free"


# Scores by hand


@pytest.mark.parametrize(("length", "stride"), [(8, 8), (8, 3), (8, 1), (1, 1)])
def test_a_uniform_model_pays_the_same_for_every_token(length: int, stride: int) -> None:
    text = random_text(61)
    found = score(Known(16), text, Scoring(sequence_length=length, stride=stride, batch_tokens=16))  # type: ignore[arg-type]
    assert found.tokens == 60
    assert found.nats == pytest.approx(60 * math.log(16), rel=1e-7)
    assert found.bits_per_byte == pytest.approx(60 * 4 / 100, rel=1e-7)


def test_a_known_distribution_pays_its_cross_entropy() -> None:
    model = Known(4)
    with torch.no_grad():
        model.table.copy_(torch.tensor([0.5, 0.25, 0.125, 0.125]).log())
    text = held_out_text(np.array([0, 1, 1, 2, 0, 3, 0]), source_bytes=5)
    found = score(model, text, Scoring(sequence_length=3, stride=2))  # type: ignore[arg-type]
    # predicted are 1 1 2 0 3 0, at 2 2 3 1 3 1 bits
    assert found.nats / math.log(2) == pytest.approx(12.0, rel=1e-6)
    assert found.bits_per_byte == pytest.approx(12 / 5, rel=1e-6)


def test_a_beginning_of_document_is_paid_for_and_stands_for_no_bytes() -> None:
    tokenizer = ByteTokenizer()
    ids = np.concatenate([[tokenizer.bos], tokenizer.encode(b"ab"), [tokenizer.bos], tokenizer.encode(b"c")])
    assert tokenizer.table_bytes(ids) == 3
    text = Text(ids.astype(np.uint16), tokenizer.bos, 3, 3, 3)
    found = score(Known(257), text, Scoring(sequence_length=2, stride=1))  # type: ignore[arg-type]
    assert found.tokens == 4
    assert found.bits_per_byte == pytest.approx(4 * math.log2(257) / 3, rel=1e-7)


@pytest.mark.parametrize(("length", "stride"), [(8, 8), (32, 8), (50, 50)])
def test_the_loss_is_kept_for_each_document(length: int, stride: int) -> None:
    """Documents of 1 to 30 tokens: some within a window, some over several, one that the text ends within."""
    ids = np.random.default_rng(1).integers(1, 257, 200)
    begins = [0, 1, 31, 40, 41, 42, 70, 100, 130, 160, 190]
    ids[begins] = BOS
    text = held_out_text(ids)
    found = score(Known(257), text, Scoring(sequence_length=length, stride=stride))  # type: ignore[arg-type]
    assert found.document_nats == pytest.approx(np.diff([*begins, 199]) * math.log(257), rel=1e-6)
    model = tiny_model()
    kept = score(model, random_text(300), Scoring(sequence_length=length, stride=stride))
    alone = [
        score(model, held_out_text(random_text(300).tokens[:end]), Scoring(sequence_length=length, stride=stride)).nats
        for end in (116, 139)  # the beginnings of two documents: a loss is of what came before alone
    ]
    if length == stride:
        assert kept.document_nats[5] == pytest.approx(alone[1] - alone[0], rel=1e-4)
    assert kept.document_nats.sum() == pytest.approx(kept.nats, rel=1e-12)
    assert len(kept.document_nats) == 13, "a text may end in the token that begins a document"


def test_the_figures_follow_from_one_sum() -> None:
    found = Score(
        nats=math.log(2) * 120,
        tokens=40,
        source_bytes=60,
        normalized_bytes=50,
        table_bytes=48,
        sequence_length=8,
        stride=4,
        ttt=None,
        tilt=None,
        seconds=1.5,
        document_nats=np.array([math.log(2) * 120]),
    )
    figures = found.to_json()
    assert figures == {
        "bits_per_byte": pytest.approx(2.0),
        "bits_per_normalized_byte": pytest.approx(2.4),
        "bits_per_table_byte": pytest.approx(2.5),
        "nats_per_token": pytest.approx(3 * math.log(2)),
        "nats_per_byte": pytest.approx(2 * math.log(2)),
        "nats": math.log(2) * 120,
        "tokens": 40,
        "source_bytes": 60,
        "normalized_bytes": 50,
        "table_bytes": 48,
        "sequence_length": 8,
        "stride": 4,
        "ttt": None,
        "tilt": None,
        "seconds": 1.5,
    }
    assert json.loads(json.dumps(figures)) == figures
    assert found == replace(found, document_nats=np.zeros(3)), "scores of one text are compared by their sums"
    assert "document_nats" not in repr(found)


def test_the_byte_counts_are_those_of_the_text() -> None:
    found = score(Known(16), random_text(40), Scoring(sequence_length=8, stride=4))  # type: ignore[arg-type]
    assert (found.source_bytes, found.normalized_bytes, found.table_bytes) == (100, 200, 400)
    assert (found.sequence_length, found.stride) == (8, 4)
    assert found.seconds > 0
    figures = found.to_json()
    assert figures["bits_per_byte"] == pytest.approx(2 * figures["bits_per_normalized_byte"])
    assert figures["bits_per_byte"] == pytest.approx(4 * figures["bits_per_table_byte"])


# What the model sees


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_model_sees_each_window_and_where_documents_begin(precision: str) -> None:
    text = random_text(31)
    model = Known(16)
    score(model, text, Scoring(sequence_length=8, stride=3, batch_tokens=1).but(precision=precision))  # type: ignore[arg-type]
    plan = list(windows(0, 30, 8, 3))
    assert len(model.seen) == len(plan), "a row at a time"
    for (ids, starts, dtype), window in zip(model.seen, plan, strict=True):
        assert ids.tolist() == [text.tokens[window.start : window.end].tolist()], "the token to predict is not in it"
        assert torch.equal(starts, ids == BOS)
        assert dtype == getattr(torch, precision)
    assert any(starts.any() for _, starts, _ in model.seen)


@pytest.mark.parametrize(("batch_tokens", "rows"), [(1, 1), (8, 1), (15, 1), (16, 2), (64, 8)])
def test_a_batch_has_its_tokens(batch_tokens: int, rows: int) -> None:
    model = Known(16)
    score(model, random_text(200), Scoring(sequence_length=8, stride=8, batch_tokens=batch_tokens))  # type: ignore[arg-type]
    assert max(len(ids) for ids, _, _ in model.seen) == rows


def test_scores_are_those_of_one_prediction_at_a_time() -> None:
    model, text = tiny_model(), random_text(50)
    found = score(model, text, Scoring(sequence_length=12, stride=5, batch_tokens=36))
    expected = 0.0
    ids = torch.from_numpy(text.tokens.astype(np.int64))
    for window in windows(0, 49, 12, 5):
        for position in range(window.first, window.end):
            context = ids[None, window.start : position + 1]
            with torch.no_grad():
                logits = model(context, context == BOS)[0, -1]
            expected += F.cross_entropy(logits.double(), ids[position + 1]).item()
    assert found.nats == pytest.approx(expected, rel=1e-6)
    assert abs(found.nats - 49 * math.log(16)) > 1, "the model is not the uniform one"


@pytest.mark.long
@pytest.mark.parametrize("stride", [12, 5, 1])
def test_the_batch_size_does_not_change_the_sum(stride: int) -> None:
    model, text = tiny_model(), random_text(70)
    chosen = Scoring(sequence_length=12, stride=stride, precision="float64")
    sums = [score(model, text, chosen.but(batch_tokens=tokens)).nats for tokens in (1, 24, 36, 10_000)]
    assert sums == pytest.approx([sums[0]] * 4, rel=1e-12)


def test_a_longer_context_helps_a_model_that_copies() -> None:
    period = np.array([BOS, *range(1, 12)])
    text = held_out_text(np.tile(period, 8))
    chosen = Scoring(sequence_length=24, stride=4, batch_tokens=240)
    sliding = score(Copier(16), text, chosen)  # type: ignore[arg-type]
    plain = score(Copier(16), text, chosen.plain)  # type: ignore[arg-type]
    assert chosen.plain == Scoring(sequence_length=24, stride=24, batch_tokens=240)
    # A token can be copied once the whole period of 12 stands before it; what cannot be costs ln 16. Sliding windows
    # lack it for the first 12 of 95 predictions, plain ones for the first 12 of each of 4 windows.
    assert sliding.nats == pytest.approx(12 * math.log(16), rel=1e-5)
    assert plain.nats == pytest.approx(48 * math.log(16), rel=1e-5)
    assert sliding.bits_per_byte < plain.bits_per_byte


def test_progress_is_reported_to_the_end() -> None:
    reports: list[tuple[int, int]] = []
    score(
        Known(16),  # type: ignore[arg-type]
        random_text(100),
        Scoring(sequence_length=10, stride=5, batch_tokens=30),
        Recorder(lambda event: reports.append((event["done"], event["total"]))),
    )
    done = [scored for scored, _ in reports]
    assert len(done) > 3
    assert done == sorted(set(done))
    assert done[-1] == 99
    assert {total for _, total in reports} == {99}


def test_an_artifact_has_the_scores_that_its_settings_have() -> None:
    model, text, watched = tiny_model(), random_text(60), Recorder(lambda event: None)
    sgd, tilt = ChunkSGD(chunk_tokens=24, sgd=SGD(lr=0.1)), NGramTilt(order=2, threshold=0.5)
    for chosen, kinds in (
        (Scoring(sequence_length=12, stride=12), ["plain"]),
        (Scoring(sequence_length=12, stride=6), ["plain", "sliding"]),
        (Scoring(sequence_length=12, stride=12, ttt=sgd), ["plain", "adaptive"]),
        (Scoring(sequence_length=12, stride=6, ttt=sgd), ["plain", "sliding", "adaptive"]),
        (Scoring(sequence_length=12, stride=6, tilt=tilt), ["plain", "sliding", "adaptive"]),
    ):
        watched.phases.clear()
        watched.events.clear()
        found = score_kinds(model, text, chosen, progress=watched)
        assert list(found) == watched.phases == kinds
        said = [event["text"] for event in watched.events if event["event"] == "doing"]
        by = f", by {'n-gram tilt' if chosen.tilt else 'test-time training'}"
        assert said == [KINDS[one] + (by if one == "adaptive" else "") for one in kinds]
        alone = {"plain": chosen.plain, "sliding": chosen.but(ttt=None, tilt=None), "adaptive": chosen}
        assert {kind: one.nats for kind, one in found.items()} == {
            kind: score(model, text, alone[kind]).nats for kind in kinds
        }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stride": 13}, r"score\.stride must be from 1 to score\.sequence_length \(12\), not 13"),
        ({"ttt": ChunkSGD(chunk_tokens=11)}, r"score\.ttt\.chunk_tokens must be at least .* \(12\), not 11"),
        ({"ttt": DocumentLoRA(chunk_tokens=13)}, r"score\.ttt\.chunk_tokens must be at most .* \(12\)"),
    ],
)
def test_settings_that_do_not_fit_are_told_before_anything_is_scored(settings: dict[str, Any], message: str) -> None:
    watched = Recorder(lambda event: None)
    with pytest.raises(UserError, match=f"^{message}"):
        score_kinds(tiny_model(), random_text(60), Scoring(sequence_length=12, stride=6).but(settings), None, watched)
    assert not watched.phases


def test_a_user_s_scorer_has_a_score_of_its_own_beside_them() -> None:
    model, text, watched = tiny_model(), random_text(60), Recorder(lambda event: None)
    chosen, told = Scoring(sequence_length=12, stride=6), list[tuple[str, int]]()
    other = chosen.scorer(tiny_model(1), BOS)
    scores = score_kinds(
        model, text, chosen, other, watched, on_window=lambda kind, window, losses: told.append((kind, window.first))
    )
    assert list(scores) == ["plain", "sliding", "user"], "the last is the score"
    assert watched.phases == ["user", "plain", "sliding"], "a user's scorer may fail, and that is told first"
    assert scores["user"].nats == score(tiny_model(1), text, chosen).nats
    assert (scores["user"].sequence_length, scores["user"].stride) == (12, 12), "the settings of its sums"
    firsts = [window.first for window in windows(0, 59, 12, 6)]
    expected = [("plain", first) for first in range(0, 59, 12)]
    expected += [(kind, first) for kind in ("sliding", "user") for first in firsts]
    assert sorted(told) == sorted(expected)


def test_scoring_leaves_the_model_as_it_was() -> None:
    model = tiny_model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    text = random_text(60)
    first = score(model, text, Scoring(sequence_length=12, stride=6))
    again = score(model, text, Scoring(sequence_length=12, stride=6))
    assert first.nats == again.nats
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None


def test_half_precision_is_close() -> None:
    model, text = tiny_model(), random_text(150)
    single = score(model, text, Scoring(sequence_length=12, stride=6))
    half = score(model, text, Scoring(sequence_length=12, stride=6, precision="bfloat16"))
    assert half.nats == pytest.approx(single.nats, rel=2e-2)
    assert half.nats != single.nats


def test_double_precision_is_used_throughout() -> None:
    model, text = tiny_model(), random_text(150)
    chosen = Scoring(sequence_length=12, stride=6, precision="float64")
    found = score(model, text, chosen).nats
    assert found == pytest.approx(score(model.double(), text, chosen).nats, rel=1e-12)
    single = score(tiny_model(), text, chosen.but(precision="float32")).nats
    assert found == pytest.approx(single, rel=1e-5)
    assert found != pytest.approx(single, rel=1e-12)


@pytest.mark.parametrize(("length", "scored"), [(16, 8192), (8192, 8192), (8200, 8200)])
def test_threads_are_chosen_by_plain_scores_of_a_first_stretch(
    length: int, scored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, before = Known(16), torch.get_num_threads()

    def try_one(counts: Sequence[int], work: Any) -> int:
        work(before)
        return before

    monkeypatch.setattr(sys.modules["caddie.score.score"], "quickest", try_one)
    use_quickest_threads(model, random_text(10_000), Scoring(sequence_length=length, stride=4, ttt=ChunkSGD()))  # type: ignore[arg-type]
    assert torch.get_num_threads() == before
    assert sum(ids.numel() for ids, _, _ in model.seen) == scored


def test_on_a_gpu_no_threads_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["caddie.score.score"], "quickest", lambda counts, work: pytest.fail("tried"))
    use_quickest_threads(Known(16).to("meta"), random_text(100), Scoring(sequence_length=16))  # type: ignore[arg-type]


def test_all_processes_take_the_fewest_threads_of_any(monkeypatch: pytest.MonkeyPatch) -> None:
    class BesideOneThread(Ranks):
        def maximum(self, *values: float) -> list[float]:
            return [max(value, -1) for value in values]

    taken: list[int] = []
    monkeypatch.setattr(sys.modules["caddie.score.score"], "quickest", lambda counts, work: 2)
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    use_quickest_threads(Known(16), random_text(100), Scoring(sequence_length=16), BesideOneThread())  # type: ignore[arg-type]
    use_quickest_threads(Known(16), random_text(100), Scoring(sequence_length=16))  # type: ignore[arg-type]
    assert taken == [1, 2]


@pytest.mark.usefixtures("two_threads")  # which a test that fails has to give back as well
def test_each_number_of_threads_is_tried_and_the_quickest_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def try_all(counts: Sequence[int], work: Any) -> int:
        for count in (2, 1, 3):
            work(count)
            tried.append(torch.get_num_threads())
        return 2

    monkeypatch.setattr(sys.modules["caddie.score.score"], "quickest", try_all)
    use_quickest_threads(Known(16), random_text(100), Scoring(sequence_length=16))  # type: ignore[arg-type]
    assert (tried, torch.get_num_threads()) == ([2, 1, 3], 2)


def test_the_seconds_are_those_that_scoring_took() -> None:
    begin = time.perf_counter()
    seconds = score(Slow(16), random_text(100), Scoring(sequence_length=16, stride=16)).seconds  # type: ignore[arg-type]
    assert 0.002 <= seconds <= time.perf_counter() - begin


def test_on_a_gpu_one_batch_of_all_rows_runs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = Known(16).to("meta"), []

    def note(scorer: Scorer, tokens: np.ndarray, layout: Layout, rows: int, add: Any, *rest: Any, **more: Any) -> None:
        asked.append((rows, *rest[:2]))
        add(Window(0, 0, layout.predictions), np.zeros(layout.predictions))

    monkeypatch.setattr(sys.modules["caddie.score.score"], "run", note)
    score(model, random_text(100), Scoring(sequence_length=16, stride=16, batch_tokens=1600))  # type: ignore[arg-type]
    assert asked == [(100, torch.device("meta"), 1)]


@pytest.mark.parametrize(
    ("length", "batch_tokens", "threads", "stateless", "wanted"),
    [
        (1024, 65_536, 1, True, (4, 1)),  # 4,096 tokens fit in the cache
        (1024, 65_536, 2, True, (4, 2)),
        (241, 65_536, 1, True, (16, 1)),  # 17 windows would be 4,097
        (1024, 4096, 2, True, (2, 2)),
        (1024, 3072, 2, True, (1, 2)),
        (1024, 3072, 2, False, (3, 1)),
        (1024, 1024, 2, True, (1, 1)),
        (5000, 65_536, 2, True, (1, 2)),
        (5000, 9999, 2, True, (1, 1)),
    ],
)
def test_rows_and_workers_on_a_cpu(
    length: int,
    batch_tokens: int,
    threads: int,
    stateless: bool,
    wanted: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    chosen = Scoring(sequence_length=length, batch_tokens=batch_tokens)
    assert rows_and_workers(stateless, chosen, torch.device("cpu")) == wanted
    rows = batch_tokens // length
    assert rows_and_workers(stateless, chosen, torch.device("meta")) == (rows, 1)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Slow(Known):
    """Notes which threads ask it, and with how many of PyTorch's; each gives the other time to come."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary)
        self.asked_by: set[tuple[int, int]] = set()

    def answers(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        self.asked_by.add((threading.get_ident(), torch.get_num_threads()))
        time.sleep(0.002)
        return super().answers(ids, dtype)


def test_on_a_cpu_each_thread_runs_a_batch(monkeypatch: pytest.MonkeyPatch, two_threads: None) -> None:
    monkeypatch.setattr(sys.modules["caddie.score.score"], "CACHED_TOKENS", 24)
    reports: list[int] = []
    chosen, slow = Scoring(sequence_length=12, stride=5, batch_tokens=240, precision="float64"), Slow(16)
    score(slow, random_text(400), chosen, Recorder(lambda event: reports.append(event["done"])))  # type: ignore[arg-type]
    assert [threads for _, threads in slow.asked_by] == [1, 1], "two workers, each with one of the two threads"
    assert max(len(ids) for ids, _, _ in slow.seen) == 2, "batches of 24 tokens"
    assert reports == sorted(reports)
    assert torch.get_num_threads() == 2

    model, text = tiny_model(), random_text(400)
    together = score(model, text, chosen).nats
    torch.set_num_threads(1)
    assert together == pytest.approx(score(model, text, chosen).nats, rel=1e-12)


def test_a_single_worker_is_the_thread_itself() -> None:
    slow = Slow(16)
    score(slow, random_text(60), Scoring(sequence_length=12, stride=12, batch_tokens=12))  # type: ignore[arg-type]
    assert slow.asked_by == {(threading.get_ident(), torch.get_num_threads())}


def test_few_windows_at_once_are_shared_by_all_threads(two_threads: None) -> None:
    slow = Slow(16)
    score(slow, random_text(400), Scoring(sequence_length=12, stride=5, batch_tokens=240))  # type: ignore[arg-type]
    assert [threads for _, threads in slow.asked_by] == [1, 1]
    assert max(len(ids) for ids, _, _ in slow.seen) == 10, "the cache would hold all 20"


def test_a_window_that_is_longer_than_the_cache_is_a_batch() -> None:
    model = Known(16)
    score(model, random_text(4200), Scoring(sequence_length=4100, stride=4100))  # type: ignore[arg-type]
    assert {len(ids) for ids, _, _ in model.seen} == {1}


def test_a_batch_that_fails_fails_the_score(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, set_threads = list[int](), torch.set_num_threads

    def note(threads: int) -> None:
        numbers.append(threads)
        set_threads(threads)

    monkeypatch.setattr(torch, "set_num_threads", note)
    before = threading.active_count()

    class Broken(Known):
        def answers(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
            if BOS in ids[:, 5:]:
                raise RuntimeError("broken")
            return super().answers(ids, dtype)

    with pytest.raises(RuntimeError, match="broken"):
        score(Broken(16), random_text(100), Scoring(sequence_length=12, stride=12))  # type: ignore[arg-type]
    assert numbers[-1] == 2, "set back, also where the number of a thread is that of the process"
    assert threading.active_count() == before, "its workers have ended"


def test_batches_that_wait_are_left_when_scoring_is_interrupted(two_threads: None) -> None:
    def interrupt(window: Window, losses: np.ndarray) -> None:
        raise KeyboardInterrupt

    slow, chosen = Slow(16), Scoring(sequence_length=12, stride=12, batch_tokens=24)
    with pytest.raises(KeyboardInterrupt):
        score(slow, random_text(700), chosen, on_window=interrupt)  # type: ignore[arg-type]
    assert len(slow.seen) < 16


@pytest.mark.parametrize("ttt", [None, ChunkSGD(chunk_tokens=24), DocumentLoRA(rank=1, chunk_tokens=6)])
def test_only_what_has_no_state_is_asked_several_things_at_once(ttt: Any) -> None:
    chosen = Scoring(sequence_length=12, stride=6, ttt=ttt)
    assert chosen.scorer(tiny_model(), BOS).stateless == (ttt is None)


# Settings


def test_the_defaults_that_scores_are_compared_by_stay() -> None:
    assert json.dumps(Scoring(ttt=ChunkSGD(), tilt=NGramTilt()).to_json()) == (
        '{"kind": "Scoring", "sequence_length": 1024, "stride": 64, "batch_tokens": 65536, "precision": "float32",'
        ' "ttt": {"kind": "ChunkSGD", "chunk_tokens": 32768, "sgd": {"kind": "SGD", "lr": 0.005, "momentum": 0.9,'
        ' "clip": 1.0, "rows": 32, "epochs": 3}},'
        ' "tilt": {"kind": "NGramTilt", "order": 16, "threshold": 0.8, "boost": 2.625}}'
    )
    assert json.dumps(DocumentLoRA(phases=GlobalSGD()).to_json()) == (
        '{"kind": "DocumentLoRA", "rank": 80, "alpha": 144.0, "lr": 0.0001, "beta1": 0.0, "beta2": 0.99, "eps": 1e-10,'
        ' "weight_decay": 0.5, "chunk_tokens": 48, "short_chunks": [], "documents": 64,'
        ' "targets": ["query", "key", "value", "attention", "mlp", "head"], "warm_start": true,'
        ' "phases": {"kind": "GlobalSGD", "documents": 2500, "phases": 3, "chunk_tokens": 32768,'
        ' "sgd": {"kind": "SGD", "lr": 0.001, "momentum": 0.9, "clip": 1.0, "rows": 32, "epochs": 1}}}'
    )
    assert (Scoring().ttt, Scoring().tilt) == (None, None)


def test_plain_scoring_neither_slides_nor_learns() -> None:
    chosen = Scoring(sequence_length=32, stride=8, ttt=DocumentLoRA(), precision="float64")
    assert chosen.plain == Scoring(sequence_length=32, stride=32, precision="float64")
    assert chosen.plain.plain == chosen.plain


@pytest.mark.parametrize(
    "ttt",
    [
        None,
        ChunkSGD(),
        ChunkSGD(chunk_tokens=64, sgd=SGD(lr=0.1, epochs=1)),
        DocumentLoRA(),
        DocumentLoRA(rank=8, targets=("query", "head"), phases=GlobalSGD(documents=10)),
    ],
)
def test_settings_go_through_json(ttt: Any) -> None:
    chosen = Scoring(ttt=ttt)
    back = Scoring.from_json(json.loads(json.dumps(chosen.to_json())))
    assert back == chosen
    assert hash(back) == hash(chosen)


@pytest.mark.parametrize(
    ("typed", "ttt"),
    [
        ("ChunkSGD", ChunkSGD()),
        (
            "ChunkSGD(chunk_tokens=4096,sgd=SGD(lr=0.002,epochs=1))",
            ChunkSGD(chunk_tokens=4096, sgd=SGD(lr=0.002, epochs=1)),
        ),
        ("DocumentLoRA(rank=8,phases=GlobalSGD())", DocumentLoRA(rank=8, phases=GlobalSGD())),
        (
            "DocumentLoRA(targets=['query','head'],warm_start=false)",
            DocumentLoRA(targets=("query", "head"), warm_start=False),
        ),
        ("none", None),
    ],
)
def test_an_adaptation_is_chosen_on_the_command_line(typed: str, ttt: Any) -> None:
    chosen = Scoring().but(dict([parse_assignment(f"ttt={typed}")]))
    assert chosen.ttt == ttt


def test_the_score_names_the_adaptation_it_was_made_with() -> None:
    text, chosen = random_text(40), Scoring(sequence_length=8, stride=8, ttt=ChunkSGD(chunk_tokens=16))
    assert score(tiny_model(), text, chosen).ttt == "ChunkSGD(chunk_tokens=16)"
    tilted = chosen.but(tilt=NGramTilt(order=2))
    found = score(tiny_model(), text, tilted)
    assert (found.ttt, found.tilt) == ("ChunkSGD(chunk_tokens=16)", "NGramTilt(order=2)")
    found = score(tiny_model(), text, tilted, scorer=chosen.plain.scorer(tiny_model(), BOS))
    assert (found.ttt, found.tilt) == (None, None)


@pytest.mark.parametrize("cls", [Scoring, SGD, ChunkSGD, GlobalSGD, DocumentLoRA])
def test_every_setting_is_described(cls: type[Config]) -> None:
    assert descriptions(cls).keys() >= field_types(cls).keys()
