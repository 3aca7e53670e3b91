"""Verbs that hand a run to others: push, export, track, lm-eval, submit; and review, which checks submissions."""

import sys
import threading
from pathlib import Path
from typing import Any

import click

from caddie.cli.options import FILE, load_artifact, options, tell
from caddie.errors import UserError, count
from caddie.report.display import Display
from caddie.runtime.interrupt import ends_on_interrupt, when_input_ends
from caddie.share.track import TRACKERS

_LACKING = {
    "three_seeds": "three seeds",
    "contest_validation_set": "a score on the contest's validation set",
    "train_under_600s": "training within 600 s",
    "eval_under_600s": "scoring within 600 s",
    "verified": "a verified artifact",
    "scored_again": "a second scoring, for which the run's text must be there",
}
"""Field of `compliance` to the words for what is missing if it is false."""


@click.command()
@click.argument("run", type=FILE)
@click.argument("place", metavar="hf:USER/NAME")
@click.option("--license", "license_name", metavar="ID", help="Licence by its hub identifier, such as mit.")
@click.option("--private", is_flag=True, help="Push only to a private repository; create it if missing.")
@options("json", "quiet")
@ends_on_interrupt
def push(run: Path, place: str, license_name: str | None, private: bool, as_json: bool, quiet: bool) -> None:
    """Publish the finished run RUN on the Hugging Face hub.

    RUN is a run folder. One commit holds artifact, result, page, recipe and a model card. The token is that of
    HF_TOKEN or of `hf auth login`. After that every ARTIFACT argument takes hf:USER/NAME or hf:USER/NAME@REVISION.
    """
    from caddie.share.push import push as publish

    bars = not quiet and sys.stderr is not None and sys.stderr.isatty()
    facts = publish(run, place, license_name=license_name, private=private, bars=bars)
    sizes = ", ".join(f"{name} {size:,}" for name, size in facts["files"].items())
    lines = [facts["url"], f"bytes: {sizes}", f"check it with: caddie verify {place}"]
    tell(facts, as_json, "\n".join(lines))


@click.command()
@click.argument("artifact", type=FILE)
@click.option("--to", "form", metavar="FORMAT", required=True, help="html, safetensors or transformers.")
@click.option("--out", metavar="PATH", type=FILE, help="Path, else NAME.html or NAME-FORMAT beside ARTIFACT.")
@options("parts", "json")
@ends_on_interrupt
def export(artifact: Path, form: str, out: Path | None, parts: tuple[Path, ...], as_json: bool) -> None:
    """Write ARTIFACT for other programs.

    ARTIFACT is a file, the folder of a run, or hf:USER/NAME[@REVISION]; the last is exported to the working
    directory. html is a page with the model inside, which runs in a browser without a network; safetensors is a
    folder of dequantized weights by name, with their settings; transformers is a folder that AutoModelForCausalLM and
    AutoTokenizer load without caddie, given trust_remote_code=True, which runs the code in that folder.
    """
    from caddie.share.export import export as write

    written = write(artifact, form, out, parts)
    tell({"path": str(written), "format": form}, as_json, str(written))


@click.command()
@click.argument("folder", metavar="RUN", type=FILE)
@click.option("--to", "kind", type=click.Choice(TRACKERS), required=True, help="The tracker.")
@click.option("--follow", is_flag=True, hidden=True, help="Follow a run until standard input ends.")
@options("json")
@ends_on_interrupt
def track(folder: Path, kind: str, follow: bool, as_json: bool) -> None:
    """Send the run RUN to a tracker: log, recipe and result.

    RUN is a run folder. The tracker's library must be installed. `caddie run --track` does
    the same while a run goes on.
    """
    from caddie.share.track import open_tracker, send

    end = threading.Event()
    if follow:
        when_input_ends(end.set)
    else:
        end.set()
    tracker = open_tracker(kind, folder, end)
    if follow:
        print(tracker.place, flush=True)
    events = send(kind, tracker, folder, end)
    if not follow:
        facts = {"tracker": kind, "events": events, "place": tracker.place}
        tell(facts, as_json, f"{events:,} events of {folder} sent; look with: {tracker.place}")


@click.command("lm-eval", context_settings={"ignore_unknown_options": True})
@click.argument("artifact", type=FILE)
@click.argument("arguments", metavar="[LM-EVAL OPTION]...", nargs=-1, type=click.UNPROCESSED)
@options("parts")
def lm_eval(artifact: Path, arguments: tuple[str, ...], parts: tuple[Path, ...]) -> None:
    """Score ARTIFACT on tasks of EleutherAI's lm-evaluation-harness.

    ARTIFACT is a file, the folder of a run, or hf:USER/NAME[@REVISION]. All options are those of lm-eval, such as
    --tasks, --limit and --output_path; they come after ARTIFACT. The model type is registered as `caddie` by importing
    caddie.share.lm_eval_model.
    """
    path = load_artifact(artifact, parts).path  # first, as the harness takes long to report a bad artifact
    try:
        from lm_eval.__main__ import cli_evaluate

        from caddie.share.lm_eval_model import NAME
    except ImportError:
        raise UserError("this needs lm-evaluation-harness; run: pip install lm-eval datasets") from None
    sys.argv = ["lm-eval", "run", "--model", NAME, "--model_args", f"artifact={path}", *arguments]
    cli_evaluate()


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=FILE)
@click.option("--out", metavar="DIR", required=True, type=FILE, help="New folder to write.")
@click.option("--author", required=True, help="Name of the author.")
@click.option("--github-id", required=True, help="The author's name on GitHub.")
@click.option("--name", help="Title; the recipe's name unless set.")
@click.option("--against", metavar="RECORD", help="Recipe with published scores, or a submission, to compare with.")
@click.option("--non-record", is_flag=True, help="Write for the contest's track without a time limit.")
@options("json", "quiet")
def submit(runs: tuple[Path, ...], out: Path, as_json: bool, quiet: bool, **about: Any) -> None:
    """Write a submission folder for the contest.

    RUN is the folder of a finished run; all runs have the same recipe and different seeds. The folder gets README.md,
    submission.json, requirements.txt, a log for each seed and one script, train_gpt.py, that trains, packs and
    scores without caddie. Each artifact is scored again where the run's text is there; if the new score
    differs from that of result.json, nothing is written.
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
@click.argument("folder", metavar="FOLDER", type=FILE)
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
