"""How public figures are written down: a run a line."""

from __future__ import annotations

from caddie.recipes.recipe import Figure

RECORDS = "openai/parameter-golf, records/track_10min_16mb/"
"""Where most public results stand."""

Run = tuple[int | str, float, int | None]
"""Seed or name of a run, bits per byte, and bytes of the artifact where they are known."""


def figures(source: str, *runs: Run, machine: str = "8xH100", note: str = "") -> tuple[Figure, ...]:
    """The runs of one source, in its order."""
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
