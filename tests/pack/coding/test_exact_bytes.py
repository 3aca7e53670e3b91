"""Exact bytes, tables and choices of the array codecs: what was written is read for ever, and written the same.

Digests are frozen from the code as it was on 2026-11-26; other values are computed here, or by hand. Arrays are made of
integers alone, so that they are the same on every machine.
"""

import hashlib
import zlib
from collections.abc import Sequence
from itertools import pairwise, product
from math import isqrt
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from caddie.errors import UserError
from caddie.pack.codecs import Brotli, Lzma, Stored, Zlib, Zstd
from caddie.pack.coding import EntropyModel, Packed, Smallest, decode
from caddie.pack.coding import entropy_model as model
from caddie.pack.coding.packed import nearest_rows
from caddie.pack.coding.priors import PER_OCTAVE, contexts, log2, width
from caddie.pack.coding.symbols import BYTES, Damaged, Meter, Reader, Writer

Array = npt.NDArray[Any]


def digest(*parts: bytes) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(4, "little") + part)
    return whole.hexdigest()[:16]


def noise(rows: int, columns: int) -> Array:
    """Integers from -7 to 7, small ones more often."""
    raw = np.random.PCG64(0).random_raw(2 * rows * columns).astype(np.int64).reshape(2, rows, columns)
    return (raw[0] & 7) - (raw[1] & 7)


def growing(count: int, times: int) -> Array:
    return 1 + np.arange(count) * times // count


def like(settings: model._Settings) -> bytes:
    """The stream of an array coded with these settings."""
    writer = Writer()
    writer.byte(model._CHOICES.index(settings))
    return bytes([model.ENTROPY_MODEL]) + writer.finish(1 << 24)


def written(array: Array, settings: model._Settings | None = None) -> bytes:
    """Return the stream of an array, which must read as that array."""
    stream = EntropyModel().encode(array, like(settings) if settings else b"")
    assert decode(stream, array.dtype, array.shape).tobytes() == array.tobytes()
    return stream


