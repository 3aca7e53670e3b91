"""Statistics over seeds: textbook figures, a simulation, what is refused, and that a seed is one observation."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy
import student
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from run_folder import make_result

from caddie.data.loaders import (
    CoprimeStride,
    Loader,
    PackedDocuments,
    SequentialStream,
    ShuffledSequences,
    TrainingData,
)
from caddie.errors import UserError
from caddie.lab import stats
from caddie.lab.compare import compare
from caddie.lab.stats import (
    ErrorTerm,
    Estimate,
    Proportion,
    _least,
    benjamini_hochberg,
    kendall,
    mean,
    order_agreement,
    paired,
    power,
    seeds_needed,
    seeds_to_decide,
    sign_agreement,
    spearman,
    welch,
)
from caddie.recipes.catalog import find
from caddie.report.units import UNITS, convert
from caddie.train import loop as training

Call = Callable[..., Any]
quick = settings(derandomize=True, deadline=None, max_examples=60)

# The tests


def test_welch_by_hand() -> None:
    # Variances 1 and 4 over three each: squared error (1 + 4) / 3; degrees (5/3)^2 / ((1/3)^2 / 2 + (4/3)^2 / 2).
    found = welch([4.0, 6.0, 8.0], [1.0, 2.0, 3.0])
    assert found.value == 4.0
    assert found.standard_error == pytest.approx(math.sqrt(5 / 3))
    assert found.degrees == pytest.approx(50 / 17)


def test_paired_by_hand() -> None:
    # Differences 1, 2, 3: mean 2, standard error 1/sqrt(3), t = 3.4641 with 2 degrees; t/sqrt(t^2 + 2) = 0.9258.
    found = paired([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert (found.value, found.degrees) == (2.0, pytest.approx(2.0))
    assert found.standard_error == pytest.approx(1 / math.sqrt(3))
    assert found.p_above(0.0) == pytest.approx((1 - math.sqrt(12 / 14)) / 2)


def test_the_interval_is_the_table_s() -> None:
    low, high = mean([1.0, 2.0, 3.0]).interval()  # t(0.975, 2) = 4.303
    assert ((low + high) / 2, (high - low) / 2) == pytest.approx((2.0, 4.303 / math.sqrt(3)), abs=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(2, 2), (3, 3), (3, 8), (10, 4)])
def test_p_is_scipy_s(sizes: tuple[int, int]) -> None:
    chance = np.random.default_rng(sum(sizes))
    a, b = (list(chance.normal(1.2, 0.001 * (k + 1), n)) for k, n in enumerate(sizes))
    for margin in (0.0, 0.002, -0.001):
        moved = [value + margin for value in b]
        theirs = scipy.stats.ttest_ind(a, moved, equal_var=False, alternative="greater")
        assert welch(a, b).p_above(margin) == pytest.approx(theirs.pvalue, rel=1e-6)
        if len(a) == len(b):
            theirs = scipy.stats.ttest_rel(a, moved, alternative="greater")
            assert paired(a, b).p_above(margin) == pytest.approx(theirs.pvalue, rel=1e-6)


@pytest.mark.long
def test_the_formulas_that_other_tests_go_by_are_scipy_s() -> None:
    chance = np.random.default_rng(4)
    for sizes in ((2, 2), (3, 8), (6, 4)):
        a, b = (chance.normal(k, k + 1, n).tolist() for k, n in enumerate(sizes))
        theirs = scipy.stats.ttest_ind(a, b, equal_var=False)
        assert student.welch(a, b)[0] == pytest.approx(theirs.pvalue, rel=1e-9)
        assert student.welch(a, b)[1] == pytest.approx(tuple(theirs.confidence_interval(0.95)), rel=1e-6)
        assert student.two_sided(a) == pytest.approx(scipy.stats.ttest_1samp(a, 0.0).pvalue, rel=1e-9)
    p = chance.random(9).tolist()
    assert student.adjusted(p) == pytest.approx(scipy.stats.false_discovery_control(p).tolist())


def test_observations_that_do_not_differ_give_no_p() -> None:
    assert math.isnan(welch([2.0, 2.0], [1.0, 1.0]).p_above(0.0))


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(2, 2), (3, 3), (5, 3)])
def test_two_sided_and_equivalence_p_are_scipy_s(sizes: tuple[int, int]) -> None:
    chance = np.random.default_rng(sum(sizes))
    a, b = (list(chance.normal(1.2, 0.001 * (k + 1), n)) for k, n in enumerate(sizes))
    found = welch(a, b)
    assert found.p_beyond() == pytest.approx(scipy.stats.ttest_ind(a, b, equal_var=False).pvalue, rel=1e-6)
    for margin in (0.001, 0.004):
        below, above = (
            scipy.stats.ttest_ind(a, np.add(b, moved), equal_var=False, alternative=side).pvalue
            for moved, side in ((margin, "less"), (-margin, "greater"))
        )
        assert found.p_within(margin) == pytest.approx(max(below, above), rel=1e-6)
    if len(a) == len(b):
        assert paired(a, b).p_beyond() == pytest.approx(scipy.stats.ttest_rel(a, b).pvalue, rel=1e-6)
        assert paired(b, a).p_beyond() == paired(a, b).p_beyond()


def test_a_margin_by_hand() -> None:
    """Differences 1, 2, 3 with a margin of 1: t = sqrt(3) with 2 degrees, one tail (1 - t / sqrt(t^2 + 2)) / 2."""
    found = paired([1.0, 2.0, 3.0], [0.0] * 3)
    tail = (1 - math.sqrt(3 / 5)) / 2
    assert found.p_beyond(1.0) == pytest.approx(2 * tail)
    assert found.p_within(3.0) == pytest.approx(tail)
    assert found.p_beyond(2.5) == 1.0
    assert math.isnan(paired([1.0, 2.0], [0.0, 1.0]).p_beyond())
    assert math.isnan(paired([1.0, 2.0], [0.0, 1.0]).p_within(9.0))


SMALL = st.floats(0.001, 10)


@quick
@given(st.floats(-10, 10), SMALL, st.integers(1, 50), st.floats(0, 10), st.floats(0.001, 0.3))
def test_p_and_interval_never_contradict_each_other(
    value: float, error: float, degrees: int, margin: float, level: float
) -> None:
    found = Estimate(value, error, degrees)
    low, high = found.interval(1 - level)
    if abs(found.p_beyond(margin) - level) > 1e-9:
        assert (found.p_beyond(margin) < level) == (low > margin or high < -margin)
    low, high = found.interval(1 - 2 * level)
    if abs(found.p_within(margin) - level) > 1e-9:
        assert (found.p_within(margin) < level) == (-margin < low and high < margin)
    assert not (found.p_beyond(margin) < level and found.p_within(margin) < level)


def share_below(p_values: list[float], level: float = 0.05) -> float:
    return float(np.mean(np.array(p_values) < level))


NOISE = 4 * math.sqrt(0.05 * 0.95 / 2000)
"""Four standard errors of a share of 0.05 of 2,000."""


@pytest.mark.long
def test_a_true_null_gives_p_below_a_level_as_often_as_the_level() -> None:
    chance = np.random.default_rng(0)
    pairs = chance.normal(0, 1, (2000, 3)).tolist()
    assert share_below([mean(row).p_beyond() for row in pairs]) == pytest.approx(0.05, abs=NOISE)
    a, b = chance.normal(0, 1, (2000, 5)).tolist(), chance.normal(0, 3, (2000, 5)).tolist()
    assert share_below([welch(x, y).p_beyond() for x, y in zip(a, b, strict=True)]) == pytest.approx(0.05, abs=NOISE)


@pytest.mark.long
def test_at_the_margin_neither_answer_comes_more_often_than_the_level() -> None:
    chance = np.random.default_rng(1)
    for seeds in (3, 30):
        found = [mean(row) for row in chance.normal(2, 1, (2000, seeds)).tolist()]
        assert share_below([one.p_beyond(2.0) for one in found]) <= 0.025 + NOISE
        within = share_below([one.p_within(2.0) for one in found])
        assert within <= 0.05 + NOISE
        assert seeds == 3 or within >= 0.05 - NOISE


# Many tests


@pytest.mark.long
@quick
@given(st.lists(st.sampled_from([0.0, 1e-9, 0.01, 0.03, 0.04, 0.05, 0.5, 1.0]) | st.floats(0, 1), min_size=1))
def test_adjusted_p_is_that_of_the_formula(p_values: list[float]) -> None:
    assert benjamini_hochberg(p_values) == pytest.approx(student.adjusted(p_values), abs=1e-12)


def test_adjusted_p_by_hand_with_some_that_cannot_be_told() -> None:
    found = benjamini_hochberg([0.02, None, 0.01, math.nan, 0.9])
    assert found == [pytest.approx(0.03), None, pytest.approx(0.03), None, pytest.approx(0.9)]
    assert benjamini_hochberg([None]) == [None]
    assert benjamini_hochberg([]) == []


# Ranks and shares

PAIRS = st.lists(st.tuples(st.integers(-4, 4), st.integers(-4, 4)), min_size=2, max_size=12)


@pytest.mark.long
@quick
@given(PAIRS)
def test_rank_correlations_are_those_of_the_formulas(pairs: list[tuple[float, float]]) -> None:
    a, b = (list(side) for side in zip(*pairs, strict=True))
    if len(set(a)) == 1 or len(set(b)) == 1:
        assert spearman(a, b) is kendall(a, b) is None
    else:
        assert spearman(a, b) == pytest.approx(student.spearman(a, b), abs=1e-12)
        assert kendall(a, b) == pytest.approx(student.kendall(a, b), abs=1e-12)
    if len({*a}) == len({*b}) == len(pairs):
        order = order_agreement(a, b)
        assert order.of == len(pairs) * (len(pairs) - 1) // 2
        assert kendall(a, b) == pytest.approx(2 * order.count / order.of - 1)


def test_ranks_by_hand() -> None:
    assert spearman([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(0.8)  # 1 - 6 * 2 / (4 * 15)
    assert kendall([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)  # five pairs less one, of six
    assert order_agreement([1, 2, 3, 4], [1, 2, 4, 4]) == Proportion(5, 5)
    assert spearman([1, 2, math.inf], [1, 2, math.inf]) == pytest.approx(1.0)
    assert sign_agreement([-1, 2, 0, 4, 5], [-5, -1, 3, 9, 0]) == Proportion(2, 3)
    assert (Proportion(1, 4).value, Proportion(0, 0).value) == (0.25, None)
    assert Proportion(0, 0).interval() == (0.0, 1.0)
    assert Proportion(0, 10).interval() == pytest.approx((0.0, 1 - 0.025**0.1))  # none of ten with a chance of 0.025
    assert Proportion(3, 3).interval(0.8) == pytest.approx((0.1 ** (1 / 3), 1.0))
    for a, b in (([], []), ([1], [2]), ([1, 1], [1, 2]), ([1, 2], [3, 3])):
        assert spearman(a, b) is kendall(a, b) is None
    assert (spearman([1, 2], [4, 3]), kendall([1, 2], [4, 3])) == pytest.approx((-1.0, -1.0))
    with pytest.raises(ValueError, match="shorter"):
        kendall([1, 2], [1])


@pytest.mark.long
@quick
@given(st.integers(0, 60).flatmap(lambda of: st.tuples(st.integers(0, of), st.just(of))))
def test_the_interval_of_a_share_is_that_of_the_formula(trials: tuple[int, int]) -> None:
    found = Proportion(*trials)
    if not found.of:
        assert (found.value, found.interval()) == (None, (0.0, 1.0))
        return
    for confidence in (0.8, 0.95):
        assert found.interval(confidence) == pytest.approx(student.exact_interval(*trials, confidence), abs=1e-9)
    assert found.value == pytest.approx(found.count / found.of)


# Power


@pytest.mark.long
@pytest.mark.parametrize(
    ("difference", "margin"),
    [
        (1.5, 0.0),
        (2.5, 1.0),
        (0.0, 1.5),
        pytest.param(-1.5, 0.0, marks=pytest.mark.slow),
        pytest.param(-0.2, 1.5, marks=pytest.mark.slow),
    ],
)
def test_the_seeds_that_decide_have_the_stated_power(difference: float, margin: float) -> None:
    seeds = seeds_to_decide(difference, [1.0], margin)
    assert seeds is not None
    assert seeds_to_decide(-difference, [1.0], margin) == seeds
    chance = np.random.default_rng(seeds)

    def reached(count: int) -> float:
        found = [mean(row) for row in chance.normal(difference, 1, (1500, count)).tolist()]
        within = abs(difference) < margin
        return share_below([one.p_within(margin) if within else one.p_beyond(margin) for one in found])

    assert reached(seeds) >= 0.8 - 0.03
    assert reached(seeds - 1) < 0.8 + 0.03


def test_the_seeds_that_decide_by_hand() -> None:
    """Beyond the margin as many as show the rest at half the level; at 0 within it, as many as one side needs alone."""
    assert seeds_to_decide(0.002, [0.0009]) == seeds_needed(0.002, [0.0009], 0.025) == 4
    assert seeds_to_decide(-0.004, [0.0009, 0.0012], 0.002) == seeds_needed(0.002, [0.0009, 0.0012], 0.025) == 6
    assert seeds_to_decide(0.0, [1.0], 1.5) == seeds_needed(1.5, [1.0], 0.05, 0.9) == 6
    assert seeds_to_decide(0.5, [1.0], 1.5) == seeds_to_decide(-0.5, [1.0], 1.5) == 8


def test_what_no_number_of_seeds_decides() -> None:
    assert seeds_to_decide(0.0, [1.0]) is None
    assert seeds_to_decide(0.5, [1.0], 0.5) is None
    assert seeds_to_decide(0.5001, [1.0], 0.5) is None


def test_power_is_the_textbook_s() -> None:
    """Cohen (1988), with the figures that exact programs give; two-sided levels of a table are halved."""
    for effect, level, welch_seeds, pairs in [
        (0.2, 0.025, 394, 199),
        (0.5, 0.025, 64, 34),
        (0.8, 0.025, 26, 15),
        (0.5, 0.050, 51, 27),
    ]:
        assert seeds_needed(effect, [1.0, 1.0], level) == welch_seeds
        assert seeds_needed(effect, [1.0], level) == pairs
    # R: power.t.test(n = 20, delta = 1, sd = 1), which takes both variances for equal, so has a little more power
    assert power(1.0, 20, [1.0, 1.0], 0.025) == pytest.approx(0.8689528, abs=1e-3)


@pytest.mark.long
def test_the_power_of_pairs_is_the_noncentral_t_of_scipy() -> None:
    for pairs, effect in [(2, 3.0), (3, 5.0), (10, 1.0), (200, 0.1)]:
        theirs = scipy.stats.nct.sf(scipy.stats.t.isf(0.01, pairs - 1), pairs - 1, effect * math.sqrt(pairs))
        assert power(effect, pairs, [1.0]) == pytest.approx(theirs, rel=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("deviations", [(0.0013, 0.0013), (0.0009, 0.0018), (0.0001, 0.002)])
def test_the_power_of_few_seeds_is_what_a_simulation_finds(deviations: tuple[float, float]) -> None:
    chance, effect = np.random.default_rng(5), 0.004
    for count in (2, 3, 5):
        b, a = (chance.normal(m, s, (count, 20_000)) for m, s in zip((0.0, effect), deviations, strict=True))
        shown = scipy.stats.ttest_ind(a, b, equal_var=False, alternative="greater").pvalue < 0.01
        assert shown.mean() == pytest.approx(power(effect, count, deviations), abs=0.01)


def test_the_power_of_few_seeds_is_what_a_million_simulations_found() -> None:
    """Of three decimals, by SciPy's `ttest_ind`; the last of the columns."""
    for count, deviations, found in (
        (3, (0.0009, 0.0018), 0.3561),
        (2, (0.0013, 0.0013), 0.0737),
        (5, (0.0001, 0.0020), 0.7280),
    ):
        assert power(0.004, count, deviations) == pytest.approx(found, abs=0.0015)
        assert power(0.004, count, deviations[::-1]) == pytest.approx(power(0.004, count, deviations), rel=1e-9)


