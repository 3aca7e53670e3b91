"""Write the records folder of a contest submission from finished runs: one recipe, one or more seeds."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from caddie.data.corpus import MANIFEST, Corpus, file_sha256
from caddie.errors import UserError
from caddie.files import reason, unfinished
from caddie.lab.compare import read_group
from caddie.lab.stats import welch
from caddie.pack.source_bundle import TRAINING, describe_source, script, source_needed
from caddie.recipes.catalog import find
from caddie.recipes.recipe import Recipe
from caddie.report.read import known_number, pick, read_json, read_object, read_scored_result, read_steps, result_errors
from caddie.report.run_files import ARTIFACT, LOG, RECIPE, RESULT
from caddie.run.contest_sets import CURRENT
from caddie.run.policy import CONTEST_2026
from caddie.submit.contest_log import after_scoring, after_training, before_training, step_line
from caddie.submit.readme import readme

JSON = "submission.json"
RECORD, NON_RECORD = "10min_16mb", "non-record-unlimited-compute-16mb"
"""Tracks: with limits of time on the contest's machine, and without."""
_OPTIONAL = ("triton", "flash_attn", "flash_attn_interface")
"""Libraries that are not required: PyTorch brings the first for a GPU, the others are used where they are installed."""


@dataclass(frozen=True)
class Run:
    """A finished run that may be submitted."""

    folder: Path
    seed: int
    result: dict[str, Any]
    recipe: Recipe
    train_shards: int | None
    """None where the corpus is gone or is another by now."""
    steps: list[dict[str, Any]]

    @property
    def scores(self) -> list[dict[str, Any]]:
        """Scores of the file, the last of which is the run's."""
        stages = ("quantized_plain", "quantized_sliding", "quantized_adaptive")
        return [score for stage in stages if (score := self.result["scores"].get(stage))]

    @property
    def contest_seconds(self) -> dict[str, float | None]:
        """Seconds of `training` and `evaluation` as the contest counts them, on the run's machine."""
        policy = next(one for one in self.result["policies"] if one["name"] == CONTEST_2026.name)
        return {clock: policy[clock]["seconds"] for clock in ("training", "evaluation")}


@dataclass(frozen=True)
class Base:
    """The record that a submission is compared with, by the scores of its seeds."""

    name: str
    scores: list[float]
    difference: float
    """Bits per byte by which the mean of the runs is lower."""
    p: float | None
    """Welch's one-sided p; None with fewer than two scores on a side, or where nothing varies."""


def submit(
    places: Sequence[Path],
    out: Path,
    *,
    author: str,
    github_id: str,
    name: str | None = None,
    against: str | None = None,
    non_record: bool = False,
) -> dict[str, Any]:
    """Write the folder `out` from run folders, which differ in their seeds alone; return what `submission.json` holds.

    `against` names a recipe with published scores, or the folder or JSON of a submission. Runs of another machine than
    the contest's go to the non-record track. Raises `UserError`, before anything is written, for runs that the track
    does not take.
    """
    if os.path.lexists(out):
        raise UserError(f"{out} exists; name a new folder by --out")
    runs = [_read(run.place) for run in read_group(places)]
    recipe = runs[0].recipe
    program = script(recipe.to_json())
    track = NON_RECORD if non_record or not all(map(_contest_machine, runs)) else RECORD
    files, by_seed = {"train_gpt.py": program.decode()}, {}
    for run in runs:
        with result_errors(run.folder / RESULT, "a submission"):
            _check(run, track, len(program))
            by_seed[str(run.seed)] = _seed_facts(run, len(program))
            files[f"train_seed{run.seed}.log"] = "\n".join(_log(run, len(program))) + "\n"
    base = _compare(against, runs) if against else None
    facts = {"author": author, "github_id": github_id, "name": name or recipe.name, "track": track}
    with result_errors(runs[0].folder / RESULT, "a submission"):
        facts |= _facts(runs, by_seed, len(program)) | (_base_facts(base) if base else {})
        files["README.md"] = readme(runs, facts, base, len(program))
        files["requirements.txt"] = _requirements(runs[0].result)
    files[JSON] = json.dumps(facts, indent=2) + "\n"
    _write(out, files)
    return facts


def _read(place: Path) -> Run:
    """Return the run in a folder; `UserError` unless its recipe and artifact are those of its result."""
    folder = place if place.is_dir() else place.parent
    path = folder / RESULT
    with result_errors(path, "a submission"):
        result = read_scored_result(path)
        about = read_json(folder / RECIPE)
        if not isinstance(pick(about, "recipe"), dict):
            raise UserError(f"{folder / RECIPE} is missing or damaged; run the recipe again")
        recipe = Recipe.from_json(about["recipe"])
        if recipe.sha256 != result["sha256"]["recipe"]:
            raise UserError(f"{folder / RECIPE} is not the recipe of {path}; run the recipe again")
        if not (folder / ARTIFACT).is_file() or file_sha256(folder / ARTIFACT) != result["sha256"]["artifact"]:
            raise UserError(f"{folder / ARTIFACT} is not the file that {path} scored; run the recipe again")
        if not (steps := read_steps(folder / LOG)):
            raise UserError(f"{folder / LOG} holds no steps; run the recipe again")
        shards = _train_shards(about.get("corpus"), result["sha256"]["corpus"])
        return Run(folder, int(result["seed"]), result, recipe, shards, steps)


