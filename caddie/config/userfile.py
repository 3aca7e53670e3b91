"""Users' Python files: recipes and studies named FILE.py:NAME, and files that an artifact needs, given by `--parts`.

An artifact holds no user's code. If its settings have classes of a user's file, it states the file's name and hash, and
the reader supplies the file. Only files that were named are executed.
"""

import hashlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.abc import InspectLoader
from pathlib import Path
from types import CodeType
from typing import cast

from caddie.config.config import Config, coerce, field_types
from caddie.errors import UserError


class Stated(Config):
    """A user's file as an artifact or a run folder states it."""

    name: str
    """Name of the file, without its folder."""
    sha256: str
    """Hash of its contents, SHA-256 in hexadecimal."""


@dataclass(frozen=True)
class UserFile:
    """A user's file and the contents that were run."""

    path: Path
    source: bytes

    @cached_property
    def stated(self) -> Stated:
        """Name and hash."""
        return Stated(name=self.path.name, sha256=hashlib.sha256(self.source).hexdigest())


_MOST = 16
_run = dict[str, UserFile]()
"""SHA-256 to each file whose classes this process has loaded."""


class _Source(InspectLoader):
    """Loads a module from source that has been read, so that no bytecode is written beside the file."""

    def __init__(self, path: Path, source: bytes) -> None:
        self._path, self.source = path, source

    def get_source(self, fullname: str) -> str:
        """Return the source, which tracebacks show."""
        return importlib.util.decode_source(self.source)

    def get_code(self, fullname: str) -> CodeType:
        """Compile the source."""
        return self.source_to_code(self.source, str(self._path))


def split_name(name: str) -> tuple[Path, str]:
    """Return the file and NAME of FILE.py:NAME; "" if there is no NAME."""
    path, colon, attribute = name.rpartition(":")
    return (Path(path), attribute) if colon and path.endswith(".py") else (Path(name), "")


def read_source(path: Path) -> bytes:
    """Return the source in a Python file; `UserError` if it is none."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a Python file, as FILE.py or FILE.py:NAME")
    if not path.exists():
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise UserError(f"no file {path}{where}; name a Python file that is there, as FILE.py or FILE.py:NAME")
    if not path.is_file():
        raise UserError(f"{path} is not a regular file; name a Python file, as FILE.py or FILE.py:NAME")
    if path.suffix != ".py":
        raise UserError(f"{path} is not a Python file; name one that ends in .py")
    return path.read_bytes()


def execute(path: Path, source: bytes | None = None) -> dict[str, object]:
    """Run a file, or its `source`, and return the names that it defines; raises `UserError` for any failure.

    A process runs a file once unless it changes, so that its classes stay the same objects.
    """
    return dict(_executed(path.resolve(), path, read_source(path) if source is None else source))


@cache
def _executed(place: Path, path: Path, source: bytes) -> Mapping[str, object]:
    loader = _Source(path, source)
    # Files of one name need different modules, and so does a changed file: classes are found by their modules.
    key = hashlib.sha256(str(place).encode() + source).hexdigest()[:8]
    spec = importlib.util.spec_from_loader(f"caddie_user_{path.stem}_{key}", loader, origin=str(path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        decorated = "overwrite attribute __setattr__" in str(error)
        hint = "; a class of settings needs no @dataclass any more" if decorated else ""
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        raise UserError(f"{path} does not run: {kind}{error}{hint}") from error
    file = UserFile(place, source)
    _run.setdefault(file.stated.sha256, file)
    return vars(module)


def user_files(*nodes: object) -> tuple[UserFile, ...]:
    """Return the users' files that define classes of these configs, sorted by file name.

    Raises `UserError` for a class that is defined in no file, and for two files of one name.
    """
    found: dict[str, UserFile] = {}
    for file in _files(nodes):
        if (other := found.setdefault(file.stated.name, file)).stated != file.stated:
            raise UserError(f"{other.path} and {file.path} have the same name; rename one")
    return tuple(found[name] for name in sorted(found))


def _files(nodes: Sequence[object]) -> Iterator[UserFile]:
    left = [*nodes]
    while left:
        node = left.pop()
        if isinstance(node, Config):
            if not type(node).__module__.startswith("caddie."):
                yield _file_of(type(node))
            left += [getattr(node, name) for name in field_types(type(node))]
        elif isinstance(node, tuple):
            left += node
        elif isinstance(node, Mapping):
            left += node.values()


@cache
def _file_of(cls: type[Config]) -> UserFile:
    """Return the file of a user's class, with the contents that were run or, if it was imported, that it has now."""
    module = sys.modules.get(cls.__module__)
    file, loader = getattr(module, "__file__", None), getattr(module, "__loader__", None)
    if file is None:
        raise UserError(f"{cls.__name__} is defined in no file; write it in one, for other processes need it too")
    path = Path(file).resolve()
    found = UserFile(path, loader.source if isinstance(loader, _Source) else read_source(path))
    _run.setdefault(found.stated.sha256, found)
    return found


def read_stated(value: object) -> tuple[Stated, ...]:
    """Return files as JSON states them; `UserError` for anything else."""
    stated = cast("tuple[Stated, ...]", coerce(value, tuple[Stated, ...], "parts"))
    if len(stated) > _MOST:
        raise UserError(f"parts must be at most {_MOST} files, not {len(stated):,}")
    for one in stated:
        if not (re.fullmatch(r"[^/\\\0]{1,100}\.py", one.name) and re.fullmatch(r"[0-9a-f]{64}", one.sha256)):
            raise UserError("parts must be names of Python files and their SHA-256")
    return stated


def supply(stated: Sequence[Stated], given: Sequence[Path], holder: Path, kept: Path | None = None) -> list[UserFile]:
    """Run the files that `holder`, an artifact or a run folder, needs; return them, with the paths given.

    A file that this process has run already need not be given. `kept` is a folder that may have copies; they are not
    run, but the error for a missing file names them. Raises `UserError` for a file that is missing, fails, or is not
    needed.
    """
    files = {file.stated.sha256: file for file in (UserFile(path, read_source(path)) for path in given)}
    needs = " and ".join(f"{one.name} (SHA-256 {one.sha256[:16]}…)" for one in stated)
    for sha256, other in files.items():
        if sha256 not in {one.sha256 for one in stated}:
            if not stated:
                hint = "" if holder.exists() else f", or name a recipe in it, as {other.path}:NAME"
                raise UserError(f"{holder} needs no file of a user's; leave out --parts {other.path}{hint}")
            raise UserError(f"{holder} needs {needs}, and {other.path} is another file (SHA-256 {sha256[:16]}…)")
    found = []
    for one in stated:
        if not (file := files.get(one.sha256) or _run.get(one.sha256)):
            copy = kept / one.name if kept and (kept / one.name).is_file() else one.name
            raise UserError(
                f"{holder} needs {needs}, written by a user; read it, and if you trust it add --parts {copy}"
            )
        if one.sha256 not in _run:
            execute(file.path, file.source)
        found.append(file)
    return found
