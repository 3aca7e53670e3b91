"""The verb that lets lm-evaluation-harness score an artifact: lm-eval."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from caddie.cli.options import load_artifact, options, path_argument
from caddie.errors import UserError


@click.command("lm-eval", context_settings={"ignore_unknown_options": True})
@path_argument("artifact")
@click.argument("arguments", metavar="[LM-EVAL OPTION]...", nargs=-1, type=click.UNPROCESSED)
@options("parts")
def lm_eval(artifact: Path, arguments: tuple[str, ...], parts: tuple[Path, ...]) -> int:
    """Score ARTIFACT on tasks of EleutherAI's lm-evaluation-harness.

    ARTIFACT is a file, the folder of a run, or hf:USER/NAME[@REVISION]. All options are those of lm-eval, such as
    --tasks, --limit and --output_path; they come after ARTIFACT. The model type is registered as `caddie` by importing
    caddie.share.lm_eval_model.
    """
    path = load_artifact(artifact, parts).path  # the harness takes long to say what is wrong with it
    try:
        from lm_eval.__main__ import cli_evaluate

        from caddie.share.lm_eval_model import NAME
    except ImportError:
        raise UserError("this needs lm-evaluation-harness; run: pip install 'caddie[lm-eval]'") from None
    sys.argv = ["lm-eval", "run", "--model", NAME, "--model_args", f"artifact={path}", *arguments]
    cli_evaluate()
    return 0
