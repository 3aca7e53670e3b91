"""Command line: verbs, their options, and one line for every mistake."""

import sys
from io import TextIOWrapper
from typing import NoReturn

import click

from caddie.cli import artifact, doctor, lab, share, study
from caddie.cli import catalog as catalog
from caddie.cli import run as line
from caddie.cli.exits import end
from caddie.errors import suggest

# Modules that need torch are imported inside the verbs, so that --help answers at once.

ELSEWHERE = {
    "board": ("dashboard", "tensorboard", "ui"),
    "data": ("prepare", "preprocess", "tokenize"),
    "export": ("convert",),
    "pack": ("quantize",),
    "sample": ("chat", "generate", "infer", "inference"),
    "score": ("eval", "evaluate", "test"),
    "train": ("finetune", "fit", "pretrain"),
}
"""Verb to its names in other programs."""


class _Verbs(click.Group):
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]
        if word in self.commands or not word[:1].isalpha():
            return super().resolve_command(ctx, args)
        meant = [verb for verb, names in ELSEWHERE.items() if word.lower() in names]
        listed = [name for name, command in self.commands.items() if not command.hidden]
        hint = f" (did you mean {meant[0]}?)" if meant else suggest(word, listed, most=2)
        raise click.UsageError(f"no command {word}{hint}", ctx)


@click.group(
    cls=_Verbs,
    commands=[
        *[line.run, line.train, line.pack, artifact.verify, artifact.score, line.replay],
        *[artifact.sample, artifact.compress, artifact.decompress],
        *[study.study, study.ablate, study.sweep, study.trial],
        *[lab.report, lab.compare, share.submit, share.review, share.push, share.export, share.track],
        *[share.lm_eval, lab.board, doctor.doctor],
        *[catalog.data, catalog.recipes, catalog.techniques, catalog.diff],
    ],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="caddie")
def app() -> None:
    """Train a language model, pack it into one file of limited size, and score that file.

    Change settings with PATH=VALUE, as in: caddie run tiny model.depth=6 train.seconds=120
    """


def main() -> NoReturn:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # print a replacement for characters that the encoding lacks
            stream.reconfigure(errors="replace")
    end(lambda: app.main(sys.argv[1:] or ["--help"], "caddie", standalone_mode=False))
