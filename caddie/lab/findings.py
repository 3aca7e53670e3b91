"""Findings of a study as plain data: verdicts, ranks, the frontier of size and score, and curves.

The input is a study's description (`Study.to_json`, kept as `study.json`) and one row per run, not the study's own
code, so old measurements can still be read.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any, get_args

import numpy as np

from caddie.errors import count
from caddie.lab.agreement import EARLY, Curve, early_agreement, public_order, safe_stop
from caddie.lab.measured import Groups, Row, costs, how_measured, run_money, run_notes, run_seconds
from caddie.lab.swept import swept
from caddie.lab.verdicts import LEVEL, Documents, Verdict, Word, judge_pairs
from caddie.report.charts import is_finite, smooth
from caddie.report.read import pick
from caddie.report.verification import passed

POINTS = 60
"""Points of a curve that is the mean over seeds."""
WORDS = get_args(Word)


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
        "holdout": _holdout(study, groups),
        "curves": {
            axis: {label: curve for label, group in groups.items() if (curve := _mean_curve(group, place))}
            for place, axis in enumerate(("steps", "seconds"))
        },
        "early": _early(groups),
        "failed": _failures(kept),
        "notes": run_notes(study, rows, done, groups),
        "cost": costs(done, price),
        "measured": [*how_measured(study, done), *_pairing(verdicts)],
    }


def _study(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description with its entries by label, the base first, and the budget in words."""
    base = {"label": described.get("label", "base"), "against": None, "kind": "", "why": "", "claim": None, "diff": {}}
    public = described.get("public") or []
    first = [one["bits_per_byte"] for one in public if one.get("source") == public[0].get("source")]
    base["public_score"] = fmean(first) if first and all(map(is_finite, first)) else None
    amount = re.fullmatch(r"\w+\(\w+=([\d.e+-]+)\)", described["budget"])
    words = f"{float(amount[1]):,.10g} {described['equal']} each" if amount else f"{described['budget']} budget"
    words = f"{described['fraction']:g} of {words}" if described.get("fraction", 1) != 1 else words
    entries = {entry["label"]: entry for entry in [base, *described["entries"]]}
    times = described.get("step_times") or {}
    return {**described, "label": base["label"], "budget": words, "entries": entries, "step_times": times}


def _scored(row: Row) -> bool:
    return row.get("state") == "finished" and is_finite(row.get("bits_per_byte"))


def _verdicts(study: Mapping[str, Any], groups: Groups, price: float | None) -> list[dict[str, Any]]:
    """Return a verdict for each entry that has a finished run, best first; entries without a rival come last."""
    judged, found = _judged(study, groups), []
    tested = ("difference", "interval", "test", "p", "q", "q_same", "seeds_needed")
    for label, entry in study["entries"].items():
        rival, claim, group, verdict = entry["against"], entry["claim"], groups[label], judged.get(label)
        if rival is None or not group:
            continue
        word = verdict.word if verdict else "unclear"
        untested = "was scored on another held-out text" if groups[rival] else "has no finished run"
        found.append(
            {
                "label": label,
                **{name: entry[name] for name in ("kind", "why", "against", "claim", "diff")},
                "seeds": list(verdict.seeds) if verdict else sorted(row["seed"] for row in group),
                "mean": verdict.mean if verdict else fmean(row["bits_per_byte"] for row in group),
                **{name: getattr(verdict, name, None) for name in tested},
                "spread": verdict.spread.to_json() if verdict and verdict.spread else None,
                "word": word,
                "reason": verdict.reason if verdict else f"{rival} {untested}",
                "agrees": _agrees(word, claim, study["margin"]) if claim else None,
                **_valid(group),
                "bytes": _more_bytes(group, groups[rival]),
                "seconds": fmean(map(run_seconds, group)),
                "money": _mean(run_money(row, price, run_seconds(row)) for row in group if price is not None),
            }
        )
    return sorted(found, key=lambda one: math.inf if one["difference"] is None else one["difference"])


def _judged(study: Mapping[str, Any], groups: Groups) -> dict[str, Verdict]:
    """Return a verdict on each entry whose runs and its rival's were all scored on one held-out text."""
    pairs = {}
    for label, own in groups.items():
        rival = groups.get(study["entries"][label]["against"], ())
        texts = {pick(row, "sha256", "validation_documents") for row in (*rival, *own)}
        if rival and own and len(texts) == 1:
            pairs[label] = rival, own
    return judge_pairs(
        {label: (_scores(rival), _scores(own)) for label, (rival, own) in pairs.items()},
        margin=study["margin"],
        documents={label: both for label, sides in pairs.items() if (both := _documents(*sides))},
    )


def _scores(rows: Sequence[Row]) -> dict[int, float]:
    return {row["seed"]: row["bits_per_byte"] for row in rows}


def _agrees(word: str, claim: Mapping[str, Any], margin: float) -> str:
    """Return agrees, disagrees or open; `same` leaves a claimed difference within the margin open."""
    small = claim["difference"] is not None and abs(claim["difference"]) <= margin
    if word == claim["word"]:
        return "agrees"
    return "open" if word == "unclear" or (word == "same" and small) else "disagrees"


def _documents(*sides: Sequence[Row]) -> tuple[Documents, Documents] | None:
    """Return the bits by seed and document of rival and entry; None unless both have them for the same documents."""
    known = [[(row["seed"], *row["documents"]) for row in rows if row.get("documents")] for rows in sides]
    every = [sizes for side in known for _, sizes, _ in side]
    if not all(known) or any(sizes != every[0] for sizes in every):
        return None
    rival, entry = (Documents(np.array(every[0]), {seed: np.array(bits) for seed, _, bits in side}) for side in known)
    return rival, entry


