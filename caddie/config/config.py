"""Settings as frozen values, checked when they are made, and diffs between them."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import re
import types
import typing
from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from typing import Annotated, Any, Literal, Self, Union, dataclass_transform, get_args, get_origin

from caddie.config.assignment import parse_value
from caddie.config.hints import hint_at, hint_elsewhere
from caddie.config.renamed import KINDS, SETTINGS, modernized
from caddie.errors import UserError, suggest

Diff = Mapping[str, Any]
"""Dotted path to value: the one notation for recipes, per-layer exceptions, sweeps, the command line and reports."""
ABSENT = object()
"""Stands for the value of a path that does not exist."""


@dataclass(frozen=True)
class Range:
    """Inclusive bounds of a number, written `Annotated[int, Range(1, 8)]`."""

    low: float
    high: float

    def check(self, value: object, name: str) -> None:
        """Raise `UserError` for a number outside of the bounds."""
        if isinstance(value, int | float) and not self.low <= value <= self.high:
            most = f" to {_bound(self.high)}" if self.high < 1e30 or value > self.high else ""
            bounds = f"{'from' if most else 'at least'} {_bound(self.low)}{most}"
            bounds = "above 0" if value <= 0 < self.low < 1e-12 else bounds
            raise UserError(f"{name} must be {bounds}, not {_shortened(int(value) if value % 1 == 0 else value)}")


Count = Annotated[int, Range(1, 1 << 40)]
"""Integer of at least one."""
Channels = Annotated[int, Range(1, 65_536)]
"""Number of channels."""
Seed = Annotated[int, Range(0, 2**32 - 1)]
"""Random seed."""
Fraction = Annotated[float, Range(0.0, 1.0)]
"""Number from 0 to 1."""
Positive = Annotated[float, Range(1e-30, 1e30)]
"""Number above 0."""
NonNegative = Annotated[float, Range(0.0, 1e30)]
"""Number of at least 0."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class Config(ABC):
    """Base of all settings. It makes subclasses frozen, keyword-only dataclasses; a socket is an abstract subclass."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        for name, annotation in field_types(type(self)).items():
            object.__setattr__(self, name, coerce(getattr(self, name), annotation, name))

    def but(self, diff: Diff | None = None, **settings: Any) -> Self:
        """Return a copy with the paths of `diff` (and fields by keyword) set; raises `UserError` for unknown paths."""
        if not isinstance(diff, Mapping | None) or not all(isinstance(path, str) for path in diff or ()):
            raise UserError(f"changes are a mapping from path to value, as {{'train.steps': 100}}, not {diff!r}")
        changes = {**(diff or {}), **settings}
        try:
            return typing.cast(Self, _changed(self, [(path.split("."), value) for path, value in changes.items()], ""))
        except _NoSuchPath as error:
            raise UserError(f"no setting {error}{hint_at(str(error), list(paths(self)))}") from None
        except RecursionError:
            raise UserError("a value is nested too deeply") from None

    def diff(self, other: Config) -> dict[str, Any]:
        """Return the diff that turns this value into `other`: `self.but(self.diff(other)) == other`."""
        if type(self) is not type(other):
            raise TypeError(f"{type(self).__name__} and {type(other).__name__} have no diff")
        return {path: after for path, _, after in differences(self, other)}

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, with the class of every node under `kind`."""
        return typing.cast(dict[str, Any], plain(self))

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Return the config that `to_json` described; raises `UserError` for anything but `cls` and its subclasses."""
        try:
            return typing.cast(Self, coerce(modernized(value), cls, ""))
        except RecursionError:
            raise UserError("the settings are nested too deeply") from None

    def key(self) -> str:
        """Return eight hexadecimal digits of a hash of this value."""
        return hashlib.sha256(json.dumps(self.to_json()).encode()).hexdigest()[:8]


class _NoSuchPath(UserError):
    pass


@cache
def field_types(cls: type[Config]) -> dict[str, Any]:
    """Return field name to resolved type of a config class."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in fields(cls)}


def _settings(config: Config) -> dict[str, Any]:
    return {name: getattr(config, name) for name in field_types(type(config))}


def variants(socket: type[Config]) -> dict[str, type[Config]]:
    """Return name to class of everything that fits a socket: the class itself if concrete, and its subclasses."""
    found = {} if inspect.isabstract(socket) else {socket.__name__: socket}
    for subclass in socket.__subclasses__():
        found.update(variants(subclass))
    return found


def paths(node: object, prefix: str = "") -> Iterator[str]:
    """Yield every dotted path that `but` accepts on this value."""
    children = _settings(node) if isinstance(node, Config) else node
    for name, value in children.items() if isinstance(children, Mapping) else ():
        yield f"{prefix}{name}"
        yield from paths(value, f"{prefix}{name}.")


