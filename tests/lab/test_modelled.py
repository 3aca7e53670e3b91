"""Equal time that is modelled: times of steps at full size, and the steps that a study's labels get by them."""

import math
from dataclasses import replace
from statistics import median
from typing import Any
from unittest.mock import Mock

import pytest

from caddie.config.schedules import PiecewiseConstant
from caddie.data.loaders import ShuffledSequences
from caddie.errors import UserError
from caddie.lab import modelled
from caddie.lab.findings import findings
from caddie.lab.modelled import PARTS, StepTime, flops_per_step, next_timed, step_time
from caddie.lab.report import markdown, page
from caddie.lab.rows import Row
from caddie.lab.selection import select
from caddie.lab.study import BASE, Entry, ModelledSeconds, Study
from caddie.lab.variations import ablate
from caddie.model.flops import count
from caddie.recipes.catalog import find, shipped
from caddie.recipes.published import speeds
from caddie.recipes.recipe import Recipe

TWIN = find("parallel_muon_mini")
WIDER = {"model.block.mlp.hidden": TWIN.model.block.mlp.hidden * 7 // 6}


def study(**entries: Entry) -> Study:
    return Study(name="modelled", base=TWIN, entries=entries, budget=ModelledSeconds(seconds=600))


@pytest.mark.parametrize("name", ["baseline", "exclusive_everywhere", "ngram_tilt", "parallel_muon"])
def test_public_runs_time_a_recipe_and_its_twin(name: str) -> None:
    for one in (find(name), find(f"{name}_mini")):
        found = step_time(one)
        assert (found.milliseconds, found.source) == (speeds()[name].step_ms, "published")
        assert found.note.startswith(f"{name} (")


def test_what_is_not_training_keeps_the_public_time() -> None:
    other = TWIN.but({"pack.quantizers.matrix": "Float16", "train.seconds": 3.0, "score.stride": 7})
    assert step_time(other) == step_time(TWIN)


def test_a_diff_that_makes_another_public_recipe_takes_its_time() -> None:
    other = find("exclusive_everywhere_mini")
    found = step_time(TWIN.but(TWIN.settings.diff(other.settings)))
    assert (found.milliseconds, found.source) == (speeds()["exclusive_everywhere"].step_ms, "published")


@pytest.mark.long
def test_a_changed_number_counts_by_the_ratio_of_recipe_and_twin() -> None:
    full = find("parallel_muon")
    found, by_hand = step_time(TWIN.but(WIDER)), full.but({"model.block.mlp.hidden": 1792})
    assert full.model.block.mlp.hidden == 1536
    ratio = count(by_hand.model, 2048).per_token / count(full.model, 2048).per_token
    assert found.source == "FLOPs"
    assert found.milliseconds == pytest.approx(speeds()["parallel_muon"].step_ms * ratio)
    doubled = step_time(TWIN.but({"train.batch_tokens": 2 * TWIN.train.batch_tokens}))  # type: ignore[operator]
    assert doubled.milliseconds == pytest.approx(2 * speeds()["parallel_muon"].step_ms)


LONGEST = "model.block.attention.longest"


@pytest.mark.long
@pytest.mark.parametrize(
    ("twin", "changed", "full"),
    [
        ("ngram_tilt_mini", 128, 1024),  # a number in place of 2,048, then 2,560
        ("ngram_tilt_mini", PiecewiseConstant(values=(128, 256), begins=(0.5,)), (1024, 2048)),
        ("longer_warmdown_mini", PiecewiseConstant(values=(128, 256), begins=(0.5,)), (1024, 2048)),
    ],
)
def test_a_number_and_a_schedule_count_alike(twin: str, changed: Any, full: Any) -> None:
    recipe, whole = find(twin), find(twin.removesuffix("_mini"))
    same = changed.but(values=full) if isinstance(changed, PiecewiseConstant) else full
    ratio = flops_per_step(whole.but({LONGEST: same})) / flops_per_step(whole)
    found = step_time(recipe.but({LONGEST: changed}))
    assert ratio < 1
    assert found.milliseconds == pytest.approx(speeds()[whole.name].step_ms * ratio)


def test_a_change_whose_cost_at_full_size_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"model\.longest has a value of another kind .*step_cost=1\.03"):
        modelled._scaled({"longest": {"kind": "Other"}}, {"longest": 256}, {"longest": 2048}, "model")
    entry = Entry(diff=WIDER)
    refused = replace(study(other=entry), base=find("ngram_tilt_mini"))
    known = step_time

    def told(recipe: Recipe) -> StepTime:
        if recipe.settings == refused.base.settings:
            return known(recipe)
        raise UserError("not known")

    monkeypatch.setattr("caddie.lab.study.step_time", told)
    with pytest.raises(UserError, match=r"^other: not known"):
        refused.recipe(BASE)
    stated = replace(refused, entries={"other": replace(entry, step_cost=1.25)})
    assert stated.recipe("other").train.steps == round(6e5 / (1.25 * speeds()["ngram_tilt"].step_ms))


