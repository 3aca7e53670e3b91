"""Tests, adjusted p, ranks and intervals of shares by their formulas, against which those of the package are held."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

import numpy as np
from scipy.special import betaincinv, stdtr, stdtrit


def two_sided(differences: Sequence[float], margin: float = 0.0) -> float:
    """p that the mean of the differences is no further from zero than the margin."""
    t = (abs(fmean(differences)) - margin) / (stdev(differences) / len(differences) ** 0.5)
    return float(2 * stdtr(len(differences) - 1, -t))


def welch(a: Sequence[float], b: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Two-sided p that both means are equal, and the interval of 95 % of the first's less the second's."""
    parts = [stdev(values) ** 2 / len(values) for values in (a, b)]
    degrees = sum(parts) ** 2 / sum(part**2 / (len(values) - 1) for part, values in zip(parts, (a, b), strict=True))
    difference, error = fmean(a) - fmean(b), sum(parts) ** 0.5
    half = float(stdtrit(degrees, 0.975)) * error
    return float(2 * stdtr(degrees, -abs(difference) / error)), (difference - half, difference + half)


def adjusted(p: Sequence[float]) -> list[float]:
    """Each p times their number by its rank from below, no larger than that of a larger p (Benjamini-Hochberg)."""
    ordered = sorted(p)
    scaled = [value * len(p) / rank for rank, value in enumerate(ordered, 1)]
    return [min(1.0, *scaled[ordered.index(value) :]) for value in p]


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Daniels's coefficient (Biometrika 33, 1944) of the differences of ranks."""
    return _daniels(_rank_steps(a), _rank_steps(b))


def kendall(a: Sequence[float], b: Sequence[float]) -> float:
    """The same of their signs."""
    return _daniels(np.sign(_rank_steps(a)), np.sign(_rank_steps(b)))


def _rank_steps(values: Sequence[float]) -> np.ndarray:
    """(n, n): by how many ranks each of n values is above each other."""
    _, place, count = np.unique(np.array(values, dtype=np.float64), return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2)[place]
    return rank[:, None] - rank


def _daniels(a: np.ndarray, b: np.ndarray) -> float:
    return float((a * b).sum()) / math.sqrt(float((a * a).sum()) * float((b * b).sum()))


def exact_interval(count: int, of: int, confidence: float) -> tuple[float, float]:
    """Bounds of a share by quantiles of the beta distribution (Clopper and Pearson)."""
    tail, missed = (1.0 - confidence) / 2, of - count
    low = float(betaincinv(count, missed + 1, tail)) if count else 0.0
    high = float(betaincinv(count + 1, missed, 1.0 - tail)) if missed else 1.0
    return low, high
