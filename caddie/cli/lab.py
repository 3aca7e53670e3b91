"""Verbs that read runs: report, compare, and board, which serves them to a browser on this machine."""

from contextlib import suppress
from pathlib import Path

import click

from caddie.cli.options import FILE, Finite, options, tell
from caddie.errors import UserError
from caddie.report.units import UNITS, Unit


@click.command()
@click.argument("places", metavar="RUN...", nargs=-1, required=True, type=FILE)
@click.option("--price", type=Finite(0), help="Price per GPU-hour, or machine-hour without a GPU, in any currency.")
@options("out", "json")
def report(places: tuple[Path, ...], price: float | None, out: Path | None, as_json: bool) -> None:
    """Regenerate the report of a run, of several, or of a study.

    RUN is a run folder, or the folder of a study's results. The report of several runs goes to --out, by
    default runs/report.
    """
    from caddie.lab.report import write_runs_report, write_study_report
    from caddie.lab.rows import RESULTS
    from caddie.report.page import write_report

    if out and len(places) == 1:
        raise UserError("--out is for several runs; the report of one, or of a study, stands in its own folder")
    if len(places) > 1:
        written = write_runs_report(places, out or Path("runs/report"), price=price)
    elif (places[0] / RESULTS).exists():
        written = write_study_report(places[0], price=price)
    elif price is not None:
        raise UserError("--price is for several runs or a study; leave it out")
    else:
        written = [write_report(places[0])]
    tell({"report": str(written[0]), "files": list(map(str, written))}, as_json, "\n".join(map(str, written)))


class TwoGroups(click.Command):
    """Command whose `--against` takes every path up to the next option, as a shell's `*` gives them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeat the option before each of its paths."""
        spread: list[str] = []
        for word in args:
            for argument in word.split("=", 1) if word.startswith("--against=") else [word]:
                if spread[-2:-1] == ["--against"] and not argument.startswith("-"):
                    spread.append("--against")
                spread.append(argument)
        return super().parse_args(ctx, spread)


@click.command(cls=TwoGroups)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=FILE)
@click.option(
    "--against",
    metavar="RUN...",
    multiple=True,
    required=True,
    type=FILE,
    help="Runs of the recipe to beat, A: all paths up to the next option.",
)
@click.option("--by", type=Finite(0), default=0.0, show_default=True, help="Least improvement of B, in --unit.")
@click.option(
    "--unit", type=click.Choice(UNITS), default=UNITS[0], show_default=True, help="Unit of --by and of the output."
)
@options("json")
def compare(runs: tuple[Path, ...], against: tuple[Path, ...], by: float, unit: Unit, as_json: bool) -> None:
    """Test whether recipe B beats recipe A.

    RUN are runs of B, and --against takes runs of A, with several seeds each.

    RUN is a run folder or its result.json, as in: caddie compare runs/b-* --against runs/a-*

    The test is paired where both groups have the same seeds, else Welch's.
    """
    from caddie.lab.compare import compare as compare_runs
    from caddie.lab.compare import summary

    facts = compare_runs(runs, against, by=by, unit=unit)
    tell(facts, as_json, summary(facts))


@click.command()
@click.argument("folder", metavar="[FOLDER]", default="runs", type=FILE)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8765, show_default=True, help="Port to listen on; 0 for any."
)
@options("json")
def board(folder: Path, port: int, as_json: bool) -> None:
    """Show the runs below FOLDER live in a browser. FOLDER is runs by default.

    Serves this machine only and writes nothing. Ctrl-C ends it.
    """
    from caddie.board.server import Board

    with Board(folder, port) as served, suppress(KeyboardInterrupt):
        facts = {"url": served.url, "port": served.server_port, "folder": str(folder)}
        tell(facts, as_json, f"{served.url} shows {folder}; Ctrl-C ends it")
        served.serve_forever()
