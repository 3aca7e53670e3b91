"""Geometry of charts, for the page of a run and `lab/plots.py`: round ticks, smoothed lines, paths in a box of 1,000.

Every length is a percentage from 0 to 100, or a coordinate in the box, whatever the numbers are.
"""

import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeGuard

POINTS = 400
"""Most points of a line; more would not be visible."""
SPLIT = 800.0
"""End of the chart's upper band, of 1,000; the learning rate is drawn below `SPLIT_END`."""
SPLIT_END = 880.0

_TIME_STEPS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400)


@dataclass(frozen=True)
class Tick:
    """A labelled place on an axis, `at` percent along it."""

    at: float
    label: str
    below: str = ""


Drawing = SimpleNamespace
"""Paths of a chart in a 1,000 by 1,000 box, its ticks and its summary, by the names that a template uses."""


def is_finite(value: object) -> TypeGuard[float]:
    """True if `value` is a number that is neither infinite nor NaN, nor a whole number beyond what a float holds."""
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def percent(value: float | None, low: float, high: float) -> float:
    """Return the place of `value` from `low` to `high` in percent, clipped to 0 and 100; 0 if missing or not finite."""
    if value is None or not math.isfinite(value) or not high > low:
        return 0.0
    return round(min(100.0, max(0.0, 100.0 * (value - low) / (high - low))), 3)


def decimal(value: float) -> str:
    """Format two digits of `value`: `0.000052`."""
    return f"{float(f'{value:.2g}'):.15f}".rstrip("0").rstrip(".")


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers, from at most `low` to at least `high`."""
    if not high - low > 1e-9 * max(abs(low), abs(high)):
        spread = abs(low) * 0.01 or 1.0
        low, high = low - spread, high + spread
    rough = (high - low) / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(0, 1 - math.floor(math.log10(step)))
    return [round(index * step, digits) for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten that enclose `low` to `high`, both above 0; within two decades also 2 and 5 times them."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    sizes = (1, 2, 5) if last - first <= 2 else (1,)
    ticks = [size * 10.0**power for power in range(first, last + 1) for size in sizes]
    begin = max(index for index, tick in enumerate(ticks) if tick <= low * (1 + 1e-9))
    end = min((index for index, tick in enumerate(ticks) if tick >= high * (1 - 1e-9)), default=len(ticks) - 1)
    return ticks[begin : max(end, begin + 1) + 1]


def time_ticks(seconds: float, count: int = 6) -> list[tuple[float, str]]:
    """Return at most `count` round times after 0, up to `seconds`, in the unit that suits them."""
    step: float = next((size for size in _TIME_STEPS if size * count >= seconds), seconds / count)
    unit, name = (1, "s") if step < 60 else (60, "min") if step < 3600 else (3600, "h")
    marks = [step * index for index in range(int(seconds / step + 1e-9) + 1)]
    return [(mark, f"{mark / unit:g} {name}") for mark in marks]


def smooth(values: Sequence[float], reach: int, at: Iterable[int]) -> list[float]:
    """Return the interquartile mean of up to `reach` values to each side of each index of `at`; it resists spikes.

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
    """Return at most `limit` evenly spaced indices below `count`, with the first and the last."""
    if count <= limit:
        return list(range(count))
    return [round(index * (count - 1) / (limit - 1)) for index in range(limit)]


def height(value: float, ticks: Sequence[float], box: float = 1000.0) -> float:
    """Return the distance of `value` from the top of a box that spans the ticks."""
    return max(-1000.0, box * (1 - (value - ticks[0]) / (ticks[-1] - ticks[0])))


def marks(values: Sequence[float], sign: str = "") -> list[Tick]:
    """Return ticks with as many digits as they need, from the first value to the last; `sign` "+" shows signs."""
    digits = max(len(f"{value:.10f}".rstrip("0").partition(".")[2]) for value in values)
    labels = ["0" if sign and not value else f"{value:{sign}.{digits}f}".replace("-", "\u2212") for value in values]
    return [Tick(percent(value, values[0], values[-1]), label) for value, label in zip(values, labels, strict=True)]


def byte_ticks(sizes: Sequence[float], place: Callable[[float], float]) -> list[Tick]:
    """Return a tick for each size, in MB if the last has a million bytes, else in kB; `place` gives its percent."""
    unit, name = (1e6, "MB") if sizes[-1] >= 1e6 else (1e3, "kB")
    return [Tick(place(size), f"{size / unit:.10g} {name}") for size in sizes]


def upward(ticks: Iterable[tuple[float, str]]) -> dict[str, Any]:
    """Return `up`, ticks of a vertical axis at (percent below the top, label), and `grid`, the path of their lines."""
    up = [Tick(round(at, 3), label) for at, label in ticks]
    return {"up": up, "grid": " ".join(f"M0,{tick.at * 10:.1f}H1000" for tick in up)}


def polyline(points: Iterable[tuple[float, float]]) -> str:
    """Return an SVG path through `points`."""
    return "M" + " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def dots(points: Iterable[tuple[float, float]]) -> str:
    """Return an SVG path of lines of length 0: round caps show them as dots, however the box is stretched."""
    return " ".join(f"M{x:.1f},{y:.1f}h0" for x, y in points)


