"""The page of a run: `result.json` and `log.jsonl` turned into one HTML file that needs no network and no script.

Every value a page shows passes through the template's escaping, and every length is a percentage from 0 to 100, so
no content of a run folder can break the page out of its layout.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from caddie.config import show
from caddie.errors import UserError
from caddie.files import replacing

if TYPE_CHECKING:
    from jinja2 import Template

VERSION = 1
"""The version of `result.json` that this module reads."""
OPEN_BARS = 12
"""Bars of a long list that are shown before the rest is folded away."""
POINTS = 400
"""Most points of a line; more would not be visible."""
SPLIT = 800.0
"""Where the chart's upper band ends, of 1,000; the learning rate has what is below `SPLIT_END`."""
SPLIT_END = 880.0

_STAGES = (
    ("Trained", "plain", "trained_plain"),
    ("Averaged", "plain", "averaged_plain"),
    ("Quantized, packed", "plain", "quantized_plain"),
    ("Quantized, packed", "sliding", "quantized_sliding"),
    ("Quantized, packed", "adaptive", "quantized_adaptive"),
)
_PARTS = {
    "weights": "Weights",
    "tokenizer": "Tokenizer",
    "config": "Model config",
    "manifest": "Manifest",
    "source": "Source code",
    "container": "Container overhead",
}
_PHASE_COLORS = (5, 1, 0, 3, 4, 2)
_TIME_STEPS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400)


@dataclass(frozen=True)
class Tick:
    """A labelled place on an axis, `at` percent along it."""

    at: float
    label: str
    below: str = ""


@dataclass(frozen=True)
class Bar:
    """One line of a bar list: a label, a figure as text, and a length in percent."""

    label: str
    text: str | None
    at: float | None
    detail: str = ""
    mark: int = 0


@dataclass(frozen=True)
class Chart:
    """The lines of the loss chart in a 1,000 by 1,000 box, and its ticks."""

    raw: str
    smoothed: str
    scale: str
    scale_top: str
    grid: str
    across: list[Tick]
    up: list[Tick]
    summary: str
    notes: list[str]


def write_report(folder: Path) -> Path:
    """Write `report.html` beside the `result.json` and `log.jsonl` of `folder`, and return its path."""
    folder = Path(folder)
    page = render(read_result(folder / "result.json"), read_steps(folder / "log.jsonl"))
    path = folder / "report.html"
    with replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8", errors="replace")
    return path


def read_result(path: Path) -> dict[str, Any]:
    """The result at `path`, or a `UserError`."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no {path}; a report is made from the folder of a finished run") from None
    except (UnicodeDecodeError, ValueError, RecursionError):
        raise UserError(f"{path} is not JSON; run the recipe again") from None
    version = result.get("version") if isinstance(result, dict) else None
    if version != VERSION:
        raise UserError(f"{path} has version {show(version)}, this program reads {VERSION}; run the recipe again")
    if not isinstance(result.get("recipe"), str):
        raise UserError(f"{path} names no recipe; run the recipe again")
    return dict(result)


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The `step` events of a log in order; what a resumed run did again replaces what it did before."""
    steps: list[dict[str, Any]] = []
    if not path.exists():
        return steps
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue  # a killed run leaves its last line unfinished
            if isinstance(event, dict) and event.get("event") == "step":
                while steps and steps[-1]["step"] >= event["step"]:
                    steps.pop()
                steps.append(event)
    return steps


def render(result: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> str:
    """The page as text."""
    return _template().render(
        result=result,
        head=_head(result),
        line=_line(result),
        beside=_beside(result),
        chart=loss_chart(steps),
        parts=_shares({_PARTS.get(k, k): v for k, v in (pick(result, "ledger", "parts") or {}).items()}, ",d"),
        phases=_shares({k.capitalize(): v for k, v in _phases(result).items()}, ",.1f", _PHASE_COLORS),
        by_bytes=_tensors(result, "bytes", ",d"),
        by_error=_tensors(result, "relative_error", ".5f"),
        total_seconds=number(pick(result, "seconds", "total"), ",.1f"),
        settings=[(path, setting(value)) for path, value in (result.get("diff") or {}).items()],
        policies=_policies(result),
        public=_public(result),
        fact=lambda path, form="": _fact(pick(result, *path.split(".")), form),
        open_bars=OPEN_BARS,
    )


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    text = resources.files("caddie").joinpath("report.html.jinja").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_shown
    )
    return environment.from_string(text)


