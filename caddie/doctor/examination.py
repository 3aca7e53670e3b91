"""All questions, in the order in which they disturb one another least, and what they come to."""

from __future__ import annotations

import platform
import shutil
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch

from caddie.board.folders import Folders
from caddie.doctor import findings as rules
from caddie.doctor import host, nvidia, pace, processes
from caddie.doctor.asking import within
from caddie.doctor.estimates import Estimate, Expected, estimate, expected
from caddie.doctor.findings import GIB, Accelerators, Finding, OpenRun
from caddie.doctor.host import Disk, Memory, Processor
from caddie.doctor.nvidia import Gpu
from caddie.doctor.pace import Pace
from caddie.doctor.processes import Activity
from caddie.ops import product_dtype
from caddie.ops.attention import choose
from caddie.pack.compress import Pack
from caddie.pack.fit import FillCap
from caddie.recipes.recipe import Recipe
from caddie.report.tables import WIDTH, printable, table
from caddie.run.run import check_recipe

SECONDS = 10.0
"""Within which a question to the system must be answered."""
RUNS = Path("runs")
_HEAD, _ROW = 64, 1024
"""Channels of a head and tokens of a row for which attention is asked about."""
T = TypeVar("T")


@dataclass(frozen=True)
class Machine:
    """What is on this machine; None for what is not known."""

    processor: Processor | None
    memory: Memory | None
    work: Disk | None
    cache: Disk | None
    gpus: list[Gpu] | None
    accelerators: Accelerators | None
    versions: dict[str, str]

    @property
    def device(self) -> str:
        """Name of what a run would train on."""
        if self.accelerators and self.accelerators.names:
            return self.accelerators.names[0]
        return self.cpu

    @property
    def cpu(self) -> str:
        """Name, cores and flags of the processor."""
        cpu = self.processor
        if cpu is None:
            return "a CPU that is not known"
        flags = "flags not known" if cpu.speedups is None else " ".join(cpu.speedups) or "no wide units"
        return f"{cpu.name or 'a CPU without a name'}, {cpu.cores:g} cores, {flags}"


