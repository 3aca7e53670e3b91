"""Find settings without effect before a run starts: those that differ from the base and change nothing.

The contest's records have such settings: late QAT that the compiler had folded away, snapshots that were collected and
never used. So each changed setting is reverted alone, and a small copy of the run is compared to the bit: its
parameters, logits, data, and steps of the real trainer over a simulated clock.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, field, fields, replace
from itertools import tee, zip_longest
from typing import Any

import numpy as np
import torch

from caddie.config import ABSENT, Config, show
from caddie.config import config as configs
from caddie.config.schedules import Schedule, TrainProgress, int_at, value_at
from caddie.data.shards import Tokens
from caddie.errors import UserError
from caddie.model import GPT, Block
from caddie.model.parameters import Part, declarations
from caddie.pack.quantize import Rows, Ternary
from caddie.recipes.catalog import find_shipped
from caddie.recipes.recipe import Recipe
from caddie.recipes.shrink import row_scale, small_copy
from caddie.runtime.distributed import Ranks
from caddie.train.averaging import Average
from caddie.train.optim import Muon
from caddie.train.settings import Train
from caddie.train.trainer import Trainer

EXEMPT = {
    (Train, "seconds"): "the budget",
    (Train, "steps"): "the budget",
    (Train, "micro_batches"): "how a step is divided, not its result",
    (Train, "precision"): "the number format, which suits the machine",
    (Train, "compile"): "speed alone",
    (Train, "cuda_graphs"): "speed alone",
    (Train, "warmup_steps"): "undone before the clock starts",
    (Train, "checkpoint_seconds"): "when the state is saved",
    (Train, "held_out_tokens"): "what is measured, and a little less text",
    (Muon, "communication"): "how processes exchange, and a copy is one process",
    (Rows, "packed"): "how integers are stored; training may name the quantizer that packing does",
    (Ternary, "packed"): "the same",
}
"""Settings that need not change the result of training, each with the reason."""

BOS = 1
"""Id that begins the documents of a copy."""
STEPS = 4801
"""Number of steps assumed for a run whose budget is of seconds alone."""

Copy = tuple[GPT, Train]
"""Model and training of a small copy."""


@dataclass(frozen=True)
class Change:
    """A setting that differs from the base, held by a config of class `owner`; `reverted` is the recipe without it."""

    path: str
    value: object
    instead: object
    """Value to compare with: the base's, or the default of the class that holds the setting."""
    reverted: Recipe = field(compare=False)
    owner: type[Config]
    unread: bool = False
    """True if nothing reads the setting; false if something reads it, or if that is not known."""

    def __str__(self) -> str:
        value, instead = ("nothing" if one is ABSENT else show(one) for one in (self.value, self.instead))
        same = f"with {instead} instead the model, the losses and the weights are the same to the bit"
        return f"{self.path}={value} has no effect: {'nothing reads it' if self.unread else same}"

    def looked_up(self, read: set[tuple[type, str]]) -> Change:
        """Return the change with `unread` set, given class and name of every setting that was read."""
        name = self.path.rpartition(".")[2]
        return replace(self, unread=name in configs.field_types(self.owner) and (self.owner, name) not in read)


def check_settings_matter(recipe: Recipe, base: Recipe | None = None) -> None:
    """Raise a `UserError` that names every setting without effect; `base` as in `dead_settings`."""
    if found := dead_settings(recipe, base):
        more = f" (nor have {', '.join(change.path for change in found[1:])})" if found[1:] else ""
        raise UserError(f"{found[0]}{more}; leave it out, or change what keeps it from acting")


def dead_settings(recipe: Recipe, base: Recipe | None = None) -> list[Change]:
    """Return the settings of `model` and `train` that differ from the base and do nothing.

    Without `base`, a recipe named like a shipped one is compared with the shipped one, so the command line's changes
    remain. Any other recipe is compared with its own base if that is shipped, else with the defaults. Two kinds of
    settings count as alive: one that cannot be reverted alone, because others need it; and one that removes (none,
    false, absent) something that acts in the base, even if another change hides it here.
    """
    base = base or find_shipped(recipe.name) or find_shipped(recipe.base or "") or Recipe()
    base = base.but({"train.seconds": recipe.train.seconds, "train.steps": recipe.train.steps})
    if not (changes := list(_changes(base, recipe))):
        return []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # copies are too small for more
    try:
        observed = _Observed(recipe, changes)
        suspects = [change for change in changes if not observed.differs(change.reverted)]
        removals = {f"{change.path}." for change in suspects if change.value in (None, False, ABSENT)}
        acting: list[str] = []
        if removals:  # `acting`: paths at which the recipe's value alone would change the base
            back = list(_changes(recipe, base))
            other = _Observed(base, back)
            acting = [f"{change.path}." for change in back if other.differs(change.reverted)]
        hidden = {removal for removal in removals if any(path.startswith(removal) for path in acting)}
    finally:
        torch.set_num_threads(threads)
    return [change.looked_up(observed.read) for change in suspects if f"{change.path}." not in hidden]