def in_sample(whole: Array, sample: Array) -> Array:
    """Return a matrix with other rows where 512 elements are drawn from."""
    runs = 512 // 4 // whole.shape[1]
    rows = (np.arange(4) * (len(whole) - runs) // 3)[:, None] + np.arange(runs)
    result = whole.copy()
    result[rows] = sample[rows]
    return result


DEFAULT = model._Settings()
SQUARE, TALL, WIDE = noise(24, 24), noise(40, 12), noise(12, 40)
ALTERNATING = 1 + 8 * (np.arange(24) % 2)
CHOSEN = {
    "zeros": np.zeros((9, 7)),
    "constant": np.full((9, 7), 5),
    "one": np.array([[9]]),
    "even": SQUARE,
    "wide": WIDE,
    "tall": TALL,
    "columns differ": SQUARE * growing(24, 9),
    "columns differ, wide": WIDE * growing(40, 9),
    "columns alternate": SQUARE * ALTERNATING,
    "rows differ": SQUARE * growing(24, 9)[:, None],
    "rows alternate": SQUARE * ALTERNATING[:, None],
    "both differ": SQUARE * growing(24, 5) * growing(24, 5)[:, None],
    "both differ, tall": TALL * growing(12, 5) * growing(40, 5)[:, None],
    "rows add up": TALL.cumsum(0),
    "columns add up": TALL.cumsum(1),
    "few below zero": np.maximum(SQUARE, 0) * 4 - (SQUARE < -2),
    "few below zero, tall": np.maximum(TALL, 0) * 4 - (TALL < -2),
    "rows rise": np.maximum(WIDE, 0).cumsum(0),
    "vector": noise(300, 1),
    "vector adds up": noise(300, 1).cumsum(0),
    "vector not below zero": np.maximum(noise(300, 1), 0),
    "far from zero": SQUARE + 2**31 - 8,
    "beyond the largest magnitude": SQUARE * 40,
    "far beyond the largest magnitude": SQUARE**9 * 20,
}


SAMPLED = {
    "columns differ": noise(160, 12) * growing(12, 9),
    "rows differ": noise(160, 12) * growing(160, 9)[:, None],
    "rows grow from zero": np.repeat((0, 1), (20, 140))[:, None] * noise(160, 12) * growing(160, 40)[:, None],
    "columns differ, wide": noise(24, 80) * growing(80, 9),
    "rows rise": np.maximum(noise(160, 12), 0).cumsum(0),
    "rows rise but in the sample": in_sample(np.maximum(noise(160, 12), 0).cumsum(0), noise(160, 12) * growing(12, 9)),
    "rows add up but in the sample": in_sample(noise(160, 12).cumsum(0), noise(160, 12)),
    "rows differ but in the sample": in_sample(noise(160, 12) * growing(160, 20)[:, None], noise(160, 12)),
    "vector": noise(900, 1),
    "vector adds up": noise(900, 1).cumsum(0),
    "vector adds up but in the sample": in_sample(noise(900, 1).cumsum(0), noise(900, 1)),
    "vector adds up in the sample": in_sample(noise(900, 1), noise(900, 1).cumsum(0)),
}


SETTINGS = {
    "zeros": ((0, 1, 1, 0), 7, "91c773fe1dd171ba"),
    "constant": ((0, 1, 1, 0), 12, "5e6973c9c6a7f494"),
    "one": ((0, 1, 1, 0), 12, "f91cf060215fc897"),
    "even": ((1, 3, 3, 0), 274, "7baae0c8b8107482"),
    "wide": ((1, 3, 3, 0), 235, "a35b81e317a360dc"),
    "tall": ((0, 3, 3, 0), 235, "742ed9876f1ff534"),
    "columns differ": ((0, 1, 3, 0), 415, "6752ac3411fd0470"),
    "columns differ, wide": ((0, 2, 1, 0), 363, "00af4401314ef4c4"),
    "columns alternate": ((0, 0, 3, 0), 369, "55acd00c32cb13b1"),
    "rows differ": ((1, 1, 2, 0), 416, "a2383ad28ab09ebd"),
    "rows alternate": ((1, 0, 3, 0), 372, "0e7f62316267c645"),
    "both differ": ((1, 2, 0, 0), 474, "737d91b94baa5082"),
    "both differ, tall": ((0, 2, 1, 0), 410, "217b2ec1bedb4817"),
    "rows add up": ((0, 1, 3, 1), 331, "d3f41401b2c9bd02"),
    "columns add up": ((1, 1, 3, 0), 308, "bfb2f3e8a1b15c63"),
    "few below zero": ((1, 3, 0, 1), 289, "7b70c68459f3ba0a"),
    "few below zero, tall": ((0, 3, 0, 1), 237, "12894c99d35a89e7"),
    "rows rise": ((2, 3, 0, 1), 182, "f21080b2ed3636d0"),
    "vector": ((0, 2, 3, 0), 149, "8214d620dcd17bad"),
    "vector adds up": ((2, 1, 3, 0), 154, "f8df499e07071e1e"),
    "vector not below zero": ((0, 0, 0, 1), 112, "57be1900809d4636"),
    "far from zero": ((1, 3, 3, 0), 279, "2e646e243e855196"),
    "beyond the largest magnitude": ((0, 3, 3, 0), 407, "0f2939483e6d76a4"),
    "far beyond the largest magnitude": ((0, 3, 3, 0), 1790, "55091240942fb5bc"),
}
"""Layout, columns, rows and skewed of each array, the bytes of its stream and their digest."""
SETTINGS_BY_SAMPLE = {
    "columns differ": ((0, 0, 3, 0), 1263, "3f2efa1bd7c3ec51"),
    "rows differ": ((0, 2, 0, 0), 1407, "06a80faeda6008bf"),
    "rows grow from zero": ((1, 0, 0, 0), 1827, "914554bd9e05ae0b"),
    "columns differ, wide": ((1, 0, 2, 0), 1390, "3e640260a79f33a5"),
    "rows rise": ((2, 0, 0, 1), 643, "8cbf847abd94f3db"),
    "rows rise but in the sample": ((2, 0, 3, 0), 1251, "210e991e5f5ff31e"),
    "rows add up but in the sample": ((2, 3, 3, 0), 1028, "51450ebdd30669c2"),
    "rows differ but in the sample": ((0, 3, 3, 0), 1576, "ec3cfc92d2d4163a"),
    "vector": ((0, 0, 3, 1), 427, "8896fa882af2d29b"),
    "vector adds up": ((2, 0, 3, 1), 432, "42e541eb386227dd"),
    "vector adds up but in the sample": ((2, 3, 3, 1), 489, "35094a669c70c36e"),
    "vector adds up in the sample": ((2, 0, 3, 1), 479, "e8d424c7224eaba2"),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_settings_and_bytes(name: str) -> None:
    stream = written(CHOSEN[name].astype(np.int32))
    settings = model._settings_of(stream)
    assert settings is not None
    assert (settings[:4], len(stream), digest(stream)) == SETTINGS[name]


@pytest.mark.long
@pytest.mark.parametrize("name", SAMPLED)
def test_settings_by_a_sample_and_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_TRIAL", 512)
    stream = written(SAMPLED[name].astype(np.int32))
    settings = model._settings_of(stream)
    assert settings is not None
    assert (settings[:4], len(stream), digest(stream)) == SETTINGS_BY_SAMPLE[name]


def test_bytes_under_all_settings() -> None:
    array = (TALL[:16] * growing(12, 60) * growing(16, 5)[:, None]).astype(np.int16)
    streams = [EntropyModel().encode(array, like(settings)) for settings in model._CHOICES if not settings.centered]
    assert len(set(streams)) == 96
    assert digest(*streams) == "d0d11dbbc1bc1103"


def test_bytes_of_two_in_many_zeros() -> None:
    """Means of rows and columns are the least that their fixed-point numbers hold, or zero."""
    array = np.zeros((100, 2100), np.int8)
    array[60, 5] = array[75, 900] = 1
    assert digest(written(array, model._Settings(columns=0))) == "a5b516c54daf344c"


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        ("?", "27451362c711e08a"),
        ("i1", "ea4006584aff8ff8"),
        ("u1", "37a4199cd7a999f8"),
        ("i2", "133aef8dd50b394e"),
        ("u2", "4ee68d9efed46121"),
        ("i4", "7c95298184c59143"),
        ("u4", "1a2bf7393b684346"),
    ],
)
def test_bytes_of_the_largest_and_least_of_a_type(dtype: str, wanted: str) -> None:
    most, least = (1, 0) if dtype == "?" else (np.iinfo(dtype).max, np.iinfo(dtype).min)
    assert digest(written(np.array([[most, least, most - 1], [most - 1, 0, most]], dtype))) == wanted


