"""Token shards on disk, and the documents in them."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caddie.data.loaders import CoprimeStride, Loader, PackedDocuments, SequentialStream, ShuffledSequences, hold_out
from caddie.data.shards import HEADER_BYTES, open_shard, split_documents, write_shard
from caddie.errors import UserError


def test_a_shard_survives_the_disk(tmp_path: Path) -> None:
    tokens = np.array([1, 0, 65535, 7], np.uint16)
    write_shard(tmp_path / "a.bin", tokens)
    raw = (tmp_path / "a.bin").read_bytes()
    assert np.frombuffer(raw[:HEADER_BYTES], "<i4")[:4].tolist() == [20240520, 1, 4, 0]
    assert raw[HEADER_BYTES:] == tokens.tobytes()
    read = open_shard(tmp_path / "a.bin")
    assert read.tolist() == tokens.tolist()
    assert not read.flags.writeable
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]


def test_the_contest_shard_opens(real_data: Path) -> None:
    tokens = open_shard(real_data / "small" / "val_small_sp1024.bin")
    assert len(tokens) == 125_113
    assert int((tokens == 1).sum()) == 35


@pytest.mark.parametrize("loader", [SequentialStream(), ShuffledSequences(), CoprimeStride(), PackedDocuments()])
@pytest.mark.parametrize("held_out", [0, 100])
def test_a_shard_that_is_cut_short_while_it_is_read_is_one_line(loader: Loader, held_out: int, tmp_path: Path) -> None:
    """The system would end the process, and with it this test."""
    write_shard(path := tmp_path / "a.bin", np.ones(100_000, np.uint16))
    shards, _ = hold_out([open_shard(path)], held_out)
    stream = loader.build(shards, tokens=512, sequence_length=64, seed=0, bos=1)
    stream.micro_batch(0)
    with path.open("r+b") as file:
        file.truncate(2000)
    with pytest.raises(UserError, match=r"a\.bin was cut short while it was in use, to 2,000 of 201,024 bytes"):
        stream.micro_batch(1)
    for read in (lambda: list(split_documents(shards, 1)), lambda: hold_out(shards, 10)):
        with pytest.raises(UserError, match="was cut short"):
            read()


@pytest.mark.parametrize(
    ("word", "value", "message"),
    [
        (0, 7, "not a token shard; it begins with 7"),
        (1, 2, "shard version 2"),
        (2, 0, "no tokens"),
        (2, -1, "no tokens"),
        (2, 4, "its 4 tokens need 1,032"),
        (2, 2, "its 2 tokens need 1,028"),
    ],
)
def test_a_bad_header_is_one_line(tmp_path: Path, word: int, value: int, message: str) -> None:
    path = tmp_path / "a.bin"
    write_shard(path, np.array([1, 2, 3], np.uint16))
    header = np.frombuffer(path.read_bytes(), "<u2").copy()
    header[:512].view("<i4")[word] = value
    path.write_bytes(header.tobytes())
    with pytest.raises(UserError, match=message) as caught:
        open_shard(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_shard_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty.bin").write_bytes(b"")
    with pytest.raises(UserError, match="0 bytes"):
        open_shard(tmp_path / "empty.bin")
    with pytest.raises(UserError, match="cannot read the shard"):
        open_shard(tmp_path / "missing.bin")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.lists(st.integers(1, 39), max_size=4))
def test_documents_cross_shards(tokens: list[int], cuts: list[int]) -> None:
    stream = np.array(tokens, np.uint16)
    pieces = [piece for piece in np.split(stream, sorted(set(cuts))) if len(piece)]
    runs = [run.tolist() for run in split_documents(pieces, 1)]
    assert [token for run in runs for token in run] == tokens
    assert all(run[0] == 1 for run in runs[1:])
    assert all(1 not in run[1:] for run in runs)
    assert Counter(run[0] for run in runs)[1] == tokens.count(1)
