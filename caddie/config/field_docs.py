"""Documentation of a config's fields: the string below each in the source, for tables, pages and tests."""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise

from caddie.config import Config


@cache
def descriptions(cls: type[Config]) -> dict[str, str]:
    """Return field name to the string written below the field."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if isinstance(base, type) and issubclass(base, Config) and base is not Config:
            body = _written(base).body
            for statement, following in pairwise(body):
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                        found[statement.target.id] = inspect.cleandoc(str(following.value.value))
    return found


@cache
def _written(cls: type[Config]) -> ast.ClassDef:
    """Return the syntax tree of the class."""
    if written := _classes(cls.__module__).get(cls.__qualname__):
        return written
    body = ast.parse(inspect.cleandoc("\n" + inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    return body


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Return name to syntax tree of a module's classes, all at once: `inspect` would read the file for each."""
    if module.partition(".")[0] != __package__:
        return {}
    body = ast.parse(inspect.getsource(sys.modules[module])).body
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}