@pytest.mark.parametrize(
    ("effect", "seeds", "deviations", "options", "wanted"),
    [
        (1.0, 2, (1.0,), {}, 0.0363224973),
        (0.004, 3, (0.0009, 0.0018), {}, 0.356124583),
        (1.0, 20, (1.0, 1.0), {"level": 0.025}, 0.868245192),
        (3.0, 5, (0.1, 2.0), {"level": 0.05}, 0.861822668),
        (0.003, 4, (0.001,), {"documents": ErrorTerm(0.0005, math.inf)}, 0.754475261),
        (0.003, 2, (0.001,), {"level": 0.025, "documents": ErrorTerm(0.002, math.inf)}, 0.153536082),
        (0.003, 2, (0.001,), {"level": 0.025, "documents": ErrorTerm(0.002, 4.0)}, 0.0465689895),
        (1e12, 2, (1.0,), {}, 1.0),
        (10.0, 16, (1.0, 0.01), {}, 1.0),  # where the library has not a number
    ],
)
def test_power_stays_what_reports_say(
    effect: float, seeds: int, deviations: tuple[float, ...], options: dict[str, Any], wanted: float
) -> None:
    assert power(effect, seeds, deviations, **options) == pytest.approx(wanted, rel=1e-7)


def test_the_number_needed_is_the_first_with_enough_power() -> None:
    for deviations in ([0.0009, 0.0018], [0.001]):
        seeds = seeds_needed(0.002, deviations)
        assert seeds is not None
        assert power(0.002, seeds, deviations) >= 0.8 > power(0.002, seeds - 1, deviations)


