"""Verbs of contest submissions: submit writes a folder from runs, review checks one, ours or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from caddie.cli.options import FILE, options, path_argument, tell
from caddie.errors import count
from caddie.report.display import Display

_LACKING = {
    "three_seeds": "three seeds",
    "contest_validation_set": "a score on the contest's validation set",
    "train_under_600s": "training within 600 s",
    "eval_under_600s": "scoring within 600 s",
    "verified": "a verified artifact",
    "scored_again": "a second scoring, for which the run's text must be there",
}
"""Field of `compliance` to what a submission lacks that does not keep it."""


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=FILE)
@click.option("--out", metavar="DIR", required=True, type=FILE, help="New folder to write.")
@click.option("--author", required=True, help="Name of the author.")
@click.option("--github-id", required=True, help="The author's name on GitHub.")
@click.option("--name", help="Title; the recipe's name unless set.")
@click.option("--against", metavar="RECORD", help="Recipe with published scores, or a submission, to compare with.")
@click.option("--non-record", is_flag=True, help="Write for the track without a limit of time.")
@options("json", "quiet")
def submit(runs: tuple[Path, ...], out: Path, as_json: bool, quiet: bool, **about: Any) -> None:
    """Write a submission folder for the contest.

    RUN is the folder of a finished run; all are of one recipe, each has another seed. The folder gets README.md,
    submission.json, requirements.txt, a log for each seed and one script, train_gpt.py, that trains, packs and
    scores without caddie. Each artifact is scored again where the run's text is there; a result that says otherwise
    is refused.
    """
    from caddie.submit.runs import NON_RECORD
    from caddie.submit.submit import submit as write_submission

    with Display(quiet=quiet) as display:
        display.phase("submit")
        facts = write_submission(runs, out, progress=display, **about)
    p = f", p = {facts['p_value']:.3g} against {facts['comparison_baseline']}" if "p_value" in facts else ""
    why = ", because it was not run on eight H100" if facts["track"] == NON_RECORD and not about["non_record"] else ""
    total, code = facts["bytes_total"], facts["bytes_code"]
    lines = [
        f"{out}: {facts['val_bpb']:.5f} bits per byte, {count(len(facts['seeds']), 'seed')}{p}",
        f"{total:,} bytes: {total - code:,} of the file without its tokenizer, {code:,} of train_gpt.py",
        f"track {facts['track']}{why}",
    ]
    if lacking := [says for field, says in _LACKING.items() if not facts["compliance"][field]]:
        lines.append(f"for a record it lacks: {', '.join(lacking)}")
    tell({"folder": str(out), **facts}, as_json, "\n".join(lines))


@click.command()
@path_argument("folder", "FOLDER")
@click.option("--against", metavar="FOLDER", type=FILE, help="Folder of the submission to beat, for the p-value.")
@options("json")
def review(folder: Path, against: Path | None, as_json: bool) -> int:
    """Check FOLDER, a submission to the contest.

    Files, sizes, seconds, scores, seeds, data and script are checked; nothing in it is run. The exit status is 1 if
    there is an error.
    """
    from caddie.submit.review import review as check
    from caddie.submit.review import review_table

    result = check(folder, against)
    tell(result.as_dict(), as_json, "" if as_json else review_table(result))
    return 1 if result.count("error") else 0
