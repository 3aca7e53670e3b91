"""Bytes of a text by compressors that know another text, as their own decoders would count them."""

import json
import lzma
import random
import sys
from pathlib import Path

import compressors
import pytest
import zstandard

from caddie.data.corpus import document_hash
from caddie.errors import UserError

RESULTS = Path(__file__).resolve().parent.parent.parent / "docs" / "results" / "2026-11-25-compressors.jsonl"
WORDS = [bytes(random.Random(number).choices(b"abcdefgh", k=6)) for number in range(200)]


def words(count: int, seed: int) -> bytes:
    return b" ".join(random.Random(seed).choices(WORDS, k=count))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": words(50, seed).decode()}) + "\n" for seed in range(200)))
    return path


def test_the_split_is_caddie_s(text: Path) -> None:
    train, held_out = compressors.split(str(text))
    documents = [words(50, seed) for seed in range(200)]
    low = [one for one in documents if document_hash(one)[:8] < int(0.05 * (1 << 64)).to_bytes(8, "big")]
    assert held_out == b"".join(low)
    assert sorted(train) == sorted(b"".join(one for one in documents if one not in low))
    assert train != b"".join(one for one in documents if one not in low), "a beginning is a fair sample"


@pytest.mark.parametrize("name", ["xz -9e", "zstd -22", "brotli -11"])
def test_what_is_known_makes_the_text_shorter(name: str) -> None:
    train, held_out = words(3000, 1), words(300, 2)
    rows = {cap: compressors.row(name, train, held_out, cap) for cap in (0, 2000, 1_000_000)}
    assert rows[0]["known_bytes"] == rows[0]["file_bytes"] == 0
    assert rows[0]["bits_per_byte"] == 8 * compressors.COMPRESSORS[name](held_out) / len(held_out)
    assert 0.9 * 2000 <= rows[2000]["file_bytes"] <= 2000
    assert rows[2000]["known_bytes"] < rows[1_000_000]["known_bytes"] == len(train), "all of it, where it fits"
    assert rows[0]["bits_per_byte"] > rows[1_000_000]["bits_per_byte"]


def test_sizes_are_those_of_files_that_can_be_read(tmp_path: Path) -> None:
    data = words(500, 3)
    strongest = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 24}]
    assert compressors.xz(data) == len(packed := lzma.compress(data, filters=strongest))
    assert lzma.decompress(packed) == data
    assert compressors.zstd(data) <= len(zstandard.ZstdCompressor(level=3).compress(data))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyppmd", None)
    with pytest.raises(UserError, match="pip install pyppmd"):
        compressors.ppmd(b"text")


def test_the_rows_are_written(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    compressors.main(["--data", str(text), "--caps", "0", "--only", "xz -9e", "--json", str(out)])
    (row,) = map(json.loads, out.read_text().splitlines())
    assert f"{row['bits_per_byte']:.4f}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        compressors.main(["--data", str(text), "--caps", "-1"])


def test_the_log_has_the_kept_rows() -> None:
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    log = (RESULTS.parent.parent / "log.md").read_text()
    entry = next(one for one in log.split("\n## ") if "bench/compressors.py" in one)
    assert len(rows) > 8
    for row in rows:
        assert row["file_bytes"] <= row["cap_bytes"]
        assert row["held_out_bytes"] == 420_229, "the demo's"
        assert f"{row['bits_per_byte']:.4f}" in entry
