"""The verbs run, train, pack, verify and score."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from caddie.cli.exits import judge, resume_hint
from caddie.cli.options import (
    FILE,
    load_artifact,
    named_recipe,
    options,
    path_argument,
    recipe_argument,
    settings_argument,
    tell,
)
from caddie.config import assignments, parse_assignment
from caddie.config.renamed import modernized_path
from caddie.errors import CheckFailed, UserError, count
from caddie.runtime.interrupt import ends_on_interrupt

if TYPE_CHECKING:
    from caddie.pack.artifact import Artifact
    from caddie.recipes.recipe import Recipe
    from caddie.report.display import Display
    from caddie.runtime.distributed import Ranks


@dataclass(frozen=True)
class Job:
    """Arguments of a verb that trains, in one of its processes: those of `caddie.run.run.run`."""

    recipe: Recipe
    source: str | None
    seed: int
    folder: Path
    command: str
    ranks: Ranks
    progress: Display


def trains(verb: Callable[[Job], tuple[dict[str, Any], str] | None]) -> click.Command:
    """Make the command of a verb that trains, with its options, processes and exit status.

    The verb returns its result as JSON values and as text, or None in all processes but the first.
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
        out: str | None,
        gpus: int,
        track: str | None,
        as_json: bool,
        quiet: bool,
    ) -> int:
        from caddie.doctor.host import allowed_cores
        from caddie.recipes.catalog import begun_from
        from caddie.report.display import Display
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
            if distributed.local_device().type == "cpu" and gpus > (cores := len(allowed_cores())):
                Display(quiet=quiet).note(f"no GPU here: {gpus} processes on {count(cores, 'core')} of a CPU")
            return distributed.launch(gpus, sys.argv[1:])
        folder = Path(out) if out else run_folder(chosen, seed)
        typed = f"{distributed.typed_program()} {shlex.join(sys.argv[1:])}"
        with distributed.join() as ranks, Display(quiet=quiet or not ranks.first_here) as display:
            if not ranks.first:
                display.note(f"process {ranks.rank} of {ranks.world}: process 0 writes the run folder and the result")
            with resume_hint(typed, folder, bool(out)) as hint, tracked(track, folder, display):
                result = ends_on_interrupt(verb, hint)(Job(chosen, data, seed, folder, typed, ranks, display))
        if result is None:
            return 0
        facts, text = result
        tell(facts, as_json, text)
        return judge(facts.get("checks", []))

    return command


@trains
def run(job: Job) -> tuple[dict[str, Any], str] | None:
    """Train, pack, score and verify RECIPE, and write a report.

    RECIPE is one that `caddie recipes` lists, FILE.toml, FILE.json, FILE.py:NAME, or the folder of a run, whose seed
    and text are taken as well unless others are given. All files go to runs/NAME-KEY-sSEED, unless --out names
    another folder; KEY stands for the settings. The same command continues a run that was interrupted.
    """
    from caddie.report.run_files import REPORT
    from caddie.report.tables import result_table
    from caddie.run.run import run as run_recipe

    result = run_recipe(**vars(job))
    return (result, result_table(result, job.folder / REPORT)) if result else None


@trains
def train(job: Job) -> tuple[dict[str, Any], str] | None:
    """Train RECIPE and keep its weights. `caddie pack` goes on from there.

    RECIPE is one that `caddie recipes` lists, FILE.toml, FILE.json, FILE.py:NAME, or the folder of a run, whose seed
    and text are taken as well unless others are given. All files go to runs/NAME-KEY-sSEED, unless --out names
    another folder.
    """
    from caddie.config.userfile import user_files
    from caddie.report.run_files import PARTS
    from caddie.run.dead_settings import check_settings_matter
    from caddie.run.resolve_corpus import open_corpus
    from caddie.run.run import train_recipe
    from caddie.run.run_folder import hold_folder
    from caddie.train.memory import enough_memory

    with (
        hold_folder(job.folder, job.ranks, job.progress, alone=True) as phases,
        enough_memory(job.recipe.model, job.recipe.train, job.ranks, phases),
    ):
        with phases("prepare"):
            corpus = open_corpus(job.recipe, job.source, job.progress, ranks=job.ranks)
            check_settings_matter(job.recipe)
        phases.begin("train")
        trained = train_recipe(job.recipe, corpus, job.folder, job.seed, job.ranks, job.progress)
    if not job.ranks.first:
        return None
    kept = [word for file in user_files(job.recipe) for word in ("--parts", str(job.folder / PARTS / file.path.name))]
    facts = {"folder": str(job.folder), "steps": trained.steps, "tokens": trained.tokens, "loss": trained.final_loss}
    hint = shlex.join(["caddie", "pack", str(job.folder), *kept])
    return facts, f"{trained.steps:,} steps; weights in {job.folder}; next: {hint}"


