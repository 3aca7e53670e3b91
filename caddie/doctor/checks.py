"""Rules of the doctor: each makes findings from measurements of this machine, or one finding that all is well."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from caddie.doctor.estimates import Estimate, Expected
from caddie.doctor.gpus import Accelerators, Gpu
from caddie.doctor.host import Disk
from caddie.doctor.pace import STEPS, Pace
from caddie.doctor.processes import Activity, orphans
from caddie.errors import count
from caddie.run.run_lock import Holder
from caddie.runtime.memory import GIB, Memory

BUSY_CORES = 0.5
"""A process that uses more of a core slows training down and falsifies timings."""
_SHOWN = 5
_FEW_MIB = 1024  # GPU memory that a desktop or the driver itself may take
_SLOW, _FAR_TOO_SLOW = 0.85, 0.5
"""Fractions of the reference rate. In the contest 85 % of the step rate cost the whole margin of acceptance."""

Level = Literal["problem", "warning", "ok"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report."""

    level: Level
    """A problem is a reason not to start."""
    what: str
    why: str = ""
    """Why it matters."""
    fix: str = ""
    """Command or setting that fixes it."""


_ON = r"(?!0$|false$|no$|off$)."
"""Pattern for `on` in `harmful_variables.txt`: values that switch a variable on."""


def check_environment(
    variables: Mapping[str, str], on_gpu: bool, cores: float, idle: float | None = None
) -> list[Finding]:
    """Find environment variables that slow training down. Of `cores`, `idle` are free; None if that is not known."""
    lines = Path(__file__).with_name("harmful_variables.txt").read_text(encoding="utf-8").splitlines()[1:]
    found = [
        Finding("warning", f"{name}={variables[name][:40]} is set", why, f"unset {name}")
        for name, where, values, why in (line.split(" | ") for line in lines)
        if name in variables and (on_gpu or where == "anywhere")
        if re.match(_ON if values == "on" else values, variables[name])
    ]
    threads = variables.get("OMP_NUM_THREADS", "")
    usable = [int(cores)] if idle is None else range(int(min(cores, idle)), int(cores) + 1)  # fewer if others work
    if threads.isdecimal() and not on_gpu and int(threads) not in (0, *usable) and int(cores) > 0:
        what = f"OMP_NUM_THREADS={threads} is set, and there are {cores:g} cores"
        found.append(Finding("warning", what, "PyTorch uses that many threads", "unset OMP_NUM_THREADS"))
    return found or [Finding("ok", "no environment variable that is known to slow training down")]


def check_cores(activity: Activity, cores: float, processes: int) -> list[Finding]:
    """Find other processes at work and missing cores: each process of a run needs one, even if it has a GPU."""
    busy = [process for process in activity.processes if process.cores > BUSY_CORES]
    found = []
    for process in busy[:_SHOWN]:
        what = f"{process.name} (process {process.pid}) uses {process.cores:.1f} cores"
        why = "it slows training down and falsifies timings: on a busy core a second thread costs a factor of three"
        found.append(Finding("warning", what, why, f"wait until it ends, or end it: kill {process.pid}"))
    if rest := busy[_SHOWN:]:
        what = f"{len(rest)} more processes use {sum(process.cores for process in rest):.1f} cores"
        found.append(Finding("warning", what, "as above", "list them: top"))
    free = cores if activity.idle_cores is None else min(cores, activity.idle_cores)
    if free < processes - 0.5:
        what = f"{free:.1f} of {cores:g} cores are free, and the run has {count(processes, 'process')}"
        fewer = ", or give fewer --gpus" if processes > 1 else ""
        found.append(Finding("problem", what, "each needs one", f"wait until other work ends{fewer}"))
    for process in orphans(activity.processes):
        what = f"{process.name} (process {process.pid}) is idle and its parent has ended"
        found.append(Finding("warning", what, "it may hold memory, a GPU or a run folder", f"kill {process.pid}"))
    return found or [Finding("ok", f"no other process uses more than {BUSY_CORES:g} of a core; {free:.1f} are free")]


@dataclass(frozen=True)
class OpenRun:
    """A run folder without a result."""

    folder: Path
    stale: bool
    """True if nothing was written to it for minutes."""
    holder: Holder | None
    """The process that writes to it; None if it has ended."""


