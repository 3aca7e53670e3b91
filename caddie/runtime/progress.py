"""One way for long work to report: phases, events within a phase, and lines that stay."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

Event = Mapping[str, Any]
"""An event of the current phase; `event` names its kind:

| event | other keys | from |
|---|---|---|
| `start`, `step`, `forecast`, `end` | those of `log.jsonl` (`docs/result.md`) | training |
| `tokens` | `done`, `total` | scoring, coding text |
| `candidate` | `number`, `file_bytes`, `cap_bytes` | packing |
| `runs` | `done`, `total`, `text` | studies |
| `doing` | `text` | all other work |
"""


class Progress(Protocol):
    """Receives the progress of long work. `Display` shows it, `SILENT` drops it."""

    def phase(self, name: str) -> None:
        """Begin the phase `name` and end the one before."""

    def step(self, event: Event) -> None:
        """Take an event of the current phase."""

    def note(self, text: str) -> None:
        """Take one line that stays."""


class Silent:
    """Progress that is dropped."""

    def phase(self, name: str) -> None:
        """Drop it."""

    def step(self, event: Event) -> None:
        """Drop it."""

    def note(self, text: str) -> None:
        """Drop it."""


SILENT: Progress = Silent()


class Phases:
    """Reports phases and times them. A phase may be entered several times; its seconds add up."""

    def __init__(self, progress: Progress = SILENT, now: Callable[[], float] = time.perf_counter) -> None:
        self.progress, self.now = progress, now
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Report the phase `name` and charge the enclosed work to it."""
        self.progress.phase(name)
        begin = self.now()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self.now() - begin
