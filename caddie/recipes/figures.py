"""Short notation for public results: one line for each run."""

from __future__ import annotations

from caddie.recipes.recipe import Figure

RECORDS = "openai/parameter-golf, records/track_10min_16mb/"
"""Folder of most public results."""

Run = tuple[int | str, float, int | None]
"""Seed or name of a run, bits per byte, and bytes of the artifact or none."""


def figures(source: str, *runs: Run, machine: str = "8xH100", note: str = "") -> tuple[Figure, ...]:
    """Return the results of one source, in its order."""
    return tuple(
        Figure(
            label=f"{machine}, seed {run}" if isinstance(run, int) else f"{machine}, {run}",
            bits_per_byte=bits_per_byte,
            artifact_bytes=artifact_bytes,
            source=source,
            note=note,
        )
        for run, bits_per_byte, artifact_bytes in runs
    )
