"""The audit: every rule that a tokenizer breaks is named and counted, and no other."""

import time
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
import real_text
from hypothesis import given, settings
from hypothesis import strategies as st

from caddie.data.round_trip_audit import Rule, audit
from caddie.data.tokenizers import ByteTokenizer, CaseOpsTokenizer, SentencePieceTokenizer

LOSSY = [
    "leading spaces",
    "repeated spaces",
    "trailing spaces",
    "line breaks",
    "tabs",
    "spaces beyond ASCII",
    "zero-width characters",
    "control characters",
    "SentencePiece's mark",
    "replacement characters",
    "bytes that are not UTF-8",
    "canonical equivalents",
    "ligatures",
    "fractions",
    "superscripts and subscripts",
    "full and half width",
    "other compatibility characters",
]
"""Normalization of the contest's models: nmt_nfkc, white space collapsed."""


class Changing(ByteTokenizer):
    """Bytes, of a text that was changed."""

    def __init__(self, change: Callable[[str], str]) -> None:
        super().__init__()
        self.change = change

    def encode_many(self, documents):  # type: ignore[no-untyped-def]
        texts = (document.decode(errors="surrogateescape") for document in documents)
        return super().encode_many([self.change(text).encode(errors="surrogateescape") for text in texts])


def lossy(rules: list[Rule]) -> list[str]:
    return [rule.name for rule in rules if rule.lossy]


def counts(rules: list[Rule]) -> dict[str, tuple[int, int]]:
    return {rule.name: (rule.lost_bytes, rule.net_bytes) for rule in rules if rule.lost_bytes or rule.net_bytes}


@pytest.fixture(scope="module")
def contest(real_data: Path) -> SentencePieceTokenizer:
    return real_text.contest(real_data)


def test_a_lossless_tokenizer_breaks_no_rule() -> None:
    rules = audit(ByteTokenizer(), [b"any\n text \xff\0", "ﬁ".encode()])
    assert len(rules) > 20
    assert len({rule.name for rule in rules}) == len(rules)
    assert not lossy(rules)
    assert not counts(rules)


CHANGES: dict[str, Callable[[str], str]] = {
    "space put in front": lambda text: " " + text if text else text,
    "leading spaces": lambda text: text.lstrip(" "),
    "trailing spaces": lambda text: text.rstrip(" "),
    "line breaks": lambda text: text.replace("\n", " "),
    "tabs": lambda text: text.replace("\t", ""),
    "NUL": lambda text: text.replace("\0", " "),
    "capitals": str.lower,
    "private-use characters": lambda text: text.replace("\ue001", ""),
    "canonical equivalents": lambda text: unicodedata.normalize("NFD", text),
    "characters without a piece": lambda text: text.replace("中", "⁇"),
    "bytes that are not UTF-8": lambda text: text.encode(errors="surrogateescape").decode(errors="replace"),
}
DOCUMENTS = [b" A\0\tb\n\n", "Éa 中\ue001".encode(), b"  \xe4\xb8 x ", b"", b" ", b"kept"]


@pytest.mark.parametrize("name", CHANGES)
def test_one_change_breaks_one_rule(name: str) -> None:
    tokenizer = Changing(CHANGES[name])
    rules = audit(tokenizer, DOCUMENTS)
    assert lossy(rules) == [name]
    (found,) = (rule for rule in rules if rule.lossy)
    assert tokenizer.decode(tokenizer.encode(found.before)) == found.after != found.before
    after = [tokenizer.decode(tokenizer.encode(document)) for document in DOCUMENTS]
    assert counts(rules) == {name: (found.lost_bytes, sum(map(len, DOCUMENTS)) - sum(map(len, after)))}
    assert f"{name}: " in str(found)
    assert str(found).isprintable()


