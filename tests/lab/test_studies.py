"""The studies that are kept here: every entry can be run, and what was found is what their results say."""

import json
import re
import runpy
import statistics
from pathlib import Path
from typing import Any

import pytest
from kept_studies import ask

from caddie.lab.findings import findings
from caddie.lab.report import markdown
from caddie.lab.rows import RESULTS, read_rows

ROOT = Path(__file__).resolve().parent.parent.parent
SAME_SCORER = {
    "047c019a5cd204fba33391ada9d0f9e35ebd887ff06ba8a5ed7fb703e83c2c41":
    "307229879c9d7103b5570f11d49fdb75cfc862772e3563c255036dcb2f1729f4",
    "d6342d032c7b899d01fa72ecefbdad2a24c39443b245f03e27750cd183d3ed20":
    "307229879c9d7103b5570f11d49fdb75cfc862772e3563c255036dcb2f1729f4",
    "023dbacc17a9ed758cac1c9f3529dedadbdc4821e3d3123c32854f93198c0721":
    "25f2de576ef5acf2d47d34a3dc9bbb7ed43eed211f3637b7b31b7fc451c8785f",
    "0bc8f1726ab34230f3d6491f2016d800b6aacf2dd5fb8583e123bbdf712ecfa9":
    "25f2de576ef5acf2d47d34a3dc9bbb7ed43eed211f3637b7b31b7fc451c8785f",
    "226cca95c419e7d8053ed9d8d17ac2cddc00a1925e94e40c11095234710328f2":
    "25f2de576ef5acf2d47d34a3dc9bbb7ed43eed211f3637b7b31b7fc451c8785f",
    "9522ecb7a8f30c3c69c96942c02a4f08ba6ad3bd572aeac71ef0082cbc0250c2":
    "25f2de576ef5acf2d47d34a3dc9bbb7ed43eed211f3637b7b31b7fc451c8785f",
    "a91801de1ff4867b2fc441b9e094e49473b30b19d2050ef213aa3ddf026a10f5":
    "676f5c82b2f72f2982a194d4bfd344442a9c2c8772dbc4677cb7a8c5d2bdb127",
    "4d4153e26a62fca2a206e6eff3e2c9574016b8a73f158b45c33c93e871470a1e":
    "676f5c82b2f72f2982a194d4bfd344442a9c2c8772dbc4677cb7a8c5d2bdb127",
}  # fmt: skip
"""Scorer to another version that scored the same: of `scale_score` the base's files, of `scale_003` SwiGLU's of seed 2,
of both `scale` the base's of seed 4 or 9, of `ladder` five rungs' of seed 2 (docs/log.md)."""


def whole(folder: Path) -> bool:
    """True unless its runs go on: then its rows stand alone, for the next machine to go on from."""
    study = json.loads((folder / "study.json").read_text())
    rows = len((folder / RESULTS).read_text().splitlines())
    return (folder / "report.md").exists() or rows == (len(study["entries"]) + 1) * len(study["seeds"])


