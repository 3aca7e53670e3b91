"""The field's words and their caddie names, read from `glossary.txt`; `docs/glossary.md` is made from them.

A line of the file is `word, synonym, … | meaning | place; place; …`, below the heading of its section. A place is a
setting (`PATH` or `PATH=VALUE`), a class of settings or one of its settings, a verb (`caddie …`), or a file. The first
place, and every other that is no `PATH=VALUE`, leads to a section of `docs/techniques.md` if it names a technique.
"""

import re
import unicodedata
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Term:
    """A word of the field."""

    names: tuple[str, ...]
    """The word, then its synonyms."""
    meaning: str
    """One sentence in plain words."""
    places: tuple[str, ...]
    """Settings, classes, verbs and files."""
    section: str
    """Heading that it stands under."""

    @property
    def links(self) -> list[str]:
        """Names of the techniques that the word stands for, if its places are techniques."""
        return [place.partition("=")[0] for place in self.places if place is self.places[0] or "=" not in place]


@cache
def terms() -> tuple[Term, ...]:
    """Return all words, in the order of the file."""
    found, section = [], ""
    for line in Path(__file__).with_name("glossary.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            section = line[2:]
        elif line:
            names, meaning, places = line.split(" | ")
            found.append(Term(tuple(names.split(", ")), meaning, tuple(places.split("; ")), section))
    return tuple(found)


@cache
def simple(word: str) -> str:
    """Return a word without case, hyphens, spaces, underscores and roles in a path, which writers vary; ² is 2."""
    word = re.sub(r"[^\w.*]|_", "", unicodedata.normalize("NFKC", word).lower())
    return re.sub(r"\b(optimizers|qat|quantizers)\.[^.]+", r"\1.*", word)


def lookup(word: str) -> list[Term]:
    """Return the terms that have this word among their names, in singular or plural."""
    wanted = simple(word).removesuffix("s")
    return [term for term in terms() if any(simple(name).removesuffix("s") == wanted for name in term.names)]
