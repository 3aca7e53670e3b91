"""The file of an artifact comes back whole, or is refused with one line that says why."""

import errno
import hashlib
import os
import random
import struct
import zlib
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caddie.config import variants
from caddie.errors import UserError
from caddie.pack import container
from caddie.pack.codecs import Brotli, Codec, Lzma, Stored, Zlib
from caddie.pack.container import Entry, Section, pack, read, unpack, write

HEADER = struct.Struct("<6sHIII")
SMALL = [
    Section("recipe", b'{"kind": "Recipe"}', Zlib()),
    Section("weights/a", bytes(40), Lzma()),
    Section("weights/b", b"0123456789"),
    Section("empty", b""),
]
GOLDEN = bytes.fromhex(
    "636164646965010050000000550000009b1f17d01f5400801f87e9067bb66942fee8249ea79def2efb907016725d1a65f150"
    "26b215137bf698a6c3069c7acef332f8208bc8b031f644e8eca0dd5f5011400b5efffe2715f4f41132b3cbc4dd23df252f01"
    "e0002700065d00006e2847580000303132333435363738399037ca5f8c836b5ecedfb9b3a6751ba729b2a3b973ae4a836176"
    "cf97d9569db3"
)

EMPTY_TABLE = bytes(4)

quick = settings(derandomize=True, deadline=None, max_examples=100)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30).filter(str.isprintable)
codecs = st.sampled_from([cls() for cls in variants(Codec).values()])


def seal(body: bytes) -> bytes:
    return body + hashlib.sha256(body).digest()


def opened(blob: bytes) -> tuple[bytes, int, bytes, bytes]:
    """Magic, version, table and payload of a whole file, read as the module's docstring says."""
    magic, version, packed_bytes, table_bytes, checksum = HEADER.unpack_from(blob)
    end = HEADER.size + packed_bytes
    table = Brotli().decode(blob[HEADER.size : end], table_bytes)
    assert zlib.crc32(table) == checksum
    assert seal(blob[:-32]) == blob
    return magic, version, table, blob[end:-32]


def forged(table: bytes, payload: bytes = b"", version: int = 1, table_bytes: int | None = None) -> bytes:
    packed = Brotli().encode(table)
    claim = len(table) if table_bytes is None else table_bytes
    return seal(HEADER.pack(b"caddie", version, len(packed), claim, zlib.crc32(table)) + packed + payload)


def table_of(*rows: tuple[bytes, bytes, int, int, int]) -> bytes:
    """A table of rows of name, codec, stored length, raw length and checksum."""
    columns = [list(column) for column in zip(*rows, strict=True)]
    numbers = columns[2] + columns[3] + columns[4]
    return struct.pack(f"<{1 + len(numbers)}I", len(rows), *numbers) + b"\n".join([*columns[0], *columns[1], b""])


def one(codec: bytes, stored: bytes, raw: bytes, claim: int | None = None) -> bytes:
    row = (b"x", codec, len(stored), len(raw) if claim is None else claim, zlib.crc32(raw))
    return forged(table_of(row), stored)


def refusal(blob: bytes, raw_bytes: int = container.RAW_BYTES) -> str:
    with pytest.raises(UserError) as caught:
        unpack(blob, raw_bytes)
    message = str(caught.value)
    assert "\n" not in message
    assert message.isprintable()
    assert len(message) < 250
    return message


def test_round_trip_in_order():
    contents = unpack(pack(SMALL)).sections
    assert list(contents.items()) == [(section.name, section.data) for section in SMALL]


def test_no_sections():
    assert unpack(pack([])).sections == {}


def test_same_sections_same_bytes():
    assert pack(SMALL) == pack(tuple(SMALL))


@settings(quick, max_examples=30)
@given(st.dictionaries(names, st.tuples(st.binary(max_size=100), codecs), max_size=4))
def test_round_trip_of_anything(parts):
    sections = [Section(name, data, codec) for name, (data, codec) in parts.items()]
    assert unpack(pack(sections)).sections == {section.name: section.data for section in sections}


def test_a_megabyte_in_every_codec():
    data = random.Random(0).randbytes(10_000) * 105
    sections = [Section(name, data, cls()) for name, cls in variants(Codec).items()]
    assert unpack(pack(sections)).sections == {section.name: data for section in sections}


