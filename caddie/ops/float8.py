"""Linear layers with float8 matrix products: one forward, two backward."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from caddie.ops.dispatch import scaled_product

FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
"""Formats of activations and weights, and of gradients, which need more range and less precision."""


def float8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x (..., inputs) by the transposed `weight` (outputs, inputs) in float8; the result has the dtype of x.

    Each factor, forward and backward, is rounded to eight bits with one scale, from its present largest magnitude
    (arXiv 2209.05433). Products and sums are exact as far as the chosen `scaled_product` is. An infinity or NaN makes
    the whole product NaN.
    """
    rows = x.reshape(-1, x.shape[-1])
    y: Tensor = _Float8Linear.apply(rows, weight.to(x.dtype))  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], len(weight))


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        dtype = x.dtype
        x, x_scale = rounded(x, FORWARD)
        weight, weight_scale = rounded(weight, FORWARD)
        ctx.save_for_backward(x, x_scale, weight, weight_scale)
        return scaled_product(x, weight.mT, x_scale, weight_scale, dtype, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        dtype = grad.dtype
        grad, grad_scale = rounded(grad, GRADIENT)
        grad_x = scaled_product(grad, _by_columns(weight), grad_scale, weight_scale, dtype)
        return grad_x, scaled_product(grad.mT.contiguous(), _by_columns(x), grad_scale, x_scale, dtype)


def rounded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x / scale in `dtype` and the float32 scale, which maps the largest |x| to the largest of `dtype`."""
    scale = x.abs().amax().float().clamp(min=1e-30) / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype), scale


def _by_columns(x: Tensor) -> Tensor:
    """Return the matrix laid out by columns, as `scaled_mm` needs its right factor."""
    return x.mT.contiguous().mT
