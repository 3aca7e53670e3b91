"""Public results of the recipes, read from `published.txt`, and the speed of their runs, from `published_steps.txt`."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

from caddie.recipes.recipe import Figure


def rows(name: str) -> list[list[str]]:
    """Return the rows of a table beside this module, each a list of columns, without the lines that begin with #."""
    lines = Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()
    return [line.split(" | ") for line in lines if not line.startswith("#")]


@cache
def published() -> dict[str, tuple[Figure, ...]]:
    """Return name of a recipe to its public results, in the order of the file."""
    found: dict[str, tuple[Figure, ...]] = {}
    for name, *about in rows("published.txt"):
        found[name] = found.get(name, ()) + figures(*about)
    return found


def figures(source: str, runs: str, machine: str, note: str = "") -> tuple[Figure, ...]:
    """Return the results of one source: the folder of a record or, as `#593`, a pull request.

    `runs` are `RUN BITS_PER_BYTE BYTES, …`, where RUN is a seed or a name, and BYTES is `-` if not known.
    """
    place = "" if source.startswith("#") else "records/track_10min_16mb/"
    source = f"openai/parameter-golf{',' if place else ''} {place}{source}"
    found = []
    for run in runs.split(", "):
        name, score, size = run.rsplit(" ", 2)
        label = f"{machine}, seed {name}" if name.isdigit() else f"{machine}, {name}"
        size_bytes = None if size == "-" else int(size)
        found.append(
            Figure(label=label, bits_per_byte=float(score), artifact_bytes=size_bytes, source=source, note=note)
        )
    return tuple(found)


class Speed(NamedTuple):
    """Speed of a recipe's public runs."""

    steps: int
    """Optimizer steps, the mean over the runs."""
    step_ms: float
    """Milliseconds per step."""
    source: str
    """Record or pull request, and machine."""


@cache
def speeds() -> dict[str, Speed]:
    """Return name of a recipe to the speed of its public runs, for recipes whose runs have logs."""
    found = rows("published_steps.txt")
    return {name: Speed(int(steps), float(step_ms), source) for name, steps, step_ms, _, source in found}