@dataclass(frozen=True)
class Examination:
    """What the doctor found."""

    recipe: str
    processes: int
    here: Machine
    findings: list[Finding]
    pace: Pace | None
    """None where it was not asked for or could not be measured."""
    expected: Expected | None
    estimate: Estimate | None
    artifact_bytes: int | None
    cap_bytes: int
    cost: float | None
    """Of warm-up and training, in the unit of the price."""

    @property
    def go(self) -> bool:
        """Whether nothing speaks against starting."""
        return not self.problems

    @property
    def problems(self) -> list[Finding]:
        """What speaks against it."""
        return [finding for finding in self.findings if finding.level == "problem"]

    def to_json(self) -> dict[str, Any]:
        """All of it, and the verdict."""
        return {"go": self.go, **asdict(self)}

    def text(self) -> str:
        """All of it for people, the verdict last."""
        blocks = [table(self._seen(), ["here", ""], width=WIDTH), "\n".join(map(_lines, self.findings))]
        blocks.append(table(self._forecast(), [f"{self.recipe}, estimated", ""], width=WIDTH))
        blocks.append(self.verdict())
        return "\n\n".join(blocks)

    def verdict(self) -> str:
        """Go or no-go, in a line."""
        if self.go:
            warnings = sum(finding.level == "warning" for finding in self.findings)
            few = f"; {warnings} warning{'s' * (warnings > 1)}" if warnings else ""
            return f"GO: nothing speaks against {self.recipe} on this machine{few}"
        count = len(self.problems)
        return f"NO-GO: {count} problem{'s' * (count > 1)}, the first: {self.problems[0].what}"

    def _seen(self) -> list[tuple[str, str]]:
        here, unknown = self.here, "not known"
        rows = [(name, text) for name, text in here.versions.items()]
        if here.processor:
            rows.append(("processor", here.cpu))
        sizes = [value and f"{value / GIB:,.1f} GiB" for value in (asdict(here.memory).values() if here.memory else ())]
        rows.append(("memory, available", ", ".join(size or unknown for size in sizes) or unknown))
        for label, disk in (("working folder", here.work), ("compile cache", here.cache)):
            text = f"{disk.folder}, {disk.free_bytes / GIB:,.1f} GiB free, {disk.kind or unknown}" if disk else unknown
            rows.append((label, text))
        seen = here.accelerators
        for index, name in enumerate(seen.names if seen else ()):
            assert seen is not None
            rows.append((f"GPU {index}", f"{name}, compute capability {'.'.join(map(str, seen.capabilities[index]))}"))
        for gpu in here.gpus or ():
            used = f"{gpu.used_mib} of {gpu.memory_mib} MiB used" if gpu.memory_mib is not None else "memory not known"
            rows.append((f"driver's GPU {gpu.index}", f"{gpu.name}, {used}, driver {gpu.driver}"))
        if not (here.gpus or (seen and seen.names)):
            rows.append(("GPU", "none" if seen else unknown))
        for kind, way in (seen.attention if seen else {}).items():
            rows.append((f"attention, {kind}", way))
        return [(label, printable(text)) for label, text in rows]

    def _forecast(self) -> list[tuple[str, str]]:
        found, unknown = self.estimate, "not known without a measurement"
        size = unknown if self.artifact_bytes is None else f"about {self.artifact_bytes:,}"
        rows = [
            ("processes", f"{self.processes}"),
            ("steps", f"{found.steps:,}" if found else unknown),
            ("tokens", f"{found.tokens:,}" if found else unknown),
            ("training seconds", unknown if found is None or found.seconds is None else f"{found.seconds:,.0f}"),
            ("artifact bytes", f"{size}, of {self.cap_bytes:,}"),
        ]
        if paced := self.pace:
            share = f"{paced.steps} steps" if paced.steps else "rows alone, for steps take too long"
            rows += [
                (
                    "timed",
                    f"{share}; {paced.precision}, {paced.threads} thread{'s' * (paced.threads > 1)}, {paced.attention}",
                ),
                ("warm-up seconds", f"{paced.warmup_seconds:,.1f}"),
                ("memory of a process", f"{paced.peak_bytes / GIB:,.1f} GiB"),
            ]
        if self.cost is not None:
            rows.append(("cost", f"{self.cost:,.2f} for warm-up and training; packing and scoring come on top"))
        return rows


def examine(
    name: str,
    settings: Sequence[str] = (),
    *,
    world: int = 1,
    price: float | None = None,
    quick: bool = False,
    note: Callable[[str], None] = lambda line: None,
) -> Examination:
    """Look at this machine and, unless `quick`, time steps of a recipe with settings of the form PATH=VALUE.

    `world` is the number of processes of the run, one for each GPU, and `price` is that of the whole
    machine for an hour. Nothing is changed, but PyTorch may add to its compile cache. A mistake in what is asked is a
    `UserError`.
    """
    recipe = pace.named(name, settings)
    check_recipe(recipe, world)
    faults: dict[str, str] = {}

    def ask(subject: str, question: Callable[[], T], seconds: float = SECONDS) -> T | None:
        answer = within(seconds, question)
        if answer.fault:
            faults[subject] = answer.fault
        return answer.value

    variables = host.environment()
    activity = ask("other processes", processes.activity)  # before this process works itself
    gpus = ask("GPUs of the driver", nvidia.look, nvidia.SECONDS + 1)  # before this process holds memory of one
    here = Machine(
        processor=ask("processor", host.processor),
        memory=ask("memory", host.memory),
        work=ask("disk of the working folder", lambda: host.disk(Path())),
        cache=ask("disk of the compile cache", lambda: host.disk(host.compile_cache(variables))),
        gpus=gpus,
        accelerators=ask("GPUs of PyTorch", accelerators, 3 * SECONDS),
        versions={name: version(name) for name in ("caddie", "torch")} | {"python": platform.python_version()},
    )
    runs = ask("runs", lambda: open_runs(RUNS, activity))
    found = _findings(here, activity, runs, variables, recipe, world)
    timed: Pace | str | None = None
    if not quick:
        note(f"timing {pace.STEPS} steps of {name}")
        looks: list[Gpu] = []
        timed = pace.measured(name, settings, world, lambda: looks.extend(_look(bool(gpus))))
        heard = {finding.what for finding in found}
        found += [finding for finding in rules.slowdown_findings(looks) if finding.what not in heard]
    known = expected(here.device, recipe)
    measured = timed if isinstance(timed, Pace) else None
    paces = measured.seconds_per_token if measured else ((0.0, 1 / known.tokens_per_second),) if known else None
    coming = None if isinstance(timed, str) else estimate(recipe.train, world, paces)
    found += rules.pace_findings(timed, known, coming, here.device) + rules.unknown_findings(faults)
    seconds = coming.seconds if coming else None
    return Examination(
        recipe=name,
        processes=world,
        here=here,
        findings=sorted(found, key=lambda finding: ("problem", "warning", "ok").index(finding.level)),
        pace=measured,
        expected=known,
        estimate=coming,
        artifact_bytes=measured.artifact_bytes if measured else _filled(recipe.pack),
        cap_bytes=recipe.pack.cap_bytes,
        cost=None
        if price is None or seconds is None
        else price * (seconds + (measured.warmup_seconds if measured else 0.0)) / 3600,
    )


