"""The choice by measurement, held against a clock that the test turns."""

from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from types import SimpleNamespace

import pytest

from caddie.runtime import autotune as threads
from caddie.runtime.autotune import quickest


class Work:
    """Work whose choices take as long as they are said to, the last time over and over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **takes: Sequence[float]) -> None:
        self.now = 0.0
        self.asked: list[str] = []
        self.takes: dict[str, Iterator[float]] = {
            name: chain(times, repeat(times[-1])) for name, times in takes.items()
        }
        monkeypatch.setattr(threads, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def __call__(self, choice: str) -> None:
        self.asked.append(choice)
        self.now += next(self.takes[choice])


def test_choices_take_turns_behind_one_that_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch, one=[9.0, 1.0], two=[1.5, 0.75])
    assert quickest(["one", "two"], work) == "two"
    assert work.asked == ["one", *["one", "two"] * 2]


@pytest.mark.parametrize("slow", [2.5, 40.0])
def test_one_slow_moment_decides_nothing(slow: float, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch, one=[1.0], two=[slow, 0.6])
    assert quickest(["one", "two"], work, seconds=50.0) == "two"


def test_what_is_short_is_tried_for_as_long_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch, one=[0.125], two=[0.25, 0.25, 0.0625])
    assert quickest(["one", "two"], work, seconds=1.0) == "two"  # 0.375, 0.75, 0.9375, 1.125
    assert work.asked == ["one", *["one", "two"] * 4]


@pytest.mark.parametrize(("seconds", "tries"), [(2.0, 1), (20.0, 2)])
def test_what_is_terrible_is_not_run_for_long(seconds: float, tries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch, one=[1.0], two=[3.5], three=[0.9])
    assert quickest(["one", "two", "three"], work, seconds=seconds) == "three"
    assert work.asked.count("two") == tries


def test_a_single_choice_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch, one=[1.0])
    assert quickest(["one"], work) == "one"
    assert not work.asked
