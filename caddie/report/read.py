"""Read what stands in a run folder: `result.json`, `log.jsonl` and smaller JSON files.

A folder may be of another version, edited by someone, or still written to, so nothing here trusts its content.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from caddie.config import show
from caddie.errors import UserError
from caddie.files import open_regular, regular_bytes
from caddie.report.charts import is_finite
from caddie.report.run_files import RECIPE, RESULT
from caddie.report.units import bits_per_byte
from caddie.runtime.cpu_share import BUSY_SHARE

VERSION = 1
"""Version of `result.json` that this module reads."""
LARGEST_BYTES = 1 << 24
"""Most bytes of a JSON file, and of a log at one reading, that `read_object` and `Log` take."""
POINTS = 500
"""Most points of the curve of a `Log`."""
_LABELS = ("kind", "name", "why", "base", "public")
"""Fields of a recipe that are no settings."""
_LARGEST_NUMBER = 1e30
_UNSTEADY_SHARE = 0.9
"""Share of its threads' time below which training was disturbed, if its step times also varied."""


def pick(value: Any, *path: str | int) -> Any:
    """Return what lies at `path` in nested mappings, or `None`."""
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def file_scores(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the packed file's scores by kind (plain, sliding, adaptive), where it has them; the last is the run's."""
    scores = result["scores"]
    return {kind: one for kind in ("plain", "sliding", "adaptive") if (one := scores.get(f"quantized_{kind}"))}


def final_score(result: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return kind and score of the packed file that count as the run's."""
    return [*file_scores(result).items()][-1]


def read_result(path: Path) -> dict[str, Any]:
    """Return the result at `path`. Raises `UserError` if there is none of this version."""
    try:
        result = json.loads(regular_bytes(path))
    except (FileNotFoundError, NotADirectoryError):
        todo, run = "name the folder of a finished run", path.parent
        if path.name == RESULT and (run / RECIPE).exists():
            again = shlex.join(["caddie", "run", str(run), "--out", str(run)])
            todo = f"the run is not finished; do what is left, to the score, with: {again}"
        raise UserError(f"no {path}; {todo}") from None
    except (ValueError, RecursionError):
        todo = "remove it and run the recipe again" if path.name == RESULT else "name the folder of a finished run"
        raise UserError(f"{path} is not JSON; {todo}") from None
    version = pick(result, "version")
    if version is None and path.name != RESULT:
        raise UserError(f"{path} is no result of a run; name the folder of a finished run")
    if version != VERSION:
        raise UserError(f"{path} has version {show(version)}, this program reads {VERSION}; run the recipe again")
    if not isinstance(result.get("recipe"), str):
        raise UserError(f"{path} names no recipe; run the recipe again")
    return dict(result)


def read_scored_result(path: Path) -> dict[str, Any]:
    """Return the result at `path`. Raises `UserError` if its score is not finite, or not that of its sums."""
    result = read_result(path)
    if not is_finite(stated := result.get("bits_per_byte")):
        raise UserError(f"{path} holds no score: bits_per_byte must be a finite number; run the recipe again")
    if "scores" not in result:
        return result
    with result_errors(path, "a score"):
        score = final_score(result)[1]
        found = bits_per_byte(score["nats"], score["source_bytes"])
    if not math.isclose(found, stated, rel_tol=1e-9):
        raise UserError(f"{path} states {stated:.4f} bits per byte, and its sums come to {found:.4f}; run it again")
    return result


@contextmanager
def result_errors(path: Path, reader: str, advice: str = "run the recipe again") -> Iterator[None]:
    """Turn errors of the block, which uses the result at `path` for `reader`, into a `UserError` with `advice`."""
    from jinja2 import UndefinedError

    try:
        yield
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, UndefinedError, ValueError) as why:
        what = f"{type(why).__name__}: {why}"
        raise UserError(f"{path} lacks what {reader} needs ({what}); {advice}") from None


def read_json(path: Path) -> Any:
    """Return the value of a small JSON file, or None if it is missing or damaged."""
    try:
        return json.loads(regular_bytes(path))
    except (OSError, ValueError, RecursionError):
        return None


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted path and value of each leaf of a JSON value; a setting's `kind` stands at the setting's path."""
    if isinstance(value, (Mapping, list)) and value:
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from leaves(item, path if path and key == "kind" else f"{path}.{key}".lstrip("."))
    else:
        yield path, "none" if isinstance(value, (Mapping, list)) else value


def run_settings(written: object) -> dict[str, Any]:
    """Return the settings in the JSON of a run's `RECIPE`, which may be of another version."""
    recipe = pick(written, "recipe")
    return {name: value for name, value in recipe.items() if name not in _LABELS} if isinstance(recipe, dict) else {}


def read_steps(path: Path, kind: str = "step") -> list[dict[str, Any]]:
    """Return the `step` events of the log at `path` in order, or the `held_out` events by `kind`.

    A resumed run's steps replace its earlier ones.
    """
    steps: list[dict[str, Any]] = []
    with suppress(FileNotFoundError), open(open_regular(path), encoding="utf-8", errors="replace") as lines:
        for event in parse_events(lines, json.loads):
            if event.get("event") == kind and isinstance(event.get("step"), int):
                while steps and steps[-1]["step"] >= event["step"]:
                    steps.pop()
                steps.append(event)
    return steps


