"""The report of a study: what it says, that it stands alone, and that no rows can break it."""

import csv
import json
import math
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from html_page import Parsed
from json_page import fields_below, fields_by_verb
from run_folder import make_events, make_result, write_run

from caddie.config import plain
from caddie.errors import UserError
from caddie.lab.findings import _agrees, findings
from caddie.lab.plots import curves, forest, marked, sizes, standings, sweep_lines
from caddie.lab.report import (
    duration,
    markdown,
    money,
    p_value,
    page,
    signed,
    verdict_html,
    write_runs_report,
    write_study_report,
)
from caddie.lab.rows import write_rows
from caddie.lab.study import Claim, Entry, Study, Tokens
from caddie.recipes.catalog import find

EFFECTS = {
    "gated attention": ("architecture", -0.0310, "better", -0.012),
    "value residual": ("architecture", -0.0120, "better", -0.008),
    "XSA on all layers": ("architecture", -0.0045, "better", -0.0016),
    "weight decay 0.04": ("optimizer", -0.0012, "better", None),
    "soft rounding": ("quantization", 0.0004, "same", 0.0),
    "rotation": ("quantization", 0.0031, "worse", 0.004),
    "pruning 5 %": ("quantization", 0.0102, "worse", 0.02),
    "shards by difficulty": ("data", 0.0280, "better", -0.003),
    "half the batch": ("schedule", 0.0610, None, None),
}


def make_study(effects: dict[str, tuple[str, float, str | None, float | None]] = EFFECTS) -> dict[str, Any]:
    """What `study.json` holds."""
    return {
        "name": "seed-000",
        "why": "Which of system 000's experiments come out the same at mini scale?",
        "base": "parallel_muon_mini",
        "budget": "Steps(steps=400)",
        "equal": "steps",
        "margin": 0.002,
        "seeds": [1, 2, 3],
        "public": [
            {"label": "8xH100, seed 42", "bits_per_byte": 1.1147, "artifact_bytes": None, "source": "", "note": ""},
            {"label": "two cores", "bits_per_byte": 2.8100, "artifact_bytes": None, "source": "", "note": ""},
        ],
        "entries": [
            {
                "label": label,
                "diff": {f"model.block.setting_{index}": f"Variant(number={index})"},
                "against": "base",
                "kind": kind,
                "why": f"Is {label} worth it?",
                "claim": word and {"word": word, "difference": claimed, "source": "system 000, table 2", "note": ""},
            }
            for index, (label, (kind, _, word, claimed)) in enumerate(effects.items())
        ],
    }


def make_row(label: str, seed: int, effect: float, chance: random.Random, steps: int = 400) -> dict[str, Any]:
    """A finished run, as a line of `results.jsonl`."""
    noise = random.Random(seed).gauss(0, 0.006)  # the same for all labels, so that pairs tell more than groups
    score = 2.8312 + effect + noise + chance.gauss(0, 0.0012)
    speed = chance.uniform(0.97, 1.03)
    curve = [
        [
            step := round((index + 1) * steps / 60),
            round(0.05 * step * speed, 2),
            step * 1024,
            round(score + 1.4 * math.exp(-7 * step / steps) + 0.35 * (1 - step / steps) + chance.gauss(0, 0.02), 5),
        ]
        for index in range(60)
    ]
    return {
        "study": "seed-000",
        "label": label,
        "kind": EFFECTS.get(label, ("", 0))[0],
        "seed": seed,
        "key": f"{label}-key",
        "state": "finished",
        "error": None,
        "bits_per_byte": score,
        "trained": score - 0.004,
        "averaged": None,
        "packed": score + 0.001,
        "quantization_loss": 0.0041,
        "artifact_bytes": round(900_000 + 3e6 * abs(effect) + chance.randrange(2000)),
        "parameters": 1_271_840,
        "steps": steps,
        "tokens": steps * 1024,
        "tokens_per_second": 20_480 * speed,
        "train_seconds": 20.0 / speed,
        "total_seconds": 27.5,
        "device": "cpu, 1 thread",
        "processor": "AMD EPYC, AVX512",
        "precision": "bfloat16",
        "world": 1,
        "threads": 1,
        "workers": 2,
        "cpu_share": 0.99,
        "code": "2cff526",
        "scorer_sha256": "ab" * 32,
        "sha256": {"train_documents": "aa" * 32, "validation_documents": "bb" * 32, "tokenizer": "cc" * 32},
        "diff": {"model.block.setting": "1"},
        "curve": curve,
        "holdout": None,
    }


def make_rows(study: dict[str, Any] | None = None, seeds: tuple[int, ...] = (1, 2, 3)) -> list[dict[str, Any]]:
    """Rows of the study above; the last entry's third run failed."""
    chance = random.Random(5)
    effects = {"base": 0.0, **{entry["label"]: 0.0 for entry in (study or make_study())["entries"]}}
    effects |= {label: effect for label, (_, effect, *_) in EFFECTS.items() if label in effects}
    return [make_row(label, seed, effect, chance) for label, effect in effects.items() for seed in seeds]


def by_hand(**labels: list[float | None]) -> list[dict[str, Any]]:
    """Rows with these scores for seeds 1, 2, ..; None failed."""
    chance = random.Random(1)
    rows = []
    for label, scores in labels.items():
        for seed, score in enumerate(scores, 1):
            row = make_row(label, seed, 0.0, chance)
            failed = {"state": "failed", "error": "out of memory", "curve": None, "bits_per_byte": None}
            rows.append(row | (failed if score is None else {"bits_per_byte": score, "artifact_bytes": 1000}))
    return rows


def plan(*labels: str, **changes: Any) -> dict[str, Any]:
    """A study of these labels without claims."""
    return make_study(dict.fromkeys(labels, ("optimizer", 0.0, None, None))) | {"margin": 0.0} | changes


class Page(Parsed):
    """The page of a study."""

    @property
    def lengths(self) -> list[float]:
        return [
            float(length) for _, _, value in self.attributes for length in re.findall(r"([\d.e+-]+|nan|inf)%", value)
        ]

    def under(self, title: str) -> list[str]:
        """The text from a section's title to the next title that `TITLES` knows."""
        begin = self.text.index(title) + 1
        ends = [index for index, text in enumerate(self.text) if index >= begin and text in TITLES]
        return self.text[begin : min(ends, default=None)]


TITLES = (
    *("Keep in mind", "Swept settings", "Differences", "Verdicts", "Leaderboard", "Loss curves", "Size against score"),
    *("How early the ranks were known", "Failed runs", "What each entry changes", "How it was measured"),
)


def read(study: dict[str, Any], rows: list[dict[str, Any]], price: float | None = None) -> Page:
    return checked(findings(study, rows, price))


