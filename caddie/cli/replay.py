"""The verb replay."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from caddie.cli.exits import resume_hint
from caddie.cli.options import options, path_argument, tell
from caddie.errors import CheckFailed


@click.command()
@path_argument("folder", metavar="RUN")
@click.option("--gpus", type=click.IntRange(1), help="Processes, one for each GPU if any; by default those of RUN.")
@click.option("--data", metavar="PATH", help="The text of RUN or its corpus; by default where RUN found it.")
@options("parts", "out", "json", "quiet")
def replay(
    folder: Path,
    gpus: int | None,
    data: str | None,
    parts: tuple[Path, ...],
    out: str | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Repeat the finished run RUN, and compare the two.

    RUN is a run folder. Settings, seed and text are those of RUN/recipe.json; another text is refused. All files go
    to RUN-replay, unless --out names another folder. Exit status 1 if weights or score differ where they must not:
    on a CPU, with a budget of steps, and the same program, libraries, machine and processes.
    """
    from caddie.report.display import Display
    from caddie.run.replay import broken_promise, read_finished, replay_folder, summary
    from caddie.run.replay import replay as do_again
    from caddie.run.run import check_recipe
    from caddie.runtime import distributed

    first = read_finished(folder, parts)
    place, world = replay_folder(folder, Path(out) if out else None), gpus or first.count("world")
    check_recipe(first.start.recipe, distributed.world_size(world))
    if world > 1 and not distributed.under_torchrun():
        return distributed.launch(world, sys.argv[1:])
    typed = f"{distributed.typed_program()} {shlex.join(sys.argv[1:])}"
    with distributed.join() as ranks, Display(quiet=quiet or not ranks.first_here) as display:
        with resume_hint(typed, place, named=True):
            facts = do_again(first, place, data, ranks, display, typed)
    if facts is None:
        return 0
    tell(facts, as_json, summary(facts))
    if broken := broken_promise(facts):
        raise CheckFailed(broken)
    return 0