def test_every_byte_is_counted_once_by_hand() -> None:
    def change(text: str) -> str:
        return " ".join(unicodedata.normalize("NFKC", text).split())

    rules = audit(Changing(change), ["  a\n\n\tb ½ ﬁ…  c\u3000²e\u0301 \n".encode(), b"as it was"])
    assert counts(rules) == {
        "leading spaces": (2, 2),
        "repeated spaces": (1, 1),
        "trailing spaces": (1, 1),
        "line breaks": (3, 2),
        "tabs": (1, 1),
        "spaces beyond ASCII": (3, 2),
        "canonical equivalents": (3, 1),
        "ligatures": (3, 1),
        "fractions": (2, -3),
        "superscripts and subscripts": (2, 1),
        "other compatibility characters": (3, 0),
    }


def test_what_no_rule_explains_is_other_and_the_rest_is_still_attributed() -> None:
    rules = audit(
        Changing(lambda text: text.replace("cat", "dogs").replace("\n", " ")), [b"one\ncat\nfell\n", b"a cat"]
    )
    assert counts(rules) == {"line breaks": (3, 0), "other": (6, -2)}
    assert rules[-1] == Rule("other", b"cat", b"dogs", 6, -2)
    gone = audit(Changing(lambda text: ""), [b"a b"])
    assert sum(rule.net_bytes for rule in gone) == 3


def test_an_example_from_the_documents_where_none_of_the_table_shows_it() -> None:
    (found,) = (
        rule for rule in audit(Changing(lambda text: text.replace("\u2009", " ")), ["a\u2009b".encode()]) if rule.lossy
    )
    assert found == Rule("spaces beyond ASCII", "\u2009".encode(), b" ", 3, 2)


def test_lines_for_people() -> None:
    assert str(Rule("tabs", b"a\tb", b"a b", 4, 0)) == r"tabs: 'a\tb' comes back as 'a b'; 4 bytes lost, +0 in length"
    assert str(Rule("fractions", "½".encode(), "1⁄2".encode(), 2, -3)).endswith("; 2 bytes lost, +3 in length")
    assert str(Rule("bytes", b"a\xff", b"a")) == r"bytes: b'a\xff' comes back as 'a'"
    assert str(Rule("accents", "e\u0301".encode(), "é".encode())) == r"accents: 'e\u0301' comes back as 'é'"


# The contest's models


def test_the_contests_models_break_these_rules(contest: SentencePieceTokenizer) -> None:
    rules = {rule.name: rule for rule in audit(contest)}
    assert [name for name, rule in rules.items() if rule.lossy] == LOSSY
    assert (rules["line breaks"].before, rules["line breaks"].after) == (b"a\nb", b"a b")
    assert (rules["fractions"].after.decode(), rules["full and half width"].after) == ("1⁄2", b"1")


def test_caseops_over_a_contest_model_loses_what_the_model_loses(contest: SentencePieceTokenizer) -> None:
    assert lossy(audit(CaseOpsTokenizer(contest))) == LOSSY


@pytest.mark.long
def test_real_text_is_explained_to_the_byte(contest: SentencePieceTokenizer, real_data: Path) -> None:
    documents = real_text.held_out_documents(real_data)
    begin = time.perf_counter()
    rules = audit(contest, documents)
    assert time.perf_counter() - begin < 3, "0.5 s on one core"
    assert counts(rules) == {
        "repeated spaces": (4, 4),
        "line breaks": (1186, 0),
        "superscripts and subscripts": (3, 1),
        "other compatibility characters": (308, -7),
    }
    assert sum(rule.net_bytes for rule in rules) == 298_445 - 298_447


pieces = st.lists(
    st.sampled_from([" ", "  ", "\n", "a", "Ｂ", "½", "ﬁ", "e\u0301", "\u0301", "\u200b", "ｶﾞ", "¨", "\0", "▁", "x"])
)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.one_of(st.binary(max_size=9), pieces.map(lambda parts: "".join(parts).encode())), max_size=4))
def test_the_net_bytes_add_up_on_any_text(contest: SentencePieceTokenizer, documents: list[bytes]) -> None:
    rules = audit(contest, documents)
    after = [contest.decode(contest.encode(document)) for document in documents]
    assert sum(rule.net_bytes for rule in rules) == sum(map(len, documents)) - sum(map(len, after))
    assert sum(rule.lost_bytes for rule in rules) <= sum(map(len, documents))
    assert all(rule.lossy for rule in rules if rule.lost_bytes or rule.net_bytes)