def test_a_stated_cost_is_a_multiple_of_the_rivals() -> None:
    slower = Entry(diff={"train.clip_norm": 0.1}, step_cost=1.5)
    one = study(slower=slower, slowest=replace(slower, against="slower", step_cost=2.0))
    ms = {label: time.milliseconds for label, time in one.step_times.items()}
    assert ms == {BASE: 83.47, "slower": pytest.approx(1.5 * 83.47), "slowest": pytest.approx(3 * 83.47)}
    with pytest.raises(UserError, match=r"^slower: its step_cost leads back to itself, by slower; state none there"):
        _ = study(slower=replace(slower, against="slowest"), slowest=replace(slower, against="slower")).step_times


def test_a_step_of_one_gpu_takes_an_eighth_on_eight() -> None:
    assert speeds()["single_gpu"].source.endswith(" on 1xH100")
    assert step_time(find("single_gpu_mini")).milliseconds == speeds()["single_gpu"].step_ms / 8


def test_the_order_of_the_data_takes_no_time() -> None:
    found = step_time(TWIN.but({"train.loader": ShuffledSequences()}))
    assert (found.milliseconds, found.source) == (speeds()["parallel_muon"].step_ms, "published")


OTHERS = ("ngram_tilt", "parallel_muon", "vocabulary_8192", "document_attention")


@pytest.mark.long
@pytest.mark.parametrize("name", ["few_layers", *OTHERS])
def test_ablations_of_twins_have_times(name: str) -> None:
    one = ablate(find(f"{name}_mini"), budget=ModelledSeconds(seconds=1))
    assert {time.source for time in one.step_times.values()} <= {"published", "FLOPs"}


def test_a_class_in_place_of_another_keeps_the_sizes_of_the_recipe() -> None:
    mlp = find("value_embeddings_mini").model.block.mlp
    assert type(mlp) is not type(TWIN.model.block.mlp)
    assert step_time(TWIN.but({"model.block.mlp": mlp})).milliseconds == step_time(TWIN).milliseconds


def test_the_mean_over_a_run_is_that_of_a_clock() -> None:
    recipe = find("three_layer_recurrence")
    train = recipe.train
    early, late = (count(recipe.model, train.sequence_length, at).per_token for at in (0.0, 1.0))
    begin = 0.35  # when the layers begin to run again
    mean = 1 / (begin / early + (1 - begin) / late)
    assert math.isclose(begin * PARTS, round(begin * PARTS))
    assert flops_per_step(recipe) == pytest.approx(mean * train.batch_tokens)  # type: ignore[operator]


def test_a_diff_that_makes_a_recipe_without_public_runs_is_compared_by_its_base() -> None:
    base, other = find("baseline_scale"), find("few_layers_scale")
    assert step_time(base.but(base.settings.diff(other.settings))) == step_time(other)
    assert " of vocabulary_4096 " in step_time(other).note


