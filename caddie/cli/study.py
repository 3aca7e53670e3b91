"""Verbs that run many runs: study, ablate, sweep."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from caddie.cli.exits import resume_hint, typed_command
from caddie.cli.options import (
    FILE,
    Finite,
    all_of,
    named_recipe,
    options,
    recipe_argument,
    settings_argument,
    settings_option,
    tell,
)
from caddie.config import assignments
from caddie.errors import UserError, count
from caddie.lab.executors import Executor, Local, end_with_parent, share_niceness
from caddie.report.display import Display
from caddie.report.run_files import REPORT
from caddie.report.tables import duration

if TYPE_CHECKING:
    from caddie.lab.ladder import Ladder
    from caddie.lab.report import Results
    from caddie.lab.selection import Selection
    from caddie.lab.study import Study


_run_options = all_of(
    options("data", "out", "json", "quiet"),
    click.option("--price", type=Finite(0), help="Price per GPU-hour, or machine-hour without a GPU, in any currency."),
    click.option("--retry", is_flag=True, help="Repeat failed runs."),
    click.option("--on", metavar="WHERE", default="local", help="Executor: local, ray[:ADDRESS] or slurm[:PARTITION]."),
    click.option("--cores", type=click.IntRange(0), default=0, help="Cores of each run on a cluster."),
    click.option(
        "--gpus", type=click.IntRange(0), default=0, help="GPUs of each run; 0: one if available, none on Slurm."
    ),
    click.option("--workers", type=click.IntRange(1), help="Runs at once, 1 by default; not for Ray."),
    click.option(
        "--keep-checkpoints", is_flag=True, help="Keep checkpoints of finished runs, for later runs to start from."
    ),
)
"""Options of all verbs that run a study."""
RUNS = Path("runs")
"""Folder of the folders of all studies' runs."""
_budget_options = all_of(
    click.option("--tokens", type=click.IntRange(1), help="Training tokens of each run."),
    click.option("--steps", type=click.IntRange(1), help="Optimizer steps of each run."),
    click.option("--seconds", type=float, help="Training seconds of each run."),
    click.option("--modelled-seconds", type=float, help="Modelled training seconds of each run on eight H100."),
    click.option(
        "--seeds", type=click.IntRange(1, 1000), default=3, show_default=True, help="Number of seeds per entry."
    ),
)
"""Options of a study that the command line defines."""


