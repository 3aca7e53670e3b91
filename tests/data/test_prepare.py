"""From text to a corpus folder and back, and what is said when that cannot be."""

import gzip
import json
import lzma
import os
import shutil
import sys
import zipfile
from collections import Counter
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from real_text import contest_file
from recording import RecordedProgress

from caddie.data import corpus, prepare, splits
from caddie.data import documents as sources
from caddie.data.corpus import Corpus
from caddie.data.fineweb import Place, fetch_fineweb
from caddie.data.manifest import RoundTripFigures, SplitName
from caddie.data.shards import open_shard, split_documents, write_shard
from caddie.data.tokenizers import (
    ByteTokenizer,
    CaseOps,
    Ids,
    RawBytes,
    SentencePieceBPE,
    SentencePieceFile,
    TokenizerSource,
)
from caddie.errors import UserError
from caddie.files import unfinished
from caddie.recipes.catalog import find
from caddie.run import resolve_corpus as corpora
from caddie.run.stages import held_out_text, training_data
from caddie.runtime.progress import SILENT

RECIPE = find("tiny").but({"data.tokenizer": RawBytes(), "model.vocabulary": 257})
TEXTS = [f"document {number} {'words and more ' * (number % 5)}" for number in range(60)]


def lines(*texts: str) -> bytes:
    return "".join(json.dumps({"src": "test", "text": text}) + "\n" for text in texts).encode()


def make(source: Path | str | None, folder: Path, **changes: object) -> Corpus:
    usual: dict[str, object] = {"tokenizer_source": RawBytes(), "vocabulary": 257, "validation_fraction": 0.2}
    return prepare.prepare(source, folder=folder, **{"progress": SILENT, **usual, **changes})  # type: ignore[arg-type]


def held_out_from(other: Corpus, source: Path, folder: Path, **changes: object) -> Corpus:
    """A corpus for scoring only, without the training documents of the other one."""
    usual: dict[str, Any] = {"tokenizer": other.tokenizer(), "progress": SILENT}
    return prepare.prepare_validation(source, folder=folder, against=other, **usual | changes)


def contest(real_data: Path) -> dict[str, Any]:
    return {"tokenizer_source": contest_file(real_data), "vocabulary": 1024}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_bytes(lines(*TEXTS))
    return path


@pytest.fixture
def made(text: Path, tmp_path: Path) -> Corpus:
    return make(text, tmp_path / "out")


def one_line(error: pytest.ExceptionInfo[UserError]) -> bool:
    return "\n" not in str(error.value)


# Sources


def test_a_shard_is_unchanged_if_its_bytes_are(made: Corpus) -> None:
    """Written again with the same bytes, or removed since it was read, it is no change; other bytes are one."""
    (shard,) = made.manifest.validation.shards
    path = made.folder / shard.file
    whole = path.read_bytes()
    made.check_shards("validation")
    made.check_unchanged()
    path.write_bytes(whole)
    os.utime(path, (1, 1))
    made.check_unchanged()
    path.write_bytes(whole[:-2] + b"\7\0")
    with pytest.raises(UserError, match=rf"^{path} was changed while it was in use; prepare the data again"):
        made.check_unchanged()
    path.unlink()
    made.check_unchanged()


def a_text(*documents: bytes) -> Any:
    return SimpleNamespace(source=SimpleNamespace(documents=lambda: iter(documents)), identity=lambda one: one)


def test_a_document_that_comes_again_is_counted_and_not_given_again() -> None:
    split = splits.FirstHeldOut(a_text(b"a", b"b", b"a", b"c", b"b", b"d"), held_out=2)
    assert split.duplicates == 0, "none is read yet"
    expected = [("validation", b"a"), ("validation", b"b"), ("train", b"c"), ("train", b"d")]
    assert list(split.documents()) == expected
    assert split.duplicates == 2


def test_a_sample_ends_with_the_byte_that_was_asked_for() -> None:
    split = splits.FirstHeldOut(a_text(b"held out", b"abc", b"def", b"ghi"), held_out=1)
    assert split.sample(4) == [b"abc", b"def"]
    assert split.sample(3) == [b"abc"]
    assert split.sample(6) == [b"abc", b"def"]
    assert split.sample(7) == [b"abc", b"def", b"ghi"]


def test_more_documents_are_needed_than_are_held_out() -> None:
    three = a_text(b"a", b"b", b"c")
    three.source.description = "three.jsonl"
    assert len(list(splits.FirstHeldOut(three, held_out=2).documents())) == 3
    for held_out in (3, 4):
        needed = f"three.jsonl has 3 documents, and the first {held_out} are held out; fetch it again"
        with pytest.raises(UserError, match=f"^{needed}$"):
            list(splits.FirstHeldOut(three, held_out).documents())


def test_a_text_that_lost_a_document_since_it_was_surveyed_is_refused() -> None:
    text = a_text(b"a", b"b", b"a", b"new")
    text.source.description = "a.jsonl"
    assert list(splits.Plan(text, {b"b": "train", b"a": "validation"}, 0).documents()) == [
        ("validation", b"a"),
        ("train", b"b"),
    ]
    with pytest.raises(UserError, match=r"^a\.jsonl: changed while it was read; prepare it again$"):
        list(splits.Plan(text, {b"a": "train", b"lost": "train"}, 0).documents())


def test_splits_come_in_the_order_of_their_names(text: Path, tmp_path: Path) -> None:
    for held_out_only, names in ((False, ["train", "validation"]), (True, ["validation"])):
        progress = RecordedProgress()
        make(text, tmp_path / str(held_out_only), held_out_only=held_out_only, progress=progress)
        told = [note.partition(":")[0] for note in progress.notes if note.endswith(" tokens")]
        assert told == names, "a split without documents is not told"


def test_documents_are_held_out_by_the_first_eight_bytes_of_their_hashes() -> None:
    """Hold out hashes below a fraction of 2^64: always the lowest, never the highest."""

    def held_out(fraction: float, *hashes: str) -> list[str]:
        sizes = {bytes.fromhex(one).ljust(16, b"\0"): 1 for one in hashes}
        found = splits.divide(sizes, fraction, a_text().source, 0)
        assert set(found) == set(sizes)
        assert set(found.values()) <= {"train", "validation"}
        return [one for one, split in zip(hashes, found.values(), strict=True) if split == "validation"]

    hashes = ("80", "7fffffffffffffffff", "c0", "ff", "00", "8000000000000001", "3fff")
    assert held_out(0.5, *hashes) == ["7fffffffffffffffff", "00", "3fff"]
    assert held_out(0.75, *hashes) == ["80", "7fffffffffffffffff", "00", "8000000000000001", "3fff"]
    assert held_out(0.001, "ff", "fe", "fd") == ["fd"]
    assert held_out(0.999, "01", "02") == ["01"]
    assert held_out(0.5, "7f", "7e") == ["7e"]


