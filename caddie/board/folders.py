"""Run folders as they stand at this moment, whatever is in them: one row for each run, and its curve.

Runs may be writing while this reads, and a folder may hold anything. So only regular files are read, none whole that is
large, every value is checked, and what cannot be read becomes the reason in that run's row. A second look reads
only what changed since the first: runs are measured on the same machine.
"""

from __future__ import annotations

import json
import math
import os
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from caddie.report.page import pick

DEPTH = 4
"""How many folders below the root a run may lie."""
MOST_FOLDERS = 10_000
"""Folders looked into at most, should somebody serve a whole disk."""
LARGEST_BYTES = 1 << 24
"""A larger document is not read, and of a log no more than this at one look."""
POINTS = 500
"""Most points of a curve."""
TRAINING_QUIET_SECONDS = 300.0
"""A run that trains and writes nothing for so long is called stale."""
QUIET_SECONDS = 1800.0
"""The same for one that prepares or scores, which writes nothing to its folder for a while."""
LONGEST_TEXT = 300
"""Characters of a text that are shown."""

RECIPE, LOG, RESULT, ERROR, TASK = "recipe.json", "log.jsonl", "result.json", "error.json", "task.json"
REPORT = "report.html"
_LABELS = ("kind", "name", "why", "base", "public")
"""Fields of a recipe that decide nothing."""
_KEPT = (
    *("recipe", "seed", "bits_per_byte", "artifact_bytes", "cap_bytes", "under_cap", "verified"),
    *("scores", "compression", "training", "seconds", "device", "precision", "world", "versions"),
)
"""Fields of a result that are held; its long lists are not."""
_LARGEST_NUMBER = 1e30
_MOST_FIELDS = 4000


class Point(NamedTuple):
    """One place on a curve: where it ends, and the mean loss of the `events` steps logged there."""

    step: float
    seconds: float
    loss: float
    events: int