def _budget(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of `_budget_options` and return the `seeds` and `budget` of a study that they give."""
    from caddie.lab.study import EqualBudget, ModelledSeconds, Seconds, Steps, Tokens

    kinds: dict[str, type[EqualBudget]] = {"seconds": Seconds, "steps": Steps, "tokens": Tokens}
    kinds["modelled_seconds"] = ModelledSeconds
    amounts = {name: options.pop(name) for name in kinds}
    given = [kinds[name](**{name.split("_")[-1]: amount}) for name, amount in amounts.items() if amount is not None]
    if len(given) > 1:
        raise UserError("runs have equal seconds, modelled seconds, steps or tokens; give one of them")
    return {"seeds": tuple(range(1, options.pop("seeds") + 1)), "budget": given[0] if given else None}


@click.command()
@click.argument("definition", metavar="FILE.py[:NAME]")
@click.option("--holdout", metavar="TEXT", help="Score the finished runs on TEXT, which no run has seen.")
@click.option("--select", "greedy", is_flag=True, help="Greedy selection: add the best entry until none is better.")
@click.option("--ladder", "as_ladder", is_flag=True, help="Run the study at each of its scales and compare them.")
@click.option(
    "--fraction",
    type=Finite(0, 1, min_open=True),
    help="Give each run this fraction of its budget, as a separate study.",
)
@click.option(
    "--background", is_flag=True, help="Run without the terminal, one run per GPU or else per core; return at once."
)
@click.option("--nice", type=click.IntRange(0, 19), help="Niceness of the runs; 10 with --background.")
@click.option("--status", is_flag=True, help="Print the study's progress and exit.")
@click.option("--estimate", is_flag=True, help="Print the core hours that the remaining runs take, and run none.")
@_run_options
def study(
    definition: str,
    holdout: str | None,
    greedy: bool,
    as_ladder: bool,
    fraction: float | None,
    background: bool,
    nice: int | None,
    status: bool,
    estimate: bool,
    **how: Any,
) -> int:
    """Run the study in FILE.py and judge its entries. Finished runs are kept.

    Results go beside FILE.py, or to --out; run folders to runs/.
    """
    from caddie.config.userfile import split_name
    from caddie.lab.background import read_state
    from caddie.lab.holdout import score_holdout
    from caddie.lab.ladder import ladder
    from caddie.lab.report import Results
    from caddie.lab.rows import RESULTS, finished_rows
    from caddie.lab.selection import select
    from caddie.lab.study import find_study

    path, name = split_name(definition)
    results = path.parent if name in ("", "study") else path.parent / name
    if (holdout is not None) + greedy + as_ladder > 1:
        raise UserError("--holdout, --select and --ladder are done one at a time")
    found = find_study(definition)
    if fraction is not None and fraction < 1:
        found, results = found.part(fraction), results / f"fraction-{fraction:g}"
    if (background or status or estimate) and (holdout is not None or greedy or as_ladder):
        alone = "--background, --status and --estimate are for a study alone"
        raise UserError(f"{alone}, without --holdout, --select and --ladder")
    how["out"] = how["out"] or results
    if status:
        if (state := read_state(RUNS / found.name)) is None:
            kept = len(finished_rows(how["out"] / RESULTS))
            runs = count(len(found.labels) * len(found.seeds), "run")
            elsewhere = f"; {how['out']}/{RESULTS} has {kept} of {runs} from elsewhere" if kept else ""
            raise UserError(f"{found.name} was not begun here, in {RUNS / found.name}{elsewhere}")
        tell(state.to_json(), how["as_json"], str(state))
        return 0
    if estimate:
        return _estimate(found, **how)
    if background:
        return _begin(found, nice, **how)
    if nice and (lower := getattr(os, "nice", None)):  # Windows has none
        lower(nice)
        if os.getsid(0) == os.getpid():  # begun in the background
            share_niceness(os.getpid())
    if holdout is None:
        method = select if greedy else ladder if as_ladder else None
        return _run(found, method=method, **how)
    folder = how["out"]
    with Display(quiet=how["quiet"]) as display:
        rows = score_holdout(found, how["data"], holdout, results=folder, progress=display)
    scored = Results(found, rows, folder, how["price"])
    scored.write()
    return _print(scored, how["as_json"])


@click.command()
@recipe_argument("recipe")
@settings_argument
@_budget_options
@_run_options
@options("parts")
def ablate(recipe: str, settings: tuple[str, ...], parts: tuple[Path, ...], **how: Any) -> int:
    """Ablate RECIPE: revert each of its changes in turn."""
    from caddie.lab.variations import ablate as ablation
    from caddie.recipes.catalog import find_base

    found = named_recipe(recipe, settings, parts=parts)
    return _run(ablation(found, find_base(recipe), **_budget(how)), **how)


@click.command()
@recipe_argument("recipe")
@settings_option("values", "PATH=V1,V2...", required=True)
@click.option(
    "--random", "drawn", type=click.IntRange(1), metavar="N", help="Draw N random combinations; allows PATH=LOW..HIGH."
)
@click.option(
    "--search", "sampler", metavar="SAMPLER", help="Search with a sampler of Optuna: tpe, gp, nsgaii or random."
)
@click.option("--trials", type=click.IntRange(1), help="Trials of --search.")
@click.option("--pruner", metavar="PRUNER", help="Stop bad runs of --search early: median or hyperband.")
@_budget_options
@_run_options
@options("parts")
def sweep(
    recipe: str,
    values: tuple[str, ...],
    drawn: int | None,
    sampler: str | None,
    trials: int | None,
    pruner: str | None,
    parts: tuple[Path, ...],
    **how: Any,
) -> int:
    """Run RECIPE with other values and judge each.

    Runs all combinations, N random ones, or those that a search proposes. If any path
    has several values, paths with one value change RECIPE itself too.
    """
    from caddie.lab.search import Between, draw, read_space, search
    from caddie.lab.study import Study
    from caddie.lab.variations import sweep as grid

    equal = _budget(how)
    base, space = named_recipe(recipe, (), parts=parts), assignments(values, read_space)
    fixed = {path: held[0] for path, held in space.items() if not isinstance(held, Between) and len(held) == 1}
    if len(fixed) < len(space):
        base, space = base.but(fixed), {path: held for path, held in space.items() if path not in fixed}
    if (sampler is None) != (trials is None) or (pruner and sampler is None) or (drawn and sampler):
        raise UserError("a search is --search SAMPLER --trials N, with --pruner PRUNER if wanted and without --random")
    if sampler is not None and trials is not None:
        method = partial(search, space=space, trials=trials, sampler=sampler, pruner=pruner or "none")
        return _run(Study(name=f"search-{base.name}", base=base, **equal), method=method, **how)
    if drawn is not None:
        entries = draw(base, space, drawn)
        return _run(Study(name=f"random-{base.name}", base=base, entries=entries, **equal), **how)
    listed = {path: held for path, held in space.items() if not isinstance(held, Between)}
    if len(listed) < len(space):
        raise UserError("LOW..HIGH has no end of combinations; write values, or add --random N or --search SAMPLER")
    return _run(grid(base, listed, **equal), **how)


@click.command(hidden=True)
@click.argument("job", type=FILE)
@click.option("--with-parent", is_flag=True, help="End when standard input ends.")
@options("gpus")
def trial(job: Path, with_parent: bool, gpus: int) -> int:
    """Run the JOB of a study, as one of its processes or on another machine."""
    from caddie.lab.job import run_job
    from caddie.runtime import distributed
    from caddie.train.loop import Interrupted

    if with_parent:
        end_with_parent()
    if gpus > 1 and not distributed.under_torchrun():
        return distributed.launch(gpus, ["trial", str(job)])
    try:
        run_job(job)
    except Interrupted as error:
        return 128 + error.number
    return 0


def _estimate(study: Study, *, data: str | None, out: Path, as_json: bool, **how: Any) -> int:
    """Print the hours of a study's runs, and write them to `estimate.json` beside its results."""
    from caddie.doctor.study_hours import study_hours
    from caddie.files import write_json
    from caddie.lab.rows import ESTIMATE
    from caddie.lab.runner import plan

    with Display(quiet=how["quiet"]) as display:
        planned = plan(study, data, RUNS, display, results=out)
        hours = study_hours(study.name, planned, display)
    write_json(out / ESTIMATE, hours.to_json())
    tell(hours.to_json(), as_json, str(hours))
    return 0


def _begin(study: Study, nice: int | None, *, data: str | None, out: Path, as_json: bool, **how: Any) -> int:
    """Check a study, begin it in the background, and print how to follow and stop it."""
    import torch

    from caddie.lab.background import NICE, STUDY_LOG, begin
    from caddie.lab.runner import checked_recipes
    from caddie.run.resolve_corpus import check_source, check_text_named
    from caddie.runtime.distributed import allowed_cores

    check_text_named(study.base, data)
    check_source(data)
    checked_recipes(study)
    _executor(how["on"], how["workers"] or 1, how["gpus"], how["cores"])
    typed = [word for word in sys.argv[1:] if word != "--background"]
    arguments = [*typed, *(["--nice", str(NICE)] if nice is None else [])]
    if how["workers"] is None and how["on"] == "local":
        each = max(1, how["gpus"]) if torch.cuda.is_available() else 1
        arguments += ["--workers", str(max(1, (torch.cuda.device_count() or len(allowed_cores())) // each))]
    state = begin(study.name, RUNS, out, arguments, len(study.labels) * len(study.seeds))
    log, pid = out / STUDY_LOG, state.driver.pid
    lines = [
        f"{study.name} runs in the background, as process {pid}; the same command goes on with it if it ends early"
    ]
    lines += [f"log     {log}", f"runs    {RUNS / study.name}; see them with: caddie board"]
    lines += [f"status  caddie {shlex.join([*typed, '--status'])}", f"stop    kill {pid}"]
    tell({**state.to_json(), "log": str(log)}, as_json, "\n".join(lines))
    return 0


def _run(
    study: Study,
    *,
    method: Callable[..., Results | Selection | Ladder] | None = None,
    out: Path | None,
    workers: int | None,
    gpus: int,
    cores: int,
    on: str,
    as_json: bool,
    quiet: bool,
    **how: Any,
) -> int:
    """Run a study by `method` (`run_study` unless named) and print its results."""
    from caddie.lab.runner import run_study
    from caddie.run.resolve_corpus import check_text_named

    check_text_named(study.base, how["data"])
    how["keep_checkpoints"] |= method is not None  # the next round, scale or trial may start from one
    how |= {"executor": _executor(on, workers or 1, gpus, cores), "folder": out}
    typed, runs = typed_command(), len(study.labels) * len(study.seeds)
    with resume_hint(typed), Display(quiet=quiet) as display:
        if method is None:
            each = f"{count(len(study.labels), 'recipe')}, {count(len(study.seeds), 'seed')} each"
            seconds = study.recipe(study.labels[0]).train.seconds
            time = f"training takes up to {duration(runs * seconds / how['executor'].workers)}, " if seconds else ""
            display.note(f"{count(runs, 'run')}: {each}; {time}after the first run the time left is known")
        found = (method or run_study)(study, command=typed, progress=display, **how)
    return _print(found, as_json)


def _executor(on: str, workers: int, gpus: int, cores: int) -> Executor:
    """Return the executor of `--on` (docs/clusters.md)."""
    engine, _, place = on.partition(":")
    if engine == "slurm":
        from caddie.lab.slurm import Slurm

        return Slurm(place, workers=workers, cores_each=cores, gpus_each=gpus)
    if engine == "ray":
        from caddie.lab.cluster import Cluster

        if workers > 1:
            raise UserError("--workers is not for Ray, where as many runs as fit go at once; give --cores and --gpus")
        return Cluster(place, cores_each=cores, gpus_each=gpus)
    if on != "local":
        raise UserError(f"--on takes local, ray[:ADDRESS] or slurm[:PARTITION], not {on}")
    if cores:
        raise UserError("--cores is for --on ray and --on slurm; leave it out")
    return Local(workers, gpus)


def _print(found: Results | Selection | Ladder, as_json: bool) -> int:
    from caddie.lab.report import Results
    from caddie.lab.rows import RESULTS

    if not isinstance(found, Results):
        tell(found.facts, as_json, str(found))
        return 0
    facts = {"study": found.study.name, "results": str(found.folder / RESULTS), "report": str(found.folder / REPORT)}
    facts |= {name: found.facts[name] for name in ("found", "verdicts", "board", "failed", "notes", "cost")}
    tell(facts, as_json, f"{found}\n\nreport  {found.folder / REPORT}")
    judged = any(one["difference"] is not None for one in found.facts["verdicts"])
    return 0 if judged or not found.study.entries else 1
