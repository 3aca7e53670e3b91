"""Progress that hands on what it gets, for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class Recorder:
    """Calls `on_event` with every event; a note is an event of that kind."""

    def __init__(self, on_event: Callable[[Mapping[str, Any]], object]) -> None:
        self.on_event = on_event
        self.phases: list[str] = []

    def phase(self, name: str) -> None:
        self.phases.append(name)

    def step(self, event: Mapping[str, Any]) -> None:
        self.on_event(event)

    def note(self, text: str) -> None:
        self.on_event({"event": "note", "text": text})


class Notes(Recorder):
    """Collects the notes alone."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        super().__init__(lambda event: self.lines.append(event["text"]) if event["event"] == "note" else None)
