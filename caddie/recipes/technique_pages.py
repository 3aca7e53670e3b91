"""Techniques as text: a section of the docs' page for each socket, and the verb's overview and details."""

import textwrap
from collections.abc import Iterator, Sequence

from caddie.recipes.glossary import lookup, simple
from caddie.recipes.techniques import Entry, Setting, Socket, Variant, find, sockets
from caddie.report.tables import WIDTH, crop


def overview() -> str:
    """Return a line of at most `WIDTH` columns for each socket, variant and setting that is a technique."""
    lines = []
    for socket in sockets():
        told = _told(socket.settings)
        for variant in socket.variants:
            told += [] if socket.alone else [f"  {title(variant)}: {_meaning(variant)}"]
            told += _told(variant.settings)
        more = f", {len(socket.paths) - 1} more" if len(socket.paths) > 1 else ""
        lines += ["", f"{title(socket)}  {socket.paths[0]}{more}", *told] if told else []
    lines += [
        "",
        "(base) marks what the recipe `baseline` has. `caddie techniques WORD`",
        "explains a name above, any setting, such as pack.cap_bytes, or a word such as",
        "XSA or bpb.",
    ]
    return "\n".join(crop(line, WIDTH) for line in lines[1:])


def details(word: str) -> str:
    """Return the texts of glossary and page about a word, wrapped at `WIDTH` columns; `UserError` if it is unknown."""
    lines = []
    for term in lookup(word):
        where = "See" if term.meaning.startswith("Not in caddie") else "In caddie"
        lines += ["", f"{', '.join(term.names)}: {term.meaning}", f"{where}: {', '.join(term.places)}"]
    for socket in find(word):
        lines += ["", *section(socket)]
    wrapper = textwrap.TextWrapper(WIDTH, break_long_words=False, break_on_hyphens=False)
    wrapped = []
    for line in lines[1:]:
        wrapper.subsequent_indent = " " * (len(line) - len(line.lstrip(" -")))  # a list's item below its first word
        wrapped += wrapper.wrap(line) or [""]
    return "\n".join(wrapped)


def section(socket: Socket) -> Iterator[str]:
    """Yield the lines of Markdown on a socket: its settings, its variants and theirs."""
    yield f"### {title(socket)}"
    yield from ("", ", ".join(f"`{path}`" for path in socket.paths))
    if not socket.alone:
        yield from ("", socket.what, *_settings(socket.settings))
    for variant in socket.variants:
        yield from () if socket.alone else ("", f"#### {title(variant)}")
        yield from ("", variant.what)
        yield from ["", *_known(variant)] if variant.why else ()
        yield from _settings(variant.settings)


def title(entry: Entry | Socket) -> str:
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
    """Return a line of the overview for each setting with a known purpose."""
    return [f"    {title(setting)}: {_meaning(setting)}" for setting in settings if setting.why]


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
