"""Verbs that read an artifact: verify, score, sample, compress, decompress."""

from __future__ import annotations

import math
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from caddie.cli.exits import judge
from caddie.cli.options import FILE, SCORER, Finite, load_artifact, options, settings_argument, tell
from caddie.config import assignments
from caddie.errors import CheckFailed, UserError
from caddie.files import check_new_file, read_file, write_file
from caddie.report.display import Display
from caddie.report.tables import printable, score_table, table
from caddie.runtime.interrupt import ends_on_interrupt
from caddie.runtime.progress import JsonLines

if TYPE_CHECKING:
    from caddie.pack.artifact import Artifact
    from caddie.recipes.recipe import Recipe

Parts = tuple[Path, ...]
ENDING = ".cz"
"""Suffix of compressed files."""


def _changed_recipe(artifact: Artifact, settings: tuple[str, ...], *others: str) -> Recipe:
    """Return a recipe with the artifact's scoring, changed by settings score.PATH=VALUE or `others`."""
    from caddie.recipes.recipe import Recipe

    diff = assignments(settings)
    for path in diff:
        if path not in others and not path.startswith("score."):
            takes = " and ".join([*(f"{other}=N" for other in others), "settings of score"])
            raise UserError(f"{click.get_current_context().info_name} takes {takes}, not {path}")
    return Recipe().but({"score": artifact.scoring}).but(diff)


def _text(artifact: Artifact, data: str | None) -> str | None:
    """Return the text to score on: the one given, else the corpus of the run folder that the artifact lies in."""
    from caddie.data.corpus import Corpus
    from caddie.recipes.recipe_file import read_place

    if not data:
        with suppress(UserError):  # an artifact may stand alone, or its corpus be gone
            return str(Corpus.load(read_place(artifact.path.parent)).folder)
    return data


@click.command()
@click.argument("artifact", type=FILE)
@settings_argument
@click.option(
    "--scorer",
    metavar="FILE.py:NAME",
    type=SCORER,
    help="A scorer of your own, or known_bad:NAME for one that must fail.",
)
@click.option("--known-bad", "examples", is_flag=True, help="Also try every known-bad example: all must be caught.")
@click.option("--lossless", is_flag=True, help="Also compress some documents and decompress them.")
@options("held_out_text", "parts", "audit_seconds", "json", "quiet")
@ends_on_interrupt
def verify(
    artifact: Path, settings: tuple[str, ...], data: str | None, parts: Parts, as_json: bool, quiet: bool, **how: Any
) -> int:
    """Check ARTIFACT and probe its scorer for cheats. The probes run in a sandbox.

    ARTIFACT is a file, the folder of a run, or hf:USER/NAME[@REVISION].

    Settings are cap=N, and score.PATH=VALUE, which changes the artifact's scoring. N limits the bytes of the file,
    without code. Without cap=N, the limit of a file in a run folder is the cap in its result.json, else 16,000,000.
    The probes use held-out documents: those of --data, which must be proven to be held out, else those of the run
    folder that ARTIFACT lies in. Without both they use Python's own library.
    """
    from caddie.run.resolve_corpus import open_for_scoring
    from caddie.run.run_folder import cap_of, is_file_of_result
    from caddie.verify import verify as verify_artifact
    from caddie.verify.probes import Check

    loaded = load_artifact(artifact, parts)
    if not any(setting.startswith("pack.cap_bytes=") for setting in settings) and (cap := cap_of(loaded)):
        settings = (f"pack.cap_bytes={cap}", *settings)
    recipe = _changed_recipe(loaded, settings, "pack.cap_bytes")
    data = _text(loaded, data)
    corpus = open_for_scoring(loaded, data) if data else None
    with Display(quiet=quiet) as display:
        display.phase("verify")
        verdict = verify_artifact(
            loaded, recipe.pack.cap_bytes, scoring=recipe.score, corpus=corpus, progress=display, **how
        )
    if not is_file_of_result(loaded):
        evidence = "result.json beside it belongs to another file, so its figures do not describe this one"
        verdict = replace(verdict, checks=(Check("file of the result", False, evidence), *verdict.checks))
    lines = [f"{check.outcome}  {check.name}: {check.evidence}" for check in verdict.checks]
    lines.append(f"{sum(bool(check.passed) for check in verdict.checks)} of {len(verdict.checks)} checks passed")
    if verdict.caught:
        words = {"pass": "caught", "FAIL": "NOT CAUGHT"}
        rows = [[bad.name, words.get(bad.outcome, "idle"), f"{bad.probe}: {bad.evidence}"] for bad in verdict.caught]
        lines += ["", table(rows, ["known-bad example", "", "probe that must catch it, and its evidence"])]
    facts = [asdict(check) for check in verdict.checks]
    caught = [asdict(bad) | {"passed": bad.passed, "outcome": bad.outcome} for bad in verdict.caught]
    more = {name: value for name, value in (("known_bad", caught), ("not_run", verdict.not_run)) if value}
    tell({"passed": verdict.passed, "checks": facts, **more}, as_json, "\n".join(lines))
    if verdict.passed is None and verdict.not_run:
        raise UserError(f"not verified, because the probes could not be run in a sandbox: {verdict.not_run}")
    return judge([*facts, *({**bad, "name": f"{bad['name']} was not caught by {bad['probe']}"} for bad in caught)])


