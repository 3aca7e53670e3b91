"""Symmetric products in Triton for Newton-Schulz: tiles above the diagonal are computed, those below are copies.

Half the multiplications of a plain product, for a whole bank of matrices at once (modded-nanogpt; cf. BLAS's syrk).
Nothing in the package takes it until `bench/kernels.py` shows a gain on a GPU.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

TILE, INNER = 64, 64
"""Rows, and as many columns, that a program computes; columns that it multiplies at a time."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _symmetric(  # type: ignore[no-untyped-def]
    x, result, rows, columns, step_matrix, step_row, step_column, b, c,
    polynomial: tl.constexpr, tile: tl.constexpr, inner: tl.constexpr,
):  # fmt: skip
    """X Xᵀ, or of a symmetric X bX + cX²; each program serves a tile on or above the diagonal and its mirror."""
    across = tl.program_id(0)
    down = tl.program_id(1)
    if down > across:
        return
    x += tl.program_id(2).to(tl.int64) * step_matrix
    result += tl.program_id(2).to(tl.int64) * rows * rows
    row = down * tile + tl.arange(0, tile)
    column = across * tile + tl.arange(0, tile)
    along = tl.arange(0, inner)
    product = tl.zeros((tile, tile), tl.float32)
    for first in range(0, columns, inner):
        here = first + along
        left = x + row[:, None] * step_row + here[None, :] * step_column
        right = x + column[None, :] * step_row + here[:, None] * step_column
        m = tl.load(left, mask=(row < rows)[:, None] & (here < columns)[None, :], other=0.0)
        n = tl.load(right, mask=(column < rows)[None, :] & (here < columns)[:, None], other=0.0)
        product = tl.dot(m, n, product, input_precision="ieee")
    inside = (row < rows)[:, None] & (column < rows)[None, :]
    if polynomial:
        linear = tl.load(x + row[:, None] * step_row + column[None, :] * step_column, mask=inside, other=0.0)
        product = b * linear.to(tl.float32) + c * product
    rounded = product.to(result.dtype.element_ty)
    tl.store(result + row[:, None] * rows + column[None, :], rounded, mask=inside)
    if down < across:
        mirrored = (column < rows)[:, None] & (row < rows)[None, :]
        tl.store(result + column[:, None] * rows + row[None, :], tl.trans(rounded), mask=mirrored)


@triton_op("caddie::symmetric_product", mutates_args={})
def _symmetric_product(x: Tensor, b: float, c: float, polynomial: bool) -> Tensor:
    """Of a bank (matrices, rows, columns), in any layout."""
    bank, rows, columns = x.shape
    result = x.new_empty(bank, rows, rows)
    tiles = triton.cdiv(rows, TILE)
    kernel: Any = wrap_triton(_symmetric) if x.is_cuda else _symmetric  # the interpreter's needs nothing
    kernel[(tiles, tiles, bank)](
        x, result, rows, columns, x.stride(0), x.stride(1), x.stride(2), b, c, polynomial, TILE, INNER, num_warps=4
    )
    return result


def gram(x: Tensor) -> Tensor:
    """Compute `caddie.train.optim.muon.gram`."""
    return _product_of(x, 0.0, 1.0, polynomial=False)


def gram_polynomial(symmetric: Tensor, b: float, c: float) -> Tensor:
    """Compute `caddie.train.optim.muon.gram_polynomial`, with one rounding at the end."""
    return _product_of(symmetric, b, c, polynomial=True)


def _product_of(x: Tensor, b: float, c: float, polynomial: bool) -> Tensor:
    rows = x.shape[-2]
    bank: Tensor = _symmetric_product(x.reshape(-1, *x.shape[-2:]), b, c, polynomial)
    return bank.view(*x.shape[:-2], rows, rows)