def _changes(base: Recipe, recipe: Recipe) -> Iterator[Change]:
    """Yield every setting of `model` and `train` that differs and can be reverted alone."""

    def walk(a: Any, b: Any, keys: tuple[str, ...], owner: type[Config]) -> Iterator[Change]:
        """Yield the changes at or below the path `keys`, where the base has `a` and the recipe has `b`."""
        same = isinstance(b, Config) and type(a) is type(b)
        inside = isinstance(b, Mapping) and "kind" not in b and (a is ABSENT or isinstance(a, Mapping))
        if inside:
            held = {} if a is ABSENT else a
            for key in {**b, **held}:
                yield from walk(held.get(key, ABSENT), b.get(key, ABSENT), (*keys, key), owner)
        reordered = inside and a is not ABSENT and [*a] != [*b] and {*a} == {*b}
        if reordered or (a != b and not (same or inside)):
            with suppress(UserError):  # others need it, or it needs them
                yield Change(".".join(keys), b, a, _replaced(recipe, keys, a), owner)
        if isinstance(b, Config) and (same or a != b):
            held = {field.name: getattr(a, field.name) for field in fields(a)} if same else _defaults(type(b))
            for name, value in held.items():
                if (type(b), name) not in EXEMPT:
                    yield from walk(value, getattr(b, name), (*keys, name), type(b))

    for name in ("model", "train"):
        yield from walk(getattr(base, name), getattr(recipe, name), (name,), Recipe)


def _replaced(node: Any, keys: tuple[str, ...], value: object) -> Any:
    """Return a config or mapping with the value at the path `keys`; `ABSENT` removes a key of a mapping."""
    if not keys:
        return value
    name, rest = keys[0], keys[1:]
    if isinstance(node, Config):
        return replace(node, **{name: _replaced(getattr(node, name), rest, value)})
    held = {**node, name: _replaced(node.get(name), rest, value)}
    return {key: item for key, item in held.items() if item is not ABSENT}


def _defaults(cls: type[Config]) -> dict[str, Any]:
    return {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(cls)
        if field.default is not field.default_factory  # equal only if both are missing
    }


@contextmanager
def _reads(found: set[tuple[type, str]]) -> Iterator[None]:
    """Add class and name of every setting that the block reads; copying, comparing and checking do not count."""
    not_counted = {configs.__file__, __file__, "<string>"}  # "<string>": methods that dataclasses generate

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


def _with_reads(work: Iterator[object], read: set[tuple[type, str]]) -> Iterator[object]:
    """Yield what `work` yields, and add the settings that it reads to `read`."""
    while True:
        with _reads(read):
            one = next(work, ABSENT)
        if one is ABSENT:
            return
        yield one


class _Observed:
    """A recipe and the behaviour of its copy; other recipes are compared with it up to the first difference.

    The copy trains only as far as a comparison needs, so `read` is complete once one comparison has gone to the end.
    """

    def __init__(self, recipe: Recipe, changes: list[Change]) -> None:
        self.recipe = recipe
        self.read: set[tuple[type, str]] = set()
        with _reads(self.read):
            self.compared = _compared_steps(recipe, [change.reverted for change in changes])
            self.copy = small_copy(recipe)
            self.sizes = _sizes(recipe.train, self.compared)
            self.model = list(_model_facts(recipe, self.copy))
        self.training = _with_reads(_training_facts(self.copy, self.compared), self.read)

    def differs(self, other: Recipe) -> bool:
        """Return true if anything differs, if copies are too small to tell, or if `other` is not a valid recipe."""
        try:
            copy, recipe = small_copy(other), self.recipe
            if _resolved(*copy) == _resolved(*self.copy):
                if _resolved(other.model, other.train) != _resolved(recipe.model, recipe.train):
                    return True
            if other.model != recipe.model and _unequal(self.model, _model_facts(other, copy)):
                return True
            if _sizes(other.train, self.compared) != self.sizes:
                return True
            self.training, seen = tee(self.training)
            if _unequal(seen, _training_facts(copy, self.compared)):
                return True
            train, own, last = other.train, recipe.train, self.compared[-1]
            touched = (train.averaging, train.lr_schedule) != (own.averaging, own.lr_schedule)
            return touched and _long_average(train, last) != _long_average(own, last)
        except UserError:
            return True


def _unequal(seen: Iterable[object], other: Iterable[object]) -> bool:
    return any(a != b for a, b in zip_longest(seen, other))


