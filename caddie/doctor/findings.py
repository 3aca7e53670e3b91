"""What is wrong on a machine: each rule makes findings of what was seen, and gives one that says so if all is well."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from caddie.doctor.estimates import Estimate, Expected
from caddie.doctor.host import Disk, Memory
from caddie.doctor.nvidia import Gpu
from caddie.doctor.pace import STEPS, Pace
from caddie.doctor.processes import Activity, Process, left_over

BUSY_CORES = 0.5
"""A process that uses more of the time of a core disturbs what is measured or trained."""
GIB = 1 << 30
_SHOWN = 5
_FEW_MIB = 1024
"""Memory of a GPU that a desktop's programs take, or the driver for itself."""
_SLOW, _FAR_TOO_SLOW = 0.85, 0.5
"""Parts of the reference rate. In the contest 85 % of the step rate was worth the whole margin of acceptance."""


Level = Literal["problem", "warning", "ok"]


@dataclass(frozen=True)
class Finding:
    """One line of what the doctor says."""

    level: Level
    """A problem is a reason not to start."""
    what: str
    why: str = ""
    """Why it matters."""
    mend: str = ""
    """The command or setting that mends it."""


@dataclass(frozen=True)
class HarmfulVariable:
    """A value of an environment variable that slows training down or misleads."""

    name: str
    value: str
    """Pattern of the values that harm."""
    why: str
    gpu: bool = True
    """Whether it matters on GPUs alone."""


_ON = r"(?!0$|false$|no$|off$)."
HARMS = (
    HarmfulVariable(
        "NCCL_IB_DISABLE", _ON, "GPUs exchange gradients without InfiniBand: 60 ms a step for 44 in a public record"
    ),
    HarmfulVariable("NCCL_P2P_DISABLE", _ON, "GPUs exchange gradients through main memory"),
    HarmfulVariable("NCCL_SHM_DISABLE", _ON, "processes of one machine exchange gradients through the network"),
    HarmfulVariable("NCCL_NET", "(?i)socket", "GPUs exchange gradients through TCP"),
    HarmfulVariable("CUDA_LAUNCH_BLOCKING", _ON, "every kernel is waited for"),
    HarmfulVariable("CUDA_VISIBLE_DEVICES", "(-1)?$", "no GPU is seen"),
    HarmfulVariable("PYTORCH_NO_CUDA_MEMORY_CACHING", _ON, "every tensor asks the driver for memory"),
    HarmfulVariable("NVIDIA_TF32_OVERRIDE", "0", "products of 32 bits leave the tensor cores"),
    HarmfulVariable("TORCH_DISTRIBUTED_DEBUG", "(?i)detail", "every exchange is checked by another"),
    HarmfulVariable("TORCHDYNAMO_DISABLE", _ON, "nothing is compiled", gpu=False),
    HarmfulVariable("TORCH_COMPILE_DISABLE", _ON, "nothing is compiled", gpu=False),
    HarmfulVariable(
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES", _ON, "everything is compiled anew by every process", gpu=False
    ),
    HarmfulVariable(
        "ATEN_CPU_CAPABILITY", "(?i)default|avx2", "PyTorch leaves the processor's widest units idle", gpu=False
    ),
    HarmfulVariable("ONEDNN_MAX_CPU_ISA", ".", "oneDNN may leave the processor's widest units idle", gpu=False),
    HarmfulVariable("OMP_WAIT_POLICY", "(?i)active", "threads that wait keep their cores busy", gpu=False),
)


def environment_findings(variables: Mapping[str, str], on_gpu: bool, cores: float) -> list[Finding]:
    """Variables known to harm."""
    found = [
        Finding("warning", f"{harm.name}={variables[harm.name][:40]} is set", harm.why, f"unset {harm.name}")
        for harm in HARMS
        if harm.name in variables and (on_gpu or not harm.gpu) and re.match(harm.value, variables[harm.name])
    ]
    threads = variables.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and not on_gpu and int(threads) != int(cores) and int(cores) > 0:
        why = "PyTorch takes so many threads, and training has no others to choose from"
        what = f"OMP_NUM_THREADS={threads} is set, and there are {cores:g} cores"
        found.append(Finding("warning", what, why, "unset OMP_NUM_THREADS"))
    return found or [Finding("ok", "no environment variable that is known to slow training down")]


