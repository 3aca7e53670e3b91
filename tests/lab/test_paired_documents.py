"""Verdicts by seed and document: by hand, by simulation, and from the rows of a study."""

import json
import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from scipy.stats import t as student
from test_report import make_rows, make_study
from test_stats import write
from verdict_rates import draw, rates

from caddie.errors import UserError
from caddie.lab.compare import compare, summary
from caddie.lab.findings import findings
from caddie.lab.report import markdown, write_study_report
from caddie.lab.rows import read_rows, write_rows
from caddie.lab.stats import ErrorTerm, Estimate, document_part, paired, power, seeds_to_decide
from caddie.lab.verdicts import Documents, judge_pairs, measure
from caddie.report.documents import write_documents
from caddie.report.run_files import DOCUMENTS

SIZES = np.array([100.0, 300.0, 600.0])


def test_the_part_of_the_documents_by_hand() -> None:
    """Of two seeds it is the sum of the products of their residuals, times n / (n - 1)."""
    bits = [np.array([10.0, 0.0, 0.0]), np.array([0.0, 20.0, 0.0])]
    first = (np.array([10.0, 0.0, 0.0]) - 0.01 * SIZES) / 1000
    second = (np.array([0.0, 20.0, 0.0]) - 0.02 * SIZES) / 1000
    part = document_part(SIZES, bits)
    assert part is not None
    assert part.standard_error == pytest.approx(math.sqrt((first * second).sum() * 3 / 2))
    assert document_part(SIZES, [bits[0], -bits[0]]) is None, "nothing in common"
    middle = (first + second) / 2
    assert part.degrees == pytest.approx(min(2, 3 * (middle**2).sum() ** 2 / (middle**4).sum()))
    assert document_part(SIZES[:1], [bits[0][:1], bits[1][:1]]) is None
    proportional = [0.01 * SIZES, 0.02 * SIZES]
    assert (document_part(SIZES, proportional) or ErrorTerm(0.0, 1)).standard_error < 1e-12, (
        "a change alike in all documents"
    )


def part_by_loops(sizes: list[float], bits: list[list[float]]) -> ErrorTerm:
    """Mean over pairs of seeds of the products of residuals, n / (n - 1) times, and degrees by the fourth moment."""
    total, documents = sum(sizes), len(sizes)
    residuals = [[(y - sum(one) / total * x) / total for x, y in zip(sizes, one, strict=True)] for one in bits]
    products = [sum(map(math.prod, zip(a, b, strict=True))) for a, b in combinations(residuals, 2)]
    middle = [fmean(column) for column in zip(*residuals, strict=True)]
    degrees = 3 * sum(x**2 for x in middle) ** 2 / sum(x**4 for x in middle)
    return ErrorTerm(math.sqrt(fmean(products) * documents / (documents - 1)), min(documents - 1, degrees))


@pytest.mark.parametrize(("documents", "seeds", "tails"), [(2, 2, 0.1), (9, 3, 0.1), (9, 3, 3.0), (60, 5, 2.0)])
def test_the_part_of_the_documents_is_that_of_the_formula(documents: int, seeds: int, tails: float) -> None:
    """With heavy tails one document makes most of the error, so the degrees are few."""
    chance = np.random.default_rng(documents)
    sizes = chance.integers(100, 900, documents).astype(float)
    common = chance.lognormal(0.0, tails, documents) * chance.choice([-1.0, 1.0], documents)
    bits = sizes + common + chance.normal(0.0, 0.2, (seeds, documents))
    found, wanted = document_part(sizes, list(bits)), part_by_loops(sizes.tolist(), bits.tolist())
    assert found is not None
    assert (found.standard_error, found.degrees) == pytest.approx((wanted.standard_error, wanted.degrees), rel=1e-9)
    assert (found.degrees < documents - 1) == (tails > 1.0)


@pytest.mark.parametrize("documents", [2, 3])
def test_documents_of_the_same_bits_per_byte_add_no_error(documents: int) -> None:
    assert document_part(SIZES[:documents], [np.zeros(documents), np.ones(documents)]) is None


def convolved(where: float, own: float, free: int, others: int) -> float:
    """Probability that `own` times a Student's t and another one add up to less, by the sum of their densities."""
    steps = np.linspace(-60.0, 60.0, 24_001)
    below = student.pdf(steps, others) * student.cdf((where - steps) / own, free)
    return float(below.sum() * (steps[1] - steps[0]))


