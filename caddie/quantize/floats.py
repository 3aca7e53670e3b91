"""Weights as floating-point numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from caddie.quantize.quantizer import Arrays, Calibration, Layout, Quantizer


@dataclass(frozen=True, kw_only=True)
class Float16(Quantizer):
    """Half precision, for what is small or sensitive."""

    def quantize(self, weight: Tensor, calibration: Calibration = Calibration()) -> Arrays:
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

    def quantize(self, weight: Tensor, calibration: Calibration = Calibration()) -> Arrays:
        """One array, `values`."""
        return {"values": weight.detach().float().cpu().numpy().astype("<f4")}

    def dequantize(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> Tensor:
        """The values."""
        return torch.from_numpy(arrays["values"].astype(np.float32)).reshape(shape)

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """One array of the weight's shape."""
        return {"values": (np.dtype("<f4"), shape)}
