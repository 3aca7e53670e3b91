"""The order in which loaders read shards."""

import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import facts, matches, tensors

from caddie.data import loaders
from caddie.data.loaders import (
    Batch,
    CoprimeStride,
    Loader,
    PackedDocuments,
    SequentialStream,
    ShuffledSequences,
    Stream,
    TrainingData,
    hold_out,
    prefetched,
)
from caddie.errors import UserError
from caddie.model.context import Context

BOS = 1
LOADERS = [SequentialStream(), ShuffledSequences(), CoprimeStride(), PackedDocuments()]
EPOCHS = [ShuffledSequences(), CoprimeStride()]


def distinct(*sizes: int) -> list[np.ndarray]:
    """Shards in which every token but the leading BOS is different, so that a token names its place."""
    tokens = np.arange(10, 10 + sum(sizes), dtype=np.uint16)
    shards = np.split(tokens, np.cumsum(sizes)[:-1])
    for shard in shards:
        shard[0] = BOS
    return shards


def build(loader: Loader, shards: list[np.ndarray], tokens: int, length: int, seed: int = 0) -> Stream:
    return loader.build(shards, tokens=tokens, sequence_length=length, seed=seed, bos=BOS)


@pytest.fixture(scope="module")
def reference(parity: Path) -> tuple[dict[str, np.ndarray], dict[str, dict[str, int]]]:
    folder = parity / "components" / "loaders"
    arrays = {name: tensor.numpy() for name, tensor in tensors(folder / "loaders").items()}
    return arrays, facts(folder / "info")


