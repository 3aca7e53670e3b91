"""Student's and Welch's tests and adjusted p by their formulas, for what the package's own are held against."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from scipy.special import stdtr, stdtrit


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
