"""Judge scores of several seeds: a pair of groups, or the entries of a study against its base.

Entries are compared seed by seed with the base, or with another entry. Where paired runs kept the bits of each held-out
document, the verdict is about new seeds and new documents of the same source, else about new seeds alone.

A study has many entries, so some look better by chance alone. So p is adjusted over all entries, whatever their rivals
(Benjamini and Hochberg, see `caddie.lab.stats`). With q below the level, the expected share of wrong "better" and
"worse", wrong signs among them, is at most the level (Benjamini and Yekutieli, "False discovery rate-adjusted multiple
confidence intervals for selected parameters", J. American Statistical Association 100, 2005). That is proven for
independent entries. Entries here share a base, or are compared with one another; in simulation this causes no more
errors (docs/statistics.md).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Literal

import numpy as np
import numpy.typing as npt

from caddie.errors import UserError
from caddie.lab.stats import Estimate, benjamini_hochberg, document_part, paired, seeds_to_decide, welch

LEVEL = 0.05
"""Level of q at which an entry is called better, worse or the same."""
ROUNDING = 1e-12
"""Standard errors below this part of the scores come from rounding, not from seeds."""

Word = Literal["better", "worse", "same", "unclear"]
Test = Literal["paired", "welch", "documents"]
"""Tests: by seed; of separate groups; by seed and document."""


@dataclass(frozen=True)
class Documents:
    """Bits that runs of a label spent on each held-out document."""

    sizes: npt.NDArray[np.float64]
    """Bytes of each document, (documents,)."""
    bits: Mapping[int, npt.NDArray[np.float64]]
    """By seed, (documents,) each."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Standard errors of a difference, with and without pairing by common seeds and documents."""

    unpaired: float
    """Standard error if each label had seeds and documents of its own."""
    seeds: float
    """Part of the paired standard error that comes from the seeds."""
    documents: float | None
    """Part of the paired standard error that comes from the documents; None where their bits are not known."""

    @property
    def paired(self) -> float:
        """Standard error with common seeds and documents."""
        return math.hypot(self.seeds, self.documents or 0.0)

    def to_json(self) -> dict[str, float | None]:
        """Return all figures."""
        return {**vars(self), "paired": self.paired}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Difference of two groups of scores by seed, and its test."""

    seeds: tuple[int, ...]
    """Seeds that count: the paired ones, or all of the entry where the test is Welch's."""
    mean: float
    """Mean score of the entry over these seeds."""
    difference: float
    """Mean score of the entry minus that of its rival: negative is better."""
    test: Test | None = None
    estimate: Estimate | None = None
    """None where nothing can be tested; `reason` says why."""
    deviations: Sequence[float] = ()
    """Standard deviations: of the paired differences, or of both groups."""
    spread: Spread | None = None
    """None where nothing is paired."""
    reason: str = ""
    """Reason why nothing was tested; empty after a test."""
    equal: bool = False
    """True if both have the same score at every seed, to the last digit."""


def measure(
    base: Mapping[int, float],
    entry: Mapping[int, float],
    pairs: Sequence[int] = (),
    documents: tuple[Documents, Documents] | None = None,
) -> Difference:
    """Test the difference of two groups of scores by seed: paired over the seeds `pairs`, or by Welch without any.

    `documents` are those of base and entry. If both have bits of the same documents for all pairs, the error due to the
    choice of documents is added to that of the seeds (`document_part`).
    """
    seeds = tuple(pairs or sorted(entry))
    b, a = [entry[seed] for seed in seeds], [base[seed] for seed in pairs or sorted(base)]
    found = Difference(seeds=seeds, mean=fmean(b), difference=fmean(b) - fmean(a))
    if min(len(a), len(b)) < 2:
        return replace(found, reason="a test needs two seeds of the entry and two of the base")
    estimate = paired(b, a) if pairs else welch(b, a)
    if estimate.standard_error <= ROUNDING * max(map(abs, (*a, *b))):
        if pairs and a == b:
            return replace(found, difference=0.0, reason="without effect on the score, at any seed", equal=True)
        return replace(found, reason="nothing varies from seed to seed")
    deviations = [stdev(x - y for x, y in zip(b, a, strict=True))] if pairs else [stdev(b), stdev(a)]
    found = replace(found, difference=estimate.value, estimate=estimate, deviations=deviations)
    if not pairs:
        return replace(found, test="welch")
    alone, own = math.hypot(stdev(b), stdev(a)) / math.sqrt(len(pairs)), estimate.standard_error
    if documents is None or not _same_documents(documents, pairs):
        return replace(found, test="paired", spread=Spread(unpaired=alone, seeds=own, documents=None))
    sizes, of_base, of_entry = documents[0].sizes, *([one.bits[seed] for seed in pairs] for one in documents)
    differences = [y - x for x, y in zip(of_base, of_entry, strict=True)]
    part, *each = (document_part(sizes, bits) for bits in (differences, of_base, of_entry))
    unpaired = math.hypot(alone, *(one.standard_error for one in each if one))
    spread = Spread(unpaired=unpaired, seeds=own, documents=part.standard_error if part else 0.0)
    return replace(found, test="documents", estimate=replace(estimate, second=part), spread=spread)


def _same_documents(documents: tuple[Documents, Documents], seeds: Sequence[int]) -> bool:
    """True if both sides have the bits of the same documents for all seeds."""
    base, entry = documents
    known = all(set(seeds) <= one.bits.keys() for one in documents)
    return known and len(base.sizes) > 1 and np.array_equal(base.sizes, entry.sizes)


