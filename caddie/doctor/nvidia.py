"""GPUs as NVIDIA's driver sees them: what they are, who holds their memory, and what holds their clocks down.

`nvidia-smi -q -x` is asked, whose XML leaves out what a driver or card does not know instead of failing. Its names for
the reasons of low clocks changed in driver 535 (NVIDIA, "System Management Interface", section CLOCKS EVENT REASONS).
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from xml.etree import ElementTree

from caddie.doctor.asking import output

SECONDS = 10.0
"""Within which eight cards answer, even when no program keeps the driver awake."""
_SLOWDOWNS = ("hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown")


@dataclass(frozen=True)
class Holder:
    """A process that holds memory of a GPU."""

    pid: int
    name: str
    mib: int
    """0 where the driver does not tell."""
    draws: bool
    """Whether it only draws on a screen."""


@dataclass(frozen=True)
class Gpu:
    """One card; None for what the driver does not tell."""

    index: int
    uuid: str
    name: str
    driver: str
    memory_mib: int | None
    used_mib: int | None
    celsius: int | None
    clock_mhz: int | None
    """Of its multiprocessors, now."""
    fastest_mhz: int | None
    holders: tuple[Holder, ...]
    slowdowns: tuple[str, ...]
    """Reasons of heat or power for which clocks are low at this moment."""
    held_by_setting: bool
    """Whether somebody set clocks below the card's own."""


def look() -> list[Gpu] | None:
    """All cards, in the driver's order; None without `nvidia-smi`, `OSError` or `ValueError` if it fails."""
    program = shutil.which("nvidia-smi")
    return None if program is None else parse(output([program, "-q", "-x"], SECONDS))


def parse(text: str) -> list[Gpu]:
    """The cards in what `nvidia-smi -q -x` printed; a `ValueError` if that is not its XML."""
    try:
        root = ElementTree.fromstring(text[max(text.find("<"), 0) :])
    except ElementTree.ParseError as error:
        raise ValueError(f"nvidia-smi printed no XML ({error})") from None
    if root.tag != "nvidia_smi_log":
        raise ValueError(f"nvidia-smi printed a {root.tag[:40]}")
    driver = root.findtext("driver_version") or "unknown"
    return [_gpu(index, node, driver.strip()) for index, node in enumerate(root.findall("gpu"))]


def _gpu(index: int, node: ElementTree.Element, driver: str) -> Gpu:
    active = {
        re.sub(r"^clocks_(event|throttle)_reason_", "", reason.tag)
        for kind in ("event", "throttle")
        for reason in node.iterfind(f"clocks_{kind}_reasons/*")
        if (reason.text or "").strip() == "Active"
    }
    holders = [
        Holder(
            pid,
            _program((process.findtext("process_name") or "").strip()),
            _number(process, "used_memory") or 0,
            (process.findtext("type") or "").strip() == "G",
        )
        for process in node.iterfind("processes/process_info")
        if (pid := _number(process, "pid")) is not None
    ]
    return Gpu(
        index=index,
        uuid=(node.findtext("uuid") or "").strip(),
        name=(node.findtext("product_name") or "unknown").strip(),
        driver=driver,
        memory_mib=_number(node, "fb_memory_usage/total"),
        used_mib=_number(node, "fb_memory_usage/used"),
        celsius=_number(node, "temperature/gpu_temp"),
        clock_mhz=_number(node, "clocks/sm_clock"),
        fastest_mhz=_number(node, "max_clocks/sm_clock"),
        holders=tuple(holders),
        slowdowns=tuple(reason for reason in _SLOWDOWNS if reason in active),
        held_by_setting="applications_clocks_setting" in active,
    )


def _program(name: str) -> str:
    """The program in what the driver calls a process; its arguments may hold secrets."""
    return name if name.startswith("[") else name.partition(" ")[0].rpartition("/")[2] or "a process"


def _number(node: ElementTree.Element, path: str) -> int | None:
    """The whole number that a text such as `81559 MiB` begins with; None for `N/A`."""
    found = re.match(r"\s*(\d{1,12})\b", node.findtext(path) or "")
    return int(found[1]) if found else None
