"""The command line: verbs, their options, and one line for every mistake."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from caddie.config import Config, parse_assignment, show
from caddie.errors import CheckFailed, UserError
from caddie.exits import end, judge, resume_hint

if TYPE_CHECKING:
    from caddie.artifact import Artifact
    from caddie.recipe import Recipe

# Modules that need torch are imported inside the verbs, so that --help answers at once.

Command = Callable[..., Any]


def _options(*names: str) -> Callable[[Command], Command]:
    known = {
        "data": click.option("--data", metavar="PATH", help="Text, JSON lines, a folder of them, shards, or a corpus."),
        "seed": click.option(
            "--seed",
            type=click.IntRange(0, 2**32 - 1),
            default=1337,
            show_default=True,
            help="Seed of all chance.",
        ),
        "seconds": click.option("--seconds", type=float, help="Training time; short for train.seconds=."),
        "out": click.option("--out", metavar="DIR", help="Folder to write to."),
        "gpus": click.option("--gpus", type=click.IntRange(1), default=1, help="Processes, one for each GPU if any."),
        "json": click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else."),
        "quiet": click.option("--quiet", is_flag=True, help="No progress on standard error."),
    }

    def decorate(command: Command) -> Command:
        for name in reversed(names):
            command = known[name](command)
        return command

    return decorate


_settings = click.argument("settings", metavar="[PATH=VALUE]...", nargs=-1)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="caddie")
def app() -> None:
    """Train the best small language model that fits in a byte budget, and score the one file it is packed into.

    Settings are reached by PATH=VALUE, as in: caddie run tiny model.depth=6 train.seconds=120
    """


@app.command()
@click.argument("recipe")
@_settings
@_options("data", "seed", "seconds", "out", "gpus", "json", "quiet")
def run(
    recipe: str,
    settings: tuple[str, ...],
    data: str | None,
    seed: int,
    seconds: float | None,
    out: str | None,
    gpus: int,
    as_json: bool,
    quiet: bool,
) -> int:
    """Train, pack, verify and score RECIPE, and write a report."""
    from caddie import distributed
    from caddie.display import Display, result_table
    from caddie.line import run as run_line
    from caddie.line import run_folder

    chosen = _recipe(recipe, settings, seconds)
    _rehearse(chosen, gpus)
    if gpus > 1 and not distributed.under_torchrun():
        return distributed.launch(gpus, sys.argv[1:])
    folder = Path(out) if out else run_folder(chosen, seed)
    command = shlex.join(["caddie", *sys.argv[1:]])
    with distributed.join() as ranks, Display(quiet=quiet or not ranks.first) as display:
        with resume_hint(command, folder, bool(out)):
            result = run_line(
                chosen,
                data,
                seed=seed,
                folder=folder,
                ranks=ranks,
                watch=_watch(display),
                phase=display.phase,
                command=command,
            )
    if result is None:
        return 0
    _print(result, as_json, result_table(result, folder / "report.html"))
    return judge(result["checks"])


@app.command()
@click.argument("recipe")
@_settings
@_options("data", "seed", "seconds", "out", "gpus", "json", "quiet")
def train(
    recipe: str,
    settings: tuple[str, ...],
    data: str | None,
    seed: int,
    seconds: float | None,
    out: str | None,
    gpus: int,
    as_json: bool,
    quiet: bool,
) -> int:
    """Train RECIPE and keep its weights. `caddie pack` goes on from there."""
    from caddie import distributed
    from caddie.corpora import open_corpus
    from caddie.display import Display
    from caddie.line import run_folder, train_run

    chosen = _recipe(recipe, settings, seconds)
    _rehearse(chosen, gpus)
    if gpus > 1 and not distributed.under_torchrun():
        return distributed.launch(gpus, sys.argv[1:])
    folder = Path(out) if out else run_folder(chosen, seed)
    with distributed.join() as ranks, Display(quiet=quiet or not ranks.first) as display:
        with resume_hint(shlex.join(["caddie", *sys.argv[1:]]), folder, bool(out)):
            if ranks.first:
                corpus = open_corpus(chosen, data, display.note)
            ranks.wait()
            if not ranks.first:
                corpus = open_corpus(chosen, data, display.note)
            display.phase("train")
            trained = train_run(chosen, corpus, folder, seed, ranks, _watch(display))
    if ranks.first:
        facts = {"folder": str(folder), "steps": trained.steps, "tokens": trained.tokens, "loss": trained.final_loss}
        _print(facts, as_json, f"{trained.steps:,} steps; weights in {folder}; next: caddie pack {folder}")
    return 0


@app.command()
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@_options("json")
def pack(folder: Path, as_json: bool) -> int:
    """Quantize and pack the weights of the run folder RUN."""
    from caddie import artifact as artifacts
    from caddie.display import table
    from caddie.line import ARTIFACT, pack_run, read_run

    recipe, _, _ = read_run(folder)
    pack_run(folder)
    packed = artifacts.load(folder / ARTIFACT)
    cap = recipe.compress.cap_bytes
    facts = {
        "artifact": str(packed.path),
        "artifact_bytes": packed.file_bytes,
        "cap_bytes": cap,
        "ledger": packed.ledger,
    }
    _print(
        facts, as_json, table([*packed.ledger.items(), ("file", packed.file_bytes), ("cap", cap)], ["part", "bytes"])
    )
    if packed.file_bytes > cap:
        raise CheckFailed(f"{packed.path} has {packed.file_bytes:,} bytes, {packed.file_bytes - cap:,} over the cap")
    return 0


@app.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@_settings
@_options("json")
def verify(artifact: Path, settings: tuple[str, ...], as_json: bool) -> int:
    """Check that ARTIFACT is what it says.

    It must be whole, under the cap (compress.cap_bytes=N), a distribution, and without look-ahead.
    """
    from caddie.checks import verify as verify_artifact
    from caddie.recipe import Recipe

    diff = dict(map(parse_assignment, settings))
    for path in diff:
        if path != "compress.cap_bytes":
            raise UserError(f"verify takes compress.cap_bytes=N alone, not {path}")
    cap = Recipe().but(diff).compress.cap_bytes
    checks = verify_artifact(_load(artifact), cap)
    passed = all(check.passed for check in checks)
    lines = [f"{'pass' if check.passed else 'FAIL'}  {check.name}: {check.evidence}" for check in checks]
    facts = [{"name": check.name, "passed": check.passed, "evidence": check.evidence} for check in checks]
    _print({"passed": passed, "checks": facts}, as_json, "\n".join(lines))
    return judge(facts)


@app.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@_options("data", "json", "quiet")
def score(artifact: Path, data: str | None, as_json: bool, quiet: bool) -> int:
    """Score ARTIFACT in bits per byte on held-out text. It is refused unless it was proven to be held out."""
    from caddie.corpora import open_for_scoring
    from caddie.display import Display, table
    from caddie.line import score_artifact

    loaded = _load(artifact)
    with Display(quiet=quiet) as display:
        corpus = open_for_scoring(loaded, data, display.note)
        display.phase("score")
        result = score_artifact(loaded, corpus)
    if not math.isfinite(result["bits_per_byte"]):
        raise CheckFailed(f"the score of {artifact} is {result['bits_per_byte']}: its model gives no probabilities")
    columns = (
        "bits_per_byte",
        "bits_per_normalized_byte",
        "bits_per_table_byte",
        "nats_per_token",
        "tokens",
        "source_bytes",
    )
    scores = {name: result[name] for name in ("plain", "sliding") if result[name]}
    rows = [
        [column, *(f"{s[column]:.6f}" if isinstance(s[column], float) else s[column] for s in scores.values())]
        for column in columns
    ]
    lines = [table(rows, ["", *scores]), "", f"bits per byte  {result['bits_per_byte']:.6f}"]
    plain = result["plain"]
    if plain["table_bytes"] != plain["normalized_bytes"]:
        lines.append(
            f"The contest's table counts {plain['table_bytes']:,} bytes where the tokens stand for "
            f"{plain['normalized_bytes']:,}: its figure is wrong for this tokenizer."
        )
    _print(result, as_json, "\n".join(lines))
    return 0


@app.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--prompt", default="", help="Text to go on from.")
@click.option("--tokens", type=click.IntRange(1, 100_000), default=120, show_default=True, help="Tokens to write.")
@click.option(
    "--temperature", type=click.FloatRange(0, 100), default=0.8, show_default=True, help="0 takes the likeliest."
)
@_options("seed", "json")
def sample(artifact: Path, prompt: str, tokens: int, temperature: float, seed: int, as_json: bool) -> int:
    """Let ARTIFACT write text."""
    from caddie.display import printable
    from caddie.generate import sample as write

    text = write(_load(artifact), prompt.encode(errors="replace"), tokens, temperature, seed).decode("utf-8", "replace")
    _print({"text": text}, as_json, "\n".join(map(printable, text.split("\n"))))
    return 0


@app.command()
@click.argument("source", metavar="[PATH]", required=False)
@_settings
@click.option("--fineweb", metavar="VARIANT", help="Fetch the contest's published shards instead: sp1024 and others.")
@click.option("--shards", type=click.IntRange(1), default=1, show_default=True, help="Training shards to fetch.")
@click.option("--tokenizer", metavar="FILE", help="An artifact or a .model file, in place of data.tokenizer.")
@click.option("--against", metavar="CORPUS", help="Drop documents that this corpus trains on; hold out all others.")
@_options("out", "json", "quiet")
def data(
    source: str | None,
    settings: tuple[str, ...],
    fineweb: str | None,
    shards: int,
    tokenizer: str | None,
    against: str | None,
    out: str | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Prepare text as a corpus. Without PATH, the sources of Python's own library are taken."""
    from caddie.corpora import describe, make_corpus
    from caddie.display import Display
    from caddie.hub import fetch_fineweb
    from caddie.recipe import Recipe

    if source is not None and "=" in source and not Path(source).exists():
        settings = (source, *settings)
        source = None
    diff = dict(map(parse_assignment, settings))
    for path in diff:
        if not path.startswith("data.") and path != "model.vocabulary":
            raise UserError(f"{path} does not change the data; give data.* or model.vocabulary")
    recipe = Recipe().but(diff)
    if fineweb is not None and (source or tokenizer or against):
        raise UserError("--fineweb brings its own text and tokenizer; leave out PATH, --tokenizer and --against")
    if diff and (fineweb or against):
        raise UserError(f"{next(iter(diff))} has no effect with --fineweb or --against; leave it out")
    with Display(quiet=quiet) as display:
        if fineweb is not None:
            folder, bars = Path(out or f"data/fineweb-{fineweb}"), sys.stderr.isatty() and not quiet
            corpus = fetch_fineweb(fineweb, shards, folder, display.note, bars=bars)
        else:
            corpus = make_corpus(source, recipe, tokenizer=tokenizer, against=against, out=out, report=display.note)
    facts = {"folder": str(corpus.folder), "manifest": json.loads((corpus.folder / "manifest.json").read_text())}
    _print(facts, as_json, f"{describe(corpus)}\ncorpus in {corpus.folder}")
    return 0


