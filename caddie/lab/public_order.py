"""Compare the order of a study's labels with that of their public scores: rank correlations, and where it breaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from caddie.lab.stats import kendall, spearman

FEWEST = 4
"""Fewest labels with a public score; the ranks of three correlate by chance."""
DRAWS, LEVEL = 500, 0.05
"""Bootstrap samples, and the part of them outside the interval."""


def public_order(study: Mapping[str, Any], groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any] | None:
    """Return correlations of ranks and the steps from label to label, best public score last; None for fewer than four.

    The intervals are percentiles of a bootstrap that draws labels, and for each of them seeds, with replacement (Efron
    and Tibshirani, "An introduction to the bootstrap", 1993): those of other labels of the kind, run with other seeds.
    A step breaks the order where the public score falls and ours rises. `groups` has the finished runs of each label.
    """
    public = {label: entry.get("public_score") for label, entry in study["entries"].items()}
    labels = [label for label, score in public.items() if score is not None and groups.get(label)]
    if len(labels) < FEWEST:
        return None
    labels.sort(key=lambda label: -public[label])
    ours = {label: [row["bits_per_byte"] for row in groups[label]] for label in labels}
    theirs, means = [public[label] for label in labels], [fmean(ours[label]) for label in labels]
    return {
        "labels": labels,
        "seeds": min(map(len, ours.values())),
        "spearman": spearman(theirs, means),
        "kendall": kendall(theirs, means),
        **_intervals(theirs, list(ours.values())),
        "steps": [
            {
                "from": labels[a],
                "to": labels[b],
                "public": theirs[b] - theirs[a],
                "ours": means[b] - means[a],
                "breaks": theirs[b] < theirs[a] and means[b] > means[a],
            }
            for a, b in pairwise(range(len(labels)))
        ],
    }


def _intervals(theirs: Sequence[float], ours: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """Return the interval of each correlation."""
    chance = np.random.default_rng(0)
    found: dict[str, list[float]] = {"spearman_interval": [], "kendall_interval": []}
    for _ in range(DRAWS):
        drawn = chance.integers(len(ours), size=len(ours))
        means = [fmean(chance.choice(ours[one], size=len(ours[one]))) for one in drawn]
        public = [theirs[one] for one in drawn]
        for name, measure in (("spearman_interval", spearman), ("kendall_interval", kendall)):
            if (value := measure(public, means)) is not None:
                found[name].append(value)
    ends = [100 * LEVEL / 2, 100 - 100 * LEVEL / 2]
    return {name: np.percentile(values, ends).tolist() for name, values in found.items()}
