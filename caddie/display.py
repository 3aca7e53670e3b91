"""What a run shows on a terminal while it works, and the short table it ends with.

Nothing here goes to standard output: the caller prints what `result_table` and `table` return. Text that a model or a
file name supplies is stripped of control characters first, so it cannot steer the terminal.
"""

from __future__ import annotations

import math
import re
import sys
import textwrap
import time
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

WIDTH = 79
"""Columns of everything printed here."""
SHORTEST_GAP = 2.0
"""Least seconds between two plain lines, but for the last."""
LONGEST_GAP = 60.0
"""Seconds after which a plain line comes even if progress has not reached the next tenth."""

_FIGURE = re.compile(r"[-+]?[\d,]+(\.\d+)?")
_PARTS = {
    "weights": "weights",
    "tokenizer": "tokenizer",
    "config": "model config",
    "manifest": "manifest",
    "source": "source code",
    "container": "container",
}
_ACROSS = (12, 17, 15, 15)  # columns of the figures of a policy
_STEPS = ("step_more_bits_per_byte", "step_fewer_bits_per_byte")
_STAGES = {
    "trained": "trained",
    "averaged": "averaged",
    "quantized": "quantized, packed",
}


def printable(text: str) -> str:
    """`text` on one line, with every character that could steer a terminal replaced."""
    line = text.expandtabs(4).replace("\r\n", " ").replace("\n", " ")
    return "".join(character if character.isprintable() else "\ufffd" for character in line)


def columns(text: str) -> int:
    """Terminal columns that `text` takes: two for wide East Asian characters, none for combining ones."""
    return sum(_columns(character) for character in text)


def crop(text: str, width: int) -> str:
    """`text`, shortened to `width` columns with `...` at the end if it is longer."""
    if columns(text) <= width:
        return text
    kept, used = [], 3
    for character in text:
        used += _columns(character)
        if used > width:
            break
        kept.append(character)
    return "".join(kept).rstrip() + "..."


def clock(seconds: float) -> str:
    """`0:35`, `12:05` or `3:10:00`."""
    if not math.isfinite(seconds):
        return "-:--"
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def step_line(event: Mapping[str, Any]) -> str:
    """Step, loss, bits per byte if the event has an estimate, speed and time left, from a `step` event of the log."""
    progress, seconds = event["progress"], event["seconds"]
    left = seconds * (1.0 - progress) / progress if progress > 0 else math.nan
    fields = [f"step {event['step']:,}", f"loss {_number(event['loss'], '.4f')}"]
    if event.get("bits_per_byte") is not None:
        fields.append(f"{event['bits_per_byte']:.4f} bpb")
    fields.append(f"{_number(event['tokens_per_second'], ',.0f')} tokens/s")
    return "  ".join([*fields, f"{clock(left)} left"])


def tokens_line(done: int, total: int, seconds: float) -> str:
    """Tokens done, speed and time left."""
    speed = done / seconds if seconds > 0 else math.nan
    left = (total - done) / speed if done and speed > 0 else math.nan
    return f"{done:,} of {total:,} tokens  {_number(speed, ',.0f')} tokens/s  {clock(left)} left"


def table(rows: Iterable[Sequence[object]], header: Sequence[str], width: int = WIDTH) -> str:
    """A plain-text table: figures to the right with thousands separators, the last column wrapped at `width`.

    Text that is a figure already, such as `1.530120`, is kept as it is. No line end follows the last line.
    """
    values = [list(row) for row in rows]
    cells = [[_cell(value) for value in row] for row in values]
    right = [_is_numeric([row[index] for row in values]) for index in range(len(header))]
    lines = [list(header), *cells]
    widths = [max(columns(line[index]) for line in lines) for index in range(len(header))]
    room = max(20, width - sum(widths[:-1]) - 2 * (len(widths) - 1))
    text = []
    for line in lines:
        pieces = textwrap.wrap(line[-1], room) or [""]
        first = [_pad(cell, space, side) for cell, space, side in zip(line, widths, right, strict=True)][:-1]
        last = _pad(pieces[0], widths[-1] if right[-1] else 0, right[-1])
        text.append("  ".join([*first, last]).rstrip())
        indent = " " * (sum(widths[:-1]) + 2 * (len(widths) - 1))
        text.extend(indent + piece for piece in pieces[1:])
    return "\n".join(text)


