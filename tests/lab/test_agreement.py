"""Early against final, small against large: by hand, against SciPy, by properties, and what is refused."""

import math
from typing import Any

import numpy as np
import pytest
import scipy
from hypothesis import given, settings
from hypothesis import strategies as st

from caddie.errors import UserError
from caddie.lab.agreement import Curve, Judged, early_agreement, safe_stop, transfer
from caddie.lab.stats import Proportion


def crossing(at: float, late: float, early: float) -> Curve:
    """A loss that is `early` until a progress and `late` from there on."""
    return [(step / 20, late if step / 20 >= at else early) for step in range(1, 21)]


GROUP = {
    "a": crossing(0.6, 1.0, 5.0),  # the best in the end; last of four before 0.6
    "b": crossing(0.3, 2.0, 2.0),
    "c": crossing(0.3, 3.0, 3.0),
    "d": crossing(0.3, 4.0, 4.0),
}


def test_early_agreement_by_hand() -> None:
    early, late = early_agreement(GROUP, at=(0.5, 0.75))
    # Early ranks 4 1 2 3, final 1 2 3 4: the squared differences are 9 + 1 + 1 + 1, so 1 - 6 * 12 / (4 * 15).
    assert early["progress"] == 0.5
    assert early["spearman"] == pytest.approx(-0.2)
    assert early["best_kept"] == Proportion(0, 1)
    assert early["order_held"] == pytest.approx(3 / 6)
    assert (late["spearman"], late["best_kept"], late["order_held"]) == (pytest.approx(1.0), Proportion(1, 1), 1.0)
    assert [row["progress"] for row in early_agreement(GROUP)] == [0.1, 0.25, 0.5, 0.75]


def test_several_groups_give_a_frequency() -> None:
    calm = {label: crossing(0.0, curve[-1][1], 9.0) for label, curve in GROUP.items()}
    (row,) = early_agreement(GROUP, calm, calm, at=(0.5,))
    assert row["best_kept"] == Proportion(2, 3)
    assert row["spearman"] == pytest.approx((-0.2 + 1 + 1) / 3)
    assert row["order_held"] == pytest.approx(15 / 18)
    assert row["best_kept"].interval()[1] - row["best_kept"].interval()[0] > 0.8


def test_the_loss_known_at_a_moment_is_the_last_one_before() -> None:
    group = {"a": [(0.1, 2.0), (0.49, 3.0), (0.51, 1.0), (1.0, 1.0)], "b": [(0.2, 2.5), (1.0, 2.5)]}
    before, after = early_agreement(group, at=(0.5, 0.51))
    assert (before["best_kept"].count, after["best_kept"].count) == (0, 1)


def test_a_safe_stop_by_hand() -> None:
    assert safe_stop(GROUP) == 0.6
    assert safe_stop(GROUP, regret=0.99) == 0.6
    assert safe_stop(GROUP, regret=1.0) == 0.05, "b is kept from the first loss on"
    calm = {label: crossing(0.0, curve[-1][1], 9.0) for label, curve in GROUP.items()}
    assert safe_stop(calm) == 0.05
    assert safe_stop(GROUP, calm) == 0.6


def test_a_lucky_moment_is_not_safe() -> None:
    lucky = GROUP | {"a": [(0.05, 1.0), (0.3, 5.0), (0.8, 1.0), (1.0, 1.0)]}
    assert early_agreement(lucky, at=(0.1,))[0]["best_kept"] == Proportion(1, 1)
    assert safe_stop(lucky) == 0.8


def test_losses_known_at_the_end_alone_are_never_safe() -> None:
    assert safe_stop({"a": [(1.0, 1.0)], "b": [(1.0, 2.0)]}) == 1.0


def test_of_three_two_are_kept() -> None:
    group = {"a": crossing(0.9, 1.0, 3.0), "b": crossing(0.9, 2.0, 2.0), "c": crossing(0.9, 3.0, 4.0)}
    assert early_agreement(group, at=(0.1,))[0]["best_kept"] == Proportion(1, 1)


def test_a_run_that_diverged_is_the_worst() -> None:
    group = {"a": crossing(0.5, 1.0, 2.0), "b": crossing(0.5, math.nan, 1.0), "c": crossing(0.5, math.inf, math.nan)}
    (row,) = early_agreement(group, at=(0.25,))
    assert row["best_kept"] == Proportion(1, 1)
    assert row["order_held"] == 0.5, "the pair of b and c is tied in the end"


LOSSES = st.integers(1, 30).map(float)


@st.composite
def groups(draw: st.DrawFn) -> dict[str, Curve]:
    runs = draw(st.integers(2, 6))
    return {
        str(run): [(moment / 10, draw(LOSSES) + run / 100) for moment in range(1, 11)] for run in range(runs)
    }  # never tied


