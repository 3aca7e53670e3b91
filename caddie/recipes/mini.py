"""Scaled-down twins: the same diffs at a size that two cores train in half a minute.

A twin keeps every choice of its recipe and shrinks its numbers. Widths, rows and batches shrink by fixed factors;
layers are named anew in a model about half as deep; what counts steps becomes a part of the run, the part that it was
when eight GPUs saw seven billion tokens. Training at test time is left out, because it would take longer than training.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from caddie.config.schedules import IntSchedule, IterationWarmdown, Ramp, StepRamp, Warmdown, all_values
from caddie.model import GPT, GroupedQueryAttention, NTKRoPE, RandomMap, YaRNRoPE
from caddie.recipes.recipe import Recipe
from caddie.train.averaging import EMA, ProgressEMA
from caddie.train.trainer import Train

WIDTH = 128
HEADS = 4
ROW = 8
"""Rows of a twin are shorter by this factor."""
RANK = 4
"""Tables and maps that are projected have fewer channels by this factor."""
BATCH = 512
"""Steps of a twin have fewer tokens by this factor."""
TOKENS = 7e9
"""What a record saw: with the tokens of a step, how many steps it made."""


def mini(recipe: Recipe) -> Recipe:
    """The twin of a recipe."""
    model, train = recipe.model, recipe.train
    row = _largest(train.sequence_length) // ROW
    return recipe.but(
        {
            **{f"model.{path}": value for path, value in _model(model).items()},
            **{f"train.{path}": value for path, value in _train(train, row).items()},
            "score.sequence_length": row,
            "score.stride": row // 2,
            "score.batch_tokens": 16_384,
            "score.precision": "float32",
            "score.ttt": None,
        },
        name=f"{recipe.name}_mini",
        base=f"{recipe.base}_mini" if recipe.base else None,
        why=f"The twin of {recipe.name} for two cores.",
        public=(),
    )


def _model(model: GPT) -> dict[str, Any]:
    depth = math.ceil(0.55 * model.depth)

    def layer(number: int) -> int:
        return round(number * (depth - 1) / max(model.depth - 1, 1))

    attention = next(filter(None, (block.attention for block in model.blocks)), GroupedQueryAttention())
    heads, shared = attention.heads, attention.key_value_heads  # type: ignore[attr-defined]
    size = (WIDTH // HEADS) / (model.width / heads)
    fewer = {"attention.heads": HEADS, "attention.key_value_heads": max(1, HEADS * shared // heads)}
    diff: dict[str, Any] = {
        "vocabulary": min(model.vocabulary, 2048),
        "width": WIDTH,
        "depth": depth,
        "layers": {_named(key, layer): _block(exception, model, size) for key, exception in model.layers.items()},
        "block": model.block.but({**(fewer if model.block.attention else {}), **_block({}, model, size)}),
    }
    if model.recurrence:
        diff["recurrence.first"], diff["recurrence.last"] = layer(model.recurrence.first), layer(model.recurrence.last)
    if model.parallel_streams:
        diff["parallel_streams.first"] = layer(model.parallel_streams.first)
    if model.value_embedding:
        diff["value_embedding.layers"] = sorted({layer(number) for number in model.value_embedding.layers})
        diff["value_embedding.dims"] = model.value_embedding.dims // RANK
    for name in ("bigrams", "trigrams"):
        ngrams = getattr(model.embedding, name)
        if ngrams and ngrams.dims:
            diff[f"embedding.{name}.dims"] = ngrams.dims // RANK
    if dims := model.embedding.dims:  # type: ignore[attr-defined]
        diff["embedding.dims"] = dims * WIDTH // model.width
    return diff


def _named(key: str, layer: Any) -> str:
    """A layer or a range of layers, as the twin names it."""
    return "-".join(str(layer(int(number))) for number in re.findall(r"\d+", key))


def _block(exception: Mapping[str, Any], model: GPT, size: float) -> dict[str, Any]:
    """An exception of a layer, or without one what all layers change."""
    if exception:
        return {
            path: value * WIDTH // model.width if path == "mlp.hidden" else value for path, value in exception.items()
        }
    attention, mlp = model.block.attention, model.block.mlp
    diff: dict[str, Any] = {"mlp.hidden": mlp.hidden * WIDTH // model.width}
    if attention is not None:
        rope = attention.rope  # type: ignore[attr-defined]
        if rope.dims:
            diff["attention.rope.dims"] = max(2, 2 * round(rope.dims * size / 2))
        if isinstance(rope, NTKRoPE | YaRNRoPE):
            diff["attention.rope.native_length"] = rope.native_length // ROW
            diff["attention.rope.length"] = rope.length // ROW
        if isinstance(attention.window, int):  # type: ignore[attr-defined]
            diff["attention.window"] = max(1, attention.window // ROW)  # type: ignore[attr-defined]
        if attention.longest:  # type: ignore[attr-defined]
            diff["attention.longest"] = attention.longest // ROW  # type: ignore[attr-defined]
        if isinstance(attention.linear, RandomMap):  # type: ignore[attr-defined]
            diff["attention.linear.rank"] = max(1, attention.linear.rank // RANK)  # type: ignore[attr-defined]
    if isinstance(mlp.linear, RandomMap):
        diff["mlp.linear.rank"] = max(1, mlp.linear.rank // RANK)
    return diff


def _train(train: Train, row: int) -> dict[str, Any]:
    steps = TOKENS / _largest(train.batch_tokens)
    diff: dict[str, Any] = {
        "seconds": 30,
        "steps": None,
        "batch_tokens": row * max(1, round(_largest(train.batch_tokens) / BATCH / row)),
        "micro_batches": 1,
        "sequence_length": row,
        "warmup_steps": 3,
    }
    if isinstance(train.lr_schedule, IterationWarmdown):
        diff["lr_schedule"] = Warmdown(fraction=min(1.0, train.lr_schedule.steps / steps))
    if isinstance(train.averaging, EMA):
        diff["averaging"] = ProgressEMA(fraction=min(1.0, 1.0 / (1.0 - train.averaging.decay) / steps))
    for rule, optimizer in train.optimizers.items():
        momentum = getattr(optimizer, "momentum", None)
        if isinstance(momentum, StepRamp):
            finish = min(1.0, momentum.steps / steps)
            diff[f"optimizers.{rule}.momentum"] = Ramp(start=momentum.start, end=momentum.end, finish=finish)
    return diff


def _largest(number: IntSchedule) -> int:
    return max(all_values(number))
