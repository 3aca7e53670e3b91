"""Options and arguments that several verbs share, and the printing of results."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from caddie.config import assignments
from caddie.errors import UserError
from caddie.share.track import TRACKERS

if TYPE_CHECKING:
    from caddie.pack.artifact import Artifact
    from caddie.recipes.recipe import Recipe

Verb = Callable[..., Any]
Decorator = Callable[[Verb], Verb]


class _Path(click.Path):
    """Path that must not be empty; click's own takes an empty one (an unset variable) for the working directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("it is empty; name a file or folder.", param, ctx)
        return super().convert(value, param, ctx)


FILE = _Path(path_type=Path)
"""Type of an option or argument that names a file or folder."""
FOLDER = _Path(path_type=Path, readable=False)
PATH = _Path(readable=False)  # a string, because `hf:NAME` is no path of this machine


class _Scorer(click.types.StringParamType):
    """Scorer of a user, FILE.py:NAME, or known_bad:NAME; checked before an artifact is loaded, which takes seconds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from caddie.config.userfile import read_source, split_name

        if not value:
            self.fail("it is empty; name a class in a Python file, as FILE.py:NAME.", param, ctx)
        prefix, _, example = value.partition(":")
        if prefix != "known_bad":
            read_source(split_name(value)[0])
        elif ctx is not None and ctx.info_name != "verify":
            self.fail("known_bad:NAME is for verify alone; name a class of your own, as FILE.py:NAME.", param, ctx)
        else:
            from caddie.verify.known_bad import known_bad

            known_bad(example)
        return str(value)


SCORER = _Scorer()


class Finite(click.FloatRange):
    """Range of finite numbers; click's own lets NaN through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def complete_recipe(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Return the recipes that begin as typed, with NAME_mini once NAME is typed; if there are none, paths."""
    from caddie.recipes.names import names

    known = [found for name in names() for found in ((name, f"{name}_mini") if name in typed else (name,))]
    begun = [CompletionItem(name) for name in known if name.startswith(typed)]
    return begun or FILE.shell_complete(context, parameter, typed)


def recipe_argument(name: str, **settings: Any) -> Decorator:
    """Return an argument that names a recipe."""
    return click.argument(name, shell_complete=complete_recipe, **settings)


def options(*names: str) -> Decorator:
    """Add options by name; each means the same for every verb."""
    known = {
        "data": click.option(
            "--data",
            metavar="PATH",
            type=PATH,
            help="Text, JSON lines, Parquet, a folder of them, hf:NAME[:SPLIT], shards, or a corpus; by default"
            " Python's own library.",
        ),
        "held_out_text": click.option(
            "--data",
            metavar="PATH",
            type=PATH,
            help="Text or corpus, as for caddie run; by default that of the run folder that ARTIFACT lies in.",
        ),
        "seed": click.option(
            "--seed", type=click.IntRange(0, 2**32 - 1), default=1337, show_default=True, help="Random seed."
        ),
        "seconds": click.option("--seconds", type=float, help="Training seconds; short for train.seconds=."),
        "out": click.option("--out", metavar="DIR", type=FOLDER, help="Folder to write to."),
        "gpus": click.option(
            "--gpus",
            type=click.IntRange(1),
            default=1,
            help="Number of processes, each on its own GPU if there are any.",
        ),
        "json": click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else."),
        "parts": click.option(
            "--parts",
            metavar="FILE.py",
            multiple=True,
            type=FILE,
            help="Python file that the artifact or run needs. It is executed, so read it first. May be repeated.",
        ),
        "track": click.option(
            "--track", type=click.Choice(TRACKERS), help="Send the log to a tracker while the run goes on."
        ),
        "audit_seconds": click.option(
            "--audit-seconds",
            type=Finite(min=0, min_open=True),
            metavar="N",
            help="Seconds per search for leaks in your own scorer; longer searches find smaller leaks.",
        ),
        "quiet": click.option("--quiet", is_flag=True, help="No progress on standard error."),
    }

    return all_of(*(known[name] for name in names))


def all_of(*decorators: Decorator) -> Decorator:
    """Return one decorator that adds the options of several, in this order."""
    return lambda verb: reduce(lambda inner, decorator: decorator(inner), reversed(decorators), verb)


def written_out(setting: str) -> str:
    """Return `cap=N`, which every verb takes, as `pack.cap_bytes=N`, and any other setting as it is."""
    return f"pack.cap_bytes{setting[3:]}" if setting.startswith("cap=") else setting


def settings_option(name: str, metavar: str, required: bool = False) -> Decorator:
    """Return the argument of settings, PATH=VALUE, with short names written out."""

    def write_out(_: click.Context, __: click.Parameter, settings: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(written_out, settings))

    return click.argument(name, metavar=metavar, nargs=-1, required=required, callback=write_out)


settings_argument = settings_option("settings", "[PATH=VALUE]...")


def is_setting(word: str) -> bool:
    """Return True if a word in place of a recipe is PATH=VALUE, not a file or folder whose name holds a `=`."""
    from caddie.recipes.recipe_file import recipe_path

    path = recipe_path(word)
    return "=" in word and ".py:" not in word and (path is None or not path.exists())


def named_recipe(
    name: str, settings: tuple[str, ...], seconds: float | None = None, parts: Sequence[Path] = ()
) -> Recipe:
    """Return the recipe of this name with its settings changed; `parts` are users' files that a run's recipe needs."""
    from caddie.recipes.catalog import find, supply_parts

    if is_setting(name):
        verb = click.get_current_context().info_name
        raise UserError(f"{name} is a setting; the recipe comes first, as in: caddie {verb} tiny {name}")
    supply_parts([name], parts)
    diff = assignments(settings)
    if seconds is not None:
        if "train.seconds" in diff:
            raise UserError("train.seconds is set twice, by --seconds too; leave one out")
        diff["train.seconds"] = seconds
    return find(name).but(diff)


def load_artifact(place: Path, parts: Sequence[Path] = ()) -> Artifact:
    """Return the artifact, with its model on this process's device; `parts` are the users' files that it needs.

    `place` is a file, a run folder, or a model on the hub (`hf:USER/NAME[@REVISION]`).
    """
    from caddie.pack import artifact as artifacts
    from caddie.runtime import distributed
    from caddie.share.pull import artifact_file

    return artifacts.load(artifact_file(place), distributed.local_device(), parts)


def tell(facts: dict[str, Any], as_json: bool, text: str) -> None:
    """Print a result: as one JSON object, or as text for people."""
    if sys.stdout is None:  # as after `>&-`: print would do nothing
        raise UserError("standard output is closed, so the result cannot be printed")
    print(json.dumps(facts) if as_json else text, flush=True)