def test_a_number_with_just_the_wanted_power_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seeds_needed(0.002, [0.001], wanted=power(0.002, 6, [0.001])) == 6
    monkeypatch.setattr(stats, "POWER", 2 * power(1.5, 7, [1.0], 0.05) - 1.0)
    assert seeds_to_decide(0.0, [1.0], 1.5) == 7


def test_the_gaps_that_three_and_ten_seeds_show() -> None:
    """With a deviation of 0.0009, the gap whose p is 0.01: 3.747 and 2.552, the table's t, by sqrt(2 / n) of it."""
    for seeds, gap in ((3, 0.00275), (10, 0.00103)):
        pattern = np.linspace(-1, 1, seeds)
        a = 0.0009 * pattern / np.std(pattern, ddof=1)
        assert welch(list(a + gap), list(a)).p_above(0.0) == pytest.approx(0.01, rel=0.02)
        assert welch(list(a + gap + 0.0023), list(a)).p_above(0.0023) == pytest.approx(0.01, rel=0.02)


def test_seeds_needed_at_the_ends() -> None:
    assert seeds_needed(1e12, [1.0, 1.0]) == 2
    assert seeds_needed(1e-9, [1.0, 1.0]) is None
    most = seeds_needed(0.05, [1.0, 1.0])
    assert most is not None
    assert 8000 < most <= 10_000
    for least in (2, 3, 4, 5, 9_999, 10_000):
        assert _least(least.__le__) == least
    assert _least((1).__le__) == 2, "of one there is no spread"
    assert _least((10_001).__le__) is None