@app.command(name="recipes")
@_options("json")
def list_recipes(as_json: bool) -> int:
    """List the recipes with their size and public figures."""
    from caddie.config import plain
    from caddie.display import table
    from caddie.recipe import shipped

    shelf = shipped()
    facts = [
        {
            "name": name,
            "why": recipe.why,
            "base": recipe.base,
            "parameters": recipe.parameters,
            "public": [plain(figure) for figure in recipe.public],
        }
        for name, recipe in shelf.items()
    ]
    rows = [
        (name, f"{recipe.parameters:,}", f"{recipe.public[0].bits_per_byte:.4f}" if recipe.public else "", recipe.why)
        for name, recipe in shelf.items()
    ]
    _print({"recipes": facts}, as_json, table(rows, ["recipe", "parameters", "public bpb", "why"], width=140))
    return 0


@app.command()
@click.argument("a")
@click.argument("b", required=False)
@_settings
@_options("json")
def diff(a: str, b: str | None, settings: tuple[str, ...], as_json: bool) -> int:
    """Show what turns recipe B into recipe A. Without B, the base of A is taken."""
    from caddie.config import plain
    from caddie.display import table
    from caddie.recipe import find

    if b is not None and "=" in b:
        settings = (b, *settings)
        b = None
    right = _recipe(a, settings, None)
    left = find(b or find(a).base or a)
    changes = left.settings.diff(right.settings)
    facts = {
        "from": left.name,
        "to": right.name,
        "diff": {path: plain(value) for path, value in changes.items()},
        "parameters": {"from": left.parameters, "to": right.parameters},
    }
    rows = [(path, _held(left, path), show(value)) for path, value in changes.items()]
    rows.append(("parameters", f"{left.parameters:,}", f"{right.parameters:,}"))
    _print(facts, as_json, table(rows, ["setting", left.name, right.name], width=140))
    return 0