def pick(value: Any, *path: str) -> Any:
    """What lies at `path` in nested mappings, or `None`."""
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def number(value: float | None, form: str) -> str | None:
    """`value` in a format, `None` if it was not measured; what is not finite says so."""
    if value is None:
        return None
    return format(int(value) if form.endswith("d") else value, form) if math.isfinite(value) else "not finite"


def setting(value: object) -> str:
    """A value of a diff for people: `Warmdown(fraction=0.5)` where JSON has a mapping with a `kind`."""
    if isinstance(value, Mapping) and "kind" in value:
        inside = ", ".join(f"{name}={setting(held)}" for name, held in value.items() if name != "kind")
        return f"{value['kind']}({inside})"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(setting, value)) + "]"
    return show(value)


def percent(value: float | None, low: float, high: float) -> float:
    """How far `value` lies from `low` to `high`, kept from 0 to 100; 0 for what is missing or not finite."""
    if value is None or not math.isfinite(value) or not high > low:
        return 0.0
    return round(min(100.0, max(0.0, 100.0 * (value - low) / (high - low))), 3)


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers whose ends enclose `low` to `high`."""
    if not high - low > 1e-9 * max(abs(low), abs(high)):
        spread = abs(low) * 0.01 or 1.0
        low, high = low - spread, high + spread
    rough = (high - low) / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(0, 1 - math.floor(math.log10(step)))
    return [round(index * step, digits) for index in range(first, last + 1)]


def time_ticks(seconds: float, count: int = 6) -> list[tuple[float, str]]:
    """At most `count` round times after 0, up to `seconds`, in the unit that suits them."""
    step: float = next((size for size in _TIME_STEPS if size * count >= seconds), seconds / count)
    unit, name = (1, "s") if step < 60 else (60, "min") if step < 3600 else (3600, "h")
    marks = [step * index for index in range(int(seconds / step + 1e-9) + 1)]
    return [(mark, f"{mark / unit:g} {name}") for mark in marks]


def smooth(values: Sequence[float], reach: int, at: Iterable[int]) -> list[float]:
    """At each index the mean of the middle half of up to `reach` values to each side, so that no lone spike drags it.

    Windows shrink near the ends and stay centred, so that no end is dragged either.
    """
    means = []
    for index in at:
        side = min(reach, index, len(values) - 1 - index)
        window = sorted(values[index - side : index + side + 1])
        middle = window[len(window) // 4 : len(window) - len(window) // 4]
        means.append(math.fsum(middle) / len(middle))
    return means


def thin(count: int, limit: int) -> list[int]:
    """At most `limit` evenly spaced indices below `count`, the first and the last among them."""
    if count <= limit:
        return list(range(count))
    return [round(index * (count - 1) / (limit - 1)) for index in range(limit)]


def polyline(points: Iterable[tuple[float, float]]) -> str:
    """An SVG path through `points`."""
    return "M" + " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def dots(points: Iterable[tuple[float, float]]) -> str:
    """An SVG path of lines without length, which round caps show as dots however the box is stretched."""
    return " ".join(f"M{x:.1f},{y:.1f}h0" for x, y in points)


def loss_chart(steps: Sequence[Mapping[str, Any]]) -> Chart | None:
    """Loss against time, raw and smoothed, above the learning-rate multiplier; `None` with fewer than two points.

    The first steep twentieth of the run may leave the picture at the top, so that the rest has room.
    """
    known = [step for step in steps if _finite(step.get("loss")) and _finite(step.get("seconds"))]
    if len(known) < 2 or not known[-1]["seconds"] > 0:
        return None
    seconds, losses = [step["seconds"] for step in known], [step["loss"] for step in known]
    kept = thin(len(known), POINTS)
    means = smooth(losses, max(1, len(losses) // 60), kept)
    early = bisect_left(seconds, seconds[-1] / 20)
    settled = sorted(losses[early:])
    highest = max(mean for index, mean in zip(kept, means, strict=True) if index >= early)
    ticks = nice_ticks(min(losses), max(highest, settled[len(settled) * 49 // 50]), 5)

    def across(time: float) -> float:
        return percent(time, 0.0, seconds[-1])

    def place(time: float, loss: float) -> tuple[float, float]:
        height = (loss - ticks[0]) / (ticks[-1] - ticks[0])
        return 10 * across(time), max(-1000.0, SPLIT * (1 - height))

    rates = [(step["seconds"], step["lr_scale"]) for step in known if _finite(step.get("lr_scale"))]
    top = max([1.0, *(rate for _, rate in rates)])
    below = [(10 * across(time), 1000 - percent(rate, 0.0, top) * (1000 - SPLIT_END) / 100) for time, rate in rates]
    notes = [f"Losses above {ticks[-1]:g} lie outside the picture."] if max(losses) > ticks[-1] else []
    if len(known) < len(steps):
        notes.append(f"Entries of the log without a finite loss: {len(steps) - len(known):,}.")
    up = [Tick(round(place(0.0, value)[1] / 10, 3), f"{value:g}") for value in ticks]
    return Chart(
        raw=dots(place(seconds[index], losses[index]) for index in kept),
        smoothed=polyline(place(seconds[index], mean) for index, mean in zip(kept, means, strict=True)),
        scale=polyline(below[index] for index in thin(len(below), POINTS)) if len(below) > 1 else "",
        scale_top=f"{top:g}",
        grid=" ".join(f"M0,{tick.at * 10:.1f}H1000" for tick in up),
        across=[
            Tick(across(time), label, f"{known[_nearest(seconds, time)]['step'] if time else 0:,}")
            for time, label in time_ticks(seconds[-1])
        ],
        up=up,
        summary=f"From {losses[0]:.4f} to {means[-1]:.4f} nats per token in {seconds[-1]:,.1f} seconds.",
        notes=notes,
    )


def _finite(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _nearest(times: Sequence[float], time: float) -> int:
    index = bisect_left(times, time)
    return min((max(index - 1, 0), min(index, len(times) - 1)), key=lambda place: abs(times[place] - time))


def _shown(value: object) -> object:
    if value is None:
        return "not measured"
    if type(value) is str:  # not Markup, which the template made itself
        return "".join(c if (c >= " " and not "\x7f" <= c < "\xa0") or c in "\n\t" else "\ufffd" for c in value)
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
    ]
    return {
        "way": way,
        "bits": number(result.get("bits_per_byte"), ".4f"),
        "plain": number(pick(result, "scores", "quantized_plain", "bits_per_byte"), ".4f"),
        "score": f"scores.quantized_{way}.",
        "bytes": number(size, ",d"),
        "cap": number(cap, ",d"),
        "width": percent(size, 0, cap or 0),
        "share": number(100 * size / cap, ".1f") if size is not None and cap else None,
        "over": result.get("under_cap") is False,
        "verified": {True: "yes", False: "no"}.get(result.get("verified")),  # type: ignore[arg-type]
        "facts": [
            *(f"{text} {name}" for text, name in facts if text is not None),
            *([str(result["device"])] if result.get("device") else []),
            *([f"seed {result['seed']}"] if result.get("seed") is not None else []),
        ],
    }


def _line(result: Mapping[str, Any]) -> dict[str, Any] | None:
    values = [pick(result, "scores", key, "bits_per_byte") for _, _, key in _STAGES]
    finite = [value for value in values if _finite(value)]
    if not finite:
        return None
    ticks = nice_ticks(min(finite), max(finite), 4)
    low, high = ticks[0], ticks[-1]
    digits = max(len(f"{tick:.10g}".partition(".")[2]) for tick in ticks)
    rows, before = [], None
    result_row = max(index for index, value in enumerate(values) if _finite(value))
    for index, ((stage, way, _), value) in enumerate(zip(_STAGES, values, strict=True)):
        if way == "adaptive" and value is None:
            continue  # most recipes learn nothing while they are scored
        change, at = "", None
        if _finite(value):
            change = f"{value - before:+.4f}".replace("-", "\u2212") if before is not None else ""
            before, at = value, percent(value, low, high)
        bar = Bar(stage, number(value, ".4f"), at, change, int(index == result_row))
        rows.append({"stage": stage, "way": way, "bar": bar})
    marks = [Tick(percent(tick, low, high), f"{tick:.{digits}f}") for tick in ticks]
    return {"rows": rows, "ticks": marks, "low": marks[0].label, "high": marks[-1].label}


def _beside(result: Mapping[str, Any]) -> list[Bar]:
    entries = [
        (f"This artifact, {way}", pick(result, "scores", f"quantized_{way}", "bits_per_byte"), 1)
        for way in ("adaptive", "sliding", "plain")
    ]
    entries += [(name, pick(entry, "bits_per_byte"), 0) for name, entry in (result.get("compressors") or {}).items()]
    known = sorted((value, name, mark) for name, value, mark in entries if _finite(value))
    longest = known[-1][0] if known else 0.0
    return [Bar(name, number(value, ".4f"), percent(value, 0.0, longest), mark=mark) for value, name, mark in known]


def _phases(result: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in (result.get("seconds") or {}).items() if name != "total"}


def _shares(values: Mapping[str, Any], form: str, colors: Sequence[int] = range(6)) -> list[Bar]:
    total = math.fsum(value for value in values.values() if _finite(value))
    shares = {name: percent(value, 0, total) for name, value in values.items()}
    return [
        Bar(name, number(value, form), shares[name], _share(shares[name]) if _finite(value) else "", colors[index % 6])
        for index, (name, value) in enumerate(values.items())
    ]


def _share(share: float) -> str:
    return f"{share:.1f} %" if share >= 0.05 or share == 0 else "< 0.1 %"


def _tensors(result: Mapping[str, Any], key: str, form: str) -> list[Bar]:
    known = [entry for entry in result.get("tensors") or [] if isinstance(entry.get(key), (int, float))]
    known.sort(key=lambda entry: -entry[key] if _finite(entry[key]) else -math.inf)
    longest = max((entry[key] for entry in known if _finite(entry[key])), default=0.0)
    return [
        Bar(
            str(entry.get("name")),
            number(entry[key], form),
            percent(entry[key], 0, longest) if _finite(entry[key]) else 100.0,
            " ".join([" × ".join(map(str, entry.get("shape") or [])), str(entry.get("quantizer") or "")]).strip(),
        )
        for entry in known
    ]


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
    """A figure, what it is held against, and whether it is over that."""
    if limit is None:
        return {"figure": number(value, form), "limit": "no limit", "over": False}
    over = value is not None and value > limit
    said = f"{number(value - limit, form)} over" if over and value else f"of {number(limit, form)}"
    return {"figure": number(value, form), "limit": said.removesuffix(".0"), "over": over}  # of 600, not of 600.0


def _public(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "label": entry.get("label"),
            "bits": number(entry.get("bits_per_byte"), ".4f"),
            "bytes": number(entry.get("artifact_bytes"), ",d"),
            "note": entry.get("note") or "",
            "source": str(entry.get("source") or ""),
        }
        for entry in result.get("public") or []
    ]


def _fact(value: Any, form: str) -> object:
    if isinstance(value, Mapping):
        return ", ".join(f"{_fact(item, form)} {name}" for name, item in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value, form) if form and isinstance(value, (int, float)) else value