# Comparing runs


def write(folder: Path, name: str, seed: int, bits: float, recipe: str = "1", **changes: Any) -> Path:
    """A finished run with this seed and score; `recipe` is a digit that stands for its settings."""
    result = make_result()
    result |= {"seed": seed, "bits_per_byte": bits, "recipe": name, "key": recipe * 8}
    final = result["scores"]["quantized_sliding"]
    final["nats"] = bits * math.log(2) * final["source_bytes"]
    result["sha256"] |= {"recipe": recipe * 64, "artifact": f"{name}{seed}"}
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = result
        for parent in parents:
            place = place[parent]
        place[last] = value
    run = folder / f"{name}-s{seed}"
    run.mkdir(parents=True)
    (run / "result.json").write_text(json.dumps(result))
    return run


A_BITS, B_BITS = (1.2300, 1.2309, 1.2318), (1.2200, 1.2204, 1.2214)


@pytest.fixture
def groups(tmp_path: Path) -> tuple[list[Path], list[Path]]:
    """Three runs of B and of A, with the same seeds."""
    b = [write(tmp_path, "b", seed, bits) for seed, bits in enumerate(B_BITS)]
    a = [write(tmp_path, "a", seed, bits, "2") for seed, bits in enumerate(A_BITS)]
    return b, a


