"""Progress of long work: phases, events within a phase, and lines that stay."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

Event = Mapping[str, Any]
"""An event of the current phase; `event` names its kind:

| event | other keys | from |
|---|---|---|
| `start`, `step`, `held_out`, `forecast`, `end` | those of `log.jsonl` (`docs/result.md`) | training |
| `tokens` | `done`, `total` | calibration, scoring, coding text |
| `candidate` | `number`, `file_bytes`, `cap_bytes` | packing |
| `runs` | `done`, `total`, `text` | studies, as a run ends |
| `running` | `progress`, `text` | studies, while runs go on |
| `doing` | `text` | all other work |
"""


class Progress:
    """Receives the progress of long work, and drops it. `Display` shows it."""

    def phase(self, name: str) -> None:
        """Begin the phase `name` and end the one before."""

    def step(self, event: Event) -> None:
        """Take an event of the current phase."""

    def note(self, text: str) -> None:
        """Take one line that stays."""


SILENT = Progress()


class JsonLines(Progress):
    """Progress as lines of JSON, for the process that started this one to `relay`."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def phase(self, name: str) -> None:
        self._write("phase", name)

    def step(self, event: Event) -> None:
        self._write("step", dict(event))

    def note(self, text: str) -> None:
        self._write("note", text)

    def _write(self, method: str, value: object) -> None:
        print(json_line(method, value), file=self.stream, flush=True)


def json_line(method: str, value: object) -> str:
    """Return the line that `JsonLines` writes when a method gets a value."""
    return json.dumps({"progress": method, "value": value})


def relay(line: str, progress: Progress) -> bool:
    """Hand a line of `JsonLines` on to `progress`; return False for any other line."""
    try:
        written = json.loads(line)
        method, value = written["progress"], written["value"]
    except (ValueError, TypeError, KeyError):
        return False
    if method not in ("phase", "step", "note"):
        return False
    getattr(progress, method)(value)
    return True


class Phases:
    """Reports phases and times them. A phase may be entered several times; its seconds add up."""

    def __init__(self, progress: Progress = SILENT, now: Callable[[], float] = time.perf_counter) -> None:
        self.progress, self.now = progress, now
        self.seconds: dict[str, float] = {}
        self.current = ""
        """The phase that began last."""

    def begin(self, name: str) -> None:
        """Report the phase `name` without timing it."""
        self.current = name
        self.progress.phase(name)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Report the phase `name` and charge the enclosed work to it."""
        self.begin(name)
        begin = self.now()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self.now() - begin
