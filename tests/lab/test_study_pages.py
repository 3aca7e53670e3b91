"""Pages of the studies that are kept: the systems' claims side by side with ours, and what each study cost."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from study_pages import STUDIES, TECHNIQUES, _left, claims_page, costs_page, kept, measured_json

from caddie.lab.report import MINUS
from caddie.lab.rows import ESTIMATE, RESULTS, STUDY

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("docs/results/claims.md", claims_page),
        ("docs/results/costs.md", costs_page),
        ("caddie/recipes/measured.json", measured_json),
    ],
)
def test_the_page_is_up_to_date(name: str, made: Callable[[], str], same_as_kept: Callable[[Path, str], None]) -> None:
    same_as_kept(ROOT / name, made())


def test_an_entry_of_a_technique_stands_in_one_study_at_scale() -> None:
    every = [one for one in kept() if one.at_scale and one.facts]
    for narrow, least in ((False, 1), (True, 0)):  # entries may be asked at width 32 as well
        studies = [json.loads((one.folder / STUDY).read_text()) for one in every if one.narrow == narrow]
        labels = [entry["label"] for study in studies for entry in study["entries"]]
        counts = {label: labels.count(label) for named in TECHNIQUES.values() for label in named}
        assert {label for label, count in counts.items() if not least <= count <= 1} == set()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one study of claims, of which nothing was run at scale."""
    for name in (STUDY, RESULTS):
        (tmp_path / "learning_rate").mkdir(exist_ok=True)
        shutil.copy(STUDIES / "learning_rate" / name, tmp_path / "learning_rate")
    return tmp_path


def row(page: str, label: str) -> list[str]:
    """The cells of a claim."""
    (line,) = [line for line in page.splitlines() if f"| {label} (" in line]
    return [cell.strip() for cell in line.strip("|").split("|")]


