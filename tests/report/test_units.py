"""Units: figures worked by hand, the contest's two readings of its bar, and the way there and back."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caddie.report.units import UNITS, bits_per_byte, convert, nats_per_byte, nats_per_token, whole_bytes

COUNTS = st.integers(1, 1 << 40)
SOURCE_BYTES = 151_080_000
"""The contest's validation text, to the four digits that its figures allow."""
TOKENS = {"SP1024": 62_021_632, "CaseOps 8192": 47_851_520}
"""Its tokens, by tokenizer."""


def test_by_hand() -> None:
    # A fair coin for each of 8 bits: 1 bit per byte, ln 2 nats per byte; two bytes to a token double it.
    nats = 8 * math.log(2)
    assert bits_per_byte(nats, 8) == 1.0
    assert nats_per_byte(nats, 8) == pytest.approx(0.693147180559945)
    assert nats_per_token(nats, 4) == pytest.approx(1.386294361119891)
    assert whole_bytes(nats) == 1.0


def test_what_entrants_stated_in_two_units() -> None:
    """openai/parameter-golf #1855 converts by the token, #1734 by the byte."""
    counts = {"tokens": TOKENS["CaseOps 8192"], "source_bytes": SOURCE_BYTES}
    assert convert(0.01992, "bits-per-byte", "nats-per-token", **counts) == pytest.approx(0.04359, abs=5e-6)
    assert convert(0.0702, "bits-per-byte", "nats-per-byte", **counts) == pytest.approx(0.0487, abs=5e-5)


def test_the_bar_of_the_contest_in_either_reading() -> None:
    counts = {"tokens": TOKENS["SP1024"], "source_bytes": SOURCE_BYTES}
    assert convert(0.005, "nats-per-byte", "bits-per-byte", **counts) == pytest.approx(0.00721348)
    by_token = convert(0.005, "nats-per-token", "bits-per-byte", **counts)
    assert by_token == 0.005 * TOKENS["SP1024"] / (math.log(2) * SOURCE_BYTES)
    assert by_token == pytest.approx(0.00296, abs=5e-6)


@given(st.floats(-1e6, 1e6), st.sampled_from(UNITS), st.sampled_from(UNITS), st.sampled_from(UNITS), COUNTS, COUNTS)
def test_every_way_leads_to_the_same_figure(cost: float, a: str, b: str, c: str, tokens: int, size: int) -> None:
    counts = {"tokens": tokens, "source_bytes": size}
    there = convert(cost, a, b, **counts)
    assert convert(cost, a, a, **counts) == cost
    assert convert(there, b, a, **counts) == pytest.approx(cost, rel=1e-12)
    assert convert(there, b, c, **counts) == pytest.approx(convert(cost, a, c, **counts), rel=1e-12)


@given(st.floats(1e-3, 1e15), COUNTS, COUNTS)
def test_conversion_agrees_with_the_rates(nats: float, tokens: int, size: int) -> None:
    figures = bits_per_byte(nats, size), nats_per_byte(nats, size), nats_per_token(nats, tokens)
    rates = dict(zip(UNITS, figures, strict=True))
    for a in UNITS:
        for b in UNITS:
            assert convert(rates[a], a, b, tokens=tokens, source_bytes=size) == pytest.approx(rates[b], rel=1e-12)
