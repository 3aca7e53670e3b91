"""The arithmetic coder: every symbol comes back, in no more bytes than the odds ask for, whatever the last bits say."""

import contextlib
import itertools
import math

import mpmath
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_strategies

from caddie.errors import UserError
from caddie.inference import range_coder as coder
from caddie.inference.range_coder import MARGIN, Decoder, Encoder

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Step = tuple[Integers, Floats]
"""Symbols, and the logits that they are coded under."""

EXTREMES = [-math.inf, math.inf, -1e308, 1e308, -1e6, 0.0, -0.0, 5e-324, 1.0, 1 / 128, 22.2, 700.0]


@st.composite
def steps(draw: st.DrawFn) -> list[Step]:
    result = []
    for _ in range(draw(st.integers(0, 4))):
        shape = draw(st.tuples(st.integers(0, 4), st.integers(1, 9)))
        values = st.one_of(st.sampled_from(EXTREMES), st.floats(-30, 30), st.floats(allow_nan=False))
        logits = draw(numpy_strategies.arrays(np.float64, shape, elements=values))
        symbols = draw(numpy_strategies.arrays(np.int64, shape[0], elements=st.integers(0, shape[1] - 1)))
        result.append((symbols, logits))
    return result


def encoded(steps: list[Step]) -> bytes:
    encoder = Encoder()
    for symbols, logits in steps:
        encoder.encode(symbols, logits)
    return encoder.finish()


