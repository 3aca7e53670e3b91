"""Steps that follow what an error costs: the same cost for every weight, whatever it is used for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from caddie.config import NonNegative, Positive, Technique
from caddie.errors import UserError
from caddie.pack.quantize.quantizer import Arrays, Calibration, Layout, Quantizer, as_rows, plain, rows_and_columns

_PER_OCTAVE = 4
"""Sizes of step between one and twice it. The best step lies within an eighth of an octave, which costs 0.004 bits per
weight; twice as fine would cost more in what has to be sent."""
_POWERS = torch.tensor([2.0 ** (i / _PER_OCTAVE) for i in range(_PER_OCTAVE)])
_MOST = 127
_LARGEST = 32_767
_BLOCK = 64


@dataclass(frozen=True, kw_only=True)
class Waterfilling(Quantizer):
    """A step for every row times one for every column, chosen so that all roundings cost the loss alike.

    With an entropy coder behind it, a weight should get bits until the next bit would buy less than elsewhere. What an
    error costs is read from the Fisher information R x C of `Calibration`: columns are rounded in turn and each takes
    up the errors of those before (GPTQ, arXiv 2210.17323, in the form of LDLQ, arXiv 2307.13304), so what an error in
    column j of row i costs is R_i times the pivot D_j of C = U D U^T. Its step is `step` / sqrt(R_i D_j), as in
    WaterSIC (arXiv 2603.04956), which has D alone. So one number decides how many bytes all matrices take together,
    and which of them get more. Where a step exceeds the weights they vanish, and cost almost nothing.
    """

    techniques: ClassVar = {
        "": Technique(
            "Bits go where they lower the loss, between matrices, rows and columns.",
            "arXiv 2603.04956 (columns), 2307.13304, 1503.05671",
            "20 % less distortion of layers from the columns alone (this project's reference measurement)",
        )
    }

    step: Positive = 5e-4
    """Root of the cost in nats per token of an error of one step, times the root of 2. A fit chooses it."""
    damping: NonNegative = 0.02
    """Added to the diagonal of C, in parts of its mean: what was measured on a sample is not trusted to the end."""

    def quantize(self, weight: Tensor, calibration: Calibration = Calibration()) -> Arrays:
        """`integers` (int16, the weight's shape), `row_steps` and `column_steps` (int8, quarters of an octave), `step`.

        The last is a factor between two quarters of an octave, so that a file can be as long as is wanted.

        Without a calibration all weights count alike, in parts of their root mean square, as do those of what is no
        matrix. A calibration that is not finite, or of another shape, is a `UserError`.
        """
        rows = as_rows(plain(weight))
        if not bool(rows.any()):
            return _arrays(torch.zeros_like(rows), torch.zeros(len(rows)), torch.zeros(rows.shape[1]), 1.0, weight)
        if weight.ndim != 2 and calibration.rows is not None:
            calibration = Calibration(rows=calibration.rows.mean().expand(len(rows)))
        importance, columns = self._costs(rows, calibration)
        factor = _upper(columns)
        pivots = factor.diagonal()
        column_steps = _octaves(1 / pivots)
        level = round(math.log2(self.step) * _PER_OCTAVE)
        step = self.step / 2.0 ** (level / _PER_OCTAVE)
        row_steps = (_octaves(importance.rsqrt()) + level).clamp(-_MOST, _MOST)
        row_steps = torch.maximum(row_steps, _least(rows, column_steps))
        integers = _feed_back(rows, _steps(row_steps, column_steps, step), factor / pivots)
        # A row of zeros needs no step of its own; the commonest is the cheapest to send.
        row_steps[~integers.any(1)] = row_steps.mode().values
        return _arrays(integers, row_steps, column_steps, step, weight)

    def dequantize(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> Tensor:
        """integers · row steps · column steps · step."""
        rows, columns = (torch.from_numpy(arrays[key].astype(np.int32)) for key in ("row_steps", "column_steps"))
        integers = torch.from_numpy(arrays["integers"].astype(np.float32)).reshape(len(rows), len(columns))
        return (integers * _steps(rows, columns, arrays["step"][0])).reshape(shape)

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """Integers of the weight's shape, and the sizes of step of rows and columns."""
        rows, columns = rows_and_columns(shape)
        small = np.dtype(np.int8)
        return {
            "row_steps": (small, (rows,)),
            "column_steps": (small, (columns,)),
            "integers": (np.dtype("<i2"), shape),
            "step": (np.dtype("<f4"), (1,)),
        }

    @property
    def reader(self) -> Quantizer:
        """The default: no setting is needed to read."""
        return Waterfilling()

    @property
    def calibrated(self) -> bool:
        """True."""
        return True

    def coarser(self, factor: float) -> Waterfilling:
        """With `factor` times the step."""
        return self.but(step=self.step * factor)

    def _costs(self, rows: Tensor, calibration: Calibration) -> tuple[Tensor, Tensor]:
        """R's diagonal and C, damped."""
        count, width = rows.shape
        known = calibration.rows
        if known is None:
            importance = torch.full((count,), 1.0 / float(rows.square().mean().clamp(2.0**-120, 2.0**120)))
        else:
            importance = known.float()
            importance = importance.clamp_min(1e-9 * float(importance.max().clamp_min(1e-20)))
        columns = torch.eye(width) if calibration.columns is None else calibration.columns.float().clone()
        if importance.shape != (count,) or columns.shape != (width, width):
            raise UserError(f"calibration is not for a weight of {count:,} rows and {width:,} columns; calibrate again")
        if not bool(torch.isfinite(importance).all() and torch.isfinite(columns).all()):
            raise UserError("calibration met what is not finite; the model diverged, lower its learning rates")
        mean = columns.diagonal().mean().clamp_min(1e-20)
        columns.diagonal().add_(self.damping * mean)
        return importance, columns


def _arrays(integers: Tensor, row_steps: Tensor, column_steps: Tensor, step: float, weight: Tensor) -> Arrays:
    return {
        "row_steps": row_steps.to(torch.int8).numpy(),
        "column_steps": column_steps.to(torch.int8).numpy(),
        "integers": integers.to(torch.int16).reshape(weight.shape).numpy(),
        "step": np.array([step], "<f4"),
    }


def _upper(matrix: Tensor) -> Tensor:
    """Upper triangular U with U U^T = `matrix`, positive definite: the Cholesky factor in the other order."""
    lower, wrong = torch.linalg.cholesky_ex(matrix.double().flip(0, 1))
    if int(wrong):
        raise UserError("what columns cost is not positive definite; raise the damping of Waterfilling")
    upper: Tensor = lower.flip(0, 1).float()
    return upper


def _feed_back(rows: Tensor, steps: Tensor, unit: Tensor) -> Tensor:
    """Integers of `rows` (rows, columns): column j is rounded with errors @ `unit`[:, j] added."""
    # Columns lie together; a copy also where they lie so already, as those of a single row do.
    left, width = rows.T.clone(memory_format=torch.contiguous_format), rows.shape[1]
    steps = steps.T.contiguous()
    integers: Tensor = torch.empty_like(left)
    for begin in range(0, width, _BLOCK):
        end = min(begin + _BLOCK, width)
        errors = torch.zeros(end - begin, len(rows))
        for j in range(begin, end):
            target = left[j]
            if j > begin:
                target = target + unit[begin:j, j] @ errors[: j - begin]
            integers[j] = (target / steps[j]).round().clamp(-_LARGEST, _LARGEST)
            errors[j - begin] = rows[:, j] - integers[j] * steps[j]
        if end < width:
            left[end:] += unit[begin:end, end:].T @ errors
    return integers.mT.contiguous()


def _octaves(steps: Tensor) -> Tensor:
    """The steps' logarithms in whole `_PER_OCTAVE`ths of an octave."""
    return (steps.log2() * _PER_OCTAVE).round().clamp(-_MOST, _MOST).int()


def _least(rows: Tensor, column_steps: Tensor) -> Tensor:
    """The sizes of the smallest steps of rows whose integers are in range, with an octave to spare for feedback."""
    widest = (rows.abs() / _steps(torch.zeros(1, dtype=torch.int32), column_steps, 1.0)).amax(1)
    return (_octaves(widest.clamp_min(2.0**-120) * (2 / _LARGEST)) + 1).clamp(-_MOST, _MOST)


def _steps(rows: Tensor, columns: Tensor, step: float) -> Tensor:
    """`step` times 2 to the sum of the two, from a table, powers of two and one product: the same on every machine."""
    octaves = rows[:, None] + columns[None]
    sizes = torch.ldexp(_POWERS[octaves.remainder(_PER_OCTAVE)], octaves.div(_PER_OCTAVE, rounding_mode="floor"))
    return sizes * float(step)
