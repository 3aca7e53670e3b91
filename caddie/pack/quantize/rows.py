"""Integers with one step for each row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from caddie.config import Range
from caddie.pack.quantize.quantizer import Arrays, Calibration, Layout, Quantizer, Rounding, as_rows, plain, rows_shape
from caddie.pack.quantize.scales import Grid, Percentile, Scale


class Rows(Quantizer):
    """One step per row (per tensor for vectors): integer = round(weight / step)."""

    bits: Annotated[int, Range(2, 8)] = 8
    """Bits of an integer; the largest is 2^(bits - 1) - 1."""
    scale: Scale = Percentile()
    """Choice of the steps."""
    steps: Literal["float16", "float32"] = "float16"
    """Number format of the stored steps; late quantization-aware training in the records does not round them (#649)."""
    packed: bool = False
    """Store integers in `bits` bits, the first in the lowest, padded with zeros to groups of whole bytes (for 6 bits
    four integers in three bytes); otherwise one byte per integer, which entropy coders compress better."""

    @property
    def dequantizer(self) -> Rows:
        return self.but(scale=Percentile())

    @property
    def calibrated(self) -> bool:
        return self.scale.calibrated

    def coarser(self, factor: float) -> Rows:
        return self.but(scale=self.scale.coarser(factor))

    @property
    def largest(self) -> int:
        """Largest integer, 2^(bits - 1) - 1."""
        return int(2 ** (self.bits - 1) - 1)

    def quantize(self, weight: Tensor, calibration: Calibration = Calibration()) -> Arrays:
        """Return `integers` (int8, the weight's shape) or `packed` (bytes), and `steps` (rows,)."""
        rows = as_rows(plain(weight))
        grid = self.grid(rows, calibration)
        return self.arrays(grid.clipped(rows).round(), grid, tuple(weight.shape))

    def grids(self, rows: Tensor, calibration: Calibration) -> list[Grid]:
        """Return the scale's candidates for a matrix (rows, columns)."""
        return self.scale.grids(rows, self.largest, self.stored, calibration)

    def grid(self, rows: Tensor, calibration: Calibration = Calibration()) -> Grid:
        """Return the candidate with the least squared error, on a tie the first, without leaving the device."""
        grids = self.grids(rows, calibration)
        if len(grids) == 1:
            return grids[0]
        seen = [grid.clipped(rows).round() * self.stored(grid.steps)[:, None] for grid in grids]
        least = torch.stack([(rows - restored).square().mean() for restored in seen]).argmin().reshape(1)
        steps, limits = torch.stack([g.steps for g in grids]), torch.stack([g.limits for g in grids])
        return Grid(steps.index_select(0, least)[0], limits.index_select(0, least)[0])

    def arrays(self, integers: Tensor, grid: Grid, shape: tuple[int, ...]) -> Arrays:
        """Return the stored arrays of integers (rows, columns), float32, for a weight of this shape."""
        found = integers.to(torch.int8).reshape(shape).numpy()
        stored = {"packed": _pack(found.reshape(-1), self.bits)} if self.packed else {"integers": found}
        return {**stored, "steps": self.stored(grid.steps).numpy().astype(self._step_dtype)}

    def stored(self, steps: Tensor) -> Tensor:
        """Return steps rounded to their stored number format, in float32."""
        return half(steps) if self.steps == "float16" else steps

    def dequantize(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> Tensor:
        integers = _unpack(arrays["packed"], self.bits, math.prod(shape)) if self.packed else arrays["integers"]
        rows = as_rows(torch.from_numpy(integers.astype(np.float32)).reshape(shape))
        return (rows * torch.from_numpy(arrays["steps"].astype(np.float32))[:, None]).reshape(shape)

    def layout(self, shape: tuple[int, ...]) -> Layout:
        steps = (self._step_dtype, (rows_shape(shape)[0],))
        if self.packed:
            return {"packed": (np.dtype(np.uint8), (_packed_bytes(math.prod(shape), self.bits),)), "steps": steps}
        return {"integers": (np.dtype(np.int8), shape), "steps": steps}

    def fake(self, weight: Tensor, rounding: Rounding = torch.round) -> Tensor:
        rows = as_rows(weight.float())
        values = rows.detach()
        grid = self.grid(values)
        # The second term is 0 and carries the gradient, also past the clip, which touches the largest of every row.
        integers = rounding(grid.clipped(values) + (rows - values) / grid.steps[:, None])
        return (integers * self.stored(grid.steps)[:, None]).reshape(weight.shape)

    @property
    def _step_dtype(self) -> np.dtype[np.generic]:
        return np.dtype("<f2" if self.steps == "float16" else "<f4")


def half(positive: Tensor) -> Tensor:
    """Round numbers from 0 to 65,504 to half precision; return them in float32.

    It uses arithmetic, because torch.compile leaves out a conversion to half precision and back.
    """
    spacing = ((positive.view(torch.int32) & 0x7F80_0000).view(torch.float32) * 2.0**-10).clamp_min(2.0**-24)
    return (positive / spacing).round() * spacing


def _packed_bytes(count: int, bits: int) -> int:
    group = 8 // math.gcd(8, bits)  # integers that fill whole bytes
    return -(-count // group) * group * bits // 8


def _pack(integers: np.ndarray, bits: int) -> np.ndarray:
    """Return the packed bytes of integers, int8 (count,), plus half their range, the lowest bits first."""
    values = np.zeros(_packed_bytes(len(integers), bits) * 8 // bits, np.uint8)
    values[: len(integers)] = integers.astype(np.int16) + 2 ** (bits - 1)
    return np.packbits(np.unpackbits(values[:, None], axis=1, count=bits, bitorder="little"), bitorder="little")


def _unpack(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    found = np.unpackbits(packed, bitorder="little").reshape(-1, bits)[:count]
    return np.packbits(found, axis=1, bitorder="little")[:, 0].astype(np.int16) - np.int16(2 ** (bits - 1))
