"""Progress, schedules and the clock: hand-computed numbers and those of the public scripts."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import facts as read_facts

from caddie.config import coerce, parse_assignment, variants
from caddie.config.schedules import (
    Budget,
    IntSchedule,
    IterationWarmdown,
    NonNegativeNumber,
    PiecewiseConstant,
    Ramp,
    Rewarmed,
    Schedule,
    StepRamp,
    TrainProgress,
    Warmdown,
    all_values,
    changes,
    int_at,
    progress_at,
    value_at,
)
from caddie.errors import UserError
from caddie.pack.quantize import Rows
from caddie.train.optim import AdamW
from caddie.train.qat import StraightThrough
from caddie.train.settings import Train

quick = settings(derandomize=True, deadline=None, max_examples=60)


def at(progress: float) -> TrainProgress:
    """A moment at this progress of a run of 100 seconds."""
    return TrainProgress(step=7, seconds=100 * progress, budget=Budget(seconds=100))


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
    assert TrainProgress(step, seconds, budget).progress == progress


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
        # The weight decay of CASE: constant to 70 %, then down to half: 0.08 - 0.04·(progress - 0.7)/0.3.
        (
            Ramp(start=0.08, end=0.04, begin=0.7),
            {0.0: 0.08, 0.7: 0.08, 0.775: 0.07, 0.85: 0.06, 0.94: 0.048, 1.0: 0.04},
        ),
        (PiecewiseConstant(values=(1, 3), begins=(0.35,)), {0.0: 1.0, 0.3499: 1.0, 0.35: 3.0, 1.0: 3.0}),
        (
            PiecewiseConstant(values=(4, 0.5, 2), begins=(0.25, 0.75)),
            {0.0: 4, 0.2: 4, 0.25: 0.5, 0.7: 0.5, 0.75: 2, 1.0: 2},
        ),
        (PiecewiseConstant(values=(7,), begins=()), {0.0: 7.0, 0.5: 7.0, 1.0: 7.0}),
    ],
)
def test_schedules_of_progress(schedule: Schedule, values: dict[float, float]) -> None:
    for progress, value in values.items():
        assert schedule.at(at(progress)) == pytest.approx(value, rel=1e-12), progress


def test_the_iteration_warmdown_foretells_its_length_from_the_mean_step() -> None:
    budget = Budget(seconds=100)
    schedule = IterationWarmdown(steps=10)
    # 20 steps in 40 s are 2 s each, so the last 10 steps are the last 20 s.
    assert schedule.at(TrainProgress(20, 40.0, budget)) == 1.0
    assert schedule.at(TrainProgress(40, 80.0, budget)) == 1.0
    assert schedule.at(TrainProgress(45, 90.0, budget)) == 0.5
    assert schedule.at(TrainProgress(48, 96.0, budget)) == pytest.approx(0.2)
    assert schedule.at(TrainProgress(50, 100.0, budget)) == 0.0
    assert schedule.at(TrainProgress(51, 101.0, budget)) == 0.0
    # 20 s a step: the warm-down would be 200 s long, so it has begun before the run.
    assert schedule.at(TrainProgress(1, 20.0, budget)) == 0.4
    assert schedule.at(TrainProgress(0, 0.0, budget)) == 1.0


def test_the_iteration_warmdown_counts_steps_where_no_seconds_are_given() -> None:
    schedule = IterationWarmdown(steps=4)
    found = [schedule.at(TrainProgress(step, 0.0, Budget(steps=10))) for step in range(12)]
    assert found == [1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0]


def test_the_iteration_warmdown_ends_with_the_budget_that_ends_first() -> None:
    """Steps of 2 s: 10 steps are over after 20 s, 100 s after 50 steps."""
    for budget, last in ((Budget(100, 10), 10), (Budget(100, 1000), 50)):
        steps = [last - left for left in range(6)]
        found = [IterationWarmdown(steps=4).at(TrainProgress(step, 2.0 * step, budget)) for step in steps]
        assert found == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1])


def test_the_step_ramp_counts_steps() -> None:
    ramp = StepRamp(start=0.5, end=1.0, steps=4)
    assert [ramp.at(TrainProgress(step, 0.0, Budget(seconds=1))) for step in range(6)] == [
        0.5,
        0.625,
        0.75,
        0.875,
        1.0,
        1.0,
    ]
    assert StepRamp(start=0.5, end=1.0, steps=0).at(TrainProgress(0, 0.0, Budget(seconds=1))) == 1.0


@pytest.mark.parametrize(
    "schedule",
    [
        Ramp(start=-1.0, end=1.0),
        StepRamp(start=0.5, end=-0.5, steps=9),
        PiecewiseConstant(values=(1.0, -1.0), begins=(0.5,)),
        Rewarmed(of=Ramp(start=1.0, end=-1.0), begins=(0.5,)),
    ],
)
def test_every_value_of_a_schedule_is_within_the_bounds(schedule: Schedule) -> None:
    for make in (lambda: AdamW(lr=schedule), lambda: Train(steps=9, lr_schedule=schedule)):
        with pytest.raises(UserError, match=rf"lr.*, a {type(schedule).__name__},.* must be at least 0, not -"):
            make()
    with pytest.raises(UserError, match=r"strength, a Ramp, must be from 0 to 1, not 3"):
        StraightThrough(quantizer=Rows(bits=6), strength=Ramp(start=0.0, end=3.0))


def test_a_schedule_stands_where_a_number_stands() -> None:
    assert value_at(0.25, at(0.5)) == 0.25
    assert value_at(Ramp(start=0, end=1), at(0.5)) == 0.5
    assert coerce({"kind": "Warmdown", "fraction": 0.5}, NonNegativeNumber, "lr") == Warmdown(fraction=0.5)
    with pytest.raises(UserError, match="lr must be at least 0, not -1"):
        coerce(-1, NonNegativeNumber, "lr")


def test_begins_and_ends_in_the_wrong_order_are_an_error() -> None:
    with pytest.raises(UserError, match="must not finish before"):
        Ramp(start=1.0, end=0.0, begin=0.9, finish=0.1)
    with pytest.raises(UserError, match="must rise"):
        Rewarmed(of=1.0, begins=(0.5, 0.2))


@pytest.mark.parametrize("steps", [20, 100, 4_900])
@pytest.mark.parametrize("begin", [0.07, 0.3, 0.35, 0.65, 0.7])
def test_a_warm_up_begins_with_its_first_step_and_rises_with_each(steps: int, begin: float) -> None:
    """By rounding, 0.65 of 20 steps are more than 13."""
    rewarmed, budget = Rewarmed(of=1.0, begins=(begin,), steps=4), Budget(steps=steps)
    first = next(step for step in range(steps) if step / steps >= begin)
    found = [rewarmed.at(TrainProgress(step, 0.0, budget)) for step in range(first - 1, first + 5)]
    assert found == [1.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    assert progress_at(begin, budget).step == first


def test_a_warm_up_from_the_start_needs_no_time_to_have_passed() -> None:
    """On a GPU the loss of a step is read after the next has begun, when no second may have been counted."""
    rewarmed = Rewarmed(of=1.0, begins=(0.0, 0.5), steps=4)
    assert [rewarmed.at(TrainProgress(step, 0.0, Budget(seconds=600.0))) for step in range(5)] == [
        0.25,
        0.5,
        0.75,
        1.0,
        1.0,
    ]


# Stairs and whole numbers in pieces


@pytest.mark.parametrize(
    ("values", "begins"),
    [
        ((1, 2), ()),
        ((1,), (0.5,)),
        ((), ()),
        ((1, 2, 3), (0.5, 0.5)),
        ((1, 2, 3), (0.5, 0.4)),
        ((1, 2), (0.0,)),
    ],
)
def test_stairs_that_do_not_rise_in_the_run_are_an_error(values: tuple[float, ...], begins: tuple[float, ...]) -> None:
    with pytest.raises(UserError, match=r"give one begin fewer than values, rising between 0 and 1, as in") as error:
        PiecewiseConstant(values=values, begins=begins)
    assert "\n" not in str(error.value)


def test_a_piece_from_the_end_on_is_for_scoring_alone() -> None:
    stairs, budget = PiecewiseConstant(values=(1, 2), begins=(1.0,)), Budget(steps=100)
    assert [stairs.at(TrainProgress(step, 0.0, budget)) for step in (0, 99, 100)] == [1, 1, 2]


def test_stairs_outside_of_the_run_are_an_error() -> None:
    with pytest.raises(UserError, match=r"begins\.0 must be from 0 to 1, not 35"):
        PiecewiseConstant(values=(1, 3), begins=(35,))
    with pytest.raises(UserError, match=r"values\.1 must be a number"):
        PiecewiseConstant(values=(1, float("nan")), begins=(0.5,))


@quick
@given(
    st.lists(st.floats(0.001, 0.999), unique=True, max_size=6).map(sorted), st.floats(0, 1), st.integers(0, 2**32 - 1)
)
def test_stairs_hold_each_value_from_its_begin_on(begins: list[float], progress: float, seed: int) -> None:
    stairs = PiecewiseConstant(
        values=tuple(float((seed >> 4 * i) % 16) for i in range(len(begins) + 1)), begins=tuple(begins)
    )
    moment = TrainProgress(0, progress, Budget(seconds=1.0))
    assert stairs.at(moment) == stairs.values[sum(begin <= moment.progress for begin in begins)]


def test_a_whole_number_may_come_in_pieces() -> None:
    tokens: IntSchedule = coerce(
        parse_assignment("x=PiecewiseConstant(values=[64, 256], begins=[0.5])")[1], IntSchedule, "batch_tokens"
    )
    assert tokens == PiecewiseConstant(values=(64, 256), begins=(0.5,))
    found = [int_at(tokens, at(progress)) for progress in (0.0, 0.49, 0.5, 1.0)]
    assert found == [64, 64, 256, 256]
    assert all(type(number) is int for number in (*found, *all_values(tokens)))
    assert all_values(tokens) == (64, 256)
    assert coerce(128, IntSchedule, "batch_tokens") == int_at(128, at(0.5)) == 128
    assert all_values(128) == (128,)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (0, "rows must be from 1 to"),
        (1.5, "rows must be a whole number, not 1.5"),
        (Ramp(start=1, end=2), "rows must be one of PiecewiseConstant, not Ramp"),
        (PiecewiseConstant(values=(1, 0), begins=(0.5,)), r"rows\.values must be from 1 to .*, not 0"),
        (PiecewiseConstant(values=(1, 2.5), begins=(0.5,)), r"rows\.values must be a whole number, not 2\.5"),
    ],
)
def test_what_is_not_whole_is_an_error(number: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        coerce(number, IntSchedule, "rows")


def test_the_changes_of_several_numbers_are_known_beforehand() -> None:
    tokens = PiecewiseConstant(values=(64, 128, 64), begins=(0.25, 0.75))
    passes = PiecewiseConstant(values=(1, 2, 3), begins=(0.5, 0.75))
    assert changes([tokens, 32, passes]) == (0.25, 0.5, 0.75)
    assert changes([tokens]) == tokens.begins
    assert changes([32]) == ()
    assert all_values(tokens) == (64, 128, 64)
    shapes = [
        (int_at(tokens, at(progress)), int_at(passes, at(progress))) for progress in (0, *changes([tokens, passes]))
    ]
    assert shapes == [(64, 1), (128, 1), (128, 2), (64, 3)]


SAMPLES: dict[str, Schedule] = {
    "Ramp": Ramp(start=1.0, end=0.5, begin=0.1, finish=0.7),
    "Warmdown": Warmdown(fraction=0.7, floor=0.1),
    "IterationWarmdown": IterationWarmdown(steps=100),
    "StepRamp": StepRamp(start=1.0, end=0.5, steps=50),
    "PiecewiseConstant": PiecewiseConstant(values=(0.2, 1.0, 0.5), begins=(0.3, 0.65)),
    "Rewarmed": Rewarmed(of=Warmdown(fraction=0.5), begins=(0.3, 0.65), steps=3),
}
"""One of each; a new schedule needs one here."""


@pytest.mark.parametrize("name", sorted(variants(Schedule)))
@quick
@given(
    st.integers(0, 10_000), st.floats(0, 2000), st.sampled_from([Budget(600.0), Budget(600.0, 500), Budget(None, 500)])
)
def test_every_schedule_is_bounded_and_pure(name: str, step: int, seconds: float, budget: Budget) -> None:
    schedule = SAMPLES[name]
    value = schedule.at(TrainProgress(step, seconds, budget))
    assert 0.0 <= value <= 1.0
    assert schedule.at(TrainProgress(step, seconds, budget)) == value
    again = type(schedule).from_json(schedule.to_json())
    assert again.at(TrainProgress(step, seconds, budget)) == value


@pytest.mark.parametrize("name", ["Ramp", "PiecewiseConstant", "Warmdown"])
def test_schedules_of_progress_mean_the_same_on_every_machine(name: str) -> None:
    for tenth in range(11):
        slow = TrainProgress(tenth, tenth * 60.0, Budget(seconds=600))
        fast = TrainProgress(tenth * 1000, tenth * 6.0, Budget(seconds=60))
        counted = TrainProgress(tenth * 50, 3.0, Budget(steps=500))
        assert SAMPLES[name].at(slow) == SAMPLES[name].at(fast) == SAMPLES[name].at(counted)


# The public scripts


@pytest.fixture(scope="module")
def scripts(parity: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_facts(parity / "components" / "schedules" / "learning_rate_momentum_loops")
    return found


@pytest.mark.parametrize("name", ["BASE", "S003", "S002", "ARG"])
def test_iteration_warmdown_agrees_with_the_scripts(scripts: dict[str, Any], name: str) -> None:
    facts = scripts[name]
    given_settings = facts["settings"]
    schedule = IterationWarmdown(steps=given_settings["warmdown iters"])
    capped = Budget(given_settings["max wallclock seconds"], given_settings["iterations"])
    grids = [rows for key, rows in facts.items() if key.startswith("grid at about")]
    rows = [row for grid in grids for row in grid]
    assert rows
    assert any(0 < multiplier < 1 for _, _, multiplier in rows)
    for step, milliseconds, multiplier in rows:
        assert schedule.at(TrainProgress(step, milliseconds / 1000, capped)) == pytest.approx(multiplier, abs=1e-9)
    uncapped = Budget(None, given_settings["iterations"])
    counted = [row for row in facts["grid without wallclock cap"] if row[0] < given_settings["iterations"]]
    assert len(counted) >= len(facts["grid without wallclock cap"]) - 1  # no step begins when all are taken
    for step, _, multiplier in counted:
        assert schedule.at(TrainProgress(step, 0.0, uncapped)) == pytest.approx(multiplier, abs=1e-12)


def test_warmdown_agrees_with_the_script_of_a_fraction(scripts: dict[str, Any]) -> None:
    facts = scripts["S001"]
    schedule = Warmdown(fraction=facts["settings"]["warmdown last frac"])
    by_time = Budget(facts["settings"]["max wallclock seconds"])
    rows = [row for key, grid in facts.items() if key.startswith("grid at about") for row in grid]
    assert any(0 < multiplier < 1 for _, _, multiplier in rows)
    for step, milliseconds, multiplier in rows:
        assert schedule.at(TrainProgress(step, milliseconds / 1000, by_time)) == pytest.approx(multiplier, abs=1e-9)
    by_steps = Budget(None, facts["settings"]["iterations"])
    for step, _, multiplier in facts["grid without wallclock cap"]:
        assert schedule.at(TrainProgress(step, 0.0, by_steps)) == pytest.approx(multiplier, abs=1e-9)


def test_quantization_joins_when_the_script_of_a_fraction_says(scripts: dict[str, Any]) -> None:
    facts = scripts["S001"]
    chosen = facts["settings"]
    joined = PiecewiseConstant(values=(0, 1), begins=(1 - chosen["qat last frac"],))
    start = facts["late quantisation-aware training starts at elapsed ms"]
    for milliseconds in (0.0, start - 0.01, start + 0.01, 1000 * chosen["max wallclock seconds"]):
        moment = TrainProgress(1, milliseconds / 1000, Budget(chosen["max wallclock seconds"]))
        assert joined.at(moment) == (milliseconds >= start)


@pytest.mark.parametrize("name", ["L3", "TOP"])
def test_warmdown_agrees_with_the_scripts_that_reserve_time(scripts: dict[str, Any], name: str) -> None:
    facts = scripts[name]
    chosen = facts["settings"]
    budget = Budget(chosen["max wallclock seconds"] - chosen["gptq reserve seconds"])
    schedule = Warmdown(fraction=chosen["warmdown frac"], floor=chosen["min lr"])
    assert budget.seconds == facts["effective cap ms"] / 1000
    passes = PiecewiseConstant(values=(1, 1 + chosen["num loops"]), begins=(chosen["enable looping at"],))
    assert facts["columns"] == ["elapsed ms", "training fraction", "learning-rate multiplier", "looping on"]
    assert {looping for *_, looping in facts["grid"]} == {False, True}
    of_the_script = Budget(facts["effective cap ms"])  # it divides milliseconds: where looping begins, each bit counts
    for milliseconds, fraction, multiplier, looping in facts["grid"]:
        moment = TrainProgress(1, milliseconds, of_the_script)
        assert moment.progress == pytest.approx(min(fraction, 1.0), abs=1e-12)
        assert schedule.at(moment) == pytest.approx(multiplier, abs=1e-9)
        assert int_at(passes, moment) == (1 + chosen["num loops"] if looping else 1)
    uncapped = Budget(None, chosen["iterations"])
    for step, fraction in facts["fraction without a wallclock cap"]:
        assert uncapped.progress(step, 1e9) == pytest.approx(fraction, abs=1e-15)


@pytest.mark.parametrize("name", ["BASE", "S003", "S001", "S002", "ARG", "L3", "TOP"])
def test_momentum_agrees_with_the_scripts(scripts: dict[str, Any], name: str) -> None:
    chosen = scripts[name]["settings"]
    ramp = StepRamp(
        start=chosen["muon momentum warmup start"],
        end=chosen["muon momentum"],
        steps=chosen["muon momentum warmup steps"],
    )
    for step, momentum in scripts[name]["muon momentum"]:
        assert ramp.at(TrainProgress(step, 0.0, Budget(seconds=600))) == pytest.approx(momentum, abs=1e-15)


def grown(text: str, default: int) -> PiecewiseConstant:
    """A schedule as the script spells it: LENGTH@END, where an end still belongs to its piece."""
    pieces = sorted(
        (float(end), int(length)) for length, end in (piece.split("@") for piece in text.split(",") if piece)
    )
    pieces = pieces or [(1.0, default)]
    begins = [math.nextafter(end, 2.0) for end, _ in pieces[:-1]]
    return PiecewiseConstant(values=tuple(length for _, length in pieces), begins=tuple(begins))


def test_rows_grow_as_in_the_script(frontier: Path) -> None:
    config, found = read_facts(frontier / "config")["growth"], read_facts(frontier / "context_growth")
    for plan in found["plans"]:
        schedule = grown(plan["schedule"], config["default"])
        rows = [schedule.at(TrainProgress(0, fraction, Budget(seconds=1.0))) for fraction in config["fractions"]]
        assert rows == plan["rows"]


def test_the_rate_is_warmed_up_anew_as_in_the_script(frontier: Path) -> None:
    config, found = read_facts(frontier / "config")["growth"], read_facts(frontier / "context_growth")
    schedule = grown(config["schedules"][0], config["default"])
    warmdown = Warmdown(fraction=config["warmdown"], floor=config["min_lr"])
    rate = Rewarmed(of=warmdown, begins=schedule.begins, steps=config["rewarm_steps"])
    assert len({row for _, row, _ in found["trace"]}) == len(schedule.values)
    for step, row, scale in found["trace"]:
        # The script divides milliseconds; another unit would differ by a last bit where a stage ends at a step.
        at = TrainProgress(step, step * config["step_ms"] / config["cap_ms"], Budget(seconds=1.0))
        assert schedule.at(at) == row
        assert rate.at(at) == pytest.approx(scale, rel=1e-5)
