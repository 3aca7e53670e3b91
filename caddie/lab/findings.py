"""Findings of a study as plain data: verdicts, ranks, the frontier of size and score, curves and notes.

It takes a study's description (`Study.to_json`, kept as `study.json`) and one row per run, not the study's own code, so
what was measured long ago can still be read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any

import numpy as np

from caddie.lab.agreement import Curve, early_agreement, public_order, safe_stop
from caddie.lab.swept import swept
from caddie.lab.verdicts import LEVEL, Documents, cost, judge_pairs
from caddie.report.charts import is_finite, smooth
from caddie.report.verification import passed

Row = Mapping[str, Any]
"""One run, as a line of `results.jsonl`."""
POINTS = 60
"""Points of a curve that is the mean over seeds."""
EARLY = (0.1, 0.25, 0.5, 0.75)
"""Progress at which ranks are compared with the final ones."""
ALONE = 0.9
"""Least share of its threads' time of a run that was alone on the machine."""
STEADY = 1.1
"""Largest ratio of the speeds of two seeds on an undisturbed machine."""
WORDS = ("better", "worse", "same", "unclear")
_SURROUNDINGS = {
    "device": "device",
    "precision": "number format",
    "threads": "number of threads",
    "workers": "number of runs at once",
    "world": "number of processes",
    "code": "version of the code",
    "program_sha256": "program",
    "scorer_sha256": "scorer",
}
_TEXTS = {"validation_documents": "held-out text", "train_documents": "training text", "tokenizer": "tokenizer"}


def findings(described: Mapping[str, Any], rows: Sequence[Row], price: float | None = None) -> dict[str, Any]:
    """Return everything that a study's report shows, as JSON values. None stands for unknown values.

    `price` is the money for an hour of one GPU, or of the machine where there is none. Rows of labels that the study
    does not have are left out, and of two rows with one label and seed the later one counts.
    """
    study = _study(described)
    known = {(row.get("label"), row.get("seed")): row for row in rows if row.get("label") in study["entries"]}
    kept = list(known.values())
    done = [row for row in kept if _scored(row)]
    groups = {label: [row for row in done if row["label"] == label] for label in study["entries"]}
    verdicts = _verdicts(study, groups, price)
    board = sorted((_standing(label, group) for label, group in groups.items() if group), key=lambda one: one["mean"])
    valid = [one for one in board if False not in (one["verified"], one["under_cap"])]
    places = [(one["artifact_bytes"], one["mean"]) for one in valid if one["artifact_bytes"] is not None]
    for one in valid:  # the Pareto frontier of size and score
        size, score = place = one["artifact_bytes"], one["mean"]
        one["frontier"] = place in places and not any(s <= size and m <= score and (s, m) != place for s, m in places)
    return {
        "study": study,
        "level": LEVEL,
        "found": _found(study, verdicts, groups),
        "counts": {word: sum(one["word"] == word for one in verdicts) for word in WORDS},
        "verdicts": verdicts,
        "swept": swept(study, groups),
        "public_order": public_order(study, groups),
        "board": board,
        "curves": {
            axis: {label: curve for label, group in groups.items() if (curve := _mean_curve(group, place))}
            for place, axis in enumerate(("steps", "seconds"))
        },
        "early": _early(groups),
        "failed": _failures(kept),
        "notes": _notes(study, rows, done, groups),
        "cost": _costs(done, price),
        "measured": [*_measured(study, done), *_pairing(verdicts)],
    }