def test_same_seeds_are_paired_in_any_order(groups: Any) -> None:
    b, a = groups
    facts = compare([b[2], b[0], b[1]], a)
    assert facts["test"] == "paired"
    assert facts["difference"] == pytest.approx(np.mean(B_BITS) - np.mean(A_BITS))
    assert facts["p"] == facts["p_paired"] == pytest.approx(student.two_sided(np.subtract(A_BITS, B_BITS).tolist()) / 2)
    assert facts["p_welch"] == pytest.approx(student.welch(A_BITS, B_BITS)[0] / 2)
    assert facts["runs"]["seeds"] == [0, 1, 2]
    assert facts["runs"]["standard_deviation"] == pytest.approx(np.std(B_BITS, ddof=1))
    low, high = facts["interval"]
    assert low < facts["difference"] < high
    assert facts["notes"] == []


def test_other_seeds_are_not_paired(groups: Any, tmp_path: Path) -> None:
    b, a = groups
    more = write(tmp_path, "b", 7, 1.2206)
    facts = compare([*b[:2], more], a)
    assert (facts["test"], facts["p_paired"]) == ("welch", None)
    assert facts["p"] == facts["p_welch"]
    assert facts["notes"] == ["some seeds, but not all, are in both groups, so nothing is paired"]
    facts = compare([*b, more], a)
    assert facts["test"] == "welch"