def check_runs(runs: Sequence[OpenRun]) -> list[Finding]:
    """Find runs that go on, hang, or ended without a result."""
    found = []
    for run in runs:
        if run.holder is None:
            continue
        pid, host = run.holder.pid, f" on {run.holder.host}" if run.holder.alive is None else ""
        if run.stale:
            what = f"{run.folder} has not been written to for minutes, but process {pid} still holds it"
            found.append(Finding("problem", what, "it seems to hang, and may hold a GPU", f"kill {pid}"))
        else:
            why = "two runs at once are slower than one after the other"
            fix = f"wait until it ends, or stop it: kill {pid}{host}"
            found.append(Finding("warning", f"{run.folder} is in use by process {pid}{host}", why, fix))
    if ended := [run for run in runs if run.holder is None]:
        names = ", ".join(str(run.folder) for run in ended[:3]) + ", ..." * (len(ended) > 3)
        what = f"{count(len(ended), 'run')} ended without a result: {names}"
        fix = f"repeat the command with --out {shlex.quote(str(ended[0].folder))}, or remove the folder"
        found.append(Finding("warning", what, "their checkpoints are kept, but nothing continues them", fix))
    return found or [Finding("ok", "no run without a result below runs/")]


def check_disks(work: Disk, cache: Disk, parameters: int) -> list[Finding]:
    """Find disks without room for a run, and a compile cache on a network disk."""
    need = GIB // 2 + 32 * parameters  # weights and checkpoint, both twice while they are replaced
    found = []
    for label, disk, least, fix in (
        ("the working folder", work, need, "free some, or work in another folder"),
        ("the compile cache", cache, GIB, "free some, or export TORCHINDUCTOR_CACHE_DIR=FOLDER"),
    ):
        if disk.free_bytes < least:
            what = f"{disk.free_bytes / GIB:.1f} GiB are free for {label}, {disk.folder}"
            found.append(Finding("problem", what, f"a run may need {least / GIB:.1f} GiB", fix))
    if cache.network:
        what = f"the compile cache {cache.folder} is on a network disk ({cache.kind})"
        why = "compiled code loads slowly; in public runs processes that waited for it were killed"
        found.append(Finding("warning", what, why, "export TORCHINDUCTOR_CACHE_DIR=FOLDER on a local disk"))
    return found or [Finding("ok", f"{work.free_bytes / GIB:,.1f} GiB of disk are free")]


def check_memory(memory: Memory, shortage: str = "") -> list[Finding]:
    """Find a shortage of main memory; `shortage` is the error with which a run would refuse to begin."""
    if shortage:
        what, _, fix = shortage.partition("; ")
        return [Finding("problem", what, "a run would refuse to begin", fix)]
    if memory.available < GIB:
        what = f"{memory.available / GIB:.2f} GiB of memory are available"
        return [Finding("problem", what, "the smallest recipe takes about one", "end what uses it: top -o %MEM")]
    return [Finding("ok", f"{memory.available / GIB:,.1f} GiB of memory are available")]


def check_gpus(gpus: Sequence[Gpu]) -> list[Finding]:
    """Find other programs on the GPUs, and lowered clocks."""
    found = []
    for gpu in gpus:
        name = f"GPU {gpu.index}"
        for holder in gpu.holders:
            if not (holder.graphics_only and holder.mib <= _FEW_MIB):
                size = f"{holder.mib:,} MiB" if holder.mib else "memory"
                what = f"{holder.name} (process {holder.pid}) holds {size} of {name}"
                why = "steps beside another program took 2 to 14 times as long in public runs"
                level: Level = "warning" if 0 < holder.mib <= _FEW_MIB else "problem"
                found.append(Finding(level, what, why, f"wait until it ends, or end it: kill {holder.pid}"))
        if not gpu.holders and (gpu.used_mib or 0) > _FEW_MIB:
            what = f"{gpu.used_mib:,} MiB of {name} are held by an unseen program, perhaps of another container"
            found.append(Finding("problem", what, "it takes memory and time from a run", "take another GPU or machine"))
        found += check_clocks([gpu])
        if gpu.held_by_setting:
            what = f"the clocks of {name} are set to {gpu.clock_mhz or '?'} MHz of {gpu.fastest_mhz or '?'}"
            fix = f"nvidia-smi -i {gpu.index} -rac && nvidia-smi -i {gpu.index} -rgc"
            found.append(Finding("warning", what, "steps take longer by that ratio", fix))
    return found or [Finding("ok", "no other program is on the GPUs, and their clocks are free")] * bool(gpus)


