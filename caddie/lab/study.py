"""Study: a base, labelled diffs of it, seeds and one budget for all (`docs/studies.md`).

Every run follows from these alone, so a study can be stopped at any moment and continued.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, get_args

from caddie.config import Config, Count, Diff, Positive, show
from caddie.config.schedules import PiecewiseConstant
from caddie.config.userfile import execute, split_name
from caddie.errors import UserError, check_kind, suggest
from caddie.lab.modelled import StepTime, full_name, step_time
from caddie.recipes.catalog import shipped
from caddie.recipes.recipe import Recipe
from caddie.report.charts import is_finite
from caddie.train.settings import Train

BASE = "base"
"""Label of the base."""
COUNTED = ("IterationWarmdown", "StepRamp", "Rewarmed", "TailEMA")
"""Settings whose `steps` are a number of optimizer steps."""


class EqualBudget(Config):
    """Budget that is equal for all runs of a study."""

    @abstractmethod
    def give(self, recipe: Recipe) -> Recipe:
        """Return the recipe with this budget."""


class Seconds(EqualBudget):
    """Equal time: a slower recipe sees less text. Runs must not disturb one another (see `caddie study --workers`)."""

    seconds: Positive
    """Training seconds of each run."""

    def give(self, recipe: Recipe) -> Recipe:
        return recipe.but({"train.seconds": self.seconds, "train.steps": None})


class Steps(EqualBudget):
    """Equal steps: nothing depends on the clock, so on a CPU a run repeats bit for bit."""

    steps: Count
    """Optimizer steps of each run."""

    def give(self, recipe: Recipe) -> Recipe:
        return recipe.but({"train.seconds": None, "train.steps": self.steps})


class Tokens(EqualBudget):
    """Equal text: larger batches make fewer steps."""

    tokens: Count
    """Training tokens of each run."""

    def give(self, recipe: Recipe) -> Recipe:
        """Return the recipe with this budget, in whole steps of its own batch (of its mean over progress)."""
        size = recipe.train.batch_tokens
        sizes = size if isinstance(size, PiecewiseConstant) else PiecewiseConstant(values=(size,), begins=())
        spans = pairwise([0.0, *sizes.begins, 1.0])
        batch = sum(value * (end - begin) for value, (begin, end) in zip(sizes.values, spans, strict=True))
        return Steps(steps=max(1, round(self.tokens / batch))).give(recipe)


class ModelledSeconds(EqualBudget):
    """Equal time on eight H100, modelled, not measured: a recipe with slower steps makes fewer (`lab/modelled.py`).

    The speed of the study's own machine does not matter, and on a CPU a run repeats bit for bit.
    """

    seconds: Positive
    """Training seconds that each run would take there at full size."""

    def give(self, recipe: Recipe) -> Recipe:
        """Return the recipe with the steps that it would make."""
        return Steps(steps=step_time(recipe).steps(self.seconds)).give(recipe)


ClaimWord = Literal["better", "worse", "same"]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Effect of a change, as a source states it."""

    word: ClaimWord
    """The source's verdict."""
    difference: float | None = None
    """Difference from the source's base in bits per byte, negative is better; None if it states none."""
    source: str
    """Place of the source."""
    note: str = ""
    """Remark on the claim, such as how the source's experiment differs from ours."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One labelled diff of a study's base."""

    diff: Diff
    """Dotted path to value."""
    against: str = BASE
    """Label of its rival."""
    kind: str = ""
    """Kind of change: architecture, optimizer, schedule, quantization, data, scoring and others.

    A `bundle` is a whole recipe. A run of any other kind fails if a setting does nothing, unless its rival is a bundle.
    """
    why: str = ""
    """Hypothesis, in one sentence."""
    claim: Claim | None = None
    """Claim of a source."""
    public_score: float | None = None
    """Public bits per byte of this recipe at full size, or None; the report compares the order of these with ours."""
    step_cost: float | None = None
    """Step time at full size as a multiple of the rival's, as a source states it; None if it is to be modelled."""

    def check(self, label: str) -> None:
        """Raise `UserError`, which names the label, for a value that no entry can have."""
        if not isinstance(self.diff, Mapping) or not all(isinstance(path, str) for path in self.diff):
            raise UserError(f"the diff of {label} must be dotted paths to values")
        if self.step_cost is not None and not (is_finite(self.step_cost) and self.step_cost > 0.0):
            raise UserError(f"the step_cost of {label} must be a number above 0, not {self.step_cost!r:.80}")
        if self.public_score is not None and not is_finite(self.public_score):
            raise UserError(f"the public_score of {label} must be a number, not {self.public_score!r:.80}")
        claim = self.claim
        if claim is not None and not (isinstance(claim, Claim) and claim.word in get_args(ClaimWord)):
            example = 'Claim(word="better", source="...")'
            raise UserError(f"the claim of {label} must say better, worse or same, not {claim!r:.80}; give {example}")
        if claim and claim.difference is not None and not is_finite(claim.difference):
            raise UserError(f"the difference that {label} claims must be a number, not {claim.difference!r:.80}")


