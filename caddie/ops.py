"""The few tensor functions that every model shares, as plain references."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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


def exclusive(y: Tensor, v: Tensor) -> Tensor:
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
