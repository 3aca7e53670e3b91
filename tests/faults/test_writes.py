"""A disk that is full, or read-only, from any write of a command on: one line, nothing half written, and it goes on."""

import errno
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import write_text
from faults import SMALL, Command, check_files, count_writes, fill_disk, refuse_writes, with_jobs_here
from tiny_study import write_study

RUN = ("run", "tiny", *SMALL, "train.steps=2", "--data", "../text.txt", "--out", "run", "--json", "--quiet")
COMMANDS = {
    "run": RUN,
    "pack": ("pack", "run", "--out", "packed.caddie", "--json", "--quiet"),
    "data": ("data", "../text.txt", "--out", "corpus", "data.tokenizer=RawBytes", "model.vocabulary=257", "--json"),
    "study": ("study", "study.py", "--data", "text.jsonl", "--json", "--quiet"),
    "compress": ("compress", "run/artifact.caddie", "../short.txt", "--out", "short.cz", "--json", "--quiet"),
}
NAMES = re.compile(
    r"\b(runs?|corpus|packed\.caddie|short\.cz|data|study\.json|results\.jsonl|(results|documents)\.csv|report\.(html|md))\b"
)
EVERY = {"run": 5, "study": 25}
"""Of these many writes one is refused in the long suite, for a run takes seconds."""
FAULTS = {"full": (fill_disk,), "no space": (refuse_writes, errno.ENOSPC), "read-only": (refuse_writes, errno.EROFS)}
SAYS = {"full": "File too large", "no space": "No space left on device", "read-only": "Read-only file system"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a text and, in `run`, of a run of it."""
    folder = tmp_path_factory.mktemp("writes")
    write_text(folder / "text.txt")
    (folder / "short.txt").write_text((folder / "text.txt").read_text()[:300])
    ended = Command(folder / "run", *RUN).end()
    assert ended.status == 0, ended.err
    return folder


def begun(verb: str, place: Path, folder: Path) -> Path:
    """The folder that a command begins in."""
    for name in ("text.txt", "short.txt"):
        shutil.copy(place / name, folder.parent)
    if verb in ("pack", "compress"):
        shutil.copytree(place / "run", folder)
    else:
        folder.mkdir()
    if verb == "study":
        write_study(folder, {}, seeds=1, steps=2)
    return folder


def command(verb: str, folder: Path, prepare: Callable[..., object], *given: object) -> Command:
    """Begin a command whose writes are looked at by `prepare`."""
    if verb == "study":
        prepare, given = with_jobs_here, (prepare, *given)
    return Command(folder, *COMMANDS[verb], prepare=prepare, given=given)


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("verb", COMMANDS)
def test_every_write_may_be_refused(
    verb: str, fault: str, place: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    note = tmp_path / "writes"
    folder = begun(verb, place, tmp_path / "whole")
    whole = command(verb, folder, count_writes, note).end()
    assert whole.status == 0, whole.err
    writes = note.read_text().splitlines()
    every = 1 if pytestconfig.getoption("--kills") >= 100 else EVERY.get(verb, 1)
    prepare, *given = FAULTS[fault]
    refused = 0
    for number in range(1, len(writes) + 1, every):
        folder = begun(verb, place, tmp_path / f"{number}")
        ended = command(verb, folder, prepare, number, *given).end()
        about = f"write {number} of {len(writes)}, {writes[number - 1]}: {ended}"
        if ended.status or fault != "full":  # what is made or renamed needs no space
            lines = [line for line in ended.err.splitlines() if line.startswith("caddie: ")]
            assert (ended.status, len(lines), "Traceback" in ended.err) == (2, 1, False), about
            assert SAYS[fault] in lines[0], about
            assert NAMES.search(lines[0]), about
            refused += 1
        check_files(folder)
        again = Command(folder, *COMMANDS[verb]).end()
        assert again.status == 0 or ended.status == 0, f"{about}; then {again}"
        check_files(folder)
        shutil.rmtree(folder)
    print(f"{verb}, {fault}: refused at {refused} of {len(writes)} writes")
    assert refused
