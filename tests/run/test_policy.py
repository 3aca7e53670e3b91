"""Policies: which bytes and seconds each of them counts, by hand-made results, and what no policy may be."""

import math
import re
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caddie.config import field_types
from caddie.errors import UserError
from caddie.pack.compress import Pack
from caddie.recipes.catalog import shipped
from caddie.run.policy import CONTEST_2026, HUTTER, POLICIES, STRICT, Allowance, Policy, apply_policies, file_cap

DOCUMENTED = Path(__file__).parent.parent.parent / "docs" / "policies.md"


def result(**changes: Any) -> dict[str, Any]:
    """What a policy reads of a result, every figure a power of two or of ten, so that sums show what is in them."""
    return {
        "bits_per_byte": 2.0,
        "corpus": {"lossless": True, "source_bytes": {"validation": 4_096, "train": 10**6}},
        "ledger": {"parts": {"weights": 1, "tokenizer": 2, "config": 4, "manifest": 8, "container": 16}},
        "source": {"needed_bytes": 32, "training_bytes": 64, "decoders": {"torch": 128, "brotli": 256}},
        "seconds": {"prepare": 1e1, "train_warmup": 1e2, "train": 1e3, "pack": 1e4, "score": 1e5, "verify": 1e6},
        "evaluation": {"load": 0.25, "warm_up": 0.5, "score": 2.0},
        **changes,
    }


def under(policy: Policy, found: dict[str, Any]) -> dict[str, Any]:
    (entry,) = apply_policies(found, [policy])
    return entry


def test_each_policy_counts_what_it_names() -> None:
    contest, strict, hutter = apply_policies(result())
    assert [entry["name"] for entry in (contest, strict, hutter)] == ["contest-2026", "strict", "hutter"]
    assert contest["bytes"] == 1 + 4 + 8 + 16 + 32 + 64
    assert strict["bytes"] == 1 + 2 + 4 + 8 + 16 + 32 + 64
    assert hutter["bytes"] == 1 + 2 + 4 + 8 + 16 + 32 + 1_024
    assert [entry["training"]["seconds"] for entry in (contest, strict, hutter)] == [1_000, 11_100, 11_100]
    assert [entry["evaluation"]["seconds"] for entry in (contest, strict, hutter)] == [2.0, 2.75, 2.75]
    assert contest["parts"] == {
        "weights": 1,
        "config": 4,
        "manifest": 8,
        "container": 16,
        "source_needed": 32,
        "source_training": 64,
    }
    assert strict["evaluation"]["phases"] == {"load": 0.25, "warm_up": 0.5, "score": 2.0}


def test_a_limit_itself_is_kept_and_a_byte_or_second_more_is_not() -> None:
    found = result()
    found["ledger"]["parts"]["weights"] = 16_000_000 - 124
    found["seconds"]["train"] = 600.0
    found["evaluation"]["score"] = 600.0
    entry = under(CONTEST_2026, found)
    assert (entry["bytes"], entry["under_cap"]) == (16_000_000, True)
    assert (entry["training"]["within"], entry["evaluation"]["within"]) == (True, True)
    found["ledger"]["parts"]["weights"] += 1
    found["seconds"]["train"] = found["evaluation"]["score"] = math.nextafter(600.0, 601.0)
    entry = under(CONTEST_2026, found)
    assert (entry["bytes"], entry["under_cap"]) == (16_000_001, False)
    assert (entry["training"]["within"], entry["evaluation"]["within"]) == (False, False)


def test_calibration_is_charged_where_there_is_any() -> None:
    found = result()
    assert under(CONTEST_2026, found)["training"]["phases"] == {"train": 1e3}
    found["seconds"]["calibrate"] = 3.5
    assert under(CONTEST_2026, found)["training"]["seconds"] == 1_003.5
    assert under(STRICT, found)["training"]["seconds"] == 11_103.5