@pytest.mark.long
@settings(derandomize=True, deadline=None, max_examples=40)
@given(groups(), st.sampled_from([0.0, 2.0, 10.0]))
def test_what_holds_of_all_curves(group: dict[str, Curve], regret: float) -> None:
    mixed = dict(reversed(group.items()))
    steeper = {label: [(progress, 2 * loss + progress) for progress, loss in curve] for label, curve in group.items()}
    rows = early_agreement(group, at=(0.3, 1.0))
    for again in (early_agreement(other, at=(0.3, 1.0)) for other in (mixed, steeper)):
        assert [row["best_kept"] for row in again] == [row["best_kept"] for row in rows]
        assert [row["spearman"] for row in again] == pytest.approx([row["spearman"] for row in rows])
    early, final = ([curve[place][1] for curve in group.values()] for place in (2, -1))
    assert rows[0]["spearman"] == pytest.approx(scipy.stats.spearmanr(early, final).statistic, abs=1e-12)
    assert (rows[1]["best_kept"], rows[1]["order_held"]) == (Proportion(1, 1), 1.0)
    stop = safe_stop(group, regret=regret)
    assert safe_stop(group, regret=regret + 1) <= stop <= 1
    if not regret and stop < 1:
        assert early_agreement(group, at=(stop,))[0]["best_kept"] == Proportion(1, 1)
    assert safe_stop(group, regret=100.0) == 0.1


@pytest.mark.long
def test_early_losses_that_say_nothing_keep_the_best_in_half_of_all_groups() -> None:
    chance = np.random.default_rng(0)
    groups = [
        {
            str(run): [(0.5, first), (1.0, last)]
            for run, (first, last) in enumerate(chance.normal(0, 1, (8, 2)).tolist())
        }
        for _ in range(700)
    ]
    (row,) = early_agreement(*groups, at=(0.5,))
    low, high = row["best_kept"].interval(0.999)
    assert low < 0.5 < high
    assert row["order_held"] == pytest.approx(0.5, abs=0.025)
    assert row["spearman"] == pytest.approx(0.0, abs=0.05)


@pytest.mark.parametrize(
    ("group", "says"),
    [
        ({"a": [(0.5, 1.0)], "b": [(0.2, 1.0), (1.0, 1.0)]}, "a has no loss by progress 0.25; ask for a later one"),
        ({"a": [], "b": [(0.2, 1.0)]}, "a has no loss by progress 0.25"),
        ({"a": [(0.1, 1.0)]}, "ranks need at least two finished runs in a group, not 1"),
    ],
)
def test_what_has_no_early_rank_is_refused(group: dict[str, Curve], says: str) -> None:
    with pytest.raises(UserError, match=says):
        early_agreement(group, at=(0.25,))


# The ladder


def scale(**entries: tuple[float, str]) -> Judged:
    return {label: {"difference": difference, "word": word} for label, (difference, word) in entries.items()}


SMALL = scale(
    gate=(-0.02, "better"),
    wide=(-0.01, "better"),
    deep=(0.01, "worse"),
    skip=(0.001, "unclear"),
    ema=(-0.01, "better"),
    batch=(0.02, "worse"),
    lost=(0.5, "worse"),
)
LARGE = scale(
    gate=(-0.010, "better"),
    wide=(-0.004, "better"),
    deep=(0.003, "unclear"),
    skip=(-0.001, "unclear"),
    ema=(0.010, "worse"),
    batch=(-0.005, "better"),
)
KINDS = dict.fromkeys(("gate", "wide", "deep", "skip"), "architecture") | dict.fromkeys(("ema", "batch"), "steps")


def share(found: dict[str, Any]) -> Proportion:
    return Proportion(found["count"], found["of"])


def test_transfer_by_hand() -> None:
    architecture, steps = transfer(SMALL, LARGE, KINDS)
    assert (architecture["kind"], architecture["labels"]) == ("architecture", ["gate", "wide", "deep", "skip"])
    assert share(architecture["signs"]) == Proportion(3, 4)
    assert share(architecture["decided"]) == Proportion(2, 2)
    # Ranks 1 2 4 3 at the small scale, 1 2 4 3 at the large one.
    assert architecture["spearman"] == architecture["kendall"] == pytest.approx(1.0)
    assert (steps["kind"], steps["labels"]) == ("steps", ["ema", "batch"])
    assert (share(steps["signs"]), share(steps["decided"])) == (Proportion(0, 2), Proportion(0, 2))
    assert [steps["spearman"], steps["kendall"]] == pytest.approx([-1.0, -1.0], abs=1e-12)
    assert steps["signs"]["interval"] == pytest.approx([0, 1 - math.sqrt(0.025)])


def test_a_scale_against_itself_agrees_with_itself() -> None:
    for row in transfer(SMALL, SMALL, KINDS | {"lost": "steps"}):
        assert share(row["signs"]) == Proportion(len(row["labels"]), len(row["labels"]))
        assert row["spearman"] == row["kendall"] == pytest.approx(1.0)


def test_a_kind_with_one_entry_has_no_correlation() -> None:
    (row,) = transfer(SMALL, {"gate": LARGE["gate"]}, KINDS)
    assert (share(row["signs"]), row["spearman"], row["kendall"]) == (Proportion(1, 1), None, None)


def test_an_entry_without_a_kind_is_refused() -> None:
    with pytest.raises(UserError, match="batch has no kind of change"):
        transfer(SMALL, LARGE, {label: kind for label, kind in KINDS.items() if label != "batch"})
