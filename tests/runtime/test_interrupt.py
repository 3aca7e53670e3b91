"""Ctrl-C ends a command within a second, wherever it comes."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from caddie.runtime.interrupt import ends_on_interrupt

CALL = """
import lzma, os, sys
from pathlib import Path
from caddie.files import replacing
from caddie.runtime.interrupt import ends_on_interrupt

@ends_on_interrupt
def command():
    data = os.urandom(1 << 26)
    with replacing(Path("target")) as temporary:
        temporary.write_bytes(b"half")
        print("begun", flush=True)
        lzma.compress(data, preset=9)

command()
"""


def interrupted(process: subprocess.Popen[bytes]) -> float:
    """Seconds until an interrupted process has ended."""
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.wait(30)
    return time.monotonic() - begin


def test_a_long_call_of_a_library_is_interrupted(tmp_path: Path) -> None:
    """Python itself would raise nothing before the call's end, half a minute later."""
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n" + CALL
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"begun\n"
        time.sleep(1.0)  # a busy machine takes a while to begin
        seconds = interrupted(process)
        said = process.stderr.read()
    assert seconds < 3
    assert (process.returncode, said) == (130, b"caddie: interrupted\n")
    assert not list(tmp_path.iterdir()), "what it had not finished is removed"


@pytest.mark.long
def test_a_verb_is_interrupted(tiny_run: object, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"the cat sat on the mat; " * 400_000)
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\nfrom caddie.cli import main; main()"
    )
    command = [sys.executable, "-c", program, "compress", str(tiny_run.artifact), "text"]  # type: ignore[attr-defined]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        time.sleep(3)
        seconds = interrupted(process)
        said = process.stderr.read()
    assert seconds < 3
    assert process.returncode == 130
    assert said.endswith(b"caddie: interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


@pytest.mark.parametrize("place", ["start", "set_wakeup_fd"])
def test_a_signal_before_the_command_begins_leaves_nothing_to_hear_the_next(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next signal would be written to a closed socket, and Python would print that it failed."""
    owner: Any = threading.Thread if place == "start" else signal
    before = getattr(owner, place)

    def struck(*arguments: Any, **named: Any) -> None:
        before(*arguments, **named)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, place, struck)
    with pytest.raises(KeyboardInterrupt):
        ends_on_interrupt(lambda: None)()
    assert signal.set_wakeup_fd(-1) == -1
