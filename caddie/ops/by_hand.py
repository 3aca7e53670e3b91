"""Functions with a backward written by hand in PyTorch's own operations, for a CPU that runs eagerly.

The loss is taken in compiled graphs, too.

Each does in a few passes over memory that is in the cache what autograd does in many over memory that is not.
`bench/kernels.py` times them beside their references.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from caddie.ops import plain
from caddie.ops.plain import Softcap

CHUNK = 1 << 18
"""Logits that are worked on at a time, a mebibyte in float32."""


def cross_entropy(
    logits: Tensor, targets: Tensor, cap: float | None = None, form: Softcap = "tanh", z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """As `plain.cross_entropy`, with the gradient made beside the loss while a chunk of logits is in the cache.

    No float32 copy of all logits is ever made; what waits for the backward is the gradient in their dtype, which can be
    taken once. Arithmetic within a chunk is in float32, tanh by way of the logistic function, six times faster. A
    polynomial cap, which one record has, is left to the reference.
    """
    if cap is not None and form != "tanh":
        return plain.cross_entropy(logits, targets, cap, form, z_loss)
    wanted = torch.is_grad_enabled() and logits.requires_grad
    descended, entropies = _CrossEntropy.apply(logits, targets, cap, z_loss, wanted)  # type: ignore[no-untyped-call]
    return descended, entropies


def _in_chunks(
    logits: Tensor, targets: Tensor, cap: float | None, z_loss: float, wanted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What is descended and the entropies, (N,), and the gradient (N, V) up to factors, empty unless wanted."""
    (count, vocabulary), step = logits.shape, max(1, CHUNK // logits.shape[1])
    denominators, entropies = (logits.new_empty(count, dtype=torch.float32) for _ in range(2))
    gradient = logits.new_empty(logits.shape if wanted else 0)
    room = logits.new_empty(2, min(step, count), vocabulary, dtype=torch.float32)
    for first in range(0, count, step):
        some = slice(first, first + step)
        target = targets[some, None]
        sigma, y = room[:, : len(target)]
        if cap is None:
            y.copy_(logits[some])
        else:  # cap · tanh(x / cap) = 2 cap · sigma(2x / cap) - cap, whose last term is added to the sum below
            torch.mul(sigma.copy_(logits[some]).mul_(2.0 / cap).sigmoid_(), 2.0 * cap, out=y)
        right, top = y.gather(1, target), y.amax(-1, keepdim=True)
        odds = torch.softmax(y, -1, out=y)
        denominator = torch.sub(top, odds.amax(-1, keepdim=True).log_(), out=denominators[some, None])
        torch.sub(denominator, right, out=entropies[some, None])
        denominator -= cap or 0.0
        if wanted:
            if z_loss:
                odds *= 1.0 + 2.0 * z_loss * denominator
            odds.scatter_add_(1, target, torch.full_like(right, -1.0))
            if cap is not None:  # sigma (1 - sigma) is a quarter of the slope of the cap
                torch.ops.aten.sigmoid_backward.grad_input(odds, sigma, grad_input=odds)
            gradient[some] = odds
    descended = entropies + z_loss * denominators.square() if z_loss else entropies.clone()
    return descended, entropies, gradient


_cross_entropy = torch.library.custom_op(
    "caddie::cross_entropy_by_hand",
    _in_chunks,
    mutates_args=(),
    schema="(Tensor logits, Tensor targets, float? cap, float z_loss, bool wanted) -> (Tensor, Tensor, Tensor)",
)
"""As one operation to the compiler: what that makes of the reference takes twice as long. Called otherwise, it would
import the compiler, a second and 150 MiB of every process."""


@_cross_entropy.register_fake
def _(logits: Tensor, targets: Tensor, cap: float | None, z_loss: float, wanted: bool) -> tuple[Tensor, Tensor, Tensor]:
    descended, entropies = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(2))
    return descended, entropies, logits.new_empty(logits.shape if wanted else 0)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, cap: float | None, z_loss: float, wanted: bool
    ) -> tuple[Tensor, Tensor]:
        compute = _cross_entropy if torch.compiler.is_compiling() else _in_chunks
        descended, entropies, gradient = compute(logits, targets, cap, z_loss, wanted)
        ctx.save_for_backward(gradient)
        ctx.factor = 1.0 if cap is None else 4.0
        ctx.mark_non_differentiable(entropies)
        return descended, entropies

    @staticmethod
    def backward(ctx: Any, slopes: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        if torch.compiler.is_compiling():
            gradient = (gradient * (ctx.factor * slopes)[:, None]).to(gradient.dtype)
        elif torch.is_grad_enabled():
            raise RuntimeError("the loss by hand has no second derivative; ask for the plain one")
        elif bool((slopes == slopes[0]).all()):  # a mean weighs all tokens alike, and a number is quicker than a column
            gradient.mul_(ctx.factor * float(slopes[0]))
        else:
            gradient.mul_((ctx.factor * slopes)[:, None])
        return gradient, None, None, None, None


def softcap(logits: Tensor, cap: float) -> Tensor:
    """As `plain.softcap`, in inference mode by way of the logistic function, six times faster.

    In float32 alone, where the difference is some millionths of a logit. What may be differentiated stays as it is.
    """
    if logits.dtype != torch.float32 or not torch.is_inference_mode_enabled():
        return plain.softcap(logits, cap)
    return logits.mul(2.0 / cap).sigmoid_().mul_(2.0 * cap).sub_(cap)


def squared(u: Tensor, slope: float = 0.0) -> Tensor:
    """As `plain.squared`, to the bit, in fewer passes backward."""
    y: Tensor = _Squared.apply(u, slope)  # type: ignore[no-untyped-call]
    return y


class _Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, slope: float) -> Tensor:
        activated = F.leaky_relu(u, slope) if slope else F.relu(u)
        ctx.save_for_backward(activated)
        ctx.slope = slope
        return activated * activated

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, None]:
        (activated,) = ctx.saved_tensors
        # Below zero what was activated is slope · u, so another factor of the slope makes it half the derivative.
        half = F.leaky_relu(activated, ctx.slope) if ctx.slope else activated
        return (slopes * half).mul_(2.0), None