def test_golden():
    assert unpack(GOLDEN).sections == {section.name: section.data for section in SMALL if section.name != "recipe"}
    assert opened(pack(SMALL[1:])) == opened(GOLDEN)


def test_layout():
    magic, version, table, payload = opened(pack(SMALL[2:]))
    assert (magic, version, payload) == (b"caddie", 1, b"0123456789")
    checksum = zlib.crc32(b"0123456789")
    assert table == table_of((b"weights/b", b"Stored", 10, 10, checksum), (b"empty", b"Stored", 0, 0, 0))


def test_every_flip_is_refused():
    blob = pack(SMALL)
    for position in range(len(blob)):
        for flip in (1, 2, 4, 8, 16, 32, 64, 128, 255):
            damaged = bytearray(blob)
            damaged[position] ^= flip
            refusal(bytes(damaged))


def test_every_flip_under_a_new_seal_is_refused_or_harmless():
    blob = pack(SMALL)
    for position in range(len(blob) - 32):
        for flip in (1, 16, 255):
            damaged = bytearray(blob[:-32])
            damaged[position] ^= flip
            with suppress(UserError):
                assert unpack(seal(bytes(damaged))) == unpack(blob)


def test_every_truncation_is_refused():
    blob = pack(SMALL)
    for end in range(len(blob)):
        refusal(blob[:end])
        refusal(seal(blob[: max(end - 32, 0)]))


@quick
@given(st.binary(max_size=200), st.sampled_from([b"caddie", b"caddie\1\0", pack(SMALL)[:20], pack(SMALL)[:-32]]))
def test_noise_after_the_magic_is_refused(noise, start):
    refusal(start + noise)
    if noise:
        refusal(seal(start + noise))


@quick
@given(st.binary(max_size=200), st.integers(0, 3))
def test_noise_in_the_table(noise, count):
    refusal(forged(count.to_bytes(4, "little") + noise + b"\n"))


@pytest.mark.parametrize("blob", [b"", b"cad", b"PK\3\4" + bytes(100), bytes(100), b"\x80\x04."])
def test_not_a_caddie_file(blob):
    assert refusal(blob) == "this is not a caddie file; name an artifact, as RUN/artifact.caddie"


def test_versions():
    assert "format version 2, this caddie reads 1; upgrade caddie" in refusal(forged(EMPTY_TABLE, version=2))
    assert "there is no format version 0" in refusal(forged(EMPTY_TABLE, version=0))


def test_damage_names_the_section():
    blob = pack(SMALL)
    position = blob.index(b"0123456789")
    damaged = blob[:position] + b"X" + blob[position + 1 :]
    assert refusal(damaged).startswith("section weights/b: the checksum does not match; the file is damaged")
    assert "checksum over the whole file" in refusal(blob[:-1] + bytes([blob[-1] ^ 1]))
    assert "checksum of the table" in refusal(blob[:16] + bytes([blob[16] ^ 1]) + blob[17:])


def test_cut_short_and_too_long():
    blob = pack(SMALL)
    assert f"the file is cut short: {len(blob) - 1} of at least {len(blob)} bytes" in refusal(blob[:-1])
    assert "1 bytes follow the end" in refusal(blob + b"\0")
    assert "cut short" in refusal(HEADER.pack(b"caddie", 1, 2**32 - 1, 10, 0) + bytes(40))


