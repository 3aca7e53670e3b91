"""Functions with a hand-written backward in PyTorch's own operations, for a CPU that runs eagerly.

Each makes a few passes over memory in the cache, where autograd makes many over memory outside of it. Arithmetic is in
float32, for bfloat16 tensors too. Compiled graphs use only the loss, GPUs only `squared`. `bench/kernels.py` times all
of them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd.function import once_differentiable

from caddie.ops import plain
from caddie.ops.plain import Softcap

CHUNK = 1 << 18
"""Logits processed at a time, a mebibyte in float32."""
_EPSILON = torch.finfo(torch.float32).eps
"""Epsilon that PyTorch's own norm adds to the mean square of float32 and of bfloat16."""


# The loss


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    cap: float | None = None,
    form: Softcap = "tanh",
    z_loss: float = 0.0,
    others: Tensor | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `plain.cross_entropy` and its gradient together, while a chunk of logits is in the cache.

    No float32 copy of all logits is made. The gradient is kept in their dtype; the backward scales it in place, once.
    The logistic function gives tanh, six times faster. The polynomial cap of one record goes to the reference.
    """
    if cap is not None and form != "tanh":
        return plain.cross_entropy(logits, targets, cap, form, z_loss, others, weights)
    with_gradient = torch.is_grad_enabled() and logits.requires_grad
    objective, entropies = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, targets, cap, z_loss, others, weights, with_gradient
    )
    return objective, entropies


def _in_chunks(
    logits: Tensor,
    targets: Tensor,
    cap: float | None,
    z_loss: float,
    others: Tensor | None,
    weights: Tensor | None,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return objective and entropies, (N,), and the gradient (N, V) up to factors, empty without `with_gradient`."""
    (count, vocabulary), step = logits.shape, max(1, CHUNK // logits.shape[1])
    log_denominators, entropies, of_others = (logits.new_zeros(count, dtype=torch.float32) for _ in range(3))
    gradient = logits.new_empty(logits.shape if with_gradient else 0)
    buffers = logits.new_empty(2, min(step, count), vocabulary, dtype=torch.float32)
    for first in range(0, count, step):
        chunk = slice(first, first + step)
        target = targets[chunk, None]
        sigma, y = buffers[:, : len(target)]
        if cap is None:
            y.copy_(logits[chunk])
        else:  # cap · tanh(x / cap) = 2 cap · sigma(2x / cap) - cap, whose last term enters `log_denominator` below
            torch.mul(sigma.copy_(logits[chunk]).mul_(2.0 / cap).sigmoid_(), 2.0 * cap, out=y)
        target_logit, top = y.gather(1, target), y.amax(-1, keepdim=True)
        if others is not None and weights is not None:
            other, weight = others[chunk, None], weights[chunk, None]
            other_logit = y.gather(1, other)
        probabilities = torch.softmax(y, -1, out=y)
        log_denominator = torch.sub(top, probabilities.amax(-1, keepdim=True).log_(), out=log_denominators[chunk, None])
        torch.sub(log_denominator, target_logit, out=entropies[chunk, None])
        if others is not None:
            torch.mul(log_denominator - other_logit, weight, out=of_others[chunk, None])
        log_denominator -= cap or 0.0
        if with_gradient:
            if z_loss or others is not None:
                factor = 1.0 + 2.0 * z_loss * log_denominator
                probabilities *= factor if others is None else factor + weight
            probabilities.scatter_add_(1, target, torch.full_like(target_logit, -1.0))
            if others is not None:
                probabilities.scatter_add_(1, other, -weight)
            if cap is not None:  # sigma (1 - sigma) is a quarter of the slope of the cap
                torch.ops.aten.sigmoid_backward.grad_input(probabilities, sigma, grad_input=probabilities)
            gradient[chunk] = probabilities
    objective = entropies + of_others
    return objective + z_loss * log_denominators.square() if z_loss else objective, entropies, gradient


_cross_entropy = torch.library.custom_op(
    "caddie::cross_entropy_manual",
    _in_chunks,
    mutates_args=(),
    schema="(Tensor logits, Tensor targets, float? cap, float z_loss, Tensor? others, Tensor? weights, "
    "bool with_gradient) -> (Tensor, Tensor, Tensor)",
)
"""One operation for the compiler, whose own code for the reference takes twice as long. Eager code calls `_in_chunks`:
calling this operation would import the compiler, a second and 150 MiB in every process."""


@_cross_entropy.register_fake
def _(logits: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, with_gradient = settings
    objective, entropies = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(2))
    return objective, entropies, logits.new_empty(logits.shape if with_gradient else 0)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, cap: float | None, *settings: Any) -> tuple[Tensor, Tensor]:
        whole = torch.compiler.is_compiling() or isinstance(logits, FakeTensor)  # else thousands of chunks are traced
        compute = _cross_entropy if whole else _in_chunks
        objective, entropies, gradient = compute(logits, targets, cap, *settings)
        ctx.save_for_backward(gradient)
        ctx.factor = 1.0 if cap is None else 4.0
        ctx.mark_non_differentiable(entropies)
        return objective, entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        if torch.compiler.is_compiling():
            gradient = (gradient * (ctx.factor * grad)[:, None]).to(gradient.dtype)
        elif torch.is_grad_enabled():
            raise RuntimeError("the manual loss has no second derivative; use the plain one")
        elif bool((grad == grad[0]).all()):  # a mean weighs all tokens equally, and a number is quicker than a column
            gradient.mul_(ctx.factor * float(grad[0]))
        else:
            gradient.mul_((ctx.factor * grad)[:, None])
        return gradient, None, None, None, None, None, None


