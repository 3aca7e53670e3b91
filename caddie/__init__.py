"""caddie: the most language model per byte and per minute, and a score that can be checked.

Everything below is loaded when it is first used; importing the package does nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from caddie.artifact import Artifact, load
    from caddie.corpora import open_corpus, open_for_scoring, text_of
    from caddie.errors import CheckFailed, UserError
    from caddie.generate import sample
    from caddie.lab.results import Results, conduct
    from caddie.lab.study import Claim, Entry, Seconds, Steps, Study, Tokens, ablate, sweep
    from caddie.line import run
    from caddie.probes import verify
    from caddie.recipe import Recipe, find, shipped
    from caddie.scoring.score import score

_HOMES = {
    "Artifact": "artifact",
    "CheckFailed": "errors",
    "Claim": "lab.study",
    "Entry": "lab.study",
    "Recipe": "recipe",
    "Results": "lab.results",
    "Seconds": "lab.study",
    "Steps": "lab.study",
    "Study": "lab.study",
    "Tokens": "lab.study",
    "UserError": "errors",
    "ablate": "lab.study",
    "conduct": "lab.results",
    "find": "recipe",
    "load": "artifact",
    "open_corpus": "corpora",
    "open_for_scoring": "corpora",
    "shipped": "recipe",
    "run": "line",
    "sample": "generate",
    "score": "scoring",
    "sweep": "lab.study",
    "text_of": "corpora",
    "verify": "probes",
}

__all__ = [
    "Artifact",
    "CheckFailed",
    "Claim",
    "Entry",
    "Recipe",
    "Results",
    "Seconds",
    "Steps",
    "Study",
    "Tokens",
    "UserError",
    "ablate",
    "conduct",
    "find",
    "load",
    "open_corpus",
    "open_for_scoring",
    "shipped",
    "run",
    "sample",
    "score",
    "sweep",
    "text_of",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'caddie' has no attribute {name!r}")
    return getattr(importlib.import_module(f"caddie.{_HOMES[name]}"), name)
