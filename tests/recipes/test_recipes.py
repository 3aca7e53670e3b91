"""The shipped recipes: parameter counts, the chain of diffs, public figures, experiments of public system 000."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from caddie.config.schedules import Budget, TrainProgress, all_values, int_at, value_at
from caddie.model import DenseGate
from caddie.model.parameters import assign
from caddie.pack.fit import FillCap
from caddie.pack.quantize import Protection
from caddie.recipes.catalog import find, shipped
from caddie.recipes.names import ALIASES, tables
from caddie.recipes.published import figures, published, rows
from caddie.recipes.recipe import Recipe
from caddie.run.dead_settings import dead_settings
from caddie.score import DocumentLoRA
from caddie.score.ngram_tilt import NGramTilt
from caddie.train.qat import Views

RECIPES = shipped()
DIFFS = tables("public_000_experiments")
EXPERIMENTS = [(*row, "")[:4] for row in rows("public_000_experiments.txt")]

PUBLISHED = {
    "baseline": 17_059_912,
    "fp16_embedding": 16_765_000,
    "lower_lr": 17_059_912,
    "single_gpu": 19_417_152,
    "gold6": 26_993_756,
    "parallel_muon": 26_928_220,
    "document_lora": 17_059_912,
    "rows_2048": 17_059_912,
    "rows_4096": 17_059_912,
    "ten_layers": 18_897_488,
    "sliding_window": 17_059_912,
    "overtone_start": 18_897_488,
    "six_bits": 21_778_504,
    "six_bits_ten_layers": 22_174_288,
    "smear_and_bigrams": 22_368_840,
    "six_bits_eleven_layers": 26_501_720,
    "snapshot_average": 22_368_841,
    "five_bits": 25_517_137,
    "exclusive_three": 26_829_913,
    "exclusive_four": 26_829_913,
    "partial_rotary": 26_829_913,
    "value_embeddings": 26_993_756,
    "exclusive_everywhere": 27_067_484,
    "coprime_loader": 27_038_812,
    "plain_six_bits": 26_993_756,
    "own_mlps": 30_352_046,
    "vocabulary_4096": 34_401_371,
    "equal_rows": 34_401_371,
    "separate_lanes_4096": 34_401_372,
    "vocabulary_8192": 35_943_512,
    "progressive_recurrence": 35_943_512,
    "sharp_attention": 35_943_512,
    "separate_lanes": 35_943_513,
    "momentum_97": 35_944_536,
    "three_layer_recurrence": 35_944_536,
    "routed_lanes": 35_944_602,
    "document_attention": 35_944_602,
    "one_phase": 35_944_602,
    "three_phases": 35_944_602,
    "narrow_gates": 35_945_671,
    "lossless_caps": 35_944_602,
    "dense_gates": 35_989_658,
    "sparse_gates": 35_945_658,
    "document_smear": 35_945_671,
    "longer_warmdown": 35_945_671,
    "asymmetric_softcap": 35_945_673,
    "longer_rows": 35_945_673,
    "growing_rows": 35_945_673,
    "finer_corrections": 35_945_673,
    "ngram_tilt": 35_945_673,
    "ternary": 73_685_840,
    "universal_transformer": 8_115_775,
    "random_mlps": 17_853_536,
    "random_maps": 3_744_892,
}
"""Recipe to the number of parameters that its record's log or script states."""

OURS_LESS_PUBLISHED = {
    # our hashed bigrams have a scale
    "smear_and_bigrams": 1,
    # matrices, scale and gains of an attention in layer 0 that never runs; mix and scales of two layers' second runs
    "own_mlps": -(786_432 + 512 + 8) - 2 * (2 * 512 + 512 + 512 + 8),
    # the weight and the gate of a sixth connection, where the record uses those of the fifth again
    "equal_rows": 2 * 512,
    "separate_lanes_4096": 2 * 512,
    # a smear that is in no optimizer: twelve weights and a scale
    "narrow_gates": -13,
    # a head beside the tied one, which nothing reads
    "ternary": -8192 * 768,
    # vectors of 12 runs for those of 4 passes, and 12 factors on what runs write (in no optimizer); gates of the first
    # values for 11 runs, where two layers have them here; two scales for each run's input and output
    "universal_transformer": 4 * 512 - 2 * 12 * 512 + (2 - 11) - 24,
    # scales of the inputs and outputs of eleven layers
    "random_maps": -22,
}
"""Where the tensors differ, with the reason; a figure's note says it too."""


def on_meta(recipe: Recipe) -> nn.Module:
    with torch.device("meta"):
        return recipe.model.build()


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_fits_together(name: str) -> None:
    """Rules for optimizers, quantizers and views reach this model's parameters, and batches divide."""
    recipe = RECIPES[name]
    model = on_meta(recipe)
    optimizers = assign(recipe.train.optimizers, model, "train.optimizers")
    quantizers = assign(recipe.pack.quantizers, model, "pack.quantizers").values()
    assert not isinstance(recipe.pack.fit, FillCap) or any(q.coarser(2.0) != q for q in quantizers)
    Views(recipe.train.qat, model)
    assert recipe.train.micro_tokens(world=8 if recipe.train.micro_batches == 8 else 1) > 0
    shapes = {parameter: tensor.ndim for parameter, tensor in model.named_parameters()}
    assert all(type(optimizer).__name__ != "Muon" or shapes[p] == 2 for p, optimizer in optimizers.items())
    assert sum(tensor.numel() for tensor in model.parameters()) == recipe.parameters


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_are_those_of_the_record(name: str) -> None:
    assert RECIPES[name].parameters - PUBLISHED[name] == OURS_LESS_PUBLISHED.get(name, 0)


