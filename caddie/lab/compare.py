"""Compare two recipes by finished runs of several seeds each.

A seed is one observation: it draws initial weights and, with a shuffling loader, data order. The same seed run again is
no further observation, so it is refused, as are groups of mixed settings or texts.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from caddie.errors import UserError
from caddie.lab.measured import listed
from caddie.lab.stats import LEVEL, MOST_SEEDS, POWER, mean, seeds_needed, welch
from caddie.lab.verdicts import Documents, measure
from caddie.report.documents import Figures, run_documents
from caddie.report.read import read_scored_result, result_errors, training_notes
from caddie.report.run_files import ARTIFACT, RESULT
from caddie.report.tables import crop, number, printable, table
from caddie.report.units import Unit, convert
from caddie.report.verification import verified
from caddie.run.run_folder import check_artifact

_COMMON = {
    "recipe": "settings",
    "train_documents": "training texts",
    "validation_documents": "held-out texts",
    "tokenizer": "tokenizers",
}
"""Hashes that the runs of a group have in common, and their names."""
_SURROUNDINGS = {"device": "device", "world": "number of processes", "precision": "number format", "code": "code"}
"""Fields of a result whose differences are worth a note."""


@dataclass(frozen=True)
class ScoredRun:
    """Fields of one finished run that a comparison needs."""

    place: Path
    recipe: str
    seed: int
    bits_per_byte: float
    tokens: int
    source_bytes: int
    byte_source: str
    sha256: Mapping[str, str]
    under_cap: bool
    verified: str | None
    """Outcome of its verification, in a word of `report.verification`."""
    surroundings: Mapping[str, str]
    notes: tuple[str, ...]
    """Sentences on anything unusual in its training."""
    documents: tuple[Figures, Figures] | None
    """Bytes and bits of each held-out document; None for a run of an older version."""

    def cost(self, unit: Unit) -> float:
        """Return the score in a unit."""
        return convert(self.bits_per_byte, "bits-per-byte", unit, tokens=self.tokens, source_bytes=self.source_bytes)


def read(place: Path) -> ScoredRun:
    """Read a run folder or its `result.json`. Raises `UserError` if it is not finished or cannot be compared."""
    path = place / RESULT if place.is_dir() else place
    if not place.exists():
        raise UserError(f"no {place}; name the folders of finished runs")
    if not path.exists():
        raise UserError(f"{place} holds no result.json, so it is no finished run; finish it or leave it out")
    with result_errors(path, "a comparison"):
        result = read_scored_result(path)
        if (path.parent / ARTIFACT).is_file():
            check_artifact(path.parent, result)
        score = result["scores"]["quantized_plain"]
        run = ScoredRun(
            place=place,
            recipe=result["recipe"],
            seed=int(result["seed"]),
            bits_per_byte=float(result["bits_per_byte"]),
            tokens=int(score["tokens"]),
            source_bytes=int(score["source_bytes"]),
            byte_source=str(result["byte_source"]),
            sha256={name: str(result["sha256"][name]) for name in (*_COMMON, "artifact")},
            under_cap=bool(result["under_cap"]),
            verified=verified(result),
            surroundings={field: str(result[field]) for field in _SURROUNDINGS},
            notes=tuple(training_notes(result)),
            documents=run_documents(path.parent),
        )
    if min(run.tokens, run.source_bytes) < 1:
        raise UserError(f"{path} counts no tokens or bytes; run the recipe again")
    return run


def _check_documents(run: ScoredRun) -> None:
    """Raise `UserError` if the bits of the held-out documents are not those of the score."""
    if run.documents is None:
        return
    rate = float(run.documents[1].sum() / run.documents[0].sum())
    if abs(rate - run.bits_per_byte) > 1e-4 * run.bits_per_byte:
        stated = f"{run.place} states {run.bits_per_byte:.4f} bits per byte"
        raise UserError(f"{stated}, and the documents beside it cost {rate:.4f}; one of them was changed: run it again")


def compare(
    places: Sequence[Path], against: Sequence[Path], *, by: float = 0.0, unit: Unit = "bits-per-byte"
) -> dict[str, Any]:
    """Test if the runs at `places` (B) cost less than those `against` (A), by at least `by` in `unit`.

    Returns the facts that `caddie compare --json` prints. Differences are B minus A: negative is better. The test is
    paired where both groups have the same seeds, else Welch's; None stands where there are too few seeds. Raises
    `UserError` for runs that must not be compared.
    """
    if not math.isfinite(by):
        raise UserError(f"--by must be a finite number, not {by}")
    b, a = (read_group(group) for group in (places, against))
    for run in (*b, *a):
        _check_documents(run)
    _check_both(b, a, unit)
    costs_b, costs_a = ({run.seed: run.cost(unit) for run in group} for group in (b, a))
    facts: dict[str, Any] = {
        "unit": unit,
        "by": by,
        "by_bits_per_byte": convert(by, unit, "bits-per-byte", tokens=b[0].tokens, source_bytes=b[0].source_bytes),
        "runs": _facts(b, unit),
        "against": _facts(a, unit),
        "difference": fmean(costs_b.values()) - fmean(costs_a.values()),
        **dict.fromkeys(("answer", "interval", "test")),
        "why": "a test needs two seeds a side",
        **dict.fromkeys(("p", "p_welch", "p_paired", "p_documents", "spread")),
        "level": LEVEL,
        "power": POWER,
        **dict.fromkeys(("seeds_to_show_by", "seeds_to_show_difference")),
        "notes": _notes(b, a),
    }
    if min(len(b), len(a)) < 2:
        return facts
    same = costs_b.keys() == costs_a.keys()
    of_b, of_a = (_documents(group, unit) for group in (b, a))
    documents = (of_b, of_a) if of_b and of_a else None
    found = measure(costs_b, costs_a, list(costs_b) if same else (), documents)  # A minus B: positive where B is better
    why = "both groups have the same seeds" if same else "the groups have different seeds"
    facts |= {"test": found.test or ("paired" if same else "welch"), "why": why}
    if found.estimate is None:
        return facts | {"why": f"{why}, but nothing varies from seed to seed, so there is no p"}
    if found.test == "welch" and documents:
        facts["notes"].append("without common seeds, the test leaves out the error of other held-out documents")
    p = found.estimate.p_above(by)
    facts["p_welch"] = welch(list(costs_a.values()), list(costs_b.values())).p_above(by)
    low, high = found.estimate.interval()
    facts |= {f"p_{found.test}": p, "p": p, "interval": (-high, -low), "answer": "yes" if p < LEVEL else "not shown"}
    facts["spread"] = found.spread and found.spread.to_json()
    deviations, error = found.deviations, found.estimate.second
    if by > 0:
        facts["seeds_to_show_by"] = seeds_needed(by, deviations, documents=error)
    if found.difference > by:
        facts["seeds_to_show_difference"] = seeds_needed(found.difference - by, deviations, documents=error)
    return facts


def _documents(runs: Sequence[ScoredRun], unit: Unit) -> Documents | None:
    """Return a group's documents, sizes scaled so that bits / size is in `unit`; None unless all runs have the same."""
    known = {run.seed: run.documents for run in runs if run.documents}
    if len(known) < len(runs):
        return None
    sizes = [of_run for of_run, _ in known.values()]
    if any(not np.array_equal(other, sizes[0]) for other in sizes):
        return None
    size = {"tokens": runs[0].tokens, "source_bytes": runs[0].source_bytes}
    per_byte = convert(1.0, "bits-per-byte", unit, **size)  # a factor: converting a score would change its last digit
    return Documents(sizes[0] / per_byte, {seed: bits for seed, (_, bits) in known.items()})


