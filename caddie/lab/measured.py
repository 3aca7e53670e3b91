"""Notes on a study's runs, their cost, and how they were measured."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from caddie.lab.verdicts import LEVEL, cost
from caddie.report.charts import is_finite
from caddie.report.read import pick

Row = Mapping[str, Any]
"""One run, as a line of `results.jsonl`."""
Groups = Mapping[str, Sequence[Row]]
"""Finished runs of each label."""
ALONE = 0.9
"""Share of its threads' time below which a run counts as disturbed by other programs (see `runtime.cpu_share`)."""
STEADY = 1.1
"""Largest ratio of the speeds of two seeds on an undisturbed machine."""
_SURROUNDINGS = {
    "device": "device",
    "processor": "processor",
    "precision": "number format",
    "threads": "number of threads",
    "workers": "number of runs at once",
    "world": "number of processes",
    "code": "version of the code",
    "program_sha256": "program",
    "scorer_sha256": "scorer",
}
_TEXTS = {"validation_documents": "held-out text", "train_documents": "training text", "tokenizer": "tokenizer"}


def run_notes(study: Mapping[str, Any], rows: Sequence[Row], done: Sequence[Row], groups: Groups) -> list[str]:
    """Return what is wrong with runs, differs between them, or is missing, a sentence each."""
    notes = []
    planned = {(label, seed) for label in study["entries"] for seed in study["seeds"]}
    missing = planned - {(row.get("label"), row.get("seed")) for row in rows}
    if missing and study.get("planned", True):  # runs compared without a study have no plan
        notes.append(f"Not run yet: {len(missing):,} of {len(planned):,} planned runs.")
    if pruned := sum(row.get("state") == "pruned" for row in rows):
        notes.append(f"Ended early by the search: {pruned:,} of {len(planned):,} runs, which have no score.")
    for name, what in _SURROUNDINGS.items():
        notes += _mixed(what, [(row, row.get(name)) for row in done])
    for name, what in _TEXTS.items():
        notes += _mixed(what, [(row, pick(row, "sha256", name)) for row in done])
    if seeds := sorted({row["seed"] for row in done if len(processors(done, row["seed"])) > 1}):
        which = listed([f"seed {seed}" for seed in seeds])
        notes.append(f"Labels with one seed ran on different processors, which round differently: {which}.")
    notes += _disturbed(done, groups) if study.get("equal") == "seconds" else []
    for label, group in groups.items():
        if len({pick(row, "sha256", "recipe") for row in group}) > 1:
            notes.append(f"{label} has runs of different settings; run the study again.")
    faults = (
        ("verified", False, "fail verification"),
        ("verified", None, "were not verified, or without a decision"),
        ("under_cap", False, "are over their cap"),
    )
    for name, outcome, what in faults:
        if wrong := dict.fromkeys(row["label"] for row in done if row.get(name, "unknown") is outcome):
            notes.append(f"Artifacts that {what}: {listed(list(wrong))}.")
    notes += _mixed("holdout text", [(row, row["holdout_documents"]) for row in done if row.get("holdout_documents")])
    if len({frozenset(row["seed"] for row in group) for group in groups.values() if group}) > 1:
        notes.append("Labels have different seeds: verdicts compare those in common, means of the leaderboard all.")
    if foreign := dict.fromkeys(str(row.get("label")) for row in rows if row.get("label") not in study["entries"]):
        notes.append(f"Left out, because the study no longer has them: {listed(list(foreign))}.")
    return notes


def processors(rows: Iterable[Row], seed: int) -> set[str]:
    """Return the processors of a random seed's runs on a CPU, as far as the rows name them.

    Each rounds bfloat16 in its own way: labels are to be compared within one of them.
    """
    own = [row for row in rows if row.get("seed") == seed and str(row.get("device")).startswith("cpu")]
    return {row["processor"] for row in own if row.get("processor")}


