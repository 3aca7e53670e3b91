"""Verbs of a run: run, train, replay and pack."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from caddie.cli.exits import judge, resume_hint, typed_command
from caddie.cli.options import FILE, PATH, named_recipe, options, recipe_argument, settings_argument, tell
from caddie.config import assignments, parse_assignment
from caddie.config.renamed import modernized_path
from caddie.config.userfile import user_files
from caddie.errors import CheckFailed, UserError, count
from caddie.files import check_new_file, check_writable
from caddie.report.display import Display
from caddie.report.read import known_number, pick, read_json
from caddie.report.run_files import ARTIFACT, PARTS, REPORT, RESULT
from caddie.report.tables import pack_table, result_table
from caddie.runtime.interrupt import ends_on_interrupt
from caddie.runtime.progress import Phases

if TYPE_CHECKING:
    from caddie.recipes.recipe import Recipe
    from caddie.runtime.distributed import Ranks


def trains(verb: Callable[..., tuple[dict[str, Any], str] | None]) -> click.Command:
    """Make the command of a verb that trains, with its options, processes and exit status.

    The verb takes the arguments of `caddie.run.run.run`. It returns its result as JSON values and as text, or None in
    all processes but the first.
    """

    @click.command(verb.__name__, help=verb.__doc__)
    @recipe_argument("recipe")
    @settings_argument
    @options("data", "parts", "seed", "seconds", "out", "gpus", "track", "json", "quiet")
    def command(
        recipe: str,
        settings: tuple[str, ...],
        data: str | None,
        parts: tuple[Path, ...],
        seed: int,
        seconds: float | None,
        out: Path | None,
        gpus: int,
        track: str | None,
        as_json: bool,
        quiet: bool,
    ) -> int:
        from caddie.recipes.catalog import begun_from
        from caddie.run.resolve_corpus import check_text_named
        from caddie.run.run import check_recipe
        from caddie.run.run_folder import run_folder
        from caddie.runtime import distributed
        from caddie.share.track import check_installed, tracked

        chosen = named_recipe(recipe, settings, seconds, parts)
        if (begun := begun_from(recipe)) is not None:
            unset = click.get_current_context().get_parameter_source("seed") is ParameterSource.DEFAULT
            seed, data = begun.seed if unset else seed, data or str(begun.corpus)
        check_recipe(chosen, distributed.world_size(gpus))
        check_text_named(chosen, data)
        track = track if distributed.is_first() else None
        if track:
            check_installed(track)
        if gpus > 1 and not distributed.under_torchrun():
            if distributed.local_device().type == "cpu" and gpus > (cores := len(distributed.allowed_cores())):
                Display(quiet=quiet).note(f"no GPU here: {gpus} processes on {count(cores, 'core')} of a CPU")
            return distributed.launch(gpus, sys.argv[1:])
        folder = out or run_folder(chosen, seed)
        typed = typed_command()
        again = typed if out else f"{typed} --out {shlex.quote(str(folder))}"
        with (
            distributed.join() as ranks,
            resume_hint(again) as hint,
            Display(quiet=quiet or not ranks.first_here) as display,
        ):
            if not ranks.first:
                display.note(f"process {ranks.rank} of {ranks.world}: process 0 writes the run folder and the result")
            with tracked(track, folder, display):
                job = {"recipe": chosen, "source": data, "seed": seed, "folder": folder, "command": typed}
                result = ends_on_interrupt(verb, hint)(**job, ranks=ranks, progress=display)
        if result is None:
            return 0
        facts, text = result
        tell(facts, as_json, text)
        return judge(facts.get("checks", []))

    return command


@trains
def run(folder: Path, **job: Any) -> tuple[dict[str, Any], str] | None:
    """Train, pack, score and verify RECIPE, and write a report.

    RECIPE is one that `caddie recipes` lists, FILE.toml, FILE.json, FILE.py:NAME, or the folder of a run, whose seed
    and text are taken as well unless others are given. All files go to runs/NAME-KEY-sSEED, unless --out names
    another folder; KEY is a hash of the settings. The same command continues a run that was interrupted, and
    shows the result of a finished one.
    """
    from caddie.run.run import run as run_recipe

    finished = job["ranks"].any(os.path.exists(folder / RESULT))  # if one process sees it, so that all decide the same
    result = _finished(folder, **job) if finished else run_recipe(folder=folder, **job)
    return ({"folder": str(folder), **result}, result_table(result, folder / REPORT)) if result else None


def _finished(
    folder: Path, recipe: Recipe, source: str | None, seed: int, ranks: Ranks, progress: Display, **_: Any
) -> dict[str, Any] | None:
    """Return the result of the finished run in a folder, in the first process; `UserError` if it is another run."""
    from caddie.report.page import write_report
    from caddie.run.resolve_corpus import open_corpus
    from caddie.run.run_folder import finished_result

    if not ranks.first:
        return None
    result = finished_result(folder, recipe, seed, open_corpus(recipe, source, progress))
    if not (folder / REPORT).exists():  # the run was killed after it wrote its result
        write_report(folder)
    progress.note(f"{folder} holds this run, finished before; its result:")
    return result


@trains
def train(
    recipe: Recipe, source: str | None, seed: int, folder: Path, ranks: Ranks, progress: Display, **_: Any
) -> tuple[dict[str, Any], str] | None:
    """Train RECIPE and keep its weights. `caddie pack` goes on from there.

    RECIPE is one that `caddie recipes` lists, FILE.toml, FILE.json, FILE.py:NAME, or the folder of a run, whose seed
    and text are taken as well unless others are given. All files go to runs/NAME-KEY-sSEED, unless --out names
    another folder.
    """
    from caddie.run.dead_settings import check_settings_matter
    from caddie.run.resolve_corpus import open_corpus
    from caddie.run.run import train_recipe
    from caddie.run.run_folder import hold_folder

    with hold_folder(folder, recipe, ranks, progress, alone=True) as phases:
        with phases("prepare"):
            corpus = open_corpus(recipe, source, progress, ranks=ranks)
            check_settings_matter(recipe)
        phases.begin("train")
        trained = train_recipe(recipe, corpus, folder, seed, ranks, progress)
    if not ranks.first:
        return None
    kept = [word for file in user_files(recipe) for word in ("--parts", str(folder / PARTS / file.path.name))]
    facts = {"folder": str(folder), "steps": trained.steps, "tokens": trained.tokens, "loss": trained.final_loss}
    hint = shlex.join(["caddie", "pack", str(folder), *kept])
    return facts, f"{count(trained.steps, 'step')}; weights in {folder}; next: {hint}"


@click.command()
@click.argument("folder", metavar="RUN", type=FILE)
@click.option("--gpus", type=click.IntRange(1), help="Processes, one for each GPU if any; by default those of RUN.")
@click.option("--data", metavar="PATH", type=PATH, help="Text or corpus of RUN; by default where RUN found it.")
@options("parts", "out", "json", "quiet")
def replay(
    folder: Path,
    gpus: int | None,
    data: str | None,
    parts: tuple[Path, ...],
    out: Path | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Repeat the finished run RUN, and compare the two.

    RUN is a run folder. Settings, seed and text are those of RUN/recipe.json; another text is refused. All files go
    to RUN-replay, unless --out names another folder. The exit status is 1 if weights or score differ although they
    must be equal: on a CPU, with a budget of steps, and the same program, libraries, machine and processes.
    """
    from caddie.run.replay import read_run_to_replay, replay_folder, summary
    from caddie.run.replay import replay as do_again
    from caddie.run.run import check_recipe
    from caddie.runtime import distributed

    first = read_run_to_replay(folder, parts)
    place, world = replay_folder(folder, out), gpus or first.count("world")
    check_recipe(first.start.recipe, distributed.world_size(world))
    if world > 1 and not distributed.under_torchrun():
        return distributed.launch(world, sys.argv[1:])
    typed = typed_command()
    with (
        distributed.join() as ranks,
        resume_hint(typed),
        Display(quiet=quiet or not ranks.first_here) as display,
    ):
        facts = do_again(first, place, data, ranks, display, typed)
    if facts is None:
        return 0
    tell(facts, as_json, summary(facts))
    if facts["identity_promised"] and not facts["identical"]:
        raise CheckFailed(f"the replay in {place} differs where it must not: {', '.join(facts['differs'])}")
    return 0


