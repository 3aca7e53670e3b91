"""The twins of all recipes for two cores: each is the same choices at another size, and goes the whole line."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from caddie.config.schedules import PiecewiseConstant, Ramp, Rewarmed, Warmdown
from caddie.errors import UserError
from caddie.recipes.catalog import find, shipped
from caddie.recipes.shrink import mini
from caddie.train.averaging import ProgressEMA

NAMES = [name for name in shipped() if name != "tiny"]


def test_a_twin_keeps_what_its_recipe_chose_and_shrinks_its_numbers() -> None:
    full, twin = shipped()["ngram_tilt"], find("best_record_mini")
    assert twin.name == "ngram_tilt_mini"
    assert twin.base == f"{full.base}_mini"
    assert twin.parameters < full.parameters / 20
    attention, small = full.model.block.attention, twin.model.block.attention
    assert type(attention.gate) is type(small.gate)  # type: ignore[union-attr]
    assert small.xsa  # type: ignore[union-attr]
    # Layers 3 to 5 and 8 of 11 become 2, 3 and 5 of 7.
    assert (twin.model.depth, twin.model.recurrence.first, twin.model.recurrence.last) == (7, 2, 3)  # type: ignore[union-attr]
    assert twin.model.recurrence.passes == full.model.recurrence.passes  # type: ignore[union-attr]
    assert twin.model.parallel_streams.first == 5  # type: ignore[union-attr]
    assert twin.train.lr_schedule == full.train.lr_schedule
    assert twin.train.optimizers["embedding"] == full.train.optimizers["embedding"]


def test_rows_shrink_in_scoring_and_where_they_grow() -> None:
    twin = find("growing_rows_mini")
    attention: Any = twin.model.block.attention
    assert attention.longest == PiecewiseConstant(values=(128, 256, 384), begins=(0.1, 0.7))
    assert (twin.train.sequence_length, twin.score.sequence_length, twin.score.stride) == (384, 384, 192)
    assert twin.train.lr_schedule == Rewarmed(of=Warmdown(fraction=0.85, floor=0.1), begins=(0.1, 0.7), steps=8)
    twin = find("longer_rows_mini")
    assert (twin.train.sequence_length, twin.score.sequence_length, twin.score.stride) == (256, 320, 160)


def test_what_counts_steps_becomes_a_part_of_the_run() -> None:
    full, twin = shipped()["parallel_muon"], find("parallel_muon_mini")
    steps = 7e9 / 786_432
    assert twin.train.lr_schedule == Warmdown(fraction=3500 / steps)
    assert isinstance(twin.train.averaging, ProgressEMA)
    assert twin.train.averaging.fraction == pytest.approx(1 / 0.003 / steps)
    assert twin.train.optimizers["matrix"].momentum == Ramp(start=0.92, end=0.99, finish=1500 / steps)  # type: ignore[attr-defined]
    assert twin.train.steps is None
    assert full.train.steps == 9000


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_has_a_twin(name: str) -> None:
    twin = find(f"{name}_mini")
    assert twin == mini(find(name))
    assert 100_000 < twin.parameters < 4_000_000
    assert twin.train.micro_tokens(1) == twin.train.batch_tokens


def test_experiments_of_public_system_000_are_found_and_have_twins() -> None:
    assert find("public_000:weight_decay_008").diff(find("parallel_muon"))
    assert find("public_000:gated_attention_mini").parameters < 2_000_000
    with pytest.raises(UserError, match="has no recipe cutlass_gemm"):
        find("public_000:cutlass_gemm")  # nothing to set


def test_a_twin_of_no_recipe_is_a_mistake() -> None:
    with pytest.raises(UserError, match="no recipe nothing_mini"):
        find("nothing_mini")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text with enough different words for a vocabulary of 2,048."""
    chance = random.Random(0)
    stems = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(2, 9))) for _ in range(4000)]
    documents = [" ".join(chance.choices(stems, k=300)).capitalize() for _ in range(400)]
    path = tmp_path_factory.mktemp("text") / "words.jsonl"
    path.write_text("\n".join(json.dumps({"text": document}) for document in documents))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_twin_trains_packs_verifies_and_scores(
    name: str, words: Path, caddie, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(words.parent)  # where corpora are kept, so that twins share them
    settings = ("train.seconds=none", "train.steps=4", "data.validation_fraction=0.02")
    settings += ("pack.calibration.tokens=4096",)
    ended = caddie("run", f"{name}_mini", *settings, "--data", words, "--out", tmp_path / "run", "--json", "--quiet")
    assert (ended.status, ended.err) == (0, ""), ended.err
    printed = json.loads(ended.out)
    assert printed["verified"]
    assert 1.0 < printed["bits_per_byte"] < 10.0
