"""Studies as values: what they hold, what they refuse, and how they are made from a recipe."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caddie.config.schedules import PiecewiseConstant
from caddie.errors import UserError
from caddie.lab.report import Results
from caddie.lab.study import (
    Claim,
    Entry,
    Seconds,
    Steps,
    Study,
    Tokens,
    find_study,
)
from caddie.lab.variations import ablate, labelled, read_values, sweep
from caddie.recipes.catalog import find
from caddie.recipes.recipe import Recipe
from caddie.run.run import check_recipe

BASE = find("baseline_mini")


def study(**settings: object) -> Study:
    entries = {"deeper": Entry(diff={"model.depth": 6}), "wide": Entry(diff={"model.width": 144}, against="deeper")}
    return Study(**{"name": "shapes", "base": BASE, "entries": entries, **settings})  # type: ignore[arg-type]


def test_a_recipe_is_the_base_the_diff_and_the_budget() -> None:
    one = study(budget=Steps(steps=7))
    assert one.labels == ["base", "deeper", "wide"]
    assert one.recipe("base").settings == BASE.but({"train.seconds": None, "train.steps": 7}).settings
    deeper = one.recipe("deeper")
    assert (deeper.model.depth, deeper.train.steps, deeper.train.seconds) == (6, 7, None)
    assert (deeper.name, deeper.base, deeper.public) == ("deeper", "baseline_mini", ())
    assert study().recipe("deeper").train.seconds == BASE.train.seconds, "no budget leaves each its own"


def test_budgets() -> None:
    recipe = BASE.but({"train.batch_tokens": 512, "train.sequence_length": 128})
    assert Seconds(seconds=2.5).give(recipe).train.budget.seconds == 2.5
    assert Tokens(tokens=51_200).give(recipe).train.steps == 100
    assert Tokens(tokens=51_200).give(recipe.but({"train.batch_tokens": 1024})).train.steps == 50
    growing = recipe.but(
        {"train.batch_tokens": PiecewiseConstant(values=(512, 1024), begins=(0.75,)), "train.micro_batches": 2}
    )
    assert Tokens(tokens=64_000).give(growing).train.steps == 100, "three quarters of 512 and one of 1,024 are 640"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "../up"}, "is letters"),
        ({"name": ".hidden"}, "is letters"),
        ({"seeds": ()}, "needs whole seeds"),
        ({"seeds": (1, 1)}, "needs whole seeds"),
        ({"seeds": (-1,)}, "needs whole seeds"),
        ({"seeds": (1.5, 2)}, "needs whole seeds"),
        ({"entries": {"a": Entry(diff={1: 2})}}, "the diff of a must be dotted paths"),  # type: ignore[dict-item]
        ({"entries": {"a": Entry(diff=["model.depth"])}}, "the diff of a must be dotted paths"),  # type: ignore[arg-type]
        ({"margin": -0.1}, "margin"),
        ({"base": "tiny"}, "base of the study shapes cannot be 'tiny'; give base=find"),
        ({"seeds": 2}, "seeds of the study shapes cannot be 2"),
        ({"margin": "x"}, "margin of the study shapes cannot be 'x'"),
        ({"budget": 100}, "budget of the study shapes cannot be 100; give budget=Steps"),
        ({"entries": ["a"]}, "entries of the study shapes"),
        ({"entries": {"a": {"model.depth": 6}}}, "the entry a must be an Entry"),
        ({"scales": {"x": 3}}, "the scale x must be dotted paths"),
        ({"entries": {"base": Entry(diff={})}}, "the base itself"),
        ({"entries": {"": Entry(diff={})}}, "a label is"),
        ({"entries": {"two\nlines": Entry(diff={})}}, "a label is"),
        ({"entries": {6: Entry(diff={})}}, "a label is 1 to 100 characters of one line, which 6 is not"),
        ({"name": 5}, 'name of the study 5 cannot be 5; give name="depths"'),
        ({"fraction": "0.1"}, "cannot be '0.1'; give fraction=0.1"),
        ({"scales": {"two layers": {}}}, "a name of a study or scale is letters, digits, - and _, which 'two layers'"),
        ({"entries": {"a": Entry(diff={}, step_cost="1.03")}}, "step_cost of a must be a number above 0, not '1.03'"),
        ({"entries": {"a": Entry(diff={}, public_score="1.2")}}, "public_score of a must be a number, not '1.2'"),
        (
            {"entries": {"a": Entry(diff={}, claim="better")}},
            "the claim of a must say better, worse or same, not 'bett",
        ),
        (
            {"entries": {"a": Entry(diff={}, claim=Claim(word="Better", source="x"))}},
            "better, worse or same, not Claim",
        ),
        (
            {"entries": {"a": Entry(diff={}, claim=Claim(word="better", difference="-0.1", source="x"))}},
            "the difference that a claims must be a number, not '-0.1'",
        ),
        ({"entries": {"a": Entry(diff={}, against="b")}}, "a is set against b"),
        ({"entries": {"a": Entry(diff={}, against="a")}}, "a is set against a"),
    ],
)
def test_what_is_no_study_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        study(**settings)


def test_a_diff_that_does_not_fit_names_its_label() -> None:
    one = study(entries={"odd": Entry(diff={"model.dept": 3})})
    with pytest.raises(UserError, match=r"^odd: no setting model\.dept \(did you mean model\.depth"):
        one.recipe("odd")


def test_an_entry_does_not_set_what_the_budget_decides() -> None:
    entries = {"longer": Entry(diff={"train.steps": 300})}
    with pytest.raises(UserError, match=r"^longer: it sets train.seconds or train.steps, which the study's budget"):
        study(entries=entries, budget=Steps(steps=150)).recipe("longer")
    assert study(entries=entries).recipe("longer").train.steps == 300


def test_long_labels_stay_apart() -> None:
    values = [
        {"kind": "PiecewiseConstant", "values": [256] * 20 + [last], "begins": [n / 21 for n in range(1, 21)]}
        for last in (1, 2)
    ]
    assert len({labelled({"train.batch_tokens": value}) for value in values}) == 2


def test_what_a_report_needs() -> None:
    claim = Claim(word="worse", difference=0.004, source="somewhere")
    one = study(entries={"a": Entry(diff={"model.depth": 6}, kind="architecture", claim=claim)}, seeds=(4, 5))
    told = one.to_json()
    assert told["entries"][0]["diff"] == {"model.depth": "6"}
    assert told["entries"][0]["claim"]["difference"] == 0.004
    assert (told["base"], told["seeds"], told["equal"]) == ("baseline_mini", [4, 5], "")
    assert study(budget=Seconds(seconds=3)).to_json()["equal"] == "seconds"


def test_what_changes_is_told_against_the_rival() -> None:
    one = study(
        entries={
            "deeper": Entry(diff={"model.depth": 6}),
            "deeper, wide": Entry(diff={"model.depth": 6, "model.width": 144}, against="deeper"),
        }
    )
    assert one.shown("base") == {}
    assert one.shown("deeper") == {"model.depth": "6"}
    assert one.shown("deeper, wide") == {"model.width": "144"}


def test_a_study_at_a_scale() -> None:
    one = study(scales={"small": {"model.width": 64}})
    small = one.at("small")
    assert (small.name, small.base.model.width, small.labels) == ("shapes-small", 64, one.labels)


def test_a_sweep_is_a_grid_without_the_recipe_itself() -> None:
    values = {"train.optimizers.matrix.lr": [0.02, 0.04], "train.optimizers.scalar.lr": [0.04, 0.01]}
    one = sweep(BASE, values, seeds=(1,))
    assert list(one.entries) == [
        "matrix.lr=0.02, scalar.lr=0.04",
        "matrix.lr=0.02, scalar.lr=0.01",
        "matrix.lr=0.04, scalar.lr=0.01",
    ]
    assert one.recipe("matrix.lr=0.02, scalar.lr=0.01").train.optimizers["scalar"].lr == 0.01  # type: ignore[attr-defined]
    for wrong in ({}, {"model.depth": []}, {"model.depth": 4}, {"model.block.mlp": "SwiGLU"}):
        with pytest.raises(UserError, match="needs a path and values"):
            sweep(BASE, wrong)
    for study in (lambda: sweep("tiny", {"model.depth": [1]}), lambda: ablate("tiny")):  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"the recipe cannot be 'tiny'; find one, as caddie.find\("):
            study()
    with pytest.raises(UserError, match="the origin cannot be 'baseline'"):
        ablate(BASE, "baseline")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="give a dict of paths and their values"):
        sweep(BASE, ["model.depth"])  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no setting"):
        sweep(BASE, {"model.dept": [1]})


def test_numbers_of_numpy_are_told_as_pythons() -> None:
    found = sweep(BASE, {"train.steps": [5, *np.arange(5, 7)], "train.optimizers.matrix.lr": [np.float32(0.5)]})
    assert [*found.entries] == ["steps=5, lr=0.5", "steps=6, lr=0.5"]
    assert [entry["diff"]["train.steps"] for entry in found.to_json()["entries"]] == ["5", "6"]


def test_ablation_takes_back_each_line_and_every_entry_is_possible() -> None:
    recipe = find("few_layers_mini")
    origin = find(recipe.base or "")
    one = ablate(recipe)
    lines = recipe.settings.diff(origin.settings)
    taken = [path for entry in one.entries.values() for path in entry.diff]
    assert {path for path in lines if not path.startswith(("train.seconds", "train.steps"))} <= set(taken)
    assert any(len(entry.diff) > 1 for entry in one.entries.values()), "depth fits only with its layers"
    for label in one.labels:
        check_recipe(one.recipe(label))
    with pytest.raises(UserError, match="has no base"):
        ablate(Recipe(name="lonely"))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a.b=1,2", [1, 2]),
        ("a.b=none,relu", [None, "relu"]),
        ("a.b=Foo(x=1,y=[1,2]),{'a': 1},\"x,y\"", [{"kind": "Foo", "x": 1, "y": [1, 2]}, {"a": 1}, "x,y"]),
    ],
)
def test_values_of_a_command_line(text: str, values: list[object]) -> None:
    assert read_values(text) == ("a.b", values)


@pytest.mark.parametrize("text", ["", "=1", "a", "a=", "a=1,,2", "a=1,"])
def test_what_names_no_values(text: str) -> None:
    with pytest.raises(UserError, match="names no values"):
        read_values(text)


@given(st.lists(st.integers(), min_size=1))
def test_as_many_values_as_were_written(values: list[int]) -> None:
    assert read_values("p=" + ",".join(map(str, values))) == ("p", values)


def test_a_study_is_found_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from caddie.lab.study import Study\nfrom caddie.recipes.catalog import find\n"
        "study = Study(name='one', base=find('baseline_mini'))\nother = Study(name='two', base=find('baseline_mini'))\n"
    )
    assert find_study(str(file)).name == "one"
    assert find_study(f"{file}:other").name == "two"
    with pytest.raises(UserError, match=r"has no study othre \(did you mean other\?\); it has study, other$"):
        find_study(f"{file}:othre")
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(UserError, match=r"has no study third; write third = Study\(\.\.\.\)$"):
        find_study(f"{tmp_path / 'empty.py'}:third")
    with pytest.raises(UserError, match="no file"):
        find_study(str(tmp_path / "none.py"))


def test_a_wide_terminal_shows_long_labels_and_no_empty_column(monkeypatch: pytest.MonkeyPatch) -> None:
    label = "without train.optimizers.matrix.lr=0.03"
    one = {"label": label, "seeds": [1], "mean": 1.5, "difference": 0.1, "interval": None, "word": "unclear"}
    one |= {"reason": "a test needs two seeds"}
    base = {"label": "base", "seeds": {"1": 1.4}, "mean": 1.4}
    results = Results(Study(name="s", base=find("tiny")), [], Path())
    kept: dict[str, Any] = {"found": "", "failed": [], "notes": [], "board": [base]}
    kept["study"] = {"name": "s", "why": "", "label": "base"}
    results.__dict__["facts"] = kept | {"verdicts": [one | {"q": None, "q_same": None, "claim": None}]}
    monkeypatch.setenv("COLUMNS", "120")
    assert label in str(results)
    assert "claimed" not in str(results)
    assert re.search(r"base +1 +1\.4000 +the base\n", str(results))
    assert f"note    {label}: a test needs two seeds" in str(results)
    monkeypatch.setenv("COLUMNS", "80")
    assert "without train.optimiz..." in str(results)
    kept["verdicts"] = [one | {"q": None, "q_same": None, "claim": {"word": "better"}}]
    results.__dict__["facts"] = kept
    assert "claimed" in str(results)