def loss_chart(steps: Sequence[Mapping[str, Any]], held_out: Sequence[Mapping[str, Any]] = ()) -> Drawing | None:
    """Draw loss against time, raw and smoothed, above the learning-rate multiplier; None with fewer than two points.

    `held_out` are the `held_out` events of the log, drawn as a line of their own.
    The first steep twentieth of the run may leave the picture at the top, so that the rest has room.
    """
    known, tried = (
        [one for one in events if is_finite(one.get("loss")) and is_finite(one.get("seconds"))]
        for events in (steps, held_out)
    )
    if len(known) < 2 or not known[-1]["seconds"] > 0:
        return None
    seconds, losses = [step["seconds"] for step in known], [step["loss"] for step in known]
    kept = thin(len(known), POINTS)
    means = smooth(losses, max(1, len(losses) // 60), kept)
    early = bisect_left(seconds, seconds[-1] / 20)
    settled = sorted(losses[early:])
    highest = max(mean for index, mean in zip(kept, means, strict=True) if index >= early)
    measured = [(min(one["seconds"], seconds[-1]), one["loss"]) for one in tried]
    late = [loss for time, loss in measured if time >= seconds[-1] / 20]
    ticks = nice_ticks(min([*losses, *late]), max([highest, settled[len(settled) * 49 // 50], *late]), 5)

    def across(time: float) -> float:
        return percent(time, 0.0, seconds[-1])

    def place(time: float, loss: float) -> tuple[float, float]:
        return 10 * across(time), height(loss, ticks, SPLIT)

    def step_at(time: float) -> int:
        return int(min(known, key=lambda one: abs(one["seconds"] - time))["step"])

    rates = [(step["seconds"], step["lr_scale"]) for step in known if is_finite(step.get("lr_scale"))]
    top = max([1.0, *(rate for _, rate in rates)])
    below = [(10 * across(time), 1000 - percent(rate, 0.0, top) * (1000 - SPLIT_END) / 100) for time, rate in rates]
    notes = [f"Losses above {ticks[-1]:g} lie outside the picture."] if max(losses) > ticks[-1] else []
    if measured:
        bits = held_out[-1].get("bits_per_byte")
        end = f"{measured[-1][1]:.4f} nats per token" + (f", {bits:.4f} bits per byte" if is_finite(bits) else "")
        notes.append(f"Held-out training text, which was not trained on: {end} at the end.")
    if len(known) < len(steps):
        notes.append(f"Entries of the log without a finite loss: {len(steps) - len(known):,}.")
    return Drawing(
        raw=dots(place(seconds[index], losses[index]) for index in kept),
        smoothed=polyline(place(seconds[index], mean) for index, mean in zip(kept, means, strict=True)),
        held_out=polyline(place(*one) for one in measured) if len(measured) > 1 else "",
        held_out_points=dots(place(*one) for one in measured),
        scale=polyline(below[index] for index in thin(len(below), POINTS)) if len(below) > 1 else "",
        scale_top=f"{top:g}",
        **upward((height(value, ticks, SPLIT) / 10, f"{value:g}") for value in ticks),
        across=[
            Tick(across(time), label, f"{step_at(time) if time else 0:,}") for time, label in time_ticks(seconds[-1])
        ],
        summary=f"From {losses[0]:.4f} to {means[-1]:.4f} nats per token in {seconds[-1]:,.1f} seconds.",
        notes=notes,
    )


def curve_chart(compression: Mapping[str, Any], file_bytes: float | None, cap_bytes: float | None) -> Drawing | None:
    """Draw the sizes and losses that the fit tried, losses on a logarithmic scale.

    `None` with fewer than two points. The cap is a line where it is in the picture.
    """
    tried = [(entry.get("bytes"), entry.get("bits_per_byte")) for entry in compression.get("curve") or []]
    points = sorted((size, loss) for size, loss in tried if is_finite(size) and is_finite(loss) and loss > 0)
    if len({size for size, _ in points}) < 2:
        return None
    sizes, losses = [size for size, _ in points], [loss for _, loss in points]
    across, up = nice_ticks(sizes[0], sizes[-1], 5), log_ticks(min(losses), max(losses))
    bottom, top = math.log(up[0]), math.log(up[-1])

    def place(size: float, loss: float) -> tuple[float, float]:
        return 10 * percent(size, across[0], across[-1]), 1000 - 10 * percent(math.log(loss), bottom, top)

    inside = is_finite(cap_bytes) and across[0] <= cap_bytes <= across[-1]
    return Drawing(
        line=polyline(place(*point) for point in points),
        tried=dots(place(*point) for point in points),
        chosen=dots(place(*point) for point in points if point[0] == file_bytes),
        cap=f"M{10 * percent(cap_bytes, across[0], across[-1]):.1f},0V1000" if inside else "",
        **upward((place(0.0, value)[1] / 10, decimal(value)) for value in up),
        across=byte_ticks(across, lambda size: percent(size, across[0], across[-1])),
        summary=f"From {decimal(losses[0])} at {sizes[0]:,.0f} bytes to {decimal(losses[-1])} at {sizes[-1]:,.0f}.",
    )
