"""What is known of every technique: what it does and why, its settings, its source, its effect elsewhere and here.

All of it is read from the classes: sockets and variants are found by walking the settings of a recipe. What was
measured here stands in `measured.json` beside this file: a mapping of names to the settings of `Measurement`.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass
from importlib import resources
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from caddie.config import Config, Count, NonNegative, Positive, Range, Technique, field_types, show
from caddie.config import variants as variants_of
from caddie.config.field_docs import descriptions
from caddie.errors import UserError, suggest
from caddie.recipes.recipe import Recipe

NOT_MEASURED = "not measured"
"""Said of what has no entry in `measured.json`."""


@dataclass(frozen=True, kw_only=True)
class Measurement(Config):
    """Effect of a technique on a recipe, with and without it, over several seeds."""

    delta_bits_per_byte: float
    """Mean over seeds of the score with it less the score without; minus is better."""
    spread: NonNegative
    """Standard deviation of that difference between seeds."""
    seeds: Count
    """Seeds of each of the two."""
    recipe: str
    """Name of the recipe, with the settings that differ from it."""
    text: str
    """What was trained on and scored."""
    seconds: Positive
    """Training time of a run."""
    date: str
    """Day, as YYYY-MM-DD."""
    machine: str
    """Processor or GPUs."""

    def __str__(self) -> str:
        return (
            f"{self.delta_bits_per_byte:+.4f} (spread {self.spread:.4f}, {self.seeds:,} seeds): {self.recipe}, "
            f"{self.seconds:g} s, {self.text}, {self.machine}, {self.date}"
        )


@dataclass(frozen=True)
class Entry:
    """A class or one of its settings."""

    name: str
    """`Class` or `Class.setting`, as in `measured.json`."""
    what: str
    """First paragraph of its documentation."""
    why: str
    """What it is for; empty where nothing is known, as are the two that follow."""
    source: str
    """Paper or record."""
    elsewhere: str
    """Effect that others measured."""
    here: str
    """Effect measured here, or `NOT_MEASURED`."""

    @property
    def last(self) -> str:
        """The name without the class that the setting is of."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Setting(Entry):
    """A setting of a socket or of a variant."""

    type: str
    """What it takes, in words."""
    default: str
    """What it is if nothing is said; empty if something must be."""


@dataclass(frozen=True)
class Variant(Entry):
    """A class that can stand in a socket."""

    base: bool
    """Whether `Recipe()`, the contest's baseline, has it."""
    shipped: bool
    """Whether it is caddie's own, and so stands in the page."""
    settings: tuple[Setting, ...]
    """Those that the socket does not have, or of which more is known here."""


@dataclass(frozen=True)
class Socket:
    """A place in a recipe and what fits it; also a class that alone fits its place, if it has techniques."""

    name: str
    """Its class."""
    what: str
    """First paragraph of its documentation."""
    paths: tuple[str, ...]
    """Where it stands in a recipe; `*` is any role or pattern."""
    settings: tuple[Setting, ...]
    """Those of all its variants."""
    variants: tuple[Variant, ...]
    """What fits."""

    @property
    def alone(self) -> bool:
        """Whether nothing but the class itself fits."""
        return [variant.name for variant in self.variants] == [self.name]


def sockets() -> list[Socket]:
    """Everything that is known, in the order of a recipe's settings."""
    places: dict[type[Config], list[str]] = {}
    for path, cls in _places(Recipe, "", ()):
        places.setdefault(cls, []).append(path)
    measured = measurements()
    base = {type(value) for value in _held(Recipe())}
    return [
        _socket(cls, paths, base, measured)
        for cls, paths in places.items()
        if variants_of(cls) and (inspect.isabstract(cls) or cls.techniques)
    ]


def measurements() -> dict[str, Measurement]:
    """Name of a technique to what was measured here."""
    text = resources.files("caddie").joinpath("recipes/measured.json").read_text(encoding="utf-8")
    return {name: Measurement.from_json(value) for name, value in json.loads(text).items()}


def find(name: str) -> list[Socket]:
    """What goes by this name, in any case: a socket, a variant, a setting, or a path in a recipe.

    Of a socket there remains what was named. A name that nothing has is a `UserError`.
    """
    known, low = sockets(), name.lower()
    found = [socket for socket in known if low in _aliases(socket, socket)]
    found = found or [only for socket in known if (only := _only(socket, low)) is not None]
    if not found:
        names = [alias for socket in known for entry in _entries(socket) for alias in _names(entry, socket)]
        raise UserError(f"no technique {name}{suggest(name, names)}; `caddie techniques` lists them")
    return found