def drawn(rng: np.random.Generator, count: int, vocabulary: int, rows: int = 64) -> tuple[list[Step], float]:
    """Symbols with odds as a language model gives, 2.7 nats each at 1,024 symbols, and their ideal cost in nats."""
    result, nats = [], 0.0
    for _ in range(count // rows):
        logits = rng.normal(-1.4 * np.log(np.arange(1, vocabulary + 1)), 2, (rows, vocabulary))
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        odds /= odds.sum(axis=1, keepdims=True)
        symbols = (odds.cumsum(axis=1) < rng.random((rows, 1))).sum(axis=1).clip(max=vocabulary - 1)
        nats -= float(np.log(odds[np.arange(rows), symbols]).sum())
        result.append((symbols, logits))
    return result, nats


# Everything comes back.


@pytest.mark.long
@settings(derandomize=True, deadline=None, max_examples=100)
@given(steps=steps())
def test_whatever_the_odds_every_symbol_comes_back(steps: list[Step]) -> None:
    decoder = Decoder(data := encoded(steps))
    for symbols, logits in steps:
        before = logits.copy()
        assert decoder.decode(logits).tolist() == symbols.tolist()
        assert np.array_equal(logits, before), "the caller's logits are left alone"
    assert decoder.stream() == data, "it says where the stream ends"


@pytest.mark.parametrize("vocabulary", [257, 8_192, 65_536])
def test_vocabularies_of_any_size(vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    logits = rng.normal(0, 4, (3, vocabulary))
    symbols = np.array([0, vocabulary - 1, int(logits[2].argmax())])
    decoder = Decoder(encoded([(symbols, logits), (symbols[:1], logits[:1])]))
    assert decoder.decode(logits).tolist() == symbols.tolist()
    assert decoder.decode(logits[:1]).tolist() == [0]


def test_rows_may_drop_out_and_ids_may_be_of_any_type() -> None:
    rng = np.random.default_rng(0)
    logits = [rng.normal(0, 3, (rows, 50)) for rows in (40, 40, 17, 3, 1)]
    symbols = [rng.integers(0, 50, len(rows)).astype(np.uint16) for rows in logits]
    decoder = Decoder(encoded(list(zip(symbols, logits, strict=True))))  # type: ignore[arg-type]
    for wanted, rows in zip(symbols, logits, strict=True):
        found = decoder.decode(rows)
        assert (found.dtype, found.tolist()) == (np.int64, wanted.tolist())


@pytest.mark.parametrize("last", [0, 1])
def test_a_carry_runs_through_words_that_are_full(last: int) -> None:
    """The middle two of 2**40 shares are around one half: 0.0111... until the last symbol says 0.1000... or not."""
    encoder = Encoder()
    middle = (1 << 39) - 1
    for _ in range(20):
        encoder._narrow(middle, 2, 1 << 40)
    encoder._narrow(last, 1, 2)
    data = encoder.finish()
    decoder = Decoder(data)
    for _ in range(20):
        assert decoder._find(1 << 40) - middle in (0, 1)
        decoder._narrow(middle, 2)
    assert decoder._find(2) == last
    decoder._narrow(last, 1)
    assert decoder.stream() == data
    assert data.rstrip(b"\0") == b"\x80" if last else data[:90] == b"\x7f" + 89 * b"\xff"


def test_an_interval_of_64_bits_is_wide_enough() -> None:
    """Write no word for it: that would waste four bytes."""
    encoder = Encoder()
    encoder._narrow(0, 1, 1 << 32)
    assert encoder.finish() == b""
    decoder = Decoder(b"")
    assert decoder._find(1 << 32) == 0
    decoder._narrow(0, 1)
    assert decoder._find(1 << 32) == 0
    with pytest.raises(UserError, match="ends before the tokens"):
        decoder._narrow(0, 1)


# In the bytes that the odds ask for.


def test_even_odds_among_256_symbols_are_bytes() -> None:
    assert encoded([(np.array([1, 2, 255]), np.zeros((3, 256)))]) == b"\x01\x02\xff"


def patterned(rows: int, vocabulary: int) -> Step:
    """Symbols and logits made of short fractions, far from the borders of the grid."""
    places = np.arange(rows)[:, None] * 7 + np.arange(vocabulary)
    return np.arange(rows) * 3 % vocabulary, (places * 37 % 101 - 50) / 8


def with_borders(rows: int, vocabulary: int, near: dict[tuple[int, int], float]) -> Step:
    """Return `patterned` with some logits moved to so many margins from a border."""
    symbols, logits = patterned(rows, vocabulary)
    for place, margins in near.items():
        logits[place] = (17 * place[1] % 200 - 100 - 1 / 3) / 64 + margins * MARGIN
    return symbols, logits


ROWS = [
    *("", "", "0006", "0005d543", "0005d5bbd7", "0005d5bbd7", "0005d5bbd7", "0005d5bbd678"),
    *(
        "0005d5bbd67a3c7e",
        "0005d5bbd67a1f62",
        "0005d5bbd67a0235",
        "0005d5bbd679e509",
        "0005d5bbd679c7e739",
        "0005d5bbd679aab9a80e5d",
        "0005d5bbd6798d8d1a260c",
    ),
]
"""Streams of 0 to 14 symbols."""
FORMAT = {
    "two calls": ([patterned(9, 7), patterned(4, 7)], "00013eae31f520b70caaa34d503454"),
    "two blocks": (
        [with_borders(9, 1024, {(0, 3): 0.5, (7, 1000): -0.5, (8, 0): 0.9})],
        "fffffffffe001ffd000000001074ac0af955febf4396dc0e64ff71090a578d",
    ),
    "two blocks of two rows": (
        [with_borders(3, 2731, {(0, 9): -0.9, (1, 1): 0.0, (2, 2730): 0.1})],
        "fffffffffe006efcf414ff7303cbd92e1b00b1ede48f",
    ),
    "all close": ([with_borders(2, 2, dict.fromkeys(np.ndindex(2, 2), 0.25))], "fffffffffc2ef4"),
    **{f"{rows} rows": ([patterned(rows, 5)], data) for rows, data in enumerate(ROWS)},
}


@pytest.mark.parametrize(("steps", "data"), FORMAT.values(), ids=FORMAT)
def test_the_format_stays(steps: list[Step], data: str) -> None:
    """Files that were compressed once must stay readable."""
    assert encoded(steps).hex() == data
    decoder = Decoder(bytes.fromhex(data))
    for symbols, logits in steps:
        assert decoder.decode(logits).tolist() == symbols.tolist()


@pytest.mark.parametrize(("margins", "close"), [(-1.01, False), (-0.99, True), (0.99, True), (1.01, False)])
def test_a_logit_is_close_within_the_margin(margins: float, close: bool) -> None:
    assert MARGIN == 2.0**-36
    symbols, logits = patterned(1, 100)
    alone = len(encoded([(symbols, logits)]))
    logits[0, 50] = (20 - 1 / 3) / 64 + margins * MARGIN
    more = len(encoded([(symbols, logits)])) - alone
    assert more >= 5 if close else more == 0, "40 bits say that there is one"


def test_a_logit_at_just_the_margin_is_not_close() -> None:
    place = 1 + 64 * MARGIN
    logit = (place - 1 / 3) / 64
    assert logit * 64 + 1 / 3 == place
    symbols, logits = patterned(1, 100)
    alone = len(encoded([(symbols, logits)]))
    logits[0, 50] = logit
    assert len(encoded([(symbols, logits)])) == alone


def test_logits_beyond_a_million_nats_are_clipped() -> None:
    logits = np.array([[math.inf, 1 << 20, (1 << 20) - 1, 0, -math.inf], [1, -math.inf, 0.5, 1e308, 1 << 21]])
    whole, nat = 1 << 32, round(math.exp(-1) * (1 << 32))
    assert np.diff(coder._sums(coder._places(logits))).tolist() == [[whole, whole, nat, 1, 1], [1, 1, 1, whole, whole]]


@pytest.mark.parametrize(("length", "decoded"), [(0, 3), (3, 3), (4, 7), (7, 7), (8, 11), (12, 15)])
def test_a_stream_ends_where_its_bytes_do(length: int, decoded: int) -> None:
    """Each four symbols of one byte read four bytes; the first twelve of the stream may be missing."""
    decoder = Decoder(bytes(length))
    assert decoder.decode(np.zeros((decoded, 256))).tolist() == [0] * decoded
    with pytest.raises(UserError, match=r"^the compressed stream ends before the tokens that it states; "):
        decoder.decode(np.zeros((1, 256)))


def test_what_is_certain_costs_nothing() -> None:
    assert Encoder().finish() == b""
    assert encoded([(np.zeros(0, np.int64), np.zeros((0, 9)))]) == b""
    assert encoded([(np.zeros(64, np.int64), np.zeros((64, 9)) - 60 * (np.arange(9) > 0))]) == b""
    assert Decoder(b"").decode(np.zeros((2, 9))).tolist() == [0, 0]


def test_the_impossible_costs_22_nats() -> None:
    data = encoded([(np.full(100, 1), np.tile([0.0, -math.inf], (100, 1)))])
    assert len(data) == 100 * 32 // 8  # the weight is 1 among 2**32 + 1


@pytest.mark.long
@pytest.mark.parametrize("vocabulary", [1_024, 8_192])
def test_the_cost_is_within_a_ten_thousandth_of_the_ideal(vocabulary: int) -> None:
    """The grid alone would move a sum of these many costs by about 0.1 byte."""
    drawn_steps, nats = drawn(np.random.default_rng(1), 20_480 * 1_024 // (4 * vocabulary), vocabulary)
    ideal = nats / math.log(256)
    assert ideal > 300
    assert ideal - 1 < len(encoded(drawn_steps)) < ideal * 1.0001 + 2


def test_the_grid_costs_a_hundred_thousandth_of_a_nat() -> None:
    divergence = []
    for _, logits in drawn(np.random.default_rng(2), 2_048, 1_024)[0]:
        exact = np.exp(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))
        sums = coder._sums(coder._places(logits))
        coded = np.diff(sums, axis=1) / sums[:, -1:]
        divergence.append((exact * np.log(exact / coded)).sum(axis=1))
    bound = 1 / (64**2 * 24)
    assert bound / 2 < np.mean(divergence) < bound * 1.1
    assert bound == pytest.approx(1.02e-5, abs=1e-7)


def test_weights_are_what_exact_arithmetic_gives() -> None:
    weights = coder._weights()
    with mpmath.workdps(60):
        expected = [int(mpmath.nint(mpmath.exp(mpmath.mpf(-i) / 64) * 2**32)) for i in range(len(weights))]
    assert weights.tolist() == expected
    assert weights[0] == 2**32
    assert weights[-2:].tolist() == [2, 1]


# On another machine.


@settings(derandomize=True, deadline=None, max_examples=30)
@given(seed=st.integers(0, 1 << 32))
def test_noise_in_the_last_bits_changes_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 4, (64, 100))
    symbols = rng.integers(0, 100, 64)
    data = encoded([(symbols, logits)])
    assert encoded([(symbols, logits + rng.uniform(-1e-13, 1e-13, logits.shape))]) == data
    elsewhere = logits + rng.uniform(-MARGIN, MARGIN, logits.shape) * 0.99
    assert Decoder(data).decode(elsewhere).tolist() == symbols.tolist()


def at_borders(rng: np.random.Generator, rows: int, vocabulary: int) -> Floats:
    return (rng.integers(-500, 500, (rows, vocabulary)) - 1 / 3) / 64


@settings(derandomize=True, deadline=None, max_examples=30)
@given(seed=st.integers(0, 1 << 32))
def test_logits_at_the_very_borders_decode_elsewhere(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps, elsewhere = [], []
    for _ in range(10):
        logits = at_borders(rng, 3, 20)
        noise = rng.uniform(-MARGIN, MARGIN, (2, 3, 20)) * 0.49
        steps.append((rng.integers(0, 20, 3), logits + noise[0]))
        elsewhere.append(logits + noise[1])
    decoder = Decoder(encoded(steps))
    assert [decoder.decode(rows).tolist() for rows in elsewhere] == [symbols.tolist() for symbols, _ in steps]


def test_without_the_margin_they_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coder, "MARGIN", 0.0)
    with pytest.raises((UserError, AssertionError)):
        test_logits_at_the_very_borders_decode_elsewhere.hypothesis.inner_test(0)  # type: ignore[attr-defined]


def test_a_logit_at_a_border_costs_7_bytes_and_a_short_fraction_is_not_at_one() -> None:
    rng = np.random.default_rng(0)
    symbols, away = rng.integers(0, 1_024, 8), np.round(rng.normal(0, 4, (8, 1_024)) * 128) / 128
    near = away.copy()
    near[5, 5] = at_borders(rng, 1, 1)[0, 0]
    moved = near + 1e-6 * (near != away)
    assert len(encoded([(symbols, near)])) - len(encoded([(symbols, moved)])) in (6, 7)  # 40 + 14 bits
    assert len(encoded([(symbols, away)])) == len(encoded([(symbols, moved)]))


# Bad input.


@pytest.mark.parametrize("place", [0, 9])
def test_a_logit_that_is_not_a_number_is_refused(place: int) -> None:
    logits = np.zeros((2, 5))
    logits.flat[place] = math.nan
    with pytest.raises(UserError, match=r"^a logit is not a number: .*$"):
        Encoder().encode(np.array([0, 1]), logits)
    with pytest.raises(UserError, match=r"^a logit is not a number: .*$"):
        Decoder(b"abc").decode(logits)


@pytest.mark.parametrize("symbol", [-1, 5])
def test_a_symbol_without_a_logit_is_refused(symbol: int) -> None:
    with pytest.raises(UserError, match=r"^a symbol is not among the 5 that these logits are for$"):
        Encoder().encode(np.array([0, symbol]), np.zeros((2, 5)))


@pytest.mark.long
@settings(derandomize=True, deadline=None, max_examples=50)
@given(data=st.binary(max_size=200), vocabulary=st.sampled_from([1, 2, 9, 257]))
def test_any_bytes_decode_to_symbols_or_a_user_error(data: bytes, vocabulary: int) -> None:
    logits = np.random.default_rng(0).normal(0, 3, (5, vocabulary))
    decoder = Decoder(data)
    with contextlib.suppress(UserError):
        for _ in range(30):
            assert all(0 <= symbol < vocabulary for symbol in decoder.decode(logits))


def test_a_stream_that_no_encoder_writes_is_refused() -> None:
    """The interval is not a multiple of its shares, and what is left over is used for nothing."""
    interval = (1 << 96) - (3 << 56)
    assert interval % (3 << 32)
    with pytest.raises(UserError, match=r"^the compressed stream is damaged, or was written under another model$"):
        Decoder((interval - 1).to_bytes(12, "big")).decode(np.zeros((1, 3)))


def test_a_damaged_stream_gives_other_symbols_or_a_user_error() -> None:
    rng = np.random.default_rng(0)
    whole, _ = drawn(rng, 256, 100, rows=32)
    data = encoded(whole)
    right = [symbols.tolist() for symbols, _ in whole]
    outcomes = set()
    for place, kind in itertools.product(range(0, len(data), 3), ("flip", "cut", "drop")):
        flipped = bytes([data[place] ^ 1 << int(rng.integers(8))])
        damaged = data[:place] + {"flip": flipped + data[place + 1 :], "cut": b"", "drop": data[place + 1 :]}[kind]
        decoder = Decoder(damaged)
        try:
            outcomes.add([decoder.decode(logits).tolist() for _, logits in whole] == right)
        except UserError:
            outcomes.add(None)  # type: ignore[arg-type]
    assert False in outcomes
    assert True not in outcomes