@click.command()
@path_argument("folder", metavar="RUN")
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

    Settings are cap=N, the bytes that the file may have, and pack.PATH=VALUE. With any, the run's own artifact is
    kept and the new one is RUN/artifact-N.caddie, unless --out names another. --compare takes several cap=N.
    """
    from caddie.pack import artifact as artifacts
    from caddie.pack.compress import pack as pack_weights
    from caddie.report.display import Display
    from caddie.report.read import known_number, pick, read_json
    from caddie.report.run_files import ARTIFACT, RESULT
    from caddie.report.tables import pack_table
    from caddie.run.cap import cap_of_recipe
    from caddie.run.compare_packings import compare as compare_packings
    from caddie.run.compare_packings import summary
    from caddie.run.policy import section_bytes
    from caddie.run.result import describe_compression
    from caddie.run.run import metadata_of
    from caddie.run.run_folder import read_run, run_weights
    from caddie.run.stages import calibrate_recipe
    from caddie.runtime.distributed import Ranks, local_device
    from caddie.runtime.progress import Phases
    from caddie.train.stage_memory import check_stages

    recipe, seed, corpus = read_run(folder, parts)
    if compare:
        with Display(quiet=quiet) as display:
            facts = compare_packings(folder, _caps(recipe, settings, out), display, parts)
        tell(facts, as_json, summary(facts))
        return
    with Display(quiet=quiet) as display:
        recipe = recipe.but(assignments(settings, _pack_setting))
        metadata, phases = metadata_of(recipe, seed, corpus), Phases(display)
        cap = cap_of_recipe(recipe, section_bytes(metadata))
        if cap.policy:
            display.note(str(cap))
        path = out or folder / (f"artifact-{cap.cap_bytes}.caddie" if settings else ARTIFACT)
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
        raise CheckFailed(f"{packed.path} has {packed.file_bytes:,} bytes, {over:,} over the cap")


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


def _changed_recipe(artifact: Artifact, settings: tuple[str, ...], *others: str) -> Recipe:
    """Return a recipe with the artifact's scoring, changed by settings score.PATH=VALUE or `others`."""
    from caddie.recipes.recipe import Recipe

    diff = assignments(settings)
    for path in diff:
        if path not in others and not path.startswith("score."):
            takes = " and ".join([*(f"{other}=N" for other in others), "settings of score"])
            raise UserError(f"{click.get_current_context().info_name} takes {takes}, not {path}")
    return Recipe().but({"score": artifact.scoring}).but(diff)


