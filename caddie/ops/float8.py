"""Linear layers whose three products are made of numbers of eight bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from caddie.ops.dispatch import scaled_product

FORWARD, SLOPES = torch.float8_e4m3fn, torch.float8_e5m2
"""What values and weights are rounded to, and what slopes are, which need more range and less precision."""


def float8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """As `linear` but for rounding: x (..., inputs) times the transposed `weight` (outputs, inputs), in the dtype of x.

    Each tensor that is multiplied, forward and backward, is rounded to eight bits over one scale, by its largest number
    now (arXiv 2209.05433). Products and sums are exact as far as the chosen `scaled_product` is. What is infinite or
    not a number makes all of a product not a number.
    """
    rows = x.reshape(-1, x.shape[-1])
    y: Tensor = _Float8Linear.apply(rows, weight.to(x.dtype))  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], len(weight))


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        dtype = x.dtype
        x, of_x = rounded(x, FORWARD)
        weight, of_weight = rounded(weight, FORWARD)
        ctx.save_for_backward(x, of_x, weight, of_weight)
        return scaled_product(x, weight.mT, of_x, of_weight, dtype, hasty=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, Tensor]:
        x, of_x, weight, of_weight = ctx.saved_tensors
        dtype = slopes.dtype
        slopes, of_slopes = rounded(slopes, SLOPES)
        of_left = scaled_product(slopes, _by_columns(weight), of_slopes, of_weight, dtype)
        return of_left, scaled_product(slopes.mT.contiguous(), _by_columns(x), of_slopes, of_x, dtype)


def rounded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x over a scale that makes its largest number the largest of the format `dtype`, and that scale, float32."""
    scale = x.abs().amax().float().clamp(min=1e-30) / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype), scale


def _by_columns(x: Tensor) -> Tensor:
    """The same matrix with its columns one after the other in memory, the only way that the right one may lie."""
    return x.mT.contiguous().mT
