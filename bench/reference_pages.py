"""Text of `docs/techniques.md` and `docs/glossary.md`; `tests/recipes/test_techniques.py` keeps both up to date."""

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from caddie.config import Config
from caddie.recipes.glossary import Term, simple, terms
from caddie.recipes.technique_pages import section, title
from caddie.recipes.techniques import Socket, parts, sockets

ROOT = Path(__file__).resolve().parent.parent


def techniques_page() -> str:
    """Return the page `docs/techniques.md`."""
    lines = [
        "# Techniques",
        "",
        "Every setting of a recipe: the places where one of several parts can stand, the parts, and the settings of"
        " each, with what is known of them. Headings begin with the field's word ([glossary](glossary.md)) and end with"
        " the name in caddie.",
        "Effects are in bits per byte unless said, and minus is better. Those measured elsewhere are their authors';"
        " those measured here are verdicts of studies at scale, with 95 % intervals ([all claims](results/claims.md)).",
        "(base) marks what the recipe `baseline` has. Ideas beside the records are not yet decided: their recipes, and"
        " the seeds that a verdict needs, stand in [a table](results/frontier-ideas.md).",
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


@cache
def glossary_page() -> str:
    """Return the page `docs/glossary.md`."""
    lines = [
        "# Glossary",
        "",
        "The field's words, in the order of a run. The last column says what a recipe sets, the verb or the file.",
        "`caddie techniques WORD` finds by these words, in any case and with or without hyphens.",
        "",
        "Made from `caddie/recipes/glossary.txt`; a test checks that every name in it exists.",
    ]
    known, part = sockets(), ""
    for term in terms():
        if term.section != part:
            part = term.section
            lines += ["", f"## {part}", "", "| word | meaning | in caddie |", "|---|---|---|"]
        places = ", ".join([*(_link(place, term, known) for place in term.places), *_file(term, known)])
        lines.append(f"| {', '.join([f'**{term.names[0]}**', *term.names[1:]])} | {term.meaning} | {places} |")
    return "\n".join(lines) + "\n"


def _subclasses(cls: type[Config]) -> Iterator[type[Config]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


@cache
def _classes() -> dict[str, type[Config]]:
    """Return the package's configs by name."""
    return {cls.__name__: cls for cls in _subclasses(Config) if cls.__module__.startswith("caddie.")}


def _file(term: Term, known: Sequence[Socket]) -> list[str]:
    """Return the file of the class that a word stands for, unless its places name one."""
    if any(place.startswith("caddie/") for place in term.places):
        return []
    classes = _classes()
    first, _, value = term.places[0].partition("=")
    found = parts(known, {simple(first)}) if first in term.links else []
    held = [variant.name for one in found for variant in one.variants]
    names = [
        value.partition("(")[0],
        first.partition(".")[0],
        *(held if len(held) == 1 else [one.name for one in found]),
    ]
    for cls in (classes[name] for name in names if name in classes):
        return [f"`{Path(inspect.getfile(cls)).relative_to(ROOT)}`"]
    return []


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
    heading = title(named[0] if named else first if whole else first.variants[0])
    return f"[`{place}`](techniques.md#{re.sub(r'[^a-z0-9_ -]', '', heading.lower()).replace(' ', '-')})"
