"""User's own Python file, named on the command line as FILE.py or FILE.py:NAME."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path

from caddie.errors import UserError


def execute(path: Path) -> dict[str, object]:
    """Run a file and return the names that it defines; raises `UserError` for any failure."""
    if not path.is_file():
        raise UserError(f"no file {path}; write FILE.py:NAME")
    place = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]  # files of one name are different modules
    spec = importlib.util.spec_from_file_location(f"caddie_user_{path.stem}_{place}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        hint = (
            "; a class of settings needs no @dataclass any more"
            if "overwrite attribute __setattr__" in str(error)
            else ""
        )
        raise UserError(f"{path} does not run: {type(error).__name__}: {error}{hint}") from error
    return vars(module)
