"""What a quantizer is, and what it may know of a weight's use."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from caddie.config import Config
from caddie.errors import UserError

Arrays = dict[str, np.ndarray]
"""What a quantized weight is stored as, by name."""
Layout = dict[str, tuple[np.dtype[np.generic], tuple[int, ...]]]
"""Dtype and shape of each stored array, known from the weight's shape alone."""
Rounding = Callable[[Tensor], Tensor]
"""Weights counted in steps to what is taken for their integers."""


@dataclass(frozen=True)
class Calibration:
    """What is known of the use of a weight W (rows = outputs, columns = inputs), on the CPU; None where nothing is.

    An error E in W costs about 1/2 tr(R E C E^T) nats per token, with R diagonal: the Fisher information as a Kronecker
    product (K-FAC, arXiv 1503.05671).
    """

    inputs: Tensor | None = None
    """Mean of x x^T over the inputs x of the matrix, (columns, columns), float32: the Hessian of GPTQ."""
    rows: Tensor | None = None
    """The diagonal of R, (rows,). All of R would gain little: `docs/log.md`."""
    columns: Tensor | None = None
    """C, (columns, columns)."""


@dataclass(frozen=True, kw_only=True)
class Quantizer(Config):
    """Socket: a weight as arrays that can be coded."""

    @abstractmethod
    def quantize(self, weight: Tensor, calibration: Calibration = Calibration()) -> Arrays:
        """The arrays of a float32 weight of any shape; what the calibration does not know counts as uniform."""

    @abstractmethod
    def dequantize(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> Tensor:
        """The float32 weight that the arrays stand for."""

    @abstractmethod
    def layout(self, shape: tuple[int, ...]) -> Layout:
        """Which arrays a weight of this shape has."""

    @property
    def reader(self) -> Quantizer:
        """The quantizer that dequantizes what this one quantized, without what only the choice of integers needs.

        An artifact names this one.
        """
        return self

    @property
    def calibrated(self) -> bool:
        """Whether `quantize` makes use of a calibration."""
        return False

    def coarser(self, factor: float) -> Quantizer:
        """The same with steps `factor` times as large, or itself if its steps are not for choice."""
        return self

    def fake(self, weight: Tensor, rounding: Rounding = torch.round) -> Tensor:
        """What `dequantize` would make of the arrays of `quantize`, on the weight's device and ready to be compiled.

        With a differentiable `rounding` so is the result; clip and steps count as constants. A quantizer that cannot
        say its answer in a training step raises a `UserError`.
        """
        raise UserError(f"{type(self).__name__} cannot be taken into training; choose Rows")


def plain(weight: Tensor) -> Tensor:
    """The weight in float32 on the CPU; one that is not finite is a `UserError`."""
    values = weight.detach().float().cpu()
    if not bool(torch.isfinite(values).all()):
        raise UserError("a weight that is not finite cannot be quantized; lower the learning rates that made it")
    return values


def as_rows(weight: Tensor) -> Tensor:
    """The weight as a matrix: rows along its last dimension, one for a vector."""
    return weight.reshape(-1, weight.shape[-1]) if weight.ndim > 1 else weight.reshape(1, -1)


def rows_and_columns(shape: tuple[int, ...]) -> tuple[int, int]:
    """The shape of `as_rows`."""
    return (math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (1, math.prod(shape))
