"""Agreement of ranks: early losses with final ones, small runs with large ones, and our scores with public ones.

Stopping the worse half of the runs early is successive halving (Jamieson and Talwalkar, "Non-stochastic best arm
identification and hyperparameter optimization", AISTATS 2016).
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

import numpy as np

from caddie.errors import UserError
from caddie.lab.measured import Groups
from caddie.lab.stats import Proportion, kendall, order_agreement, sign_agreement, spearman
from caddie.report.charts import is_finite

Curve = Sequence[tuple[float, float]]
"""(progress from 0 to 1, loss) of one run, in order of progress.

The last point is the final loss. Only this one may have another unit, such as bits per byte of the artifact, because
early and final losses are ranked separately.
"""

EARLY = (0.1, 0.25, 0.5, 0.75)
"""Progress at which ranks are compared with the final ones."""
FEWEST = 4
"""Fewest labels with a public score; the ranks of three correlate by chance."""
DRAWS, LEVEL = 500, 0.05
"""Bootstrap samples, and the part of them outside the interval."""

Judged = Mapping[str, Mapping[str, Any]]
"""Label to verdict, with `difference` and `word`, as in `caddie.lab.findings`."""


def early_agreement(*groups: Mapping[str, Curve], at: Sequence[float] = EARLY) -> list[dict[str, Any]]:
    """Compare the ranks by loss at each `progress` of `at` with the final ones.

    A group maps label to curve for runs that compete: those of one seed of a study. An early loss is the last one at or
    before that progress. Each row has `spearman`, the rank correlation of early and final loss, a mean over the groups,
    None where the losses do not vary; `order_held`, the share of pairs of runs in a group that ended in their early
    order; and `best_kept`, the share of groups whose best run was early in the better half (the larger one, if the
    number of runs is odd). Raises `UserError` for a progress before the first loss of a run, and for a group of fewer
    than two runs.
    """
    rows = []
    for progress in at:
        losses = [_losses(group, progress) for group in groups]
        ranks = [found for early, final in losses if (found := spearman(early, final)) is not None]
        orders = [order_agreement(early, final) for early, final in losses]
        rows.append(
            {
                "progress": progress,
                "spearman": fmean(ranks) if ranks else None,
                "order_held": Proportion(sum(one.count for one in orders), sum(one.of for one in orders)).value,
                "best_kept": Proportion(sum(_regret(*pair) <= 0 for pair in losses), len(losses)),
            }
        )
    return rows


def safe_stop(*groups: Mapping[str, Curve], regret: float = 0.0) -> float:
    """Return the earliest progress, in hundredths, from which on it was safe to stop the worse half.

    Safe: in every group (see `early_agreement`) the better half held a run whose final loss is within `regret` of the
    best, at this and at all later hundredths, so one lucky moment does not count. The value fits these runs; for others
    it is more likely too early than too late. 1 if stopping was never safe.
    """
    first = max((curve[0][0] for group in groups for curve in group.values() if curve), default=1.0)
    earliest = 1.0
    for progress in (hundredth / 100 for hundredth in range(99, 0, -1)):
        if progress < first or not all(_regret(*_losses(group, progress)) <= regret for group in groups):
            break
        earliest = progress
    return earliest


def transfer(small: Judged, large: Judged, kinds: Mapping[str, str]) -> list[dict[str, Any]]:
    """Compare differences from the base at a small scale with those at a large one, by kind of change.

    `kinds` names the kind of each label. An entry without a verdict at both scales is left out. A kind has `labels`;
    `signs`, how many differences have the same sign at both scales; `decided`, the same among entries that are better
    or worse at both, because noise alone can flip the other signs; and the rank correlations of the differences, None
    where they do not vary. The intervals of the shares are exact for independent entries. They are too narrow for
    entries that share a base, whose noise flips their signs together. Raises `UserError` for an entry without a kind.
    """
    labels: dict[str, list[str]] = {}
    for label in small:
        if label not in large:
            continue
        if label not in kinds:
            raise UserError(f"{label} has no kind of change; name one")
        labels.setdefault(kinds[label], []).append(label)

    def differences(of: Sequence[str]) -> list[list[float]]:
        return [[scale[label]["difference"] for label in of] for scale in (small, large)]

    found = []
    for kind, group in labels.items():
        decided = [label for label in group if {small[label]["word"], large[label]["word"]} <= {"better", "worse"}]
        a, b = differences(group)
        shares = {"signs": sign_agreement(a, b), "decided": sign_agreement(*differences(decided))}
        found.append(
            {
                "kind": kind,
                "labels": group,
                **{name: {**vars(share), "interval": list(share.interval())} for name, share in shares.items()},
                "spearman": spearman(a, b),
                "kendall": kendall(a, b),
            }
        )
    return found


def public_order(study: Mapping[str, Any], groups: Groups) -> dict[str, Any] | None:
    """Return rank correlations with the public scores, and the steps from label to label, best public score last.

    None for fewer than four labels. The intervals are percentiles of a bootstrap that draws labels, and seeds of each,
    with replacement (Efron and Tibshirani, "An introduction to the bootstrap", 1993): they hold for similar labels with
    other seeds. A step's `order` is "broken" if the public score falls and ours rises, and "not told apart" if our step
    is smaller than the larger standard deviation over seeds of its two labels. `unpacked` has the correlations of our
    scores minus the quantization gap, and `packing` is the change of the gap in a step; both are None where a gap was
    not measured. `groups` has the finished runs of each label.
    """
    public = {label: entry.get("public_score") for label, entry in study["entries"].items()}
    labels = [label for label, score in public.items() if score is not None and groups.get(label)]
    if len(labels) < FEWEST:
        return None
    labels.sort(key=lambda label: -public[label])
    ours = {label: [row["bits_per_byte"] for row in groups[label]] for label in labels}
    theirs, means = [public[label] for label in labels], [fmean(ours[label]) for label in labels]
    gaps = [
        fmean(math.nan if (gap := row.get("quantization_loss")) is None else gap for row in groups[label])
        for label in labels
    ]
    unpacked = [mean - gap for mean, gap in zip(means, gaps, strict=True)]
    whole = all(map(is_finite, unpacked))
    return {
        "labels": labels,
        "seeds": min(map(len, ours.values())),
        "spearman": spearman(theirs, means),
        "kendall": kendall(theirs, means),
        **_intervals(theirs, list(ours.values())),
        "unpacked": {"spearman": spearman(theirs, unpacked), "kendall": kendall(theirs, unpacked)} if whole else None,
        "steps": [
            {
                "from": labels[a],
                "to": labels[b],
                "public": theirs[b] - theirs[a],
                "ours": means[b] - means[a],
                "packing": gap if is_finite(gap := gaps[b] - gaps[a]) else None,
                "order": _order(theirs[b] - theirs[a], ours[labels[a]], ours[labels[b]]),
            }
            for a, b in pairwise(range(len(labels)))
        ],
    }


def _order(public: float, before: Sequence[float], after: Sequence[float]) -> str:
    """Return the `order` of a step, from its public difference and our scores of both labels, one per seed."""
    step = fmean(after) - fmean(before)
    if abs(step) < max((stdev(scores) for scores in (before, after) if len(scores) > 1), default=0.0):
        return "not told apart"
    return "broken" if public < 0 < step else "kept"


def _losses(group: Mapping[str, Curve], progress: float) -> tuple[list[float], list[float]]:
    """Return early and final losses of a group; NaN ranks as the worst."""
    if len(group) < 2:
        raise UserError(f"ranks need at least two finished runs in a group, not {len(group)}")
    early, final = list[float](), list[float]()
    for label, curve in group.items():
        known = bisect_right(curve, progress, key=lambda point: point[0])
        if not known:
            raise UserError(f"{label} has no loss by progress {progress:g}; ask for a later one or leave it out")
        for losses, (_, loss) in ((early, curve[known - 1]), (final, curve[-1])):
            losses.append(math.inf if math.isnan(loss) else loss)
    return early, final


def _regret(early: Sequence[float], final: Sequence[float]) -> float:
    """Return the final loss of the best run in the early better half, minus the best of all; ties go by order."""
    better = sorted(range(len(early)), key=early.__getitem__)[: (len(early) + 1) // 2]
    kept, best = min(final[place] for place in better), min(final)
    return 0.0 if kept == best else kept - best


def _intervals(theirs: Sequence[float], ours: Sequence[Sequence[float]]) -> dict[str, list[float] | None]:
    """Return the interval of each correlation; None where all are tied.

    Also None where it would have no width: any sample of labels in perfect order is in perfect order, however small.
    """
    chance, samples = np.random.default_rng(0), []
    for _ in range(DRAWS):
        drawn = chance.integers(len(ours), size=len(ours))
        means = [fmean(chance.choice(ours[one], size=len(ours[one]))) for one in drawn]
        samples.append(([theirs[one] for one in drawn], means))
    found: dict[str, list[float] | None] = {}
    for name, measure in (("spearman_interval", spearman), ("kendall_interval", kendall)):
        values = [value for sample in samples if (value := measure(*sample)) is not None]
        low, high = np.quantile(values, [LEVEL / 2, 1 - LEVEL / 2]).tolist() if values else (0.0, 0.0)
        found[name] = [low, high] if high - low > 1e-9 else None
    return found
