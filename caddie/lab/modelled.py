"""Time of a training step at full size on eight H100: as published, as a source states it, or from FLOPs.

A twin (small copy of a recipe) trains on a CPU, whose step times do not predict those of the recipe's own machine. So a
study of equal time (`ModelledSeconds`) divides the seconds by these times, and no clock decides a score.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from statistics import harmonic_mean
from typing import Any, Literal

from caddie.config.schedules import int_at, progress_at
from caddie.data.loaders import SequentialStream
from caddie.errors import UserError
from caddie.model.flops import count
from caddie.recipes.catalog import find, shipped
from caddie.recipes.published import speeds
from caddie.recipes.recipe import Recipe

GPUS = 8
"""Number of H100 of the modelled machine. A step that took t on N of them counts as t * N / 8."""
PARTS = 20
"""Parts of a run whose FLOPs are counted."""
DOCUMENT_POSITIONS = 677.0
"""Mean positions that a query of the contest's documents sees, in rows of 2,048 tokens (`docs/performance.md`)."""
_TWIN = re.compile(r"_(mini|scale\d*)$")
_MACHINE = re.compile(r" on (\d+)xH100$")
_STATED = "Entry(step_cost=1.03)"
_FLOPS: dict[str, float] = {}
"""Cache: key of a training to FLOPs per step, because counting them takes a while."""


@dataclass(frozen=True)
class StepTime:
    """Time of a step at full size, with its source."""

    milliseconds: float
    source: Literal["published", "stated", "FLOPs"]
    note: str
    """Run that was timed, and the factor on its time."""

    def steps(self, seconds: float) -> int:
        """Return the steps that fit these seconds, at least one."""
        return max(1, round(seconds * 1e3 / self.milliseconds))

    def times(self, factor: float) -> StepTime:
        """Return this time multiplied by a factor that a source states."""
        return StepTime(self.milliseconds * factor, "stated", f"{factor:.4g} of {self.note}")


def full_name(name: str) -> str:
    """Return the name of the recipe whose twin has this name, or the name itself."""
    return _TWIN.sub("", name)


def step_time(recipe: Recipe) -> StepTime:
    """Return the step time of a recipe at full size: for a twin, that of its recipe with the twin's changes.

    A recipe is identified by its name, or by its base if it is a user's own. One that trains like a recipe with public
    runs, or like its twin, takes the published time; the order of the data does not matter. Else the time of the
    nearest recipe with public runs is scaled by FLOPs: itself, the one that trains alike, or one that it is based on. A
    number changed in a twin is scaled by the ratio of recipe to twin. Raises `UserError` where there is no such ratio.
    """
    name = next((name for name in (recipe.name, recipe.base or "") if full_name(name) in shipped()), "")
    alike = _trainings(name[len(full_name(name)) :]).get(_training(recipe), [])
    named = min(alike, key=lambda one: (one not in _timed(), one != full_name(name)), default=None)
    if named in _timed():
        return StepTime(_timed()[named], "published", _run(named))
    full = find(named) if named else _full_size(recipe, find(name)) if name else recipe
    timed = next_timed(full)
    try:
        ratio = flops_per_step(full) / flops_per_step(find(timed))
    except UserError as error:
        raise UserError(f"{full.name} with these changes: {error}; state its time, as in {_STATED}") from None
    return StepTime(_timed()[timed] * ratio, "FLOPs", f"{ratio:.4g} of {_run(timed)}")


def flops_per_step(recipe: Recipe) -> float:
    """Return FLOPs of a training step, the mean over the steps of a run against the clock."""
    train = recipe.train
    key = _training(recipe)
    if key not in _FLOPS:
        parts = []
        for part in range(PARTS):
            at = progress_at((part + 0.5) / PARTS)
            per_token = count(recipe.model, train.sequence_length, at.progress, DOCUMENT_POSITIONS).per_token
            parts.append(per_token * int_at(train.batch_tokens, at))
        _FLOPS[key] = harmonic_mean(parts)  # all parts take the same time, so their steps are inverse to FLOPs
    return _FLOPS[key]


def next_timed(recipe: Recipe) -> str:
    """Return the name of the nearest recipe with public runs on H100: this one, one of its bases, or the baseline."""
    name = recipe.name
    while name and name not in _timed():
        one = recipe if name == recipe.name else shipped().get(name)
        name = full_name(one.base or "") if one else ""
    return name or "baseline"


@cache
def _timed() -> dict[str, float]:
    """Return recipe to milliseconds per step on eight H100, of recipes with public runs on any number of H100."""
    return {
        name: speed.step_ms * int(machine[1]) / GPUS
        for name, speed in speeds().items()
        if (machine := _MACHINE.search(speed.source))
    }


def _run(name: str) -> str:
    return f"{name} ({speeds()[name].source})"


@cache
def _trainings(suffix: str) -> dict[str, list[str]]:
    """Return key of a training to the recipes that train so; with a suffix, to those whose twins do."""
    found: dict[str, list[str]] = {}
    for name in shipped():
        found.setdefault(_training(find(name + suffix)), []).append(name)
    return found


def _training(recipe: Recipe) -> str:
    """Return the key of model and training settings, without budget, order of the data, precision and compilation."""
    same = {"seconds": 1.0, "steps": None, "loader": SequentialStream(), "precision": "auto", "compile": "auto"}
    return f"{recipe.model.key()}-{recipe.train.but(same).key()}"


def _full_size(recipe: Recipe, twin: Recipe) -> Recipe:
    """Return the recipe whose twin `recipe` is, with the twin's changes as far as FLOPs depend on them."""
    full = find(full_name(twin.name))
    value, small, large = (one.to_json() for one in (recipe, twin, full))
    sizes = {"model": _scaled(value["model"], small["model"], large["model"], "model")}
    for name in ("batch_tokens", "sequence_length"):
        changed, before, after = (one["train"][name] for one in (value, small, large))
        sizes[f"train.{name}"] = _scaled(changed, before, after, f"train.{name}")
    return full.but(sizes)


def _scaled(value: Any, small: Any, large: Any, path: str) -> Any:
    """Return a setting of a changed twin at full size, as JSON; `small` is the twin's value, `large` the recipe's.

    A number is scaled by the ratio of large to small, and so are the values of a `PiecewiseConstant`, whose largest
    gives the ratio. Lists of layers, and settings that twin or recipe does not have, stay as they are.
    """
    if small == large or value is None or isinstance(value, str | bool):
        return value
    if value == small:
        return large
    held, before, after = _numbers(value), _numbers(small), _numbers(large)
    if held and after and any(before):
        ratio = max(after) / max(before)
        sizes = [round(one * ratio) if isinstance(after[0], int) else one * ratio for one in held]
        return {**value, "values": sizes} if isinstance(value, Mapping) else sizes[0]
    if all(isinstance(one, Mapping) for one in (value, small, large)):
        known = small.keys() & large.keys()
        return {
            key: _scaled(item, small[key], large[key], f"{path}.{key}") if key in known else item
            for key, item in value.items()
        }
    if isinstance(value, list) and not isinstance(small, Mapping):
        return value
    raise UserError(
        f"{path} has a value of another kind in the twin, so the time of a step with this one is not known; state it,"
        f" as in {_STATED}"
    )


def _numbers(value: Any) -> list[float]:
    """Return a number, or those of a `PiecewiseConstant`, given as JSON; for anything else an empty list."""
    if isinstance(value, Mapping) and value.get("kind") == "PiecewiseConstant":
        return list(value["values"])
    return [value] if isinstance(value, int | float) else []