def _train_shards(corpus: object, sha256: str) -> int | None:
    with suppress(OSError, ValueError, UserError):
        folder = Path(str(corpus))
        if file_sha256(folder / MANIFEST) == sha256 and (split := Corpus.load(folder).manifest.train):
            return len(split.shards)
    return None


def _contest_machine(run: Run) -> bool:
    return bool(run.result["world"] == 8 and "H100" in run.result["device"])


def _check(run: Run, track: str, code_bytes: int) -> None:
    """Raise `UserError` if a run may not be submitted to the track with a script of `code_bytes`."""
    result, folder, cap = run.result, run.folder, CONTEST_2026.cap_bytes or 0
    if result["verified"] is False or not result["under_cap"]:
        raise UserError(f"{folder} did not pass verification; caddie verify {folder / ARTIFACT} says why")
    if run.recipe.pack.carry_source:
        raise UserError(f"{folder}: its file carries its source, as the script does; set pack.carry_source=false")
    source = describe_source(run.recipe.to_json())
    counted = result["source"]["needed_bytes"] + result["source"]["training_bytes"]
    if result["source"].get("script_sha256") != source["script_sha256"] or counted != code_bytes:
        made = f" (commit {result['code'][:12]})" if result.get("code") else ""
        raise UserError(
            f"{folder} was run by another program{made}, whose script is another; submit with that, or rerun"
        )
    if (total := result["artifact_bytes"] + code_bytes) > cap:
        raise UserError(f"{folder}: file and script have {total:,} bytes, {total - cap:,} over {cap:,}; lower cap=N")
    if track == NON_RECORD:
        return
    for clock, seconds in run.contest_seconds.items():
        if over := _over(clock, seconds):
            raise UserError(f"{folder}: {clock} {over}; --non-record has no limit of time")
    if not _contest_text(run):
        raise UserError(f"{folder} was scored on another text than {CURRENT.name}; --non-record takes any")


def _over(clock: str, seconds: float | None) -> str:
    """Say how a clock is not within the contest's limit; empty if it is."""
    most = {"training": CONTEST_2026.training, "evaluation": CONTEST_2026.evaluation}[clock].seconds
    if seconds is None:
        return "was not timed"
    return f"took {seconds:,.1f} s of {most:,.0f}" if most and seconds > most else ""


def _contest_text(run: Run) -> bool:
    corpus = run.result["corpus"]
    return CURRENT.fits(corpus["source_bytes"]["validation"], corpus["documents"]["validation"])


def _facts(runs: Sequence[Run], by_seed: Mapping[str, Any], code_bytes: int) -> dict[str, Any]:
    """Return what `submission.json` holds of the runs together, in the fields of merged records."""
    bits = [run.result["bits_per_byte"] for run in runs]
    losses = [run.scores[-1]["nats_per_token"] for run in runs]
    totals = [run.result["artifact_bytes"] + code_bytes for run in runs]
    deviations = {"val_bpb_std": stdev(bits), "val_loss_std": stdev(losses)} if len(runs) > 1 else {}
    first = runs[0].result
    late = {clock for run in runs for clock, seconds in run.contest_seconds.items() if _over(clock, seconds)}
    return {
        "blurb": first["why"],
        "date": time.strftime("%Y-%m-%d"),
        "val_bpb": round(fmean(bits), 8),
        "val_loss": round(fmean(losses), 8),
        **{field: round(value, 8) for field, value in deviations.items()},
        "seeds": [run.seed for run in runs],
        "seed_results": by_seed,
        "bytes_total": max(totals),
        "bytes_code": code_bytes,
        "artifact_bytes_mean": round(fmean(totals)),
        "artifact_bytes_max": max(totals),
        "model_params": first["training"]["parameters"],
        "hardware": f"{first['world']}x{first['device']}",
        "pytorch_version": first["versions"]["torch"],
        "compliance": {
            "artifact_under_16mb": max(totals) <= (CONTEST_2026.cap_bytes or 0),
            "train_under_600s": "training" not in late,
            "eval_under_600s": "evaluation" not in late,
            "three_seeds": len(runs) >= 3,
            "verified": all(run.result["verified"] for run in runs),
            "contest_validation_set": all(map(_contest_text, runs)),
        },
        "sha256": {
            name: first["sha256"][name] for name in ("recipe", "tokenizer", "train_documents", "validation_documents")
        },
    }


