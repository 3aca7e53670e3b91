"""Tests of means over seeds, seeds needed, shares and ranks: SciPy's, and the margins and powers that it lacks.

Tests: Welch, "The generalization of Student's problem when several different population variances are involved"
(Biometrika 34, 1947), and the paired t-test. Power: the noncentral t distribution (Cohen, "Statistical power analysis
for the behavioral sciences", 1988), not its normal limit, which asks for too few seeds where seeds are few.
Equivalence: two one-sided tests (Schuirmann, J. Pharmacokinetics and Biopharmaceutics 15, 1987). Many tests: Benjamini
and Hochberg, "Controlling the false discovery rate" (J. Royal Statistical Society B 57, 1995). Seeds crossed with
documents: the variance clustered both ways (Cameron, Gelbach and Miller, "Robust inference with multiway clustering",
J. Business and Economic Statistics 29, 2011) and, as its parts have few and many degrees of freedom, the test of
Behrens and Fisher (Fisher, "The fiducial argument in statistical inference", Annals of Eugenics 6, 1935), which errs to
"not shown" (Robinson, Annals of Statistics 4, 1976), with a prior whose intervals hold as often as they say (Ghosh and
Kim, "The Behrens-Fisher problem revisited: a Bayes-frequentist synthesis", Canadian J. Statistics 29, 2001). Ranks:
Spearman (1904) and Kendall (1938) as two cases of one coefficient (Daniels, Biometrika 33, 1944).
"""

import math
import warnings
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

import numpy as np

LEVEL = 0.01
"""Level of p at which a difference counts as shown: the contest's."""
POWER = 0.8
"""Wanted probability of showing a difference that is there."""
MOST_SEEDS = 10_000
"""Largest number of seeds that is searched."""
SHARES = 200
"""Points of a distribution over which a mean is taken."""


@dataclass(frozen=True)
class ErrorTerm:
    """An error of mean zero whose variance was estimated: a Student's t, times its standard error."""

    standard_error: float
    degrees: float
    """Degrees of freedom."""


@dataclass(frozen=True)
class Estimate:
    """Mean, or difference of means, with an error that is Student's t distributed, or the sum of two such errors."""

    value: float
    standard_error: float
    """Standard error of the first error."""
    degrees: float
    """Degrees of freedom of the first error."""
    second: ErrorTerm | None = None
    """Second error, independent of the first: that of the held-out documents."""

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Return the bounds of the confidence interval."""
        from scipy.optimize import brentq
        from scipy.special import stdtrit

        wanted = 0.5 + confidence / 2
        reach = self.standard_error * float(stdtrit(self.degrees, wanted))
        if self.second:
            far = 2.0 * (reach + self.second.standard_error * float(stdtrit(self.second.degrees, wanted)))
            reach = float(brentq(lambda error: self._below(error) - wanted, 0.0, far))
        return self.value - reach, self.value + reach

    def p_above(self, margin: float) -> float:
        """Return the one-sided p of "the true value is above `margin`"; NaN if the observations do not differ."""
        return self._below(margin - self.value) if self.standard_error else math.nan

    def _below(self, error: float) -> float:
        """Return the probability that the error lies below `error`.

        For two errors it is that of Behrens and Fisher, which is too conservative where the second error is the larger.
        From three seeds on, it is averaged with the probability under Ghosh and Kim's prior, which gives the first
        error the same sum of squares and two more degrees. The weight of the latter is the second error's share of the
        variance. Two seeds are too few for that prior. A tail is never lighter than that of the first error alone.
        """
        from scipy.special import stdtr

        alone = float(stdtr(self.degrees, error / self.standard_error))
        if self.second is None:
            return alone
        own, other = self.standard_error**2, self.second.standard_error**2
        plain, matched = (
            _behrens_fisher(error, own * self.degrees, degrees, other * self.second.degrees, self.second.degrees)
            for degrees in (self.degrees, self.degrees + 2)
        )
        weight = other / (own + other) if self.degrees > 1 else 0.0
        both = (1.0 - weight) * plain + weight * matched
        return max(alone, both) if error < 0 else min(alone, both)

    def p_beyond(self, margin: float = 0.0) -> float:
        """Return the two-sided p of "the true value is further from zero than `margin`, on the side of `value`".

        It is twice the one-sided p of that side, so it is below a level exactly where the interval of confidence
        1 - level lies beyond the margin. At margin 0 it is the usual p of "no difference". NaN as for `p_above`.
        """
        p = replace(self, value=abs(self.value)).p_above(margin)
        return p if math.isnan(p) else min(1.0, 2.0 * p)

    def p_within(self, margin: float) -> float:
        """Return the p of "the true value is nearer to zero than `margin`": the larger of two one-sided p."""
        return replace(self, value=-abs(self.value)).p_above(-margin)


def _behrens_fisher(error: float, first: float, free: float, second: float, others: float) -> float:
    """Return the probability that a sum of two Student's t, given by sums of squares and degrees, lies below `error`.

    Given the share of the first in their total chi-squared, the sum is Student's t (Ruben, J. Royal Statistical Society
    B 22, 1960). The mean is taken over that share, at points that are dense where it is small and makes the
    first error large.
    """
    from scipy.special import betaincinv, stdtr

    places = (np.arange(SHARES) + 0.5) / SHARES
    share = betaincinv(free / 2, others / 2, places**4)
    scale = np.sqrt((first / share + second / (1.0 - share)) / (free + others))
    return float(np.average(stdtr(free + others, error / scale), weights=places**3))


@dataclass(frozen=True)
class Proportion:
    """Successes among independent trials."""

    count: int
    of: int

    @property
    def value(self) -> float | None:
        """Share of successes; None without trials."""
        return self.count / self.of if self.of else None

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Return the bounds of the exact interval of Clopper and Pearson (Biometrika 26, 1934)."""
        from scipy.stats import binomtest

        if not self.of:
            return 0.0, 1.0
        low, high = binomtest(self.count, self.of).proportion_ci(confidence, method="exact")
        return float(low), float(high)


