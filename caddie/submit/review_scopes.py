"""Functions of a submission's script, with the labels of the values in them, and the places noted there."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from caddie.submit.review_script import Script

TEXT, TARGET, LOSS, LOOKUP, FILE, LIVE, ENV, CHOICE = (1 << place for place in range(8))
"""Labels: validation text, a later token, a loss, a table indexed by text, data read from a file, weights in memory, a
setting, a choice by loss."""
ALL, PARAMETER = 255, 8
"""All labels, and the bits by which labels from a parameter are shifted: a call does not return these to other
callers."""
_MOST_CANDIDATES = 8
"""Functions of one name that are looked at."""


@dataclass(frozen=True, eq=False)
class Place:
    """A statement or expression of interest: line, outermost loop around it, and what was noted there."""

    line: int
    loop: ast.AST | None
    what: str
    no_gradient: bool


@dataclass(frozen=True, eq=False)
class Call(Place):
    """A call of a function of the scripts, or a call that is handed one; `what` says where its text comes from."""

    function: Scope
    models: frozenset[str]
    """Names of models that it is handed."""


@dataclass(eq=False)
class Scope:
    """A function, or a script's top level: labels of its variables, and places of interest by kind."""

    name: str
    node: ast.AST
    script: Script
    parent: Scope | None
    parameters: list[str] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)
    """Names of `*args` and `**kwargs`."""
    defaults: dict[str, int] = field(default_factory=dict)
    """Labels of the parameters' defaults."""
    labels: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    returns: dict[int | None, int] = field(default_factory=lambda: defaultdict(int))
    """Labels of its return values: together (None), and by place in a tuple."""
    aliases: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    items: dict[str, dict[object, int]] = field(default_factory=dict)
    """Labels by key of the variables that hold a dict of constant keys."""
    made: dict[str, int] = field(default_factory=dict)
    """Variable to the `id` of the expression that made its dict."""
    changed: set[str] = field(default_factory=set)
    """Variables that are changed in place, or hold several dicts."""
    classes: dict[str, str] = field(default_factory=dict)
    """Variable to the class of its object, if the script defines that class."""
    places: dict[str, list[Place]] = field(default_factory=lambda: defaultdict(list))
    calls: list[Call] = field(default_factory=list)
    called: bool = False
    owner: str = ""
    """The class that it is a method of."""


@dataclass
class Flow:
    """Names known across the scripts: their scopes, labels of attributes, and names of models."""

    scopes: list[Scope] = field(default_factory=list)
    named: dict[str, list[Scope]] = field(default_factory=lambda: defaultdict(list))
    attributes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    models: set[str] = field(default_factory=set)
    of_node: dict[ast.AST, Scope] = field(default_factory=dict)

    def home(self, name: str, scope: Scope) -> Scope:
        """Return the scope that a name belongs to: `scope` or one around it."""
        while scope.parent is not None and name not in scope.labels and name not in scope.parameters:
            scope = scope.parent
        return scope

    def functions(self, name: str) -> list[Scope]:
        """Return the functions of a name that are looked at."""
        return self.named.get(name, [])[:_MOST_CANDIDATES]

    def size(self) -> int:
        """Return a number that grows with every new label; no label is ever removed."""
        bits = (mark for scope in self.scopes for kept in (scope.labels, scope.returns) for mark in kept.values())
        return sum(bits) + sum(self.attributes.values())


def union(marks: Iterable[int]) -> int:
    """Return the labels of several values together."""
    found = 0
    for one in marks:
        found |= one
    return found


def plain(marks: int) -> int:
    """Return labels, whether or not they came in by a parameter."""
    return (marks | marks >> PARAMETER) & ALL


def without(marks: int, labels: int) -> int:
    """Return `marks` without `labels`."""
    return marks & ~(labels | labels << PARAMETER)