def result_table(result: Mapping[str, Any], report: Path | str | None = None) -> str:
    """The end of a run in about 30 lines of at most 79 columns, from what `result.json` holds."""
    blocks = [
        _headline(result),
        _beside(_scores(result), _seconds(result)),
        [*_beside(_bytes(result), _compressors(result)), *_worth(result.get("compression") or {})],
        _policies(result),
        _sample(str(result.get("sample") or "")),
        [f"report  {report}"] if report is not None else [],
    ]
    return "\n\n".join("\n".join(line.rstrip() for line in block) for block in blocks if block)


def pack_table(facts: Mapping[str, Any]) -> str:
    """What `caddie pack` made: its bytes by part, how full it is, what it is expected to cost, and what comes next."""
    size, cap, found = facts["artifact_bytes"], facts["cap_bytes"], facts["compression"]
    rows = [*facts["ledger"].items(), ("file", size), ("cap", cap)]
    loss = found["predicted_bits_per_byte"]
    lines = [table(rows, ["part", "bytes"]), ""]
    lines += [f"  {100 * size / cap:.2f} % of the cap", *_worth(found)]
    lines.append(f"  predicted loss by rounding: {'not measured' if loss is None else f'{loss:.4f} bits per byte'}")
    lines += [f"  {facts['seconds']:,.1f} seconds", "", f"written  {printable(facts['artifact'])}"]
    return "\n".join([*lines, *(f"next     {printable(command)}" for command in facts["next"])])


def score_table(result: Mapping[str, Any]) -> str:
    """What `caddie score` found: a column for each kind of scoring, and what must be known to read it."""
    columns = ("bits_per_byte", "bits_per_normalized_byte", "bits_per_table_byte", "nats_per_token")
    counts = ("tokens", "source_bytes", "normalized_bytes", "table_bytes")
    scores = [(kind, result[kind]) for kind in ("plain", "sliding", "adaptive", "user") if result.get(kind)]
    rows = [[name.replace("_", " "), *(f"{score[name]:.6f}" for _, score in scores)] for name in columns]
    rows += [[name.replace("_", " "), *(score[name] for _, score in scores)] for name in counts]
    rows.append(["seconds", *(f"{score['seconds']:.1f}" for _, score in scores)])
    lines = [table(rows, ["", *(kind for kind, _ in scores)]), ""]
    lines.append(f"bits per byte  {result['bits_per_byte']:.6f}")
    lines += textwrap.wrap(result["validation_set"], WIDTH)
    if not result["own_scoring"]:
        lines.append("Not the scoring that the artifact carries.")
    plain = result["plain"]
    if plain["table_bytes"] != plain["normalized_bytes"]:
        lines.append(
            f"The contest's table counts {plain['table_bytes']:,} bytes where the tokens stand for "
            f"{plain['normalized_bytes']:,}: its figure is wrong for this tokenizer."
        )
    return "\n".join(lines)


