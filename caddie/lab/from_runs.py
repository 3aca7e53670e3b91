"""Turn run folders into a study: runs of one recipe are the seeds of one label."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from caddie.errors import UserError
from caddie.lab.rows import measured
from caddie.report.page import setting
from caddie.report.read import pick, read_json, read_result, result_errors, run_settings
from caddie.report.run_files import RECIPE, RESULT, TASK


def from_runs(folders: Sequence[Path]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a study's description and rows for finished runs; the recipe of the first is the base.

    Raises `UserError` for a folder without a result, and where one recipe has a seed twice.
    """
    if not folders:
        raise UserError("no runs to report; name the folders of finished runs")
    results = [(folder, read_result(folder / RESULT)) for folder in folders]
    groups: dict[str, list[tuple[Path, dict[str, Any]]]] = {}
    for folder, result in results:
        groups.setdefault(str(pick(result, "sha256", "recipe") or result.get("key")), []).append((folder, result))
    firsts = [group[0] for group in groups.values()]
    names = [str(pick(read_json(folder / TASK), "label") or result["recipe"]) for folder, result in firsts]
    labels = [
        f"{name} {result.get('key')}" if names.count(name) > 1 else name
        for name, (_, result) in zip(names, firsts, strict=True)
    ]
    settings = [run_settings(read_json(folder / RECIPE)) for folder, _ in firsts]
    entries, rows = [], []
    for label, group, own in zip(labels, groups.values(), settings, strict=True):
        diff = dict(_changes(settings[0], own))
        why = group[0][1].get("why") or ""
        entries.append({"label": label, "diff": diff, "against": labels[0], "kind": "", "why": why, "claim": None})
        seeds: dict[int, Path] = {}
        for folder, result in group:
            with result_errors(folder / RESULT, "a report"):
                seed = int(result["seed"])
                if seed in seeds:
                    raise UserError(f"{seeds[seed]} and {folder} are the same recipe and seed; leave one out")
                seeds[seed] = folder
                facts = {"label": label, "kind": "", "seed": seed, "key": result.get("key"), "diff": diff}
                rows.append({"study": pick(result, "study", "study"), **facts, **measured(folder, result)})
    study = {
        "name": "Runs",
        "why": f"{len(results)} finished runs side by side.",
        "base": labels[0],
        "label": labels[0],
        "entries": entries[1:],
        "seeds": sorted({row["seed"] for row in rows}),
        "margin": 0.0,
        "budget": "each recipe's own",
        "equal": "",
        "public": results[0][1].get("public") or [],
        "base_values": {path: value for own in settings for path, value in _changes(own, settings[0])},
    }
    return study, rows


def _changes(base: Any, other: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted paths at which two recipes in JSON differ, with the value of the other."""
    if isinstance(base, Mapping) and isinstance(other, Mapping) and base.get("kind") == other.get("kind"):
        for name in {**base, **other}:
            below = f"{path}.{name}" if path else str(name)
            if name not in other:
                yield below, "left out"
            elif name not in base:
                yield below, setting(other[name])
            else:
                yield from _changes(base[name], other[name], below)
    elif base != other:
        yield path, setting(other)
