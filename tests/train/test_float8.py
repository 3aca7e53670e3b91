"""Linear layers in eight bits: what is rounded, that both ways to multiply agree, and where a run takes them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recording import RecordedProgress
from test_loop import STEPS, TINY, go
from torch import Tensor

from caddie.model import GPT, ModelPart, Recurrence, SwiGLU, UntiedHead, build
from caddie.ops import choose, float8_linear, linear, multiplies_float8, plain, use_implementations
from caddie.ops import dispatch as choice
from caddie.ops.float8 import FORWARD, GRADIENT, rounded

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def random(*size: int, scale: float = 1.0, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    chance = torch.Generator().manual_seed(sum(size) + seed)
    return (scale * torch.randn(size, generator=chance)).to(dtype)


def both_ways(x: Tensor, weight: Tensor, slopes: Tensor, layer: Any = float8_linear) -> list[Tensor]:
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = layer(*leaves)
    # Slopes as an argument would import SymPy, a second of the process.
    found = [y.detach(), *torch.autograd.grad((y * slopes).sum(), leaves)]
    assert [t.dtype for t in found] == [x.dtype, x.dtype, weight.dtype]
    return found


def far(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right.double()).norm() / right.double().norm())


# The operation


@pytest.mark.parametrize(("dtype", "largest"), [(FORWARD, 448.0), (GRADIENT, 57344.0)])
def test_the_largest_number_becomes_the_largest_of_the_format(dtype: torch.dtype, largest: float) -> None:
    x = torch.tensor([[3.0, -1.5], [0.75, 0.0]])
    eight, scale = rounded(x, dtype)
    assert eight.float().tolist() == [[largest, -largest / 2], [largest / 4, 0.0]]
    assert float(scale) == pytest.approx(3.0 / largest)
    for size in (1e-25, 1e25):
        eight, scale = rounded(size * random(9, 9), dtype)
        assert float(eight.float().abs().max()) == largest
        assert far(eight.float() * scale, size * random(9, 9)) < 0.06
    assert rounded(torch.zeros(2, 2), dtype)[0].float().tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(1, 16, 16), (64, 32, 48), (33, 48, 16), (7, 5, 3)])
def test_the_reference_is_a_linear_layer_of_rounded_numbers(dtype: torch.dtype, size: tuple[int, int, int]) -> None:
    """Numbers far beyond their format's largest, and slopes far below their format's smallest."""
    count, inputs, outputs = size
    x, weight = random(count, inputs, scale=1e4, dtype=dtype), random(outputs, inputs)
    slopes = random(count, outputs, scale=1e-9, dtype=dtype)
    found = both_ways(x, weight, slopes)
    (x8, of_x), (w8, of_w) = rounded(x, FORWARD), rounded(weight.to(dtype), FORWARD)
    (s8, of_s) = rounded(slopes, GRADIENT)
    x64, w64, s64 = (eight.double() * scale.double() for eight, scale in ((x8, of_x), (w8, of_w), (s8, of_s)))
    near = 2**-7 if dtype == torch.bfloat16 else 1e-6
    for one, right in zip(found, (x64 @ w64.mT, s64 @ w64, s64.mT @ x64), strict=True):
        assert far(one, right) < near
    for one, exact in zip(found, both_ways(x, weight, slopes, linear), strict=True):
        assert far(one, exact) < 0.15


@pytest.mark.long
@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 9).map(lambda n: 16 * n),
    inputs=st.integers(1, 5).map(lambda n: 16 * n),
    outputs=st.integers(1, 5).map(lambda n: 16 * n),
    brain=st.booleans(),
)
def test_the_instructions_for_it_give_what_the_reference_gives(
    rows: int, inputs: int, outputs: int, brain: bool
) -> None:
    dtype = torch.bfloat16 if brain else torch.float32
    given = random(2, rows, inputs, dtype=dtype), random(outputs, inputs), random(2, rows, outputs, dtype=dtype)
    found = []
    for name in ("plain", "scaled_mm"):
        with use_implementations(scaled_product=name):
            found.append(both_ways(*given))
    for one, right in zip(*reversed(found), strict=True):
        assert one.shape == right.shape
        assert far(one, right) < (2**-7 if brain else 1e-6)


def test_sizes_that_do_not_fit_the_instructions_go_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def instructions(left: Tensor, right: Tensor, *rest: Any, **named: Any) -> Tensor:
        asked.append((*left.shape, right.shape[1]))
        return plain.scaled_product(left, right, *rest, **named)

    monkeypatch.setitem(choice._functions, ("scaled_product", "scaled_mm"), instructions)
    with use_implementations(scaled_product="scaled_mm"):
        for size, expected in (
            ((8, 16, 32), [(8, 16, 32), (8, 32, 16)]),
            ((16, 16, 24), [(24, 16, 16)]),
            ((16, 8, 16), [(16, 16, 8)][:0]),
            ((48, 32, 16), [(48, 32, 16), (48, 16, 32), (16, 48, 32)]),
        ):
            asked.clear()
            count, inputs, outputs = size
            both_ways(random(count, inputs), random(outputs, inputs), random(count, outputs))
            assert asked == expected


def test_what_is_not_finite_stays_so() -> None:
    """A run whose loss is no number stops; rounding must not hide it."""
    for bad in (torch.nan, torch.inf):
        x = random(16, 16)
        x[3, 5] = bad
        assert float8_linear(x, random(16, 16)).isnan().all()


def test_who_multiplies_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not multiplies_float8(CPU)
    assert choose("scaled_product", CPU, FORWARD) == "plain"
    for capability, able in (((8, 0), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert multiplies_float8(CUDA) is able
        for dtype in (FORWARD, GRADIENT):
            assert choose("scaled_product", CUDA, dtype) == ("scaled_mm" if able else "plain")
    assert choose("scaled_product", CUDA, torch.bfloat16) == "plain"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not multiplies_float8(CUDA), "AMD's formats are others"


# In the model and in a run


MLPS = {f"blocks.{layer}.mlp.{name}.weight" for layer in (0, 1) for name in ("up", "down")}
LOOPED = TINY.but({"recurrence": Recurrence(first=1, last=1, passes=2, own_mlps=True)})


@pytest.mark.parametrize(
    ("part", "gpt", "expected"),
    [
        ("mlp", TINY, MLPS),
        ("mlp", TINY.but({"block.mlp": SwiGLU(hidden=48)}), MLPS | {f"blocks.{n}.mlp.gate.weight" for n in (0, 1)}),
        ("mlp", LOOPED, MLPS | {f"blocks.1.later_mlps.0.{name}.weight" for name in ("up", "down")}),
        ("head", TINY, {"embedding.weight"}),
        ("head", TINY.but({"head": UntiedHead()}), {"head.table.weight"}),
        ("head", TINY.but({"embedding.dims": 16}), {"embedding.weight", "head.projection.weight"}),
    ],
)
def test_parts_are_the_layers_of_their_names(part: ModelPart, gpt: GPT, expected: set[str]) -> None:
    model = build(gpt, 0)
    names = {parameter.data_ptr(): name for name, parameter in model.named_parameters()}
    seen = []

    def spy(x: Tensor, weight: Tensor) -> Tensor:
        seen.append(names[weight.data_ptr()])
        return linear(x, weight)

    model.set_product(part, spy)
    model(torch.zeros(1, 4, dtype=torch.long), capped=False)  # as in training
    assert set(seen) == expected
    assert len(seen) == len(expected)


@pytest.mark.long
def test_a_run_is_trained_in_eight_bits_and_says_what_they_cost(tmp_path: Path) -> None:
    shown, runs = RecordedProgress(), {}
    for parts in ((), ("mlp",), ("head", "mlp")):
        config = STEPS.but(steps=20, float8=parts, precision="float32")
        runs[parts] = go(tmp_path / "-".join(("run", *parts)), config, progress=shown)
    losses = [run.final_loss for run in runs.values()]
    assert len(set(losses)) == 3, "each part rounds something more"
    assert max(losses) - min(losses) < 0.02 * min(losses)
    weight = runs["head", "mlp"].last["blocks.0.mlp.up.weight"]
    eight, scale = rounded(weight, FORWARD)
    assert not torch.equal(weight, eight.float() * scale), "eight bits are how products are made, not what is kept"
    said = "train.float8: this device has no float8 products, so they are emulated, which takes longer"
    assert shown.notes == [said] * 2
