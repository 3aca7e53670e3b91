"""Does every setting act? One that differs from the base and changes nothing is found before a run starts.

Settings that did nothing stand in the contest's records: late quantization-aware training that the compiler had folded
away, snapshots that were collected and never used. So each changed setting is taken back alone, and a small copy of the
run is compared to the bit: its parameters, its logits, its data, and steps of the real trainer over a made-up clock.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, fields, replace
from itertools import tee, zip_longest
from typing import Any

import numpy as np
import torch

from caddie.config import Config, show
from caddie.config import config as configs
from caddie.config.schedules import Schedule, TrainProgress, int_at, value_at
from caddie.data.loaders import Stream
from caddie.data.shards import Tokens
from caddie.errors import UserError
from caddie.model import GPT, Block
from caddie.model.parameters import Part, declarations
from caddie.pack.quantize import Rows, Ternary
from caddie.recipes.catalog import find
from caddie.recipes.recipe import Recipe
from caddie.recipes.shrink import row_scale, small_copy
from caddie.runtime.distributed import Ranks
from caddie.train.optim import Muon
from caddie.train.trainer import Train, Trainer

EXEMPT = {
    (Train, "seconds"): "the budget",
    (Train, "steps"): "the budget",
    (Train, "micro_batches"): "how a step is cut, not what it computes",
    (Train, "precision"): "the number format, which suits the machine",
    (Train, "compile"): "speed alone",
    (Train, "cuda_graphs"): "speed alone",
    (Train, "warmup_steps"): "undone before the clock starts",
    (Train, "checkpoint_seconds"): "when the state is saved",
    (Muon, "communication"): "how processes exchange, and a copy is one process",
    (Rows, "packed"): "how integers are stored; training may name the quantizer that packing does",
    (Ternary, "packed"): "the same",
}
"""Settings that need not change the result of training, each with the reason."""

BOS = 1
"""Id that begins the documents of a copy."""
STEPS = 4801
"""Steps that a run is taken to make when its budget is of seconds alone."""
FEWEST_STEPS = 64
"""Steps that it is taken to make at least, so that a trial of one step is not told that its momentum does nothing."""
_ABSENT = object()
_NOTHING = (None, False, _ABSENT)


@dataclass(frozen=True)
class Finding:
    """A setting without effect."""

    path: str
    """Dotted path."""
    value: str
    """What it is set to."""
    instead: str
    """What it would be without this: the base's value, or the default of the class that holds it."""
    unread: bool
    """Whether nothing reads it at all; or something does, and it comes to the same."""

    def __str__(self) -> str:
        same = f"with {self.instead} instead the model, the losses and the weights are the same to the bit"
        return f"{self.path}={self.value} has no effect: {'nothing reads it' if self.unread else same}"


def check_settings_matter(recipe: Recipe, base: Recipe | None = None) -> None:
    """Raise a `UserError` that names every setting without effect; `base` is that of `dead_settings`."""
    if found := dead_settings(recipe, base):
        more = f" (nor have {', '.join(finding.path for finding in found[1:])})" if found[1:] else ""
        raise UserError(f"{found[0]}{more}; leave it out, or change what keeps it from acting")


def dead_settings(recipe: Recipe, base: Recipe | None = None) -> list[Finding]:
    """Settings of `model` and `train` that differ from the base and do nothing.

    Without `base`, a recipe with the name of a shipped one is compared with that, so what a command line changed is
    looked at; any other with the shipped recipe that it names as its base, or with the defaults. A setting that cannot
    be taken back alone, because others need it, is alive. So is one that takes something away (none, false or nothing)
    and would act on the base, though another change covers it here.
    """
    base = (base or _origin(recipe)).but({"train.seconds": recipe.train.seconds, "train.steps": recipe.train.steps})
    if not (undone := list(_undone(base, recipe))):
        return []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # copies are too small for more
    try:
        copy = _Observed(recipe, undone)
        suspects = [one for one in undone if not copy.differs(one.recipe)]
        taking = {f"{one.path}." for one in suspects if one.value in _NOTHING}
        acting = _acting(recipe, base) if taking else []
        covered = {path for path in taking if any(f"{one}.".startswith(path) for one in acting)}
    finally:
        torch.set_num_threads(threads)
    return [_finding(one, copy.read) for one in suspects if f"{one.path}." not in covered]


