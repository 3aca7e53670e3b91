"""Run folders as they are now, whatever is in them: one row for each run, and its loss curve.

Runs may be writing during a read, and a folder may hold anything. So only regular files are read, never more than a
limit at once, and every value is checked. If a file cannot be read, the run's row gives the reason. A second look reads
only what changed since the first, because runs are timed on the same machine.
"""

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from caddie.files import reason
from caddie.lab.background import read_state
from caddie.report.read import Log, known_number, leaves, pick, read_object, read_regular, run_settings
from caddie.report.run_files import DRIVER, ERROR, LOG, RECIPE, REPORT, RESULT, TASK, WEIGHTS
from caddie.report.verification import verified
from caddie.run.run_lock import Holder, holder

DEPTH = 4
"""Folder levels below the root that are searched."""
MOST_FOLDERS = 10_000
"""Most folders searched, in case somebody serves a whole disk."""
TRAINING_QUIET_SECONDS = 300.0
"""A training run that writes nothing for this time is stale."""
QUIET_SECONDS = 1800.0
"""The same for a run that prepares or scores, which writes less often."""
UNHELD_QUIET_SECONDS = 30.0
"""The same for a folder that no process holds, as after Ctrl-C."""
LONGEST_TEXT = 300
"""Most characters of a text."""
LARGEST_REPORT = 1 << 28
"""Most bytes of a report. It holds every logged step: 100 bytes each, two steps a second."""

_KEPT = (
    *("recipe", "seed", "bits_per_byte", "artifact_bytes", "cap_bytes", "under_cap", "verified"),
    *("scores", "compression", "training", "seconds", "device", "precision", "world", "versions"),
)
"""Fields of a result that stay in memory; its long lists do not."""
_MOST_FIELDS = 4000


