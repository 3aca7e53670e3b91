"""Verdicts of a study: by hand, by simulation, and what is refused."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from student import adjusted, two_sided, welch

from caddie.errors import UserError
from caddie.lab.stats import benjamini_hochberg, paired, seeds_to_decide
from caddie.lab.verdicts import _word, cost, judge, judge_pairs, measure

BASE = {1: 1.230, 2: 1.232, 3: 1.231, 4: 1.229}
MOVES = (0.0003, -0.0002, 0.0001, -0.0002)
"""Sum zero; variance 6e-8."""


def moved(by: float, moves: tuple[float, ...] = MOVES) -> dict[int, float]:
    """The base's scores with that mean difference."""
    return {seed: score + by + move for (seed, score), move in zip(BASE.items(), moves, strict=True)}


def test_a_study_by_hand() -> None:
    found = judge(BASE, {"down": moved(-0.003), "up": moved(0.003), "hardly": moved(-0.0002)})
    assert [one.word for one in found.values()] == ["better", "worse", "unclear"]
    down = found["down"]
    assert (down.label, down.test, down.reason) == ("down", "paired", "")
    assert down.seeds == (1, 2, 3, 4)
    assert down.mean == pytest.approx(1.2275)
    assert down.difference == pytest.approx(-0.003)
    error = (6e-8 / 4) ** 0.5  # and t(0.975, 3) = 3.1824
    assert down.interval == pytest.approx((-0.003 - 3.1824 * error, -0.003 + 3.1824 * error), abs=1e-8)
    strict = judge(BASE, {"down": moved(-0.003)}, level=0.01)["down"]
    assert strict.interval == pytest.approx((-0.003 - 5.8409 * error, -0.003 + 5.8409 * error), abs=1e-8)
    p = [two_sided([by + move for move in MOVES]) for by in (-0.003, 0.003, -0.0002)]
    assert [one.p for one in found.values()] == pytest.approx(p, rel=1e-6)
    assert [one.q for one in found.values()] == pytest.approx(adjusted(p), rel=1e-6)
    assert {one.q_same for one in found.values()} == {None}
    assert found["hardly"].seeds_needed == seeds_to_decide(0.0002, [6e-8**0.5])


def test_the_words() -> None:
    assert [_word(sign, 0.01, None, 0.05) for sign in (-1.0, 1.0)] == ["better", "worse"]
    assert _word(-1.0, 0.05, 0.01, 0.05) == "same"
    assert _word(-1.0, 0.05, 0.05, 0.05) == "unclear"
    assert _word(-1.0, None, None, 0.05) == "unclear"


def test_a_margin_moves_the_bar_and_lets_equal_things_be_the_same() -> None:
    entries = {"far": moved(-0.006), "near": moved(-0.003), "at": moved(-0.002), "same": moved(0.0001)}
    found = judge(BASE, entries, margin=0.002)
    assert [one.word for one in found.values()] == ["better", "better", "unclear", "same"]
    assert found["near"].p == pytest.approx(two_sided([-0.003 + move for move in MOVES], 0.002))
    assert found["at"].p == pytest.approx(1.0)
    assert found["at"].seeds_needed is None or found["at"].seeds_needed > 1000
    assert judge(BASE, entries)["same"].word == "unclear"
    assert judge(BASE, {"worse": moved(0.003)}, margin=0.002)["worse"].word == "worse"


def test_many_entries_ask_for_more() -> None:
    """What is better alone is unclear as the only one of twenty."""
    lone = moved(-0.0005)
    crowd = {f"{k}": moved(0.00001 * k) for k in range(19)}
    alone = judge(BASE, {"lone": lone})["lone"]
    among = judge(BASE, {"lone": lone} | crowd)["lone"]
    assert (alone.word, among.word) == ("better", "unclear")
    assert alone.p == alone.q == among.p
    assert among.q == pytest.approx(20 * alone.p)


