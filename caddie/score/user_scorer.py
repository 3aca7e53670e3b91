"""Scorers of a user's own: a Python file with one class that predicts one token at a time."""

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
    """Subclass this in a file and name it with `--scorer FILE.py:NAME`.

    All it ever learns of the text comes through `update`, one token at a time and after that token was charged for. So
    it cannot look ahead, nor score anything twice; and what it answers is normalized, so it is a distribution.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer = model, tokenizer

    @abstractmethod
    def predict(self) -> Any:
        """Log-odds of every token of the vocabulary to be the next one: a tensor, an array or a list."""

    @abstractmethod
    def update(self, token: int) -> None:
        """The next token, or at the start the first token of the text, which is context only."""


class TokenByToken(Scorer):
    """A `TokenScorer` in the one loop; what goes wrong in it is a `UserError` that begins with `name`."""

    def __init__(self, scorer: TokenScorer, vocabulary: int, name: str) -> None:
        self._scorer, self._vocabulary, self._name = scorer, vocabulary, name
        self._begun = False

    def plan(self, layout: Layout, rows: int) -> Iterator[Step]:
        """One prediction after the other."""
        for begin, end in zip(layout.begins.tolist(), layout.ends.tolist(), strict=True):
            self._begun = False
            for position in range(begin, end):
                yield Step([Window(position, position, position + 1)], [0])

    def logits(self, inputs: Tensor, slots: Sequence[int], last: int, cache: Cache | None = None) -> Tensor:
        """What the scorer predicts; the only input is the token that it was told last."""
        if not self._begun:
            self._tell(int(inputs[0, 0]))
            self._begun = True
        with self._blamed("predict"):
            answer = torch.as_tensor(self._scorer.predict(), dtype=torch.float64, device="cpu").detach()
        if answer.shape != (self._vocabulary,):
            raise UserError(
                f"{self._name}: predict must give {self._vocabulary:,} log-odds, one for each token, not the shape "
                f"{tuple(answer.shape)}"
            )
        if not answer.logsumexp(0).isfinite():
            raise UserError(f"{self._name}: predict must give finite log-odds, or minus infinity for some tokens")
        return answer.to(inputs.device)[None, None]

    def update(self, batches: Sequence[ScoringBatch], past: ScoredPrefix) -> None:
        """Tell the scorer what came."""
        (window,) = batches[0].windows
        if not past.over(window):
            self._tell(int(past.targets([window])[0, 0]))

    def _tell(self, token: int) -> None:
        with self._blamed("update"):
            self._scorer.update(token)

    @contextmanager
    def _blamed(self, method: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise UserError(f"{self._name}: {method} failed with {type(error).__name__}: {error}") from error


def load_scorer(name: str, model: Model, tokenizer: Tokenizer) -> Scorer:
    """The scorer that `FILE.py:NAME` names, made with model and tokenizer; what is wrong with it is a `UserError`.

    The model is a copy. A file with one scorer in it needs no NAME. A class derived from `Scorer` is asked for whole
    windows, which is quicker and leaves it to the probes of `caddie verify` to show that it does not look ahead.
    """
    path, _, attribute = name.rpartition(":") if ":" in name else (name, "", "")
    found = execute(Path(path))
    own = [value for value in found.values() if isinstance(value, type) and value.__module__ == found["__name__"]]
    classes: dict[str, Any] = {cls.__name__: cls for cls in own if issubclass(cls, (TokenScorer, Scorer))}
    if not attribute and len(classes) == 1:
        attribute = next(iter(classes))
    if attribute not in classes:
        wanted = f"no scorer {attribute}{suggest(attribute, classes)}" if attribute else f"{len(classes)} scorers"
        raise UserError(f"{path} has {wanted}; write FILE.py:NAME of a class derived from caddie.scoring.TokenScorer")
    own_model = copy.deepcopy(model)  # whatever it does to it, the artifact's stays as it is
    try:
        made: TokenScorer | Scorer = classes[attribute](own_model, tokenizer)
    except Exception as error:
        raise UserError(f"{path}:{attribute} cannot be made: {type(error).__name__}: {error}") from error
    if isinstance(made, TokenScorer):
        return TokenByToken(made, model.config.vocabulary, f"{path}:{attribute}")
    return made
