"""Progress that keeps or hands on what it gets."""

from collections.abc import Callable
from typing import Any

from caddie.runtime.progress import Event, Progress


class RecordedProgress(Progress):
    """Phases, events and notes in order."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def phase(self, name: str) -> None:
        self.phases.append(name)

    def step(self, event: Event) -> None:
        self.events.append(dict(event))

    def note(self, text: str) -> None:
        self.notes.append(text)


class Recorder(RecordedProgress):
    """Also calls `on_event` with every event; a note is an event of that kind."""

    def __init__(self, on_event: Callable[[dict[str, Any]], object]) -> None:
        super().__init__()
        self.on_event = on_event

    def step(self, event: Event) -> None:
        super().step(event)
        self.on_event(dict(event))

    def note(self, text: str) -> None:
        super().note(text)
        self.on_event({"event": "note", "text": text})
