"""A corpus folder by hand: the bytes of its documents, what is refused when it is read, and its files."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zstandard

from caddie.data import corpus
from caddie.data import documents as sources
from caddie.data.corpus import VALIDATION_TEXT, Corpus, document_hash, read_hashes, set_sha256, write_hashes
from caddie.data.manifest import MANIFEST, Manifest, Shard, Split, TokenizerEntry
from caddie.data.shards import split_documents, write_shard
from caddie.data.tokenizers import ByteTokenizer
from caddie.errors import UserError
from caddie.files import file_sha256

BOS = ByteTokenizer.bos
STREAM = np.array([*b"cut", BOS, *b"whole", BOS, BOS, *b"x"], np.uint16)
"""Begins within a document; one is empty."""


def write_tokens(folder: Path, name: str, tokens: Sequence[int] | np.ndarray) -> Shard:
    write_shard(folder / name, np.asarray(tokens, np.uint16))
    return Shard(name, len(tokens), file_sha256(folder / name))


def save(folder: Path, validation: Split, **fields: Any) -> Corpus:
    """Write and load a corpus with nothing to train on."""
    train = Split(0, 0, 0, 0, 0, set_sha256([]), ())
    entry = TokenizerEntry.of(ByteTokenizer())
    manifest = Manifest(
        name="by hand", source="a test", inputs="", tokenizer=entry, train=train, validation=validation, **fields
    )
    corpus.write(folder, manifest, ByteTokenizer(), [], [])
    return Corpus.load(folder)


def of_stream(folder: Path, tokens: np.ndarray = STREAM, counts: Sequence[int] = ()) -> Corpus:
    """A corpus of ids without their text; with `counts`, the bytes that each accounts for."""
    hashes = [document_hash(run.tobytes()) for run in split_documents([tokens], BOS)]
    size = int(np.count_nonzero(tokens[1:] != BOS))
    split = Split(
        *(len(hashes), len(tokens), sum(counts[1:]) if counts else size, size, size, set_sha256(hashes)),
        shards=(write_tokens(folder, "val_000000.bin", tokens),),
        byte_counts=(write_tokens(folder, "val_bytes_000000.bin", counts),) if counts else (),
    )
    return save(folder, split, hashed="tokens", byte_source="sidecar" if counts else "table")


def of_documents(folder: Path, *documents: bytes) -> Corpus:
    lines = "".join(json.dumps({"text": document.decode()}) + "\n" for document in documents)
    (folder / VALIDATION_TEXT).write_bytes(zstandard.compress(lines.encode()))
    tokens = np.concatenate([[BOS, *document] for document in documents])
    size = sum(map(len, documents))
    hashes = set_sha256(map(document_hash, documents))
    shard = write_tokens(folder, "val_000000.bin", tokens)
    split = Split(len(documents), len(tokens), size, size, size, hashes, (shard,))
    return save(folder, split, hashed="documents", byte_source="documents")


def changed(found: Corpus, **fields: Any) -> Corpus:
    """The same files under a manifest with another held-out split."""
    split = replace(found.manifest.validation, **fields)
    return Corpus(found.folder, replace(found.manifest, validation=split))


# Counting


def test_the_bytes_of_each_document_are_those_that_are_predicted(tmp_path: Path) -> None:
    """The first token is context alone, and the BOS of a document ends the one before it."""
    tokens = np.append(STREAM, np.uint16(BOS))
    assert of_stream(tmp_path).document_bytes(STREAM).tolist() == [2, 5, 0, 1]
    assert of_stream(tmp_path, tokens).document_bytes(tokens).tolist() == [2, 5, 0, 1]
    assert of_stream(tmp_path, STREAM[3:]).document_bytes(STREAM[3:]).tolist() == [5, 0, 1]
    counts = [1 << place for place in range(len(STREAM))]
    assert of_stream(tmp_path, STREAM, counts).document_bytes(STREAM).tolist() == [2 + 4 + 8, 1008, 1024, 2048]
    assert of_documents(tmp_path, b"one", b"three").document_bytes(STREAM).tolist() == [3, 5]


def test_what_the_manifest_says_of_its_files_is_counted(tmp_path: Path) -> None:
    of_stream(tmp_path).count_again()
    of_stream(tmp_path, STREAM, [int(token != BOS) for token in STREAM]).count_again()
    of_stream(tmp_path, np.array([BOS, 7, BOS], np.uint16)).count_again()
    of_documents(tmp_path, b"a", b"bc").count_again()


@pytest.mark.parametrize(
    "fields",
    [{"source_bytes": 0}, {"normalized_bytes": 0}, {"table_bytes": 0}, {"tokens": 13}, {"shards": ()}],
)
def test_a_manifest_that_counts_nothing_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="the manifest miscounts the held-out text; prepare the data again"):
        changed(of_stream(tmp_path), **fields).count_again()


@pytest.mark.parametrize(
    "fields", [{"documents": 3}, {"documents": 5}, {"document_set_sha256": set_sha256([b"another"])}]
)
def test_other_documents_than_the_manifest_s_are_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="holds out other documents than its manifest says"):
        changed(of_stream(tmp_path), **fields).count_again()


def test_other_tokens_than_were_hashed_are_refused(tmp_path: Path) -> None:
    """Replace the text by an easier one with equal numbers of documents and bytes."""
    easy = write_tokens(tmp_path, "easy.bin", [*b"cat", BOS, *b"caddy", BOS, BOS, *b"y"])
    with pytest.raises(UserError, match="holds out other documents than its manifest says"):
        changed(of_stream(tmp_path), shards=(easy,)).count_again()


def test_a_held_out_document_twice_is_refused(tmp_path: Path) -> None:
    """Adaptation would know it the second time, and the hash of the set is the same."""
    with pytest.raises(UserError, match="holds a document twice"):
        of_documents(tmp_path, b"one", b"two", b"one").count_again()


def test_ids_over_those_of_the_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path} has held-out ids above 256; prepare it again"):
        of_stream(tmp_path, np.array([BOS, 257], np.uint16)).count_again()


def test_a_side_car_that_counts_a_byte_three_times_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="state 24 bytes for tokens that spell 8, so a score would be too low"):
        of_stream(tmp_path, STREAM, [3 * int(token != BOS) for token in STREAM]).count_again()


def test_a_lone_long_document_is_read_as_it_was_written(tmp_path: Path) -> None:
    document = b"a line of a book\n" * 5000
    assert of_documents(tmp_path, document).validation_documents() == [document]


def test_held_out_tokens_that_spell_nothing_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every character may have a token, and the tokenizer still make one unknown token of a word."""
    found = of_documents(tmp_path, b"ab", b"a")
    pieces = (*(bytes([byte]) for byte in range(ord("b"))), b"")
    monkeypatch.setattr(Corpus, "tokenizer", lambda self: SimpleNamespace(token_bytes=pieces))
    with pytest.raises(UserError, match="unknown-token ids are 1 of the held-out tokens and decode to nothing"):
        found.check_spelled()


