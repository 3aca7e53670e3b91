"""Files that appear whole or not at all, and what is left of those that did not."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from caddie.errors import UserError
from caddie.files import (
    check_new_file,
    check_new_folder,
    expanded,
    making,
    process_name,
    read_file,
    replacing,
    unfinished,
)


@pytest.fixture(scope="module")
def gone() -> str:
    """Name of an unfinished file of a process that has ended."""
    program = "from pathlib import Path; from caddie.files import unfinished; print(unfinished(Path('whole')).name)"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def own(tmp_path: Path) -> str:
    return unfinished(tmp_path / "whole").name


NAMES: dict[str, Callable[[str, str], str]] = {
    "ended": lambda own, gone: gone,
    "this process": lambda own, gone: own,
    "number was given out again": lambda own, gone: re.sub(r"-\d+-(?=[0-9a-f]{16})", "-1-", own),
    "another machine": lambda own, gone: re.sub(r"^.caddie-", ".caddie-another", own),
    "an earlier version": lambda own, gone: f".caddie-machine-{os.getpid()}-0123456789abcdef.tmp",
}


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize(
    ("whose", "hours", "stays"),
    [
        ("ended", 0, False),
        ("ended", -300, False),
        ("this process", 0, True),
        ("this process", 300, True),  # or the clock jumped
        ("number was given out again", 0, False),
        ("another machine", 0, True),
        ("another machine", 2, False),
        ("an earlier version", 0, True),
        ("an earlier version", 2, False),
    ],
)
def test_what_a_killed_process_left_is_removed_by_the_next_write(
    whose: str, hours: float, stays: bool, folder: bool, gone: str, tmp_path: Path
) -> None:
    left = tmp_path / NAMES[whose](own(tmp_path), gone)
    inside = left / "train_000000.bin" if folder else left
    inside.parent.mkdir(exist_ok=True)
    inside.write_bytes(b"half of it")
    for path in {left, inside}:
        os.utime(path, times=(time.time() - 3600 * hours,) * 2)
    others = {tmp_path / ".0123456789abcdef.tmp", tmp_path / ".caddie-notes.tmp"}
    for other in others:
        other.touch()
        os.utime(other, (0, 0))
    with replacing(tmp_path / "whole") as temporary:
        temporary.write_text("all of it")
    assert set(tmp_path.iterdir()) == {tmp_path / "whole", *others, *([left] if stays else [])}


def test_a_folder_that_is_being_filled_is_left_alone(tmp_path: Path) -> None:
    left = tmp_path / ".caddie-another-1-0123456789abcdef.tmp"
    left.mkdir()
    (left / "train_000000.bin").touch()
    os.utime(left, (0, 0))
    with replacing(tmp_path / "whole") as temporary:
        temporary.touch()
    assert left.exists()


def test_what_is_unfinished_is_named_after_its_process(tmp_path: Path) -> None:
    with replacing(tmp_path / "whole") as first, replacing(tmp_path / "other") as second:
        first.touch()
        second.touch()
        assert f".{os.getpid()}-" in first.name
        assert first.exists()


def test_a_link_to_nothing_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(UserError, match="it exists and is not a regular file"), replacing(tmp_path / "link") as file:
        file.touch()
    assert (tmp_path / "link").is_symlink()
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def test_devices_and_pipes_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path, why in (
        (tmp_path / "pipe", "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path, "(not a regular file|Is a directory)"),
        (tmp_path / "loop", "Too many levels of symbolic links"),
        (tmp_path / "none", "No such file or directory"),
    ):
        with pytest.raises(UserError, match=rf"{path}: cannot be read \({why}\)"):
            read_file(path)


def test_the_home_of_an_unknown_user_is_a_name_like_any() -> None:
    assert expanded("~/a") == expanded(Path("~/a")) == Path.home() / "a"
    assert expanded("~no-such-user/a") == Path("~no-such-user/a")


def test_a_folder_that_was_to_be_replaced_is_still_there_after_an_interruption_between_two_renames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rename = tmp_path / "corpus", Path.rename
    folder.mkdir()
    (folder / "old").touch()

    def interrupted(path: Path, target: Path) -> Path:
        moved = rename(path, target)
        if path == folder:
            raise KeyboardInterrupt
        return moved

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), making(folder, replaces=True) as partial:
        (partial / "new").touch()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["corpus", "corpus/old"]


def test_a_place_that_takes_no_new_file_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    check_new_file(tmp_path / "new")
    check_new_folder(tmp_path / "new" / "below")
    with pytest.raises(UserError, match=r"file exists; name another file with --documents"):
        check_new_file(tmp_path / "file", "--documents")
    with pytest.raises(UserError, match=r"no folder .*new; make it"):
        check_new_file(tmp_path / "new" / "below")
    with pytest.raises(UserError, match=r"file exists; name a new folder"):
        check_new_folder(tmp_path / "file")
    with pytest.raises(UserError, match=r"file is not a folder; name another with --out"):
        check_new_folder(tmp_path / "file" / "new" / "below")
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write anywhere
    for check in (check_new_file, check_new_folder):
        with pytest.raises(UserError, match=rf"{tmp_path.name} cannot be written to; name another place with --out"):
            check(tmp_path / "new")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_process_that_nobody_waited_for_has_ended() -> None:
    """In a container without an init a killed process stays as a zombie."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    stat = Path(f"/proc/{process.pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    assert process_name(process.pid).endswith(f".{process.pid}-0")
    process.wait()
    assert not process_name(os.getpid()).endswith("-0")