@pytest.mark.parametrize("own", [0.05, 1.0, 20.0])
@pytest.mark.parametrize(("first", "second"), [(1, 50), (2, 200), (4, 30)])
def test_two_errors_are_added_as_distributions(own: float, first: int, second: int) -> None:
    """Held against the convolution of the densities; from three seeds on with two degrees more, in part."""
    estimate = Estimate(0.0, own, first, ErrorTerm(1.0, second))
    weight = 1.0 / (1.0 + own**2) if first > 1 else 0.0
    for error in (-0.4, -2.0, -4.0):
        where = error * math.hypot(own, 1.0)
        plain, matched = (convolved(where, own * math.sqrt(first / free), free, second) for free in (first, first + 2))
        wanted = max((1 - weight) * plain + weight * matched, student.cdf(where / own, first))
        assert replace(estimate, value=-where).p_above(0.0) == pytest.approx(wanted, rel=0.02)
    low, high = replace(estimate, value=3.0).interval()
    assert low + high == pytest.approx(6.0)
    assert replace(estimate, value=high - 3.0).p_beyond() == pytest.approx(0.05, rel=1e-6), "interval and p agree"
    assert high - 3.0 > math.hypot(own, 1.0) * 1.9


@pytest.mark.parametrize(
    ("estimate", "above", "interval"),
    [
        (Estimate(3.0, 1.0, 1, ErrorTerm(1.0, 50)), (0.115639222, 0.561849255), (-3.47965282, 9.47965282)),
        (Estimate(3.0, 1.0, 2, ErrorTerm(1.0, 30)), (0.0477329831, 0.580249856), (0.0800144196, 5.91998558)),
        (Estimate(3.0, 0.05, 4, ErrorTerm(1.0, 30)), (0.0026985724, 0.616755804), (1.30133458, 4.69866542)),
        (Estimate(3.0, 20.0, 4, ErrorTerm(1.0, 30)), (0.444107277, 0.505614938), (-39.6442504, 45.6442504)),
        (Estimate(3.0, 1.0, 2, ErrorTerm(3.0, 5)), (0.194074365, 0.535640904), (-3.32868413, 9.32868413)),
        (Estimate(3e-3, 1e-4, 3, ErrorTerm(2e-4, 9.5)), (4.06764021e-05, 0.89350219), (0.00259188359, 0.00340811641)),
    ],
)
def test_figures_of_two_errors_stay_what_reports_say(
    estimate: Estimate, above: tuple[float, ...], interval: tuple[float, float]
) -> None:
    """One-sided p of 0 and of a tenth more than the value, and the interval of 90 %."""
    assert [estimate.p_above(margin * estimate.value) for margin in (0.0, 1.1)] == pytest.approx(above, rel=1e-7)
    assert estimate.interval(0.9) == pytest.approx(interval, rel=1e-7)


def test_the_seeds_needed_allow_for_the_documents() -> None:
    """No number of seeds decides with too few documents; without their part it is the paired power."""
    assert power(0.003, 4, [0.001], documents=ErrorTerm(1e-9, 50.0)) == pytest.approx(
        power(0.003, 4, [0.001]), abs=0.01
    )
    few, more = (seeds_to_decide(0.002, [0.001], documents=error) for error in (None, ErrorTerm(0.0005, 50.0)))
    assert few is not None
    assert more is not None
    assert few < more
    assert seeds_to_decide(0.002, [0.001], documents=ErrorTerm(0.001, 50.0)) is None
    assert seeds_to_decide(0.0001, [0.001], 0.002, documents=ErrorTerm(0.001, 50.0)) is None
    assert seeds_to_decide(0.006, [0.001], documents=ErrorTerm(0.00159, 50.0)) == 3
    assert seeds_to_decide(0.006, [0.001], documents=ErrorTerm(0.00159, 3.0)) is None, "four documents"


def scored(documents: Documents) -> dict[int, float]:
    return {seed: float(bits.sum() / documents.sizes.sum()) for seed, bits in documents.bits.items()}


