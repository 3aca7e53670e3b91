"""Waterfilling: steps by row and column, so that rounding any weight raises the loss by the same amount."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from caddie.config import NonNegative, Positive
from caddie.errors import UserError
from caddie.pack.quantize.gptq import cholesky_upper
from caddie.pack.quantize.quantizer import Arrays, Calibration, Layout, Quantizer, as_rows, plain, rows_shape

_PER_OCTAVE = 4
"""Step sizes from one power of two to the next. The best step is then within an eighth of an octave, which costs 0.004
bits per weight; a finer grid would cost more in the bytes of the step sizes."""
_POWERS = torch.tensor([2.0 ** (i / _PER_OCTAVE) for i in range(_PER_OCTAVE)])
_MOST = 127  # largest step size, in quarters of an octave: it is stored as int8
_BLOCK = 64  # columns rounded before all later columns are updated at once
_LARGEST = 32_767  # largest integer: it is stored as int16
_REMEDY = "the Fisher information of the columns is not positive definite; raise the damping of Waterfilling"
RoundColumn = Callable[[int, Tensor], Tensor]
"""Maps a column's index and its values, (rows,), to the points stored for them; both in steps."""


@dataclass(frozen=True, kw_only=True)
class WaterfillingSteps:
    """Mixin for a quantizer with the steps of `Waterfilling`."""

    step: Positive = 5e-4
    """Square root of twice the cost, in nats per token, of an error of one step. `pack.fit` chooses it."""
    damping: NonNegative = 0.02
    """Added to the diagonal of C, in units of its mean, because C is measured on a sample."""
    calibrated: ClassVar[bool] = True

    def quantize(self, weight: Tensor, calibration: Calibration = Calibration()) -> Arrays:
        """Return `row_steps` and `column_steps` (int8, quarters of an octave), `integers` (int16) and `step`.

        `step`, of one element, is a factor of less than a quarter of an octave, so that a file can have any length.
        Without a calibration all weights have the same importance, in units of their root mean square; outside matrices
        all have the mean importance. `UserError` for a calibration that is not finite or of another shape.
        """
        rows = as_rows(plain(weight))
        if not bool(rows.any()):
            zeros = torch.zeros(len(rows)), torch.zeros(rows.shape[1])
            return self._arrays(torch.zeros_like(rows), *zeros, 1.0, weight.shape)
        if weight.ndim != 2 and calibration.rows is not None:
            calibration = Calibration(rows=calibration.rows.mean().expand(len(rows)))
        importance, columns = self._costs(rows, calibration)
        factor = cholesky_upper(columns.double(), _REMEDY).float()
        pivots = factor.diagonal()
        column_steps = _octaves(1 / pivots)
        level = round(math.log2(self.step) * _PER_OCTAVE)
        step = self.step / 2.0 ** (level / _PER_OCTAVE)
        row_steps = (_octaves(importance.rsqrt()) + level).clamp(-_MOST, _MOST)
        row_steps = torch.maximum(row_steps, _least(rows, column_steps))
        steps = _steps(row_steps, column_steps, step)
        points = ldlq(rows, steps, factor / pivots, self._rounding(rows / steps))
        # A row of zeros needs no step of its own; the most common step is the cheapest to code.
        row_steps[~points.any(1)] = row_steps.mode().values
        return self._arrays(points, row_steps, column_steps, step, weight.shape)

    def dequantize(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> Tensor:
        """Return integers · row steps · column steps · step."""
        rows, columns = (torch.from_numpy(arrays[key].astype(np.int32)) for key in ("row_steps", "column_steps"))
        integers = torch.from_numpy(arrays["integers"].astype(np.float32)).reshape(len(rows), len(columns))
        return (integers * _steps(rows, columns, arrays["step"][0])).reshape(shape)

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """Return integers of the weight's shape, step sizes of rows and columns, and their common factor."""
        rows, columns = rows_shape(shape)
        small = np.dtype(np.int8)
        return {
            "row_steps": (small, (rows,)),
            "column_steps": (small, (columns,)),
            "integers": (np.dtype("<i2"), shape),
            "step": (np.dtype("<f4"), (1,)),
        }

    def coarser(self, factor: float) -> Self:
        """Return the same with `factor` times the step."""
        return replace(self, step=self.step * factor)

    def _rounding(self, weights: Tensor) -> RoundColumn:
        """Return the function that rounds columns of `weights`, (rows, columns) in steps: to the nearest integers."""
        return nearest

    def _arrays(
        self, points: Tensor, row_steps: Tensor, column_steps: Tensor, step: float, shape: tuple[int, ...]
    ) -> Arrays:
        """Return the arrays that stand for `points`, (rows, columns), in steps."""
        return {
            "row_steps": row_steps.to(torch.int8).numpy(),
            "column_steps": column_steps.to(torch.int8).numpy(),
            "integers": points.to(torch.int16).reshape(shape).numpy(),
            "step": np.array([step], "<f4"),
        }

    def _costs(self, rows: Tensor, calibration: Calibration) -> tuple[Tensor, Tensor]:
        """Return the diagonal of R, (rows,), and the damped C, (columns, columns)."""
        count, width = rows.shape
        if calibration.rows is None:
            importance = torch.full((count,), 1.0 / float(rows.square().mean().clamp(2.0**-120, 2.0**120)))
        else:
            importance = calibration.rows.float()
            importance = importance.clamp_min(1e-9 * float(importance.max().clamp_min(1e-20)))
        columns = torch.eye(width) if calibration.columns is None else calibration.columns.float().clone()
        if importance.shape != (count,) or columns.shape != (width, width):
            raise UserError(f"calibration is not for a weight of {count:,} rows and {width:,} columns; calibrate again")
        if not bool(torch.isfinite(importance).all() and torch.isfinite(columns).all()):
            raise UserError("calibration met values that are not finite; the model diverged, lower its learning rates")
        mean = columns.diagonal().mean().clamp_min(1e-20)
        columns.diagonal().add_(self.damping * mean)
        return importance, columns


class Waterfilling(WaterfillingSteps, Quantizer):
    """A step for every row times a step for every column, so that rounding any weight raises the loss equally.

    With an entropy coder, a weight should get bits until its next bit would gain less than a bit elsewhere. The cost of
    an error follows from the Fisher information R x C of `Calibration`. Columns are rounded in turn, and each column
    compensates the errors of earlier ones (GPTQ, arXiv 2210.17323, in the form of LDLQ, arXiv 2307.13304), so an error
    in column j of row i costs R_i times the pivot D_j of C = U D U^T. Its step is `step` / sqrt(R_i D_j), as in
    WaterSIC (arXiv 2603.04956), which uses D alone. So one number sets the bytes of all matrices together and how they
    are divided. Weights smaller than half their step become 0 and cost almost nothing.
    """

    @property
    def dequantizer(self) -> Quantizer:
        return Waterfilling()


def nearest(column: int, values: Tensor) -> Tensor:
    """Return the integers nearest to a column's values."""
    return values.round().clamp(-_LARGEST, _LARGEST)


def ldlq(rows: Tensor, steps: Tensor, unit: Tensor, rounded: RoundColumn = nearest) -> Tensor:
    """Round `rows` (rows, columns) column by column, each after adding errors @ `unit`[:, j]; in steps (LDLQ)."""
    # Columns are contiguous; always a copy, also of a single row.
    left, width = rows.T.clone(memory_format=torch.contiguous_format), rows.shape[1]
    steps = steps.T.contiguous()
    points: Tensor = torch.empty_like(left)
    for begin in range(0, width, _BLOCK):
        end = min(begin + _BLOCK, width)
        errors = torch.zeros(end - begin, len(rows))
        for j in range(begin, end):
            target = left[j]
            if j > begin:
                target = target + unit[begin:j, j] @ errors[: j - begin]
            points[j] = rounded(j, target / steps[j])
            errors[j - begin] = rows[:, j] - points[j] * steps[j]
        if end < width:
            left[end:] += unit[begin:end, end:].T @ errors
    return points.mT.contiguous()


def _octaves(steps: Tensor) -> Tensor:
    """Return the steps' base-2 logarithms, rounded to quarters of an octave, int32."""
    return (steps.log2() * _PER_OCTAVE).round().clamp(-_MOST, _MOST).int()


def _least(rows: Tensor, column_steps: Tensor) -> Tensor:
    """Return the smallest row steps that keep integers in range, with an octave to spare for compensation."""
    widest = (rows.abs() / _steps(torch.zeros(1, dtype=torch.int32), column_steps, 1.0)).amax(1)
    return (_octaves(widest.clamp_min(2.0**-120) * (2 / _LARGEST)) + 1).clamp(-_MOST, _MOST)


def _steps(rows: Tensor, columns: Tensor, step: float) -> Tensor:
    """Return `step` · 2^((row + column) / 4), (rows, columns).

    A table, powers of two and one product give the same bits on every machine.
    """
    octaves = rows[:, None] + columns[None]
    sizes = torch.ldexp(_POWERS[octaves.remainder(_PER_OCTAVE)], octaves.div(_PER_OCTAVE, rounding_mode="floor"))
    return sizes * float(step)
