"""The fused kernels against their references in Triton's interpreter; `test_kernels.py` runs this in its own process.

The interpreter multiplies no bfloat16 matrices, so products are compared in float32 and float16; and it cuts numbers
off where a GPU rounds them, so half formats are given twice the error of rounding.
"""

from collections.abc import Iterator
from inspect import signature
from itertools import product
from typing import Any

import gram_kernels
import mlp_kernels
import pytest
import torch
from kernels import CANDIDATES, candidate, function_of, squared_mlp
from torch import Tensor

from caddie import ops
from caddie.ops import IMPLEMENTATIONS, Softcap, plain, use_implementations
from caddie.ops.dispatch import implementation
from caddie.train.optim import muon

PRECISE = {"rtol": 1e-5, "atol": 2e-6}
BRAIN = {"rtol": 2**-7, "atol": 1e-5}


def test_signatures_are_those_of_the_references() -> None:
    for operation, names in IMPLEMENTATIONS.items():
        if "Triton" in names:
            assert signature(implementation(operation, "Triton")) == signature(getattr(plain, operation))


def test_signatures_of_the_bench_are_those_of_the_references() -> None:
    for operation, (reference, _) in CANDIDATES.items():
        assert [*signature(function_of(operation, "Triton")).parameters] == [*signature(reference).parameters]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def agrees(found: Tensor, exact: Tensor) -> None:
    """The error of a whole product is that of its dtype; one element that is missing would be more."""
    error = (found.double() - exact).norm() / exact.norm()
    assert error < (1e-6 if found.dtype == torch.float32 else 2e-3)


CAPS: list[tuple[float | None, Softcap]] = [(None, "tanh"), (30.0, "tanh"), (2.0, "polynomial")]
SIZES = [(1, 2), (3, 16), (2, 33), (2, 4097)]


def losses() -> Iterator[Any]:
    """All combinations; the fast ones have each cap at each size, and each dtype with each further loss there."""
    for (place, size), (number, cap), z_loss, dtype in product(
        enumerate(SIZES), enumerate(CAPS), (0.0, 0.2), (torch.float32, torch.bfloat16)
    ):
        fast = (place + number) % 2 == (z_loss > 0) ^ (dtype == torch.bfloat16)
        yield pytest.param(*size, *cap, z_loss, dtype, marks=[] if fast else pytest.mark.slow)


@pytest.mark.parametrize(("rows", "columns", "cap", "form", "z_loss", "dtype"), list(losses()))
def test_cross_entropy(
    rows: int, columns: int, cap: float | None, form: Softcap, z_loss: float, dtype: torch.dtype
) -> None:
    logits, slopes = (8 * random(rows, columns)).to(dtype), random(rows)
    targets = torch.arange(rows) * 7 % columns
    targets[-1] = columns - 1
    mine, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    second = (targets.flip(0) // 2, slopes.abs()) if rows % 2 else ()
    with use_implementations(cross_entropy="Triton"):
        descended, entropies = ops.cross_entropy(mine, targets, cap, form, z_loss, *second)
    right, right_entropies = plain.cross_entropy(exact, targets, cap, form, z_loss, *second)
    assert not entropies.requires_grad
    torch.testing.assert_close(descended, right, **PRECISE)
    torch.testing.assert_close(entropies, right_entropies, **PRECISE)
    descended.backward(slopes)
    right.backward(slopes)
    assert mine.grad is not None
    assert mine.grad.dtype == dtype
    torch.testing.assert_close(mine.grad.double(), exact.grad, **(BRAIN if dtype == torch.bfloat16 else PRECISE))


def test_cross_entropy_at_its_edges() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [0.0, 500.0, 0.0], [0.0, 0.0, 0.0]])
    with use_implementations(cross_entropy="Triton"):
        assert ops.cross_entropy(logits, torch.tensor([1, 0, 3]))[0][:2].tolist() == [2e4, 500.0]
        assert ops.cross_entropy(logits, torch.tensor([1, 0, 3]))[0][2].isnan()
        strided = random(6, 10).mT
        found = ops.cross_entropy(strided, torch.arange(10) % 6, 3.0)[0]
    torch.testing.assert_close(found, plain.cross_entropy(strided, torch.arange(10) % 6, 3.0)[0])
    columns = (torch.arange(30) * 7 % 6).reshape(10, 3)
    second = columns[:, 1], random(10, 2)[:, 1].abs()
    with use_implementations(cross_entropy="Triton"):
        found = ops.cross_entropy(strided, columns[:, 0], 3.0, "tanh", 0.2, *second)[0]
    torch.testing.assert_close(found, plain.cross_entropy(strided, columns[:, 0], 3.0, "tanh", 0.2, *second)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("shape", "hidden", "slope"), [((1, 1), 1, 0.0), ((2, 3, 5), 7, 0.5), ((130, 66), 140, 0.0), ((130, 66), 140, 0.5)]
)
def test_squared_mlp(shape: tuple[int, ...], hidden: int, slope: float, dtype: torch.dtype) -> None:
    width = shape[-1]
    tensors = random(*shape), random(hidden, width) / width**0.5, random(width, hidden) / hidden**0.5
    mine = [tensor.to(dtype).requires_grad_() for tensor in tensors]
    exact = [tensor.detach().double().requires_grad_() for tensor in mine]
    slopes = random(*shape, seed=1).to(dtype)
    y = mlp_kernels.squared_mlp(*mine, slope)
    right = squared_mlp(*exact, slope)
    y.backward(slopes)
    right.backward(slopes.double())
    assert y.shape == shape
    for one, other in zip([y, *(leaf.grad for leaf in mine)], [right, *(leaf.grad for leaf in exact)], strict=True):
        assert one is not None
        assert other is not None
        assert one.dtype == dtype
        agrees(one, other)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 1), torch.float32),
        ((3, 5), torch.float16),
        ((64, 64), torch.float32),
        ((2, 65, 130), torch.float16),
        ((2, 2, 7, 70), torch.float32),
        pytest.param((1, 1), torch.float16, marks=pytest.mark.slow),
        pytest.param((3, 5), torch.float32, marks=pytest.mark.slow),
        pytest.param((64, 64), torch.float16, marks=pytest.mark.slow),
        pytest.param((2, 65, 130), torch.float32, marks=pytest.mark.slow),
        pytest.param((2, 2, 7, 70), torch.float16, marks=pytest.mark.slow),
    ],
)
def test_symmetric_products(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (random(*shape) / shape[-1] ** 0.5).to(dtype)
    for matrices in (x, x.mT):
        gram = gram_kernels.gram(matrices)
        tile = torch.arange(gram.shape[-1]) // gram_kernels.TILE
        mirrored = tile[:, None] != tile  # a tile on the diagonal is as symmetric as the library's products
        assert torch.equal(gram[..., mirrored], gram.mT[..., mirrored])
        agrees(gram, muon.gram(matrices.double()))
        exact = gram.double().reshape(-1, *gram.shape[-2:])
        right = muon.gram_polynomial(exact, -4.775, 2.0315).view(gram.shape)
        agrees(gram_kernels.gram_polynomial(gram, -4.775, 2.0315), right)


def test_newton_schulz_through_the_kernels() -> None:
    for matrices, steps, name in ((random(3, 10, 6), 5, "polar_express"), (random(70, 80), 2, "turbo")):
        with candidate("gram"), candidate("gram_polynomial"):
            found = muon.newton_schulz(matrices, steps, name)
        torch.testing.assert_close(found, muon.newton_schulz(matrices, steps, name), rtol=1e-4, atol=1e-5)
