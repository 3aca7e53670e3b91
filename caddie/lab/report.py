"""Report a study, or any finished runs, as a table and as files: an offline HTML page, Markdown and CSV."""

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from caddie.errors import UserError, count
from caddie.files import write_file
from caddie.lab.findings import findings
from caddie.lab.measured import Row, listed
from caddie.lab.plots import curves, forest, marked, sizes, standings, sweep_lines, written
from caddie.lab.rows import RESULTS, STUDY, from_runs, read_rows, read_study
from caddie.lab.study import Study
from caddie.report.charts import is_finite
from caddie.report.page import csv_table, template
from caddie.report.read import result_errors
from caddie.report.run_files import REPORT
from caddie.report.tables import crop, duration, markdown_lines, number, printable, table

OPEN_ROWS = 40
"""Rows of a long list that are shown before the rest is folded away."""
HOLDOUT = "Bits per byte of text that no run of the study has seen. Verdicts are by seed."
MINUS = "\N{MINUS SIGN}"
_COLUMNS = (
    *("study", "label", "kind", "seed", "state", "error"),
    *("bits_per_byte", "trained", "averaged", "packed", "quantization_loss", "holdout"),
    *("verified", "under_cap", "artifact_bytes"),
    *("parameters", "steps", "tokens", "tokens_per_second", "train_seconds", "total_seconds"),
    *("step_ms", "step_ms_by"),
    *("device", "processor", "precision", "threads", "workers", "cpu_share", "code", "program_sha256", "scorer_sha256"),
)
_HASHES = ("recipe", "train_documents", "validation_documents", "tokenizer", "artifact")


@dataclass(frozen=True)
class Results:
    """Results of a study: a table as text, a table and a plot in a notebook."""

    study: Study
    rows: Sequence[Row]
    """One for each run that is over."""
    folder: Path
    """Folder of `results.jsonl` and the reports."""
    price: float | None = None
    """Price of an hour of one GPU."""

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Verdicts, leaderboard, failures, notes and costs, as JSON values (see `caddie.lab.findings`)."""
        return findings(self.study.to_json(), self.rows, self.price)

    def write(self) -> list[Path]:
        """Write the report as a page, as Markdown and as CSV, and return their paths."""
        return write_study_report(self.folder, price=self.price)

    def _repr_html_(self) -> str:
        return verdict_html(self.facts)

    def __str__(self) -> str:
        facts, study, rows = self.facts, self.facts["study"], []
        claims = any(one["claim"] for one in facts["verdicts"])
        room = 24 + max(0, shutil.get_terminal_size().columns - 80)  # for the longest label on a wide terminal
        if base := next((one for one in facts["board"] if one["label"] == study["label"]), None):
            figures = [len(base["seeds"]), f"{base['mean']:.4f}", "", ""]
            rows.append([crop(base["label"], room), *figures, "the base", *([""] if claims else [])])
        for one in facts["verdicts"]:
            reach = one["interval"] and (one["interval"][1] - one["interval"][0]) / 2
            difference = signed(one["difference"]) + (f" ±{reach:.4f}" if reach else "")
            figures = [len(one["seeds"]), f"{one['mean']:.4f}", difference, verdict_q(one)]
            claimed = [one["claim"]["word"] if one["claim"] else ""] if claims else []
            rows.append([crop(one["label"], room), *figures, one["word"], *claimed])
        lines = [f"{study['name']}: {study['why']}" if study["why"] else study["name"], facts["found"]]
        if rows:
            names = ["entry", "seeds", "mean", "difference", "q", "verdict", *(["claimed"] if claims else [])]
            lines += ["", *table(rows, names).split("\n"), ""]
            lines.append("differences in bits per byte, negative is better; q is p adjusted for the number of entries")
        reasons: dict[str, list[str]] = {}
        for one in facts["verdicts"]:
            if one["reason"]:
                reasons.setdefault(one["reason"], []).append(one["label"])
        lines += [f"note    {', '.join(labels)}: {reason}" for reason, labels in reasons.items()]
        lines += [f"failed  {one['label']}: {one['error']}" for one in facts["failed"]]
        lines += [f"note    {one}" for one in facts["notes"]]
        return "\n".join(map(printable, lines))


def write_study_report(folder: Path, *, price: float | None = None) -> list[Path]:
    """Write `report.html`, `report.md` and `results.csv` beside `study.json` and `results.jsonl`; return their paths.

    `price` is the money for an hour of one GPU, or of the machine where there is none.
    """
    study, rows = read_study(folder / STUDY), read_rows(folder / RESULTS)
    with result_errors(folder, "a report", "run the study again"):
        return _write(folder, study, rows, price)


def write_runs_report(folders: Sequence[Path], out: Path, *, price: float | None = None) -> list[Path]:
    """Write the same files for finished runs to `out`; runs of one recipe are one label, and the first is the base."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; name a folder with --out")
    held = {path.name for path in out.iterdir()} if out.is_dir() else set()
    if foreign := sorted(held - {REPORT, "report.md", "results.csv"}):
        raise UserError(f"{out} holds other files, such as {foreign[0]}; name an empty folder with --out")
    study, rows = from_runs(folders)
    out.mkdir(parents=True, exist_ok=True)
    return _write(out, study, rows, price)