@pytest.mark.parametrize(
    ("largest", "size"), [(254, 15), (255, 16), (256, 19), (510, 19), (511, 22), (65_790, 22), (65_791, 25)]
)
def test_bytes_of_what_is_beyond_the_largest_magnitude(largest: int, size: int) -> None:
    """Three of seven: beyond 255 each has one byte more, from 255 + 256 two and from 255 + 65,536 three."""
    assert len(written(np.array([largest, 0, -largest, 1, 0, -1, -largest], np.int32))) == size


@pytest.mark.parametrize("size", range(1, 10))
def test_a_reader_takes_up_to_eight_bytes_beyond_the_largest_magnitude(size: int) -> None:
    array, largest, settings = np.array([[258], [-258]], np.int32), np.array([[255], [-255]], np.int32), DEFAULT
    writer = Writer()
    for byte in (model._CHOICES.index(settings), 255, 31):
        writer.byte(byte)
    model._code(largest, 255, model._mean(31), settings, writer)
    for byte in (size, *((3, *bytes(size - 1)) * 2)):
        writer.byte(byte)
    stream = bytes([model.ENTROPY_MODEL]) + writer.finish(model._seal(array))
    if size > 8:
        with pytest.raises(UserError, match="not one whole array"):
            decode(stream, array.dtype, array.shape)
    else:
        assert decode(stream, array.dtype, array.shape).tolist() == array.tolist()


def test_the_codecs_that_smallest_tries() -> None:
    brotli = {"kind": "Brotli", "quality": 11}
    plain = {"kind": "Packed", "columns": False, "shuffle": False, "sort_rows": False}
    assert Smallest().to_json() == {
        "kind": "Smallest",
        "of": [{"kind": "EntropyModel"}, {**plain, "codec": {"kind": "Zstd", "level": 3}, "shuffle": True}],
        "also": [
            {**plain, "codec": {"kind": "Zlib", "level": 9}},
            {**plain, "codec": brotli, "shuffle": True},
            {**plain, "codec": brotli, "columns": True},
        ],
        "small_bytes": 4096,
    }
    assert Packed().to_json() == {**plain, "codec": brotli}


def test_the_head_of_packed_bytes() -> None:
    """Layout and codec in the first byte, then the upper three of the array's CRC-32."""
    array = np.array([[1, -2], [3, 400]], ">i2")
    data = array.astype("<i2").tobytes()
    crc = (zlib.crc32(data) >> 8).to_bytes(3, "little")
    assert Packed(codec=Stored()).encode(array) == b"\1" + crc + data
    for place, codec in enumerate((Stored(), Zlib(), Lzma(), Zstd(), Brotli())):
        for layout in range(8):
            columns, shuffle, sort_rows = (bool(layout & bit) for bit in (1, 2, 4))
            stream = Packed(codec=codec, columns=columns, shuffle=shuffle, sort_rows=sort_rows).encode(array)
            assert stream[:4] == bytes([1 + layout + 8 * place]) + crc
            assert decode(stream, array.dtype, array.shape).tolist() == array.tolist()
    for first in range(41, 256):
        with pytest.raises(UserError, match="no coded array that this version knows"):
            decode(bytes([first]) + stream[1:], array.dtype, array.shape)
    for dtype in ("i8", "u8", "f2", "f4"):
        with pytest.raises(UserError, match="no coded array that this version knows"):
            decode(EntropyModel().encode(array), dtype, array.shape)


