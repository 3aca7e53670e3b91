"""Which processes work on this machine, from two looks at /proc (see the manual page proc(5))."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from caddie.doctor.host import PROC

LOOK_SECONDS = 0.4
"""Time between the two looks; the system counts in hundredths of a second."""
_HARMLESS = ("board", "doctor")
"""Verbs of ours that are no work."""


@dataclass(frozen=True)
class Process:
    """A process of anybody's. Its arguments stay here, for they may hold secrets."""

    pid: int
    parent: int
    cores: float
    """Of which it used the whole time."""
    arguments: tuple[str, ...]
    title: str
    """The system's short name for it."""

    @property
    def name(self) -> str:
        """Its program, and of Python the module or file that runs; of ours the verb."""
        if self.verb:
            return f"caddie {self.verb}"
        if not self.arguments:
            return self.title
        program = Path(self.arguments[0]).name
        if not program.startswith("python"):
            return program
        for place, argument in enumerate(self.arguments[1:], 1):
            if argument == "-m" and place + 1 < len(self.arguments):
                return f"{program} -m {self.arguments[place + 1]}"
            if not argument.startswith("-"):
                return f"{program} {Path(argument).name}"
        return program

    @property
    def verb(self) -> str | None:
        """The verb of a `caddie` that may work, as `run`."""
        for place, argument in enumerate(self.arguments[:-1]):
            module = argument == "caddie" and place > 0 and self.arguments[place - 1] == "-m"
            if module or (place < 2 and "/" in argument and Path(argument).name == "caddie"):
                verb = self.arguments[place + 1]
                return None if verb in _HARMLESS or verb.startswith("-") else verb
        return None


@dataclass(frozen=True)
class Activity:
    """What this machine was doing while it was looked at."""

    processes: tuple[Process, ...]
    """Those of others, which excludes this process and its children, the busiest first."""
    idle_cores: float | None
    """Of those that this process may use."""


def activity(proc: Path = PROC, seconds: float = LOOK_SECONDS, own: int | None = None) -> Activity | None:
    """What others do on this machine for so many seconds; None where there is no /proc."""
    if not (proc / "stat").exists():
        return None
    began, before, cores = time.perf_counter(), _ticks(proc), _core_ticks(proc)
    time.sleep(seconds)
    span, after, later = time.perf_counter() - began, _ticks(proc), _core_ticks(proc)
    per_core = os.sysconf("SC_CLK_TCK") * span
    mine = family({pid: parent for pid, (parent, _, _) in after.items()}, os.getpid() if own is None else own)
    found = [
        Process(pid, parent, (ticks - before[pid][1]) / per_core, _arguments(proc, pid), title)
        for pid, (parent, ticks, title) in after.items()
        if pid in before and pid not in mine
    ]
    shares = [
        (later[core][0] - cores[core][0]) / spent
        for core in later.keys() & cores.keys() & _allowed()
        if (spent := later[core][1] - cores[core][1]) > 0
    ]
    busiest = tuple(sorted(found, key=lambda process: (-process.cores, process.pid)))
    return Activity(busiest, sum(shares) if shares else None)


def family(parents: Mapping[int, int], pid: int) -> set[int]:
    """A process and all that descend from it, by the parent of each."""
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def at_work_in(folder: Path, processes: Iterable[Process], proc: Path = PROC) -> list[Process]:
    """Those of ours that have a file of a run folder open or were told its name."""
    real = os.path.realpath(folder)
    return [process for process in processes if process.verb and _touches(proc / str(process.pid), process, real)]


def left_over(processes: Iterable[Process]) -> list[Process]:
    """Those of ours whose parent is gone and that do nothing, nor does a process that descends from them."""
    known = list(processes)
    parents = {process.pid: process.parent for process in known}
    working = {process.pid for process in known if process.cores > 0.05}
    return [
        process
        for process in known
        if process.verb and process.parent == 1 and not working & family(parents, process.pid)
    ]


def _touches(place: Path, process: Process, folder: str) -> bool:
    try:
        opened = [os.readlink(link) for link in (place / "fd").iterdir()]
        start = os.readlink(place / "cwd")
    except OSError:  # it ended, or belongs to somebody else
        return False
    named = [os.path.realpath(os.path.join(start, argument)) for argument in process.arguments[1:]]
    return any(path == folder or path.startswith(folder + "/") for path in [*opened, *named])


def _ticks(proc: Path) -> dict[int, tuple[int, int, str]]:
    """Process to parent, clock ticks so far, and title."""
    found = {}
    for entry in proc.iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text("utf-8", "replace")
                head, _, tail = text.rpartition(") ")  # a title may hold parentheses and blanks
                fields = tail.split()
                found[int(entry.name)] = (int(fields[1]), int(fields[11]) + int(fields[12]), head.partition("(")[2])
            except (OSError, ValueError, IndexError):
                continue  # it ended in the meantime, or is none
    return found


def _core_ticks(proc: Path) -> dict[int, tuple[int, int]]:
    """Core to clock ticks in which it was idle, and all."""
    found = {}
    for line in (proc / "stat").read_text("utf-8", "replace").splitlines():
        name, *counts = line.split() or [""]
        if name.startswith("cpu") and name[3:].isdigit() and len(counts) >= 5 and all(map(str.isdigit, counts)):
            spent = [int(count) for count in counts[:8]]  # what follows is counted in the first two
            found[int(name[3:])] = (spent[3] + spent[4], sum(spent))
    return found


def _allowed() -> set[int]:
    return set(os.sched_getaffinity(0)) if sys.platform == "linux" else set(range(os.cpu_count() or 1))


def _arguments(proc: Path, pid: int) -> tuple[str, ...]:
    try:
        with (proc / str(pid) / "cmdline").open("rb") as file:
            text = file.read(1 << 14).decode("utf-8", "replace").rstrip("\0")
    except OSError:
        return ()
    return tuple(text.split("\0")) if text else ()  # a kernel's own thread has none