def _origin(recipe: Recipe) -> Recipe:
    for name in (recipe.name, recipe.base or ""):
        with suppress(UserError):  # a name that only its user's file knows
            return find(name)
    return Recipe()


def _finding(one: _Undone, read: set[tuple[type, str]]) -> Finding:
    value, instead = ("nothing" if held is _ABSENT else show(held) for held in (one.value, one.instead))
    name = one.path.rpartition(".")[2]
    return Finding(one.path, value, instead, name in configs.field_types(one.owner) and (one.owner, name) not in read)


def _acting(recipe: Recipe, base: Recipe) -> list[str]:
    """Paths at which the recipe's value alone would change the base."""
    undone = list(_undone(recipe, base))
    copy = _Observed(base, undone)
    return [one.path for one in undone if copy.differs(one.recipe)]


# Settings taken back


@dataclass(frozen=True)
class _Undone:
    """A recipe with one setting, held by a config of class `owner`, taken back."""

    path: str
    value: object
    instead: object
    recipe: Recipe
    owner: type[Config]


Copy = tuple[GPT, Train]  # model and training of a small copy
Rebuild = Callable[[Any], Recipe]  # a value in the place of the one looked at, to the recipe with it


def _undone(base: Recipe, recipe: Recipe) -> Iterator[_Undone]:
    for name in ("model", "train"):
        rebuild = _replacing(recipe, name, lambda whole: whole)
        yield from _walk(getattr(base, name), getattr(recipe, name), name, Recipe, rebuild)


def _walk(a: Any, b: Any, path: str, owner: type[Config], rebuild: Rebuild) -> Iterator[_Undone]:
    """Every setting at or below `path` that is `a` in the base and `b` in the recipe."""
    if isinstance(b, Config) and type(a) is type(b):
        yield from _walk_fields({field.name: getattr(a, field.name) for field in fields(a)}, b, path, rebuild)
        return
    inside = isinstance(b, Mapping) and "kind" not in b and (a is _ABSENT or isinstance(a, Mapping))
    if inside:
        held = {} if a is _ABSENT else a
        for key in {**b, **held}:
            one = _replacing(b, key, rebuild)
            yield from _walk(held.get(key, _ABSENT), b.get(key, _ABSENT), f"{path}.{key}", owner, one)
    if [*a] != [*b] and {*a} == {*b} if inside and a is not _ABSENT else not inside and a != b:
        try:
            yield _Undone(path, b, a, rebuild(a), owner)
        except UserError:
            return  # others need it, or it them
        finally:
            if isinstance(b, Config):
                yield from _walk_fields(_defaults(type(b)), b, path, rebuild)


def _walk_fields(held: Mapping[str, Any], b: Config, path: str, rebuild: Rebuild) -> Iterator[_Undone]:
    for name, value in held.items():
        if (type(b), name) not in EXEMPT:
            one = _replacing(b, name, rebuild)
            yield from _walk(value, getattr(b, name), f"{path}.{name}", type(b), one)


def _replacing(node: Any, name: str, rebuild: Rebuild) -> Rebuild:
    """What sets a field of a config, or an item of a mapping, in the recipe."""

    def one(value: Any) -> Recipe:
        if isinstance(node, Config):
            return rebuild(replace(node, **{name: value}))
        return rebuild({key: item for key, item in {**node, name: value}.items() if item is not _ABSENT})

    return one


def _defaults(cls: type[Config]) -> dict[str, Any]:
    return {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(cls)
        if field.default is not field.default_factory  # both missing
    }


# What is read and observed


@contextmanager
def _reads(found: set[tuple[type, str]]) -> Iterator[None]:
    """Add class and name of every setting that is read meanwhile, but for being copied, compared and checked."""
    not_counted = {configs.__file__, __file__, "<string>"}  # the last: methods that dataclasses write

    def read(self: Config, name: str) -> Any:
        code = sys._getframe(1).f_code
        if code.co_filename not in not_counted and code.co_name != "__post_init__":
            found.add((type(self), name))
        return object.__getattribute__(self, name)

    Config.__getattribute__ = read  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del Config.__getattribute__