def accelerators() -> Accelerators:
    """The GPUs that PyTorch sees, and how attention would be computed."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    all_of_them = [torch.cuda.get_device_properties(index) for index in range(count)]
    device = torch.device("cuda", 0) if count else torch.device("cpu")
    kinds = {"causal": (False, None), "window": (False, _ROW // 4), "documents": (True, None)}
    return Accelerators(
        names=tuple(one.name for one in all_of_them),
        uuids=tuple(str(getattr(one, "uuid", "")) for one in all_of_them),
        capabilities=tuple((one.major, one.minor) for one in all_of_them),
        attention={
            kind: choose(device, product_dtype(device, torch.bfloat16), _HEAD, _ROW, _ROW, documents, window)
            for kind, (documents, window) in kinds.items()
        },
    )


def open_runs(root: Path, activity: Activity | None) -> list[OpenRun]:
    """Runs below a folder that have no result, and who works in each."""
    if not root.is_dir():
        return []
    ours = activity.processes if activity else ()
    return [
        OpenRun(root / row["name"], row["state"] == "stale", tuple(processes.at_work_in(root / row["name"], ours)))
        for row in Folders(root).rows()["runs"]
        if row["state"] in ("running", "stale")
    ]


def _findings(
    here: Machine,
    activity: Activity | None,
    runs: list[OpenRun] | None,
    variables: dict[str, str],
    recipe: Recipe,
    world: int,
) -> list[Finding]:
    """What every rule says of what was seen."""
    found: list[Finding] = []
    cores = here.processor.cores if here.processor else 1
    seen, gpus = here.accelerators, here.gpus
    if activity is not None:
        found += rules.processor_findings(activity, cores, world)
    if runs is not None and activity is not None:
        found += rules.run_findings(runs)
    found += rules.environment_findings(variables, bool(gpus or (seen and seen.names)), cores)
    if here.work and here.cache:
        found += rules.disk_findings(here.work, here.cache, recipe.parameters)
    if here.memory:
        found += rules.memory_findings(here.memory)
    if seen is not None:
        compilers = any(map(shutil.which, ("cc", "gcc", "clang")))
        triton = find_spec("triton") is not None
        found += rules.kernel_findings(seen, gpus, world, compilers, torch.__version__, torch.version.cuda, triton)
        own = [gpu for gpu in gpus or () if gpu.uuid.removeprefix("GPU-") in seen.uuids[:world]]
        gpus = own or gpus
    return found + rules.gpu_findings(gpus or ())


def _look(there: bool) -> list[Gpu]:
    """The GPUs while they work; none where the driver does not answer."""
    return within(nvidia.SECONDS + 1, nvidia.look).value or [] if there else []


def _filled(config: Pack) -> int | None:
    """The size of an artifact that is made to fill its cap."""
    return config.cap_bytes if isinstance(config.fit, FillCap) else None


def _lines(finding: Finding) -> str:
    """A finding on as many lines as it needs."""
    parts = [finding.what, finding.why, f"mend: {finding.mend}" if finding.mend else ""]
    text = printable("; ".join(part for part in parts if part))
    return textwrap.fill(text, WIDTH, initial_indent=f"{finding.level:<9}", subsequent_indent=" " * 9)
