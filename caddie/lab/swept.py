"""Find the sweep in a study: labels that differ in one or two numbers, with their scores."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from caddie.lab.measured import Groups
from caddie.report.charts import is_finite

Changes = Mapping[str, float | None]
"""Path to the number that a label changes in the base; None for other values."""
FEWEST = 3
"""Fewest values of the first axis for a chart."""


def swept(study: Mapping[str, Any], groups: Groups) -> dict[str, Any] | None:
    """Return the scores over the one or two numbers in which most labels of a study differ, else None.

    Settings that change together are one axis. The axis with more values comes first; the other has a line for each of
    its values. Labels that change anything else are left out. The base's values are in the study's `base_values`.
    `groups` has the finished runs of each label. Only seeds that every point has are used, because scores of different
    seeds cannot be compared; if no seed is left, all are used.
    """
    changes = {label: _changes(study, label) for label in study["entries"]}
    chosen, axes = _chosen({label: found for label, found in changes.items() if None not in found.values()})
    done = {label: {row["seed"]: row["bits_per_byte"] for row in groups[label]} for label in chosen if groups[label]}
    if 2 * len(chosen) <= len(changes) or not axes or not done:
        return None
    base = {path: _number(text) for path, text in study.get("base_values", {}).items()}
    places = {label: [{**base, **changes[label]}.get(axis[0]) for axis in axes] for label in done}
    places = {label: place for label, place in places.items() if None not in place}
    if len({place[0] for place in places.values()}) < FEWEST:
        return None
    common = set.intersection(*(set(done[label]) for label in places))
    lines: dict[float | None, list[dict[str, Any]]] = {}
    for label, (value, *second) in sorted(places.items(), key=lambda item: item[1][::-1]):
        scores = [score for seed, score in done[label].items() if seed in common or not common]
        point = {"value": value, "label": label, "mean": fmean(scores), "low": min(scores), "high": max(scores)}
        lines.setdefault(second[0] if second else None, []).append(point)
    return {
        "axes": axes,
        "seeds": sorted(common),
        "lines": [
            {"value": value, "best": min(points, key=lambda one: one["mean"])["value"], "points": points}
            for value, points in lines.items()
        ],
        "left_out": [label for label in done if label not in places]
        + [label for label in changes if label not in chosen and groups[label]],
    }


def _changes(study: Mapping[str, Any], label: str) -> dict[str, float | None]:
    """Return the changes of a label to the base, through all its rivals."""
    entries = study["entries"]
    diffs: list[Mapping[str, str]] = []
    while entries[label]["against"] is not None and len(diffs) < len(entries):
        diffs.append(entries[label]["diff"])
        label = entries[label]["against"]
    base = study.get("base_values", {})
    changed = {path: text for diff in reversed(diffs) for path, text in diff.items()}
    return {path: _number(text) for path, text in changed.items() if text != base.get(path)}


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if is_finite(value) else None


def _chosen(changes: Mapping[str, Changes]) -> tuple[list[str], list[list[str]]]:
    """Return the labels that fit into two axes, and the axes; the largest groups of equal paths go first."""
    kinds: dict[frozenset[str], list[str]] = {}
    for label, found in changes.items():
        kinds.setdefault(frozenset(found), []).append(label)
    chosen: list[str] = []
    for kind in sorted(kinds.values(), key=len, reverse=True):
        if len(_axes([changes[label] for label in chosen + kind])) <= 2:
            chosen += kind
    axes = _axes([found for label, found in changes.items() if label in chosen])
    axes.sort(key=lambda axis: -len({changes[label].get(axis[0]) for label in chosen}))
    return chosen, axes


def _axes(changes: Sequence[Changes]) -> list[list[str]]:
    """Group the paths that change together: each value of one goes with one value of the other."""
    axes: list[list[str]] = []
    for path in dict.fromkeys(path for one in changes for path in one):
        pairs = [{(one.get(path), one.get(axis[0])) for one in changes} for axis in axes]
        for axis, both in zip(axes, pairs, strict=True):
            if len(both) == len({a for a, _ in both}) == len({b for _, b in both}):
                axis.append(path)
                break
        else:
            axes.append([path])
    return axes
