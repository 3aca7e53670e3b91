"""Codecs give back what they were given, and refuse everything else within its memory."""

import lzma
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from caddie.config import field_types, variants
from caddie.config.field_docs import descriptions
from caddie.errors import UserError
from caddie.pack.codecs import Brotli, Codec, Lzma, Stored, Zlib, Zstd, _lzma_filters

NAMES = sorted(variants(Codec))
COMPRESSORS = [name for name in NAMES if name != "Stored"]
QUICK = {
    "Brotli": Brotli(quality=1),
    "Lzma": Lzma(preset=0, extreme=False),
    "Zlib": Zlib(level=1),
    "Zstd": Zstd(level=1),
}
"""The same streams, written sooner."""
BOMB_BYTES = 200 << 20
SAMPLES = [
    b"",
    b"a",
    b"hello " * 100,
    random.Random(0).randbytes(5000),
    bytes(65535),
    bytes(65536),
    bytes(65537),
    random.Random(1).randbytes(1000) * 1000 + b"end",
]

quick = settings(derandomize=True, deadline=None, max_examples=60)


def named(name: str) -> Codec:
    return variants(Codec)[name]()  # type: ignore[return-value]


@contextmanager
def memory_below(limit: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def bomb(name: str) -> bytes:
    if name == "Lzma":
        # Streams of LZMA2 join once the end mark is cut off, which is much sooner than packing as much.
        return (Lzma().encode(bytes(1 << 20))[:-1]) * (BOMB_BYTES >> 20) + b"\0"
    return QUICK.get(name, named(name)).encode(bytes(BOMB_BYTES))


@pytest.fixture(scope="module")
def bombs() -> dict[str, bytes]:
    return {name: bomb(name) for name in COMPRESSORS}


def test_the_variants():
    assert {"Stored", "Zlib", "Lzma", "Zstd", "Brotli"} <= set(NAMES)
    assert "Codec" not in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_is_documented_and_has_a_default(name):
    assert set(descriptions(variants(Codec)[name])) == set(field_types(variants(Codec)[name]))
    assert Codec.from_json(name) == named(name)


def test_the_defaults_that_sizes_are_compared_by_stay():
    assert {name: named(name).to_json() for name in NAMES} == {
        "Brotli": {"kind": "Brotli", "quality": 11},
        "Lzma": {"kind": "Lzma", "preset": 9, "extreme": True},
        "Stored": {"kind": "Stored"},
        "Zlib": {"kind": "Zlib", "level": 9},
        "Zstd": {"kind": "Zstd", "level": 22},
    }


@pytest.mark.parametrize("data", SAMPLES, ids=len)
@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name, data):
    codec = named(name)
    stored = codec.encode(data)
    assert codec.encode(data) == stored
    assert codec.decode(stored, len(data)) == data


@pytest.mark.parametrize("data", SAMPLES, ids=len)
@pytest.mark.parametrize("name", sorted(QUICK))
def test_defaults_read_what_other_settings_wrote(name, data):
    assert named(name).decode(QUICK[name].encode(data), len(data)) == data


@pytest.mark.parametrize("name", NAMES)
def test_round_trip_of_anything(name):
    codec = QUICK.get(name, named(name))

    @quick
    @given(st.binary(max_size=2000), st.integers(1, 50))
    def check(data, copies):
        assert codec.decode(codec.encode(data * copies), len(data) * copies) == data * copies

    check()


@pytest.mark.parametrize("data", SAMPLES, ids=len)
@pytest.mark.parametrize("name", NAMES)
def test_another_size_or_other_ends_are_refused(name, data):
    codec = QUICK.get(name, named(name))
    stored = codec.encode(data)
    wrong = [(stored, len(data) + 1), (stored, 2 * len(data) + 100_000), (stored + b"\0", len(data))]
    wrong += [(stored + b"x", len(data)), (stored + stored + b"x", len(data))]
    if data:
        wrong += [(stored, len(data) - 1), (stored, 0), (stored[:-1], len(data)), (b"", len(data))]
    for bad, size in wrong:
        with pytest.raises(UserError, match=f"not one whole {name} stream of"):
            codec.decode(bad, size)


@pytest.mark.parametrize("name", NAMES)
def test_every_truncation_is_refused(name):
    codec = named(name)
    data = b"the quick brown fox " * 20 + random.Random(2).randbytes(100)
    stored = codec.encode(data)
    for end in range(len(stored)):
        with pytest.raises(UserError):
            codec.decode(stored[:end], len(data))


@pytest.mark.parametrize("name", COMPRESSORS)
def test_damage_is_refused_or_gives_the_size_asked_for(name):
    codec = named(name)
    data = b"the quick brown fox " * 20 + random.Random(2).randbytes(100)
    stored = codec.encode(data)
    for position in range(len(stored)):
        for flip in (1, 8, 64, 255):
            damaged = bytearray(stored)
            damaged[position] ^= flip
            with suppress(UserError):
                assert len(codec.decode(bytes(damaged), len(data))) == len(data)


