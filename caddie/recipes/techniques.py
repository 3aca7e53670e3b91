"""Everything known of each technique: purpose, settings, source, effect elsewhere and here.

Sockets and variants are found by walking the settings of a recipe. Settings and what they do are read from the classes;
purpose, source and effects that others measured stand in `techniques.txt` beside this file, effects measured here in
`measured.json`, by name, as settings of `Measurement`. So the code that an artifact carries holds none of it.
"""

import dataclasses
import inspect
import json
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from caddie.config import Config, Count, Range, field_types, show
from caddie.config import variants as variants_of
from caddie.config.field_docs import descriptions
from caddie.config.hints import setting_called
from caddie.errors import UserError, suggest
from caddie.recipes.catalog import find_shipped, shipped
from caddie.recipes.glossary import Term, lookup, simple, terms
from caddie.recipes.published import rows
from caddie.recipes.recipe import Recipe

NOT_MEASURED = "not measured"
"""Text for a technique without an entry in `measured.json`."""


class Facts(NamedTuple):
    """Facts about a class or one of its settings that its docstring does not state."""

    why: str
    """Its purpose, in one sentence."""
    source: str
    """Paper or record."""
    elsewhere: str = ""
    """Effects that others measured, in bits per byte unless said; minus is better."""


class Measurement(Config):
    """Effect of a technique in a study at scale, in twins that make all the steps of a public run."""

    difference: float
    """Mean over seeds of the score with the change minus the score without it, in bits per byte; minus is better."""
    interval: tuple[float, float] | None
    """95 % interval of the difference; none where the scores are the same by construction."""
    seeds: Count
    """Number of random seeds, with the change and without it."""
    verdict: str
    """Verdict: better, worse, same (within 0.002), or undecided."""
    entry: str
    """Entry of the study."""
    study: str
    """The study, as `caddie study` takes it."""

    def __str__(self) -> str:
        interval = "{:+.4f} to {:+.4f}, ".format(*self.interval) if self.interval else ""
        return f"{self.verdict}, {self.difference:+.4f} ({interval}{self.seeds:,} seeds): {self.entry}, {self.study}"


Measured = Mapping[str, Sequence[Measurement]]
"""Effects by the name of the technique."""


@dataclass(frozen=True)
class Entry:
    """A class or one of its settings."""

    name: str
    """`Class` or `Class.setting`, as in `measured.json`."""
    what: str
    """First paragraph of its documentation."""
    term: Term | None
    """The field's word for it."""
    why: str
    """Its purpose; empty if nothing is known, as are the two that follow."""
    source: str
    """Paper or record."""
    elsewhere: str
    """Effect that others measured."""
    here: str
    """Effect measured here, or `NOT_MEASURED`."""

    @property
    def last(self) -> str:
        """Name of the setting without its class."""
        return self.name.rpartition(".")[2]

    def mentions(self, word: str) -> bool:
        """Return True if a word of its texts begins with `word`, of three letters or more."""
        texts = " ".join((self.what, self.why, self.source, self.elsewhere))
        return len(word) > 2 and re.search(rf"(?<!\w){re.escape(word)}", texts, re.IGNORECASE) is not None


@dataclass(frozen=True)
class Setting(Entry):
    """A setting of a socket or of a variant."""

    type: str
    """Type and bounds, in words."""
    default: str
    """Default value; empty if there is none."""


@dataclass(frozen=True)
class Variant(Entry):
    """A class that fits a socket."""

    base: bool
    """True if the recipe `baseline` has it."""
    shipped: bool
    """True if it is part of caddie, and so of the page."""
    settings: tuple[Setting, ...]
    """Settings that the socket lacks, or whose facts differ from the socket's."""


@dataclass(frozen=True)
class Socket:
    """A place in a recipe and the classes that fit it, or the one class that does."""

    name: str
    """Its class."""
    what: str
    """First paragraph of its documentation."""
    term: Term | None
    """The field's word for it."""
    paths: tuple[str, ...]
    """Paths in a recipe; `*` is any role or pattern."""
    settings: tuple[Setting, ...]
    """Settings of all its variants."""
    variants: tuple[Variant, ...]
    """Classes that fit."""

    @property
    def all_settings(self) -> list[Setting]:
        """Settings of the socket, which all variants have, and those of each variant."""
        return [*self.settings, *(setting for variant in self.variants for setting in variant.settings)]

    @property
    def alone(self) -> bool:
        """True if nothing but the class itself fits."""
        return [variant.name for variant in self.variants] == [self.name]


