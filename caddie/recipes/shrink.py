"""Recipes made small: twins of half a minute, twins of all the steps, and copies that train in milliseconds.

A twin keeps every choice of its recipe and shrinks its numbers. Widths, rows and batches shrink by fixed factors.

- `NAME_mini` trains on two cores in half a minute. Its layers are renumbered in a model about half as deep. Numbers of
  steps become fractions of the run, as in a run of seven billion tokens on eight GPUs. Test-time training is left out,
  since it would take longer than training.
- `NAME_scale` makes as many steps as the recipe's public runs, at its depth, so that schedules, averages, recurrence
  and test-time training work as at full size. Weight decay shrinks with the square root of the tokens of a step: so
  does the part of a normalized update that is not noise, and weights settle where that part and the decay balance.
  Rows are shuffled: a step of the recipe reads hundreds of documents, but a step of the twin, in the order of the text,
  would read one or two. It takes minutes to hours (`docs/studies.md`). `NAME_scale32` is narrower and reads as many
  tokens per parameter as the recipe.

A copy keeps the depth and every layer as well, so that it shows what each setting does (`run/dead_settings.py`).
"""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from caddie.config import schedules
from caddie.config.schedules import IntSchedule, IterationWarmdown, Number, PiecewiseConstant, Rewarmed, all_values
from caddie.data.loaders import PackedDocuments, SequentialStream, ShuffledSequences
from caddie.errors import UserError
from caddie.model import GPT, Block, GroupedQueryAttention, NTKRoPE, RandomMap, YaRNRoPE
from caddie.pack.calibrate import TrainingText
from caddie.recipes.recipe import Recipe
from caddie.score import ChunkSGD, DocumentLoRA
from caddie.train.averaging import EMA, ProgressEMA
from caddie.train.settings import Train

ROW = 8
"""Factor by which a twin's rows shrink."""
TOKENS = 7e9
"""Training tokens of a record; divided by the tokens of a step they give its number of steps."""
DOCUMENTS = 50_000 / 113
"""Documents of the contest's held-out text per held-out document of a study."""