@pytest.mark.parametrize(
    ("rows", "order"),
    [
        (np.array([[5, 5], [0, 0], [5, 9], [6, 6], [4, 4]], np.int8), [0, 3, 2, 4, 1]),
        (np.array([[100], [-100], [90], [127], [-128]], np.int8), [0, 2, 3, 1, 4]),  # differences beyond the type
        (np.array([[2**62], [-(2**62)], [0]]), [0, 2, 1]),
        (np.array([[2**63], [0], [2**64 - 1], [2**62]], np.uint64), [0, 3, 1, 2]),
        (np.array([[0.5], [2.5], [np.inf], [0.75], [0.625], [-np.inf]], np.float32), [0, 4, 3, 1, 2, 5]),
        (np.array([[0, 0, 0], [1, 1, 1 + 2**-50], [1, 1, 1 + 2**-51]]), [0, 2, 1]),  # sums differ, means round alike
        (np.zeros((0, 1)), []),
    ],
)
def test_the_order_of_nearest_rows(rows: Array, order: list[int]) -> None:
    assert nearest_rows(rows).tolist() == order


def test_settings_that_no_version_wrote_are_refused() -> None:
    for number in (190, 191, 192, 193):
        writer = Writer()
        for byte in (number, *((1, 0) if number % 2 else ()), 0):
            writer.byte(byte)
        array = np.full((2, 3), number % 2, np.int8)
        stream = bytes([model.ENTROPY_MODEL]) + writer.finish(model._seal(array))
        if number < len(model._CHOICES):
            assert decode(stream, array.dtype, array.shape).tolist() == array.tolist()
        else:
            with pytest.raises(UserError, match="not one whole array"):
                decode(stream, array.dtype, array.shape)


@pytest.mark.parametrize(
    ("columns", "borders"),
    [
        (1, [0, 1]),
        (64, [0, 64]),
        (95, [0, 95]),
        (96, [0, 64, 96]),
        (160, [0, 64, 128, 160]),
        (543, [0, 64, 128, 192, 256, 320, 400, 543]),
        (550, [0, 64, 128, 192, 256, 320, 400, 500, 550]),
    ],
)
def test_tiles_are_64_elements_and_then_as_wide_as_a_quarter_of_what_is_left(columns: int, borders: list[int]) -> None:
    assert list(model._tiles(1, columns)) == [(0, 1, borders)]


@pytest.mark.parametrize(
    ("rows", "tops"),
    [
        (8, range(9)),
        (16, [*range(9), 10, 12, 15, 16]),
        (17, [*range(9), 10, 12, 15, 17]),
        (23, [*range(9), 10, 12, 15, 18, 23]),
        (24, [*range(9), 10, 12, 15, 18, 22, 24]),
    ],
)
def test_tiles_are_as_high_as_a_quarter_of_what_is_above(rows: int, tops: Sequence[int]) -> None:
    assert [block[:2] for block in model._tiles(rows, 1)] == list(pairwise(tops))


def test_tiles_of_all_sizes() -> None:
    shapes = [(rows, 20) for rows in range(1, 80)] + [(30, columns) for columns in range(1, 300)]
    shapes += [
        (5000, 1),
        (70_000, 3),
        (300_000, 3),
        (3, 200_000),
        (1, 300_000),
        (2000, 2000),
        (16, 140_000),
        (100, 40_000),
    ]
    assert digest(*(repr(list(model._tiles(*shape))).encode() for shape in shapes)) == "3d62dee5bb844e6b"


def test_the_first_guess_of_a_magnitude() -> None:
    """A byte of half octaves from 2^-8; a mean is a number of 12 fraction bits, below 2^25 whatever the byte."""
    assert [model._mean(code) for code in range(256)] == [isqrt(2 ** (8 + min(code, 40))) for code in range(256)]
    for magnitudes, code in {(1,): 16, (2,): 18, (3,): 19, (255,): 31, (0, 1): 14, (0, 0, 2, 1): 15}.items():
        assert model._mean_code(np.array([magnitudes, magnitudes])) == code
        assert model._mean_code(-np.array([magnitudes])) == code
    for zeros, code in ((128, 1), (127, 2), (178, 0), (177, 1), (400, 0)):
        assert model._mean_code(np.eye(1, 1 + zeros, dtype=np.int64)) == code


