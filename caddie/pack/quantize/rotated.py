"""Hadamard rotation of weights before they are quantized."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from caddie.errors import UserError
from caddie.pack.quantize.low_rank import LARGEST, LowRank
from caddie.pack.quantize.quantizer import Arrays, Calibration, Quantizer, Rounding, Wrapper, plain
from caddie.pack.quantize.rows import Rows


class Rotated(Wrapper, Quantizer):
    """Columns rotated by a block-diagonal Hadamard matrix, quantized, and rotated back when they are read.

    The block size is the largest power of two that divides the number of columns. This is the part of QuIP
    (arXiv 2307.13304) and SpinQuant (arXiv 2405.16406) that touches no activation.
    """

    of: Quantizer = Rows()
    """Quantizer of the rotated weight, not Rotated or LowRank (which may itself wrap Rotated)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.of, Rotated | LowRank):
            raise UserError(f"Rotated cannot be of {type(self.of).__name__}; choose Rows or Gptq")

    def quantize(self, weight: Tensor, calibration: Calibration = Calibration()) -> Arrays:
        inputs, columns = (
            None if moments is None else rotated(rotated(moments).mT).mT
            for moments in (calibration.inputs, calibration.columns)
        )
        weight = rotated(plain(weight).clamp(-LARGEST, LARGEST))
        return self.of.quantize(weight, Calibration(inputs, calibration.rows, columns))

    def dequantize(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> Tensor:
        return rotated(self.of.dequantize(arrays, shape))

    def fake(self, weight: Tensor, rounding: Rounding = torch.round) -> Tensor:
        return rotated(self.of.fake(rotated(weight.float().clamp(-LARGEST, LARGEST)), rounding))


def rotated(values: Tensor) -> Tensor:
    """Return values (..., columns) times the rotation, which is symmetric and its own inverse.

    Each block gets a fast Walsh-Hadamard transform; its size is the largest power of two that divides the columns.
    """
    columns = values.shape[-1] if values.ndim else 1
    block = columns & -columns
    if block <= 1 or not values.numel():
        return values.clone()
    blocks = values.reshape(-1, block)
    for octave in range(block.bit_length() - 1):
        first, second = blocks.reshape(-1, block >> octave + 1, 2, 1 << octave).unbind(2)
        blocks = torch.stack([first + second, first - second], dim=2).reshape(-1, block)
    return (blocks * float(block**-0.5)).reshape(values.shape)
