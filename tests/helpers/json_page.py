"""Fields that docs/json.md documents."""

import re
from pathlib import Path

PAGE = Path(__file__).parent.parent.parent / "docs" / "json.md"


def fields_by_verb() -> dict[str, set[str]]:
    """Return verb to the fields that it prints, in the page's order."""
    found: dict[str, set[str]] = {}
    verb = ""
    for first, names in re.findall(r"^\| (`\w+` )?\| ([^|]+) \| [^|]+ \|$", PAGE.read_text(), re.MULTILINE):
        verb = first.strip(" `") or verb
        found.setdefault(verb, set()).update(re.findall(r"`(\w+)`", names))
    return {verb: names for verb, names in found.items() if verb}


def fields_below(heading: str) -> set[str]:
    """Return the fields in the first column of the table below a heading."""
    section = PAGE.read_text().partition(f"### {heading}\n")[2].partition("\n#")[0]
    columns = "".join(re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE))
    return set(re.findall(r"`(\w+)`", columns))
