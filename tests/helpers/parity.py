"""The public scripts' numbers: how they are read, and our recipes at the sizes at which they were computed.

A set of them is a folder: one subfolder for each system (`BASE`, `TOP`, …) and `components`. Nothing of a set's shapes
or names is written here; they are taken from its `config.json` and the names of its tensors, so that another set, made
the same way, will do. Any file may be compressed by xz, with `.xz` behind its name, as those in `tests/golden` are.
"""

import json
import lzma
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from script_names import load_script_weights
from torch import Tensor

from caddie.model import GPT, Model, build
from caddie.recipes.catalog import shipped
from caddie.recipes.recipe import Recipe

SYSTEMS = {
    "BASE": "baseline",
    "S003": "fp16_embedding",
    "S001": "single_gpu",
    "S002": "gold6",
    "S000": "parallel_muon",
    "ARG": "exclusive_everywhere",
    "L3": "three_layer_recurrence",
    "TOP": "longer_warmdown",
}
"""Subfolder of a set to the recipe that is the same system."""


def _bytes(path: Path) -> bytes:
    packed = path.with_name(f"{path.name}.xz")
    return lzma.decompress(packed.read_bytes()) if packed.exists() else path.read_bytes()


def tensors(path: Path) -> dict[str, Tensor]:
    """Read a file of tensors, named without its `.safetensors`."""
    return safetensors.torch.load(_bytes(path.with_name(f"{path.name}.safetensors")))


def facts(path: Path) -> Any:
    """Read a file of JSON, named without its `.json`."""
    return json.loads(_bytes(path.with_name(f"{path.name}.json")))


def weights(folder: Path) -> dict[str, Tensor]:
    """Read a system's weights, or draw them again where the set keeps the seed and the vectors alone."""
    if not any(folder.glob("weights.json*")):
        return tensors(folder / "weights")
    given, drawn = tensors(folder / "vectors"), facts(folder / "weights")
    generator = torch.Generator().manual_seed(drawn["seed"])
    found = {}
    for name in sorted({*given, *drawn["matrices"]}):
        if name in given:
            torch.randn(given[name].shape, generator=generator)
            found[name] = given[name]
        else:
            shape, gain, inputs = drawn["matrices"][name]
            found[name] = (torch.randn(shape, generator=generator) * gain / math.sqrt(inputs)).half()
    return found


def matches(found: dict[str, Any], pattern: str) -> list[re.Match[str]]:
    """Return the names that match a pattern whole; a set without any is not one that a test can use."""
    every = [match for match in (re.fullmatch(pattern, name) for name in found) if match]
    assert every, f"nothing in the set is named like {pattern}"
    return every


def recorded(expected: dict[str, Tensor], name: str, found: Tensor) -> tuple[Tensor, Tensor]:
    """Return the elements of `found` that a set holds, and what it holds: all, or with `NAME_every_S` each S-th."""
    if name in expected:
        return found, expected[name].reshape(found.shape)
    (match,) = matches(expected, rf"{re.escape(name)}_every_(\d+)")
    return found.flatten()[:: int(match[1])], expected[match[0]]


@dataclass(frozen=True)
class Case:
    """One forward that the scripts recorded."""

    name: str = "plain"
    tokens: str = ""
    """Beginning of its tokens' names."""
    stage: int = -1

    @property
    def prefix(self) -> str:
        """Beginning of its results' names."""
        return "" if self.name == "plain" else f"{self.name}."


CASES = {
    "L3": [Case("loop_off", stage=0), Case("loop_on"), Case("long_row_with_rotary_rescaling", "long_")],
    "TOP": [
        Case("loop_off", stage=0),
        Case("loop_on"),
        Case("packed_loop_off", "packed_", stage=0),
        Case("packed_loop_on", "packed_"),
    ],
}
"""The cases of systems that have more than one."""
TRAINED = "loop_on"
"""The case that is trained, where there are several."""


def cases(system: str) -> list[Case]:
    return CASES.get(system, [Case()])


