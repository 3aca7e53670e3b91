"""What follows from the runs of a study: which entries are better than its base, which are worse, which are the same.

Every entry is compared seed by seed with the base, or with another entry. A study has many entries, so some look better
by chance alone; p is adjusted over all of them (Benjamini and Hochberg, see `caddie.lab.stats`), whatever each is
compared with, and with q below the level the expected share of wrong "better" and "worse", wrong signs among them, is
at most the level (Benjamini and Yekutieli, "False discovery rate-adjusted multiple confidence intervals for selected
parameters", J. American Statistical Association 100, 2005). That is proven for independent entries. These share a base,
or are one another's; simulation finds no more errors for it (docs/statistics.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from caddie.errors import UserError
from caddie.lab.stats import Estimate, Word, benjamini_hochberg, paired, seeds_to_decide, verdict, welch

LEVEL = 0.05
"""The q below which an entry is called better, worse or the same."""
ROUNDING = 1e-12
"""A standard error below this part of the scores is that of their last digits, and tells nothing of a seed."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is known of one entry; None stands for what its seeds cannot tell."""

    label: str
    seeds: tuple[int, ...]
    """Those that count: the ones that the base has too, or all its own where the test is Welch's."""
    mean: float
    """Bits per byte, over these seeds."""
    deviation: float | None
    """Standard deviation over these seeds."""
    difference: float
    """Bits per byte above what it is compared with, over these seeds; negative is better."""
    interval: tuple[float, float] | None
    """Bounds of the difference with confidence 1 - level, for this entry alone."""
    test: Literal["paired", "welch"] | None
    p: float | None
    """Two-sided, of the difference lying beyond the margin (`Estimate.p_beyond`)."""
    q: float | None
    """p adjusted over the entries of the study."""
    q_same: float | None
    """The like of q for the difference lying within the margin (`Estimate.p_within`); None without a margin."""
    word: Word
    reason: str
    """Why nothing was tested; empty where something was."""
    seeds_needed: int | None
    """How many seeds decide, with 80 % power and p of this entry alone, if difference and spread are as seen."""


def judge(
    base: Mapping[int, float],
    entries: Mapping[str, Mapping[int, float]],
    *,
    margin: float = 0.0,
    level: float = LEVEL,
) -> dict[str, Verdict]:
    """A verdict on each entry: what `base` and the entries hold is bits per byte by seed.

    "better": q < level for a difference beyond `margin` (bits per byte) below the base; "worse": above it. p is tested
    against the margin, not against zero. As q is at least p, the interval then lies beyond the margin as a whole.
    "same": the margin is positive and q < level for a difference within it. Else "unclear", which is not "the same".

    The test is paired over the seeds that the base has too. Where these are fewer than two it is Welch's over all seeds
    (one that is shared makes it err to "unclear"), and where a side has but one there is none. Nor is there one where
    the difference is alike at every seed: a fact of those runs, but what another seed would do to it is not known, so
    it is "unclear" and `reason` says why. Only no difference at all, to the last digit at two seeds or more, is "same":
    such a change does not reach the score.

    Raises `UserError` for a score that is not finite, no score at all, and a margin or level out of range.
    """
    _check("the base", base)
    return judge_pairs({label: (base, scores) for label, scores in entries.items()}, margin=margin, level=level)


def judge_pairs(
    pairs: Mapping[str, tuple[Mapping[int, float], Mapping[int, float]]],
    *,
    margin: float = 0.0,
    level: float = LEVEL,
) -> dict[str, Verdict]:
    """`judge` where each entry has a rival of its own: label to the rival's scores and the entry's.

    p is adjusted over all of them together, so that a study makes no more false findings for having many rivals.
    """
    if not 0 <= margin < math.inf:
        raise UserError(f"the margin must be a finite number of bits per byte from 0 up, not {margin}")
    if not 0 < level < 0.5:
        raise UserError(f"the level must lie between 0 and 0.5, not {level}")
    for label, (rival, scores) in pairs.items():
        _check(f"what {label} is compared with", rival)
        _check(label, scores)
    found = {label: _measure(rival, scores) for label, (rival, scores) in pairs.items()}
    tested = [difference.tested for difference in found.values()]
    p = [estimate.p_beyond(margin) if estimate else None for estimate in tested]
    q = benjamini_hochberg(p)
    q_same = benjamini_hochberg([estimate.p_within(margin) if estimate and margin else None for estimate in tested])
    return {
        label: Verdict(
            label=label,
            seeds=one.seeds,
            mean=fmean(one.scores),
            deviation=stdev(one.scores) if len(one.scores) > 1 else None,
            difference=one.value,
            interval=one.tested.interval(1.0 - level) if one.tested else None,
            test=one.test,
            p=p[place],
            q=q[place],
            q_same=q_same[place],
            word="same" if one.equal else verdict(one.value, q[place], q_same[place], level),
            reason=one.reason,
            seeds_needed=seeds_to_decide(one.value, one.deviations, margin, level) if one.tested else None,
        )
        for place, (label, one) in enumerate(found.items())
    }


def cost(seconds_per_run: float, gpus: int, price_per_gpu_hour: float) -> float:
    """What a run costs, in the money of the price; time to start a machine or to load data is not in it."""
    if not (0 <= seconds_per_run < math.inf and gpus >= 1 and 0 <= price_per_gpu_hour < math.inf):
        raise UserError(
            "a cost needs seconds and a price per GPU and hour from 0 up and at least one GPU, "
            f"not {seconds_per_run} s, {price_per_gpu_hour} and {gpus}"
        )
    return seconds_per_run / 3600 * gpus * price_per_gpu_hour


@dataclass(frozen=True)
class _Difference:
    """An entry against its rival, before anything is asked of it."""

    seeds: tuple[int, ...]
    scores: Sequence[float]
    value: float
    reason: str
    test: Literal["paired", "welch"] | None = None
    tested: Estimate | None = None
    deviations: Sequence[float] = ()
    equal: bool = False
    """Whether both have the same score at every seed, to the last digit."""


def _measure(base: Mapping[int, float], entry: Mapping[int, float]) -> _Difference:
    common = sorted(base.keys() & entry.keys())
    if len(common) == 1 < min(len(base), len(entry)):
        common = []
    seeds = tuple(common or sorted(entry))
    b = [entry[seed] for seed in seeds]
    a = [base[seed] for seed in common] or list(base.values())
    value = fmean(b) - fmean(a)
    if min(len(a), len(b)) < 2:
        return _Difference(seeds, b, value, "a test needs two seeds of the entry and two of the base")
    estimate = paired(b, a) if common else welch(b, a)
    if estimate.standard_error <= ROUNDING * max(map(abs, (*a, *b))):
        if common and a == b:
            return _Difference(seeds, b, 0.0, "without effect on the score, at any seed", equal=True)
        return _Difference(seeds, b, value, "nothing varies from seed to seed")
    deviations = [stdev(x - y for x, y in zip(b, a, strict=True))] if common else [stdev(b), stdev(a)]
    return _Difference(seeds, b, estimate.value, "", "paired" if common else "welch", estimate, deviations)


def _check(name: str, scores: Mapping[int, float]) -> None:
    if not scores:
        raise UserError(f"{name} has no finished run; leave it out")
    for seed, score in scores.items():
        if not math.isfinite(score):
            raise UserError(f"seed {seed} of {name} has no finite score; leave it out, it counts as failed")