KEPT = sorted(path.parent for path in (ROOT / "studies").rglob(RESULTS) if whole(path.parent))


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What `kept_studies` tells."""
    return ask()


@pytest.mark.long
def test_every_entry_can_be_run(told: dict[str, Any]) -> None:
    assert {str(folder.relative_to(ROOT / "studies")) for folder in KEPT} <= told["studies"].keys()
    for name, study in told["studies"].items():
        assert study["described"]["entries"]
        assert len(study["described"]["seeds"]) >= 3
        assert len(set(study["runs"])) == len(study["runs"]), f"two labels of {name} are the same run"


@pytest.mark.long
def test_hardest_shards_come_first(told: dict[str, Any]) -> None:
    hardest = told["hardest"]
    assert sorted(hardest["order"]) == list(range(40))
    assert all(hardest["same"]), "the same batches in another order"
    assert min(hardest["ids"][:8]) > 100 > max(hardest["ids"][-8:]), "noise compresses worst"


def test_the_demo_s_other_text_is_different_source_without_tests(tmp_path: Path) -> None:
    documents = runpy.run_path(str(ROOT / "studies" / "demo" / "text.py"))["documents"]
    texts = {f"package/module_{number}.py": f"# {number}\n" * 2000 for number in range(10, 30)}
    other = {
        "package/twin.py": texts["package/module_10.py"],
        "package/tests/test_it.py": "#\n" * 5000,
        "package/none.py": "",
        "package/table.py": "0,\n" * 100_000,
        "package/notes.txt": "note\n" * 5000,
    }
    for name, text in (texts | other).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "package" / "latin.py").write_bytes(b"# \xe9\n" * 3000)
    assert sorted(documents(tmp_path)) == sorted(texts.values())
    some = list(documents(tmp_path, total=50_000))
    assert 50_000 - 10_000 <= sum(map(len, some)) <= 50_000
    assert some == list(documents(tmp_path, total=50_000)) != sorted(some), "the order is a hash's"


def _known(now: Any, then: Any) -> Any:
    """Return what a description says now, without the fields that came after the one of then."""
    if isinstance(now, dict) and isinstance(then, dict):
        return {name: _known(value, then[name]) for name, value in now.items() if name in then}
    if isinstance(now, list) and isinstance(then, list) and len(now) == len(then):
        return [_known(*pair) for pair in zip(now, then, strict=True)]
    return now


@pytest.mark.long
def test_what_was_found_is_what_the_results_say(told: dict[str, Any]) -> None:
    for folder in KEPT:
        rows, described = read_rows(folder / RESULTS), json.loads((folder / "study.json").read_text())
        study = told["studies"][str(folder.relative_to(ROOT / "studies"))]
        assert described["command"].startswith("caddie study")
        now = {**study["described"], "command": described["command"]}
        assert described == _known(now, described), "it changed after it was run"
        labels = study["shown"].items()
        found = [(row["label"], row["seed"]) for row in rows]
        planned = [(label, seed) for label, _ in labels for seed in described["seeds"]]
        assert found == [run for run in planned if run in found]
        assert {(label, seed) for label, seed in planned if seed <= 3} <= {*found}, "later seeds may be under way"
        left = f"Not run yet: {len(planned) - len(found)} of {len(planned)} planned runs"
        assert (len(found) < len(planned)) == (left in (folder / "report.md").read_text())
        assert all(row["diff"] == study["shown"][row["label"]] for row in rows)
        done = [row for row in rows if row["state"] == "finished"]
        assert len({SAME_SCORER.get(row["scorer_sha256"], row["scorer_sha256"]) for row in done}) == 1
        if described["equal"] != "modelled seconds":  # in which no clock counts
            assert len({row["workers"] for row in done}) == 1
        report = markdown(findings(described, rows))
        assert (folder / "report.md").read_text() == report, f"write it anew: caddie report {folder.relative_to(ROOT)}"
        assert (folder / "report.html").stat().st_size > 10_000


def test_the_results_page_has_their_verdicts() -> None:
    page = "\n".join(path.read_text() for path in (ROOT / "docs" / "results").glob("*-studies.md"))
    for folder in KEPT:
        if folder.name in ("recipes", "ladder"):  # whose diffs are whole recipes; they have pages of their own
            continue
        verdicts = (folder / "report.md").read_text().partition("## Verdicts")[2].partition("\n## ")[0].strip()
        assert verdicts in page, f"docs/results lacks the verdicts of {folder.name}"


def test_the_ladder_s_page_has_its_order_and_its_means() -> None:
    (path,) = (ROOT / "docs" / "results").glob("*-ladder.md")
    report = (ROOT / "studies" / "ladder" / "report.md").read_text()
    for name in ("Order of the public scores", "Leaderboard"):
        assert report.partition(f"## {name}")[2].partition("\n## ")[0].strip() in path.read_text()


def test_the_recipes_page_has_their_means() -> None:
    (path,) = (ROOT / "docs" / "results").glob("*-recipes.md")
    shown = {
        cells[0]: cells[1:]
        for cells in re.findall(r"^\| \**(\w+)\** \|" + r" ([^|]+) \|" * 8 + "$", path.read_text(), re.M)
    }
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in read_rows(ROOT / "studies" / "recipes" / RESULTS):
        groups.setdefault("baseline" if row["label"] == "base" else row["label"], []).append(row)
    assert len(groups) > 40
    assert set(shown) == set(groups)
    for name, rows in groups.items():
        assert len(rows) == 3
        assert all(row["verified"] and row["under_cap"] for row in rows)

        def mean(field: str, rows: list[dict[str, Any]] = rows) -> float:
            return statistics.mean(row[field] for row in rows)

        handed_on = statistics.mean(row["averaged"] or row["trained"] for row in rows)
        spread = statistics.stdev(row["bits_per_byte"] for row in rows)
        assert list(shown[name][:7]) == [
            f"{mean('bits_per_byte'):.4f}",
            f"{spread:.4f}",
            f"{handed_on:.4f}",
            f"{mean('artifact_bytes'):,.0f}",
            f"{rows[0]['parameters']:,}",
            f"{mean('steps'):.0f}",
            f"{mean('tokens_per_second'):,.0f}",
        ]


def differences(folder: Path) -> list[float | None]:
    """Every difference, claim and rank correlation that a study's results hold, means and single random seeds."""
    rows = read_rows(folder / RESULTS)
    facts = findings(json.loads((folder / "study.json").read_text()), rows)
    scored = {(row["label"], row["seed"]): row["bits_per_byte"] for row in rows if row["bits_per_byte"] is not None}
    rivals = {one["label"]: one["against"] for one in facts["verdicts"]}
    paired = [(key, (rivals.get(key[0], "base"), key[1])) for key in scored]
    return [
        *(one["difference"] for one in facts["verdicts"]),
        *(one["claim"]["difference"] for one in facts["verdicts"] if one["claim"]),
        *(row["spearman"] for row in (facts["early"] or {"rows": []})["rows"]),
        *(scored[key] - scored[rival] for key, rival in paired if rival in scored),
    ]


@pytest.mark.long
def test_the_log_says_what_the_results_say() -> None:
    """Every signed number of an entry that names studies is a difference, a claim or a rank correlation of them."""
    entries = (ROOT / "docs" / "log.md").read_text().split("\n## ")
    for folder in KEPT:
        if folder.name == "study_seconds":  # nothing was decided, and the log is silent
            continue
        name = str(folder.relative_to(ROOT / "studies")).replace("/", "`, `")
        entry = next(entry for entry in entries if re.search(rf"`studies/{name}`(?!, `scale)", entry))
        others = re.search(rf"`studies/{name}` and `(\w+)`", entry)
        named = [folder, *([folder.parent / others[1]] if others else [])]
        known = [value for one in named for value in differences(one)]
        for number in re.findall(r"(?<![\w.])[+-]\d+\.\d+", entry):
            digits = len(number.partition(".")[2])
            found = any(value is not None and abs(value - float(number)) <= 0.51 * 10**-digits for value in known)
            assert found, f"{number} in the log's entry on {name} is nowhere in its results"
