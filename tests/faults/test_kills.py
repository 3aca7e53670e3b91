"""Commands that are killed at random moments of every phase: begun again they end as if nothing had been."""

import json
import random
import re
import shutil
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from conftest import write_text
from faults import SMALL, Command, Ended, check_files, durations, kill_at, tensors
from tiny_study import write_study

VERBS = ("run", "data", "run", "pack", "run", "study", "run", "score", "data", "pack")
"""The commands of ten kills."""
RUN = ("run", "tiny", *SMALL, "train.steps=6", "--data", "../text.txt", "--out", "run", "--json", "--quiet")
DATA = ("data", "../text.txt", "--out", "corpus", "model.vocabulary=300", "--json")
COMMANDS = {
    "run": RUN,
    "data": DATA,
    "pack": ("pack", "run", "pack.coding=EntropyModel", "--json", "--quiet"),
    "study": ("study", "study.py", "--data", "text.jsonl", "--json", "--quiet"),
    "score": ("score", "run/artifact.caddie", "--data", "../text.txt", "--gpus", "2", "--json", "--quiet"),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Try the number of kills that the option asks for."""
    if "kill" in metafunc.fixturenames:
        kills = range(metafunc.config.getoption("--kills"))
        metafunc.parametrize("kill", kills, ids=[f"{VERBS[kill % len(VERBS)]}-{kill}" for kill in kills])


@dataclass
class Undisturbed:
    """Commands that met no fault: the folder that each began in, what it left, the seconds of its phases."""

    place: Path
    ended: dict[str, Ended]
    left: dict[str, dict[str, bytes]]
    seconds: dict[str, dict[str, float]]

    def copy(self, verb: str, folder: Path) -> Path:
        """A folder as a command finds it."""
        shutil.copytree(self.place / f"before {verb}", folder)
        write_text(folder.parent / "text.txt")
        return folder


def left(verb: str, folder: Path) -> dict[str, bytes]:
    """Return the outcome of a command, which must be the same to the bit after any fault."""
    if verb == "study":
        return {"bits": repr([row["bits_per_byte"] for row in rows(folder)]).encode()}
    patterns = {"run": ["run/weights.safetensors", "run/artifact.caddie"], "data": ["corpus/*"], "pack": ["run/art*-*"]}
    paths = [path for pattern in patterns.get(verb, []) for path in sorted(folder.glob(pattern))]
    assert paths or verb == "score"
    place = re.compile(rb'"(source|inputs)": ".*",')  # of the text, by its path
    return {
        path.name: _bits(path) if path.suffix == ".safetensors" else place.sub(b"", path.read_bytes()) for path in paths
    }


def _bits(path: Path) -> bytes:
    return repr(tensors(path)).encode()


def rows(folder: Path) -> list[dict[str, float]]:
    """The results of the study."""
    (path,) = (
        folder.glob("studies/**/results.jsonl") if (folder / "studies").exists() else folder.rglob("results.jsonl")
    )
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    place = tmp_path_factory.mktemp("undisturbed")
    write_text(place / "text.txt")
    found = Undisturbed(place, {}, {}, {})
    for verb in COMMANDS:
        folder = place / f"before {verb}"
        shutil.copytree(place / "run", folder) if verb in ("pack", "score") else folder.mkdir()
        if verb == "study":
            write_study(folder, {}, seeds=1, steps=3)
        shutil.copytree(folder, place / verb)
        command = Command(place / verb, *COMMANDS[verb])
        ended = command.end()
        assert ended.status == 0, ended.err
        found.ended[verb], found.left[verb] = ended, left(verb, place / verb)
        found.seconds[verb] = durations(command, ended.seconds)
    return found


@pytest.mark.long
def test_a_command_that_is_killed_begins_again(kill: int, undisturbed: Undisturbed, tmp_path: Path) -> None:
    verb, chance = VERBS[kill % len(VERBS)], random.Random(kill)
    folder = undisturbed.copy(verb, tmp_path / "work")
    command = Command(folder, *COMMANDS[verb])
    phases = undisturbed.seconds[verb] or {"begin": undisturbed.ended[verb].seconds}
    phase = chance.choice(sorted(phases))
    if verb in ("study", "score"):
        whom = _kill_one_of(command, chance, undisturbed.ended[verb].seconds)
    else:
        whom = kill_at(command, phase, chance.uniform(0.0, phases[phase]))
    ended = command.end()
    print(f"killed {verb} in {whom}")
    check_files(folder, temporary=True)
    if whom == "a process of two":
        assert (ended.status, len(ended.err.splitlines())) == (128 + signal.SIGKILL, 1), ended.err
    again = _again(verb, folder, whom == "a job")
    assert again.status == 0, again.err
    check_files(folder, temporary=True)
    assert verb != "run" or (folder / "run" / "report.html").exists()
    assert left(verb, folder) == undisturbed.left[verb]
    if verb == "score":
        bits = [json.loads(one.out)["bits_per_byte"] for one in (again, undisturbed.ended[verb])]
        assert bits[0] == bits[1]


def _kill_one_of(command: Command, chance: random.Random, seconds: float) -> str:
    """Kill the process of the command, or one that it has started."""
    command.wait(chance.uniform(0.0, seconds))
    victim, whom = command.process.pid, "the first process"
    with suppress(psutil.NoSuchProcess):  # it may end meanwhile
        if chance.random() < 0.5:
            started = [one for one in psutil.Process(victim).children() if "caddie" in one.cmdline()]
            job = any("trial" in one.cmdline() for one in started)
            if started:
                victim, whom = chance.choice(started).pid, "a job" if job else "a process of two"
    if command.process.is_alive():
        with suppress(psutil.NoSuchProcess):
            psutil.Process(victim).kill()
    else:
        whom = "its end"
    return whom


def _again(verb: str, folder: Path, failed: bool) -> Ended:
    """The same command."""
    return Command(folder, *COMMANDS[verb], *(["--retry"] if failed else [])).end()
