"""Other processes at work on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

from caddie.runtime.distributed import allowed_cores

WATCH_SECONDS = 0.4
"""Time over which CPU use is measured; the system counts in hundredths of a second."""
_HARMLESS_VERBS = ("board", "doctor")


@dataclass(frozen=True)
class Process:
    """A running process. Its arguments may hold secrets and are never shown."""

    pid: int
    parent: int
    cores: float
    """CPU time that it uses, in cores."""
    arguments: tuple[str, ...]
    title: str
    running: bool = False
    """True if it was on a core, or waited for one, when it was looked at."""

    @property
    def name(self) -> str:
        """Program name; with the module or file for Python, and the verb for caddie."""
        if self.verb:
            return f"caddie {self.verb}"
        if not self.arguments:
            return self.title
        program = Path(self.arguments[0]).name
        if not program.startswith("python"):
            return program
        arguments = iter(self.arguments[1:])
        for argument in arguments:
            if argument in ("-c", "-"):  # code, not a file name
                return program
            if argument == "-m":
                return f"{program} -m {next(arguments, '')}".rstrip()
            if argument in ("-X", "-W"):
                next(arguments, None)  # its value
            elif not argument.startswith("-"):
                return f"{program} {Path(argument).name}"
        return program

    @property
    def verb(self) -> str | None:
        """Verb of a caddie process that does work, such as `run`; None for any other process."""
        for place, (argument, verb) in enumerate(pairwise(self.arguments)):
            module = argument == "caddie" and place > 0 and self.arguments[place - 1] == "-m"
            if module or (place < 2 and "/" in argument and Path(argument).name == "caddie"):
                return None if verb in _HARMLESS_VERBS or verb.startswith("-") else verb
        return None


@dataclass(frozen=True)
class Activity:
    """Work on this machine while it was watched."""

    processes: tuple[Process, ...]
    """All but this process and its children, the busiest first."""
    idle_cores: float | None
    """Idle cores among those that this process may use; None if unknown."""


def activity(seconds: float = WATCH_SECONDS) -> Activity:
    """Watch the processes of this machine for `seconds`."""
    list(psutil.process_iter(["cpu_percent"]))  # psutil keeps their CPU times until the next call
    busy_percent = psutil.cpu_percent(seconds, percpu=True)
    attributes = ["pid", "ppid", "cpu_percent", "cmdline", "name", "status"]
    seen = [process.info for process in psutil.process_iter(attributes)]
    this = psutil.Process()
    own = {process.pid for process in (this, *this.children(recursive=True))}
    others = []
    for info in seen:
        if info["pid"] not in own:
            cores, arguments = (info["cpu_percent"] or 0.0) / 100, info["cmdline"] or ()  # None on macOS if not ours
            running, title = info["status"] == psutil.STATUS_RUNNING, info["name"] or ""
            others.append(Process(info["pid"], info["ppid"], cores, tuple(arguments), title, running))
    allowed = allowed_cores()
    idle = [1 - percent / 100 for core, percent in enumerate(busy_percent) if core in allowed]
    busiest = sorted(others, key=lambda process: (-process.cores, process.pid))
    # psutil lists online cores by position: with one offline, positions are not the core numbers of `allowed`.
    return Activity(tuple(busiest), sum(idle) if len(busy_percent) > max(allowed, default=0) and idle else None)


def orphans(processes: Sequence[Process]) -> list[Process]:
    """Return the caddie processes whose parent has ended, that do nothing and that have no child process.

    On a busy machine a process of low priority may get no time for seconds, and so may the children of a study.
    """
    parents = {process.parent for process in processes}
    left = [process for process in processes if process.verb and process.parent == 1]
    return [one for one in left if one.cores <= 0.05 and not one.running and one.pid not in parents]
