"""Means over seeds, whether one is above another, and how many seeds it takes to show it; ranks; on plain numbers.

Tests: Welch, "The generalization of Student's problem when several different population variances are involved"
(Biometrika 34, 1947), and the paired t-test. Power: the noncentral t distribution (Cohen, "Statistical power analysis
for the behavioral sciences", 1988), not its normal limit, which asks for too few seeds where seeds are few.
Equivalence: two one-sided tests (Schuirmann, J. Pharmacokinetics and Biopharmaceutics 15, 1987). Many tests: Benjamini
and Hochberg, "Controlling the false discovery rate" (J. Royal Statistical Society B 57, 1995). Ranks: Spearman (1904)
and Kendall (1938) as two cases of one coefficient (Daniels, Biometrika 33, 1944).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Literal

import numpy as np

LEVEL = 0.01
"""The p below which a difference counts as shown: the contest's."""
POWER = 0.8
"""Wanted probability of showing a difference that is there."""
MOST_SEEDS = 10_000
"""Where the search for a number of seeds gives up."""
SHARES = 200
"""Points at which the mean over a beta distribution is taken."""

Word = Literal["better", "worse", "same", "unclear"]
"""What may be said of a difference."""


@dataclass(frozen=True)
class Estimate:
    """A mean, or a difference of means, with what is needed to judge it by Student's t."""

    value: float
    standard_error: float
    degrees: float
    """Degrees of freedom; NaN where the observations do not differ at all."""

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Bounds that enclose the true value in that part of all experiments."""
        from scipy.special import stdtrit

        reach = self.standard_error * float(stdtrit(self.degrees, 0.5 + confidence / 2))
        return self.value - reach, self.value + reach

    def p_above(self, margin: float) -> float:
        """One-sided p of "the true value is above `margin`"; NaN where the observations do not differ at all."""
        from scipy.special import stdtr

        if not self.standard_error:
            return math.nan
        return float(stdtr(self.degrees, (margin - self.value) / self.standard_error))

    def p_beyond(self, margin: float = 0.0) -> float:
        """Two-sided p of "the true value is further from zero than `margin`, on the side of `value`".

        Twice the one-sided p of that side, so that it is below a level exactly where the interval of confidence
        1 - level lies beyond the margin. At margin 0 it is the usual p of "no difference". NaN as for `p_above`.
        """
        p = Estimate(abs(self.value), self.standard_error, self.degrees).p_above(margin)
        return p if math.isnan(p) else min(1.0, 2.0 * p)

    def p_within(self, margin: float) -> float:
        """p of "the true value is nearer to zero than `margin`": the larger p of two one-sided tests; NaN as above."""
        return Estimate(-abs(self.value), self.standard_error, self.degrees).p_above(-margin)


@dataclass(frozen=True)
class Proportion:
    """How many of some independent trials came out one way."""

    count: int
    of: int

    @property
    def value(self) -> float | None:
        """The share; None of no trials."""
        return self.count / self.of if self.of else None

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Bounds that enclose the true share in at least that part of experiments.

        Exact (Clopper and Pearson, Biometrika 26, 1934), so of 0 to 1 with no trials.
        """
        from scipy.special import betaincinv

        tail, missed = (1.0 - confidence) / 2, self.of - self.count
        low = float(betaincinv(self.count, missed + 1, tail)) if self.count else 0.0
        high = float(betaincinv(self.count + 1, missed, 1.0 - tail)) if missed else 1.0
        return low, high


def mean(values: Sequence[float]) -> Estimate:
    """The mean of at least two independent observations."""
    return _estimate(fmean(values), values)


def welch(against: Sequence[float], values: Sequence[float]) -> Estimate:
    """mean(against) - mean(values) of independent groups of at least two, of different variances."""
    return _estimate(fmean(against) - fmean(values), against, values)


def paired(against: Sequence[float], values: Sequence[float]) -> Estimate:
    """The mean of against - values, pair by pair, of at least two pairs."""
    return mean([a - b for a, b in zip(against, values, strict=True)])


def _estimate(value: float, *samples: Sequence[float]) -> Estimate:
    """Degrees of freedom by Welch and Satterthwaite; for a single sample they are its size less one."""
    squares = [variance(sample) / len(sample) for sample in samples]
    spread = sum(square**2 / (len(sample) - 1) for square, sample in zip(squares, samples, strict=True))
    return Estimate(value, math.sqrt(sum(squares)), sum(squares) ** 2 / spread if spread else math.nan)


