"""The exceptions that a user is meant to read."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in what was asked or given: one line that says what is wrong and what to do.

    The command line prints it without a traceback and exits with status 2.
    """


class CheckFailed(Exception):
    """Something was checked and did not hold: one line, printed without a traceback; exit status 1."""


def first_line(error: BaseException) -> str:
    """What an error of somebody else's says first, or its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def suggest(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` when a known word is close to `word`, in any case, else an empty string."""
    words = {one.lower(): one for one in reversed([*known])}  # of those that differ in case alone, the first
    close = difflib.get_close_matches(word.lower(), words, n=1, cutoff=0.5)
    return f"; did you mean {words[close[0]]}?" if close else ""
