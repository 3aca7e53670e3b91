"""Trainings of the tests say nothing of how busy the machine is, so that their notes are the same everywhere."""

from __future__ import annotations

import math

import pytest

from caddie.train import hooks


@pytest.fixture(autouse=True)
def no_word_of_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "BUSY_SECONDS", math.inf)