def _facts(runs: Sequence[ScoredRun], unit: Unit) -> dict[str, Any]:
    costs = [run.cost(unit) for run in runs]
    deviation = stdev(costs) if len(costs) > 1 else None
    return {
        "places": [str(run.place) for run in runs],
        "recipe": runs[0].recipe,
        "key": runs[0].sha256["recipe"][:8],
        "seeds": [run.seed for run in runs],
        "costs": costs,
        "mean": fmean(costs),
        "standard_deviation": deviation,
        "interval": mean(costs).interval() if deviation else None,
    }


def read_group(places: Sequence[Path]) -> list[ScoredRun]:
    """Read runs of one recipe, by seed. Refuses runs of different recipes or texts, and repeated seeds."""
    first, *others = runs = sorted(map(read, places), key=lambda run: run.seed)
    for run in others:
        for name, what in _COMMON.items():
            if run.sha256[name] != first.sha256[name]:
                raise UserError(
                    f"{first.place} and {run.place} stand in one group but have different {what} "
                    f"({first.sha256[name][:8]} and {run.sha256[name][:8]}); a group is one recipe on one text"
                )
    seed, times = Counter(run.seed for run in runs).most_common(1)[0]
    if times > 1:
        raise UserError(
            f"seed {seed} stands {times} times in the group of {first.place}, and a seed run again is no further "
            "observation; leave the repeats out"
        )
    return runs


def _check_both(b: Sequence[ScoredRun], a: Sequence[ScoredRun], unit: Unit) -> None:
    """Refuse costs of different texts or in different units, and an artifact on both sides."""
    first, places = a[0], f"{b[0].place} and {a[0].place}"
    if b[0].sha256["validation_documents"] != first.sha256["validation_documents"]:
        raise UserError(f"{places} were scored on different held-out texts; score both on the same")
    for run in (*b, *a):
        if (run.byte_source, run.source_bytes) != (first.byte_source, first.source_bytes):
            raise UserError(
                f"{run.place} counts {run.source_bytes:,} bytes from the {run.byte_source}, {first.place} "
                f"{first.source_bytes:,} from the {first.byte_source}; prepare both corpora from the same documents"
            )
        same = run.sha256["tokenizer"] == first.sha256["tokenizer"] and run.tokens == first.tokens
        if unit == "nats-per-token" and not same:
            raise UserError(f"{places} have different tokens, so nats per token differ; take --unit bits-per-byte")
    for run in b:
        if run.sha256["artifact"] in {other.sha256["artifact"] for other in a}:
            raise UserError(f"the artifact of {run.place} stands on both sides; leave it out of one")


