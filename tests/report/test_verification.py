"""What a result says of its verification, wherever it is read: three outcomes of a check, and of all together."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from html_page import Parsed
from run_folder import make_result, write_run

from caddie.board.folders import RunFolder
from caddie.lab.compare import _notes, read
from caddie.report.page import write_report
from caddie.report.tables import result_table
from caddie.report.verification import describe_checks, passed, verified
from caddie.share.push import card_text
from caddie.verify import Verdict
from caddie.verify.probes import Check

RESULTS: dict[str, dict[str, Any]] = {
    "yes": {"checks": [True, True]},
    "no": {"checks": [False, None]},
    "inconclusive": {"checks": [True, None]},
    "not probed": {"checks": [True, True], "not_verified_because": "namespaces are refused"},
}
"""State of a verification to outcomes of the checks `size` and `causal`, and why the probes did not run."""
SAID = {
    "yes": "all 2 passed",
    "no": "failed: size; inconclusive: causal",
    "inconclusive": "inconclusive: causal",
    "not probed": "not verified: the probes could not be run in a sandbox",
}


def outcome(state: str) -> dict[str, Any]:
    """Return a result as a run in this state writes it."""
    result, given = make_result(), RESULTS[state]
    checks = [Check(one["name"], held, "seen") for one, held in zip(result["checks"], given["checks"], strict=True)]
    verdict = Verdict(checks=tuple(checks), not_run=given.get("not_verified_because"))
    written = [{"name": check.name, "passed": check.passed, "evidence": check.evidence} for check in checks]
    return result | {"verified": verdict.passed, "not_verified_because": verdict.not_run, "checks": written}


def test_what_several_outcomes_are_together() -> None:
    assert passed([True, True]) is True
    assert passed([True, None]) is None
    assert passed([None, True, False]) is False
    assert passed([]) is None, "nothing was looked at"
    assert passed([True, []]) is None, "of an edited file"


@pytest.mark.parametrize("state", RESULTS)
def test_every_reader_tells_the_outcomes_apart(state: str, tmp_path: Path) -> None:
    result = outcome(state)
    assert verified(json.loads(json.dumps(result))) == state
    assert describe_checks(result) == SAID[state]
    assert f"| checks | {SAID[state]} |" in card_text(result, "ada/small", ["artifact.caddie"])
    page = Parsed(write_report(write_run(tmp_path / "run", result)).read_text(encoding="utf-8"))
    assert page.text[page.text.index("Verified") + 1] == state
    words = [page.text[page.text.index(name) + 1] for name in ("size", "causal")]
    shown = {True: "seen", False: "failed", None: "inconclusive"}
    assert words == [shown[one] for one in RESULTS[state]["checks"]]
    text = " ".join(result_table(result).split())
    table = {"yes": "verified", "no": "VERIFICATION FAILED", "not probed": "not verified"}
    undecided = "verification inconclusive Verification inconclusive: causal."
    assert f"(lower is better), {table.get(state, undecided)} " in text
    run = RunFolder(tmp_path / "run")
    run.look({file.name: os.stat(file) for file in (tmp_path / "run").iterdir()}, 0.0)
    assert run.documents["result.json"]["verified"] == state
    assert run.reason("finished") == ("verification failed" if state == "no" else "")


@pytest.mark.parametrize("state", RESULTS)
def test_a_comparison_notes_what_is_not_verified(state: str, tmp_path: Path) -> None:
    place = write_run(tmp_path / "run", outcome(state))
    one = read(place)
    notes = [note for note in _notes([one], [one]) if "verif" in note]
    said = {"no": "did not pass verification", "inconclusive": "was verified without a decision"}
    assert notes == ([] if state == "yes" else [f"{place} {said.get(state, 'was not verified')}"] * 2)


@pytest.mark.parametrize("wrong", [{"verified": []}, {"verified": None, "checks": [1]}, {"verified": 1, "checks": 2}])
def test_an_edited_result_breaks_no_reader(wrong: dict[str, Any]) -> None:
    assert verified(wrong) in ("not probed", "inconclusive")
    assert verified({}) is None