class Size(NamedTuple):
    """Size of a twin."""

    width: int
    depth: float
    """Layers per layer of the recipe."""
    batch: int
    """Factor by which the tokens of a step shrink."""
    heads: int = 4
    rank: int = 4
    """Factor by which the channels of projected tables and of maps shrink."""
    buckets: int = 1
    """Factor by which the rows of hashed tables shrink."""
    rotary: int = 2
    """Fewest rotary channels of a head, if the recipe's has as many: each frequency rotates two channels."""
    finer: bool = False
    """True if quantization steps set in standard deviations shrink with the square root of the width.

    A sum over inputs averages their rounding errors, so the loss from them falls with the width.
    """

    def vocabulary(self, full: int) -> int:
        """Return the twin's vocabulary size; a twin with all layers has more ids if the recipe does (`full`)."""
        return min(full, 2048) if self.depth < 1 else max(min(full, 512), full // 4)


MINI = Size(width=128, depth=0.55, batch=512)
SCALES = {
    "scale": Size(width=64, depth=1, batch=512, buckets=2),
    "scale32": Size(width=32, depth=1, batch=192, heads=2, rank=16, buckets=16, rotary=16, finer=True),
}
"""Suffix to size of the twins with all steps: two, so that the effect of size itself can be seen."""
AT_SCALE = {"data.validation_fraction": 0.005, "train.steps": None, "pack.calibration": TrainingText(tokens=16_384)}
"""Changes of such twins in a study of equal modelled time: the study sets the budget, and little text is scored."""
AT_SCALE_COMPILED = {**AT_SCALE, "train.precision": "bfloat16", "train.compile": "always"}
"""The same as records are trained: compiled, in bfloat16. Steps take 0.62 of the time (`docs/log.md`, 2026-11-26)."""

_VOCABULARY, _WIDTH, _HIDDEN, _BUCKETS, _ROW = 96, 64, 48, 64, 64
"""Most ids, channels, hidden channels, hashed rows and tokens per row of a copy, where that divides."""


def mini(recipe: Recipe) -> Recipe:
    """Return the twin of a recipe that trains for half a minute."""
    stride = max(1, _in_rows(recipe.score.sequence_length) // 2)
    diff = {**_mini_training(recipe.train), "score.stride": stride, "score.ttt": None}
    return _twin(recipe, MINI, "mini", diff)


def scale(recipe: Recipe, suffix: str, steps: int) -> Recipe:
    """Return the twin of a recipe that makes `steps` steps, at the size `SCALES[suffix]`."""
    size, ttt = SCALES[suffix], recipe.score.ttt
    diff: dict[str, Any] = {"train.steps": steps, "score.stride": _in_rows(recipe.score.stride)}
    diff |= {"train.precision": "float32"}  # auto would be measured on each machine
    if isinstance(recipe.train.loader, SequentialStream | PackedDocuments):
        diff["train.loader"] = ShuffledSequences()
    for rule, quantizer in recipe.pack.quantizers.items() if size.finer else ():
        diff[f"pack.quantizers.{rule}"] = quantizer.coarser((size.width / recipe.model.width) ** 0.5)
    for name in ("weight_decay", "cautious_decay"):
        decays = _of_optimizers(recipe.train, name)
        diff |= {f"train.{path}": _times(decay, size.batch**-0.5) for path, decay in decays.items()}
    if isinstance(ttt, DocumentLoRA):
        rank = max(1, ttt.rank * size.width // recipe.model.width)
        diff |= {"score.ttt.rank": rank, "score.ttt.alpha": ttt.alpha * rank / ttt.rank}
        diff |= {"score.ttt.chunk_tokens": min(ttt.chunk_tokens, _in_rows(recipe.score.sequence_length))}
        if ttt.phases:
            documents = max(ttt.phases.phases, round(ttt.phases.documents / DOCUMENTS))
            diff |= {"score.ttt.phases.documents": documents}
            diff |= {"score.ttt.phases.chunk_tokens": _in_rows(ttt.phases.chunk_tokens)}
    elif isinstance(ttt, ChunkSGD):
        diff["score.ttt.chunk_tokens"] = _in_rows(ttt.chunk_tokens)
    return _twin(recipe, size, suffix, diff)


def _in_rows(tokens: int) -> int:
    """Return a number of tokens that shrinks with the rows."""
    return max(1, tokens // ROW)


def _times(number: Number, factor: float) -> Number:
    if isinstance(number, schedules.Ramp | schedules.StepRamp):
        return number.but(start=number.start * factor, end=number.end * factor)
    if isinstance(number, PiecewiseConstant):
        return number.but(values=tuple(value * factor for value in number.values))
    if isinstance(number, schedules.Schedule):
        kind = type(number).__name__
        raise UserError(f"no twin of a weight decay by {kind}; use a number, Ramp, StepRamp or PiecewiseConstant")
    return number * factor


def small_cap(recipe: Recipe, twin: Recipe) -> int:
    """Return the twin's cap in bytes: as many bits per parameter as the recipe's cap allows."""
    return recipe.pack.cap_bytes * twin.parameters // recipe.parameters


def _twin(recipe: Recipe, size: Size, suffix: str, diff: dict[str, Any]) -> Recipe:
    train, row = recipe.train, _in_rows(recipe.train.longest_row)
    head = recipe.model.width // getattr(recipe.model.block.attention, "heads", 1)
    groups = _of_optimizers(train, "group_rows")  # a group keeps its number of heads
    return recipe.but(
        {
            **{f"model.{path}": value for path, value in _twin_model(recipe.model, size).items()},
            "train.seconds": None,
            "train.batch_tokens": row * max(1, round(max(all_values(train.batch_tokens)) / size.batch / row)),
            "train.micro_batches": 1,
            "train.sequence_length": row,
            "train.warmup_steps": 3,
            **{f"train.{path}": max(1, rows * (size.width // size.heads) // head) for path, rows in groups.items()},
            "score.sequence_length": _in_rows(recipe.score.sequence_length),
            "score.batch_tokens": 16_384,
            "score.precision": "float32",
            **diff,
        },
        name=f"{recipe.name}_{suffix}",
        base=f"{recipe.base}_{suffix}" if recipe.base else None,
        why=f"The twin of {recipe.name} for two cores.",
        public=(),
    )


def _twin_model(model: GPT, size: Size) -> dict[str, Any]:
    depth = math.ceil(size.depth * model.depth)

    def layer(number: int) -> int:
        return round(number * (depth - 1) / max(model.depth - 1, 1))

    def channels(number: int) -> int:
        return max(1, number * size.width // model.width)

    diff: dict[str, Any] = {
        "vocabulary": size.vocabulary(model.vocabulary),
        "width": size.width,
        "depth": depth,
        "layers": {
            re.sub(r"\d+", lambda number: str(layer(int(number[0]))), key): {
                path: channels(value) if path == "mlp.hidden" else value for path, value in exception.items()
            }
            for key, exception in model.layers.items()
        },
        "block": model.block.but(_twin_block(model, size, channels)),
    }
    if again := model.recurrence:
        diff["recurrence"] = again = replace(again, first=layer(again.first), last=layer(again.last))
    if model.dense_connections:
        passes, fewer = len(model.longest_order), len(again.order(depth, again.most)) if again else depth
        diff["dense_connections"] = model.dense_connections.renumbered(
            lambda number: round(number * (fewer - 1) / max(passes - 1, 1))
        )
    if model.parallel_streams:
        diff["parallel_streams.first"] = layer(model.parallel_streams.first)
    if model.value_embedding:
        diff["value_embedding.layers"] = sorted({layer(number) for number in model.value_embedding.layers})
        diff["value_embedding.dims"] = max(1, model.value_embedding.dims // size.rank)
    for name in ("bigrams", "trigrams"):
        ngrams = getattr(model.embedding, name)
        if ngrams and ngrams.dims:
            diff[f"embedding.{name}.dims"] = max(1, ngrams.dims // size.rank)
        if ngrams:
            diff[f"embedding.{name}.buckets"] = max(2, ngrams.buckets // size.buckets)
    if dims := model.embedding.dims:  # type: ignore[attr-defined]
        diff["embedding.dims"] = channels(dims)
    return diff


def _twin_block(model: GPT, size: Size, channels: Callable[[int], int]) -> dict[str, Any]:
    diff: dict[str, Any] = {"mlp.hidden": channels(model.block.mlp.hidden)}
    held: Any = next(filter(None, (block.attention for block in model.blocks)), GroupedQueryAttention())
    attention: Any = model.block.attention
    if attention is not None:
        diff["attention.heads"] = size.heads
        diff["attention.key_value_heads"] = max(1, size.heads * held.key_value_heads // held.heads)
        if attention.rope.dims:
            head, dims = size.width // size.heads, attention.rope.dims
            share = 2 * round(dims * head / (model.width / held.heads) / 2)
            diff["attention.rope.dims"] = min(head, max(share, min(size.rotary, dims)))
        if isinstance(attention.rope, NTKRoPE | YaRNRoPE):
            diff["attention.rope.native_length"] = _in_rows(attention.rope.native_length)
            diff["attention.rope.length"] = _in_rows(attention.rope.length)
        diff |= {f"attention.{name}": length for name, length in _lengths(attention, 1 / ROW).items()}
    for part in ("attention", "mlp"):
        if isinstance(linear := getattr(getattr(model.block, part), "linear", None), RandomMap):
            diff[f"{part}.linear.rank"] = max(1, linear.rank // size.rank)
    return diff


def _mini_training(train: Train) -> dict[str, Any]:
    """Return a half-minute twin's changes in training, where numbers of steps become fractions of the run."""
    steps = TOKENS / max(all_values(train.batch_tokens))
    diff: dict[str, Any] = {"train.seconds": 30, "train.steps": None}
    diff["train.lr_schedule"] = _twin_schedule(train.lr_schedule, steps)
    if isinstance(train.averaging, EMA):
        fraction = min(1.0, 1.0 / (1.0 - train.averaging.decay) / steps)
        diff["train.averaging"] = ProgressEMA(fraction=fraction)
    for path, momentum in _of_optimizers(train, "momentum").items():
        if isinstance(momentum, schedules.StepRamp):
            finish = min(1.0, momentum.steps / steps)
            diff[f"train.{path}"] = schedules.Ramp(start=momentum.start, end=momentum.end, finish=finish)
    return diff


def _of_optimizers(train: Train, name: str) -> dict[str, Any]:
    """Return path to value of a setting in all optimizers where it is set, to neither zero nor none."""
    held = {rule: getattr(optimizer, name, None) for rule, optimizer in train.optimizers.items()}
    return {f"optimizers.{rule}.{name}": value for rule, value in held.items() if value}


def _twin_schedule(schedule: Number, steps: float) -> Number:
    if isinstance(schedule, IterationWarmdown):
        return schedules.Warmdown(fraction=min(1.0, schedule.steps / steps))
    if isinstance(schedule, Rewarmed):  # fewer, for a twin makes about a hundred steps, but enough to act
        return schedule.but({"of": _twin_schedule(schedule.of, steps), "steps": math.ceil(schedule.steps / 4)})
    return schedule


def small_copy(recipe: Recipe) -> tuple[GPT, Train]:
    """Return model and training settings that train in milliseconds; depth, layers, head size and every choice stay.

    The clipping norm is a thousandth of the recipe's, so that it clips. Heads are fewer, and the width shrinks with
    them, if the attention has fields for heads. Windows and pieces of documents shrink with the rows.
    """
    scale = row_scale(recipe.train)
    train = replace(
        recipe.train,
        sequence_length=_scaled(recipe.train.sequence_length, scale),
        batch_tokens=3 * round(recipe.train.longest_row * scale),
        micro_batches=1,
        clip_norm=recipe.train.clip_norm and recipe.train.clip_norm * 1e-3,
        compile="never",
        cuda_graphs="never",
    )
    groups = _of_optimizers(train, "group_rows")  # a copy may have no more rows than a single head's
    train = train.but({path: math.gcd(rows, 8) for path, rows in groups.items()})
    heads = (getattr(block.attention, "heads", 1) for block in recipe.model.blocks if block.attention)
    fewer = math.gcd(recipe.model.width, max(1, recipe.model.width // _WIDTH), *heads)  # each keeps its width
    try:
        return _small_model(recipe.model, scale, fewer), train
    except UserError:  # an attention of the user's own may divide otherwise
        return _small_model(recipe.model, scale, 1), train


def row_scale(train: Train) -> float:
    """Return the factor on the length of rows in a copy."""
    common = math.gcd(*all_values(train.sequence_length))
    return max(1, _ROW * common // train.longest_row) / common


def _small_model(gpt: GPT, scale: float, fewer: int) -> GPT:
    block = _small_block(gpt.block, scale, fewer)
    embedding = gpt.embedding
    for name in ("bigrams", "trigrams"):
        if ngrams := getattr(embedding, name, None):
            embedding = replace(embedding, **{name: replace(ngrams, buckets=min(ngrams.buckets, _BUCKETS))})
    small = replace(
        gpt,
        vocabulary=min(gpt.vocabulary, _VOCABULARY),
        width=gpt.width // fewer,
        block=block,
        layers={
            str(layer): block.diff(_small_block(own, scale, fewer))
            for layer, own in enumerate(gpt.blocks)
            if own != gpt.block
        },
        embedding=embedding,
    )
    small.outline()
    return small


def _small_block(block: Block, scale: float, fewer: int) -> Block:
    attention: Any = block.attention
    if attention is not None:
        held = {name: getattr(attention, name, None) for name in ("heads", "key_value_heads")}
        heads = {name: count // fewer if count % fewer == 0 else 1 for name, count in held.items() if count}
        attention = replace(attention, **_lengths(attention, scale), **heads)
    return replace(block, attention=attention, mlp=replace(block.mlp, hidden=min(block.mlp.hidden, _HIDDEN)))


def _lengths(attention: object, scale: float) -> dict[str, IntSchedule]:
    """Return the attention's window and longest piece of a document, where it has them, times `scale`."""
    held = {name: getattr(attention, name, None) for name in ("window", "longest")}
    return {name: _scaled(length, scale) for name, length in held.items() if length}


def _scaled(number: IntSchedule, scale: float) -> IntSchedule:
    if isinstance(number, PiecewiseConstant):
        return replace(number, values=tuple(max(1, int(value * scale)) for value in number.values))
    return max(1, int(number * scale))  # so what is shorter than a row stays shorter
