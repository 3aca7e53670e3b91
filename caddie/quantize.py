"""Quantizers: from weights to integer arrays and back."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from caddie.config import Config, Range

Arrays = dict[str, np.ndarray]
"""What a quantized weight is stored as, by name."""
Layout = dict[str, tuple[np.dtype[np.generic], tuple[int, ...]]]
"""Dtype and shape of each stored array, known from the weight's shape alone."""


@dataclass(frozen=True, kw_only=True)
class Quantizer(Config):
    """Socket: a weight as arrays that can be coded."""

    @abstractmethod
    def quantize(self, weight: Tensor) -> Arrays:
        """The arrays of a float32 weight of any shape."""

    @abstractmethod
    def dequantize(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> Tensor:
        """The float32 weight that the arrays stand for."""

    @abstractmethod
    def layout(self, shape: tuple[int, ...]) -> Layout:
        """Which arrays a weight of this shape has."""


@dataclass(frozen=True, kw_only=True)
class Float16(Quantizer):
    """Half precision, for what is small or sensitive."""

    def quantize(self, weight: Tensor) -> Arrays:
        """One array, `values`."""
        return {"values": weight.detach().float().cpu().clamp(-65_504, 65_504).numpy().astype("<f2")}

    def dequantize(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> Tensor:
        """The values in float32."""
        return torch.from_numpy(arrays["values"].astype(np.float32)).reshape(shape)

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """One array of the weight's shape."""
        return {"values": (np.dtype("<f2"), shape)}


@dataclass(frozen=True, kw_only=True)
class Float32(Quantizer):
    """Full precision: exact."""

    def quantize(self, weight: Tensor) -> Arrays:
        """One array, `values`."""
        return {"values": weight.detach().float().cpu().numpy().astype("<f4")}

    def dequantize(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> Tensor:
        """The values."""
        return torch.from_numpy(arrays["values"].astype(np.float32)).reshape(shape)

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """One array of the weight's shape."""
        return {"values": (np.dtype("<f4"), shape)}


@dataclass(frozen=True, kw_only=True)
class Rows(Quantizer):
    """One step per row (per tensor for vectors): integer = round(weight / step), step from a percentile of |weight|.

    The contest baseline's exporter is `Rows(floor="absolute")`. Its floor, 1/127 for every row, destroys models whose
    weights are small; the default floor follows the tensor's own largest step instead.
    """

    bits: Annotated[int, Range(2, 8)] = 8
    """Width of an integer; the largest is 2^(bits - 1) - 1."""
    percentile: Annotated[float, Range(0.5, 1.0)] = 0.9999984
    """Quantile of |weight| that maps to the largest integer; what lies beyond is clipped."""
    floor: Literal["relative", "absolute"] = "relative"
    """Least step: 1/1024 of the tensor's largest step, or the scripts' 1/(largest integer) for every tensor."""

    def quantize(self, weight: Tensor) -> Arrays:
        """`integers` (int8, the weight's shape) and `steps` (float16, one per row)."""
        rows = _as_rows(weight.detach().float().cpu())
        clip = torch.quantile(rows.abs(), self.percentile, dim=1) if rows.numel() else rows.new_zeros(len(rows))
        steps = self._steps(clip)
        stored = steps.numpy().astype("<f2")
        if self.floor == "relative":  # integers that fit the step as stored; the scripts round the step afterwards
            steps = torch.from_numpy(stored.astype(np.float32))
        clipped = rows.clamp(-clip[:, None], clip[:, None])
        integers = (clipped / steps[:, None]).round().clamp(-self._largest, self._largest)
        return {"integers": integers.to(torch.int8).reshape(weight.shape).numpy(), "steps": stored}

    def dequantize(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> Tensor:
        """integers · steps."""
        rows = _as_rows(torch.from_numpy(arrays["integers"].astype(np.float32)).reshape(shape))
        return (rows * torch.from_numpy(arrays["steps"].astype(np.float32))[:, None]).reshape(shape)

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """Integers of the weight's shape and one step per row."""
        rows = math.prod(shape[:-1]) if len(shape) > 1 else 1
        return {"integers": (np.dtype(np.int8), shape), "steps": (np.dtype("<f2"), (rows,))}

    @property
    def _largest(self) -> int:
        return int(2 ** (self.bits - 1) - 1)

    def _steps(self, clip: Tensor) -> Tensor:
        steps = clip / self._largest
        if self.floor == "absolute":
            return steps.clamp(1.0 / self._largest, 65_504)
        largest = float(steps.max()) if len(steps) else 0.0
        # 2^-20 is a safe distance above the smallest half; 65,504 is the largest
        return steps.clamp(max(largest / 1024, 2.0**-20), 65_504)


def _as_rows(weight: Tensor) -> Tensor:
    return weight.reshape(-1, weight.shape[-1]) if weight.ndim > 1 else weight.reshape(1, -1)
