"""Rules: each makes findings of what was measured on this machine, or one finding that all is well."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from caddie.doctor.estimates import Estimate, Expected
from caddie.doctor.gpus import Accelerators, Gpu
from caddie.doctor.host import Disk, Memory
from caddie.doctor.pace import STEPS, Pace
from caddie.doctor.processes import Activity, Process, orphans

GIB = 1 << 30
BUSY_CORES = 0.5
"""A process that uses more of a core slows training down and falsifies timings."""
_SHOWN = 5
_FEW_MIB = 1024
"""GPU memory that a desktop or the driver itself may take."""
_SLOW, _FAR_TOO_SLOW = 0.85, 0.5
"""Parts of the reference rate. In the contest 85 % of the step rate cost the whole margin of acceptance."""

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


@dataclass(frozen=True)
class HarmfulVariable:
    """Values of an environment variable that slow training down."""

    name: str
    value: str
    """Pattern of the values."""
    why: str
    gpu: bool = True
    """True if it matters on GPUs alone."""


_ON = r"(?!0$|false$|no$|off$)."
HARMFUL_VARIABLES = (
    HarmfulVariable(
        "NCCL_IB_DISABLE", _ON, "GPUs exchange gradients without InfiniBand: 60 ms a step for 44 in a public record"
    ),
    HarmfulVariable("NCCL_P2P_DISABLE", _ON, "GPUs exchange gradients through main memory"),
    HarmfulVariable("NCCL_SHM_DISABLE", _ON, "processes of one machine exchange gradients through the network"),
    HarmfulVariable("NCCL_NET", "(?i)socket", "GPUs exchange gradients through TCP"),
    HarmfulVariable("CUDA_LAUNCH_BLOCKING", _ON, "the program waits for every kernel"),
    HarmfulVariable("CUDA_VISIBLE_DEVICES", "(-1)?$", "it hides all GPUs"),
    HarmfulVariable("PYTORCH_NO_CUDA_MEMORY_CACHING", _ON, "every tensor asks the driver for memory"),
    HarmfulVariable("NVIDIA_TF32_OVERRIDE", "0", "float32 products do not use the tensor cores"),
    HarmfulVariable("TORCH_DISTRIBUTED_DEBUG", "(?i)detail", "every exchange is checked by another"),
    HarmfulVariable("TORCHDYNAMO_DISABLE", _ON, "nothing is compiled", gpu=False),
    HarmfulVariable("TORCH_COMPILE_DISABLE", _ON, "nothing is compiled", gpu=False),
    HarmfulVariable("TORCHINDUCTOR_FORCE_DISABLE_CACHES", _ON, "every process compiles everything again", gpu=False),
    HarmfulVariable(
        "ATEN_CPU_CAPABILITY", "(?i)default|avx2", "PyTorch leaves the processor's widest units idle", gpu=False
    ),
    HarmfulVariable("ONEDNN_MAX_CPU_ISA", ".", "oneDNN may leave the processor's widest units idle", gpu=False),
    HarmfulVariable("OMP_WAIT_POLICY", "(?i)active", "waiting threads keep their cores busy", gpu=False),
)


def count(number: int, noun: str) -> str:
    """Return a number with its noun in singular or plural."""
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number} {noun if number == 1 else plural}"


def check_environment(variables: Mapping[str, str], on_gpu: bool, cores: float) -> list[Finding]:
    """Find environment variables that slow training down."""
    found = [
        Finding("warning", f"{harm.name}={variables[harm.name][:40]} is set", harm.why, f"unset {harm.name}")
        for harm in HARMFUL_VARIABLES
        if harm.name in variables and (on_gpu or not harm.gpu) and re.match(harm.value, variables[harm.name])
    ]
    threads = variables.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and not on_gpu and int(threads) != int(cores) and int(cores) > 0:
        what = f"OMP_NUM_THREADS={threads} is set, and there are {cores:g} cores"
        found.append(Finding("warning", what, "PyTorch uses that many threads", "unset OMP_NUM_THREADS"))
    return found or [Finding("ok", "no environment variable that is known to slow training down")]


def check_cores(activity: Activity, cores: float, processes: int) -> list[Finding]:
    """Find other processes at work and missing cores: each process of a run needs one, even if it has a GPU."""
    busy = [process for process in activity.processes if process.cores > BUSY_CORES]
    found = [
        Finding(
            "warning",
            f"{process.name} (process {process.pid}) uses {process.cores:.1f} cores",
            "it slows training down and falsifies timings: on a busy core a second thread costs a factor of three",
            f"wait until it ends, or end it: kill {process.pid}",
        )
        for process in busy[:_SHOWN]
    ]
    if rest := busy[_SHOWN:]:
        what = f"{len(rest)} more processes use {sum(process.cores for process in rest):.1f} cores"
        found.append(Finding("warning", what, "as above", "list them: top"))
    free = cores if activity.idle_cores is None else min(cores, activity.idle_cores)
    if free < processes - 0.5:
        what = f"{free:.1f} of {cores:g} cores are free, and the run has {count(processes, 'process')}"
        found.append(Finding("problem", what, "each needs one", "wait until other work ends, or give fewer --gpus"))
    found += [
        Finding(
            "warning",
            f"{process.name} (process {process.pid}) is idle and its parent has ended",
            "it may hold memory, a GPU or a run folder",
            f"kill {process.pid}",
        )
        for process in orphans(activity.processes)
    ]
    return found or [Finding("ok", f"no other process uses more than {BUSY_CORES:g} of a core; {free:.1f} are free")]


@dataclass(frozen=True)
class OpenRun:
    """A run folder without a result."""

    folder: Path
    stale: bool
    """True if nothing was written to it for minutes."""
    processes: tuple[Process, ...]
    """The caddie processes at work in it."""


def check_runs(runs: Sequence[OpenRun]) -> list[Finding]:
    """Find runs that go on, hang, or ended without a result."""
    found = []
    for run in runs:
        for pid in (process.pid for process in run.processes):
            if run.stale:
                what = f"{run.folder} has not been written to for minutes, but process {pid} still works in it"
                found.append(Finding("problem", what, "it seems to hang, and may hold a GPU", f"kill {pid}"))
            else:
                why = "two runs at once are slower than one after the other"
                fix = f"wait until it ends, or stop it: kill {pid}"
                found.append(Finding("warning", f"{run.folder} is in use by process {pid}", why, fix))
    if ended := [run for run in runs if not run.processes]:
        names = ", ".join(str(run.folder) for run in ended[:3]) + ", ..." * (len(ended) > 3)
        what = f"{count(len(ended), 'run')} ended without a result: {names}"
        fix = f"repeat the command with --out {shlex.quote(str(ended[0].folder))}, or remove the folder"
        found.append(Finding("warning", what, "their checkpoints are kept, but nothing continues them", fix))
    return found or [Finding("ok", "no run without a result below runs/")]


def check_disks(work: Disk, cache: Disk, parameters: int) -> list[Finding]:
    """Find disks without room for a run, and a compile cache on a network disk."""
    need = GIB // 2 + 32 * parameters  # weights and checkpoint, both twice while they are replaced
    found = []
    for label, disk, least, elsewhere in (
        ("the working folder", work, need, "free some, or work in another folder"),
        ("the compile cache", cache, GIB, "free some, or export TORCHINDUCTOR_CACHE_DIR=FOLDER"),
    ):
        if disk.free_bytes < least:
            what = f"{disk.free_bytes / GIB:.1f} GiB are free for {label}, {disk.folder}"
            found.append(Finding("problem", what, f"a run may need {least / GIB:.1f} GiB", elsewhere))
    if cache.network:
        found.append(
            Finding(
                "warning",
                f"the compile cache {cache.folder} is on a network disk ({cache.kind})",
                "compiled code loads slowly; in public runs processes that waited for it were killed",
                "export TORCHINDUCTOR_CACHE_DIR=FOLDER on a local disk",
            )
        )
    return found or [Finding("ok", f"{work.free_bytes / GIB:,.1f} GiB of disk are free")]


def check_memory(memory: Memory) -> list[Finding]:
    """Find a shortage of main memory."""
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
            if holder.graphics_only and holder.mib <= _FEW_MIB:
                continue
            size = f"{holder.mib:,} MiB of " if holder.mib else "memory of "
            what = f"{holder.name} (process {holder.pid}) holds {size}{name}"
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
    seen = {(gpu.index, reason): gpu for gpu in gpus for reason in gpu.slowdowns}
    return [
        Finding(
            "problem",
            f"GPU {index} lowers its clocks to {gpu.clock_mhz or '?'} MHz of {gpu.fastest_mhz or '?'} ({reason},"
            f" {'?' if gpu.celsius is None else gpu.celsius} °C)",
            "its steps take longer, and all other GPUs wait for it",
            "check fans and power: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER; or take another machine",
        )
        for (index, reason), gpu in seen.items()
    ]


_KERNELS = {
    8: ("FlashAttention 2", "pip install flash-attn --no-build-isolation"),
    9: ("FlashAttention 3", "pip install flash-attn-3 --no-deps --index-url https://download.pytorch.org/whl/cu{cuda}"),
    10: ("FlashAttention 4", "pip install flash-attn-4"),
}
"""The attention kernel for each compute capability, and the command that installs it."""


def check_kernels(
    seen: Accelerators,
    driver: Sequence[Gpu] | None,
    processes: int,
    compilers: bool,
    torch: str,
    cuda: str | None,
    triton: bool,
) -> list[Finding]:
    """Find GPUs that PyTorch does not see, and missing kernels and compilers. `cuda` is the version of its build."""
    found = []
    if driver and not seen.names:
        what = f"the driver has {count(len(driver), 'GPU')}, and PyTorch {torch} sees none"
        fix = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu128"
        if cuda:
            fix = f"check CUDA_VISIBLE_DEVICES, and that the driver is new enough for CUDA {cuda}"
        found.append(Finding("problem", what, "training would run on the CPU", fix))
    if not seen.names:
        return found
    if processes > len(seen.names):
        what = f"the run has {processes} processes, and PyTorch sees {count(len(seen.names), 'GPU')}"
        found.append(Finding("problem", what, "each needs one", f"--gpus {len(seen.names)}"))
    kernel, install = _KERNELS.get(seen.capabilities[0][0], ("", ""))
    if kernel and not any(name.startswith("FlashAttention") for name in seen.attention.values()):
        why = "9 to 15 ms of an 85 ms step were gained by FlashAttention 3 over others on an H100"
        fix = install.format(cuda=(cuda or "12.8").replace(".", ""))
        found.append(Finding("warning", f"{kernel} is not installed", why, fix))
    if not compilers:
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
    elif pace is not None:
        rate = f"{pace.tokens_per_second:,.0f} tokens per second"
        if known is None:
            found.append(Finding("ok", f"{rate}; no reference for {device}"))
        else:
            ratio = pace.tokens_per_second / known.tokens_per_second
            scaled = f", scaled from {known.reference.recipe} by FLOPs per token" if known.scaled else ""
            what = f"{rate}, {ratio:.2f} of the reference ({known.reference.source}, {known.reference.date}{scaled})"
            if ratio >= (_FAR_TOO_SLOW if known.scaled else _SLOW):
                found.append(Finding("ok", what))
            else:
                level: Level = "problem" if ratio < _FAR_TOO_SLOW and not known.scaled else "warning"
                why = "the budget buys fewer steps than such a machine should give"
                found.append(Finding(level, what, why, "fix the other findings first, then take another machine"))
    if estimate is not None and estimate.steps < STEPS:
        end = f"after about {count(estimate.steps, 'step')}" if estimate.steps else "before the first step does"
        fix = "more train.seconds, a smaller train.batch_tokens, NAME_mini in place of NAME, or a faster machine"
        found.append(Finding("problem", f"the budget ends {end}", "too few to learn anything", fix))
    return found


def check_answers(errors: Mapping[str, str]) -> list[Finding]:
    """Report what could not be examined, by subject."""
    return [
        Finding("warning", f"{subject} not known: {error}", "problems there would go unnoticed")
        for subject, error in errors.items()
    ]
