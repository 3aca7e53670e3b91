"""A part of a study: seconds, steps, and all that counts steps."""

import json
from pathlib import Path

import pytest
from conftest import call
from test_runner import Pretended
from tiny_study import SETTINGS, write_study, write_text

from caddie.config.schedules import IterationWarmdown, Rewarmed, StepRamp, Warmdown
from caddie.errors import UserError
from caddie.lab.findings import findings
from caddie.lab.rows import RESULTS, read_rows
from caddie.lab.study import Entry, Seconds, Steps, Study, shortened
from caddie.recipes.catalog import find
from caddie.train.averaging import EMA, TailEMA

RECORD = find("parallel_muon")


def test_what_counts_steps_shrinks_with_them() -> None:
    whole = RECORD.but({"train.steps": 9000, "train.seconds": 600})
    tenth = shortened(whole, 0.1)
    assert (tenth.train.steps, tenth.train.seconds) == (900, 60.0)
    assert isinstance(whole.train.lr_schedule, IterationWarmdown)
    assert tenth.train.lr_schedule == IterationWarmdown(steps=whole.train.lr_schedule.steps // 10)
    momenta = [one.train.optimizers["matrix"].momentum for one in (whole, tenth)]  # type: ignore[attr-defined]
    assert [momentum.steps for momentum in momenta] == [1500, 150]
    assert isinstance(momenta[1], StepRamp)
    assert isinstance(whole.train.averaging, EMA)
    assert tenth.train.averaging == EMA(decay=whole.train.averaging.decay**10)
    back = tenth.but({path: value for path, value in tenth.diff(whole).items() if path.startswith("train.")})
    assert back == whole, "nothing else changed"


def test_schedules_by_progress_stay() -> None:
    schedule = Rewarmed(of=Warmdown(fraction=0.5), begins=(0.5,), steps=32)
    given = {"train.lr_schedule": schedule, "train.averaging": TailEMA(steps=150.0), "train.steps": 4}
    found = shortened(RECORD.but(given), 0.25).train
    assert found.lr_schedule == schedule.but(steps=8)
    assert found.averaging == TailEMA(steps=38.0)
    assert found.steps == 1
    assert shortened(find("baseline_mini"), 0.1).train.seconds == 3.0


def test_a_part_of_a_study_is_a_study_of_its_own() -> None:
    entries = {"low": Entry(diff={"train.optimizers.matrix.lr": 0.01})}
    whole = Study(name="rates", base=find("baseline_mini"), entries=entries, budget=Steps(steps=150))
    tenth = whole.part(0.1)
    assert (tenth.name, [tenth.recipe(label).train.steps for label in tenth.labels]) == ("rates-0.1", [15, 15])
    assert (tenth.recipe("low").name, tenth.recipe("low").base) == ("low", "baseline_mini")
    told = findings({**tenth.to_json(), "command": "caddie study s.py --fraction 0.1"}, [])
    assert told["study"]["budget"] == "0.1 of 150 steps each"
    assert "A tenth of the training" not in dict(told["measured"])
    assert (
        Study(name="rates", base=find("tiny"), budget=Seconds(seconds=30)).part(0.5).recipe("base").train.seconds == 15
    )
    for wrong in (0.0, -1.0, 1.5):
        with pytest.raises(UserError, match=r"the fraction of rates-.* must be above 0"):
            whole.part(wrong)


def test_the_verb_keeps_a_part_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("caddie.cli.study._executor", lambda *given: Pretended())
    write_study(tmp_path, {}, seeds=2, steps=10)
    ended = call("study", "study.py", "--data", "text.jsonl", "--fraction", "0.3", "--quiet")
    assert ended.status == 0, ended.err
    assert {row["study"] for row in read_rows(tmp_path / "fraction-0.3" / RESULTS)} == {"tiny-0.3"}
    jobs = [json.loads(path.read_text()) for path in tmp_path.glob("runs/tiny-0.3/*/job.json")]
    assert [job["runs"][0]["recipe"]["train"]["steps"] for job in jobs] == [3, 3]
    assert not (tmp_path / RESULTS).exists()
    whole = call("study", "study.py", "--data", "text.jsonl", "--fraction", "1", "--quiet")
    assert (whole.status, len(read_rows(tmp_path / RESULTS))) == (0, 2)


def test_the_command_line_takes_modelled_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("caddie.cli.study._executor", lambda *given: Pretended())
    write_text(tmp_path)
    (tmp_path / "mine.py").write_text(
        f"from caddie.recipes.catalog import find\nmine = find('baseline_mini').but({SETTINGS!r})\n"
    )
    budget = ("--modelled-seconds", "0.5", "--seeds", "1", "--quiet")
    ended = call("sweep", "mine.py:mine", "train.batch_tokens=128", "--data", "text.jsonl", *budget)
    assert ended.status == 0, ended.err
    (results,) = tmp_path.glob("runs/sweep-*/study.json")
    told = json.loads(results.read_text())
    assert told["equal"] == "modelled seconds"
    base, twice = told["step_times"].values()
    assert twice["milliseconds"] == pytest.approx(2 * base["milliseconds"])
    both = call("sweep", "mine.py:mine", "model.depth=3", "--data", "text.jsonl", "--steps", "3", *budget)
    assert (both.status, "give one of them" in both.err) == (2, True)
