"""The squared-activation MLP in Triton: the activation rides on the product before it, its derivative on that after it.

Forward, one kernel multiplies and writes the hidden channels before and after the activation; backward, the same kernel
multiplies by the other matrix and writes the gradient before the activation, so no pass over the hidden channels is the
activation's own (modded-nanogpt; openai/parameter-golf, 2026-03-23 on). The other four products are PyTorch's. Nothing
in the package takes it until `bench/kernels.py` shows a gain on a GPU.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

TILE = (128, 128, 64)
"""Rows and hidden channels that a program computes, and channels that it multiplies at a time."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _product(  # type: ignore[no-untyped-def]
    x, matrix, before, result, rows, hidden, width, step_hidden, step_width,
    slope: tl.constexpr, backward: tl.constexpr,
    tile_rows: tl.constexpr, tile_hidden: tl.constexpr, tile_width: tl.constexpr,
):  # fmt: skip
    """`x` (rows, width) times `matrix`, (width, hidden) in steps as given, into (rows, hidden).

    Forward the product is stored as `before`, and activated as `result`; backward it is a gradient, and as `result`
    times the derivative at `before`. Programs that follow one another share rows of `x`. The slope is a constant: a
    compiled graph would hand it over in float64.
    """
    across = tl.cdiv(hidden, tile_hidden)
    row = tl.program_id(0) // across * tile_rows + tl.arange(0, tile_rows)
    column = tl.program_id(0) % across * tile_hidden + tl.arange(0, tile_hidden)
    inner = tl.arange(0, tile_width)
    left = x + row.to(tl.int64)[:, None] * width + inner[None, :]
    right = matrix + inner[:, None] * step_width + column[None, :] * step_hidden
    product = tl.zeros((tile_rows, tile_hidden), tl.float32)
    for first in range(0, width, tile_width):
        within = first + inner < width
        a = tl.load(left + first, mask=(row < rows)[:, None] & within[None, :], other=0.0)
        b = tl.load(right + first * step_width, mask=within[:, None] & (column < hidden)[None, :], other=0.0)
        product = tl.dot(a, b, product, input_precision="ieee")
    place = row.to(tl.int64)[:, None] * hidden + column[None, :]
    inside = (row < rows)[:, None] & (column < hidden)[None, :]
    if backward:
        u = tl.load(before + place, mask=inside, other=0.0).to(tl.float32)
        y = product * 2.0 * tl.where(u > 0.0, u, slope * slope * u)
    else:
        rounded = product.to(result.dtype.element_ty)
        tl.store(before + place, rounded, mask=inside)
        u = rounded.to(tl.float32)
        y = tl.where(u > 0.0, u * u, slope * slope * u * u)
    tl.store(result + place, y.to(result.dtype.element_ty), mask=inside)


def _multiply(x: Tensor, matrix: Tensor, before: Tensor, slope: float, backward: bool) -> Tensor:
    """`x` (rows, width) times `matrix` (width, hidden), and what the kernel makes of it."""
    result = torch.empty_like(before)
    (rows, width), hidden = x.shape, before.shape[1]
    tile_rows, tile_hidden, tile_width = TILE
    kernel: Any = wrap_triton(_product) if x.is_cuda else _product  # the interpreter's needs nothing
    kernel[(triton.cdiv(rows, tile_rows) * triton.cdiv(hidden, tile_hidden),)](
        x, matrix, before, result, rows, hidden, width, matrix.stride(1), matrix.stride(0), slope, backward,
        tile_rows, tile_hidden, tile_width, num_warps=8, num_stages=3,
    )  # fmt: skip
    return result


@triton_op("caddie::squared_up", mutates_args={})
def _up(x: Tensor, up: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    before = x.new_empty(len(x), len(up))
    return before, _multiply(x, up.mT, before, slope, backward=False)


@triton_op("caddie::squared_down_backward", mutates_args={})
def _down_backward(slopes: Tensor, down: Tensor, before: Tensor, slope: float) -> Tensor:
    return _multiply(slopes, down, before, slope, backward=True)


class _SquaredMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, down: Tensor, slope: float) -> Tensor:
        before, after = _up(x, up, slope)
        ctx.save_for_backward(x, up, down, before, after)
        ctx.slope = slope
        return F.linear(after, down)

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
        x, up, down, before, after = ctx.saved_tensors
        slopes = slopes.contiguous()
        hidden = _down_backward(slopes, down, before, ctx.slope)
        return hidden @ up, hidden.mT @ x, slopes.mT @ after, None


def squared_mlp(x: Tensor, up: Tensor, down: Tensor, slope: float = 0.0) -> Tensor:
    """Return x (..., width) through `up` (hidden, width), the squared activation and `down` (width, hidden)."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    y: Tensor = _SquaredMLP.apply(rows, up, down, slope)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], -1)


def forward(mlp: Any, x: Tensor) -> Tensor:
    """Forward of the package's squared MLPs through the kernels, for whole steps."""
    return squared_mlp(x, mlp.up.weight.to(x.dtype), mlp.down.weight.to(x.dtype), mlp.slope)