def test_carried_source_is_counted_once() -> None:
    found = result()
    found["ledger"]["parts"]["source"] = 32
    assert [entry["bytes"] for entry in apply_policies(found)] == [entry["bytes"] for entry in apply_policies(result())]
    shipped = STRICT.but(counts=("weights", "source"))
    assert under(shipped, found)["bytes"] == 33
    assert under(shipped, result())["parts"] == {"weights": 1, "source": 0}


def test_what_was_not_measured_is_not_guessed() -> None:
    found = result()
    del found["evaluation"], found["source"]
    for entry in apply_policies(found):
        assert entry["bytes"] is entry["under_cap"] is None
        assert entry["evaluation"]["seconds"] is entry["evaluation"]["within"] is None
        assert entry["training"]["seconds"] > 0
    assert under(STRICT, result(evaluation={"load": None, "warm_up": 0.5, "score": 2.0}))["evaluation"] == {
        "phases": {"load": None, "warm_up": 0.5, "score": 2.0},
        "seconds": None,
        "budget_seconds": 600.0,
        "within": None,
    }
    for bits in (None, math.nan, math.inf):
        assert under(HUTTER, result(bits_per_byte=bits))["parts"]["text"] is None


def test_libraries_count_where_a_policy_says_so() -> None:
    everything = HUTTER.but(counts=("decoders",))
    assert under(everything, result())["bytes"] == 384
    unknown = {"needed_bytes": 32, "training_bytes": 64, "decoders": {"torch": 128, "brotli": None}}
    assert under(everything, result(source=unknown))["bytes"] is None
    assert not any("decoders" in policy.counts for policy in POLICIES)


def test_a_text_that_does_not_come_back_has_no_size() -> None:
    found = result()
    found["corpus"]["lossless"] = False
    entry = under(HUTTER, found)
    assert entry["parts"]["text"] is None
    assert entry["bytes"] is None
    assert under(STRICT, found) == under(STRICT, result())


def test_coded_text_is_rounded_up() -> None:
    assert under(HUTTER, result(bits_per_byte=2.0 + 1e-9))["parts"]["text"] == 1_025


def test_policies_without_a_limit_give_no_verdict() -> None:
    entry = under(HUTTER, result())
    assert entry["cap_bytes"] is entry["under_cap"] is entry["hardware"] is None
    for clock in ("training", "evaluation"):
        assert entry[clock]["budget_seconds"] is entry[clock]["within"] is None


sizes = st.integers(0, 1 << 30)
seconds = st.floats(0, 1e6)


@pytest.mark.long
@given(
    parts=st.fixed_dictionaries(dict.fromkeys(("weights", "tokenizer", "config", "manifest", "container"), sizes)),
    needed=sizes,
    training=sizes,
    phases=st.fixed_dictionaries(dict.fromkeys(("train_warmup", "train", "pack"), seconds)),
    evaluation=st.fixed_dictionaries(dict.fromkeys(("load", "warm_up", "score"), seconds)),
)
def test_strict_never_counts_less_than_the_contest(
    parts: dict[str, int], needed: int, training: int, phases: dict[str, float], evaluation: dict[str, float]
) -> None:
    source = {"needed_bytes": needed, "training_bytes": training, "decoders": {}}
    found = result(ledger={"parts": parts}, source=source, seconds=phases, evaluation=evaluation)
    contest, strict = apply_policies(found, [CONTEST_2026, STRICT])
    assert strict["bytes"] - contest["bytes"] == parts["tokenizer"]
    for clock in ("training", "evaluation"):
        assert strict[clock]["seconds"] >= contest[clock]["seconds"]
        assert strict[clock]["within"] <= contest[clock]["within"]
    assert strict["under_cap"] <= contest["under_cap"]


def test_policies_are_data() -> None:
    for policy in POLICIES:
        assert Policy.from_json(policy.to_json()) == policy
        assert re.fullmatch(r"[A-Z][^.]*\.", policy.why), "one sentence"
    assert len({policy.name for policy in POLICIES}) == 3
    assert (
        under(CONTEST_2026.but({"cap_bytes": 124, "training.seconds": 999.0}), result())["training"]["within"] is False
    )