def test_hostile_tables():
    row = (b"x", b"Stored", 0, 0, 0)
    assert "two sections are named x" in refusal(forged(table_of(row, row)))
    assert "needs the codec 'Zip'; upgrade" in refusal(forged(table_of((b"x", b"Zip", 0, 0, 0))))
    assert "needs the codec 'Codec'" in refusal(forged(table_of((b"x", b"Codec", 0, 0, 0))))
    assert "needs the codec ''" in refusal(forged(table_of((b"x", b"", 0, 0, 0))))
    assert "not UTF-8" in refusal(forged(table_of((b"\xff", b"Stored", 0, 0, 0))))
    assert "not UTF-8" in refusal(forged(table_of((b"\xed\xa0\x80", b"Stored", 0, 0, 0))))
    for name in (b"", b"a\tb", b"\x1b[31m", b"a\0", "\u202e".encode(), "\u2028".encode(), b"n" * 1025, b"y" * 100_000):
        assert "cannot name a section" in refusal(forged(table_of((name, b"Stored", 0, 0, 0))))
    assert "cut short" in refusal(forged(table_of((b"x", b"Stored", 2**32 - 1, 0, 0))))
    assert "raw data is 4,294,967,295 bytes long" in refusal(forged(table_of((b"x", b"Stored", 0, 2**32 - 1, 0))))
    halves = [(b"a", b"Stored", 0, 1 << 30, 0), (b"b", b"Stored", 0, 1 << 30, 0), (b"c", b"Stored", 0, 1, 0)]
    assert "raw data is 2,147,483,649 bytes long" in refusal(forged(table_of(*halves)))
    whole = table_of(row)
    for bad in (b"", b"\1\0", whole[:-1], whole + b"x", whole + b"\n", whole[:8], EMPTY_TABLE + b"x", b"\1\0\0\0" * 9):
        assert "the table does not hold what it says" in refusal(forged(bad))
    assert "65,537 entries" in refusal(forged((65_537).to_bytes(4, "little")))
    assert "4,294,967,295 entries" in refusal(forged(b"\xff" * 8))


def test_what_is_just_within_the_limits_is_read_on():
    within = {
        "raw data": table_of((b"a", b"Stored", 0, 1 << 30, 0), (b"b", b"Stored", 0, 1 << 30, 0)),
        "list": (65_536).to_bytes(4, "little"),
    }
    for what, table in within.items():
        assert f"the {what}" not in refusal(forged(table)), "refused for another reason"
    assert "the table" not in refusal(forged(EMPTY_TABLE, table_bytes=16 << 20)).split("table:")[0]
    assert "the table is 16,777,217 bytes long" in refusal(forged(EMPTY_TABLE, table_bytes=(16 << 20) + 1))
    assert container.FILE_BYTES == 1 << 30


def test_hostile_table_lengths():
    bomb = forged(bytes(4 << 20), table_bytes=1000)
    assert "table: the bytes are not one whole Brotli stream of 1,000 bytes" in refusal(bomb)
    assert "table is 20,971,520 bytes long, over the limit" in refusal(forged(EMPTY_TABLE, table_bytes=20 << 20))
    assert "one whole Brotli stream" in refusal(forged(EMPTY_TABLE, table_bytes=16 << 20))


@pytest.mark.parametrize("name", sorted(variants(Codec)))
def test_raw_lengths_that_lie(name):
    raw = bytes(1 << 20)
    stored = variants(Codec)[name]().encode(raw)  # type: ignore[attr-defined]
    assert unpack(one(name.encode(), stored, raw)).sections == {"x": raw}
    for claim in (0, 1000, len(raw) - 1, len(raw) + 1, 100 << 20):
        message = refusal(one(name.encode(), stored, raw, claim))
        assert message.startswith(f"section x: the bytes are not one whole {name} stream of {claim:,} bytes; the file")


def test_out_of_memory_is_one_line(monkeypatch):
    def fail(self, data, size):
        raise MemoryError

    monkeypatch.setattr(Stored, "decode", fail)
    assert refusal(one(b"Stored", b"abc", b"abc")) == "section x: its 3 bytes do not fit in memory"


