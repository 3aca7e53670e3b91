"""From trained weights to the sections of an artifact."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from caddie.config import Config, Count
from caddie.errors import UserError
from caddie.model import GPT
from caddie.model.parameters import assign, declarations
from caddie.pack.calibrate import CalibrationText, TrainingText
from caddie.pack.candidates import Candidate, Candidates
from caddie.pack.coding import ArrayCodec, Coders, Smallest
from caddie.pack.container import Section
from caddie.pack.fit import FillCap, Fit
from caddie.pack.quantize import Calibration, Float16, LowRank, Quantizer, Waterfilling
from caddie.runtime.memory import keep_freed_memory

Calibrate = Callable[[], Mapping[str, Calibration]]
"""What is known of the weights' use, by parameter name."""
Dequantizers = dict[str, Quantizer]
"""Rules, as in `Compress.quantizers`, for the quantizers that read an artifact's weights."""
Size = Callable[[Dequantizers, list[Section]], int]
"""Bytes of the whole file that holds these sections of weights."""


def _weights_alone(readers: Dequantizers, sections: list[Section]) -> int:
    return sum(len(section.data) for section in sections)


@dataclass(frozen=True, kw_only=True)
class Correction(Config):
    """The matrices that rounding changes most get a correction of low rank (LQER, arXiv 2402.02446)."""

    matrices: Count = 3
    """How many, those of the largest Frobenius norm of the error."""
    rank: Count = 4
    """Rank of each correction."""


@dataclass(frozen=True, kw_only=True)
class Pack(Config):
    """How weights become bytes. The cap is the one setting that a plain user needs."""

    quantizers: Mapping[str, Quantizer] = field(
        default_factory=lambda: {
            "embedding": Waterfilling(),
            "matrix": Waterfilling(),
            "head": Waterfilling(),
            "gate": Float16(),
            "scalar": Float16(),
        }
    )
    """Role or name pattern to quantizer; the last match wins."""
    correction: Correction | None = None
    """Low-rank corrections of what is lost, or none."""
    coding: ArrayCodec = Smallest()
    """How the quantizers' arrays become bytes."""
    cap_bytes: Count = 16_000_000
    """Bytes that the artifact may have."""
    fit: Fit | None = FillCap()
    """How the file is made to fill the cap, or none: the quantizers as they are set."""
    calibration: CalibrationText = TrainingText()
    """What the model is run on for quantizers that ask how a weight is used."""
    carry_source: bool = False
    """Whether the artifact carries the source that scores it. Off, because whoever scores it has this program, and the
    bytes would be taken from the weights; what the source would take is measured in any case."""

    @property
    def calibrated(self) -> bool:
        """Whether any quantizer makes use of a calibration."""
        return any(quantizer.calibrated for quantizer in self.quantizers.values())


@dataclass(frozen=True)
class QuantizedTensor:
    """What became of one parameter; `relative_error` is that of its Frobenius norm.

    `predicted_loss` is what its rounding is expected to cost, in nats per token, where it was calibrated.
    """

    name: str
    role: str
    shape: tuple[int, ...]
    quantizer: Quantizer
    relative_error: float
    predicted_loss: float | None


@dataclass(frozen=True)
class Compressed:
    """The weight sections of an artifact, in the model's order, and what happened to each tensor."""

    sections: list[Section]
    tensors: list[QuantizedTensor]
    readers: Dequantizers
    predicted_loss: float | None
    """Nats per token that quantization is expected to cost, where the weights were calibrated."""
    curve: list[tuple[int, float]]
    """Bytes of the file and predicted loss of what was tried."""


def compress(
    gpt: GPT,
    weights: Mapping[str, Tensor],
    config: Pack,
    calibrate: Calibrate = lambda: {},
    size: Size = _weights_alone,
    watch: Callable[[Candidate], None] = lambda draft: None,
) -> Compressed:
    """Quantize and code every weight; weights of another model or not finite are a `UserError`.

    `calibrate` is asked for all weights if a quantizer wants to know of their use; `watch` sees every draft.
    """
    keep_freed_memory()
    with torch.device("meta"):
        model = gpt.build()
    declared = declarations(model)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name in sorted(shapes.keys() | weights.keys()):
        if name not in weights or tuple(weights[name].shape) != shapes.get(name):
            raise UserError(f"the weights are not those of this model: {name} does not fit; train again")
        if not bool(torch.isfinite(weights[name]).all()):
            raise UserError(
                f"{name} has values that are not finite; the training run diverged, lower its learning rates"
            )
    chosen = assign(config.quantizers, model, "pack.quantizers")
    quantizers = {name: chosen[name] for name in shapes}
    readers = {rule: quantizer.reader for rule, quantizer in config.quantizers.items()}
    calibrations = calibrate() if config.calibrated else {}
    with Coders(torch.get_num_threads()) as coders:
        drafts = Candidates(
            {name: weights[name] for name in shapes},
            calibrations,
            config.coding,
            lambda sections: size(readers, sections),
            watch,
            coders,
        )
        if config.correction is not None:
            corrected = _corrected(drafts, drafts.make(quantizers), config.correction)
            quantizers |= corrected
            # The last match wins, so they come last.
            readers = {rule: reader for rule, reader in readers.items() if rule not in corrected}
            readers |= {name: quantizer.reader for name, quantizer in corrected.items()}
        if config.fit is None:
            draft, curve = drafts.make(quantizers), []
        else:
            fitted = config.fit.fit(drafts, quantizers, config.cap_bytes)
            draft, curve = fitted.draft, fitted.curve
    tensors = [
        QuantizedTensor(
            name, declared[name].role, shapes[name], stored.quantizer, stored.relative_error, stored.predicted_loss
        )
        for name, stored in draft.weights.items()
    ]
    return Compressed(draft.sections, tensors, readers, draft.predicted_loss, curve)


def _corrected(drafts: Candidates, draft: Candidate, correction: Correction) -> dict[str, Quantizer]:
    """The quantizers of the matrices whose error is the largest, each with a correction around it."""
    errors = {
        name: float((stored.restored - drafts.weights[name]).norm())
        for name, stored in draft.weights.items()
        if stored.restored.ndim == 2 and not isinstance(stored.quantizer, LowRank)
    }
    largest = sorted(errors, key=lambda name: -errors[name])[: correction.matrices]
    return {name: LowRank(of=draft.weights[name].quantizer, rank=correction.rank) for name in largest}