@pytest.mark.parametrize(
    ("diff", "message"),
    [
        ({"counts": ("weights", "weights")}, "twice"),
        ({"training": Allowance(phases=("train", "score"))}, "twice"),
        ({"counts": ("source", "source_needed")}, "take one"),
        ({"counts": ("wheights",)}, "must be one of"),
        ({"evaluation.phases": ("sleep",)}, "must be one of"),
        ({"cap_bytes": 0}, "from 1"),
        ({"training.seconds": 0}, "seconds"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(diff: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        STRICT.but(diff)


def test_every_policy_is_documented() -> None:
    """The table of the documentation has a column for each policy, and says of each part and phase what it does."""
    text = DOCUMENTED.read_text()
    rows = {cells[0]: cells[1:] for cells in (line.strip("| ").split(" | ") for line in text.splitlines()) if cells[1:]}
    assert rows["bytes of"] == [policy.name for policy in POLICIES]
    for index, policy in enumerate(POLICIES):
        counted = {name.strip("`") for name, cells in rows.items() if cells[index : index + 1] == ["counted"]}
        assert counted == set(policy.counts)
        for clock in ("training", "evaluation"):
            charged = {name.strip("`") for name, cells in rows.items() if cells[index : index + 1] == [clock]}
            assert charged == set(getattr(policy, clock).phases)


PARTS = {"tokenizer": 2, "config": 4, "manifest": 8, "container": 16}


CODE = {"source_needed": 32, "source_training": 64}


@pytest.mark.parametrize("policy", [CONTEST_2026, STRICT])
@pytest.mark.parametrize("carried", [{}, {"source": 512}])
def test_a_file_that_fills_its_cap_fills_that_of_the_policy(policy: Policy, carried: dict[str, int]) -> None:
    parts = {**PARTS, **carried}
    cap = file_cap(Pack(policy=policy.name), CODE, parts)
    full = {**parts, "weights": cap.file_bytes - sum(parts.values())}
    entry = under(policy, result(ledger={"parts": full}))
    assert (entry["bytes"], entry["under_cap"]) == (16_000_000, True)
    more = {**full, "weights": full["weights"] + 1}
    assert under(policy, result(ledger={"parts": more}))["under_cap"] is False


def test_the_cap_is_told_in_a_line() -> None:
    assert str(file_cap(Pack(policy="contest-2026", cap_bytes=1000), CODE, PARTS)) == (
        "contest-2026: 1,000 bytes, less code of 32 to score and 64 to train, and 2 more for the tokenizer, which does "
        "not count: 906 for the file"
    )
    assert str(file_cap(Pack(policy="strict", cap_bytes=1000), CODE, PARTS)).endswith("64 to train: 904 for the file")
    assert file_cap(Pack(cap_bytes=1000), CODE, PARTS).file_bytes == 1000, "without a policy the file alone counts"


def test_code_that_leaves_nothing_is_refused() -> None:
    assert file_cap(Pack(policy="strict", cap_bytes=97), CODE).file_bytes == 1
    with pytest.raises(UserError, match=r"strict counts 96 bytes of code, which leaves nothing of pack\.cap_bytes=96"):
        file_cap(Pack(policy="strict", cap_bytes=96), CODE)


def test_recipes_name_the_policies_that_have_a_cap() -> None:
    named = {policy.name for policy in POLICIES if policy.cap_bytes}
    assert named == {*typing.get_args(typing.get_args(field_types(Pack)["policy"])[0])}
    contest = {name for name, recipe in shipped().items() if recipe.pack.policy == "contest-2026"}
    assert {*shipped()} - contest == {"tiny", "small"}, "their cap is no contest's"
    assert shipped()["tiny"].pack.policy is shipped()["small"].pack.policy is None
