"""Ideas beside the records: each is one recipe, in the table of the docs, and as undecided as its seeds."""

import re
from pathlib import Path

import pytest

from caddie.lab.stats import seeds_needed
from caddie.recipes.catalog import find, shipped
from caddie.recipes.names import tables

IDEAS = sorted(tables("frontier_ideas"))
PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "results" / "frontier-ideas.md"
ROWS = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "not yet decided" in line]
DEVIATION, UNKNOWN = 0.00036, 0.0005
"""Between the best record's seeds, and the effect to look for where none is known in bits per byte."""


def test_every_idea_is_in_the_table_once() -> None:
    named = re.findall(r"`(\w+)`", " ".join(row.split("|")[4] for row in ROWS))
    assert {*IDEAS, "finer_corrections", "longer_rows"} == set(named)
    assert len(ROWS) == len(IDEAS) + 2, "the row floor is a part of another"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("`")[1])
def test_the_seeds_are_those_that_the_effect_needs(row: str) -> None:
    published = re.search(r"\| (?:.*, about )?-(0\.\d+)(?:,| \|)", row)
    effect = float(published[1]) if published and "nats" not in row else UNKNOWN
    assert f"({seeds_needed(effect, [DEVIATION] * 2)} seeds needed)" in row


@pytest.mark.parametrize("name", IDEAS)
def test_an_idea_changes_one_thing_of_the_best_record(name: str) -> None:
    recipe = shipped()[name]
    assert recipe.base == find("best_record").name
    assert len(find("best_record").settings.diff(recipe.settings)) <= 3
    assert not recipe.public


def test_queries_and_keys_differ_in_their_groups_alone() -> None:
    rules = find("head_pairs").train.optimizers
    assert rules["blocks.*.attention.[qk]*.weight"] == rules["matrix"].but(group_rows=128)


def test_groups_of_rows_shrink_with_the_heads() -> None:
    rules = find("head_pairs_mini").train.optimizers
    assert [optimizer.group_rows for optimizer in rules.values() if getattr(optimizer, "group_rows", None)] == [64]  # type: ignore[attr-defined]
