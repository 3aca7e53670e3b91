"""Charts: round ticks that enclose, lines that are not dragged, and places that can be worked out by hand."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_folder import make_steps

from caddie.report import charts
from caddie.report.charts import (
    byte_ticks,
    curve_chart,
    decimal,
    is_finite,
    log_ticks,
    loss_chart,
    marks,
    nice_ticks,
    percent,
    smooth,
    thin,
    time_ticks,
)


def test_a_whole_number_beyond_all_floats_is_not_finite() -> None:
    assert is_finite(10**300)
    assert not any(map(is_finite, (10**400, -(10**400), math.inf, math.nan, None, "1")))


def test_percent() -> None:
    assert percent(1.5, 1.0, 2.0) == 50.0
    assert percent(3.0, 1.0, 2.0) == 100.0
    assert percent(-3.0, 1.0, 2.0) == 0.0
    assert [percent(value, 0, 1) for value in (None, math.nan, math.inf)] == [0.0, 0.0, 0.0]
    assert percent(1.0, 2.0, 2.0) == percent(1.0, 0.0, math.nan) == 0.0


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 10.0, [0.0, 2.5, 5.0, 7.5, 10.0]),
        (1.5301, 1.5487, [1.53, 1.535, 1.54, 1.545, 1.55]),
        (2.3, 7.4, [2.0, 4.0, 6.0, 8.0]),
        (-1.0, 1.0, [-1.0, -0.5, 0.0, 0.5, 1.0]),
        (2.0, 2.0, [1.98, 1.99, 2.0, 2.01, 2.02]),
    ],
)
def test_nice_ticks(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high, 5) == ticks


def test_time_ticks() -> None:
    assert [label for _, label in time_ticks(60.0)] == ["0 s", "10 s", "20 s", "30 s", "40 s", "50 s", "60 s"]
    assert time_ticks(600.0)[-1] == (600.0, "10 min")
    assert [label for _, label in time_ticks(8000.0)] == ["0 min", "30 min", "60 min", "90 min", "120 min"]
    assert len(time_ticks(0.3)) == 1
    assert len(time_ticks(1e7)) == 7


def test_smooth_ignores_a_spike_and_keeps_the_ends() -> None:
    assert smooth([2.0, 2.0, 2.0, 90.0, 2.0, 2.0, 2.0], 3, range(7))[3] == 2.0
    assert smooth([1.0, 2.0, 3.0, 4.0], 2, range(4)) == [1.0, 2.0, 3.0, 4.0]


def test_thin_keeps_the_ends() -> None:
    assert thin(5, 10) == [0, 1, 2, 3, 4]
    kept = thin(10_000, 400)
    assert (len(kept), kept[0], kept[-1]) == (400, 0, 9_999)
    assert kept == sorted(set(kept))


def test_loss_chart() -> None:
    steps = make_steps(4_000, every=1)
    chart = loss_chart(steps)
    assert chart is not None
    assert chart.raw.count("h0") == 400
    assert chart.smoothed.count(" ") == 399
    assert chart.scale_top == "1"
    assert [tick.label for tick in chart.across][:2] == ["0 s", "10 s"]
    assert [tick.below for tick in chart.across] == ["0", "667", "1,333", "2,000", "2,667", "3,333", "4,000"]
    assert chart.up[0].at == charts.SPLIT / 10
    assert chart.up[-1].at == 0
    assert chart.notes == [f"Losses above {chart.up[-1].label} lie outside the picture."]


def test_loss_chart_of_held_out_text() -> None:
    steps = make_steps()
    places = [
        steps[index] | {"loss": loss, "bits_per_byte": loss / 2} for index, loss in ((0, 9.0), (100, 5.0), (-1, 3.0))
    ]
    chart, without = loss_chart(steps, places), loss_chart(steps)
    assert chart is not None
    assert without is not None
    assert chart.held_out_points.count("h0") == 3
    assert chart.held_out.count(" ") == 2
    assert float(chart.up[-1].label) >= 5.0 > float(without.up[-1].label), "late losses are in the picture"
    assert chart.held_out.startswith(without.raw[: len("M4.9,")]), "across as the steps"
    assert chart.notes[-1].endswith("3.0000 nats per token, 1.5000 bits per byte at the end.")
    alone = loss_chart(steps, [{"loss": 2.0, "seconds": math.nan}, {"loss": 2.0, "seconds": 30.0}])
    assert alone is not None
    assert (alone.held_out, alone.held_out_points.count("h0")) == ("", 1)
    assert without.held_out_points == ""


def test_loss_chart_needs_two_points() -> None:
    steps = make_steps()
    assert loss_chart([]) is None
    assert loss_chart(steps[:1]) is None
    assert loss_chart([step | {"seconds": 0.0} for step in steps]) is None
    flat = loss_chart([step | {"loss": 2.0, "lr_scale": None} for step in steps[:2]])
    assert flat is not None
    assert flat.scale == ""
    broken = loss_chart([*steps, steps[-1] | {"loss": math.nan}])
    assert broken is not None
    assert broken.notes[-1] == "Entries of the log without a finite loss: 1."


@pytest.mark.parametrize("reach", [2e-6, 1e-5, 5e-5, 1e-4, 0.5])
def test_labels_of_small_ticks_differ_and_say_their_values(reach: float) -> None:
    ticks = nice_ticks(-reach, reach, 5)
    labels = [tick.label for tick in marks(ticks, "+")]
    assert [float(label.replace("\u2212", "-")) for label in labels] == pytest.approx(ticks)
    assert labels[ticks.index(0.0)] == "0"


def test_labels_of_sizes_that_differ_by_little_are_all_different() -> None:
    for sizes in ([15_999_800, 15_999_850, 15_999_900, 15_999_950], [399_990, 399_995, 400_000]):
        labels = [tick.label for tick in byte_ticks(sizes, float)]
        unit = {"MB": 1e6, "kB": 1e3}[labels[0][-2:]]
        assert [float(label[:-3]) * unit for label in labels] == pytest.approx(sizes, rel=1e-9)


def test_decimal() -> None:
    assert [decimal(value) for value in (0.0000524, 0.0398, 1.0, 12.3, 0.1)] == ["0.000052", "0.04", "1", "12", "0.1"]
    assert decimal(-0.00082) == "-0.00082"


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.001, 0.01, [0.001, 0.002, 0.005, 0.01]),
        (0.0012, 0.03, [0.001, 0.002, 0.005, 0.01, 0.02, 0.05]),
        (0.003, 0.004, [0.002, 0.005]),
        (0.00005, 0.04, [1e-5, 1e-4, 1e-3, 1e-2, 1e-1]),
        (2.0, 2.0, [2.0, 5.0]),
    ],
)
def test_log_ticks(low: float, high: float, ticks: list[float]) -> None:
    assert log_ticks(low, high) == pytest.approx(ticks)


@given(st.floats(1e-12, 1e6), st.floats(1.0, 1e9))
def test_log_ticks_enclose(low: float, ratio: float) -> None:
    ticks = log_ticks(low, low * ratio)
    assert ticks[0] <= low * (1 + 1e-6)
    assert ticks[-1] >= low * ratio * (1 - 1e-6)
    assert ticks == sorted(set(ticks))
    assert 2 <= len(ticks) < 25


def curve(*points: tuple[Any, Any]) -> dict[str, Any]:
    return {"curve": [{"bytes": size, "bits_per_byte": loss} for size, loss in points]}


def test_curve_chart_places_every_draft() -> None:
    # the axes run from 100 to 500 kB and, on a logarithm, from 0.001 to 0.01
    found = curve((300_000, 10**-2.5), (100_000, 0.01), (500_000, 0.001))
    chart = curve_chart(found, 300_000, 400_000)
    assert chart is not None
    assert chart.line == "M0.0,0.0 500.0,500.0 1000.0,1000.0"
    assert chart.tried == "M0.0,0.0h0 M500.0,500.0h0 M1000.0,1000.0h0"
    assert chart.chosen == "M500.0,500.0h0"
    assert chart.cap == "M750.0,0V1000"
    assert [tick.label for tick in chart.across] == ["100 kB", "200 kB", "300 kB", "400 kB", "500 kB"]
    assert [tick.label for tick in chart.up] == ["0.001", "0.002", "0.005", "0.01"]
    assert [chart.up[0].at, chart.up[-1].at] == [100.0, 0.0]
    assert chart.summary == "From 0.01 at 100,000 bytes to 0.001 at 500,000."


def test_curve_chart_leaves_out_what_cannot_be_drawn() -> None:
    assert curve_chart({}, 1, 1) is None
    assert curve_chart(curve((100, 0.1)), 100, 100) is None
    assert curve_chart(curve((100, 0.1), (100, 0.2), (200, 0.0), (math.nan, 1.0), (300, None)), 100, 100) is None
    chart = curve_chart(curve((100, 0.1), (2_000_000, 0.01)), 7, 16_000_000)
    assert chart is not None
    assert (chart.chosen, chart.cap) == ("", "")
    assert chart.across[-1].label == "2 MB"
