"""The result of a run: the one document that every report reads (`docs/result.md`)."""

import math
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from caddie.config import plain
from caddie.config.userfile import user_files
from caddie.data.corpus import Corpus
from caddie.data.manifest import MANIFEST
from caddie.errors import count
from caddie.files import file_sha256, write_json
from caddie.inference.sample import sample
from caddie.model.parameters import declarations
from caddie.pack.artifact import Artifact
from caddie.pack.compress import Compressed
from caddie.recipes.catalog import shipped
from caddie.recipes.recipe import Recipe
from caddie.report.page import write_report
from caddie.report.read import VERSION, read_steps, step_seconds
from caddie.report.run_files import LOG, RESULT
from caddie.run.cap import source_of_recipe
from caddie.run.policy import FileCap, apply_policies
from caddie.run.stages import bits_per_nat
from caddie.runtime.distributed import Ranks
from caddie.runtime.memory import PROC, system_text
from caddie.train.loop import Trained
from caddie.verify import Verdict


def describe_run(
    recipe: Recipe,
    corpus: Corpus,
    trained: Trained,
    compressed: Compressed,
    artifact: Artifact,
    cap: FileCap,
    ranks: Ranks,
) -> dict[str, Any]:
    """Return the result of a run without its scores, seconds, and what follows from them, such as its policies."""
    manifest = corpus.manifest
    held_out = manifest.validation.source_bytes
    base = shipped().get(recipe.base or "")
    diff = base.settings.diff(recipe.settings) if base else {}
    compressors, trip = manifest.validation_compressors, manifest.tokenizer.round_trip
    per_nat = bits_per_nat(corpus)
    roles = declarations(artifact.model)
    needed = [file.stated for file in artifact.parts]
    return {
        "version": VERSION,
        "recipe": recipe.name,
        "why": recipe.why,
        "base": recipe.base,
        "key": recipe.key(),
        "diff": {path: plain(value) for path, value in diff.items()},
        "artifact_bytes": artifact.file_bytes,
        "cap_bytes": cap.file_bytes,
        "under_cap": artifact.file_bytes <= cap.file_bytes,
        "cap": cap.to_json(),
        "byte_source": manifest.byte_source,
        "compressors": compressors
        and {name: {"bytes": size, "bits_per_byte": 8 * size / held_out} for name, size in compressors.items()},
        "ledger": {"file_bytes": artifact.file_bytes, "parts": artifact.ledger},
        "source": source_of_recipe(recipe),
        "parts": [{**asdict(file.stated), "needed_to_score": file.stated in needed} for file in user_files(recipe)],
        "tensors": [
            {
                "name": name,
                "role": roles[name].role,
                "shape": list(tensor.shape),
                "quantizer": type(tensor.quantizer).__name__,
                "bytes": artifact.tensor_bytes[name],
                "parameters": math.prod(tensor.shape),
                "relative_error": tensor.relative_error,
                "predicted_bits_per_byte": tensor.predicted_loss and tensor.predicted_loss * per_nat,
            }
            for name, tensor in compressed.candidate.weights.items()
        ],
        "compression": describe_compression(compressed, artifact, corpus),
        "training": {
            "steps": trained.steps,
            "earlier_budgets": list(trained.earlier_budgets),
            "warmup_steps": trained.warmup_steps,
            "tokens": trained.tokens,
            "tokens_per_second": trained.tokens / max(trained.seconds, 1e-9),
            "parameters": recipe.parameters,
            "final_loss": trained.final_loss,
            "threads": trained.threads,
            "cpu_share": trained.cpu_share,
            "peak_bytes": trained.peak_bytes,
        },
        "sample": sample(artifact).decode("utf-8", "replace"),
        "device": device_name(ranks.device, trained.threads),
        "processor": processor_name(),
        "precision": trained.precision,
        "world": ranks.world,
        "versions": {"python": platform.python_version(), **{x: version(x) for x in ("caddie", "torch", "numpy")}},
        "code": commit(),
        "sha256": {
            "corpus": file_sha256(corpus.folder / MANIFEST),
            "train_documents": manifest.train.document_set_sha256,
            "validation_documents": manifest.validation.document_set_sha256,
            "tokenizer": manifest.tokenizer.sha256,
            "recipe": recipe.sha256,
            "artifact": artifact.sha256,
        },
        "corpus": {
            "name": manifest.name,
            "origin": manifest.origin and asdict(manifest.origin),
            "documents": {"train": manifest.train.documents, "validation": manifest.validation.documents},
            "tokens": {"train": manifest.train.tokens, "validation": manifest.validation.tokens},
            "source_bytes": {"train": manifest.train.source_bytes, "validation": held_out},
            "lossless": trip is not None and not trip.changed_documents,
            "changed_documents": trip and trip.changed_documents,
            "duplicates_removed": manifest.duplicates_removed,
        },
        "public": [asdict(figure) for figure in recipe.public],
    }


