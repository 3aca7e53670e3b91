"""Budget and progress of a run, and schedules of numbers over it.

Progress is the fraction of the budget spent, so one recipe means the same on a laptop and on eight GPUs.
"""

import math
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from caddie.config import Config, Count, Fraction, Range, coerce
from caddie.errors import UserError


@dataclass(frozen=True)
class Budget:
    """Budget of training: wall-clock seconds, optimizer steps, or whichever of both runs out first."""

    seconds: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.seconds is None and self.steps is None:
            raise UserError("training needs a budget; set train.seconds or train.steps")

    def __str__(self) -> str:
        budget = {"train.seconds": self.seconds, "train.steps": self.steps}
        return " ".join(f"{name}={value:.15g}" for name, value in budget.items() if value is not None)

    def progress(self, step: int, seconds: float) -> float:
        """Return the fraction spent, from 0 to 1, after `step` steps that took `seconds`."""
        by_time = seconds / self.seconds if self.seconds else 0.0
        by_steps = step / self.steps if self.steps else 0.0
        return min(1.0, max(by_time, by_steps))


@dataclass(frozen=True)
class TrainProgress:
    """Progress of a run: before step number `step`, from 0, after `seconds` of training."""

    step: int
    seconds: float
    budget: Budget

    @property
    def progress(self) -> float:
        """Fraction of the budget spent."""
        return self.budget.progress(self.step, self.seconds)


def progress_at(fraction: float, budget: Budget = Budget(seconds=1.0)) -> TrainProgress:
    """Return the first progress at which that fraction of the budget is spent."""
    step = math.ceil(fraction * budget.steps) if budget.steps else 0
    if budget.steps and step > 0 and (step - 1) / budget.steps >= fraction:  # in floats 0.07 * 100 is above 7
        step -= 1
    return TrainProgress(step, fraction * (budget.seconds or 0.0), budget)


class Schedule(Config):
    """Socket: schedule of a value over the run."""

    @abstractmethod
    def at(self, train_progress: TrainProgress) -> float:
        """Return the value at `train_progress`."""

    def ends(self) -> tuple["Number", ...]:
        """Return the values that bound the schedule, where its settings state them; ranges are checked on these."""
        return ()


Number = float | Schedule
"""Number, or a schedule in its place."""


class NumberRange(Range):
    """Inclusive bounds of a number, and of every value of a schedule."""

    def check(self, value: object, name: str) -> None:
        super().check(value, name)
        for end in value.ends() if isinstance(value, Schedule) else ():
            self.check(end, f"{name}, a {type(value).__name__},")


NonNegativeNumber = Annotated[Number, NumberRange(0.0, 1e30)]
"""Number of at least 0, or a schedule."""


def value_at(number: Number, train_progress: TrainProgress) -> float:
    """Return the number itself, or the schedule's value at `train_progress`."""
    return number.at(train_progress) if isinstance(number, Schedule) else number