def power(effect: float, seeds: int, deviations: Sequence[float], level: float = LEVEL) -> float:
    """Probability that `seeds` per group show a true difference of `effect` at p < `level`, one-sided.

    `deviations` are the standard deviations of both groups (Welch's test), or the one of the differences (paired).

    The paired statistic is noncentral t with n - 1 degrees about effect / sqrt(deviation^2 / n). Welch's takes its
    degrees from the sample variances. Given the share that the first of them, over its true value, has in their sum, it
    is a scaled noncentral t with 2 (n - 1) degrees; the share is beta distributed, and the mean over it is taken. With
    degrees from the true variances the power of three seeds would come out up to 0.16 too high.
    """
    from scipy.special import betaincinv, nctdtr, stdtrit

    variances = [deviation**2 for deviation in deviations]
    center = min(effect / math.sqrt(sum(variances) / seeds), 1e6)  # beyond, the library overflows; power is 1
    free = seeds - 1
    if len(variances) == 1:
        return 1.0 - float(nctdtr(free, center, stdtrit(free, 1.0 - level)))
    share = betaincinv(free / 2, free / 2, (np.arange(SHARES) + 0.5) / SHARES)
    first, second = variances[0] * share, variances[1] * (1.0 - share)
    degrees = free * (first + second) ** 2 / (first**2 + second**2)
    bar = stdtrit(degrees, 1.0 - level) * np.sqrt(2.0 * (first + second) / sum(variances))
    return 1.0 - float(nctdtr(2 * free, center, bar).mean())


def seeds_needed(effect: float, deviations: Sequence[float], level: float = LEVEL, wanted: float = POWER) -> int | None:
    """The least number of seeds per group with that power (see `power`); None if there is none up to `MOST_SEEDS`."""
    return _least(lambda seeds: power(effect, seeds, deviations, level) >= wanted)


def seeds_to_decide(
    difference: float, deviations: Sequence[float], margin: float = 0.0, level: float = 0.05, wanted: float = POWER
) -> int | None:
    """The least number of seeds per group that show where a true `difference` lies; None as for `seeds_needed`.

    Beyond the margin: that `Estimate.p_beyond` falls below `level`. Within it: that `Estimate.p_within` does, by a
    bound that may ask for a seed too many (two tests fail together no more often than the sum of their failures). None
    too for a difference of just the margin. `deviations` as for `power`.
    """
    beyond = abs(difference) - margin
    if beyond >= 0:
        return seeds_needed(beyond, deviations, level / 2, wanted)
    sides = (margin - difference, margin + difference)
    return _least(lambda seeds: sum(power(side, seeds, deviations, level) for side in sides) - 1.0 >= wanted)


def _least(enough: Callable[[int], bool]) -> int | None:
    """The least number from 2 to `MOST_SEEDS` that is enough, where all above it are."""
    low, high = 1, 2  # too few, or untried; enough, once tried
    while not enough(high):
        low, high = high, 2 * high
        if low >= MOST_SEEDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high if high <= MOST_SEEDS else None


def benjamini_hochberg(p_values: Sequence[float | None]) -> list[float | None]:
    """p adjusted for the number of tests: the share of false findings to expect among those at or below it.

    None and NaN stay out of the count and come back as None. The tests may be independent or rise and fall together.
    """
    tested = {place: p for place, p in enumerate(p_values) if p is not None and not math.isnan(p)}
    adjusted: list[float | None] = [None] * len(p_values)
    least = 1.0
    for rank, place in zip(
        range(len(tested), 0, -1), sorted(tested, key=tested.__getitem__, reverse=True), strict=True
    ):
        adjusted[place] = least = min(least, tested[place] * (len(tested) / rank))
    return adjusted


def verdict(difference: float, beyond: float | None, within: float | None, level: float) -> Word:
    """The word for a difference of costs (negative is better) whose p, adjusted if it is one of many, are given.

    `beyond` is that of lying beyond the margin (`Estimate.p_beyond`), `within` that of lying within (`p_within`), None
    where it was not asked or cannot be told. Both cannot be below `level` at once.
    """
    if beyond is not None and beyond < level:
        return "better" if difference < 0 else "worse"
    return "same" if within is not None and within < level else "unclear"


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Correlation of the ranks of paired values, ties sharing theirs; None where either side does not vary."""
    return _correlation(*(_steps(values) for values in _pairs(a, b)))


def kendall(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Pairs in the same order less those in the other, over all: tau-b, which allows for ties; None as above."""
    return _correlation(*(np.sign(_steps(values)) for values in _pairs(a, b)))


def order_agreement(a: Sequence[float], b: Sequence[float]) -> Proportion:
    """In how many pairs of positions `a` and `b` have the same order, of those that are tied in neither.

    The pairs are not independent, so the interval of the proportion means nothing.
    """
    product = np.triu(np.prod([np.sign(_steps(values)) for values in _pairs(a, b)], axis=0))
    return Proportion(int((product > 0).sum()), int((product != 0).sum()))


def sign_agreement(a: Sequence[float], b: Sequence[float]) -> Proportion:
    """In how many positions `a` and `b` have the same sign, of those where neither is zero."""
    product = np.prod([np.sign(values) for values in _pairs(a, b)], axis=0)
    return Proportion(int((product > 0).sum()), int((product != 0).sum()))


def _pairs(a: Sequence[float], b: Sequence[float]) -> np.ndarray:
    """Both as (2, n); `ValueError` where one is longer."""
    return np.array(list(zip(a, b, strict=True)), dtype=np.float64).reshape(-1, 2).T


def _steps(values: np.ndarray) -> np.ndarray:
    """(n, n): how many ranks each of n values is above each other; endless values are in order too."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2)[place]
    return rank[:, None] - rank


def _correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    """Daniels's coefficient of two antisymmetric arrays (n, n)."""
    scale = math.sqrt(float((a * a).sum()) * float((b * b).sum()))
    return float((a * b).sum()) / scale if scale else None