def test_the_rival_s_runs_may_follow_an_equals_sign(groups: Any, caddie: Any) -> None:
    b, a = groups
    typed = ("compare", *b, f"--against={a[0]}", *a[1:], "--json")
    assert json.loads(caddie(*typed).out)["against"]["places"] == list(map(str, a))


def test_worse_is_not_better(groups: Any) -> None:
    b, a = groups
    facts = compare(a, b)
    assert facts["difference"] > 0
    assert facts["p"] > 0.99
    assert facts["seeds_to_show_difference"] is None


def test_the_bar_may_be_in_any_unit(groups: Any) -> None:
    b, a = groups
    score = make_result()["scores"]["quantized_plain"]
    counts = {"tokens": score["tokens"], "source_bytes": score["source_bytes"]}
    bar = compare(b, a, by=0.005, unit="nats-per-token")
    bits = 0.005 * counts["tokens"] / (math.log(2) * counts["source_bytes"])
    assert bar["by_bits_per_byte"] == bits
    for unit in UNITS:
        facts = compare(b, a, by=convert(bits, "bits-per-byte", unit, **counts), unit=unit)
        assert facts["p"] == pytest.approx(bar["p"], rel=1e-6)
        assert facts["by_bits_per_byte"] == pytest.approx(bits)
        in_bits = convert(facts["difference"], unit, "bits-per-byte", **counts)
        assert in_bits == pytest.approx(np.mean(B_BITS) - np.mean(A_BITS))
    assert compare(b, a)["p"] < bar["p"]


def test_seeds_are_counted_for_the_bar_and_for_what_was_seen(groups: Any) -> None:
    b, a = groups
    facts = compare(b, a, by=0.001)
    deviation = float(np.std(np.subtract(A_BITS, B_BITS), ddof=1))
    assert facts["seeds_to_show_by"] == seeds_needed(0.001, [deviation])
    assert facts["seeds_to_show_difference"] == seeds_needed(-facts["difference"] - 0.001, [deviation])


def test_nothing_follows_from_one_seed_a_side(groups: Any, caddie: Call) -> None:
    b, a = groups
    facts = compare(b[:1], a[:1])
    assert facts["difference"] == pytest.approx(-0.01)
    assert [facts[name] for name in ("test", "p", "interval", "seeds_to_show_difference")] == [None] * 4
    said = caddie("compare", b[0], "--against", *a).out
    assert "difference  -0.010900 (B is lower)\n" in said
    assert f"\nB           {b[0]}\nA           {a[0]} and 2 more\n" in said
    assert "busy" not in said
    about = json.loads((b[0] / "result.json").read_text())
    about["training"] |= {"cpu_share": 0.25, "step_seconds": None}
    (b[0] / "result.json").write_text(json.dumps(about))
    said = caddie("compare", b[0], "--against", *a).out
    assert f"note        {b[0]}: The machine was busy: training got 25% of its threads' time.\n" in said
    assert "with one seed on a side nothing can be concluded" in said