class Ramp(Schedule):
    """Linear ramp over progress, constant before and after."""

    start: float
    """Value until progress `begin`."""
    end: float
    """Value from progress `finish` on."""
    begin: Fraction = 0.0
    """Progress at which the line leaves `start`."""
    finish: Fraction = 1.0
    """Progress at which the line reaches `end`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.begin > self.finish:
            raise UserError(f"Ramp begins at {self.begin:g} and finishes at {self.finish:g}; it must not finish before")

    def ends(self) -> tuple[Number, ...]:
        return self.start, self.end

    def at(self, train_progress: TrainProgress) -> float:
        progress, length = train_progress.progress, self.finish - self.begin
        fraction = (progress - self.begin) / length if length > 0 else float(progress >= self.finish)
        return self.start + (self.end - self.start) * min(1.0, max(0.0, fraction))


class Warmdown(Schedule):
    """Warm-down: 1, then a line toward 0 over the last `fraction` of the budget, never below `floor` (#1493 on)."""

    fraction: Fraction
    """Fraction of the budget over which the value falls."""
    floor: Fraction = 0.0
    """Lowest value."""

    def at(self, train_progress: TrainProgress) -> float:
        left = 1.0 - train_progress.progress
        return max(left / self.fraction, self.floor) if left <= self.fraction and self.fraction > 0 else 1.0


class Rewarmed(Schedule):
    """Another schedule with a new warm-up over some steps after each change of the run, such as longer rows.

    The step of a change is estimated from the mean step time so far. So with a budget of seconds, if steps take k times
    as long from then on, the warm-up has about `steps` / k steps.
    """

    of: Number
    """Value without the warm-ups."""
    begins: tuple[Fraction, ...]
    """Progress at which each change comes, rising."""
    steps: Count = 32
    """Steps of a warm-up."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if list(self.begins) != sorted(self.begins):
            raise UserError(f"the begins of Rewarmed must rise, as in [0.3, 0.6], not {list(self.begins)}")

    def ends(self) -> tuple[Number, ...]:
        return (self.of,)

    def at(self, train_progress: TrainProgress) -> float:
        value, progress = value_at(self.of, train_progress), train_progress.progress
        if not (passed := bisect_right(self.begins, progress)):
            return value
        first = math.ceil(self.begins[passed - 1] * train_progress.step / progress - 1e-6) if progress else 0
        return value * min(1.0, (train_progress.step - first + 1) / self.steps)


class IterationWarmdown(Schedule):
    """Warm-down of the contest's baseline over the last `steps` steps, estimated from the mean step time so far.

    On a slow machine it decays from almost the first step; `Warmdown` does not. With budgets of seconds and of steps it
    falls toward whichever ends first, where the contest's scripts look at the seconds alone. Kept to reproduce public
    runs.
    """

    steps: Count
    """Steps over which the value falls to zero."""

    def at(self, train_progress: TrainProgress) -> float:
        budget, step, seconds = train_progress.budget, train_progress.step, train_progress.seconds
        value = 1.0
        if budget.steps is not None:
            value = min(value, max(0, budget.steps - step) / self.steps)
        if budget.seconds is not None and seconds > 0.0:
            value = min(value, max(0.0, budget.seconds - seconds) / (self.steps * seconds / max(step, 1)))
        return value


class StepRamp(Schedule):
    """Linear ramp over the first `steps` steps: the contest's warm-up of momentum."""

    start: float
    """Value at step 0."""
    end: float
    """Value from step `steps` on."""
    steps: Annotated[int, Range(0, 1 << 40)]
    """Length in steps."""

    def ends(self) -> tuple[Number, ...]:
        return self.start, self.end

    def at(self, train_progress: TrainProgress) -> float:
        fraction = min(1.0, train_progress.step / self.steps) if self.steps else 1.0
        return (1.0 - fraction) * self.start + fraction * self.end


MOST_PIECES = 64
"""Largest number of pieces, each of which may be a graph of its own."""


class PiecewiseConstant(Schedule):
    """Piecewise constant over progress: depth recurrence from 35 % on (3LayerRecur), longer rows, a larger batch."""

    values: tuple[float, ...]
    """Value of each piece."""
    begins: tuple[Fraction, ...]
    """Progress at which each piece but the first begins, rising; a piece from 1 on is only for packing and scoring."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.values) > MOST_PIECES:
            raise UserError(f"PiecewiseConstant has {len(self.values):,} values, over the limit of {MOST_PIECES}")
        bounds = (0.0, *self.begins)
        if len(self.values) != len(self.begins) + 1 or any(a >= b for a, b in pairwise(bounds)):
            raise UserError(
                f"PiecewiseConstant has {len(self.values)} values and begins {list(self.begins)}; give one begin fewer "
                "than values, rising between 0 and 1, as in PiecewiseConstant(values=[1, 2, 4], begins=[0.3, 0.6])"
            )

    def ends(self) -> tuple[Number, ...]:
        return self.values

    def at(self, train_progress: TrainProgress) -> float:
        return self.values[bisect_right(self.begins, train_progress.progress)]


class _EachPiece(Range):
    def check(self, value: object, name: str) -> None:
        super().check(value, name)
        for piece in value.values if isinstance(value, PiecewiseConstant) else ():
            coerce(piece, Count, f"{name}.values")


IntSchedule = Annotated[int | PiecewiseConstant, _EachPiece(1, 1 << 40)]
"""Integer of at least one, or a piecewise constant one."""


def int_at(number: IntSchedule, train_progress: TrainProgress) -> int:
    """Return the number itself, or its value at `train_progress`."""
    return int(number.at(train_progress)) if isinstance(number, PiecewiseConstant) else number


def all_values(number: IntSchedule) -> tuple[int, ...]:
    """Return every value in the order of the run, repeated ones included."""
    return tuple(int(value) for value in number.values) if isinstance(number, PiecewiseConstant) else (number,)


def changes(numbers: Iterable[IntSchedule | None]) -> tuple[float, ...]:
    """Return the progress values at which any of the numbers may change, rising."""
    return tuple(sorted({begin for number in numbers for begin in getattr(number, "begins", ())}))
