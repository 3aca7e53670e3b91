"""Norms of the stream and of queries and keys, with a backward written by hand, for a CPU that runs eagerly.

All arithmetic is in float32, also that of bfloat16 tensors, and a few passes do what autograd does in many.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_EPSILON = torch.finfo(torch.float32).eps
"""What PyTorch's own norm adds to the mean square of float32 and bfloat16 alike."""


def rms_norm(x: Tensor, epsilon: float | None = None) -> Tensor:
    """As `plain.rms_norm`."""
    y: Tensor = _Normed.apply(x, _EPSILON if epsilon is None else epsilon)  # type: ignore[no-untyped-call]
    return y


def normed_rotation(x: Tensor, cosine: Tensor, sine: Tensor, gain: Tensor | None = None) -> Tensor:
    """As `plain.normed_rotation`."""
    y: Tensor = _NormedRotation.apply(x, cosine, sine, gain)  # type: ignore[no-untyped-call]
    return y


def _factor(x: Tensor, epsilon: float) -> Tensor:
    """1 / sqrt(mean(x²) + epsilon) of the rows of x (..., D): (..., 1)."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()


def _along(slopes: Tensor, normed: Tensor) -> Tensor:
    """The sum of the product of both over each row, (..., 1)."""
    return (slopes * normed).sum(-1, keepdim=True)


def _backward(slopes: Tensor, normed: Tensor, along: Tensor, factor: Tensor) -> Tensor:
    """The gradient of rows that were multiplied by `factor` (..., 1) from that of the normed ones, in its place."""
    return slopes.addcmul_(normed, along, value=-1.0 / normed.shape[-1]).mul_(factor)


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, epsilon: float) -> Tensor:
        exact = x.float()
        factor = _factor(exact, epsilon)
        y = (exact * factor).to(x.dtype)
        ctx.save_for_backward(y, factor)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, None]:
        y, factor = ctx.saved_tensors
        exact, normed = slopes.to(torch.float32, copy=True), y.float()
        return _backward(exact, normed, _along(exact, normed), factor).to(y.dtype), None


class _NormedRotation(torch.autograd.Function):
    """Heads of one position lie beside each other here, as the projection that x comes from left them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor, gain: Tensor | None) -> Tensor:
        exact = x.transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        factor = _factor(exact, _EPSILON)
        normed = exact * factor
        cosine, sine = cosine.float()[:, None], sine.float()[:, None]
        ctx.save_for_backward(normed, factor, cosine, sine, gain)
        if gain is not None:
            gain = gain.float()[:, None]
            cosine, sine = cosine * gain, sine * gain
        y = _turned(normed, cosine, sine, gain)
        return torch.empty(x.shape, dtype=x.dtype).copy_(y.transpose(1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
        normed, factor, cosine, sine, gain = ctx.saved_tensors
        back = _turned(torch.empty(normed.shape).copy_(slopes.transpose(1, 2)), cosine, -sine, None)
        along = _along(back, normed)
        of_gain = None
        if gain is not None:
            of_gain = along.sum((0, 1, 3)).to(gain.dtype)
            factor = factor * gain.float()[:, None]
        gradient = _backward(back, normed, along, factor).to(slopes.dtype)
        return gradient.transpose(1, 2), None, None, of_gain


def _turned(x: Tensor, cosine: Tensor, sine: Tensor, rest: Tensor | None) -> Tensor:
    """x (B, T, heads, D), its leading channels turned, the others times `rest`; tables are (T, heads or 1, n)."""
    half = cosine.shape[-1]
    u, w, behind = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned, across = torch.cat((cosine, cosine), -1), torch.cat((sine, -sine), -1)
    # Passes over both halves at once are quicker than passes over one.
    leading = torch.cat((w, u), -1).mul_(across).addcmul_(x[..., : 2 * half], turned)
    return leading if not behind.shape[-1] else torch.cat((leading, behind if rest is None else behind * rest), -1)