# Activations


def softcap(logits: Tensor, cap: float) -> Tensor:
    """Compute `plain.softcap`; float32 in inference mode uses the logistic function, six times faster.

    Results differ by some millionths of a logit. Inference mode needs no gradient.
    """
    if logits.dtype != torch.float32 or not torch.is_inference_mode_enabled():
        return plain.softcap(logits, cap)
    return logits.mul(2.0 / cap).sigmoid_().mul_(2.0 * cap).sub_(cap)


def squared(u: Tensor, slope: float = 0.0) -> Tensor:
    """Compute `plain.squared`, bit for bit, in fewer passes backward."""
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (activated,) = ctx.saved_tensors
        # Below zero `activated` is slope · u, so another factor of the slope makes it half the derivative.
        half = F.leaky_relu(activated, ctx.slope) if ctx.slope else activated
        return (grad * half).mul_(2.0), None


# Norms


def rms_norm(x: Tensor, epsilon: float | None = None) -> Tensor:
    """Compute `plain.rms_norm`."""
    y: Tensor = _RMSNorm.apply(x, _EPSILON if epsilon is None else epsilon)  # type: ignore[no-untyped-call]
    return y


def normed_rotation(x: Tensor, cosine: Tensor, sine: Tensor, gain: Tensor | None = None) -> Tensor:
    """Compute `plain.normed_rotation`."""
    y: Tensor = _NormedRotation.apply(x, cosine, sine, gain)  # type: ignore[no-untyped-call]
    return y


def _inverse_rms(x: Tensor, epsilon: float) -> Tensor:
    """Return 1 / sqrt(mean(x²) + epsilon) of the rows of x (..., D): (..., 1)."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()


def _norm_backward(grad: Tensor, normed: Tensor, dot: Tensor, factor: Tensor) -> Tensor:
    """Turn the gradient of the normed rows x · `factor` into the gradient of x, in place."""
    return grad.addcmul_(normed, dot, value=-1.0 / normed.shape[-1]).mul_(factor)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, epsilon: float) -> Tensor:
        exact = x.float()
        factor = _inverse_rms(exact, epsilon)
        y = (exact * factor).to(x.dtype)
        ctx.save_for_backward(y, factor)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        y, factor = ctx.saved_tensors
        exact, normed = grad.to(torch.float32, copy=True), y.float()
        dot = (exact * normed).sum(-1, keepdim=True)
        return _norm_backward(exact, normed, dot, factor).to(y.dtype), None


class _NormedRotation(torch.autograd.Function):
    """Keep the heads of a position side by side in memory, the layout of the projection that makes x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor, gain: Tensor | None) -> Tensor:
        exact = x.transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        factor = _inverse_rms(exact, _EPSILON)
        normed = exact * factor
        cosine, sine = cosine.float()[:, None], sine.float()[:, None]
        ctx.save_for_backward(normed, factor, cosine, sine, gain)
        if gain is not None:
            gain = gain.float()[:, None]
            cosine, sine = cosine * gain, sine * gain
        y = _rotated(normed, cosine, sine, gain)
        return torch.empty(x.shape, dtype=x.dtype).copy_(y.transpose(1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        normed, factor, cosine, sine, gain = ctx.saved_tensors
        back = _rotated(torch.empty(normed.shape).copy_(grad.transpose(1, 2)), cosine, -sine, None)
        dot = (back * normed).sum(-1, keepdim=True)
        grad_gain = None
        if gain is not None:
            grad_gain = dot.sum((0, 1, 3)).to(gain.dtype)
            factor = factor * gain.float()[:, None]
        grad_x = _norm_backward(back, normed, dot, factor).to(grad.dtype)
        return grad_x.transpose(1, 2), None, None, grad_gain


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor, gain: Tensor | None) -> Tensor:
    """Rotate the leading channels of x (B, T, heads, D) and multiply the rest by `gain`.

    The tables are (T, heads or 1, n) with the gain in them.
    """
    half = cosine.shape[-1]
    u, w, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    both_cosine, both_sine = torch.cat((cosine, cosine), -1), torch.cat((sine, -sine), -1)
    # Passes over both halves at once are quicker than passes over one.
    leading = torch.cat((w, u), -1).mul_(both_sine).addcmul_(x[..., : 2 * half], both_cosine)
    return leading if not rest.shape[-1] else torch.cat((leading, rest if gain is None else rest * gain), -1)
