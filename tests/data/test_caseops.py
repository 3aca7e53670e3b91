"""CaseOps: nothing is lost, every byte is counted once, and the contest's strings and side-cars are reproduced."""

import random
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from parity import facts

from caddie.data.tokenizers.caseops import ALLCAPS, CAPNEXT, ESC, SYMBOLS, TITLE, byte_lengths, decode, encode

quick = settings(derandomize=True, deadline=None, max_examples=150)
ODD = [*SYMBOLS, *"aAzZxX '.1\n", "É", "é", "e\u0301", "ǅ", "ß", "İ", "ı", "ſ", "K", "Ａ", "\ud7ff", "\U0010ffff"]
dense = st.lists(st.sampled_from(ODD)).map("".join)
texts = st.one_of(st.text(), dense).map(str.encode)
anything = st.one_of(
    texts, st.binary(), st.lists(st.sampled_from([b"\xee", b"\x80", b"\x81", b"\x84", b"A", b"a"])).map(b"".join)
)


@pytest.fixture(scope="module")
def recorded(parity: Path) -> dict[str, Any]:
    return dict(facts(parity / "components" / "bytes" / "caseops"))


# By hand


@pytest.mark.parametrize(
    ("text", "encoded"),
    [
        ("", ""),
        ("all lower", "all lower"),
        ("A Word", "<a <word"),
        ("NASA and eBay", "^nasa and e>bay"),
        ("McDonald HTTPServer", "<mc>donald <h>t>t>p>server"),
        ("DON'T", "^don'<t"),
        ("ÉCOLE Straße", "É^cole <straße"),
        ("ǅ İ Ａ", "ǅ İ Ａ"),
        ("a\ue001B", "a/\ue001<b"),
        ("\ue004\ue003", "/\ue004/\ue003"),
    ],
)
def test_marks_by_hand(text: str, encoded: str) -> None:
    for sign, mark in zip("<^>/", SYMBOLS, strict=True):
        encoded = encoded.replace(sign, mark)
    assert encode(text.encode()).decode() == encoded


def test_bytes_by_hand() -> None:
    pieces = [TITLE, b"the", b" " + ALLCAPS, b"n", b"asa e" + CAPNEXT, b"b", ESC, ALLCAPS, "É".encode()]
    assert byte_lengths(pieces).tolist() == [0, 3, 1, 1, 5, 1, 0, 3, 2]
    assert decode(b"".join(pieces)).decode() == "The NASA eB\ue002É"
    assert byte_lengths([]).tolist() == []
    assert byte_lengths([b"", b"ab"]).tolist() == [0, 2]


# Any text


@quick
@given(anything)
@example("ǅ ß İ K ſ ﬁ e\u0301 A\u0301".encode())
@example(b"\xee\x80A\xee\x80\x81 \xee\xee\x80\x84\x80\x81B")
def test_every_byte_comes_back(text: bytes) -> None:
    encoded = encode(text)
    assert decode(encoded) == text


@quick
@given(texts)
def test_only_ascii_letters_and_marks_change(text: bytes) -> None:
    encoded = encode(text)
    assert not any(0x41 <= byte <= 0x5A for byte in encoded), "no capital is left"
    kept = encoded.decode().translate(dict.fromkeys(map(ord, SYMBOLS)))
    assert kept.encode() == text.decode().translate(dict.fromkeys(map(ord, SYMBOLS))).encode().lower()


@pytest.mark.long
@quick
@given(anything, st.lists(st.integers(0, 200)))
def test_pieces_count_what_they_stand_for_however_they_are_cut(text: bytes, cuts: list[int]) -> None:
    encoded = encode(text)
    places = [0, *sorted(min(cut, len(encoded)) for cut in cuts), len(encoded)]
    pieces = [encoded[begin:end] for begin, end in pairwise(places)]
    lengths = byte_lengths(pieces)
    assert lengths.sum() == len(text)
    assert all(0 <= length <= len(piece) for length, piece in zip(lengths, pieces, strict=True))


@pytest.mark.long
@quick
@given(anything)
def test_text_that_was_never_encoded_has_the_bytes_that_are_read(data: bytes) -> None:
    read = decode(data)
    assert byte_lengths([data]).tolist() == [len(read)]
    assert decode(encode(read)) == read


def test_stray_marks_apply_to_what_letters_follow() -> None:
    assert decode(b"a" + TITLE + b"b") == b"aB"
    assert decode(b"a" + ALLCAPS + b"bc D" + CAPNEXT) == b"aBC D"
    assert decode(TITLE + CAPNEXT + b"x" + ESC + b"y" + TITLE + b" z") == b"Xy z"


@pytest.mark.long
def test_long_runs_take_linear_time() -> None:
    parts = [b"a" * 200_000, b"A" * 200_000, b"aA" * 100_000, ESC * 100_000, (ALLCAPS + b"a" + CAPNEXT) * 50_000]
    random.Random(0).shuffle(parts)
    begin = time.perf_counter()
    for text in parts:
        assert decode(encode(text)) == text
        decode(text)
    assert time.perf_counter() - begin < 5


# The contest's


def test_the_contests_strings_are_reproduced(recorded: dict[str, Any]) -> None:
    assert list(recorded["control characters"].values()) == list(SYMBOLS)
    assert recorded["pairs"]
    for pair in recorded["pairs"]:
        text, encoded = pair["text"].encode(), pair["encoded"].encode()
        assert encode(text) == encoded
        assert decode(encoded) == text


def test_the_contests_side_cars_are_reproduced(recorded: dict[str, Any]) -> None:
    for pair in recorded["pairs"]:
        lengths = byte_lengths([surface.encode() for surface in pair["surfaces"]])
        assert lengths.tolist() == pair["byte count per token"], pair["text"]
        assert lengths.sum() == pair["sum"]


def test_the_contests_decoder_reads_the_same_and_refuses_what_is_never_encoded(recorded: dict[str, Any]) -> None:
    cases = recorded["decoder on unusual input"]
    assert {case["decoded"] is None for case in cases} == {True, False}
    for case in cases:
        encoded = case["encoded"].encode()
        if case["decoded"] is None:
            assert encode(decode(encoded)) != encoded, "no text has this encoding"
            assert byte_lengths([encoded]).tolist() == [len(decode(encoded))]
        else:
            assert decode(encoded).decode() == case["decoded"]
            assert byte_lengths([encoded]).tolist() == case["byte_counts_as_one_piece"]
