"""Weights made of chance, and how often chance is tried, for the tests of whatever changes weights."""

from typing import TypeVar

import torch
from hypothesis import settings
from torch import Tensor, nn

from caddie.pack.quantize import Calibration, Quantizer

Module = TypeVar("Module", bound=nn.Module)
quick = settings(derandomize=True, deadline=None, max_examples=20)
"""Few examples, the same in every run."""


def sample(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def noisy(module: Module, scale: float, seed: int = 1) -> Module:
    """The same module with noise on every parameter, so that none is at zero and whatever can reach an output does."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return module


def restored(quantizer: Quantizer, weight: Tensor, calibration: Calibration = Calibration()) -> Tensor:
    """What comes back of a weight."""
    return quantizer.dequantize(quantizer.quantize(weight, calibration), tuple(weight.shape))