def _study(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description with its entries by label, the base first, and the budget in words."""
    base = {"label": described.get("label", "base"), "against": None, "kind": "", "why": "", "claim": None, "diff": {}}
    public = described.get("public") or []
    first = [one["bits_per_byte"] for one in public if one.get("source") == public[0].get("source")]
    base["public_score"] = fmean(first) if first and all(map(is_finite, first)) else None
    amount = re.fullmatch(r"\w+\(\w+=([\d.e+]+)\)", described["budget"])
    words = f"{float(amount[1]):,.10g} {described['equal']} each" if amount else f"{described['budget']} budget"
    words = f"{described['fraction']:g} of {words}" if described.get("fraction", 1) != 1 else words
    entries = {entry["label"]: entry for entry in [base, *described["entries"]]}
    times = described.get("step_times") or {}
    return {**described, "label": base["label"], "budget": words, "entries": entries, "step_times": times}


def _scored(row: Row) -> bool:
    return row.get("state") == "finished" and is_finite(row.get("bits_per_byte"))


def _verdicts(
    study: Mapping[str, Any], groups: Mapping[str, Sequence[Row]], price: float | None
) -> list[dict[str, Any]]:
    """Return a verdict for each entry that has a finished run, best first; entries without a rival come last."""
    scores = {label: {row["seed"]: row["bits_per_byte"] for row in group} for label, group in groups.items() if group}
    against = {label: entry["against"] for label, entry in study["entries"].items() if entry["against"] is not None}
    pairs = {label: rival for label, rival in against.items() if {label, rival} <= scores.keys()}
    judged = judge_pairs(
        {label: (scores[rival], scores[label]) for label, rival in pairs.items()},
        margin=study["margin"],
        documents={label: both for label, rival in pairs.items() if (both := _documents(groups[rival], groups[label]))},
    )
    found = []
    for label, rival in against.items():
        if label not in scores:
            continue
        entry, verdict, claim = study["entries"][label], judged.get(label), study["entries"][label]["claim"]
        word = verdict.word if verdict else "unclear"
        agrees = "open" if word == "unclear" else "agrees" if claim and word == claim["word"] else "disagrees"
        tested = ("difference", "interval", "test", "p", "q", "q_same", "seeds_needed")
        found.append(
            {
                "label": label,
                **{name: entry[name] for name in ("kind", "why", "against", "claim", "diff")},
                "seeds": list(verdict.seeds) if verdict else sorted(scores[label]),
                "mean": verdict.mean if verdict else fmean(scores[label].values()),
                **{name: getattr(verdict, name, None) for name in tested},
                "spread": verdict.spread.to_json() if verdict and verdict.spread else None,
                "word": word,
                "reason": verdict.reason if verdict else f"{rival} has no finished run",
                "agrees": agrees if claim else None,
                **_valid(groups[label]),
                "bytes": _more_bytes(groups[label], groups[rival]),
                "seconds": fmean(map(_seconds, groups[label])),
                "money": None if price is None else fmean(_money(row, price, _seconds(row)) for row in groups[label]),
            }
        )
    return sorted(found, key=lambda one: math.inf if one["difference"] is None else one["difference"])


def _documents(*sides: Sequence[Row]) -> tuple[Documents, Documents] | None:
    """Return the bits of each document, by seed, of rival and entry; None unless all were scored on one text."""
    known = [[(row["seed"], *row["documents"]) for row in rows if row.get("documents")] for rows in sides]
    every = [sizes for side in known for _, sizes, _ in side]
    texts = {(row.get("sha256") or {}).get("validation_documents") for rows in sides for row in rows}
    if not all(known) or len(texts) > 1 or any(sizes != every[0] for sizes in every):
        return None
    rival, entry = (Documents(np.array(every[0]), {seed: np.array(bits) for seed, _, bits in side}) for side in known)
    return rival, entry


def _more_bytes(group: Sequence[Row], rival: Sequence[Row]) -> float | None:
    """Return bytes of the artifact above the rival's: means over common seeds, or over all if there are none."""
    sizes, others = (
        {row["seed"]: row["artifact_bytes"] for row in rows if is_finite(row.get("artifact_bytes"))}
        for rows in (group, rival)
    )
    if not (sizes and others):
        return None
    common = sizes.keys() & others.keys()
    return fmean(sizes[seed] for seed in common or sizes) - fmean(others[seed] for seed in common or others)


def _found(study: Mapping[str, Any], verdicts: Sequence[Mapping[str, Any]], groups: Mapping[str, Sequence[Row]]) -> str:
    counts = [f"{sum(one['word'] == word for one in verdicts)} {word}" for word in WORDS]
    without = sum(not group for label, group in groups.items() if study["entries"][label]["against"] is not None)
    counts += [f"{without} without a finished run"] if without else []
    entries, claims = len(study["entries"]) - 1, [one["agrees"] for one in verdicts if one["agrees"]]
    sentence = f"Of {entries} {'entry' if entries == 1 else 'entries'}: {', '.join(counts)}."
    if not claims:
        return sentence
    agree, disagree, undecided = (claims.count(word) for word in ("agrees", "disagrees", "open"))
    one_or_more = "claim" if len(claims) == 1 else "claims"
    return f"{sentence} Of {len(claims)} {one_or_more}: {agree} true here, {disagree} not, {undecided} undecided."


def _pairing(verdicts: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the line on what pairing does to the standard errors of the differences, by the median of each."""
    spreads = [one["spread"] for one in verdicts if one["spread"]]
    lines = []
    for way, group in (
        ("seed", [one for one in spreads if one["documents"] is None]),
        ("seed and document", [one for one in spreads if one["documents"] is not None]),
    ):
        if group:
            names = ("unpaired", "paired", *(["seeds", "documents"] if way != "seed" else []))
            figures = ", ".join(f"{name} {median(one[name] for one in group):.4f}" for name in names)
            lines.append((f"Standard error by {way}, median", figures))
    return lines


def _standing(label: str, group: Sequence[Row]) -> dict[str, Any]:
    """Return a label's row of the leaderboard: means over its seeds."""
    scores = [row["bits_per_byte"] for row in group]
    means = ("artifact_bytes", "parameters", "steps", "tokens", "tokens_per_second", "train_seconds", "total_seconds")
    stages = ("trained", "averaged", "packed", "quantization_loss", "holdout")
    return {
        "label": label,
        "seeds": {str(row["seed"]): row["bits_per_byte"] for row in group},
        "mean": fmean(scores),
        "deviation": stdev(scores) if len(scores) > 1 else None,
        **{name: _mean(row.get(name) for row in group) for name in (*means, *stages)},
        **_valid(group),
        "frontier": False,
    }


def _valid(group: Sequence[Row]) -> dict[str, bool | None]:
    """Return `verified` and `under_cap` of a label: False if an artifact of it is not, None if that is not known."""
    return {name: passed(row.get(name) for row in group) for name in ("verified", "under_cap")}


def _mean(values: Iterable[Any]) -> float | None:
    known = [value for value in values if is_finite(value)]
    return fmean(known) if known else None


def _points(row: Row, axis: int) -> list[tuple[float, float]]:
    """Return a run's training loss in bits per byte, against steps (`axis` 0) or seconds (1)."""
    return [(point[axis], point[3]) for point in row.get("curve") or [] if all(map(is_finite, point[:4]))]


def _mean_curve(group: Sequence[Row], place: int) -> list[tuple[float, float, float, float]]:
    """Return mean, lowest and highest over seeds at even spacing up to where all runs got, lightly smoothed."""
    curves = [points for row in group if len(points := _points(row, place)) > 1]
    if not curves:
        return []
    begin, end = max(points[0][0] for points in curves), min(points[-1][0] for points in curves)
    if not end > begin:
        return []
    places = np.linspace(begin, end, POINTS)
    each = np.array([np.interp(places, [x for x, _ in points], [y for _, y in points]) for points in curves])
    lines = [smooth(line.tolist(), 2, range(POINTS)) for line in (each.mean(0), each.min(0), each.max(0))]
    return list(zip(places.tolist(), *lines, strict=True))


def _early(groups: Mapping[str, Sequence[Row]]) -> dict[str, Any] | None:
    """Compare early ranks with final ones among the runs of each seed; None if there is nothing to rank.

    Early is the training loss by then, final the score of the artifact; a training that several share counts once.
    """
    seeds: dict[int, dict[str, Curve]] = {}
    for label, group in groups.items():
        for row in group:
            points = _points(row, 0) if row.get("trained_with") in (None, label) else []
            if len(points) > 1 and points[0][0] <= EARLY[0] * points[-1][0]:
                early = [(step / points[-1][0], loss) for step, loss in points[:-1]]
                seeds.setdefault(row["seed"], {})[label] = [*early, (1.0, row["bits_per_byte"])]
    competing = [group for group in seeds.values() if len(group) > 2]
    if not competing:
        return None
    rows = [
        {**vars(one), "best_kept": one.best_kept.count, "of": one.best_kept.of}
        for one in early_agreement(*competing, at=EARLY)
    ]
    return {"rows": rows, "runs": sum(map(len, competing)), "safe": safe_stop(*competing)}


def _failures(kept: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the runs without a score that no search pruned, by label and reason."""
    seeds: dict[tuple[str, str], list[Any]] = {}
    for row in kept:
        if not _scored(row) and row.get("state") != "pruned":
            reason = row.get("error") or ("no finite score" if row.get("state") == "finished" else "not finished")
            seeds.setdefault((row["label"], str(reason)), []).append(row.get("seed"))
    return [{"label": label, "seeds": found, "error": reason} for (label, reason), found in seeds.items()]


def _notes(
    study: Mapping[str, Any], rows: Sequence[Row], done: Sequence[Row], groups: Mapping[str, Sequence[Row]]
) -> list[str]:
    notes = []
    planned = {(label, seed) for label in study["entries"] for seed in study["seeds"]}
    if missing := planned - {(row.get("label"), row.get("seed")) for row in rows}:
        notes.append(f"Not run yet: {len(missing):,} of {len(planned):,} planned runs.")
    if pruned := sum(row.get("state") == "pruned" for row in rows):
        notes.append(f"Ended early by the search: {pruned:,} of {len(planned):,} runs, which have no score.")
    for name, what in _SURROUNDINGS.items():
        notes += _mixed(what, [(row, row.get(name)) for row in done])
    for name, what in _TEXTS.items():
        notes += _mixed(what, [(row, (row.get("sha256") or {}).get(name)) for row in done])
    notes += _disturbed(done, groups) if study.get("equal") == "seconds" else []
    for label, group in groups.items():
        if len({(row.get("sha256") or {}).get("recipe") for row in group}) > 1:
            notes.append(f"{label} has runs of different settings; run the study again.")
    faults = (
        ("verified", False, "fail verification"),
        ("verified", None, "were not verified, or without a decision"),
        ("under_cap", False, "are over their cap"),
    )
    for name, outcome, what in faults:
        if wrong := dict.fromkeys(row["label"] for row in done if row.get(name, "unknown") is outcome):
            notes.append(f"Artifacts that {what}: {_listed(list(wrong))}.")
    notes += _mixed("holdout text", [(row, row["holdout_documents"]) for row in done if row.get("holdout_documents")])
    if len({frozenset(row["seed"] for row in group) for group in groups.values() if group}) > 1:
        notes.append("Labels have different seeds: verdicts compare those in common, means of the leaderboard all.")
    if foreign := dict.fromkeys(str(row.get("label")) for row in rows if row.get("label") not in study["entries"]):
        notes.append(f"Left out, because the study no longer has them: {_listed(list(foreign))}.")
    return notes


def _disturbed(done: Sequence[Row], groups: Mapping[str, Sequence[Row]]) -> list[str]:
    """Return notes if runs were not alone, or seeds of a label, which do the same work, had different speeds."""
    notes = []
    shares = [(row["cpu_share"], row) for row in done if is_finite(row.get("cpu_share"))]
    if crowded := [one for one in shares if one[0] < ALONE]:
        share, row = min(crowded, key=lambda one: one[0])
        notes.append(
            f"Not alone on their threads: {len(crowded):,} of {len(shares):,} runs had under {ALONE:.0%} of the time "
            f"(least: {row['label']}, seed {row['seed']}, {share:.0%}), so they trained less in the same seconds."
        )
    ratios: dict[str, float] = {}
    for label, group in groups.items():
        speeds: list[float] = [row["tokens_per_second"] for row in group if is_finite(row.get("tokens_per_second"))]
        if len(speeds) > 1 and min(speeds) > 0:
            ratios[label] = max(speeds) / min(speeds)
    if wrong := [label for label, ratio in ratios.items() if ratio > STEADY]:
        worst = max(wrong, key=lambda label: ratios[label])
        notes.append(
            f"The machine's speed changed: {len(wrong):,} of {len(ratios):,} labels have seeds that went more than "
            f"{STEADY - 1:.0%} faster than others (most: {worst}, {ratios[worst] - 1:.0%}), and so saw more text."
        )
    return notes


def _mixed(what: str, values: Sequence[tuple[Row, object]]) -> list[str]:
    """Return a note if runs differ: the usual value, and the labels that have another."""
    labels: dict[str, list[str]] = {}
    for row, value in values:
        labels.setdefault("unknown" if value is None else str(value), []).append(row["label"])
    if len(labels) < 2:
        return []
    usual, *others = sorted(labels, key=lambda value: -len(labels[value]))
    counted = "; ".join(
        f"{value[:40]} in {len(labels[value]):,} ({_listed(list(dict.fromkeys(labels[value])))})" for value in others
    )
    return [f"Runs differ in their {what}: {usual[:40]} in {len(labels[usual]):,}; {counted}."]


def _listed(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def _seconds(row: Row) -> float:
    return next((row[name] for name in ("total_seconds", "train_seconds") if is_finite(row.get(name))), 0.0)


def spent(row: Row) -> float:
    """Return the seconds of a run itself; training that several runs share counts once."""
    shared = row.get("trained_with") not in (None, row["label"])
    return _seconds(row) - (row["train_seconds"] if shared and is_finite(row.get("train_seconds")) else 0.0)


def _money(row: Row, price: float, seconds: float) -> float:
    """Return the price of these seconds of a run; runs that share a machine without a GPU share its price."""
    workers = row.get("workers")
    beside = workers if isinstance(workers, int) and str(row.get("device")).startswith("cpu") else 1
    return cost(seconds, row.get("world") or 1, price / max(1, beside))


def _costs(done: Sequence[Row], price: float | None) -> dict[str, Any]:
    paid = None if price is None else math.fsum(_money(row, price, spent(row)) for row in done)
    core_seconds = math.fsum(spent(row) * ((is_finite(row.get("threads")) and row["threads"]) or 1) for row in done)
    return {"runs": len(done), "seconds": math.fsum(map(spent, done)), "core_seconds": core_seconds, "money": paid}


def _measured(study: Mapping[str, Any], done: Sequence[Row]) -> list[tuple[str, str]]:
    """Return the lines on how it was measured; several values of one thing stand side by side."""

    def all_of(values: Iterable[object]) -> str:
        return _listed(list(dict.fromkeys(str(value) for value in values if value is not None))) or "not known"

    lines = [
        ("Base", str(study["base"])),
        ("Budget", study["budget"]),
        ("Seeds", ", ".join(map(str, study["seeds"]))),
        ("Margin, bits per byte", f"{study['margin']:g}"),
        ("Level of q", f"{LEVEL:g}"),
    ]
    lines += [(what.capitalize(), all_of(row.get(name) for row in done)) for name, what in _SURROUNDINGS.items()]
    shares = [row["cpu_share"] for row in done if is_finite(row.get("cpu_share"))]
    lines += [("Least share of its threads' time", f"{min(shares):.0%}")] if shares else []
    lines += [
        (f"SHA-256 of the {what}", all_of((row.get("sha256") or {}).get(name) for row in done))
        for name, what in _TEXTS.items()
    ]
    times = study["step_times"]
    for source in dict.fromkeys(one["source"] for one in times.values()):
        what = "stated by the study" if source == "stated" else "by FLOPs" if source == "FLOPs" else source
        notes = all_of(one["note"] for one in times.values() if one["source"] == source)
        lines.append((f"Time of a step on eight H100, {what}", notes))
    cost = _costs(done, None)
    hours, core_hours = (f"{cost[name] / 3600:,.3g}" for name in ("seconds", "core_seconds"))
    lines.append(("Cost", f"{cost['runs']:,} runs of {hours} hours together, {core_hours} core hours"))
    command = study.get("command") or ""
    if command.startswith("caddie study ") and study.get("fraction", 1) == 1:
        lines.append(("A tenth of it", f"{command} --fraction 0.1"))
    return [*([("Command", command)] if command else []), *lines]