def facts(known: Sequence[Socket]) -> dict[str, Any]:
    """The same as plain JSON values."""
    return {"sockets": [asdict(socket) for socket in known]}


# From classes to what is known of them


def _places(cls: type[Config], path: str, above: tuple[type[Config], ...]) -> Iterator[tuple[str, type[Config]]]:
    """Paths below a class and what type of config stands there, in the order of the settings."""
    for name, annotation in field_types(cls).items():
        for steps, found in _configs(annotation):
            here = ".".join(filter(None, (path, name, *steps)))
            yield here, found
            for variant in variants_of(found).values():
                if variant not in above:
                    yield from _places(variant, here, (*above, variant))


def _configs(annotation: Any) -> Iterator[tuple[tuple[str, ...], type[Config]]]:
    """Config classes in a type, each with the steps that lead to it."""
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


def _held(value: object) -> Iterator[Config]:
    """A config and all configs in it."""
    if isinstance(value, Config):
        yield value
        for field in dataclasses.fields(value):
            yield from _held(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _held(item)


def _socket(
    cls: type[Config], paths: Sequence[str], base: set[type[Config]], measured: Mapping[str, Measurement]
) -> Socket:
    shared = list(field_types(cls)) if inspect.isabstract(cls) else []
    found = []
    for variant in variants_of(cls).values():
        own = [
            name
            for name in field_types(variant)
            if name not in shared or variant.techniques.get(name) != cls.techniques.get(name)
        ]
        entry = _entry(variant, "", inspect.getdoc(variant) or "", measured)
        found.append(
            Variant(
                **entry,
                base=variant in base,
                shipped=variant.__module__.startswith("caddie."),
                settings=_settings(variant, own, measured),
            )
        )
    what = _paragraph((inspect.getdoc(cls) or "").removeprefix("Socket: "))
    what = what[:1].upper() + what[1:]
    return Socket(cls.__name__, what, tuple(dict.fromkeys(paths)), _settings(cls, shared, measured), tuple(found))


def _settings(cls: type[Config], names: Sequence[str], measured: Mapping[str, Measurement]) -> tuple[Setting, ...]:
    told, hints = descriptions(cls), field_types(cls)
    return tuple(
        Setting(
            **_entry(cls, field.name, told.get(field.name, ""), measured),
            type=_type(hints[field.name]),
            default=_default(field),
        )
        for field in dataclasses.fields(cls)
        if field.name in names
    )


def _entry(cls: type[Config], setting: str, text: str, measured: Mapping[str, Measurement]) -> dict[str, str]:
    name = f"{cls.__name__}.{setting}" if setting else cls.__name__
    technique = cls.techniques.get(setting, Technique("", ""))
    here = str(measured[name]) if name in measured else NOT_MEASURED
    return {"name": name, "what": _paragraph(text), **technique._asdict(), "here": here}


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default if field.default_factory is MISSING else field.default_factory()
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {show(item)}" for key, item in value.items()) or "empty"
    return "" if value is MISSING else show(value) or "empty"


def _type(annotation: Any, bounds: str = "") -> str:
    """What a setting of this type takes, in words."""
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
    return " above 0" if 0 < bounds.low < 1e-12 else f" of at least {bounds.low:g}"


def _paragraph(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())


def _entries(socket: Socket) -> Iterator[Entry | Socket]:
    """The socket, its settings, its variants and theirs."""
    yield socket
    yield from socket.settings
    for variant in socket.variants:
        yield variant
        yield from variant.settings


def _aliases(entry: Entry | Socket, socket: Socket) -> list[str]:
    """Names, in small letters, of a socket or of something in it."""
    return [name.lower() for name in _names(entry, socket)]


def _names(entry: Entry | Socket, socket: Socket) -> list[str]:
    if isinstance(entry, Socket):
        return [entry.name, *entry.paths]
    inside = [f"{path}.{entry.last}" for path in socket.paths] if isinstance(entry, Setting) else []
    return [entry.name, entry.last, *inside]


def _only(socket: Socket, name: str) -> Socket | None:
    """What a socket has under a name, with all the settings of what is named; None if nothing."""

    def asked(entry: Entry) -> bool:
        return name in _aliases(entry, socket)

    if named := tuple(filter(asked, socket.variants)):
        return dataclasses.replace(socket, variants=named)
    found = [
        dataclasses.replace(variant, settings=settings)
        for variant in socket.variants
        if (settings := tuple(filter(asked, variant.settings)))
    ]
    shared = tuple(filter(asked, socket.settings))
    return dataclasses.replace(socket, settings=shared, variants=tuple(found)) if shared or found else None
