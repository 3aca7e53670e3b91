"""Show progress on a terminal.

Unless another stream is named it goes to standard error, as standard output carries the result.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event as Signal
from threading import Thread
from typing import TYPE_CHECKING, Any, Self, TextIO, cast

from caddie.errors import count
from caddie.report.tables import number, printable
from caddie.runtime.progress import Event, Progress

if TYPE_CHECKING:
    from rich.progress import Progress as LiveBars
    from rich.progress import TaskID

SHORTEST_GAP = 2.0
"""Least seconds between two plain lines, except before the last."""
LONGEST_GAP = 60.0
"""Most seconds between two plain lines of a phase."""
FIRST_SILENCE = 5.0
"""Seconds without an event after which a plain line says that the work goes on; the next comes after twice as many.

Training steps do not reset the doubling: each step of a large model may take longer.
"""
_PHASE_WIDTH, _BAR_WIDTH = 9, 10
"""Characters of the longest phase's name, and the fewest of a bar."""
_SETTLED = 1.0
"""Seconds of training before its speed and the time left are shown: earlier they are chance."""


def clock(seconds: float) -> str:
    """Format a duration as `0:35`, `12:05` or `3:10:00`."""
    if not math.isfinite(seconds):
        return "-:--"
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def start_line(event: Event) -> str:
    """Format the choices of the warm-up, from a `start` event of the log."""
    threads = count(event["threads"], "thread")
    fields = [event["precision"], threads, "compiled" if event["compiled"] else "not compiled"]
    fields += ["CUDA graphs"] if event.get("cuda_graphs") else []
    fields += [f"attention by {event['attention']}"] if event["attention"] else []
    return ", ".join(fields)


def loss_line(event: Event) -> str:
    """Format loss, and bits per byte if there is an estimate, from a `step` or `held_out` event of the log."""
    bits = event.get("bits_per_byte")
    return f"loss {number(event['loss'], '.4f')}" + (f"  {bits:.4f} bpb" if bits is not None else "")


def step_line(event: Event, held_out: str = "", room: float = math.inf) -> str:
    """Format step, loss, bits per byte if there is an estimate, speed and time left, from a `step` event of the log.

    `held_out` is the last held-out loss as text, in bits per byte if known. Fields that do not fit into `room`
    characters are left out, the least needed first.
    """
    progress, seconds, bits = event["progress"], event["seconds"], event.get("bits_per_byte")
    left = seconds * (1.0 - progress) / progress if progress > 0 else math.nan
    fields = {"step": f"step {event['step']:,}", "loss": f"loss {number(event['loss'], '.4f')}"}
    fields |= {"bits": f"{bits:.4f} bpb"} if bits is not None else {}
    fields |= {"held out": f"held out {held_out}"} if held_out else {}
    if seconds >= _SETTLED or progress >= 1.0:
        fields |= {"speed": f"{number(event['tokens_per_second'], ',.0f')} tokens/s", "left": f"{clock(left)} left"}
    for least in ("loss" if bits is not None else "held out", "held out", "step", "speed"):
        if len("  ".join(fields.values())) > room:
            fields.pop(least, None)
    return "  ".join(fields.values())