def cells_of(page: str) -> list[list[str]]:
    """The cells of all claims."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.count("|") == 9]


RATE = "rate 0.02, warm-down 0.09"


@pytest.mark.parametrize(
    ("verdict", "hours", "left"),
    [
        ({"word": "better", "seeds_needed": 9}, None, "-"),
        ({"word": "unclear", "seeds_needed": 9}, None, "9 seeds: 12.0"),
        ({"word": "unclear", "seeds_needed": 2}, 1.25, "1.2"),
        ({"word": "unclear", "seeds_needed": None}, 1.0, "no number of seeds decides"),
    ],
)
def test_what_an_undecided_claim_would_still_take(verdict: dict[str, Any], hours: float | None, left: str) -> None:
    assert _left({**verdict, "seeds": [1, 2, 3], "seconds": 7200.0}, hours) == left


def test_what_was_not_run_at_scale_is_said_to_be_so(folder: Path) -> None:
    page = claims_page(folder)
    assert row(page, RATE)[-3:] == ["not run", "-", "-"]
    assert "5 claims are true there, 0 not, 1 undecided." in page
    assert "0 of 6 were run, 0 are decided" in page


@pytest.mark.long
def test_hours_come_from_the_estimate_and_figures_from_rows_at_scale(folder: Path) -> None:
    scale = folder / "learning_rate" / "scale"
    scale.mkdir()
    one = {"runs": 3, "steps": 9, "train_seconds": 3000.0, "score_seconds": 600.0, "trained_with": None}
    (scale / ESTIMATE).write_text(json.dumps({"labels": {RATE: one}, "runs": 132, "core_hours": 44.0}))
    page = claims_page(folder)
    assert row(page, RATE)[-3:] == ["not run", "-", "3.0"]
    assert "The claims: 132 runs left, 44 core hours, by 1 estimate." in page
    for name in (RESULTS, STUDY):
        shutil.copy(folder / "learning_rate" / name, scale)
    page = claims_page(folder)
    cells = row(page, RATE)
    assert cells[:3] == ["004", f"{RATE} (steps)", f"better {MINUS}0.0056"]
    assert cells[3:5] == cells[5:7]
    assert cells[4] == "better"
    assert cells[7] == "-"
    undecided = next(one for one in cells_of(page) if one[6] == "undecided")
    assert re.fullmatch(r"\d[\d,]* seeds: \d+\.\d", undecided[7])
    assert "6 of 6 were run, 5 are decided" in page
    assert "| studies/learning\\_rate/study.py:scale | 1 | 66 | 0 | 0.0 |" in page
    assert "The claims: 0 runs left, 0 core hours, by 1 estimate." in page


@pytest.mark.long
def test_a_claim_counts_as_run_with_three_of_more_seeds(folder: Path) -> None:
    shutil.copytree(folder / "learning_rate", folder / "learning_rate" / "scale")
    path = folder / "learning_rate" / "scale" / STUDY
    study = json.loads(path.read_text())
    path.write_text(json.dumps({**study, "seeds": [*study["seeds"], 8, 9]}))
    assert "6 of 6 were run, 5 are decided" in claims_page(folder)
    rows = path.with_name(RESULTS)
    rows.write_text("".join(line for line in rows.read_text().splitlines(True) if json.loads(line)["seed"] < 3))
    assert "0 of 6 were run" in claims_page(folder)


@pytest.mark.long
def test_the_answer_at_width_32_counts_whatever_it_says(folder: Path) -> None:
    for name in ("scale", "scale32"):
        shutil.copytree(
            STUDIES / "learning_rate", folder / "learning_rate" / name, ignore=shutil.ignore_patterns("scale")
        )
    rows = folder / "learning_rate" / "scale32" / RESULTS
    changed = [json.loads(line) for line in rows.read_text().splitlines()]
    for one in changed:
        one["bits_per_byte"] += one["seed"] * (one["label"] == RATE)
    rows.write_text("".join(json.dumps(one) + "\n" for one in changed))
    cells = row(claims_page(folder), RATE)
    assert cells[3:5] == ["\u22120.0491 (\u22120.0806 to \u22120.0177)", "better"]
    assert cells[5].startswith("+1.9509 (")
    assert cells[5].endswith(", width 32")
    assert cells[6] == "undecided"
    assert row(claims_page(folder), "rate 0.06, warm-down 0.09")[6] == "worse"


@pytest.mark.long
def test_a_claim_counts_as_run_when_its_rival_was_run_too(folder: Path) -> None:
    shutil.copytree(folder / "learning_rate", folder / "learning_rate" / "scale")
    rows = folder / "learning_rate" / "scale" / RESULTS
    rows.write_text("".join(line for line in rows.read_text().splitlines(True) if json.loads(line)["label"] != "base"))
    page = claims_page(folder)
    assert "0 of 6 were run, 0 are decided" in page
    assert row(page, RATE)[-3:] == ["not run", "-", "-"]


@pytest.mark.long
def test_parts_of_studies_are_no_studies_of_the_page(folder: Path) -> None:
    before = costs_page(folder)
    shutil.copytree(folder / "learning_rate", folder / "learning_rate" / "fraction-0.1")
    assert costs_page(folder) == before


@pytest.mark.long
def test_costs_are_those_of_the_rows(folder: Path) -> None:
    path = folder / "learning_rate" / RESULTS
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for one in rows:
        one |= {"threads": 2, "train_seconds": 100.0, "total_seconds": 300.0, "trained_with": one["label"]}
    rows[0] |= {"state": "failed", "error": "it failed"}
    rows[1]["trained_with"] = "another"  # whose training counts there
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    whole = 2 * (300 * (len(rows) - 1) - 100) / 3600
    tenth = 2 * (210 * (len(rows) - 1) - 10) / 3600
    page = costs_page(folder)
    assert f"| {len(rows) - 1} | {whole:.1f} | {tenth:.1f} |" in page
    assert "    caddie study studies/learning_rate/study.py --data train_small.jsonl --workers 2 --fraction 0.1" in page
