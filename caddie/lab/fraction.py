"""A part of a recipe's training, for a first look at what a whole study takes hours or days for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from caddie.recipes.recipe import Recipe
from caddie.train.settings import Train

COUNTED = ("IterationWarmdown", "StepRamp", "Rewarmed", "TailEMA")
"""Settings whose `steps` are a number of optimizer steps."""


def shortened(recipe: Recipe, fraction: float) -> Recipe:
    """Return the recipe with this fraction of its seconds and steps, schedules and averages that count steps included.

    A score of it is no estimate of the whole run's.
    """
    train = recipe.train
    seconds = None if train.seconds is None else train.seconds * fraction
    steps = None if train.steps is None else max(1, round(train.steps * fraction))
    shorter = Train.from_json(_shorter(train.to_json(), fraction)).but(seconds=seconds, steps=steps)
    return recipe.but(train=shorter)


def _shorter(value: Any, fraction: float) -> Any:
    if isinstance(value, list):
        return [_shorter(item, fraction) for item in value]
    if not isinstance(value, Mapping):
        return value
    found = {name: _shorter(item, fraction) for name, item in value.items()}
    if found.get("kind") in COUNTED and found["steps"]:
        found["steps"] = max(1, round(found["steps"] * fraction))
    if found.get("kind") == "EMA":  # the weight of a step's weights at the same part of the run
        found["decay"] **= 1 / fraction
    return found
