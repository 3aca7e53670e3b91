"""The source that scores an artifact, and the script that trains it: minified and compressed, their bytes measured.

Modules are found by their imports alone. Docstrings, comments, names of local variables and annotations of functions
are removed. Assertions stay, and so do names and annotations of classes and their fields: settings are read by them.
"""

import ast
import base64
import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import metadata
from operator import itemgetter
from pathlib import Path
from string import Template
from typing import Any

import python_minifier

from caddie.errors import UserError
from caddie.files import reason, write_file
from caddie.pack.codecs import Brotli, Codec, Lzma
from caddie.pack.container import Section

SCORING = ("caddie.pack.artifact", "caddie.score")
"""Modules that score an artifact: one reads it, the other turns the tokens of a text into bits per byte."""
TRAINING = ("caddie.submit.script", "caddie.ops.loss_kernels")
"""Modules that train, pack and score a model, as one program; kernels are imported by a computed name."""

_PACKAGE = Path(__file__).parent.parent
_PATH = re.compile(r"caddie(/[a-z_][a-z0-9_]*)+\.py")


@dataclass(frozen=True)
class Bundle:
    """A set of caddie's modules that works without the others."""

    files: dict[str, str]
    """Path, with slashes, to minified source."""
    libraries: tuple[str, ...]
    """Third-party libraries that the files import, in alphabetical order."""
    data: bytes
    """The files as one JSON object, for `unpack`."""

    @property
    def code_bytes(self) -> int:
        """Code bytes: the length of `data` after compression."""
        return _smallest(self.data)[0]

    def section(self, name: str) -> Section:
        """Return the bundle as a section of an artifact."""
        return Section(name, self.data, _smallest(self.data)[1])


@lru_cache(maxsize=8)  # for a bundle it takes a second
def _smallest(data: bytes) -> tuple[int, Codec]:
    """Return the length of the compressed data and the codec, Brotli or LZMA, whichever is smaller."""
    return min(((len(codec.encode(data)), codec) for codec in (Brotli(), Lzma())), key=itemgetter(0))


