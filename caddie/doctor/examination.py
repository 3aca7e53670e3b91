"""Examine this machine, time a recipe on it, and report what was found."""

import platform
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import torch

from caddie.board.folders import Folders
from caddie.doctor import checks, gpus, host, pace, processes
from caddie.doctor.checks import Finding, OpenRun
from caddie.doctor.estimates import Estimate, Expected, estimate, expected
from caddie.doctor.gpus import Accelerators
from caddie.errors import count
from caddie.pack.fit import FillCap
from caddie.report.run_files import ERROR, RESULT
from caddie.report.tables import one_line, printable, table
from caddie.run.cap import cap_of_recipe
from caddie.run.run import check_recipe
from caddie.run.run_lock import holder
from caddie.runtime.distributed import Ranks, local_device
from caddie.runtime.memory import GIB, Memory, memory
from caddie.runtime.progress import SILENT, Progress
from caddie.train.memory import MemoryEstimate, estimate_memory, judge_memory
from caddie.train.stage_memory import StageMemory, estimate_stages

SECONDS = 10.0
"""Time limit for each question to the system."""
RUNS = Path("runs")
_UNKNOWN, _UNMEASURED = "not known", "not known without a measurement"
T = TypeVar("T")


@dataclass(frozen=True)
class Machine:
    """Hardware and versions of this machine; None for what is not known."""

    processor: host.Processor | None
    memory: Memory | None
    work: host.Disk | None
    """Disk of the working folder."""
    cache: host.Disk | None
    """Disk of the compile cache."""
    gpus: list[gpus.Gpu] | None
    """GPUs of the driver; None without a driver."""
    accelerators: Accelerators | None
    """GPUs of PyTorch."""
    versions: dict[str, str]

    @property
    def device(self) -> str:
        """Name of the device that a run would train on."""
        return self.accelerators.names[0] if self.accelerators and self.accelerators.names else self.cpu

    @property
    def cpu(self) -> str:
        """Name, cores and instruction sets of the processor."""
        cpu = self.processor
        if cpu is None:
            return "an unknown CPU"
        sets = "unknown instruction sets" if cpu.instruction_sets is None else " ".join(cpu.instruction_sets)
        return f"{cpu.name or 'a CPU without a name'}, {cpu.cores:g} cores, {sets or 'no vector instructions'}"

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of a table, as label and text."""
        rows, memory, seen = [*self.versions.items()], self.memory, self.accelerators
        if self.processor:
            rows.append(("processor", self.cpu))
        sizes = f"{memory.total / GIB:,.1f} GiB, {memory.available / GIB:,.1f} available" if memory else _UNKNOWN
        rows.append(("memory", sizes))
        for label, disk in (("working folder", self.work), ("compile cache", self.cache)):
            free = f"{disk.free_bytes / GIB:,.1f} GiB free, {disk.kind or 'unknown file system'}" if disk else ""
            rows.append((label, f"{disk.folder}, {free}" if disk else _UNKNOWN))
        for index, (name, (major, minor)) in enumerate(zip(seen.names, seen.capabilities, strict=True) if seen else ()):
            rows.append((f"GPU {index}", f"{name}, compute capability {major}.{minor}"))
        for gpu in self.gpus or ():
            used = f"{gpu.used_mib} of {gpu.memory_mib} MiB used" if gpu.memory_mib is not None else "memory not known"
            rows.append((f"driver's GPU {gpu.index}", f"{gpu.name}, {used}, driver {gpu.driver}"))
        if not (self.gpus or (seen and seen.names)):
            rows.append(("GPU", "none" if seen else _UNKNOWN))
        rows += [(f"attention, {mask}", kernel) for mask, kernel in (seen.attention if seen else {}).items()]
        return [(label, printable(text)) for label, text in rows]


@dataclass(frozen=True)
class Examination:
    """Result of the doctor."""

    recipe: str
    processes: int
    machine: Machine
    findings: list[Finding]
    pace: pace.Pace | None
    """None if it was not or could not be measured."""
    expected: Expected | None
    estimate: Estimate | None
    memory: MemoryEstimate
    """Memory of one process of the run at the peak of training."""
    stages: StageMemory
    """Memory of packing and scoring, less the table of an n-gram tilt: its size follows from text unknown here."""
    artifact_bytes: int | None
    cap_bytes: int
    cost: float | None
    """Cost of warm-up and training, in the unit of the price."""

    @property
    def problems(self) -> list[Finding]:
        """Findings that are reasons not to start."""
        return [finding for finding in self.findings if finding.level == "problem"]

    @property
    def go(self) -> bool:
        """True if there are no problems."""
        return not self.problems

    def verdict(self) -> str:
        """Return go or no-go, in one line."""
        if self.problems:
            return f"NO-GO: {count(len(self.problems), 'problem')}, the first: {self.problems[0].what}"
        warnings = sum(finding.level == "warning" for finding in self.findings)
        more = f"; {count(warnings, 'warning')}" if warnings else ""
        return f"GO: no reason not to start {self.recipe} on this machine{more}"

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {"go": self.go, **asdict(self)}

    def text(self) -> str:
        """Return everything as text for a terminal, the verdict last."""
        coming = self.estimate
        size = _UNMEASURED if self.artifact_bytes is None else f"about {self.artifact_bytes:,}"
        rows = [
            ("processes", f"{self.processes}"),
            ("steps", f"{coming.steps:,}" if coming else _UNMEASURED),
            ("tokens", f"{coming.tokens:,}" if coming else _UNMEASURED),
            ("training seconds", _UNMEASURED if coming is None or coming.seconds is None else f"{coming.seconds:,.0f}"),
            ("memory of a process", f"{self.memory}; {self.stages}"),
            ("artifact bytes", f"{size}, of {self.cap_bytes:,}"),
        ]
        if found := self.pace:
            timed = f"{found.steps} steps" if found.steps else "single rows, because steps take too long"
            settings = f"{found.precision}, {count(found.threads, 'thread')}, {found.attention}"
            rows.append(("timed", f"{timed}; {settings}"))
            rows.append(("warm-up seconds", f"{found.warmup_seconds:,.1f}"))
        if self.cost is not None:
            rows.append(("cost", f"{self.cost:,.2f} for warm-up and training, without packing and scoring"))
        findings = []
        for one in self.findings:
            parts = filter(None, (one.what, one.why, one.fix and f"fix: {one.fix}"))
            findings.append((one.level, "; ".join(parts)))
        tables = (self.machine.rows(), "this machine"), (findings, "finding"), (rows, f"{self.recipe}, estimated")
        return "\n\n".join([*(table(cells, [title, ""]) for cells, title in tables), self.verdict()])


def examine(
    name: str,
    settings: Sequence[str] = (),
    *,
    parts: Sequence[Path] = (),
    world: int = 1,
    price: float | None = None,
    quick: bool = False,
    progress: Progress = SILENT,
) -> Examination:
    """Examine this machine and, unless `quick`, time steps of a recipe with settings of the form PATH=VALUE.

    `parts` are the users' files that a run's recipe needs. `world` is the number of processes of the run, one per GPU;
    `price` is the price of the machine for an hour. Changes nothing, but PyTorch may add to its compile cache. Raises
    `UserError` for an unknown recipe or a wrong setting.
    """
    recipe = pace.named(name, settings, parts)
    check_recipe(recipe, world)
    unknown: list[Finding] = []

    def ask(subject: str, question: Callable[[], T], seconds: float = SECONDS) -> T | None:
        value, error = call_within(seconds, question)
        if error:
            unknown.append(Finding("warning", f"{subject} not known: {error}", "problems there would go unnoticed"))
        return value

    variables = host.environment()
    activity = ask("other processes", processes.activity)  # before this process works itself
    driver = ask("GPUs of the driver", gpus.driver_gpus)  # before this process holds memory of one
    machine = Machine(
        processor=ask("processor", host.processor),
        memory=ask("memory", memory),
        work=ask("disk of the working folder", lambda: host.disk(Path())),
        cache=ask("disk of the compile cache", lambda: host.disk(host.compile_cache(variables))),
        gpus=driver,
        accelerators=ask("GPUs of PyTorch", gpus.torch_gpus, 3 * SECONDS),
        versions={name: version(name) for name in ("caddie", "torch")} | {"python": platform.python_version()},
    )
    runs = ask("runs", lambda: open_runs(RUNS))
    ranks = Ranks(0, world, local_device())
    needed, short = judge_memory(recipe.model, recipe.train, ranks, progress)
    if not quick and not needed.traced:
        needed = estimate_memory(recipe.model, recipe.train, ranks)
    found = _check(machine, activity, variables, recipe.parameters, world, short)
    if runs is not None:
        found += checks.check_runs(runs)
    timed: pace.Pace | str | None = None
    if not quick and not short:
        progress.note(f"timing {pace.STEPS} steps of {name}")
        working: list[gpus.Gpu] = []  # GPUs while they work: only then heat lowers their clocks

        def look() -> None:
            if driver:
                working.extend(call_within(SECONDS, gpus.driver_gpus)[0] or [])

        timed = pace.measured(name, settings, parts, world, look)
        own = _of_run(working, machine.accelerators, world)
        found += [finding for finding in checks.check_clocks(own) if finding not in found]
    known = expected(machine.device, recipe)
    measured = timed if isinstance(timed, pace.Pace) else None
    rates = measured.seconds_per_token if measured else ((0.0, 1 / known.tokens_per_second),) if known else None
    coming = None if isinstance(timed, str) else estimate(recipe.train, world, rates)
    found += checks.check_pace(timed, known, coming, machine.device) + unknown
    cost = None
    if price is not None and coming is not None and coming.seconds is not None:
        cost = price * (coming.seconds + (measured.warmup_seconds if measured else 0.0)) / 3600
    fills_cap, cap_bytes = isinstance(recipe.pack.fit, FillCap), cap_of_recipe(recipe).file_bytes
    return Examination(
        recipe=name,
        processes=world,
        machine=machine,
        findings=sorted(found, key=lambda finding: ("problem", "warning", "ok").index(finding.level)),
        pace=measured,
        expected=known,
        estimate=coming,
        memory=needed,
        stages=estimate_stages(recipe.model, recipe.pack, recipe.score),
        artifact_bytes=measured.artifact_bytes if measured else cap_bytes if fills_cap else None,
        cap_bytes=cap_bytes,
        cost=cost,
    )


def call_within(seconds: float, function: Callable[[], T]) -> tuple[T | None, str]:
    """Call `function` and wait at most `seconds`: a disk or driver may hang. Return its value, or why there is none.

    A call that takes longer goes on in its thread, because threads cannot be ended.
    """
    answers: list[tuple[T | None, str]] = []

    def call() -> None:
        try:
            answers.append((function(), ""))
        except Exception as error:  # whatever a broken driver or a garbled file leads to
            answers.append((None, one_line(f"{type(error).__name__}: {error}")))

    thread = Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else (None, f"no answer within {seconds:g} seconds")


def open_runs(root: Path) -> list[OpenRun]:
    """Return the runs below a folder that have neither result nor error, and the process that holds each."""
    found = []
    for row in Folders(root).rows()["runs"] if root.is_dir() else ():
        folder = root / row["name"]
        killed = row["state"] == "failed" and not any((folder / name).exists() for name in (RESULT, ERROR))
        if killed or row["state"] in ("running", "stale"):
            stale, held = row["state"] == "stale", holder(folder)
            alive = held and held.alive
            ended = alive is False or (stale and alive is None)  # a container that is gone leaves its lock
            found.append(OpenRun(folder, stale, None if ended else held))
    return found


def _check(
    machine: Machine,
    activity: processes.Activity | None,
    variables: dict[str, str],
    parameters: int,
    world: int,
    short: str,
) -> list[Finding]:
    seen, driver = machine.accelerators, machine.gpus
    cores = machine.processor.cores if machine.processor else 1
    idle = activity.idle_cores if activity else None
    found = checks.check_environment(variables, bool(driver or (seen and seen.names)), cores, idle)
    if activity is not None:
        found += checks.check_cores(activity, cores, world)
    if machine.work and machine.cache:
        found += checks.check_disks(machine.work, machine.cache, parameters)
    if machine.memory:
        found += checks.check_memory(machine.memory, short)
    if seen is not None:
        compiler, triton = any(map(shutil.which, ("cc", "gcc", "clang"))), find_spec("triton") is not None
        found += checks.check_kernels(seen, driver, world, compiler, torch.__version__, torch.version.cuda, triton)
    return found + checks.check_gpus(_of_run(driver or (), seen, world))


def _of_run(driver: Sequence[gpus.Gpu], seen: Accelerators | None, world: int) -> Sequence[gpus.Gpu]:
    """Return the driver's GPUs that a run would use; all of them, if PyTorch does not tell which it sees."""
    uuids = seen.uuids[:world] if seen else ()
    return [gpu for gpu in driver if gpu.uuid.removeprefix("GPU-") in uuids] or driver