@app.command()
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@_options("json")
def report(folder: Path, as_json: bool) -> int:
    """Write the report page of the run folder RUN anew."""
    from caddie.report import write_report

    path = write_report(folder)
    _print({"report": str(path)}, as_json, str(path))
    return 0


def main() -> NoReturn:
    """Run the command line."""
    end(lambda: app.main(sys.argv[1:] or ["--help"], "caddie", standalone_mode=False))


def _recipe(name: str, settings: tuple[str, ...], seconds: float | None) -> Recipe:
    from caddie.recipe import find

    diff = dict(map(parse_assignment, settings))
    if seconds is not None:
        diff["train.seconds"] = seconds
    return find(name).but(diff)


def _rehearse(recipe: Recipe, gpus: int) -> None:
    """Raise now the `UserError` that would else come after hours of preparing and training."""
    import torch

    from caddie.parameters import assign
    from caddie.scoring import windows

    with torch.device("meta"):
        model = recipe.model.build()
    assign(recipe.train.optimizers, model, "train.optimizers")
    assign(recipe.compress.quantizers, model, "compress.quantizers")
    windows(recipe.score.sequence_length, recipe.score.sequence_length, recipe.score.stride)
    _ = recipe.train.budget
    recipe.train.micro_tokens(gpus)


def _load(path: Path) -> Artifact:
    from caddie import artifact as artifacts
    from caddie import distributed

    return artifacts.load(path, distributed.local_device())


def _watch(display: Any) -> Callable[[dict[str, Any]], None]:
    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            display.step(event)
        elif event["event"] == "note":
            display.note(event["text"])

    return watch


def _held(config: Config, path: str) -> str:
    """What a config holds at a path, for people; empty where the path does not exist."""
    value: Any = config
    parts = path.split(".")
    while parts:
        if isinstance(value, Config):
            value = getattr(value, parts.pop(0), None)
        elif isinstance(value, dict) and (
            key := next((k for n in range(len(parts), 0, -1) if (k := ".".join(parts[:n])) in value), None)
        ):
            value, parts = value[key], parts[key.count(".") + 1 :]
        else:
            return ""
    return show(value)


def _print(facts: dict[str, Any], as_json: bool, text: str) -> None:
    print(json.dumps(facts) if as_json else text)
