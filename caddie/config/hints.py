"""Suggestions for unknown settings."""

import difflib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from caddie.config.renamed import modernized_path


@cache
def names_elsewhere() -> dict[str, list[str]]:
    """Return setting to its names in other programs, from `names_elsewhere.txt`; empty in a bundle, which lacks it."""
    table = Path(__file__).with_name("names_elsewhere.txt")
    lines = table.read_text(encoding="utf-8").splitlines()[1:] if table.is_file() else []
    return {setting: names.split() for setting, names in (line.split(" | ") for line in lines)}


def hint_at(path: str, known: Sequence[str]) -> str:
    """Return a hint for an unknown path: the path in `known` that is probably meant, or where to look it up."""
    if path == "seed":
        return "; a run takes it by --seed"
    now = modernized_path(path)
    if now != path and now in known:
        return f"; it is now {now}"
    look_up = f"; `caddie techniques {path.rpartition('.')[2]}` looks the word up"
    return hint_elsewhere(now, known) or _similar(now.lower(), known) or look_up


def hint_elsewhere(path: str, known: Sequence[str] | None = None) -> str:
    """Return a hint at the setting, in `known` if given, with this name in other programs; else an empty string."""
    ours = setting_called(path.rpartition(".")[2])
    return f" (did you mean {ours}?)" if ours and (known is None or ours in known) else ""


def setting_called(word: str) -> str | None:
    """Return the setting that other programs call by this word; None if there is none."""
    return next((ours for ours, names in names_elsewhere().items() if word.lower() in names), None)


def _similar(path: str, known: Sequence[str]) -> str:
    """Return a hint at the path spelled most like `path`: as a whole, among its siblings, or by its last part."""
    parent, _, last = path.rpartition(".")
    siblings = [one for one in known if parent and one.rpartition(".")[0] == parent]
    by_last: dict[str, str] = {}
    for one in sorted(known, key=lambda one: (-difflib.SequenceMatcher(None, path, one).ratio(), len(one))):
        by_last.setdefault(one.rpartition(".")[2].lower(), one)
    close = difflib.get_close_matches(path, known, n=1, cutoff=0.9)
    close += difflib.get_close_matches(path, siblings, n=1, cutoff=0.76)
    close += [by_last[one] for one in difflib.get_close_matches(last, by_last, n=1, cutoff=0.78)]
    return f" (did you mean {close[0]}?)" if close else ""