class Display:
    """The running commentary: a live bar on a terminal, a few plain lines elsewhere, nothing if quiet.

    A context manager, so that an exception or Ctrl-C gives the terminal its cursor back.
    """

    def __init__(
        self, quiet: bool = False, stream: TextIO | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.quiet = quiet
        self.stream = stream if stream is not None else sys.stderr
        self.now = now
        self._live: Progress | None = None
        self._task: TaskID | None = None
        self._file: TaskID | None = None
        self._last_half = -1
        self._phase = ""
        self._began = now()
        self._last_step = ""
        self._last_line = -math.inf
        self._last_tenth = -1

    def __enter__(self) -> Self:
        self._live = None if self.quiet else _live(self.stream)
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is None:
            return
        try:
            self._end_phase()
        finally:
            self._live.stop()
            self._live = None

    def note(self, text: str) -> None:
        """One line that stays."""
        line = printable(text)
        if self._live is not None:
            self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)
        elif not self.quiet:
            print(line, file=self.stream, flush=True)

    def phase(self, name: str) -> None:
        """Say that the work called `name` begins."""
        if self._live is not None:
            self._end_phase()
            self._task = self._live.add_task(printable(name), total=None, text="")
        else:
            self.note(name)
        self._phase, self._began, self._last_step = name, self.now(), ""
        self._last_line, self._last_tenth = -math.inf, -1

    def step(self, event: Mapping[str, Any]) -> None:
        """Show a `step` event of the log; off a terminal, only at each tenth of the budget or once a minute."""
        if not self.quiet:
            self._show(event["progress"], step_line(event))

    def forecast(self, event: Mapping[str, Any]) -> None:
        """Show a `forecast` event of the log; off a terminal at the beginning, in the middle and at the end."""
        size, cap, half = event["file_bytes"], event["cap_bytes"], int(2 * event["progress"])
        line = f"file about {size / 1e6:.2f} of {cap / 1e6:.2f} MB"
        line += f" · quantization about {event['gap_bits_per_byte']:+.4f} bpb"
        if self._live is not None:
            if self._file is None:
                self._file = self._live.add_task("file", total=None, text="")
            self._live.update(self._file, total=cap, completed=size, text=line)
        elif half > self._last_half:
            self.note(f"      {line}")
        self._last_half = half

    def tokens(self, done: int, total: int) -> None:
        """Show how many of the tokens of this phase are done."""
        if not self.quiet and total:
            self._show(done / total, tokens_line(done, total, self.now() - self._began))

    def doing(self, line: str) -> None:
        """Show what this phase is at; off a terminal at most one line in two seconds."""
        self._last_step = line = printable(line)
        if self._live is not None and self._task is not None:
            self._live.update(self._task, text=line)
        elif self._live is None and not self.quiet and self.now() - self._last_line >= SHORTEST_GAP:
            self._last_line = self.now()
            print(f"      {line}", file=self.stream, flush=True)

    def _show(self, progress: float, line: str) -> None:
        self._last_step = line
        if self._live is not None:
            if self._task is None:
                self._task = self._live.add_task("train", total=None, text="")
            self._live.update(self._task, total=1.0, completed=progress, text=line)
        elif self._is_due(progress):
            print(f"{progress:4.0%}  {line}", file=self.stream, flush=True)

    def _is_due(self, progress: float) -> bool:
        now, tenth = self.now(), int(progress * 10 + 1e-9)
        gap = now - self._last_line
        ends = progress >= 1.0 and self._last_tenth < 10
        if not (ends or (gap >= SHORTEST_GAP and tenth > self._last_tenth) or gap >= LONGEST_GAP):
            return False
        self._last_line, self._last_tenth = now, max(tenth, self._last_tenth)
        return True

    def _end_phase(self) -> None:
        if self._live is None or self._task is None:
            return
        self._live.remove_task(self._task)
        if self._file is not None:
            self._live.remove_task(self._file)
            self._file = None
        self._live.refresh()
        self._task = None
        line = f"{self._phase or 'train':<9}{self.now() - self._began:8,.1f} s"
        self.note(f"{line}   {self._last_step.rpartition('  ')[0]}".rstrip())


def _live(stream: TextIO) -> Progress | None:
    if not stream.isatty():
        return None
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(file=stream)
    if not console.is_interactive:
        return None
    return Progress(
        TextColumn("{task.description}", markup=False, style="bold"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[text]}", markup=False),
        console=console,
        expand=True,
        transient=True,
        refresh_per_second=2,  # every redraw takes the interpreter from training
        redirect_stdout=False,  # standard output carries the result and may be a file
        redirect_stderr=stream is sys.stderr,
    )


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _is_number(value: object) -> bool:
    if isinstance(value, str):
        return _FIGURE.fullmatch(value) is not None
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_numeric(column: list[object]) -> bool:
    present = [value for value in column if value is not None]
    return bool(present) and all(_is_number(value) for value in present)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.4f}" if isinstance(value, float) else printable(str(value))


def _pad(text: str, width: int, right: bool) -> str:
    space = " " * max(0, width - columns(text))
    return space + text if right else text + space


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _row(label: str, *cells: str, width: int = 20) -> str:
    return f"{crop(label, width):<{width}}" + "".join(f"{cell:>10}" for cell in cells)


def _beside(left: list[str], right: list[str]) -> list[str]:
    height = max(len(left), len(right))
    pad = [[*block, *[""] * (height - len(block))] for block in (left, right)]
    return [f"{a:<44}{b}" for a, b in zip(*pad, strict=True)]


def _headline(result: Mapping[str, Any]) -> list[str]:
    verified = {True: "verified", False: "VERIFICATION FAILED", None: "not verified"}[result.get("verified")]
    name = crop(printable(str(result["recipe"])), 20)
    bits = _number(result.get("bits_per_byte"), ".4f")
    lines = [f"{name}, seed {result['seed']}: {bits} bits per byte, {verified}"]
    if result.get("under_cap") is False:
        over = result["artifact_bytes"] - result["cap_bytes"]
        lines.append(f"THE ARTIFACT IS {over:,} BYTES OVER ITS CAP")
    return lines


