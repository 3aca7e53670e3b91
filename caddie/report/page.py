"""Write the page of a run: one HTML file of `result.json` and `log.jsonl` that needs no network and no script.

Every value a page shows passes through the template's escaping, and every length is a percentage from 0 to 100, so
no content of a run folder can break the page out of its layout.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caddie.config import show
from caddie.files import write_file
from caddie.report.charts import curve_chart, decimal, is_finite, loss_chart, marks, nice_ticks, percent
from caddie.report.read import pick, read_scored_result, read_steps, result_errors, training_notes
from caddie.report.run_files import LOG, REPORT, RESULT
from caddie.report.tables import LEDGER_WORDS
from caddie.report.verification import verified

if TYPE_CHECKING:
    from jinja2 import Template

OPEN_BARS = 12
"""Bars of a long list that are shown before the rest is folded away."""
_STAGES = (
    ("Trained", "plain", "trained_plain"),
    ("Averaged", "plain", "averaged_plain"),
    ("Quantized, packed", "plain", "quantized_plain"),
    ("Quantized, packed", "sliding", "quantized_sliding"),
    ("Quantized, packed", "adaptive", "quantized_adaptive"),
)
_PARTS = {**LEDGER_WORDS, "container": "container overhead"}
_STEP_COLUMNS = ("step", "seconds", "progress", "loss", "bits_per_byte", "tokens", "tokens_per_second", "lr_scale")
_PHASE_COLORS = (5, 1, 0, 3, 4, 2)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters other than tab and line feed; a page shows a mark in place of each."""


@dataclass(frozen=True)
class Bar:
    """Line of a bar list: a label, a figure as text, and a length in percent."""

    label: str
    text: str | None
    at: float | None
    detail: str = ""
    mark: int = 0


def write_report(folder: Path) -> Path:
    """Write `report.html` beside the `result.json` and `log.jsonl` of `folder`, and return its path."""
    with result_errors(folder / RESULT, "a report"):
        result, log = read_scored_result(folder / RESULT), folder / LOG
        page = render(result, read_steps(log), read_steps(log, "held_out"))
    write_file(folder / REPORT, page.encode(errors="replace"))
    return folder / REPORT


def render(
    result: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], held_out: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Return the page as HTML, from a result and the `step` and `held_out` events of its log."""
    sizes, seconds = pick(result, "ledger", "parts") or {}, result.get("seconds") or {}
    compression = result.get("compression") or {}
    phases = {name.replace("_", " ").capitalize(): value for name, value in seconds.items() if name != "total"}
    return template("report/report.html.jinja").render(
        result=result,
        head=_head(result),
        line=_line(result),
        beside=_beside(result),
        chart=loss_chart(steps, held_out),
        notes=training_notes(result),
        downloads=_downloads(result, steps, held_out),
        parts=_shares({_PARTS.get(name, name).capitalize(): size for name, size in sizes.items()}, ",d"),
        phases=_shares(phases, ",.1f", _PHASE_COLORS),
        by_bytes=_tensors(result, "bytes", ",d"),
        by_error=_tensors(result, "relative_error", ".5f"),
        by_loss=_tensors(result, "predicted_bits_per_byte", ".6f"),
        curve=curve_chart(compression, result.get("artifact_bytes"), result.get("cap_bytes")),
        worth=_worth(compression),
        settings=[(path, setting(value)) for path, value in (result.get("diff") or {}).items()],
        policies=_policies(result),
        public=result.get("public") or [],
        number=number,
        fact=lambda path, form="": _fact(pick(result, *path.split(".")), form),
        open_bars=OPEN_BARS,
    )


@cache
def template(name: str) -> Template:
    """Return a template of the package. It escapes every value; a missing variable is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("caddie", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    ).get_template(name)


def number(value: float | None, form: str) -> str | None:
    """Format `value`; None if it was not measured, and `not finite` for infinities and NaN."""
    if value is None:
        return None
    return format(round(value) if form.endswith("d") else value, form) if math.isfinite(value) else "not finite"


