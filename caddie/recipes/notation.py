"""Short notation for what many recipes say: public results, and one setting of several roles."""

from __future__ import annotations

from caddie.recipes.recipe import Figure


def figures(source: str, runs: str, machine: str = "8xH100", note: str = "") -> tuple[Figure, ...]:
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


def per_role(path: str, **values: float) -> dict[str, float]:
    """Return the diff that sets one setting of several roles; `*` in the path stands for the role."""
    return {path.replace("*", role): value for role, value in values.items()}
