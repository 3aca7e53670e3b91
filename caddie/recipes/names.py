"""Names of the shipped recipes, read from the source: the command line completes them without PyTorch."""

import re
from pathlib import Path

MODULES = (
    "baseline",
    "early_records",
    "records",
    "late_records",
    "public_systems",
    "ideas",
    "frontier_ideas",
    "champion",
)
"""Modules of this folder whose tables are the shipped recipes."""
ALIASES = {"best_record": "ngram_tilt"}
"""Further names of shipped recipes; until 2026-11-25 `best_record` was `longer_warmdown`."""
_ROW = re.compile(r'^    "(\w+)": \{$', re.MULTILINE)


def names() -> list[str]:
    """Return the name of every recipe that caddie ships, and the aliases."""
    sources = (Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8") for module in MODULES)
    return [name for source in sources for name in _ROW.findall(source)] + [*ALIASES]