def test_every_recipe_with_figures_has_a_count_to_answer_to() -> None:
    assert {name for name, recipe in RECIPES.items() if recipe.public} == set(PUBLISHED) == set(published())


@pytest.mark.parametrize("name", sorted(set(RECIPES) - {"baseline"}))
def test_every_recipe_is_a_small_diff_on_one_that_is_shipped(name: str) -> None:
    recipe = RECIPES[name]
    assert recipe.base in RECIPES
    base = RECIPES[str(recipe.base)]
    diff = base.settings.diff(recipe.settings)
    assert diff
    assert base.settings.but(diff) == recipe.settings
    assert len(diff) <= 32


def test_the_best_record_goes_back_to_the_baseline_through_the_history() -> None:
    chain = [find("best_record").name]
    while (base := RECIPES[chain[-1]].base) is not None:
        chain.append(base)
    assert chain[-1] == "baseline"
    passed = {"sparse_gates", "three_phases", "three_layer_recurrence", "vocabulary_8192", "parallel_muon", "six_bits"}
    assert passed <= set(chain)
    counts = [RECIPES[name].parameters for name in chain]
    assert counts[0] > 2 * counts[-1]


def test_best_record_stands_for_the_one_with_the_best_public_score() -> None:
    assert ALIASES.keys() == {"best_record"}
    best = min((recipe for recipe in RECIPES.values() if recipe.published), key=lambda recipe: recipe.published or 9.0)
    assert find("best_record") == best == RECIPES["ngram_tilt"]
    assert best.published == pytest.approx(1.0565, abs=5e-5)
    assert "best_record" in best.why


LATEST = ("asymmetric_softcap", "longer_rows", "growing_rows", "finer_corrections", "ngram_tilt")


LATEST_SETTINGS: dict[str, tuple[object, ...]] = {
    "train.seconds": (596, 596, 596, 596, 599.5),
    "train.optimizers.matrix.lr": (0.026, 0.026, 0.026, 0.028, 0.028),
    "train.sequence_length": (2048, 2048, 3072, 2048, 2048),
    "model.block.attention.query_gain": (5.0, 5.25, 5.25, 5.25, 5.0),
    "model.head.learned_caps": ("untrained",) * 5,
    "pack.calibration.tokens": (65_536, 65_536, 65_536, 65_536, 131_072),
    "pack.correction.matrices": (3, 3, 3, 4, 3),
    "pack.correction.rank": (4, 4, 4, 2, 4),
    "pack.correction.group": (64, 64, 64, 32, 32),
    "score.sequence_length": (2048, 2560, 3072, 2560, 2560),
    "score.ttt.lr": (1e-4, 0.75e-4, 0.75e-4, 0.8e-4, 0.8e-4),
    "score.ttt.weight_decay": (0.5, 0.5, 0.5, 0.5, 2.0),
    "score.ttt.documents": (64, 64, 24, 64, 64),
    "score.ttt.chunk_tokens": (48,) * 5,
    "score.ttt.short_chunks": ((), (), ((256, 8), (2000, 24)), (), ()),
    "score.ttt.rank": (80,) * 5,
    "score.ttt.phases.phases": (3, 3, 1, 3, 1),
    "score.ttt.phases.documents": (2500, 2500, 2500, 3000, 2500),
}
"""Path to what the logs of the records say, in the order of `LATEST`: each differs from the one before it in these."""


@pytest.mark.parametrize("path", LATEST_SETTINGS)
def test_settings_of_the_latest_records_are_those_of_their_logs(path: str) -> None:
    found = []
    for name in LATEST:
        value: Any = RECIPES[name]
        for step in path.split("."):
            value = value[step] if isinstance(value, Mapping) else getattr(value, step)
        found.append(value)
    assert tuple(found) == LATEST_SETTINGS[path]


def test_switches_of_the_latest_records_are_those_of_their_logs() -> None:
    protected, gates, tilted, adapted = [], [], [], []
    for name in LATEST:
        recipe = RECIPES[name]
        protected.append(recipe.pack.protection)
        gates.append(type(recipe.pack.quantizers["gate"]).__name__)
        tilted.append(recipe.score.tilt)
        assert isinstance(recipe.score.ttt, DocumentLoRA)
        adapted.append({"query", "key", "value"} & set(recipe.score.ttt.targets))
    one = Protection(groups=1, columns=64, bits=8)
    assert protected == [one, one, one, one, None]
    assert gates == ["Rows"] * 4 + ["Float16"]
    assert tilted == [None] * 4 + [NGramTilt(order=16, threshold=0.8, boost=2.625)]
    assert adapted == [{"query", "key", "value"}, {"key"}, {"key"}, {"key"}, {"query", "value"}]


