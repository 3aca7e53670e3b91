"""User's own Python file, named on the command line as FILE.py or FILE.py:NAME."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from importlib.abc import InspectLoader
from pathlib import Path
from types import CodeType

from caddie.errors import UserError


class _Source(InspectLoader):
    """Loads a module from source that has been read, so that no bytecode is written beside the file."""

    def __init__(self, path: Path, source: bytes) -> None:
        self._path, self._source = path, source

    def get_source(self, fullname: str) -> str:
        """Return the source, which tracebacks show."""
        return importlib.util.decode_source(self._source)

    def get_code(self, fullname: str) -> CodeType:
        """Compile the source."""
        return self.source_to_code(self._source, str(self._path))


def read_source(path: Path) -> bytes:
    """Return the source in a Python file; `UserError` if it is none."""
    if not path.is_file():
        raise UserError(f"no file {path}; name a Python file that is there, as FILE.py or FILE.py:NAME")
    if path.suffix != ".py":
        raise UserError(f"{path} is not a Python file")
    return path.read_bytes()


def execute(path: Path, source: bytes | None = None) -> dict[str, object]:
    """Run a file, or its `source`, and return the names that it defines; raises `UserError` for any failure."""
    loader = _Source(path, read_source(path) if source is None else source)
    place = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]  # files of one name are different modules
    spec = importlib.util.spec_from_loader(f"caddie_user_{path.stem}_{place}", loader, origin=str(path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        hint = (
            "; a class of settings needs no @dataclass any more"
            if "overwrite attribute __setattr__" in str(error)
            else ""
        )
        raise UserError(f"{path} does not run: {type(error).__name__}: {error}{hint}") from error
    return vars(module)
