"""One run packed in many ways: every quantizer with every coding, the same losses for the same integers."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from caddie.model import build
from caddie.pack.calibrate import TrainingText
from caddie.pack.codecs import Brotli, Zlib
from caddie.pack.coding import Packed
from caddie.run import compare_packings as packing
from caddie.run.compare_packings import METHODS, compare, summary
from caddie.run.run_folder import read_run


@pytest.mark.long
def test_every_way_in_every_coding(tiny_run: Any, caddie: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    codings = {"zlib -9": Packed(codec=Zlib()), "brotli -5": Packed(codec=Brotli(quality=5), shuffle=True)}
    monkeypatch.setattr(packing, "CODINGS", codings)
    monkeypatch.setattr(packing, "METHODS", (METHODS[1], replace(METHODS[-2], fills="brotli -5")))
    before = sorted(path.name for path in tiny_run.folder.iterdir())
    ended = caddie("pack", tiny_run.folder, "--compare", "cap=4500", "cap=4000", "--json")
    assert ended.status == 0
    assert sorted(path.name for path in tiny_run.folder.iterdir()) == before
    assert [line for line in ended.err.splitlines() if not line.startswith((" ", "100%"))] == [
        "calibrate",
        "1 of 3: int6, five percentiles",
        "2 of 3: Waterfilling, 4,500 bytes",
        "3 of 3: Waterfilling, 4,000 bytes",
    ]
    assert "\n      candidate 1: a file of " in ended.err
    facts = json.loads(ended.out)
    found = facts["packings"]
    assert [one["coding"] for one in found] == ["zlib -9", "brotli -5", "smallest"] * 3
    assert [one["cap_bytes"] for one in found] == [None] * 3 + [4500] * 3 + [4000] * 3
    for first in (0, 3, 6):
        zlib, brotli, smallest = found[first : first + 3]
        assert smallest["bytes"] <= min(zlib["bytes"], brotli["bytes"]) + 24, "the table may pack a little worse"
        assert smallest["encode_seconds"] == zlib["encode_seconds"] + brotli["encode_seconds"]
        for name in ("predicted_bits_per_byte", "measured_bits_per_byte"):
            assert zlib[name] == brotli[name] == smallest[name]
    for one in found[4::3]:
        assert 0.98 * one["cap_bytes"] <= one["bytes"] <= one["cap_bytes"]
    assert found[7]["predicted_bits_per_byte"] > found[4]["predicted_bits_per_byte"] > 0
    assert facts["measured_tokens"] > 10_000
    assert 5 < facts["unpacked_bits_per_byte"] < 9, "a model of bytes after two steps"
    assert facts["parameters"] == sum(entry["parameters"] for entry in tiny_run.printed["tensors"])
    check_summary(facts)


def check_summary(facts: dict[str, Any]) -> None:
    lines = summary(facts).splitlines()
    assert lines[0].split() == ["quantizer", "coding", "bytes", "predicted", "measured", "enc.", "s", "dec.", "s"]
    names = ["int6, five percentiles", "Waterfilling, 4,500", "Waterfilling, 4,000"]
    assert [line.split("  ")[0] for line in lines[1:10] if line[0] != " "] == names
    assert sum(" brotli -5 * " in line for line in lines) == 2
    assert "tokens that calibration has not seen" in lines[-2]
    unmeasured = [one | {"measured_bits_per_byte": None} for one in facts["packings"]]
    none = summary(facts | {"measured_tokens": 0, "packings": unmeasured})
    assert "not measured, for calibration has seen all of the training text" in none


@pytest.mark.long
def test_no_text_is_left_to_measure_on(tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "CODINGS", {"zlib -9": Packed(codec=Zlib())})
    monkeypatch.setattr(packing, "METHODS", METHODS[:1])
    told = json.loads((tiny_run.folder / "recipe.json").read_text())
    told["recipe"]["pack"]["calibration"] |= {"tokens": 100_000, "batch_tokens": 4096}
    (tmp_path / "recipe.json").write_text(json.dumps(told))
    (tmp_path / "weights.safetensors").write_bytes((tiny_run.folder / "weights.safetensors").read_bytes())
    facts = compare(tmp_path)
    assert (facts["measured_tokens"], facts["unpacked_bits_per_byte"]) == (0, None)
    assert {one["measured_bits_per_byte"] for one in facts["packings"]} == {None}


@pytest.mark.parametrize("batch_rows", [1, 3, 8])
def test_what_is_measured_on_is_no_row_of_the_calibration(batch_rows: int, tiny_run: Any) -> None:
    """Also where a batch has more tokens than were asked for, or they are no multiple of it."""
    recipe, _, corpus = read_run(tiny_run.folder)
    length = recipe.score.sequence_length
    text = TrainingText(tokens=4 * length, batch_tokens=batch_rows * length)
    recipe = recipe.but({"pack.calibration": text})
    model = build(recipe.model, 0)
    unseen = packing._unseen(recipe, corpus, model)
    seen = torch.cat([*text.batches(model, corpus.train_shards(), length=length, bos=corpus.manifest.tokenizer.bos)])
    assert len(seen) == {1: 4, 3: 3, 8: 8}[batch_rows]
    assert sum(ids.numel() for ids in unseen) == packing.MEASURED_TOKENS // length * length
    assert not {*map(tuple, seen.tolist())} & {*map(tuple, torch.cat(unseen).tolist())}
