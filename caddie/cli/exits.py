"""Exit status of a command, and one line on standard error for every mistake."""

import os
import re
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import which
from types import ModuleType
from typing import Any, NoReturn

import click

from caddie.errors import CheckFailed, UserError
from caddie.report.tables import one_line
from caddie.runtime.interrupt import MESSAGES

_CLOSED_PIPE = 128 + 13
"""Exit status when nobody reads the output any more; shells give it to a program that SIGPIPE ended."""


class Terminated(BaseException):
    """Raised by SIGTERM."""


def end(command: Callable[[], object]) -> NoReturn:
    """Run a command and exit with its status: 0 success, 1 a failed check, 2 a mistake of the user's.

    The message of a library that ends the program is printed, with status 1. SIGTERM unwinds the command as Ctrl-C
    does, so that it leaves no unfinished file.
    """
    before, streams = signal.getsignal(signal.SIGTERM), (sys.stdout, sys.stderr)
    try:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _terminate)
        status = command()
    except SystemExit as error:
        status = error.code if sys.stdout is streams[0] else _CLOSED_PIPE  # click wraps a closed pipe, and exits with 1
        if status is not None and not isinstance(status, int):  # message of a library or a user's own class
            status = fail(str(status), 1)
    except (KeyboardInterrupt, click.exceptions.Abort):
        status = _stopped(signal.SIGINT)
    except Terminated:
        status = _stopped(signal.SIGTERM)
    except click.ClickException as error:
        status = fail(_mistake(error), 2)
    except (UserError, CheckFailed) as error:
        if (several := _several()) and several.reported_elsewhere() and not several.is_first():
            time.sleep(several.SAME_MISTAKE_SECONDS)  # if all processes met it, the first one reports it
        status = fail(str(error), 2 if isinstance(error, UserError) else 1)
    except BrokenPipeError:
        status = _CLOSED_PIPE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        status = fail(f"{where}{error.strerror or error}", 2)
    except (MemoryError, RuntimeError) as error:
        from caddie.runtime.memory import out_of_memory

        _, loop, path = str(error).partition("Symlink loop from '")  # pathlib's message before Python 3.13
        small = "not enough memory; take a smaller model, batch or sequence length"
        if loop or out_of_memory(error):
            status = fail(f"{path[:-1]}: too many levels of symbolic links" if loop else small, 2)
        elif (several := _several()) and several.lost_another(error):
            if not several.reported_elsewhere():
                fail("another process of this run has ended, and so does this one; its own output says why", 1)
            status = 1
        else:
            status = _defect(error)
    except Exception as error:
        status = _defect(error)
    finally:
        sys.stdout, sys.stderr = streams
        _close_unwritable()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
    status = status if isinstance(status, int) else 0
    # gloo's threads may still hold tensors when the interpreter shuts down, and then end the process by SIGABRT after
    # all its work is done (pytorch/pytorch#179291).
    if status - 128 in MESSAGES or ((several := _several()) and several.under_torchrun()):
        _leave(status)
    sys.exit(status)


def _defect(error: Exception) -> int:
    """Raise an error of the program; under torchrun, print it and return 1.

    After a raise, NCCL would wait for the other processes while the interpreter shuts down.
    """
    if not ((several := _several()) and several.under_torchrun()):
        raise error
    traceback.print_exception(error)
    return 1


def _close_unwritable() -> None:
    """Close standard output if its buffer cannot be written: Python would try again at exit and end with status 120."""
    with suppress(OSError):
        try:
            if sys.stdout is not None:
                sys.stdout.flush()
        except OSError:
            sys.stdout.close()


def _mistake(error: click.ClickException) -> str:
    """Return click's message about a mistake in our words, and the command that prints help."""
    context, usage = getattr(error, "ctx", None), ""
    if context is not None:
        usage, params = f"; see `{context.command_path} --help`", context.command.params
        if isinstance(error, click.NoSuchOption):
            hidden = {name for one in params if getattr(one, "hidden", False) for name in one.opts}
            shown = [name for name in error.possibilities or () if name not in hidden]
            error = click.NoSuchOption(error.option_name, possibilities=shown, ctx=context)
            if any(one.name == "settings" for one in params):
                usage = f"; settings have no dashes: PATH=VALUE, as train.steps=100{usage}"
    said = " ".join(error.format_message().split()).rstrip(".")
    said = re.sub("not a valid integer( range)?", "not a whole number", said)
    said = re.sub("not a valid float( range)?", "not a number", said)
    return said + _needed(error) + usage


def _needed(error: click.ClickException) -> str:
    """Name all required options if one is missing, so that a user does not meet them one at a time."""
    if not isinstance(error, click.MissingParameter) or not error.ctx:
        return ""
    options = [param.opts[0] for param in error.ctx.command.params if param.required and param.opts[0].startswith("-")]
    return f"; needed are {' and '.join([', '.join(options[:-1]), options[-1]])}" if len(options) > 1 else ""


def _several() -> ModuleType | None:
    """Return `caddie.runtime.distributed` if it was imported, as in every process of a run of several."""
    return sys.modules.get("caddie.runtime.distributed")


def _leave(status: int) -> NoReturn:
    """End this process at once; taking down an interpreter that has imported PyTorch takes about a second."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # None if it was closed before the program began
            with suppress(OSError):
                stream.flush()
    os._exit(status)


def _terminate(number: int, frame: object) -> NoReturn:
    raise Terminated


def _stopped(number: int, message: str = "") -> int:
    """Return the exit status of a command that a signal stopped; of several processes the first prints the message."""
    several = _several()
    first = several is None or several.is_first()
    return fail(message or MESSAGES[signal.Signals(number)], 128 + number) if first else 128 + number


def fail(message: str, status: int) -> int:
    """Print an error message and return `status`."""
    if sys.stderr is not None:  # None after `2>&-`: print would write to standard output
        print(f"caddie: {one_line(message)}\n", end="", file=sys.stderr)  # one write, as several processes may print
    return status


def judge(checks: Sequence[Mapping[str, Any]]) -> int:
    """Return 0 if no check failed; otherwise raise `CheckFailed` with one line that names those that failed."""
    failed = [f"{check['name']} ({check['evidence']})" for check in checks if check["passed"] is False]
    if failed:
        raise CheckFailed(f"verification failed: {'; '.join(failed)}")
    return 0


@contextmanager
def resume_hint(again: str) -> Iterator[str]:
    """Yield a line on how to go on. After an interruption, print such a line and exit with the signal's status."""
    try:
        yield f"stopped; go on with: {again}"
    except (KeyboardInterrupt, Terminated) as error:
        number = signal.SIGTERM if isinstance(error, Terminated) else getattr(error, "number", signal.SIGINT)
        raise SystemExit(_stopped(number, f"{str(error) or 'stopped'}; go on with: {again}")) from None


def typed_command() -> str:
    """Return the command as a user typed it, so that it can be given again."""
    if (several := _several()) and several.under_torchrun() and not several.reported_elsewhere():
        program = "torchrun … -m caddie"
    else:  # the path of an environment that is not activated, as .venv/bin/caddie
        program = sys.argv[0] if Path(sys.argv[0]).name == "caddie" and which("caddie") is None else "caddie"
    return f"{program} {shlex.join(sys.argv[1:])}"
