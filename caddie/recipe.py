"""A recipe: every setting of a run as one value, with its reason and the public figures it answers to."""

from __future__ import annotations

import hashlib
import importlib
import json
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated

from caddie.compress import Compress
from caddie.config import Config, Range
from caddie.errors import UserError, suggest
from caddie.model import GPT, parameter_count
from caddie.scoring import Scoring
from caddie.tokenizers import SentencePieceBPE, TokenizerSource
from caddie.trainer import Train
from caddie.userfile import execute


@dataclass(frozen=True, kw_only=True)
class Figure(Config):
    """A public result, as its source states it; nothing here was measured by caddie."""

    label: str
    """Machine and seed."""
    bits_per_byte: float
    """Bits per byte on the contest's validation text, after quantization."""
    artifact_bytes: int | None = None
    """Bytes of model and code."""
    source: str
    """Where it stands."""
    note: str = ""
    """What must be known to compare."""


@dataclass(frozen=True, kw_only=True)
class Data(Config):
    """How text becomes tokens."""

    tokenizer: TokenizerSource = SentencePieceBPE()
    """Where the tokenizer comes from; the size of its vocabulary is the model's."""
    validation_fraction: Annotated[float, Range(0.0, 0.9)] = 0.05
    """Part of the documents held out for scoring, chosen by hash."""


@dataclass(frozen=True, kw_only=True)
class Recipe(Config):
    """Everything that a run does, apart from the text, the seed and the machine."""

    name: str = ""
    """Short name."""
    why: str = ""
    """What the recipe is for, in one sentence."""
    base: str | None = None
    """Name of the recipe that it is a diff of."""
    public: tuple[Figure, ...] = ()
    """Public results of the same settings."""
    data: Data = Data()
    """How text becomes tokens."""
    model: GPT = GPT()
    """The model."""
    train: Train = Train()
    """How it is trained."""
    compress: Compress = Compress()
    """How its weights become bytes."""
    score: Scoring = Scoring()
    """How the artifact is scored."""

    @property
    def settings(self) -> Recipe:
        """The recipe without its labels: what decides the result."""
        return self.but(name="", why="", base=None, public=())

    @cached_property
    def sha256(self) -> str:
        """Hash of the settings."""
        return hashlib.sha256(json.dumps(self.settings.to_json()).encode()).hexdigest()

    @property
    def published(self) -> float | None:
        """Bits per byte of the public result, the mean over its seeds; of the first source where there are several."""
        figures = [figure.bits_per_byte for figure in self.public if figure.source == self.public[0].source]
        return sum(figures) / len(figures) if figures else None

    @cached_property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return parameter_count(self.model)


def shipped() -> dict[str, Recipe]:
    """Name to recipe of all that caddie ships."""
    return dict(_shelf())


@cache
def _shelf() -> dict[str, Recipe]:
    return _named(vars(importlib.import_module("caddie.recipes")))


def find(name: str) -> Recipe:
    """A recipe by its name, its twin for two cores as `NAME_mini`, or one of a user's own as `FILE.py:NAME`.

    Seed 000's experiments are found by their labels, as `seed_000:LABEL`.
    """
    path, colon, attribute = name.rpartition(":")
    if path == "seed_000":
        tried = importlib.import_module("caddie.recipes.experiments").seed_000_experiments
        shelf: dict[str, Recipe] = {one.label: recipe for one in tried if (recipe := one.recipe)}
    else:
        shelf = _named(execute(Path(path))) if colon else shipped()
    full = attribute.removesuffix("_mini")
    if attribute not in shelf and full in shelf:
        twin: Recipe = importlib.import_module("caddie.recipes.mini").mini(shelf[full])
        return twin
    if attribute not in shelf:
        hint = suggest(attribute, shelf)
        raise UserError(
            f"{path} has no recipe {attribute}{hint}"
            if colon
            else f"no recipe {name}{hint}; `caddie recipes` lists them, FILE.py:NAME is yours"
        )
    return shelf[attribute]


def _named(values: dict[str, object]) -> dict[str, Recipe]:
    return {name: value.but(name=name) for name, value in values.items() if isinstance(value, Recipe)}