@pytest.mark.parametrize("name", NAMES)
def test_noise_is_refused_or_gives_the_size_asked_for(name):
    codec = named(name)

    @quick
    @given(st.binary(max_size=300), st.integers(0, 100_000))
    def check(noise, size):
        with suppress(UserError):
            assert len(codec.decode(noise, size)) == size

    check()


@pytest.mark.parametrize("size", [0, 1000])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_bomb(bombs, name, size):
    with memory_below(2 << 20), pytest.raises(UserError, match=f"not one whole {name} stream"):
        named(name).decode(bombs[name], size)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on the address space that the system honours")
def test_bombs_stay_small_outside_python_too(bombs, tmp_path):
    script = """
import pathlib, resource, sys
from caddie.pack.codecs import Codec
from caddie.config import variants
from caddie.errors import UserError
held = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + (24 << 20),) * 2)
for path in map(pathlib.Path, sys.argv[1:]):
    try:
        variants(Codec)[path.name]().decode(path.read_bytes(), 1000)
    except UserError:
        print(path.name)
"""
    for name, data in bombs.items():
        (tmp_path / name).write_bytes(data)
    command = [sys.executable, "-c", script, *(str(tmp_path / name) for name in bombs)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.split() == list(bombs)


def test_zstd_frame_that_claims_gigabytes():
    empty = zstandard.ZstdCompressor(level=1).compress(b"a")
    assert empty[4] >> 6 == 0
    claim = bytes([0b1010_0000]) + (1 << 31).to_bytes(4, "little") + empty[6:]
    assert zstandard.get_frame_parameters(claim, format=zstandard.FORMAT_ZSTD1_MAGICLESS).content_size == 1 << 31
    with memory_below(1 << 20), pytest.raises(UserError):
        Zstd().decode(claim, 1 << 31)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_what_was_30_kb_before_is_found(name):
    data = random.Random(5).randbytes(30_000)
    assert len(QUICK[name].encode(data + data)) < 31_000


def test_zstd_allocates_no_more_than_its_best_ratio():
    """A frame of 9 bytes that claims 32,768 times as many, and one that claims a byte more."""
    empty = zstandard.ZstdCompressor(level=1).compress(b"a")
    for claim, allocated in ((9 << 15, True), ((9 << 15) + 1, False)):
        frame = bytes([0b1010_0000]) + claim.to_bytes(4, "little") + empty[6:]
        assert len(frame) == 9
        tracemalloc.start()
        with pytest.raises(UserError):
            Zstd().decode(frame, claim)
        assert (tracemalloc.get_traced_memory()[1] >= claim) == allocated
        tracemalloc.stop()


@pytest.mark.parametrize("codec", [Stored(), Zlib(), Zstd(), Brotli()])
def test_a_short_stream_cannot_ask_for_gigabytes(codec):
    stored = codec.encode(b"hello")
    with memory_below(2 << 20), pytest.raises(UserError):
        codec.decode(stored, 1 << 40)


def test_zstd_reads_any_ratio_that_it_writes_and_keeps_no_window():
    """A frame by hand: blocks of 128 KiB of zeros in four bytes each, and a window of 256 MiB."""
    blocks = [(last | 1 << 1 | 1 << 20).to_bytes(3, "little") + b"\0" for last in (0, 0, 1)]
    frame = bytes([2 << 6, 28 - 10 << 3]) + (3 << 17).to_bytes(4, "little") + b"".join(blocks)
    with memory_below(1 << 20):
        assert Zstd().decode(frame, 3 << 17) == bytes(3 << 17)


def test_brotli_looks_back_16_mib():
    assert Brotli().encode(b"hello " * 100)[0] & 15 == 15, "the window as RFC 7932 writes it"


def test_the_dictionary_of_lzma_that_files_rely_on():
    """Writer and reader choose it alike by the size: streams of longer data were written with the largest."""
    sizes = {0: 4096, 4096: 4096, 5000: 5000, (64 << 20) + 1: 64 << 20, 1 << 30: 64 << 20}
    assert {size: _lzma_filters(size)[0]["dict_size"] for size in sizes} == sizes


def test_lzma_dictionary_is_bounded():
    stored = Lzma().encode(b"hello")
    with memory_below(66 << 20), pytest.raises(UserError):
        Lzma().decode(stored, 1 << 40)


def test_incompressible_bytes_grow_little():
    data = random.Random(3).randbytes(100_000)
    for name in NAMES:
        assert len(named(name).encode(data)) < len(data) + 100


def test_settings_out_of_range():
    with pytest.raises(UserError, match="level must be from 1 to 22"):
        Zstd(level=23)
    with pytest.raises(UserError, match="did you mean Brotli"):
        Codec.from_json("Brotil")


@pytest.mark.parametrize("extreme", [False, True])
def test_lzma_searches_as_hard_as_it_is_told(extreme: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(lzma, "compress", lambda data, form, filters: asked.extend(filters) or b"")
    Lzma(preset=6, extreme=extreme).encode(b"text")
    assert asked[-1]["preset"] == 6 | (lzma.PRESET_EXTREME if extreme else 0)
