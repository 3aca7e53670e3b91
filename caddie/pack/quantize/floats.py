"""Weights as floating-point numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from caddie.config import Technique
from caddie.pack.quantize.quantizer import Arrays, Calibration, Layout, Quantizer, Rounding, plain


@dataclass(frozen=True, kw_only=True)
class Float16(Quantizer):
    """Half precision, for what is small or sensitive."""

    techniques: ClassVar = {
        "": Technique(
            "A tied embedding is the head as well, and is hurt most by int8; gates and scales are too small to matter.",
            "openai/parameter-golf, 2026-03-18_FP16Embed_WD3600 (seed 003)",
            "lost by rounding 0.007 to 0.0005 for 0.5 MB (seed 003)",
        ),
    }

    def quantize(self, weight: Tensor, calibration: Calibration = Calibration()) -> Arrays:
        """One array, `values`."""
        return {"values": plain(weight).clamp(-65_504, 65_504).numpy().astype("<f2")}

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
        return {"values": plain(weight).numpy().astype("<f4")}

    def dequantize(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> Tensor:
        """The values."""
        return torch.from_numpy(arrays["values"].astype(np.float32)).reshape(shape)

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """One array of the weight's shape."""
        return {"values": (np.dtype("<f4"), shape)}


@dataclass(frozen=True, kw_only=True)
class Float8(Quantizer):
    """A byte with 4 bits of exponent and 3 of mantissa, up to 448 (E4M3, arXiv 2209.05433).

    openai/parameter-golf, 2026-03-24_74M_Ternary_UNet_FP8_10L_8192BPE_YaRN_NeoMuon, for what is not ternary.
    """

    techniques: ClassVar = {
        "": Technique(
            "Half the bytes of half precision, and no steps to store.",
            "arXiv 2209.05433; openai/parameter-golf, 2026-03-24_74M_Ternary_UNet_FP8",
            "0.002 for small matrices",
        )
    }

    def quantize(self, weight: Tensor, calibration: Calibration = Calibration()) -> Arrays:
        """One array, `values`: the bytes."""
        return {"values": plain(weight).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()}

    def dequantize(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> Tensor:
        """The values in float32."""
        values = torch.from_numpy(arrays["values"].copy()).view(torch.float8_e4m3fn)
        return values.float().reshape(shape)

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """One byte for each weight."""
        return {"values": (np.dtype(np.uint8), shape)}

    def fake(self, weight: Tensor, rounding: Rounding = torch.round) -> Tensor:
        """The values, as counts of the distance between neighbours."""
        weight = weight.float()
        values = weight.detach().clamp(-448, 448)
        power = (values.abs().view(torch.int32) & 0x7F80_0000).view(torch.float32)  # of two, at or below
        spacing = (power * 2.0**-3).clamp_min(2.0**-9)
        return rounding(values / spacing + (weight - weight.detach()) / spacing) * spacing
