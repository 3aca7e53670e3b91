"""Read a submission folder that may be hostile: files, bytes, depth and time are bounded, and links not followed."""

import codecs
import json
import os
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from itertools import islice
from pathlib import Path
from typing import Any

from caddie.errors import UserError
from caddie.files import reason
from caddie.report.read import read_regular
from caddie.submit.review_rules import Findings

_MOST_FILES, _MOST_FOLDERS, _MOST_DEPTH = 2_000, 200, 3
_MOST_BYTES = 8_000_000
"""Largest file in bytes that is read; the largest merged log has 0.2 MB."""
_MOST_TOGETHER = 32_000_000
_MOST_JSON_BYTES = 1_000_000
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass
class Folder:
    """The regular files of a folder, by their paths below it, and what was read of them."""

    path: Path
    sizes: dict[str, int] = field(default_factory=dict)
    left: int = _MOST_TOGETHER
    """Bytes that may still be read."""

    def text(self, name: str, found: Findings, most: int = _MOST_BYTES) -> str | None:
        """Return a file as text, with a replacement for bytes that are not UTF-8; None with a finding if unread."""
        if self.left < self.sizes[name] <= most:
            said = f"it was not read, as at most {_MOST_TOGETHER:,} bytes of a folder are: read it yourself"
            found.add("file-unread", name, said)
            return None
        try:
            data = read_regular(self.path / name, most)
        except OSError as error:
            found.add("file-unread", name, f"it cannot be read ({reason(error)})")
            return None
        self.left -= len(data)
        # As PowerShell writes a command's output: Latin letters have a zero beside them. Python reads no such source.
        if data.startswith(_UTF_16) and data.count(0) > len(data) / 3 and not name.endswith(".py"):
            found.add("file-unread", name, "it is UTF-16, where UTF-8 is expected", note=True)
            return data.decode("utf-16", errors="replace")
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError:
            found.add("file-unread", name, "it is not UTF-8; other bytes were replaced", note=True)
            return data.decode("utf-8-sig", errors="replace")


def list_folder(path: Path, found: Findings) -> Folder:
    """Return the folder's regular files, three folders deep; links and the like become findings."""
    if not path.is_dir():
        said = "is not a folder" if os.path.lexists(path) else "does not exist"
        raise UserError(f"{path} {said}; name the folder of a submission, with its README.md and submission.json")
    folder, folders = Folder(path), [path]
    for opened, here in enumerate(folders, 1):  # which grows meanwhile
        depth = len(here.relative_to(path).parts)
        try:
            with os.scandir(here) as scan:
                entries = sorted(islice(scan, _MOST_FILES + 1), key=lambda entry: entry.name)
        except OSError as error:
            if here == path:
                raise UserError(f"{path}: cannot be read ({reason(error)}); name a folder that you may read") from None
            found.add("file-unread", _below(path, here), f"it cannot be read ({reason(error)})")
            continue
        if len(folder.sizes) + len(entries) > _MOST_FILES or opened > _MOST_FOLDERS:
            said = f"more than {_MOST_FILES:,} files or {_MOST_FOLDERS} folders; the rest was not looked at"
            found.add("file-unread", _below(path, here), said)
            break
        for entry in entries:
            name = _below(path, Path(entry.path))
            if entry.is_dir(follow_symlinks=False):
                if depth < _MOST_DEPTH and not entry.name.startswith("."):
                    folders.append(Path(entry.path))
                elif entry.name != ".git":
                    why = "its name begins with a dot" if depth < _MOST_DEPTH else "it is too deep"
                    found.add("file-unread", name, f"{why}; what is in it was neither read nor counted: move it")
            elif path / name != Path(entry.path):
                found.add("file-unread", name, "its name is not UTF-8, and it was not read: rename it")
            elif entry.is_file(follow_symlinks=False):
                folder.sizes[name] = entry.stat(follow_symlinks=False).st_size
            else:
                kind = "a link, and is not followed" if entry.is_symlink() else "not a regular file, and is not read"
                found.add("file-irregular", name, f"it is {kind}")
    return folder


def read_json(text: str, name: str, found: Findings) -> dict[str, Any]:
    """Return a JSON object whose fractions are decimals as written; empty, with a finding, if it is none."""
    try:
        if len(text) > _MOST_JSON_BYTES:
            raise ValueError(f"more than {_MOST_JSON_BYTES:,} bytes")
        data = json.loads(text, parse_float=Decimal, parse_constant=_refuse)
    except RecursionError:
        found.add("json", name, "it is nested too deeply")
    except InvalidOperation:
        found.add("json", name, "it has a number whose exponent is too large")
    except ValueError as error:
        found.add("json", name, f"it is not JSON ({str(error)[:100]})", getattr(error, "lineno", None))
    else:
        if isinstance(data, dict):
            return data
        found.add("json", name, "it is not an object")
    return {}


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def _below(folder: Path, path: Path) -> str:
    return os.fsencode(path.relative_to(folder)).decode(errors="replace")
