"""One way for long work to report: phases, events within a phase, and lines that stay."""

from __future__ import annotations

from collections.abc import Mapping
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


class _Silent:
    def phase(self, name: str) -> None:
        """Drop it."""

    def step(self, event: Event) -> None:
        """Drop it."""

    def note(self, text: str) -> None:
        """Drop it."""


SILENT: Progress = _Silent()