def test_recipes_without_public_runs_are_compared_with_what_they_are_based_on() -> None:
    assert next_timed(find("lower_lr")) == "baseline", "that was timed on other GPUs"
    assert next_timed(find("few_layers")) in speeds()
    assert next_timed(find("tiny").but(name="mine", base=None)) == "baseline"
    mine = find("baseline_mini").but({"model.depth": 6}, name="mine", base="baseline_mini")
    assert step_time(mine) == step_time(find("baseline_mini").but({"model.depth": 6}))


@pytest.mark.long
def test_flops_tell_the_ratio_of_public_times() -> None:
    """The model is no better than this: half of the records are within 2 % of what it makes of their bases."""
    wrong = []
    for name, recipe in shipped().items():
        base = recipe.base or ""
        if {name, base} <= speeds().keys() and all(speeds()[one].source.endswith(" on 8xH100") for one in (name, base)):
            ratio = flops_per_step(recipe) / flops_per_step(find(base))
            wrong.append(abs(ratio / (speeds()[name].step_ms / speeds()[base].step_ms) - 1))
    assert len(wrong) > 35
    assert median(wrong) < 0.02


def test_steps_are_the_seconds_by_the_time_of_a_step() -> None:
    one = study(wider=Entry(diff=WIDER), slower=Entry(diff={"model.block.attention.xsa": True}, step_cost=1.03))
    ms = speeds()["parallel_muon"].step_ms
    steps = {label: one.recipe(label).train.steps for label in one.labels}
    wider = step_time(TWIN.but(WIDER)).milliseconds
    assert steps == {BASE: round(6e5 / ms), "wider": round(6e5 / wider), "slower": round(6e5 / (1.03 * ms))}
    assert one.recipe("wider").train.seconds is None
    told = one.to_json()
    assert (told["equal"], told["budget"]) == ("modelled seconds", "ModelledSeconds(seconds=600.0)")
    assert {label: (at["steps"], at["source"]) for label, at in told["step_times"].items()} == {
        BASE: (steps[BASE], "published"),
        "wider": (steps["wider"], "FLOPs"),
        "slower": (steps["slower"], "stated"),
    }
    assert Study(name="clocked", base=TWIN).to_json()["step_times"] == {}
    assert ModelledSeconds(seconds=600).give(TWIN).train.steps == steps[BASE]


@pytest.mark.parametrize("cost", [0.0, -1.0, math.inf, math.nan])
def test_a_cost_that_is_none_is_refused(cost: float) -> None:
    with pytest.raises(UserError, match="the step_cost of odd must be a number above 0"):
        study(odd=Entry(diff={}, step_cost=cost))


def test_the_report_says_which_times_are_modelled() -> None:
    one = study(wider=Entry(diff=WIDER), slower=Entry(diff={"model.block.attention.xsa": True}, step_cost=1.03))
    facts = {"state": "finished", "threads": 2, "train_seconds": 1800.0, "total_seconds": 3600.0}
    rows: list[Row] = [
        {
            "label": label,
            "seed": seed,
            "bits_per_byte": 1.0 + seed / 100,
            "steps": one.recipe(label).train.steps,
            **facts,
        }
        for label in one.labels
        for seed in one.seeds
    ]
    found = findings({**one.to_json(), "command": "caddie study s.py"}, rows)
    text, html = markdown(found), page(found)
    assert "steps (each at full size)" in text
    for words in ("(83.47 ms, published)", "ms, FLOPs)", "(85.97 ms, stated)"):
        assert words in text
        assert words.strip("()") in html
    measured = dict(found["measured"])
    assert measured["Budget"] == "600 modelled seconds each"
    assert measured["Time of a step on eight H100, published"] == "parallel_muon (#593 on 8xH100)"
    assert measured["Time of a step on eight H100, stated by the study"] == "1.03 of parallel_muon (#593 on 8xH100)"
    assert measured["Cost"] == "9 runs of 9 hours together, 18 core hours"
    assert measured["A tenth of the training"] == "caddie study s.py --fraction 0.1"


def test_selection_refuses_a_cost_that_it_could_not_add_up() -> None:
    with pytest.raises(UserError, match="a stated step_cost holds beside one rival alone"):
        select(study(slower=Entry(diff={}, step_cost=1.1)), executor=Mock())