def mean(values: Sequence[float]) -> Estimate:
    """Return the mean of at least two independent observations."""
    return Estimate(fmean(values), _standard_error(values), len(values) - 1)


def welch(against: Sequence[float], values: Sequence[float]) -> Estimate:
    """Return mean(against) - mean(values) of independent groups of at least two, of different variances."""
    from scipy.stats import ttest_ind

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # for groups that do not vary: their standard error is 0
        degrees = float(ttest_ind(against, values, equal_var=False).df)
    error = math.hypot(_standard_error(against), _standard_error(values))
    return Estimate(fmean(against) - fmean(values), error, degrees)


def paired(against: Sequence[float], values: Sequence[float]) -> Estimate:
    """Return the mean of against - values, pair by pair, of at least two pairs."""
    return mean([a - b for a, b in zip(against, values, strict=True)])


def document_part(sizes: Sequence[float] | np.ndarray, bits: Sequence[np.ndarray]) -> ErrorTerm | None:
    """Return the error of sum(bits) / sum(sizes) due to the choice of documents from their source.

    `sizes` has the size of each document, `bits` an array of their bits for each of two seeds or more. The variance is
    the part that the seeds share: the mean, over pairs of seeds, of the products of a document's two residuals. The
    part that differs from seed to seed is left out: the spread of the seeds' means already holds it, so the two
    variances add up. None if the variance is not above zero.

    The degrees of freedom are those of a sum of squares of unequal weights and heavy tails, by its fourth moment
    (Satterthwaite, Biometrics Bulletin 2, 1946).
    """
    residuals = np.array([one - np.sum(one) / np.sum(sizes) * np.asarray(sizes) for one in bits]) / np.sum(sizes)
    seeds, documents = residuals.shape
    if documents < 2:
        return None
    middle, products = residuals.mean(0), residuals @ residuals.T
    variance = (products.sum() - products.trace()) / (seeds * (seeds - 1)) * documents / (documents - 1)
    if variance <= 0.0:
        return None
    return ErrorTerm(math.sqrt(variance), min(documents - 1.0, 3.0 * float((middle**2).sum() ** 2 / (middle**4).sum())))


