"""Context of a forward: shifts, segments, earlier positions, and their state in a cache."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from parity import facts, tensors
from torch import Tensor

from caddie.config.schedules import PiecewiseConstant
from caddie.model import Cache, PlainRoPE
from caddie.model.context import Context
from caddie.ops.attention import attention

quick = settings(derandomize=True, deadline=None, max_examples=50)
LENGTH = 12


def test_previous_is_masked_where_documents_begin() -> None:
    ids = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])
    starts = torch.tensor([[True, False, True, False], [False, False, False, True]])
    context = Context(ids, starts, torch.float32)
    assert context.previous(ids).tolist() == [[0, 5, 0, 7], [0, 1, 2, 0]]
    stream = torch.stack([ids, 10 * ids], dim=-1).float()
    assert context.previous(stream).tolist() == [
        [[0, 0], [5, 50], [0, 0], [7, 70]],
        [[0, 0], [1, 10], [2, 20], [0, 0]],
    ]
    assert Context(ids, None, torch.float32).previous(ids).tolist() == [[0, 5, 6, 7], [0, 1, 2, 3]]


def segments(starts: list[list[int]], longest: int | None = None) -> list[list[int]]:
    """The numbers of segments that attention is told; `starts` has 1 where a document begins."""
    begins = torch.tensor(starts, dtype=torch.bool)
    found = Context(torch.zeros_like(begins, dtype=torch.long), begins, torch.float32).visible(
        "document", longest, None
    )
    assert found.segments is not None
    numbers: list[list[int]] = found.segments.tolist()
    return numbers


def test_documents_are_numbered_within_their_row_and_cut() -> None:
    assert segments([[1, 0, 1, 0], [0, 0, 0, 1]]) == [[0, 0, 1, 1], [-1, -1, -1, 0]]
    # the third token of a document of five is in its first piece of three; a row that goes on is of age zero
    assert segments([[0, 0, 0, 0, 1, 0, 0, 0, 0]], longest=3) == [[0, 0, 0, 1, 2, 2, 2, 3, 3]]
    assert segments([[0, 1, 1, 0, 0, 0, 0, 0, 0]], longest=2) == [[0, 1, 2, 2, 3, 3, 4, 4, 5]]
    ids = torch.zeros(1, 4, dtype=torch.long)
    starts = torch.tensor([[False, True, False, False]])
    rows = Context(ids, starts, torch.float32).visible("row", 2, None)
    assert (rows.segments, rows.longest) == (None, ids.shape[1]), "documents are cut, rows are not"
    assert Context(ids, None, torch.float32).visible("document", None, None).segments is None


@quick
@given(
    begins=arrays(np.bool_, st.tuples(st.integers(1, 4), st.integers(1, 12))), longest=st.none() | st.integers(1, 13)
)
def test_there_is_room_for_all_documents_that_were_counted(begins: np.ndarray, longest: int | None) -> None:
    """However they are cut; where nobody counted, no room is made."""
    starts, ids = torch.from_numpy(begins), torch.zeros(begins.shape, dtype=torch.long)
    counted = int(begins.sum()) + len(begins)
    visible = Context(ids, starts, torch.float32, segments=counted).visible("document", longest, None)
    bounds = visible.bounds(len(ids), torch.device("cpu"))  # which raises where there is too little
    assert len(bounds) == visible.room + 1 == counted + (begins.size // longest if longest else 0) + 1
    assert Context(ids, starts, torch.float32).visible("document", longest, None).room == 0


def test_the_window_is_that_of_the_moment() -> None:
    ids = torch.zeros(1, 9, dtype=torch.long)
    window = PiecewiseConstant(values=(2, 4), begins=(0.5,))
    for progress, width in ((0.0, 2), (0.49, 2), (0.5, 4), (1.0, 4)):
        context = Context(ids, None, torch.float32, progress=progress)
        assert context.visible("row", None, window).window == width
        assert context.visible("row", None, window) is context.visible("row", None, width)
    assert Context(ids, None, torch.float32).visible("row", None, None).window is None


def through(
    ids: Tensor, starts: Tensor | None, cuts: Sequence[int], longest: int | None, window: int | None
) -> list[Tensor]:
    """Return the results of every call of a context, piece by piece with a cache."""
    cache, found = Cache(), []
    q, k, v = torch.randn(3, 2, 1, LENGTH, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for begin, end in pairwise([0, *cuts, LENGTH]):
        piece = ids[:, begin:end]
        context = Context(piece, None if starts is None else starts[:, begin:end], torch.float64, cache)
        assert cache.length == end
        twice = context.previous(context.previous(piece))
        visible = context.visible("document", longest, window)
        y = context.attention(*(x[:, :, begin:end] for x in (q, k, v)), visible)
        cosine, sine = (table.expand(2, -1, -1) for table in context.rope(PlainRoPE().as_text(), 4))
        found.append((twice, y.transpose(1, 2), cosine, sine, context.previous(y[:, 0])))
    return [torch.cat(pieces, 1) for pieces in zip(*found, strict=True)]


@pytest.mark.long
@quick
@given(
    cuts=st.sets(st.integers(1, LENGTH - 1)).map(sorted),
    begins=st.none() | st.lists(st.sets(st.integers(0, LENGTH - 1)), min_size=2, max_size=2),
    longest=st.none() | st.integers(1, 5),
    window=st.none() | st.integers(1, 5),
)
def test_pieces_of_any_size_are_the_whole(
    cuts: list[int], begins: list[set[int]] | None, longest: int | None, window: int | None
) -> None:
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) + 1
    starts = None if begins is None else torch.tensor([[at in row for at in range(LENGTH)] for row in begins])
    whole = through(ids, starts, [], longest, window)
    for found, expected in zip(through(ids, starts, cuts, longest, window), whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_without_a_cache_attention_is_that_of_these_positions() -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 4, generator=torch.Generator().manual_seed(0))
    context = Context(torch.zeros(1, 6, dtype=torch.long), None, torch.float32)
    visible = context.visible("row", None, 3)
    assert torch.equal(context.attention(q, k, v, visible), attention(q, k, v, visible))


def test_pieces_of_documents_are_those_of_the_script(frontier: Path) -> None:
    config, found = facts(frontier / "config")["growth"], facts(frontier / "context_growth")["segments"]
    tokens = tensors(frontier / "context_growth_tokens")["tokens"].long()[None]
    assert len(found) == len(config["row_lengths"])
    for length in config["row_lengths"]:
        numbers = Context(tokens, tokens == 1, torch.float32)._numbered(tokens == 1, length)[0]
        begins = [0, *(torch.nonzero(numbers.diff())[:, 0] + 1).tolist()]
        expected = found[str(length)]
        assert begins == [begin for begin in dict.fromkeys(expected["boundaries"]) if begin < tokens.shape[1]]
        assert int(torch.bincount(numbers - numbers.min()).max()) == expected["longest"]


def test_pieces_may_grow_with_the_run() -> None:
    ids = torch.zeros(1, 8, dtype=torch.long)
    starts = torch.tensor([[True, *[False] * 7]])
    longest = PiecewiseConstant(values=(2, 4), begins=(0.5,))
    for progress, length in ((0.0, 2), (0.49, 2), (0.5, 4), (1.0, 4)):
        grown, fixed = (
            Context(ids, starts, torch.float32, progress=progress).visible("document", chosen, None)
            for chosen in (longest, length)
        )
        assert grown.segments is not None
        assert fixed.segments is not None
        assert torch.equal(grown.segments, fixed.segments)