def test_seeds_that_both_have_are_paired_and_others_left_out() -> None:
    entry = {seed: score for seed, score in moved(-0.003).items() if seed < 4} | {9: 1.5}
    found = judge(BASE, {"b": entry})["b"]
    assert found.seeds == (1, 2, 3)
    assert found.mean == pytest.approx(fmean(entry[seed] for seed in (1, 2, 3)))
    assert found.p == pytest.approx(two_sided([entry[seed] - BASE[seed] for seed in (1, 2, 3)]))
    two = judge({1: 1.25, 2: 1.5}, {"b": {1: 1.0, 2: 1.375}})["b"]
    assert (two.seeds, two.test, two.difference) == ((1, 2), "paired", -0.1875)


@pytest.mark.parametrize("shared", [False, True])
def test_without_two_common_seeds_the_test_is_welch_s(shared: bool) -> None:
    entry = {4 if shared else 11: 1.2285, 12: 1.2271, 13: 1.2280}
    found = judge(BASE, {"b": entry})["b"]
    assert found.test == "welch"
    assert found.seeds == tuple(entry)
    assert found.difference == pytest.approx(fmean(entry.values()) - fmean(BASE.values()))
    p, interval = welch(list(entry.values()), list(BASE.values()))
    assert found.p == pytest.approx(p, rel=1e-6)
    assert found.interval == pytest.approx(interval, rel=1e-6)
    deviations = [float(np.std(list(scores.values()), ddof=1)) for scores in (entry, BASE)]
    assert found.seeds_needed == seeds_to_decide(found.difference, deviations)


@pytest.mark.parametrize(("base", "entry", "difference"), [(BASE, {2: 1.222}, -0.01), (BASE, {9: 1.2205}, -0.01)])
def test_one_seed_gives_a_difference_and_no_more(
    base: dict[int, float], entry: dict[int, float], difference: float
) -> None:
    found = judge(base, {"b": entry}, margin=0.1)["b"]
    assert found.difference == pytest.approx(difference)
    assert (found.word, found.reason) == ("unclear", "a test needs two seeds of the entry and two of the base")
    assert {found.interval, found.test, found.p, found.q, found.q_same, found.seeds_needed} == {None}
    assert found.seeds == tuple(entry)


ROUNDED = {1: 0.93, 2: 1.23, 3: 2.03}
"""On other sides of a power of two, so that one difference from all three comes out as three in the last digits."""


@pytest.mark.parametrize(
    ("base", "entry", "says"),
    [
        (ROUNDED, {seed: score - 0.0123 for seed, score in ROUNDED.items()}, "nothing varies from seed to seed"),
        ({1: 1.2, 2: 1.2}, {8: 1.1, 9: 1.1}, "nothing varies from seed to seed"),
        ({1: 1.2, 2: 1.2}, {8: 1.2, 9: 1.2}, "nothing varies from seed to seed"),
        ({1: 1.2, 2: 1.3}, {1: 1.2}, "a test needs two seeds of the entry and two of the base"),
    ],
)
def test_what_does_not_vary_is_no_proof(base: dict[int, float], entry: dict[int, float], says: str) -> None:
    other = {seed: score - 0.003 + 0.0001 * seed for seed, score in base.items()}
    found = judge(base, {"b": entry, "other": other}, margin=0.001)
    assert (found["b"].word, found["b"].reason) == ("unclear", says)
    assert {found["b"].interval, found["b"].p, found["b"].q, found["b"].q_same, found["b"].seeds_needed} == {None}
    assert found["other"].q == found["other"].p, "what was not tested is not counted"


@pytest.mark.parametrize(("step", "reason"), [(1e-9, "nothing varies from seed to seed"), (3e-9, "")])
def test_a_spread_below_the_last_digits_of_the_largest_score_is_rounding(step: float, reason: str) -> None:
    """Of two seeds the standard error is half their step, and the bar 1e-12 of 1,000, not of a half."""
    base = {1: 1000.0, 2: 0.5}
    assert measure(base, base | {1: 1000.0 + step}, (1, 2)).reason == reason