def test_the_fingerprint_of_a_text_and_its_settings_is_that_of_corpora_made_before() -> None:
    def inputs(*settings: object) -> str:
        source: Any = SimpleNamespace(fingerprint=lambda: "the files")
        return splits.Text(source, corpus.document_hash, settings).inputs

    made = inputs({"kind": "RawBytes", "content": None}, 257, 0.1)
    assert made == "49c4ca91549f3c44804275892ff1ccd690b45630449116db08fa8894690cb5df"
    assert made == inputs({"content": None, "kind": "RawBytes"}, 257, 0.1)
    assert made != inputs({"content": None, "kind": "RawBytes"}, 257, 0.2)


def test_a_corpus_of_ids_is_compared_under_its_own_tokenizer_alone() -> None:
    other: Any = SimpleNamespace(
        manifest=SimpleNamespace(hashed="tokens", tokenizer=SimpleNamespace(sha256="another")), folder="corpus"
    )
    with pytest.raises(UserError, match=r"^the corpus in corpus can be compared only under its own tokenizer"):
        splits.identity(ByteTokenizer(), other)
    other.manifest.tokenizer.sha256 = ByteTokenizer().sha256
    ids = np.array([256, *b"a"], "<u2")
    assert splits.identity(ByteTokenizer(), other)(b"a") == corpus.document_hash(ids.tobytes())


