"""Plain references of the tensor functions that every model shares."""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from caddie.ops.products import to_product_dtype


def rms_norm(x: Tensor, epsilon: float | None = None) -> Tensor:
    """Return x / sqrt(mean(x²) + epsilon) over the last axis, without a learned gain (RMSNorm, arXiv 1910.07467).

    The default epsilon is PyTorch's own: on a CPU float32's, for half precision too.
    """
    return F.rms_norm(x, (x.shape[-1],), eps=epsilon)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the halves u, w of the leading channels of x (..., T, D): (u cos + w sin, -u sin + w cos).

    The tables are (T, channels/2); the remaining channels stay (RoPE: RoFormer, arXiv 2104.09864).
    """
    half = cosine.shape[-1]
    halves, rest = torch.unflatten(x[..., : 2 * half], -1, (2, half)), x[..., 2 * half :]
    # Halves that are flipped, not taken apart: the backward of a concatenation compiles to slow code on a CPU.
    y = (halves * cosine[..., None, :] + halves.flip(-2) * torch.stack((sine, -sine), dim=-2)).flatten(-2)
    return torch.cat((y, rest), dim=-1) if rest.shape[-1] else y


def normed_rotation(x: Tensor, cosine: Tensor, sine: Tensor, gain: Tensor | None = None) -> Tensor:
    """Norm queries or keys x (B, heads, T, D), rotate them, and multiply each head by its `gain` (heads,)."""
    y = rotate(rms_norm(x), cosine, sine)
    return y if gain is None else y * gain.to(x.dtype)[:, None, None]


def xsa(y: Tensor, v: Tensor, share: Tensor | None = None) -> Tensor:
    """Remove from y (B, H, T, D) its projection on its own value, v (B, K, T, D); head h uses value head h // (H/K).

    With a `share` (H,) only that part of a head's projection is removed. Exclusive self-attention (XSA),
    openai/parameter-golf #265; public systems also call it cross self-attention.
    """
    unit = F.normalize(v, dim=-1, eps=1e-12)[:, :, None]
    grouped = y.view(len(y), v.shape[1], -1, *y.shape[2:])
    length = (grouped * unit).sum(-1, keepdim=True)
    if share is not None:
        length = length * share.to(y.dtype).view(v.shape[1], -1, 1, 1)
    return (grouped - length * unit).view_as(y)


def softcap(logits: Tensor, cap: float) -> Tensor:
    """Return cap · tanh(logits / cap), near the identity for small logits (Gemma 2, arXiv 2408.00118)."""
    return cap * torch.tanh(logits / cap)


def asymmetric_softcap(logits: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """Return the softcap with two caps, for logits above 0 and below, 0-dimensional (AsymLogit, #1923)."""
    caps = torch.where(logits > 0, positive.to(logits.dtype), negative.to(logits.dtype))
    return caps * torch.tanh(logits / caps)


def polynomial_softcap(logits: Tensor, cap: float) -> Tensor:
    """Cap logits at ±cap with a polynomial of degree five (openai/parameter-golf, the ternary record)."""
    u = (logits / cap).clamp(-2.0, 2.0)
    square = u * u
    return cap * (u * (1.0 - square / 3.0 + square * square / 15.0)).clamp(-1.0, 1.0)


Softcap = Literal["tanh", "polynomial"]
"""Names in `SOFTCAPS`."""
SOFTCAPS: Mapping[Softcap, Callable[[Tensor, float], Tensor]] = {"tanh": softcap, "polynomial": polynomial_softcap}


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    cap: float | None = None,
    form: Softcap = "tanh",
    z_loss: float = 0.0,
    others: Tensor | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the training objective and the cross-entropy in it, both (N,) in float32; only the first has a gradient.

    `logits` (N, V) are uncapped; `targets` (N,) are ids. The objective is the cross-entropy, plus `z_loss` times the
    squared log of the softmax's denominator (PaLM, arXiv 2204.02311), plus `weights` times the cross-entropy of
    `others`. `others` (N,) are ids, `weights` (N,) float32 without gradient; give both or neither.
    """
    capped = (logits if cap is None else SOFTCAPS[form](logits, cap)).float()
    entropies = F.cross_entropy(capped, targets, reduction="none")
    objective = entropies + z_loss * capped.logsumexp(-1).square() if z_loss else entropies
    if others is not None and weights is not None:
        objective = objective + weights * F.cross_entropy(capped, others, reduction="none")
    return objective, entropies.detach()


def squared(u: Tensor, slope: float = 0.0) -> Tensor:
    """Return relu(u)², or with a slope leaky_relu(u)², u² above zero else (slope·u)² (Primer, arXiv 2109.08668)."""
    return (F.leaky_relu(u, slope) if slope else F.relu(u)).square()


def scaled_product(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """Multiply float8 left (n, k) by right (k, m) and by their scales (0-dimensional, float32); returns `dtype`.

    `fast` allows an implementation to accumulate in fewer bits; this one accumulates in float32 all the same.
    """
    product = to_product_dtype(left.to(dtype)) @ to_product_dtype(right.to(dtype))
    # In float32: a GPU would round the scales to the product's dtype.
    return (product.float() * (left_scale * right_scale)).to(dtype)
