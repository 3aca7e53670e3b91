"""Scoring: every prediction once, with its context, and figures that follow from one sum."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from caddie.errors import UserError
from caddie.model import GPT, Model, build
from caddie.scoring import Score, Scoring, Text, score, windows
from caddie.tokenizers import ByteTokenizer

quick = settings(derandomize=True, deadline=None, max_examples=150)

BOS = 0
TINY = GPT(vocabulary=16, width=16, depth=2).but(
    {"block.attention.heads": 2, "block.attention.key_value_heads": 1, "block.mlp.hidden": 16}
)


def text_of(tokens: np.ndarray, source_bytes: int = 100) -> Text:
    return Text(tokens.astype(np.uint16), BOS, source_bytes, 2 * source_bytes, 4 * source_bytes)


def random_text(tokens: int, vocabulary: int = 16, seed: int = 0) -> Text:
    ids = np.random.default_rng(seed).integers(1, vocabulary, tokens)
    ids[::23] = BOS
    return text_of(ids)


def tiny_model(seed: int = 0) -> Model:
    """A model whose outputs depend on all of its context, not only the untrained one's logits near zero."""
    model = build(TINY, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model


class Known(nn.Module):
    """A model whose log-odds are those of a table, for tests whose answer is known by hand."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(vocabulary))
        self.seen: list[tuple[Tensor, Tensor, torch.dtype]] = []

    def forward(self, ids: Tensor, starts: Tensor, dtype: torch.dtype) -> Tensor:
        self.seen.append((ids.clone(), starts.clone(), dtype))
        return self.table.to(dtype).expand(*ids.shape, -1)


class Copier(Known):
    """Sure that what followed the last occurrence of the current token in its context follows again."""

    def forward(self, ids: Tensor, starts: Tensor, dtype: torch.dtype) -> Tensor:
        logits = torch.zeros(*ids.shape, len(self.table), dtype=dtype)
        for row, position in np.ndindex(*ids.shape):
            before = (ids[row, :position] == ids[row, position]).nonzero()
            if len(before):
                logits[row, position, ids[row, before[-1] + 1]] = 30.0
        return logits


# Windows


def test_windows_by_hand() -> None:
    assert windows(10, 4, 2) == [(0, 0, 4), (2, 4, 6), (4, 6, 8), (6, 8, 10)]
    assert windows(9, 4, 2) == [(0, 0, 4), (2, 4, 6), (4, 6, 8), (6, 8, 9)]
    assert windows(8, 4, 4) == [(0, 0, 4), (4, 4, 8)]
    assert windows(9, 4, 4) == [(0, 0, 4), (4, 4, 8), (8, 8, 9)]
    assert windows(4, 4, 1) == [(0, 0, 4)]
    assert windows(6, 4, 1) == [(0, 0, 4), (1, 4, 5), (2, 5, 6)]
    assert windows(1, 1, 1) == [(0, 0, 1)]


@quick
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 300))
def test_every_prediction_is_scored_exactly_once_with_its_context(length: int, stride: int, more: int) -> None:
    stride = min(stride, length)
    predictions = length + more
    plan = windows(predictions, length, stride)
    scored = [position for window in plan for position in range(window.first, window.end)]
    assert scored == list(range(predictions)), "each once, in order"
    for window in plan:
        assert 0 <= window.start <= window.first < window.end <= predictions
        assert window.end - window.start <= length
        if window.start:
            assert window.first - window.start >= length - stride
    assert len(plan) == 1 + math.ceil(more / stride), "no more windows than needed"


@pytest.mark.parametrize(("length", "stride"), [(4, 0), (4, 5), (4, -1), (1, 2)])
def test_a_stride_beyond_the_window_is_an_error(length: int, stride: int) -> None:
    with pytest.raises(UserError, match=r"^score\.stride must be from 1 to"):
        windows(100, length, stride)


@pytest.mark.parametrize("predictions", [0, 1, 31])
def test_a_text_shorter_than_a_window_says_what_to_do(predictions: int) -> None:
    with pytest.raises(UserError, match=f"score.sequence_length={max(1, predictions)}$"):
        windows(predictions, 32, 8)


def test_windows_agree_with_the_public_scripts(parity: Path) -> None:
    """All of L3's lists are ours, but that we refuse a text shorter than one window where it scores nothing.

    S001 and its like score the same positions from the same windows, then the tail again and again; leaving out what
    was scored before gives our list. TERN leaves the tail out; ours begins with its list.
    """
    cases = json.loads((parity / "components" / "evaluation" / "sliding_windows.json").read_text())["cases"]
    compared = 0
    for case in cases["L3"]:
        expected = [tuple(window) for window in case["windows"]]
        if not expected:
            with pytest.raises(UserError, match="too few"):
                windows(case["predictable_tokens"], case["window"], case["stride"])
            continue
        assert windows(case["predictable_tokens"], case["window"], case["stride"]) == expected
        compared += 1
    assert compared >= 10
    for name in ("S001", "S002", "ARG"):
        for case in cases[name]:
            if case["predictable_tokens"] < case["window"]:
                continue
            new, done = [], 0
            for start, first, end in case["windows"]:
                if end > done:
                    new.append((start, max(first, done), end))
                    done = end
            assert windows(case["predictable_tokens"], case["window"], case["stride"]) == new
    for case in cases["TERN"]:
        if case["windows"]:
            plan = windows(case["predictable_tokens"], case["window"], case["stride"])
            expected = [tuple(window) for window in case["windows"]]
            assert plan[: len(expected)] == expected
            assert len(plan) - len(expected) <= 1


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
    text = text_of(np.array([0, 1, 1, 2, 0, 3, 0]), source_bytes=5)
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


def test_the_figures_follow_from_one_sum() -> None:
    found = Score(
        nats=math.log(2) * 120,
        tokens=40,
        source_bytes=60,
        normalized_bytes=50,
        table_bytes=48,
        sequence_length=8,
        stride=4,
        seconds=1.5,
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
        "seconds": 1.5,
    }
    assert json.loads(json.dumps(figures)) == figures


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
    plan = windows(30, 8, 3)
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
    model, text = tiny_model(), random_text(60)
    found = score(model, text, Scoring(sequence_length=12, stride=5, batch_tokens=36))
    expected = 0.0
    ids = torch.from_numpy(text.tokens.astype(np.int64))
    for window in windows(59, 12, 5):
        for position in range(window.first, window.end):
            context = ids[None, window.start : position + 1]
            with torch.no_grad():
                logits = model(context, context == BOS)[0, -1]
            expected += F.cross_entropy(logits.double(), ids[position + 1]).item()
    assert found.nats == pytest.approx(expected, rel=1e-6)
    assert abs(found.nats - 59 * math.log(16)) > 1, "the model is not the uniform one"


@pytest.mark.parametrize("stride", [12, 5, 1])
def test_the_batch_size_does_not_change_the_sum(stride: int) -> None:
    model, text = tiny_model(), random_text(150)
    sums = [
        score(model, text, Scoring(sequence_length=12, stride=stride, batch_tokens=batch_tokens)).nats
        for batch_tokens in (1, 24, 36, 10_000)
    ]
    assert sums == pytest.approx([sums[0]] * 4, rel=1e-9)


def test_a_longer_context_helps_a_model_that_copies() -> None:
    period = np.array([BOS, *range(1, 12)])
    text = text_of(np.tile(period, 8))
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
        lambda done, total: reports.append((done, total)),
    )
    done = [scored for scored, _ in reports]
    assert len(done) > 3
    assert done == sorted(set(done))
    assert done[-1] == 99
    assert {total for _, total in reports} == {99}


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
