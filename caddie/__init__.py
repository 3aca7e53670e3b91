"""caddie: the most language model per byte and per minute, and a score that can be checked.

Everything below is loaded when it is first used; importing the package does nothing.
"""

import importlib
import sys
from importlib.metadata import version
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from caddie.errors import CheckFailed, UserError
    from caddie.inference.sample import sample
    from caddie.lab.report import Results
    from caddie.lab.runner import run_study
    from caddie.lab.study import Claim, Entry, ModelledSeconds, Seconds, Steps, Study, Tokens
    from caddie.lab.variations import ablate, sweep
    from caddie.pack.artifact import Artifact, load
    from caddie.recipes.catalog import find, shipped
    from caddie.recipes.recipe import Recipe
    from caddie.run.resolve_corpus import open_corpus, open_for_scoring
    from caddie.run.run import run
    from caddie.run.stages import held_out_text
    from caddie.runtime.progress import SILENT
    from caddie.score.score import score
    from caddie.verify import verify

_NAMES = {
    "errors": "CheckFailed UserError",
    "inference.sample": "sample",
    "lab.report": "Results",
    "lab.runner": "run_study",
    "lab.study": "Claim Entry ModelledSeconds Seconds Steps Study Tokens",
    "lab.variations": "ablate sweep",
    "pack.artifact": "Artifact load",
    "recipes.catalog": "find shipped",
    "recipes.recipe": "Recipe",
    "run.resolve_corpus": "open_corpus open_for_scoring",
    "run.run": "run",
    "run.stages": "held_out_text",
    "runtime.progress": "SILENT",
    "score.score": "score",
    "verify.verify": "verify",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
_VERBS = ("run", "score", "verify")
"""Functions named like their folder; importing the folder makes it the package's attribute of that name."""

__all__ = [
    "SILENT",
    "Artifact",
    "CheckFailed",
    "Claim",
    "Entry",
    "ModelledSeconds",
    "Recipe",
    "Results",
    "Seconds",
    "Steps",
    "Study",
    "Tokens",
    "UserError",
    "ablate",
    "run_study",
    "find",
    "load",
    "open_corpus",
    "open_for_scoring",
    "shipped",
    "run",
    "sample",
    "score",
    "sweep",
    "held_out_text",
    "verify",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return version("caddie")
    if name not in _HOMES:
        raise AttributeError(f"module 'caddie' has no attribute {name!r}")
    return importlib.import_module(f"caddie.{name}") if name in _VERBS else _function(name)


def _function(name: str) -> Any:
    return getattr(importlib.import_module(f"caddie.{_HOMES[name]}"), name)


class _Verb(ModuleType):
    """A folder that can be called as its function: `caddie.score(…)` beside `caddie.score.windows`."""

    def __call__(self, *arguments: object, **named: object) -> object:
        return _function(self.__name__.removeprefix("caddie."))(*arguments, **named)


class _Root(ModuleType):
    """The package, which makes each folder in `_VERBS` callable when it is imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _VERBS and isinstance(value, ModuleType):
            value.__class__ = _Verb
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Root