def _model_facts(recipe: Recipe, copy: Copy) -> Iterator[object]:
    """Yield the parameters of the model and their initial values, then the copy's logits at every stage."""
    model = recipe.model.outline()
    yield declarations(model), [parameter.shape for parameter in model.parameters()]
    yield [(name, part.constants) for name, part in model.named_modules() if isinstance(part, Part) and part.constants]
    gpt, train = copy
    model = Trainer(gpt, train, 0, Ranks()).model
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
        shards = _shards(gpt.vocabulary)
        row = train.stream(shards, 0, BOS).micro_batch(0).inputs.shape[1]
        length = max(row, min(1024, math.ceil(recipe.score.sequence_length * row_scale(recipe.train))))
        ids = torch.from_numpy(shards[0][: 2 * length].astype(np.int64)).reshape(2, length)
        ids[1, 1:].masked_fill_(ids[1, 1:] == BOS, 0)  # one document
        for stage in range(len(model.stages)):
            yield model(ids, ids == BOS, torch.float64, stage=stage).numpy().tobytes()


def _training_facts(copy: Copy, compared: list[TrainProgress]) -> Iterator[object]:
    """Yield the copy's data, then loss, weights and average after each of its steps."""
    gpt, train = copy
    data = train.stream(_shards(gpt.vocabulary), 0, BOS)
    yield [batch.inputs.tobytes() + batch.targets.tobytes() for batch in map(data.micro_batch, range(130))]
    trainer = Trainer(gpt, train, 0, Ranks())
    for number, train_progress in enumerate(compared):
        loss = trainer.step(iter([data.micro_batch(number)]), train_progress, BOS)
        trainer.zero_grad()
        trainer.update_average(_at(compared[-1], train_progress.step + 1), value_at(train.lr_schedule, train_progress))
        average = trainer.average.weights if trainer.average else {}
        yield loss, _digest(trainer.parameters), _digest(average)


def _long_average(train: Train, last: TrainProgress) -> object:
    """Return the average, if any, of a weight that goes up and down over many steps."""
    if train.averaging is None:
        return None
    average = Average(train.averaging, weight := {"weight": torch.zeros(1)})
    for train_progress in _spread(last, STEPS):
        weight["weight"].fill_(math.sin(train_progress.step))
        average.update(weight, _at(last, train_progress.step + 1), value_at(train.lr_schedule, train_progress))
    return _digest(average.weights)


def _digest(tensors: Mapping[str, torch.Tensor]) -> bytes:
    return hashlib.blake2b(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors.values())).digest()


def _sizes(train: Train, compared: list[TrainProgress]) -> list[tuple[int, int]]:
    """Return, for each step, the tokens of its batch and of its rows as the loader cuts them."""
    longest = train.longest_row
    shard = np.zeros(128 * (train.micro_tokens(1) + 1), np.uint16)
    shard[0] = BOS
    row = train.stream([shard], 0, BOS).micro_batch(0).inputs.shape[1]
    return [
        (int_at(train.batch_tokens, train_progress), row * int_at(train.sequence_length, train_progress) // longest)
        for train_progress in compared
    ]


def _resolved(gpt: GPT, train: Train) -> object:
    """Return settings that are equal if every layer's block is equal, however the exceptions are written."""
    return gpt.blocks, replace(gpt, block=Block(), layers={}), train


def _shards(vocabulary: int) -> list[Tokens]:
    """Return random documents, some longer than a row."""
    random = np.random.default_rng(0)
    drawn = [random.integers(vocabulary, size=20_000).astype(np.uint16) for _ in range(3)]
    for shard in drawn:
        begins = np.cumsum(random.integers(3, 150, 300)) - 3
        shard[begins[begins < len(shard)]] = BOS
    return drawn


def _compared_steps(recipe: Recipe, others: list[Recipe]) -> list[TrainProgress]:
    """Return the first steps, the last, some between, and those at which schedules of two recipes differ most."""
    budget = recipe.train.budget
    steps = max(64, budget.steps or STEPS)  # so that momentum matters in a trial of one step
    budget = replace(budget, steps=budget.steps and steps)
    last = TrainProgress(steps - 1, 0.999999 * (budget.seconds or 0.0), budget)
    fine = _spread(last, 1001)
    chosen = {0, 1, 2, *(round(part * last.step) for part in np.linspace(0.1, 1.0, 10))}
    for other in others:
        for a, b in _schedules(recipe, other):
            apart = [abs(value_at(a, train_progress) - value_at(b, train_progress)) for train_progress in fine]
            chosen.add(fine[int(np.argmax(apart))].step)
    return [_at(last, step) for step in sorted(chosen) if step <= last.step]


def _at(last: TrainProgress, step: int) -> TrainProgress:
    return TrainProgress(step, step * last.seconds / max(1, last.step), last.budget)


def _spread(last: TrainProgress, count: int) -> list[TrainProgress]:
    return [_at(last, step) for step in sorted({round(part * last.step) for part in np.linspace(0.0, 1.0, count)})]


def _schedules(a: Any, b: Any) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of differing numbers at the same path of two configs, at least one of them a schedule."""
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