@click.command()
@path_argument("artifact")
@settings_argument
@click.option(
    "--scorer", metavar="FILE.py:NAME", help="A scorer of your own, or known_bad:NAME for one that must fail."
)
@click.option("--known-bad", "examples", is_flag=True, help="Also try every known-bad example: all must be caught.")
@click.option("--lossless", is_flag=True, help="Also compress some documents and decompress them.")
@options("data", "parts", "audit_seconds", "json", "quiet")
@ends_on_interrupt
def verify(
    artifact: Path,
    settings: tuple[str, ...],
    scorer: str | None,
    examples: bool,
    lossless: bool,
    data: str | None,
    parts: tuple[Path, ...],
    audit_seconds: float | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Check ARTIFACT and probe its scorer for cheats. The probes run in a sandbox.

    ARTIFACT is a file, the folder of a run, or hf:USER/NAME[@REVISION].

    Settings are cap=N and those of score, for another scoring than the artifact's own. Without cap=N, a file in a run
    folder is held against the cap that it was packed for, and any other against the contest's. The probe text is from
    the held-out documents of --data, which must be proven to be held out, else from those of the run folder that
    ARTIFACT lies in, else from Python's library.
    """
    from caddie.report.display import Display
    from caddie.report.tables import table
    from caddie.run.resolve_corpus import open_for_scoring
    from caddie.run.run_folder import cap_of, corpus_of
    from caddie.verify import verify as verify_artifact

    loaded = load_artifact(artifact, parts)
    if not any(setting.startswith("pack.cap_bytes=") for setting in settings) and (cap := cap_of(loaded)):
        settings = (f"pack.cap_bytes={cap}", *settings)
    recipe = _changed_recipe(loaded, settings, "pack.cap_bytes")
    corpus = open_for_scoring(loaded, data) if data else None
    if not data:
        with suppress(UserError):  # an artifact may stand alone, or its corpus be gone
            corpus = open_for_scoring(loaded, str(corpus_of(loaded.path.parent).folder))
    with Display(quiet=quiet) as display:
        display.phase("verify")
        verdict = verify_artifact(
            loaded,
            recipe.pack.cap_bytes,
            scoring=recipe.score,
            scorer=scorer,
            corpus=corpus,
            examples=examples,
            lossless=lossless,
            audit_seconds=audit_seconds,
            progress=display,
        )
    lines = [f"{check.outcome}  {check.name}: {check.evidence}" for check in verdict.checks]
    if verdict.caught:
        rows = [[bad.name, bad.outcome, f"{bad.probe}: {bad.evidence}"] for bad in verdict.caught]
        lines += ["", table(rows, ["known-bad example", "", "must be caught by, and what that saw"])]
    facts = [asdict(check) for check in verdict.checks]
    caught = [asdict(bad) | {"passed": bad.passed, "outcome": bad.outcome} for bad in verdict.caught]
    more = {name: value for name, value in (("known_bad", caught), ("not_run", verdict.not_run)) if value}
    tell({"passed": verdict.passed, "checks": facts, **more}, as_json, "\n".join(lines))
    if verdict.passed is None and verdict.not_run:
        raise UserError(f"not verified, because the probes could not be run in a sandbox: {verdict.not_run}")
    return judge([*facts, *({**bad, "name": f"{bad['name']} was not caught by {bad['probe']}"} for bad in caught)])


@click.command()
@path_argument("artifact")
@settings_argument
@click.option("--scorer", metavar="FILE.py:NAME", help="Score with a class of your own.")
@click.option(
    "--documents",
    metavar="FILE",
    type=FILE,
    help="CSV file to write: bytes and bits of each held-out document.",
)
@click.option("--events", is_flag=True, hidden=True, help="Progress on standard error as JSON, for another process.")
@options("data", "parts", "audit_seconds", "gpus", "json", "quiet")
@ends_on_interrupt
def score(
    artifact: Path,
    settings: tuple[str, ...],
    scorer: str | None,
    documents: Path | None,
    events: bool,
    data: str | None,
    parts: tuple[Path, ...],
    audit_seconds: float | None,
    gpus: int,
    as_json: bool,
    quiet: bool,
) -> int:
    """Score ARTIFACT in bits per byte on held-out text. It is refused unless it was proven to be held out.

    ARTIFACT is a file, the folder of a run, or hf:USER/NAME[@REVISION]. Another scoring than the artifact's own is set
    by score.PATH=VALUE, as in score.ttt=ChunkSGD. Several processes give the same score as one, in less time where
    nothing is learnt on the way.
    """
    from caddie.report.display import Display
    from caddie.report.tables import score_table
    from caddie.run.resolve_corpus import open_for_scoring
    from caddie.run.run import score_artifact
    from caddie.run.stages import held_out_text
    from caddie.runtime import distributed
    from caddie.runtime.progress import JsonLines

    if audit_seconds and not scorer:
        raise UserError("--audit-seconds is for a scorer of your own: --scorer FILE.py:NAME")
    if gpus > 1 and not distributed.under_torchrun():
        return distributed.launch(gpus, sys.argv[1:])
    with distributed.join() as ranks, Display(quiet=quiet or events or not ranks.first) as display:
        progress = JsonLines(sys.stderr) if events and ranks.first else display
        loaded = load_artifact(artifact, parts)
        scoring = _changed_recipe(loaded, settings).score
        corpus = open_for_scoring(loaded, data, progress, ranks)
        given = scoring, scorer, progress, ranks, documents, audit_seconds
        result = score_artifact(loaded, corpus, held_out_text(corpus), *given)
    if not ranks.first:
        return 0
    if not math.isfinite(result["bits_per_byte"]):
        raise CheckFailed(f"the score of {artifact} is {result['bits_per_byte']}: its model gives no probabilities")
    tell(result, as_json, score_table(result))
    return 0
