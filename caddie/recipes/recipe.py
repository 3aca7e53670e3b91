"""A recipe: every setting of a run as one value, with its reason and the public figures it answers to."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from caddie.config import Config, Range
from caddie.data.tokenizers import SentencePieceBPE, TokenizerSource
from caddie.model import GPT, parameter_count
from caddie.pack.compress import Pack
from caddie.score import Scoring
from caddie.train.trainer import Train


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
    pack: Pack = Pack()
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