def _watched(work: Iterator[object], read: set[tuple[type, str]]) -> Iterator[object]:
    """What `work` gives, and what it reads for that."""
    while True:
        with _reads(read):
            one = next(work, _ABSENT)
        if one is _ABSENT:
            return
        yield one


class _Observed:
    """A recipe and what its copy does; others are compared with it and stop where they first differ.

    It trains no further than they ask, so what it reads is known once one of them asked for all.
    """

    def __init__(self, recipe: Recipe, undone: list[_Undone]) -> None:
        self.recipe = recipe
        self.read: set[tuple[type, str]] = set()
        with _reads(self.read):
            self.moments = _moments(recipe, [one.recipe for one in undone])
            self.copy = small_copy(recipe)
            self.sizes = _sizes(recipe.train, self.moments)
            self.model = list(_of_model(recipe, self.copy))
        self.train = _watched(_of_training(self.copy, self.moments), self.read)

    def differs(self, other: Recipe) -> bool:
        """Whether anything does; or it cannot be told, for the copies are too small or the other is not possible."""
        try:
            copy, recipe = small_copy(other), self.recipe
            hidden = _resolved(*copy) == _resolved(*self.copy)
            if hidden and _resolved(other.model, other.train) != _resolved(recipe.model, recipe.train):
                return True
            if other.model != recipe.model and _unequal(self.model, _of_model(other, copy)):
                return True
            if _sizes(other.train, self.moments) != self.sizes:
                return True
            self.train, seen = tee(self.train)
            return _unequal(seen, _of_training(copy, self.moments)) or self._averages_otherwise(other.train)
        except UserError:
            return True

    def _averages_otherwise(self, train: Train) -> bool:
        own, last = self.recipe.train, self.moments[-1]
        touched = (train.averaging, train.lr_schedule) != (own.averaging, own.lr_schedule)
        return touched and _long_average(train, last) != _long_average(own, last)


def _unequal(seen: Iterable[object], other: Iterable[object]) -> bool:
    return any(a != b for a, b in zip_longest(seen, other))


def _of_model(recipe: Recipe, copy: Copy) -> Iterator[object]:
    """Every parameter of the model and where it starts; then the copy's logits at every stage, of random weights."""
    with torch.device("meta"):
        model = recipe.model.build()
    yield declarations(model), [parameter.shape for parameter in model.parameters()]
    yield [(name, part.constants) for name, part in model.named_modules() if isinstance(part, Part) and part.constants]
    gpt, train = copy
    model = Trainer(gpt, train, 0, Ranks()).model
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
        row = _stream(gpt, train).micro_batch(0).inputs.shape[1]
        length = max(row, min(1024, math.ceil(recipe.score.sequence_length * row_scale(recipe.train))))
        ids = torch.from_numpy(_shards(gpt.vocabulary)[0][: 2 * length].astype(np.int64)).reshape(2, length)
        ids[1, 1:].masked_fill_(ids[1, 1:] == BOS, 0)  # one document
        for stage in range(len(model.stages)):
            yield model(ids, ids == BOS, torch.float64, stage=stage).numpy().tobytes()


def _of_training(copy: Copy, moments: list[TrainProgress]) -> Iterator[object]:
    """The copy's data; loss, weights and average after each of its steps."""
    gpt, train = copy
    data = _stream(gpt, train)
    yield [batch.inputs.tobytes() + batch.targets.tobytes() for batch in map(data.micro_batch, range(130))]
    trainer = Trainer(gpt, train, 0, Ranks())
    for number, moment in enumerate(moments):
        loss = trainer.step(iter([data.micro_batch(number)]), moment, BOS)
        trainer.forget_gradients()
        trainer.watch(_at(moments[-1], moment.step + 1), value_at(train.lr_schedule, moment))
        average = trainer.average.result() if trainer.average else {}
        yield loss, _digest(trainer.parameters), _digest(average)