@pytest.mark.parametrize("name", LATEST)
def test_the_latest_records_are_scored_in_whole_rows(name: str) -> None:
    """No cut of documents is shorter than a window of scoring; while training none is longer than a row."""
    recipe = RECIPES[name]
    attention: Any = recipe.model.block.attention
    assert all_values(attention.longest)[-1] == recipe.score.sequence_length
    last = TrainProgress(9999, 0.0, Budget(steps=10_000))
    assert int_at(attention.longest, last) == recipe.train.sequence_length


@pytest.mark.long
@pytest.mark.parametrize("name", LATEST)
def test_only_the_caps_of_the_latest_records_are_trained_by_nothing(name: str) -> None:
    model = on_meta(RECIPES[name])
    assert {parameter for parameter, tensor in model.named_parameters() if not tensor.requires_grad} == {"head.caps"}
    assert not dead_settings(RECIPES[name], RECIPES[str(RECIPES[name].base)])


def test_names_and_reasons_are_unique() -> None:
    for what in (Counter(r.why for r in RECIPES.values()), Counter(r.sha256 for r in RECIPES.values())):
        assert set(what.values()) == {1}


def test_public_figures_are_whole() -> None:
    for recipe in RECIPES.values():
        labels = [(figure.source, figure.label) for figure in recipe.public]
        assert len(set(labels)) == len(labels), recipe.name
        for figure in recipe.public:
            assert figure.source.startswith("openai/parameter-golf")
            assert 1.0 < figure.bits_per_byte < 1.5
            assert figure.artifact_bytes is None or 4_000_000 < figure.artifact_bytes <= 16_000_000
    assert figures("#7", "7 1.5 -, run b 1.25 10", machine="a laptop", note="n")[1].to_json() == {
        "kind": "Figure",
        "label": "a laptop, run b",
        "bits_per_byte": 1.25,
        "artifact_bytes": 10,
        "source": "openai/parameter-golf #7",
        "note": "n",
    }


def test_a_difference_of_counts_is_explained_where_the_figure_stands() -> None:
    for name in OURS_LESS_PUBLISHED:
        assert any(f"{PUBLISHED[name]:,}" in figure.note for figure in RECIPES[name].public), name


@pytest.mark.parametrize("name", ["six_bits", "six_bits_ten_layers", "smear_and_bigrams", "six_bits_eleven_layers"])
def test_records_that_trained_with_six_bits_do_so_throughout(name: str) -> None:
    (view,) = RECIPES[name].train.qat.values()
    assert view.quantizer.bits == 6  # type: ignore[attr-defined]
    assert value_at(view.strength, TrainProgress(0, 0.0, Budget(seconds=600))) == 1.0


def test_public_system_001_sees_eight_bits_in_the_last_part_of_the_run() -> None:
    view = RECIPES["single_gpu"].train.qat["matrix"]
    budget = Budget(seconds=600)
    assert [value_at(view.strength, TrainProgress(1, seconds, budget)) for seconds in (509.9, 510.2)] == [0.0, 1.0]
    assert view.quantizer == RECIPES["single_gpu"].pack.quantizers["matrix"]


def test_matrices_that_read_the_stream_start_orthogonal_once_a_record_did() -> None:
    for name in ("snapshot_average", "gold6", "parallel_muon", "three_layer_recurrence", "ngram_tilt"):
        block = RECIPES[name].model.block
        assert type(block.mlp.linear.initial).__name__ == "Orthogonal", name  # type: ignore[attr-defined]
        assert type(block.attention.linear.initial).__name__ == "Orthogonal", name  # type: ignore[union-attr]


@pytest.mark.parametrize(("label", "outcome", "score", "note"), EXPERIMENTS, ids=[label for label, *_ in EXPERIMENTS])
def test_an_experiment_changes_something_or_says_why_not(label: str, outcome: str, score: str, note: str) -> None:
    assert outcome
    assert score == "-" or 1 < float(score) < 2
    base = RECIPES["parallel_muon"]
    if label not in DIFFS:
        assert note
        return
    recipe = find(f"public_000:{label}")
    assert recipe.base == base.name
    assert recipe.why == outcome
    assert base.settings.diff(recipe.settings)
    model = on_meta(recipe)
    assign(recipe.train.optimizers, model, "train.optimizers")
    assign(recipe.pack.quantizers, model, "pack.quantizers")
    Views(recipe.train.qat, model)
    assert recipe.train.micro_tokens(world=8) > 0


def test_public_system_000_lists_two_dozen_experiments() -> None:
    labels = {label for label, *_ in EXPERIMENTS}
    assert len(EXPERIMENTS) == len(labels) == 24
    assert set(DIFFS) < labels
    assert len(DIFFS) == 13
    gated = find("public_000:gated_attention")
    assert gated.model.block.attention.gate == DenseGate(bias=4.0)  # type: ignore[union-attr]
    assert gated.parameters - RECIPES["parallel_muon"].parameters == 11 * (8 * 512 + 8)