def plain(value: object) -> object:
    """Return the JSON form of a config, or of any value that a config can hold."""
    if isinstance(value, Config):
        value = {"kind": type(value).__name__, **_settings(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return _number(value)


def _number(value: Any) -> Any:
    """Return a NumPy or PyTorch scalar as a Python number, and anything else as it is."""
    return value.item() if getattr(value, "dtype", None) and getattr(value, "shape", None) == () else value


def show(value: object) -> str:
    """Return a value as one line for people, as it could be typed after `PATH=`."""
    if isinstance(value, Config):
        shown = ", ".join(
            f"{field.name}={json.dumps(item) if isinstance(item, str) else show(item)}"
            for field in fields(value)
            if (item := getattr(value, field.name)) != field.default
        )
        return f"{type(value).__name__}({shown})" if shown else type(value).__name__
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(plain(value), default=str)


def _shortened(value: object) -> str:
    """Return a wrong value for a message, on one line of bounded length."""
    try:
        text = " ".join(show(value).split())
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return (text if len(text) <= 200 else text[:200] + "…") or "''"


def coerce(value: object, annotation: Any, name: str) -> Any:
    """Return `value` as the type `annotation`; raises `UserError`, which names the field, if it does not fit."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    value = _number(value)
    if origin is Annotated:
        result = coerce(value, arguments[0], name)
        arguments[1].check(result, name)
        return result
    if origin in (Union, types.UnionType):
        return _coerce_union(value, arguments, name)
    if origin is Literal:
        if value not in arguments:
            raise UserError(f"{name} must be one of {', '.join(map(str, arguments))}, not {_shortened(value)}")
        return arguments[arguments.index(value)]  # 16 for the 16.0 of a JSON file
    if origin is tuple:
        if not isinstance(value, (tuple, list)):
            hint = f"; write [{_shortened(value)}]" if isinstance(value, str | int | float) else ""
            raise UserError(f"{name} must be a list, not {_shortened(value)}{hint}")
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(value) != len(kinds):
            raise UserError(f"{name} must be a list of {len(kinds)}, not {_shortened(value)}")
        pairs = enumerate(zip(value, kinds, strict=True))
        return tuple(coerce(item, kind, f"{name}.{index}") for index, (item, kind) in pairs)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise UserError(f"{name} must be a mapping, not {_shortened(value)}{hint_elsewhere(name)}")
        return {str(key): coerce(item, arguments[1], f"{name}.{key}") for key, item in value.items()}
    if annotation is Any:
        return {key: coerce(item, Any, name) for key, item in value.items()} if isinstance(value, dict) else value
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return _coerce_config(value, annotation, name)
    return _coerce_scalar(value, annotation, name)


def _coerce_union(value: object, arguments: tuple[Any, ...], name: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    choices = [choice for choice in arguments if choice is not type(None)]
    configs = [choice for choice in choices if isinstance(choice, type) and issubclass(choice, Config)]
    errors = []
    for choice in configs[:1] if isinstance(value, (Config, Mapping)) and configs else choices:
        try:
            return coerce(value, choice, name)
        except UserError as error:
            errors.append(error)
    raise errors[0]


def _coerce_config(value: object, socket: type[Config], name: str) -> Config:
    if isinstance(value, socket):
        return value
    known = variants(socket)
    if isinstance(value, str) and "(" in value:  # as on a command line
        value = parse_value(value)
    settings = {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {"kind": value}
    kind = settings.pop("kind", socket.__name__ if socket.__name__ in known else None)
    if not isinstance(kind, str) or kind not in known:
        hint = ""
        if isinstance(kind, str):
            if (meant := kind.partition("(")[0]) in known:
                call = f"{meant}({next(iter(field_types(known[meant])), 'setting')}=VALUE)"
                raise UserError(f"{name}: {_shortened(value)} is not of the form {call}; put text in quotes")
            hint = f"; it is now {KINDS[kind]}" if KINDS.get(kind) in known else suggest(kind[:100], known)
            readers = [each for each, cls in known.items() if "path" in field_types(cls)]
            if not hint and readers and {".", "/"} & set(kind):
                hint = f'; for a file write {" or ".join(readers)}(path="FILE")'
            if not hint and kind.isidentifier() and len(kind) <= 40:
                hint = f"; `caddie techniques {kind}` looks the word up"
            value = kind  # the kind is wrong, not its settings
        raise UserError(f"{name or 'config'} must be one of {', '.join(sorted(known))}, not {_shortened(value)}{hint}")
    cls, where = known[kind], f"{name}: " if name else ""
    for setting in settings:
        if setting not in field_types(cls):
            now = SETTINGS.get(kind, {}).get(setting)
            hint = f"; it is now {now}" if now else suggest(setting[:100], field_types(cls))
            raise UserError(f"{where}{kind} has no setting {_shortened(setting)}{hint}")
    required = [field.name for field in fields(cls) if field.default is field.default_factory is MISSING]
    if missing := [setting for setting in required if setting not in settings]:
        raise UserError(f"{where}{kind} needs {', '.join(missing)}")
    try:
        return cls(**settings)
    except UserError as error:
        of_setting = re.split(r"\W", str(error), maxsplit=1)[0] in field_types(cls)
        raise UserError(f"{name}.{error}" if name and of_setting else f"{where}{error}") from None


def _coerce_scalar(value: object, annotation: type, name: str) -> Any:
    fits = isinstance(value, annotation) and (annotation is bool or not isinstance(value, bool))
    if fits and not (annotation is float and not math.isfinite(typing.cast(float, value))):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= 1e308:
        if annotation is float:
            return float(value)
        if annotation is int and float(value).is_integer():
            return int(value)
    nouns = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    typed = isinstance(value, str) and parse_value(value) != value  # such as "30": another value on a command line
    found = f"the text {_shortened(repr(value))}" if typed else _shortened(value)
    hint = "; write numbers without commas" if isinstance(value, list) and annotation in (int, float) else ""
    raise UserError(f"{name} must be {nouns.get(annotation, annotation.__name__)}, not {found}{hint}")


def _bound(value: float) -> str:
    """Format a bound, whole numbers with all digits: 1.04858e+06 would not be the exact bound."""
    return f"{value:,.0f}" if value % 1 == 0 and abs(value) < 1e15 else f"{value:,g}"


def _changed(node: Any, changes: Sequence[tuple[Sequence[str], Any]], path: str) -> Any:
    """Return `node` with all `changes` (path split at dots, value) made at once, because some depend on others."""
    if isinstance(node, Mapping):
        for parts, value in changes:
            node = _changed_mapping(node, parts, value, path)
        return node
    types = field_types(type(node)) if isinstance(node, Config) else {}
    new: dict[str, Any] = {}
    inner: dict[str, list[tuple[Sequence[str], Any]]] = {}
    for (name, *rest), value in changes:
        if name not in types:
            raise _NoSuchPath(".".join([*([path] if path else []), name, *rest]))
        if rest:
            inner.setdefault(name, []).append((rest, value))
        elif _is_diff(new.get(name, getattr(node, name)), value):
            inner.setdefault(name, []).extend((key.split("."), item) for key, item in value.items())
        else:
            new[name] = coerce(value, types[name], _join(path, name))
            inner.pop(name, None)
    for name, group in inner.items():
        new[name] = _changed(new.get(name, getattr(node, name)), group, _join(path, name))
    try:
        return replace(node, **new)
    except UserError as error:
        raise UserError(_join(path, str(error))) from None


def _changed_mapping(node: Mapping[str, Any], parts: Sequence[str], value: object, path: str) -> Mapping[str, Any]:
    for length in range(len(parts) - 1, 0, -1):
        key = ".".join(parts[:length])
        if key in node:
            try:
                return {**node, key: _changed(node[key], [(parts[length:], value)], _join(path, key))}
            except _NoSuchPath:  # unless it is a new rule whose name begins like an existing one
                if not isinstance(value, Config) and not (isinstance(value, Mapping) and "kind" in value):
                    raise
    key = ".".join(parts)
    if len(parts) > 1 and any(isinstance(held, Config) for held in node.values()):
        if not isinstance(value, (Config, Mapping, str)):
            raise _NoSuchPath(_join(path, key))
    if _is_diff(node.get(key), value):
        assert isinstance(value, Mapping)
        value = _changed(node[key], [(name.split("."), item) for name, item in value.items()], _join(path, key))
    return {**node, key: value}


def _is_diff(held: object, value: object) -> bool:
    return isinstance(held, Config) and isinstance(value, Mapping) and "kind" not in value


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def differences(a: object, b: object, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield each path of the diff from `a` to `b`, with its value in `a`, which may be `ABSENT`, and in `b`."""
    if isinstance(a, Config) and isinstance(b, Config) and type(a) is type(b):
        a, b = _settings(a), _settings(b)
    if isinstance(a, Mapping) and isinstance(b, Mapping) and [*b][: len(a)] == [*a]:
        for key, value in b.items():
            inner = _join(path, str(key))
            yield from differences(a[key], value, inner) if key in a else [(inner, ABSENT, value)]
    elif a != b or (isinstance(a, Mapping) and isinstance(b, Mapping) and [*a] != [*b]):
        yield path, a, b
