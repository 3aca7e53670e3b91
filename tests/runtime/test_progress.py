"""Progress of long work, and the seconds of its phases."""

import io

import pytest
from recording import RecordedProgress, Recorder

from caddie.runtime.progress import SILENT, JsonLines, Phases, relay


def test_phases_are_reported_as_they_begin() -> None:
    recorder = Recorder(lambda event: None)
    phases = Phases(recorder)
    with phases("train"), phases("score"):
        assert recorder.phases == ["train", "score"]


def test_silent_progress_takes_everything() -> None:
    SILENT.phase("train")
    SILENT.step({"event": "tokens", "done": 1, "total": 2})
    SILENT.note("a line")


def test_progress_goes_through_a_pipe() -> None:
    stream, there = io.StringIO(), RecordedProgress()
    here = JsonLines(stream)
    here.phase("score")
    here.step({"event": "tokens", "done": 1, "total": 2})
    here.note("two\nlines")
    assert all(relay(line, there) for line in stream.getvalue().splitlines())
    assert (there.phases, there.notes) == (["score"], ["two\nlines"])
    assert there.events == [{"event": "tokens", "done": 1, "total": 2}]
    for other in ("", "Traceback", "7", "[]", "{}", '{"progress": "exit", "value": 1}', '{"progress": [], "value": 1}'):
        assert not relay(other, there)


class Ticks:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def test_a_clock_of_phases_adds_up_phases() -> None:
    ticks = Ticks()
    phases = Phases(now=ticks)
    assert phases.seconds == {}
    with phases("train"):
        ticks.time += 2.0
    ticks.time += 50.0  # outside of any phase
    with phases("score"):
        ticks.time += 0.5
    with phases("train"):
        ticks.time += 1.0
    assert phases.seconds == {"train": 3.0, "score": 0.5}


def test_a_clock_of_phases_charges_a_phase_that_fails() -> None:
    ticks = Ticks()
    phases = Phases(now=ticks)

    def work() -> None:
        with phases("train"):
            ticks.time += 4.0
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        work()
    assert phases.seconds == {"train": 4.0}


def test_a_clock_of_phases_nests() -> None:
    ticks = Ticks()
    phases = Phases(now=ticks)
    with phases("all"):
        ticks.time += 1.0
        with phases("part"):
            ticks.time += 2.0
    assert phases.seconds == {"all": 3.0, "part": 2.0}