def test_a_verdict_adds_the_error_of_the_documents_and_tells_what_pairing_saves() -> None:
    base, entry = draw(np.random.default_rng(5), 3, ratio=1.0, effect=0.02)
    scores = scored(base), scored(entry)
    alone = judge_pairs({"b": scores})["b"]
    found = judge_pairs({"b": scores}, documents={"b": (base, entry)})["b"]
    assert (alone.test, found.test) == ("paired", "documents")
    assert (found.difference, found.seeds, found.mean) == (alone.difference, alone.seeds, alone.mean)
    part = document_part(base.sizes, [entry.bits[seed] - base.bits[seed] for seed in range(3)])
    spread, of_seeds = found.spread, paired(list(scores[1].values()), list(scores[0].values()))
    assert (spread.seeds, spread.documents) == (of_seeds.standard_error, part.standard_error)
    assert spread.paired == math.hypot(spread.seeds, spread.documents)
    each = [document_part(base.sizes, list(one.bits.values())).standard_error for one in (base, entry)]
    deviations = [np.std(list(one.values()), ddof=1) / math.sqrt(3) for one in scores]
    assert spread.unpaired == pytest.approx(math.hypot(*each, *deviations))
    assert spread.unpaired > 2 * spread.paired
    assert (alone.spread.documents, alone.spread.paired) == (None, alone.spread.seeds)
    assert spread.to_json() == {**vars(spread), "paired": spread.paired}
    assert alone.spread.unpaired == pytest.approx(math.hypot(*deviations))
    assert found.p >= alone.p, "a claim that reaches further is no surer"
    assert found.interval[0] <= alone.interval[0]
    assert found.p == Estimate(found.difference, of_seeds.standard_error, 2, part).p_beyond()
    more = [
        judge_pairs({"b": scores}, margin=0.01, documents={"b": (base, entry)} if both else None) for both in (0, 1)
    ]
    assert [one["b"].seeds_needed for one in more] == [3, 4], "to be as sure of other documents takes more seeds"


def test_documents_count_only_where_both_have_them_all() -> None:
    base, entry = draw(np.random.default_rng(5), 3, ratio=1.0)
    scores = scored(base), scored(entry)
    lacking = replace(entry, bits={seed: entry.bits[seed] for seed in (0, 1)})
    other = Documents(entry.sizes[::-1], entry.bits)
    for documents in ((base, lacking), (lacking, base), (base, other)):
        assert measure(*scores, (0, 1, 2), documents).test == "paired"
    assert measure(*scores, (), (base, entry)).test == "welch"
    assert measure(*scores, (0, 1), (base, lacking)).test == "documents"
    same = measure(scores[0], scores[0], (0, 1, 2), (base, base))
    assert same.equal
    for count, test in ((1, "paired"), (2, "documents")):
        few = [Documents(one.sizes[:count], {s: bits[:count] for s, bits in one.bits.items()}) for one in (base, entry)]
        assert measure(*map(scored, few), (0, 1, 2), (few[0], few[1])).test == test


def test_documents_that_move_apart_with_every_seed_add_no_error() -> None:
    """Count such a difference once: the error of the seeds holds it already."""
    sizes, moves = np.full(4, 100.0), np.array([3.0, -1.0, -1.0, -1.0])
    base = Documents(sizes, {1: 120.0 + 0.0 * moves, 2: 120.0 + 0.0 * moves})
    entry = Documents(sizes, {1: 119.0 + moves, 2: 118.0 - moves})
    found = measure(scored(base), scored(entry), (1, 2), (base, entry))
    assert (found.test, found.spread.documents) == ("documents", 0.0)
    assert found.estimate == paired([1.19, 1.18], [1.2, 1.2])


@pytest.mark.long
@pytest.mark.parametrize(
    ("seeds", "ratio"),
    [(3, 10.0), (2, 10.0), (5, 2.0)],
)
def test_where_nothing_differs_one_verdict_in_twenty_says_so(seeds: int, ratio: float) -> None:
    """Within 3.5 and 6.5 %, and what so few trials leave open; methods that forget what is shared fail."""
    trials = 900
    found, open_still = rates(seeds, ratio, trials), 2 * math.sqrt(0.05 * 0.95 / trials)
    assert 0.035 - open_still < found["seeds and documents"] < 0.065 + open_still / 2
    assert found["all independent"] > 0.3, "documents of one seed share what the seed did"
    assert found["documents alone"] > 0.1
    if seeds == 2:
        assert found["Satterthwaite"] > 0.08
    if ratio < 5:
        assert found["seeds alone"] > found["seeds and documents"], "the held-out documents are a sample too"


