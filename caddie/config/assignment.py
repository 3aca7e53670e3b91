"""Settings as typed on a command line: PATH=VALUE."""

import ast
import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from caddie.errors import UserError


def parse_assignment(text: str) -> tuple[str, object]:
    """Parse `PATH=VALUE` of a command line: JSON, a variant as `Name(setting=value)`, or a plain word."""
    path, sign, value = text.partition("=")
    if not sign or not path:
        raise UserError(f"{text!r} is not a setting; write PATH=VALUE, as in train.seconds=60")
    try:
        return path, parse_value(value)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def parse_value(text: str) -> object:
    """Parse a value of a command line, as text if nothing else fits; `UserError` if it sets something twice."""
    if text.lower() in ("none", "null"):
        return None
    try:
        return json.loads(text, object_pairs_hook=unique)
    except UserError:
        raise
    except (ValueError, RecursionError):
        pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a word may be odd Python
            return _parse_variant(ast.parse(text, mode="eval").body)
    except UserError:
        raise
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return text


def assignments(texts: Iterable[str], parse: Callable[[str], tuple[str, Any]] = parse_assignment) -> dict[str, Any]:
    """Return path to value of a command line's settings; raises `UserError` if a path is set twice."""
    return unique([parse(text) for text in texts])


def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return a mapping of these pairs; `UserError` for a repeated key, of which only the last value would count."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise UserError(f"{next(key for key in keys if keys.count(key) > 1)} is set twice; leave one out")
    return found


def _parse_variant(node: ast.expr) -> object:
    """Return the value of `Name(setting=value)`, whose settings may be variants, words or Python constants."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
        settings = [(word.arg or "", _parse_variant(word.value)) for word in node.keywords]
        return {"kind": node.func.id, **unique(settings)}
    if isinstance(node, ast.Name):
        return {"none": None, "null": None, "true": True, "false": False}.get(node.id, node.id)
    if isinstance(node, ast.Dict):
        keys: list[Any] = [ast.literal_eval(key) if key else None for key in node.keys]
        return unique([*zip(keys, map(_parse_variant, node.values), strict=True)])
    if isinstance(node, ast.List | ast.Tuple):
        return [_parse_variant(item) for item in node.elts]
    return ast.literal_eval(node)
