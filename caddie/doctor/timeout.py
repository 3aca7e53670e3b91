"""Calls with a time limit: a disk or driver that hangs is a finding of its own and must not hold up the doctor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
from typing import Generic, TypeVar

from caddie.report.tables import one_line

T = TypeVar("T")


@dataclass(frozen=True)
class Answer(Generic[T]):
    """Result of a call that may fail or hang."""

    value: T | None
    error: str = ""
    """Reason why there is no value; empty if the call returned."""


def call_within(seconds: float, function: Callable[[], T]) -> Answer[T]:
    """Call `function` and wait at most `seconds`. A call that takes longer goes on unseen: threads cannot be ended."""
    answers: list[Answer[T]] = []

    def call() -> None:
        try:
            answers.append(Answer(function()))
        except Exception as error:  # whatever a broken driver or a garbled file leads to
            answers.append(Answer(None, one_line(f"{type(error).__name__}: {error}")))

    thread = Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else Answer(None, f"no answer within {seconds:g} seconds")
