"""Trackers: what they are sent, from a run that goes on or is over, and that no tracker harms a run."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, Ended

from caddie.errors import UserError
from caddie.report.read import read_steps
from caddie.runtime.progress import Progress
from caddie.share import track

Caddie = Callable[..., Ended]


class Recorder:
    """A tracker that keeps what it is sent."""

    made: list[Recorder]

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.folder, self.config, self.place = folder, config, "the test"
        self.points: list[tuple[int, dict[str, float]]] = []
        self.result: dict[str, float] = {}
        Recorder.made.append(self)

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self.points.append((step, numbers))

    def finish(self, step: int, result: dict[str, float]) -> None:
        self.last, self.result = step, result


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """The recorders that were made in place of trackio."""
    Recorder.made = []
    monkeypatch.setitem(track.TRACKERS, "trackio", Recorder)  # type: ignore[arg-type]
    monkeypatch.setattr(track, "check_installed", lambda kind: None)
    monkeypatch.setattr(track, "POLL_SECONDS", 0.01)
    return Recorder.made


@pytest.fixture
def run(tiny_run: Any, tmp_path: Path) -> Path:
    """A copy of a finished run."""
    return Path(shutil.copytree(tiny_run.folder, tmp_path / "run"))


def test_a_finished_run_is_sent_with_recipe_and_result(caddie: Caddie, run: Path, recorder: list[Recorder]) -> None:
    ended = caddie("track", run, "--to", "trackio", "--json")
    (made,), steps = recorder, read_steps(run / "log.jsonl")
    assert (ended.status, ended.err) == (0, "")
    assert json.loads(ended.out) == {"tracker": "trackio", "events": len(made.points), "place": "the test"}
    assert made.folder.name == "run"
    assert made.config["model"]["width"] == 16
    assert made.config["seed"] == 1337
    trained = [(step, found) for step, found in made.points if "train/loss" in found]
    assert [step for step, _ in trained] == [step["step"] for step in steps]
    for (_, found), step in zip(trained, steps, strict=True):
        for name in ("bits_per_byte", "tokens_per_second", "lr_scale"):
            assert found[f"train/{name}"] == step[name]
    result = json.loads((run / "result.json").read_text())
    assert made.last == 2
    assert made.result["result/bits_per_byte"] == result["bits_per_byte"]
    assert made.result["result/under_cap"] == 1.0
    assert made.result["result/seconds.train"] == result["seconds"]["train"]


def test_steps_of_a_resumed_run_replace_its_earlier_ones_and_none_is_sent_twice() -> None:
    def step(number: int, loss: float, kind: str = "step") -> dict[str, Any]:
        return {"event": kind, "step": number, "loss": loss}

    sent: dict[str, int] = {}
    first = [step(1, 9.0), step(2, 8.0), step(1, 7.0, "held_out"), {"event": "start", "step": 1}, step(2, 6.0)]
    assert track.latest(first, sent) == [step(1, 9.0), step(1, 7.0, "held_out"), step(2, 6.0)]
    assert track.latest([step(2, 5.0), step(3, 4.0), step(1, 3.0, "forecast")], sent) == [
        step(1, 3.0, "forecast"),
        step(3, 4.0),
    ]
    assert sent == {"step": 3, "held_out": 1, "forecast": 1}


def test_numbers_alone_are_sent() -> None:
    event = {"event": "step", "step": 3, "loss": float("nan"), "lr_scale": 1.0, "text": "some"}
    assert track.numbers(event) == {"train/lr_scale": 1.0}


def test_a_run_is_followed_line_by_line(tmp_path: Path, recorder: list[Recorder]) -> None:
    log, end = tmp_path / "log.jsonl", threading.Event()

    def write(text: str) -> None:
        with log.open("a") as file:
            file.write(text)

    def arrives(count: int) -> None:
        for _ in range(1000):
            if recorder and len(recorder[0].points) == count:
                return
            threading.Event().wait(0.01)
        raise AssertionError(f"no {count} points")

    def follow() -> None:
        track.send("trackio", track.open_tracker("trackio", tmp_path, end), tmp_path, end)

    thread = threading.Thread(target=follow)
    thread.start()
    write('{"event": "step", "step": 1, "loss": 3.0}\n{"event": "st')
    arrives(1)
    write('ep", "step": 2, "loss": 2.0}\n')
    arrives(2)
    write('{"event": "step", "step": 3, "loss": 1.0}\n')
    end.set()
    thread.join(10)
    assert recorder[0].points == [(1, {"train/loss": 3.0}), (2, {"train/loss": 2.0}), (3, {"train/loss": 1.0})]
    assert recorder[0].last == 3
    assert recorder[0].result == {}, "it has no result yet"


def test_what_is_no_run_is_one_line(caddie: Caddie, tmp_path: Path, recorder: list[Recorder]) -> None:
    ended = caddie("track", tmp_path, "--to", "trackio")
    assert ended.status == 2
    assert "log.jsonl is missing; name the folder of a run that has trained" in ended.err
    assert not recorder


@pytest.mark.parametrize("kind", track.TRACKERS)
def test_a_missing_library_is_one_line_that_names_the_extra(
    kind: str, caddie: Caddie, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(track, "find_spec", lambda name: None)
    for command in (["track", tmp_path, "--to", kind], ["run", "tiny", "--track", kind, "--out", tmp_path / "run"]):
        ended = caddie(*command)
        install = f"caddie: {kind} is not installed; install it with: pip install {kind}\n"
        assert (ended.status, ended.err) == (2, install)
    assert not list(tmp_path.iterdir())


def test_whatever_a_tracker_raises_is_one_line(
    caddie: Caddie, run: Path, recorder: list[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Recorder, step: int, numbers: dict[str, float]) -> None:
        print("noise of a library")
        raise ConnectionError("no route\nto the host")

    monkeypatch.setattr(Recorder, "log", fail)
    ended = caddie("track", run, "--to", "trackio", "--json")
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.endswith("caddie: trackio failed: no route\n")


# While a run goes on: the process that follows it has a trackio of the test's own


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes a library `trackio` whose `finish` is the given code; it writes to the file that is returned."""
    written = tmp_path / "written.jsonl"

    def make(finish: str) -> Path:
        code = f"""
            import json, time

            def init(**settings):
                print("a banner on standard output")
                return Run()

            class Run:
                def log(self, numbers, step):
                    with open({str(written)!r}, "a") as file:
                        print(json.dumps([step, numbers]), file=file)

            def finish():
                {finish}
        """
        (tmp_path / "library").mkdir()
        (tmp_path / "library" / "trackio.py").write_text(textwrap.dedent(code))
        monkeypatch.syspath_prepend(tmp_path / "library")
        monkeypatch.delitem(sys.modules, "trackio", raising=False)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "library"))
        return written

    return make