def trained_case(system: str) -> Case:
    return next((case for case in cases(system) if case.name == TRAINED), cases(system)[0])


def layer_range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


class Golden:
    """One system of a set, and our recipe at its size."""

    def __init__(self, folder: Path) -> None:
        self.system = folder.name
        self.recipe: Recipe = shipped()[SYSTEMS[folder.name]]
        self.config = facts(folder / "config")
        self.tokens = tensors(folder / "tokens")
        self.expected = tensors(folder / "expected")
        self.weights = weights(folder)
        self.settings: dict[str, Any] = {
            **self.config["settings_full_recipe"],
            **self.config["settings_tiny_model_that_differ"],
        }
        self.extra: dict[str, Any] = self.config["extra"]
        self.bos: int = self.extra.get("beginning-of-document id", 1)
        self.gpt: GPT = self.recipe.model.but(model_diff(self.recipe.model, self.settings, self.extra))

    def model(self, case: Case | None = None) -> Model:
        """Our model with the script's weights, as the case needs it."""
        model = build(self.gpt.but(self._case_diff(case or Case())), seed=0)
        load_script_weights(dict(model.named_parameters()), {n: w.float() for n, w in self.weights.items()})
        return model

    def starts(self, ids: Tensor) -> Tensor | None:
        """Return where documents begin, for a system that masks by them."""
        return ids == self.bos if self.recipe.model.block.attention.scope == "document" else None

    def _case_diff(self, case: Case) -> dict[str, Any]:
        attention = "block.attention"
        if case.tokens == "long_":
            length = self.tokens["long_inputs"].shape[1]
            rope = {"dims": self.settings["rope dims"], "native_length": self.settings["train seq len"]}
            values = {f"{attention}.rope.{name}": value for name, value in {**rope, "length": length}.items()}
            return {f"{attention}.rope": "NTKRoPE", **values}
        if self.recipe.model.block.attention.scope != "document":
            return {}
        if case.tokens == "packed_":
            return {f"{attention}.longest": self.config["results"]["packed_setup"]["cut_length"]}
        return {f"{attention}.scope": "row", f"{attention}.longest": None}


def model_diff(full: GPT, settings: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Return what makes a recipe's model that of the scripts' settings."""
    depth = settings["num layers"]
    diff: dict[str, Any] = {
        "vocabulary": settings["vocab size"],
        "width": settings["model dim"],
        "depth": depth,
        "block.attention.heads": settings["num heads"],
        "block.attention.key_value_heads": settings["num kv heads"],
        "block.mlp.hidden": settings.get("mlp hidden") or int(settings["mlp mult"] * settings["model dim"]),
        "layers": {},
    }
    if "rope dims" in settings:
        diff["block.attention.rope.dims"] = settings["rope dims"]
    native = extra.get("length above which the rotary base is rescaled (tiny model)")
    if native is not None:
        diff["block.attention.rope.native_length"] = native
        diff["block.attention.rope.length"] = settings["train seq len"]
    exclusive = settings.get("xsa last n", 0)
    if full.block.attention.xsa:
        assert exclusive == depth, "the recipe's attention is exclusive in all layers"
    elif exclusive:
        diff["layers"][layer_range(depth - exclusive, depth - 1)] = {"attention.xsa": True}
    if "parallel residual start" in settings:
        diff["layers"][layer_range(settings["parallel residual start"], depth - 1)] = {"parallel": True}
    if "parallel start layer" in settings:
        diff["parallel_streams.first"] = settings["parallel start layer"]
    if "loop start" in settings:
        diff["recurrence.first"], diff["recurrence.last"] = settings["loop start"], settings["loop end"]
        diff["recurrence.passes.values"] = (1, 1 + settings["num loops"])
    if "bigram dim" in settings:
        diff["embedding.bigrams.buckets"] = settings["bigram vocab size"]
        diff["embedding.bigrams.dims"] = settings["bigram dim"]
        diff["value_embedding.dims"] = settings["ve dim"]
        diff["value_embedding.layers"] = [int(layer) for layer in settings["ve layers"].split(",")]
    return diff
