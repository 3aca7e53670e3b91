"""Verbs that run many runs: study, ablate, sweep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from caddie.cli.options import Verb, named_recipe, options, path_argument, settings_argument, tell
from caddie.errors import UserError

if TYPE_CHECKING:
    from caddie.lab.rows import Row
    from caddie.lab.study import Study


def _runs(verb: Verb) -> Verb:
    """Options of everything that runs a study."""
    for option in (
        click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Runs at once."),
        click.option("--gpus", type=click.IntRange(0), default=0, help="GPUs of each run; 0 takes what there is."),
        click.option("--retry", is_flag=True, help="Run again what failed."),
        click.option("--price", type=click.FloatRange(0), help="Money for an hour of one GPU, to count the cost."),
    ):
        verb = option(verb)
    return options("data", "out", "json", "quiet")(verb)


def _equal(verb: Verb) -> Verb:
    """Options of a study that is made on the command line."""
    for option in (
        click.option(
            "--seeds", type=click.IntRange(1, 1000), default=3, show_default=True, help="Seeds of each label."
        ),
        click.option("--seconds", type=float, help="Training seconds of each run."),
        click.option("--steps", type=click.IntRange(1), help="Optimizer steps of each run."),
        click.option("--tokens", type=click.IntRange(1), help="Training tokens of each run."),
    ):
        verb = option(verb)
    return verb


def _settings(seeds: int, **budgets: Any) -> dict[str, Any]:
    from caddie.lab.study import Equal, Seconds, Steps, Tokens

    made: dict[str, Callable[[Any], Equal]] = {
        "seconds": lambda value: Seconds(seconds=value),
        "steps": lambda value: Steps(steps=value),
        "tokens": lambda value: Tokens(tokens=value),
    }
    given = [made[name](value) for name, value in budgets.items() if value is not None]
    if len(given) > 1:
        raise UserError("runs have equal seconds, equal steps or equal tokens; give one of them")
    return {"seeds": tuple(range(1, seeds + 1)), "budget": given[0] if given else None}


@click.command()
@click.argument("definition", metavar="FILE.py[:NAME]")
@_runs
def study(definition: str, **how: Any) -> int:
    """Run what is left of the study that FILE.py defines, and judge it.

    Results go beside FILE.py, or to --out; run folders to runs/.
    """
    from caddie.lab.study import find_study

    path, _, name = definition.rpartition(":") if ".py:" in definition else (definition, "", "study")
    place = Path(path).parent
    return _run(find_study(definition), place if name == "study" else place / name, Path(path), **how)


@click.command()
@click.argument("recipe")
@settings_argument
@_equal
@_runs
def ablate(recipe: str, settings: tuple[str, ...], **how: Any) -> int:
    """Take back each line of RECIPE's diff to its base in turn, and judge what each is worth."""
    from caddie.lab.study import ablate as ablation

    asked = _settings(**{name: how.pop(name) for name in ("seeds", "seconds", "steps", "tokens")})
    return _run(ablation(named_recipe(recipe, settings), **asked), None, None, **how)


@click.command()
@click.argument("recipe")
@click.argument("values", metavar="PATH=V1,V2...", nargs=-1, required=True)
@_equal
@_runs
def sweep(recipe: str, values: tuple[str, ...], **how: Any) -> int:
    """Run RECIPE with every combination of the values, and judge each against RECIPE."""
    from caddie.lab.study import read_values
    from caddie.lab.study import sweep as grid

    asked = _settings(**{name: how.pop(name) for name in ("seeds", "seconds", "steps", "tokens")})
    return _run(grid(named_recipe(recipe, ()), dict(map(read_values, values)), **asked), None, None, **how)


@click.command(hidden=True)
@path_argument("job")
@click.option("--with-parent", is_flag=True, help="End when standard input does.")
@options("gpus")
def trial(job: Path, with_parent: bool, gpus: int) -> int:
    """Do the JOB of a study, as one of its processes or on another machine."""
    from caddie import distributed
    from caddie.lab.executors import end_with_parent
    from caddie.lab.trial import run_job
    from caddie.train import Interrupted

    if with_parent:
        end_with_parent()
    if gpus > 1 and not distributed.under_torchrun():
        return distributed.launch(gpus, ["trial", str(job)])
    try:
        run_job(job)
    except Interrupted as error:
        return 128 + error.number
    return 0


def _run(
    study: Study,
    results: Path | None,
    definition: Path | None,
    *,
    data: str | None,
    out: str | None,
    workers: int,
    gpus: int,
    retry: bool,
    as_json: bool,
    quiet: bool,
    price: float | None,
) -> int:
    from caddie.display import Display
    from caddie.lab.driver import run_study
    from caddie.lab.executors import Local
    from caddie.lab.findings import findings
    from caddie.lab.report import write_study_report
    from caddie.lab.rows import RESULTS

    place = Path(out) if out else results or Path("runs") / study.name
    with Display(quiet=quiet) as display:
        rows = run_study(
            study,
            data,
            results=place,
            executor=Local(workers, gpus),
            definition=definition,
            retry=retry,
            note=display.note,
            done=lambda row, over, total: display.runs(over, total, _line(row)),
        )
    facts = findings(study.to_json(), rows, price)
    pages = [str(path) for path in write_study_report(place, price=price)]
    keep = ("found", "verdicts", "board", "failed", "notes", "cost")
    told = {"study": study.name, "results": str(place / RESULTS), "reports": pages}
    tell(told | {name: facts[name] for name in keep}, as_json, _summary(study, facts, pages[0]))
    return 0


def _summary(study: Study, facts: Mapping[str, Any], page: str) -> str:
    """What was found, for people."""
    from caddie.lab.report import chance, signed
    from caddie.tables import crop, printable, table

    rows = []
    for one in facts["verdicts"]:
        reach = one["interval"] and (one["interval"][1] - one["interval"][0]) / 2
        difference = (signed(one["difference"]) or "-") + (f" ±{reach:.4f}" if reach else "")
        figures = [len(one["seeds"]), f"{one['mean']:.4f}", difference, chance(one["q"]) or "-"]
        says = one["claim"]["word"] if one["claim"] else ""
        rows.append([crop(one["label"], 24), *figures, one["word"], says])
    names = ["entry", "seeds", "mean", "difference", "q", "verdict", "claimed"]
    lines = [f"{study.name}: {study.why}" if study.why else study.name, facts["found"]]
    lines += ["", table(rows, names)] if rows else []
    lines += (
        ["", "differences in bits per byte, negative is better; q is p adjusted for the number of entries"]
        if rows
        else []
    )
    lines += [f"failed  {one['label']}: {one['error']}" for one in facts["failed"]]
    lines += [f"note    {note}" for note in facts["notes"]]
    return "\n".join([*(printable(line) for part in lines for line in part.split("\n")), "", f"report  {page}"])


def _line(row: Row) -> str:
    """What came of a run."""
    came = f"{row['bits_per_byte']:.4f} bpb" if row["state"] == "finished" else f"failed: {row['error']}"
    return f"{row['label']}, seed {row['seed']}  {came}"