@dataclass(frozen=True, kw_only=True)
class Verdict(Difference):
    """Verdict on one entry: its difference from its rival. Values that its seeds cannot tell are None."""

    label: str
    interval: tuple[float, float] | None
    """Bounds of the difference with confidence 1 - level, for this entry alone."""
    p: float | None
    """Two-sided p of the difference lying beyond the margin (`Estimate.p_beyond`)."""
    q: float | None
    """p adjusted over the entries of the study."""
    q_same: float | None
    """Adjusted p of the difference lying within the margin (`Estimate.p_within`); None without a margin."""
    word: Word
    seeds_needed: int | None
    """Seeds that decide with 80 % power, by p of this entry alone, if difference and spread are as seen.

    None also where no number of seeds decides: the documents are too few for that difference.
    """


def judge(
    base: Mapping[int, float], entries: Mapping[str, Mapping[int, float]], *, margin: float = 0.0, level: float = LEVEL
) -> dict[str, Verdict]:
    """Return a verdict on each entry. `base` and the entries are bits per byte by seed.

    "better": q < level for a difference beyond `margin` (bits per byte) below the base; "worse": above it. p is tested
    against the margin, not against zero. As q is at least p, the interval then lies beyond the margin as a whole.
    "same": the margin is positive and q < level for a difference within it. Else "unclear", which is not "the same".

    The test is paired over the seeds that the base has too. Where these are fewer than two it is Welch's over all seeds
    (one that is shared makes it err to "unclear"). There is no test where a side has one seed, or where the difference
    is equal at every seed: another seed might change it, so the word is "unclear" and `reason` says why. No difference
    at all, to the last digit at two seeds or more, is "same": such a change does not reach the score.

    Raises `UserError` for a score that is not finite, no score at all, and a margin or level out of range.
    """
    _check("the base", base)
    return judge_pairs({label: (base, scores) for label, scores in entries.items()}, margin=margin, level=level)


def judge_pairs(
    pairs: Mapping[str, tuple[Mapping[int, float], Mapping[int, float]]],
    *,
    margin: float = 0.0,
    level: float = LEVEL,
    documents: Mapping[str, tuple[Documents, Documents]] | None = None,
) -> dict[str, Verdict]:
    """Judge entries that each have a rival of their own: label to the rival's scores and the entry's.

    `documents` are those of rival and entry, by label, where they are known (`measure`). p is adjusted over all entries
    together, so many rivals make no more false findings.
    """
    if not 0 <= margin < math.inf:
        raise UserError(f"the margin must be a finite number of bits per byte from 0 up, not {margin}")
    if not 0 < level < 0.5:
        raise UserError(f"the level must lie between 0 and 0.5, not {level}")
    for label, (rival, scores) in pairs.items():
        _check(f"what {label} is compared with", rival)
        _check(label, scores)
    known = documents or {}
    found = {
        label: measure(rival, scores, _paired_seeds(rival, scores), known.get(label))
        for label, (rival, scores) in pairs.items()
    }
    estimates = [one.estimate for one in found.values()]
    p = [estimate.p_beyond(margin) if estimate else None for estimate in estimates]
    q = benjamini_hochberg(p)
    q_same = benjamini_hochberg([estimate.p_within(margin) if estimate and margin else None for estimate in estimates])
    return {
        label: Verdict(
            **vars(one),
            label=label,
            interval=one.estimate.interval(1.0 - level) if one.estimate else None,
            p=p[place],
            q=q[place],
            q_same=q_same[place],
            word="same" if one.equal else _word(one.difference, q[place], q_same[place], level),
            seeds_needed=seeds_to_decide(one.difference, one.deviations, margin, level, one.estimate.second)
            if one.estimate
            else None,
        )
        for place, (label, one) in enumerate(found.items())
    }


def _paired_seeds(base: Mapping[int, float], entry: Mapping[int, float]) -> Sequence[int]:
    """Return the seeds that both have, unless it is a single one and Welch's test can use more."""
    common = sorted(base.keys() & entry.keys())
    return () if len(common) == 1 < min(len(base), len(entry)) else common


def _word(difference: float, q: float | None, q_same: float | None, level: float) -> Word:
    """Return the word for a difference (negative is better); q and q_same are never both below the level."""
    if q is not None and q < level:
        return "better" if difference < 0 else "worse"
    return "same" if q_same is not None and q_same < level else "unclear"


def cost(seconds_per_run: float, gpus: int, price_per_gpu_hour: float) -> float:
    """Return the price of a run, without the time to start a machine or to load data."""
    if not (0 <= seconds_per_run < math.inf and gpus >= 1 and 0 <= price_per_gpu_hour < math.inf):
        raise UserError(
            "a cost needs seconds and a price per GPU and hour from 0 up and at least one GPU, "
            f"not {seconds_per_run} s, {price_per_gpu_hour} and {gpus}"
        )
    return seconds_per_run / 3600 * gpus * price_per_gpu_hour


def _check(name: str, scores: Mapping[int, float]) -> None:
    if not scores:
        raise UserError(f"{name} has no finished run; leave it out")
    for seed, score in scores.items():
        if not math.isfinite(score):
            raise UserError(f"seed {seed} of {name} has no finite score; leave it out, it counts as failed")