def logarithm(number: int) -> int:
    """In 64ths, of the first eleven bits: one less than the bits of the 64th power, which integers hold exactly."""
    cut = max(number.bit_length() - 11, 0)
    return ((number >> cut) ** 64).bit_length() - 1 + 64 * cut


def test_logarithms_of_the_first_eleven_bits() -> None:
    raw = np.random.PCG64(0).random_raw(500)
    numbers = [*range(1, 5000), *(number >> 11 + place % 40 for place, number in enumerate(raw.tolist())), 2**53 - 1]
    assert log2(np.array(numbers)).tolist() == [logarithm(number) for number in numbers]
    assert log2(np.array([0, 1])).tolist() == [0, 0]


def test_contexts_are_the_nearest_quarters_of_an_octave() -> None:
    """The first is for 2^-8 with 12 fraction bits, 64 steps an octave."""
    logs = np.arange(-2000, 3000)
    nearest = np.abs(logs - (12 - 8) * 64 - 16 * np.arange(64)[:, None] + 0.1).argmin(axis=0)
    assert contexts(logs).tolist() == nearest.tolist()
    assert contexts(np.array([263, 264, 1255, 1256])).tolist() == [0, 1, 62, 63]


def test_a_larger_array_than_any_here_is_packed() -> None:
    assert model._MOST_ELEMENTS == 2**31, "the coder counts symbols in 32 bits"


def test_mixtures_of_estimates() -> None:
    """The less certain an estimate, the wider: borders are one and a half times 0.064, 0.124 and 0.259."""
    counts = [*range(1, 60), 114, 133, 160, 200, 266, 267, 400, 401, 800, 801, 10**6]
    for rows, columns in product(counts, counts):
        variance = 60 + 800 // rows + 800 // columns
        assert width(rows, columns) == 2 + (variance > 96) + (variance > 186) + (variance > 388.5)


def test_all_bytes_are_as_probable() -> None:
    assert BYTES.tolist() == [[2**24 // 256 - 1] * 256]


def test_the_size_that_settings_are_chosen_by() -> None:
    """Code lengths of symbols under a probability of (weight + 1) / 2^24, in 64ths of a bit."""
    weights = np.array([[0, 1, 2, 2**24 - 6], [2**20, 30, 2**24 - 2**20 - 34, 0]])
    symbols, meter = np.array([0, 1, 2, 3, 3, 0, 1, 2, 3], np.int32), Meter()
    meter.code(symbols, weights, np.array([5, 4]))
    odds = [1, 2, 3, 2**24 - 5, 2**24 - 5, 2**20 + 1, 31, 2**24 - 2**20 - 33, 1]
    assert meter.size == sum(24 * 64 - logarithm(each) for each in odds)


def test_signed_numbers_in_bytes() -> None:
    numbers, writer, meter = [0, 1, -1, 127, 128, -128, 200, 2**15, 2**23 - 1, -(2**23)], Writer(), Meter()
    assert [writer.number(3, number) for number in numbers] == numbers
    assert [meter.number(3, number) for number in numbers] == numbers
    assert meter.size == 30 * 8 * PER_OCTAVE
    reader = Reader(writer.finish(1 << 24 | 5))
    assert [reader.number(3) for _ in numbers] == numbers
    reader.finish(1 << 24 | 5)
    assert reader.byte() in range(256), "of the seal"
    with pytest.raises(Damaged):
        reader.byte()


@pytest.mark.parametrize("skewed", [0, 1])
def test_weights_of_symbols(skewed: int) -> None:
    """Prior and twice the counts, or the counts of both signs; zero has what division leaves."""
    prior, counts = np.array([[3, 70, 9, 70, 3], [1, 1, 1, 1, 1]]) << 16, np.array([[0, 5, 8, 2, 1], [0, 0, 0, 0, 7]])
    wanted = []
    for one, seen in zip(prior.tolist(), counts.tolist(), strict=True):
        both = [2 * count for count in seen] if skewed else [a + b for a, b in zip(seen, reversed(seen), strict=True)]
        shares = [share + count * 2**19 for share, count in zip(one, both, strict=True)]
        scaled = [share * (2**24 - 5) // sum(shares) for share in shares]
        scaled[2] += 2**24 - 5 - sum(scaled)
        wanted.append(scaled)
    assert model._weights(prior, counts, skewed).tolist() == wanted
