"""Array codecs: every array comes back, anything else is refused, and the bytes are few and the same everywhere."""

import hashlib
import math
import random
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_strategies
from parity import facts

from caddie.config import field_types, variants
from caddie.config.field_docs import descriptions
from caddie.errors import UserError
from caddie.pack.codecs import Brotli, Codec, Lzma, Stored, Zlib, Zstd
from caddie.pack.coding import ArrayCodec, EntropyModel, Packed, Smallest, decode, packed
from caddie.pack.coding import entropy_model as model
from caddie.pack.coding.packed import nearest_rows
from caddie.pack.coding.priors import CONTEXTS, FRACTION_BITS, PER_OCTAVE, PRIOR_BITS, contexts, log2, priors, width
from caddie.pack.coding.symbols import Meter, Writer

Array = npt.NDArray[Any]

CODECS: dict[str, ArrayCodec] = {
    "EntropyModel": EntropyModel(),
    "Smallest": Smallest(also=(Packed(codec=Zlib(level=1)),)),
    "Packed": Packed(codec=Brotli(quality=1)),
    "Packed, columns": Packed(codec=Zlib(level=1), columns=True),
    "Packed, shuffle": Packed(codec=Stored(), shuffle=True),
    "Packed, sort_rows": Packed(codec=Lzma(preset=0, extreme=False), sort_rows=True),
    "Packed, everything": Packed(codec=Zstd(level=1), columns=True, shuffle=True, sort_rows=True),
}
DTYPES = [np.dtype(name) for name in ("?", "i1", "u1", "<i2", ">i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", ">f8")]
SHAPES = numpy_strategies.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9)
ARRAYS = st.sampled_from(DTYPES).flatmap(lambda dtype: numpy_strategies.arrays(dtype, SHAPES))
quick = settings(derandomize=True, deadline=None, max_examples=25)


def same(found: Array, wanted: Array) -> bool:
    """Equal in dtype, shape and every bit."""
    return (found.dtype, found.shape) == (wanted.dtype, wanted.shape) and found.tobytes() == wanted.tobytes()


def returns(codec: ArrayCodec, array: Array) -> bytes:
    data = codec.encode(array)
    found = decode(data, array.dtype, array.shape)
    assert same(found, array)
    assert found.flags.c_contiguous, "what reads rows of it would be slow"
    return data


def gaussian(rows: int, columns: int, deviation: float = 2.4, by_column: float = 0.0, by_row: float = 0.0) -> Array:
    chance = np.random.default_rng(rows + columns)
    scales = np.exp(chance.normal(0, by_column, (1, columns)) + chance.normal(0, by_row, (rows, 1)))
    values = np.rint(chance.normal(0, 1, (rows, columns)) * scales * deviation)
    return np.clip(values, -127, 127).astype(np.int8)


def entropy(values: Array) -> float:
    """Bytes."""
    counts = np.unique(values, return_counts=True)[1]
    return float((counts * np.log2(values.size / counts)).sum()) / 8


# Everything comes back.


def test_the_variants_are_documented():
    assert set(variants(ArrayCodec)) >= {"EntropyModel", "Packed", "Smallest"}
    for variant in variants(ArrayCodec).values():
        assert set(descriptions(variant)) == set(field_types(variant))
        assert ArrayCodec.from_json(variant().to_json()) == variant()


@pytest.mark.parametrize("name", CODECS)
def test_any_array_comes_back(name):
    @quick
    @given(array=ARRAYS)
    def check(array: Array) -> None:
        assert returns(CODECS[name], array) == CODECS[name].encode(array.copy())

    check()