def shards_of(arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    numbers = sorted(int(match[1]) for match in matches(arrays, r"shard(\d+)"))
    return [arrays[f"shard{number}"].astype(np.uint16) for number in numbers]


def check_parity(stream: Any, arrays: dict[str, np.ndarray], case: str, count: int, world: int, rank: int) -> None:
    """Compare the batches that a rank reads with those of the public scripts."""
    for number in range(count):
        batch = stream.micro_batch(number * world + rank)
        np.testing.assert_array_equal(batch.inputs, arrays[f"{case}.batch{number}.x"])
        np.testing.assert_array_equal(batch.targets, arrays[f"{case}.batch{number}.y"])


def test_sequential_parity(reference) -> None:  # type: ignore[no-untyped-def]
    arrays = reference[0]
    for match in matches(reference[1], r"sequential\.world(\d+)\.rank(\d+)\..+"):
        case, world, rank = match[0], int(match[1]), int(match[2])
        info = reference[1][case]
        tokens = info["global_tokens"] // (world * info["accumulation"])
        stream = build(SequentialStream(begin="first shard"), shards_of(arrays), tokens, info["row_length"])
        check_parity(stream, arrays, case, info["batches"], world, rank)


def test_packed_parity(reference) -> None:  # type: ignore[no-untyped-def]
    arrays = reference[0]
    for match in matches(reference[1], r"packed\.world(\d+)\.rank(\d+)"):
        case, world, rank = match[0], int(match[1]), int(match[2])
        info = reference[1][case]
        tokens = info["global_tokens"] // (world * info["accumulation"])
        stream = build(PackedDocuments(group=world, begin="first shard"), shards_of(arrays), tokens, info["cut_length"])
        check_parity(stream, arrays, case, info["batches"], world, rank)
        for number in range(info["batches"]):
            batch = stream.micro_batch(number * world + rank)
            ends = np.append(segments(batch.inputs, info["cut_length"]), tokens)
            assert ends.tolist() == sorted(set(arrays[f"{case}.batch{number}.boundaries"].tolist()))
            assert int(np.diff(ends).max()) == info["longest"][number]


def segments(inputs: np.ndarray, longest: int) -> list[int]:
    """Return the starts of segments of an attention with the scope `document`, in one row of inputs."""
    ids = torch.from_numpy(inputs).reshape(1, -1)
    numbers = Context(ids, ids == BOS, torch.float32).visible("document", longest, None).segments
    assert numbers is not None
    return [0, *(1 + torch.nonzero(numbers[0].diff()).flatten()).tolist()]


def test_segments_by_hand() -> None:
    inputs = np.array([9, 9, 9, BOS, 9, BOS, BOS, 9, 9, 9, 9])
    assert segments(inputs, 2) == [0, 2, 3, 5, 6, 8, 10]
    assert segments(inputs, 100) == [0, 3, 5, 6]
    assert segments(inputs[:1], 100) == [0]


sizes = st.lists(st.integers(2, 90), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(sizes=sizes, length=st.integers(1, 12), seed=st.integers(0, 9), loader=st.sampled_from(EPOCHS))
def test_each_row_of_an_epoch_is_read_once(sizes: list[int], length: int, seed: int, loader: Loader) -> None:
    shards = distinct(*sizes)
    if max(sizes) <= length:
        with pytest.raises(UserError, match="use more text"):
            build(loader, shards, length, length, seed)
        return
    stream = build(loader, shards, length, length, seed)
    rows = sum(max(size // length - 1, 1) for size in sizes if size > length)
    for epoch in range(2):
        batches = [stream.micro_batch(epoch * rows + row) for row in range(rows)]
        for batch in batches:
            assert (batch.targets[:, :-1] == batch.inputs[:, 1:]).all()
        for tokens in ([batch.inputs for batch in batches], [batch.targets for batch in batches]):
            found, counts = np.unique(np.concatenate(tokens), return_counts=True)
            assert (counts[found != BOS] == 1).all()
        first = np.array([batch.targets[0, 0] for batch in batches])
        for shard, size in zip(shards, sizes, strict=True):
            assert np.isin(first, shard).sum() == (max(size // length - 1, 1) if size > length else 0)


@settings(max_examples=30, deadline=None)
@given(size=st.integers(40, 200), rows=st.integers(1, 4), loader=st.sampled_from(LOADERS), index=st.integers(0, 40))
def test_random_access_equals_one_pass(size: int, rows: int, loader: Loader, index: int) -> None:
    shards = distinct(size, 50)
    one_pass = build(loader, shards, rows * 8, 8, 3)
    batches = [one_pass.micro_batch(number) for number in range(index + 1)]
    jumped = build(loader, shards, rows * 8, 8, 3).micro_batch(index)
    np.testing.assert_array_equal(jumped.inputs, batches[index].inputs)
    np.testing.assert_array_equal(jumped.targets, batches[index].targets)
    assert jumped.inputs.dtype == jumped.targets.dtype == np.int64


@pytest.mark.parametrize(
    ("loader", "firsts"),
    [
        (SequentialStream(), [65, 69, 74, 78, 83, 11, 16, 20, 25, 29, 34, 38, 43, 47, 52, 56]),
        (SequentialStream(begin="first shard"), [11, 15, 20, 24, 29, 1, 38, 42, 47, 51, 56, 60, 65, 69, 74, 78]),
        (ShuffledSequences(), [62, 66, 54, 42, 18, 78, 22, 26, 70, 14, 58, 38, 50, 46, 22, 52]),
        (CoprimeStride(), [50, 42, 70, 62, 14, 78, 18, 22, 54, 26, 46, 38, 66, 58, 14, 72]),
        (PackedDocuments(begin="first shard"), [11, 20, 38, 47, 56, 65, 78, 11]),
        (PackedDocuments(group=2), [56, 65, 11, 20, 38, 47, 56, 65]),
        (PackedDocuments(group=2, begin="first shard"), [11, 20, 38, 47, 56, 65, 11, 20]),
    ],
)
def test_a_seed_gives_the_order_that_it_gave_runs_before(loader: Loader, firsts: list[int]) -> None:
    """First targets of rows of four, two to a micro-batch, over the end of an epoch; of documents one row of eight."""
    stream = build(loader, distinct(23, 4, 40, 9), 8, 4, seed=3)
    batches = [stream.micro_batch(index) for index in range(8)]
    assert [first for batch in batches for first in batch.targets[:, 0].tolist()] == firsts


def first_rows(loader: Loader, seed: int, epoch: int = 0) -> list[list[int]]:
    stream = build(loader, distinct(330, 330), 10, 10, seed)
    return [stream.micro_batch(epoch * 64 + index).inputs.ravel().tolist() for index in range(64)]


@pytest.mark.parametrize("loader", EPOCHS, ids=lambda loader: type(loader).__name__)
def test_the_order_follows_seed_and_epoch(loader: Loader) -> None:
    assert first_rows(loader, 0) == first_rows(loader, 0)
    assert first_rows(loader, 0) != first_rows(loader, 1)
    assert first_rows(loader, 0) != first_rows(loader, 0, epoch=1)
    phases = {row[0] % 10 for epoch in range(4) for row in first_rows(loader, 0, epoch)}
    assert len(phases) > 2


def test_a_stride_walks_its_shard() -> None:
    stream = build(CoprimeStride(), distinct(330), 10, 10, 5)
    begins = np.array([int(stream.micro_batch(index).inputs[0, 0]) for index in range(32)])
    blocks = (begins - begins.min()) // 10
    assert len(set((np.diff(blocks) % 32).tolist())) == 1


def test_shards_are_mixed() -> None:
    for loader in EPOCHS:
        rows = first_rows(loader, 0)
        origins = [row[5] < 340 for row in rows]
        assert sum(a != b for a, b in pairwise(origins)) > 8


def test_packed_starts_at_a_document_and_skips_the_tail() -> None:
    shards = distinct(30, 30)
    shards[0] = np.concatenate([np.array([5, 5, 5], np.uint16), shards[0]])
    stream = build(PackedDocuments(group=2, begin="first shard"), shards, 6, 4)
    firsts = [int(stream.micro_batch(index).inputs[0, 0]) for index in range(9)]
    assert firsts == [1, 17, 24, 31, 1, 47, 54, 61, 1]


@pytest.mark.parametrize("loader", LOADERS, ids=lambda loader: type(loader).__name__)
def test_too_few_tokens_are_one_line(loader: Loader) -> None:
    for shards in ([], distinct(32)):
        held = f"the training shards hold {sum(map(len, shards))} tokens, and "
        if isinstance(loader, PackedDocuments):
            held = f"no shard holds more than {sum(map(len, shards))} tokens from a document on, and "
        with pytest.raises(UserError, match=held + "a micro-batch needs 33; use more text") as caught:
            build(loader, shards, 32, 16)
        assert "\n" not in str(caught.value)
    assert build(loader, distinct(33), 32, 16).micro_batch(0).inputs.size == 32


@pytest.mark.parametrize("loader", LOADERS, ids=lambda loader: type(loader).__name__)
def test_a_short_shard_beside_a_long_one_is_no_hindrance(loader: Loader) -> None:
    for shards in (distinct(5, 100), distinct(100, 5)):
        stream = build(loader, shards, 32, 16)
        assert {stream.micro_batch(index).inputs.size for index in range(5)} == {32}


@pytest.mark.parametrize(("loader", "firsts"), [(SequentialStream(), 8), (PackedDocuments(group=2), 4)])
def test_a_random_start_is_any_place_that_the_order_passes(loader: Loader, firsts: int) -> None:
    """95 tokens hold eight spans of ten and one; of two micro-batches in a group only the first is one to begin at."""
    places = {build(loader, distinct(95), 10, 10, seed).micro_batch(0).targets[0, 0] for seed in range(60)}
    assert places == {11 + index * 88 // firsts for index in range(firsts)}


@pytest.mark.parametrize("loader", LOADERS[:3], ids=lambda loader: type(loader).__name__)
def test_a_micro_batch_is_whole_rows(loader: Loader) -> None:
    for tokens in (8, 40):
        with pytest.raises(UserError, match="not whole rows of 16"):
            build(loader, distinct(300), tokens, 16)


def test_what_is_held_out_is_cut_off_the_end() -> None:
    shards = distinct(20, 5, 4)
    kept, held = hold_out(shards, 6)
    assert [len(shard) for shard in kept] == [20, 3]
    assert held.tolist() == [*shards[1][3:], *shards[2]]
    kept, held = hold_out(shards, 9)
    assert [len(shard) for shard in kept] == [20]
    assert len(held) == 9
    with pytest.raises(UserError, match="hold 29 tokens in all; hold out fewer"):
        hold_out(shards, 29)


def test_training_data_is_known_by_its_documents_and_tokenizer() -> None:
    assert TrainingData([], BOS, "documents", "tokenizer").identity == "documentstokenizer"


def test_documents_that_begin_in_a_batch_are_those_of_its_inputs() -> None:
    inputs = np.array([[BOS, 5, BOS], [6, 7, 8]])
    assert Batch(inputs, np.full((2, 3), BOS)).begun(BOS) == 2


def test_the_first_document_is_found_however_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "BOS_SCAN", 4)
    for before in range(10):
        shards = [np.concatenate([np.full(before, 5, np.uint16), *distinct(11, 30)])]
        batch = build(PackedDocuments(begin="first shard"), shards, 6, 6).micro_batch(0)
        assert batch.inputs.tolist() == [[BOS, 11, 12, 13, 14, 15]]


def test_packed_needs_a_document() -> None:
    with pytest.raises(UserError, match="use more text"):
        build(PackedDocuments(), [np.full(100, 9, np.uint16)], 32, 16)


def test_prefetch_keeps_the_order_and_works_ahead() -> None:
    made: list[int] = []
    ahead = threading.Event()

    def make(index: int) -> int:
        made.append(index)
        if index == 12:
            ahead.set()
        return index * index

    with prefetched(make, range(10, 100), ready=2) as ready:
        assert next(ready) == 100
        assert ahead.wait(10)
        assert [next(ready) for _ in range(3)] == [121, 144, 169]
    assert made == list(range(10, 10 + len(made)))
    assert len(made) <= 6


def test_prefetch_is_as_many_results_ahead_as_were_asked_for_on_one_thread() -> None:
    taken, threads = list[int](), set[int]()

    def indices() -> Iterator[int]:
        for index in range(10):
            taken.append(index)
            yield index

    def make(index: int) -> int:
        threads.add(threading.get_ident())
        time.sleep(0.005)
        return index

    with prefetched(make, indices(), 3) as ready:
        assert taken == [0, 1, 2]
        assert [next(ready), next(ready)] == [0, 1]
        assert taken == [0, 1, 2, 3, 4]
        assert list(ready) == list(range(2, 10))
    assert len(threads - {threading.get_ident()}) == len(threads) == 1


def test_prefetch_ends_with_its_indices_and_leaves_no_thread() -> None:
    with prefetched(lambda index: index, range(3), 2) as ready:
        assert list(ready) == [0, 1, 2]
        ready.close()
        with pytest.raises(StopIteration):
            next(ready)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_closing_drops_what_is_not_begun() -> None:
    made: list[int] = []

    def make(index: int) -> None:
        made.append(index)
        time.sleep(0.05)

    with prefetched(make, range(100), ready=50):
        pass
    assert len(made) < 5


def test_prefetch_raises_what_make_raised() -> None:
    with prefetched(lambda index: 1 // (2 - index), range(9), 2) as ready:
        assert next(ready) == 0
        assert next(ready) == 1
        with pytest.raises(ZeroDivisionError):
            next(ready)
