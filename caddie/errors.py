"""Exceptions whose messages are for users."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in the arguments or files given: one line that says what is wrong and what to do.

    The command line prints it without a traceback and exits with status 2.
    """


class CheckFailed(Exception):
    """A check failed: one line, printed without a traceback; exit status 1."""


def check_kind(value: object, kind: type | tuple[type, ...], name: str, advice: str) -> None:
    """Raise `UserError` for an argument of the wrong type, as Python callers may give; `advice` says what to give."""
    if not isinstance(value, kind):
        raise UserError(f"{name} cannot be {value!r:.80}; {advice}")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class name if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def count(number: int, noun: str) -> str:
    """Return a number with its noun in singular or plural."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"


def suggest(word: str, known: Iterable[str], most: int = 1) -> str:
    """Return ` (did you mean X or Y?)`: at most `most` known words close to `word`, in any case; "" without one."""
    words = {one.lower(): one for one in reversed([*known])}  # of words that differ only in case, the first
    close = [words[low] for low in difflib.get_close_matches(word.lower(), words, n=most, cutoff=0.5)]
    return f" (did you mean {' or '.join(filter(None, (', '.join(close[:-1]), close[-1])))}?)" if close else ""