class Display(Progress):
    """Progress for people: a live bar on a terminal, a few plain lines elsewhere, nothing if quiet.

    The bar needs the context manager, which gives the terminal its cursor back after an exception or Ctrl-C.
    """

    def __init__(
        self, quiet: bool = False, stream: TextIO | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.stream = stream if stream is not None else sys.stderr
        self.quiet = quiet or self.stream is None  # as after `2>&-`, where print would take standard output
        self.now = now
        self._live: LiveBars | None = None
        self._bars: dict[str, TaskID] = {}
        self._phase, self._began, self._last_step, self._held_out = "", now(), "", ""
        self._last_line, self._last_tenth, self._last_half = -math.inf, -1, -1
        self._first_tokens: tuple[int, float] | None = None
        self._last_event, self._silence, self._left = time.monotonic(), FIRST_SILENCE, Signal()

    def __enter__(self) -> Self:
        self._live = None if self.quiet else _live(self.stream)
        if self._live is not None:
            self._live.start()
        elif not self.quiet:
            Thread(target=self._break_silences, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._left.set()
        if self._live is None:
            return
        try:
            self._end_phase()
        finally:
            self._live.stop()
            self._live = None

    def note(self, text: str) -> None:
        self._last_event, self._silence = time.monotonic(), FIRST_SILENCE
        line = printable(text)
        if self._live is not None:
            self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)
        elif not self.quiet:
            self._print(line)

    def phase(self, name: str) -> None:
        if self._live is not None:
            self._end_phase()
        else:
            self.note(name)
        self._phase, self._began, self._last_step = name, self.now(), ""
        self._last_line, self._last_tenth, self._first_tokens = -math.inf, -1, None
        if self._live is not None:
            self._draw(self._live, name)

    def _draw(self, live: LiveBars, name: str, **shown: Any) -> None:
        """Update the live bar of this name, which is made if there is none yet."""
        if name not in self._bars:
            self._bars[name] = live.add_task(printable(name), total=None, text="")
        live.update(self._bars[name], **shown)

    def step(self, event: Event) -> None:
        if self.quiet:
            return
        self._last_event = time.monotonic()
        kind = event["event"]
        if kind == "step":  # off a terminal only at each tenth of the budget or once a minute
            whole, fitting = (step_line(event, self._held_out, room) for room in (math.inf, self._room()))
            self._show(event["progress"], whole, fitting)
        elif kind == "held_out":
            self._held_out = loss_line(event).rpartition("  ")[2]  # bits per byte alone, where they are known
            if event["progress"] >= 1.0:
                self.note(f"held-out training text: {loss_line(event)}")
        elif kind == "start":
            self.note(start_line(event))
            self.note("loss in nats per token and bpb in bits per byte, of the training text; lower is better")
        elif kind == "forecast":
            self._forecast(event)
        elif kind == "tokens" and event["total"]:
            self._tokens(event["done"], event["total"])
        elif kind == "candidate":
            room = event["cap_bytes"] - event["file_bytes"] if event["cap_bytes"] else None
            cap = "" if room is None else f", {abs(room):,} {'under' if room >= 0 else 'over'} the cap"
            self._doing(f"candidate {event['number']}: a file of {event['file_bytes']:,} bytes{cap}")
        elif kind == "runs":
            text = f"{event['done']} of {event['total']} runs  {event['text']}"
            if self._live is not None:
                self._show(event["done"] / event["total"], text)
            else:
                self.note(text)
        elif kind == "running":  # off a terminal as seldom as steps
            self._show(event["progress"], event["text"])
        elif kind == "doing":
            self._doing(event["text"])

    def _tokens(self, done: int, total: int) -> None:
        """Show tokens done. Speed and time left count from the first event on: its own time includes the start-up."""
        self._first_tokens = before, began = self._first_tokens or (done, self.now())
        tokens, seconds = done - before, self.now() - began
        speed = tokens / seconds if tokens > 0 and seconds >= 1 else 0.0  # over less time it would be millions
        rates = f"  {speed:,.0f} tokens/s  {clock((total - done) / speed)} left" if speed else ""
        self._show(done / total, f"{done:,} of {total:,} tokens{rates}")

    def _forecast(self, event: Event) -> None:
        """Show the forecast size, and the quantization gap from the middle on, for early weights round badly.

        Off a terminal, one line each at the beginning, in the middle and at the end.
        """
        size, cap, half = event["file_bytes"], event["cap_bytes"], int(2 * event["progress"])
        line = f"forecast: file about {size / 1e6:.2f} of {cap / 1e6:.2f} MB"
        gap = f", quantization gap about {event['gap_bits_per_byte']:.4f} bpb before calibration" if half else ""
        line += gap if len(line + gap) <= self._room() else ""
        if self._live is not None:
            self._draw(self._live, "file", total=cap, completed=size, text=line)
        elif half > self._last_half:
            self.note(f"      {line}")
        self._last_half = half

    def _doing(self, line: str) -> None:
        """Show the current work; off a terminal at most one line in two seconds."""
        self._last_step, self._silence = (line := printable(line)), FIRST_SILENCE
        if self._live is not None:
            self._draw(self._live, self._phase or "work", text=line)
        elif self.now() - self._last_line >= SHORTEST_GAP:
            self._last_line = self.now()
            self._print(f"      {line}")

    def _break_silences(self) -> None:
        """Say that the work goes on while it reports nothing: first after seconds, later once a minute."""
        while not self._left.wait(FIRST_SILENCE / 10):
            if time.monotonic() - self._last_event >= self._silence:
                self._last_event, self._silence = time.monotonic(), min(2 * self._silence, LONGEST_GAP)
                work = f": {self._last_step}" if self._last_step else ""
                self._print(f"      still at work after {clock(self.now() - self._began)}{work}")

    def _room(self) -> float:
        """Return the characters that a line may have beside its phase and bar; no limit off a terminal."""
        return math.inf if self._live is None else self._live.console.width - _PHASE_WIDTH - _BAR_WIDTH - 2

    def _show(self, progress: float, line: str, fitting: str | None = None) -> None:
        """Show a line and the progress of its phase; beside a live bar, show `fitting` instead if it is given."""
        self._last_step = line
        if self._live is not None:
            text = line if fitting is None else fitting
            self._draw(self._live, self._phase or "work", total=1.0, completed=progress, text=text)
            return
        now, tenth = self.now(), int(progress * 10 + 1e-9)
        gap, ends = now - self._last_line, progress >= 1.0 and self._last_tenth < 10
        if ends or (gap >= SHORTEST_GAP and tenth > self._last_tenth) or gap >= LONGEST_GAP:
            self._last_line, self._last_tenth = now, max(tenth, self._last_tenth)
            self._print(f"{progress:4.0%}  {line}")

    def _print(self, line: str) -> None:
        with suppress(OSError):  # a run goes on where the disk of its log is full
            print(line, file=self.stream, flush=True)

    def _end_phase(self) -> None:
        if self._live is None or not self._bars:
            return
        for bar in self._bars.values():
            self._live.remove_task(bar)
        self._bars.clear()
        self._live.refresh()
        if self._phase:
            line = f"{self._phase:<{_PHASE_WIDTH}}{self.now() - self._began:8,.1f} s"
            self.note(f"{line}   {self._last_step.rpartition('  ')[0]}".rstrip())


class _Lasting:
    """Stream to a terminal that may be closed while a run goes on: output that cannot be written is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def _live(stream: TextIO) -> LiveBars | None:
    if not stream.isatty():
        return None
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    console = Console(file=cast("TextIO", _Lasting(stream)))
    if not console.is_interactive:
        return None
    name = Column(no_wrap=True, min_width=_PHASE_WIDTH)
    return Progress(
        TextColumn("{task.description}", markup=False, style="bold", table_column=name),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[text]}", markup=False),
        console=console,
        expand=True,
        transient=True,
        refresh_per_second=2,  # every redraw takes the interpreter from training
        redirect_stdout=False,  # standard output carries the result and may be a file
        redirect_stderr=stream is sys.stderr,
    )