def test_a_side_car_of_another_length_is_refused(tmp_path: Path) -> None:
    found = of_stream(tmp_path, STREAM, [1] * len(STREAM))
    for length in (11, 13):
        other = changed(found, byte_counts=(write_tokens(tmp_path, "other.bin", [1] * length),))
        with pytest.raises(UserError, match=f"{tmp_path}: {length} byte counts for 12 held-out tokens"):
            other.count_again()


def test_tokens_of_another_text_than_the_held_out_one_are_refused(tmp_path: Path) -> None:
    found = of_documents(tmp_path, b"ab", b"c")
    forged = changed(found, shards=(write_tokens(tmp_path, "val_000000.bin", [BOS, *b"ax", BOS, *b"c"]),))
    with pytest.raises(UserError, match="the held-out tokens are not those of the held-out documents"):
        forged.count_again()


@pytest.mark.parametrize(
    ("counts", "counted"), [((1, 1, 1), True), ((0, 5, 5), False), ((5, 0, 5), False), ((5, 5, 0), False)]
)
def test_a_corpus_just_written_is_not_counted_again_if_it_has_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: tuple[int, int, int], counted: bool
) -> None:
    monkeypatch.setattr(Corpus, "_counted", set())
    fields = dict(zip(("source_bytes", "normalized_bytes", "table_bytes"), counts, strict=True))
    stated = changed(of_documents(tmp_path, b"a"), **fields).manifest
    corpus.write(tmp_path, stated, ByteTokenizer(), [], [])
    (tmp_path / "val_000000.bin").unlink()
    if counted:
        corpus.load_counted(tmp_path).check_counts()
    else:
        with pytest.raises(UserError, match="cannot read the shard"):
            corpus.load_counted(tmp_path).check_counts()


