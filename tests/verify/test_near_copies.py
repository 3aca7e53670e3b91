"""Held-out text that stands in the training text but for a letter here and there."""

import json
import random
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from caddie.data import contamination
from caddie.data.contamination import shared_ngrams
from caddie.data.corpus import Corpus, document_hash, write_hashes
from caddie.data.prepare import prepare
from caddie.data.shards import Tokens
from caddie.data.tokenizers import ByteTokenizer, RawBytes
from caddie.errors import UserError
from caddie.pack.artifact import load
from caddie.runtime.progress import SILENT, Event, Progress
from caddie.verify import verify
from caddie.verify.held_out import (
    NEAR_COPIES,
    TRAINED_ON,
    check_held_out,
    check_near_copies,
    check_training_documents,
)
from caddie.verify.probes import HELD_OUT as EQUAL

BOS = ByteTokenizer().bos


def shard(documents: Sequence[bytes]) -> Any:
    tokenizer = ByteTokenizer()
    return np.concatenate([[tokenizer.bos, *tokenizer.encode(text)] for text in documents]).astype(np.uint16)


def outcome(held_out: Sequence[bytes], train: Sequence[bytes]) -> list[tuple[bool | None, str]]:
    tokens = shard(held_out)
    split = SimpleNamespace(tokens=len(tokens), source_bytes=sum(map(len, held_out)))
    corpus: Any = SimpleNamespace(validation_tokens=lambda: tokens, manifest=SimpleNamespace(validation=split))
    checks = check_near_copies(ByteTokenizer(), corpus, [shard(train)], 1)
    assert {check.name for check in checks} <= {NEAR_COPIES}
    return [(check.passed, check.evidence) for check in checks]


def documents(count: int, seed: int, size: int = 400) -> list[bytes]:
    chance = random.Random(seed)
    return [bytes(chance.choices(range(97, 123), k=size)) for _ in range(count)]


def one_letter_changed(document: bytes) -> bytes:
    place = len(document) // 3
    return document[:place] + b"#" + document[place + 1 :]


HELD_OUT, TRAIN = documents(20, 1), documents(60, 2)
COPIES = [one_letter_changed(document) for document in HELD_OUT]


@pytest.mark.parametrize(
    ("held_out", "train", "passed", "copies"),
    [
        (HELD_OUT, TRAIN, True, 0),
        (HELD_OUT, [*TRAIN, *COPIES], False, 20),
        (HELD_OUT, [b"".join([*TRAIN, *COPIES])], False, 20),
        (HELD_OUT, [*TRAIN, *COPIES[:12]], False, 12),
        (HELD_OUT, [*TRAIN, *COPIES[:8]], True, 8),
        ([*HELD_OUT, *documents(9, 3, 2000)], [*TRAIN, *COPIES], None, 20),
        ([*HELD_OUT[:9], *documents(20, 3, 60)], [*TRAIN, *COPIES], None, 9),
        (HELD_OUT[:4], [*TRAIN, *COPIES], None, 4),
        (HELD_OUT[:4], [*TRAIN, *(text + b"#" for text in HELD_OUT)], False, 4),
        (HELD_OUT, [*TRAIN, *(document[:150] for document in HELD_OUT)], True, 0),
    ],
    ids=[
        "others",
        "all",
        "all in one",
        "more than half",
        "less than half",
        "most of the documents",
        "most of the text",
        "few",
        "few, and nearly all of the text",
        "a part of each",
    ],
)
def test_copies_are_found_by_their_share_of_the_text(
    held_out: list[bytes], train: list[bytes], passed: bool | None, copies: int
) -> None:
    [(found, evidence)] = outcome(held_out, train)
    assert found is passed
    assert evidence.startswith(f"{copies} document")
    begins = [ascii(document[:30].decode()) for document in held_out[: min(copies, 3)]]
    assert all(begin in evidence for begin in begins), "the first of them are named"


def test_a_text_that_cannot_be_compared_has_no_check() -> None:
    assert outcome([b"short"] * 9, TRAIN) == []


def test_without_training_shards_nothing_is_compared_with_them(tmp_path: Path) -> None:
    """Neither copies nor the vocabulary nor the documents of the shards."""

    def missing() -> None:
        raise UserError("gone")

    write_hashes(tmp_path, map(document_hash, TRAIN), map(document_hash, HELD_OUT))
    manifest = SimpleNamespace(byte_source="shards", validation=None)
    corpus: Any = SimpleNamespace(folder=tmp_path, manifest=manifest, train_shards=missing)
    [check] = check_held_out(ByteTokenizer(), corpus, [])
    assert (check.name, check.passed) == (EQUAL, True)
    assert check.evidence.endswith(
        "; the training text is not here, so its near copies and the vocabulary are not looked at"
    )


def counted_by_hand(held_out: Sequence[list[int]], train: Sequence[list[int]], length: int) -> list[tuple[int, int]]:
    known = {tuple(one[at : at + length]) for one in train for at in range(len(one) - length + 1)}
    grams = [[tuple(one[at : at + length]) for at in range(len(one) - length + 1)] for one in held_out]
    return [(len(found), sum(gram in known for gram in found)) for found in grams]