def test_seeds_that_all_score_the_same_give_no_p(tmp_path: Path, caddie: Call) -> None:
    b, a = ([write(tmp_path, name, seed, 1.25, name) for seed in range(2)] for name in "ba")
    assert compare(b, a)["p"] is None
    assert "none; both groups have the same seeds, but nothing varies" in caddie("compare", *b, "--against", *a).out


REFUSED = {
    "settings": (
        {"sha256__recipe": "9" * 64},
        "stand in one group but have different settings (11111111 and 99999999)",
    ),
    "training": ({"sha256__train_documents": "9"}, "stand in one group but have different training texts"),
    "validation": ({"sha256__validation_documents": "9"}, "stand in one group but have different held-out texts"),
    "tokenizer": ({"sha256__tokenizer": "9"}, "stand in one group but have different tokenizers"),
    "repeat": ({"seed": 1}, "seed 1 stands 2 times in the group"),
    "byte source": ({"byte_source": "table"}, "bytes from the table"),
    "bytes": ({"scores__quantized_plain__source_bytes": 7}, "counts 7 bytes from the documents"),
    "artifact": ({"sha256__artifact": "a0"}, "stands on both sides"),
    "no score": ({"bits_per_byte": None}, "holds no score"),
    "endless score": ({"bits_per_byte": math.nan}, "holds no score"),
    "another score": ({"bits_per_byte": 0.5}, "states 0.5000 bits per byte, and its sums come to 1.2200"),
    "no tokens": ({"scores__quantized_plain": None}, "lacks what a comparison needs (TypeError"),
    "version": ({"version": 99}, "has version 99"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_must_not_be_mixed_is_refused(case: str, groups: Any, tmp_path: Path, caddie: Call) -> None:
    b, a = groups
    changes, says = REFUSED[case]
    ended = caddie("compare", *b, write(tmp_path, "other", **{"seed": 8, "bits": 1.22} | changes), "--against", *a)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.count("\n") == 1
    assert says in ended.err


@pytest.mark.parametrize("unit", UNITS)
def test_tokens_of_another_tokenizer_are_another_unit(unit: str, groups: Any, tmp_path: Path) -> None:
    _, a = groups
    b = [
        write(tmp_path, "c", seed, bits, "3", sha256__tokenizer="9", scores__quantized_plain__tokens=100)
        for seed, bits in enumerate(B_BITS)
    ]
    if unit == "nats-per-token":
        with pytest.raises(UserError, match="different tokens, so nats per token differ"):
            compare(b, a, unit=unit)
    else:
        assert compare(b, a, unit=unit)["notes"] == ["the groups have different tokenizers"]


def test_other_held_out_texts_are_refused_across_groups(groups: Any, tmp_path: Path) -> None:
    b = [write(tmp_path, "c", seed, 1.2, "3", sha256__validation_documents="9") for seed in range(2)]
    with pytest.raises(UserError, match="scored on different held-out texts"):
        compare(b, groups[1])


def test_an_unfinished_run_and_a_margin_without_end_are_refused(groups: Any, tmp_path: Path, caddie: Call) -> None:
    b, a = groups
    (tmp_path / "killed").mkdir()
    for arguments, says in (
        ([tmp_path / "killed", "--against", *a], "holds no result.json, so it is no finished run"),
        ([tmp_path / "nowhere", "--against", *a], "nowhere; name the folders of finished runs"),
        ([*b, "--against", *a, "--by", "nan"], "'--by': nan is not a finite number"),
        ([*b, "--against", *a, "--by", "-1"], "-1.0 is not in the range"),
        ([*b], "Missing option '--against'"),
        (["--against", *a], "Missing argument 'RUN...'"),
        ([*b, "--against"], "requires an argument"),
    ):
        ended = caddie("compare", *arguments)
        assert (ended.status, ended.out) == (2, "")
        assert says in ended.err


def test_what_is_worth_knowing_is_noted(groups: Any, tmp_path: Path, caddie: Call) -> None:
    b, a = groups
    odd = write(tmp_path, "b", 8, 1.22, under_cap=False, verified=False, device="abacus", code="abc+")
    said = caddie("compare", *b, odd, "--against", *a).out
    for note in (
        f"{odd} is over its cap",
        f"{odd} did not pass verification",
        "the runs differ in their device: abacus, cpu, 2 threads",
        "the runs differ in their code: None, abc+",
    ):
        assert f"note        {note}\n" in said + "\n"
    same = [write(tmp_path, "twin", seed, 1.22 + seed / 1000, sha256__train_documents="9") for seed in (5, 6)]
    notes = compare(b, same)["notes"]
    assert notes == ["both groups have the same settings", "the groups have different training texts"]


def test_compare_prints_one_object_or_a_text(groups: Any, caddie: Call) -> None:
    b, a = groups
    ended = caddie("compare", *b, "--against", *a, "--by", 0.005, "--unit", "nats-per-token", "--json")
    assert (ended.status, ended.err, ended.out.count("\n")) == (0, "", 1)
    facts = json.loads(ended.out, parse_constant=pytest.fail)
    assert facts == json.loads(json.dumps(compare(b, a, by=0.005, unit="nats-per-token")))
    said = caddie("compare", b[0] / "result.json", *b[1:], "--against", *a, "--by", 0.005).out
    lines = said.splitlines()
    assert max(len(line) for line in lines if "/" not in line) < 100, "a folder may have a long name"
    shown = [line.partition(" ")[0] for line in lines]
    assert shown == ["bits", "B", "A", "", "B", "A", "difference", "question", "answer", "test", "error", "seeds", ""]
    assert "answer      yes, p = 0.00" in said
    assert "one-sided paired test, as both groups have the same seeds (Welch: p = 0.0" in said


def test_both_groups_may_stand_in_either_order(groups: Any, caddie: Call) -> None:
    b, a = groups
    assert caddie("compare", "--against", *a, "--json", *b) == caddie("compare", *b, "--against", *a, "--json")


# A seed is one observation


class Started(Exception):
    """The run has its first batch."""


@pytest.fixture
def first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Loader, int], tuple[Any, Any]]:
    """Initial weights and first batch of a run of the tiny recipe."""
    shards = [np.random.default_rng(0).integers(0, 257, 20_000).astype(np.uint16)]
    shrunk = {"model.vocabulary": 257, "model.width": 16, "model.depth": 1, "model.block.mlp.hidden": 16}
    shrunk |= {"train.seconds": None, "train.steps": 5, "train.batch_tokens": 512, "train.warmup_steps": 0}

    def begin(loader: Loader, seed: int) -> tuple[Any, Any]:
        recipe = find("tiny").but(shrunk | {"train.loader": loader})
        found: list[tuple[Any, Any]] = []

        def step(self: Any, batches: Any, moment: Any, bos: int, lr_scale: float) -> float:
            found.append(({name: tensor.clone() for name, tensor in self.parameters.items()}, next(batches).inputs))
            raise Started

        monkeypatch.setattr(training.Trainer, "launch", step)
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        with pytest.raises(Started):
            training.train(recipe.model, recipe.train, TrainingData(shards, 256), seed=seed, folder=folder)
        return found[0]

    return begin


