"""Low-rank correction of the rounding error."""

from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from caddie.config import Range
from caddie.errors import UserError
from caddie.pack.quantize.gptq import Gptq
from caddie.pack.quantize.quantizer import Arrays, Calibration, Layout, Quantizer, Wrapper, as_rows, plain, rows_shape
from caddie.pack.quantize.scales import LARGEST_STEP

LARGEST = 1e30
"""Bound that weights and errors are clipped to, so that their sums and squares stay finite."""


class LowRank(Wrapper, Quantizer):
    """Quantizer `of`, its error W - Ŵ corrected by a low-rank product A B in a few bits: LQER (arXiv 2402.02446).

    A has the left singular vectors times the singular values, B the right ones.
    """

    of: Quantizer = Gptq()
    """Quantizer of the weight itself."""
    rank: Annotated[int, Range(1, 256)] = 4
    """Rank of the correction: columns of A."""
    form: Literal["asymmetric", "symmetric"] = "asymmetric"
    """Asymmetric: A in 2 bits with one step, B in 4 bits with a step for each group of values. Symmetric: both in 4
    bits with a step for each row; this is also used if the values of B do not divide into groups."""
    group: Annotated[int, Range(1, 65_536)] = 64
    """Values of B that share a step; 32 in the record at 1.0565."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.of, LowRank):
            raise UserError("LowRank cannot be of LowRank; raise its rank")

    def quantize(self, weight: Tensor, calibration: Calibration = Calibration()) -> Arrays:
        """Return the arrays of `of`, then `left` and `right` (int8) and their steps."""
        arrays = self.of.quantize(weight, calibration)
        return arrays | self.factors(as_rows(plain(weight) - self.of.dequantize(arrays, tuple(weight.shape))))

    def factors(self, error: Tensor) -> Arrays:
        """Return the arrays of A and B for an error (rows, columns)."""
        u, s, vt = torch.linalg.svd(error.clamp(-LARGEST, LARGEST), full_matrices=False)
        grouped = self._grouped(tuple(error.shape))
        return self.pack(u[:, : self.rank] * s[: self.rank], vt[: self.rank], grouped)

    def pack(self, left: Tensor, right: Tensor, grouped: bool) -> Arrays:
        """Return the arrays of A (rows, rank) and B (rank, columns), with steps by group or by row."""
        found: Arrays = {}
        for name, factor in (("left", left), ("right", right)):
            if grouped:
                groups = factor.reshape(1, -1) if name == "left" else factor.reshape(-1, self.group)
                low, high, span = (-2, 1, 1.5) if name == "left" else (-8, 7, 7.5)
            else:
                groups, low, high, span = factor, -7, 7, 7.0
            largest = groups.abs().amax(1) if groups.numel() else groups.new_zeros(len(groups))
            steps = (largest / span).clamp(2.0**-24, LARGEST_STEP).half()
            integers = (groups / steps.float()[:, None]).round().clamp(low, high)
            found |= {name: integers.to(torch.int8).reshape(factor.shape).numpy(), f"{name}_steps": steps.numpy()}
        return found

    def dequantize(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> Tensor:
        return self.of.dequantize(arrays, shape) + self.product(arrays).reshape(shape)

    def product(self, arrays: Mapping[str, np.ndarray]) -> Tensor:
        """Return A B (rows, columns)."""
        factors = []
        for name in ("left", "right"):
            integers = torch.from_numpy(arrays[name].astype(np.float32))
            steps = torch.from_numpy(arrays[f"{name}_steps"].astype(np.float32))
            each = integers.numel() // max(len(steps), 1)
            factors.append(integers * steps.repeat_interleave(each).reshape(integers.shape))
        return factors[0] @ factors[1]

    def layout(self, shape: tuple[int, ...]) -> Layout:
        rows, columns = rows_shape(shape)
        rank = min(self.rank, rows, columns)
        steps = (1, rank * columns // self.group) if self._grouped(shape) else (rows, rank)
        return self.of.layout(shape) | {
            "left": (np.dtype(np.int8), (rows, rank)),
            "left_steps": (np.dtype("<f2"), (steps[0],)),
            "right": (np.dtype(np.int8), (rank, columns)),
            "right_steps": (np.dtype("<f2"), (steps[1],)),
        }

    def _grouped(self, shape: tuple[int, ...]) -> bool:
        rows, columns = rows_shape(shape)
        return self.form == "asymmetric" and not min(self.rank, rows, columns) * columns % self.group
