"""Core hours of a study before it runs: what is timed, what FLOPs tell, and what is left out."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import call
from tiny_study import SETTINGS, write_study, write_text

from caddie.doctor.study_hours import study_hours
from caddie.files import write_json
from caddie.lab.modelled import flops_per_step
from caddie.lab.rows import ESTIMATE
from caddie.lab.runner import plan
from caddie.lab.study import BASE, Entry, Seconds, Steps, Study
from caddie.recipes.catalog import find
from caddie.report.run_files import ERROR
from caddie.score import ChunkSGD

ENTRIES = {
    "deeper": Entry(diff={"model.depth": 4}),
    "adapting": Entry(diff={"score.ttt": ChunkSGD(chunk_tokens=32)}),
    "rounded": Entry(diff={"pack.quantizers.matrix.bits": 6}),
}


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    """Three entries of a tiny base; a folder with its text is the current one."""
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)
    base = find("baseline_mini").but(SETTINGS)
    return Study(name="tiny", base=base, entries=ENTRIES, seeds=(1, 2), budget=Steps(steps=1000))


@pytest.mark.long
def test_training_goes_by_flops_and_scoring_is_timed(study: Study) -> None:
    threads = torch.get_num_threads()
    planned = plan(study, "text.jsonl", Path("runs"))
    write_json(planned[0].folder / ERROR, {"error": "it failed"})
    found = study_hours("tiny", planned)
    labels = found.labels
    base, deeper = labels[BASE], labels["deeper"]
    ratio = flops_per_step(study.recipe("deeper")) / flops_per_step(study.recipe(BASE))
    assert ratio > 1.1
    assert deeper.train_seconds == pytest.approx(ratio * base.train_seconds)
    assert 1e-4 < base.train_seconds / 1000 < 1
    assert labels["adapting"].score_seconds > 1.2 * base.score_seconds > 0
    assert {labels[label].train_seconds for label in ("adapting", "rounded")} == {0.0}
    assert [one.trained_with for one in labels.values()] == [None, None, BASE, BASE]
    assert {label: one.runs for label, one in labels.items()} == {BASE: 1, "deeper": 2, "adapting": 2, "rounded": 2}
    seconds = sum(one.runs * (one.train_seconds + one.score_seconds) for one in labels.values())
    assert found.core_hours == pytest.approx(seconds / 3600)
    assert torch.get_num_threads() == threads


@pytest.mark.long
def test_twice_the_steps_take_twice_the_time_and_a_clock_takes_its_own(study: Study) -> None:
    one, two = (
        study_hours("tiny", plan(replace(study, entries={}, budget=budget), "text.jsonl", Path("runs"))).labels[BASE]
        for budget in (Seconds(seconds=7), Steps(steps=5))
    )
    assert (one.train_seconds, one.steps) == (7.0, None)
    assert (two.steps, two.train_seconds < 1) == (5, True)


@pytest.mark.long
def test_the_verb_prints_an_estimate_and_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_study(tmp_path, {"deeper": {"model.depth": 3}}, seeds=3, steps=10)
    ended = call("study", "study.py", "--data", "text.jsonl", "--estimate", "--quiet")
    assert ended.status == 0, ended.err
    assert "tiny: 6 runs left, 0.0 core hours without packing" in ended.out
    kept = json.loads((tmp_path / ESTIMATE).read_text())
    assert (kept["runs"], kept["labels"]["deeper"]["runs"], kept["labels"]["deeper"]["steps"]) == (6, 3, 10)
    assert not list(tmp_path.glob("runs/**/*.json"))
    told = call("study", "study.py", "--data", "text.jsonl", "--estimate", "--quiet", "--json", "--out", "there")
    assert json.loads(told.out)["labels"].keys() == {BASE, "deeper"}
    assert (tmp_path / "there" / ESTIMATE).exists()
    wrong = call("study", "study.py", "--data", "text.jsonl", "--estimate", "--select")
    assert (wrong.status, "--estimate are for a study alone" in wrong.err) == (2, True)
