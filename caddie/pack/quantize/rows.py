"""Integers with one step for each row, and the choice of the steps: quantiles (clipping), deviations (SDClip)."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from caddie.config import Config, Fraction, Positive, Range, Technique, known
from caddie.pack.quantize.quantizer import Arrays, Calibration, Layout, Quantizer, Rounding, as_rows, plain, rows_shape

LARGEST_STEP = 65_504
"""The largest number in half precision."""


@dataclass(frozen=True)
class Grid:
    """A step for each row: its integers are round(clamp(weight / step, ±limit))."""

    steps: Tensor
    """(rows,), float32, above 0."""
    limits: Tensor
    """Clip of each row in units of its step, (rows,)."""

    def clipped(self, rows: Tensor) -> Tensor:
        """Return clipped weights in units of their row's step, (rows, columns)."""
        limits = self.limits[:, None]
        return (rows / self.steps[:, None]).clamp(-limits, limits)


class Scale(Config):
    """Socket: the choice of each row's step."""

    @property
    def calibrated(self) -> bool:
        """True if the steps depend on `Calibration.inputs`."""
        return False

    def coarser(self, factor: float) -> Scale:
        """Return the same for steps `factor` times as large, or itself if they follow from the weights alone."""
        return self

    @abstractmethod
    def grids(self, rows: Tensor, largest: int, stored: Rounding, calibration: Calibration) -> list[Grid]:
        """Return one or several candidates for rows (rows, columns), float32, and integers up to `largest`.

        `stored` rounds steps to the number format they are stored in. Of several candidates the quantizer takes the one
        with the least squared error over the whole matrix, the first of equals.
        """


Floor = Literal["relative", "absolute"]


class Percentile(Scale):
    """The largest integer stands for a quantile of the row's |weight|, as in the contest's baseline.

    The baseline's script is `Percentile(floor="absolute")`. That floor, 1/127 for every row, destroys models whose
    weights are small; the default floor follows the tensor's own largest step instead.
    """

    techniques = known(
        "The largest few of a row may be clipped for smaller steps.",
        "openai/parameter-golf, 2026-03-17_NaiveBaseline",
        floor=Technique(
            "The scripts' floor holds the integers of rows with small weights small, and destroys an untrained model.",
            "openai/parameter-golf, 2026-03-17_NaiveBaseline; here for the relative floor",
            "1.3072 for 1.2417 after few steps with the scripts' floor, by a fork of #670",
        ),
    )

    fraction: Annotated[float, Range(0.5, 1.0)] = 0.9999984
    """Quantile of |weight| that maps to the largest integer; weights beyond it are clipped."""
    floor: Floor = "relative"
    """Least step: 1/1024 of the tensor's largest step, or the scripts' 1/(largest integer) for every tensor."""

    def grids(self, rows: Tensor, largest: int, stored: Rounding, calibration: Calibration) -> list[Grid]:
        """Return one candidate."""
        clip = _quantile(rows.abs(), self.fraction)
        steps = _at_least(clip / largest, largest, self.floor)
        if self.floor == "relative":  # integers that fit the step as stored; the scripts round the step afterwards
            steps = stored(steps)
        return [Grid(steps, (clip / steps).clamp(max=largest))]


class BestPercentile(Scale):
    """The quantile of the rows' |weight|, one of five for the whole matrix, with the least squared error.

    The records' scripts are `BestPercentile(floor="absolute")`.
    """

    techniques = known(
        "Clipping the largest few makes the steps of all others smaller.",
        "openai/parameter-golf, 2026-03-22_11L_EMA_GPTQ-lite and #649",
        "-0.0006 (the record that brought it)",
    )

    fractions: tuple[Annotated[float, Range(0.5, 1.0)], ...] = (0.999, 0.9995, 0.9999, 0.99999, 1.0)
    """Quantiles to try."""
    floor: Floor = "relative"
    """Least step, as in `Percentile`."""

    def grids(self, rows: Tensor, largest: int, stored: Rounding, calibration: Calibration) -> list[Grid]:
        """Return one candidate for each quantile."""
        clips = [_quantile(rows.abs(), fraction) for fraction in self.fractions]
        steps = [stored(_at_least(clip / largest, largest, self.floor)) for clip in clips]
        return [Grid(each, torch.full_like(each, largest)) for each in steps]


