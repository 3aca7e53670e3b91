"""Documentation of a config's fields: the string below each in the source, for tables, pages and tests."""

import ast
import inspect
import sys
from dataclasses import is_dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from caddie.config import Config


@cache
def descriptions(cls: type[Config]) -> dict[str, str]:
    """Return field name to the string written below the field."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if is_dataclass(base) and base is not Config:  # also a base that only passes its fields on
            in_module = _classes(sys.modules[base.__module__])
            written = in_module.get(base.__qualname__) or _classes(base)[base.__name__]  # a class in a function
            for statement, following in pairwise(written.body):
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                        found[statement.target.id] = inspect.cleandoc(str(following.value.value))
    return found


@cache
def _classes(source: Any) -> dict[str, ast.ClassDef]:
    """Return name to syntax tree of a module's classes, all at once: `inspect` would read the file for each."""
    body = ast.parse(inspect.cleandoc("\n" + inspect.getsource(source))).body
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}
