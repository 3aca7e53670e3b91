"""Loss in Triton: softcap, cross-entropy and their gradient, without a float32 copy of the logits.

The forward reads the logits once and keeps the log of the denominator; the backward reads them once more and writes
their gradient in their own dtype (cf. Liger Kernel, arXiv 2410.10989; openai/parameter-golf, 2026-04-27).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from caddie.ops.plain import Softcap

FORMS = {None: 0, "tanh": 1, "polynomial": 2}
BLOCK = 4096
"""Largest number of logits that a program holds at a time."""

# Cap and z-loss are constants of the kernels: a compiled graph would pass numbers in float64, and Triton lets no sum
# that begins in float32 go on in float64.


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _cap(x, cap, form: tl.constexpr):  # type: ignore[no-untyped-def]
    y = x
    if form == 1:
        y = cap * (1.0 - 2.0 / (tl.exp(2.0 * x / cap) + 1.0))
    if form == 2:
        u = tl.minimum(tl.maximum(x / cap, -2.0), 2.0)
        y = cap * tl.minimum(tl.maximum(u * (1.0 - u * u / 3.0 + u * u * u * u / 15.0), -1.0), 1.0)
    return y


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _slope(x, y, cap, form: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the derivative of `y`, the softcap of `x`."""
    slope = tl.full(x.shape, 1.0, tl.float32)
    if form == 1:
        slope = 1.0 - (y / cap) * (y / cap)
    if form == 2:
        u = x / cap
        p = u * (1.0 - u * u / 3.0 + u * u * u * u / 15.0)
        slope = tl.where((tl.abs(u) <= 2.0) & (tl.abs(p) <= 1.0), 1.0 - u * u + u * u * u * u / 3.0, 0.0)
    return slope


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _forward(  # type: ignore[no-untyped-def]
    logits, targets, others, weights, objective, entropies, denominators, columns,
    cap: tl.constexpr, z_loss: tl.constexpr, form: tl.constexpr, two: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    top = float("-inf")
    total = 0.0
    for first in range(0, columns, block):
        column = first + tl.arange(0, block)
        y = _cap(tl.load(logits + column, mask=column < columns, other=0.0).to(tl.float32), cap, form)
        y = tl.where(column < columns, y, float("-inf"))
        above = tl.maximum(top, tl.max(y, 0))
        total = total * tl.exp(top - above) + tl.sum(tl.exp(y - above), 0)
        top = above
    denominator = top + tl.log(total)
    target = tl.load(targets + row)
    known = (target >= 0) & (target < columns)
    right = _cap(tl.load(logits + target, mask=known, other=float("nan")).to(tl.float32), cap, form)
    tl.store(denominators + row, denominator)
    tl.store(entropies + row, denominator - right)
    total = denominator - right + z_loss * denominator * denominator
    if two:
        other = tl.load(others + row)
        known = (other >= 0) & (other < columns)
        right = _cap(tl.load(logits + other, mask=known, other=float("nan")).to(tl.float32), cap, form)
        total += tl.load(weights + row) * (denominator - right)
    tl.store(objective + row, total)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _backward(  # type: ignore[no-untyped-def]
    logits, targets, others, weights, denominators, grad, gradient, columns,
    cap: tl.constexpr, z_loss: tl.constexpr, form: tl.constexpr, two: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < columns
    x = tl.load(logits + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    y = _cap(x, cap, form)
    denominator = tl.load(denominators + row)
    factor = 1.0 + 2.0 * z_loss * denominator
    if two:
        weight = tl.load(weights + row)
        factor += weight
    change = tl.exp(y - denominator) * factor
    change = tl.where(column == tl.load(targets + row), change - 1.0, change)
    if two:
        change = tl.where(column == tl.load(others + row), change - weight, change)
    change = change * _slope(x, y, cap, form) * tl.load(grad + row)
    tl.store(gradient + row * columns + column, change.to(gradient.dtype.element_ty), mask=inside)


def _block(columns: int) -> int:
    """Return the columns that a program reads at once."""
    return min(BLOCK, 1 << max(4, (columns - 1).bit_length()))


@triton_op("caddie::cross_entropy", mutates_args={})
def _cross_entropy(
    logits: Tensor, targets: Tensor, others: Tensor | None, weights: Tensor | None, cap: float, form: int, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits.contiguous()
    rows, columns = logits.shape
    objective, entropies, denominators = (logits.new_empty(rows, dtype=torch.float32) for _ in range(3))
    # The kernel's name stands here, so that PyTorch's graph cache finds its source; Triton's interpreter runs on CPUs.
    kernel, block = wrap_triton(_forward) if logits.is_cuda else _forward, _block(columns)
    # The kernel needs a pointer here even where it does not read it.
    second = (targets, denominators, False) if others is None or weights is None else (others, weights, True)
    kernel[(rows,)](
        logits, targets, *second[:2], objective, entropies, denominators, columns,
        cap, z_loss, form, second[2], block, num_warps=8,
    )  # fmt: skip
    return objective, entropies, denominators


@triton_op("caddie::cross_entropy_backward", mutates_args={})
def _cross_entropy_backward(
    logits: Tensor,
    targets: Tensor,
    others: Tensor | None,
    weights: Tensor | None,
    denominators: Tensor,
    grad: Tensor,
    cap: float,
    form: int,
    z_loss: float,
) -> Tensor:
    logits = logits.contiguous()
    rows, columns = logits.shape
    gradient = torch.empty_like(logits)
    kernel, block = wrap_triton(_backward) if logits.is_cuda else _backward, _block(columns)
    second = (targets, denominators, False) if others is None or weights is None else (others, weights, True)
    kernel[(rows, triton.cdiv(columns, block))](
        logits, targets, *second[:2], denominators, grad.contiguous(), gradient, columns,
        cap, z_loss, form, second[2], block, num_warps=8,
    )  # fmt: skip
    return gradient


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, others: Tensor | None, weights: Tensor | None, *settings: Any
    ) -> tuple[Tensor, Tensor]:
        objective, entropies, denominators = _cross_entropy(logits, targets, others, weights, *settings)
        ctx.save_for_backward(logits, targets, others, weights, denominators)
        ctx.settings = settings
        ctx.mark_non_differentiable(entropies)
        return objective, entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return _cross_entropy_backward(*ctx.saved_tensors, grad, *ctx.settings), *[None] * 6


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    cap: float | None = None,
    form: Softcap = "tanh",
    z_loss: float = 0.0,
    others: Tensor | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `plain.cross_entropy`, with arithmetic in float32 between the logits and their gradient.

    A target that is not an id gives NaN; the reference raises an error.
    """
    number = FORMS[None if cap is None else form]
    others, weights = (each if each is None else each.contiguous() for each in (others, weights))
    objective, entropies = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, targets.contiguous(), others, weights, cap or 1.0, number, z_loss
    )
    return objective, entropies
