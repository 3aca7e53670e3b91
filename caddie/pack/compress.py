"""Compress trained weights to an artifact."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

import torch
from torch import Tensor

from caddie.config import Config, Count, Range
from caddie.errors import UserError
from caddie.model import GPT
from caddie.model.parameters import assign
from caddie.pack import container
from caddie.pack.artifact import Metadata
from caddie.pack.calibrate import CalibrationText, TrainingText
from caddie.pack.candidates import Candidates
from caddie.pack.coding import ArrayCodec, ProcessPool, Smallest
from caddie.pack.container import Section
from caddie.pack.fit import FillCap, Fit, Fitted
from caddie.pack.quantize import Calibration, Float16, LowRank, Protection, Quantizer, Waterfilling
from caddie.runtime.memory import keep_freed_memory
from caddie.runtime.progress import SILENT, Progress

Dequantizers = dict[str, Quantizer]
"""Role or name pattern to dequantizer, as in `Pack.quantizers`, for an artifact's weights."""
Size = Callable[[Dequantizers, list[Section]], int]
"""Returns the bytes of the whole file with these weight sections."""


def _weights_alone(dequantizers: Dequantizers, sections: list[Section]) -> int:
    return sum(len(section.data) for section in sections)


class Correction(Config):
    """Low-rank corrections of the matrices that rounding changes most (LQER, arXiv 2402.02446)."""

    matrices: Count = 3
    """Number of matrices."""
    rank: Annotated[int, Range(1, 256)] = 4
    """Rank of each correction."""
    group: Annotated[int, Range(1, 65_536)] = 64
    """Values of a correction's right factor that share a step."""
    choice: Literal["error", "gain"] = "error"
    """Matrices to correct: those of largest error (Frobenius norm), or those whose error the correction lowers most."""
    pattern: str = "*"
    """Name pattern of the matrices that may be corrected."""

    def of(self, quantizer: Quantizer) -> LowRank:
        """Return the quantizer with the correction."""
        return LowRank(of=quantizer, rank=self.rank, group=self.group)

    def eligible(self, weights: Mapping[str, Tensor], quantizers: Mapping[str, Quantizer]) -> list[str]:
        """Return the names of the matrices that may be corrected; `UserError` if the pattern matches none."""
        found = [
            name
            for name, weight in weights.items()
            if weight.ndim == 2 and not isinstance(quantizers[name], LowRank) and fnmatchcase(name, self.pattern)
        ]
        if self.pattern != "*" and not found:
            raise UserError(f"pack.correction.pattern: no matrix has a name like {self.pattern}")
        return found

    def corrected(
        self, weights: Mapping[str, Tensor], restored: Mapping[str, Tensor], quantizers: Mapping[str, Quantizer]
    ) -> dict[str, Quantizer]:
        """Return corrected quantizers by parameter name; `restored` are the weights after `quantizers`."""
        lowered: dict[str, float] = {}
        for name in self.eligible(weights, quantizers):
            error = weights[name] - restored[name]
            lowered[name] = float(error.norm())
            if self.choice == "gain":
                correction = self.of(quantizers[name])
                lowered[name] -= float((error - correction.product(correction.factors(error))).norm())
        chosen = sorted(lowered, key=lambda name: -lowered[name])[: self.matrices]
        return {name: self.of(quantizers[name]) for name in chosen}


class Pack(Config):
    """Settings of packing; most users need only `cap_bytes`."""

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
    protection: Protection | None = None
    """Choice of columns that GPTQ rounds to more bits (AWQ-lite), or none."""
    correction: Correction | None = None
    """Low-rank corrections of the rounding errors, or none."""
    coding: ArrayCodec = Smallest()
    """Entropy coding of the quantizers' arrays."""
    cap_bytes: Count = 16_000_000
    """Maximum size of the artifact, in bytes; with a policy, of everything that the policy counts."""
    policy: Literal["contest-2026", "strict"] | None = None
    """Policy of what the cap counts (`caddie/run/policy.py`): both policies count code; contest-2026 omits the
    tokenizer. The artifact gets the rest of the cap. With none, the cap counts the artifact alone."""
    fit: Fit | None = FillCap()
    """Search for the candidate that fills the cap; none uses the quantizers as they are set."""
    calibration: CalibrationText = TrainingText()
    """Text that the model runs on to calibrate the quantizers that use it."""
    carry_source: bool = False
    """Store in the artifact the source code that scores it. Off by default, because whoever scores it has this program,
    and the code would take bytes from the weights. The code's bytes are measured in any case."""

    @property
    def calibrated(self) -> bool:
        """True if any quantizer uses a calibration."""
        return any(quantizer.calibrated for quantizer in self.quantizers.values())


@dataclass(frozen=True, kw_only=True)
class Compressed(Fitted):
    """The chosen candidate, its weights in the model's order, and their dequantizers."""

    dequantizers: Dequantizers


def pack(
    metadata: Metadata,
    weights: Mapping[str, Tensor],
    config: Pack,
    path: Path,
    calibrations: Mapping[str, Calibration] = MappingProxyType({}),
    progress: Progress = SILENT,
) -> Compressed:
    """Quantize and code the weights, and write the artifact to `path`."""
    compressed = compress(metadata.gpt, weights, config, calibrations, metadata.file_bytes, progress)
    container.write(path, [*metadata.sections(compressed.dequantizers), *compressed.candidate.sections])
    return compressed


def compress(
    gpt: GPT,
    weights: Mapping[str, Tensor],
    config: Pack,
    calibrations: Mapping[str, Calibration] = MappingProxyType({}),
    size: Size = _weights_alone,
    progress: Progress = SILENT,
) -> Compressed:
    """Quantize and code every weight; `UserError` for weights of another model and for values that are not finite.

    `calibrations` are by parameter name, for quantizers that use them; `progress` gets an event for each candidate.
    """
    keep_freed_memory()
    model = gpt.outline()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name in sorted(shapes.keys() | weights.keys()):
        if name not in weights or tuple(weights[name].shape) != shapes.get(name):
            raise UserError(f"the weights are not those of this model: {name} does not fit; train again")
        if not bool(torch.isfinite(weights[name]).all()):
            why = "values that are not finite; the training run diverged, lower its learning rates"
            raise UserError(f"{name} has {why}")
    chosen = assign(config.quantizers, model, "pack.quantizers")
    quantizers = {name: chosen[name] for name in shapes}
    dequantizers = {rule: quantizer.dequantizer for rule, quantizer in config.quantizers.items()}
    with ProcessPool(torch.get_num_threads()) as pool:
        known, ordered = calibrations if config.calibrated else {}, {name: weights[name] for name in shapes}
        fit, cap = config.fit, config.cap_bytes
        candidates = Candidates(
            ordered, known, config.coding, lambda sections: size(dequantizers, sections), pool, progress, cap
        )
        replaced = config.protection.protected(ordered, quantizers, known) if config.protection else {}
        quantizers |= replaced
        if config.correction is not None:
            restored = {name: stored.restored for name, stored in candidates.make(quantizers).weights.items()}
            replaced |= config.correction.corrected(candidates.weights, restored, quantizers)
            quantizers |= replaced
        # The last match wins, so replaced quantizers come last.
        dequantizers = {rule: dequantizer for rule, dequantizer in dequantizers.items() if rule not in replaced}
        dequantizers |= {name: quantizer.dequantizer for name, quantizer in replaced.items()}
        fitted = fit.fit(candidates, quantizers, cap) if fit else Fitted(candidates.make(quantizers))
    return Compressed(**vars(fitted), dequantizers=dequantizers)
