"""What is kept of a study's runs: one JSON row for each, small enough to commit (`docs/studies.md`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from caddie.errors import UserError
from caddie.files import replacing
from caddie.lab.study import Study
from caddie.lab.trial import ERROR, Run, finished
from caddie.line import LOG, RESULT
from caddie.report import read_result, read_steps

Row = dict[str, Any]
RESULTS, HOLDOUT = "results.jsonl", "holdout.json"
CURVE_POINTS = 60
"""Of a loss curve that a row keeps, at most."""


def row(study: Study, run: Run) -> Row | None:
    """The row of a run that is over, or None."""
    entry = study.entries.get(run.label)
    facts: Row = {
        "study": study.name,
        "label": run.label,
        "kind": entry.kind if entry else "",
        "seed": run.seed,
        "key": run.key,
        "diff": study.shown(run.label),
    }
    if not finished(run.folder):
        return facts | failure(run.folder) if (run.folder / ERROR).exists() else None
    result = read_result(run.folder / RESULT)
    scores, training, told = result["scores"], result["training"], result.get("study", {})
    return facts | {
        "state": "finished",
        "error": None,
        "bits_per_byte": result["bits_per_byte"],
        "trained": scores["trained_plain"]["bits_per_byte"],
        "averaged": scores["averaged_plain"] and scores["averaged_plain"]["bits_per_byte"],
        "packed": scores["quantized_plain"]["bits_per_byte"],
        "quantization_loss": result["compression"]["measured_bits_per_byte"],
        "artifact_bytes": result["artifact_bytes"],
        "parameters": training["parameters"],
        **{name: training[name] for name in ("steps", "tokens", "tokens_per_second", "threads", "cpu_share")},
        "train_seconds": result["seconds"]["train"],
        "total_seconds": result["seconds"]["total"],
        "verified": result["verified"],
        **{name: result[name] for name in ("device", "precision", "world", "code")},
        "trained_with": told.get("trained_with"),
        "workers": told.get("workers"),
        "scorer_sha256": result["source"]["sha256"],
        "sha256": result["sha256"],
        "curve": curve(read_steps(run.folder / LOG)),
        "holdout": read_holdout(run.folder),
    }


def failure(folder: Path) -> Row:
    """Whether a run failed or was pruned by a search, and why, with paths as they are in its folder."""
    try:
        told = json.loads((folder / ERROR).read_text())
        reason = str(told["error"]).replace(f"{folder.resolve()}/", "")
        return {"state": "pruned" if told.get("state") == "pruned" else "failed", "error": reason}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {"state": "failed", "error": f"{folder / ERROR} cannot be read"}


def read_holdout(folder: Path, documents: str | None = None) -> float | None:
    """The bits per byte that a run's last look gave, of these documents if they are named; or None."""
    try:
        kept = json.loads((folder / HOLDOUT).read_text())
        return float(kept["bits_per_byte"]) if documents in (None, kept["documents"]) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def curve(steps: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Step, seconds, tokens and training bits per byte, each point the mean over its share of the logged steps."""
    points: list[list[float]] = []
    count = min(CURVE_POINTS, len(steps))
    for index in range(count):
        part = steps[index * len(steps) // count : (index + 1) * len(steps) // count]
        costs = [float(step.get("bits_per_byte", step["loss"])) for step in part]
        last = part[-1]
        points.append([last["step"], round(last["seconds"], 2), last["tokens"], round(sum(costs) / len(costs), 5)])
    return points


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; a `UserError` names a line that is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise UserError(f"{path} cannot be read; run the study first: caddie study FILE.py") from None
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or not {"label", "seed", "state"} <= found.keys():
            raise UserError(f"{path}: line {number} is no run of a study; run the study again to write it anew")
        rows.append(found)
    return rows


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows, all or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