# Spelling


def test_characters_that_no_tokens_spell_are_counted_and_three_of_them_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A character is spelled by a piece of its own, with a space before it or without, or by one for each byte."""
    pieces = (b"", b"a", b" b", b" ", b"ab", "\u00fc".encode(), b"\xc3", b" \xa9")
    monkeypatch.setattr(Corpus, "tokenizer", lambda self: SimpleNamespace(token_bytes=pieces))
    of_documents(tmp_path, "ab \u00e9".encode(), "\u00fc b".encode()).check_spelled()
    lacking = of_documents(tmp_path, "d\u00eb c".encode(), "fe\u00fcabc".encode())
    said = "no tokens spell 5 characters of the held-out text, such as 'c', 'd', 'e', so its score"
    with pytest.raises(UserError, match=said):
        lacking.check_spelled()
    Corpus(tmp_path, replace(lacking.manifest, byte_source="table", hashed="tokens")).check_spelled()
    alone = tuple(bytes([byte]) for byte in range(256))
    monkeypatch.setattr(Corpus, "tokenizer", lambda self: SimpleNamespace(token_bytes=alone))
    lacking.check_spelled()


# Files


def test_files_are_written_as_they_were_before(tmp_path: Path) -> None:
    found = of_documents(tmp_path, b"one", b"two")
    assert (tmp_path / MANIFEST).read_text() == json.dumps(asdict(found.manifest), indent=2) + "\n"
    assert (tmp_path / "tokenizer.bin").read_bytes() == ByteTokenizer().serialize()
    hashes = [document_hash(b"%d" % number) for number in range(20)]
    write_hashes(tmp_path, [*hashes, hashes[3]], hashes[:2])
    with np.load(tmp_path / "documents.npz") as arrays:
        assert (arrays["train"].dtype, arrays["train"].shape) == (np.uint8, (20, 16))
        assert arrays["train"].tobytes() == b"".join(sorted(hashes))
        assert arrays["validation"].tobytes() == b"".join(sorted(hashes[:2]))
    assert read_hashes(tmp_path, "train") == set(hashes)
    assert set_sha256(hashes) == "10a12818120d1d95916b7976564e682309f5d4c9bad9b4ee3c02f16ae55df920"


def test_a_manifest_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing removes the old manifest first, so a failure leaves no corpus."""
    found = of_documents(tmp_path, b"one")

    def fail(*_: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr(corpus, "write_hashes", fail)
    with pytest.raises(OSError, match="no room"):
        corpus.write(tmp_path, found.manifest, ByteTokenizer(), [], [])
    assert not (tmp_path / MANIFEST).exists()


def test_hashes_in_pickle_are_not_read(tmp_path: Path) -> None:
    of_documents(tmp_path, b"one")
    np.savez(tmp_path / "documents.npz", train=np.array([{}]), validation=np.array([{}]))
    with pytest.raises(UserError, match=r"documents\.npz: cannot read the document hashes \(Object arrays cannot"):
        read_hashes(tmp_path, "train")


@pytest.mark.parametrize("missing", [(), (MANIFEST,), ("documents.npz",), (MANIFEST, "documents.npz")])
def test_a_finished_corpus_has_a_manifest_and_hashes(tmp_path: Path, missing: tuple[str, ...]) -> None:
    of_documents(tmp_path, b"one")
    for name in missing:
        (tmp_path / name).unlink()
    assert corpus.is_corpus(tmp_path) == (not missing)


def test_a_corpus_is_reused_for_the_same_inputs_and_with_all_its_shards(tmp_path: Path) -> None:
    found = of_stream(tmp_path, STREAM, [1] * len(STREAM))
    made = corpus.reusable(tmp_path, "")
    assert made is not None
    assert made.manifest == found.manifest
    assert corpus.reusable(tmp_path, "other") is None
    (tmp_path / "val_bytes_000000.bin").unlink()
    assert corpus.reusable(tmp_path, "") is None
    assert corpus.reusable(tmp_path / "nowhere", "") is None


def test_shards_are_opened_before_they_are_hashed(tmp_path: Path) -> None:
    found = of_stream(tmp_path, STREAM, [1] * len(STREAM))
    found.check_shards("validation")
    found.check_shards("train")
    write_tokens(tmp_path, "val_bytes_000000.bin", [1] * 3)
    with pytest.raises(UserError, match=r"val_bytes_000000\.bin: 3 tokens, but the manifest says 12"):
        found.check_shards("validation")
    write_tokens(tmp_path, "val_bytes_000000.bin", [2] * len(STREAM))
    with pytest.raises(UserError, match=r"val_bytes_000000\.bin: changed since it was prepared"):
        found.check_shards("validation")


@pytest.mark.parametrize("kind", ["documents", "tokens"])
def test_training_documents_are_found_by_the_other_kind_of_hash(kind: str, tmp_path: Path) -> None:
    """Hashes of two kinds never agree, so a corpus whose manifest changes the kind proved everything to be held out."""
    text = b"whole"
    if kind == "documents":
        found, other = of_documents(tmp_path, text, b"other"), np.array([BOS, *text], np.uint16).tobytes()
        own = [document_hash(one) for one in (text, b"other")]
    else:
        found, other = of_stream(tmp_path), text
        own = [document_hash(ids.tobytes()) for ids in split_documents([STREAM], BOS)]
    write_hashes(tmp_path, [], own)
    found.check_disjoint()
    write_hashes(tmp_path, [document_hash(other)], own)
    train = replace(found.manifest.train, document_set_sha256=set_sha256([document_hash(other)]))
    forged = Corpus(tmp_path, replace(found.manifest, train=train))
    with pytest.raises(UserError, match=r"1 of \d validation documents drawn from .* by hashes of (documents|tokens);"):
        forged.check_disjoint()


def test_a_document_that_its_tokens_change_into_a_training_document_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer in lower case makes `Whole` of `whole`; only the text as it came is hashed."""
    found = of_documents(tmp_path, b"Whole", b"other")
    write_hashes(tmp_path, [document_hash(b"whole")], [document_hash(one) for one in (b"Whole", b"other")])
    train = replace(found.manifest.train, document_set_sha256=set_sha256([document_hash(b"whole")]))
    monkeypatch.setattr(ByteTokenizer, "decode", lambda self, ids: bytes(ids.tolist()).lower())
    Corpus(tmp_path, replace(found.manifest, train=train)).check_disjoint()


def test_hashes_of_ids_show_it_by_a_training_shard(tmp_path: Path) -> None:
    """Hashes of text may be called hashes of ids; no held-out ids are found among them."""
    stream = of_stream(tmp_path)
    assert not stream.shows_hashed_tokens(), "it has no training shard"
    assert stream.manifest.training_set == f"tokens:{set_sha256([])}"
    shard = write_tokens(tmp_path, "train_000000.bin", STREAM)
    hashes = [document_hash(run.tobytes()) for run in split_documents([STREAM], BOS)]
    train = replace(stream.manifest.train, shards=(shard,), document_set_sha256=set_sha256(hashes))
    for kind, found in (("ids", hashes), ("text", [document_hash(b"a text")])):
        write_hashes(tmp_path, found, [])
        assert Corpus(tmp_path, replace(stream.manifest, train=train)).shows_hashed_tokens() == (kind == "ids")
    assert not Corpus(tmp_path, replace(stream.manifest, train=train, hashed="documents")).shows_hashed_tokens()


def check_all(folder: Path) -> None:
    found = Corpus.load(folder)
    found.check_counts()
    found.check_disjoint()


@pytest.mark.parametrize("name", [MANIFEST, "tokenizer.bin", "val_000000.bin", "documents.npz"])
def test_a_device_in_place_of_a_file_is_refused_at_once(name: str, tmp_path: Path) -> None:
    of_documents(tmp_path, b"a text", b"another")
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(UserError, match="not a regular file"):
        check_all(tmp_path)


def test_held_out_text_that_unpacks_to_more_than_is_stated_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, many = of_documents(tmp_path, b"a text", b"another"), 100_000
    (tmp_path / VALIDATION_TEXT).write_bytes(zstandard.compress(b'{"text": "a text"}\n' * many))
    read: list[bytes] = []
    monkeypatch.setattr(sources, "_json_text", lambda *given: read.append(b"a text") or b"a text")
    with pytest.raises(UserError, match="not the text of the manifest"):
        found.validation_documents()
    assert len(read) < 5
    monkeypatch.setattr(sources, "LONGEST_LINE", 10)
    with pytest.raises(UserError, match="a line of more than 10 bytes"):
        found.validation_documents()
