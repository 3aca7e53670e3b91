"""Progress, schedules, the clock and the running average: hand-computed numbers and those of the public scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from caddie.averaging import EMA, Averaging
from caddie.config import coerce, variants
from caddie.errors import UserError
from caddie.schedules import (
    Budget,
    Clock,
    IterationWarmdown,
    Moment,
    NonNegativeNumber,
    Ramp,
    Schedule,
    StepRamp,
    Warmdown,
    value_at,
)

quick = settings(derandomize=True, deadline=None, max_examples=60)


def at(progress: float) -> Moment:
    """A moment at this progress of a run of 100 seconds."""
    return Moment(step=7, seconds=100 * progress, budget=Budget(seconds=100))


# Budget


@pytest.mark.parametrize(
    ("budget", "step", "seconds", "progress"),
    [
        (Budget(seconds=600), 0, 0.0, 0.0),
        (Budget(seconds=600), 10_000, 150.0, 0.25),
        (Budget(seconds=600), 1, 900.0, 1.0),
        (Budget(steps=200), 50, 1e9, 0.25),
        (Budget(steps=200), 400, 0.0, 1.0),
        (Budget(seconds=600, steps=200), 100, 150.0, 0.5),  # whichever is further spent
        (Budget(seconds=600, steps=200), 20, 150.0, 0.25),
    ],
)
def test_progress_is_the_fraction_spent(budget: Budget, step: int, seconds: float, progress: float) -> None:
    assert budget.progress(step, seconds) == progress
    assert Moment(step, seconds, budget).progress == progress


def test_a_budget_of_nothing_is_an_error() -> None:
    with pytest.raises(UserError, match=r"set train\.seconds or train\.steps"):
        Budget()


# Hand-computed values


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (Ramp(start=1, end=3), {0.0: 1.0, 0.25: 1.5, 0.5: 2.0, 1.0: 3.0}),
        (Ramp(start=3, end=1, begin=0.5), {0.0: 3.0, 0.5: 3.0, 0.75: 2.0, 1.0: 1.0}),
        (Ramp(start=0, end=1, finish=0.5), {0.0: 0.0, 0.25: 0.5, 0.5: 1.0, 0.9: 1.0}),
        (Ramp(start=0, end=1, begin=0.25, finish=0.75), {0.25: 0.0, 0.5: 0.5, 0.75: 1.0}),
        (Ramp(start=0, end=1, begin=0.5, finish=0.5), {0.25: 0.0, 0.5: 1.0, 0.75: 1.0}),  # a jump
        (Warmdown(fraction=0.25), {0.0: 1.0, 0.5: 1.0, 0.75: 1.0, 0.875: 0.5, 1.0: 0.0}),
        (Warmdown(fraction=0.5, floor=0.25), {0.5: 1.0, 0.75: 0.5, 0.875: 0.25, 1.0: 0.25}),
        (Warmdown(fraction=1.0), {0.0: 1.0, 0.25: 0.75, 1.0: 0.0}),
        (Warmdown(fraction=0.0), {0.0: 1.0, 1.0: 1.0}),
    ],
)
def test_schedules_of_progress(schedule: Schedule, values: dict[float, float]) -> None:
    for progress, value in values.items():
        assert schedule.at(at(progress)) == value, progress


def test_the_iteration_warmdown_foretells_its_length_from_the_mean_step() -> None:
    budget = Budget(seconds=100)
    schedule = IterationWarmdown(steps=10)
    # 20 steps in 40 s are 2 s each, so the last 10 steps are the last 20 s.
    assert schedule.at(Moment(20, 40.0, budget)) == 1.0
    assert schedule.at(Moment(40, 80.0, budget)) == 1.0
    assert schedule.at(Moment(45, 90.0, budget)) == 0.5
    assert schedule.at(Moment(48, 96.0, budget)) == pytest.approx(0.2)
    assert schedule.at(Moment(50, 100.0, budget)) == 0.0
    assert schedule.at(Moment(51, 101.0, budget)) == 0.0
    # 20 s a step: the warm-down would be 200 s long, so it has begun before the run.
    assert schedule.at(Moment(1, 20.0, budget)) == 0.4
    assert schedule.at(Moment(0, 0.0, budget)) == 1.0


def test_the_iteration_warmdown_counts_steps_where_no_seconds_are_given() -> None:
    schedule = IterationWarmdown(steps=4)
    found = [schedule.at(Moment(step, 0.0, Budget(steps=10))) for step in range(12)]
    assert found == [1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0]


def test_the_step_ramp_counts_steps() -> None:
    ramp = StepRamp(start=0.5, end=1.0, steps=4)
    assert [ramp.at(Moment(step, 0.0, Budget(seconds=1))) for step in range(6)] == [0.5, 0.625, 0.75, 0.875, 1.0, 1.0]
    assert StepRamp(start=0.5, end=1.0, steps=0).at(Moment(0, 0.0, Budget(seconds=1))) == 1.0


def test_a_schedule_stands_where_a_number_stands() -> None:
    assert value_at(0.25, at(0.5)) == 0.25
    assert value_at(Ramp(start=0, end=1), at(0.5)) == 0.5
    assert coerce({"kind": "Warmdown", "fraction": 0.5}, NonNegativeNumber, "lr") == Warmdown(fraction=0.5)
    with pytest.raises(UserError, match="lr must be from 0"):
        coerce(-1, NonNegativeNumber, "lr")


SAMPLES: dict[str, Schedule] = {
    "Ramp": Ramp(start=1.0, end=0.5, begin=0.1, finish=0.7),
    "Warmdown": Warmdown(fraction=0.7, floor=0.1),
    "IterationWarmdown": IterationWarmdown(steps=100),
    "StepRamp": StepRamp(start=1.0, end=0.5, steps=50),
}
"""One of each; a new schedule needs one here."""


@pytest.mark.parametrize("name", sorted(variants(Schedule)))
@quick
@given(
    st.integers(0, 10_000), st.floats(0, 2000), st.sampled_from([Budget(600.0), Budget(600.0, 500), Budget(None, 500)])
)
def test_every_schedule_is_bounded_and_pure(name: str, step: int, seconds: float, budget: Budget) -> None:
    schedule = SAMPLES[name]
    value = schedule.at(Moment(step, seconds, budget))
    assert 0.0 <= value <= 1.0
    assert schedule.at(Moment(step, seconds, budget)) == value
    again = type(schedule).from_json(schedule.to_json())
    assert again.at(Moment(step, seconds, budget)) == value


@pytest.mark.parametrize("name", ["Ramp", "Warmdown"])
def test_schedules_of_progress_mean_the_same_on_every_machine(name: str) -> None:
    for tenth in range(11):
        slow = Moment(tenth, tenth * 60.0, Budget(seconds=600))
        fast = Moment(tenth * 1000, tenth * 6.0, Budget(seconds=60))
        counted = Moment(tenth * 50, 3.0, Budget(steps=500))
        assert SAMPLES[name].at(slow) == SAMPLES[name].at(fast) == SAMPLES[name].at(counted)


# The public scripts


@pytest.fixture(scope="module")
def scripts(parity: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (parity / "components" / "schedules" / "learning_rate_momentum_loops.json").read_text()
    )
    return found


@pytest.mark.parametrize("name", ["BASE", "S003", "S002", "ARG"])
def test_iteration_warmdown_agrees_with_the_scripts(scripts: dict[str, Any], name: str) -> None:
    facts = scripts[name]
    given_settings = facts["settings"]
    schedule = IterationWarmdown(steps=given_settings["warmdown iters"])
    capped = Budget(given_settings["max wallclock seconds"], given_settings["iterations"])
    grids = [rows for key, rows in facts.items() if key.startswith("grid at about")]
    rows = [row for grid in grids for row in grid]
    assert len(rows) > 40
    assert any(0 < multiplier < 1 for _, _, multiplier in rows)
    for step, milliseconds, multiplier in rows:
        assert schedule.at(Moment(step, milliseconds / 1000, capped)) == pytest.approx(multiplier, abs=1e-9)
    uncapped = Budget(None, given_settings["iterations"])
    counted = [row for row in facts["grid without wallclock cap"] if row[0] < given_settings["iterations"]]
    assert len(counted) >= len(facts["grid without wallclock cap"]) - 1  # no step begins when all are taken
    for step, _, multiplier in counted:
        assert schedule.at(Moment(step, 0.0, uncapped)) == pytest.approx(multiplier, abs=1e-12)


def test_warmdown_agrees_with_the_script_of_a_fraction(scripts: dict[str, Any]) -> None:
    facts = scripts["S001"]
    schedule = Warmdown(fraction=facts["settings"]["warmdown last frac"])
    assert schedule.fraction == 0.2
    by_time = Budget(facts["settings"]["max wallclock seconds"])
    rows = [row for key, grid in facts.items() if key.startswith("grid at about") for row in grid]
    assert any(0 < multiplier < 1 for _, _, multiplier in rows)
    for step, milliseconds, multiplier in rows:
        assert schedule.at(Moment(step, milliseconds / 1000, by_time)) == pytest.approx(multiplier, abs=1e-9)
    by_steps = Budget(None, facts["settings"]["iterations"])
    for step, _, multiplier in facts["grid without wallclock cap"]:
        assert schedule.at(Moment(step, 0.0, by_steps)) == pytest.approx(multiplier, abs=1e-9)


@pytest.mark.parametrize("name", ["L3", "TOP"])
def test_warmdown_agrees_with_the_scripts_that_reserve_time(scripts: dict[str, Any], name: str) -> None:
    facts = scripts[name]
    chosen = facts["settings"]
    budget = Budget(chosen["max wallclock seconds"] - chosen["gptq reserve seconds"])
    schedule = Warmdown(fraction=chosen["warmdown frac"], floor=chosen["min lr"])
    assert len(facts["grid"]) > 10
    for milliseconds, fraction, multiplier, _ in facts["grid"]:
        moment = Moment(1, milliseconds / 1000, budget)
        assert moment.progress == pytest.approx(min(fraction, 1.0), abs=1e-12)
        assert schedule.at(moment) == pytest.approx(multiplier, abs=1e-9)


@pytest.mark.parametrize("name", ["BASE", "S003", "S001", "S002", "ARG", "L3", "TOP"])
def test_momentum_agrees_with_the_scripts(scripts: dict[str, Any], name: str) -> None:
    chosen = scripts[name]["settings"]
    ramp = StepRamp(
        start=chosen["muon momentum warmup start"],
        end=chosen["muon momentum"],
        steps=chosen["muon momentum warmup steps"],
    )
    for step, momentum in scripts[name]["muon momentum"]:
        assert ramp.at(Moment(step, 0.0, Budget(seconds=600))) == pytest.approx(momentum, abs=1e-15)


# Averaging


@pytest.mark.parametrize("decay", [0.99, 0.9965, 0.997])
def test_the_average_agrees_with_the_scripts(parity: Path, decay: float) -> None:
    data = load_file(parity / "components" / "schedules" / "ema.safetensors")
    weights = [data[f"weights.step{step:02}"] for step in range(21)]
    average = EMA(decay=decay).build({"w": weights[0]})
    for weight in weights[1:]:
        average.watch({"w": weight})
    expected = data[f"ema_decay_{decay}.after_step20"]
    torch.testing.assert_close(average.result()["w"], expected, rtol=2e-6, atol=1e-6)
    assert (weights[20] - expected).abs().max() > 1e-2


def test_the_average_by_hand() -> None:
    average = EMA(decay=0.75).build({"w": torch.tensor([8.0])})
    average.watch({"w": torch.tensor([0.0])})
    assert average.result()["w"].item() == 6.0
    average.watch({"w": torch.tensor([2.0])})
    assert average.result()["w"].item() == 5.0


AVERAGES: dict[str, Averaging] = {"EMA": EMA(decay=0.9)}
"""One of each; a new average needs one here."""


@pytest.mark.parametrize("name", sorted(variants(Averaging)))
def test_every_average_of_a_constant_is_the_constant(name: str) -> None:
    constant = {"a": torch.full((3, 2), 0.1), "b": torch.tensor(7.0)}
    average = AVERAGES[name].build(constant)
    for _ in range(50):
        average.watch(constant)
    for key, value in constant.items():
        assert torch.allclose(average.result()[key], value, rtol=1e-6)


@pytest.mark.parametrize("name", sorted(variants(Averaging)))
def test_every_average_keeps_its_own_numbers_and_resumes(name: str) -> None:
    torch.manual_seed(0)
    seen = [{"w": torch.randn(4, 3), "v": torch.randn(5).bfloat16()} for _ in range(7)]
    first = {key: value.clone() for key, value in seen[0].items()}
    average = AVERAGES[name].build(first)
    first["w"].fill_(100.0)
    assert torch.equal(average.result()["w"], seen[0]["w"]), "not a view of the weights"
    for weights in seen[1:4]:
        average.watch(weights)
    saved = {key: value.clone() for key, value in average.result().items()}
    resumed = AVERAGES[name].build(seen[5])
    for key, tensor in resumed.result().items():
        tensor.copy_(saved[key])
    for weights in seen[4:]:
        average.watch(weights)
        resumed.watch(weights)
    for key in seen[0]:
        assert torch.equal(average.result()[key], resumed.result()[key])
        assert average.result()[key].dtype == torch.float32
        assert not average.result()[key].requires_grad


# Clock


class Ticks:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def test_the_clock_adds_up_phases() -> None:
    ticks = Ticks()
    clock = Clock(ticks)
    assert clock.seconds == {}
    with clock.phase("train"):
        ticks.time += 2.0
    ticks.time += 50.0  # outside of any phase
    with clock.phase("score"):
        ticks.time += 0.5
    with clock.phase("train"):
        ticks.time += 1.0
    assert clock.seconds == {"train": 3.0, "score": 0.5}


def test_the_clock_charges_a_phase_that_fails() -> None:
    ticks = Ticks()
    clock = Clock(ticks)

    def work() -> None:
        with clock.phase("train"):
            ticks.time += 4.0
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        work()
    assert clock.seconds == {"train": 4.0}


def test_the_clock_nests() -> None:
    ticks = Ticks()
    clock = Clock(ticks)
    with clock.phase("all"):
        ticks.time += 1.0
        with clock.phase("part"):
            ticks.time += 2.0
    assert clock.seconds == {"all": 3.0, "part": 2.0}