@dataclass(frozen=True, kw_only=True)
class Study:
    """Runs of labelled diffs, to be judged side by side."""

    name: str
    """Short name; the runs stand in a folder of that name."""
    why: str = ""
    """Question, in one sentence."""
    base: Recipe
    """Recipe of which all entries are diffs."""
    entries: Mapping[str, Entry] = field(default_factory=dict)
    """Label to diff."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Random seeds, the same for each label; verdicts need at least two."""
    budget: EqualBudget | None = None
    """Equal budget of all runs; None leaves each recipe its own."""
    margin: float = 0.0
    """Bits per byte that a difference must exceed to matter."""
    fraction: float = 1.0
    """Fraction of each run's budget to run; settings that count steps shrink with it (`shortened`)."""
    scales: Mapping[str, Diff] = field(default_factory=dict)
    """Name of a scale to a diff of the base, smallest first, for `caddie study --ladder`."""

    def __post_init__(self) -> None:
        for name, kind, example in (
            ("name", str, '"depths"'),
            ("base", Recipe, 'find("tiny")'),
            ("budget", (EqualBudget, type(None)), "Steps(steps=200)"),
            ("seeds", (tuple, list), "(1, 2, 3)"),
            ("margin", (int, float), "0.001"),
            ("fraction", (int, float), "0.1"),
            ("entries", Mapping, '{"deeper": Entry(diff={"model.depth": 6})}'),
            ("scales", Mapping, '{"small": {"model.width": 64}}'),
        ):
            check_kind(getattr(self, name), kind, f"{name} of the study {self.name}", f"give {name}={example}")
        for name in (self.name, *self.scales):
            if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]{0,79}", name):
                raise UserError(f"a name of a study or scale is letters, digits, - and _, which {name!r:.80} is not")
        if BASE in self.entries:
            raise UserError(f"the label {BASE} is the base itself; name the entry otherwise")
        for scale, diff in self.scales.items():
            if not isinstance(diff, Mapping):
                raise UserError(f"the scale {scale} must be dotted paths to values, not {diff!r:.80}")
        for label, entry in self.entries.items():
            if not isinstance(label, str) or not re.fullmatch(r"[^\x00-\x1f\x7f]{1,100}", label):
                raise UserError(f"a label is 1 to 100 characters of one line, which {label!r:.120} is not")
            if not isinstance(entry, Entry):
                raise UserError(f"the entry {label} must be an Entry, not {entry!r:.80}; give Entry(diff={{...}})")
            entry.check(label)
            if entry.against not in self.labels or entry.against == label:
                raise UserError(f"{label} is set against {entry.against}, which is no other label of {self.name}")
        whole = all(type(seed) is int and 0 <= seed < 1 << 32 for seed in self.seeds)
        if not self.seeds or not whole or len(set(self.seeds)) < len(self.seeds):
            raise UserError(f"{self.name} needs whole seeds from 0 on, each once, not {list(self.seeds)}")
        if not 0.0 < self.fraction <= 1.0:
            raise UserError(f"the fraction of {self.name} must be above 0 and at most 1, not {self.fraction}")
        if not 0.0 <= self.margin < math.inf:
            raise UserError(f"the margin of {self.name} must be a number of at least 0, not {self.margin}")

    @property
    def labels(self) -> list[str]:
        """Labels of the base and all entries."""
        return [BASE, *self.entries]

    def recipe(self, label: str) -> Recipe:
        """Return the recipe of a label, with the budget. Raises `UserError`, with the label, if it does not fit."""
        entry, times = Entry(diff={}) if label == BASE else self.entries[label], self.step_times
        try:
            recipe = self.base.but(entry.diff)
            budgets = [(one.train.seconds, one.train.steps) for one in (self.base, recipe)]
            if self.budget and budgets[0] != budgets[1]:
                raise UserError("it sets train.seconds or train.steps, which the study's budget decides; leave out one")
            if isinstance(self.budget, ModelledSeconds):
                recipe = Steps(steps=times[label].steps(self.budget.seconds)).give(recipe)
            elif self.budget:
                recipe = self.budget.give(recipe)
            recipe = recipe if self.fraction == 1.0 else shortened(recipe, self.fraction)
            return recipe if label == BASE else recipe.but(name=label, base=self.base.name, why=entry.why, public=())
        except UserError as error:
            raise UserError(f"{label}: {error}") from None

    @cached_property
    def step_times(self) -> dict[str, StepTime]:
        """Return each label's step time at full size; empty unless the budget is `ModelledSeconds`.

        Raises `UserError` for a label whose time is not known.
        """
        labels = self.labels if isinstance(self.budget, ModelledSeconds) else ()
        return {label: self._step_time(label) for label in labels}

    def _step_time(self, label: str) -> StepTime:
        """Follow the rivals to the first label without a stated cost; return its step time, times the stated costs."""
        chain, costs = [label], list[float]()
        while (entry := self.entries.get(chain[-1])) and entry.step_cost is not None:
            if entry.against in chain:
                raise UserError(f"{label}: its step_cost leads back to itself, by {entry.against}; state none there")
            chain.append(entry.against)
            costs.append(entry.step_cost)
        try:
            found = step_time(self.base.but(entry.diff if entry else {}))
        except UserError as error:
            raise UserError(f"{chain[-1]}: {error}") from None
        return found.times(math.prod(costs)) if costs else found

    def shown(self, label: str) -> dict[str, str]:
        """Return the changes of a label to its rival: path to value as it could be typed."""
        entry = self.entries.get(label, Entry(diff={}))
        diff = entry.diff
        if entry.against != BASE:
            rival = self.base.but(self.entries[entry.against].diff)
            diff = rival.settings.diff(self.base.but(diff).settings)
        return {path: show(value) for path, value in diff.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the description of the study that its report needs.

        `public` are the public results of the base, or of the recipe whose twin it is. `base_values` are the values of
        the base at all paths that an entry changes, as they could be typed.
        """
        twin_of = shipped().get(full_name(self.base.name))
        public = self.base.public or (twin_of.public if twin_of else ())
        back = [self.base.but(entry.diff).settings.diff(self.base.settings) for entry in self.entries.values()]
        return {
            "name": self.name,
            "why": self.why,
            "base": self.base.name,
            "budget": show(self.budget) if self.budget else "each recipe's own",
            "fraction": self.fraction,
            "equal": re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(self.budget).__name__).lower() if self.budget else "",
            "margin": self.margin,
            "seeds": list(self.seeds),
            "public": [asdict(figure) for figure in public],
            "entries": [
                {"label": label, **vars(entry), "diff": self.shown(label), "claim": entry.claim and asdict(entry.claim)}
                for label, entry in self.entries.items()
            ],
            "step_times": {
                label: {"steps": self.recipe(label).train.steps, **asdict(one)}
                for label, one in self.step_times.items()
            },
            "base_values": {path: show(value) for diff in back for path, value in diff.items()},
        }

    def at(self, scale: str) -> Study:
        """Return this study at one of its scales."""
        return replace(self, name=f"{self.name}-{scale}", base=self.base.but(self.scales[scale]), scales={})

    def part(self, fraction: float) -> Study:
        """Return this study with a fraction of each run's budget, under a name of its own."""
        return replace(self, name=f"{self.name}-{fraction:g}", fraction=fraction)


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
    if found.get("kind") == "EMA":  # the same decay over the same part of the run
        found["decay"] **= 1 / fraction
    return found


def find_study(name: str) -> Study:
    """Load the study that a Python file defines, as FILE.py (its `study`) or FILE.py:NAME."""
    path, attribute = split_name(name)
    attribute = attribute or "study"
    studies = {key: value for key, value in execute(path).items() if isinstance(value, Study)}
    if attribute not in studies:
        has = f"it has {', '.join(studies)}" if studies else f"write {attribute} = Study(...)"
        raise UserError(f"{path} has no study {attribute}{suggest(attribute, studies)}; {has}")
    return studies[attribute]