def describe_scores(
    scores: Mapping[str, Any], scored: Mapping[str, Any], verdict: Verdict, seconds: Mapping[str, float]
) -> dict[str, Any]:
    """Return the scores of a run's weights (`scores`) and artifact (`scored`), its checks, and its seconds by phase."""
    return {
        "bits_per_byte": scored["bits_per_byte"],
        "verified": verdict.passed,
        "not_verified_because": verdict.not_run,
        "checks": [asdict(check) for check in verdict.checks],
        "scores": {**scores, **{f"quantized_{kind}": scored[kind] for kind in ("plain", "sliding", "adaptive")}},
        "seconds": {**seconds, "total": sum(seconds.values())},
        "evaluation": scored["seconds"],
    }


def write_result(folder: Path, result: dict[str, Any]) -> dict[str, Any]:
    """Add the values that follow from others, write `result.json` and the report, and return the result."""
    result["compression"]["measured_bits_per_byte"] = rounding_loss(result["scores"])
    result["training"]["step_seconds"] = step_seconds(read_steps(folder / LOG))
    result["policies"] = apply_policies(result)
    write_json(folder / RESULT, result)
    write_report(folder)
    return result


def describe_compression(compressed: Compressed, artifact: Artifact, corpus: Corpus) -> dict[str, Any]:
    """Return the expected loss by quantization, bits per byte, at this size and others; None without a calibration."""
    per_nat = bits_per_nat(corpus)
    curve = [{"bytes": size, "bits_per_byte": loss * per_nat} for size, loss in compressed.curve]
    loss, slope = compressed.candidate.predicted_loss, _decline(compressed.curve, artifact.file_bytes)
    step = min(10 ** (len(str(artifact.file_bytes // 2)) - 1), 1_000_000)
    more = fewer = None
    if loss and slope is not None:
        more, fewer = (loss * per_nat * math.expm1(min(-slope * change, 50.0)) for change in (step, -step))
    return {
        "bits_per_weight": 8 * artifact.ledger["weights"] / sum(one.numel() for one in artifact.model.parameters()),
        "predicted_bits_per_byte": loss and loss * per_nat,
        "curve": curve,
        "step_bytes": step,
        "step_more_bits_per_byte": more,
        "step_fewer_bits_per_byte": fewer,
    }


def rounding_loss(scores: Mapping[str, Any]) -> float:
    """Return the bits per byte that quantization added on the held-out text, scored without overlap."""
    before = scores["averaged_plain"] or scores["trained_plain"]
    return float(scores["quantized_plain"]["bits_per_byte"] - before["bits_per_byte"])


def _decline(curve: list[tuple[int, float]], file_bytes: int) -> float | None:
    """Return the fall of the logarithm of the predicted loss per byte, at a file of this size.

    The logarithm falls in proportion to the bytes (one bit more per weight takes three quarters of the loss). So a line
    is drawn through the point of this size and the nearest point whose size differs by more than 1 %.
    """
    points = {size: loss for size, loss in curve if loss > 0}
    far = [size for size in points if abs(size - file_bytes) > 0.01 * file_bytes]
    if file_bytes not in points or not far:
        return None
    other = min(far, key=lambda size: abs(size - file_bytes))
    return (math.log(points[file_bytes]) - math.log(points[other])) / (other - file_bytes)


def device_name(device: torch.device, threads: int) -> str:
    """Return the name of a device for people."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "mps":
        return "Apple GPU"
    return f"cpu, {count(threads, 'thread')}"


def processor_name() -> str:
    """Return the model of the CPU, and the instructions that PyTorch uses on it, which decide how sums are rounded."""
    system = system_text(PROC / "cpuinfo") or ""
    model = re.search(r"^model name\s*:\s*(.*\S)", system, re.MULTILINE)
    name = model[1] if model else platform.processor() or platform.machine()
    matrices = " with AMX" if re.search(r"\bamx_tile\b", system) else ""  # PyTorch names vectors alone
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}{matrices}"


def commit() -> str | None:
    """Return the git commit of this code, with a + when the tree has changes; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    git = partial(subprocess.check_output, cwd=root, text=True, stderr=subprocess.DEVNULL)
    try:
        head, changes = git(["git", "rev-parse", "HEAD"]).strip(), git(["git", "status", "--porcelain"])
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changes else "")
