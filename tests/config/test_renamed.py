"""Old names of settings: files written with them load, and whoever types one is told the new one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from caddie.cli.run import _pack_setting
from caddie.config.renamed import KINDS, SETTINGS, modernized_path
from caddie.errors import UserError
from caddie.recipes.catalog import find
from caddie.recipes.recipe import Recipe

OLD = json.loads((Path(__file__).parent.parent / "golden" / "recipes_before_0.2.json").read_text())
"""Recipes as version 0.1 wrote them, a few that together have every old name that a recipe has."""
TYPED = {
    "compress.cap_bytes": "pack.cap_bytes",
    "score.adaptation": "score.ttt",
    "train.fake_quantize": "train.qat",
    "train.rehearsal_steps": "train.warmup_steps",
    "model.lanes": "model.parallel_streams",
    "model.block.mix": "model.block.residual_mix",
    "model.block.attention.exclusive": "model.block.attention.xsa",
    "model.block.attention.gain": "model.block.attention.query_gain",
    "model.block.attention.rotary": "model.block.attention.rope",
}


def old_names(value: Any) -> Iterator[str]:
    """Old names in a file's JSON: of classes, of settings, and at the end of paths."""
    if isinstance(value, list):
        for item in value:
            yield from old_names(item)
    elif isinstance(value, dict):
        kind = KINDS.get(value.get("kind", ""), value.get("kind", ""))
        if value.get("kind") in KINDS:
            yield value["kind"]
        for name, item in value.items():
            if name in SETTINGS.get(kind, {}):
                yield f"{kind}.{name}"
            elif modernized_path(f"block.{name}") != f"block.{name}":
                yield f"layers.{name.rpartition('.')[2]}"
            yield from old_names(item)


@pytest.mark.parametrize("name", sorted(OLD))
def test_files_with_old_names_load(name: str) -> None:
    assert list(old_names(OLD[name])), "it has no old name"
    before_policies = find(name).settings.but({"pack.policy": None})
    assert Recipe.from_json(OLD[name]).settings == before_policies


def test_the_files_have_every_old_name_that_a_recipe_had() -> None:
    found = set(old_names(list(OLD.values())))
    assert found >= {"layers.exclusive", "Train.fake_quantize", "Scoring.adaptation", "Recipe.compress", "GPT.lanes"}
    named = {f"{kind}.{name}" for kind, names in SETTINGS.items() for name in names}
    assert {*KINDS, *named} - found <= {"NTKRotary", "YaRNRotary"}, "names that no shipped recipe had"


@pytest.mark.parametrize(("old", "new"), sorted(TYPED.items()))
def test_a_typed_old_name_is_told_the_new_one(old: str, new: str) -> None:
    with pytest.raises(UserError) as raised:
        find("baseline").but({old: 1})
    assert str(raised.value) == f"no setting {old}; it is now {new}"


def test_every_renamed_setting_is_known_by_its_new_name() -> None:
    typed = {path.rpartition(".")[2] if "." in path else path for path in TYPED} | {"compress"}
    assert {name for names in SETTINGS.values() for name in names} <= typed


@pytest.mark.parametrize(
    ("path", "old"),
    [
        ("model.block.attention.rope", "Rotary"),
        ("model.block.attention.rope", "NTKRotary"),
        ("model.block.attention.rope", "YaRNRotary"),
        ("model.parallel_streams", "SeparateLanes"),
        ("model.parallel_streams", "RoutedLanes"),
    ],
)
def test_a_typed_old_class_is_told_the_new_one(path: str, old: str) -> None:
    with pytest.raises(UserError, match=rf"not {old}; it is now {KINDS[old]}$"):
        find("baseline").but({path: old})


def test_pack_tells_the_new_name_too() -> None:
    with pytest.raises(UserError, match=r"not compress\.cap_bytes; it is now pack\.cap_bytes$"):
        _pack_setting("compress.cap_bytes=300000")