def modules_needed(roots: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return, by dotted name, path (with slashes) and source of these modules and of all caddie modules they import."""
    modules, found = _modules(_PACKAGE), dict[str, tuple[str, str]]()
    wanted = list(roots)
    while wanted:
        if (name := wanted.pop()) in found:
            continue
        path, content = modules[name]
        found[name] = path, (text := content.decode())
        for imported in _imported(text):
            parts = imported.split(".")
            around = (".".join(parts[:count]) for count in range(len(parts), 1, -1) if parts[0] == "caddie")
            wanted += [module for module in around if module in modules][:1]
    return found


@cache
def source_needed(roots: tuple[str, ...] = SCORING) -> Bundle:
    """Return the bundle of these modules and of all that they import; computed once in a process.

    A folder's `__init__` is left empty unless something is imported from it, because its exports import the whole
    folder.
    """
    sources = dict(modules_needed(roots).values())
    libraries = {name.partition(".")[0] for text in sources.values() for name in _imported(text)}
    libraries -= {"caddie", *sys.stdlib_module_names}
    folders = {folder for path in sources for folder in [*Path(path).parents][:-1]}
    files = {(folder / "__init__.py").as_posix(): "" for folder in folders}
    files |= {path: _strip(text) for path, text in sources.items()}
    return Bundle(files, tuple(sorted(libraries)), _packed(files))


def _packed(files: Mapping[str, str]) -> bytes:
    return json.dumps(files, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def script(recipe: Mapping[str, Any], source: str | None = None) -> bytes:
    """Return a Python program that trains, packs and scores a recipe, given as JSON values, without caddie.

    The public results of others are left out of the recipe. The same recipe gives the same bytes for any seed. A
    `source`, if given, replaces caddie's encoded modules.
    """
    settings = {name: value for name, value in recipe.items() if name != "public"}
    held = _encoded_source() if source is None else source
    text = json.dumps(settings, indent=1).replace("'", "\\u0027")  # else it might end the literal
    return Template(_head()).substitute(version=metadata.version("caddie"), recipe=text, source=held).encode()


@cache
def _head() -> str:
    """Return the template of the script, with the placeholders $version, $recipe and $source."""
    return (Path(__file__).parent / "train_gpt.py.txt").read_text()


@cache
def _encoded_source() -> str:
    """Return the modules of `TRAINING`, encoded for the script, with the version for the manifests of artifacts."""
    version = metadata.version("caddie")
    about = {f"caddie-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: caddie\nVersion: {version}\n"}
    files = source_needed(TRAINING).files | about
    return base64.b85encode(Brotli().encode(_packed(files))).decode()


def unpack(data: bytes, folder: Path) -> None:
    """Write the files of a bundle, such as the section `source` of an artifact, into a new or empty folder.

    Nothing is run. `UserError` for data that is not a bundle, names that lead elsewhere, a folder in use, and one that
    cannot be made.
    """
    files = None
    with suppress(ValueError, RecursionError):
        files = json.loads(data)
    if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
        raise UserError("this is not a bundle of source")
    for name in files:
        if not _PATH.fullmatch(name):
            raise UserError(f"{name[:100]!a} is not a module of caddie; nothing was written")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is in use; name a new folder for the source")
    for name, text in files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make {str(path.parent)[:200]}: {reason(error)}; name another folder") from error
        write_file(path, text.encode(errors="surrogatepass"))


def installed_bytes(library: str) -> int | None:
    """Return the bytes of a distribution's files by its own list, without its dependencies; None without a list."""
    with suppress(metadata.PackageNotFoundError):
        if files := metadata.files(library):
            return sum(file.size or 0 for file in files)
    return None


def describe_source(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the source facts of `result.json`: hashes, code bytes to score, more bytes to train, modules, libraries.

    `needed_bytes` and `training_bytes` add up to the bytes of `script` for the recipe, given as JSON values.
    """
    described = _measured()
    training = described.pop("other_script_bytes") + len(script(recipe, "")) - described["needed_bytes"]
    return described | {"training_bytes": training}


def _measured() -> dict[str, Any]:
    """Return the source facts that all recipes share, and the bytes of the script's encoded modules.

    Measuring takes seconds, so the result is cached in `__pycache__` until the source changes.
    """
    program = hashlib.sha256()
    for name, (_, content) in _modules(_PACKAGE).items():
        program.update(name.encode() + hashlib.sha256(content).digest())
    libraries = [metadata.version(name) for name in ("caddie", "python-minifier", "brotli")]
    digest = hashlib.sha256(f"{sys.version} {libraries} {_head()} {program.hexdigest()}".encode())
    kept = _PACKAGE / "__pycache__" / f"source-{digest.hexdigest()[:16]}.json"
    with suppress(OSError, ValueError):
        return dict(json.loads(kept.read_text()))
    scoring, training = source_needed(SCORING), source_needed(TRAINING)
    described = {
        "program_sha256": program.hexdigest(),
        "sha256": _files_sha256(scoring),
        "script_sha256": hashlib.sha256((_files_sha256(training) + _head()).encode()).hexdigest(),
        "needed_bytes": scoring.code_bytes,
        "other_script_bytes": len(_encoded_source()),
        "modules": {path: len(text.encode()) for path, text in sorted(scoring.files.items())},
        "decoders": {library: installed_bytes(library) for library in scoring.libraries},
    }
    with suppress(UserError):  # in a read-only folder it is measured each time
        write_file(kept, json.dumps(described).encode())
    return described


def _files_sha256(bundle: Bundle) -> str:
    return hashlib.sha256(json.dumps(sorted(bundle.files.items())).encode()).hexdigest()


def with_parts(described: dict[str, Any], needed: Sequence[bytes], training: Sequence[bytes]) -> dict[str, Any]:
    """Return the facts of `describe_source` with users' files added: those `needed` to score, and all for `training`.

    Each file is compressed alone, since it stays a separate file, and unminified, since its code may read its comments.
    """
    more = {"needed_bytes": needed, "training_bytes": [source for source in training if source not in needed]}
    sizes = {name: sum(_smallest(source)[0] for source in sources) for name, sources in more.items()}
    return described | {name: described[name] + size for name, size in sizes.items()}


@cache
def _modules(package: Path) -> dict[str, tuple[str, bytes]]:
    """Return each module's path, with slashes, and source by its dotted name.

    Files are read once per process, so all facts describe one program even if files are edited meanwhile.
    """
    found = {}
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package.parent)
        name = ".".join(place.with_suffix("").parts).removesuffix(".__init__")
        found[name] = place.as_posix(), path.read_bytes()
    return found


@cache
def _imported(text: str) -> list[str]:
    """Return the dotted names that a module imports anywhere, except under `TYPE_CHECKING`."""
    found: list[str] = []
    nodes: list[ast.AST] = [ast.parse(text)]
    for node in nodes:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        nodes += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]
    return found


@cache
def _strip(text: str) -> str:
    # Hoisting literals into names would make the source shorter, but longer after compression.
    return python_minifier.minify(text, remove_literal_statements=True, hoist_literals=False)
