"""Text of `docs/results/claims.md`, `docs/results/costs.md` and `caddie/recipes/measured.json`, the effects that
`caddie techniques` shows; `tests/lab/test_study_pages.py` keeps them up to date.

They are made of what the studies left: `study.json`, `results.jsonl` and, of `caddie study --estimate`,
`estimate.json`.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from caddie.errors import count
from caddie.lab.findings import findings
from caddie.lab.measured import costs, spent
from caddie.lab.report import markdown_table, signed
from caddie.lab.rows import ESTIMATE, RESULTS, STUDY, read_rows, read_study
from caddie.report.charts import is_finite

STUDIES = Path(__file__).resolve().parent.parent / "studies"
SYSTEM = re.compile(r"\(system (\d+)\)")
"""A public system, named by the source of a claim on it."""
DECIDED = ("better", "worse", "same")
TECHNIQUES = {
    "Train.batch_tokens": ("002, twice the batch", "002, four times the batch", "a third more tokens a step"),
    "SwiGLU": ("003, SwiGLU",),
    "Recurrence": ("003, layers 1 and 2 twice",),
    "PlainRoPE.dims": ("001, all channels rotary",),
    "GroupedQueryAttention.xsa": ("001, four exclusive layers", "exclusive in all layers"),
    "DenseGate": ("gated attention",),
    "MixedValueResidual": ("value residual",),
    "StraightThrough": (
        "001, quantization-aware throughout",
        "003, quantization-aware throughout",
        "003, quantization-aware at the end",
    ),
    "SoftRound": ("soft rounding",),
    "Float16": ("fp16 embedding alone",),
    "Rotated": ("Hadamard rotation",),
    "Lzma": ("003, lzma for zlib",),
    "DocumentLoRA": ("test-time adapters",),
    "ChunkSGD": (
        "test-time training 0.005",
        "test-time training 0.02, one epoch",
        "test-time training 0.02",
        "test-time training 0.02, short chunks",
        "test-time training 0.05",
    ),
}
"""Entries at scale that change one technique alone, by its name in caddie."""


@dataclass(frozen=True)
class Kept:
    """Files of a study's folder."""

    folder: Path
    top: str
    """Folder below `studies/` that holds its definition."""
    name: str
    """Name in the definition; `study` stands in the folder itself."""

    @property
    def at_scale(self) -> bool:
        """True for twins that make all the steps."""
        return self.name.startswith("scale") or self.top in ("ablations", "ladder")

    @property
    def narrow(self) -> bool:
        """True for a study that is named after the twins of width 32, beside one of width 64."""
        return self.name.endswith("32")

    @property
    def title(self) -> str:
        """Definition as the verb takes it, below `studies/`."""
        return f"{self.top}/study.py" + (f":{self.name}" if self.name != "study" else "")

    @cached_property
    def facts(self) -> dict[str, Any] | None:
        """Findings of its rows, or None if nothing was run."""
        if not (self.folder / RESULTS).exists():
            return None
        return findings(read_study(self.folder / STUDY), read_rows(self.folder / RESULTS))

    @property
    def runs(self) -> int:
        """Runs of a study with rows: every entry and the base, with each seed."""
        described = self.facts["study"] if self.facts else {"entries": (), "seeds": ()}
        return len(described["entries"]) * len(described["seeds"])

    @cached_property
    def estimate(self) -> dict[str, Any] | None:
        """Core hours of the runs that were left when it was estimated, or None."""
        path = self.folder / ESTIMATE
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def hours(self, label: str) -> float | None:
        """Return the core hours of the runs of an entry that were left, or None without an estimate."""
        one = self.estimate["labels"].get(label) if self.estimate else None
        return one["runs"] * (one["train_seconds"] + one["score_seconds"]) / 3600 if one else None

    def verdict(self, label: str) -> Mapping[str, Any] | None:
        """Return the verdict on an entry, or None until it and its rival have three seeds, or all if they are fewer."""
        found, seeds = (self.facts["verdicts"], self.facts["study"]["seeds"]) if self.facts else ((), ())
        enough = min(3, len(seeds))
        judged = (one for one in found if one["label"] == label and one["difference"] is not None)
        return next((one for one in judged if len(one["seeds"]) >= enough), None)


def kept(studies: Path = STUDIES) -> list[Kept]:
    """Return every study with rows or an estimate; folders of parts (`--fraction`) are left out."""
    folders = {path.parent for name in (RESULTS, ESTIMATE) for path in studies.rglob(name)}
    found = []
    for folder in sorted(folders):
        top, *below = folder.relative_to(studies).parts
        if not any(part.startswith("fraction-") for part in below):
            found.append(Kept(folder, top, below[0] if below else "study"))
    return found


