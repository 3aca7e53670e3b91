"""Recipes in files: a diff on another recipe in TOML or JSON, a whole recipe, or that of a run (`recipe.json`)."""

import json
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caddie.config import Config, Seed, coerce
from caddie.config.assignment import parse_value, unique
from caddie.config.userfile import Stated, read_stated, supply
from caddie.errors import UserError
from caddie.files import read_file
from caddie.recipes.recipe import Recipe
from caddie.report.run_files import PARTS, RECIPE

_NAME_ONE = "; name a recipe that is there"
_LARGEST_BYTES = 1 << 20  # the largest recipe that is shipped takes 10 kB


@dataclass(frozen=True)
class RunStart:
    """Recipe, seed and corpus of a run, as its `recipe.json` keeps them."""

    recipe: Recipe
    seed: int
    corpus: Path


def recipe_path(name: str) -> Path | None:
    """Return the recipe file that a name means: TOML, JSON, or `recipe.json` in the folder of a run; else None."""
    if os.path.isdir(name) and os.path.lexists(os.path.join(name, RECIPE)):
        return Path(name, RECIPE)
    return Path(name) if name.endswith((".toml", ".json")) else None


def read_recipe(path: Path, find: Callable[[str], Recipe]) -> Recipe:
    """Return the recipe in a file; `find` looks up its `base`. Raises `UserError`, which names file and setting."""
    held = _table(path)
    if "recipe" in held:
        return _start(path, held).recipe
    with _named(path):
        if held.get("kind") == "Recipe":
            recipe = Recipe.from_json(held)
        else:
            base = held.get("base")
            if not isinstance(base, str):
                raise UserError('it names no base; write base = "tiny", or kind = "Recipe" if it holds every setting')
            recipe = changed(find(base), held, name=path.stem, why="", public=())
        return _checked(recipe if recipe.name else recipe.but(name=path.stem))


def changed(origin: Recipe, held: Mapping[str, Any], **labels: object) -> Recipe:
    """Return a recipe with the changes in a table; `labels` are used where the table has none of its own."""
    own = {label: held[label] for label in ("name", "why", "base") if label in held}
    settings = {name: value for name, value in held.items() if name not in own}
    return origin.but({**labels, **own, **dict(_settings(origin, settings))})


def read_start(folder: Path, parts: Sequence[Path] = ()) -> RunStart:
    """Return recipe, seed and corpus of the run in a folder; `UserError` if it is no run's, or `parts` lack a file.

    `parts` are the users' files that the recipe needs; they are run. Copies in the folder are run only if they are
    named: the folder may be a stranger's.
    """
    path = folder / RECIPE
    with _no_run(folder):
        held = _table(path)
        stated = _stated(path, held)
    supply(stated, parts, folder, folder / PARTS)
    with _no_run(folder):
        return _start(path, held)


def read_place(folder: Path) -> Path:
    """Return the path of a run's corpus, whatever files its recipe needs; `UserError` if the folder is no run's."""
    with _no_run(folder):
        return Path(coerce(_table(folder / RECIPE).get("corpus"), str, "corpus"))


def stated_parts(path: Path) -> tuple[Stated, ...]:
    """Return the users' files that a run's recipe, read from its file, needs."""
    return _stated(path, _table(path))


def base_in(path: Path) -> str | None:
    """Return the base that a file of changes names; None if the file holds a whole recipe."""
    held = _table(path)
    base = None if "recipe" in held or held.get("kind") == "Recipe" else held.get("base")
    return base if isinstance(base, str) else None


def begun_from(path: Path) -> RunStart | None:
    """Return recipe, seed and corpus of a run, read from its file; None if the file is no run's."""
    held = _table(path)
    return _start(path, held) if "recipe" in held else None


def _start(path: Path, held: Mapping[str, Any]) -> RunStart:
    with _named(path):
        if missing := [name for name in ("recipe", "seed", "corpus") if name not in held]:
            raise UserError(f"it is no {RECIPE} of a run, for it has no {missing[0]}")
        if isinstance(held["corpus"], Mapping):
            raise UserError(f"it is the result of a run; name the {RECIPE} beside it")
        seed = coerce(held["seed"], Seed, "seed")
        corpus = coerce(held["corpus"], str, "corpus")
    supply(_stated(path, held), (), path.parent, path.parent / PARTS)
    with _named(path):
        return RunStart(_checked(Recipe.from_json(held["recipe"])), seed, Path(corpus))


def _stated(path: Path, held: Mapping[str, Any]) -> tuple[Stated, ...]:
    """Return the users' files that the recipe of a run needs."""
    with _named(path):
        return read_stated(held.get(PARTS, []))


def _table(path: Path) -> dict[str, Any]:
    """Return the table in a file of TOML or JSON."""
    if not os.path.exists(path):
        raise UserError(f"no file {path}{_NAME_ONE}")
    data, form = read_file(path), "TOML" if path.suffix == ".toml" else "JSON"
    if len(data) > _LARGEST_BYTES:
        raise UserError(f"{path} is no recipe: it has {len(data):,} bytes, and may have {_LARGEST_BYTES:,}")
    try:
        held = tomllib.loads(data.decode()) if form == "TOML" else json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else error
        raise UserError(f"{path} is not {form}: {what}") from None
    if not isinstance(held, dict):
        raise UserError(f"{path} is no recipe: it holds no object of settings")
    return held


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Put the file's name before the message of an error."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


@contextmanager
def _no_run(folder: Path) -> Iterator[None]:
    """Turn an error into one that says that the folder is no run's."""
    try:
        yield
    except UserError as error:
        why = str(error).removesuffix(_NAME_ONE)
        raise UserError(f"{folder} is not a run folder: {why}; name one that caddie train wrote") from None


def _checked(recipe: Recipe) -> Recipe:
    """Return the recipe; `UserError` if its name would lead out of the folder of runs or is no valid file name."""
    if len(recipe.name) > 100 or not recipe.name.isprintable() or {"/", "\\"} & set(recipe.name):
        raise UserError(f"name must be a short word without slashes, not {recipe.name[:100]!r}")
    return recipe


def _settings(held: object, table: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield path and value of every setting in a table; a table inside it without `kind` is read setting by setting.

    `held` is the base's value there. A mapping in a mapping is the diff of some layers, whose keys are paths.
    """
    for name, value in table.items():
        below = held.get(name) if isinstance(held, Mapping) else getattr(held, name, None)
        if not _is_diff(value):
            yield name, _spelled(value)
        elif isinstance(held, Mapping) and not isinstance(below, Config):
            diff = dict(_dotted(value))
            yield from ((f"{name}.{path}", one) for path, one in diff.items()) if below else [(name, diff)]
        elif isinstance(below, Config | Mapping):
            yield from ((f"{name}.{path}", one) for path, one in _settings(below, value))
        else:
            yield name, value


def _dotted(table: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for name, value in table.items():
        below = _dotted(value) if _is_diff(value) else None
        yield from ((f"{name}.{path}", one) for path, one in below) if below else [(name, _spelled(value))]


def _is_diff(value: object) -> bool:
    return isinstance(value, dict) and "kind" not in value


def _spelled(value: object) -> object:
    """Return the value that a text means on the command line, such as none, a variant with settings, or a schedule."""
    return parse_value(value) if isinstance(value, str) else value