def step_seconds(steps: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Return the seconds of a quick step (5th percentile) and a slow one (95th); None with fewer than ten entries."""
    known = [(step["step"], step["seconds"]) for step in steps if is_finite(step.get("seconds"))]
    spans = sorted((later[1] - one[1]) / (later[0] - one[0]) for one, later in pairwise(known))
    if len(spans) < 10:
        return None
    return {"p5": spans[len(spans) // 20], "p95": spans[-1 - len(spans) // 20]}


def training_notes(result: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each thing that sets a run apart from one trained in one go on a quiet machine."""
    notes = [busy] if (busy := busy_machine(result)) else []
    if earlier := pick(result, "training", "earlier_budgets"):
        notes.append(
            f"It began with {' and then '.join(map(str, earlier))}, so the same command alone does not repeat it."
        )
    return notes


def busy_machine(result: Mapping[str, Any]) -> str | None:
    """Return a sentence if other programs slowed the training down, judging by the CPU time that its threads got."""
    share = pick(result, "training", "cpu_share")
    quick, slow = (pick(result, "training", "step_seconds", name) for name in ("p5", "p95"))
    ranged = is_finite(quick) and is_finite(slow)
    if not is_finite(share) or share >= (_UNSTEADY_SHARE if ranged and slow > 1.5 * quick else BUSY_SHARE):
        return None
    took = f", and most steps took {quick:.2g} to {slow:.2g} s" if ranged else ""
    return f"The machine was busy: training got {share:.0%} of its threads' time{took}."


def parse_events(lines: Iterable[Any], parse: Callable[[Any], Any]) -> Iterator[dict[str, Any]]:
    """Yield the events in the lines of a log, without those that a killed run left unfinished."""
    for line in lines:
        try:
            event = parse(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            yield event


class Point(NamedTuple):
    """Point of a curve: its last step and second, and the mean loss of its `events` logged steps."""

    step: float
    seconds: float
    loss: float
    events: int


@dataclass
class Log:
    """Log of a run that may still be written to. Each `read` takes only new lines."""

    offset: int = 0
    inode: int = 0
    last: dict[str, Any] = field(default_factory=dict)
    """The latest step."""
    file_bytes: float | None = None
    """The latest forecast of the artifact's size."""
    ended: bool = False
    points: list[Point] = field(default_factory=list)
    """Curve of the loss, at most `POINTS` points."""
    events_per_point: int = 1

    def read(self, path: Path) -> Log:
        """Return this log with the new lines of the file at `path`, or a new log if that is another file."""
        with os.fdopen(open_regular(path, "O_NOFOLLOW"), "rb") as file:
            status = os.fstat(file.fileno())
            if self.inode not in (0, status.st_ino) or status.st_size < self.offset:
                return Log().read(path)
            self.inode = status.st_ino
            file.seek(self.offset)
            chunk = file.read(LARGEST_BYTES)
        finished = chunk[: chunk.rfind(b"\n") + 1]
        if not finished and len(chunk) == LARGEST_BYTES:  # no event has so long a line
            finished = chunk
        self.offset += len(finished)
        for event in parse_events(finished.split(b"\n"), parse_finite):
            self._add(event)
        return self

    def _add(self, event: dict[str, Any]) -> None:
        kind = event.get("event")
        if kind == "step" and (step := known_number(event.get("step"))) is not None:
            self.last, self.ended = event, False
            self._draw(step, known_number(event.get("seconds")), known_number(event.get("loss")))
        elif kind == "forecast":
            self.file_bytes = known_number(event.get("file_bytes"))
        elif kind in ("start", "end"):
            self.ended = kind == "end"

    def _draw(self, step: float, seconds: float | None, loss: float | None) -> None:
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


def read_regular(path: Path, most: int = LARGEST_BYTES) -> bytes:
    """Return the bytes of a regular file. Raises `OSError` for others and above `most` bytes."""
    with os.fdopen(open_regular(path, "O_NOFOLLOW"), "rb") as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(f"it has more than {most:,} bytes")
        return file.read(most)


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a regular JSON file. Raises `OSError` as `read_regular`, `ValueError` for other content."""
    found = parse_finite(read_regular(path))
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is no JSON object")
    return found


def parse_finite(content: bytes) -> Any:
    """Parse JSON; numbers that are not finite become None, so that the value can be written as strict JSON."""

    def finite(digits: str) -> float | None:
        value = float(digits)
        return value if math.isfinite(value) else None

    return json.loads(content, parse_float=finite, parse_constant=finite)


def known_number(*values: object) -> float | None:
    """Return the first of the values that is a number of sensible size, else None."""
    numbers = (one for one in values if isinstance(one, (int, float)) and not isinstance(one, bool))
    return next((number for number in numbers if abs(number) <= _LARGEST_NUMBER), None)
