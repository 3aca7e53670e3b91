"""Settings as typed on a command line: PATH=VALUE."""

import ast
import json
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from caddie.errors import UserError


def parse_assignment(text: str) -> tuple[str, object]:
    """Parse `PATH=VALUE` of a command line: JSON, a variant as `Name(setting=value)`, or a plain word."""
    path, sign, value = text.partition("=")
    if not sign or not path:
        raise UserError(f"{text!r} is not a setting; write PATH=VALUE, as in train.seconds=60")
    return path, parse_value(value)


def parse_value(text: str) -> object:
    """Parse a value of a command line, which is text if it is nothing else."""
    if text.lower() in ("none", "null"):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a word may be odd Python
            return _parse_variant(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return text


def assignments(texts: Iterable[str], parse: Callable[[str], tuple[str, Any]] = parse_assignment) -> dict[str, Any]:
    """Return path to value of a command line's settings; raises `UserError` if a path is set twice."""
    found: dict[str, Any] = {}
    for path, value in map(parse, texts):
        if path in found:
            raise UserError(f"{path} is set twice; leave one out")
        found[path] = value
    return found


def _parse_variant(node: ast.expr) -> object:
    """Return the value of `Name(setting=value)`, whose settings may be variants, words or Python constants."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
        return {"kind": node.func.id, **{word.arg or "": _parse_variant(word.value) for word in node.keywords}}
    if isinstance(node, ast.Name):
        return {"none": None, "null": None, "true": True, "false": False}.get(node.id, node.id)
    if isinstance(node, ast.Dict):
        keys = [ast.literal_eval(key) if key else None for key in node.keys]
        return dict(zip(keys, map(_parse_variant, node.values), strict=True))
    if isinstance(node, ast.List | ast.Tuple):
        return [_parse_variant(item) for item in node.elts]
    return ast.literal_eval(node)