@dataclass
class Log:
    """The log of a run, of which only new lines are read; its curve never has more than `POINTS` points."""

    offset: int = 0
    inode: int = 0
    last: dict[str, Any] = field(default_factory=dict)
    """The latest step."""
    file_bytes: float | None = None
    """The latest forecast of the artifact's size."""
    ended: bool = False
    points: list[Point] = field(default_factory=list)
    events_per_point: int = 1

    def read(self, path: Path) -> Log:
        """This log with the lines that were finished since the last look, or a new one if the file is another."""
        with os.fdopen(open_regular(path), "rb") as file:
            status = os.fstat(file.fileno())
            if self.inode not in (0, status.st_ino) or status.st_size < self.offset:
                return Log().read(path)
            self.inode = status.st_ino
            file.seek(self.offset)
            chunk = file.read(LARGEST_BYTES)
        finished = chunk[: chunk.rfind(b"\n") + 1]
        if not finished and len(chunk) == LARGEST_BYTES:  # no event has such a line
            finished = chunk
        self.offset += len(finished)
        for line in finished.split(b"\n"):
            try:
                event = parse(line)
            except (ValueError, RecursionError):
                continue  # a killed run leaves its last line unfinished
            if isinstance(event, dict):
                self._add(event)
        return self

    def _add(self, event: dict[str, Any]) -> None:
        kind = event.get("event")
        if kind == "step" and number(event.get("step")) is not None:
            self.last, self.ended = event, False
            self._draw(*(number(event.get(name)) for name in ("step", "seconds", "loss")))
        elif kind == "forecast":
            self.file_bytes = number(event.get("file_bytes"))
        elif kind in ("start", "end"):
            self.ended = kind == "end"

    def _draw(self, step: float | None, seconds: float | None, loss: float | None) -> None:
        assert step is not None
        while self.points and self.points[-1].step >= step:  # a resumed run did it again
            self.points.pop()
        if seconds is None or loss is None:
            return
        point = Point(step, seconds, loss, 1)
        if self.points and self.points[-1].events < self.events_per_point:
            point = _joined(self.points.pop(), point)
        self.points.append(point)
        if len(self.points) > POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=False)
            self.points = [_joined(*pair) for pair in pairs] + self.points[len(self.points) // 2 * 2 :]
            self.events_per_point *= 2


def _joined(a: Point, b: Point) -> Point:
    events = a.events + b.events
    return Point(b.step, b.seconds, (a.loss * a.events + b.loss * b.events) / events, events)


@dataclass
class Run:
    """One run folder as it was at the last look."""

    folder: Path
    files: dict[str, os.stat_result] = field(default_factory=dict)
    changed: float = 0.0
    """When the folder or a file of the run in it last changed, seconds since 1970."""
    documents: dict[str, dict[str, Any]] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    """File name to why it cannot be read."""
    log: Log = field(default_factory=Log)

    def look(self, files: dict[str, os.stat_result], changed: float) -> None:
        """Read what changed since the last look."""
        before, self.files = self.files, files
        self.changed = max(changed, *(status.st_mtime for status in files.values()))
        for name in (RECIPE, LOG, RESULT, ERROR, TASK):
            if name not in files:
                self.documents.pop(name, None)
                self.faults.pop(name, None)
            elif name not in before or _signature(files[name]) != _signature(before[name]) or self._unread(name):
                self._read(name)
        if LOG not in files:
            self.log = Log()

    def _unread(self, name: str) -> bool:
        return name == LOG and self.files[LOG].st_size > self.log.offset

    def _read(self, name: str) -> None:
        self.faults.pop(name, None)
        self.documents.pop(name, None)
        try:
            if name == LOG:
                self.log = self.log.read(self.folder / name)
                return
            found = document(self.folder / name)
            self.documents[name] = {key: found[key] for key in _KEPT if key in found} if name == RESULT else found
        except (ValueError, RecursionError):
            self.faults[name] = f"{name} is no JSON object"
        except OSError as error:
            self.faults[name] = f"{name} cannot be read: {error.strerror or error}"

    @property
    def state(self) -> str:
        """`finished`, `failed`, `running`, `stale` or, with nothing but its task written, `waiting`."""
        if RESULT in self.files:
            return "failed" if RESULT in self.faults else "finished"
        if ERROR in self.files and not (LOG in self.files and self.files[LOG].st_mtime > self.files[ERROR].st_mtime):
            return "failed"
        if not {RECIPE, LOG} & set(self.files):
            return "waiting"
        training = self.log.last and not self.log.ended
        quiet = TRAINING_QUIET_SECONDS if training else QUIET_SECONDS
        return "stale" if time.time() - self.changed > quiet else "running"

    def reason(self, state: str) -> str:
        """Why the run is not as it should be, or an empty text."""
        result = self.documents.get(RESULT)
        told = text(pick(self.documents.get(ERROR), "error")) if state == "failed" else ""
        reasons = [*([told] if told else []), *self.faults.values()]
        if state == "failed" and not reasons:
            reasons.append("no reason was written down")
        if pick(result, "verified") is False:
            reasons.append("verification failed")
        if pick(result, "under_cap") is False:
            reasons.append("the artifact is over its cap")
        if state != "finished" and self.log.last and number(self.log.last.get("loss")) is None:
            reasons.append("the loss is not finite")
        return "; ".join(reasons)

    def row(self, name: str) -> dict[str, Any]:
        """What the table shows; null for what is not known."""
        told, task, result = (self.documents.get(file) for file in (RECIPE, TASK, RESULT))
        last, state = self.log.last, self.state
        recipe = text(pick(told, "recipe", "name")) or text(pick(result, "recipe"))
        seeds = (number(pick(source, "seed")) for source in (task, told, result))
        progress = 1.0 if state == "finished" else number(last.get("progress"))
        speed = number(pick(result, "training", "tokens_per_second"))
        seconds = number(pick(result, "seconds", "train"))
        return {
            "name": name,
            "state": state,
            "reason": self.reason(state),
            "label": text(pick(task, "label")) or recipe or name.rpartition("/")[2],
            "recipe": recipe,
            "study": text(pick(task, "study")),
            "seed": next((seed for seed in seeds if seed is not None), None),
            "bits_per_byte": number(pick(result, "bits_per_byte")),
            "loss": number(last.get("loss")),
            "train_bits_per_byte": number(last.get("bits_per_byte")),
            "step": number(last.get("step")),
            "progress": None if progress is None else min(1.0, max(0.0, progress)),
            "tokens_per_second": number(last.get("tokens_per_second")) if speed is None else speed,
            "artifact_bytes": number(pick(result, "artifact_bytes")),
            "forecast_bytes": self.log.file_bytes,
            "parameters": number(pick(result, "training", "parameters")),
            "seconds": number(last.get("seconds")) if seconds is None else seconds,
            "started": min(status.st_mtime for file, status in self.files.items() if file != REPORT),
            "changed": self.changed,
            "report": REPORT in self.files,
        }

    def details(self, name: str) -> dict[str, Any]:
        """The row, the curve as three lists of equal length, and settings and result as dotted path to value."""
        told, result = self.documents.get(RECIPE), self.documents.get(RESULT)
        recipe = pick(told, "recipe")
        known = recipe if isinstance(recipe, dict) else {}
        settings = {key: value for key, value in known.items() if key not in _LABELS}
        settings |= {key: pick(told, key) for key in ("seed", "corpus")}
        return {
            "row": self.row(name),
            "curve": {key: [getattr(point, key) for point in self.log.points] for key in ("step", "seconds", "loss")},
            "settings": flat(settings),
            "result": flat(result or {}),
        }


class Folders:
    """All run folders below a root; links are not followed. Safe to ask from several threads."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.realpath(root))
        self._runs: dict[Path, Run] = {}
        self._by_name: dict[str, Run] = {}
        self._lock = threading.Lock()

    def rows(self) -> dict[str, Any]:
        """`folder`, `runs` with one row each, and `complete`: whether every folder was looked into."""
        with self._lock:
            complete = self._look()
            runs = [run.row(name) for name, run in self._by_name.items()]
        return {"folder": shown(self.root.name or str(self.root)), "complete": complete, "runs": runs}

    def details(self, name: str) -> dict[str, Any] | None:
        """More of one run, by the name in its row; `None` if there is none of that name."""
        with self._lock:
            run = self._find(name)
            return run.details(name) if run else None

    def report(self, name: str) -> bytes | None:
        """The report page of a run, or `None`."""
        with self._lock:
            run = self._find(name)
        try:
            return read_regular(run.folder / REPORT) if run else None
        except OSError:
            return None

    def _find(self, name: str) -> Run | None:
        """A run by its name. What was asked for is only compared with names, never made into a path."""
        if name not in self._by_name:
            self._look()
        return self._by_name.get(name)

    def _look(self) -> bool:
        found: dict[Path, Run] = {}
        folders, waiting = 0, [(self.root, 0)]
        while waiting and folders < MOST_FOLDERS:
            folder, depth = waiting.pop()
            folders += 1
            try:
                below, files, changed = _list(folder)
            except OSError:
                continue  # removed in the meantime, or not ours to read
            if depth < DEPTH:
                waiting += [(path, depth + 1) for path in below]
            if set(files) - {REPORT}:
                found[folder] = self._runs.get(folder) or Run(folder)
                found[folder].look(files, changed)
        self._runs = found
        self._by_name = {shown(str(folder.relative_to(self.root).as_posix())): run for folder, run in found.items()}
        return not waiting


def _list(folder: Path) -> tuple[list[Path], dict[str, os.stat_result], float]:
    """Folders in a folder, the files of a run in it, and when something in it was made, renamed or removed."""
    below, files = [], {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                below.append(folder / entry.name)
            elif entry.name in (RECIPE, LOG, RESULT, ERROR, TASK, REPORT) and entry.is_file(follow_symlinks=False):
                files[entry.name] = entry.stat(follow_symlinks=False)
    return below, files, folder.stat().st_mtime


def _signature(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_mtime_ns, status.st_size, status.st_ino


def open_regular(path: Path) -> int:
    """A descriptor of a regular file; an `OSError` for a link or anything else, without waiting for a pipe's end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("not a regular file")
    return descriptor


def read_regular(path: Path) -> bytes:
    """The bytes of a regular file of at most `LARGEST_BYTES`, or an `OSError`."""
    with os.fdopen(open_regular(path), "rb") as file:
        content = file.read(LARGEST_BYTES + 1)
    if len(content) > LARGEST_BYTES:
        raise OSError(f"it has more than {LARGEST_BYTES:,} bytes")
    return content


def document(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds; `ValueError` if it holds none."""
    found = parse(read_regular(path))
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is no JSON object")
    return found


def parse(content: bytes) -> Any:
    """JSON in which numbers that are not finite become null, so that it can be handed on."""
    return json.loads(content, parse_float=_finite, parse_constant=lambda name: None)


def _finite(digits: str) -> float | None:
    value = float(digits)
    return value if math.isfinite(value) else None


def number(value: object) -> float | None:
    """`value` if it is a number of sensible size."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST_NUMBER
    return value if known else None  # type: ignore[return-value]


def text(value: object) -> str:
    """`value` if it is text, of bounded length."""
    value = value if isinstance(value, str) else ""
    return value if len(value) <= LONGEST_TEXT else value[:LONGEST_TEXT] + "…"


def shown(name: str) -> str:
    """A file name as text that can be encoded."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def flat(value: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted path to number, text, truth value or null; the class of a setting stands at its own path."""
    try:
        return dict(islice(_leaves(value, ""), _MOST_FIELDS))
    except RecursionError:
        return {}


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (Mapping, list)) and value:
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(item, path if key == "kind" else f"{path}.{key}" if path else str(key))
    elif isinstance(value, (Mapping, list)):
        yield path, "none"
    else:
        yield path, text(value) if isinstance(value, str) else value
