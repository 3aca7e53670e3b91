"""The verb that checks the folder of a contest submission: review."""

from __future__ import annotations

from pathlib import Path

import click

from caddie.cli.options import options, path_argument, tell


@click.command()
@path_argument("folder", "FOLDER")
@click.option(
    "--against",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Folder of the submission to beat, for the p-value.",
)
@options("json")
def review(folder: Path, against: Path | None, as_json: bool) -> int:
    """Check FOLDER, a submission to the contest: files, sizes, seconds, scores, seeds, data and script.

    Nothing in it is run. The exit status is 1 if there is an error.
    """
    from caddie.submit.review import review as check
    from caddie.submit.review import review_table

    result = check(folder, against)
    tell(result.as_dict(), as_json, "" if as_json else review_table(result))
    return 1 if result.count("error") else 0
