"""Rounding column by column, each error made good by the columns to come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from torch import Tensor

from caddie.config import Range, Technique
from caddie.errors import UserError
from caddie.pack.quantize.quantizer import Arrays, Calibration, Layout, Quantizer, Rounding, as_rows, plain
from caddie.pack.quantize.rows import Rows
from caddie.pack.quantize.scales import Grid


@dataclass(frozen=True, kw_only=True)
class Gptq(Quantizer):
    """Integers that keep the outputs W x, not the weights: GPTQ (arXiv 2210.17323) in order of activation.

    Columns are taken by falling mean square of their inputs. What rounding a column loses is made good, as far as the
    inputs are correlated, by those not yet rounded. Where the inputs are not known, as those of an embedding that is
    no linear map, this is `of`.
    """

    techniques: ClassVar = {
        "": Technique(
            "Columns that are rounded later make good what the earlier ones lost.",
            "arXiv 2210.17323; openai/parameter-golf #593 and nearly all records after it",
            "loss by rounding 0.0035 to 0.0042 for 0.008 with six bits (#593)",
        )
    }

    of: Rows = Rows()
    """The integers, their steps and how they are stored."""
    damping: Annotated[float, Range(1e-6, 1.0)] = 0.01
    """What is added to the diagonal of the inputs' second moments, in units of its mean."""
    block: Annotated[int, Range(1, 65_536)] = 128
    """Columns after which later ones are updated, all at once; changes time alone."""

    @property
    def reader(self) -> Quantizer:
        """That of `of`: what is stored is the same."""
        return self.of.reader

    @property
    def calibrated(self) -> bool:
        """It is."""
        return True

    def coarser(self, factor: float) -> Gptq:
        """Around a coarser `of`."""
        return self.but(of=self.of.coarser(factor))

    def quantize(self, weight: Tensor, calibration: Calibration = Calibration()) -> Arrays:
        """The arrays of `of`; inputs that are not finite or of another width are a `UserError`."""
        if calibration.inputs is None or not weight.numel():
            return self.of.quantize(weight, calibration)
        rows = as_rows(plain(weight))
        grids = self.of.grids(rows, calibration)
        with torch.autocast("cpu", enabled=False):
            moments, alive = _moments(calibration.inputs, rows.shape[1], self.damping)
            order = torch.argsort(moments.diagonal(), descending=True, stable=True)
            upper = _upper_factor_of_inverse(moments[order][:, order])
            columns = (rows * alive).T[order].contiguous()
            found = [_rounded(columns, upper, grid, self.of.stored(grid.steps), self.block) for grid in grids]
            restored = [each * self.of.stored(grid.steps) for each, grid in zip(found, grids, strict=True)]
            best = int(torch.stack([(columns - each).square().mean() for each in restored]).argmin())
        integers = torch.empty_like(columns)
        integers[order] = found[best]
        return self.of.arrays(integers.T.contiguous(), grids[best], tuple(weight.shape))

    def dequantize(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> Tensor:
        """That of `of`."""
        return self.of.dequantize(arrays, shape)

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """That of `of`."""
        return self.of.layout(shape)

    def fake(self, weight: Tensor, rounding: Rounding = torch.round) -> Tensor:
        """That of `of`: in training there is no time for more."""
        return self.of.fake(weight, rounding)


def _moments(inputs: Tensor, columns: int, damping: float) -> tuple[Tensor, Tensor]:
    """Damped second moments of the inputs, and 0 for columns whose input never differs from 0, else 1."""
    moments = inputs.detach().float().cpu().clone()
    if moments.shape != (columns, columns):
        raise UserError(f"calibration is for {moments.shape[-1]:,} inputs, the weight has {columns:,}; calibrate again")
    if not bool(torch.isfinite(moments).all()):
        raise UserError("calibration met inputs that are not finite; the model diverged, lower its learning rates")
    diagonal = moments.diagonal()
    alive = (diagonal != 0).float()
    diagonal += 1 - alive
    diagonal += damping * diagonal.mean()
    return moments, alive


def _upper_factor_of_inverse(moments: Tensor) -> Tensor:
    """The upper triangular U with U^T U = H^-1.

    H backwards is L L^T, so H is R R^T with R, which is L backwards, upper triangular, and U is R^-1: one
    factorization and one triangular inverse, where the usual way by H^-1 has two and an inverse.
    """
    lower, wrong = torch.linalg.cholesky_ex(moments.flip(0, 1))
    if int(wrong):
        raise UserError("the inputs' second moments are not positive definite; raise the damping of Gptq")
    identity = torch.eye(len(lower), dtype=lower.dtype)
    upper: Tensor = torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True)
    return upper


def _rounded(columns: Tensor, upper: Tensor, grid: Grid, steps: Tensor, block: int) -> Tensor:
    """Integers of W^T, (columns, rows): a column of W is contiguous there."""
    rest, integers = columns.clone(), torch.empty_like(columns)
    pivots = upper.diagonal().tolist()
    low, high = -grid.limits, grid.limits
    for begin in range(0, len(rest), block):
        end = min(begin + block, len(rest))
        errors = torch.empty_like(rest[begin:end])
        for column in range(begin, end):
            weight, integer, error = rest[column], integers[column], errors[column - begin]
            torch.div(weight, grid.steps, out=integer).clamp_(low, high).round_()
            torch.sub(weight, integer * steps, out=error).div_(pivots[column])
            rest[column + 1 : end].addr_(upper[column, column + 1 : end], error, alpha=-1)
        rest[end:].addmm_(upper[begin:end, end:].T, errors, alpha=-1)
    return integers
