"""Old names of settings: whoever types one, or has it in a file, is told the new one."""

from __future__ import annotations

import pytest

from caddie.cli.run import _pack_setting
from caddie.config.renamed import KINDS, SETTINGS
from caddie.errors import UserError
from caddie.recipes.catalog import find
from caddie.recipes.recipe import Recipe

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


@pytest.mark.parametrize(("old", "new"), sorted(TYPED.items()))
def test_a_typed_old_name_is_told_the_new_one(old: str, new: str) -> None:
    with pytest.raises(UserError) as raised:
        find("baseline").but({old: 1})
    assert str(raised.value) == f"no setting {old}; it is now {new}"


def test_every_old_name_is_tried() -> None:
    assert {name for path in TYPED for name in path.split(".")} >= {*SETTINGS}


@pytest.mark.parametrize(("new", "old"), [("qat", "fake_quantize"), ("warmup_steps", "rehearsal_steps")])
def test_a_file_with_an_old_name_is_told_the_new_one(new: str, old: str) -> None:
    written = find("baseline").to_json()
    written["train"][old] = written["train"].pop(new)
    with pytest.raises(UserError, match=rf"Train has no setting {old}; it is now {new}$"):
        Recipe.from_json(written)


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
