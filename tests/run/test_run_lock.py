"""A run folder has one writer: the lock, what killed writers left, and writers that were given up."""

import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from caddie.errors import UserError
from caddie.files import write_json
from caddie.run.run_lock import LOCK, holder, locked
from caddie.train.checkpoint import open_log

WRITER = """
import sys, time
from pathlib import Path
from caddie.files import replacing, write_json
from caddie.run.run_lock import locked
from caddie.train.checkpoint import open_log

folder, number = Path(sys.argv[1]), 0
with locked(folder), open_log(folder / "log.jsonl") as log:
    while True:
        number += 1
        log.write(f"old {number}\\n")
        with replacing(folder / "checkpoint") as temporary:
            temporary.write_text(f"old {number}")
            if number == 3:
                print("begun", flush=True)
            time.sleep(0.01)
"""


@pytest.fixture
def writer(tmp_path: Path) -> object:
    """A process that writes log and checkpoint of a run again and again."""
    command = [sys.executable, "-c", WRITER, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        yield process
        process.kill()


@pytest.mark.long
def test_a_second_run_in_a_folder_is_refused_and_told_who_is_there(
    writer: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    where = f"{tmp_path / 'run'} is in use by process {writer.pid} on {platform.node()} since {time.strftime('%Y')}"
    with pytest.raises(UserError) as refused, locked(tmp_path / "run"):
        pass
    assert str(refused.value).startswith(where)
    held = holder(tmp_path / "run")
    assert held is not None
    assert held.alive
    writer.kill()
    writer.wait()
    assert not held.alive


@pytest.mark.long
def test_a_killed_run_leaves_no_lock_and_no_half_written_file_for_the_next(
    writer: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    writer.kill()
    writer.wait()
    assert len(list((tmp_path / "run").glob(".writing-*/*"))) == 1, "it was killed within a write"
    with locked(tmp_path / "run"):
        assert not list((tmp_path / "run").glob(".writing-*/*"))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint", "log.jsonl"]


@pytest.mark.long
def test_a_writer_that_stood_still_and_was_given_up_writes_no_more(
    writer: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    writer.send_signal(signal.SIGSTOP)
    time.sleep(0.1)
    begin = time.monotonic()
    with locked(folder, patience_seconds=0.5), open_log(folder / "log.jsonl") as log:
        assert time.monotonic() - begin >= 0.5, "it is waited for first"
        before = (folder / "log.jsonl").read_bytes()
        write_json(folder / "checkpoint", "new")
        writer.send_signal(signal.SIGCONT)
        writer.wait(30)
        assert (folder / "log.jsonl").read_bytes() == before
        assert (folder / "checkpoint").read_text() == '"new"\n'
        held = holder(folder)
        assert held is not None
        assert held.pid == os.getpid(), "the lock is the new writer's, which the old one has not removed"
        log.write("new\n")
    assert (folder / "log.jsonl").read_bytes() == before + b"new\n"
    assert writer.returncode == 1
    assert writer.stderr is not None
    assert b"cannot write" in writer.stderr.read()
    assert not (folder / LOCK).exists()


def test_a_folder_that_is_held_and_released_is_as_before(tmp_path: Path) -> None:
    with locked(tmp_path / "new"):
        assert holder(tmp_path / "new") is not None
    assert not (tmp_path / "new").exists(), "nothing was written there"
    (tmp_path / "run").mkdir()
    with locked(tmp_path / "run"):
        pass
    assert (tmp_path / "run").is_dir(), "the user made it"
    (tmp_path / "run" / LOCK).write_text("[" * 100_000)
    assert holder(tmp_path / "run") is None
    with locked(tmp_path / "run"):
        write_json(tmp_path / "run" / "kept", 1)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["kept"]
