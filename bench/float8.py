"""The three products of a linear layer in float8 beside bfloat16: whether FP8 would pay, at which shapes and errors.

python bench/float8.py [--toy]    (a GPU of compute capability 8.9 or more; --toy runs anywhere, its times say nothing)

Forward x Wᵀ and backward g W and gᵀ x by PyTorch's own `torch._scaled_mm`: what goes forward as e4m3, slopes as e5m2,
one scale for each tensor by its largest number now (arXiv 2209.05433). Casts and transposed copies count, since
training makes them in each step. Both are compiled on a GPU. Shapes: an MLP of the baseline, MLP and head of the
records, and a width of 1,024.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from equality import compared, listed
from torch import Tensor

from caddie.distributed import local_device
from caddie.errors import UserError
from caddie.exits import end

SHAPES = {
    "the baseline's MLP": (65_536, 512, 1024),
    "a record's MLP": (98_304, 512, 2048),
    "a record's head": (98_304, 512, 8192),
    "an MLP of width 1,024": (65_536, 1024, 4096),
}
"""Tokens of a micro-batch, inputs, outputs."""
Products = Callable[[Tensor, Tensor, Tensor], list[Tensor]]


def plain(x: Tensor, weight: Tensor, slopes: Tensor) -> list[Tensor]:
    """x (N, inputs) Wᵀ, and the gradients of both, given those of the result (N, outputs)."""
    return [x @ weight.mT, slopes @ weight, slopes.mT @ x]


def float8(x: Tensor, weight: Tensor, slopes: Tensor) -> list[Tensor]:
    """The same with all that is multiplied rounded to eight bits; results are bfloat16."""
    (x, of_x), (weight, of_weight) = _rounded(x, torch.float8_e4m3fn), _rounded(weight, torch.float8_e4m3fn)
    slopes, of_slopes = _rounded(slopes, torch.float8_e5m2)
    return [
        _product(x, weight.mT, of_x, of_weight, hasty=True),
        _product(slopes, _by_columns(weight), of_slopes, of_weight),
        _product(slopes.mT.contiguous(), _by_columns(x), of_slopes, of_x),
    ]


def _rounded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The tensor over a scale that makes its largest number the largest of the format, and that scale, float32."""
    scale = x.abs().amax().float().clamp(min=1e-12) / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype), scale


def _by_columns(x: Tensor) -> Tensor:
    """The same matrix with its columns one after the other in memory, the only way that the right one may lie."""
    return x.mT.contiguous().mT


def _product(left: Tensor, right: Tensor, of_left: Tensor, of_right: Tensor, hasty: bool = False) -> Tensor:
    """Their product; `hasty` adds up in fewer bits, which is quicker and what others do forward."""
    product: Tensor = torch._scaled_mm(
        left, right, scale_a=of_left, scale_b=of_right, out_dtype=torch.bfloat16, use_fast_accum=hasty
    )
    return product


def float8_products(toy: bool = False) -> Iterator[dict[str, Any]]:
    """A row for each shape: milliseconds of the three products either way, and errors against float32."""
    device = local_device()
    for what, shape in SHAPES.items():
        count, inputs, outputs = (64, 32, 48) if toy else shape
        generator = torch.Generator(device).manual_seed(0)
        x, weight, slopes = (
            torch.randn(size, device=device, generator=generator).bfloat16()
            for size in ((count, inputs), (outputs, inputs), (count, outputs))
        )
        found = compared(
            partial(_compiled(float8), x, weight, slopes),
            partial(_compiled(plain), x, weight, slopes),
            partial(plain, x.float(), weight.float(), slopes.float()),
        )
        del found["equal"]  # eight bits are not equal to sixteen, and are not meant to be
        size = f"{count:,} x {inputs:,} x {outputs:,}"
        yield {"what": what, "size": size, **found}


def _compiled(function: Products) -> Products:
    return torch.compile(function, dynamic=False) if local_device().type == "cuda" else function


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true")
    toy = parser.parse_args().toy
    if not toy and local_device().type != "cuda":
        raise UserError("there is no GPU here; --toy runs the products at sizes whose times say nothing")
    print(listed(list(float8_products(toy))))


if __name__ == "__main__":
    end(main)
