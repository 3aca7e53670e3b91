"""A study of very short runs, written as a user's file and run as a command, for tests that end its processes."""

import json
import subprocess
import sys
from contextlib import suppress
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


def write_text(folder: Path) -> Path:
    """`text.jsonl`, 60 short documents."""
    path = folder / "text.jsonl"
    documents = [f"Document {n}: {'word ' * (n % 7 + 3)}{n * n}." for n in range(60)]
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return path


def write_study(folder: Path, entries: dict[str, dict[str, Any]], *, seeds: int, steps: int, **base: Any) -> None:
    """`study.py`, whose study is named tiny, and `text.jsonl` for it."""
    write_text(folder)
    (folder / "study.py").write_text(
        "from caddie.lab.study import Entry, Steps, Study\n"
        "from caddie.recipes.catalog import find\n"
        f"entries = {{label: Entry(diff=diff) for label, diff in {entries!r}.items()}}\n"
        f"base = find('baseline_mini').but({SETTINGS | base!r})\n"
        f"seeds, budget = {tuple(range(1, seeds + 1))}, Steps(steps={steps})\n"
        "study = Study(name='tiny', base=base, entries=entries, seeds=seeds, budget=budget)\n"
    )


def begin_study(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    """`caddie study study.py --json` in its folder; what it finds goes to `found.json`, all else to `printed.txt`."""
    command = [sys.executable, "-m", "caddie", "study", "study.py", "--data", "text.jsonl", "--json", *options]
    with (folder / "found.json").open("wb") as found, (folder / "printed.txt").open("ab") as printed:
        return subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=found, stderr=printed)


def events(run: Path) -> list[dict[str, Any]]:
    """The log of a run, without what a kill left half written."""
    found = []
    with suppress(FileNotFoundError):
        for line in (run / "log.jsonl").read_text().splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
    return found