def test_limits(monkeypatch):
    blob = pack(SMALL)
    assert "the raw data is 68 bytes long, over the limit of 67" in refusal(blob, 67)
    for name, limit, says in (
        ("FILE_BYTES", 100, f"the file is {len(blob)} bytes long, over the limit of 100"),
        ("SECTIONS", 3, "the list of sections is 4 entries long"),
        ("TABLE_BYTES", 20, "the table is"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(container, name, limit)
            assert says in refusal(blob)


def test_pack_refuses_what_unpack_would(monkeypatch):
    for name in ("", "a\nb", "\ud800", "é" * 513):
        with pytest.raises(UserError, match="cannot name a section"):
            pack([Section(name, b"")])
    with pytest.raises(UserError, match="two sections are named a"):
        pack([Section("a", b""), Section("a", b"")])
    for name, limit in (("FILE_BYTES", 50), ("RAW_BYTES", 67), ("SECTIONS", 3), ("TABLE_BYTES", 20)):
        with monkeypatch.context() as patch:
            patch.setattr(container, name, limit)
            with pytest.raises(UserError, match="over the limit"):
                pack(SMALL)


def test_the_longest_name():
    assert list(unpack(pack([Section("é" * 512, b"")])).sections) == ["é" * 512]


def test_sections_are_stored_unless_told():
    assert Section("a", b"").codec == Stored()


def test_write_and_read(tmp_path):
    path = tmp_path / "model.caddie"
    write(path, SMALL)
    assert read(path).entries == [
        Entry("recipe", "Zlib", len(Zlib().encode(SMALL[0].data)), 18),
        Entry("weights/a", "Lzma", len(Lzma().encode(bytes(40))), 40),
        Entry("weights/b", "Stored", 10, 10),
        Entry("empty", "Stored", 0, 0),
    ]
    assert path.read_bytes() == pack(SMALL)
    assert read(path) == read(str(path)) == unpack(pack(SMALL))
    assert read(path).sections == {section.name: section.data for section in SMALL}
    assert os.listdir(tmp_path) == [path.name]
    write(path, SMALL[:1])
    assert list(read(path).sections) == ["recipe"]


def test_written_files_have_the_usual_permissions(tmp_path):
    write(tmp_path / "a", [])
    (tmp_path / "b").write_bytes(b"")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def cannot_write(path: Path | str) -> str:
    with pytest.raises(UserError) as caught:
        write(path, SMALL)
    return str(caught.value)


@pytest.mark.parametrize(("name", "code"), [("fsync", errno.ENOSPC), ("replace", errno.EACCES)])
def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, name, code):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    path = tmp_path / "model.caddie"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, name, fail)
    assert cannot_write(path) == f"cannot write {path}: {os.strerror(code)}"
    assert os.listdir(tmp_path) == [path.name]
    assert path.read_bytes() == b"old"


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "model.caddie", SMALL)
    assert os.listdir(tmp_path) == []


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    assert "No such file" in cannot_write(tmp_path / "missing" / "a")
    assert "ot a directory" in cannot_write(tmp_path / "file" / "a")
    assert "not a regular file" in cannot_write(tmp_path)
    assert "null" in cannot_write("a\0b")
    assert "too long" in cannot_write(tmp_path / ("n" * 300))
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(os.name != "posix", reason="devices and permissions of POSIX")
def test_devices_and_permissions(tmp_path):
    assert "not a regular file" in cannot_write("/dev/null")
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in cannot_read(tmp_path / "pipe")
    assert "not a regular file" in cannot_read("/dev/zero")
    if os.geteuid() == 0:
        return
    (tmp_path / "secret").write_bytes(b"")
    (tmp_path / "secret").chmod(0)
    assert "ermission denied" in cannot_read(tmp_path / "secret")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder").chmod(0o500)
    assert "ermission denied" in cannot_write(tmp_path / "folder" / "a")
    assert os.listdir(tmp_path / "folder") == []


def cannot_read(path: Path | str) -> str:
    with pytest.raises(UserError) as caught:
        read(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    path = tmp_path / "model.caddie"
    assert (
        cannot_read(path) == f"cannot read {path}: No such file or directory; name an artifact, as RUN/artifact.caddie"
    )
    assert "not a regular file" in cannot_read(tmp_path)
    assert "null" in cannot_read("a\0b")
    path.write_bytes(b"nothing of the kind")
    assert cannot_read(path) == f"{path}: this is not a caddie file; name an artifact, as RUN/artifact.caddie"

    def fail(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(container, "regular_bytes", fail)
    assert cannot_read(path) == f"cannot read {path}: Permission denied; name an artifact, as RUN/artifact.caddie"
    monkeypatch.setattr(container, "FILE_BYTES", 10)
    assert cannot_read(path) == f"{path}: the file is 19 bytes long, over the limit of 10"


def test_a_sparse_terabyte_is_not_read(tmp_path):
    path = tmp_path / "huge"
    with open(path, "wb") as file:
        try:
            file.truncate(1 << 40)
        except OSError:
            pytest.skip("this file system has no sparse files")
    assert "over the limit of 1,073,741,824" in cannot_read(path)
