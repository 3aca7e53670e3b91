"""What the source says of a config's fields: the string below each, for tables, pages and tests."""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise

from caddie.config import Config


@cache
def descriptions(cls: type[Config]) -> dict[str, str]:
    """Field name to the string written under the field, its documentation."""
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
    """The class as it is written."""
    if written := _classes(cls.__module__).get(cls.__qualname__):
        return written
    body = ast.parse(inspect.cleandoc("\n" + inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    return body


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Name to class of what a module of this package defines, all at once: `inspect` reads the file anew for each."""
    if module.partition(".")[0] != __package__:
        return {}
    body = ast.parse(inspect.getsource(sys.modules[module])).body
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}
