"""Text for a terminal: tables and summaries.

The caller prints what these return. Text that a model or a file name supplies is stripped of control characters first,
so it cannot steer the terminal.
"""

import re
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from caddie.errors import count
from caddie.report.charts import is_finite
from caddie.report.read import pick, training_notes
from caddie.report.verification import describe_checks, verified

WIDTH = 79
"""Most columns of everything printed here; a narrower terminal has less."""

LEDGER_WORDS = {"config": "model config", "source": "source code"}
"""Names on a terminal of the parts of an artifact that have other names in `result.json`."""
_VERIFIED = {"yes": "verified", "no": "VERIFICATION FAILED", "inconclusive": "verification inconclusive"}
_UNMENTIONED = 0.001
"""Share of a text's bytes by which another count may differ unmentioned, if the text is not the contest's."""
LONGEST_LINE = 600
"""Most characters of an error's line."""


def duration(seconds: float) -> str:
    """Format a duration in the unit that suits it."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:,.1f} min" if seconds < 6000 else f"{seconds / 3600:,.1f} h"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table whose cells may hold Markdown."""
    return markdown_lines(header, ([str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows))


def markdown_lines(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table of cells that are escaped already."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))


def one_line(message: str) -> str:
    """Return an error message as one line of bounded length."""
    line = printable(" ".join(message.split()))
    if len(line) > LONGEST_LINE:  # what is wrong stands at the beginning, what to do at the end
        line = f"{line[: LONGEST_LINE // 2]} ... {line[-LONGEST_LINE // 2 :]}"
    return line


def printable(text: str) -> str:
    """Return `text` as one line, with every character that could steer a terminal replaced."""
    line = text.expandtabs(4).replace("\r\n", " ").replace("\n", " ")
    return "".join(character if character.isprintable() else "\ufffd" for character in line)


def columns(text: str) -> int:
    """Return the terminal columns of `text`: two for wide East Asian characters, none for combining ones."""
    from rich.cells import cell_len

    return cell_len(text)


def crop(text: str, width: int) -> str:
    """Shorten `text` to `width` columns, with `...` at its end, if it is longer."""
    from rich.cells import set_cell_size

    return text if columns(text) <= width else set_cell_size(text, max(0, width - 3)).rstrip() + "..."


def terminal_width() -> int:
    """Return the columns to print in: those of the terminal less one, at most `WIDTH`; `WIDTH` for a file."""
    return max(20, min(WIDTH, shutil.get_terminal_size((WIDTH + 1, 24)).columns - 1))


def table(rows: Iterable[Sequence[object]], header: Sequence[str], width: int | None = None) -> str:
    """Format a plain-text table: figures to the right with thousands separators, the last column wrapped at `width`.

    `width` is that of the terminal unless given. Where the columns do not fit a narrow one, each row becomes a block
    with a line for each column. Text that is a figure already, such as `1.530120`, is kept as it is. No line end
    follows the last line.
    """
    width = width or terminal_width()
    values = [list(row) for row in rows]
    lines = [list(header), *([_cell(value) for value in row] for row in values)]
    right = [_is_numeric([row[index] for row in values]) for index in range(len(header))]
    widths = [max(columns(line[index]) for line in lines) for index in range(len(header))]
    indent = sum(widths[:-1]) + 2 * (len(widths) - 1)
    if width < WIDTH and indent + (widths[-1] if right[-1] else min(20, widths[-1])) > width:
        stacked = (line for row in lines[1:] for line in _stacked(row, header, width))
        return "\n".join([*filter(None, header[:1]), *stacked])
    text = []
    for line in lines:
        first, *more = textwrap.wrap(line[-1], max(20, width - indent)) or [""]
        cells = [_pad(cell, space, side) for cell, space, side in zip(line, widths, right, strict=True)][:-1]
        text.append("  ".join([*cells, _pad(first, widths[-1] if right[-1] else 0, right[-1])]).rstrip())
        text += [" " * indent + piece for piece in more]
    return "\n".join(text)


def _stacked(row: Sequence[str], header: Sequence[str], width: int) -> list[str]:
    """Return a row as lines: its first cell, and each of the others below it, behind the name of its column."""
    lines = textwrap.wrap(row[0], width) or ["-"]
    for name, cell in zip(header[1:], row[1:], strict=True):
        if cell:
            said = f"{name}  {cell}" if name else cell
            lines += textwrap.wrap(said, width, initial_indent="  ", subsequent_indent="    ")
    return lines


def result_table(result: Mapping[str, Any], report: Path | str | None = None) -> str:
    """Format a result in about 30 lines of at most 79 columns, or in more for a narrow terminal."""
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
    """Format the facts of `caddie pack`: bytes by part, share of the cap, expected loss and the next commands."""
    size, cap, found = facts["artifact_bytes"], facts["cap_bytes"], facts["compression"]
    rows = [*facts["ledger"].items(), ("file", size), ("cap", cap)]
    loss = found["predicted_bits_per_byte"]
    lines = [table(rows, ["part", "bytes"]), ""]
    lines += [f"  {100 * size / cap:.2f} % of the cap", *_worth(found)]
    lines.append(f"  predicted quantization gap: {'not measured' if loss is None else f'{loss:.4f} bits per byte'}")
    lines += [f"  {facts['seconds']:,.1f} seconds", "", f"written  {printable(facts['artifact'])}"]
    return "\n".join([*lines, *(f"next     {printable(command)}" for command in facts["next"])])


def score_table(result: Mapping[str, Any]) -> str:
    """Format the scores of `caddie score`: a column for each kind of scoring, and notes."""
    plain, official = result["plain"], result["validation_set"]
    most = 0 if official else _UNMENTIONED * plain["source_bytes"]
    kinds = [kind for kind in ("normalized", "table") if abs(plain[f"{kind}_bytes"] - plain["source_bytes"]) > most]
    columns = ("bits_per_byte", *(f"bits_per_{kind}_byte" for kind in kinds), "nats_per_token")
    counts = ("tokens", "source_bytes", *(f"{kind}_bytes" for kind in kinds))
    scores = [(kind, result[kind]) for kind in ("plain", "sliding", "adaptive", "user") if result.get(kind)]
    rows = [[name.replace("_", " "), *(f"{score[name]:.6f}" for _, score in scores)] for name in columns]
    rows += [[name.replace("_", " "), *(score[name] for _, score in scores)] for name in counts]
    rows.append(["seconds", *(f"{score['seconds']:.1f}" for _, score in scores)])
    lines = [table(rows, ["", *(kind for kind, _ in scores)]), ""]
    doubt = "" if result.get("audited") is not False else "  (not audited; the last lines say why)"
    lines.append(f"bits per byte  {result['bits_per_byte']:.6f}{doubt}")
    lines += textwrap.wrap(official or "", terminal_width())
    if not result["own_scoring"]:
        lines.append("Not the scoring that the artifact carries.")
    lines += _lost(result["changed_documents"])
    notes = result.get("notes") or []
    if "table" in kinds:
        table_bytes = f"by the contest's table of each token's bytes they are {plain['table_bytes']:,}"
        notes = [f"The text's own {plain['source_bytes']:,} bytes count; {table_bytes}.", *notes]
    lines += [line for note in notes for line in textwrap.wrap(note, terminal_width())]
    return "\n".join(lines)


def _is_numeric(column: list[object]) -> bool:
    """True if a column holds numbers, or text that is figures already, and nothing else but None."""
    present = [value for value in column if value is not None]
    return bool(present) and all(
        re.fullmatch(r"[-+]?[\d,]+(\.\d+)?", value)
        if isinstance(value, str)
        else isinstance(value, (int, float)) and not isinstance(value, bool)
        for value in present
    )


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


def number(value: float | None, form: str) -> str:
    """Format the value, or return `-` for None."""
    return "-" if value is None else format(value, form)


def _row(label: str, *cells: str, width: int = 20) -> str:
    return f"{crop(label, width):<{width}}" + "".join(f"{cell:>10}" for cell in cells)


def _beside(left: list[str], right: list[str]) -> list[str]:
    if terminal_width() < WIDTH:
        return [*left, "", *right]
    return [f"{a:<44}{b}" for a, b in zip_longest(left, right, fillvalue="")]


def _headline(result: Mapping[str, Any]) -> list[str]:
    name = crop(printable(str(result["recipe"])), 20)
    bits, outcome = number(result.get("bits_per_byte"), ".4f"), verified(result)
    said = _VERIFIED.get(outcome or "", "not verified")
    lines = [f"{name}, seed {result['seed']}: {bits} bits per byte (lower is better), {said}"]
    if why := result.get("not_verified_because"):
        lines.append(f"Not verified: {printable(str(why))}.")
    elif outcome == "inconclusive":
        lines.append(f"Verification {printable(describe_checks(result))}.")
    if result.get("under_cap") is False:
        over = result["artifact_bytes"] - result["cap_bytes"]
        lines.append(f"THE ARTIFACT IS {over:,} BYTES OVER ITS CAP")
    lines += [*map(printable, training_notes(result)), *_lost(result["corpus"].get("changed_documents"))]
    return [part for line in lines for part in textwrap.wrap(line, terminal_width())]


def _lost(changed_documents: int | None) -> list[str]:
    """Return a note if the tokenizer does not round-trip."""
    if not changed_documents:
        return []
    return [f"Lossy tokenizer: it changes {count(changed_documents, 'document')}."]


def _scores(result: Mapping[str, Any]) -> list[str]:
    lines = [_row("bits per byte", "plain", "sliding")]
    stages = (("trained", "trained"), ("averaged", "averaged"), ("quantized", "quantized, packed"))
    for stage, label in stages:
        entries = [result["scores"].get(f"{stage}_{way}") for way in ("plain", "sliding")]
        if any(entries):
            lines.append(_row("  " + label, *(number(entry and entry["bits_per_byte"], ".4f") for entry in entries)))
    if adaptive := result["scores"].get("quantized_adaptive"):
        sliding = ["-"] if result["scores"].get("quantized_sliding") else []  # it adapts over the same windows
        lines.append(_row("  packed, adaptive", *sliding, number(adaptive["bits_per_byte"], ".4f")))
    if result["scores"].get("quantized_sliding"):
        lines.append("  sliding windows overlap: a longer past")
    compression = result.get("compression") or {}
    losses = [compression.get(f"{way}_bits_per_byte") for way in ("predicted", "measured")]
    if losses != [None, None]:
        lines += [_row("", "predicted", "measured")]
        lines += [_row("  quantization gap", *(number(loss, "z.4f") for loss in losses))]
    return lines


def _worth(compression: Mapping[str, Any]) -> list[str]:
    """Format bits per weight, and the expected effect of more or fewer bytes."""
    names = ("bits_per_weight", "step_bytes", "step_more_bits_per_byte", "step_fewer_bits_per_byte")
    bits, step, more, fewer = (compression.get(name) for name in names)
    if bits is None:
        return []
    if step is None or more is None or fewer is None:
        return [f"  {bits:.2f} bits a weight"]
    said = f"{bits:.2f} bits a weight; {step:,} bytes more: about {more:+z.4f} bpb, fewer: {fewer:+z.4f}"
    return textwrap.wrap(said, terminal_width(), initial_indent="  ", subsequent_indent="  ")


def _seconds(result: Mapping[str, Any]) -> list[str]:
    shown = {f"  {name.replace('_', ' ')}": number(value, ",.1f") for name, value in result["seconds"].items()}
    if is_finite(steps := pick(result, "training", "steps")):
        shown = {f"  train, {count(int(steps), 'step')}" if name == "  train" else name: shown[name] for name in shown}
    return ["seconds", *(_row(name, value, width=23) for name, value in shown.items())]


def _bytes(result: Mapping[str, Any]) -> list[str]:
    ledger = result["ledger"]
    shown = {LEDGER_WORDS.get(name, name): value for name, value in ledger["parts"].items()}
    shown |= {"whole file": ledger["file_bytes"], "cap": result.get("cap_bytes")}
    return [_row("artifact bytes"), *(_row("  " + name, number(value, ",")) for name, value in shown.items())]


def _compressors(result: Mapping[str, Any]) -> list[str]:
    shown: dict[str, Any] = {"this artifact": result.get("bits_per_byte")}
    shown |= {name: entry["bits_per_byte"] for name, entry in (result.get("compressors") or {}).items()}
    rows = [_row("  " + name, number(value, ".4f"), width=23) for name, value in shown.items()]
    if is_finite(own := shown.pop("this artifact")) and shown and own > min(shown.values()):
        rows.append(f"  {crop(min(shown, key=lambda name: shown[name]), 12)} is ahead; train longer")
    return ["same held-out bytes, bits per byte", *rows]


def _policies(result: Mapping[str, Any]) -> list[str]:
    if not (policies := result.get("policies")):
        return []
    rows = [("by the rules of", "bytes", "cap", "training s", "evaluation s")]
    for entry in policies:
        size, cap = entry["bytes"], entry["cap_bytes"]
        room = number(cap, ",") if size is None or cap is None else f"{'over' if size > cap else 'of'} {cap:,}"
        clocks = (_charged(entry["training"]), _charged(entry["evaluation"]))
        rows.append(("  " + printable(entry["name"]), number(size, ","), room, *clocks))
    machines = dict.fromkeys(printable(entry["hardware"]) for entry in policies if entry["hardware"])
    notes = [f"{printable(entry['name'])}: {printable(entry['why'])}" for entry in policies if entry.get("why")]
    notes += [f"seconds of this machine; budgets are for {', '.join(machines)}"] if machines else []
    if terminal_width() < WIDTH:
        wrapped = (line for note in notes for line in textwrap.wrap(f"  {note}", terminal_width()))
        return [*table(rows[1:], rows[0]).split("\n"), *wrapped]
    lines = [f"{_pad(crop(name, 20), 20, False)}{a:>12}{b:>17} {c:>14} {d:>14}" for name, a, b, c, d in rows]
    return [*lines, *(crop(f"  {note}", WIDTH) for note in notes)]


def _charged(budget: Mapping[str, Any]) -> str:
    seconds, most = number(budget["seconds"], ",.1f"), budget["budget_seconds"]
    if most is None or budget["seconds"] is None:
        return seconds
    return f"{seconds} {'over' if budget['within'] is False else 'of'} {most:,g}"


def _sample(text: str) -> list[str]:
    written = filter(None, (printable(line).rstrip() for line in text.splitlines()))
    lines = ["  " + crop(line, terminal_width() - 2) for line in islice(written, 5)]
    return ["written by the packed artifact", *lines] if lines else []
