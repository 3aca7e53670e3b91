"""AWQ-lite: round some columns of a matrix to more bits than the others."""

from collections.abc import Iterable, Mapping
from typing import Annotated, TypeGuard

import numpy as np
import torch
from torch import Tensor

from caddie.config import Config, Count, Range
from caddie.errors import UserError
from caddie.pack.quantize.gptq import Gptq
from caddie.pack.quantize.quantizer import Arrays, Calibration, Layout, Quantizer, Rounding, Wrapper, as_rows, plain
from caddie.pack.quantize.rows import Rows

_FEWEST_NUMBERS = 65_536
"""Tensors with at most this many weights are not protected."""


class Protected(Wrapper, Quantizer):
    """GPTQ with one group of columns at more bits; later columns compensate the error of each column as usual."""

    of: Gptq = Gptq()
    """GPTQ of the matrix, with the bits of the other columns."""
    start: Annotated[int, Range(0, 65_535)] = 0
    """First column of the group."""
    columns: Count = 64
    """Columns of the group."""
    bits: Annotated[int, Range(2, 8)] = 8
    """Bits of the group's integers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.of.of.packed:
            raise UserError("Protected has integers of two widths, which Rows cannot pack; leave out packed")

    @property
    def dequantizer(self) -> Quantizer:
        return Protected(of=Gptq(of=self._rows.dequantizer), start=self.start, columns=self.columns)

    def quantize(self, weight: Tensor, calibration: Calibration = Calibration()) -> Arrays:
        """Return the arrays of `of`, with the group's integers among them, and the group's steps (rows,)."""
        rows = as_rows(plain(weight))
        fine = self._rows.but(bits=self.bits).grid(rows, calibration)
        if calibration.inputs is None or not weight.numel():
            arrays = self._rows.quantize(weight, calibration)
            integers = as_rows(torch.from_numpy(arrays["integers"]))
            integers[:, self._group] = fine.clipped(rows)[:, self._group].round().to(torch.int8)
        else:
            arrays = self.of.rounded(weight, calibration, (fine, range(*self._group.indices(rows.shape[1]))))
        return arrays | {"fine_steps": self._rows.stored(fine.steps).numpy().astype(arrays["steps"].dtype)}

    def dequantize(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> Tensor:
        restored = self.of.dequantize(arrays, shape)
        integers = as_rows(torch.from_numpy(arrays["integers"].astype(np.float32)).reshape(shape))
        steps = torch.from_numpy(arrays["fine_steps"].astype(np.float32))
        as_rows(restored)[:, self._group] = integers[:, self._group] * steps[:, None]
        return restored

    def fake(self, weight: Tensor, rounding: Rounding = torch.round) -> Tensor:
        """Return the fake quantization at both widths: a training step has no time for GPTQ."""
        rows, fine = (as_rows(of.fake(weight, rounding)) for of in (self._rows, self._rows.but(bits=self.bits)))
        columns = torch.arange(rows.shape[1], device=rows.device)
        inside = (columns >= self.start) & (columns < self.start + self.columns)
        return torch.where(inside, fine, rows).reshape(weight.shape)

    def layout(self, shape: tuple[int, ...]) -> Layout:
        found = self.of.layout(shape)
        return found | {"fine_steps": found["steps"]}

    @property
    def _rows(self) -> Rows:
        return self.of.of

    @property
    def _group(self) -> slice:
        return slice(self.start, self.start + self.columns)


class Protection(Config):
    """Choice of groups of columns, among all matrices, that are rounded to more bits: AWQ-lite.

    Groups of neighbouring columns, in matrices with GPTQ of fewer bits, are ranked by a sum over their columns: the
    input's root mean square times the mean |weight|.
    """

    groups: Count = 1
    """Number of best groups to protect; if several are in one matrix, only the best of them is."""
    columns: Count = 64
    """Columns of a group; columns left over at the right end are never protected."""
    bits: Annotated[int, Range(2, 8)] = 8
    """Bits of the protected integers."""

    def check(self, quantizers: Iterable[Quantizer]) -> None:
        """Raise `UserError` if none of these quantizers can be protected; a run calls this before training."""
        if not any(map(self._protects, quantizers)):
            raise UserError(
                f"pack.protection: none of pack.quantizers is Gptq of fewer than {self.bits} bits, not packed; "
                "set one so, or pack.protection=none"
            )

    def _protects(self, quantizer: Quantizer) -> TypeGuard[Gptq]:
        return type(quantizer) is Gptq and quantizer.of.bits < self.bits and not quantizer.of.packed

    def protected(
        self,
        weights: Mapping[str, Tensor],
        quantizers: Mapping[str, Quantizer],
        calibrations: Mapping[str, Calibration],
    ) -> dict[str, Quantizer]:
        """Return protected quantizers by parameter name, for the matrices of the best groups."""
        found: dict[str, Quantizer] = {}
        for _, name, protected in self.ranked(weights, quantizers, calibrations)[: self.groups]:
            found.setdefault(name, protected)
        return found

    def ranked(
        self,
        weights: Mapping[str, Tensor],
        quantizers: Mapping[str, Quantizer],
        calibrations: Mapping[str, Calibration],
    ) -> list[tuple[float, str, Protected]]:
        """Return score, parameter and quantizer of all groups, the best first."""
        found = []
        for name, weight in weights.items():
            gptq, inputs = quantizers[name], calibrations.get(name, Calibration()).inputs
            if inputs is None or not self._protects(gptq) or weight.numel() <= _FEWEST_NUMBERS:
                continue
            saliency = inputs.diagonal().clamp_min(0).sqrt() * as_rows(weight).float().abs().mean(0).cpu()
            for start in range(0, len(saliency) - self.columns + 1, self.columns):
                score = float(saliency[start : start + self.columns].sum())
                found.append((score, name, Protected(of=gptq, start=start, columns=self.columns, bits=self.bits)))
        return sorted(found, key=lambda group: -group[0])
