"""Weights made of chance, and how often chance is tried, for the tests of whatever changes weights."""

import torch
from hypothesis import settings
from torch import Tensor

from caddie.pack.quantize import Calibration, Quantizer

quick = settings(derandomize=True, deadline=None, max_examples=20)
"""Few examples, the same in every run."""


def sample(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def restored(quantizer: Quantizer, weight: Tensor, calibration: Calibration = Calibration()) -> Tensor:
    """What comes back of a weight."""
    return quantizer.dequantize(quantizer.quantize(weight, calibration), tuple(weight.shape))
