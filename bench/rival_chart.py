"""The picture of caddie beside what a user would pick instead: bits per byte by bytes, and by seconds of training.

It is drawn from the newest rows of `bench/rivals.py` and `bench/compressors.py` in `docs/results`, by
`bench/pictures.py`; what has no rows is left out. A dashed line has the same files scored with n-gram tilt, as in
`make demo`.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from svg import picture, words

from caddie.report.charts import nice_ticks, polyline

Row = Mapping[str, Any]
RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
WIDTH, HEIGHT = 920, 430
TOP, BOTTOM = 84, 372
"""Heights between which the lines run."""
PANELS = ((52, 316), (536, 790))
"""Left and right end of the panels, with room for labels beside each."""
MAIN_CAP = 1_000_000
"""Cap of the panel by seconds."""
COMPRESSORS = {"PPMd, order 16": "PPMd", "xz -9e": "xz", "zstd -22": "zstd", "brotli -11": "brotli"}
STYLE = """
.title { font-size: 15px; font-weight: 600 }
.curve { fill: none; stroke-width: 1.6 }
.thick { stroke-width: 3 }
.dashed { stroke-dasharray: 4 4; stroke-width: 1.6 }
.caddie { stroke: #2f6fde } .nanoGPT { stroke: #d9730d } .nanochat { stroke: #0b8f6a } .compressor { stroke: #9aa3af }
text.caddie { fill: #2f6fde; font-weight: 700 } text.nanoGPT { fill: #d9730d } text.nanochat { fill: #0b8f6a }
text.compressor { fill: #8b94a1 }
text.caddie, text.nanoGPT, text.nanochat, text.compressor { stroke: none }
.dot { stroke-width: 7; stroke-linecap: round }
.grid { fill: none; stroke: #8b97a8; stroke-opacity: .25 }
"""


class Curve(NamedTuple):
    """Named line through points (place, bits per byte), by place; `kind` is its style."""

    label: str
    kind: str
    points: list[tuple[float, float]]


def newest(name: str, folder: Path = RESULTS) -> list[Row]:
    """Return the rows of the newest file DATE-NAME.jsonl, none without one."""
    files = sorted(folder.glob(f"*-{name}.jsonl"))
    return [json.loads(line) for line in files[-1].read_text().splitlines()] if files else []


def budget(seconds: float) -> str:
    """Format a budget: `1 min`, `30 s`."""
    return f"{seconds / 60:g} min" if seconds >= 60 else f"{seconds:g} s"


def joined(rows: Sequence[Row], place: str, score: str) -> list[tuple[float, float]]:
    """Return the mean place and score of each cap and budget, by place; rows without the score are left out."""
    found = defaultdict(list)
    for row in rows:
        if row.get(score) is not None:
            found[row["cap_bytes"], row.get("budget")].append(row)
    return sorted((fmean(row[place] for row in same), fmean(row[score] for row in same)) for same in found.values())


def curves(rows: Sequence[Row], place: str, named: Callable[[Row], str], longest: float) -> list[Curve]:
    """Return the curves of contenders: the rows of one label share a curve, thick for the longest budget."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["contender"], named(row)].append(row)
    found = []
    for (contender, label), same in groups.items():
        kind = f"{contender} thick" if max(row["budget"] for row in same) == longest else contender
        found.append(Curve(label, kind, joined(same, place, "bits_per_byte")))
        if tilted := joined(same, place, "tilted_bits_per_byte"):
            found.append(Curve("", f"{contender} dashed", tilted))
    return found


def panels(rivals: Sequence[Row], compressors: Sequence[Row]) -> tuple[list[Curve], list[Curve]]:
    """Return the curves by bytes and those by seconds; only rows of the compressors' text count, and only finals."""
    texts = {row["held_out_bytes"] for row in compressors}
    scored = [row for row in rivals if row["trial"] is None and row["bits_per_byte"] is not None]
    finals = [row for row in scored if not texts or row["held_out_bytes"] in texts]
    longest = max((row["budget"] for row in finals), default=0.0)
    by_bytes = curves(finals, "file_bytes", lambda row: f"{row['contender']}, {budget(row['budget'])}", longest)
    known = [row for row in compressors if row["file_bytes"]]
    for name, label in COMPRESSORS.items():
        points = joined([row for row in known if row["name"] == name], "file_bytes", "bits_per_byte")
        if len(points) > 1:
            by_bytes.append(Curve(label, "compressor", points))
    main = [row for row in finals if row["cap_bytes"] == MAIN_CAP]
    by_seconds = curves(main, "seconds", lambda row: str(row["contender"]), longest)
    places = [place for curve in by_seconds for place, _ in curve.points]
    for name, label in COMPRESSORS.items() if places else ():
        for row in known:
            if row["name"] == name and row["cap_bytes"] == MAIN_CAP:
                level = row["bits_per_byte"]
                by_seconds.append(Curve(label, "compressor", [(min(places), level), (max(places), level)]))
    return by_bytes, by_seconds


def draw_rivals() -> str:
    """Draw both panels from the committed rows."""
    return draw(newest("rivals"), newest("compressors"))


def draw(rivals: Sequence[Row], compressors: Sequence[Row]) -> str:
    """Draw the panels that have curves on one scale of bits per byte."""
    by_bytes, by_seconds = panels(rivals, compressors)
    levels = [bits for curve in (*by_bytes, *by_seconds) for _, bits in curve.points]
    ticks = nice_ticks(min(levels), max(levels), 6)
    parts = [
        words(PANELS[0][0] - 42, 26, "Bits per byte of text that was never seen: lower is better", "title", "start")
    ]
    sizes = [(size, f"{size / 1e6:g} MB") for size in (100_000, 300_000, 1_000_000, 2_000_000, 4_000_000)]
    times = [(seconds, budget(seconds)) for seconds in (3, 10, 30, 60, 300, 1800)]
    parts += _panel(PANELS[0], "by the bytes of the file", by_bytes, sizes, ticks)
    if by_seconds:
        title = f"by seconds of training on two cores, {MAIN_CAP / 1e6:g} MB"
        parts += _panel(PANELS[1], title, by_seconds, times, ticks)
    width = WIDTH if by_seconds else PANELS[0][1] + 130
    if any("dashed" in curve.kind for curve in by_bytes):
        note = "dashed: learning from the text as it is scored (n-gram tilt)"
        parts.append(words(PANELS[0][0] - 42, HEIGHT - 12, note, "place", "start"))
    return picture(width, HEIGHT, "Bits per byte by bytes and by seconds", parts, STYLE)


def _panel(
    ends: tuple[float, float],
    title: str,
    found: Sequence[Curve],
    marks: Sequence[tuple[float, str]],
    ticks: Sequence[float],
) -> list[str]:
    """Draw axes, lines and labels of a panel; places are on a logarithmic scale."""
    left, right = ends
    places = [place for curve in found for place, _ in curve.points]
    low, high = math.log(min(places)), math.log(max(places))

    def across(place: float) -> float:
        return left + 12 + (right - left - 24) * ((math.log(place) - low) / (high - low) if high > low else 0.5)

    def down(bits: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (bits - ticks[0]) / (ticks[-1] - ticks[0])

    parts = [words(left, TOP - 22, title, "", "start")]
    for tick in ticks:
        parts.append(f'<path class="grid" d="M{left},{down(tick):.1f}H{right}"/>')
        parts.append(words(left - 6, down(tick) + 4, f"{tick:.10g}", "place", "end"))
    for place, label in marks:
        if low - 0.1 <= math.log(place) <= high + 0.1:
            parts.append(words(across(place), BOTTOM + 20, label, "place"))
    for curve in sorted(found, key=lambda curve: "compressor" not in curve.kind):
        points = [(across(place), down(bits)) for place, bits in curve.points]
        parts.append(f'<path class="curve {curve.kind}" d="{polyline(points)}"/>')
        if "compressor" not in curve.kind and "dashed" not in curve.kind:
            colour = curve.kind.split()[0]
            parts += [f'<path class="dot {colour}" d="M{x:.1f},{y:.1f}h0"/>' for x, y in points]
    named = [(down(curve.points[-1][1]), curve) for curve in found if curve.label]
    for y, curve in _apart(named):
        parts.append(words(right + 4, y + 4, curve.label, curve.kind.split()[0], "start"))
    return parts


def _apart(named: Sequence[tuple[float, Curve]], least: float = 14.0) -> list[tuple[float, Curve]]:
    """Move labels down, and then up, until no two are nearer than `least`."""
    placed = sorted(named, key=lambda one: (one[0], one[1].label))
    heights = list(accumulate((y for y, _ in placed), lambda above, y: max(y, above + least)))
    if heights and heights[-1] > BOTTOM:
        heights = list(accumulate([BOTTOM, *heights[-2::-1]], lambda below, y: min(y, below - least)))[::-1]
    return [(y, curve) for y, (_, curve) in zip(heights, placed, strict=True)]