def _base_facts(base: Base) -> dict[str, Any]:
    return {
        "comparison_baseline": base.name,
        "comparison_baseline_scores": base.scores,
        "delta_bpb": -base.difference,
        **({"p_value": base.p} if base.p is not None else {}),
    }


def _seed_facts(run: Run, code_bytes: int) -> dict[str, Any]:
    """Return the fields of a seed; `artifact_bytes` include the script, as in merged records."""
    result, seconds = run.result, run.contest_seconds
    training, before = result["training"], result["scores"]["averaged_plain"] or result["scores"]["trained_plain"]
    return {
        "val_bpb": round(result["bits_per_byte"], 8),
        "val_loss": round(run.scores[-1]["nats_per_token"], 8),
        "artifact_bytes": result["artifact_bytes"] + code_bytes,
        "model_bytes": result["artifact_bytes"],
        "steps": training["steps"],
        "step_avg_ms": round(1000 * result["seconds"]["train"] / training["steps"], 3),
        "train_wallclock_ms": None if seconds["training"] is None else round(1000 * seconds["training"]),
        "eval_time_s": seconds["evaluation"],
        "pre_quant_val_bpb": round(before["bits_per_byte"], 8),
        "quantized_val_bpb": round(result["scores"]["quantized_plain"]["bits_per_byte"], 8),
        "val_tokens": run.scores[-1]["tokens"],
        "artifact_sha256": result["sha256"]["artifact"],
    }


def _log(run: Run, code_bytes: int) -> list[str]:
    """Return the lines of the run's log as a contest script would have printed them."""
    result, budget = run.result, run.recipe.train
    facts = {
        "recipe": result["recipe"],
        "recipe_sha256": result["sha256"]["recipe"],
        "device": result["device"],
        "precision": result["precision"],
        "seed": run.seed,
        "world_size": result["world"],
        "train_shards": run.train_shards,
        "val_tokens": run.scores[-1]["tokens"],
        "val_bytes": run.scores[-1]["source_bytes"],
        "model_params": result["training"]["parameters"],
    }
    steps = budget.steps or result["training"]["steps"]
    return [
        *before_training(facts),
        *(step_line(event, steps) for event in run.steps),
        *after_training(result, {"seconds": budget.seconds, "steps": budget.steps}),
        *after_scoring(result, code_bytes),
        f"artifact_sha256:{result['sha256']['artifact']}",
    ]


def _compare(against: str, runs: Sequence[Run]) -> Base:
    """Return the comparison with a recipe's published scores or another submission, on the same held-out text."""
    path = Path(against)
    if path.exists() or path.suffix == ".json":
        path = path / JSON if path.is_dir() else path
        name, scores, text = _submitted(path)
    else:
        recipe, text = find(against), None
        name = recipe.name
        scores = [one.bits_per_byte for one in recipe.public if one.source == recipe.public[0].source]
    if not scores:
        raise UserError(f"{against} has no scores to compare with; name a recipe or a submission that has")
    ours = runs[0].result["sha256"]["validation_documents"]
    if text != ours and (text is not None or not _contest_text(runs[0])):
        raise UserError(f"the runs were scored on another text than {against}; their scores do not compare")
    bits = [run.result["bits_per_byte"] for run in runs]
    p = welch(scores, bits).p_above(0.0) if min(len(scores), len(bits)) > 1 else None
    return Base(name, scores, fmean(scores) - fmean(bits), None if p is None or p != p else p)


def _submitted(path: Path) -> tuple[str, list[float], str | None]:
    """Return name, scores of the seeds and hash of the held-out text, if stated, of a `submission.json`."""
    try:
        known = read_object(path)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({reason(error)}); name a submission or its {JSON}") from None
    by_seed = known.get("seed_results")
    entries = list(by_seed.values()) if isinstance(by_seed, dict) else []
    scores = [score for entry in entries if (score := known_number(pick(entry, "val_bpb"))) is not None]
    mean, text = known_number(known.get("val_bpb")), pick(known, "sha256", "validation_documents")
    name = str(known.get("name") or path.parent.name)
    return name, scores or ([mean] if mean is not None else []), text if isinstance(text, str) else None


def _requirements(result: Mapping[str, Any]) -> str:
    """Return the libraries of the script: PyTorch and NumPy as the runs had them, all others as on this machine."""
    known = {name: result["versions"][name] for name in ("torch", "numpy")}
    libraries = [name for name in source_needed(TRAINING).libraries if name not in _OPTIONAL]
    versions = {name: known.get(name) or version(name) for name in libraries}
    return "".join(f"{name}=={found.partition('+')[0]}\n" for name, found in versions.items())


def _write(out: Path, files: Mapping[str, str]) -> None:
    """Write the folder, whole or not at all."""
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        partial = unfinished(out)
        try:
            partial.mkdir()
            for name, text in files.items():
                (partial / name).write_text(text, encoding="utf-8")
            partial.rename(out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{out}: cannot be written ({reason(error)}); name another folder") from None