@dataclass
class RunFolder:
    """One run folder as it was at the last look."""

    folder: Path
    files: dict[str, os.stat_result] = field(default_factory=dict)
    changed: float = 0.0
    """Time of the last change to the folder or its files, in seconds since 1970."""
    documents: dict[str, dict[str, Any]] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    """File name to the reason why it cannot be read."""
    log: Log = field(default_factory=Log)
    holder: Holder | None = None
    """Process that writes to the folder, or that was killed while it did."""

    def look(self, files: dict[str, os.stat_result], changed: float) -> None:
        """Read what changed since the last look."""
        before, self.files = self.files, files
        self.changed = max(changed, *(status.st_mtime for status in files.values()))
        for name in (RECIPE, LOG, RESULT, ERROR, TASK):
            unread = name == LOG and name in files and files[name].st_size > self.log.offset
            if _signature(files.get(name)) != _signature(before.get(name)) or unread:
                self.documents.pop(name, None)
                self.faults.pop(name, None)
                if name in files:
                    self._read(name)
        if LOG not in files:
            self.log = Log()
        self.holder = None if RESULT in files else holder(self.folder)

    def _read(self, name: str) -> None:
        try:
            if name == LOG:
                self.log = self.log.read(self.folder / name)
                return
            found = read_object(self.folder / name)
            if name == RESULT:
                found |= {"verified": verified(found)}
                found = {key: found[key] for key in _KEPT if key in found}
            self.documents[name] = found
        except (ValueError, RecursionError):
            self.faults[name] = f"{name} is no JSON object"
        except OSError as error:
            self.faults[name] = f"{name} cannot be read: {reason(error)}"

    @property
    def state(self) -> str:
        """State: `finished`, `trained`, `failed`, `running`, `stale`, or `waiting` if only its task is written."""
        if RESULT in self.files:
            return "failed" if RESULT in self.faults else "finished"
        if ERROR in self.files and not (LOG in self.files and self.files[LOG].st_mtime > self.files[ERROR].st_mtime):
            return "failed"
        alive = self.holder and self.holder.alive
        if alive is False:
            return "failed"
        if not {RECIPE, LOG} & set(self.files):
            return "running" if alive else "waiting"
        if self.log.ended and WEIGHTS in self.files and not alive:
            return "trained"
        training = self.log.last and not self.log.ended
        quiet = TRAINING_QUIET_SECONDS if training else QUIET_SECONDS
        quiet = quiet if self.holder else UNHELD_QUIET_SECONDS
        return "stale" if time.time() - self.changed > quiet else "running"

    def reason(self, state: str) -> str:
        """Return what is wrong with the run, or an empty text."""
        result = self.documents.get(RESULT)
        error = text(pick(self.documents.get(ERROR), "error")) if state == "failed" else ""
        reasons = [*([error] if error else []), *self.faults.values()]
        if state == "failed" and not reasons:
            dead = f"its process, {self.holder.pid}, was killed" if self.holder else ""
            reasons.append(dead or "no reason was written down")
        if state == "trained":
            reasons.append("caddie pack makes its file; the same command of caddie run does all that is left")
        if state == "stale" and not self.holder:
            reasons.append("it was stopped; the same command continues it")
        if pick(result, "verified") == "no":
            reasons.append("verification failed")
        if pick(result, "under_cap") is False:
            reasons.append("the artifact is over its cap")
        if state != "finished" and self.log.last and known_number(self.log.last.get("loss")) is None:
            reasons.append("the loss is not finite")
        return "; ".join(reasons)

    def row(self, name: str) -> dict[str, Any]:
        """Return the run's row of the table. None stands for unknown values."""
        written, task, result = (self.documents.get(file) for file in (RECIPE, TASK, RESULT))
        last, state, training = self.log.last, self.state, pick(result, "training")
        recipe = text(pick(written, "recipe", "name")) or text(pick(result, "recipe"))
        progress = 1.0 if state == "finished" else known_number(last.get("progress"))
        return {
            "name": name,
            "state": state,
            "reason": self.reason(state),
            "label": text(pick(task, "label")) or recipe or name.rpartition("/")[2],
            "recipe": recipe,
            "study": text(pick(task, "study")),
            "seed": known_number(*(pick(source, "seed") for source in (task, written, result))),
            "bits_per_byte": known_number(pick(result, "bits_per_byte")),
            "loss": known_number(last.get("loss")),
            "train_bits_per_byte": known_number(last.get("bits_per_byte")),
            "step": known_number(last.get("step")),
            "progress": None if progress is None else min(1.0, max(0.0, progress)),
            "tokens_per_second": known_number(pick(training, "tokens_per_second"), last.get("tokens_per_second")),
            "artifact_bytes": known_number(pick(result, "artifact_bytes")),
            "forecast_bytes": self.log.file_bytes,
            "parameters": known_number(pick(training, "parameters")),
            "seconds": known_number(pick(result, "seconds", "train"), last.get("seconds")),
            "started": min(status.st_mtime for file, status in self.files.items() if file != REPORT),
            "changed": self.changed,
            "report": REPORT in self.files,
        }

    def details(self, name: str) -> dict[str, Any]:
        """Return the row, the curve as three lists of equal length, and settings and result by dotted path."""
        written, result = self.documents.get(RECIPE), self.documents.get(RESULT)
        settings = run_settings(written) | {key: pick(written, key) for key in ("seed", "corpus")}
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
        self._runs: dict[Path, RunFolder] = {}
        self._by_name: dict[str, RunFolder] = {}
        self._studies: list[Path] = []
        self._lock = threading.Lock()

    def rows(self) -> dict[str, Any]:
        """Return `folder`, `runs` and `studies` (a row each) and `complete` (True if every folder was searched)."""
        with self._lock:
            complete = self._look()
            runs = [run.row(name) for name, run in self._by_name.items()]
            states = [state for folder in self._studies if (state := read_state(folder)) is not None]
        place = shown(self.root.name or str(self.root))
        names = ("study", "state", "done", "failed", "total", "seconds_left")
        studies = [{name: getattr(state, name) for name in names} for state in states]
        return {"folder": place, "complete": complete, "runs": runs, "studies": studies}

    def details(self, name: str) -> dict[str, Any] | None:
        """Return the details of the run with this name, or None."""
        with self._lock:
            run = self._find(name)
            return run.details(name) if run else None

    def report(self, name: str) -> bytes | None:
        """Return the report page of a run, or None."""
        with self._lock:
            run = self._find(name)
        try:
            return read_regular(run.folder / REPORT, LARGEST_REPORT) if run else None
        except OSError:
            return None

    def _find(self, name: str) -> RunFolder | None:
        """Return a run by its name, which is only compared with known names, never made into a path."""
        if name not in self._by_name:
            self._look()
        return self._by_name.get(name)

    def _look(self) -> bool:
        found, studies = dict[Path, RunFolder](), list[Path]()
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
            if files.pop(DRIVER, None):
                studies.append(folder)
            if set(files) - {REPORT, WEIGHTS}:
                found[folder] = self._runs.get(folder) or RunFolder(folder)
                found[folder].look(files, changed)
        self._runs, self._studies = found, sorted(studies)
        self._by_name = {shown(str(folder.relative_to(self.root).as_posix())): run for folder, run in found.items()}
        return not waiting


_FILES = {RECIPE, LOG, RESULT, ERROR, TASK, REPORT, DRIVER, WEIGHTS}


def _list(folder: Path) -> tuple[list[Path], dict[str, os.stat_result], float]:
    """Return the folders in a folder, the run files in it, and the time of its last change."""
    below, files = [], {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                below.append(folder / entry.name)
            elif entry.name in _FILES and entry.is_file(follow_symlinks=False):
                files[entry.name] = entry.stat(follow_symlinks=False)
    return below, files, folder.stat().st_mtime


def _signature(status: os.stat_result | None) -> tuple[int, int, int] | None:
    return status and (status.st_mtime_ns, status.st_size, status.st_ino)


def text(value: object) -> str:
    """Return `value` if it is text, cut to a bounded length."""
    value = value if isinstance(value, str) else ""
    return value if len(value) <= LONGEST_TEXT else value[:LONGEST_TEXT] + "…"


def shown(name: str) -> str:
    """Return a file name as text that can be encoded."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def flat(value: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten to dotted path and value; the class of a setting stands at its own path."""
    try:
        found = islice(leaves(value), _MOST_FIELDS)
        return {path: text(held) if isinstance(held, str) else held for path, held in found}
    except RecursionError:
        return {}
