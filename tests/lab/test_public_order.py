"""The order of a study's labels against that of their public scores."""

from random import Random
from typing import Any

import pytest
from test_report import make_row, make_study

from caddie.lab.agreement import public_order
from caddie.lab.findings import findings
from caddie.lab.report import markdown, order_words, page

Groups = dict[str, list[dict[str, float]]]


@pytest.fixture(autouse=True)
def few_draws(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few bootstrap samples where no test looks at the interval."""
    if not request.node.get_closest_marker("long"):
        monkeypatch.setattr("caddie.lab.agreement.DRAWS", 10)


def ladder(*rungs: tuple[float | None, list[float]]) -> tuple[dict[str, Any], Groups]:
    """A study whose labels a, b, c … have these public scores and, seed by seed, these of ours."""
    labels = [chr(ord("a") + place) for place in range(len(rungs))]
    study = {"entries": {label: {"public_score": score} for label, (score, _) in zip(labels, rungs, strict=True)}}
    ours = {label: [{"bits_per_byte": score} for score in own] for label, (_, own) in zip(labels, rungs, strict=True)}
    return study, ours


RUNGS = ((1.20, [2.50, 2.52]), (1.15, [2.40, 2.41]), (1.10, [2.43, 2.44]), (1.08, [2.30, 2.31]), (1.06, [2.20]))


def test_the_correlations_and_steps_are_those_by_hand() -> None:
    found = public_order(*ladder(*RUNGS))
    assert found is not None
    assert found["labels"] == ["a", "b", "c", "d", "e"]
    assert found["seeds"] == 1
    assert found["spearman"] == pytest.approx(1 - 6 * 2 / (5 * 24))  # two ranks are off by one
    assert found["kendall"] == pytest.approx((9 - 1) / 10)
    steps = [(one["from"], one["to"], round(one["public"], 4), round(one["ours"], 4)) for one in found["steps"]]
    assert steps[1] == ("b", "c", -0.05, 0.03)
    assert [one["order"] for one in found["steps"]] == ["kept", "broken", "kept", "kept"]


def test_a_step_smaller_than_the_spread_of_the_seeds_tells_no_order() -> None:
    noisy = ((1.10, [2.43, 2.44]), (1.08, [2.38, 2.50]), (1.07, [2.36, 2.46]), (1.06, [2.42]), (1.05, [2.43]))
    found = public_order(*ladder(*noisy))
    assert found is not None
    unclear = ["not told apart"] * 3
    assert [one["order"] for one in found["steps"]] == [*unclear, "broken"], "the last two have one seed each"


def test_the_order_without_the_quantization_gap_is_told_apart() -> None:
    study, ours = ladder(*RUNGS)
    for label, gap in zip(ours, (0.01, 0.01, 0.05, 0.02, 0.02), strict=True):
        for row in ours[label]:
            row["quantization_loss"] = gap
    found = public_order(study, ours)
    assert found is not None
    assert found["unpacked"] == {"spearman": pytest.approx(1.0), "kendall": pytest.approx(1.0)}
    assert found["spearman"] < 1
    assert [round(one["packing"], 4) for one in found["steps"]] == [0.0, 0.04, -0.03, 0.0]
    assert order_words(found).endswith("Without the quantization gap: 1.00 and 1.00.")
    del ours["c"][0]["quantization_loss"]
    found = public_order(study, ours)
    assert found is not None
    assert found["unpacked"] is None
    assert [one["packing"] is None for one in found["steps"]] == [False, True, True, False]


def test_scores_that_are_all_tied_have_no_correlation() -> None:
    tied = public_order(*ladder(*[(1.08, own) for _, own in RUNGS]))
    assert tied is not None
    assert (tied["spearman"], tied["spearman_interval"], tied["kendall_interval"]) == (None, None, None)
    assert "correlation - (Spearman, 95 % interval -), - (Kendall, -)" in order_words(tied)


def test_a_perfect_order_of_few_labels_is_no_certainty() -> None:
    """One of 24 orders of four is perfect by chance."""
    perfect = public_order(*ladder(*((1.2 - step / 50, [2.5 - step / 50]) for step in range(4))))
    assert perfect is not None
    assert (perfect["spearman_interval"], perfect["kendall_interval"]) == (None, None)
    assert "correlation 1.00 (Spearman, 95 % interval -), 1.00 (Kendall, -)" in order_words(perfect)


def test_labels_come_in_the_order_of_their_public_scores() -> None:
    shuffled = (RUNGS[3], RUNGS[0], RUNGS[4], RUNGS[2], RUNGS[1])
    found, straight = public_order(*ladder(*shuffled)), public_order(*ladder(*RUNGS))
    assert found is not None
    assert straight is not None
    assert found["labels"] == ["b", "e", "d", "a", "c"]
    assert found["spearman"] == straight["spearman"]


@pytest.mark.long
def test_the_interval_holds_the_correlation_and_is_wide_where_seeds_disagree() -> None:
    certain = public_order(*ladder(*((1.2 - step / 50, [2.5 - step / 50] * 3) for step in range(8))))
    noisy = public_order(
        *ladder(*((1.2 - step / 50, [2.5 - step / 50 + off for off in (0.0, 0.2, -0.2)]) for step in range(8)))
    )
    assert certain is not None
    assert noisy is not None
    assert certain["spearman"] == pytest.approx(1.0)
    assert (certain["spearman_interval"], certain["kendall_interval"]) == (None, None)
    assert noisy["spearman"] == pytest.approx(1.0)  # of the means, though seeds differ more than steps do
    low, high = noisy["spearman_interval"]
    assert low < 0.5 < high


def test_fewer_than_four_public_scores_have_no_order() -> None:
    assert public_order(*ladder(*RUNGS[:3])) is None
    assert public_order(*ladder(*RUNGS[:3], (None, [2.0]))) is None
    assert public_order(*ladder(*RUNGS[:3], (1.0, []))) is None
    assert public_order(*ladder(*RUNGS[:4])) is not None


def test_the_report_tells_correlations_and_steps() -> None:
    study, chance = make_study(), Random(0)
    study["public"] = study["public"][:1]  # the base's, 1.1147
    scores = {"gated attention": 1.11, "value residual": 1.10, "rotation": 1.09, "pruning 5 %": 1.08}
    for entry in study["entries"]:
        entry["public_score"] = scores.get(entry["label"])
    effects = {"base": 0.0, "gated attention": -0.03, "value residual": -0.06, "rotation": 0.02, "pruning 5 %": -0.2}
    rows = [make_row(label, seed, effect, chance) for label, effect in effects.items() for seed in (1, 2, 3)]
    facts = findings(study, rows)
    assert facts["public_order"]["labels"] == list(effects)
    text, html = markdown(facts), page(facts)
    assert "## Order of the public scores" in text
    assert "5 labels with public scores, 3 seeds or more each: rank correlation 0.40 (Spearman" in text
    assert "| value residual | rotation | −0.0100 |" in text
    assert "Without the quantization gap: 0.40 and" in text
    line = next(line for line in text.splitlines() if line.startswith("| value residual | rotation"))
    assert line.endswith("| broken |")
    assert "Order of the public scores" in html
    assert html.count(">broken<") == 1
    assert findings(make_study(), rows)["public_order"] is None
