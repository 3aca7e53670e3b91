"""Modules of caddie as readable files of one folder that need no caddie: `caddie.model.gpt` is `caddie_model_gpt.py`.

They import one another by relative imports, as transformers wants of the code beside a model.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from caddie.pack.source_bundle import modules_needed

_ROOT = "caddie.share."
"""Prefix of the modules that keep their own names, being those that transformers is told of."""
_HEAD = "# Written by caddie export from {path}, with its imports alone changed.\n"


def standalone(roots: Sequence[str]) -> dict[str, str]:
    """Return file name to source of these modules and of all that they import."""
    sources = modules_needed(roots)
    modules = {_dotted(path) for path in sources}
    return {
        f"{_name(_dotted(path))}.py": _HEAD.format(path=path) + _rewritten(text, modules)
        for path, text in sorted(sources.items())
    }


def _dotted(path: str) -> str:
    return ".".join(PurePosixPath(path).with_suffix("").parts).removesuffix(".__init__")


def _name(module: str) -> str:
    return module.removeprefix(_ROOT).replace(".", "_")


def _rewritten(text: str, modules: set[str]) -> str:
    """Return the source with every import of caddie's modules made relative, and none for type checkers alone.

    Libraries that a function imports may be missing where the function is not called, which transformers takes from a
    `try`.
    """
    lines = text.splitlines()
    for node in reversed([*_imports(ast.parse(text), inside=False)]):
        first = lines[node.lineno - 1]
        indent = first[: node.col_offset]
        if isinstance(node, ast.If):
            new = [f"{indent}{line}" for line in ("if TYPE_CHECKING:", "    pass")]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "caddie":
            new = [indent + line for line in _relative(node, modules)]
        else:
            kept = [line[len(indent) :] for line in lines[node.lineno - 1 : node.end_lineno]]
            tried = ["try:", *(f"    {line}" for line in kept), "except ImportError:", "    raise"]
            new = [indent + line for line in tried]
        lines[node.lineno - 1 : node.end_lineno] = new
    return "\n".join(lines) + "\n"


def _imports(node: ast.AST, inside: bool) -> Iterator[ast.stmt]:
    """Yield the statements that are rewritten, in order; `inside` is True within a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            yield child
        elif isinstance(child, ast.Import | ast.ImportFrom):
            module = child.module if isinstance(child, ast.ImportFrom) else child.names[0].name
            library = (module or "").split(".")[0]
            foreign = library not in sys.stdlib_module_names and library != "torch"
            if library == "caddie" or (inside and foreign and not isinstance(node, ast.Try)):
                yield child
        elif not isinstance(child, ast.expr):
            yield from _imports(child, inside or isinstance(child, ast.FunctionDef))


def _relative(node: ast.ImportFrom, modules: set[str]) -> Iterator[str]:
    names = []
    for alias in node.names:
        if (inner := f"{node.module}.{alias.name}") in modules:
            yield f"from . import {_name(inner)} as {alias.asname or alias.name}"
            yield f"from .{_name(inner)} import __doc__ as _  # transformers copies files that such lines name"
        else:
            names.append(f"{alias.name} as {alias.asname}" if alias.asname else alias.name)
    if names:
        yield f"from .{_name(str(node.module))} import {', '.join(names)}"
