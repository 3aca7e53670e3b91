"""Ctrl-C, SIGTERM and the end of a parent process, heard within a second even inside a library's long call."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import ParamSpec, TypeVar

from caddie.files import remove_unfinished

P = ParamSpec("P")
R = TypeVar("R")

PATIENCE_SECONDS = 0.5
"""Seconds that the work has to end by itself after a signal."""
MESSAGES = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
"""Signal that ends a command to the message that the command prints."""
SIGKILL = 9
"""Number of a signal for which Windows has no name."""

_SAVING = threading.Event()
"""Set while a block that saves its work handles signals itself."""


@contextmanager
def saves_on_interrupt() -> Iterator[None]:
    """Leave signals to the block, which handles them and saves its work before it ends."""
    _SAVING.set()
    try:
        yield
    finally:
        _SAVING.clear()


def ends_on_interrupt(command: Callable[P, R], message: str = "") -> Callable[P, R]:
    """Wrap a command so that Ctrl-C and SIGTERM end its process within a second; it then says `message`.

    Python handles a signal between two of its own instructions, so not while PyTorch or a compressor computes. A thread
    hears of the signal at once and waits `PATIENCE_SECONDS` for the command to end. Then it removes this process's
    unfinished files and ends the process, unless the command is in `saves_on_interrupt`. Works in the main thread only.
    """

    @wraps(command)
    def watched(*args: P.args, **kwargs: P.kwargs) -> R:
        if threading.current_thread() is not threading.main_thread():
            return command(*args, **kwargs)
        heard, sent = socket.socketpair()
        sent.setblocking(False)
        ended = threading.Event()
        before = -1
        try:  # a handler may raise at any call, the next two included
            threading.Thread(target=_watch, args=(heard, ended, message), daemon=True).start()
            before = signal.set_wakeup_fd(sent.fileno(), warn_on_full_buffer=False)
            return command(*args, **kwargs)
        finally:
            signal.set_wakeup_fd(before)
            ended.set()
            sent.close()

    return watched


def _watch(heard: socket.socket, ended: threading.Event, message: str) -> None:
    """Wait for signal numbers; after one in `MESSAGES`, end the process unless the command ends first."""
    with heard:
        while number := heard.recv(1):
            if number[0] not in MESSAGES or _SAVING.is_set() or ended.wait(PATIENCE_SECONDS):
                continue
            remove_unfinished()
            several = sys.modules.get("caddie.runtime.distributed")  # an import here would load PyTorch, for seconds
            if sys.stderr is not None and (several is None or several.is_first()):
                show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # which a live display hides
                said = message or MESSAGES[signal.Signals(number[0])]
                os.write(2, f"{show_cursor}caddie: {said}\n".encode())
            os._exit(128 + number[0])


def when_input_ends(act: Callable[[], object]) -> None:
    """Call `act`, in a thread, when the process at the other end of standard input closes it or is gone."""

    def wait() -> None:
        with suppress(OSError):
            while os.read(0, 1):
                continue
        act()

    threading.Thread(target=wait, daemon=True).start()
