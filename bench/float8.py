"""The three products of a linear layer in eight bits beside bfloat16: whether FP8 pays, at which shapes and errors.

python bench/float8.py [--toy]    (a GPU of compute capability 8.9 or more; --toy runs anywhere, its times say nothing)

Forward and backward of what `train.float8` runs, with `torch._scaled_mm`, beside the linear layer that it replaces.
Casts and transposed copies count, since training makes them in each step. Both are compiled on a GPU. Errors are
against float32; that of the reference, which rounds alike and multiplies otherwise, should be the same. Shapes: an MLP
of the baseline, MLP and head of the records, and a width of 1,024.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from equality import compared, listed
from kernels import error
from torch import Tensor

from caddie.cli.exits import end
from caddie.errors import UserError
from caddie.ops import float8_linear, linear, use_implementations
from caddie.runtime.distributed import local_device

SHAPES = {
    "the baseline's MLP": (65_536, 512, 1024),
    "a record's MLP": (98_304, 512, 2048),
    "a record's head": (98_304, 512, 8192),
    "an MLP of width 1,024": (65_536, 1024, 4096),
}
"""Tokens of a micro-batch, inputs, outputs."""
Layer = Callable[[Tensor, Tensor], Tensor]


def products(layer: Layer, x: Tensor, weight: Tensor, slopes: Tensor) -> list[Tensor]:
    """x (N, inputs) Wᵀ, and the gradients of both, given those of the result (N, outputs)."""
    leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = layer(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, slopes)]


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
        exact = partial(products, linear, x.float(), weight.float(), slopes.float())
        with use_implementations(scaled_product="plain"):
            of_reference = error(products(float8_linear, x, weight, slopes), exact())
        with use_implementations(scaled_product="scaled_mm"):
            found = compared(
                partial(products, _compiled(float8_linear), x, weight, slopes),
                partial(products, _compiled(linear), x, weight, slopes),
                exact,
            )
        size = f"{count:,} x {inputs:,} x {outputs:,}"
        # Eight bits are not equal to sixteen, and are not meant to be, but to the reference in eight.
        if found["equal"] is not None:
            found["equal"] = found["error"] <= 1.1 * of_reference
        yield {"what": what, "size": size, "of reference": of_reference, **found}


def _compiled(layer: Layer) -> Layer:
    return torch.compile(layer, dynamic=False) if local_device().type == "cuda" else layer


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
