"""Norms by hand against their references, forward and backward, and whom they are for."""

import pytest
import torch
from torch import Tensor

from caddie import ops
from caddie.ops import choose, use_implementations

CPU = torch.device("cpu")
SHAPES = [(2, 5, 3, 8, 4), (1, 1, 1, 2, 1), (3, 17, 2, 12, 3), (2, 7, 4, 6, 3)]
"""Batch, positions, heads, size of a head and half of its channels that turn."""


def both(function: str, arguments: tuple[Tensor | None, ...], slopes: Tensor) -> list[list[Tensor]]:
    """Result and gradients of the reference, in float64, and of the version by hand."""
    found = []
    for name, dtype in (("plain", torch.float64), ("manual", None)):
        given = [a if a is None else (a if dtype is None else a.to(dtype)).clone().requires_grad_() for a in arguments]
        with use_implementations(**{function: name}):
            y = getattr(ops, function)(*given)
        if function == "normed_rotation":
            given = [given[0], given[3]]
        wanted = [a for a in given if a is not None]
        found.append([y, *torch.autograd.grad((y * slopes.to(y.dtype)).sum(), wanted)])
    return found


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("shape", [(3, 8), (2, 5, 16), (1, 1), (4, 3, 2, 7)])
def test_norm(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    x, slopes = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    for expected, got in zip(*both("rms_norm", (x,), slopes), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 6e-2)])
@pytest.mark.parametrize("gained", [True, False])
@pytest.mark.parametrize(("rows", "length", "heads", "size", "half"), SHAPES)
def test_rotation(
    rows: int, length: int, heads: int, size: int, half: int, gained: bool, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, length, heads, size).to(dtype).transpose(1, 2)
    angles = torch.rand(length, half)
    gain = torch.rand(heads) + 0.5 if gained else None
    tables = angles.cos().to(dtype), angles.sin().to(dtype)
    slopes = torch.randn(rows, heads, length, size).to(dtype)
    for expected, got in zip(*both("normed_rotation", (x, *tables, gain), slopes), strict=True):
        scale = max(1.0, float(expected.detach().abs().max()))  # a gain's gradient is a sum over all positions
        assert (got.double() - expected).detach().abs().max() < tolerance * scale


def test_small_rows_and_epsilon() -> None:
    zeros = torch.zeros(2, 4, requires_grad=True)
    with use_implementations(rms_norm="manual"):
        y = ops.rms_norm(zeros)
        (y.sum()).backward()
        assert not y.any()
        assert zeros.grad is not None
        assert bool(zeros.grad.isfinite().all())
        assert ops.rms_norm(torch.tensor([3.0, 4.0]), 12.0).tolist() == pytest.approx([3 / 24.5**0.5, 4 / 24.5**0.5])
    for dtype in (torch.float32, torch.bfloat16):  # PyTorch's own epsilon is that of float32 for both
        small = torch.full((4,), 1e-3, dtype=dtype)
        with use_implementations(rms_norm="plain"):
            expected = ops.rms_norm(small)
        with use_implementations(rms_norm="manual"):
            assert torch.equal(ops.rms_norm(small), expected)


@pytest.mark.parametrize("operation", ["rms_norm", "normed_rotation"])
def test_choice(operation: str) -> None:
    assert choose(operation, CPU, torch.bfloat16) == choose(operation, CPU, torch.float32) == "manual"
    assert choose(operation, CPU, torch.float64) == "plain"
    assert choose(operation, CPU, torch.bfloat16, compiling=True) == "plain"
    assert choose(operation, torch.device("cuda"), torch.bfloat16) == "plain"
