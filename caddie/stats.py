"""Means over seeds, whether one is above another, and how many seeds it takes to show it; on plain numbers.

Tests: Welch, "The generalization of Student's problem when several different population variances are involved"
(Biometrika 34, 1947), and the paired t-test. Power: the noncentral t distribution (Cohen, "Statistical power analysis
for the behavioral sciences", 1988), not its normal limit, which asks for too few seeds where seeds are few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

import numpy as np

LEVEL = 0.01
"""The p below which a difference counts as shown: the contest's."""
POWER = 0.8
"""Wanted probability of showing a difference that is there."""
MOST_SEEDS = 10_000
"""Where the search for a number of seeds gives up."""
SHARES = 200
"""Points at which the mean over a beta distribution is taken."""


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
    low, high = 1, 2  # too few, or untried; enough, once tried
    while power(effect, high, deviations, level) < wanted:
        low, high = high, 2 * high
        if low >= MOST_SEEDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        if power(effect, middle, deviations, level) < wanted:
            low = middle
        else:
            high = middle
    return high if high <= MOST_SEEDS else None
