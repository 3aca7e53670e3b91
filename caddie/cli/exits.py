"""Exit status of a command, and one line on standard error for every mistake."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import click

from caddie.errors import CheckFailed, UserError
from caddie.report.tables import one_line


def end(command: Callable[[], object]) -> NoReturn:
    """Run a command and exit with its status: 0 success, 1 a failed check, 2 a mistake of the user's."""
    try:
        status = command()
    except (KeyboardInterrupt, click.exceptions.Abort):
        status = fail("interrupted", 130)
    except click.ClickException as error:
        hint = getattr(error, "ctx", None)
        usage = f"; see `{hint.command_path} --help`" if hint else ""
        status = fail(" ".join(error.format_message().split()).rstrip(".") + usage, 2)
    except (UserError, CheckFailed) as error:
        status = fail(str(error), 2 if isinstance(error, UserError) else 1)
    except BrokenPipeError:
        with suppress(OSError):
            sys.stdout.close()
        status = 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        status = fail(f"{where}{error.strerror or error}", 2)
    except (MemoryError, RuntimeError) as error:
        _, loop, path = str(error).partition("Symlink loop from '")  # as pathlib says it before Python 3.13
        # PyTorch has no class of its own for memory that the system refuses.
        memory = isinstance(error, MemoryError) or "allocate" in str(error) or "out of memory" in str(error)
        if not (loop or memory):
            raise
        small = "not enough memory; take a smaller model, batch or sequence length"
        status = fail(f"{path[:-1]}: too many levels of symbolic links" if loop else small, 2)
    status = status if isinstance(status, int) else 0
    if "torch" in sys.modules:
        from caddie.runtime.distributed import leave

        leave(status)
    sys.exit(status)


def fail(message: str, status: int) -> int:
    """Print an error message and return `status`."""
    if sys.stderr is not None:  # None after `2>&-`: print would write to standard output
        print(f"caddie: {one_line(message)}", file=sys.stderr)
    return status


def judge(checks: Sequence[Mapping[str, Any]]) -> int:
    """Return 0 if every check passed; otherwise raise `CheckFailed` with one line that names those that failed."""
    failed = [f"{check['name']} ({check['evidence']})" for check in checks if not check["passed"]]
    if failed:
        raise CheckFailed(f"verification failed: {'; '.join(failed)}")
    return 0


@contextmanager
def resume_hint(command: str, folder: Path, named: bool) -> Iterator[None]:
    """Turn an interrupted run into its exit status and one line that says how to continue it."""
    from caddie.train.loop import Interrupted

    try:
        yield
    except Interrupted as error:
        again = command if named else f"{command} --out {shlex.quote(str(folder))}"
        raise SystemExit(fail(f"{error}; go on with: {again}", 128 + error.number)) from None