@pytest.mark.long
@pytest.mark.usefixtures("one_process", "unprobed", "alive_once")
@pytest.mark.parametrize(
    ("finish", "said"),
    [
        ("pass", "followed by trackio; look with: trackio show --project caddie\n"),
        (
            "raise OSError('the disk is full')",
            "trackio: trackio failed: the disk is full; the run's own files are complete, and `caddie",
        ),
        ("time.sleep(600)", "trackio: took more than 5 s to end; the run's own files are complete, and `caddie"),
    ],
)
def test_no_tracker_harms_the_run_that_it_follows(
    finish: str,
    said: str,
    caddie: Caddie,
    library: Callable[[str], Path],
    tiny_run: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "sleep" in finish:
        monkeypatch.setattr(track, "PATIENCE_SECONDS", 5.0)
    written = library(finish)
    out = tmp_path / "run"
    ended = caddie("run", "tiny", *TINY, "--data", tiny_run.text, "--out", out, "--track", "trackio", "--json")
    assert ended.status == 0
    assert said in ended.err
    result = json.loads(ended.out)
    points = [json.loads(line) for line in written.read_text().splitlines()]
    assert [step for step, numbers in points if "train/loss" in numbers] == [1, 2]
    assert points[-1][1]["result/bits_per_byte"] == result["bits_per_byte"]


def test_a_run_goes_on_where_no_process_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **settings: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(track.subprocess, "Popen", refuse)
    notes: list[str] = []
    progress, trained = Progress(), []
    monkeypatch.setattr(progress, "note", notes.append)
    with track.tracked("wandb", tmp_path, progress):
        trained.append(True)
    assert trained
    assert notes == ["wandb: Resource temporarily unavailable; the run goes on without it"]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os; os.kill(os.getpid(), 9)", "its process was ended by signal 9, out of memory?"),
        ("import time; time.sleep(600)", "took more than 1 s to end"),
    ],
)
def test_a_follower_that_is_killed_is_told_from_a_slow_one(
    code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, notes, progress = subprocess.Popen, list[str](), Progress()

    def instead(command: list[str], **settings: Any) -> subprocess.Popen[str]:
        return begin([sys.executable, "-c", code], **settings)

    monkeypatch.setattr(track.subprocess, "Popen", instead)
    monkeypatch.setattr(track, "PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(progress, "note", notes.append)
    run = tmp_path / "my run"
    with track.tracked("wandb", run, progress):
        pass
    assert notes == [], "nothing was logged, and the run itself says why"
    run.mkdir()
    (run / "log.jsonl").touch()
    with track.tracked("wandb", run, progress):
        pass
    again = f"`caddie track '{run}' --to wandb` sends it again"
    assert notes == [f"wandb: {said}; the run's own files are complete, and {again}"]


# The libraries themselves


def sent_to(kind: str, run: Path, **environment: str) -> dict[str, Any]:
    """Return the output of `caddie track RUN --to KIND --json` in a process of its own, without a network."""
    pytest.importorskip(kind)
    done = subprocess.run(
        [sys.executable, "-m", "caddie", "track", str(run), "--to", kind, "--json"],
        env={**os.environ, "HOME": str(run.parent), **environment},
        cwd=run.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.long
def test_trackio_keeps_it(run: Path) -> None:
    facts = sent_to("trackio", run, TRACKIO_DIR=str(run.parent / "kept"))
    with sqlite3.connect(run.parent / "kept" / "caddie.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
        ((config,),) = database.execute("select config from configs").fetchall()
    assert len(rows) == facts["events"] + 1
    assert {name for name, *_ in rows} == {"run"}
    bits = [json.loads(numbers)["train/bits_per_byte"] for _, _, numbers in rows if b"train/loss" in numbers]
    assert bits == [step["bits_per_byte"] for step in read_steps(run / "log.jsonl")]
    assert (
        json.loads(rows[-1][2])["result/bits_per_byte"]
        == json.loads((run / "result.json").read_text())["bits_per_byte"]
    )
    assert json.loads(config)["model"]["width"] == 16


@pytest.mark.long
def test_wandb_keeps_it(run: Path) -> None:
    facts = sent_to("wandb", run, WANDB_MODE="offline", WANDB_SILENT="true")
    assert facts["place"].startswith("wandb sync ")
    (file,) = Path(facts["place"].removeprefix("wandb sync ")).glob("*.wandb")
    kept = file.read_bytes()
    for step in read_steps(run / "log.jsonl"):
        assert str(step["bits_per_byte"]).encode() in kept
    score = json.loads((run / "result.json").read_text())["bits_per_byte"]
    for name in ("train/bits_per_byte", "train/lr_scale", "result/bits_per_byte", str(score), "residual_mix"):
        assert name.encode() in kept


@pytest.mark.long
def test_tensorboard_keeps_the_last_call(run: Path) -> None:
    for _ in range(2):
        facts = sent_to("tensorboard", run)
    assert facts["place"] == f"tensorboard --logdir {run.parent}"
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = (run / "tensorboard").iterdir()
    kept = EventAccumulator(str(file))
    kept.Reload()
    steps = read_steps(run / "log.jsonl")
    for name in ("bits_per_byte", "tokens_per_second", "lr_scale"):
        points = [(point.step, point.value) for point in kept.Scalars(f"train/{name}")]
        assert points == [(step["step"], pytest.approx(step[name])) for step in steps]
    score = json.loads((run / "result.json").read_text())["bits_per_byte"]
    assert [point.value for point in kept.Scalars("result/bits_per_byte")] == [pytest.approx(score)]
    assert b"model.width = 16" in kept.Tensors("recipe/text_summary")[0].tensor_proto.string_val[0]


def test_errors_for_people_pass_as_they_are(
    recorder: list[Recorder], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Recorder, step: int, numbers: dict[str, float]) -> None:
        raise UserError("a sentence")

    monkeypatch.setattr(Recorder, "log", refuse)
    (end := threading.Event()).set()
    with pytest.raises(UserError, match=r"^a sentence$"):
        track.send("trackio", track.open_tracker("trackio", run, end), run, end)