def _disturbed(done: Sequence[Row], groups: Groups) -> list[str]:
    """Return notes if other programs took CPU time, or if seeds of a label, which do equal work, had unequal speeds."""
    notes = []
    shares = [(row["cpu_share"], row) for row in done if is_finite(row.get("cpu_share"))]
    if crowded := [one for one in shares if one[0] < ALONE]:
        share, row = min(crowded, key=lambda one: one[0])
        notes.append(
            f"Other programs took CPU time: {len(crowded):,} of {len(shares):,} runs had under {ALONE:.0%} of their "
            f"threads' time (least: {row['label']}, seed {row['seed']}, {share:.0%}), so they trained on less text."
        )
    ratios: dict[str, float] = {}
    for label, group in groups.items():
        speeds: list[float] = [row["tokens_per_second"] for row in group if is_finite(row.get("tokens_per_second"))]
        if len(speeds) > 1 and min(speeds) > 0:
            ratios[label] = max(speeds) / min(speeds)
    if wrong := [label for label, ratio in ratios.items() if ratio > STEADY]:
        worst = max(wrong, key=lambda label: ratios[label])
        notes.append(
            f"The machine's speed changed: in {len(wrong):,} of {len(ratios):,} labels one seed ran more than "
            f"{STEADY - 1:.0%} faster than another (most: {worst}, {ratios[worst] - 1:.0%}) and trained on more text."
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
        f"{_short(value)} in {len(labels[value]):,} ({listed(list(dict.fromkeys(labels[value])))})" for value in others
    )
    return [f"Runs differ in their {what}: {_short(usual)} in {len(labels[usual]):,}; {counted}."]


def _short(value: str) -> str:
    """Return the first 12 characters of a hash, with the plus of a modified checkout; other values stay, up to 40."""
    return re.sub(r"^([0-9a-f]{12})[0-9a-f]{28,52}(\+?)$", r"\1\2", value)[:40]


def listed(names: Sequence[str], most: int = 5) -> str:
    """Return the first `most` names, and the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def run_seconds(row: Row) -> float:
    """Return the seconds of a run, shared training included; those of training where the rest is not known."""
    return next((row[name] for name in ("total_seconds", "train_seconds") if is_finite(row.get(name))), 0.0)


def spent(row: Row) -> float:
    """Return the seconds of a run itself; training that several runs share counts once."""
    shared = row.get("trained_with") not in (None, row["label"])
    return run_seconds(row) - (row["train_seconds"] if shared and is_finite(row.get("train_seconds")) else 0.0)


def run_money(row: Row, price: float, seconds: float) -> float:
    """Return the price of these seconds of a run; runs that share a machine without a GPU share its price."""
    if not str(row.get("device")).startswith("cpu"):
        return cost(seconds, row.get("world") or 1, price)
    return cost(seconds, 1, price / max(1, row["workers"] if is_finite(row.get("workers")) else 1))


def costs(done: Sequence[Row], price: float | None) -> dict[str, Any]:
    """Return runs, their seconds and core seconds, and the price of these; None without a price."""
    paid = None if price is None else math.fsum(run_money(row, price, spent(row)) for row in done)
    cores = [math.prod(row[name] for name in ("threads", "world") if is_finite(row.get(name))) for row in done]
    core_seconds = math.fsum(spent(row) * each for row, each in zip(done, cores, strict=True))
    return {"runs": len(done), "seconds": math.fsum(map(spent, done)), "core_seconds": core_seconds, "money": paid}


def how_measured(study: Mapping[str, Any], done: Sequence[Row]) -> list[tuple[str, str]]:
    """Return the lines on how it was measured; several values of one thing stand side by side."""

    def all_of(values: Iterable[object]) -> str:
        return listed(list(dict.fromkeys(str(value) for value in values if value is not None))) or "not known"

    lines = [
        ("Base", str(study["base"])),
        ("Budget", study["budget"]),
        ("Seeds", ", ".join(map(str, study["seeds"]))),
        ("Margin, bits per byte", f"{study['margin']:g}"),
        ("Level of q", f"{LEVEL:g}"),
    ]
    lines += [(what.capitalize(), all_of(row.get(name) for row in done)) for name, what in _SURROUNDINGS.items()]
    shares = [row["cpu_share"] for row in done if is_finite(row.get("cpu_share"))]
    lines += [("Lowest CPU share of a run", f"{min(shares):.0%}")] if shares else []
    lines += [
        (f"SHA-256 of the {what}", all_of(pick(row, "sha256", name) for row in done)) for name, what in _TEXTS.items()
    ]
    times = study["step_times"]
    for source in dict.fromkeys(one["source"] for one in times.values()):
        what = "stated by the study" if source == "stated" else "by FLOPs" if source == "FLOPs" else source
        notes = all_of(one["note"] for one in times.values() if one["source"] == source)
        lines.append((f"Time of a step on eight H100, {what}", notes))
    cost = costs(done, None)
    hours, core_hours = (f"{cost[name] / 3600:,.3g}" for name in ("seconds", "core_seconds"))
    lines.append(("Cost", f"{cost['runs']:,} runs of {hours} hours together, {core_hours} core hours"))
    command = study.get("command") or ""
    if command.startswith("caddie study ") and study.get("fraction", 1) == 1:
        lines.append(("A tenth of the training", f"{command} --fraction 0.1"))
    return [*([("Command", command)] if command else []), *lines]