def test_document_hashes_are_those_of_files_written_before() -> None:
    assert corpus.document_hash(b"a").hex() == "ca978112ca1bbdcafac231b39a23dc4d"


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zst"])
def test_json_lines_plain_and_compressed(tmp_path: Path, suffix: str) -> None:
    pack = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress}[suffix]
    path = tmp_path / f"a.jsonl{suffix}"
    content = pack(lines("one", "", "zwei ü", "three\n") + b"\n" + lines("four"))
    for named in (path, path.with_name(path.name.upper())):
        named.write_bytes(content)
        assert list(sources.find(named).documents()) == [b"one", "zwei ü".encode(), b"three\n", b"four"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{not json", "a.jsonl:2: not JSON"),
        (b'{"txt": "x"}', "a.jsonl:2: no text"),
        (b'{"text": 3}', "a.jsonl:2: no text"),
        (b'["text"]', "a.jsonl:2: no text"),
        (b'{"text": "\\ud800"}', "a.jsonl:2: half a surrogate pair"),
        (b'{"text": "\xff"}', "a.jsonl:2: byte 11 is not UTF-8"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines("fine") + line + b"\n")
    with pytest.raises(UserError, match=message) as caught:
        list(sources.find(tmp_path / "a.jsonl").documents())
    assert one_line(caught)


PACK = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor(write_checksum=True).compress}


@pytest.mark.parametrize("suffix", PACK)
def test_a_damaged_archive_is_named(tmp_path: Path, suffix: str) -> None:
    whole, second = PACK[suffix](lines(*TEXTS)), bytearray(PACK[suffix](lines("and more")))
    second[len(second) // 2] ^= 0x40
    for content in (
        whole[:-20],
        b"nothing of the kind",
        b"",
        whole + second,
        whole + b"and no more",
        whole + whole[:9],
    ):
        (tmp_path / f"a.jsonl{suffix}").write_bytes(content)
        with pytest.raises(UserError, match=r"a.jsonl.*cannot be read") as caught:
            list(sources.find(tmp_path / f"a.jsonl{suffix}").documents())
        assert one_line(caught)


@pytest.mark.parametrize("suffix", PACK)
def test_all_parts_of_an_archive_are_read(tmp_path: Path, suffix: str) -> None:
    parts = [PACK[suffix](lines(text)) for text in ("one", "two", "three")]
    for between in (b"", bytes(8), bytes(9000)):
        (tmp_path / f"a.jsonl{suffix}").write_bytes(between.join([*parts, b""]))
        assert list(sources.find(tmp_path / f"a.jsonl{suffix}").documents()) == [b"one", b"two", b"three"]


def test_a_folder_gives_its_text_and_skips_the_rest(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "hidden.txt").write_text("hidden")
    (tmp_path / "z.txt").write_text("last")
    (tmp_path / "b" / "one.md").write_text("first\n\n" * 20_000)
    (tmp_path / "b" / "two.jsonl").write_bytes(lines("second", "third"))
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.txt").write_bytes(b"")
    skipped: list[Path] = []
    found = list(sources.find(tmp_path).documents(skipped))
    assert found == [b"last", b"first\n\n" * 20_000, b"second", b"third"]
    assert [path.name for path in skipped] == ["latin.txt", "picture.png"]


def test_linked_folders_are_read_once_and_links_that_lead_up_are_not(tmp_path: Path) -> None:
    for name in ("texts", "others"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(f"of {name}")
    (tmp_path / "others" / "b.txt").write_text("in others alone")
    for name, to in (("again", tmp_path / "others"), ("link", tmp_path / "others"), ("up", tmp_path), ("self", ".")):
        (tmp_path / "texts" / name).symlink_to(to)
    found = sorted(sources.find(tmp_path / "texts").documents(whole=True))
    assert found == [b"in others alone", b"of others", b"of texts"]


def test_a_link_says_what_the_file_holds_whose_own_name_does_not(tmp_path: Path) -> None:
    """The hub's cache names files by their hashes and links to them."""
    packed = zstandard.compress(lines("one", "two"))
    for link, to, content in (
        ("a.jsonl", "5d41402a", lines("one", "two")),
        ("b.jsonl.zst", "7d793037", packed),
        ("latest", "c.jsonl.zst", packed),
    ):
        (tmp_path / to).write_bytes(content)
        (tmp_path / link).symlink_to(to)
        assert list(sources.find(tmp_path / link).documents()) == [b"one", b"two"]
    (tmp_path / "d.txt.gz").symlink_to("e")
    (tmp_path / "e").write_bytes(gzip.compress(b"plain text"))
    assert list(sources.find(tmp_path / "d.txt.gz").documents()) == [b"plain text"]


def test_a_single_shard_is_told_to_be_named_by_its_folder(tmp_path: Path) -> None:
    write_shard(tmp_path / "val_000000.bin", np.arange(300, dtype=np.uint16))
    with pytest.raises(UserError, match=r"val_000000.bin: not UTF-8 text; .*; of shards, name the folder$"):
        list(sources.find(tmp_path / "val_000000.bin").documents())


def test_a_single_file_must_be_text(tmp_path: Path) -> None:
    for content in (b"caf\xe9", b"a\0b", b"a" * 9000 + b"\0"):
        (tmp_path / "a.txt").write_bytes(content)
        with pytest.raises(UserError, match="not UTF-8 text"):
            list(sources.find(tmp_path / "a.txt").documents())
    with pytest.raises(UserError, match="no such file or folder"):
        sources.find(tmp_path / "missing")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="holds no files"):
        sources.find(tmp_path / "folder")


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file system that takes any bytes for a name")
def test_a_name_that_is_not_utf8_is_refused_before_the_work(text: Path, shards: Path, tmp_path: Path) -> None:
    for source in (text, shards):
        renamed = source.rename(tmp_path / os.fsdecode(b"caf\xe9" + source.suffix.encode()))
        with pytest.raises(UserError, match=r"the name is not UTF-8; rename it$"):
            make(renamed, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_the_library_is_always_there() -> None:
    found = sources.find(None)
    names = [path.as_posix() for path in found.files]
    assert any(name.endswith("pydoc_data/topics.py") for name in names)
    assert not [name for name in names if "/test/" in name or "/tests/" in name or "-packages/" in name]
    assert found == sources.find("stdlib")
    assert sum(1 for _ in found.documents()) > 300


def test_a_long_file_is_cut_at_blank_lines(tmp_path: Path) -> None:
    paragraph = "words " * 500 + "\n\n"
    (tmp_path / "a.txt").write_text(paragraph * 100)
    found = list(sources.find(tmp_path / "a.txt").documents())
    assert b"".join(found) == (paragraph * 100).encode()
    assert all(piece.endswith(b"\n\n") and 1 << 14 <= len(piece) < 20_000 for piece in found[:-1])
    (tmp_path / "a.txt").write_text(paragraph * 20)
    assert len(list(sources.find(tmp_path / "a.txt").documents())) == 1


def test_a_long_file_alone_in_a_folder_is_cut_too(tmp_path: Path) -> None:
    """Beside another text it is one document, as it was before, so that splits made then are made again."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("words and more\n\n" * 9_000)
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    cut = list(sources.find(folder / "a.txt").documents())
    assert list(sources.find(folder).documents()) == cut
    assert make(folder, tmp_path / "corpus").manifest.validation.documents > 0
    (folder / "b.txt").write_text("another")
    assert list(map(len, sources.find(folder).documents())) == [144_000, 7]
    (tmp_path / "one.jsonl").write_bytes(lines("words and more\n\n" * 9_000))
    assert list(sources.find(tmp_path / "one.jsonl").documents()) == cut


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([b"\n", b"\n\n", b"\n \r\n", b"x"]), st.integers(1, 30_000)), max_size=9))
def test_cutting_loses_nothing(parts: list[tuple[bytes, int]]) -> None:
    text = b"".join(b"y" * length + end for end, length in parts)
    pieces = list(sources.cut(text))
    assert b"".join(pieces) == text
    assert all(piece.endswith(b"\n") for piece in pieces[:-1])


# Preparation


def test_every_document_is_in_one_split(made: Corpus) -> None:
    train, validation = b"", made.validation_tokens()
    train = np.concatenate(made.train_shards())
    tokenizer = made.tokenizer()

    def texts(tokens: np.ndarray) -> list[str]:
        return [tokenizer.decode(run).decode() for run in split_documents([tokens], tokenizer.bos)]

    assert sorted(texts(train) + texts(validation)) == sorted(TEXTS)
    assert 2 <= len(texts(validation)) <= 30
    assert texts(validation) == [document.decode() for document in made.validation_documents()]
    for split, tokens in ((made.manifest.train, train), (made.manifest.validation, validation)):
        size = sum(len(text) for text in texts(tokens))
        assert (split.documents, split.tokens) == (len(texts(tokens)), len(tokens))
        assert split.source_bytes == split.normalized_bytes == split.table_bytes == size
    assert made.manifest.byte_source == "documents"
    facts = made.manifest
    assert (facts.duplicates_removed, facts.training_documents_removed, facts.overlap) == (0, 0, 0)
    assert made.manifest.tokenizer.round_trip == RoundTripFigures(60, 0, *(2 * [len("".join(TEXTS))]))


def test_the_split_depends_on_content_alone(tmp_path: Path, made: Corpus) -> None:
    (tmp_path / "other.jsonl").write_bytes(lines(*reversed(TEXTS), *TEXTS[:7], "one more"))
    other = make(tmp_path / "other.jsonl", tmp_path / "reversed")
    assert other.manifest.duplicates_removed == 7
    for name in ("train", "validation"):
        before, after = (corpus.read_hashes(found.folder, name) for found in (made, other))
        assert after - before <= {corpus.document_hash(b"one more")}
        assert before <= after


def test_the_same_text_in_another_order_is_the_same_set(tmp_path: Path, made: Corpus) -> None:
    (tmp_path / "other.jsonl").write_bytes(lines(*reversed(TEXTS)))
    other = make(tmp_path / "other.jsonl", tmp_path / "reversed")
    assert other.manifest.validation.document_set_sha256 == made.manifest.validation.document_set_sha256
    assert other.manifest.validation.shards != made.manifest.validation.shards


def test_two_documents_are_enough(tmp_path: Path) -> None:
    for fraction in (0.0001, 0.9999):
        (tmp_path / "a.jsonl").write_bytes(lines("one", "two"))
        found = make(tmp_path / "a.jsonl", tmp_path / "out", validation_fraction=fraction)
        assert (found.manifest.train.documents, found.manifest.validation.documents) == (1, 1)


def test_bytes_are_those_of_the_source(tmp_path: Path, real_data: Path) -> None:
    found = make(real_data / "small" / "val_small.jsonl", tmp_path / "out", **contest(real_data))
    train, validation = found.manifest.train, found.manifest.validation
    assert train.source_bytes + validation.source_bytes == 298_445
    assert train.tokens + validation.tokens == 125_113
    # NFKC makes "…" and the like longer; of the table method's errors none shows in this text.
    assert train.normalized_bytes + validation.normalized_bytes == 298_447
    assert train.table_bytes + validation.table_bytes == 298_447
    assert found.manifest.tokenizer.round_trip is not None
    assert found.manifest.tokenizer.round_trip.changed_documents > 0
    assert found.manifest.validation_compressors is not None
    assert set(found.manifest.validation_compressors) == {"gzip -9", "xz -9e", "zstd -22", "brotli -11"}
    assert max(found.manifest.validation_compressors.values()) < validation.source_bytes


def test_lost_white_space_still_counts(tmp_path: Path, real_data: Path) -> None:
    texts = ["hello  world", "a\nb\n\nc"]
    (tmp_path / "a.jsonl").write_bytes(lines(*texts))
    found = make(tmp_path / "a.jsonl", tmp_path / "out", **contest(real_data))
    train, validation = found.manifest.train, found.manifest.validation
    assert train.source_bytes + validation.source_bytes == 12 + 6
    assert train.normalized_bytes + validation.normalized_bytes == 11 + 5
    assert found.manifest.tokenizer.round_trip == RoundTripFigures(2, 2, 18, 16)


def test_shards_begin_with_a_document(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 300)
    found = make(text, tmp_path / "out")
    shards = found.train_shards()
    assert len(shards) > 3
    assert all(shard[0] == 256 and len(shard) <= 300 for shard in shards)
    assert sum(map(len, shards)) == found.manifest.train.tokens
    assert found.manifest.train.table_bytes == found.manifest.train.source_bytes


def test_the_tokenizer_learns_from_training_documents_only(text: Path, tmp_path: Path) -> None:
    seen: list[bytes] = []

    class Spy(TokenizerSource):
        def build(self, vocabulary, sample):  # type: ignore[no-untyped-def]
            seen.extend(sample())
            return ByteTokenizer()

    found = make(text, tmp_path / "out", tokenizer_source=Spy())
    held_out = set(found.validation_documents())
    assert sorted(seen) == sorted(text.encode() for text in TEXTS if text.encode() not in held_out)


def test_the_sample_is_spread_evenly(made: Corpus, text: Path) -> None:
    planned: dict[bytes, SplitName] = {corpus.document_hash(document.encode()): "train" for document in TEXTS}
    plan = splits.Plan(splits.Text(sources.find(text), corpus.document_hash, []), planned, 0)
    assert plan.sample(0.25) == [document.encode() for document in TEXTS[::4]]
    assert plan.sample(7.0) == [document.encode() for document in TEXTS]


def test_a_trained_tokenizer_comes_back(tmp_path: Path, real_data: Path) -> None:
    arguments = {"tokenizer_source": SentencePieceBPE(), "vocabulary": 300}
    text = tmp_path / "text.jsonl"
    with (real_data / "small" / "train_small.jsonl").open("rb") as file:
        text.write_bytes(b"".join(file.readlines(80_000)))
    found = make(text, tmp_path / "out", **arguments)
    again = make(text, tmp_path / "again", **arguments)
    assert (found.folder / "manifest.json").read_text() == (again.folder / "manifest.json").read_text()
    assert (found.folder / "documents.npz").read_bytes() == (again.folder / "documents.npz").read_bytes()
    round_trip = found.manifest.tokenizer.round_trip
    assert round_trip is not None
    assert round_trip.changed_documents == 0
    assert 60_000 < round_trip.source_bytes <= text.stat().st_size


def test_a_corpus_is_reused_until_something_changes(text: Path, tmp_path: Path, made: Corpus) -> None:
    def stamp() -> int:
        return (made.folder / "manifest.json").stat().st_ino

    first = stamp()
    make(text, made.folder)
    assert stamp() == first
    assert make(made.folder, tmp_path / "unused").manifest == made.manifest
    for change in ({"validation_fraction": 0.3}, {"vocabulary": 260}, {}):
        made = make(text, made.folder, **change)
        assert stamp() != first
        first = stamp()
    text.write_bytes(lines(*TEXTS[:50]))
    changed = make(text, made.folder)
    assert changed.manifest.tokenizer.round_trip is not None
    assert changed.manifest.tokenizer.round_trip.documents == 50
    (made.folder / "train_000000.bin").unlink()
    assert len(make(text, made.folder).train_shards()) == 1


@pytest.mark.parametrize("most", [sources.HASHED_BYTES, 0])
def test_a_copy_is_the_same_text_and_a_change_that_keeps_size_and_time_another(
    text: Path, made: Corpus, tmp_path: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of more bytes than are hashed go by path, size and time."""
    monkeypatch.setattr(sources, "HASHED_BYTES", most)
    first = sources.find(text).fingerprint()
    (tmp_path / "other").mkdir()
    copy = Path(shutil.copy(text, tmp_path / "other"))
    os.utime(copy, (1, 1))
    assert (sources.find(copy).fingerprint() == first) == (most > 0)
    assert sources.find(copy.rename(tmp_path / "other" / "named.jsonl")).fingerprint() != first, "names decide the kind"
    before = text.stat()
    text.write_bytes(text.read_bytes().swapcase())
    os.utime(text, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (sources.find(text).fingerprint() != first) == (most > 0)
    if most:
        assert make(copy.with_name("named.jsonl").rename(copy), made.folder).manifest == made.manifest


def test_the_corpus_of_a_text_that_changed_is_kept_for_the_runs_that_need_it(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = corpora.open_corpus(RECIPE, str(text), SILENT)
    assert corpora.open_corpus(RECIPE, str(text), SILENT).folder == first.folder
    text.write_bytes(lines(*TEXTS[:50]))
    second = corpora.open_corpus(RECIPE, str(text), SILENT)
    assert second.folder != first.folder
    assert corpora.open_corpus(RECIPE, str(text), SILENT).folder == second.folder
    assert Corpus.load(first.folder).manifest == first.manifest
    assert second.manifest.train.documents + second.manifest.validation.documents == 50


def test_a_corpus_that_holds_out_more_than_it_trains_on_says_so(text: Path, tmp_path: Path) -> None:
    for fraction, told in ((0.4, False), (0.9, True)):
        progress = Mock()
        changed = RECIPE.but({"data.validation_fraction": fraction})
        corpora.open_corpus(changed, str(text), progress, tmp_path / str(fraction))
        notes = [call.args[0] for call in progress.note.mock_calls]
        assert told == any(note.startswith("more text is held out than trained on; give more") for note in notes)


@pytest.mark.parametrize("against", [False, True])
def test_a_corpus_of_another_text_in_a_named_folder_is_not_replaced(
    text: Path, made: Corpus, tmp_path: Path, against: bool
) -> None:
    out = tmp_path / "named"
    given = {"tokenizer": None, "against": str(made.folder) if against else None, "out": out, "progress": SILENT}
    text.write_bytes(lines(*TEXTS[:50], "A document that no corpus trains on, and so can be held out whole."))
    first = corpora.make_corpus(str(text), RECIPE, **given)
    assert corpora.make_corpus(str(text), RECIPE, **given).manifest == first.manifest
    text.write_bytes(lines(*TEXTS[:40], "Another document that no corpus trains on, and so can be held out."))
    with pytest.raises(
        UserError, match=r"named holds a corpus of another text, .*; name another folder, or delete it$"
    ):
        corpora.make_corpus(str(text), RECIPE, **given)
    assert Corpus.load(out).manifest == first.manifest


@pytest.mark.parametrize("given", ["out", "tokenizer"])
def test_a_corpus_is_not_prepared_again(made: Corpus, tmp_path: Path, given: str) -> None:
    options: dict[str, Any] = {"out": tmp_path / "new", "tokenizer": str(made.folder / "bytes.model")}
    options = {**dict.fromkeys(options), given: options[given]}
    with pytest.raises(
        UserError, match=f"is a corpus already; leave out --{given}, or name the text that it was made from$"
    ):
        corpora.make_corpus(str(made.folder), RECIPE, against=None, progress=SILENT, **options)


def test_corpora_and_runs_below_a_folder_of_text_are_no_text(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, held in zip(("a.txt", "b.txt"), TEXTS, strict=False):
        (folder / name).write_text(str(held))
    make(text, folder / "data" / "corpus")
    (make(text, folder / "data" / "half_copied").folder / "manifest.json").unlink()
    run = folder / "runs" / "tiny"
    run.mkdir(parents=True)
    for name in ("recipe.json", "log.jsonl"):
        (run / name).write_text("{}")
    assert [path.name for path in sources.find(folder).files] == ["a.txt", "b.txt"]
    (run / "log.jsonl").unlink()
    assert "recipe.json" in [path.name for path in sources.find(folder).files], "which may be one of a cook's"


def test_a_held_out_document_that_cannot_be_read_again_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A letter beyond ASCII takes six bytes as JSON."""
    monkeypatch.setattr(sources, "LONGEST_LINE", 1000)
    (tmp_path / "texts").mkdir()
    for number in range(2):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number} {'привет ' * 60}", encoding="utf-8")
    with pytest.raises(UserError, match=r"takes 2,\d\d\d bytes as a line of JSON, .*; cut it into documents$"):
        make(tmp_path / "texts", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_held_out_text_of_too_few_tokens_is_refused_before_the_training(tmp_path: Path, real_data: Path) -> None:
    """A tokenizer that makes one space of many leaves a text that scoring would not read back."""
    (tmp_path / "a.jsonl").write_bytes(lines(*(f"a{' ' * 20_000}{number}" for number in range(10))))
    with pytest.raises(UserError, match=r"bytes of held-out text, more than 4,096 each, .* that keeps its text$"):
        make(tmp_path / "a.jsonl", tmp_path / "out", **contest(real_data))
    assert not (tmp_path / "out").exists()


def test_a_failure_leaves_no_folder(text: Path, tmp_path: Path) -> None:
    class Broken(ByteTokenizer):
        def encode_many(self, documents):  # type: ignore[no-untyped-def]
            raise RuntimeError("broken")

    class Breaks(TokenizerSource):
        def build(self, vocabulary, sample):  # type: ignore[no-untyped-def]
            return Broken()

    before = sorted(tmp_path.iterdir())
    with pytest.raises(RuntimeError, match="broken"):
        make(text, tmp_path / "out", tokenizer_source=Breaks())
    assert sorted(tmp_path.iterdir()) == before


def test_what_a_killed_process_left_is_removed(text: Path, tmp_path: Path) -> None:
    name = unfinished(tmp_path / "out").name
    left = tmp_path / name.replace(f".{os.getpid()}-", f".{os.getpid()}-1")  # one that had its number before
    left.mkdir()
    make(text, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["out", text.name])


def test_a_folder_with_other_files_is_left_alone(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"holds other files, such as thesis.tex"):
        make(text, out)
    assert (out / "thesis.tex").read_text() == "years of work"
    with pytest.raises(UserError, match="is a file; name a folder"):
        make(text, out / "thesis.tex")


def test_tokens_of_another_make_are_neither_a_lost_corpus_nor_replaced(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    shutil.copy(text, folder / text.name)
    write_shard(folder / "val_small_sp1024.bin", np.arange(300, dtype=np.uint16))
    recipe = RECIPE.but({"data.validation_fraction": 0.2})
    found = corpora.open_corpus(recipe, str(folder), folder=tmp_path / "corpus")
    assert found.manifest.train.documents == make(text, tmp_path / "alone").manifest.train.documents
    (folder / text.name).unlink()
    with pytest.raises(UserError, match=r"holds other files, such as val_small_sp1024.bin"):
        make(text, folder)
    shutil.copy(folder / "val_small_sp1024.bin", folder / "val_000000.bin")
    with pytest.raises(UserError, match=r"is a corpus without its manifest.json"):
        corpora.open_corpus(recipe, str(folder))


def test_text_that_gives_no_corpus_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for texts, message in (
        (["", ""], r"no documents; give text$"),
        (["same", "same"], r"one document \(duplicates dropped: 1\), and two or more are needed"),
    ):
        path.write_bytes(lines(*texts))
        with pytest.raises(UserError, match=message) as caught:
            make(path, tmp_path / "out")
        assert one_line(caught)
    for fraction in (0.0, 1.0, 7.0):
        with pytest.raises(UserError, match="fraction must lie between 0 and 1"):
            make(path, tmp_path / "out", validation_fraction=fraction)
    path.write_bytes(lines("one", "two"))
    with pytest.raises(UserError, match=r"none\.model"):
        make(path, tmp_path / "out", tokenizer_source=SentencePieceFile(path=str(tmp_path / "none.model")))
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


# Loading and checking


def test_scoring_needs_no_training_shards(made: Corpus) -> None:
    for shard in made.folder.glob("train_*.bin"):
        shard.unlink()
    loaded = Corpus.load(made.folder)
    assert loaded.manifest == made.manifest
    assert len(loaded.validation_tokens()) == loaded.manifest.validation.tokens
    assert loaded.tokenizer().vocabulary == 257
    loaded.check_disjoint()
    loaded.check_shards("validation")
    with pytest.raises(UserError, match="cannot read the shard"):
        loaded.train_shards()


def test_what_is_said_of_a_text_agrees_in_number(tmp_path: Path) -> None:
    progress = RecordedProgress()
    (tmp_path / "a.jsonl").write_bytes(lines("one", "two", "two"))
    made = make(tmp_path / "a.jsonl", tmp_path / "out", progress=progress)
    (tmp_path / "b.jsonl").write_bytes(lines("three"))
    held_out_from(made, tmp_path / "b.jsonl", tmp_path / "alone", progress=progress)
    (tmp_path / "folder").mkdir()
    shutil.copy(tmp_path / "b.jsonl", tmp_path / "folder")
    (tmp_path / "folder" / "picture.png").write_bytes(b"\x89PNG\0\0")
    held_out_from(made, tmp_path / "folder", tmp_path / "other", progress=progress)
    said = "\n".join(progress.notes)
    assert f"reading {tmp_path / 'a.jsonl'}\n2 documents, 6 bytes; 1 duplicate dropped" in said
    assert f"reading {tmp_path / 'b.jsonl'}\n1 document, 5 bytes; 0 duplicates dropped" in said
    assert "\nskipped, not text: 1 file, picture.png\n1 document, 5 bytes; 0 duplicates dropped" in said
    assert said.count("skipped") == 1
    assert "train: 1 document, 3 bytes, 4 tokens" in said


def test_for_a_score_only_held_out_documents_are_encoded(text: Path, tmp_path: Path, made: Corpus) -> None:
    progress = RecordedProgress()
    alone = make(text, tmp_path / "alone", held_out_only=True, progress=progress)
    assert not list(alone.folder.glob("train_*"))
    assert alone.manifest.validation == made.manifest.validation
    train, whole = alone.manifest.train, made.manifest.train
    same = (train.documents, train.source_bytes, train.document_set_sha256)
    assert same == (whole.documents, whole.source_bytes, whole.document_set_sha256)
    assert (train.tokens, train.shards) == (0, ())
    alone.check_disjoint()
    alone.check_counts()
    assert not any(note.startswith("train:") for note in progress.notes)
    said = f"the others, {train.documents} documents of {train.source_bytes:,} bytes, are left alone"
    assert f"encoding the held-out documents; {said}" in progress.notes
    assert make(text, tmp_path / "alone", held_out_only=True).manifest == alone.manifest
    with pytest.raises(UserError, match="for validation only"):
        alone.train_shards()


def test_no_corpus_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"no corpus in {tmp_path}; make one with: caddie data PATH --out"):
        Corpus.load(tmp_path)


def test_a_damaged_manifest_is_one_line(made: Corpus) -> None:
    path = made.folder / "manifest.json"
    value = json.loads(path.read_text())
    cases = [
        ("{", "not JSON"),
        ("[]", "not a manifest"),
        (json.dumps({**value, "version": 2}), "manifest version 2"),
        (json.dumps({key: item for key, item in value.items() if key != "name"}), "must have exactly"),
        (json.dumps({**value, "extra": 1}), "must have exactly"),
        (json.dumps({**value, "overlap": "none"}), "manifest.overlap must be a whole number"),
        (json.dumps({**value, "validation": None}), "manifest.validation must have exactly"),
        (json.dumps({**value, "validation": {**value["validation"], "shards": [3]}}), "manifest.validation.shards.0"),
        (json.dumps({**value, "overlap": -1}), "manifest.overlap must be from 0 to"),
        (json.dumps({**value, "overlap": 10**400}), "manifest.overlap must be"),
        (json.dumps({**value, "name": "a\0b"}), "manifest.name must be text without null bytes"),
        (json.dumps({**value, "name": "\ud800"}), "manifest.name must be text without null bytes or lone surrogates"),
        (json.dumps({**value, "byte_source": "guess"}), "manifest.byte_source must be one of"),
    ]
    for text, message in cases:
        path.write_text(text)
        with pytest.raises(UserError, match=message) as caught:
            Corpus.load(made.folder)
        assert one_line(caught)
        assert "prepare the data again" in str(caught.value)


def test_training_data_has_the_prefixes_of_the_tokenizer(made: Corpus) -> None:
    data = training_data(made)
    assert data.prefixes is not None
    assert np.array_equal(data.prefixes(), made.tokenizer().prefixes)


def test_training_text_without_bytes_is_refused(made: Corpus) -> None:
    without = replace(made.manifest, train=replace(made.manifest.train, source_bytes=0))
    with pytest.raises(UserError, match="states no bytes of training text"):
        training_data(Corpus(made.folder, without))


def test_a_manifest_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(UserError, match=r"manifest.json: cannot be read \(not a regular file\)"):
        Corpus.load(tmp_path)


def test_changed_files_are_found(made: Corpus) -> None:
    shard = made.folder / "val_000000.bin"
    tokens = open_shard(shard).copy()
    tokens[1] += 1
    write_shard(shard, tokens)
    with pytest.raises(UserError, match=r"val_000000.bin: changed since"):
        made.check_shards("validation")
    write_shard(shard, tokens[:-1])
    with pytest.raises(UserError, match="but the manifest says"):
        made.validation_tokens()
    shutil.copyfile(made.folder / "train_000000.bin", made.folder / "kept.bin")
    made.check_shards("train")
    (made.folder / "tokenizer.bin").write_bytes(b"x")
    with pytest.raises(UserError, match="no tokenizer of kind"):
        made.tokenizer()
    (made.folder / "tokenizer.bin").unlink()
    with pytest.raises(UserError, match=r"tokenizer.bin: cannot read the tokenizer \(No such file or directory\)"):
        made.tokenizer()
    (made.folder / "validation.jsonl.zst").write_bytes(zstandard.compress(lines("forged")))
    with pytest.raises(UserError, match="not the text of the manifest"):
        made.validation_documents()


def test_held_out_text_that_is_missing_is_told(made: Corpus) -> None:
    (made.folder / "validation.jsonl.zst").unlink()
    with pytest.raises(UserError, match=r"validation.jsonl.zst: the held-out text is missing; copy the corpus again"):
        made.check_counts()


def test_overlap_is_found(made: Corpus) -> None:
    hashes = {name: corpus.read_hashes(made.folder, name) for name in ("train", "validation")}
    leaked = min(hashes["validation"])
    corpus.write_hashes(made.folder, hashes["train"] | {leaked}, hashes["validation"])
    with pytest.raises(UserError, match=r"documents.npz: not the train documents"):
        made.check_disjoint()
    name = corpus.set_sha256(hashes["train"] | {leaked})
    forged = Corpus(made.folder, replace(made.manifest, train=replace(made.manifest.train, document_set_sha256=name)))
    leaks = f"^1 of {len(hashes['validation'])} validation documents in .* are training documents too"
    with pytest.raises(UserError, match=leaks) as caught:
        forged.check_disjoint()
    assert one_line(caught)


@pytest.mark.parametrize("member", [None, b"no array", b"\x93NUMPY\1\0\x10\0{'shape': (1,   \n"])
def test_damaged_hashes_are_refused(member: bytes | None, made: Corpus) -> None:
    path = made.folder / "documents.npz"
    path.write_bytes(b"PK")
    if member is not None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("train.npy", member)
    with pytest.raises(UserError, match="cannot read the document hashes") as caught:
        made.check_disjoint()
    assert one_line(caught)


# Validation against another corpus


def test_a_foreign_text_is_held_out_from_training(made: Corpus, tmp_path: Path) -> None:
    held_out = [document.decode() for document in made.validation_documents()]
    trained = [text for text in TEXTS if text not in held_out]
    (tmp_path / "other.jsonl").write_bytes(lines("new", trained[0], held_out[0], trained[1], "newer", "new"))
    progress = RecordedProgress()
    found = held_out_from(made, tmp_path / "other.jsonl", tmp_path / "v", progress=progress)
    assert any("2 of 5 documents left out" in note for note in progress.notes)
    assert found.validation_documents() == [b"new", held_out[0].encode(), b"newer"]
    assert (found.manifest.training_documents_removed, found.manifest.duplicates_removed) == (2, 1)
    assert found.manifest.train.document_set_sha256 == made.manifest.train.document_set_sha256
    found.check_disjoint()
    with pytest.raises(UserError, match="for validation only"):
        found.train_shards()
    assert held_out_from(made, tmp_path / "other.jsonl", tmp_path / "v").manifest == found.manifest

    (tmp_path / "other.jsonl").write_bytes(lines(*trained))
    with pytest.raises(UserError, match="every document is in the training text"):
        held_out_from(made, tmp_path / "other.jsonl", tmp_path / "x")


# Denominators


CAPITALS = [f"The {number}th of NASA's eBay \ue001 pages\n{'And MORE Words ' * (number % 5)}" for number in range(60)]


def test_a_book_that_was_trained_on_in_pieces_is_left_out_whole(tmp_path: Path) -> None:
    """Read a book as one document beside another text: its hash is that of no piece."""
    (tmp_path / "texts").mkdir()
    book = "".join(f"line {number} of a book\n\n" for number in range(9000))
    for name, content in (("book.txt", book), ("long.txt", book[::-1]), ("new.txt", "a new text")):
        (tmp_path / "texts" / name).write_text(content)
    trained = make(tmp_path / "texts" / "book.txt", tmp_path / "book")
    found = held_out_from(trained, tmp_path / "texts", tmp_path / "new")
    assert found.validation_documents() == [book[::-1].encode(), b"a new text"]
    found.check_disjoint()
    assert found.manifest.training_documents_removed == 1


@pytest.mark.parametrize("whole", [True, False])
def test_a_corpus_is_no_foreign_text(made: Corpus, tmp_path: Path, whole: bool) -> None:
    """Taken as text, a corpus would give its manifest as a document."""
    (tmp_path / "b.jsonl").write_bytes(lines(*(f"another {text}" for text in TEXTS)))
    other = make(tmp_path / "b.jsonl", tmp_path / "other")
    if not whole:
        (other.folder / "manifest.json").unlink()
    with pytest.raises(UserError, match="other is a corpus, and a text is needed; name the text that it was"):
        held_out_from(made, other.folder, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.fixture
def marked(tmp_path: Path) -> Corpus:
    (tmp_path / "capitals.jsonl").write_bytes(lines(*CAPITALS))
    return make(tmp_path / "capitals.jsonl", tmp_path / "marked", tokenizer_source=CaseOps(), vocabulary=300)


def test_caseops_counts_the_bytes_of_the_text(marked: Corpus) -> None:
    train, validation = marked.manifest.train, marked.manifest.validation
    assert train.source_bytes + validation.source_bytes == len("".join(CAPITALS).encode())
    for split in (train, validation):
        assert split.normalized_bytes == split.source_bytes < split.table_bytes
    assert marked.manifest.tokenizer.kind == "caseops"
    assert marked.manifest.tokenizer.round_trip is not None
    assert marked.manifest.tokenizer.round_trip.changed_documents == 0
    text = held_out_text(marked)
    assert text.source_bytes == text.normalized_bytes == sum(map(len, marked.validation_documents()))
    assert text.source_bytes == marked.tokenizer().byte_lengths(text.tokens).sum()
    assert corpora.describe(marked).endswith("lossless tokenizer")


def test_the_held_out_text_is_encoded_once_per_process(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preparing counts it; what opens the corpus afterwards counts it once, and again when a file has changed."""
    seen: Counter[bytes] = Counter()
    encode_many = ByteTokenizer.encode_many

    def counting(self: ByteTokenizer, documents: list[bytes]) -> list[Ids]:
        seen.update(documents)
        return encode_many(self, documents)

    def times() -> set[int]:
        return {seen[document] for document in held_out}

    monkeypatch.setattr(ByteTokenizer, "encode_many", counting)
    prepared = make(text, tmp_path / "out")
    held_out = prepared.validation_documents()
    assert seen.total() == len(TEXTS)
    for _ in range(2):
        held_out_text(prepared)
        held_out_text(Corpus.load(prepared.folder))
        corpora.audit_corpus(prepared)
    assert times() == {1}
    shutil.copytree(prepared.folder, tmp_path / "copy")
    for _ in range(2):
        held_out_text(Corpus.load(tmp_path / "copy"))
    assert times() == {2}, "another corpus to this process, counted once"
    os.utime(tmp_path / "copy" / corpus.VALIDATION_TEXT, (1, 1))
    held_out_text(Corpus.load(tmp_path / "copy"))
    assert times() == {3}


@pytest.mark.parametrize("byte_source", ["documents", "table", "tokens"])
@pytest.mark.parametrize("count", ["source_bytes", "normalized_bytes"])
def test_bytes_that_only_the_table_sees_are_refused(marked: Corpus, byte_source: str, count: str) -> None:
    split, hashed = marked.manifest.validation, "documents" if byte_source == "documents" else "tokens"
    forged = replace(split, **{count: split.table_bytes})
    if hashed == "tokens":
        runs = split_documents([marked.validation_tokens()], marked.manifest.tokenizer.bos)
        ids = corpus.set_sha256(corpus.document_hash(run.tobytes()) for run in runs)
        forged = replace(forged, document_set_sha256=ids)
    manifest = replace(marked.manifest, validation=forged, byte_source=byte_source, hashed=hashed)
    with pytest.raises(UserError, match=f"states {split.table_bytes:,} {count} for validation; there are"):
        Corpus(marked.folder, manifest).check_counts()


def test_a_caseops_corpus_is_reused_until_its_model_changes(marked: Corpus, tmp_path: Path) -> None:
    model = tmp_path / "own.model"
    model.write_bytes(marked.tokenizer().serialize())
    arguments = {"tokenizer_source": CaseOps(of=SentencePieceFile(path=str(model))), "vocabulary": 300}
    found = make(tmp_path / "capitals.jsonl", tmp_path / "file", **arguments)
    assert found.manifest.tokenizer.sha256 == marked.manifest.tokenizer.sha256
    model.write_bytes(SentencePieceBPE().build(300, lambda: [text.encode() for text in CAPITALS]).serialize())
    again = make(tmp_path / "capitals.jsonl", tmp_path / "file", **arguments)
    assert again.manifest.tokenizer.sha256 != marked.manifest.tokenizer.sha256
    plain = make(
        tmp_path / "capitals.jsonl",
        tmp_path / "file",
        **arguments | {"tokenizer_source": arguments["tokenizer_source"].of},
    )
    assert plain.manifest.tokenizer.kind == "sentencepiece"


def test_the_tokenizer_of_an_artifact_is_made_a_source_again(
    marked: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for tokenizer in (marked.tokenizer(), ByteTokenizer(), marked.tokenizer().of):  # type: ignore[attr-defined]
        source = corpora._tokenizer_source(tokenizer)
        assert source.build(tokenizer.vocabulary, lambda: []).sha256 == tokenizer.sha256


def test_published_caseops_shards_count_what_they_stand_for(marked: Corpus, tmp_path: Path) -> None:
    folder = tmp_path / "published"
    folder.mkdir()
    for name in ("train", "val"):
        shutil.copyfile(marked.folder / f"{name}_000000.bin", folder / f"fineweb_{name}_000000.bin")
    (tmp_path / "own.model").write_bytes(marked.tokenizer().serialize())
    source = CaseOps(of=SentencePieceFile(path=str(tmp_path / "own.model")))
    found = make(folder, tmp_path / "described", tokenizer_source=source, vocabulary=300)
    assert found.manifest.byte_source == "tokens"
    sizes = attrgetter("source_bytes", "normalized_bytes", "table_bytes")
    assert sizes(found.manifest.train) == sizes(marked.manifest.train)
    assert sizes(found.manifest.validation) == sizes(marked.manifest.validation)
    found.count_again()
    with pytest.raises(UserError, match="has no text"):
        found.validation_documents()
    assert corpora.describe(found).endswith("bytes by the tokens (no text)")


def test_a_stream_that_begins_within_a_document_counts_what_is_predicted(tmp_path: Path) -> None:
    for name in ("train", "val"):
        write_shard(tmp_path / f"a_{name}_0.bin", np.array([*b"cut", 256, *b"whole"], np.uint16))
    found = make(tmp_path, tmp_path / "out")
    assert found.manifest.validation.source_bytes == found.manifest.validation.table_bytes == 7
    assert found.manifest.byte_source == "table"
    found.count_again()


def test_a_lossy_corpus_is_described_and_audited(tmp_path: Path, real_data: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines("a\nb", "c\n\nd", "e\nf"))
    found = make(tmp_path / "a.jsonl", tmp_path / "out", **contest(real_data))
    assert corpora.describe(found).endswith(
        "; lossy tokenizer: 17 rules, 3 of 3 documents change, their length by -1 bytes"
    )
    rules = {rule.name: rule.lost_bytes for rule in corpora.audit_corpus(found)}
    assert rules["line breaks"] == b"".join(found.validation_documents()).count(b"\n") > 0
    assert sum(rules.values()) == rules["line breaks"]


# Published shards


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "fineweb10B_bytes"
    folder.mkdir()
    stream = np.concatenate([np.array([256, *text.encode()], np.uint16) for text in TEXTS])
    cut = int(np.flatnonzero(stream == 256)[12])
    write_shard(folder / "fineweb_val_000000.bin", stream[:cut])
    write_shard(folder / "fineweb_train_000000.bin", stream[cut:700])
    write_shard(folder / "fineweb_train_000001.bin", stream[700:])
    return folder


def test_published_shards_are_described_where_they_lie(shards: Path, tmp_path: Path) -> None:
    found = make(shards, tmp_path / "out")
    train, validation = found.manifest.train, found.manifest.validation
    assert (train.documents, validation.documents, found.manifest.overlap) == (48, 12, 0)
    assert (found.manifest.duplicates_removed, found.manifest.training_documents_removed) == (0, 0)
    assert validation.source_bytes == validation.table_bytes == len("".join(TEXTS[:12]))
    assert train.source_bytes == len("".join(TEXTS[12:]))
    assert (found.manifest.byte_source, found.manifest.hashed) == ("table", "tokens")
    assert [len(shard) for shard in found.train_shards()][1] == train.tokens - len(found.train_shards()[0])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "documents.npz",
        "manifest.json",
        "tokenizer.bin",
    ]
    found.check_disjoint()
    found.check_shards("train")
    with pytest.raises(UserError, match="has no text"):
        found.validation_documents()
    inode = (tmp_path / "out" / "manifest.json").stat().st_ino
    make(shards, tmp_path / "out")
    assert (tmp_path / "out" / "manifest.json").stat().st_ino == inode


def test_published_shards_are_ordered_by_their_numbers(shards: Path, tmp_path: Path) -> None:
    """Documents run on from one to the next, whatever the zeros before the numbers."""
    stream = np.array(open_shard(shards / "fineweb_val_000000.bin"))
    (shards / "fineweb_val_000000.bin").unlink()
    for number, part in enumerate(np.array_split(stream, 11)):
        write_shard(shards / f"fineweb_val_{number}.bin", part.copy())
    found = make(shards, tmp_path / "out")
    assert np.array_equal(found.validation_tokens(), stream)
    assert found.manifest.validation.documents == 12
    (shards / "fineweb_val_4.bin").unlink()
    with pytest.raises(UserError, match=r"between fineweb_val_3.bin and fineweb_val_5.bin held-out shards are missing"):
        make(shards, tmp_path / "out")


def test_published_shards_replace_no_corpus_of_another_text(made: Corpus, shards: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in made.folder.iterdir()}
    with pytest.raises(UserError, match=r"holds a corpus of another text, .*; name another folder, or delete it$"):
        make(shards, made.folder, existing="refuse")
    beside = make(shards, made.folder, existing="keep").folder
    assert beside.parent == made.folder.parent
    assert beside != made.folder
    with pytest.raises(UserError, match=r"holds a corpus of another text, .*; name another folder, or delete it$"):
        fetch_fineweb("sp1024", 1, made.folder, SILENT, Place(local=shards))
    assert {path.name: path.read_bytes() for path in made.folder.iterdir()} == before


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("byte_source", "tokens", "bytes of tokens beside hashes of documents"),
        ("tokenizer.sha256", "0" * 64, "not the tokenizer of the manifest"),
        ("tokenizer.bos", 7, "not the tokenizer of the manifest"),
        ("tokenizer.vocabulary", 299, "not the tokenizer of the manifest"),
    ],
)
def test_a_manifest_that_was_changed_is_refused(marked: Corpus, field: str, value: object, message: str) -> None:
    path = marked.folder / "manifest.json"
    facts = json.loads(path.read_text())
    inner = facts
    *outer, last = field.split(".")
    for name in outer:
        inner = inner[name]
    assert inner[last] != value
    inner[last] = value
    path.write_text(json.dumps(facts))
    with pytest.raises(UserError, match=message):
        Corpus.load(marked.folder).check_counts()


def test_a_leak_in_published_shards_is_told(shards: Path, tmp_path: Path) -> None:
    write_shard(shards / "fineweb_train_000002.bin", open_shard(shards / "fineweb_val_000000.bin").copy())
    told = RecordedProgress()
    found = make(shards, shards.parent, progress=told)
    assert found.manifest.overlap == 12
    assert any("12 validation documents are training documents too" in line for line in told.notes)
    with pytest.raises(UserError, match="12 of 12 validation documents"):
        found.check_disjoint()
    assert found.manifest.validation.shards[0].file == "fineweb10B_bytes/fineweb_val_000000.bin"


def test_text_is_compared_with_published_shards_by_tokens(shards: Path, tmp_path: Path) -> None:
    against = make(shards, tmp_path / "out")
    (tmp_path / "other.jsonl").write_bytes(lines("new", TEXTS[20], TEXTS[3]))
    found = held_out_from(against, tmp_path / "other.jsonl", tmp_path / "v")
    assert found.validation_documents() == [b"new", TEXTS[3].encode()]
    assert found.manifest.training_documents_removed == 1
    found.check_disjoint()


def test_published_shards_need_their_tokenizer(shards: Path, tmp_path: Path, real_data: Path) -> None:
    with pytest.raises(UserError, match="need the tokenizer they were made with"):
        make(shards, tmp_path / "out", tokenizer_source=SentencePieceBPE(), vocabulary=300)
    write_shard(shards / "fineweb_train_000000.bin", np.array([256, 257], np.uint16))
    with pytest.raises(UserError, match="token 257, but the tokenizer has 257 ids"):
        make(shards, tmp_path / "out")
    (shards / "fineweb_val_000000.bin").unlink()
    with pytest.raises(UserError, match="no validation shards"):
        make(shards, tmp_path / "out")


def test_the_table_method_on_the_contest_tokens(tmp_path: Path, real_data: Path) -> None:
    tokens = open_shard(real_data / "small" / "val_small_sp1024.bin")
    write_shard(tmp_path / "a_val_0.bin", tokens[:])
    write_shard(tmp_path / "a_train_0.bin", tokens[:])
    found = make(tmp_path, tmp_path / "out", **contest(real_data))
    assert found.manifest.validation.documents == 35
    assert found.manifest.validation.table_bytes == len(found.tokenizer().decode(tokens)) == 298_447
    assert found.manifest.overlap == 35