def claims_page(studies: Path = STUDIES) -> str:
    """Return the page `docs/results/claims.md`."""
    every = kept(studies)
    rows, words, later = [], list[str](), list[str]()
    for study, verdict, system in _claims(one for one in every if not one.at_scale):
        label, claim = verdict["label"], verdict["claim"]
        scaled = sorted((one for one in every if one.top == study.top and one.at_scale), key=lambda one: not one.narrow)
        by, again = next(((one, found) for one in scaled if (found := one.verdict(label))), (None, None))
        hours = next((found for one in scaled if (found := one.hours(label)) is not None), None)
        words.append(verdict["agrees"])
        later.append(again["word"] if again else "not run")
        rows.append(
            [
                system,
                f"{label} ({(study.facts or {})['study']['equal']})",
                f"{claim['word']} {signed(claim['difference'])}".removesuffix(" -"),
                *_found(verdict),
                *(_found(again, ", width 32" if by and by.narrow else "") if again else ("not run", "-")),
                _left(again, hours) if again else "-" if hours is None else f"{hours:.1f}",
            ]
        )
    rows.sort(key=lambda row: row[0])
    head = ["system", "claim (equal)", "it says", "30 seconds", "verdict", "at scale", "verdict", "core hours left"]
    agree, disagree, undecided = (words.count(word) for word in ("agrees", "disagrees", "open"))
    ran, decided = len(later) - later.count("not run"), sum(word in DECIDED for word in later)
    lines = [
        "# The claims of the public systems",
        "",
        f"{len(rows)} claims of the public systems about single changes, beside our results, in bits per byte against"
        " the same rival; negative is better, in brackets the 95 % interval of three random seeds or more."
        " **30 seconds** are twins of half a minute (`NAME_mini`), where less than 0.001 is the same:"
        f" {agree} claims are true there, {disagree} not, {undecided} undecided."
        " **At scale** are twins that make all the steps of the public runs (`NAME_scale`), in equal modelled time on"
        " eight H100 ([studies](../studies.md#modelled-seconds)). Where a claim was asked of twins of width 32 as well"
        " (`NAME_scale32`), which read as many tokens for each parameter as the records, their answer counts:"
        f" {ran} of {len(rows)} were run,"
        f" {decided} are decided, that is better, worse, or the same within 0.002.",
        "",
        "A claim that was asked in equal steps and in equal seconds stands here twice; at scale one run answers both."
        " Core hours are those of the entry's runs alone, its rival's apart, as `caddie study --estimate` has"
        " them: training by FLOPs from a timing of the base, scoring timed, packing left out.",
        "",
        "The last column gives, for an undecided claim, the random seeds that would decide it with 80 % power if"
        " difference and spread stay as measured (those already run included), and the core hours of the further ones.",
        "",
        "Made from the studies' rows; a test fails when it is old.",
        "",
        markdown_table(head, rows),
        "",
        "## What it takes",
        "",
        *_plans(every),
    ]
    return "\n".join(lines) + "\n"


def measured_json(studies: Path = STUDIES) -> str:
    """Return the file of `caddie.recipes.techniques.measurements`: differences at scale of three seeds or more."""
    scaled, found = [one for one in kept(studies) if one.at_scale], dict[str, list[dict[str, Any]]]()
    for technique, labels in TECHNIQUES.items():
        for label in labels:
            for study in scaled:
                if verdict := study.verdict(label):
                    known = {
                        "difference": round(verdict["difference"], 4),
                        "interval": [round(end, 4) for end in verdict["interval"]] if verdict["interval"] else None,
                        "seeds": len(verdict["seeds"]),
                        "verdict": _found(verdict)[1],
                        "entry": label,
                        "study": f"studies/{study.title}",
                    }
                    found.setdefault(technique, []).append(known)
    lists = (
        f"  {json.dumps(name)}: [\n" + ",\n".join(f"    {json.dumps(one)}" for one in known) + "\n  ]"
        for name, known in found.items()
    )
    return "{\n" + ",\n".join(lists) + "\n}\n"


def _claims(studies: Iterable[Kept]) -> Iterator[tuple[Kept, Mapping[str, Any], str]]:
    """Yield the verdicts on claims of the public systems, each with its study and the system."""
    for study in studies:
        for verdict in study.facts["verdicts"] if study.facts else ():
            if verdict["claim"] and (system := SYSTEM.search(verdict["claim"]["source"])):
                yield study, verdict, system[1]


def _found(verdict: Mapping[str, Any], note: str = "") -> tuple[str, str]:
    """Return difference with interval and a note, and the verdict."""
    interval = " to ".join(signed(end) for end in verdict["interval"] or ())
    measured = signed(verdict["difference"]) + (f" ({interval})" if interval else "") + note
    return measured, verdict["word"] if verdict["word"] in DECIDED else "undecided"


