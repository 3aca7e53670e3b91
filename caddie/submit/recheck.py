"""Compare a run's result with the run's own files, and its scores with a new scoring of its artifact."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from caddie.config import show
from caddie.errors import UserError
from caddie.pack.artifact import Artifact, load
from caddie.report.read import file_scores, pick, read_steps
from caddie.report.run_files import ARTIFACT, LOG, RECIPE, RESULT
from caddie.report.units import bits_per_byte, nats_per_byte, nats_per_token
from caddie.report.verification import passed
from caddie.run.policy import apply_policies
from caddie.run.run import score_in_new_process
from caddie.runtime.distributed import local_device
from caddie.runtime.progress import SILENT, Progress
from caddie.submit.runs import Run
from caddie.verify import verify

ROUNDING = 1e-4
"""Bits per byte by which a new score may differ: other threads, kernels and GPUs round differently. A thirtieth of
the gain that the contest asks of a record."""


def check_result(run: Run, artifact: Artifact) -> None:
    """Raise `UserError` for the first figure of a result that the run's own files contradict."""
    result, manifest, last = run.result, artifact.manifest, run.score
    ends = read_steps(run.folder / LOG, "end")
    if not ends:
        raise UserError(f"{run.folder / LOG} does not tell the end of training; run the recipe again")
    hashes = {name: getattr(manifest, f"{name}_sha256") for name in ("recipe", "tokenizer", "train_documents")}
    hashes["train_documents"] = hashes["train_documents"].rpartition(":")[2]  # without the prefix for the kind of data
    no_parts = dict.fromkeys(result["ledger"]["parts"])
    in_file = {
        "artifact_bytes": artifact.file_bytes,
        "under_cap": artifact.file_bytes <= result["cap_bytes"],
        "ledger": {"file_bytes": artifact.file_bytes, "parts": {**no_parts, **artifact.ledger}},
        "seed": manifest.seed,
        "training": {"parameters": manifest.parameters},
        "versions": {"caddie": manifest.caddie},
        "sha256": hashes,
    }
    in_log = {"training": {"steps": ends[-1]["step"]}, "seconds": {"train": ends[-1]["seconds"]}}
    follows = {
        "scores": {stage: _rates(score) for stage, score in result["scores"].items() if score},
        "bits_per_byte": last["bits_per_byte"],
        "corpus": {"source_bytes": {"validation": last["source_bytes"]}},
        "policies": apply_policies(result),
    }
    if not result["not_verified_because"]:
        follows["verified"] = passed(check["passed"] for check in result["checks"])
    _compare(run, RECIPE, {"recipe": run.recipe.name, "why": run.recipe.why})
    _compare(run, ARTIFACT, in_file)
    _compare(run, LOG, in_log)
    _compare(run, "its other fields", follows)
    if run.corpus:
        splits = {"train": run.corpus.manifest.train, "validation": run.corpus.manifest.validation}
        counts = ("documents", "tokens", "source_bytes")
        text = {count: {name: getattr(split, count) for name, split in splits.items()} for count in counts}
        sets = {f"{name}_documents": split.document_set_sha256 for name, split in splits.items()}
        _compare(run, "its text", {"corpus": text, "sha256": sets})


def score_again(run: Run, progress: Progress = SILENT) -> float | None:
    """Score a run's artifact in a new process; return how far that is from its result, in bits per byte.

    None if the text is gone, or if a GPU's run would be scored on a CPU, which may take days. Raises `UserError` if a
    score differs from the result's by more than `ROUNDING`, or if the artifact does not pass verification.
    """
    if run.corpus is None or (local_device().type == "cpu" and not run.result["device"].startswith("cpu")):
        return None
    progress.note(f"scoring {run.folder / ARTIFACT} again")
    fresh = score_in_new_process(run.folder / ARTIFACT, run.corpus.folder, run.result["world"], progress)
    kinds = file_scores(run.result)
    found = {f"quantized_{kind}": fresh[kind] and _without_time(fresh[kind]) for kind in kinds}
    _compare(run, "a new scoring", {"scores": found, "bits_per_byte": fresh["bits_per_byte"]}, ROUNDING)
    progress.note(f"verifying {run.folder / ARTIFACT} again")
    verdict = verify(load(run.folder / ARTIFACT), run.result["cap_bytes"], corpus=run.corpus, progress=progress)
    if wrong := [check for check in verdict.checks if check.passed is False]:
        raise UserError(f"{run.folder} does not pass verification: {wrong[0].name}: {wrong[0].evidence}")
    return max(abs(float(score["bits_per_byte"] - fresh[kind]["bits_per_byte"])) for kind, score in kinds.items())


def _rates(score: Mapping[str, Any]) -> dict[str, float]:
    """Return the rates of a score that follow from its sum and its sizes."""
    nats, source_bytes = score["nats"], score["source_bytes"]
    return {
        "bits_per_byte": bits_per_byte(nats, source_bytes),
        "nats_per_byte": nats_per_byte(nats, source_bytes),
        "nats_per_token": nats_per_token(nats, score["tokens"]),
    }


def _without_time(score: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a score that do not depend on the machine, without the sum, which the rates contain."""
    return {name: value for name, value in score.items() if name not in ("seconds", "nats")}


def _compare(run: Run, where: str, found: Mapping[str, Any], tolerance: float = 0.0) -> None:
    """Raise `UserError` for the first of the figures `found` that differs from the result."""
    for path, stated, true in _differences(run.result, found, tolerance):
        said = f"{run.folder / RESULT} states {path} as {show(stated)}; by {where} it is {show(true)}"
        raise UserError(f"{said}; run the recipe again")


def _differences(stated: Any, found: Any, tolerance: float, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield path, stated and found value of each leaf of `found` that differs in `stated`."""
    if isinstance(stated, list) and isinstance(found, list) and len(stated) != len(found):
        yield f"the length of {path}", len(stated), len(found)
        return
    stated, found = (dict(enumerate(value)) if isinstance(value, list) else value for value in (stated, found))
    if isinstance(found, Mapping):
        for name, value in found.items():
            yield from _differences(pick(stated, name), value, tolerance, f"{path}.{name}".lstrip("."))
    elif isinstance(found, float) and isinstance(stated, (int, float)):
        if not math.isclose(stated, found, rel_tol=1e-9, abs_tol=tolerance):
            yield path, stated, found
    elif stated != found:
        yield path, stated, found