def _standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean, exactly 0 where nothing varies (as `scipy.stats.sem` is not)."""
    return stdev(values) / math.sqrt(len(values))


def power(
    effect: float, seeds: int, deviations: Sequence[float], level: float = LEVEL, documents: ErrorTerm | None = None
) -> float:
    """Return the probability that `seeds` per group show a true difference of `effect` at p < `level`, one-sided.

    `deviations` are the standard deviations of both groups (Welch's test), or the one of the differences (paired).

    The paired statistic is noncentral t with n - 1 degrees about effect / sqrt(deviation^2 / n). Welch's takes its
    degrees from the sample variances. Divide each of them by its true variance: given the first one's share of the sum,
    Welch's is a scaled noncentral t with 2 (n - 1) degrees. The share is beta distributed, and power is the mean over
    it. With degrees from the true variances the power of three seeds would come out up to 0.16 too high.

    `documents` is the error that the held-out documents add to the paired one, whatever the seeds. Then the critical
    value is that of Cochran and Cox ("Experimental designs", 1950): the two quantiles, weighted by the variances.
    """
    from scipy.special import betaincinv, chdtri, nctdtr, ndtr, stdtrit

    variances = [deviation**2 for deviation in deviations]
    center = min(effect / math.sqrt(sum(variances) / seeds), 1e6)  # beyond, the library overflows; power is 1
    free, places = seeds - 1, (np.arange(SHARES) + 0.5) / SHARES
    if documents:
        (variance,), fixed = variances, documents.standard_error**2
        seen = variance / seeds * chdtri(free, places) / free
        quantiles = stdtrit((free, documents.degrees), 1.0 - level)
        bar = (seen * quantiles[0] + fixed * quantiles[1]) / np.sqrt(seen + fixed)
        return float(ndtr((effect - bar) / math.sqrt(variance / seeds + fixed)).mean())
    if len(variances) == 1:
        return 1.0 - float(np.nan_to_num(nctdtr(free, center, stdtrit(free, 1.0 - level))))  # NaN: about zero
    share = betaincinv(free / 2, free / 2, places)
    first, second = variances[0] * share, variances[1] * (1.0 - share)
    degrees = free * (first + second) ** 2 / (first**2 + second**2)
    bar = stdtrit(degrees, 1.0 - level) * np.sqrt(2.0 * (first + second) / sum(variances))
    return 1.0 - float(np.nan_to_num(nctdtr(2 * free, center, bar)).mean())


def seeds_needed(
    effect: float,
    deviations: Sequence[float],
    level: float = LEVEL,
    wanted: float = POWER,
    documents: ErrorTerm | None = None,
) -> int | None:
    """Return the least number of seeds per group with that power (see `power`); None above `MOST_SEEDS`."""
    return _least(lambda seeds: power(effect, seeds, deviations, level, documents) >= wanted)


def seeds_to_decide(
    difference: float,
    deviations: Sequence[float],
    margin: float = 0.0,
    level: float = 0.05,
    documents: ErrorTerm | None = None,
) -> int | None:
    """Return the least number of seeds per group that show where a true `difference` lies; None as for `seeds_needed`.

    Beyond the margin, `Estimate.p_beyond` must fall below `level`. Within it, `Estimate.p_within` must, by a bound that
    may ask for a seed too many (two tests fail together no more often than the sum of their failures). A difference of
    just the margin gives None too. `deviations` and `documents` as for `power`.
    """
    beyond = abs(difference) - margin
    if beyond >= 0:
        return seeds_needed(beyond, deviations, level / 2, documents=documents)
    sides = (margin - difference, margin + difference)
    return _least(lambda seeds: sum(power(side, seeds, deviations, level, documents) for side in sides) - 1.0 >= POWER)


def _least(enough: Callable[[int], bool]) -> int | None:
    """Return the least number from 2 to `MOST_SEEDS` that is enough, where all above it are; None if there is none."""
    high = 2
    while not enough(high):
        if high >= MOST_SEEDS:
            return None
        high *= 2
    least = high // 2 + 1 + bisect_left(range(high // 2 + 1, high), True, key=enough)
    return least if least <= MOST_SEEDS else None


def benjamini_hochberg(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p adjusted for the number of tests: the false discovery rate among those at or below it.

    None and NaN stay out of the count and come back as None. The tests may be independent or positively dependent.
    """
    from scipy.stats import false_discovery_control

    tested = [place for place, p in enumerate(p_values) if p is not None and not math.isnan(p)]
    adjusted: list[float | None] = [None] * len(p_values)
    for place, q in zip(tested, false_discovery_control([p_values[place] for place in tested]), strict=True):
        adjusted[place] = float(q)
    return adjusted


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return the correlation of the ranks of paired values, ties sharing theirs; None where either side is constant."""
    from scipy.stats import spearmanr

    return float(spearmanr(a, b).statistic) if _vary(a, b) else None


def kendall(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return Kendall's tau-b of paired values; None where either side is constant."""
    from scipy.stats import kendalltau

    return float(kendalltau(a, b).statistic) if _vary(a, b) else None


def _vary(a: Sequence[float], b: Sequence[float]) -> bool:
    """True if neither side is constant. Raises `ValueError` for sides of different lengths."""
    pairs = list(zip(a, b, strict=True))
    return min(len({x for x, _ in pairs}), len({y for _, y in pairs})) > 1


def order_agreement(a: Sequence[float], b: Sequence[float]) -> Proportion:
    """Count the pairs of positions in which `a` and `b` have the same order, of those that are tied in neither.

    The pairs are not independent, so the interval of the proportion means nothing.
    """
    from scipy.stats import rankdata

    ranks = map(rankdata, (a, b))  # which order infinities too
    return sign_agreement(*(np.subtract.outer(rank, rank)[np.triu_indices(len(rank), 1)] for rank in ranks))


def sign_agreement(a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray) -> Proportion:
    """Count the positions in which `a` and `b` have the same sign, of those where neither is zero."""
    products = np.sign(a) * np.sign(b)
    return Proportion(int((products > 0).sum()), int((products != 0).sum()))
