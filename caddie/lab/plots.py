"""Charts of a lab report: differences with intervals, sweeps, standings, loss curves, and size against score.

They are drawn from `caddie.lab.findings` in percentages and boxes of 1,000 by 1,000 (see `caddie.report.charts`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from caddie.errors import count
from caddie.report.charts import (
    Drawing,
    Tick,
    byte_ticks,
    dots,
    height,
    is_finite,
    log_ticks,
    marks,
    nice_ticks,
    percent,
    polyline,
    time_ticks,
    upward,
)

COLORS = 5
"""Colours of lines; further lines are grey."""
STRAY = 6.0
"""Range of a chart of differences, in multiples of the usual interval; points beyond leave it."""
SETTLED = 0.25
"""Part of a run after which its loss counts for the height of the picture."""
WIDE = 3.0
"""Factor between the ends of a swept axis beyond which it is logarithmic."""
EDGE = 3.0
"""Space beside the first and the last swept value, in percent of the picture."""
LETTER = 2.4
"""Width of a letter of a tick's label, in percent of a picture on a phone."""
NUMBERED = 12
"""Most points of a frontier that are numbered."""

Mean = Sequence[tuple[float, float, float, float]]
"""Curve: points of place, mean, lowest, highest."""


def forest(verdicts: Sequence[Mapping[str, Any]], margin: float) -> Drawing | None:
    """Draw the differences of `verdicts` around zero, in percent of the strip; None if there are none.

    A row has the point (`at`), its interval and claim, and `outside`: `low` or `high` where the point lies outside the
    picture. `band` is begin and width of the margin around zero; `strays` is True if something leaves the picture.
    """
    known = [one for one in verdicts if is_finite(one["difference"])]
    if not known:
        return None
    ends = {one["label"]: [one["difference"], *(one["interval"] or ())] for one in known}
    claims = {
        one["label"]: claim["difference"] for one in known if is_finite((claim := one["claim"] or {}).get("difference"))
    }
    usual = STRAY * median(max(map(abs, reach)) for reach in ends.values())
    shown = [value for reach in ends.values() for value in reach] + list(claims.values())
    far = max(usual, 2 * margin) or max(map(abs, shown))
    inside = [value for value in shown if abs(value) <= far] or [0.0]
    ticks = nice_ticks(min(*inside, -margin, 0.0), max(*inside, margin, 0.0), 5)
    low, high = ticks[0], ticks[-1]

    def at(value: float | None) -> float | None:
        return None if value is None else percent(value, low, high)

    rows = {}
    for one in known:
        point, (begin, end), claim = one["difference"], one["interval"] or (None, None), claims.get(one["label"])
        rows[one["label"]] = Drawing(
            at=at(point),
            low=at(begin),
            high=at(end),
            claim=at(claim if claim is not None and low <= claim <= high else None),
            outside="low" if point < low else "high" if point > high else "",
        )
    return Drawing(
        rows=rows,
        zero=percent(0.0, low, high),
        band=(percent(-margin, low, high), percent(2 * margin, 0.0, high - low)) if margin else None,
        ticks=marks(ticks, "+"),
        strays=any(not low <= value <= high for value in shown),
    )


