"""Calls with a time limit: a disk or driver that hangs is a finding of its own and must not hold up the doctor."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import TypeVar

from caddie.report.tables import one_line

T = TypeVar("T")


def call_within(seconds: float, function: Callable[[], T]) -> tuple[T | None, str]:
    """Call `function` and wait at most `seconds`. Return its value and "", or None and why there is none.

    A call that takes longer goes on unseen: threads cannot be ended.
    """
    answers: list[tuple[T | None, str]] = []

    def call() -> None:
        try:
            answers.append((function(), ""))
        except Exception as error:  # whatever a broken driver or a garbled file leads to
            answers.append((None, one_line(f"{type(error).__name__}: {error}")))

    thread = Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else (None, f"no answer within {seconds:g} seconds")
