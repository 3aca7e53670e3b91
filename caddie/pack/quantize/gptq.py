"""GPTQ: rounding column by column, with each column's error compensated by those that follow."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, cast

import torch
from torch import Tensor

from caddie.config import Range
from caddie.errors import UserError
from caddie.pack.quantize.quantizer import Arrays, Calibration, Quantizer, Rounding, Wrapper, as_rows, plain
from caddie.pack.quantize.rows import Rows
from caddie.pack.quantize.scales import Grid


class Gptq(Wrapper, Quantizer):
    """Integers that keep the outputs W x, not the weights: GPTQ (arXiv 2210.17323) with activation order.

    Columns are rounded in order of decreasing mean square of their inputs. The error of a column is compensated, as far
    as inputs are correlated, by the columns not yet rounded. Without calibrated inputs, as for an embedding (not a
    linear map), it is the same as `of`.
    """

    of: Rows = Rows()
    """The integers, their steps and how they are stored."""
    damping: Annotated[float, Range(1e-6, 1.0)] = 0.01
    """Added to the diagonal of the inputs' second moments, in units of its mean."""
    block: Annotated[int, Range(1, 65_536)] = 128
    """Columns rounded before all later columns are updated at once; changes only the time."""
    calibrated: ClassVar[bool] = True

    @property
    def dequantizer(self) -> Quantizer:
        """The dequantizer of `of`: the arrays are the same."""
        return self.of.dequantizer

    def quantize(self, weight: Tensor, calibration: Calibration = Calibration()) -> Arrays:
        """Return the arrays of `of`; `UserError` for inputs that are not finite or of another width."""
        if calibration.inputs is None or not weight.numel():
            return self.of.quantize(weight, calibration)
        return self.rounded(weight, calibration)

    def rounded(
        self, weight: Tensor, calibration: Calibration, fine: tuple[Grid, Sequence[int]] | None = None
    ) -> Arrays:
        """Return the arrays of `of` for known inputs; `fine` is another grid and the columns that use it."""
        assert calibration.inputs is not None
        rows = as_rows(plain(weight))
        grids = self.of.grids(rows, calibration)
        hessian = calibration.inputs.detach().float().cpu().clone()
        if hessian.shape != (width := rows.shape[1],) * 2:
            raise UserError(f"calibration is for {len(hessian):,} inputs, the weight has {width:,}; calibrate again")
        if not bool(torch.isfinite(hessian).all()):
            raise UserError("calibration met inputs that are not finite; the model diverged, lower its learning rates")
        with torch.autocast("cpu", enabled=False):
            diagonal = hessian.diagonal()
            alive = (diagonal != 0).float()
            diagonal += 1 - alive
            diagonal += self.damping * diagonal.mean()
            order = torch.argsort(diagonal, descending=True, stable=True)
            upper = _upper_factor_of_inverse(hessian[order][:, order])
            columns = (rows * alive).T[order].contiguous()
            others = dict.fromkeys(fine[1], (fine[0], self.of.stored(fine[0].steps))) if fine else {}
            found, errors = [], []
            for grid in grids:
                usual = grid, self.of.stored(grid.steps)
                by_column = [others.get(column, usual) for column in order.tolist()]
                found.append(_round_columns(columns, upper, by_column, self.block))
                steps = torch.stack([steps for _, steps in by_column])
                errors.append((columns - found[-1] * steps).square().mean())
            best = int(torch.stack(errors).argmin())
        integers = torch.empty_like(columns)
        integers[order] = found[best]
        return self.of.arrays(integers.T.contiguous(), grids[best], tuple(weight.shape))

    def fake(self, weight: Tensor, rounding: Rounding = torch.round) -> Tensor:
        """Return the fake quantization of `of`: a training step has no time for GPTQ."""
        return self.of.fake(weight, rounding)


def _upper_factor_of_inverse(hessian: Tensor) -> Tensor:
    """Return the upper triangular U with U^T U = H^-1.

    With H = R R^T, U is R^-1: one factorization and one triangular inverse. The usual way, by H^-1, takes two
    factorizations and an inverse.
    """
    remedy = "the inputs' second moments are not positive definite; raise the damping of Gptq"
    factor = cholesky_upper(hessian, remedy)
    return cast(Tensor, torch.linalg.solve_triangular(factor, torch.eye(len(factor), dtype=factor.dtype), upper=True))


def _round_columns(columns: Tensor, upper: Tensor, grids: Sequence[tuple[Grid, Tensor]], block: int) -> Tensor:
    """Return the integers of W^T, (columns, rows), by the grid and the stored steps of each column.

    W is transposed so that its columns are contiguous.
    """
    rest, integers = columns.clone(), torch.empty_like(columns)
    pivots = upper.diagonal().tolist()
    for begin in range(0, len(rest), block):
        end = min(begin + block, len(rest))
        errors = torch.empty_like(rest[begin:end])
        for column in range(begin, end):
            weight, integer, error = rest[column], integers[column], errors[column - begin]
            grid, steps = grids[column]
            torch.div(weight, grid.steps, out=integer).clamp_(-grid.limits, grid.limits).round_()
            torch.sub(weight, integer * steps, out=error).div_(pivots[column])
            rest[column + 1 : end].addr_(upper[column, column + 1 : end], error, alpha=-1)
        rest[end:].addmm_(upper[begin:end, end:].T, errors, alpha=-1)
    return integers


def cholesky_upper(matrix: Tensor, remedy: str) -> Tensor:
    """Return the upper triangular R with R R^T = `matrix`; `UserError` with the remedy if not positive definite.

    The matrix with rows and columns reversed is L L^T, and R is L reversed likewise.
    """
    lower, failed = torch.linalg.cholesky_ex(matrix.flip(0, 1))
    if int(failed):
        raise UserError(remedy)
    return cast(Tensor, lower.flip(0, 1))
