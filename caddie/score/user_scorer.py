"""Scorers from a user's Python file, token by token or in whole windows."""

from abc import ABC, abstractmethod
from typing import Any

from caddie.config.userfile import execute, split_name
from caddie.data.tokenizers import Tokenizer
from caddie.errors import UserError, suggest
from caddie.model import Model
from caddie.score.scorer import Scorer


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


def load_scorer(name: str, model: Model, tokenizer: Tokenizer, source: bytes | None = None) -> TokenScorer | Scorer:
    """Return the scorer `FILE.py:NAME`, built with the model and the tokenizer; `UserError` if that fails.

    A file with one scorer needs no NAME. `source` is the contents of a file that cannot be read here. A class derived
    from `Scorer` scores whole windows, which is faster; the probes of `caddie verify` test that it does not look ahead.
    The scorer may change the model: give it a copy.
    """
    path, attribute = split_name(name)
    module = execute(path, source)
    own = [value for value in module.values() if isinstance(value, type) and value.__module__ == module["__name__"]]
    classes: dict[str, Any] = {cls.__name__: cls for cls in own if issubclass(cls, (TokenScorer, Scorer))}
    if not attribute and len(classes) == 1:
        attribute = next(iter(classes))
    if attribute not in classes:
        wanted = f"no scorer {attribute}{suggest(attribute, classes)}" if attribute else f"{len(classes)} scorers"
        raise UserError(f"{path} has {wanted}; write FILE.py:NAME of a class derived from caddie.score.TokenScorer")
    try:
        scorer: TokenScorer | Scorer = classes[attribute](model, tokenizer)
    except Exception as error:
        raise UserError(f"{path}:{attribute} cannot be made: {type(error).__name__}: {error}") from error
    return scorer