def processor_findings(activity: Activity, cores: float, processes: int) -> list[Finding]:
    """Other processes at work, and cores that are left; each process of a run needs one, also with a GPU of its own."""
    busy = [process for process in activity.processes if process.cores > BUSY_CORES]
    found = [
        Finding(
            "warning",
            f"{process.name} (process {process.pid}) uses {process.cores:.1f} cores",
            "what is measured or trained beside it is slower; a second thread on a busy core costs a factor of three",
            f"wait until it ends, or end it: kill {process.pid}",
        )
        for process in busy[:_SHOWN]
    ]
    if rest := busy[_SHOWN:]:
        what = f"{len(rest)} more processes use {sum(process.cores for process in rest):.1f} cores"
        found.append(Finding("warning", what, "as above", "look at them: top"))
    free = cores if activity.idle_cores is None else min(cores, activity.idle_cores)
    if free < processes - 0.5:
        what = f"{free:.1f} of {cores:g} cores are free, and the run has {processes} process{'es' * (processes > 1)}"
        found.append(Finding("problem", what, "each needs one", "wait until other work ends, or give fewer --gpus"))
    found += [
        Finding(
            "warning",
            f"{process.name} (process {process.pid}) is idle and its parent is gone",
            "it may hold memory, a GPU or a run folder",
            f"kill {process.pid}",
        )
        for process in left_over(activity.processes)
    ]
    return found or [Finding("ok", f"no other process uses more than {BUSY_CORES:g} of a core; {free:.1f} are free")]


@dataclass(frozen=True)
class OpenRun:
    """A run folder without a result."""

    folder: Path
    stale: bool
    """Whether nothing was written to it for minutes."""
    processes: tuple[Process, ...]
    """Of ours, at work in it."""


def run_findings(runs: Sequence[OpenRun]) -> list[Finding]:
    """Runs that go on, hang, or ended without a result."""
    found = []
    for run in runs:
        for process in run.processes:
            who = f"process {process.pid}"
            if run.stale:
                what = f"{run.folder} has been silent for minutes, and {who} is still at it"
                found.append(Finding("problem", what, "it seems to hang, and may hold a GPU", f"kill {process.pid}"))
            else:
                what, why = (
                    f"{run.folder} is being run by {who}",
                    "two runs at once are slower than one after the other",
                )
                found.append(Finding("warning", what, why, f"wait until it ends, or stop it: kill {process.pid}"))
    if ended := [run for run in runs if not run.processes]:
        first = shlex.quote(str(ended[0].folder))
        named = ", ".join(str(run.folder) for run in ended[:3]) + ", ..." * (len(ended) > 3)
        plural = len(ended) > 1
        found.append(
            Finding(
                "warning",
                f"{len(ended)} run{'s' * plural} ended without a result: {named}",
                "what was trained is kept, and nobody goes on with it",
                f"give the same command again with --out {first}, or remove the folder",
            )
        )
    return found or [Finding("ok", "no run without a result below runs/")]


def disk_findings(work: Disk, cache: Disk, parameters: int) -> list[Finding]:
    """Room for a run, and where compiled code is kept."""
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
                f"the compile cache {cache.folder} lies on a network disk ({cache.kind})",
                "compiled code comes through the network; in public runs processes that waited for it were killed",
                "export TORCHINDUCTOR_CACHE_DIR=FOLDER on a disk of this machine",
            )
        )
    return found or [Finding("ok", f"{work.free_bytes / GIB:,.1f} GiB of disk are free")]


def memory_findings(memory: Memory) -> list[Finding]:
    """Main memory."""
    if memory.available is None:
        return []
    if memory.available < GIB:
        what = f"{memory.available / GIB:.2f} GiB of memory are available"
        return [Finding("problem", what, "the smallest recipe takes about one", "end what uses it: top -o %MEM")]
    return [Finding("ok", f"{memory.available / GIB:,.1f} GiB of memory are available")]


def gpu_findings(gpus: Sequence[Gpu]) -> list[Finding]:
    """Who else is on the GPUs, and what holds their clocks down."""
    found = []
    for gpu in gpus:
        name = f"GPU {gpu.index}"
        holders = [holder for holder in gpu.holders if not holder.draws or holder.mib > _FEW_MIB]
        for holder in holders:
            size = f"{holder.mib:,} MiB of " if holder.mib else "memory of "
            what = f"{holder.name} (process {holder.pid}) holds {size}{name}"
            why = "steps beside another program took 2 to 14 times as long in public runs"
            level: Level = "warning" if 0 < holder.mib <= _FEW_MIB else "problem"
            found.append(Finding(level, what, why, f"wait until it ends, or end it: kill {holder.pid}"))
        if not gpu.holders and (gpu.used_mib or 0) > _FEW_MIB:
            what = f"{gpu.used_mib:,} MiB of {name} are held by a program out of sight, perhaps of another container"
            found.append(Finding("problem", what, "it takes memory and time from a run", "take another GPU or machine"))
        found += slowdown_findings([gpu])
        if gpu.held_by_setting:
            what = f"the clocks of {name} are set to {gpu.clock_mhz or '?'} MHz, of {gpu.fastest_mhz or '?'}"
            mend = f"nvidia-smi -i {gpu.index} -rac && nvidia-smi -i {gpu.index} -rgc"
            found.append(Finding("warning", what, "steps take longer by the ratio", mend))
    return found or [Finding("ok", "nobody else is on the GPUs, and their clocks are free")] * bool(gpus)


