"""The interface of quantizers, and the calibration statistics of a weight."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from caddie.config import Config
from caddie.errors import UserError

Arrays = dict[str, np.ndarray]
"""Stored arrays of a quantized weight, by name."""
Layout = dict[str, tuple[np.dtype[np.generic], tuple[int, ...]]]
"""Dtype and shape of each stored array, known from the weight's shape alone."""
Rounding = Callable[[Tensor], Tensor]
"""Maps weights in units of their step to integers: `torch.round`, or a differentiable stand-in (STE)."""


@dataclass(frozen=True)
class Calibration:
    """Statistics of how a weight W (rows = outputs, columns = inputs) is used, on the CPU; None if not measured.

    An error E in W costs about 1/2 tr(R E C E^T) nats per token, with R diagonal: the Fisher information as a Kronecker
    product (K-FAC, arXiv 1503.05671).
    """

    inputs: Tensor | None = None
    """Mean of x x^T over the inputs x of the matrix, (columns, columns), float32: the Hessian of GPTQ."""
    rows: Tensor | None = None
    """The diagonal of R, (rows,). The full R would gain little: `docs/log.md`."""
    columns: Tensor | None = None
    """C, (columns, columns)."""


class Quantizer(Config):
    """Socket: a weight as arrays that can be coded."""

    @abstractmethod
    def quantize(self, weight: Tensor, calibration: Calibration = Calibration()) -> Arrays:
        """Return the arrays of a float32 weight of any shape; statistics that are None count as uniform."""

    @abstractmethod
    def dequantize(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> Tensor:
        """Return the weight, float32 of this shape, that the arrays stand for."""

    @abstractmethod
    def layout(self, shape: tuple[int, ...]) -> Layout:
        """Return dtype and shape of each array of a weight of this shape, in the order in which they are stored."""

    @property
    def dequantizer(self) -> Quantizer:
        """The dequantizer that an artifact names: this quantizer without settings that only `quantize` needs."""
        return self

    @property
    def calibrated(self) -> bool:
        """True if `quantize` uses a calibration."""
        return False

    def coarser(self, factor: float) -> Quantizer:
        """Return the same with steps `factor` times as large, or itself if its steps follow from the weights alone."""
        return self

    def fake(self, weight: Tensor, rounding: Rounding = torch.round) -> Tensor:
        """Return `dequantize(quantize(weight))` on the weight's device, fit for `torch.compile`: fake quantization.

        Gradients flow through `rounding`; clip and steps count as constants. `UserError` if the quantizer is too
        slow for a training step.
        """
        raise UserError(f"{type(self).__name__} cannot be taken into training; choose Rows")


class Wrapper:
    """Mixin for a quantizer around another, `of`: delegates all but `quantize` and `fake`."""

    of: Quantizer
    but: Callable[..., Any]

    @property
    def dequantizer(self) -> Quantizer:
        """The same around the dequantizer of `of`."""
        return cast("Quantizer", self.but(of=self.of.dequantizer))

    @property
    def calibrated(self) -> bool:
        """True if `of` is calibrated."""
        return self.of.calibrated

    def coarser(self, factor: float) -> Quantizer:
        """Return the same around a coarser `of`."""
        return cast("Quantizer", self.but(of=self.of.coarser(factor)))

    def dequantize(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> Tensor:
        """Return the weight that `of` reads from the arrays."""
        return self.of.dequantize(arrays, shape)

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """Return the layout of `of`."""
        return self.of.layout(shape)


def plain(weight: Tensor) -> Tensor:
    """Return the weight in float32 on the CPU; `UserError` if it is not finite."""
    values = weight.detach().float().cpu()
    if not bool(torch.isfinite(values).all()):
        raise UserError("a weight that is not finite cannot be quantized; lower the learning rates that made it")
    return values


def as_rows(weight: Tensor) -> Tensor:
    """Return the weight as a matrix with rows along its last dimension; a vector is one row."""
    return weight.reshape(-1, weight.shape[-1]) if weight.ndim > 1 else weight.reshape(1, -1)


def rows_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of `as_rows` of a weight of this shape."""
    return (math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (1, math.prod(shape))
