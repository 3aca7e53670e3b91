"""Scorers from a user's Python file, token by token or in whole windows."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from caddie.config.userfile import execute
from caddie.data.tokenizers import Tokenizer
from caddie.errors import UserError, suggest
from caddie.model import Cache, Model
from caddie.score.scorer import Layout, ScoredPrefix, Scorer, ScoringBatch, Step
from caddie.score.windows import Window


class TokenScorer(ABC):
    """Base class of a scorer in a user's file, named with `--scorer FILE.py:NAME`.

    It sees the text only through `update`, one token at a time and after the token was scored. So it can neither look
    ahead nor score a token twice; and its predictions are normalized, so they are distributions.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer = model, tokenizer

    @abstractmethod
    def predict(self) -> Any:
        """Return next-token logits, (vocabulary,): a tensor, an array or a list."""

    @abstractmethod
    def update(self, token: int) -> None:
        """Take the next token; the first token of the text, before any prediction, is context only."""


class TokenByToken(Scorer):
    """Adapts a `TokenScorer` to the scoring loop; its errors become a `UserError` that begins with `name`."""

    def __init__(self, scorer: TokenScorer, vocabulary: int, name: str) -> None:
        self._scorer, self._vocabulary, self._name, self._begun = scorer, vocabulary, name, False

    def plan(self, layout: Layout, rows: int) -> Iterator[Step]:
        """Yield one prediction after the other."""
        for begin, end in zip(layout.begins.tolist(), layout.ends.tolist(), strict=True):
            self._begun = False
            for position in range(begin, end):
                yield Step([Window(position, position, position + 1)], [0])

    def logits(self, inputs: Tensor, slots: Sequence[int], last: int, cache: Cache | None = None) -> Tensor:
        """Return the scorer's prediction; the only input is the last token it was given."""
        if not self._begun:
            self._update(int(inputs[0, 0]))
            self._begun = True
        with self._blamed("predict"):
            logits = torch.as_tensor(self._scorer.predict(), dtype=torch.float64, device="cpu").detach()
        if logits.shape != (self._vocabulary,):
            wanted = f"{self._vocabulary:,} logits, one for each token"
            raise UserError(f"{self._name}: predict must return {wanted}, not the shape {tuple(logits.shape)}")
        if not logits.logsumexp(0).isfinite():
            raise UserError(f"{self._name}: predict must return finite logits, or minus infinity for some tokens")
        return logits.to(inputs.device)[None, None]

    def update(self, batches: Sequence[ScoringBatch], prefix: ScoredPrefix) -> None:
        """Give the scorer the token that was scored."""
        (window,) = batches[0].windows
        if not prefix.is_last(window):
            self._update(int(prefix.targets([window])[0, 0]))

    def _update(self, token: int) -> None:
        with self._blamed("update"):
            self._scorer.update(token)

    @contextmanager
    def _blamed(self, method: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise UserError(f"{self._name}: {method} failed with {type(error).__name__}: {error}") from error


def load_scorer(name: str, model: Model, tokenizer: Tokenizer) -> Scorer:
    """Return the scorer `FILE.py:NAME`, built with a copy of the model and the tokenizer; `UserError` if that fails.

    A file with one scorer needs no NAME. A class derived from `Scorer` scores whole windows, which is faster; that it
    does not look ahead is for the probes of `caddie verify` to show.
    """
    path, _, attribute = name.rpartition(":") if ":" in name else (name, "", "")
    module = execute(Path(path))
    own = [value for value in module.values() if isinstance(value, type) and value.__module__ == module["__name__"]]
    classes: dict[str, Any] = {cls.__name__: cls for cls in own if issubclass(cls, (TokenScorer, Scorer))}
    if not attribute and len(classes) == 1:
        attribute = next(iter(classes))
    if attribute not in classes:
        wanted = f"no scorer {attribute}{suggest(attribute, classes)}" if attribute else f"{len(classes)} scorers"
        raise UserError(f"{path} has {wanted}; write FILE.py:NAME of a class derived from caddie.score.TokenScorer")
    own_model = copy.deepcopy(model)  # a user's scorer may change it
    try:
        scorer: TokenScorer | Scorer = classes[attribute](own_model, tokenizer)
    except Exception as error:
        raise UserError(f"{path}:{attribute} cannot be made: {type(error).__name__}: {error}") from error
    if isinstance(scorer, TokenScorer):
        return TokenByToken(scorer, model.config.vocabulary, f"{path}:{attribute}")
    return scorer