def _write(folder: Path, study: Mapping[str, Any], rows: Sequence[Row], price: float | None) -> list[Path]:
    facts = findings(study, rows, price)
    texts = {REPORT: page(facts), "report.md": markdown(facts), "results.csv": _csv(rows)}
    for name, text in texts.items():
        write_file(folder / name, text.encode(errors="replace"))
    return [folder / name for name in texts]


def page(facts: Mapping[str, Any]) -> str:
    """Return the HTML page of the findings."""
    board, base = facts["board"], facts["study"]["label"]
    colored = marked(board, base)
    return template("lab/report.html.jinja").render(
        **_context(facts),
        ranks=standings(board, facts["study"]["public"]),
        colored=colored,
        by_steps=curves(facts["curves"]["steps"], colored, "steps"),
        by_seconds=curves(facts["curves"]["seconds"], colored, "seconds"),
        space=sizes(board),
        sweep=sweep_lines(facts["swept"]) if facts["swept"] else None,
        frontier=sorted((one for one in board if one["frontier"]), key=lambda one: one["artifact_bytes"]),
    )


def verdict_html(facts: Mapping[str, Any]) -> str:
    """Return the summary and the differences with their intervals as HTML for a notebook."""
    return template("lab/verdicts.html.jinja").render(**_context(facts))


def _context(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "facts": facts,
        "base": facts["study"]["label"],
        "plot": forest(facts["verdicts"], facts["study"]["margin"]),
        "claimed": any(one["claim"] for one in facts["verdicts"]),
        "open_rows": OPEN_ROWS,
        "holdout_words": HOLDOUT,
        **{one.__name__: one for one in (signed, bits, integer, signed_integer, verdict_q, duration, money, problem)},
        **{one.__name__: one for one in (order_words, step_words, sweep_words)},
    }


def signed(value: float | None) -> str:
    """Format a difference in bits per byte: `−0.0012`; `-` for an unknown value, as in all these functions."""
    if not is_finite(value):
        return "-"
    text = f"{value:+.4f}"
    return text.replace("-", MINUS) if float(text) else text[1:]


def bits(value: float | None) -> str:
    """Format bits per byte: `2.8312`."""
    return f"{value:z.4f}".replace("-", MINUS) if is_finite(value) else "-"


def integer(value: float | None) -> str:
    """Format a count: `1,234`."""
    return f"{value:,.0f}" if is_finite(value) else "-"


def signed_integer(value: float | None) -> str:
    """Format a difference of counts: `+1,234`."""
    return (f"{round(value):+,}" if round(value) else "0").replace("-", MINUS) if is_finite(value) else "-"


def p_value(value: float | None) -> str:
    """Format a p or q."""
    if not is_finite(value):
        return "-"
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def verdict_q(one: Mapping[str, Any]) -> str:
    """Format the q that decided the word of a verdict."""
    return p_value(one["q_same" if one["word"] == "same" else "q"])


def money(value: float) -> str:
    """Format an amount of money."""
    return f"{value:,.2f}" if value >= 1 or not value else f"{value:.2g}"


