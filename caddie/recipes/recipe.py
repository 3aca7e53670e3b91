"""A recipe: every setting of a run as one value, with its purpose and public results."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from typing import Annotated

from caddie.config import Config, Range
from caddie.data.tokenizers import SentencePieceBPE, TokenizerSource
from caddie.model import GPT, parameter_count
from caddie.pack.compress import Pack
from caddie.score import Scoring
from caddie.train.settings import Train


class Figure(Config):
    """A public result as its source states it; none was measured by caddie."""

    label: str
    """Machine and seed."""
    bits_per_byte: float
    """Bits per byte on the contest's validation text, after quantization."""
    artifact_bytes: int | None = None
    """Bytes of model and code."""
    source: str
    """Folder of a record, or pull request."""
    note: str = ""
    """Differences that matter to a comparison."""


class Data(Config):
    """The tokenizer and the held-out part of the text."""

    tokenizer: TokenizerSource = SentencePieceBPE()
    """Source of the tokenizer; its vocabulary has `model.vocabulary` ids."""
    validation_fraction: Annotated[float, Range(0.0, 0.9)] = 0.05
    """Fraction of the documents held out for scoring, chosen by hash."""


AS_RECIPE = 'find one, as caddie.find("tiny")'
"""Advice to a caller that passed something else than a recipe."""


class Recipe(Config):
    """Everything that decides a run, apart from the text, the seed and the machine."""

    name: str = ""
    """Short name."""
    why: str = ""
    """Purpose, in one sentence; for a record also its name."""
    base: str | None = None
    """Name of the recipe that it changes."""
    public: tuple[Figure, ...] = ()
    """Public results of the same settings."""
    data: Data = Data()
    """Tokenizer and held-out part."""
    model: GPT = GPT()
    """The model."""
    train: Train = Train()
    """Training: budget, data order, optimizers, schedules, QAT, averaging."""
    pack: Pack = Pack()
    """Quantization and coding of the weights."""
    score: Scoring = Scoring()
    """Scoring of the artifact."""

    @property
    def settings(self) -> Recipe:
        """Return the recipe without its labels."""
        return self.but(name="", why="", base=None, public=())

    @cached_property
    def sha256(self) -> str:
        """Return the hash of the settings."""
        return hashlib.sha256(json.dumps(self.settings.to_json()).encode()).hexdigest()

    def key(self) -> str:
        """Return the first eight hexadecimal digits of the hash, as in `result.json` and the names of run folders."""
        return self.sha256[:8]

    @property
    def published(self) -> float | None:
        """Return the public bits per byte, the mean over the seeds of its first source; none if there is no result."""
        figures = [figure.bits_per_byte for figure in self.public if figure.source == self.public[0].source]
        return sum(figures) / len(figures) if figures else None

    @cached_property
    def parameters(self) -> int:
        """Return the number of parameters of the model."""
        return parameter_count(self.model)