def standings(board: Sequence[Mapping[str, Any]], public: Sequence[Mapping[str, Any]]) -> Drawing | None:
    """Draw the leaderboard: for each label its mean and its seeds, in percent of the strip.

    Public figures are drawn if they are no further away than the scores' own range.
    """
    if not board:
        return None
    scores = sorted(score for one in board for score in one["seeds"].values())
    middle = scores[len(scores) // 2]
    top = min(scores[-1], middle + STRAY * max(middle - scores[0], 0.01 * abs(middle)))
    wide = top - scores[0]
    near = [
        entry
        for entry in public
        if is_finite(entry.get("bits_per_byte")) and scores[0] - wide <= entry["bits_per_byte"] <= top + wide
    ]
    values = [scores[0], top, *(entry["bits_per_byte"] for entry in near)]
    ticks = nice_ticks(min(values), max(values), 5)
    low, high = ticks[0], ticks[-1]
    return Drawing(
        rows={
            one["label"]: (percent(one["mean"], low, high), [percent(v, low, high) for v in one["seeds"].values()])
            for one in board
        },
        references=[Tick(percent(entry["bits_per_byte"], low, high), str(entry.get("label"))) for entry in near],
        ticks=marks(ticks),
    )


def marked(board: Sequence[Mapping[str, Any]], base: str) -> list[str]:
    """Return the labels with coloured lines, base first: all if they are few, else the best and the worst."""
    labels = [one["label"] for one in board if one["label"] != base]
    chosen = labels if len(labels) < COLORS else [*labels[: COLORS - 2], labels[-1]]
    return [base, *chosen] if len(labels) < len(board) else chosen


def curves(found: Mapping[str, Mean], colored: Sequence[str], unit: str) -> Drawing | None:
    """Draw loss against steps or seconds. The first steep part may leave the picture at the top.

    Grey lines come first, so that coloured ones lie on them.
    """
    if not found:
        return None
    last, digits = max(curve[-1][0] for curve in found.values()), 1 if unit == "seconds" else 0
    lowest = min(low for curve in found.values() for _, _, low, _ in curve)
    settled = sorted(max(mean for x, mean, *_ in curve if x >= SETTLED * curve[-1][0]) for curve in found.values())
    middle = median(settled)
    up = nice_ticks(lowest, max(min(settled[-1], middle + 2 * (middle - lowest)), lowest), 7)
    lines = [
        _line(label, colored.index(label) if label in colored else None, curve, lambda x: percent(x, 0.0, last), up)
        for label, curve in found.items()
    ]
    across = time_ticks(last, 5) if unit == "seconds" else [(tick, f"{tick:,.10g}") for tick in nice_ticks(0, last, 6)]
    return Drawing(
        lines=sorted(lines, key=lambda line: -COLORS if line.color is None else -line.color),
        **upward((height(value, up) / 10, f"{value:g}") for value in up),
        across=[Tick(percent(at, 0.0, last), label) for at, label in across if at <= last],
        summary=f"{count(len(found), 'label')}, up to {last:,.{digits}f} {unit}.",
    )


def _line(label: str, color: int | None, curve: Mean, across: Callable[[float], float], up: Sequence[float]) -> Drawing:
    """Draw a mean over seeds and, unless it is grey (no color), the range of the seeds."""
    edge = [(x, high) for x, _, _, high in curve] + [(x, low) for x, _, low, _ in reversed(curve)]
    ranged = color is not None and any(high > low for _, _, low, high in curve)
    path, band = ([(10 * across(x), height(y, up)) for x, y in points] for points in ([c[:2] for c in curve], edge))
    return Drawing(
        label=label, color=color, path=polyline(path), band=f"{polyline(band)}Z" if ranged else "", points=""
    )


def sweep_lines(found: Mapping[str, Any]) -> Drawing:
    """Draw the score over swept numbers: a line for each value of the second axis, with its best point.

    The first axis is logarithmic where its values are above 0 and span more than a factor of 3; its ticks are the
    values. Points far above the others leave the picture; `above` counts them.
    """
    points = [point for line in found["lines"] for point in line["points"]]
    values = sorted({point["value"] for point in points})
    scale = math.log if values[0] > 0 and values[-1] > WIDE * values[0] else float
    means = sorted(point["mean"] for point in points)
    top = means[0] + STRAY * (means[len(means) // 2] - means[0])
    inside = [point for point in points if point["mean"] <= top] if top > means[0] else points
    up = nice_ticks(min(point["low"] for point in inside), max(point["high"] for point in inside), 6)

    def across(value: float) -> float:
        return EDGE + percent(scale(value), scale(values[0]), scale(values[-1])) * (100 - 2 * EDGE) / 100

    firm = sorted(found["lines"], key=lambda line: min(point["mean"] for point in line["points"]))[:COLORS]
    colors = {line["value"]: color for color, line in enumerate(line for line in found["lines"] if line in firm)}
    lines = []
    for line in found["lines"]:
        curve = [(point["value"], point["mean"], point["low"], point["high"]) for point in line["points"]]
        places = [(10 * across(value), height(mean, up)) for value, mean, *_ in curve]
        drawn = _line(_best(found["axes"], line), colors.get(line["value"]), curve, across, up)
        drawn.points = dots(places)
        drawn.best = dots(place for place, point in zip(places, curve, strict=True) if point[0] == line["best"])
        lines.append(drawn)
    return Drawing(
        lines=sorted(lines, key=lambda line: line.color is not None),
        **upward((100 - tick.at, tick.label) for tick in marks(up)),
        across=_apart([Tick(across(value), written(value)) for value in values]),
        summary="; ".join(line.label for line in lines),
        above=sum(point["mean"] > up[-1] for point in points),
    )


def _best(axes: Sequence[Sequence[str]], line: Mapping[str, Any]) -> str:
    """Return the label of a line and its best point, with the last words of the paths."""
    paths = [axis[0].split(".") for axis in axes]
    words = 1 if len({path[-1] for path in paths}) == len(paths) else 2
    first, *second = (".".join(path[-words:]) for path in paths)
    place = f"best at {first} {written(line['best'])}"
    return f"{second[0]} {written(line['value'])}: {place}" if second else place


def written(value: float) -> str:
    """Format a swept number: `0.02`, `1048576`."""
    return f"{value:.10g}"


def _apart(ticks: Sequence[Tick]) -> list[Tick]:
    """Return the ticks whose labels do not overlap on a phone, with the first and the last."""
    last, kept = ticks[-1], list(ticks[:1])
    for tick in ticks[1:-1]:
        if all(abs(tick.at - other.at) > LETTER * max(len(tick.label), len(other.label)) for other in (kept[-1], last)):
            kept.append(tick)
    return [*kept, last]


def sizes(board: Sequence[Mapping[str, Any]]) -> Drawing | None:
    """Draw bytes of the artifact against the score, both means over seeds; None unless sizes differ.

    Sizes are on a logarithmic scale where the largest is more than ten times the smallest. `marks` has left and top in
    percent, and the number, of up to `NUMBERED` members of the frontier.
    """
    known = [one for one in board if is_finite(one["artifact_bytes"]) and one["artifact_bytes"] > 0]
    if len({one["artifact_bytes"] for one in known}) < 2:
        return None
    sizes = [one["artifact_bytes"] for one in known]
    scores = sorted(one["mean"] for one in known)
    top = min(scores[-1], scores[len(scores) // 2] + STRAY * (scores[len(scores) // 2] - scores[0] or scores[-1]))
    wide = max(sizes) > 10 * min(sizes)
    scale = math.log if wide else float
    across = log_ticks(min(sizes), max(sizes)) if wide else nice_ticks(min(sizes), max(sizes), 4)
    up = nice_ticks(scores[0], top, 5)

    def left(size: float) -> float:
        return percent(scale(size), scale(across[0]), scale(across[-1]))

    def place(one: Mapping[str, Any]) -> tuple[float, float]:
        return 10 * left(one["artifact_bytes"]), 1000 - 10 * percent(one["mean"], up[0], up[-1])

    best = sorted((one for one in known if one["frontier"]), key=lambda one: one["artifact_bytes"])
    return Drawing(
        points=dots(place(one) for one in known if not one["frontier"]),
        best=dots(map(place, best)),
        frontier=polyline(map(place, best)) if len(best) > 1 else "",
        marks=[(place(one)[0] / 10, place(one)[1] / 10, number) for number, one in enumerate(best[:NUMBERED], 1)],
        **upward((100 - tick.at, tick.label) for tick in marks(up)),
        across=byte_ticks(across, left),
        summary=f"{len(best)} of {len(known)} on the frontier, from {min(sizes):,.0f} to {max(sizes):,.0f} bytes.",
    )