class SigmaClip(Scale):
    """The largest integer stands for k standard deviations of the row: openai/parameter-golf, 2026-04-05 SDClip.

    With k as large as in the records nothing is clipped. It is a uniform quantizer for an entropy coder, and doubling k
    costs about one bit for each weight.
    """

    techniques = known(
        "Where integers are entropy coded, the step decides how many bytes they take, not the largest of the row.",
        "openai/parameter-golf, 2026-04-05_SP8192_GPTQ-Embeddings_SDClip_Loop45x2",
        "in a bundle; 10 to 12 standard deviations for MLPs -0.00096",
        importance=Technique(
            "Rows that matter more could have wider clips.",
            "openai/parameter-golf, 2026-04-06_SP8192_HessianSDClip_ProgressiveRecurrence",
            "0.30 is worse than 0.175; the importance of rows differs from seed to seed (r = 0.12)",
        ),
    )

    k: Positive = 12.85
    """Standard deviations that map to the largest integer."""
    importance: Fraction = 0.0
    """Clips are multiplied by 1 + λ(i - 1), with λ this number and i the row's importance: its mean of |weight| times
    the mean square of that weight's input, as a multiple of the average row's. Without calibration all i are 1."""

    @property
    def calibrated(self) -> bool:
        """True if rows differ in importance."""
        return self.importance > 0

    def coarser(self, factor: float) -> SigmaClip:
        """Return the same with `factor` times as many standard deviations."""
        return self.but(k=self.k * factor)

    def grids(self, rows: Tensor, largest: int, stored: Rounding, calibration: Calibration) -> list[Grid]:
        """Return one candidate. The clip is at least the row's |mean|, so that constant rows survive."""
        spread = rows.new_zeros(len(rows))
        if rows.numel():
            deviation = rows.std(dim=1, correction=min(1, rows.shape[1] - 1))
            spread = torch.maximum(self.k * deviation, rows.mean(1).abs())
        if self.importance and calibration.inputs is not None:
            squares = calibration.inputs.diagonal().to(rows)
            important = (rows.abs() * squares).mean(1)
            spread = spread * (1 + self.importance * (important / important.mean().clamp_min(1e-30) - 1))
        # the scripts' floor, 1e-10, is 0 in half precision; this is the smallest half
        steps = stored((spread / largest).nan_to_num(nan=LARGEST_STEP).clamp(2.0**-24, LARGEST_STEP))
        return [Grid(steps, torch.full_like(steps, largest))]


