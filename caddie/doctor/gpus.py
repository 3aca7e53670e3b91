"""GPUs: as NVIDIA's driver reports them through NVML, and as PyTorch sees them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import pynvml
import torch

from caddie.ops import product_dtype
from caddie.ops.attention import choose

_HEAD, _ROW = 64, 1024
"""Channels of a head and tokens of a row for which the attention kernel is chosen."""
_MIB = 1 << 20
_SLOWDOWNS = {
    "hw_slowdown": pynvml.nvmlClocksEventReasonHwSlowdown,
    "hw_thermal_slowdown": pynvml.nvmlClocksEventReasonHwThermalSlowdown,
    "sw_thermal_slowdown": pynvml.nvmlClocksEventReasonSwThermalSlowdown,
    "hw_power_brake_slowdown": pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
}
"""Names of `nvidia-smi` for clocks lowered by heat or power, and their bits in NVML."""
T = TypeVar("T")


@dataclass(frozen=True)
class Holder:
    """A process that holds memory of a GPU."""

    pid: int
    name: str
    mib: int
    """0 if the driver does not report it."""
    graphics_only: bool


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver reports it; None for what the driver does not report."""

    index: int
    uuid: str
    name: str
    driver: str
    memory_mib: int | None
    used_mib: int | None
    celsius: int | None
    clock_mhz: int | None
    """Current clock of the multiprocessors."""
    fastest_mhz: int | None
    holders: tuple[Holder, ...]
    slowdowns: tuple[str, ...]
    """Reasons of heat or power for which clocks are lowered now."""
    held_by_setting: bool
    """True if somebody has set clocks below the GPU's own."""


def driver_gpus() -> list[Gpu] | None:
    """Return all GPUs in the driver's order, or None without a driver; `pynvml.NVMLError` if the driver fails."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return None
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        return [_gpu(index, driver) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int, driver: str) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = _known(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)  # without what the driver reserves
    memory = memory or _known(pynvml.nvmlDeviceGetMemoryInfo, handle)
    reasons = _known(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    if reasons is None:  # a driver before 535
        reasons = _known(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    compute = _known(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    graphics = _known(pynvml.nvmlDeviceGetGraphicsRunningProcesses, handle) or []
    holders = {one.pid: _holder(one, kind is graphics) for kind in (graphics, compute) for one in kind}
    return Gpu(
        index=index,
        uuid=_known(pynvml.nvmlDeviceGetUUID, handle) or "",
        name=_known(pynvml.nvmlDeviceGetName, handle) or "unknown",
        driver=driver,
        memory_mib=memory and memory.total // _MIB,
        used_mib=memory and memory.used // _MIB,
        celsius=_known(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        clock_mhz=_known(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
        fastest_mhz=_known(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM),
        holders=tuple(holders.values()),
        slowdowns=tuple(name for name, bit in _SLOWDOWNS.items() if reasons & bit),
        held_by_setting=bool(reasons & pynvml.nvmlClocksEventReasonApplicationsClocksSetting),
    )


def _holder(process: Any, graphics_only: bool) -> Holder:
    name = _known(pynvml.nvmlSystemGetProcessName, process.pid) or "[Not Found]"
    if not name.startswith("["):
        name = name.partition(" ")[0].rpartition("/")[2]  # without arguments, which may hold secrets
    return Holder(process.pid, name, (process.usedGpuMemory or 0) // _MIB, graphics_only)


def _known(function: Callable[..., T], *arguments: object) -> T | None:
    """Return the answer of an NVML function, or None if this driver or GPU does not have it."""
    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None


@dataclass(frozen=True)
class Accelerators:
    """GPUs as PyTorch sees them, and the attention kernels chosen for the first of them, or for the CPU."""

    names: tuple[str, ...]
    uuids: tuple[str, ...]
    capabilities: tuple[tuple[int, int], ...]
    attention: Mapping[str, str]
    """Kernel for each kind of mask: `causal`, `window`, `documents`."""


def torch_gpus() -> Accelerators:
    """Return the GPUs that PyTorch sees."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    device = torch.device("cuda", 0) if count else torch.device("cpu")
    masks = {"causal": (False, None), "window": (False, _ROW // 4), "documents": (True, None)}
    dtype = product_dtype(device, torch.bfloat16)
    return Accelerators(
        names=tuple(one.name for one in properties),
        uuids=tuple(str(getattr(one, "uuid", "")) for one in properties),
        capabilities=tuple((one.major, one.minor) for one in properties),
        attention={mask: choose(device, dtype, _HEAD, _ROW, _ROW, *kind) for mask, kind in masks.items()},
    )