def checked(facts: dict[str, Any]) -> Page:
    """The page of these findings, whose lengths and lines are all possible."""
    json.dumps(facts, allow_nan=False)
    found = Page(page(facts))
    assert all(0 <= length <= 100 for length in found.lengths)
    drawn = [value for tag, name, value in found.attributes if (tag, name) == ("path", "d")]
    assert not re.search(r"nan|inf", " ".join(drawn))
    return found


# What it says


def test_seeds_to_decide_are_more_than_were_run() -> None:
    """Three seeds decide the first by p alone; of three entries its q is not below the level."""
    scores = {"near": [0.99, 1.0925, 1.1875], "none": [1.01, 1.09, 1.2], "nor": [0.99, 1.12, 1.2]}
    facts = findings(plan(*scores), by_hand(base=[1.0, 1.1, 1.2], **scores))
    near = next(one for one in facts["verdicts"] if one["label"] == "near")
    assert (near["word"], near["seeds_needed"], len(near["seeds"])) == ("unclear", 3, 3)
    assert near["p"] < 0.05 < near["q"]
    shown = page(facts)
    assert "a few more seeds to decide, as q counts all entries" in shown
    assert ">3 seeds to decide" not in shown


def test_differences_are_those_of_a_calculation_by_hand() -> None:
    rows = by_hand(base=[1.0, 1.1, 1.2], lower=[0.90, 0.99, 1.11], higher=[1.1, 1.2, 1.2999], broken=[1.0, None, None])
    facts = findings(plan("higher", "lower", "broken"), rows)
    lower, broken, higher = facts["verdicts"]
    assert [lower["label"], broken["label"], higher["label"]] == ["lower", "broken", "higher"]
    assert lower["difference"] == pytest.approx(-0.1)
    # The differences -0.10, -0.11, -0.09 have the deviation 0.01; Student's t of two degrees is 4.3027 at 97.5 %.
    assert lower["interval"] == pytest.approx((-0.1 - 4.3027 * 0.01 / 3**0.5, -0.1 + 4.3027 * 0.01 / 3**0.5), abs=1e-6)
    assert [one["word"] for one in (lower, broken, higher)] == ["better", "unclear", "worse"]
    assert facts["found"] == "Of 3 entries: 1 better, 1 worse, 0 same, 1 unclear."
    assert facts["failed"] == [{"label": "broken", "seeds": [2, 3], "error": "out of memory"}]
    # t = -17.32 has p = 1 - 17.32 / (2 + 17.32^2)^0.5 with two degrees, and is the larger p of two, so q = p.
    assert lower["q"] == pytest.approx(1 - 300**0.5 / 302**0.5, rel=1e-6)
    shown = read(plan("higher", "lower", "broken"), rows)
    table = shown.under("Verdicts")
    row = table[table.index("lower") :][:7]
    assert row == ["lower", "optimizer", "\u22120.1000", "\u22120.1248 to \u22120.0752", "0.003", "better", "0"]
    assert "a test needs two seeds of the entry and two of the base" in table
    assert shown.under("Failed runs") == ["broken, seeds 2, 3", "out of memory"]


def test_the_page_says_all_of_a_study() -> None:
    shown = read(make_study(), make_rows())
    assert [title for title in TITLES if title in shown.text] == [
        title for title in TITLES if title not in ("Keep in mind", "Swept settings", "Failed runs")
    ]
    assert "Which of system 000's experiments come out the same at mini scale?" in shown.text
    differences = shown.under("Differences")
    order = [differences.index(label) for label in EFFECTS]
    assert order == sorted(order), "the effects grow in the order of the study"
    for label in EFFECTS:
        assert label in shown.under("Verdicts")
        assert label in shown.under("What each entry changes")
    ranks = shown.under("Leaderboard")
    scores = [
        float(text) for text in ranks[: ranks.index("More figures of each label")] if re.fullmatch(r"2\.\d{4}", text)
    ]
    assert scores == sorted(scores)
    assert len(scores) == 10
    assert any("1.1147 (8xH100, seed 42); 2.8100 (two cores). Those far" in text for text in ranks)
    claims = [one for one in shown.under("Verdicts") if one in ("agrees here", "disagrees here", "undecided here")]
    assert len(claims) == 8
    assert "agrees here" in claims
    assert "disagrees here" in claims
    assert "better, \u22120.0120 bits per byte" in shown.under("What each entry changes")


def test_an_entry_is_compared_with_the_label_it_names() -> None:
    study = plan("wide", "wide and deep")
    study["entries"][1]["against"] = "wide"
    rows = by_hand(**{"base": [1.0, 1.1], "wide": [0.9, 1.01], "wide and deep": [0.8, 0.92]})
    deep, wide = findings(study, rows)["verdicts"]
    assert deep["difference"] == pytest.approx(-0.095), "against wide"
    assert wide["difference"] == pytest.approx(-0.095)
    shown = read(study, rows)
    assert "against wide" in shown.under("Differences")
    text = shown.under("What each entry changes")
    assert text[text.index("wide and deep") + 1] == "against wide"
    # Both have one degree of freedom, where p = 1 - 2 atan(t) / pi; q counts them together.
    p = [1 - 2 / math.pi * math.atan(t) for t in (0.095 / 0.005, 0.095 / 0.005)]
    assert [deep["q"], wide["q"]] == pytest.approx(p, rel=1e-6)
    rows[4]["bits_per_byte"] = 0.84
    deep, wide = sorted(findings(study, rows)["verdicts"], key=lambda one: -len(one["label"]))
    assert deep["q"] == pytest.approx(1 - 2 / math.pi * math.atan(0.075 / 0.015), rel=1e-6)
    assert wide["q"] == pytest.approx(2 * p[0], rel=1e-6), "twice its p, as the smaller of two"


def test_bytes_are_those_above_what_an_entry_is_compared_with() -> None:
    study = plan("packed", "repacked", "lost")
    study["entries"][0]["claim"] = {"word": "same", "difference": None, "source": "", "note": ""}
    study["entries"][1]["against"] = "packed"
    rows = by_hand(base=[1.0, 1.1], packed=[1.0, 1.1], repacked=[0.9, 1.3], lost=[1.0, None])
    for row, size in zip(rows, (1000, 3000, 12_000, 14_690, 100, None, None, None), strict=True):
        row["artifact_bytes"] = size
    verdicts = {one["label"]: one for one in findings(study, rows)["verdicts"]}
    assert verdicts["packed"]["bytes"] == pytest.approx(11_345)
    assert verdicts["repacked"]["bytes"] == pytest.approx(100 - 12_000), "over the seed that both have"
    assert verdicts["lost"]["bytes"] is None
    assert (verdicts["packed"]["word"], verdicts["packed"]["agrees"]) == ("same", "agrees")
    table = read(study, rows).under("Verdicts")
    row = table[table.index("packed") :][:11]
    assert row[2:8] == ["0.0000", "-", "same", "without effect on the score, at any seed", "same", "agrees here"]
    assert row[8] == "+11,345"
    assert "\u221211,900" in table
    assert "| same | +11,345 | same | agrees |" in markdown(findings(study, rows))