def _scores(result: Mapping[str, Any]) -> list[str]:
    lines = [_row("bits per byte", "plain", "sliding")]
    for stage, label in _STAGES.items():
        entries = [result["scores"].get(f"{stage}_{way}") for way in ("plain", "sliding")]
        if any(entries):
            lines.append(_row("  " + label, *(_number(entry and entry["bits_per_byte"], ".4f") for entry in entries)))
    if adaptive := result["scores"].get("quantized_adaptive"):
        lines.append(_row("  packed, adaptive", _number(adaptive["bits_per_byte"], ".4f")))
    compression = result.get("compression") or {}
    losses = [compression.get(f"{way}_bits_per_byte") for way in ("predicted", "measured")]
    if losses != [None, None]:
        lines += [
            _row("", "predicted", "measured"),
            _row("  lost by rounding", *(_number(loss, ".4f") for loss in losses)),
        ]
    return lines


def _worth(compression: Mapping[str, Any]) -> list[str]:
    """Bits for each weight, and what more or fewer bytes are expected to change, on a line."""
    bits = compression.get("bits_per_weight")
    step, more, fewer = (compression.get(name) for name in ("step_bytes", *_STEPS))
    if bits is None:
        return []
    if step is None or more is None or fewer is None:
        return [f"  {bits:.2f} bits per weight"]
    return [f"  {bits:.2f} bits per weight; {step:,} bytes more {more:+.4f} bits per byte, fewer {fewer:+.4f}"]


def _seconds(result: Mapping[str, Any]) -> list[str]:
    rows = [_row("  " + name, _number(value, ",.1f"), width=23) for name, value in result["seconds"].items()]
    return ["seconds", *rows]


def _bytes(result: Mapping[str, Any]) -> list[str]:
    ledger = result["ledger"]
    shown = {_PARTS.get(name, name): value for name, value in ledger["parts"].items()}
    shown |= {"whole file": ledger["file_bytes"], "cap": result.get("cap_bytes")}
    return [_row("artifact bytes"), *(_row("  " + name, _number(value, ",")) for name, value in shown.items())]


def _compressors(result: Mapping[str, Any]) -> list[str]:
    shown = {"this artifact": result.get("bits_per_byte")}
    shown |= {name: entry["bits_per_byte"] for name, entry in (result.get("compressors") or {}).items()}
    rows = [_row("  " + name, _number(value, ".4f"), width=23) for name, value in shown.items()]
    return ["same held-out bytes, bits per byte", *rows]


def _policies(result: Mapping[str, Any]) -> list[str]:
    policies = result.get("policies") or []
    lines = [_policy("counted by policy", "bytes", "cap", "training s", "evaluation s")]
    for entry in policies:
        size, cap = entry["bytes"], entry["cap_bytes"]
        room = "-" if size is None or cap is None else "under" if size <= cap else f"{size - cap:,} over"
        clocks = (_charged(entry["training"]), _charged(entry["evaluation"]))
        lines.append(_policy("  " + printable(entry["name"]), _number(size, ","), room, *clocks))
    machines = dict.fromkeys(printable(entry["hardware"]) for entry in policies if entry["hardware"])
    if machines:
        lines.append(crop(f"  seconds of this machine; budgets are for {', '.join(machines)}", WIDTH))
    return lines if policies else []


def _policy(name: str, *cells: str) -> str:
    return _pad(crop(name, 20), 20, False) + "".join(
        f"{cell:>{width}}" for cell, width in zip(cells, _ACROSS, strict=True)
    )


def _charged(budget: Mapping[str, Any]) -> str:
    seconds, most = _number(budget["seconds"], ",.1f"), budget["budget_seconds"]
    if most is None or budget["seconds"] is None:
        return seconds
    return f"{seconds} {'over' if budget['within'] is False else 'of'} {most:,g}"


def _sample(text: str) -> list[str]:
    lines = [printable(line).rstrip() for line in text.splitlines()]
    shown = [line for line in lines if line][:5]
    return ["written by the packed artifact", *("  " + crop(line, WIDTH - 2) for line in shown)] if shown else []
