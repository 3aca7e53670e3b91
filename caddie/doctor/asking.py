"""Questions to the system. A disk or a driver that hangs is itself a finding, so none may keep the doctor waiting."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread, Timer
from typing import Generic, TypeVar

from caddie.report.tables import one_line

LARGEST_BYTES = 1 << 22
"""Output of a program, or a file of the system's, beyond which nothing is read."""

T = TypeVar("T")


@dataclass(frozen=True)
class Answer(Generic[T]):
    """What a question came to."""

    value: T | None
    """None where it is not known."""
    fault: str = ""
    """Why it is not known, where something failed; empty where there is simply nothing of the kind here."""


def within(seconds: float, ask: Callable[[], T]) -> Answer[T]:
    """What `ask` answers within so many seconds. It is left behind when it does not: threads cannot be ended."""
    found: list[Answer[T]] = []

    def attend() -> None:
        try:
            found.append(Answer(ask()))
        except Exception as error:  # whatever a broken driver or a garbled file leads to
            found.append(Answer(None, one_line(f"{type(error).__name__}: {error}")))

    thread = Thread(target=attend, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else Answer(None, f"no answer within {seconds:g} seconds")


def output(command: Sequence[str], seconds: float) -> str:
    """What a program prints; it is killed after so many seconds, with its children, which is a `TimeoutError`.

    `OSError` if it cannot be started, `ValueError` if it fails or prints more than `LARGEST_BYTES`.
    """
    late: list[bool] = []
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:

        def kill() -> None:
            with suppress(OSError):  # it has ended
                os.killpg(process.pid, signal.SIGKILL)

        def give_up() -> None:
            late.append(True)
            kill()

        timer = Timer(seconds, give_up)
        timer.daemon = True
        timer.start()
        assert process.stdout is not None
        content = process.stdout.read(LARGEST_BYTES + 1)
        if len(content) > LARGEST_BYTES:
            kill()
        process.wait()
        timer.cancel()
    if late:
        raise TimeoutError(f"{command[0]} gave no answer within {seconds:g} seconds")
    if len(content) > LARGEST_BYTES:
        raise ValueError(f"{command[0]} printed more than {LARGEST_BYTES:,} bytes")
    if process.returncode:
        raise ValueError(f"{command[0]} failed with status {process.returncode}")
    return content.decode("utf-8", "replace")