@pytest.mark.long
@pytest.mark.parametrize("ratio", [10.0, 5.0, 1.0])
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_the_rate_of_false_findings_over_the_parts(seeds: int, ratio: float) -> None:
    """Two seeds are too few where documents weigh as much as seeds: the test then finds less than it may."""
    found, strict = rates(seeds, ratio, 6000), rates(seeds, ratio, 3000, level=0.005)
    assert found["seeds and documents"] < 0.065
    assert strict["seeds and documents"] < 0.011, "p is adjusted over many entries, so small ones must hold too"
    if seeds > 2 or ratio > 1.0:
        assert found["seeds and documents"] > 0.033
    if ratio == 1.0:
        assert found["seeds alone"] > 0.07


# Rows and reports


def with_documents(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows whose documents add up to their scores: a label moves each document, a seed moves all."""
    sizes, kept = np.random.default_rng(0).integers(100, 9000, 40).astype(float), []
    for place, row in enumerate(rows):
        chance = np.random.default_rng(place)
        moved = np.random.default_rng(len(row["label"])).normal(0.0, 0.002, 40) + chance.normal(0.0, 0.001, 40)
        bits = sizes * (row["bits_per_byte"] + moved)
        bits += sizes * (row["bits_per_byte"] - bits.sum() / sizes.sum())
        kept.append({**row, "documents": [sizes.tolist(), bits.tolist()]})
    return kept


def test_rows_keep_documents_in_a_file_beside_them(tmp_path: Path) -> None:
    rows = with_documents(make_rows())
    other = {**rows[-1], "seed": 99, "documents": [[1.0] * 7, [1.0] * 7]}
    write_rows(tmp_path / "results.jsonl", [*rows, other])
    assert "documents" not in json.loads((tmp_path / "results.jsonl").read_text().split("\n")[0])
    found = read_rows(tmp_path / "results.jsonl")
    for before, after in zip(rows, found, strict=False):
        sizes, bits = after["documents"]
        assert sizes == before["documents"][0]
        assert sum(bits) / sum(sizes) == pytest.approx(before["bits_per_byte"], abs=1e-6)
    assert "documents" not in found[-1], "a run on another text has no column"
    write_rows(tmp_path / "results.jsonl", make_rows())
    assert not (tmp_path / DOCUMENTS).exists(), "no figures of other rows"
    assert read_rows(tmp_path / "results.jsonl") == make_rows()
    (tmp_path / DOCUMENTS).write_text("bytes,b\n1,x\n")
    with pytest.raises(UserError, match=r"documents\.csv: cannot be read"):
        read_rows(tmp_path / "results.jsonl")


def test_rounded_bits_of_short_documents_are_those_of_their_run(tmp_path: Path) -> None:
    """Twelve documents of nine bytes: each loses 0.0004 bits, all together 4e-5 bits per byte."""
    row, sizes, bits = make_rows()[0], [9.0] * 12, [20.0004] * 12
    write_rows(tmp_path / "results.jsonl", [{**row, "bits_per_byte": 20.0004 / 9, "documents": [sizes, bits]}])
    assert read_rows(tmp_path / "results.jsonl")[0]["documents"] == [sizes, [20.0] * 12]


def test_documents_of_another_run_are_refused(tmp_path: Path) -> None:
    """Files of two studies in one folder would give a verdict of neither."""
    rows = with_documents(make_rows())
    other = [{**row, "bits_per_byte": row["bits_per_byte"] + 1e-4} for row in rows]
    write_rows(tmp_path / "results.jsonl", rows)
    write_rows(tmp_path / "other" / "results.jsonl", other)
    (tmp_path / DOCUMENTS).replace(tmp_path / "other" / DOCUMENTS)
    with pytest.raises(UserError, match=rf"{DOCUMENTS}: .* bits per byte, and .* bring both files"):
        read_rows(tmp_path / "other" / "results.jsonl")


def test_a_report_judges_by_document_and_shows_both_errors(tmp_path: Path) -> None:
    rows = with_documents(make_rows())
    facts, old = findings(make_study(), rows), findings(make_study(), make_rows())
    assert {one["test"] for one in facts["verdicts"]} == {"documents"}
    assert {one["test"] for one in old["verdicts"]} == {"paired"}
    for one, before in zip(facts["verdicts"], old["verdicts"], strict=True):
        assert one["difference"] == before["difference"]
        assert one["spread"]["paired"] < one["spread"]["unpaired"]
        assert before["spread"]["documents"] is None
    json.dumps(facts["verdicts"])
    lines = dict(facts["measured"])
    assert lines["Standard error by seed and document, median"].startswith("unpaired 0.0")
    assert "Standard error by seed, median" in dict(old["measured"])
    head = next(line for line in markdown(facts).splitlines() if line.startswith("| entry"))
    assert "| standard error | unpaired |" in head
    write_rows(tmp_path / "results.jsonl", rows)
    (tmp_path / "study.json").write_text(json.dumps(make_study()))
    write_study_report(tmp_path)
    assert "Standard error by seed and document" in (tmp_path / "report.html").read_text()
    assert "Standard error by seed and document" in (tmp_path / "report.md").read_text()


def test_rows_of_another_held_out_text_are_not_compared() -> None:
    rows = with_documents(make_rows())
    label = rows[-1]["label"]
    for row in rows:
        if row["label"] == label:
            row["sha256"] = {**row["sha256"], "validation_documents": "dd" * 32}
    tests = {one["label"]: one["test"] for one in findings(make_study(), rows)["verdicts"]}
    assert tests.pop(label) is None
    assert set(tests.values()) == {"documents"}


@pytest.mark.parametrize("unit", ["bits-per-byte", "nats-per-byte", "nats-per-token"])
@pytest.mark.parametrize("scores", range(4))
def test_compare_uses_the_documents_of_run_folders(scores: int, unit: Any, tmp_path: Path) -> None:
    """In another unit both groups divide by one factor, whatever the last digits of their scores."""
    base, entry = draw(np.random.default_rng(scores), 3, ratio=1.0, effect=-0.02)
    groups = []
    for name, digit, side in (("b", "2", entry), ("a", "1", base)):
        groups.append([write(tmp_path, name, seed, score, digit) for seed, score in scored(side).items()])
        for folder, bits in zip(groups[-1], side.bits.values(), strict=True):
            write_documents(folder / DOCUMENTS, side.sizes, {"bits": bits})
    facts = compare(*groups, unit=unit)
    assert facts["test"] == "documents"
    assert facts["p"] == facts["p_documents"]
    wanted = judge_pairs({"b": (scored(base), scored(entry))}, documents={"b": (base, entry)})["b"]
    factor = facts["difference"] / wanted.difference
    assert facts["spread"]["documents"] == pytest.approx(factor * wanted.spread.documents, rel=1e-3)
    assert 2 * facts["p"] == pytest.approx(wanted.p, rel=1e-3)
    text = summary(facts)
    assert "paired test by seed and document" in text
    assert f"unpaired {facts['spread']['unpaired']:.6f}" in text
    last, left_out = next(reversed(entry.bits)), "without common seeds, the test leaves out the error"
    elsewhere = write(tmp_path, "b", 7, scored(entry)[last], "2")
    unlike = compare([*groups[0][:2], elsewhere], groups[1], unit=unit)
    assert not [note for note in (*facts["notes"], *unlike["notes"]) if note.startswith(left_out)], "no file of them"
    write_documents(elsewhere / DOCUMENTS, entry.sizes, {"bits": entry.bits[last]})
    unlike = compare([*groups[0][:2], elsewhere], groups[1], unit=unit)
    assert unlike["test"] == "welch"
    assert unlike["notes"][-1].startswith(left_out)
    halved = next(iter(entry.bits.values())) / 2
    write_documents(groups[0][0] / DOCUMENTS, entry.sizes, {"bits": halved})
    with pytest.raises(
        UserError, match=r"states .* bits per byte, and the documents beside it cost .*; one of them was"
    ):
        compare(*groups, unit=unit)
    (groups[0][0] / DOCUMENTS).unlink()
    assert compare(*groups, unit=unit)["test"] == "paired"
