"""Ctrl-C and SIGTERM end a command within a second, wherever they come."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from caddie.runtime.interrupt import ends_on_interrupt

PROLOGUE = """
import signal
def terminate(number, frame):
    raise SystemExit("heard late")
signal.signal(signal.SIGTERM, terminate)
"""
CALL = """
import lzma, os, sys
from pathlib import Path
from caddie.files import making, replacing
from caddie.runtime.interrupt import ends_on_interrupt

@ends_on_interrupt
def command():
    data = os.urandom(1 << 26)
    with making(Path("folder")) as made, replacing(Path("target")) as temporary:
        (made / "file").write_bytes(b"half")
        temporary.write_bytes(b"half")
        print("begun", flush=True)
        lzma.compress(data, preset=9)

command()
"""


def stopped(process: subprocess.Popen[bytes], number: int = signal.SIGINT) -> float:
    """Seconds from a signal to the end of a process."""
    begin = time.monotonic()
    process.send_signal(number)
    process.wait(30)
    return time.monotonic() - begin


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "status", "word"), [(signal.SIGINT, 130, b"interrupted"), (signal.SIGTERM, 143, b"terminated")]
)
def test_a_long_call_of_a_library_is_stopped(number: int, status: int, word: bytes, tmp_path: Path) -> None:
    """Python itself would raise nothing before the call's end, half a minute later."""
    program = PROLOGUE + CALL
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"begun\n"
        told = psutil.Process(process.pid).cpu_times
        begun = told().user
        while told().user < begun + 0.3:  # a busy machine takes a while to enter the call
            time.sleep(0.05)
        seconds = stopped(process, number)
        said = process.stderr.read()
    assert seconds < 3
    assert (process.returncode, said) == (status, b"caddie: %s\n" % word)
    assert not list(tmp_path.iterdir()), "what it had not finished is removed"


@pytest.mark.long
def test_a_verb_is_interrupted(tiny_run: object, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"the cat sat on the mat; " * 400_000)
    program = "from caddie.cli import main; main()"
    command = [sys.executable, "-c", program, "compress", str(tiny_run.artifact), "text"]  # type: ignore[attr-defined]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        time.sleep(3)
        seconds = stopped(process)
        said = process.stderr.read()
    assert seconds < 3
    assert process.returncode == 130
    assert said.endswith(b"caddie: interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


STOPS = """
import atexit
from caddie.cli.exits import end

def command():
    raise KeyboardInterrupt

atexit.register(print, "taken down")
end(command)
"""


def test_a_stopped_command_does_not_wait_until_the_interpreter_is_taken_down() -> None:
    """With PyTorch in it that takes a second, or several on a busy machine."""
    ended = subprocess.run([sys.executable, "-c", STOPS], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "caddie: interrupted\n")


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
