"""Damaged files of every format are read or refused, in bounded time and memory: `make fuzz N=...` runs more."""

import random
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import fuzz
from mutations import mutated_bytes, mutated_json

CASES = {
    "artifact": 800,
    "text": 100,
    "corpus": 200,
    "shard": 200,
    "checkpoint": 200,
    "recipe": 200,
    "result": 100,
    "board": 200,
}
"""Cases of each format, 2,000 together."""


@pytest.mark.long
@pytest.mark.parametrize("kind", CASES)
def test_damaged_files_are_read_or_refused(kind: str, tiny_run: Any) -> None:
    found = fuzz.fuzz(kind, CASES[kind], tiny_run.folder)
    assert not found.findings, str(found)
    assert found.cases == found.read + found.refused == CASES[kind]
    assert found.read or kind == "text", "some damage does not matter; of a text's, one case in 150"


@pytest.mark.parametrize(
    ("does", "what"),
    [
        ("raise KeyError(number)", "KeyError at test_fuzz.py"),
        ("time.sleep(60)", "longer than 5 s"),
        ("os._exit(1)", "the process ended"),
        ("bytearray(BYTES)", "more than "),
    ],
)
@pytest.mark.long
def test_what_goes_wrong_is_found(does: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a process of its own, which runs this file's `_wrong` in the place of a format."""
    monkeypatch.setattr(fuzz, "_HANG_SECONDS", 5.0 if "sleep" in does else 60.0)  # memory may be slow to come by
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # a forked process begins with this
    monkeypatch.setattr(fuzz, "MOST_BYTES", before + (128 << 20))
    monkeypatch.setattr(fuzz, "_work", _wrong)
    found = fuzz.fuzz(does.replace("BYTES", str(before + (256 << 20))), 3, tmp_path)
    assert found.cases == 3
    assert found.findings, does
    assert all(name.startswith(what) for name in found.findings), str(found)


def _wrong(there: Any, does: str, *given: Any) -> None:
    """Report a case that does something wrong, as `fuzz._work` would."""
    import os  # noqa: F401
    import resource
    import time  # noqa: F401

    number = given[-2]
    there.send(number)
    try:
        exec(does)
        what = "read"
    except KeyError:
        what = "KeyError at test_fuzz.py"
    there.send((what, 0.0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
    there.send("end")


def test_damage_is_repeated_by_its_seed() -> None:
    text = b'{"a": [1, 2, {"b": "c"}], "d": null}'
    for damage in (mutated_bytes, mutated_json):
        once, again = ([damage(random.Random(seed), text) for seed in range(200)] for _ in range(2))
        assert once == again
        assert len(set(once)) > 100