def sockets() -> list[Socket]:
    """Return every socket with all that is known of it, in the order of a recipe's settings."""
    places: dict[type[Config], list[str]] = {}
    for path, cls in _places(Recipe, "", ()):
        places.setdefault(cls, []).append(path)
    measured = measurements()
    base = set(re.findall(r'"kind": "(\w+)"', json.dumps(shipped()["baseline"].to_json())))
    return [
        _socket(cls, tuple(dict.fromkeys(paths)), base, measured)
        for cls, paths in places.items()
        if variants_of(cls) and paths[0] != "public.*"  # results are no settings
    ]


@cache
def table() -> dict[str, Facts]:
    """Return the lines of `techniques.txt` by name: `Class` or `Class.setting`."""
    return {name: Facts(*facts) for name, *facts in rows("techniques.txt")}


def facts_of(cls: type[Config], setting: str = "") -> Facts:
    """Return the facts about a class or its setting, its own or those of a base class; empty if there are none."""
    names = (f"{base.__name__}.{setting}" if setting else base.__name__ for base in cls.__mro__)
    return next((table()[name] for name in names if name in table()), Facts("", ""))


def measurements() -> Measured:
    """Return the effects measured here, by the name of the technique."""
    text = Path(__file__).with_name("measured.json").read_text(encoding="utf-8")
    return {name: [Measurement.from_json(one) for one in values] for name, values in json.loads(text).items()}


def find(word: str) -> list[Socket]:
    """Return the techniques of a name or of a word of the field; none for a word that is no technique.

    Names are those of sockets, variants and settings, and paths in a recipe; case, hyphens and spaces do not matter.
    A socket's name gives the whole socket, any other name its part of a socket. Raises `UserError` for an unknown word.
    """
    known, words = sockets(), lookup(word)
    wanted = {simple(setting_called(word) or word), *(simple(link) for term in words for link in term.links)}
    if not (found := parts(known, wanted)) and not words:
        if word.isidentifier() and find_shipped(word):
            raise UserError(f"{word} is a recipe, not a technique; `caddie diff {word}` lists what it changes")
        entries = [one for socket in known for one in (*socket.variants, *socket.all_settings)]
        names = [*shipped(), *(name for term in terms() for name in term.names), *(entry.last for entry in entries)]
        for socket in known:
            settings = [f"{path}.{setting.last}" for path in socket.paths for setting in socket.all_settings]
            names += [socket.name, *socket.paths, *settings]
        if near := ", ".join(list(dict.fromkeys(one.name for one in entries if one.mentions(word)))[:3]):
            raise UserError(f"no technique is called {word}, but the word is in the text of {near}")
        raise UserError(f"no technique {word or 'named'}{suggest(word, names, most=3)}; `caddie techniques` lists them")
    return found


def parts(known: Sequence[Socket], wanted: set[str]) -> list[Socket]:
    """Return the sockets that these simple words name, then the parts of other sockets that the remaining words name.

    A socket's name that is also a setting of some class finds the socket alone, which prints that setting too. The path
    of a number finds both: the number, and the schedules that may stand there.
    """
    whole = wanted & {name for socket in known for name in _names(socket)}
    numbers = {
        simple(f"{path}.{setting.last}")
        for socket in known
        for setting in socket.all_settings
        if "number" in setting.type
        for path in socket.paths
    }
    rest = wanted - (whole - numbers)
    found = (socket if whole & _names(socket) else _part(socket, rest) for socket in known)
    return sorted(filter(None, found), key=lambda part: bool(whole & _names(part)))


# From classes to what is known of them


def _places(cls: type[Config], path: str, above: tuple[type[Config], ...]) -> Iterator[tuple[str, type[Config]]]:
    """Yield each path below a class with the type of config there, in the order of the settings."""
    for name, annotation in field_types(cls).items():
        for steps, found in _configs(annotation):
            here = ".".join(filter(None, (path, name, *steps)))
            yield here, found
            for variant in variants_of(found).values():
                if variant not in above:
                    yield from _places(variant, here, (*above, variant))


