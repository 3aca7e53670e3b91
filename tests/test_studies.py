"""The studies that are kept here: every entry can be run, and what was found is what their results say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from caddie.data import SequentialStream
from caddie.lab.findings import findings
from caddie.lab.report import markdown
from caddie.lab.rows import RESULTS, read_rows
from caddie.lab.study import Study, find_study
from caddie.line import check_whole_run
from caddie.userfile import execute

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "studies").glob("*/study.py"))
NAMES = [(file, name) for file in FILES for name, value in execute(file).items() if isinstance(value, Study)]
KEPT = sorted(path.parent for path in (ROOT / "studies").rglob(RESULTS))


@pytest.mark.parametrize(("file", "name"), NAMES, ids=[f"{file.parent.name}:{name}" for file, name in NAMES])
def test_every_entry_can_be_run(file: Path, name: str) -> None:
    study = find_study(f"{file}:{name}")
    assert len(study.entries) > 3
    assert len(study.seeds) >= 3
    recipes = {label: study.recipe(label) for label in study.labels}
    for recipe in recipes.values():
        check_whole_run(recipe)
    assert len({recipe.sha256 for recipe in recipes.values()}) == len(recipes), "no two labels are the same run"


def test_hardest_shards_come_first() -> None:
    first = execute(ROOT / "studies" / "negative_results" / "study.py")["HardestFirst"]
    noise = np.random.default_rng(0).integers(0, 1000, 4096)
    text = np.concatenate([np.zeros(4096, int), noise, np.arange(4096) % 7]).astype(np.uint16)
    settings = {"tokens": 256, "sequence_length": 64, "seed": 1, "bos": 1}
    loader = first(of=SequentialStream(), batches=40, shards=5)  # type: ignore[operator]
    stream = loader.build([text], **settings)
    plain = SequentialStream().build([text], **settings)
    order = stream.order
    assert sorted(order) == list(range(40))
    words = [len(np.unique(stream.micro_batch(index).inputs)) for index in range(40)]
    assert min(words[:8]) > 100 > max(words[-8:]), "noise compresses worst"
    np.testing.assert_array_equal(stream.micro_batch(0).inputs, plain.micro_batch(order[0]).inputs)
    np.testing.assert_array_equal(stream.micro_batch(41).inputs, plain.micro_batch(41).inputs)


@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: str(folder.relative_to(ROOT / "studies")))
def test_what_was_found_is_what_the_results_say(folder: Path) -> None:
    rows, told = read_rows(folder / RESULTS), json.loads((folder / "study.json").read_text())
    file = next(path / "study.py" for path in (folder, folder.parent) if (path / "study.py").exists())
    study = find_study(f"{file}:{'study' if folder == file.parent else folder.name}")
    command = told.pop("command")
    assert told == json.loads(json.dumps(study.to_json())), "the definition changed after it was run"
    assert command.startswith("caddie study")
    assert [(row["label"], row["seed"]) for row in rows] == [
        (one, seed) for one in study.labels for seed in study.seeds
    ]
    assert {row["diff"] == study.shown(row["label"]) for row in rows} == {True}
    for name in ("scorer_sha256", "workers"):
        assert len({row[name] for row in rows if row["state"] == "finished"}) == 1
    report = markdown(findings({**told, "command": command}, rows))
    assert (folder / "report.md").read_text() == report, f"write it anew: caddie report {folder.relative_to(ROOT)}"
    assert (folder / "report.html").stat().st_size > 10_000


def test_the_results_page_has_their_verdicts() -> None:
    page = "\n".join(path.read_text() for path in (ROOT / "docs" / "results").glob("*-studies.md"))
    for folder in KEPT:
        verdicts = (folder / "report.md").read_text().partition("## Verdicts")[2].partition("\n## ")[0].strip()
        assert verdicts in page, f"docs/results lacks the verdicts of {folder.name}"
