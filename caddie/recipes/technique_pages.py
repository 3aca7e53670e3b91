"""What is known of every technique as text: a line each or all of it for a terminal, and the page of the docs."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from caddie.recipes.techniques import Entry, Setting, Socket, Variant, sockets
from caddie.report.tables import crop

WIDTH = 100
"""Columns of everything printed here."""


def overview(known: Sequence[Socket]) -> str:
    """One line for each socket, variant and setting that is a technique, of at most `WIDTH` columns."""
    lines = []
    for socket in known:
        more = f", {len(socket.paths) - 2} more" if len(socket.paths) > 2 else ""
        lines.append(f"{socket.name}  {', '.join(socket.paths[:2])}{more}")
        lines += [f"    {setting.last}: {setting.what}" for setting in socket.settings if setting.why]
        for variant in socket.variants:
            lines.append(f"  {'' if socket.alone else _title(variant) + ': '}{variant.what}")
            lines += [f"    {setting.last}: {setting.what}" for setting in variant.settings if setting.why]
        lines.append("")
    lines.append("(base) is the contest's baseline. `caddie techniques NAME` says more.")
    return "\n".join(crop(line, WIDTH) for line in lines)


def details(known: Sequence[Socket]) -> str:
    """All that is known, as text of at most `WIDTH` columns."""
    blocks = []
    for socket in known:
        lines = _wrapped("", ", ".join(socket.paths), f"{socket.name}  ")
        if not socket.alone:
            blocks.append([*lines, *_wrapped("  ", socket.what), *_setting_lines(socket.settings)])
        for variant in socket.variants:
            title = lines if socket.alone else [_title(variant)]
            blocks.append([*title, *_wrapped("  ", variant.what), *_known(variant), *_setting_lines(variant.settings)])
    return "\n\n".join("\n".join(lines) for lines in blocks)


def markdown() -> str:
    """The page `docs/techniques.md`."""
    lines = [
        "# Techniques",
        "",
        "Every place in a recipe where one of several parts can stand, and every part and setting of which more is"
        " known.",
        "Effects are in bits per byte unless said, and minus is better; those measured elsewhere are their authors'.",
        "What is marked (base) is the contest's baseline.",
        "",
        "This page is what `caddie techniques` knows, made from the classes; a test fails when it is out of date.",
    ]
    section = ""
    for socket in sockets():
        if (top := socket.paths[0].split(".")[0]) != section:
            section = top
            lines += ["", f"## {section}"]
        lines += ["", f"### {socket.name}", "", ", ".join(f"`{path}`" for path in socket.paths)]
        if not socket.alone:
            lines += ["", socket.what, *_markdown_settings(socket.settings)]
        for variant in filter(lambda variant: variant.shipped, socket.variants):
            lines += [] if socket.alone else ["", f"#### {_title(variant)}"]
            lines += ["", variant.what, *_markdown_known(variant), *_markdown_settings(variant.settings)]
    return "\n".join(lines) + "\n"


def _title(variant: Variant) -> str:
    return f"{variant.name} (base)" if variant.base else variant.name


def _labelled(entry: Entry) -> list[tuple[str, str]]:
    return [
        ("why", entry.why),
        ("source", entry.source),
        ("measured elsewhere", entry.elsewhere or "not known"),
        ("measured here", entry.here),
    ]


def _wrapped(indent: str, text: str, first: str = "") -> list[str]:
    return textwrap.wrap(f"{first}{text}", WIDTH, initial_indent=indent, subsequent_indent=indent + " " * len(first))


def _known(entry: Entry, indent: str = "  ") -> list[str]:
    """Lines on why and whence, none where nothing is known."""
    rows = _labelled(entry) if entry.why else []
    return [line for label, text in rows for line in _wrapped(indent, text, f"{label:20}")]


def _setting_lines(settings: Sequence[Setting]) -> list[str]:
    lines = []
    for setting in settings:
        lines += ["", *_wrapped("  ", f"{setting.last}={setting.default}  ({setting.type})")]
        lines += [*_wrapped("      ", setting.what), *_known(setting, "      ")]
    return lines


def _markdown_known(entry: Entry) -> list[str]:
    return ["", *(f"- {label}: {text}" for label, text in _labelled(entry))] if entry.why else []


def _markdown_settings(settings: Sequence[Setting]) -> list[str]:
    lines = ["", "| setting | default | takes | what |", "|---|---|---|---|"] if settings else []
    for setting in settings:
        default = f"`{setting.default}`" if setting.default else ""
        cells = (f"`{setting.last}`", default, setting.type, setting.what)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    for setting in settings:
        if setting.why:
            lines += ["", f"`{setting.last}`:", *_markdown_known(setting)]
    return lines