def check_clocks(gpus: Iterable[Gpu]) -> list[Finding]:
    """Find clocks lowered by heat or power. A GPU that was looked at several times gives each reason once."""
    found = {}
    fix = "check fans and power: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER; or take another machine"
    for gpu in gpus:
        clocks = f"{gpu.clock_mhz or '?'} MHz of {gpu.fastest_mhz or '?'}"
        celsius = "?" if gpu.celsius is None else gpu.celsius
        for reason in gpu.slowdowns:
            what = f"GPU {gpu.index} lowers its clocks to {clocks} ({reason}, {celsius} °C)"
            why = "its steps take longer, and all other GPUs wait for it"
            found[gpu.index, reason] = Finding("problem", what, why, fix)
    return list(found.values())


_KERNELS = {
    8: ("FlashAttention 2", "pip install flash-attn --no-build-isolation"),
    9: ("FlashAttention 3", "pip install flash-attn-3 --no-deps --index-url https://download.pytorch.org/whl/cu{cuda}"),
    10: ("FlashAttention 4", "pip install flash-attn-4"),
}
"""The attention kernel for each compute capability, and the command that installs it."""


def check_kernels(
    seen: Accelerators,
    driver: Sequence[Gpu] | None,
    world: int,
    compiler: bool,
    torch: str,
    cuda: str | None,
    triton: bool,
) -> list[Finding]:
    """Find GPUs that PyTorch does not see, and missing kernels and compilers. `cuda` is PyTorch's CUDA version."""
    found = []
    if driver and not seen.names:
        what = f"the driver has {count(len(driver), 'GPU')}, and PyTorch {torch} sees none"
        fix = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu128"
        if cuda:
            fix = f"check CUDA_VISIBLE_DEVICES, and that the driver is new enough for CUDA {cuda}"
        found.append(Finding("problem", what, "training would run on the CPU", fix))
    if not seen.names:
        return found
    if world > len(seen.names):
        what = f"the run has {world} processes, and PyTorch sees {count(len(seen.names), 'GPU')}"
        found.append(Finding("problem", what, "each needs one", f"--gpus {len(seen.names)}"))
    kernel, install = _KERNELS.get(seen.capabilities[0][0], ("", ""))
    if kernel and not any(name.startswith("FlashAttention") for name in seen.attention.values()):
        why = "9 to 15 ms of an 85 ms step were gained by FlashAttention 3 over others on an H100"
        fix = install.format(cuda=(cuda or "12.8").replace(".", ""))
        found.append(Finding("warning", f"{kernel} is not installed", why, fix))
    if not compiler:
        why = "without a C compiler nothing is compiled for the GPU"
        found.append(Finding("warning", "no cc, gcc or clang was found", why, "apt-get install gcc"))
    if not triton:
        why = "without it nothing is compiled for the GPU, and the loss makes logits in float32"
        found.append(Finding("warning", "Triton is not installed", why, "pip install triton"))
    return found


def check_pace(
    pace: Pace | str | None, known: Expected | None, estimate: Estimate | None, device: str
) -> list[Finding]:
    """Compare the measured rate with the reference, and the steps with the budget. `pace` may be an error."""
    found = []
    if isinstance(pace, str):
        fix = "a smaller model, batch or sequence length; or another machine"
        found.append(Finding("problem", f"steps could not be timed: {pace}", "a run would end the same way", fix))
    elif pace is not None and known is None:
        found.append(Finding("ok", f"{pace.tokens_per_second:,.0f} tokens per second; no reference for {device}"))
    elif pace is not None and known is not None:
        ratio = pace.tokens_per_second / known.tokens_per_second
        scaled = f", scaled from {known.reference.recipe} by FLOPs per token" if known.scaled else ""
        source = f"{known.reference.source}, {known.reference.date}{scaled}"
        what = f"{pace.tokens_per_second:,.0f} tokens per second, {ratio:.2f} of the reference ({source})"
        why = "the budget buys fewer steps than such a machine should give"
        fix = "fix the other findings first, then take another machine"
        level: Level = "problem" if ratio < _FAR_TOO_SLOW and not known.scaled else "warning"
        fast = ratio >= (_FAR_TOO_SLOW if known.scaled else _SLOW)
        found.append(Finding("ok", what) if fast else Finding(level, what, why, fix))
    if estimate is not None and estimate.steps < STEPS:
        end = f"after about {count(estimate.steps, 'step')}" if estimate.steps else "before the first step does"
        fix = "more train.seconds, a smaller train.batch_tokens, NAME_mini in place of NAME, or a faster machine"
        found.append(Finding("problem", f"the budget ends {end}", "too few to learn anything", fix))
    return found
