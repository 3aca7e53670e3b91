"""The proxy ladder: how well small runs predict large ones."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from test_search import DEPTH, RATE, STRIDE, Scored, quick, setting, text
from tiny_study import SETTINGS as TINY

from caddie.errors import UserError
from caddie.lab.ladder import ALL_KINDS, NO_KIND, Ladder, ladder
from caddie.lab.report import Results
from caddie.lab.study import Entry, Steps, Study
from caddie.recipes.catalog import find

__all__ = ["quick", "text"]  # fixtures

WIDTH = "model.width"
ENTRIES = {
    "deeper": Entry(diff={DEPTH: 3}, kind="architecture"),
    "deepest": Entry(diff={DEPTH: 4}, kind="architecture"),
    "slow": Entry(diff={RATE: 0.01}, kind="optimizer"),
    "slower": Entry(diff={RATE: 0.005}, kind="optimizer", against="slow"),
    "closer": Entry(diff={STRIDE: 16}),
}


def climb(**settings: Any) -> Study:
    given: dict[str, Any] = {
        "name": "climb",
        "base": find("baseline_mini").but(TINY),
        "entries": ENTRIES,
        "seeds": (1, 2, 3),
        "budget": Steps(steps=3),
        "scales": {"small": {}, "middle": {WIDTH: 24}, "large": {WIDTH: 32}},
    }
    return Study(**(given | settings))


def turning(recipe: Mapping[str, Any], seed: int) -> float:
    """Depth gains at every width; a lower rate gains in narrow models and loses in the widest."""
    depth, halvings = setting(recipe, DEPTH) - 2, math.log2(0.04 / setting(recipe, RATE))
    rate = halvings * (0.03 if setting(recipe, WIDTH) == 32 else -0.03)
    noise = 0.0001 * math.sin(seed * (depth + 7 * halvings + setting(recipe, STRIDE)))
    return 2.0 - 0.05 * depth + rate + noise


@pytest.mark.long
def test_what_turns_round_is_found_by_kind(text: str, quick: None) -> None:
    executor = Scored(turning)
    found = ladder(climb(), text, executor=executor)
    assert len(executor.done) == 3 * 3 * 6
    steps = found.facts["steps"]
    assert [(step["small"], step["large"]) for step in steps] == [("small", "large"), ("middle", "large")]
    kinds = {one["kind"]: one for one in steps[0]["kinds"]}
    assert list(kinds) == ["architecture", "optimizer", NO_KIND, ALL_KINDS]
    assert (kinds["architecture"]["signs"]["count"], kinds["architecture"]["signs"]["of"]) == (2, 2)
    assert (kinds["optimizer"]["signs"]["count"], kinds["optimizer"]["signs"]["of"]) == (0, 2)
    assert kinds["optimizer"]["signs"]["interval"] == pytest.approx([0.0, 1 - math.sqrt(0.025)]), "none of two"
    assert kinds["architecture"]["spearman"] == pytest.approx(1.0, abs=1e-12)
    assert kinds[NO_KIND]["decided"]["of"] == 0, "the stride does nothing"
    assert (kinds[ALL_KINDS]["decided"]["count"], kinds[ALL_KINDS]["decided"]["of"]) == (2, 4)
    slower = next(one for one in found.facts["entries"] if one["label"] == "slower")["at"]
    assert slower["small"]["difference"] == pytest.approx(-0.03, abs=1e-3), "against slow, not the base"
    assert [slower[scale]["word"] for scale in ("small", "middle", "large")] == ["better", "better", "worse"]
    json.dumps(found.facts)


def test_what_is_written(text: str, quick: None) -> None:
    scales, entries = {"thin": {}, "wide": {WIDTH: 32}}, {"slow": ENTRIES["slow"], "a | b": Entry(diff={STRIDE: 8})}
    one = climb(scales=scales, entries=entries)
    found = ladder(one, text, executor=Scored(turning), folder=Path("up"))
    page = Path("up/ladder.md").read_text()
    assert page == found.markdown()
    assert "## How well thin predicts wide" in page
    assert "| optimizer | 1 | 0 of 1 | 0% to 98% | 0 of 1 | - | - |" in page
    assert "| entry | kind of change | thin | wide |" in page
    assert r"| a \| b | no kind named |" in page
    assert Path("up/wide/results.jsonl").exists()
    shown = str(found).split("\n")
    assert shown[0] == "how well thin predicts wide"
    assert max(map(len, shown)) <= 79
    again = Scored(turning)
    assert ladder(one, text, executor=again, folder=Path("up")).facts == found.facts
    assert again.done == []


def test_a_ladder_needs_two_scales() -> None:
    for scales in ({}, {"small": {}}):
        with pytest.raises(UserError, match=rf"^climb has {len(scales)} scales and a ladder needs two"):
            ladder(climb(scales=scales), "nowhere", executor=Scored(turning))


def test_what_does_not_fit_is_known_before_the_first_run(text: str) -> None:
    executor = Scored(turning)
    scales = {"small": {}, "large": {"score.sequence_length": 8, STRIDE: 8}}
    with pytest.raises(UserError, match=r"^closer at large: .*stride"):
        ladder(climb(scales=scales), text, executor=executor)
    assert executor.done == []


def test_entries_without_a_score_or_a_rival_have_no_verdict(tmp_path: Path) -> None:
    def row(label: str, seed: int, bits: float, state: str = "finished") -> dict[str, Any]:
        return {"label": label, "seed": seed, "state": state, "bits_per_byte": bits}

    rows = [row("base", seed, 2.0 + 0.01 * seed) for seed in (1, 2, 3)]
    rows += [row("deeper", seed, 1.9 + 0.011 * seed) for seed in (1, 2, 3)]
    rows += [row("deepest", 1, math.nan), row("slower", 1, 1.0), {"label": "slow", "seed": 1, "state": "failed"}]
    study = climb()
    found = Ladder(study, {"small": Results(study, rows, tmp_path)}, tmp_path)
    at = {one["label"]: one["at"] for one in found.facts["entries"] if one["at"]}
    assert list(at) == ["deeper"]
    assert at["deeper"]["small"]["difference"] == pytest.approx(-0.098)