def setting(value: object) -> str:
    """Format a value of a diff: `Warmdown(fraction=0.5)` where JSON has a mapping with a `kind`."""
    if isinstance(value, Mapping) and "kind" in value:
        inside = ", ".join(f"{name}={setting(held)}" for name, held in value.items() if name != "kind")
        return f"{value['kind']}({inside})"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(setting, value)) + "]"
    return show(value)


def _shown(value: object) -> object:
    if value is None:
        return "not measured"
    if type(value) is str:  # not Markup, which the template made itself
        return _CONTROLS.sub("\ufffd", value)
    return value


def _head(result: Mapping[str, Any]) -> dict[str, Any]:
    size, cap = result.get("artifact_bytes"), result.get("cap_bytes")
    training, scores = result.get("training"), result.get("scores") or {}
    way = next((way for way in ("adaptive", "sliding") if scores.get(f"quantized_{way}")), "plain")
    facts = [
        (number(pick(training, "parameters"), ",d"), "parameters"),
        (number(pick(training, "steps"), ",d"), "steps"),
        (number(pick(training, "tokens"), ",d"), "tokens"),
        (number(pick(result, "seconds", "train"), ",.1f"), "seconds of training"),
        (number(pick(training, "tokens_per_second"), ",.0f"), "tokens per second"),
    ]
    return {
        "way": way,
        "width": percent(size, 0, cap or 0),
        "share": number(100 * size / cap, ".1f") if size is not None and cap else None,
        "over": result.get("under_cap") is False,
        "verified": verified(result),
        "facts": [
            *(f"{text} {name}" for text, name in facts if text is not None),
            *([str(result["device"])] if result.get("device") else []),
            *([f"seed {result['seed']}"] if result.get("seed") is not None else []),
        ],
    }


def _downloads(
    result: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], held_out: Sequence[Mapping[str, Any]]
) -> list[dict[str, str]]:
    """Return the result as JSON and the events of the log as CSV, each as a data URL, so that the page stands alone."""
    files = {
        "result.json": ("application/json", json.dumps(result, indent=2)),
        "steps.csv": ("text/csv", csv_table(steps, _STEP_COLUMNS)),
    }
    if held_out:
        files["held_out.csv"] = "text/csv", csv_table(held_out, _STEP_COLUMNS[:6])  # they have no speed
    return [
        {"name": name, "address": f"data:{kind};base64,{base64.b64encode(content.encode(errors='replace')).decode()}"}
        for name, (kind, content) in files.items()
    ]