@pytest.mark.parametrize(
    ("seeds", "counted"), [((1337, 42, *range(100, 107)), (42, 1337)), (range(109, 100, -1), range(101, 110))]
)
def test_the_order_of_seeds_says_nothing_to_the_last_digit(seeds: Sequence[int], counted: Sequence[int]) -> None:
    """Of paired seeds, which a set has in another order, and of Welch's test."""
    chance = np.random.default_rng(0)
    for scores in chance.normal(1.2, 0.01, (10, 2, 9)).round(4).tolist():
        base, entry = (
            dict(zip((1337, 42, *range(9, 2, -1)), scores[0], strict=True)),
            dict(zip(seeds, scores[1], strict=True)),
        )
        found = judge(base, {"b": entry})["b"]
        assert found.seeds == tuple(counted)
        assert judge(dict(sorted(base.items())), {"b": dict(sorted(entry.items()))})["b"] == found


@pytest.mark.parametrize("margin", [0.0, 0.001])
def test_what_does_not_reach_the_score_is_the_same(margin: float) -> None:
    """Another coder of the weights, say: it changes bytes alone."""
    found = judge(BASE, {"b": BASE, "nearly": BASE | {4: BASE[4] + 1e-9}}, margin=margin)
    assert (found["b"].word, found["b"].difference) == ("same", 0.0)
    assert found["b"].reason == "without effect on the score, at any seed"
    assert {found["b"].interval, found["b"].p, found["b"].q, found["b"].q_same, found["b"].seeds_needed} == {None}
    assert found["nearly"].word == ("same" if margin else "unclear")
    assert found["nearly"].reason == ""


def test_each_entry_may_have_a_rival_of_its_own_and_all_count_together() -> None:
    rival, other = moved(0.01, (0.0004, 0.0, -0.0003, -0.0001)), moved(-0.0004)
    pairs = {"a": (BASE, moved(-0.003)), "b": (rival, other), "c": (other, rival), "d": (BASE, rival)}
    found = judge_pairs(pairs)
    for label, (base, scores) in pairs.items():
        assert replace(found[label], q=found[label].p) == judge(base, {label: scores})[label]
    p = [one.p for one in found.values()]
    assert [one.q for one in found.values()] == pytest.approx(adjusted(p), rel=1e-6)
    assert [one.word for one in found.values()] == ["better", "better", "worse", "worse"]
    with pytest.raises(UserError, match="what b is compared with has no finished run"):
        judge_pairs(pairs | {"b": ({}, other)})


SCORES = st.integers(10_000, 14_000).map(lambda score: score / 10_000)
STUDY = st.integers(2, 4).flatmap(
    lambda seeds: st.lists(st.lists(SCORES, min_size=seeds, max_size=seeds), min_size=2, max_size=5)
)


@pytest.mark.long
@settings(derandomize=True, deadline=None, max_examples=60)
@given(STUDY, st.sampled_from([0.0, 0.01, 0.1]), st.sampled_from([0.01, 0.05, 0.2]))
def test_what_holds_of_every_study(rows: list[list[float]], margin: float, level: float) -> None:
    base, *others = (dict(enumerate(row)) for row in rows)
    entries = {str(place): row for place, row in enumerate(others)}
    found = judge(base, entries, margin=margin, level=level)
    for one in found.values():
        if one.word == "better":
            assert one.interval[1] < -margin
        if one.word == "worse":
            assert one.interval[0] > margin
        if one.word == "same":
            assert abs(one.difference) < margin or rows[0] == rows[1 + int(one.label)]
        if one.p is not None:
            assert one.q >= one.p
    # The order of labels and of seeds says nothing.
    mixed = {label: dict(reversed(entries[label].items())) for label in reversed(entries)}
    assert judge(base, mixed, margin=margin, level=level) == found
    # What is better against the base finds the base worse against it.
    for label, row in entries.items():
        there = judge(base, {label: row}, margin=margin, level=level)[label]
        back = judge(row, {label: base}, margin=margin, level=level)[label]
        assert back.word == {"better": "worse", "worse": "better"}.get(there.word, there.word)
        assert back.p == there.p