def _long_average(train: Train, last: TrainProgress) -> object:
    """The average, if any, of a weight that goes up and down over many steps."""
    if train.averaging is None:
        return None
    average = train.averaging.build(weight := {"weight": torch.zeros(1)})
    for moment in _spread(last, STEPS):
        weight["weight"].fill_(math.sin(moment.step))
        average.update(weight, _at(last, moment.step + 1), value_at(train.lr_schedule, moment))
    return _digest(average.result())


def _digest(tensors: Mapping[str, torch.Tensor]) -> bytes:
    return hashlib.blake2b(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors.values())).digest()


def _sizes(train: Train, moments: list[TrainProgress]) -> list[tuple[int, int]]:
    """Tokens of each step, and of its rows as the loader cuts them."""
    tokens, longest = train.micro_tokens(1), train.longest_row
    shard = np.zeros(128 * (tokens + 1), np.uint16)
    shard[0] = BOS
    stream = train.loader.build([shard], tokens=tokens, sequence_length=longest, seed=0, bos=BOS)
    row = stream.micro_batch(0).inputs.shape[1]
    rows = (row * int_at(train.sequence_length, moment) // longest for moment in moments)
    return [(int_at(train.batch_tokens, moment), length) for moment, length in zip(moments, rows, strict=True)]


def _resolved(gpt: GPT, train: Train) -> object:
    """Return settings that compare equal if every layer's block does, however it is put together."""
    return gpt.blocks, replace(gpt, block=Block(), layers={}), train


def _shards(vocabulary: int) -> list[Tokens]:
    """Return random documents, some longer than a row."""
    random = np.random.default_rng(0)
    drawn = [random.integers(vocabulary, size=20_000).astype(np.uint16) for _ in range(3)]
    for shard in drawn:
        begins = np.cumsum(random.integers(3, 150, 300)) - 3
        shard[begins[begins < len(shard)]] = BOS
    return drawn


def _stream(gpt: GPT, train: Train) -> Stream:
    """Return the data of a copy, in the order of its loader."""
    return train.loader.build(
        _shards(gpt.vocabulary), tokens=train.micro_tokens(1), sequence_length=train.longest_row, seed=0, bos=BOS
    )


# Moments


def _moments(recipe: Recipe, others: list[Recipe]) -> list[TrainProgress]:
    """The first steps, the last, some between, and those at which a schedule differs most from that of another."""
    budget = recipe.train.budget
    steps = max(FEWEST_STEPS, budget.steps or STEPS)
    budget = replace(budget, steps=budget.steps and steps)
    last = TrainProgress(steps - 1, 0.999999 * (budget.seconds or 0.0), budget)
    fine = _spread(last, 1001)
    chosen = {0, 1, 2, *(round(part * last.step) for part in np.linspace(0.1, 1.0, 10))}
    for other in others:
        for a, b in _schedules(recipe, other):
            apart = [abs(value_at(a, moment) - value_at(b, moment)) for moment in fine]
            chosen.add(fine[int(np.argmax(apart))].step)
    return [_at(last, step) for step in sorted(chosen) if step <= last.step]


def _at(last: TrainProgress, step: int) -> TrainProgress:
    return TrainProgress(step, step * last.seconds / max(1, last.step), last.budget)


def _spread(last: TrainProgress, count: int) -> list[TrainProgress]:
    return [_at(last, step) for step in sorted({round(part * last.step) for part in np.linspace(0.0, 1.0, count)})]


def _schedules(a: Any, b: Any) -> Iterator[tuple[Any, Any]]:
    """Numbers in the same place of two configs that differ, at least one of them a schedule."""
    if a == b:
        return
    if isinstance(a, Schedule) or isinstance(b, Schedule):
        if all(isinstance(one, (Schedule, int, float)) for one in (a, b)):
            yield a, b
    elif isinstance(a, Config) and type(a) is type(b):
        for field in fields(a):
            yield from _schedules(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in a.keys() & b.keys():
            yield from _schedules(a[key], b[key])
