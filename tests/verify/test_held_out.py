"""A tokenizer that has a part in the held-out text: ids of its own for it, and documents that it drops."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from caddie.data.tokenizers import ByteTokenizer
from caddie.errors import UserError
from caddie.verify.held_out import COMES_BACK, VOCABULARY, _by_bytes, check_comes_back, check_vocabulary

BYTES = ByteTokenizer()
LONG = 3000


def words(seed: int, size: int = LONG) -> bytes:
    chance = random.Random(seed)
    return " ".join(
        "".join(chance.choices("etaoinshr", k=chance.randint(2, 9))) for _ in range(size // 3 + 1)
    ).encode()[:size]


HELD_OUT, TRAIN = ([words(seed) for seed in seeds] for seeds in (range(12), range(100, 140)))


class Whole:
    """Raw bytes and an id of its own for each of some documents."""

    def __init__(self, documents: Sequence[bytes]) -> None:
        self.own = {document: BYTES.vocabulary + number for number, document in enumerate(documents)}
        self.token_bytes, self.bos = (*BYTES.token_bytes, *documents), BYTES.bos

    def stream(self, documents: Sequence[bytes]) -> Any:
        ids = [[self.own[text]] if text in self.own else BYTES.encode(text).tolist() for text in documents]
        return np.array([one for document in ids for one in (self.bos, *document)], np.uint16)


def outcome(known: Sequence[bytes], held_out: Sequence[bytes] = HELD_OUT) -> tuple[bool | None, str]:
    tokenizer: Any = Whole(known)
    check = check_vocabulary(tokenizer, tokenizer.stream(held_out), [tokenizer.stream(TRAIN)])
    assert check.name == VOCABULARY
    return check.passed, check.evidence


def test_documents_with_an_id_of_their_own_are_found() -> None:
    assert outcome([])[0] is True
    for count in (1, 5, 12):
        passed, evidence = outcome(HELD_OUT[:count])
        assert passed is False
        assert f"{count / 12:.1%} of the held-out bytes in long ids that training text does not use" in evidence


def test_a_small_share_is_doubtful() -> None:
    short = HELD_OUT[0][: LONG * 12 // 40]  # 2.7 % of the text
    assert outcome([short], [short, *HELD_OUT[1:]])[0] is None


def test_ids_of_single_training_documents_are_expected_in_others_too() -> None:
    rare = [*HELD_OUT[:2], *TRAIN[:10]]  # a sixth of the one, a quarter of the other
    passed, evidence = outcome(rare)
    assert passed is True
    assert "16.7% of the held-out bytes" in evidence
    assert "25.0% expected" in evidence


def test_a_document_that_goes_on_in_the_next_shard_is_one() -> None:
    tokenizer: Any = Whole(TRAIN[:1])
    whole = tokenizer.stream([TRAIN[1], TRAIN[0], TRAIN[1]])
    alone = np.append(tokenizer.stream([TRAIN[0]]), np.uint16(tokenizer.own[TRAIN[0]]))  # twice in one document

    def expected(shards: list[Any]) -> str:
        return check_vocabulary(tokenizer, tokenizer.stream(HELD_OUT), shards).evidence.rpartition(", ")[2]

    assert expected([whole, alone[:-1]]) == "0.0% expected"
    assert expected([tokenizer.stream(TRAIN[1:]), alone[:-1], alone[-1:]]) == "4.9% expected"


class Drops:
    """Raw bytes that keep only the first of a long document."""

    def __init__(self, longest: int, kept: int) -> None:
        self.longest, self.kept = longest, kept

    def encode_many(self, documents: Sequence[bytes]) -> list[Any]:
        return [BYTES.encode(text[: self.kept] if len(text) > self.longest else text) for text in documents]

    def decode(self, ids: Any) -> bytes:
        return BYTES.decode(ids)


@pytest.mark.parametrize(
    ("longest", "kept", "passed"),
    [(LONG, 100, True), (LONG - 1, 100, False), (LONG - 1, LONG * 7 // 8, False), (LONG - 1, LONG - 1, True)],
    ids=["no document", "nearly all", "an eighth", "a letter of each"],
)
def test_text_that_long_documents_lose_is_found(longest: int, kept: int, passed: bool) -> None:
    tokenizer: Any = Drops(longest, kept)
    check = check_comes_back(tokenizer, HELD_OUT, 1)
    assert (check.name, check.passed) == (COMES_BACK, passed)
    assert check.evidence.startswith(f"{12 * LONG:,} bytes in 12 documents")
    assert ("12 documents do not round-trip" in check.evidence) == (longest < LONG)


@pytest.mark.long
def test_long_documents_are_drawn_by_their_bytes_and_what_all_tokens_leave_out_is_told() -> None:
    """A document over the bytes that are decoded was left out unless it was drawn first."""
    long = words(50, 3 << 19)
    tokenizer: Any = Drops(1 << 20, 0)
    drawn = [seed for seed in range(20) if long in _by_bytes([*HELD_OUT, long], seed)]
    assert len(drawn) >= 19
    assert not check_comes_back(tokenizer, [*HELD_OUT, long], drawn[0]).passed
    check = check_comes_back(BYTES, HELD_OUT, 1, 0.25)
    assert (check.passed, check.evidence.split("; ")[-1]) == (
        False,
        "of all held-out bytes, its tokens leave out 25.0%",
    )


def test_other_letters_are_no_cheat() -> None:
    """Bytes that training text lacks stand in one document, as of another language."""
    assert outcome([], [*HELD_OUT[:9], "ж".encode() * LONG])[0] is True


@pytest.mark.parametrize(
    ("held_out", "train", "passes"),
    [
        ([b"\x01abcd" * 40] * 8, [b"\x01abcd" * 40] * 40, True),
        ([b"\x01ABCD" * 40] * 8, [b"\x01abcd" * 40, b"\x01ABCD"] * 40, False),
        ([b"\x01ABCD" * 40] + [b"\x01abcd" * 40] * 7, [b"\x01abcd" * 40, b"\x01ABCD"] * 40, True),
        ([b"\x01ABCD" * 40], [b"\x01abcd" * 40, b"\x01ABCD"] * 5, True),
        ([b"\x01ABCD"] * 8, [b"\x01abcd" * 40] * 40, False),
    ],
    ids=["alike", "all longer", "one document is chance", "so is one alone", "short ones count too"],
)
def test_longer_tokens_than_training_text_has(held_out: list[bytes], train: list[bytes], passes: bool) -> None:
    """Capitals are the first bytes of long pieces, which a few training documents have."""
    tokenizer = ByteTokenizer()
    tokenizer.token_bytes = tuple(piece * 8 if piece.isupper() else piece for piece in tokenizer.token_bytes)

    def shard(documents: list[bytes]) -> Any:
        return np.concatenate([[tokenizer.bos, *tokenizer.encode(text)] for text in documents]).astype(np.uint16)

    assert check_vocabulary(tokenizer, shard(held_out), [shard(train)]).passed is passes


def test_a_training_id_beyond_the_vocabulary_is_one_line() -> None:
    held_out, beyond = np.array([BYTES.bos, 5], np.uint16), np.array([BYTES.bos, 5, 65_535], np.uint16)
    with pytest.raises(UserError, match="a training shard holds ids over 256; prepare the data again"):
        check_vocabulary(BYTES, held_out, [beyond])
