"""Rows of integers with a step each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from caddie.config import Range, Technique
from caddie.quantize.quantizer import Arrays, Calibration, Layout, Quantizer, Rounding


@dataclass(frozen=True, kw_only=True)
class Rows(Quantizer):
    """One step per row (per tensor for vectors): integer = round(weight / step), step from a percentile of |weight|.

    The contest baseline's exporter is `Rows(floor="absolute")`. Its floor, 1/127 for every row, destroys models whose
    weights are small; the default floor follows the tensor's own largest step instead.
    """

    techniques: ClassVar = {
        "": Technique(
            "Every row gets the step it needs.",
            "openai/parameter-golf, the baseline (8 bits), 6 bits from MixedQuant_Int6Int8_SlidingWindow on",
            "loss by rounding: 8 bits 0.0004, 6 bits 0.006, 5 bits 0.012 (#375)",
        ),
    }

    bits: Annotated[int, Range(2, 8)] = 8
    """Width of an integer; the largest is 2^(bits - 1) - 1."""
    percentile: Annotated[float, Range(0.5, 1.0)] = 0.9999984
    """Quantile of |weight| that maps to the largest integer; what lies beyond is clipped."""
    floor: Literal["relative", "absolute"] = "relative"
    """Least step: 1/1024 of the tensor's largest step, or the scripts' 1/(largest integer) for every tensor."""
    steps: Literal["float16", "float32"] = "float16"
    """Number format of the stored steps; the records' late quantization-aware training rounds none (#649)."""

    def quantize(self, weight: Tensor, calibration: Calibration = Calibration()) -> Arrays:
        """`integers` (int8, the weight's shape) and `steps` (one per row)."""
        integers, steps = self._quantized(_as_rows(weight.detach().float().cpu()), torch.round)
        stored = steps.numpy().astype(self._step_dtype)
        return {"integers": integers.to(torch.int8).reshape(weight.shape).numpy(), "steps": stored}

    def dequantize(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> Tensor:
        """integers · steps."""
        rows = _as_rows(torch.from_numpy(arrays["integers"].astype(np.float32)).reshape(shape))
        return (rows * torch.from_numpy(arrays["steps"].astype(np.float32))[:, None]).reshape(shape)

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """Integers of the weight's shape and one step per row."""
        rows = math.prod(shape[:-1]) if len(shape) > 1 else 1
        return {"integers": (np.dtype(np.int8), shape), "steps": (self._step_dtype, (rows,))}

    def fake(self, weight: Tensor, rounding: Rounding = torch.round) -> Tensor:
        """integers · steps."""
        integers, steps = self._quantized(_as_rows(weight.float()), rounding)
        return (integers * steps[:, None]).reshape(weight.shape)

    def _quantized(self, rows: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
        """Integers, as floats, and steps as stored."""
        values = rows.detach()
        clip = _quantile(values.abs(), self.percentile) if values.numel() else values.new_zeros(len(values))
        steps = self._least(clip / self._largest)
        stored = _half(steps) if self.steps == "float16" else steps
        if self.floor == "relative":  # integers that fit the step as stored; the scripts round the step afterwards
            steps = stored
        steps = steps[:, None]
        limit = (clip[:, None] / steps).clamp(max=self._largest)
        clipped = (values / steps).clamp(-limit, limit)
        # What is added is 0 and carries the gradient, past the clip too: it touches the largest of every row.
        return rounding(clipped + (rows - values) / steps), stored

    @property
    def _largest(self) -> int:
        return int(2 ** (self.bits - 1) - 1)

    @property
    def _step_dtype(self) -> np.dtype[np.generic]:
        return np.dtype("<f2" if self.steps == "float16" else "<f4")

    def _least(self, steps: Tensor) -> Tensor:
        """The steps, none below the floor."""
        if self.floor == "absolute":
            return steps.clamp(1.0 / self._largest, 65_504)
        largest = steps.amax() if len(steps) else steps.new_zeros(())
        # 2^-20 is a safe distance above the smallest half; 65,504 is the largest
        return torch.maximum(steps, (largest / 1024).clamp_min(2.0**-20)).clamp(max=65_504)


def _as_rows(weight: Tensor) -> Tensor:
    return weight.reshape(-1, weight.shape[-1]) if weight.ndim > 1 else weight.reshape(1, -1)


def _quantile(rows: Tensor, fraction: float) -> Tensor:
    """`torch.quantile(rows, fraction, dim=1)`, which sorts whole rows where only the largest few are wanted."""
    last = rows.shape[1] - 1
    below = int(fraction * last)
    largest = rows.topk(last + 1 - below, dim=1).values
    weight = torch.full((), fraction, device=rows.device) * last - below  # in float32, as in `torch.quantile`
    return largest[:, -1].lerp(largest[:, max(last - below - 1, 0)], weight)


def _half(positive: Tensor) -> Tensor:
    """The nearest half-precision number, in float32; torch.compile leaves out a conversion there and back."""
    exponent = (positive.view(torch.int32) & 0x7F80_0000).view(torch.float32)  # the power of two at or below
    spacing = (exponent * 2.0**-10).clamp_min(2.0**-24)
    return (positive / spacing).round() * spacing
