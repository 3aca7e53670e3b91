"""The few tensor functions that every model shares, as plain references."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from caddie.ops.products import linear, multiplied


def rms_norm(x: Tensor, epsilon: float | None = None) -> Tensor:
    """x / sqrt(mean(x²) + epsilon) over the last axis, no learned gain; without epsilon that of the dtype."""
    return F.rms_norm(x, (x.shape[-1],), eps=epsilon)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn the halves u, w of the leading channels of x (..., T, D): (u cos + w sin, -u sin + w cos).

    The tables are (T, channels/2); channels behind the leading ones stay (RoFormer, arXiv 2104.09864).
    """
    half = cosine.shape[-1]
    u, w, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((u * cosine + w * sine, w * cosine - u * sine, rest), dim=-1)


def normed_rotation(x: Tensor, cosine: Tensor, sine: Tensor, gain: Tensor | None = None) -> Tensor:
    """Queries or keys x (B, heads, T, D), their norm taken, turned, and times the `gain` (heads,) of each head."""
    y = rotate(rms_norm(x), cosine, sine)
    return y if gain is None else y * gain.to(x.dtype)[:, None, None]


def xsa(y: Tensor, v: Tensor) -> Tensor:
    """y (B, H, T, D) without its part along v (B, K, T, D), the position's own value; head h has v of h // (H/K).

    Exclusive self-attention ("XSA"; the seeds also call it cross self-attention), openai/parameter-golf #265.
    """
    unit = F.normalize(v, dim=-1, eps=1e-12)[:, :, None]
    grouped = y.view(len(y), v.shape[1], -1, *y.shape[2:])
    return (grouped - (grouped * unit).sum(-1, keepdim=True) * unit).view_as(y)


def softcap(logits: Tensor, cap: float) -> Tensor:
    """cap · tanh(logits / cap), near the identity for small logits (Gemma 2, arXiv 2408.00118)."""
    return cap * torch.tanh(logits / cap)


def polynomial_softcap(logits: Tensor, cap: float) -> Tensor:
    """The same along a polynomial of degree five, cut at ±cap; openai/parameter-golf, the ternary record."""
    u = (logits / cap).clamp(-2.0, 2.0)
    square = u * u
    return cap * (u * (1.0 - square / 3.0 + square * square / 15.0)).clamp(-1.0, 1.0)


Softcap = Literal["tanh", "polynomial"]
"""Names in `SOFTCAPS`."""
SOFTCAPS: Mapping[Softcap, Callable[[Tensor, float], Tensor]] = {"tanh": softcap, "polynomial": polynomial_softcap}


def cross_entropy(
    logits: Tensor, targets: Tensor, cap: float | None = None, form: Softcap = "tanh", z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """What is descended and the cross-entropy in it, both (N,) in float32; only the first has a gradient.

    `logits` (N, V) are those before the cap, `targets` (N,) ids. What is descended is the cross-entropy plus `z_loss`
    times the squared log of the softmax's denominator (PaLM, arXiv 2204.02311).
    """
    capped = (logits if cap is None else SOFTCAPS[form](logits, cap)).float()
    entropies = F.cross_entropy(capped, targets, reduction="none")
    descended = entropies + z_loss * capped.logsumexp(-1).square() if z_loss else entropies
    return descended, entropies.detach()


def squared(u: Tensor, slope: float = 0.0) -> Tensor:
    """relu(u)², or with a slope leaky_relu(u)²: u² above zero and (slope·u)² below (Primer, arXiv 2109.08668)."""
    return (F.leaky_relu(u, slope) if slope else F.relu(u)).square()


def squared_mlp(x: Tensor, up: Tensor, down: Tensor, slope: float = 0.0) -> Tensor:
    """x (..., width) through `up` (hidden, width), the squared activation and `down` (width, hidden)."""
    return linear(squared(linear(x, up), slope), down)


def gram(x: Tensor) -> Tensor:
    """X Xᵀ of matrices (..., rows, columns), which is symmetric; for updates, which nothing differentiates."""
    return x @ x.mT


def gram_polynomial(symmetric: Tensor, b: float, c: float) -> Tensor:
    """bA + cA² of symmetric matrices A (..., rows, rows), the middle of a Newton-Schulz iteration."""
    stack = symmetric.reshape(-1, *symmetric.shape[-2:])
    return torch.baddbmm(stack, stack, stack, beta=b, alpha=c).view(symmetric.shape)


def scaled_product(
    left: Tensor, right: Tensor, of_left: Tensor, of_right: Tensor, dtype: torch.dtype, *, hasty: bool = False
) -> Tensor:
    """left (n, k) times right (k, m), both of eight bits, times their scales (0-dimensional, float32), in `dtype`.

    `hasty` lets an implementation add up in fewer bits; this one adds up in float32 all the same.
    """
    product = multiplied(left.to(dtype)) @ multiplied(right.to(dtype))
    return (product.float() * (of_left * of_right)).to(dtype)  # a GPU would round the scales to the product's dtype