def _notes(b: Sequence[ScoredRun], a: Sequence[ScoredRun]) -> list[str]:
    notes = [f"{run.place} is over its cap" for run in (*b, *a) if not run.under_cap]
    said = {"no": "did not pass verification", "inconclusive": "was verified without a decision"}
    notes += [
        f"{run.place} {said.get(run.verified or '', 'was not verified')}" for run in (*b, *a) if run.verified != "yes"
    ]
    notes += [f"{run.place}: {note}" for run in (*b, *a) for note in run.notes]
    if b[0].sha256["recipe"] == a[0].sha256["recipe"]:
        notes.append("both groups have the same settings")
    notes += [
        f"the groups have different {_COMMON[name]}"
        for name in ("train_documents", "tokenizer")
        if b[0].sha256[name] != a[0].sha256[name]
    ]
    for field, what in _SURROUNDINGS.items():
        values = sorted({run.surroundings[field] for run in (*b, *a)})
        if len(values) > 1:
            notes.append(f"the runs differ in their {what}: {', '.join(values)}")
    seeds_b, seeds_a = ({run.seed for run in group} for group in (b, a))
    if seeds_b & seeds_a and seeds_b != seeds_a:
        notes.append("some seeds, but not all, are in both groups, so nothing is paired")
    return notes


def summary(facts: Mapping[str, Any]) -> str:
    """Format the facts of `compare` for a terminal."""
    unit, difference, interval = facts["unit"].replace("-", " "), facts["difference"], _bounds(facts["interval"])
    groups = (("B", facts["runs"]), ("A", facts["against"]))
    rows = [
        (
            f"{letter} {crop(group['recipe'], 20)}-{group['key']}",
            len(group["seeds"]),
            f"{group['mean']:.6f}",
            number(group["standard_deviation"], ".6f"),
            _bounds(group["interval"]),
        )
        for letter, group in groups
    ]
    lower = "lower" if difference < 0 else "higher" if difference > 0 else "as A"
    found = f"{difference:+z.6f} (B is {lower})"
    if facts["p"] is not None:
        lines = [("difference", f"{found}, 95 % interval {interval}"), *_verdict(facts, unit)]
    else:
        why = "with one seed on a side nothing can be concluded" if facts["test"] is None else facts["why"]
        lines = [("difference", found), ("conclusion", f"none; {why}")]
    lines = [*((letter, listed(group["places"], 1)) for letter, group in groups), *lines]
    lines += [("note", note) for note in facts["notes"]]
    head = table(rows, [unit, "seeds", "mean", "deviation", "95 % interval"]).split("\n")
    return "\n".join(map(printable, [*head, "", *(f"{label:<12}{line}" for label, line in lines)]))


def _verdict(facts: Mapping[str, Any], unit: str) -> list[tuple[str, str]]:
    """Return the question, its answer, the test and the seeds that an answer takes, each with its label."""
    by, p, level = facts["by"], facts["p"], facts["level"]
    question = f"is B better by at least {by:g} {unit}" if by else "is B better"
    if by and facts["unit"] != "bits-per-byte":
        question += f", {facts['by_bits_per_byte']:.6f} bits per byte"
    if facts["test"] != "welch":
        how = "paired test by seed and document" if facts["test"] == "documents" else "paired test"
        test = f"one-sided {how}, as {facts['why']} (Welch: p = {_p(facts['p_welch'])})"
    else:
        test = f"one-sided Welch test, as {facts['why']}"
    seeds = "no number gives a yes"
    if facts["difference"] < -by:
        power = f"for p < {level} with {100 * facts['power']:.0f} % power"
        seeds = f"{_seeds(facts['seeds_to_show_difference'])} a side {power}"
    answer = f"{facts['answer']}, p = {_p(p)}"
    lines = [("question", f"{question}?"), ("answer", answer), ("test", test)]
    if spread := facts["spread"]:
        parts = [f"{name} {spread[name]:.6f}" for name in ("paired", "unpaired", "seeds", "documents") if spread[name]]
        lines.append(("error", f"standard error {', '.join(parts)}"))
    lines += [("seeds", f"{seeds}, if the difference is {facts['difference']:+z.6f}")]
    if by:
        lines.append(("", f"{_seeds(facts['seeds_to_show_by'])} a side to tell a difference of {by:g} from none"))
    return lines


def _seeds(count: int | None) -> str:
    return f"more than {MOST_SEEDS:,}" if count is None else f"{count:,}"


def _p(p: float | None) -> str:
    return "none" if p is None else f"{p:.4f}" if p >= 1e-4 else f"{p:.0e}"


def _bounds(interval: Sequence[float] | None) -> str:
    return "-" if interval is None else f"{interval[0]:.6f} to {interval[1]:.6f}"
