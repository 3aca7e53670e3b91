"""Memory that calibration, packing and scoring need after training: upper estimates from shapes and settings.

Nothing is traced: packing depends on numbers that are only known after training, and a few tensors take most of the
memory.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import psutil
import torch

from caddie.model import GPT, Model
from caddie.model.flops import flops_per_token
from caddie.pack.calibrate import CalibrationText, SelfGenerated, TrainingText, as_matrix, product_modules
from caddie.pack.compress import Pack
from caddie.runtime.distributed import Ranks
from caddie.runtime.memory import GIB, free_bytes
from caddie.score import ChunkSGD, DocumentLoRA, Scoring
from caddie.score.score import rows_and_workers
from caddie.score.ttt_lora import adapter_places
from caddie.train.memory import raise_on_all_ranks

_FLOAT = 4
_KEPT_BYTES = 3.0
"""Bytes per token and (FLOPs of a training step per token / width), where the graph of a forward is kept."""
_FORWARD_BYTES = 0.5
"""Same for a forward without a graph."""
_LOGITS = 6
"""Tensors of the size of the logits that live at once: logits, their softmax, signs and products, gradients."""
_CANDIDATES = 17
"""Candidates that a search for the cap may keep, and the one that is made."""
_CANDIDATE_BYTES = 3
"""Bytes per weight of a candidate: integers, coded section; one of them may be dequantized."""
_HELD_BYTES = 16
"""Bytes per weight that a run holds after training: last and averaged weights, and the models that take them."""
_CODER_BYTES = 220 << 20
"""Bytes of a process of the pool: PyTorch, NumPy and the array that it codes."""
_CONTEXT_BYTES = 50
"""Bytes that the n-gram tilt keeps for each context, of which there are at most as many as tokens."""


Stage = Literal["packing", "scoring"]


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one process at the peaks of the stages after training, beside the program itself."""

    process: int
    calibrating: int
    packing: int
    """Packing itself, with the processes that code."""
    scoring: int

    def needed(self, stage: Stage, processes: int = 1) -> int:
        """Return the bytes of a stage on one machine: all processes calibrate and score, and one packs."""
        if stage == "scoring":
            return processes * (self.process + self.scoring)
        return max(processes * (self.process + self.calibrating), self.process + self.packing)

    def __str__(self) -> str:
        packing, scoring = (self.needed(stage) / GIB for stage in get_args(Stage))
        return f"packing about {packing:,.1f} GiB, scoring about {scoring:,.1f} GiB"


def estimate_stages(gpt: GPT, pack: Pack, scoring: Scoring, predictions: int = 0) -> StageMemory:
    """Return the memory of calibration, packing and scoring.

    `predictions` is the number of predictions in the held-out text, 0 if unknown.
    """
    model = gpt.outline()
    process = int(psutil.Process().memory_info().rss)
    return StageMemory(process, *_packing(gpt, model, pack, scoring), _scoring(gpt, model, scoring, predictions))


def check_stages(
    gpt: GPT, pack: Pack, scoring: Scoring, predictions: int, ranks: Ranks, stages: Mapping[Stage, int] | None = None
) -> None:
    """Raise `UserError` if packing or scoring will not fit this machine, with the bytes and a setting that fits.

    `stages` maps each coming stage to its number of processes on this machine; by default all `ranks` calibrate and one
    process scores, as in a run.
    """
    if ranks.device.type != "cpu":
        return
    free, found = free_bytes(ranks.device, ranks.started), estimate_stages(gpt, pack, scoring, predictions)
    text = ""
    for stage, processes in (stages or {"packing": ranks.world, "scoring": 1}).items():
        if (need := found.needed(stage, processes)) > free and not text:
            together = f" in {processes} processes" if processes > 1 else ""
            short = f"{stage}{together} needs about {need / GIB:,.1f} GiB"
            advice = _advice(stage, processes, gpt, pack, scoring, free, predictions)
            text = f"{short}, and this machine has {free / GIB:,.1f} GiB free; {advice}"
    raise_on_all_ranks(text, "packing or scoring", ranks)


def _advice(stage: Stage, processes: int, gpt: GPT, pack: Pack, scoring: Scoring, free: int, predictions: int) -> str:
    """Return a setting with which a stage fits, or what else to do."""
    of, choices = ("pack", _smaller_packings(pack, scoring)) if stage == "packing" else ("score", _smaller(scoring))
    for diff in choices:
        changed = (pack.but(diff), scoring) if of == "pack" else (pack, scoring.but(diff))
        if (need := estimate_stages(gpt, *changed, predictions).needed(stage, processes)) <= free:
            settings = " ".join(f"{of}.{name}={'none' if value is None else value}" for name, value in diff.items())
            return f"{settings} needs about {need / GIB:,.1f} GiB"
    if processes > 1 and (need := estimate_stages(gpt, pack, scoring, predictions).needed(stage)) <= free:
        return f"one process needs about {need / GIB:,.1f} GiB"
    return "take a smaller model, or NAME_mini in place of NAME"


