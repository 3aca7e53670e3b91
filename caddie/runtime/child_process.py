"""The environment of a Python process that is started from this one."""

import os
import sysconfig
from collections.abc import Mapping
from pathlib import Path

_PACKAGES = str(Path(__file__).absolute().parents[2])
"""Folder that the package lies in."""


def child_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a child: it finds caddie where this process did, and imports nothing else by chance.

    `python -m` looks in the working folder first, which may be a stranger's, with a `click.py` in it.
    """
    given = {**environment, "PYTHONSAFEPATH": "1"}
    folders = [folder for folder in given.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if _PACKAGES not in (*folders, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        folders.append(_PACKAGES)
    return {**given, "PYTHONPATH": os.pathsep.join(folders)}
