"""Memory that calibration, packing and scoring need after training: upper estimates from shapes and settings.

Nothing is traced: packing depends on numbers that are only known after training, and few tensors make up most of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import psutil
import torch
from torch import nn

from caddie.errors import UserError
from caddie.model import GPT, Linear
from caddie.model.flops import flops_per_token
from caddie.pack.calibrate import as_matrix
from caddie.pack.compress import Pack
from caddie.runtime.distributed import Ranks
from caddie.runtime.memory import GIB, free_bytes
from caddie.score import DocumentLoRA, Scoring
from caddie.score.score import CACHED_TOKENS
from caddie.score.ttt_lora import adapter_places

_FLOAT = 4
_KEPT_BYTES = 3.0
"""Bytes per token for each product of a forward over the width, where its graph is kept, as in training."""
_FORWARD_BYTES = 0.5
"""The same without a graph."""
_LOGITS = 6
"""Tensors of the size of the logits that live at once: logits, their softmax, signs and products, gradients."""
_CANDIDATES = 17
"""Candidates that a search for the cap may keep, and the one that is made."""
_CANDIDATE_BYTES = 6.5
"""Bytes per weight of a candidate: restored float32, integers and coded section."""
_HELD_BYTES = 16
"""Bytes per weight of what a run holds after training: last and averaged weights, and the models they are put in."""
_CODER_BYTES = 220 << 20
"""A process of the pool: PyTorch, NumPy and the array that it codes."""
_CONTEXT_BYTES = 50
"""Bytes that the n-gram tilt keeps for each context, of which there are at most as many as tokens."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one process at the peaks of the stages after training, beside the program itself."""

    process: int
    packing: int
    """Calibration and packing, with the processes that code."""
    scoring: int

    def __str__(self) -> str:
        packing, scoring = ((self.process + part) / GIB for part in (self.packing, self.scoring))
        return f"packing about {packing:,.1f} GiB, scoring about {scoring:,.1f} GiB"


def estimate_stages(gpt: GPT, pack: Pack, scoring: Scoring, predictions: int = 0) -> StageMemory:
    """Return the memory of calibration, packing and scoring; `predictions` are those of the held-out text, if known."""
    with torch.device("meta"):
        model = gpt.build()
    process = int(psutil.Process().memory_info().rss)
    return StageMemory(process, _packing(gpt, model, pack, scoring), _scoring(gpt, model, scoring, predictions))


def check_stages(gpt: GPT, pack: Pack, scoring: Scoring, predictions: int, ranks: Ranks) -> None:
    """Raise `UserError` if packing or scoring will not fit this machine, with the number and a setting that fits."""
    if ranks.device.type != "cpu":
        return
    free, found = free_bytes(ranks.device, ranks.started), estimate_stages(gpt, pack, scoring, predictions)
    needs = {"packing": found.process + found.packing, "scoring": found.process + found.scoring}
    text = ""
    for stage, need in needs.items():
        if need > free and not text:
            short = f"{stage} needs about {need / GIB:,.1f} GiB, and this machine has {free / GIB:,.1f} GiB free"
            text = f"{short}; {_advice(stage, gpt, scoring, free, predictions)}"
    if ranks.maximum(float(bool(text)))[0]:  # a collective: all processes refuse, or none
        raise (
            UserError(text or "packing or scoring does not fit the memory of another process")
            if ranks.first
            else SystemExit(2)
        )


def _advice(stage: str, gpt: GPT, scoring: Scoring, free: int, predictions: int) -> str:
    """Return a setting with which a stage fits, or what else to do."""
    choices: list[dict[str, Any]] = []
    if stage == "scoring" and isinstance(scoring.ttt, DocumentLoRA):
        halves = range(1, scoring.ttt.documents.bit_length())
        choices += [{"ttt.documents": max(1, scoring.ttt.documents >> half)} for half in halves]
    if stage == "scoring":
        choices += [{name: None} for name in ("ttt", "tilt") if getattr(scoring, name) is not None]
    for diff in choices:
        found = estimate_stages(gpt, Pack(), scoring.but(diff), predictions)
        if (need := found.process + found.scoring) <= free:
            (name, value), *_ = diff.items()
            return f"score.{name}={'none' if value is None else value} needs about {need / GIB:,.1f} GiB"
    return "take a smaller model, or NAME_mini in place of NAME"


def _packing(gpt: GPT, model: nn.Module, pack: Pack, scoring: Scoring) -> int:
    shapes = {name: as_matrix(weight).shape for name, weight in model.named_parameters()}
    weights = sum(map(math.prod, shapes.values()))
    held, hessians, calibrating = _HELD_BYTES * weights, 0, 0
    if pack.calibrated:
        used = {f"{name}.weight" for name, part in model.named_modules() if isinstance(part, Linear)}
        used.add("embedding.weight")
        sizes = {name: _FLOAT * width**2 * (2 if name in used else 1) for name, (_, width) in shapes.items()}
        hessians = sum(sizes.values())
        text = cast(Any, pack.calibration)
        rows = getattr(text, "batch", 0) or max(1, text.batch_tokens // scoring.sequence_length)
        tokens = rows * scoring.sequence_length
        # The sums stand beside the calibrations that are made of them.
        calibrating = hessians + _FLOAT * weights + tokens * _token(gpt, scoring, _KEPT_BYTES, _LOGITS)
        hessians += 4 * max(sizes.values())  # the inverse of the largest, and its factors
    candidates = _CANDIDATES if pack.fit is not None else 1
    coders = torch.get_num_threads() if torch.get_num_threads() > 1 and weights >= 1 << 22 else 0
    packing = round(candidates * _CANDIDATE_BYTES * weights) + coders * _CODER_BYTES
    return held + hessians + max(calibrating, packing)


def _scoring(gpt: GPT, model: nn.Module, scoring: Scoring, predictions: int) -> int:
    weights = sum(weight.numel() for weight in model.parameters())
    length, ttt = scoring.sequence_length, scoring.ttt
    rows = max(1, min(CACHED_TOKENS, scoring.batch_tokens) // length)
    workers = max(1, min(torch.get_num_threads(), scoring.rows // rows))
    found = 2 * _FLOAT * weights + workers * rows * length * _token(gpt, scoring, _FORWARD_BYTES, 2)
    if isinstance(ttt, DocumentLoRA):
        # Factors, their gradients and two moments, and those that the rows select; each chunk's graph is kept.
        numbers = ttt.documents * ttt.rank * _adapter_places(gpt, ttt)
        found += _FLOAT * (weights + 6 * numbers) + ttt.documents * length * _token(gpt, scoring, _KEPT_BYTES, 3)
    elif ttt is not None:
        part = cast(Any, ttt).sgd.rows * length
        found += 4 * _FLOAT * weights + part * _token(gpt, scoring, _KEPT_BYTES, 3)
    if scoring.tilt is not None:
        found += _CONTEXT_BYTES * predictions
    return found + 16 * predictions


def _adapter_places(gpt: GPT, ttt: DocumentLoRA) -> int:
    """Return the inputs and outputs of all adapters together."""
    with torch.device("meta"):
        places = [place for name in ttt.targets for place in adapter_places(name, gpt.build())]
    return sum((place.inputs + place.outputs) * place.runs for place in places)


def _token(gpt: GPT, scoring: Scoring, per_product: float, logits: int) -> int:
    """Return the bytes of one token of a batch."""
    products = flops_per_token(gpt, scoring.sequence_length) / gpt.width
    return round(per_product * products) + logits * _FLOAT * gpt.vocabulary