class Rows(Quantizer):
    """One step per row (per tensor for vectors): integer = round(weight / step)."""

    techniques = known(
        "Every row gets the step it needs.",
        "openai/parameter-golf, the baseline (8 bits), 6 bits from MixedQuant_Int6Int8_SlidingWindow on",
        "quantization gap: 8 bits 0.0004, 6 bits 0.006, 5 bits 0.012 (#375)",
        packed=Technique(
            "Without an entropy coder six bits for a weight are fewer than eight.",
            "openai/parameter-golf #1559, mixed_int6_int8_per_row_v1",
            "worse than one byte each with any coder behind it (#1510)",
        ),
    )

    bits: Annotated[int, Range(2, 8)] = 8
    """Width of an integer; the largest is 2^(bits - 1) - 1."""
    scale: Scale = Percentile()
    """Choice of the steps."""
    steps: Literal["float16", "float32"] = "float16"
    """Number format of the stored steps; the records' late quantization-aware training rounds none (#649)."""
    packed: bool = False
    """Store integers in `bits` bits, the first in the lowest, padded with zeros to groups that end with a byte (for 6
    bits four integers in three bytes); otherwise a byte each, which coders compress better."""

    @property
    def dequantizer(self) -> Quantizer:
        """The same without the choice of the steps."""
        return self.but(scale=Percentile())

    @property
    def calibrated(self) -> bool:
        """True if the scale is calibrated."""
        return self.scale.calibrated

    def coarser(self, factor: float) -> Rows:
        """Return the same with a coarser scale."""
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
        """Return the candidate of the least squared error, the first of equals, without leaving the device."""
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
        """Return integers · steps."""
        integers = _unpack(arrays["packed"], self.bits, math.prod(shape)) if self.packed else arrays["integers"]
        rows = as_rows(torch.from_numpy(integers.astype(np.float32)).reshape(shape))
        return (rows * torch.from_numpy(arrays["steps"].astype(np.float32))[:, None]).reshape(shape)

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """Return integers of the weight's shape, or their bytes, and one step per row."""
        steps = (self._step_dtype, (rows_shape(shape)[0],))
        if self.packed:
            return {"packed": (np.dtype(np.uint8), (_packed_bytes(math.prod(shape), self.bits),)), "steps": steps}
        return {"integers": (np.dtype(np.int8), shape), "steps": steps}

    def fake(self, weight: Tensor, rounding: Rounding = torch.round) -> Tensor:
        """Return integers · steps, without a calibration."""
        rows = as_rows(weight.float())
        values = rows.detach()
        grid = self.grid(values)
        # What is added is 0 and carries the gradient, past the clip too: it touches the largest of every row.
        integers = rounding(grid.clipped(values) + (rows - values) / grid.steps[:, None])
        return (integers * self.stored(grid.steps)[:, None]).reshape(weight.shape)

    @property
    def _step_dtype(self) -> np.dtype[np.generic]:
        return np.dtype("<f2" if self.steps == "float16" else "<f4")


def _at_least(steps: Tensor, largest: int, floor: Floor) -> Tensor:
    if floor == "absolute":
        return steps.clamp(1.0 / largest, LARGEST_STEP)
    widest = steps.amax() if len(steps) else steps.new_zeros(())
    # 2^-20 is a safe distance above the smallest half
    return torch.maximum(steps, (widest / 1024).clamp_min(2.0**-20)).clamp(max=LARGEST_STEP)


def _quantile(rows: Tensor, fraction: float) -> Tensor:
    """Return `torch.quantile(rows, fraction, dim=1)` by sorting only the largest few of each row; 0 for empty rows."""
    if not rows.numel():
        return rows.new_zeros(len(rows))
    last = rows.shape[1] - 1
    below = int(fraction * last)
    largest = rows.topk(last + 1 - below, dim=1).values
    weight = torch.full((), fraction, device=rows.device) * last - below  # in float32, as in `torch.quantile`
    return largest[:, -1].lerp(largest[:, max(last - below - 1, 0)], weight)


def half(positive: Tensor) -> Tensor:
    """Return the half-precision number nearest to each of 0 to 65,504, in float32.

    Done by arithmetic, because torch.compile leaves out a conversion to half precision and back.
    """
    spacing = ((positive.view(torch.int32) & 0x7F80_0000).view(torch.float32) * 2.0**-10).clamp_min(2.0**-24)
    return (positive / spacing).round() * spacing


def _packed_bytes(count: int, bits: int) -> int:
    group = 8 // math.gcd(8, bits)  # integers that end with a byte
    return -(-count // group) * group * bits // 8


def _pack(integers: np.ndarray, bits: int) -> np.ndarray:
    """Return the bytes of integers plus half their range, int8 (count,), the lowest bits first."""
    values = np.zeros(_packed_bytes(len(integers), bits) * 8 // bits, np.uint8)
    values[: len(integers)] = integers.astype(np.int16) + 2 ** (bits - 1)
    return np.packbits(np.unpackbits(values[:, None], axis=1, count=bits, bitorder="little"), bitorder="little")


def _unpack(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    found = np.unpackbits(packed, bitorder="little").reshape(-1, bits)[:count]
    return np.packbits(found, axis=1, bitorder="little")[:, 0].astype(np.int16) - np.int16(2 ** (bits - 1))
