"""Outcomes of verification for people: a check passes, fails, or decides nothing, which JSON has as null."""

from collections.abc import Iterable, Mapping
from typing import Any

from caddie.report.read import pick

OUTCOMES: Mapping[bool | None, str] = {True: "pass", False: "FAIL", None: "inconclusive"}
"""Outcome of a check to the word for it."""


def passed(outcomes: Iterable[object]) -> bool | None:
    """Return False if any outcome is False, None if any is no boolean or there are none, else True."""
    found = {outcome if isinstance(outcome, bool) else None for outcome in outcomes}
    return False if False in found else True if found == {True} else None


def verified(result: Mapping[str, Any]) -> str | None:
    """Return a result's verification in a word or two: yes, no, inconclusive or not probed; None if it states none.

    The result may be of another version, or edited by someone.
    """
    if "verified" not in result:
        return None
    if isinstance(result["verified"], bool):
        return "yes" if result["verified"] else "no"
    checks = result.get("checks")
    undecided = isinstance(checks, list) and any(pick(check, "passed") is None for check in checks)
    return "inconclusive" if undecided else "not probed"


def describe_checks(result: Mapping[str, Any]) -> str:
    """Return the outcome of a result's checks in one line, with the names of those that did not pass."""
    checks = result["checks"]
    named = {
        word: ", ".join(check["name"] for check in checks if check["passed"] is outcome)
        for outcome, word in ((False, "failed"), (None, "inconclusive"))
    }
    said = [f"{word}: {names}" for word, names in named.items() if names]
    if verified(result) == "not probed":
        said.append("not verified: the probes could not be run in a sandbox")
    return "; ".join(said) or f"all {len(checks)} passed"
