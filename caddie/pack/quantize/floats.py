"""Weights as floating-point numbers."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from caddie.pack.quantize.quantizer import Arrays, Calibration, Layout, Quantizer, Rounding, plain


class _Floats:
    """Mixin: one array, `values`, with every weight rounded to the nearest number of a format."""

    _format: ClassVar[torch.dtype]
    _stored: ClassVar[np.dtype[Any]]  # dtype of the array, which has the format's bits

    def quantize(self, weight: Tensor, calibration: Calibration = Calibration()) -> Arrays:
        """Return `values`, of the weight's shape; numbers beyond the format's largest are clipped to it."""
        largest = torch.finfo(self._format).max
        values = plain(weight).clamp(-largest, largest).to(self._format)
        if self._stored.kind == "u":  # a format that NumPy does not know
            values = values.view(torch.uint8)
        return {"values": values.numpy().astype(self._stored)}

    def dequantize(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> Tensor:
        values = torch.from_numpy(arrays["values"].astype(self._stored.newbyteorder("=")))
        return values.view(self._format).float().reshape(shape)

    def layout(self, shape: tuple[int, ...]) -> Layout:
        return {"values": (self._stored, shape)}


class Float16(_Floats, Quantizer):
    """Half precision, for small or sensitive parameters."""

    _format, _stored = torch.float16, np.dtype("<f2")


class Float32(_Floats, Quantizer):
    """Full precision: exact."""

    _format, _stored = torch.float32, np.dtype("<f4")


class Float8(_Floats, Quantizer):
    """A byte with 4 bits of exponent and 3 of mantissa, up to 448 (E4M3, arXiv 2209.05433)."""

    _format, _stored = torch.float8_e4m3fn, np.dtype(np.uint8)

    def fake(self, weight: Tensor, rounding: Rounding = torch.round) -> Tensor:
        """Return the rounded weights; `rounding` gets them in units of the spacing of the format's numbers."""
        weight = weight.float()
        values = weight.detach().clamp(-448, 448)
        power = (values.abs().view(torch.int32) & 0x7F80_0000).view(torch.float32)  # the power of two at or below
        spacing = (power * 2.0**-3).clamp_min(2.0**-9)
        return rounding(values / spacing + (weight - weight.detach()) / spacing) * spacing
