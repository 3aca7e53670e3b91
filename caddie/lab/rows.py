"""Rows of a study's runs: one JSON object for each, small enough to commit (`docs/studies.md`).

A row's `documents`, the bytes and bits of each held-out document, stand in another file, a column for each run.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from caddie.errors import UserError, count
from caddie.files import write_file
from caddie.lab.job import Run, finished
from caddie.lab.study import Study
from caddie.report.documents import read_documents, run_documents, write_documents
from caddie.report.page import setting
from caddie.report.read import known_number, pick, read_json, read_result, read_steps, result_errors, run_settings
from caddie.report.run_files import DOCUMENTS, ERROR, HOLDOUT, LOG, RECIPE, RESULT, TASK
from caddie.runtime.progress import Progress

Row = dict[str, Any]
STUDY, RESULTS, ESTIMATE = "study.json", "results.jsonl", "estimate.json"
EARLIER = "earlier.jsonl"
"""Rows of finished runs that the study no longer plans, each with its documents."""
CURVE_POINTS = 60
"""Most points of the loss curve in a row."""
_ROUNDED, _ROUNDED_BITS = 1e-5, 0.0005
"""Rounding errors allowed between a score and its documents: bits per byte, and bits of each document."""


def row(study: Study, run: Run) -> Row | None:
    """Return the row of a run that is over, or None."""
    entry = study.entries.get(run.label)
    facts: Row = {
        "study": study.name,
        "label": run.label,
        "kind": entry.kind if entry else "",
        "seed": run.seed,
        "key": run.key,
        "diff": study.shown(run.label),
    }
    if time := study.step_times.get(run.label):  # of a step at full size, if the budget uses it
        facts |= {"step_ms": time.milliseconds, "step_ms_by": time.source}
    if run.row is not None:
        return {**run.row, **facts}
    if not finished(run.folder):
        return facts | failure(run.folder) if (run.folder / ERROR).exists() else None
    return facts | measured(run.folder, read_result(run.folder / RESULT))


def outcome(row: Row) -> str:
    """Format the end of a run: its label, seed and score or reason."""
    end = f"{row['bits_per_byte']:.4f} bpb" if row["state"] == "finished" else f"{row['state']}: {row['error']}"
    return f"{row['label']}, seed {row['seed']}  {end}"


def measured(folder: Path, result: Mapping[str, Any]) -> Row:
    """Return the part of a row that comes from a run folder. None stands for what older versions did not write."""
    training = result.get("training")
    stages = {"trained": "trained_plain", "averaged": "averaged_plain", "packed": "quantized_plain"}
    return {
        "state": "finished",
        "error": None,
        "bits_per_byte": result.get("bits_per_byte"),
        **{name: known_number(pick(result, "scores", key, "bits_per_byte")) for name, key in stages.items()},
        "quantization_loss": pick(result, "compression", "measured_bits_per_byte"),
        "artifact_bytes": result.get("artifact_bytes"),
        **{name: pick(training, name) for name in ("parameters", "steps", "tokens", "tokens_per_second")},
        **{name: pick(training, name) for name in ("threads", "cpu_share")},
        "train_seconds": pick(result, "seconds", "train"),
        "total_seconds": pick(result, "seconds", "total"),
        **{name: result.get(name) for name in ("verified", "under_cap", "device", "processor")},
        **{name: result.get(name) for name in ("precision", "world", "code")},
        "trained_with": pick(result, "study", "trained_with"),
        "workers": pick(result, "study", "workers"),
        "program_sha256": pick(result, "source", "program_sha256"),
        "scorer_sha256": pick(result, "source", "sha256"),
        "sha256": result.get("sha256") or {},
        "curve": curve(read_steps(folder / LOG)),
        **read_holdout(folder),
        **({"documents": [one.tolist() for one in documents]} if (documents := run_documents(folder)) else {}),
    }


def failure(folder: Path) -> Row:
    """Return the state (failed or pruned) and reason of a run without result, with paths relative to its folder."""
    found = read_json(folder / ERROR)
    if (reason := pick(found, "error")) is None:
        return {"state": "failed", "error": f"{folder / ERROR} cannot be read"}
    state = "pruned" if found.get("state") == "pruned" else "failed"
    return {"state": state, "error": str(reason).replace(f"{folder.resolve()}/", "")}


def read_holdout(folder: Path) -> Row:
    """Return the holdout bits per byte of a run, and the hash of the holdout documents; None if not scored."""
    try:
        kept = read_json(folder / HOLDOUT)
        return {"holdout": float(kept["bits_per_byte"]), "holdout_documents": str(kept["documents"])}
    except (ValueError, KeyError, TypeError):
        return {"holdout": None, "holdout_documents": None}


def curve(steps: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Return points of step, seconds, tokens and training bits per byte, each the mean over its share of the steps."""
    points: list[list[float]] = []
    count = min(CURVE_POINTS, len(steps))
    for index in range(count):
        part = steps[index * len(steps) // count : (index + 1) * len(steps) // count]
        cost, last = fmean(step["bits_per_byte"] for step in part), part[-1]
        points.append([last["step"], round(last["seconds"], 2), last["tokens"], round(cost, 5)])
    return points


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file; those of `RESULTS` get their `DOCUMENTS`. Raises `UserError` for a bad line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise UserError(f"{path} cannot be read; run the study first: caddie study FILE.py") from None
    rows: list[Row] = []
    places = dict[tuple[str, int], int]()
    for number, line in enumerate(lines, 1):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or not _is_row(found):
            raise UserError(f"{path}: line {number} is no run of a study; remove it, and run the study again")
        first = places.setdefault((found["label"], found["seed"]), number)
        if path.name == RESULTS and first != number:  # of two machines, or two versions of the study
            again = f"line {number} is of {found['label']}, seed {found['seed']}, as line {first} is"
            raise UserError(f"{path}: {again}; remove one of them, and run the study again")
        rows.append(found)
    beside = path.with_name(DOCUMENTS)
    if path.name != RESULTS or not beside.exists():
        return rows
    sizes, bits = read_documents(beside)
    for row in rows:
        if (own := bits.get(_column(row))) is None:
            continue
        score, total = row.get("bits_per_byte"), float(own.sum() / sizes.sum())
        if isinstance(score, float) and abs(total - score) > _ROUNDED + _ROUNDED_BITS * len(sizes) / sizes.sum():
            differ = f"{_column(row)} has {total:.5f} bits per byte, and {score:.5f} in {path.name}"
            raise UserError(f"{beside}: {differ}; remove it, or bring both files from one place")
        row["documents"] = [sizes.tolist(), own.tolist()]
    return rows


def finished_rows(*paths: Path) -> dict[str, Row]:
    """Return key to row of every finished run in files of rows, which need not exist; a later file wins."""
    return {str(row.get("key")): row for path in paths for row in _finished(path)}


def keep_earlier(folder: Path, keys: Collection[str], progress: Progress) -> None:
    """Copy finished rows of `RESULTS` whose key is not in a study's `keys` to `EARLIER`, and report it."""
    kept = _finished(folder / EARLIER)
    new = [row for row in _finished(folder / RESULTS) if row.get("key") not in keys and row not in kept]
    if new:
        _write(folder / EARLIER, [*kept, *new])
        progress.note(f"{count(len(new), 'finished run')} no longer in this study; kept in {folder / EARLIER}")


def _finished(path: Path) -> list[Row]:
    return [row for row in read_rows(path) if row["state"] == "finished"] if path.exists() else []


def _is_row(found: Mapping[str, Any]) -> bool:
    names = isinstance(found.get("label"), str) and isinstance(found.get("seed"), int) and "state" in found
    points = found.get("curve") or []
    return names and isinstance(points, list) and all(isinstance(point, list) and len(point) == 4 for point in points)


def read_study(path: Path) -> dict[str, Any]:
    """Return the description of a study at `path`. Raises `UserError` if there is none."""
    study = read_json(path)
    if not isinstance(study, dict) or not {"name", "base", "budget", "entries", "margin", "seeds"} <= study.keys():
        todo = f"{'remove it and ' if path.exists() else ''}run the study, finished runs are kept"
        raise UserError(f"{path} describes no study; {todo}: caddie study FILE.py")
    return study


def from_runs(folders: Sequence[Path]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a description and rows like a study's for finished runs: each recipe is a label, the first is the base.

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
        diff = dict(_setting_changes(settings[0], own))
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
        "planned": False,
        "margin": 0.0,
        "budget": "each recipe's own",
        "equal": "",
        "public": results[0][1].get("public") or [],
        "base_values": {path: value for own in settings for path, value in _setting_changes(own, settings[0])},
    }
    return study, rows


def _setting_changes(base: Any, other: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted paths at which two recipes in JSON differ, with the value of the other."""
    if isinstance(base, Mapping) and isinstance(other, Mapping) and base.get("kind") == other.get("kind"):
        for name in {**base, **other}:
            below = f"{path}.{name}" if path else str(name)
            if name not in other:
                yield below, "left out"
            elif name not in base:
                yield below, setting(other[name])
            else:
                yield from _setting_changes(base[name], other[name], below)
    elif base != other:
        yield path, setting(other)


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows, all or nothing, and the documents of all runs that were scored on the text of the first one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = [(_column(row), *row["documents"]) for row in rows if row.get("documents")]
    beside = path.with_name(DOCUMENTS)
    if not known:
        beside.unlink(missing_ok=True)  # it belongs to earlier rows
    else:
        sizes = known[0][1]
        bits = {column: own for column, of_text, own in known if of_text == sizes}
        write_documents(beside, sizes, bits)
    _write(path, [{name: value for name, value in row.items() if name != "documents"} for row in rows])


def _write(path: Path, rows: Iterable[Row]) -> None:
    write_file(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def _column(row: Row) -> str:
    """Return the name of a run's column of documents."""
    return f"{row['label']} s{row['seed']}"