def _holdout(study: Mapping[str, Any], groups: Groups) -> list[dict[str, Any]]:
    """Return mean and verdict of each label with scores on the holdout text, lowest first."""
    scored = {
        label: [_scored_on_holdout(row) for row in group if is_finite(row.get("holdout"))]
        for label, group in groups.items()
    }
    judged, tested = _judged(study, scored), ("difference", "interval", "p", "q", "q_same", "word")
    found = [
        {
            "label": label,
            "against": study["entries"][label]["against"],
            "seeds": sorted(row["seed"] for row in group),
            "mean": fmean(row["bits_per_byte"] for row in group),
            **{name: getattr(judged.get(label), name, None) for name in tested},
        }
        for label, group in scored.items()
        if group
    ]
    return sorted(found, key=lambda one: one["mean"])


def _scored_on_holdout(row: Row) -> Row:
    """Return a row as if the holdout text had been the run's held-out text."""
    text = {"validation_documents": row.get("holdout_documents")}
    return {**row, "bits_per_byte": row["holdout"], "sha256": text, "documents": None}


def _more_bytes(group: Sequence[Row], rival: Sequence[Row]) -> float | None:
    """Return bytes of the artifact minus the rival's: means over common seeds, or over all if there are none."""
    sizes, others = (
        {row["seed"]: row["artifact_bytes"] for row in rows if is_finite(row.get("artifact_bytes"))}
        for rows in (group, rival)
    )
    if not (sizes and others):
        return None
    common = sizes.keys() & others.keys()
    return fmean(sizes[seed] for seed in common or sizes) - fmean(others[seed] for seed in common or others)


def _found(study: Mapping[str, Any], verdicts: Sequence[Mapping[str, Any]], groups: Groups) -> str:
    counts = [f"{sum(one['word'] == word for one in verdicts)} {word}" for word in WORDS]
    without = sum(not group for label, group in groups.items() if study["entries"][label]["against"] is not None)
    counts += [f"{without} without a finished run"] if without else []
    entries, claims = len(study["entries"]) - 1, [one["agrees"] for one in verdicts if one["agrees"]]
    sentence = f"Of {entries} {'entry' if entries == 1 else 'entries'}: {', '.join(counts)}."
    if not claims:
        return sentence
    agree, disagree, undecided = (claims.count(word) for word in ("agrees", "disagrees", "open"))
    return f"{sentence} Of {count(len(claims), 'claim')}: {agree} true here, {disagree} not, {undecided} undecided."


def _pairing(verdicts: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return lines on the effect of pairing: medians of the differences' standard errors, with and without it."""
    spreads = [one["spread"] for one in verdicts if one["spread"]]
    lines, names = [], ("unpaired", "paired", "seeds", "documents")
    for way, parts, known in (("seed", names[:2], False), ("seed and document", names, True)):
        if group := [one for one in spreads if (one["documents"] is not None) == known]:
            figures = ", ".join(f"{name} {median(one[name] for one in group):.4f}" for name in parts)
            lines.append((f"Standard error by {way}, median", figures))
    return lines


def _standing(label: str, group: Sequence[Row]) -> dict[str, Any]:
    """Return a label's row of the leaderboard: means over its seeds."""
    scores = [row["bits_per_byte"] for row in group]
    means = ("artifact_bytes", "parameters", "steps", "tokens", "tokens_per_second", "train_seconds", "total_seconds")
    stages = ("trained", "averaged", "packed", "quantization_loss")
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
    """Return `verified` and `under_cap` of a label: False if one of its artifacts is not, None if that is not known."""
    return {name: passed(row.get(name) for row in group) for name in ("verified", "under_cap")}


def _mean(values: Iterable[Any]) -> float | None:
    known = [value for value in values if is_finite(value)]
    return fmean(known) if known else None


def _points(row: Row, axis: int) -> list[tuple[float, float]]:
    """Return a run's training loss in bits per byte, against steps (`axis` 0) or seconds (1)."""
    return [(point[axis], point[3]) for point in row.get("curve") or [] if all(map(is_finite, point[:4]))]


def _mean_curve(group: Sequence[Row], place: int) -> list[tuple[float, float, float, float]]:
    """Return mean, lowest and highest over seeds at evenly spaced places that all runs reached, lightly smoothed."""
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


def _early(groups: Groups) -> dict[str, Any] | None:
    """Compare early ranks with final ones among the runs of each seed; None if there is nothing to rank.

    Early ranks are by training loss, final ones by the artifact's score; a training that several share counts once.
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
    found = early_agreement(*competing)
    rows = [{**one, "best_kept": one["best_kept"].count, "of": one["best_kept"].of} for one in found]
    return {"rows": rows, "runs": sum(map(len, competing)), "safe": safe_stop(*competing)}


def _failures(kept: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the runs without a score that no search pruned, by label and reason."""
    seeds: dict[tuple[str, str], list[Any]] = {}
    for row in kept:
        if not _scored(row) and row.get("state") != "pruned":
            reason = row.get("error") or ("no finite score" if row.get("state") == "finished" else "not finished")
            seeds.setdefault((row["label"], str(reason)), []).append(row.get("seed"))
    return [{"label": label, "seeds": found, "error": reason} for (label, reason), found in seeds.items()]