def slowdown_findings(gpus: Sequence[Gpu]) -> list[Finding]:
    """Clocks lowered by heat or power; of cards seen several times, each reason once."""
    seen = {(gpu.index, reason): gpu for gpu in gpus for reason in gpu.slowdowns}
    return [
        Finding(
            "problem",
            f"GPU {index} lowers its clocks to {gpu.clock_mhz or '?'} MHz of {gpu.fastest_mhz or '?'} ({reason},"
            f" {gpu.celsius if gpu.celsius is not None else '?'} °C)",
            "its steps take longer, and all others wait for the slowest",
            "look at fans and power: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER; or take another machine",
        )
        for (index, reason), gpu in seen.items()
    ]


@dataclass(frozen=True)
class Accelerators:
    """The GPUs as PyTorch sees them, and how attention is computed on the first, or on the CPU."""

    names: tuple[str, ...]
    uuids: tuple[str, ...]
    capabilities: tuple[tuple[int, int], ...]
    attention: Mapping[str, str]
    """What bounds the past (`causal`, `window`, `documents`) to the name of an implementation."""


_KERNELS = {
    8: ("FlashAttention 2", "pip install flash-attn --no-build-isolation"),
    9: ("FlashAttention 3", "pip install flash-attn-3 --no-deps --index-url https://download.pytorch.org/whl/cu{cuda}"),
    10: ("FlashAttention 4", "pip install flash-attn-4"),
}
"""Compute capability to the kernel made for it, and how it is installed."""


def kernel_findings(
    seen: Accelerators,
    driver: Sequence[Gpu] | None,
    processes: int,
    compilers: bool,
    torch: str,
    cuda: str | None,
    triton: bool,
) -> list[Finding]:
    """Whether PyTorch sees the GPUs, and has what makes them quick. `cuda` is the version it was built for, if any."""
    found = []
    if driver and not seen.names:
        what = f"the driver has {len(driver)} GPU{'s' * (len(driver) > 1)}, and PyTorch {torch} sees none"
        mend = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu128"
        if cuda:
            mend = "look at CUDA_VISIBLE_DEVICES, and whether the driver is new enough for CUDA " + cuda
        found.append(Finding("problem", what, "training would be on the CPU", mend))
    if seen.names and processes > len(seen.names):
        what = f"the run has {processes} processes, and PyTorch sees {len(seen.names)} GPU{'s' * (len(seen.names) > 1)}"
        found.append(Finding("problem", what, "each needs one", f"--gpus {len(seen.names)}"))
    if seen.names:
        major = seen.capabilities[0][0]
        kernel, install = _KERNELS.get(major, ("", ""))
        if kernel and not any(name.startswith("FlashAttention") for name in seen.attention.values()):
            why = "9 to 15 ms of an 85 ms step were gained by FlashAttention 3 over others on an H100"
            mend = install.format(cuda=(cuda or "12.8").replace(".", ""))
            found.append(Finding("warning", f"{kernel} is not installed", why, mend))
        if not compilers:
            why = "without a C compiler nothing is compiled for the GPU"
            found.append(Finding("warning", "no cc, gcc or clang was found", why, "apt-get install gcc"))
        if not triton:
            why = "without it nothing is compiled for the GPU, and the loss makes logits in float32"
            found.append(Finding("warning", "Triton is not installed", why, "pip install triton"))
    return found


def pace_findings(
    pace: Pace | str | None, known: Expected | None, estimate: Estimate | None, device: str
) -> list[Finding]:
    """What the measurement says, against the reference and the budget; `pace` may be why there is none."""
    found = []
    if isinstance(pace, str):
        mend = "a smaller model, batch or sequence length; or another machine"
        found.append(Finding("problem", f"steps could not be timed: {pace}", "a run would end the same way", mend))
    elif pace is not None:
        rate = f"{pace.tokens_per_second:,.0f} tokens per second"
        if known is None:
            found.append(Finding("ok", f"{rate}; no reference for {device} is known"))
        else:
            ratio = pace.tokens_per_second / known.tokens_per_second
            way = f", scaled from {known.reference.recipe} by the arithmetic of a token" if known.scaled else ""
            what = f"{rate}, {ratio:.2f} of the reference ({known.reference.source}, {known.reference.date}{way})"
            if ratio >= (_FAR_TOO_SLOW if known.scaled else _SLOW):
                found.append(Finding("ok", what))
            else:
                level: Level = "problem" if ratio < _FAR_TOO_SLOW and not known.scaled else "warning"
                why = "the budget buys fewer steps than such a machine should give"
                found.append(Finding(level, what, why, "see to the other lines first, then take another machine"))
    if estimate is not None and estimate.steps < STEPS:
        end = f"after about {estimate.steps} steps" if estimate.steps else "before the first step does"
        what = f"the budget ends {end}"
        mend = "more train.seconds, a smaller train.batch_tokens, NAME_mini in place of NAME, or a faster machine"
        found.append(Finding("problem", what, "too few to learn anything", mend))
    return found


def unknown_findings(faults: Mapping[str, str]) -> list[Finding]:
    """Questions that were not answered, by subject."""
    return [
        Finding("warning", f"{subject} not known: {fault}", "something may be wrong that is not said here")
        for subject, fault in faults.items()
    ]
