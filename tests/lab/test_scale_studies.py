"""Studies at scale: every entry resolves, fits its recipe's parts, and has steps by a known time of a step."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from kept_studies import ask

from caddie.data.loaders import CoprimeStride, ShuffledSequences
from caddie.lab.study import BASE, find_study
from caddie.lab.variations import ablate
from caddie.recipes.catalog import find

STUDIES = Path(__file__).resolve().parent.parent.parent / "studies"
LABELS = {"name", "why", "base", "public"}
CLAIMS = ("public_systems", "learning_rate", "negative_results")


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """Facts of the claims' studies at scale; every label is built and fits its recipe's parts."""
    return ask("|".join(CLAIMS), "scale")


def claims(described: dict[str, Any]) -> set[str]:
    """Labels that a public system has a claim on."""
    return {one["label"] for one in described["entries"] if one["claim"] and "(system 00" in one["claim"]["source"]}


@pytest.mark.long
def test_the_systems_claims_are_asked_again_at_scale(told: dict[str, Any]) -> None:
    minis = [path for path in STUDIES.rglob("study.json") if not path.parent.name.startswith("scale")]
    kept = {path.parent: json.loads(path.read_text()) for path in minis}
    assert sum(len(claims(described)) for described in kept.values()) == 43
    for folder in CLAIMS:
        asked = {
            label for path, one in kept.items() if (STUDIES / folder) in (path, path.parent) for label in claims(one)
        }
        again = [
            label
            for name, one in told["studies"].items()
            if name.startswith(folder)
            for label in claims(one["described"])
        ]
        assert asked <= set(again)
        assert len(asked) > 5


@pytest.mark.long
def test_every_label_has_steps_by_a_known_time(told: dict[str, Any]) -> None:
    for name, study in told["studies"].items():
        described = study["described"]
        assert described["equal"] == "modelled seconds"
        assert len(set(study["runs"])) == len(study["runs"]), f"two labels of {name} are the same run"
        seconds = float(re.findall(r"[\d.]+", described["budget"])[0])
        for label, at in described["step_times"].items():
            assert study["steps"][label] == at["steps"] == round(seconds * 1e3 / at["milliseconds"])
            assert at["steps"] > 600


@pytest.mark.long
def test_what_slows_a_step_makes_fewer(told: dict[str, Any]) -> None:
    steps = {label: count for study in told["studies"].values() for label, count in study["steps"].items()}
    public = {
        "system 003": 13708,
        "003, SwiGLU": 9454,
        "exclusive in all layers": 6946,
        "a third more tokens a step": 5525,
    }
    assert {label: steps[label] for label in public} == public
    study = told["studies"]["public_systems/scale_001"]
    assert study["steps"][BASE] == 1620, "as many as the seed made on one H100"


@pytest.mark.long
def test_a_share_of_the_ones_is_pruned(told: dict[str, Any]) -> None:
    assert told["pruned"] == {
        "0.0": [[1, -1, 2, 0], [1, 1, -3, 1]],
        "0.5": [[1, -1, 2, 0], [0, 0, -3, 1]],  # those of the smallest steps first
        "1.0": [[0, 0, 2, 0], [0, 0, -3, 0]],
    }


def test_champion_is_the_last_rung_and_has_the_bytes_of_the_record() -> None:
    rows = [json.loads(line) for line in (STUDIES / "ladder" / "results.jsonl").read_text().splitlines()]
    record_bytes = next(row["artifact_bytes"] for row in rows if (row["label"], row["seed"]) == ("ngram_tilt", 1))
    for name, suffix in (("study", "scale32"), ("wider", "scale")):
        ladder = find_study(f"{STUDIES / 'ladder' / 'study.py'}:{name}")
        assert len(ladder.labels) == 14
        assert (ladder.labels[0], *ladder.labels[-2:]) == (BASE, "ngram_tilt", "champion")
        champion, record = ladder.recipe("champion"), find("ngram_tilt")
        weights = find(f"ngram_tilt_{suffix}").parameters
        assert champion.pack.policy is None, "the code is not counted against so few bytes"
        same_share = 16_000_000 * weights // record.parameters
        assert champion.pack.cap_bytes == (same_share if name == "wider" else record_bytes)
        assert champion.model == find(f"ngram_tilt_{suffix}").model, "in the same steps, by better bytes"
        assert ladder.recipe("champion").train == ladder.recipe("ngram_tilt").train
        assert {ladder.recipe(label).pack.policy for label in ladder.labels[:-1]} == {"contest-2026"}
        orders = {type(ladder.recipe(label).train.loader) for label in ladder.labels}
        assert orders <= {ShuffledSequences, CoprimeStride}, "in the order of the text a step is of one document"


def test_champion_and_record_train_alike_and_as_in_the_ladder_but_for_the_order_of_the_text() -> None:
    both, ladder = (find_study(f"{STUDIES / 'ladder' / 'study.py'}:{name}") for name in ("champion", "wider"))
    assert len(both.seeds) == 5
    for label, rung in ((BASE, "ngram_tilt"), ("champion", "champion")):
        other = set(both.recipe(label).settings.diff(ladder.recipe(rung).settings))
        assert other == {"train.loader", *(["pack.coding"] if label == BASE else [])}
        assert both.step_times[label] == ladder.step_times[rung]
    paths = [path for path in both.entries["champion"].diff if not path.startswith("pack.")]
    assert not paths


def test_lines_are_taken_back_to_another_recipe_than_the_base() -> None:
    record, origin = find("lower_lr_mini"), find("fp16_embedding_mini")
    found = ablate(record, origin)
    assert {path for entry in found.entries.values() for path in entry.diff} == set(record.diff(origin)) - LABELS
    back = record.but({path: value for entry in found.entries.values() for path, value in entry.diff.items()})
    assert back.settings == origin.settings


@pytest.mark.long
def test_every_line_to_the_best_record_and_to_champion_is_taken_back_once() -> None:
    study = find_study(str(STUDIES / "ablations" / "study.py"))
    of_champion = {label for label in study.entries if label.startswith("champion without ")}
    of_record = {label for label in study.entries if label.startswith("without ")}
    assert set(study.entries) == {"whole scoring", "champion"} | of_champion | of_record
    asked = lines_of("ngram_tilt", "baseline"), lines_of("champion", "ngram_tilt")
    for labels, full, least in ((of_record, asked[0], 30), (of_champion, asked[1], 6)):
        lines = [path for label in labels for path in study.shown(label)]
        assert len(set(lines)) == len(lines)
        assert len(labels) >= least
        left = {path for path in full if not any(path.startswith(line) or line.startswith(path) for line in lines)}
        assert left <= {
            "model.block.attention.rope.dims",  # all of a twin's channels turn
            "score.precision",  # float32 in all twins
            "train.loader",  # shuffled in all twins
            "train.micro_batches",
            "train.warmup_steps",
            "score.stride",
            "score.batch_tokens",
        }


def lines_of(recipe: str, origin: str) -> set[str]:
    """Lines of a diff of two recipes, without those of their budgets."""
    ours = ("train.seconds", "train.steps", "pack.calibration", "pack.cap_bytes", "pack.policy")
    return {path for path in find(recipe).settings.diff(find(origin).settings) if not path.startswith(ours)}


@pytest.mark.long
def test_the_time_of_a_technique_is_its_logs_or_flops_and_packings_train_as_the_record_does() -> None:
    study = find_study(str(STUDIES / "ablations" / "study.py"))
    times, base = study.step_times, study.recipe(BASE)
    assert times["without model.block.attention.xsa"].source == "stated"
    assert times["without model.block.attention.xsa"].milliseconds < 0.96 * times[BASE].milliseconds
    assert times["without model.recurrence"].source == "FLOPs"
    alike = {label for label in study.entries if not set(base.settings.diff(study.recipe(label).settings)) - LABELS}
    assert not alike, "an entry is the base itself"
    packings = [label for label in study.entries if label.startswith("champion")]
    for recipe in map(study.recipe, [*packings, "whole scoring", "without score.ttt", "without score.tilt"]):
        assert (recipe.model, recipe.train, recipe.data) == (base.model, base.train, base.data)
    ladder = find_study(str(STUDIES / "ladder" / "study.py"))
    whole = study.entries["whole scoring"].diff
    for recipe, rung in ((base, "ngram_tilt"), (study.recipe("champion"), "champion")):
        assert not set(recipe.but(whole).settings.diff(ladder.recipe(rung).settings)) - LABELS