@pytest.mark.parametrize("seed", range(20))
def test_ngrams_are_those_counted_by_hand(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of three letters have many in common, also across the borders of chunks."""
    chance, length = random.Random(seed), 4
    monkeypatch.setattr(contamination, "_CHUNK", chance.randint(1, 40))
    made = [[[BOS, *chance.choices(range(3), k=chance.randint(0, 30))] for _ in range(count)] for count in (6, 9)]
    held_out, *shards = (np.array([*chain(*one)], np.uint16) for one in (made[0], made[1][:4], made[1][4:]))
    found = shared_ngrams(held_out, shards, BOS, length, seed)
    assert [*zip(*found, strict=True)] == counted_by_hand(*made, length)


def test_hashes_that_differ_in_a_low_bit_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float has 53 bits of their 64."""

    def first_tokens(columns: Sequence[Tokens], factors: contamination.Hashes) -> contamination.Hashes:
        return columns[0].astype(np.uint64) + np.uint64(1 << 60)

    monkeypatch.setattr(contamination, "_hash", first_tokens)
    found = shared_ngrams(np.array([10, 12, 14], np.uint16), [np.array([11, 12, 13], np.uint16)], BOS, 1, 0)
    assert found.shared.tolist() == [1]


def test_a_drawn_part_is_the_same_of_both_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    every = shared_ngrams(shard(HELD_OUT), [shard([*TRAIN, *HELD_OUT[:10]])], BOS, 50, 7)
    monkeypatch.setattr(contamination, "_ALL_TOKENS", 10_000)
    part = shared_ngrams(shard(HELD_OUT), [shard([*TRAIN, *HELD_OUT[:10]])], BOS, 50, 7)
    assert every.counted.sum() / 8 < part.counted.sum() < every.counted.sum() / 2
    assert part.shared.tolist() == [*part.counted[:10], *[0] * 10]


def test_progress_is_shown_to_the_end() -> None:
    texts = list[str]()

    class Seen(Progress):
        def step(self, event: Event) -> None:
            texts.append(event["text"])

    shared_ngrams(shard(HELD_OUT), [shard(TRAIN)] * 3, BOS, 50, 7, Seen())
    assert len(texts) == 3
    assert texts[-1] == "looking for held-out text in training text, 100%"


@pytest.mark.usefixtures("unprobed")
def test_verify_fails_a_corpus_that_trains_on_changed_copies(tiny_run: Any, tmp_path: Path) -> None:
    """Hashes of documents see nothing of it."""

    def prepared(name: str, texts: Sequence[bytes]) -> Corpus:
        lines = "".join(json.dumps({"text": text.decode()}) + "\n" for text in texts)
        (tmp_path / f"{name}.jsonl").write_text(lines)
        return prepare(
            tmp_path / f"{name}.jsonl",
            folder=tmp_path / name,
            tokenizer_source=RawBytes(),
            vocabulary=257,
            validation_fraction=0.2,
            progress=SILENT,
        )

    def failed(corpus: Corpus) -> list[str]:
        corpus.check_disjoint()
        checks = verify(load(tiny_run.artifact), 10**6, corpus=corpus).checks
        assert {NEAR_COPIES, EQUAL} <= {check.name for check in checks}
        return [check.name for check in checks if not check.passed]

    honest = prepared("honest", texts := documents(100, 4))
    assert failed(honest) == []
    copies = map(one_letter_changed, honest.validation_documents())
    assert failed(prepared("copied", [*texts, *copies])) == [NEAR_COPIES]


@pytest.mark.parametrize("hashed", ["documents", "tokens"])
def test_other_shards_than_were_hashed_are_found(hashed: str, tmp_path: Path) -> None:
    """Whoever trained on copies of the held-out text puts other shards in the place of those."""

    def check(shown: list[bytes], trip: Any = None) -> tuple[bool | None, str]:
        hashes = [document_hash(one if hashed == "documents" else shard([one]).tobytes()) for one in TRAIN]
        write_hashes(tmp_path, hashes, [])
        tokenizer: Any = SimpleNamespace(round_trip=trip)
        manifest = SimpleNamespace(tokenizer=tokenizer, hashed=hashed)
        corpus: Any = SimpleNamespace(folder=tmp_path, manifest=manifest)
        shards = [shard(shown[:20]), shard(shown[20:])]
        [found] = check_training_documents(ByteTokenizer(), corpus, shards, 1)
        assert found.name == TRAINED_ON
        return found.passed, found.evidence

    assert check(TRAIN)[0] is True
    assert check([*TRAIN[:-1], documents(1, 9)[0]])[0] is True, "the last may go on elsewhere"
    passed, evidence = check([*TRAIN[:50], *documents(10, 9)])
    assert passed is False
    assert re.fullmatch(r"\d+ of \d+ documents drawn from the shards were hashed", evidence)
    unread = SimpleNamespace(documents=60, changed_documents=60)
    assert check(documents(60, 9), unread)[0] is None, "nothing was found, and nothing could be"
    for changed, expected in ((10, True), (40, None)):
        trip = SimpleNamespace(documents=60, changed_documents=changed)
        assert check([*TRAIN[:50], *documents(10, 9)], trip)[0] is True
        assert check(documents(60, 9), trip)[0] is (None if expected is None else False)