@pytest.mark.parametrize(
    ("word", "claimed", "difference", "agrees"),
    [
        ("better", "better", -0.01, "agrees"),
        ("worse", "better", -0.01, "disagrees"),
        ("unclear", "better", -0.01, "open"),
        ("same", "same", None, "agrees"),
        ("same", "worse", 0.01, "disagrees"),
        ("same", "worse", None, "disagrees"),
        ("same", "worse", 0.0006, "open"),
    ],
)
def test_a_claim_within_the_margin_is_not_refuted_by_the_same(
    word: str, claimed: str, difference: float | None, agrees: str
) -> None:
    assert _agrees(word, {"word": claimed, "difference": difference}, margin=0.002) == agrees


# Sweeps

RATES = (0.01, 0.02, 0.04, 0.08)
FALLS = (0.1, 0.5)


def swept_study() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A grid whose base has rate 0.04 and fall 0.1: the score is |log2(rate / best)|, best 0.04 and 0.02."""
    scores, entries = {}, []
    for fall, best in zip(FALLS, (0.04, 0.02), strict=True):
        for rate in RATES:
            label = "base" if (rate, fall) == (0.04, 0.1) else f"{rate}, {fall}"
            score = 2.0 + abs(math.log2(rate / best))
            scores[label] = [score, score + 0.2]
            diff = {"optimizer.matrix.lr": str(rate), "optimizer.scalar.lr": f"{rate + 0.01:g}"} if rate != 0.04 else {}
            diff |= {"schedule.fall": str(fall)} if fall != 0.1 else {}
            entries.append({"label": label, "diff": diff, "against": "base"})
    scores["gate"] = [1.0, 1.0]
    entries.append({"label": "gate", "diff": {"gate": "Sparse", "schedule.fall": "0.5"}, "against": "base"})
    study = plan() | {
        "entries": [one | {"kind": "", "why": "", "claim": None} for one in entries if one["label"] != "base"],
        "base_values": {"optimizer.matrix.lr": "0.04", "optimizer.scalar.lr": "0.05", "schedule.fall": "0.1"},
        "seeds": [1, 2],
    }
    return study, by_hand(**scores)


def test_a_sweep_is_drawn_over_its_numbers() -> None:
    study, rows = swept_study()
    found = findings(study, rows)["swept"]
    assert found["axes"] == [["optimizer.matrix.lr", "optimizer.scalar.lr"], ["schedule.fall"]]
    assert [line["value"] for line in found["lines"]] == list(FALLS)
    assert [line["best"] for line in found["lines"]] == [0.04, 0.02]
    assert [[point["value"] for point in line["points"]] for line in found["lines"]] == [list(RATES)] * 2
    assert found["lines"][0]["points"][2] == {
        **{"value": 0.04, "label": "base"},
        **{"mean": pytest.approx(2.1), "low": pytest.approx(2.0), "high": pytest.approx(2.2)},
    }
    assert (found["seeds"], found["left_out"]) == ([1, 2], ["gate"])
    drawn = sweep_lines(found)
    assert [line.label for line in drawn.lines] == ["fall 0.1: best at lr 0.04", "fall 0.5: best at lr 0.02"]
    alike = sweep_lines(found | {"axes": [["optimizer.matrix.lr"], ["optimizer.scalar.lr"]]})
    assert alike.lines[0].label == "scalar.lr 0.1: best at matrix.lr 0.04"
    assert [(tick.at, tick.label) for tick in drawn.across] == [
        *((pytest.approx(3.0), "0.01"), (pytest.approx(3 + 94 / 3, abs=1e-3), "0.02")),
        *((pytest.approx(3 + 188 / 3, abs=1e-3), "0.04"), (pytest.approx(97.0), "0.08")),
    ], "evenly, as each is twice the last"
    ticks = {float(tick.label): tick.at for tick in drawn.up}
    assert min(ticks) <= 2.0
    assert max(ticks) >= 4.2
    base = 100 * (max(ticks) - 2.1) / (max(ticks) - min(ticks))
    assert drawn.lines[0].best == f"M{10 * (3 + 188 / 3):.1f},{10 * base:.1f}h0"
    text = read(study, rows).under("Swept settings")
    assert "optimizer.matrix.lr (with it optimizer.scalar.lr), for each schedule.fall: mean over seeds 1, 2." in text[0]
    assert "Left out: 1 label with other changes." in text[0]


def test_a_sweep_is_a_table_in_markdown() -> None:
    table = markdown(findings(*swept_study())).split("## Swept settings")[1].split("\n\n")[2]
    assert table.splitlines() == [
        "| optimizer.matrix.lr \N{DOWNWARDS ARROW}, schedule.fall \N{RIGHTWARDS ARROW} | 0.1 | 0.5 |",
        "| --- | --- | --- |",
        "| 0.01 | 4.1000 | 3.1000 |",
        "| 0.02 | 3.1000 | **2.1000** |",
        "| 0.04 | **2.1000** | 3.1000 |",
        "| 0.08 | 3.1000 | 4.1000 |",
    ]


def test_entries_set_against_one_another_keep_their_places() -> None:
    study, rows = swept_study()
    whole = findings(study, rows)["swept"]
    for entry in study["entries"]:
        if entry["diff"].get("schedule.fall") and "optimizer.matrix.lr" in entry["diff"]:
            entry["against"] = "0.04, 0.5"
            del entry["diff"]["schedule.fall"]
    assert findings(study, rows)["swept"] == whole
    for entry in study["entries"]:
        if entry["label"] == "0.04, 0.5":
            entry["against"] = "0.01, 0.5"
    findings(study, rows)  # a circle has an end


def test_points_of_a_sweep_share_their_seeds() -> None:
    study, rows = swept_study()
    found = findings(study, rows[:-3])["swept"]
    assert found["seeds"] == [1]
    assert found["lines"][0]["points"][2]["mean"] == 2.0
    for row in rows:
        row["seed"] = row["seed"] if row["label"] == "base" else row["seed"] + 2
    found = findings(study, rows)["swept"]
    assert found["seeds"] == []
    assert found["lines"][0]["points"][2]["mean"] == pytest.approx(2.1)
    assert "means over unlike seeds" in read(study, rows).under("Swept settings")[0]


def test_one_swept_setting_is_one_line() -> None:
    study, rows = swept_study()
    study["entries"] = [entry for entry in study["entries"] if "schedule.fall" not in entry["diff"]]
    found = findings(study, rows)["swept"]
    assert [line["value"] for line in found["lines"]] == [None]
    assert [line.label for line in sweep_lines(found).lines] == ["best at lr 0.04"]
    assert "| optimizer.matrix.lr | bits per byte |" in markdown(findings(study, rows))
    read(study, rows)
    del study["base_values"]
    found = findings(study, rows)["swept"]
    assert [point["value"] for point in found["lines"][0]["points"]] == [0.01, 0.02, 0.08], "without the base"


@pytest.mark.long
def test_what_is_no_sweep_has_no_picture() -> None:
    assert findings(make_study(), make_rows())["swept"] is None, "no numbers"
    rows = by_hand(base=[1.0], **{label: [1.0 + index / 10] for index, label in enumerate("abc")})
    for diffs, drawn in (
        ([{"x": "1"}, {"x": "2"}, {"x": "3"}], True),
        ([{"x": "1"}, {"x": "2"}, {"x": "none"}], True),
        ([{"x": "1"}, {"x": "none"}, {"x": "true"}], False),
        ([{"x": "1"}, {"y": "2"}, {"z": "3"}], False),
        ([{"x": "1"}, {"x": "2"}, {"gate": "Sparse"}], True),
        ([{"x": "1"}, {"x": "1"}, {"x": "1"}], False),
        ([{}, {}, {}], False),
    ):
        study = plan("a", "b", "c") | {"base_values": {"x": "0", "y": "0", "z": "0"}}
        for entry, diff in zip(study["entries"], diffs, strict=True):
            entry["diff"] = diff
        assert (findings(study, rows)["swept"] is not None) is drawn, diffs
        assert ("Swept settings" in read(study, rows).text) is drawn
        assert ("## Swept settings" in markdown(findings(study, rows))) is drawn


@pytest.mark.long
def test_a_crowded_sweep_is_still_a_picture() -> None:
    values = [f"{value:g}" for value in (0.0, *(1.001**index for index in range(12)))]
    labels = {f"{x}, {y}": {"x": x, "y": str(y)} for x in values for y in range(1, 8)}
    study = plan(*labels)
    for entry in study["entries"]:
        entry["diff"] = labels[entry["label"]]
    chance = random.Random(8)
    rows = [make_row(label, 1, chance.gauss(0, 0.01), chance, 60) for label in labels]
    rows[50]["bits_per_byte"] = 1e6
    drawn = sweep_lines(findings(study, rows)["swept"])
    assert [line.color for line in drawn.lines] == [None] * 2 + list(range(5))
    assert drawn.above == 1
    assert float(drawn.up[-1].label) < 4
    assert [drawn.across[0].label, drawn.across[-1].label] == ["0", values[-1]]
    assert all(b.at - a.at > 2.4 * max(len(a.label), len(b.label)) for a, b in pairwise(drawn.across))
    read(study, rows)


def test_the_frontier_is_what_nothing_beats_twice() -> None:
    rows = by_hand(base=[1.0], smaller=[1.2], worse=[1.3], larger=[0.9], dominated=[1.0])
    for label, size in {"base": 200, "smaller": 100, "worse": 100, "larger": 400, "dominated": 300}.items():
        next(row for row in rows if row["label"] == label)["artifact_bytes"] = size
    facts = findings(plan("smaller", "worse", "larger", "dominated"), rows)
    assert {one["label"] for one in facts["board"] if one["frontier"]} == {"smaller", "base", "larger"}
    drawn = sizes(facts["board"])
    assert drawn is not None
    assert [number for *_, number in drawn.marks] == [1, 2, 3]
    assert [left for left, _, _ in drawn.marks] == pytest.approx([0.0, 100 / 3, 100.0], abs=1e-3)
    assert drawn.summary == "3 of 5 on the frontier, from 100 to 400 bytes."
    table = read(plan("smaller", "worse", "larger", "dominated"), rows).under("Size against score")
    assert table[table.index("frontier") :] == [
        *("frontier", "bytes", "bits per byte"),
        *("1", "smaller", "100", "1.2000", "2", "base", "200", "1.0000", "3", "larger", "400", "0.9000"),
    ]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"verified": False, "under_cap": False}, "over the cap"),
        ({"verified": False, "under_cap": True}, "failed verification"),
    ],
)
def test_a_file_that_does_not_count_is_marked_and_on_no_frontier(fault: dict[str, bool], said: str) -> None:
    study, rows = plan("small", "other"), by_hand(base=[1.0, 1.1], small=[1.3, 1.2], other=[1.4, 1.4])
    for row in rows:
        size = {"base": 300, "small": 100, "other": 200}[row["label"]]
        row |= {"artifact_bytes": size, "verified": True, "under_cap": True}
    rows[3] |= fault  # one seed of small
    facts = findings(study, rows)
    assert {one["label"] for one in facts["board"] if one["frontier"]} == {"base", "other"}
    [verdict] = [one for one in facts["verdicts"] if one["label"] == "small"]
    assert {name: verdict[name] for name in fault} == fault
    assert markdown(facts).count(f"small ({said})") == 2, "leaderboard and verdicts"
    assert page(facts).count(f'small <small class="wrong">{said}</small>') == 2
    assert said not in markdown(findings(study, rows[:2] + rows[4:]))


def test_the_page_on_json_has_all_fields() -> None:
    facts = findings(make_study(), make_rows())
    assert set(facts["verdicts"][0]) == fields_below("Verdicts")
    assert set(facts["board"][0]) == fields_below("Board")
    assert fields_by_verb()["study"] - {"results", "report"} <= set(facts)


def test_equal_size_and_score_are_both_on_the_frontier() -> None:
    board = findings(plan("twin"), by_hand(base=[1.0], twin=[1.0]))["board"]
    assert [one["frontier"] for one in board] == [True, True]
    assert sizes(board) is None, "one size makes no picture"


def test_sizes_of_several_decades_have_a_logarithmic_axis() -> None:
    rows = by_hand(base=[1.0], large=[0.9])
    rows[0]["artifact_bytes"], rows[1]["artifact_bytes"] = 10_000, 1_000_000
    drawn = sizes(findings(plan("large"), rows)["board"])
    assert drawn is not None
    assert {tick.label: tick.at for tick in drawn.across}["0.1 MB"] == pytest.approx(50.0)


@pytest.mark.parametrize(("early", "spearman", "kept"), [([3.0, 2.0, 4.0], 1.0, 1), ([3.0, 4.0, 2.0], -1.0, 0)])
def test_early_ranks_are_held_against_final_ones(early: list[float], spearman: float, kept: int) -> None:
    rows = by_hand(base=[1.1], a=[1.0], b=[1.2])
    for row, loss in zip(rows, early, strict=True):
        row["curve"] = [[step, step / 2, 1024 * step, loss] for step in range(1, 101)]
    found = findings(plan("a", "b"), rows)["early"]
    for row in found["rows"]:
        assert row["spearman"] == pytest.approx(spearman)
        assert (row["best_kept"], row["of"]) == (kept, 1)
    assert found["safe"] == (0.01 if kept else 1.0)
    rows[2]["trained_with"] = "base"
    assert findings(plan("a", "b"), rows)["early"] is None, "two trainings make no ranks"
    del rows[2]["trained_with"]
    text = read(plan("a", "b"), rows).under("How early the ranks were known")
    assert text[-1].startswith("Stopping the worse half")
    assert ("never safe" in text[-1]) is not kept


def test_a_price_becomes_money() -> None:
    rows = by_hand(base=[1.0], a=[0.9])
    for row in rows:
        row |= {"total_seconds": 1800.0, "world": 8, "device": "NVIDIA H200"}
    facts = findings(plan("a"), rows, price=2.5)
    assert facts["verdicts"][0]["money"] == pytest.approx(0.5 * 8 * 2.5)
    assert facts["cost"] == {"runs": 2, "seconds": 3600.0, "core_seconds": 8 * 3600.0, "money": pytest.approx(20.0)}
    assert "costs 10.00" in read(plan("a"), rows, 2.5).text
    on_a_cpu = [row | {"world": 2, "device": "cpu, 1 thread", "workers": 2} for row in rows]
    assert findings(plan("a"), on_a_cpu, price=2.5)["cost"]["money"] == pytest.approx(2.5 / 2), "two at once share it"
    assert not [text for text in read(plan("a"), rows).text if "costs" in text]


def test_a_training_that_several_share_is_paid_for_once() -> None:
    rows = by_hand(base=[1.0], a=[0.9])
    for row in rows:
        row |= {"total_seconds": 100.0, "train_seconds": 60.0, "trained_with": "base"}
    facts = findings(plan("a"), rows)
    assert facts["cost"]["seconds"] == pytest.approx(140.0)
    assert facts["verdicts"][0]["seconds"] == pytest.approx(100.0), "what it takes by itself"


def test_runs_that_should_not_count_unseen_are_named() -> None:
    rows = by_hand(base=[1.0, 1.1], a=[0.9, 1.0, 1.2])
    rows[2] |= {"verified": False, "world": 8}
    rows[3] |= {"under_cap": False}
    rows[4] |= {"verified": None}
    for row, text in zip(rows, "xxxyy", strict=True):
        row |= {"holdout": 1.0, "holdout_documents": text}
    study = plan("a", seeds=[1, 2, 3])
    notes = "\n".join(findings(study, rows)["notes"])
    for said in (
        "Artifacts that fail verification: a.",
        "Artifacts that were not verified, or without a decision: a.",
        "Artifacts that are over their cap: a.",
        "Runs differ in their number of processes",
        "Runs differ in their holdout text: x in 3; y in 2 (a).",
        "Labels have different seeds",
    ):
        assert said in notes
    verdict = findings(study, rows)["verdicts"][0]
    assert (verdict["seeds"], verdict["mean"]) == ([1, 2], pytest.approx(0.95)), "those that the test compared"


def test_a_machine_that_changes_its_speed_is_noticed() -> None:
    rows = by_hand(base=[1.0, 1.1], a=[0.9, 1.0])
    for row, speed in zip(rows, (1000.0, 1090.0, 1000.0, 1200.0), strict=True):
        row["tokens_per_second"] = speed
    study = plan("a") | {"equal": "seconds", "budget": "Seconds(seconds=20.0)", "seeds": [1, 2]}
    notes = findings(study, rows)["notes"]
    assert any("The machine's speed changed: in 1 of 2 labels" in note and "(most: a, 20%)" in note for note in notes)
    assert not [note for note in findings(study | {"equal": "steps"}, rows)["notes"] if "speed" in note]


def test_what_must_be_minded_is_said() -> None:
    rows = make_rows()
    study = make_study() | {"equal": "seconds", "budget": "Seconds(seconds=20.0)", "seeds": [1, 2, 3, 4]}
    assert findings(study, rows)["notes"] == ["Not run yet: 10 of 40 planned runs."]
    rows[3] |= {"code": "1" * 40 + "+", "processor": "AMD EPYC, AVX2"}
    rows[4] |= {"workers": 1, "code": None, "sha256": rows[4]["sha256"] | {"recipe": "ee" * 32}}
    rows[7] |= {"cpu_share": 0.713, "scorer_sha256": "cd" * 32}
    rows[8]["sha256"] = rows[8]["sha256"] | {"validation_documents": "ff" * 32}
    rows.append(rows[0] | {"label": "gone"})
    notes = findings(study | {"seeds": [1, 2, 3]}, rows)["notes"]
    first, second, third = list(EFFECTS)[:3]
    assert notes == [
        f"Runs differ in their processor: AMD EPYC, AVX512 in 29; AMD EPYC, AVX2 in 1 ({first}).",
        f"Runs differ in their number of runs at once: 2 in 29; 1 in 1 ({first}).",
        "Runs differ in their version of the code: 2cff526 in 28; "
        f"111111111111+ in 1 ({first}); unknown in 1 ({first}).",
        f"Runs differ in their scorer: {'ab' * 6} in 29; {'cd' * 6} in 1 ({second}).",
        f"Runs differ in their held-out text: {'bb' * 6} in 29; {'ff' * 6} in 1 ({second}).",
        "Labels with one seed ran on different processors, which round differently: seed 1.",
        "Other programs took CPU time: 1 of 30 runs had under 90% of their threads' time "
        f"(least: {second}, seed 2, 71%), so they trained on less text.",
        f"{first} has runs of different settings; run the study again.",
        "Left out, because the study no longer has them: gone.",
    ]
    assert third not in " ".join(notes)
    steps = findings(make_study(), rows)["notes"]
    assert not [note for note in steps if "alone" in note], "with equal steps load changes no score"


def test_of_many_changes_six_are_shown() -> None:
    study = make_study()
    study["entries"][0]["diff"] = {f"model.part{number}": str(number) for number in range(8)}
    shown = markdown(findings(study, make_rows()))
    assert "model.part4=4, model.part5=5 and 2 more |" in shown
    assert "model.part6" not in shown


def test_how_it_was_measured_is_said() -> None:
    lines = dict(findings(make_study(), make_rows())["measured"])
    assert lines["Budget"] == "400 steps each"
    assert lines["Device"] == "cpu, 1 thread"
    assert lines["SHA-256 of the held-out text"] == "bb" * 32
    assert findings(make_study() | {"budget": "each recipe's own", "equal": ""}, [])["study"]["budget"] == (
        "each recipe's own budget"
    )
    assert findings(make_study() | {"budget": "Tokens(tokens=12345678)", "equal": "tokens"}, [])["study"]["budget"] == (
        "12,345,678 tokens each"
    )


def test_a_study_describes_itself_for_the_report() -> None:
    study = Study(
        name="gates",
        why="Do gates pay?",
        base=find("baseline_mini"),
        entries={
            "deep": Entry(diff={"model.depth": 6}, kind="size", claim=Claim(word="better", source="a paper")),
            "deeper": Entry(diff={"model.depth": 7}, against="deep"),
        },
        budget=Tokens(tokens=1_000_000),
    )
    told = json.loads(json.dumps(plain(study.to_json())))
    shown = read(told, by_hand(base=[1.0, 1.1], deep=[0.9, 1.01], deeper=[0.8, 0.92]))
    assert "1,000,000 tokens each" in shown.text
    text = shown.under("What each entry changes")
    assert text[text.index("deeper") :][:4] == ["deeper", "against deep", "model.depth", "7"]
    values = [
        point["value"]
        for point in findings(told, by_hand(base=[1.0], deep=[0.9], deeper=[0.8]))["swept"]["lines"][0]["points"]
    ]
    assert values == [study.base.model.depth, 6, 7]


# That it stands alone


def test_the_page_stands_alone(tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text(json.dumps(make_study()))
    write_rows(tmp_path / "results.jsonl", make_rows())
    written = write_study_report(tmp_path)
    assert [path.name for path in written] == ["report.html", "report.md", "results.csv"]
    assert len(list(tmp_path.iterdir())) == 5
    text = written[0].read_text(encoding="utf-8")
    shown = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form", "a"} & set(shown.tags)
    assert not [name for _, name, _ in shown.attributes if name.startswith("on") or name in ("src", "href", "action")]
    assert not re.search(r"url\(|@import|@font-face|https?:", text)
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


@pytest.mark.long
@pytest.mark.parametrize("place", ["name", "label", "why", "kind", "claim", "diff", "error", "device", "public"])
def test_everything_is_escaped(place: str) -> None:
    evil = "<script>alert(1)</script>\"'\x00&amp;|"
    study, rows = make_study(), make_rows()
    entry = study["entries"][0]
    if place == "label":
        for row in rows[3:6]:
            row["label"] = evil
        entry["label"] = evil
    elif place in ("why", "kind"):
        entry[place] = evil
    elif place == "claim":
        entry["claim"] |= {"source": evil, "note": evil}
    elif place == "diff":
        entry["diff"] = {evil: evil}
    elif place == "error":
        rows[3] |= {"state": "failed", "error": evil}
    elif place == "device":
        rows[3]["device"] = evil
    elif place == "public":
        study["public"][0]["label"] = evil
    else:
        study[place] = evil
    facts = findings(study, rows)
    shown = read(study, rows)
    assert "script" not in shown.tags
    assert any("<script>alert(1)</script>\"'\ufffd&amp;|" in line for line in shown.text)
    assert "script" not in Page(verdict_html(facts)).tags
    assert "<script" not in markdown(facts)


def test_a_notebook_gets_a_table_with_its_own_style() -> None:
    text = verdict_html(findings(make_study(), make_rows()))
    shown = Page(text)
    assert shown.tags[0] == "div"
    assert not {"html", "body", "script", "link"} & set(shown.tags)
    assert shown.tags.count("svg") == len(EFFECTS)
    rules = re.sub(r"@media[^{]*\{", "", text.partition("<style>")[2].partition("</style>")[0])
    selectors = [one.strip() for rule in re.findall(r"([^{}]+)\{", rules) for one in rule.split(",")]
    assert len(selectors) > 15
    assert all(selector.startswith((".forest", ".word-")) for selector in selectors), (
        "the notebook's own are left alone"
    )
    for label, word in (("gated attention", "better"), ("half the batch", "worse")):
        assert shown.text[shown.text.index(label) + 2] == word


# That no rows can break it


@pytest.mark.parametrize("seeds", [(), (1,), (1, 2)])
@pytest.mark.parametrize("entries", [0, 1, 9])
def test_few_runs(seeds: tuple[int, ...], entries: int) -> None:
    study = make_study(dict(list(EFFECTS.items())[:entries]))
    shown = read(study, make_rows(study, seeds))
    assert ("No finished run." in shown.text) is (not seeds)
    assert ("Differences" in shown.text) is (bool(seeds) and entries > 0)
    Page(verdict_html(findings(study, make_rows(study, seeds))))


def test_runs_of_another_held_out_text_have_no_verdict() -> None:
    rows = make_rows()
    for row in rows[3:6]:
        row["sha256"] = row["sha256"] | {"validation_documents": "cc" * 32}
    facts = findings(make_study(), rows)
    other = next(one for one in facts["verdicts"] if one["label"] == rows[3]["label"])
    assert (other["word"], other["difference"]) == ("unclear", None)
    assert other["reason"] == "base was scored on another held-out text"
    assert sum(one["difference"] is not None for one in facts["verdicts"]) == 8
    assert "base was scored on another held-out text" in read(make_study(), rows).text


def test_all_failed_or_the_base_alone_failed() -> None:
    rows = make_rows()
    for row in rows[:3]:
        row |= {"state": "failed", "error": "out of memory", "bits_per_byte": None}
    facts = findings(make_study(), rows)
    assert facts["counts"] == {"better": 0, "worse": 0, "same": 0, "unclear": 9}
    assert facts["verdicts"][0]["reason"] == "base has no finished run"
    assert "Differences" not in read(make_study(), rows).text
    for row in rows:
        row |= {"state": "failed", "error": "out of memory", "bits_per_byte": None}
    shown = read(make_study(), rows)
    assert "Of 9 entries: 0 better, 0 worse, 0 same, 0 unclear, 9 without a finished run." in shown.text
    assert shown.under("Failed runs")[:2] == ["base, seeds 1, 2, 3", "out of memory"]


@pytest.mark.long
def test_two_hundred_entries() -> None:
    chance = random.Random(3)
    effects = {f"entry {index}": ("optimizer", chance.gauss(0, 0.02), None, None) for index in range(200)}
    rows = [make_row("base", seed, 0.0, chance) for seed in (1, 2)]
    rows += [make_row(label, seed, effect, chance) for label, (_, effect, *_) in effects.items() for seed in (1, 2)]
    facts = findings(make_study(effects), rows)
    shown = Page(page(facts))
    assert {"160 more entries", "160 more verdicts", "161 more labels"} <= set(shown.text)
    assert all(label in shown.text for label in effects)
    assert "196 more" in shown.under("Loss curves")
    colored = marked(facts["board"], "base")
    assert (colored[0], len(colored)) == ("base", 5)
    assert colored[1] == facts["board"][0]["label"]
    assert colored[-1] == facts["board"][-1]["label"]
    drawn = curves(facts["curves"]["steps"], colored, "steps")
    assert drawn is not None
    assert [line.label for line in drawn.lines[-5:]] == colored[::-1], "coloured lines lie on grey ones"


@pytest.mark.parametrize(
    ("unit", "last", "told", "end"),
    [
        ("steps", 1_500_000, "1 label, up to 1,500,000 steps.", "1,500,000"),
        ("seconds", 61.26, "1 label, up to 61.3 seconds.", "60 s"),
    ],
)
def test_large_numbers_of_a_curve_have_no_exponent(unit: str, last: float, told: str, end: str) -> None:
    drawn = curves({"base": [(1.0, 3.0, 3.0, 3.0), (last, 2.0, 2.0, 2.0)]}, ["base"], unit)
    assert drawn is not None
    assert (drawn.summary, drawn.across[-1].label) == (told, end)


few_or_each = pytest.mark.parametrize("together", [3, pytest.param(1, marks=pytest.mark.slow)])
"""Names are spoilt by threes that stand far from one another, and each alone."""


def apart(names: list[str], together: int) -> list[list[str]]:
    """At most so many in each group, as far from one another as they can be."""
    groups = -(-len(names) // together)
    return [names[first::groups] for first in range(groups)]


@few_or_each
@pytest.mark.parametrize(
    "value",
    [None, math.nan, *(pytest.param(value, marks=pytest.mark.long) for value in (math.inf, -math.inf, -5.0, 0, 1e30))],
)
def test_numbers_that_make_no_sense(value: float | None, together: int) -> None:
    study = make_study(dict(list(EFFECTS.items())[:2]))
    numbers = [name for name, held in make_row("base", 1, 0.0, random.Random(1)).items() if type(held) in (int, float)]
    assert len(numbers) > 12
    never = {"seed"} if value is None else {"seed", "total_seconds", "world"}  # of these a program writes none
    for names in apart([name for name in [*numbers, "curve"] if name not in never], together):
        rows = make_rows(study, (1, 2))
        for row in (rows[0], rows[3]):
            row |= {name: [[value] * 4, *row["curve"][1:]] if name == "curve" else value for name in names}
        facts = findings(study, rows, 1.0)
        checked(facts)
        markdown(facts)


@pytest.mark.long
@few_or_each
def test_any_field_may_be_missing(together: int) -> None:
    study = make_study(dict(list(EFFECTS.items())[:2]))
    for names in apart([name for name in make_rows()[0] if name not in ("label", "seed", "state")], together):
        rows = make_rows(study, (1, 2))
        for name in names:
            del rows[0][name], rows[3][name]
        read(study, rows)


def test_what_is_no_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"study\.json describes no study"):
        write_study_report(tmp_path)
    for text in ("{", "[]", '{"name": "a"}'):
        (tmp_path / "study.json").write_text(text)
        with pytest.raises(UserError, match="describes no study"):
            write_study_report(tmp_path)
    (tmp_path / "study.json").write_text(json.dumps(make_study()))
    with pytest.raises(UserError, match=r"results\.jsonl"):
        write_study_report(tmp_path)
    write_rows(tmp_path / "results.jsonl", make_rows())
    lacking = make_study()
    del lacking["why"]
    lost = make_study()
    lost["entries"][0]["against"] = "nobody"
    for study in (lacking, lost):
        (tmp_path / "study.json").write_text(json.dumps(study))
        with pytest.raises(UserError, match=r"lacks what a report needs \(.*\); run the study again"):
            write_study_report(tmp_path)


# Drawings


def test_a_stray_point_does_not_squeeze_the_picture() -> None:
    rows = by_hand(base=[1.0, 1.1], a=[1.001, 1.102], b=[1.003, 1.102], c=[9.0, 9.1])
    verdicts = findings(plan("a", "b", "c"), rows)["verdicts"]
    drawn = forest(verdicts, 0.0)
    assert drawn is not None
    assert drawn.rows["c"].outside == "high"
    assert drawn.strays
    assert drawn.rows["a"].outside == ""
    assert abs(drawn.rows["a"].at - drawn.zero) > 1
    drawn = forest([one for one in verdicts if one["label"] == "a"], 0.0)
    assert drawn is not None
    assert not drawn.strays


def test_places_of_a_forest_by_hand() -> None:
    claim = {"word": "better", "difference": -0.1, "source": "", "note": ""}
    one = {"label": "a", "difference": 0.1, "interval": (0.05, 0.15), "claim": claim}
    drawn = forest([one], 0.05)
    assert drawn is not None
    assert [tick.label for tick in drawn.ticks] == ["\u22120.1", "0", "+0.1", "+0.2"]
    assert drawn.zero == pytest.approx(100 / 3, abs=1e-3)
    assert drawn.band == pytest.approx((100 / 6, 100 / 3), abs=1e-3)
    row = drawn.rows["a"]
    assert (row.low, row.at, row.high, row.claim) == pytest.approx((50.0, 200 / 3, 250 / 3, 0.0), abs=1e-3)


def test_public_figures_that_are_near_are_drawn() -> None:
    board = findings(make_study(), make_rows())["board"]
    drawn = standings(board, make_study()["public"])
    assert drawn is not None
    assert [tick.label for tick in drawn.references] == ["two cores"]
    means = [drawn.rows[one["label"]][0] for one in board]
    assert all(a <= b for a, b in pairwise(means))


def test_a_curve_is_the_mean_over_seeds_where_all_have_been() -> None:
    rows = by_hand(base=[1.0, 1.0])
    rows[0]["curve"] = [[step, step * 0.5, step, 2.0] for step in range(1, 101)]
    rows[1]["curve"] = [[step, step * 0.5, step, 3.0] for step in range(1, 51)]
    found = findings(plan(), rows)["curves"]
    assert found["steps"]["base"][0] == pytest.approx((1, 2.5, 2.0, 3.0))
    assert found["steps"]["base"][-1] == pytest.approx((50, 2.5, 2.0, 3.0))
    assert found["seconds"]["base"][-1][0] == pytest.approx(25.0)


# Markdown and CSV


def test_markdown_tables_are_whole() -> None:
    study, rows = make_study(), make_rows()
    study["entries"][0]["diff"] = {"a|b": "[x]"}
    rows[-1] |= {"state": "failed", "error": "a | b"}
    text = markdown(findings(study, rows, 2.0))
    assert "a \\| b" in text
    tables = [block for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 5
    for block in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1
    verdicts = tables[0].splitlines()
    assert [line.split(" | ")[0].removeprefix("| ") for line in verdicts[2:]] == list(EFFECTS)
    assert "| system 000" not in text


def test_the_table_has_a_line_for_each_run(tmp_path: Path) -> None:
    rows = make_rows()
    rows[0]["diff"] = {"a": "1", "b": '"x, y"'}
    rows[-1] |= {"state": "failed", "error": "broke, badly", "bits_per_byte": None}
    (tmp_path / "study.json").write_text(json.dumps(make_study()))
    write_rows(tmp_path / "results.jsonl", rows)
    with write_study_report(tmp_path)[2].open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 30
    assert float(lines[0]["bits_per_byte"]) == rows[0]["bits_per_byte"]
    assert lines[0]["diff"] == 'a=1; b="x, y"'
    assert (lines[-1]["error"], lines[-1]["bits_per_byte"]) == ("broke, badly", "")
    assert lines[0]["sha256_validation_documents"] == "bb" * 32


def test_words_for_numbers() -> None:
    assert [signed(value) for value in (-0.00123, 0.5, 0.0, -0.00001, math.nan, None)] == [
        *("\u22120.0012", "+0.5000", "0.0000", "0.0000"),
        *("-", "-"),
    ]
    assert [p_value(value) for value in (0.0004, 0.0416, None)] == ["< 0.001", "0.042", "-"]
    assert [duration(value) for value in (9.96, 600.0, 7200.0)] == ["10.0 s", "10.0 min", "2.0 h"]
    assert [money(value) for value in (0.0, 0.01234, 1234.5)] == ["0.00", "0.012", "1,234.50"]


# Runs of no study


def make_run(folder: Path, name: str, seed: int, width: int, score: float) -> Path:
    """A run folder with a recipe of this width."""
    result = make_result(1) | {"recipe": name, "seed": seed, "bits_per_byte": score, "key": f"{width:08x}"}
    result["sha256"] = result["sha256"] | {"recipe": f"{width:064x}"}
    write_run(folder, result, make_events(60))
    model = {"kind": "GPT", "width": width, "mlp": {"kind": "MLP" if width < 200 else "Gated", "hidden": 3}}
    recipe = {"kind": "Recipe", "name": name, "why": name, "base": None, "public": [], "model": model}
    (folder / "recipe.json").write_text(json.dumps({"recipe": recipe, "seed": seed}))
    return folder


def test_runs_side_by_side(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / f"{width}-{seed}", name, seed, width, score + seed / 100)
        for name, width, score in (("tiny", 128, 1.5), ("wide", 256, 1.4))
        for seed in (1, 2)
    ]
    out = tmp_path / "new" / "out"
    alone = Page(write_runs_report(runs[:3], tmp_path / "three")[0].read_text())
    assert not any(said.startswith("Not run yet") for said in alone.text), "nobody planned the fourth"
    written = write_runs_report(runs, out)
    assert [path.parent for path in written] == [out] * 3
    shown = Page(written[0].read_text())
    assert "Of 1 entry: 0 better, 0 worse, 0 same, 1 unclear." in shown.text
    differences = shown.under("Differences")
    assert differences[differences.index("wide") + 1] == "\u22120.1000"
    changes = shown.under("What each entry changes")
    assert changes[changes.index("model.width") + 1] == "256"
    assert changes[changes.index("model.mlp") + 1] == "Gated(hidden=3)"
    assert "model.mlp.hidden" not in changes
    assert "Loss curves" in shown.text
    with written[2].open(newline="") as file:
        assert [line["label"] for line in csv.DictReader(file)] == ["tiny", "tiny", "wide", "wide"]


def test_runs_of_one_name_are_told_apart_and_tasks_name_theirs(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(width), "tiny", 1, width, 1.5) for width in (128, 144, 160)]
    (tmp_path / "160" / "task.json").write_text(json.dumps({"study": "s", "label": "widest", "seed": 1, "key": "k"}))
    shown = Page(write_runs_report(runs, tmp_path / "out")[0].read_text())
    assert {"tiny 00000080", "tiny 00000090", "widest"} <= set(shown.text)


@pytest.mark.parametrize("loss", [{}, {"loss": None}, {"loss": 10**400}])
def test_a_run_with_a_damaged_log_or_seed_is_refused(loss: dict[str, Any], tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(width), str(width), 1, width, 1.5) for width in (128, 144)]
    events = make_events(60)
    damaged = {"event": "step", "step": 10**6, "seconds": 1.0, "tokens": 1, **loss}
    write_run(runs[1], json.loads((runs[1] / "result.json").read_text()), [*events, damaged])
    with pytest.raises(UserError, match=r"144.result\.json lacks what a report needs .*; run the recipe again"):
        write_runs_report(runs, tmp_path / "out")
    write_run(runs[1], make_result(1) | {"seed": None}, events)
    with pytest.raises(UserError, match=r"144.result\.json lacks what a report needs"):
        write_runs_report(runs, tmp_path / "out")


def test_a_damaged_recipe_has_no_settings(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(width), str(width), 1, width, 1.5) for width in (128, 144)]
    (tmp_path / "144" / "recipe.json").write_text('{"recipe": 5}')
    shown = Page(write_runs_report(runs, tmp_path / "out")[0].read_text())
    changes = shown.under("What each entry changes")
    assert changes[changes.index("model") + 1] == "left out"


def test_a_seed_twice_and_an_unfinished_run_are_refused(tmp_path: Path) -> None:
    a, b = (make_run(tmp_path / name, "tiny", 1, 128, 1.5) for name in "ab")
    with pytest.raises(UserError, match="same recipe and seed; leave one out"):
        write_runs_report([a, b], tmp_path / "out")
    with pytest.raises(UserError, match="same recipe and seed; leave one out"):
        write_runs_report([a, a], tmp_path / "out")
    (b / "result.json").unlink()
    with pytest.raises(UserError, match=r"no .*result\.json"):
        write_runs_report([a, b], tmp_path / "out")
    with pytest.raises(UserError, match="name the folders"):
        write_runs_report([], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_entries_are_judged_on_the_holdout_text_too() -> None:
    rows = by_hand(base=[1.0, 1.1, 1.2], a=[0.9, 1.0, 1.1], b=[1.0, 1.1, 1.2], unscored=[1.0, 1.1, 1.2])
    scores = {"base": (2.0, 2.1, 2.2), "a": (1.9, 2.001, 2.099), "b": (2.02, 2.119, 2.221)}
    for row in rows:
        if own := scores.get(row["label"]):
            text = "y" if (row["label"], row["seed"]) == ("b", 3) else "x"
            row |= {"holdout": own[row["seed"] - 1], "holdout_documents": text}
    study = plan("a", "b", "unscored")
    a, base, b = findings(study, rows)["holdout"]
    assert [one["label"] for one in (a, base, b)] == ["a", "base", "b"]
    assert (a["word"], a["seeds"]) == ("better", [1, 2, 3])
    assert a["difference"] == pytest.approx(-0.1)
    assert a["interval"][0] < -0.1 < a["interval"][1] < -0.09
    assert a["p"] == a["q"] < 0.001
    assert base["mean"] == pytest.approx(2.1)
    assert base["word"] is base["difference"] is b["word"] is None, "b was scored on other text"
    told = markdown(findings(study, rows))
    assert "| a | 3 | 2.0000 | −0.1000 | −0.1025 to −0.0975 | < 0.001 | better |" in told.replace("&lt;", "<")
    assert "| b | 3 | 2.1200 | - | - | - | - |" in told
    page = read(study, rows)
    assert page.under("Holdout")[-1] == "-"
    assert "−0.1025 to −0.0975" in page.under("Holdout")
    assert "## Holdout" not in markdown(findings(study, by_hand(base=[1.0], a=[0.9])))