@pytest.mark.parametrize("loader", [ShuffledSequences(), CoprimeStride(), SequentialStream(), PackedDocuments()])
def test_seeds_draw_weights_and_data_order_anew(loader: Loader, first_step: Any) -> None:
    (weights, batch), (again, batch_again), (others, other_batch) = (first_step(loader, seed) for seed in (1, 1, 2))
    drawn = [name for name, tensor in weights.items() if len(tensor.unique()) > 2]
    assert len(drawn) > 3
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert not any(torch.equal(weights[name], others[name]) for name in drawn)
    assert np.array_equal(batch, batch_again)
    assert not np.array_equal(batch, other_batch)


@pytest.mark.parametrize("loader", [SequentialStream(begin="first shard"), PackedDocuments(begin="first shard")])
def test_the_contest_s_own_order_is_the_same_for_every_seed(loader: Loader, first_step: Any) -> None:
    """So such runs share their data order, and their spread is that of the initial weights alone."""
    (weights, batch), (others, other_batch) = (first_step(loader, seed) for seed in (1, 2))
    assert np.array_equal(batch, other_batch)
    assert not torch.equal(weights["embedding.weight"], others["embedding.weight"])


def test_a_result_beside_another_artifact_is_refused(groups: Any) -> None:
    b, a = groups
    (b[0] / "artifact.caddie").write_bytes(b"another")
    with pytest.raises(UserError, match=r"is not the file that .* scored"):
        compare(b, a)
