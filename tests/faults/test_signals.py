"""SIGINT and SIGTERM in every phase, clocks that jump, and data that change under a run."""

import json
import lzma
import os
import shutil
import signal
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from conftest import write_text
from faults import PHASES as PHASES_OF_FUNCTIONS
from faults import SMALL, Command, check_files, tensors

RUN = ("run", "tiny", *SMALL, "train.steps=4", "--data", "../text.txt", "--out", "run", "--json", "--quiet")
PHASES = ("prepare", "check", "warm-up", "train", "calibrate", "score weights", "pack", "score file", "result")
OTHERS = {
    "pack": (("pack", "run", "--out", "packed.caddie", "--json", "--quiet"), ("calibrate", "pack")),
    "data": (("data", "../text.txt", "--out", "corpus", "model.vocabulary=300", "--json"), ("prepare",)),
    "compress": (("compress", "run/artifact.caddie", "../text.txt", "--out", "short.cz", "--quiet"), ("compress",)),
    "sample": (("sample", "run/artifact.caddie", "--tokens", "100000"), ("sample",)),
}
WEIGHTS, ARTIFACT = "run/weights.safetensors", "run/artifact.caddie"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that met no fault."""
    folder = tmp_path_factory.mktemp("signals") / "work"
    write_text(folder.parent / "text.txt")
    ended = Command(folder, *RUN).end()
    assert ended.status == 0, ended.err
    return folder


@pytest.mark.long
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_run_stops_in_any_phase_and_goes_on(
    number: signal.Signals, phase: str, undisturbed: Path, tmp_path: Path
) -> None:
    write_text(tmp_path / "text.txt")
    folder = tmp_path / "work"
    command = Command(folder, *RUN)
    command.wait_for(phase)
    command.signal(number)
    ended = command.end()
    assert ended.status == 128 + number, ended
    (line,) = ended.err.strip().splitlines()
    assert line.startswith("caddie: stopped")
    assert "go on with: caddie run tiny" in line
    check_files(folder)
    again = Command(folder, *RUN).end()
    assert again.status == 0, again
    assert tensors(folder / WEIGHTS) == tensors(undisturbed / WEIGHTS)
    assert (folder / ARTIFACT).read_bytes() == (undisturbed / ARTIFACT).read_bytes()


def compute_at(folder: Path, function: str) -> None:
    """Let a function take half a minute in one call of a library, in which Python hears no signal."""
    module, _, name = function.rpartition(".")
    before = getattr(import_module(module), name)

    def computing(*arguments: Any, **named: Any) -> Any:
        found, data = before(*arguments, **named), os.urandom(1 << 26)
        (folder.parent / "computing").touch()
        lzma.compress(data, preset=9)
        return found

    setattr(import_module(module), name, computing)


@pytest.mark.long
@pytest.mark.parametrize("phase", ["prepare", "warm-up", "calibrate"])
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_run_in_a_long_call_of_a_library_stops(number: signal.Signals, phase: str, tmp_path: Path) -> None:
    """It ends in a second or two, long before the call does, and says how to go on."""
    write_text(tmp_path / "text.txt")
    function = next(name for name, begins in PHASES_OF_FUNCTIONS.items() if begins == phase)
    command = Command(tmp_path / "work", *RUN, prepare=compute_at, given=[function])
    while not (tmp_path / "computing").exists():
        command.wait(0.1)
    command.wait(1.0)
    begin = time.monotonic()
    command.signal(number)
    ended = command.end()
    assert time.monotonic() - begin < 8
    assert (ended.status, ended.err.count("\n")) == (128 + number, 1), ended
    assert "caddie: stopped; go on with: caddie run tiny" in ended.err
    check_files(tmp_path / "work", temporary=True)


@pytest.mark.long
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("verb", OTHERS)
def test_other_commands_stop_in_any_phase(verb: str, number: signal.Signals, undisturbed: Path, tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    arguments, phases = OTHERS[verb]
    for phase in phases:
        folder = tmp_path / phase / "work"
        shutil.copytree(undisturbed, folder)
        shutil.copy(tmp_path / "text.txt", folder.parent)
        command = Command(folder, *arguments)
        command.wait_for(phase)
        command.signal(number)
        ended = command.end()
        said = [line for line in ended.err.splitlines() if line.startswith("caddie: ")]
        assert (ended.status, said) == (128 + number, [f"caddie: {'interrupted' if number == 2 else 'terminated'}"])
        check_files(folder)
        if verb not in ("compress", "sample"):  # which take long, and wrote nothing
            assert Command(folder, *arguments).end().status == 0
            check_files(folder)


def jump(folder: Path, seconds: float) -> None:
    """Let the wall clock jump by some seconds at every other look."""
    told = time.time
    looks = [0]

    def jumping() -> float:
        looks[0] += 1
        return told() + seconds * (looks[0] % 2)

    time.time = jumping


@pytest.mark.long
@pytest.mark.parametrize("seconds", [-1e6, 1e6])
def test_a_clock_that_jumps_changes_nothing(seconds: float, undisturbed: Path, tmp_path: Path) -> None:
    """A budget of seconds is kept by a clock that does not jump, and no file that is being written counts as old."""
    write_text(tmp_path / "text.txt")
    timed = [setting.replace("train.seconds=none", "train.seconds=0.3") for setting in RUN if "steps" not in setting]
    ended = Command(tmp_path / "timed", *timed, prepare=jump, given=[seconds]).end()
    assert ended.status == 0, ended.err
    log = (tmp_path / "timed" / "run" / "log.jsonl").read_text().splitlines()
    assert 0.3 <= json.loads(log[-1])["seconds"] < 3
    ended = Command(tmp_path / "steps", *RUN, prepare=jump, given=[seconds]).end()
    assert ended.status == 0, ended.err
    assert tensors(tmp_path / "steps" / WEIGHTS) == tensors(undisturbed / WEIGHTS)


def change_at(folder: Path, function: str, split: str, cut: bool) -> None:
    """Change a shard, or cut it short, when a function is called."""
    module, _, name = function.rpartition(".")
    before = getattr(import_module(module), name)

    def changed(*arguments: Any, **named: Any) -> Any:
        (path,) = folder.glob(f"data/*/{split}_000000.bin")
        with path.open("r+b") as file:
            if cut:
                file.truncate(2000)
            else:
                file.seek(4000)
                file.write(b"\x01\x00")
        return before(*arguments, **named)

    setattr(import_module(module), name, changed)


@pytest.mark.long
def test_data_that_change_under_a_run_are_told(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    folder = tmp_path / "work"
    ended = Command(folder, *RUN, prepare=change_at, given=["caddie.train.loop.warm_up", "train", False]).end()
    assert ended.status == 2, ended
    (line,) = ended.err.splitlines()
    assert "train_000000.bin was changed while it was in use" in line
    assert not (folder / WEIGHTS).exists()
    refused = Command(folder, *RUN).end()
    assert refused.status == 2
    assert "changed since it was prepared" in refused.err
    check_files(folder)


@pytest.mark.long
def test_held_out_text_that_changes_while_it_is_scored_is_told(undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    shutil.copytree(undisturbed, folder)
    (corpus,) = folder.glob("data/text-*")
    arguments = ("score", ARTIFACT, "--data", corpus, "--json", "--quiet")
    ended = Command(folder, *arguments, prepare=change_at, given=["caddie.run.run.score_kinds", "val", False]).end()
    assert (ended.status, ended.out) == (2, ""), ended
    (line,) = ended.err.splitlines()
    assert "val_000000.bin was changed while it was in use" in line


@pytest.mark.long
def test_data_that_are_cut_short_under_a_run_are_told(tmp_path: Path) -> None:
    """The system would end a process that reads past the end of a file that it has mapped, without a line."""
    write_text(tmp_path / "text.txt")
    folder = tmp_path / "work"
    ended = Command(folder, *RUN, prepare=change_at, given=["caddie.train.loop.warm_up", "train", True]).end()
    assert ended.status == 2, ended
    (line,) = ended.err.splitlines()
    assert "train_000000.bin was cut short while it was in use, to 2,000 of" in line
    assert not (folder / WEIGHTS).exists()
    assert Command(folder, *RUN).end().status == 0
    check_files(folder)


@pytest.mark.long
def test_held_out_text_that_is_cut_short_while_it_is_scored_is_told(undisturbed: Path, tmp_path: Path) -> None:
    """It was read before."""
    folder = tmp_path / "work"
    shutil.copytree(undisturbed, folder)
    (corpus,) = folder.glob("data/text-*")
    arguments = ("score", ARTIFACT, "--data", corpus, "--json", "--quiet")
    ended = Command(folder, *arguments, prepare=change_at, given=["caddie.run.run.score_kinds", "val", True]).end()
    assert (ended.status, ended.out) == (2, ""), ended
    assert "val_000000.bin was changed while it was in use" in ended.err
