"""Studies at scale: every entry resolves, fits its recipe's parts, and has steps by a known time of a step."""

from __future__ import annotations

from pathlib import Path

from caddie.lab.study import BASE, find_study
from caddie.recipes.catalog import find

STUDIES = Path(__file__).resolve().parent.parent.parent / "studies"


def test_champion_is_the_last_rung_and_has_the_bytes_of_the_record() -> None:
    for name, suffix in (("study", "scale"), ("larger", "scale96")):
        ladder = find_study(f"{STUDIES / 'ladder' / 'study.py'}:{name}")
        assert len(ladder.labels) == 14
        assert (ladder.labels[0], *ladder.labels[-2:]) == (BASE, "ngram_tilt", "champion")
        champion, record = ladder.recipe("champion"), find("ngram_tilt")
        weights = find(f"ngram_tilt_{suffix}").parameters
        assert champion.pack.policy is None, "the code is not counted against so few bytes"
        assert abs(champion.pack.cap_bytes / weights - 16_000_000 / record.parameters) < 1e-5
        assert champion.model == find(f"champion_{suffix}").model
        assert {ladder.recipe(label).pack.policy for label in ladder.labels[:-1]} == {"contest-2026"}