def study(chance: np.random.Generator, true: np.ndarray, seeds: int = 3) -> tuple[dict, dict]:
    """Base and entries with these true differences; deviations 0.001 on top of what a seed does to all alike."""
    scores = 1.2 + chance.normal(0, 0.002, seeds) + chance.normal(0, 0.001, (len(true) + 1, seeds))
    scores[1:] += true[:, None]
    base, *entries = (dict(enumerate(row.tolist())) for row in scores)
    return base, {str(place): row for place, row in enumerate(entries)}


@pytest.mark.long
def test_twenty_entries_that_change_nothing_rarely_hold_a_finding() -> None:
    """All share one base. One study in twenty may be wrong; a p of 0.05 alone would be wrong in well over half."""
    chance, trials = np.random.default_rng(3), 100
    wrong = alone = 0
    for _ in range(trials):
        found = judge(*study(chance, np.zeros(20))).values()
        wrong += any(one.word != "unclear" for one in found)
        alone += any(one.p < 0.05 for one in found)
    assert wrong / trials <= 0.05 + 3 * (0.05 * 0.95 / trials) ** 0.5
    assert alone / trials > 0.3


@pytest.mark.long
def test_the_share_of_wrong_findings_stays_below_the_level() -> None:
    """Ten of twenty entries have an effect; a wrong sign is wrong too."""
    true = np.concatenate([np.zeros(10), np.linspace(-0.006, 0.006, 10)])
    chance, shares, found = np.random.default_rng(4), [], 0
    for _ in range(250):
        base, entries = study(chance, true, 5)
        differences = [paired(list(entry.values()), list(base.values())) for entry in entries.values()]
        q = benjamini_hochberg([difference.p_beyond() for difference in differences])
        signs = [np.sign(one.value) * (one_q < 0.05) for one, one_q in zip(differences, q, strict=True)]
        wrong = sum(sign != 0 and sign != np.sign(effect) for sign, effect in zip(signs, true, strict=True))
        shares.append(wrong / max(1, np.count_nonzero(signs)))
        found += np.count_nonzero(signs)
    assert np.mean(shares) <= 0.05
    assert found / 250 > 3


# Runs and costs


def test_what_cannot_be_judged_is_refused() -> None:
    for entries, changes, says in (
        ({"b": {}}, {}, "b has no finished run; leave it out"),
        ({"b": {1: float("inf")}}, {}, "seed 1 of b has no finite score; leave it out"),
        ({"b": BASE}, {"margin": -0.1}, "margin must be a finite number"),
        ({"b": BASE}, {"margin": float("nan")}, "margin must be a finite number"),
        ({"b": BASE}, {"level": 0.5}, "level must lie between 0 and 0.5"),
        ({"b": BASE}, {"level": 0.0}, "level must lie between 0 and 0.5"),
    ):
        with pytest.raises(UserError, match=says):
            judge(BASE, entries, **changes)
    with pytest.raises(UserError, match="the base has no finished run"):
        judge({}, {"b": BASE})


def test_a_cost_by_hand() -> None:
    assert cost(600, 8, 3.0) == pytest.approx(4.0)  # 80 minutes of a GPU
    assert cost(0, 1, 0) == 0
    for wrong in ((-0.5, 8, 3.0), (600, 0, 3.0), (600, 8, float("nan")), (600, 8, -0.5), (float("inf"), 8, 3.0)):
        with pytest.raises(UserError, match="a cost needs seconds"):
            cost(*wrong)


def test_scores_that_are_all_zero_are_equal() -> None:
    """Their interval has no width, and neither has the rounding that it is held against."""
    zeros = dict.fromkeys((1, 2, 3), 0.0)
    assert measure(zeros, zeros, (1, 2, 3)).equal