def markdown(facts: Mapping[str, Any]) -> str:
    """Return the report as Markdown: summary, verdicts, leaderboard, and how it was measured."""
    study = facts["study"]
    parts = [f"# {_cell(study['name'])}"]
    parts += [_cell(study["why"])] if study["why"] else []
    parts += [facts["found"], "\n".join(f"- {_cell(note)}" for note in facts["notes"])]
    if facts["swept"]:
        parts += ["## Swept settings", *_sweep_table(facts["swept"])]
    if facts["verdicts"]:
        parts += ["## Verdicts", _verdicts_table(facts["verdicts"], study["label"])]
    if facts["board"]:
        parts += ["## Leaderboard", _board_table(facts["board"], study["step_times"])]
    if facts["holdout"]:
        parts += ["## Holdout", HOLDOUT, _holdout_table(facts["holdout"], study["label"])]
    if order := facts["public_order"]:
        names = ["from", "to", "public", "here", "here, by packing", "order"]
        rows = [
            [one["from"], one["to"], *map(signed, (one["public"], one["ours"], one["packing"])), one["order"]]
            for one in order["steps"]
        ]
        parts += ["## Order of the public scores", order_words(order), markdown_table(names, rows)]
    if early := facts["early"]:
        rows = []
        for row in early["rows"]:
            ranks, held = number(row["spearman"], ".2f"), number(row["order_held"], ".0%")
            rows.append([f"{row['progress']:.0%}", ranks, held, f"{row['best_kept']} of {row['of']}"])
        names = ["after", "rank correlation with the end", "pairs that kept their order", "best in the better half"]
        parts += ["## How early the ranks were known", markdown_table(names, rows)]
    if facts["failed"]:
        rows = [[one["label"], ", ".join(map(str, one["seeds"])), one["error"]] for one in facts["failed"]]
        parts += ["## Failed runs", markdown_table(["label", "seeds", "reason"], rows)]
    parts += ["## How it was measured", markdown_table(["", ""], facts["measured"])]
    return "\n\n".join(part for part in parts if part) + "\n"


def sweep_words(found: Mapping[str, Any]) -> str:
    """Describe the figures of a sweep."""
    first, *second = (axis[0] + (f" (with it {', '.join(axis[1:])})" if axis[1:] else "") for axis in found["axes"])
    seeds = f"seed{'s' * (len(found['seeds']) > 1)} {', '.join(map(str, found['seeds']))}"
    words = f"Bits per byte over {first}" + (f", for each {second[0]}" if second else "")
    words += f": {'mean over ' * (len(found['seeds']) > 1)}{seeds}." if found["seeds"] else ": means over unlike seeds."
    others = len(found["left_out"])
    return words + (f" Left out: {count(others, 'label')} with other changes." if others else "")


def order_words(order: Mapping[str, Any]) -> str:
    """Describe the agreement with the order of the public scores."""
    intervals = {name: order[f"{name}_interval"] or () for name in ("spearman", "kendall")}
    ends = {name: " to ".join(f"{end:.2f}" for end in interval) or "-" for name, interval in intervals.items()}
    unpacked = ""
    if order["unpacked"]:
        both = " and ".join(number(order["unpacked"][name], ".2f") for name in ("spearman", "kendall"))
        unpacked = f" Without the quantization gap: {both}."
    return (
        f"{len(order['labels'])} labels with public scores, {count(order['seeds'], 'seed')} or more each: rank"
        f" correlation {number(order['spearman'], '.2f')} (Spearman, 95 % interval {ends['spearman']}),"
        f" {number(order['kendall'], '.2f')} (Kendall, {ends['kendall']}).{unpacked}"
    )


def _sweep_table(found: Mapping[str, Any]) -> list[str]:
    """Return description and table: the first axis downwards, the second across, the best of each column in bold."""
    first, *second = (axis[0] for axis in found["axes"])
    names = [_cell(f"{first} \N{DOWNWARDS ARROW}, {second[0]} \N{RIGHTWARDS ARROW}" if second else first)]
    names += [written(line["value"]) if second else "bits per byte" for line in found["lines"]]
    columns = [{point["value"]: bits(point["mean"]) for point in line["points"]} for line in found["lines"]]
    for line, column in zip(found["lines"], columns, strict=True):
        column[line["best"]] = f"**{column[line['best']]}**"
    values = sorted({value for column in columns for value in column})
    rows = [[written(value), *(column.get(value, "-") for column in columns)] for value in values]
    return [_cell(sweep_words(found)), markdown_lines(names, rows)]


