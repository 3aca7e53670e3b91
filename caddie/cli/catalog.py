"""Verbs of the catalog: data, recipes, techniques, diff."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path

import click

from caddie.cli.options import is_setting, named_recipe, options, recipe_argument, settings_argument, tell, written_out
from caddie.config import ABSENT, Config, assignments, differences, plain, show
from caddie.errors import UserError
from caddie.report.display import Display
from caddie.report.tables import crop, table
from caddie.runtime.interrupt import ends_on_interrupt


@click.command()
@click.argument("source", metavar="[PATH]", required=False)
@settings_argument
@click.option("--fineweb", metavar="VARIANT", help="Fetch the contest's text: sp1024, caseops8192, documents, others.")
@click.option("--shards", type=click.IntRange(1), help="Training shards to fetch with --fineweb.  [default: 1]")
@click.option("--repository", metavar="OWNER/NAME", help="Repository to fetch --fineweb from, instead of the default.")
@click.option("--revision", metavar="NAME", help="Branch, tag or commit of the repository.")
@click.option("--local", metavar="DIR", help="Read a copy of the repository on disk instead.")
@click.option("--tokenizer", metavar="FILE", help="An artifact or a model file, in place of data.tokenizer.")
@click.option("--column", metavar="NAME", help="Parquet column or JSON key that holds the text; text by default.")
@click.option("--against", metavar="CORPUS", help="Hold out all documents except those that CORPUS trains on.")
@options("out", "json", "quiet")
@ends_on_interrupt
def data(
    source: str | None,
    settings: tuple[str, ...],
    fineweb: str | None,
    shards: int | None,
    repository: str | None,
    revision: str | None,
    local: str | None,
    tokenizer: str | None,
    column: str | None,
    against: str | None,
    out: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Prepare text as a corpus. Without PATH: the source files of Python's own library.

    The contest's text comes with --fineweb: published shards of a tokenizer (sp1024, sp2048, sp4096, sp8192,
    caseops8192, byte260), or the documents themselves, which take any tokenizer.
    """
    from caddie.data.fineweb import Place
    from caddie.recipes.recipe import Recipe
    from caddie.run.resolve_corpus import audit_corpus, describe, fetch_corpus, make_corpus

    if source is not None and "=" in source and not Path(source).exists():
        settings, source = (source, *settings), None
    diff = assignments(settings)
    for path in diff:
        if not path.startswith("data.") and path != "model.vocabulary":
            raise UserError(f"{path} does not change the data; give data.* or model.vocabulary")
    recipe = Recipe().but(diff)
    if fineweb is None and (shards or repository or revision or local):
        raise UserError("--shards, --repository, --revision and --local are for --fineweb; add --fineweb VARIANT")
    if local and (repository or revision):
        raise UserError("--local takes the place of --repository and --revision; leave them out")
    own_tokenizer = fineweb is not None and fineweb != "documents"
    if fineweb is not None and (source or against or column or (own_tokenizer and tokenizer)):
        own, more = (" and tokenizer", ", --tokenizer") if own_tokenizer else ("", "")
        raise UserError(f"--fineweb brings its own text{own}; leave out PATH, --column{more} and --against")
    if diff and (own_tokenizer or against):
        raise UserError(f"{next(iter(diff))} has no effect with --fineweb or --against; leave it out")
    replaced = [path for path in diff if path.startswith(("data.tokenizer", "model.vocabulary"))]
    if tokenizer and replaced:
        raise UserError(f"--tokenizer takes the place of {replaced[0]}; leave one of them out")
    if fineweb and (fraction := "data.validation_fraction") in diff:
        raise UserError(f"{fraction} has no effect: the first 50,000 documents are held out; leave it out")
    with Display(quiet=quiet) as display:
        if fineweb is not None:
            bars = not display.quiet and sys.stderr.isatty()
            place = Place(repository, revision, Path(local) if local else None, bars=bars)
            corpus = fetch_corpus(
                fineweb, shards or 1, recipe, tokenizer=tokenizer, out=out, place=place, progress=display
            )
        else:
            given = {"tokenizer": tokenizer, "column": column, "against": against}
            corpus = make_corpus(source, recipe, **given, out=out, progress=display, settings=diff)
    lossy = [rule for rule in audit_corpus(corpus) if rule.lossy]
    rules = [rule.to_json() for rule in lossy]
    facts = {"folder": str(corpus.folder), "manifest": asdict(corpus.manifest), "lossy_rules": rules}
    tell(facts, as_json, "\n".join([describe(corpus), *map(str, lossy), f"corpus in {corpus.folder}"]))