def csv_table(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Return the rows as CSV with these columns; empty where a row has no value."""
    text = io.StringIO()
    table = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def _line(result: Mapping[str, Any]) -> dict[str, Any] | None:
    values = [pick(result, "scores", key, "bits_per_byte") for _, _, key in _STAGES]
    finite = [value for value in values if is_finite(value)]
    if not finite:
        return None
    ticks = nice_ticks(min(finite), max(finite), 4)
    low, high = ticks[0], ticks[-1]
    rows, before = [], None
    result_row = max(index for index, value in enumerate(values) if is_finite(value))
    for index, ((stage, way, _), value) in enumerate(zip(_STAGES, values, strict=True)):
        if way == "adaptive" and value is None:
            continue  # most recipes learn nothing while they are scored
        change, at = "", None
        if is_finite(value):
            change = f"{value - before:+z.4f}".replace("-", "\u2212") if before is not None else ""
            before, at = value, percent(value, low, high)
        bar = Bar(stage, number(value, ".4f"), at, change, int(index == result_row))
        rows.append({"stage": stage, "way": way, "bar": bar})
    drawn = marks(ticks)
    return {"rows": rows, "ticks": drawn, "low": drawn[0].label, "high": drawn[-1].label}


def _beside(result: Mapping[str, Any]) -> list[Bar]:
    entries = [
        (f"This artifact, {way}", pick(result, "scores", f"quantized_{way}", "bits_per_byte"), 1)
        for way in ("adaptive", "sliding", "plain")
    ]
    entries += [(name, pick(entry, "bits_per_byte"), 0) for name, entry in (result.get("compressors") or {}).items()]
    known = sorted((value, name, mark) for name, value, mark in entries if is_finite(value))
    longest = known[-1][0] if known else 0.0
    return [Bar(name, number(value, ".4f"), percent(value, 0.0, longest), mark=mark) for value, name, mark in known]


def _shares(values: Mapping[str, Any], form: str, colors: Sequence[int] = range(6)) -> list[Bar]:
    total = math.fsum(value for value in values.values() if is_finite(value))
    bars = []
    for index, (name, value) in enumerate(values.items()):
        share = percent(value, 0, total)
        text = f"{share:.1f} %" if share >= 0.05 or share == 0 else "< 0.1 %"
        bars.append(Bar(name, number(value, form), share, text if is_finite(value) else "", colors[index % 6]))
    return bars


def _tensors(result: Mapping[str, Any], key: str, form: str) -> list[Bar]:
    known = [entry for entry in result.get("tensors") or [] if isinstance(entry.get(key), (int, float))]
    known.sort(key=lambda entry: -entry[key] if is_finite(entry[key]) else -math.inf)
    longest = max((entry[key] for entry in known if is_finite(entry[key])), default=0.0)
    bars = []
    for entry in known:
        value, count = entry[key], entry.get("parameters")
        detail = f"{' × '.join(map(str, entry.get('shape') or []))} {entry.get('quantizer') or ''}".strip()
        if key == "bytes" and is_finite(value) and is_finite(count) and count:
            detail += f", {8 * value / count:.2f} bits per weight"
        length = percent(value, 0, longest) if is_finite(value) else 100.0
        bars.append(Bar(str(entry.get("name")), number(value, form), length, detail))
    return bars


def _worth(found: Mapping[str, Any]) -> str | None:
    """Return a sentence on the effect of other file sizes, from a result's `compression`."""
    step, more, fewer = (found.get(f"step_{name}") for name in ("bytes", "more_bits_per_byte", "fewer_bits_per_byte"))
    if not (is_finite(step) and is_finite(more) and is_finite(fewer)):
        return None
    said = f"{step:,.0f} bytes more would lower the predicted loss by {decimal(-more)} bits per byte; "
    return f"{said}{step:,.0f} fewer would raise it by {decimal(fewer)}."


def _policies(result: Mapping[str, Any]) -> dict[str, Any]:
    entries, rows = result.get("policies") or [], []
    for entry in entries:
        cells = [_held(entry.get("bytes"), entry.get("cap_bytes"), ",d")]
        for clock in (entry.get("training"), entry.get("evaluation")):
            cells.append(_held(pick(clock, "seconds"), pick(clock, "budget_seconds"), ",.1f"))
        rows.append({"name": entry.get("name"), "why": entry.get("why"), "cells": cells})
    machines = dict.fromkeys(str(entry["hardware"]) for entry in entries if entry.get("hardware"))
    return {"rows": rows, "machines": ", ".join(machines)}


def _held(value: float | None, limit: float | None, form: str) -> dict[str, Any]:
    if limit is None:
        return {"figure": number(value, form), "limit": "no limit", "over": False}
    over = value is not None and value > limit
    said = f"{number(value - limit, form)} over" if over and value else f"of {number(limit, form)}"
    return {"figure": number(value, form), "limit": said.removesuffix(".0"), "over": over}  # of 600, not of 600.0


def _fact(value: Any, form: str) -> object:
    if isinstance(value, Mapping):
        return ", ".join(f"{_fact(item, form)} {name}" for name, item in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value, form) if form and isinstance(value, (int, float)) else value
