"""Studies of the variations of one recipe: each of its changes reverted in turn, or every combination of values."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

from caddie.config import Diff, show
from caddie.config.assignment import parse_value
from caddie.errors import UserError, check_kind
from caddie.lab.study import Entry, Study
from caddie.recipes.catalog import find_shipped
from caddie.recipes.recipe import AS_RECIPE, Recipe
from caddie.run.run import check_recipe


def ablate(recipe: Recipe, origin: Recipe | None = None, **settings: Any) -> Study:
    """Return the study that reverts each of the recipe's changes to `origin` in turn; `settings` go to `Study`.

    By default `origin` is the recipe's base, which must be shipped. Changes that are valid only together are
    reverted together. Raises `UserError` for a recipe without a base, and for a change that cannot be reverted.
    """
    check_kind(recipe, Recipe, "the recipe", AS_RECIPE)
    check_kind(origin, (Recipe, type(None)), "the origin", AS_RECIPE)
    origin = origin or find_shipped(recipe.base or "")
    if origin is None:
        has = f"is based on {recipe.base}, which caddie does not ship" if recipe.base else "has no base"
        raise UserError(f"{recipe.name or 'the recipe'} {has}, so there is nothing to revert; name one that has")
    lines = recipe.settings.diff(origin.settings)
    paths = [path for path in lines if not path.startswith(("train.seconds", "train.steps"))]
    backs = [_taken_back(recipe, lines, path) for path in paths]
    entries = {_cut(f"without {', '.join(back)}"): Entry(diff=back) for back in backs}
    return Study(base=recipe, entries=entries, **{"name": f"ablate-{recipe.name}", **settings})


def _taken_back(recipe: Recipe, lines: Diff, path: str) -> Diff:
    """Return this change alone, with one other, or with all: the first whose reverting leaves a valid recipe."""
    others = [other for other in lines if other != path]
    for chosen in [(), *((other,) for other in others), tuple(others)]:
        back = {line: value for line, value in lines.items() if line == path or line in chosen}
        with suppress(UserError):
            check_recipe(recipe.but(back).but({"train.seconds": 1.0}))
            return back
    raise UserError(f"{path} cannot be taken back, not even with all other lines of {recipe.name}")


def sweep(recipe: Recipe, values: Mapping[str, Sequence[object]], **settings: Any) -> Study:
    """Return the study of every combination of a value for each path; `settings` go to `Study`.

    A combination that is the recipe itself is left out.
    """
    check_kind(recipe, Recipe, "the recipe", AS_RECIPE)
    check_kind(values, Mapping, "values", "give a dict of paths and their values")
    if not values or not all(
        isinstance(each, Sequence) and each and not isinstance(each, str) for each in values.values()
    ):
        raise UserError("a sweep needs a path and values for it, as in train.optimizers.matrix.lr=0.02,0.04")
    diffs = [dict(zip(values, combination, strict=True)) for combination in product(*values.values())]
    changed = [diff for diff in diffs if recipe.but(diff).settings != recipe.settings]
    if not changed:
        raise UserError(f"{recipe.name or 'the recipe'} has {labelled(diffs[0])} already; name another value")
    entries = {labelled(diff): Entry(diff=diff) for diff in changed}
    return Study(base=recipe, entries=entries, **{"name": f"sweep-{recipe.name}", **settings})


def labelled(diff: Mapping[str, object]) -> str:
    """Return the label of a diff: its values and the last words of their paths, as many as tell these apart."""
    names = [path.split(".") for path in diff]
    most = max(map(len, names))
    words = next(n for n in range(1, most + 1) if n == most or len({(*name[-n:],) for name in names}) == len(names))
    values = zip(names, diff.values(), strict=True)
    return _cut(", ".join(f"{'.'.join(name[-words:])}={show(value)}" for name, value in values))


def _cut(label: str) -> str:
    return label if len(label) <= 100 else f"{label[:90]}… {hashlib.sha256(label.encode()).hexdigest()[:8]}"


def read_values(text: str) -> tuple[str, list[object]]:
    """Parse `PATH=V1,V2,...` from a command line; commas inside brackets and quotes belong to a value."""
    path, sign, rest = text.partition("=")
    pieces, depth = [""], 0
    for token in re.findall(r"\"[^\"]*\"?|'[^']*'?|[^\"']", rest):
        depth += (token in "([{") - (token in ")]}")
        if token == "," and not depth:
            pieces.append("")
        else:
            pieces[-1] += token
    values = [piece.strip() for piece in pieces]
    if not sign or not path or not all(values):
        raise UserError(f"{text!r} names no values; write PATH=V1,V2,...")
    return path, [parse_value(value) for value in values]