@click.command()
@options("json")
def recipes(as_json: bool) -> None:
    """List the recipes with their size and public score.

    NAME_mini is a small copy of recipe NAME that trains half a minute on a CPU; NAME_scale and NAME_scale32 are small
    copies that make all its steps. public_000:LABEL is an experiment of public system 000, a contest entry.
    FILE.toml, FILE.json and FILE.py:NAME are recipes of your own, and the folder of a run stands for its recipe.
    """
    from caddie.recipes.catalog import shipped

    # From the worst public score to the best, which is nearly their history: the best stay visible on the screen.
    ordered = sorted(shipped().values(), key=lambda recipe: -(recipe.published or 9.0))
    facts = [
        {name: getattr(one, name) for name in ("name", "why", "base", "parameters")}
        | {"public": [plain(figure) for figure in one.public]}
        for one in ordered
    ]
    own = [(one.name, f"{one.parameters:,}", one.why) for one in ordered if not one.published]
    records = [(one.name, f"{one.parameters:,}", f"{one.published:.4f}", one.why) for one in ordered if one.published]
    text = [
        "Without a public score: begin with tiny or small; the others are ideas.\n",
        table(own, ["recipe", "parameters", "purpose; its source"]),
        "\nPublic results, from the first to the best, in bits per byte (bpb):\n",
        table(records, ["recipe", "parameters", "bpb", "purpose; its record"]),
    ]
    tell({"recipes": facts}, as_json, "\n".join(text))


@click.command()
@click.argument("words", metavar="[WORD]...", nargs=-1)
@options("json")
def techniques(words: tuple[str, ...], as_json: bool) -> None:
    """List the techniques, or explain WORD.

    WORD is a word of the field (XSA, value residual, bpb), the name of a class of settings, or a setting, as in: caddie
    techniques model.block.mlp
    """
    from caddie.recipes.glossary import lookup
    from caddie.recipes.technique_pages import details, overview
    from caddie.recipes.techniques import find, sockets

    word = " ".join(words)
    if as_json:
        found = find(word) if words else sockets()
        tell({"words": list(map(asdict, lookup(word))), "sockets": list(map(asdict, found))}, True, "")
    else:
        tell({}, False, details(word) if words else overview())


@click.command()
@recipe_argument("a")
@recipe_argument("b", required=False)
@settings_argument
@options("parts", "json")
def diff(a: str, b: str | None, settings: tuple[str, ...], parts: tuple[Path, ...], as_json: bool) -> None:
    """Show the changes that turn recipe A into B. With A alone: those that turn its base into A.

    Settings given as PATH=VALUE are changed in the last recipe named.
    """
    from caddie.model.flops import flops_per_token
    from caddie.recipes.catalog import find, find_base, supply_parts

    if b is not None and is_setting(b):
        settings, b = (written_out(b), *settings), None
    supply_parts([a, b] if b else [a], parts)
    right = named_recipe(b or a, settings)
    left = named_recipe(a, ()) if b else find_base(a) or find(a)
    changes = list(differences(left.settings, right.settings))
    size = {"from": left.parameters, "to": right.parameters}
    work = {
        side: {
            when: flops_per_token(recipe.model, recipe.train.sequence_length, progress)
            for when, progress in (("start", 0.0), ("end", 1.0))
        }
        for side, recipe in (("from", left), ("to", right))
    }
    names, plainly = {"from": left.name, "to": right.name}, {path: plain(after) for path, _, after in changes}
    facts = {**names, "diff": plainly, "parameters": size, "training_flops_per_token": work}
    rows = [row for change in changes for row in _changes(*change)]
    figures = [_figure("parameters", size["from"], size["to"], ",")]
    grows = any(one["start"] != one["end"] for one in work.values())
    for when, label in (("start", " at the start"), ("end", " at the end")) if grows else (("end", ""),):
        before, after = (work[side][when] / 1e6 for side in ("from", "to"))
        figures.append(_figure(f"training MFLOP per token{label}", before, after, ",.1f"))
    change = f"{_headline_name(a, left.name) if b else left.name} -> {_headline_name(b or a, right.name)}"
    changed = table(rows, ["setting", change]) if rows else f"{change}: the same settings"
    tell(facts, as_json, f"{changed}\n\n{table(figures, ['', 'from', 'to', 'difference'])}")


def _headline_name(typed: str, name: str) -> str:
    """Return the name of a recipe, after the alias if one was typed."""
    from caddie.recipes.names import ALIASES

    return f"{typed} ({name})" if typed.startswith(tuple(ALIASES)) else name


def _figure(label: str, before: float, after: float, form: str) -> tuple[str, ...]:
    difference = "none" if after == before else f"{after / before - 1:+.1%}"
    return label, format(before, form), format(after, form), difference


def _changes(path: str, before: object, after: object) -> Iterator[tuple[str, str]]:
    """Yield a path and its change; if both values are mappings, one such pair for each key that changed."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in {**before, **after}:
            if (old := before.get(key, ABSENT)) != (new := after.get(key, ABSENT)):
                yield from _changes(f"{path}.{key}", old, new)
    else:
        old, new = ("(absent)" if value is ABSENT else show(value) for value in (before, after))
        yield path, f"{crop(old, 60)} -> {new}"
        if path.startswith("model.") and isinstance(before, Config) and isinstance(after, Config):
            yield from _new_defaults(path, vars(before), after)


def _new_defaults(path: str, before: Mapping[str, object], after: Config) -> Iterator[tuple[str, str]]:
    """Yield the settings that a part shares with the one it replaces, where its default changes the value."""
    for field in fields(after):
        value = getattr(after, field.name)
        if value == field.default and before.get(field.name, value) != value:
            default = f"{show(value)}, the default of {type(after).__name__}"
            yield f"{path}.{field.name}", f"{show(before[field.name])} -> {default}"