def _verdicts_table(verdicts: Sequence[Mapping[str, Any]], base: str) -> str:
    claimed = any(one["claim"] for one in verdicts)
    priced = any(one["money"] is not None for one in verdicts)
    names = ["entry", "changes", "seeds", "mean", "difference", "95 % interval"]
    names += ["standard error", "unpaired", "q", "verdict", "bytes"]
    rows = []
    for one in verdicts:
        against = "" if one["against"] == base else f" (against {one['against']})"
        interval = " to ".join(map(signed, one["interval"] or ())) or "-"
        changes = listed([f"{path}={value}" for path, value in one["diff"].items()], most=6)
        against += f" ({problem(one)})" if problem(one) else ""
        row = [one["label"] + against, changes, len(one["seeds"]), bits(one["mean"]), signed(one["difference"])]
        row += [interval, *((bits(one["spread"][name]) if one["spread"] else "-") for name in ("paired", "unpaired"))]
        row += [verdict_q(one), one["word"], signed_integer(one["bytes"])]
        if claimed:
            claim = one["claim"] or {"word": "-", "difference": None}
            stated = f" {signed(claim['difference'])}" if is_finite(claim["difference"]) else ""
            row += [claim["word"] + stated, one["agrees"] or "-"]
        rows.append([*row, duration(one["seconds"]), *([money(one["money"])] if priced else [])])
    names += ["claim", "our result"] if claimed else []
    return markdown_table([*names, "time per run", *(["costs"] if priced else [])], rows)


def problem(one: Mapping[str, Any]) -> str:
    """Return the reason why the artifacts of a label do not count, or an empty text."""
    return "over the cap" if one["under_cap"] is False else "failed verification" if one["verified"] is False else ""


def step_words(one: Mapping[str, Any]) -> str:
    """Describe the time of a step at full size: `86.69 ms, published`."""
    return f"{one['milliseconds']:.2f} ms, {one['source']}"


def _board_table(board: Sequence[Mapping[str, Any]], step_times: Mapping[str, Mapping[str, Any]]) -> str:
    names = ["", "label", "bits per byte", "deviation", "trained", "quantization gap", "bytes", "parameters"]
    names.append("steps (each at full size)" if step_times else "steps")
    rows = [
        [
            place,
            one["label"] + (" (frontier)" if one["frontier"] else f" ({problem(one)})" if problem(one) else ""),
            *(bits(one[name]) for name in ("mean", "deviation", "trained", "quantization_loss")),
            *(integer(one[name]) for name in ("artifact_bytes", "parameters")),
            integer(one["steps"]) + (f" ({step_words(step_times[one['label']])})" if step_times else ""),
            integer(one["tokens_per_second"]),
        ]
        for place, one in enumerate(board, 1)
    ]
    return markdown_table([*names, "tokens/s"], rows)


def _holdout_table(holdout: Sequence[Mapping[str, Any]], base: str) -> str:
    rows = [
        [
            one["label"] + (f" (against {one['against']})" if one["against"] not in (None, base) else ""),
            len(one["seeds"]),
            bits(one["mean"]),
            signed(one["difference"]),
            " to ".join(map(signed, one["interval"] or ())) or "-",
            *([verdict_q(one), one["word"]] if one["word"] else ["-", "-"]),
        ]
        for one in holdout
    ]
    return markdown_table(["label", "seeds", "mean", "difference", "95 % interval", "q", "verdict"], rows)


def markdown_table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table of values."""
    return markdown_lines([*map(_cell, names)], (list(map(_cell, row)) for row in rows))


def _cell(value: object) -> str:
    """Escape text for a cell of a Markdown table."""
    text = " ".join(str(value).split())
    return re.sub(r"([|\\`*_\[\]])", r"\\\1", text).replace("<", "&lt;")


def _csv(rows: Sequence[Row]) -> str:
    """Return a CSV line per run, without curves."""
    lines = []
    for row in rows:
        hashes = {f"sha256_{name}": digest for name, digest in (row.get("sha256") or {}).items()}
        diff = "; ".join(f"{path}={value}" for path, value in (row.get("diff") or {}).items())
        lines.append({**row, **hashes, "diff": diff})
    return csv_table(lines, [*_COLUMNS, *(f"sha256_{name}" for name in _HASHES), "diff"])
