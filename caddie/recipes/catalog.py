"""Finding recipes: caddie's own, their twins for two cores, and those of a user's file."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from caddie.config.userfile import UserFile, execute, read_source, supply
from caddie.errors import UserError, suggest
from caddie.recipes import recipe_file
from caddie.recipes.names import ALIASES, FILES, tables
from caddie.recipes.published import published, rows, speeds
from caddie.recipes.recipe import Recipe
from caddie.recipes.recipe_file import RunStart, changed, read_recipe, recipe_path
from caddie.recipes.shrink import SCALES, mini, scale
from caddie.report.run_files import PARTS


def _based() -> dict[str, Recipe]:
    """Return every recipe of the tables; each table stands after the one that it is based on."""
    found: dict[str, Recipe] = {}
    for name, table in ((name, table) for file in FILES for name, table in tables(file).items()):
        base = found[table["base"]] if "base" in table else Recipe()
        found[name] = changed(base, table, name=name, public=published().get(name, ()))
    return found


_SHIPPED = _based()
_BY_ALIAS = {alias: _SHIPPED[name] for alias, name in ALIASES.items()}


def shipped() -> dict[str, Recipe]:
    """Return every recipe that caddie ships, by name."""
    return dict(_SHIPPED)


def _file(name: str) -> Path | None:
    """Return the recipe file that a name means; None for a shipped recipe, which goes before a folder of its name."""
    return None if name in _SHIPPED else recipe_path(name)


def _beside(file: Path, base: str) -> str:
    """Return the base that a recipe file names: a path beside that file if there is one, else the name itself."""
    beside = file.parent / base.partition(":")[0]
    return str(file.parent / base) if base not in _SHIPPED and beside.exists() else base


def find(name: str | Path, within: tuple[Path, ...] = ()) -> Recipe:
    """Return a recipe by its name or alias; its twins are `NAME_mini` and `NAME_scale`, a user's own `FILE.py:NAME`.

    A file of TOML or JSON and the folder of a run are recipes as well (`recipe_file.py`). The experiments of public
    system 000 are found by their labels, as `public_000:LABEL`. `within` are the files that led here by their `base`.
    Raises `UserError` for an unknown name.
    """
    if not isinstance(name, str | Path):
        raise UserError(f"a recipe is found by its name or file, not by {name!r}")
    name = str(name)
    if (file := _file(name)) is not None:
        if (place := file.absolute()) in within:
            raise UserError(f"{file} is based on itself")
        return read_recipe(file, lambda base: find(_beside(file, base), (*within, place)))
    path, colon, attribute = name.rpartition(":")
    if path == "seed_000":
        raise UserError(f"seed_000 is now public_000: write public_000:{attribute}")
    if path == "public_000":
        base = _SHIPPED["parallel_muon"]
        outcomes = {label: outcome for label, outcome, *_ in rows("public_000_experiments.txt")}
        known = {
            label: changed(base, table, name=label, base=base.name, why=outcomes[label], public=())
            for label, table in tables("public_000_experiments").items()
        }
    elif colon:
        defined = execute(Path(path))
        known = {label: one.but(name=label) for label, one in defined.items() if isinstance(one, Recipe)}
    else:
        known = _SHIPPED | _BY_ALIAS
    if attribute in known:
        return known[attribute]
    full, _, suffix = attribute.rpartition("_")
    twins = ("mini", *SCALES)
    if full in known and suffix in twins:
        return mini(known[full]) if suffix == "mini" else scale(known[full], suffix, public_steps(known[full]))
    if not name:
        raise UserError("the name of the recipe is empty; `caddie recipes` lists them")
    if not attribute:
        raise UserError(f"{name} names no recipe; write its name behind the colon, as {path}:NAME")
    hint = suggest(attribute, [f"{full}_{twin}" for twin in twins] if full in known else known)
    if colon:
        raise UserError(f"{path} has no recipe {attribute}{hint}")
    if name.endswith(".py"):
        raise UserError(f"{name} names a file; name a recipe in it, as {name}:NAME")
    raise UserError(f"no recipe {name}{hint}; `caddie recipes` lists them, FILE.toml and FILE.py:NAME are yours")


def find_shipped(name: str) -> Recipe | None:
    """Return a recipe that caddie ships, by name, alias or twin; None for any other name. No file is read or run."""
    if _file(name) is not None or name.rpartition(":")[0] not in ("", "public_000"):
        return None
    with suppress(UserError):
        return find(name)
    return None


def find_base(name: str) -> Recipe | None:
    """Return the base of the recipe of this name; None if it has no base.

    A whole recipe in a file, such as a run's, may be a stranger's. The base that it names must be a shipped one:
    otherwise a file of the stranger's choice could be run. Raises `UserError` if it is not.
    """
    file, base = _file(name), find(name).base  # whose errors name the file
    if file and (stated := recipe_file.base_in(file)):
        return find(_beside(file, stated))
    if not base or not file:
        return find(base) if base else None
    if found := find_shipped(base):
        return found
    raise UserError(f"{name} is based on {base}, which caddie does not ship; name both, as in: caddie diff BASE {name}")


def public_steps(recipe: Recipe) -> int:
    """Return the steps of a recipe's public runs, or of its nearest base that has public runs.

    A recipe without a time budget has its own `train.steps`. Raises `UserError` if there are no public runs.
    """
    if recipe.train.seconds is None and recipe.train.steps:
        return recipe.train.steps
    one: Recipe | None = recipe
    while one is not None:
        if speed := speeds().get(one.name):
            return speed.steps
        one = _SHIPPED.get(one.base or "")
    raise UserError(f"{recipe.name} is based on no recipe with public runs, whose steps it could make; set train.steps")


def begun_from(name: str) -> RunStart | None:
    """Return recipe, seed and corpus of a run, if `name` is its folder or `recipe.json`; None for any other recipe."""
    return recipe_file.begun_from(file) if (file := _file(name)) else None


def supply_parts(names: Sequence[str], parts: Sequence[Path]) -> None:
    """Run the users' files that the recipes of runs need, so that `find` knows their classes; `UserError` for others.

    Each name stands for a run's folder or its `recipe.json`. Without `parts` nothing is done.
    """
    left = [UserFile(path, read_source(path)) for path in parts]
    for name in names if parts else ():
        file = _file(name)
        stated = recipe_file.stated_parts(file) if file else ()
        own = [one for one in left if name == names[-1] or one.stated.sha256 in {need.sha256 for need in stated}]
        left = [one for one in left if one not in own]
        folder = file.parent if file else Path(name)
        supply(stated, [one.path for one in own], folder, folder / PARTS)