@pytest.mark.long
@pytest.mark.parametrize("name", CODECS)
def test_odd_arrays_come_back(name):
    codec = CODECS[name]
    for dtype in DTYPES:
        limits = np.array([0, 1]) if dtype.kind == "b" else None
        if dtype.kind in "iu":
            info = np.iinfo(dtype)
            limits = np.array([info.min, info.max, 0, info.max // 2], dtype)
        if dtype.kind == "f":
            limits = np.array([np.nan, np.inf, -np.inf, -0.0, 1.0], dtype)
        assert limits is not None
        pool = limits.astype(dtype)
        returns(codec, np.resize(pool, 40))
        returns(codec, np.resize(pool, (7, 9)))
        returns(codec, np.full((5, 6), pool[0]))
        returns(codec, pool[1].reshape(()))
        for shape in ((0,), (0, 3), (3, 0), (2, 0, 4)):
            returns(codec, np.empty(shape, dtype))
    cube = np.arange(4 * 5 * 6, dtype=np.int16).reshape(4, 5, 6)
    for view in (cube[::2, ::-1, 1:], cube.T, np.asfortranarray(cube[0]), np.broadcast_to(cube[0, 0], (3, 6))):
        returns(codec, view)


@pytest.mark.long
def test_rare_large_values_come_back_and_cost_little():
    array = gaussian(64, 64).astype(np.int32)
    few = len(returns(EntropyModel(), array))
    array[3, 5], array[60, 2], array[9, 9] = 2**31 - 1, -(2**31), 255
    assert len(returns(EntropyModel(), array)) < few + 100


def test_what_is_not_a_number_is_refused():
    for array in (np.array(["a"]), np.array([1j]), np.array([None]), np.array([], "M8[s]"), np.zeros(1, "V3")):
        for codec in CODECS.values():
            with pytest.raises(UserError, match="cannot be coded"):
                codec.encode(array)
        with pytest.raises(UserError, match="cannot be coded"):
            decode(b"\0", array.dtype, array.shape)


def test_a_codec_that_readers_do_not_know_is_refused():
    class Own(Codec):
        def encode(self, data: bytes) -> bytes:
            return data

        def decode(self, data: bytes, size: int) -> bytes:
            return data

    with pytest.raises(UserError, match="Own is not one of Stored"):
        Packed(codec=Own()).encode(np.zeros(3))


# Everything else is refused.


@pytest.mark.parametrize(
    "array",
    [
        pytest.param(gaussian(9, 12), marks=pytest.mark.long),
        gaussian(70, 1)[:, 0],
        pytest.param(np.arange(30, dtype=np.int32) * 99, marks=pytest.mark.long),
    ],
)
def test_damage_to_the_entropy_model_is_found(array):
    stream = EntropyModel().encode(array)
    wrong = [stream[:end] for end in range(len(stream))]
    wrong += [stream + tail for tail in (b"\0", b"\1", bytes(4), b"abcd", stream)]
    for place in range(1, len(stream)):
        for flip in (1, 128, 255):
            wrong.append(stream[:place] + bytes([stream[place] ^ flip]) + stream[place + 1 :])
    for bad in wrong:
        with pytest.raises(UserError):
            decode(bad, array.dtype, array.shape)
    for dtype, shape in (
        (np.int8, (109,)),
        (np.int8, (12, 9)),
        (np.int16, (7,)),
        (np.int32, (0,)),
        (np.float32, (60,)),
    ):
        with pytest.raises(UserError):
            decode(stream, dtype, shape)


@pytest.mark.parametrize("name", [name for name in CODECS if name.startswith("Packed")])
def test_damage_to_packed_bytes_is_found(name):
    array = gaussian(12, 20).astype(np.int16)
    stream = CODECS[name].encode(array)
    for end in range(len(stream)):
        with pytest.raises(UserError):
            decode(stream[:end], array.dtype, array.shape)
    with pytest.raises(UserError):
        decode(stream + b"\0", array.dtype, array.shape)
    for place in range(len(stream)):
        damaged = stream[:place] + bytes([stream[place] ^ 20]) + stream[place + 1 :]
        try:
            found = decode(damaged, array.dtype, array.shape)
        except UserError:
            continue
        assert same(found, array), "a bit that means nothing, as the last of a stream may have"


def test_noise_is_refused():
    chance = random.Random(0)
    for size in range(200):
        noise = chance.randbytes(size)
        for first in (b"", b"\0", b"\1", b"\7"):
            with pytest.raises(UserError):
                decode(first + noise, np.int8, (40, 70))


def test_a_short_stream_for_a_large_array_ends_soon():
    stream = EntropyModel().encode(gaussian(20, 20))
    tracemalloc.start()
    with pytest.raises(UserError):
        decode(stream, np.int8, (1000, 1000))
    assert tracemalloc.get_traced_memory()[1] < 12 << 20
    tracemalloc.stop()


def test_an_order_of_rows_that_is_none_is_refused():
    array = gaussian(3, 2)
    stream = Packed(codec=Stored(), sort_rows=True).encode(array)
    assert stream[4:10] in (b"\0\0\1\0\2\0", b"\0\0\2\0\1\0")
    for wrong in (b"\0\0\1\0\1\0", b"\0\0\1\0\3\0"):
        with pytest.raises(UserError, match="not one whole array of 3 x 2 int8"):
            decode(stream[:4] + wrong + stream[10:], np.int8, (3, 2))


# Layouts


def test_layouts_as_the_records_have_them(parity):
    recorded = facts(parity / "components" / "quantisation" / "byte_level")
    rows = recorded["row ordering by nearest L1 neighbour"]
    assert nearest_rows(np.array(rows["matrix"], np.int8)).tolist() == rows["order"]
    cases = recorded["byte de-interleave with stride 2"]
    assert cases
    for case in cases:
        data, tagged = bytes.fromhex(case["in"]), bytes.fromhex(case["out"])
        if len(data) % 2 == 0:
            stream = Packed(codec=Stored(), shuffle=True).encode(np.frombuffer(data, "<u2"))
            assert stream[4:] == tagged[5:], "behind four letters and the stride"


def test_layouts_by_hand():
    array = np.array([[0x0102, 0x0304], [0x0506, 0x0708]], np.int16)
    layouts = {
        (False, False): "02010403 06050807",
        (True, False): "02010605 04030807",
        (False, True): "02040608 01030507",
        (True, True): "02060408 01050307",
    }
    for (columns, shuffle), wanted in layouts.items():
        stream = Packed(codec=Stored(), columns=columns, shuffle=shuffle).encode(array)
        assert stream[4:] == bytes.fromhex(wanted)
    near = np.array([[0, 0], [9, 9], [1, 0], [0, 1]], np.uint8)
    assert nearest_rows(near).tolist() == [0, 2, 3, 1], "the first of two that are as near"


# The model


def test_logarithms_in_integers():
    numbers = np.array([0, 1, 2, 3, 4, 1023, 1024, 10**6, 2**52])
    exact = [PER_OCTAVE * math.log2(max(number, 1)) for number in numbers.tolist()]
    assert all(-0.1 < wanted - found < 1.1 for found, wanted in zip(log2(numbers).tolist(), exact, strict=True))
    assert log2(2 ** np.arange(50)).tolist() == [PER_OCTAVE * power for power in range(50)]


def test_priors_are_distributions_of_the_magnitude_they_are_for():
    found = priors()
    assert found.shape == (6, CONTEXTS, 256)
    assert found.min() >= 1
    sums = 2 * found.sum(axis=2) - found[..., 0]
    assert np.abs(sums - (1 << PRIOR_BITS)).max() <= 3 * 256
    means = 2 * ((found - 1) * np.arange(256)).sum(axis=2) / sums
    wanted = 2.0 ** (np.arange(CONTEXTS) / 4 - 8)
    middle = slice(12, 56)
    assert np.abs(np.log2(means / wanted))[:, middle].max() < 0.25
    assert (np.diff(means, axis=1) >= 0).all()
    # one sigma of 2: exp(-k^2 / 8)
    narrow = found[0, contexts(np.array(log2(np.array(int(1.58 * 2**FRACTION_BITS))))).item()]
    assert narrow[0] / narrow[2] == pytest.approx(math.exp(0.5), rel=0.15)


def test_what_the_coder_is_given_makes_its_arithmetic_exact():
    weights = model._weights(priors()[2, :, :32] * 9, np.zeros((CONTEXTS, 32), np.int64), 1)
    assert (weights.sum(axis=1) == (1 << 24) - 32).all()
    assert weights.min() >= 0
    # The same bytes from an ANS coder in a few lines of integers, under odds of weight + 1 in 2**24.
    symbols = np.random.default_rng(0).integers(0, 32, 500).astype(np.int32)
    writer = Writer()
    writer.code(symbols, weights[[20, 45]], np.array([300, 200]))
    state, words = 1 << 24 | 77, []
    for place in reversed(range(500)):
        odds = weights[20 if place < 300 else 45] + 1
        share, start = int(odds[symbols[place]]), int(odds[: symbols[place]].sum())
        if state >> 40 >= share:
            words.append(state & 0xFFFFFFFF)
            state >>= 32
        state = (state // share << 24) + start + state % share
    while state:
        words.append(state & 0xFFFFFFFF)
        state >>= 32
    assert writer.finish(1 << 24 | 77) == np.array(words, "<u4").tobytes().rstrip(b"\0")


def test_tiles_cover_a_matrix_once():
    for rows, columns in ((1, 1), (1, 5000), (5000, 1), (64, 128), (37, 1000), (70_000, 3)):
        seen = np.zeros((rows, columns), np.int8)
        for top, bottom, borders in model._tiles(rows, columns):
            assert borders == sorted(set(borders))
            assert (borders[0], borders[-1]) == (0, columns)
            seen[top:bottom] += 1
        assert (seen == 1).all()


def test_what_the_model_does_not_code_is_packed_by_columns_and_bytes(monkeypatch: pytest.MonkeyPatch):
    packed, floats = Packed(codec=Brotli(), columns=True, shuffle=True), gaussian(30, 40, 0.5).astype(np.float32)
    assert EntropyModel().encode(floats) == packed.encode(floats)
    few = gaussian(8, 8)
    monkeypatch.setattr(model, "_MOST_ELEMENTS", 64)
    assert EntropyModel().encode(few) == packed.encode(few)
    assert returns(EntropyModel(), few[:, 1:])[0] == model.ENTROPY_MODEL


def test_counts_are_halved_above_the_most_and_not_at_it(monkeypatch: pytest.MonkeyPatch):
    values, streams = np.tile(np.array([[3, -3]], np.int32), (1, 64)), {}  # two tiles of 64 integers, of one context
    for most in (63, 64, 10**9):
        monkeypatch.setattr(model, "_MOST_COUNT", most)
        writer = Writer()
        model._code(values, 3, 3 << FRACTION_BITS, model._Settings(), writer)
        streams[most] = writer.finish(1 << 24)
    assert streams[63] != streams[64] == streams[10**9]


def test_probabilities_that_files_rely_on():
    """Every prior and the choice among them, which no single array uses all of."""
    widths = bytes(width(rows, columns) for rows in range(1, 200) for columns in range(1, 200))
    assert hashlib.sha256(widths).hexdigest()[:16] == "47602cf9109ab9ab"
    assert hashlib.sha256(priors().astype("<i8").tobytes()).hexdigest()[:16] == "1cf36814d062e426"


def test_the_meter_measures_what_the_writer_writes():
    weights = model._weights(priors()[2, 20:22, :32] * 9, np.zeros((2, 32), np.int64), 1)
    symbols = np.random.default_rng(0).integers(0, 32, 500).astype(np.int32)
    meter = Meter()
    assert meter.size == 0
    meter.code(symbols, weights, np.array([300, 200]))
    odds = np.concatenate([weights[0, symbols[:300]], weights[1, symbols[300:]]]) + 1
    bits = float(-np.log2(odds / 2**24).sum())
    assert bits <= meter.size / PER_OCTAVE <= bits + 500 / PER_OCTAVE + 1


@pytest.mark.parametrize("bits", [1, 7, 8, 9, 15, 16, 17, 24, 31])
def test_what_is_beyond_the_largest_magnitude_comes_back(bits):
    array = gaussian(6, 8).astype(np.int64)
    array[1, 2], array[3, 4] = 255 + (1 << bits) - 1, -255 - (1 << bits) // 2
    returns(EntropyModel(), np.clip(array, -(2**31), 2**31 - 1).astype(np.int32))


def test_settings_of_a_similar_array_are_taken_over(monkeypatch: pytest.MonkeyPatch):
    array = gaussian(20, 30, 2.4, 0.5)
    stream = EntropyModel().encode(array)
    assert EntropyModel().encode(array, Packed(codec=Stored()).encode(array)) == stream  # of another codec
    monkeypatch.setattr(model, "_best", lambda *given: pytest.fail("settings are tried"))
    assert EntropyModel().encode(array, stream) == stream


def test_a_mean_below_the_first_context_is_that_of_the_first():
    assert model._mean_code(np.eye(1, 999, dtype=np.int32)) == 0
    returns(EntropyModel(), np.eye(1, 999, dtype=np.int8))


def test_a_vector_is_never_transposed():
    chance = np.random.default_rng(3)
    for deviation in (0.3, 1.0, 9.0):
        vector = np.rint(chance.normal(0, deviation, (200, 1))).astype(np.int8)
        settings = model._settings_of(EntropyModel().encode(vector))
        assert settings is not None
        assert settings.layout != 1


def misleading(first: int) -> Array:
    """An embedding whose first rows are alike, as those of tokens that no text has, and the others are not."""
    values = gaussian(2000, 128, 5.0, 0.2, 0.5)
    values[:first] = values[0] + gaussian(first, 128, 0.3)
    return values


def least(array: Array, layout: int) -> int:
    """Bytes in a layout, with what suits it best."""
    each = [model._CHOICES.index(model._Settings(layout, *trust)) for trust in ((0, 0), (1, 1), (1, 2), (2, 1))]
    return min(len(EntropyModel().encode(array, bytes([model.ENTROPY_MODEL]) + like(choice))) for choice in each)


def like(choice: int) -> bytes:
    """The stream of an array coded with these settings, without its first byte."""
    writer = Writer()
    writer.byte(choice)
    return writer.finish(1 << 24)


@pytest.mark.long
@pytest.mark.parametrize("first", [256, 1700])
def test_settings_suit_the_whole_matrix_where_the_first_rows_mislead(first):
    array = misleading(first)
    sizes = [least(array, layout) for layout in range(3)]
    assert (sizes[2] == min(sizes)) == (first > 1000), "differences suit many rows that are alike"
    assert len(returns(EntropyModel(), array)) <= 1.001 * min(sizes)


@pytest.mark.long
@pytest.mark.parametrize("vector", [False, True])
def test_the_whole_matrix_chooses_the_layout_where_the_sample_misleads(vector, monkeypatch: pytest.MonkeyPatch):
    array = misleading(256) if not vector else np.concatenate([np.arange(500), gaussian(70_000, 1)[:, 0]])
    monkeypatch.setattr(model, "_sample", lambda matrix: matrix[:256])
    chosen = model._settings_of(EntropyModel().encode(array.astype(np.int16)))
    assert chosen is not None
    assert chosen.layout in ((0,) if vector else (0, 1))


def test_the_sample_of_rows_is_of_the_whole_matrix():
    matrix = np.arange(10_000)[:, None] * np.ones((1, 64), np.int64)
    rows = model._sample(matrix)[:, 0]
    assert len(rows) == 512
    assert (rows[0], rows[-1]) == (0, 9_999)
    assert (np.diff(rows) == 1).sum() == 508, "in four runs"
    assert model._sample(np.arange(10)[:, None] * np.ones((1, 9000)))[:, 0].tolist() == [0, 3, 6, 9]
    for small in (matrix[:512], matrix[:4].repeat(999, axis=1), matrix[:, :0]):
        assert model._sample(small) is small


def test_slow_codecs_are_tried_on_small_arrays_alone():
    codec = Smallest(of=(Packed(codec=Stored()),))
    assert len(codec.encode(np.zeros(4096, np.int8))) < 100
    assert len(codec.encode(np.zeros(4097, np.int8))) == 4101


# Few bytes, the same everywhere


def test_bytes_and_settings_that_files_rely_on():
    digest = hashlib.sha256()
    for array in (gaussian(64, 96, 2.4, 0.5, 0.2), gaussian(200, 1).astype(np.int32) * 60, gaussian(30, 40) > 1):
        digest.update(returns(EntropyModel(), array))
    assert digest.hexdigest()[:16] == "230adf0c225d8053"


@pytest.mark.long
def test_size_is_close_to_the_ideal():
    for array, most in (
        (gaussian(128, 128), 1.004),
        (gaussian(64, 128), 1.008),
        (gaussian(128, 128, 0.3), 1.01),
        (np.random.default_rng(0).integers(0, 256, (100, 100)).astype(np.uint8), 1.02),
    ):
        assert len(EntropyModel().encode(array)) < most * entropy(array) + 10
    # Each column and row with the entropy that a Gaussian of its own scale has: what no coder is told.
    chance = np.random.default_rng(0)
    scales = 3 * np.exp(chance.normal(0, 0.5, (1, 128)) + chance.normal(0, 0.2, (256, 1)))
    array = np.rint(chance.normal(0, 1, (256, 128)) * scales).astype(np.int8)
    ideal = float(np.log2(scales * math.sqrt(2 * math.pi * math.e)).sum()) / 8
    assert len(EntropyModel().encode(array)) < 1.02 * ideal
    assert ideal < 0.94 * entropy(array)


@pytest.mark.long
def test_it_beats_the_compressors():
    for array in (gaussian(128, 128), gaussian(128, 96, 2.4, 0.5, 0.2), gaussian(64, 128, 1.0, 0.4)):
        ours = len(EntropyModel().encode(array))
        for codec in (Brotli(), Zstd(), Lzma()):
            for columns in (False, True):
                assert ours < len(Packed(codec=codec, columns=columns).encode(array))


def test_vectors_that_drift_cost_little():
    chance = np.random.default_rng(0)
    exponents = np.rint(-40 + np.cumsum(chance.normal(0, 0.7, 512))).astype(np.int8)
    steps = np.diff(exponents)
    assert len(EntropyModel().encode(exponents)) < 1.05 * entropy(steps) + 14
    independent = np.rint(chance.normal(-50, 2, 512)).astype(np.int8)
    assert len(EntropyModel().encode(independent)) < 1.05 * entropy(independent) + 14


@pytest.mark.long
def test_like_another_nothing_is_tried(monkeypatch: pytest.MonkeyPatch):
    arrays = [gaussian(40, 50, 2.4, 0.5), gaussian(50, 40, 1.0, 0.0, 0.5), np.arange(300, dtype=np.int16), np.zeros(0)]
    streams = [EntropyModel().encode(array) for array in arrays]
    others = [Packed(codec=Stored()).encode(array) for array in arrays]
    for array, stream, other in zip(arrays, streams, others, strict=True):
        assert EntropyModel().encode(array, other) == stream  # of another kind, it says nothing
    monkeypatch.setattr(model, "_best", lambda *given: pytest.fail("settings are tried"))
    assert [EntropyModel().encode(*both) for both in zip(arrays, streams, strict=True)] == streams
    for array in (*arrays[:3], gaussian(1, 9), gaussian(7, 1), np.full((3, 3), 9)):
        for like in streams[:3]:
            for codec in (EntropyModel(), Smallest(of=(EntropyModel(),), small_bytes=0)):
                assert same(decode(codec.encode(array, like), array.dtype, array.shape), array)


@quick
@given(
    numpy_strategies.arrays(np.int64, st.integers(1, 40), elements=st.integers(-9, 9) | st.integers(-(2**31), 2**31))
)
def test_the_median(values: Array):
    assert model._median(values) == sorted(values.tolist())[len(values) // 2]


@pytest.mark.long
def test_smallest_is_the_smallest():
    pattern = np.tile(np.arange(100, dtype=np.uint8), (40, 1))
    noise = np.random.default_rng(0).normal(size=(20, 20)).astype(np.float32)
    codec = Smallest()
    for array in (pattern, noise, gaussian(64, 64), np.zeros(0)):
        sizes = [len(each.encode(array)) for each in (*codec.of, *codec.also)]
        assert len(returns(codec, array)) == min(sizes)
    large = np.zeros(70_000, np.int8)
    assert len(Smallest(of=(Packed(codec=Stored()),)).encode(large)) == 70_004


@pytest.mark.long
def test_threads_do_not_disturb_one_another():
    arrays = [gaussian(30 + index, 40, 2.0, 0.3) for index in range(4)]
    streams = [EntropyModel().encode(array) for array in arrays]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(EntropyModel().encode, arrays)) == streams
        found = list(pool.map(lambda pair: decode(pair[0], np.int8, pair[1].shape), zip(streams, arrays, strict=True)))
    assert all(same(each, array) for each, array in zip(found, arrays, strict=True))


def test_an_order_of_rows_takes_two_bytes_a_row_while_they_hold_it() -> None:
    """Encoder and decoder would agree on another bound, and files written before would not."""
    assert [packed._order_dtype(rows).itemsize for rows in (1, 65_536, 65_537)] == [2, 2, 4]
