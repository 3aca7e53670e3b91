"""Write the records folder of a contest submission from finished runs: one recipe, one or more seeds."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from caddie.errors import UserError
from caddie.files import check_new_folder, making
from caddie.lab.compare import read_group
from caddie.pack.artifact import load, load_tokenizer
from caddie.pack.source_bundle import TRAINING, script, source_needed
from caddie.report.read import result_errors
from caddie.report.run_files import ARTIFACT, RESULT
from caddie.report.verification import passed
from caddie.run.policy import CONTEST_2026
from caddie.runtime.progress import SILENT, Progress
from caddie.submit.against import JSON, compare_with
from caddie.submit.contest_log import after_scoring, after_training, before_training, step_line
from caddie.submit.readme import readme
from caddie.submit.recheck import check_result, score_again
from caddie.submit.runs import NON_RECORD, RECORD, Run, check_run, read_submitted

_OPTIONAL = (
    *("triton", "flash_attn", "flash_attn_interface"),
    *("huggingface_hub", "pyarrow", "tiktoken", "tiktoken_ext", "tokenizers"),
)
"""Libraries that are not required: PyTorch brings the first for a GPU, FlashAttention is used where installed, and the
others fetch and prepare texts, which the script does not."""
_OF_TOKENIZER = {"hugging_face": "tokenizers", "tiktoken": "tiktoken"}
"""Kind of tokenizer to the optional library that it needs."""


def submit(
    places: Sequence[Path],
    out: Path,
    *,
    author: str,
    github_id: str,
    name: str | None = None,
    against: str | None = None,
    non_record: bool = False,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Write the folder `out` from runs that differ only in their seeds; return the contents of `submission.json`.

    `against` names a recipe with published scores, or the folder or JSON of a submission. Runs of another machine than
    the contest's go to the non-record track. Each artifact is scored again where the run's text is there. Raises
    `UserError`, before anything is written, for runs that the track does not take, and for a result that the
    run's files or a new scoring contradict.
    """
    check_new_folder(out)
    if not re.fullmatch(r"(?!.{40})[A-Za-z0-9]+(-[A-Za-z0-9]+)*", github_id):
        raise UserError(f"--github-id takes a name on GitHub, such as octocat, not {github_id!r}")
    runs = [read_submitted(run.place) for run in read_group(places)]
    recipe = runs[0].recipe
    program = script(recipe.to_json())
    track = NON_RECORD if non_record or not all(run.on_contest_machine for run in runs) else RECORD
    files, by_seed = {"train_gpt.py": program.decode()}, {}
    for run in runs:
        with result_errors(run.folder / RESULT, "a submission"):
            check_run(run, track, len(program))
            check_result(run, load(run.folder / ARTIFACT))
            by_seed[str(run.seed)] = _seed_facts(run, len(program))
            files[f"train_seed{run.seed}.log"] = "\n".join(_log(run, len(program))) + "\n"
    base = compare_with(against, runs) if against else None
    off = {run.seed: score_again(run, progress) for run in runs}
    facts: dict[str, Any] = {"author": author, "github_id": github_id, "name": name or recipe.name, "track": track}
    with result_errors(runs[0].folder / RESULT, "a submission"):
        facts |= _facts(runs, by_seed, len(program))
        facts["compliance"]["scored_again"] = None not in off.values()
        if base:
            facts |= {"comparison_baseline": base.name, "comparison_baseline_scores": base.scores}
            facts |= {"delta_bpb": -base.difference} | ({"p_value": base.p} if base.p is not None else {})
        files["README.md"] = readme(runs, facts, base, off)
        files["requirements.txt"] = _requirements(runs[0])
    files[JSON] = json.dumps(facts, indent=2) + "\n"
    with making(out) as partial:
        for file, text in files.items():
            (partial / file).write_text(text, encoding="utf-8")
    return facts


def _facts(runs: Sequence[Run], by_seed: Mapping[str, Any], code_bytes: int) -> dict[str, Any]:
    """Return the fields of `submission.json` for all runs together, named as in merged records."""
    bits = [run.result["bits_per_byte"] for run in runs]
    losses = [run.score["nats_per_token"] for run in runs]
    totals = [run.counted_bytes + code_bytes for run in runs]
    deviations = {"val_bpb_std": bits, "val_loss_std": losses} if len(runs) > 1 else {}
    first = runs[0].result
    late = {clock for run in runs for clock in run.contest_seconds if run.over_time(clock)}
    return {
        "blurb": first["why"],
        "date": time.strftime("%Y-%m-%d"),
        "val_bpb": round(fmean(bits), 8),
        "val_loss": round(fmean(losses), 8),
        **{field: round(stdev(values), 8) for field, values in deviations.items()},
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
            "verified": passed(run.result["verified"] for run in runs),
            "contest_validation_set": all(run.on_contest_text for run in runs),
        },
        "sha256": {
            name: first["sha256"][name] for name in ("recipe", "tokenizer", "train_documents", "validation_documents")
        },
    }


def _seed_facts(run: Run, code_bytes: int) -> dict[str, Any]:
    """Return the fields of a seed; `artifact_bytes` include the script, as in merged records."""
    result, seconds = run.result, run.contest_seconds
    training, before = result["training"], result["scores"]["averaged_plain"] or result["scores"]["trained_plain"]
    return {
        "val_bpb": round(result["bits_per_byte"], 8),
        "val_loss": round(run.score["nats_per_token"], 8),
        "artifact_bytes": run.counted_bytes + code_bytes,
        "model_bytes": run.counted_bytes,
        "steps": training["steps"],
        "step_avg_ms": round(1000 * result["seconds"]["train"] / training["steps"], 3),
        "train_wallclock_ms": None if seconds["training"] is None else round(1000 * seconds["training"]),
        "eval_time_s": seconds["evaluation"],
        "pre_quant_val_bpb": round(before["bits_per_byte"], 8),
        "quantized_val_bpb": round(result["scores"]["quantized_plain"]["bits_per_byte"], 8),
        "val_tokens": run.score["tokens"],
        "artifact_sha256": result["sha256"]["artifact"],
    }


def _log(run: Run, code_bytes: int) -> list[str]:
    """Return the lines of the run's log as a contest script would have printed them."""
    result, budget = run.result, run.recipe.train.steps
    facts = {
        "recipe": result["recipe"],
        "recipe_sha256": result["sha256"]["recipe"],
        "device": result["device"],
        "precision": result["precision"],
        "seed": run.seed,
        "world_size": result["world"],
        "train_shards": len(run.corpus.manifest.train.shards) if run.corpus else None,
        "val_tokens": run.score["tokens"],
        "val_bytes": run.score["source_bytes"],
        "model_params": result["training"]["parameters"],
    }
    return [
        *before_training(facts),
        *(step_line(event, budget or result["training"]["steps"]) for event in run.steps),
        *after_training(result, budget),
        *after_scoring(result, code_bytes),
    ]


def _requirements(run: Run) -> str:
    """Return the libraries of the script: PyTorch and NumPy as the runs had them, all others as on this machine."""
    known = {name: run.result["versions"][name] for name in ("torch", "numpy")}
    own = _OF_TOKENIZER.get(load_tokenizer(run.folder / ARTIFACT).kind)
    libraries = [name for name in source_needed(TRAINING).libraries if name == own or name not in _OPTIONAL]
    versions = {name: known.get(name) or version(name) for name in libraries}
    return "".join(f"{name}=={found.partition('+')[0]}\n" for name, found in versions.items())
