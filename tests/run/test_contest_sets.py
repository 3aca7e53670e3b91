"""Official sets are known by their totals, and nothing else passes for one."""

import json
from pathlib import Path

import pytest
from recording import RecordedProgress

from caddie.data.fineweb import VARIANTS
from caddie.errors import UserError
from caddie.recipes.catalog import find, shipped
from caddie.run.contest_sets import CURRENT, FIRST, identify
from caddie.run.resolve_corpus import check_text_named, contest_variant, open_corpus

NO_OFFICIAL = "its score compares with no official one"


@pytest.mark.parametrize(
    ("totals", "name"),
    [  # tokens in the file, where they were published, and bytes of the text or of what is left of it
        ((62_021_846, 151_080_891, 50_000, 1_024), "SP 1024"),
        ((40_540_803, 151_080_891, 50_000, 8_192), "SP 8192"),
        ((47_853_344, 151_080_645, 50_000, 8_192), "CaseOps 8192"),
        ((62_021_632, 151_078_500, 50_000, 1_024), "SP 1024"),
    ],
)
def test_the_official_set_is_known(totals: tuple[int, int, int, int], name: str) -> None:
    said = identify(*totals)
    assert said == (
        f"By its totals this is the contest's validation set, tokenized by {name}: 50,000 documents, 151.08 MB known to"
        " 10 kB."
    )


def test_the_same_text_under_another_tokenizer_is_known_by_bytes_and_documents() -> None:
    said = identify(151_130_645, 151_080_645, 50_000, 257)
    assert said
    assert said.startswith("By its totals this is the contest's validation set, under another tokenizer: ")
    assert "under another tokenizer" in str(identify(62_021_846, 151_080_645, 50_000, 4_096))


def test_the_first_export_is_told_apart() -> None:
    said = identify(63_779_900, 155_769_500, 50_900, 1_024)
    assert said
    assert said.startswith("By its totals this is the contest's first validation set, which no later result was scored")


@pytest.mark.parametrize(
    ("totals", "part"),
    [((9_662_464, 32_800_000, 10_000, 8_192), "21.7%"), ((750_678, 1_790_670, 210, 1_024), "1.2%")],
)
def test_a_part_says_how_much(totals: tuple[int, int, int, int], part: str) -> None:
    said = identify(*totals)
    assert said
    assert said.startswith(f"By its totals this may be a part of the contest's validation set, {part} of its bytes")
    assert NO_OFFICIAL in said


@pytest.mark.parametrize(
    "totals",
    [
        (62_021_846, 151_200_000, 50_000, 1_024),  # other bytes
        (62_021_846, 151_080_891, 49_999, 1_024),  # other documents
        (40_000, 298_445, 35, 1_024),  # longer tokens than the tokenizer makes of English
        (300, 300, 5, 257),
        (17_600, 42_000, 5, 1_024),  # a text of one's own, as dense as a part
        (90_000_000, 200_000_000, 70_000, 1_024),
    ],
)
def test_anything_else_is_no_official_set(totals: tuple[int, int, int, int]) -> None:
    assert identify(*totals) is None


def test_counts_in_logs_are_whole_sequences_at_the_bytes_per_token_they_print() -> None:
    printed = {"SP 1024": 2.4359, "SP 4096": 3.3197, "SP 8192": 3.7266, "CaseOps 8192": 3.1574}
    for name, count in CURRENT.tokens.items():
        assert count % 2_048 == 0
        assert abs(count * printed[name] - CURRENT.bytes) < 10_000
    assert FIRST.tokens["SP 1024"] % 1_024 == 0
    assert abs(FIRST.tokens["SP 1024"] * 2.4423 - FIRST.bytes) < 10_000


def test_every_recipe_for_the_contest_names_a_variant_that_can_be_fetched() -> None:
    wanted = {recipe.name: contest_variant(recipe) for recipe in shipped().values()}
    assert wanted.pop("tiny") is wanted.pop("small") is None
    assert len(wanted) == 67
    assert set(wanted.values()) == {"sp1024", "sp4096", "sp8192", "caseops8192"} <= set(VARIANTS)
    assert (wanted["baseline"], wanted["few_layers"], wanted["champion"]) == ("sp1024", "sp4096", "caseops8192")


def test_a_corpus_of_another_kind_of_tokenizer_is_told(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": f"Document {n}"}) + "\n" for n in range(20)))
    plain = find("tiny").but({"data.tokenizer": "RawBytes", "model.vocabulary": 257})
    folder = open_corpus(plain, tmp_path / "text.jsonl", folder=tmp_path / "corpus").folder
    for source, said in (
        ("CaseOps", ["the recipe has the tokenizer CaseOps, but the corpus was made with bytes"]),
        ("RawBytes", []),
    ):
        told = RecordedProgress()
        open_corpus(plain.but({"data.tokenizer": source}), folder, told)
        assert told.notes == said


def test_a_recipe_for_the_contest_says_how_its_text_is_fetched() -> None:
    best = find("best_record")
    with pytest.raises(UserError, match="`caddie data --fineweb caseops8192 --shards 80`, then add --data data/fine"):
        check_text_named(best, None)
    check_text_named(best, "stdlib")
    for other in (find("tiny"), find("best_record_mini"), best.but({"model.vocabulary": 300}), best.but(name="mine")):
        check_text_named(other, None)
