"""The few tensor functions that every model shares, as plain references."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor) -> Tensor:
    """x / sqrt(mean(x²) + eps) over the last axis, no learned gain, eps the machine epsilon of the dtype."""
    return F.rms_norm(x, (x.shape[-1],))


def rotary_tables(positions: Tensor, dims: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position times base^(-2i/dims), each (T, dims/2) (RoFormer, arXiv 2104.09864)."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    frequencies = base ** (-torch.arange(0, dims, 2, dtype=exact, device=positions.device) / dims)
    angles = positions.to(exact)[:, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn the halves of the last axis of x (..., T, D) against each other: (u cos + w sin, -u sin + w cos)."""
    u, w = x.chunk(2, dim=-1)
    return torch.cat((u * cosine + w * sine, w * cosine - u * sine), dim=-1)


SHORT_ROW = 512
"""On a CPU, bfloat16 rows up to this length are attended by plain products: 1.9 to 4.6 times faster, forward and
backward, than the fused kernel (`bench/attention.py`, 2026-11-21); in float32 the fused kernel is the faster."""


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """True where a query may look, (queries, keys); the queries are the last of the keys."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of q (B, H, T, D) over k, v (B, K, S, D); query head h reads key/value head h // (H/K).

    `mask` (B, 1, T, S) is true where a query may look. Without it each query, the T being the last of the S positions,
    sees itself and all before.
    """
    grouped = q.shape[1] != k.shape[1]
    queries, keys = q.shape[-2], k.shape[-2]
    if mask is None and 1 < queries < keys:
        mask = causal_mask(queries, keys, q.device)
    if mask is not None or queries < keys:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and queries <= SHORT_ROW:
        return _plain_attention(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def _plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by two batched products, the query heads of a group stacked along the row."""
    heads, length, size = q.shape[1:]
    group = heads // k.shape[1]
    future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    bias = torch.zeros(length, length, dtype=q.dtype, device=q.device).masked_fill(future, -torch.inf).repeat(group, 1)
    queries = (q * size**-0.5).reshape(-1, group * length, size)
    keys, values = k.reshape(-1, length, size), v.reshape(-1, length, size)
    weights = torch.baddbmm(bias, queries, keys.mT).softmax(-1)
    return (weights @ values).reshape(q.shape)


def softcap(logits: Tensor, cap: float) -> Tensor:
    """cap · tanh(logits / cap), near the identity for small logits (Gemma 2, arXiv 2408.00118)."""
    return cap * torch.tanh(logits / cap)