def _left(verdict: Mapping[str, Any], hours: float | None) -> str:
    """Return the core hours that a claim which was run still takes: of seeds planned, or of those that would decide."""
    if verdict["word"] in DECIDED:
        return "-"
    if (needed := verdict["seeds_needed"]) is None:
        return "no number of seeds decides"
    more = needed - len(verdict["seeds"])
    return f"{needed:,} seeds: {more * verdict['seconds'] / 3600:.1f}" if more > 0 else f"{hours or 0.0:.1f}"


def _plans(every: list[Kept]) -> Iterator[str]:
    """Yield the lines on studies at scale that have an estimate, those of the claims first, and their sums."""
    planned = sorted((one for one in every if one.at_scale and one.estimate), key=lambda one: one.top == "ablations")
    rows, left = [], dict[str, tuple[int, float]]()
    for one in planned:
        estimate, facts = one.estimate or {}, one.facts
        done = facts["cost"]["runs"] if facts else 0
        runs = one.runs - done if facts else estimate["runs"]
        each = estimate["core_hours"] / max(1, estimate["runs"])
        left[one.title] = runs, each * runs
        rows.append([f"studies/{one.title}", len(estimate["labels"]), done, runs, f"{left[one.title][1]:.1f}"])
    yield (
        "Each of these is one command, with a STUDY of the table. It goes on where it ended; `--fraction 0.1` does a "
        "tenth of the training. Runs that another study has made already are not left:"
    )
    yield ""
    yield "    caddie study STUDY --data train_open.jsonl.xz --background"
    yield ""
    yield markdown_table(["study", "labels", "runs done", "runs left", "core hours left"], rows)
    for what, chosen in (
        ("The claims", [one for one in planned if one.name.startswith("scale")]),
        ("Every line of the best record and of champion", [one for one in planned if one.top == "ablations"]),
    ):
        runs, hours = (sum(left[one.title][column] for one in chosen) for column in (0, 1))
        yield ""
        yield f"{what}: {count(runs, 'run')} left, {hours:,.0f} core hours, by {count(len(chosen), 'estimate')}."


def costs_page(studies: Path = STUDIES) -> str:
    """Return the page `docs/results/costs.md`."""
    rows, total, counted = [], 0.0, set[tuple[object, ...]]()
    for one in kept(studies):
        if one.facts is None:
            continue
        described, cost = one.facts["study"], one.facts["cost"]
        kept_rows = read_rows(one.folder / RESULTS)
        for row in (row for row in kept_rows if row["state"] == "finished"):
            same = (row["seed"], row.get("train_seconds"), row.get("total_seconds"))
            total += 0.0 if same in counted else costs([row], None)["core_seconds"]
            counted.add(same)
        tenth = sum(_tenth(row) for row in kept_rows)
        rows.append(
            [
                f"studies/{one.title}",
                described["why"],
                f"{cost['runs']:,}",
                f"{cost['core_seconds'] / 3600:.1f}",
                f"{tenth / 3600:.1f}",
            ]
        )
    commands = [
        _command(one.facts["study"]["command"]) for one in kept(studies) if one.facts and one.facts["study"]["command"]
    ]
    return "\n".join(
        [
            "# What the studies cost",
            "",
            f"{len(rows)} studies with rows, {total / 3600:,.1f} core hours together. Core hours are the seconds of"
            " the runs that finished, by their rows, times their threads; training that several runs share counts"
            " once, and in the sum a run of several studies, too. What a machine did beside them is in it. A tenth is"
            " a tenth of the training, with all of packing and scoring. Made from the rows; a test fails when it is"
            " old.",
            "",
            markdown_table(["study", "question", "runs", "core hours", "a tenth"], rows),
            "",
            "Again, in this order; a study's runs that are over are not run again:",
            "",
            *(f"    {command}" for command in commands),
            "",
            "A tenth of each, as a study of its own (`fraction-0.1` beside the results):",
            "",
            *(f"    {command} --fraction 0.1" for command in commands),
            "",
            "[What the texts are](../studies.md#their-texts); any other will do to see a study work. [The first"
            " results](2026-11-21-studies.md) have their own words on machine and date. What studies that were not"
            " run yet would take:"
            " [the claims](claims.md#what-it-takes).",
            "",
        ]
    )


def _tenth(row: Mapping[str, Any]) -> float:
    """Return core seconds of a run with a tenth of its training."""
    if row.get("state") != "finished":
        return 0.0
    shared = row.get("trained_with") not in (None, row["label"])
    train = row["train_seconds"] if is_finite(row.get("train_seconds")) and not shared else 0.0
    return (spent(row) - 0.9 * train) * (row.get("threads") or 1)


def _command(typed: str) -> str:
    """Return a command without the folder of its text."""
    return re.sub(r"(--data )\S*/", r"\1", typed)
