"""A part of a study: seconds, steps, and all that counts steps."""

from __future__ import annotations

import pytest

from caddie.config.schedules import IterationWarmdown, Rewarmed, StepRamp, Warmdown
from caddie.errors import UserError
from caddie.lab.findings import findings
from caddie.lab.fraction import shortened
from caddie.lab.study import Entry, Seconds, Steps, Study
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
    assert "A tenth of it" not in dict(told["measured"])
    assert (
        Study(name="rates", base=find("tiny"), budget=Seconds(seconds=30)).part(0.5).recipe("base").train.seconds == 15
    )
    for wrong in (0.0, -1.0, 1.5):
        with pytest.raises(UserError, match=r"the fraction of rates-.* must be above 0"):
            whole.part(wrong)