@click.command()
@click.argument("artifact", type=FILE)
@settings_argument
@click.option("--scorer", metavar="FILE.py:NAME", type=SCORER, help="Score with a class of your own.")
@click.option(
    "--documents", metavar="FILE", type=FILE, help="CSV file to write: bytes and bits of each held-out document."
)
@click.option("--events", is_flag=True, hidden=True, help="Progress on standard error as JSON, for another process.")
@options("held_out_text", "parts", "audit_seconds", "gpus", "json", "quiet")
@ends_on_interrupt
def score(
    artifact: Path,
    settings: tuple[str, ...],
    scorer: str | None,
    documents: Path | None,
    events: bool,
    data: str | None,
    parts: Parts,
    audit_seconds: float | None,
    gpus: int,
    as_json: bool,
    quiet: bool,
) -> int:
    """Score ARTIFACT in bits per byte on held-out text. A text that was not proven to be held out is refused.

    ARTIFACT is a file, the folder of a run, or hf:USER/NAME[@REVISION]. The text is that of --data, else that of
    the run folder that ARTIFACT lies in, else Python's own library. Change the artifact's own scoring with
    score.PATH=VALUE, as in score.ttt=ChunkSGD. Several processes give the same score as one, in less time where
    the scorer can divide its work.
    """
    from caddie.run.resolve_corpus import open_for_scoring
    from caddie.run.run import score_artifact
    from caddie.run.stages import held_out_text
    from caddie.runtime import distributed

    if audit_seconds and not scorer:
        raise UserError("--audit-seconds is for a scorer of your own: --scorer FILE.py:NAME")
    if gpus > 1 and not distributed.under_torchrun():
        return distributed.launch(gpus, sys.argv[1:])
    with distributed.join() as ranks, Display(quiet=quiet or events or not ranks.first) as display:
        progress = JsonLines(sys.stderr) if events and ranks.first else display
        if documents is not None and not events:  # with --events a run scores itself, and rewrites its file
            check_new_file(documents, "--documents")
        loaded = load_artifact(artifact, parts)
        scoring = _changed_recipe(loaded, settings).score
        corpus = open_for_scoring(loaded, _text(loaded, data), progress, ranks)
        given = scoring, scorer, progress, ranks, documents, audit_seconds
        result = score_artifact(loaded, corpus, held_out_text(corpus), *given)
    if not ranks.first:
        return 0
    if not math.isfinite(result["bits_per_byte"]):
        raise CheckFailed(f"the score of {artifact} is {result['bits_per_byte']}: its model gives no probabilities")
    text = f"text           {printable(corpus.manifest.source)}, prepared in {printable(str(corpus.folder))}"
    tell(result, as_json, f"{score_table(result)}\n{text}")
    return 0


@click.command()
@click.argument("artifact", type=FILE)
@click.option("--prompt", default="", help="Text to continue.")
@click.option("--tokens", type=click.IntRange(1, 100_000), default=120, show_default=True, help="Tokens to generate.")
@click.option(
    "--temperature", type=Finite(0, 100), default=0.8, show_default=True, help="0 takes the most likely token."
)
@options("parts", "seed", "json")
@ends_on_interrupt
def sample(
    artifact: Path, prompt: str, tokens: int, temperature: float, parts: Parts, seed: int, as_json: bool
) -> None:
    """Generate text."""
    from caddie.inference.sample import sample as write

    model = load_artifact(artifact, parts)
    text = write(model, prompt, tokens, temperature, seed).decode("utf-8", "replace")
    tell({"text": text}, as_json, "\n".join(map(printable, text.split("\n"))))


@click.command()
@click.argument("artifact", type=FILE)
@click.argument("file", type=FILE)
@click.option("--out", type=FILE, help=f"File to write, else FILE with {ENDING} added.")
@options("parts", "json", "quiet")
@ends_on_interrupt
def compress(artifact: Path, file: Path, out: Path | None, parts: Parts, as_json: bool, quiet: bool) -> None:
    """Compress FILE with the model of ARTIFACT. Decompressing needs the same ARTIFACT."""
    target = out or Path(f"{file}{ENDING}")
    source, packed = _coded("compress", artifact, parts, file, target, quiet)
    rate = 8 * packed / source if source else 0.0
    facts = {"file": str(target), "bytes": packed, "source_bytes": source, "bits_per_byte": rate}
    tell(facts, as_json, f"{target}: {packed:,} bytes from {source:,}, {rate:.3f} bits per byte")


@click.command()
@click.argument("artifact", type=FILE)
@click.argument("file", type=FILE)
@click.option("--out", type=FILE, help=f"File to write, else FILE without {ENDING}.")
@options("parts", "json", "quiet")
@ends_on_interrupt
def decompress(artifact: Path, file: Path, out: Path | None, parts: Parts, as_json: bool, quiet: bool) -> None:
    """Decompress FILE with the ARTIFACT that it was compressed with."""
    if out is None and file.suffix != ENDING:
        raise UserError(f"{file} does not end in {ENDING}; name the file to write with --out")
    target = out or file.with_suffix("")
    _, size = _coded("decompress", artifact, parts, file, target, quiet)
    tell({"file": str(target), "bytes": size}, as_json, f"{target}: {size:,} bytes")


def _coded(verb: str, artifact: Path, parts: Parts, file: Path, target: Path, quiet: bool) -> tuple[int, int]:
    """Compress or decompress a file to `target`. Return the sizes of both in bytes."""
    from caddie.inference import text_codec

    check_new_file(target)
    data = read_file(file)
    model = load_artifact(artifact, parts)
    with Display(quiet=quiet) as display:
        display.phase(verb)
        if verb == "compress":
            coded = text_codec.compress(model, [data], progress=display)
        else:
            coded = text_codec.decompress(model, data, progress=display)
    write_file(target, coded)
    return len(data), len(coded)
