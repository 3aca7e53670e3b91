"""The source that an artifact needs to be scored, stripped and compressed, so that the bytes of code are measured.

What is needed follows from the imports alone. Docstrings, comments, names of local variables and the annotations of
functions go; assertions stay, and so do names and annotations of classes and their fields, since those are what
settings are read by.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import python_minifier

from caddie.errors import UserError
from caddie.files import replacing
from caddie.pack.codecs import Brotli, Codec, Lzma
from caddie.pack.container import Section

SCORING = ("caddie.pack.artifact", "caddie.score")
"""Modules that score an artifact: one reads it, the other takes the tokens of a text and gives bits per byte."""
TRAINING = (*SCORING, "caddie.train.loop")
"""The same and those that make one."""

_PACKAGE = Path(__file__).parent.parent
_PATH = re.compile(r"caddie(/[a-z_][a-z0-9_]*)+\.py")


@dataclass(frozen=True)
class Bundle:
    """Modules of caddie that work without the others."""

    files: dict[str, str]
    """Path, with slashes, to stripped source."""
    libraries: tuple[str, ...]
    """Other libraries that they import, in alphabetical order; those of Python itself are not named."""
    data: bytes
    """The files as one JSON object, for `unpack`."""

    @property
    def codec(self) -> Codec:
        """What makes `data` smallest: Brotli or LZMA."""
        return self._smallest[0]

    @property
    def bytes(self) -> int:
        """Length of `data` after the codec: the code bytes."""
        return self._smallest[1]

    @cached_property
    def _smallest(self) -> tuple[Codec, int]:  # when asked for: it takes a second
        return min(((codec, len(codec.encode(self.data))) for codec in (Brotli(), Lzma())), key=lambda each: each[1])

    def section(self, name: str) -> Section:
        """The bundle as a section of an artifact."""
        return Section(name, self.data, self.codec)


@cache
def source_needed(roots: tuple[str, ...] = SCORING) -> Bundle:
    """The bundle of these modules and of all that they import; computed once in a process.

    The `__init__` of a folder is left empty unless something is imported from it: exports lead to all of the folder.
    """
    modules = _modules(_PACKAGE)
    wanted, files, libraries = list(roots), {}, set()
    while wanted:
        path, content = modules[wanted.pop()]
        if path in files:
            continue
        text = content.decode()
        files[path] = _strip(text)
        for imported in _imported(text):
            parts = imported.split(".")
            if parts[0] == "caddie":
                around = [".".join(parts[:count]) for count in range(len(parts), 1, -1)]
                wanted += [module for module in around if module in modules][:1]
            elif parts[0] not in sys.stdlib_module_names:
                libraries.add(parts[0])
    for path in list(files):
        for folder in list(Path(path).parents)[:-1]:
            files.setdefault((folder / "__init__.py").as_posix(), "")
    data = json.dumps(dict(sorted(files.items())), separators=(",", ":"), ensure_ascii=False).encode()
    return Bundle(files, tuple(sorted(libraries)), data)


def unpack(data: bytes, folder: Path) -> None:
    """Write the files of a bundle, such as the section `source` of an artifact, into a new or empty folder.

    Nothing is run. Data that is not a bundle, names that lead elsewhere and a folder in use are a `UserError`.
    """
    try:
        files = json.loads(data)
    except (ValueError, RecursionError):
        raise UserError("this is not a bundle of source") from None
    if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
        raise UserError("this is not a bundle of source")
    for name in files:
        if not _PATH.fullmatch(name):
            raise UserError(f"{name[:100]!a} is not a module of caddie; nothing was written")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is in use; name a new folder for the source")
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_bytes(text.encode(errors="surrogatepass"))


def installed_bytes(library: str) -> int | None:
    """Bytes of the files that the distribution of this name brought, by its own list; None where there is no list.

    What the library requires in turn is not among them.
    """
    try:
        files = metadata.files(library)
    except metadata.PackageNotFoundError:
        return None
    return sum(file.size or 0 for file in files) if files else None


def describe_source() -> dict[str, Any]:
    """What `result.json` says of the source: bytes to score and beyond that to train, modules, libraries.

    As Python keeps what it compiled, the answer is kept beside the source until that changes: it takes two seconds.
    """
    program = _program()
    digest = hashlib.sha256(f"{sys.version} {metadata.version('python-minifier')} {program}".encode())
    kept = _PACKAGE / "__pycache__" / f"source-{digest.hexdigest()[:16]}.json"
    with suppress(OSError, ValueError):
        return dict(json.loads(kept.read_text()))
    described = {"program_sha256": program, **_describe_source()}
    with suppress(UserError), replacing(kept) as temporary:  # where nothing can be written, it is measured again
        temporary.write_text(json.dumps(described))
    return described


def _program() -> str:
    """Hash of all modules of caddie."""
    digest = hashlib.sha256()
    for name, (_, content) in _modules(_PACKAGE).items():
        digest.update(name.encode() + hashlib.sha256(content).digest())
    return digest.hexdigest()


def _describe_source() -> dict[str, Any]:
    scoring, training = source_needed(SCORING), source_needed(TRAINING)
    contents = json.dumps(sorted(scoring.files.items()))
    return {
        "sha256": hashlib.sha256(contents.encode()).hexdigest(),
        "needed_bytes": scoring.bytes,
        "training_bytes": training.bytes - scoring.bytes,
        "modules": {path: len(text.encode()) for path, text in sorted(scoring.files.items())},
        "decoders": {library: installed_bytes(library) for library in scoring.libraries},
    }


@cache
def _modules(package: Path) -> dict[str, tuple[str, bytes]]:
    """Dotted name of every module of a package to its path, with slashes, and its source.

    Read once in a process, so that all that is said of them is of one program, whoever edits them meanwhile.
    """
    found = {}
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package.parent)
        name = ".".join(place.with_suffix("").parts).removesuffix(".__init__")
        found[name] = place.as_posix(), path.read_bytes()
    return found


@cache
def _imported(text: str) -> tuple[str, ...]:
    """What a module imports, once for all bundles."""
    return tuple(_imports(ast.parse(text)))


def _imports(node: ast.AST) -> Iterator[str]:
    """Dotted names imported anywhere below `node`, but for those that only a type checker imports."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):  # in which nothing is imported
            yield from _imports(child)


@cache
def _strip(text: str) -> str:
    annotations = python_minifier.RemoveAnnotationsOptions(
        remove_variable_annotations=True,
        remove_return_annotations=True,
        remove_argument_annotations=True,
        remove_class_attribute_annotations=False,
    )
    # Literals are not gathered into names: that is shorter, but longer after compression.
    return python_minifier.minify(
        text, remove_annotations=annotations, remove_literal_statements=True, hoist_literals=False
    )
