"""The twins of all recipes for two cores: each is the same choices at another size, and goes the whole line.

`NAME_mini` is the twin of half a minute, `NAME_scale` and `NAME_scale32` those of all the steps.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from caddie.config.schedules import PiecewiseConstant, Ramp, Rewarmed, Schedule, StepRamp, Warmdown, all_values
from caddie.data.loaders import CoprimeStride, ShuffledSequences
from caddie.errors import UserError
from caddie.recipes.catalog import find, shipped
from caddie.recipes.published import speeds
from caddie.recipes.shrink import SCALES, mini, scale, small_cap
from caddie.run.run import check_recipe
from caddie.score import DocumentLoRA
from caddie.train.averaging import ProgressEMA

WEAKER = SCALES["scale32"].batch ** -0.5
NAMES = [name for name in shipped() if name not in ("tiny", "small")]


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


def test_what_is_small_already_stays_above_zero() -> None:
    recipe = shipped()["value_embeddings"]
    few = {
        "model.value_embedding.dims": 2,
        "model.embedding.bigrams.dims": 2,
        "model.embedding.bigrams.buckets": 4,
        "model.embedding.dims": 8,
        "model.block.mlp.hidden": 8,
        "train.sequence_length": 4,
        "train.batch_tokens": 32,
        "score.sequence_length": 4,
        "score.stride": 4,
    }
    tiny = recipe.but(few)
    twin, half_minute = scale(tiny, "scale32", 100), mini(tiny)
    bigrams: Any = twin.model.embedding.bigrams
    assert (twin.model.value_embedding.dims, bigrams.dims, bigrams.buckets) == (1, 1, 2)  # type: ignore[union-attr]
    assert (twin.model.embedding.dims, twin.model.block.mlp.hidden) == (1, 1)  # type: ignore[attr-defined]
    for one in (twin, half_minute):
        assert (one.train.sequence_length, one.score.sequence_length, one.score.stride) == (1, 1, 1)


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


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_and_twin_can_be_trained_and_scored(name: str) -> None:
    for suffix in ("", "_mini", *(f"_{one}" for one in SCALES)):
        check_recipe(find(name + suffix))


def test_a_twin_of_all_steps_keeps_depth_schedules_averages_and_adaptation() -> None:
    full, twin = shipped()["longer_warmdown"], find("longer_warmdown_scale")
    assert twin.train.steps == speeds()["longer_warmdown"].steps
    assert twin.train.seconds is None
    for path in ("lr_schedule", "averaging", "qat", "clip_norm"):
        assert getattr(twin.train, path) == getattr(full.train, path), path
    for rule, optimizer in full.train.optimizers.items():
        assert twin.train.optimizers[rule] == optimizer.but(weight_decay=optimizer.weight_decay * 512**-0.5), rule
    assert (twin.model.depth, twin.model.recurrence) == (full.model.depth, full.model.recurrence)
    assert twin.model.parallel_streams == full.model.parallel_streams
    # 512 channels, 8 heads, 8,192 ids, rows of 2,048 and 786,432 tokens a step
    attention: Any = twin.model.block.attention
    assert (twin.model.width, attention.heads, attention.key_value_heads) == (64, 4, 2)
    assert (twin.model.vocabulary, twin.train.sequence_length, twin.train.batch_tokens) == (2048, 256, 1536)
    ttt, full_ttt = twin.score.ttt, full.score.ttt
    assert isinstance(ttt, DocumentLoRA)
    assert isinstance(full_ttt, DocumentLoRA)
    assert ttt.phases is not None
    assert (ttt.rank, ttt.alpha, ttt.chunk_tokens) == (10, 18.0, full_ttt.chunk_tokens)
    assert (ttt.phases.documents, ttt.phases.phases, ttt.phases.chunk_tokens) == (6, 3, 4096)
    assert ttt.lr == full_ttt.lr


@pytest.mark.parametrize("name", ["baseline", "longer_warmdown", "vocabulary_8192"])
def test_no_step_of_a_twin_of_all_steps_is_a_single_document(name: str) -> None:
    assert find(f"{name}_scale").train.loader == ShuffledSequences()
    assert find("vocabulary_4096_scale").train.loader == shipped()["vocabulary_4096"].train.loader == CoprimeStride()


def test_the_narrow_twin_reads_as_many_tokens_for_each_parameter_as_its_recipe() -> None:
    for name in ("baseline", "smear_and_bigrams", "exclusive_everywhere", "vocabulary_4096", "longer_warmdown"):
        full, wide, narrow = (find(f"{name}{suffix}") for suffix in ("", "_scale", "_scale32"))
        read = [max(all_values(one.train.batch_tokens)) / one.parameters for one in (full, wide, narrow)]
        assert 0.9 < read[2] / read[0] < 1.2 < 4 < read[0] / read[1], f"{name}: the wide one reads a tenth"
        assert (narrow.train.steps, narrow.model.depth) == (wide.train.steps, wide.model.depth)
        assert narrow.model.vocabulary == wide.model.vocabulary
        heads = [one.model.width // one.model.block.attention.heads for one in (wide, narrow)]
        assert heads == [16, 16], "as wide a head as the wide one's"


def test_the_narrow_twin_keeps_its_rotary_channels() -> None:
    for name in ("partial_rotary", "vocabulary_4096"):
        dims = [find(f"{name}{suffix}").model.block.attention.rope.dims for suffix in ("", "_scale", "_scale32")]
        assert dims == [16, 4, 16], "of a head of 64, 16 and 16 channels"
    fewer = find("partial_rotary").but({"model.block.attention.rope.dims": 8})
    assert scale(fewer, "scale32", 1000).model.block.attention.rope.dims == 8


def test_the_narrow_twin_rounds_as_much_finer_as_its_sums_are_shorter() -> None:
    full, wide, narrow = (find(f"vocabulary_8192{suffix}") for suffix in ("", "_scale", "_scale32"))
    assert wide.pack == full.pack.but(calibration=wide.pack.calibration)
    clips = [one.pack.quantizers["matrix"].of.scale.k for one in (full, narrow)]
    assert clips == [12.85, 12.85 / 4], "a sixteenth of the width"
    assert find("baseline_scale32").pack.quantizers == find("baseline").pack.quantizers, "its steps are of each row"
    bits = [8 * small_cap(full, one) / one.parameters for one in (wide, narrow)]
    assert bits == pytest.approx([8 * 16e6 / full.parameters] * 2, abs=1e-3)


def test_a_recipe_without_public_runs_makes_the_steps_of_the_next_one_that_has_some() -> None:
    assert find("finer_corrections_scale").train.steps == speeds()["longer_rows"].steps
    assert find("rows_2048_scale").score.stride == 2048 // 8
    assert find("overtone_start_scale").score.stride == 64 // 8
    vocabularies = [find(f"{name}_scale").model.vocabulary for name in ("baseline", "vocabulary_4096", "ngram_tilt")]
    assert vocabularies == [512, 1024, 2048]


def test_weight_decay_that_falls_shrinks_as_a_whole() -> None:
    full, twin = (find(f"lossless_caps{suffix}").train.optimizers["matrix"] for suffix in ("", "_scale32"))
    assert twin.weight_decay == full.weight_decay.but(start=0.095 * WEAKER, end=0.0475 * WEAKER)


@pytest.mark.parametrize(
    ("decay", "weaker"),
    [
        (StepRamp(start=0.16, end=0.32, steps=9), StepRamp(start=0.16 * WEAKER, end=0.32 * WEAKER, steps=9)),
        (
            PiecewiseConstant(values=(0.16, 0.0), begins=(0.5,)),
            PiecewiseConstant(values=(0.16 * WEAKER, 0.0), begins=(0.5,)),
        ),
    ],
)
def test_decay_by_other_schedules_shrinks_as_well(decay: Schedule, weaker: Schedule) -> None:
    own = find("baseline").but({"train.optimizers.matrix.weight_decay": decay})
    assert scale(own, "scale32", 1000).train.optimizers["matrix"].weight_decay == weaker


def test_decay_by_a_schedule_that_cannot_shrink_is_refused_in_one_line() -> None:
    own = find("baseline").but({"train.optimizers.matrix.weight_decay": Warmdown(fraction=0.5)})
    with pytest.raises(UserError, match="no twin of a weight decay by Warmdown; use a number"):
        scale(own, "scale", 1000)


@pytest.mark.long
@pytest.mark.parametrize("suffix", SCALES)
@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_has_a_twin_of_all_steps(name: str, suffix: str) -> None:
    twin, full = find(f"{name}_{suffix}"), find(name)
    assert twin.model.depth == full.model.depth
    least = {"scale": 100_000, "scale32": 15_000}[suffix]
    assert least < twin.parameters < 2_000_000
    assert twin.train.micro_tokens(1) == twin.train.batch_tokens
    assert 1000 < (twin.train.steps or 0) < 20_000


def test_experiments_of_public_system_000_are_found_and_have_twins() -> None:
    assert find("public_000:weight_decay_008").diff(find("parallel_muon"))
    assert find("public_000:gated_attention_mini").parameters < 2_000_000
    with pytest.raises(UserError, match="has no recipe cutlass_gemm"):
        find("public_000:cutlass_gemm")  # nothing to set


def test_a_twin_of_no_recipe_is_a_mistake() -> None:
    with pytest.raises(UserError, match="no recipe nothing_mini"):
        find("nothing_mini")
    with pytest.raises(UserError, match=r"no recipe baseline_scale48 \(did you mean baseline_scale\?\)"):
        find("baseline_scale48")


def test_a_recipe_that_is_based_on_none_with_public_runs_has_no_steps_to_make(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("import caddie\nown = caddie.find('baseline').but(base=None)\n")
    with pytest.raises(UserError, match=r"own is based on no recipe with public runs.*set train\.steps"):
        find(f"{file}:own_scale")


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
@pytest.mark.parametrize("suffix", ["mini", "scale"])
@pytest.mark.parametrize("name", NAMES)
def test_every_twin_trains_packs_verifies_and_scores(
    name: str, suffix: str, words: Path, caddie, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(words.parent)  # where corpora are kept, so that twins share them
    settings = ("train.seconds=none", "train.steps=4", "data.validation_fraction=0.02")
    if hasattr(find(f"{name}_{suffix}").pack.calibration, "tokens"):
        settings += ("pack.calibration.tokens=4096",)
    ended = caddie(
        "run", f"{name}_{suffix}", *settings, "--data", words, "--out", tmp_path / "run", "--json", "--quiet"
    )
    assert (ended.status, ended.err) == (0, ""), ended.err
    printed = json.loads(ended.out)
    assert printed["verified"]
    assert 1.0 < printed["bits_per_byte"] < 10.0
