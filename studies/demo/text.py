"""Python source that is not the demo's text, to choose its settings on: other packages, as many bytes.

    python studies/demo/text.py packages.jsonl

Takes the files of the installed packages in the order of a hash of their paths, without tests, twins and very long
ones. `constraints.txt` fixes the versions of most packages, so another checkout has nearly the same text.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from caddie.files import replacing

SKIPPED = re.compile(r"tests?|_?testing|idle_test|__pycache__|_vendor|caddie.*")
"""Folders and files left out: tests repeat themselves, and vendored files are twins."""
SIZES = range(201, 300_000)
"""Bytes of a file: no empty ones, no tables of data."""
TOTAL_BYTES = 12_231_092
"""Bytes of Python 3.11's library as the demo reads it."""
CLOSE_BYTES = 6_092
"""Bytes that may be missing."""


def documents(packages: Path, total: int = TOTAL_BYTES) -> Iterator[str]:
    """Yield different files until at most `CLOSE_BYTES` of `total` are left."""
    paths = [path.relative_to(packages) for path in packages.rglob("*.py")]
    chosen = [path for path in paths if not any(map(SKIPPED.fullmatch, path.parts))]
    seen = set[bytes]()
    for path in sorted(chosen, key=lambda path: hashlib.sha256(path.as_posix().encode()).digest()):
        data = (packages / path).read_bytes()
        digest = hashlib.sha256(data).digest()
        if len(data) not in SIZES or len(data) > total or digest in seen:
            continue
        try:
            text = data.decode()
        except UnicodeDecodeError:
            continue
        seen.add(digest)
        yield text
        total -= len(data)
        if total < CLOSE_BYTES:
            return


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="FILE.jsonl")
    with replacing(parser.parse_args().out) as unfinished, unfinished.open("w") as file:
        for text in documents(Path(sysconfig.get_path("purelib"))):
            file.write(json.dumps({"text": text}) + "\n")
