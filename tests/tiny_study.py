"""A study whose runs take a second each, for tests that end its processes: written as a user's file, run as a command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SETTINGS = {
    "model.width": 16,
    "model.depth": 2,
    "model.vocabulary": 257,
    "model.block.attention.heads": 2,
    "model.block.attention.key_value_heads": 1,
    "model.block.mlp.hidden": 32,
    "data.tokenizer": "RawBytes",
    "data.validation_fraction": 0.2,
    "train.batch_tokens": 64,
    "train.sequence_length": 32,
    "score.sequence_length": 32,
    "score.stride": 32,
    "train.precision": "float32",
}


def write_study(folder: Path, entries: dict[str, dict[str, Any]], *, seeds: int, steps: int, **base: Any) -> None:
    """`study.py`, whose study is named tiny, and `text.jsonl` for it."""
    (folder / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"Document {n}: {'word ' * (n % 7 + 3)}{n * n}."}) + "\n" for n in range(60))
    )
    (folder / "study.py").write_text(
        "from caddie.lab.study import Entry, Steps, Study\n"
        "from caddie.recipe import find\n"
        f"entries = {{label: Entry(diff=diff) for label, diff in {entries!r}.items()}}\n"
        f"base = find('baseline_mini').but({SETTINGS | base!r})\n"
        f"seeds, budget = {tuple(range(1, seeds + 1))}, Steps(steps={steps})\n"
        "study = Study(name='tiny', base=base, entries=entries, seeds=seeds, budget=budget)\n"
    )


def begin_study(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    """`caddie study study.py` in its folder; what it says goes to `printed.txt`."""
    command = [sys.executable, "-m", "caddie", "study", "study.py", "--data", "text.jsonl", *options]
    with (folder / "printed.txt").open("ab") as printed:
        return subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed)


def events(run: Path) -> list[dict[str, Any]]:
    """The log of a run; of the last line, only what is whole."""
    try:
        return [json.loads(line) for line in (run / "log.jsonl").read_text().split("\n")[:-1] if line]
    except FileNotFoundError:
        return []
