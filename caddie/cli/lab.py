"""Verbs that read finished runs: report, compare."""

from __future__ import annotations

from pathlib import Path

import click

from caddie.cli.options import options, path_argument, tell
from caddie.units import UNITS, Unit


@click.command()
@path_argument("folder", metavar="RUN")
@options("json")
def report(folder: Path, as_json: bool) -> int:
    """Write the report page of the run folder RUN anew."""
    from caddie.report import write_report

    path = write_report(folder)
    tell({"report": str(path)}, as_json, str(path))
    return 0


class TwoGroups(click.Command):
    """A command whose `--against` takes every path up to the next option, as a shell's `*` gives them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeat the option before each of its paths."""
        spread: list[str] = []
        for argument in args:
            if spread[-2:-1] == ["--against"] and not argument.startswith("-"):
                spread.append("--against")
            spread.append(argument)
        return super().parse_args(ctx, spread)


@click.command(cls=TwoGroups)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--against",
    metavar="RUN...",
    multiple=True,
    required=True,
    type=click.Path(path_type=Path),
    help="Runs of the recipe to beat, A: all paths up to the next option.",
)
@click.option("--by", type=click.FloatRange(0), default=0.0, show_default=True, help="How much better B must be.")
@click.option(
    "--unit", type=click.Choice(UNITS), default=UNITS[0], show_default=True, help="Unit of --by and of what is printed."
)
@options("json")
def compare(runs: tuple[Path, ...], against: tuple[Path, ...], by: float, unit: Unit, as_json: bool) -> int:
    """Tell whether recipe B is better than recipe A, from runs of several seeds each.

    RUN is a run folder or its result.json, as in: caddie compare runs/b-* --against runs/a-*

    The test is paired where both groups have the same seeds, else Welch's.
    """
    from caddie.comparison import compare as compare_runs
    from caddie.comparison import summary

    facts = compare_runs(runs, against, by=by, unit=unit)
    tell(facts, as_json, summary(facts))
    return 0