@click.command()
@click.argument("folder", metavar="RUN", type=FILE)
@settings_argument
@click.option("--out", metavar="FILE", type=FILE, help="File to write.")
@click.option("--compare", is_flag=True, help="Write nothing; compare all quantizers and codings on RUN.")
@options("parts", "json", "quiet")
@ends_on_interrupt
def pack(
    folder: Path,
    settings: tuple[str, ...],
    out: Path | None,
    compare: bool,
    parts: tuple[Path, ...],
    as_json: bool,
    quiet: bool,
) -> None:
    """Quantize and pack the weights of the run folder RUN.

    Settings are cap=N and pack.PATH=VALUE. N limits the bytes of the file, or with pack.policy the bytes that the
    policy counts, code included. With any setting, the run's own artifact is kept, and the new file is
    RUN/artifact-N.caddie; settings other than cap=N add a short hash to that name. --out names another file.
    --compare takes several cap=N.
    """
    from caddie.pack import artifact as artifacts
    from caddie.pack.compress import pack as pack_weights
    from caddie.run.cap import cap_of_recipe
    from caddie.run.compare_packings import compare as compare_packings
    from caddie.run.compare_packings import summary
    from caddie.run.result import describe_compression
    from caddie.run.run import metadata_of
    from caddie.run.run_folder import read_run, run_weights
    from caddie.run.run_lock import locked
    from caddie.run.stages import calibrate_recipe
    from caddie.runtime.distributed import Ranks, local_device
    from caddie.train.stage_memory import check_stages

    if out is not None and not compare:
        check_new_file(out)
    recipe, seed, corpus = read_run(folder, parts)
    if compare:
        with Display(quiet=quiet) as display:
            facts = compare_packings(folder, _caps(recipe, settings, out), display, parts)
        tell(facts, as_json, summary(facts))
        return
    with Display(quiet=quiet) as display, nullcontext() if out else locked(folder):
        policy, recipe = recipe.pack.policy, recipe.but(changes := assignments(settings, _pack_setting))
        if recipe.pack.policy != policy and out is None:
            raise UserError("pack.policy is not the run's, which verify applies to files in its folder; add --out FILE")
        metadata, phases = metadata_of(recipe, seed, corpus), Phases(display)
        cap = cap_of_recipe(recipe, metadata)
        if cap.policy:
            display.note(str(cap))
        key = f"-{recipe.pack.key()}" if changes.keys() - {"pack.cap_bytes"} else ""  # several may have one cap
        path = out or folder / (f"artifact-{cap.cap_bytes}{key}.caddie" if settings else ARTIFACT)
        check_writable(path.parent)
        ranks = Ranks(device=local_device())
        check_stages(recipe.model, recipe.pack, recipe.score, 0, ranks, {"packing": 1})
        weights, calibrations = run_weights(folder, recipe, corpus), {}
        if recipe.pack.calibrated:
            if (known_number(pick(read_json(folder / RESULT), "world")) or 1) > 1:
                display.note("several processes calibrated this run, and one does now: the file differs by some bytes")
            with phases("calibrate"):
                calibrations = calibrate_recipe(recipe, weights, corpus, ranks, display)
        with phases("pack"):
            packing = recipe.pack.but(cap_bytes=cap.file_bytes)
            compressed = pack_weights(metadata, weights, packing, path, calibrations, display)
    packed = artifacts.load(path)
    own = [word for file in packed.parts for word in ("--parts", str(file.path))]
    facts = {
        "artifact": str(packed.path),
        "artifact_bytes": packed.file_bytes,
        "cap_bytes": cap.file_bytes,
        "cap": cap.to_json(),
        "ledger": packed.ledger,
        "compression": describe_compression(compressed, packed, corpus),
        "seconds": sum(phases.seconds.values()),
        "next": [shlex.join(["caddie", "score", str(path), "--data", str(corpus.folder), *own])],
    }
    tell(facts, as_json, pack_table(facts))
    if (over := packed.file_bytes - cap.file_bytes) > 0:
        raise CheckFailed(f"{packed.path} has {packed.file_bytes:,} bytes, {over:,} over the cap; give a larger cap")


def _pack_setting(text: str) -> tuple[str, object]:
    path, value = parse_assignment(text)
    if not path.startswith("pack."):
        now = modernized_path(path)
        hint = f"; it is now {now}" if now != path else ""
        raise UserError(f"pack takes cap=N and settings of pack, as in pack.fit=none, not {path}{hint}")
    return path, value


def _caps(recipe: Recipe, settings: tuple[str, ...], out: Path | None) -> list[int]:
    """Return the caps of `--compare`, which takes nothing else."""
    if out is not None:
        raise UserError("--compare writes no file; leave out --out")
    caps = []
    for path, value in map(_pack_setting, settings):
        if path != "pack.cap_bytes":
            raise UserError(
                f"--compare tries the quantizers and codings that it knows and takes cap=N alone, not {path}"
            )
        caps.append(recipe.but({path: value}).pack.cap_bytes)
    return caps
