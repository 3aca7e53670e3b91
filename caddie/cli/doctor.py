"""Doctor verb: check a machine before a run."""

from typing import Any

import click

from caddie.cli.options import Finite, is_setting, options, recipe_argument, settings_argument, tell, written_out
from caddie.errors import CheckFailed
from caddie.report.display import Display


@click.command()
@recipe_argument("recipe", default="tiny")
@settings_argument
@options("seconds", "gpus")
@click.option("--price", type=Finite(0), help="Price of this machine per hour, in any currency, to estimate the cost.")
@click.option("--quick", is_flag=True, help="Skip timing; estimate from a published speed where one is known.")
@options("parts", "json", "quiet")
def doctor(
    recipe: str, settings: tuple[str, ...], seconds: float | None, gpus: int, as_json: bool, quiet: bool, **how: Any
) -> int:
    """Check this machine and estimate whether RECIPE fits it. RECIPE is tiny by default.

    Takes a recipe and its settings as `caddie run` does. Changes nothing. The exit status is 0 for go and 1 for no-go.
    """
    from caddie.doctor import examine

    if is_setting(recipe):
        recipe, settings = "tiny", (written_out(recipe), *settings)
    if seconds is not None:
        settings = (*settings, f"train.seconds={seconds!r}")
    with Display(quiet=quiet) as display:
        found = examine(recipe, settings, world=gpus, progress=display, **how)
    tell(found.to_json(), as_json, found.text())
    if not found.go and as_json:
        raise CheckFailed(found.verdict())
    return 0 if found.go else 1  # the text ends with the verdict