def _smaller_packings(pack: Pack, scoring: Scoring) -> Iterator[dict[str, Any]]:
    """Yield diffs of packing that take less memory, those that change least first."""
    batches = list[dict[str, Any]]()
    name, value, least = "", 0, 0
    match pack.calibration if pack.calibrated else None:
        case SelfGenerated(batch=value):
            name, least = "batch", 1
        case TrainingText(batch_tokens=value):
            name, least = "batch_tokens", scoring.sequence_length
    while value > least:
        value = max(least, value // 2)
        batches.append({f"calibration.{name}": value})
    yield from batches
    if pack.fit is not None:
        yield from ({"fit": None}, *({**one, "fit": None} for one in batches[-1:]))


def _smaller(scoring: Scoring) -> Iterator[dict[str, Any]]:
    """Yield diffs of scoring that take less memory, those that change least first."""
    if isinstance(scoring.ttt, DocumentLoRA):
        halves = range(1, scoring.ttt.documents.bit_length())
        yield from ({"ttt.documents": max(1, scoring.ttt.documents >> half)} for half in halves)
    yield from ({name: None} for name in ("ttt", "tilt") if getattr(scoring, name) is not None)


def _packing(gpt: GPT, model: Model, pack: Pack, scoring: Scoring) -> tuple[int, int]:
    """Return the bytes of calibrating and of packing itself."""
    shapes = {name: as_matrix(weight).shape for name, weight in model.named_parameters()}
    weights = sum(map(math.prod, shapes.values()))
    held, hessians, calibrating = _HELD_BYTES * weights, 0, 0
    if pack.calibrated:
        used = product_modules(model)
        sizes = {name: _FLOAT * width**2 * (2 if name in used else 1) for name, (_, width) in shapes.items()}
        hessians = sum(sizes.values())
        tokens = _calibration_tokens(pack.calibration, scoring.sequence_length)
        # The sums are in memory beside the calibrations made from them.
        calibrating = hessians + _FLOAT * weights + tokens * _token(gpt, scoring, _KEPT_BYTES, _LOGITS)
        hessians += 4 * max(sizes.values())  # the inverse of the largest, and its factors
    candidates = _CANDIDATES if pack.fit is not None else 1
    coders = torch.get_num_threads() if torch.get_num_threads() > 1 and weights >= 1 << 22 else 0
    packing = (candidates * _CANDIDATE_BYTES + _FLOAT) * weights + coders * _CODER_BYTES
    return held + hessians + calibrating, held + hessians + packing


def _calibration_tokens(text: CalibrationText, length: int) -> int:
    """Return the tokens of a calibration batch: one row for a user's class, whose batch is unknown."""
    match text:
        case SelfGenerated(batch=rows):
            return rows * length
        case TrainingText(batch_tokens=tokens):
            return max(1, tokens // length) * length
    return length


def _scoring(gpt: GPT, model: Model, scoring: Scoring, predictions: int) -> int:
    weights = sum(weight.numel() for weight in model.parameters())
    length, ttt = scoring.sequence_length, scoring.ttt
    rows, workers = rows_and_workers(True, scoring, torch.device("cpu"))
    found = 2 * _FLOAT * weights + workers * rows * length * _token(gpt, scoring, _FORWARD_BYTES, 2)
    if isinstance(ttt, DocumentLoRA):
        # Factors, their gradients and two moments, and those that the rows select; each chunk's graph is kept.
        places = [place for name in ttt.targets for place in adapter_places(name, model)]
        numbers = ttt.documents * ttt.rank * sum((place.inputs + place.outputs) * place.runs for place in places)
        found += _FLOAT * (weights + 6 * numbers) + ttt.documents * length * _token(gpt, scoring, _KEPT_BYTES, 3)
    elif isinstance(ttt, ChunkSGD):
        found += 4 * _FLOAT * weights + ttt.sgd.rows * length * _token(gpt, scoring, _KEPT_BYTES, 3)
    if scoring.tilt is not None:
        found += _CONTEXT_BYTES * predictions
    return found + 16 * predictions


def _token(gpt: GPT, scoring: Scoring, per_product: float, logits: int) -> int:
    """Return the bytes of one token of a batch."""
    products = flops_per_token(gpt, scoring.sequence_length) / gpt.width
    return round(per_product * products) + logits * _FLOAT * gpt.vocabulary
