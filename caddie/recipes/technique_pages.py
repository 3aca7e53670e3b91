"""Techniques and glossary as text: the pages of the docs, and their sections for a terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace

from caddie.recipes.glossary import Term, lookup, simple, terms
from caddie.recipes.techniques import Entry, Setting, Socket, Variant, find, parts, sockets
from caddie.report.tables import WIDTH, crop


def overview() -> str:
    """Return a line of at most `WIDTH` columns for each socket, variant and setting that is a technique."""
    lines = []
    for socket in sockets():
        more = f", {len(socket.paths) - 1} more" if len(socket.paths) > 1 else ""
        lines += ["", f"{_title(socket)}  {socket.paths[0]}{more}", *_told(socket.settings)]
        for variant in socket.variants:
            lines += [] if socket.alone else [f"  {_title(variant)}: {_meaning(variant)}"]
            lines += _told(variant.settings)
    lines += [
        "",
        "(base) marks what the recipe `baseline` has. `caddie techniques WORD` explains a name",
        "above, a setting such as model.block.mlp, or a word such as XSA or bpb.",
    ]
    return "\n".join(crop(line, WIDTH) for line in lines[1:])


def details(word: str) -> str:
    """Return what the glossary and the page say of a word, wrapped at `WIDTH` columns; `UserError` if it is unknown."""
    lines = []
    for term in lookup(word):
        lines += ["", f"{', '.join(term.names)}: {term.meaning}", f"In caddie: {', '.join(term.places)}"]
    for socket in find(word):
        lines += ["", *section(socket)]
    wrapper = textwrap.TextWrapper(WIDTH, break_long_words=False, break_on_hyphens=False)
    wrapped = []
    for line in lines[1:]:
        wrapper.subsequent_indent = " " * (len(line) - len(line.lstrip(" -")))  # a list's item below its first word
        wrapped += wrapper.wrap(line) or [""]
    return "\n".join(wrapped)


def techniques_page() -> str:
    """Return the page `docs/techniques.md`."""
    lines = [
        "# Techniques",
        "",
        "Every place in a recipe where one of several parts can stand, and every part and setting of which more is"
        " known. Headings begin with the field's word ([glossary](glossary.md)) and end with the name in caddie.",
        "Effects are in bits per byte unless said, and minus is better; those measured elsewhere are their authors'.",
        "(base) marks what the recipe `baseline` has.",
        "",
        "`caddie techniques WORD` prints a section. The page is made from the classes; a test fails when it is old.",
    ]
    part = ""
    for socket in sockets():
        if (top := socket.paths[0].split(".")[0]) != part:
            part = top
            lines += ["", f"## {part}"]
        lines += ["", *section(replace(socket, variants=tuple(one for one in socket.variants if one.shipped)))]
    return "\n".join(lines) + "\n"


def glossary_page() -> str:
    """Return the page `docs/glossary.md`."""
    lines = [
        "# Glossary",
        "",
        "The field's words, in the order of the line. The last column says what a recipe sets, the verb or the file.",
        "`caddie techniques WORD` finds by these words, in any case and with or without hyphens.",
        "",
        "Made from `caddie/recipes/glossary.txt`; a test checks that every name in it exists.",
    ]
    known, part = sockets(), ""
    for term in terms():
        if term.section != part:
            part = term.section
            lines += ["", f"## {part}", "", "| word | meaning | in caddie |", "|---|---|---|"]
        places = ", ".join(_link(place, term, known) for place in term.places)
        lines.append(f"| {', '.join([f'**{term.names[0]}**', *term.names[1:]])} | {term.meaning} | {places} |")
    return "\n".join(lines) + "\n"


def section(socket: Socket) -> Iterator[str]:
    """Yield the lines of Markdown on a socket: its settings, its variants and theirs."""
    yield f"### {_title(socket)}"
    yield from ("", ", ".join(f"`{path}`" for path in socket.paths))
    if not socket.alone:
        yield from ("", socket.what, *_settings(socket.settings))
    for variant in socket.variants:
        yield from () if socket.alone else ("", f"#### {_title(variant)}")
        yield from ("", variant.what)
        yield from ["", *_known(variant)] if variant.why else ()
        yield from _settings(variant.settings)


def _title(entry: Entry | Socket) -> str:
    """Return the field's word, if there is one, and the name in caddie."""
    base = " (base)" if isinstance(entry, Variant) and entry.base else ""
    return f"{_word(entry)}{entry.name.rpartition('.')[2]}{base}"


def _word(entry: Entry | Socket) -> str:
    """Return the field's word and a comma; nothing if it is the name in caddie."""
    names = entry.term.names if entry.term else ()
    return "" if simple(entry.name.rpartition(".")[2]) in map(simple, names) or not names else f"{names[0]}, "


def _meaning(entry: Entry) -> str:
    return entry.term.meaning if entry.term else entry.what


def _told(settings: Sequence[Setting]) -> list[str]:
    """Return a line of the overview for each setting of which something is known."""
    return [f"    {_title(setting)}: {_meaning(setting)}" for setting in settings if setting.why]


def _settings(settings: Sequence[Setting]) -> Iterator[str]:
    if settings:
        yield ""
    for setting in settings:
        default = f", default `{setting.default}`" if setting.default else ""
        yield f"- {_word(setting)}`{setting.last}` ({setting.type}{default}): {setting.what}"
        yield from (f"  {line}" for line in _known(setting)) if setting.why else ()


def _known(entry: Entry) -> list[str]:
    return [
        f"- why: {entry.why}",
        f"- source: {entry.source}",
        f"- measured elsewhere: {entry.elsewhere or 'not known'}",
        f"- measured here: {entry.here}",
    ]


def _link(place: str, term: Term, known: Sequence[Socket]) -> str:
    """Return a place as Markdown, with a link to its page or to its section of the techniques."""
    if place.startswith("docs/"):
        return f"[{place[5:]}]({place[5:]})"
    name = place.partition("=")[0]
    owner = name.partition(".")[0] if name[0].isupper() else name  # a class, whose settings have no headings
    found = parts(known, {simple(owner)}) if name in term.links else []
    if not found:
        return f"`{place}`"
    named = [one if one.alone else variant for one in found for variant in one.variants if variant.name == owner]
    first = found[0]
    whole = first.alone or first in known or not first.variants
    heading = _title(named[0] if named else first if whole else first.variants[0])
    return f"[`{place}`](techniques.md#{re.sub(r'[^a-z0-9_ -]', '', heading.lower()).replace(' ', '-')})"
