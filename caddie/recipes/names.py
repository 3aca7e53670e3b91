"""Tables of the shipped recipes, read without PyTorch, so that the command line can complete their names."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

FILES = (
    "baseline",
    "early_records",
    "records",
    "late_records",
    "public_systems",
    "ideas",
    "frontier_ideas",
    "champion",
)
"""Files of TOML in this folder whose tables are the shipped recipes."""
ALIASES = {"best_record": "ngram_tilt"}
"""Further names of shipped recipes; until 2026-11-25 `best_record` was `longer_warmdown`."""


@cache
def tables(file: str) -> dict[str, dict[str, Any]]:
    """Return name to table of a file's recipes; each table is what a recipe file holds.

    A mapping written as text, such as `model.layers`, replaces the base's; a TOML table changes the keys it names.
    """
    return tomllib.loads(Path(__file__).with_name(f"{file}.toml").read_text(encoding="utf-8"))


def names() -> list[str]:
    """Return the name of every recipe that caddie ships, and the aliases."""
    return [name for file in FILES for name in tables(file)] + [*ALIASES]
