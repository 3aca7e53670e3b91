"""A progress that keeps what it gets."""

from __future__ import annotations

from typing import Any

from caddie.runtime.progress import Event


class RecordedProgress:
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