def _configs(annotation: Any) -> Iterator[tuple[tuple[str, ...], type[Config]]]:
    """Yield the config classes in a type, each with the steps that lead to it."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        yield (), annotation
        return
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (None, Literal):
        return
    steps = () if origin in (Annotated, Union, types.UnionType) else ("*",)
    for argument in arguments:
        for further, found in _configs(argument):
            yield (*steps, *further), found


def _socket(cls: type[Config], paths: tuple[str, ...], base: set[str], measured: Measured) -> Socket:
    def entry(of: type[Config], setting: str, text: str) -> dict[str, Any]:
        name = f"{of.__name__}.{setting}" if setting else of.__name__
        called = (name, *(f"{path}.{setting}" for path in paths if setting))
        return {
            "name": name,
            "what": _paragraph(text),
            "term": next((words[key] for key in map(simple, called) if key in words), None),
            **facts_of(of, setting)._asdict(),
            "here": "; ".join(map(str, measured.get(name, [NOT_MEASURED]))),
        }

    def settings(of: type[Config], names: Sequence[str]) -> tuple[Setting, ...]:
        documented, types = descriptions(of), field_types(of)
        return tuple(
            Setting(
                **entry(of, field.name, documented.get(field.name, "")),
                type=_type(types[field.name]),
                default=_default(field),
            )
            for field in dataclasses.fields(of)
            if field.name in names
        )

    words = {simple(term.links[0]): term for term in reversed(terms())}
    shared = list(field_types(cls)) if inspect.isabstract(cls) else []
    found = tuple(
        Variant(
            **entry(variant, "", inspect.getdoc(variant) or ""),
            base=variant.__name__ in base,
            shipped=variant.__module__.startswith("caddie."),
            settings=settings(
                variant,
                [
                    name
                    for name in field_types(variant)
                    if name not in shared or facts_of(variant, name) != facts_of(cls, name)
                ],
            ),
        )
        for variant in variants_of(cls).values()
    )
    what = _paragraph((inspect.getdoc(cls) or "").removeprefix("Socket: "))
    term = words.get(simple(cls.__name__))
    return Socket(cls.__name__, what[:1].upper() + what[1:], term, paths, settings(cls, shared), found)


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default if field.default_factory is MISSING else field.default_factory()
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {show(item)}" for key, item in value.items()) or "empty"
    return "" if value is MISSING else show(value) or "empty"


def _type(annotation: Any, bounds: str = "") -> str:
    """Return the type of a setting in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0], _bounds(arguments[1]))
    if origin in (Union, types.UnionType):
        return " or ".join(_type(argument, bounds) for argument in arguments)
    if origin is Literal:
        return " or ".join(map(str, arguments))
    if origin is tuple:
        return f"list of {_type(arguments[0])}"
    if origin is not None:
        return f"mapping to {_type(arguments[1])}"
    words = {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "none"}
    if annotation in (int, float):
        return words[annotation] + bounds
    return words.get(annotation) or ("anything" if annotation is Any else str(annotation.__name__))


def _bounds(bounds: Range) -> str:
    if bounds.high < 1e12:
        return f" from {bounds.low:g} to {bounds.high:,.10g}"
    if bounds.low <= -1e30:
        return ""
    return " above 0" if 0 < bounds.low < 1e-12 else f" of at least {bounds.low:g}"


def _paragraph(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())


def _names(socket: Socket) -> set[str]:
    return {simple(name) for name in (socket.name, *socket.paths)}


def _part(socket: Socket, wanted: set[str]) -> Socket | None:
    """Return a socket with only the variants and settings that are wanted; None if it has none of them."""

    def is_wanted(entry: Entry) -> bool:
        paths = [f"{path}.{entry.last}" for path in socket.paths] if isinstance(entry, Setting) else []
        return not wanted.isdisjoint(map(simple, (entry.name, entry.last, *paths)))

    if variants := tuple(filter(is_wanted, socket.variants)):
        return replace(socket, variants=variants)
    parts = [replace(variant, settings=tuple(filter(is_wanted, variant.settings))) for variant in socket.variants]
    variants = tuple(part for part in parts if part.settings)
    settings = tuple(filter(is_wanted, socket.settings))
    return replace(socket, settings=settings, variants=variants) if settings or variants else None
