"""Quantizers: the public script's integers, and what every quantizer must keep."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from caddie.config import variants
from caddie.errors import UserError
from caddie.model import GPT, build
from caddie.quantize import Arrays, Float16, Quantizer, Rows
from caddie.quantize.rows import _half, _quantile

quick = settings(derandomize=True, deadline=None, max_examples=25)

SETTINGS: list[Quantizer] = [
    *(cls() for cls in variants(Quantizer).values()),
    Rows(bits=2),
    Rows(bits=4),
    Rows(bits=6, percentile=1.0),
    Rows(floor="absolute"),
    Rows(bits=6, floor="absolute"),
    Rows(bits=6, percentile=1.0, floor="absolute", steps="float32"),
    Rows(bits=4, steps="float32"),
]
"""Every variant as it comes, and a few with other settings. A variant that has no defaults needs a line here."""
EMPTY = torch.zeros(0, 1)


def can_be_faked(quantizer: Quantizer) -> bool:
    try:
        quantizer.fake(EMPTY)
    except UserError:
        return False
    return True


every_quantizer = pytest.mark.parametrize("quantizer", SETTINGS, ids=repr)
every_fake = pytest.mark.parametrize("quantizer", [q for q in SETTINGS if can_be_faked(q)], ids=repr)

SHAPES = [(8, 32), (1, 32), (32, 1), (1, 1), (1,), (17,), (3, 4, 5), (0, 4), (0,), ()]


def sample(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def restored(quantizer: Quantizer, weight: Tensor) -> Tensor:
    return quantizer.dequantize(quantizer.quantize(weight), tuple(weight.shape))


def through_bytes(quantizer: Quantizer, weight: Tensor) -> Arrays:
    """The arrays as an artifact gives them back: from bytes and the layout alone."""
    arrays = quantizer.quantize(weight)
    found = {}
    for key, (dtype, shape) in quantizer.layout(tuple(weight.shape)).items():
        data = arrays[key].tobytes()
        found[key] = np.frombuffer(data, dtype, math.prod(shape)).reshape(shape)
    return found


def bound(quantizer: Quantizer, weight: Tensor) -> Tensor:
    """The largest error that a quantizer may make at each element."""
    weight = weight.float()
    if isinstance(quantizer, Float16):
        return (weight.abs() * 2**-11).clamp_min(2**-25) + (weight.abs() - 65_504).clamp_min(0)
    if not isinstance(quantizer, Rows):
        return torch.zeros_like(weight)  # exact; a variant that is not needs its bound here
    steps = torch.from_numpy(quantizer.quantize(weight)["steps"].astype(np.float32))
    step = steps.reshape((*weight.shape[:-1], 1) if weight.ndim else ()).expand(weight.shape)
    largest = 2 ** (quantizer.bits - 1) - 1
    # The public scripts choose the integers by the step before it is rounded to half precision.
    halves = 0.5 if quantizer.floor == "relative" else 0.5 + largest * 2**-11
    return step * halves * (1 + 1e-4) + (weight.abs() - step * largest).clamp_min(0)


# Contracts of every quantizer


@every_quantizer
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layout_and_shape_are_kept(quantizer: Quantizer, shape: tuple[int, ...]) -> None:
    weight = sample(shape)
    arrays = quantizer.quantize(weight)
    assert {key: (array.dtype, array.shape) for key, array in arrays.items()} == quantizer.layout(shape)
    assert list(arrays) == list(quantizer.layout(shape)), "sections are written in this order"
    assert all(array.dtype.byteorder in "<|=" for array in arrays.values())
    back = restored(quantizer, weight)
    assert back.shape == weight.shape
    assert back.dtype == torch.float32
    assert torch.equal(quantizer.dequantize(through_bytes(quantizer, weight), shape), back)


@every_quantizer
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_error_is_bounded(quantizer: Quantizer, shape: tuple[int, ...]) -> None:
    weight = sample(shape)
    assert ((restored(quantizer, weight) - weight).abs() <= bound(quantizer, weight)).all()


@every_quantizer
@quick
@given(
    st.integers(0, 1000),
    st.sampled_from([(1, 7), (5, 3), (4, 33), (2, 1), (9,)]),
    st.floats(-6, 6),
    st.sampled_from(["plain", "outlier", "zero row", "constant", "rows of many sizes"]),
)
def test_the_error_is_bounded_for_any_magnitude(
    quantizer: Quantizer, seed: int, shape: tuple[int, ...], exponent: float, kind: str
) -> None:
    weight = sample(shape, seed) * 10**exponent
    if kind == "outlier":
        weight.view(-1)[0] *= 1000
    elif kind == "zero row":
        weight[0] = 0
    elif kind == "constant":
        weight[:] = weight.view(-1)[0].item()
    elif kind == "rows of many sizes":
        weight *= torch.logspace(-4, 0, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    back = restored(quantizer, weight)
    assert torch.isfinite(back).all()
    assert ((back - weight).abs() <= bound(quantizer, weight)).all()


@every_quantizer
def test_zeros_stay_zeros(quantizer: Quantizer) -> None:
    for shape in [(3, 4), (1,), (5,), ()]:
        assert torch.equal(restored(quantizer, torch.zeros(shape)), torch.zeros(shape))


@every_quantizer
@pytest.mark.parametrize("magnitude", [1e-38, 1e-12, 1e12, 1e30, 3e38])
def test_no_magnitude_gives_what_is_not_finite(quantizer: Quantizer, magnitude: float) -> None:
    weight = torch.tensor([[1.0, -0.5], [0.25, 0.0]]) * magnitude
    back = restored(quantizer, weight)
    assert torch.isfinite(back).all()
    assert (back.sign() * weight.sign() >= 0).all(), "no sign turns"


@every_quantizer
def test_signs_do_not_matter(quantizer: Quantizer) -> None:
    weight = sample((6, 40))
    assert torch.equal(restored(quantizer, -weight), -restored(quantizer, weight))


@every_quantizer
@quick
@given(st.integers(0, 1000), st.sampled_from([(1, 1), (1, 50), (6, 40), (3, 2), (11,)]), st.floats(-3, 3))
def test_quantizing_again_changes_nothing_much(
    quantizer: Quantizer, seed: int, shape: tuple[int, ...], exponent: float
) -> None:
    weight = sample(shape, seed) * 10**exponent
    first = quantizer.quantize(weight)
    once = quantizer.dequantize(first, shape)
    second = quantizer.quantize(once)
    for key, array in first.items():
        if np.issubdtype(array.dtype, np.integer):
            assert np.abs(array.astype(int) - second[key].astype(int)).max() <= 1
    assert ((quantizer.dequantize(second, shape) - once).abs() <= bound(quantizer, once)).all()


@every_quantizer
def test_the_weight_is_left_alone_and_may_be_any_tensor(quantizer: Quantizer) -> None:
    weight = sample((6, 8))
    before = weight.clone()
    arrays = quantizer.quantize(weight)
    assert torch.equal(weight, before)
    views = [torch.nn.Parameter(weight), weight.mT.contiguous().mT, weight[:, :], weight.double().float()]
    for view in views:
        again = quantizer.quantize(view)
        assert all(np.array_equal(array, again[key]) for key, array in arrays.items())
    half = weight.bfloat16()
    assert all(
        np.array_equal(array, quantizer.quantize(half.float())[key]) for key, array in quantizer.quantize(half).items()
    )
    back = quantizer.dequantize(arrays, (6, 8))
    back.zero_()
    assert torch.equal(quantizer.dequantize(arrays, (6, 8)), restored(quantizer, weight)), "its own memory"


# Fake quantization


@every_fake
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fake_is_what_the_arrays_stand_for(quantizer: Quantizer, shape: tuple[int, ...]) -> None:
    for exponent in (-30, -7, -2, 0, 3, 37):
        weight = sample(shape) * 10.0**exponent
        assert torch.equal(quantizer.fake(weight), restored(quantizer, weight)), exponent
    assert quantizer.fake(weight.bfloat16()).dtype == torch.float32


@every_fake
@quick
@given(st.integers(0, 1000), st.integers(1, 9), st.integers(1, 300), st.floats(-6, 6))
def test_fake_of_any_matrix(quantizer: Quantizer, seed: int, rows: int, columns: int, exponent: float) -> None:
    weight = sample((rows, columns), seed) * 10**exponent
    assert torch.equal(quantizer.fake(weight), restored(quantizer, weight))


@every_fake
def test_fake_hands_its_rounding_counts_of_steps_and_a_gradient(quantizer: Quantizer) -> None:
    weight = sample((4, 30)).requires_grad_()
    assert (quantizer.fake(weight, lambda y: y) - weight).abs().max() < weight.abs().max(), "nothing is rounded"
    seen = quantizer.fake(weight, lambda y: 2 * y)
    (gradient,) = torch.autograd.grad(seen.sum(), weight)
    torch.testing.assert_close(gradient, torch.full_like(gradient, 2.0), rtol=2e-3, atol=0)  # a step may be rounded


def test_a_quantizer_without_fake_says_so() -> None:
    with pytest.raises(UserError, match="Float16 cannot be taken into training; choose Rows"):
        Float16().fake(torch.ones(2, 2))


@quick
@given(st.integers(0, 1000), st.integers(1, 400), st.sampled_from([0.5, 0.7, 0.99, 0.999, 0.9999984, 1.0]))
def test_quantiles_are_those_of_torch(seed: int, columns: int, fraction: float) -> None:
    rows = sample((3, columns), seed).abs()
    torch.testing.assert_close(_quantile(rows, fraction), torch.quantile(rows, fraction, dim=1), rtol=1e-6, atol=1e-9)


def test_halves_are_those_of_torch() -> None:
    halves = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).float()  # all that are finite, from zero on
    assert torch.equal(_half(halves), halves)
    between = torch.cat([(halves[1:] + halves[:-1]) / 2, torch.logspace(-8, 4.8, 20_000)])
    for values in (between, torch.nextafter(between, torch.tensor(0.0)), torch.nextafter(between, torch.tensor(1e9))):
        assert torch.equal(_half(values), values.half().float())


# Rows by hand


def test_rows_by_hand() -> None:
    weight = torch.tensor([[3.0, -1.0, 0.49], [0.0, 6.0, -7.0]])
    arrays = Rows(bits=3, percentile=1.0).quantize(weight)  # integers from -3 to 3
    assert arrays["steps"].tolist() == pytest.approx([1.0, 7 / 3], rel=1e-3)
    assert arrays["integers"].tolist() == [[3, -1, 0], [0, 3, -3]]
    back = Rows(bits=3).dequantize(arrays, (2, 3))
    assert back[0].tolist() == [3.0, -1.0, 0.0]


def test_rows_round_half_to_even() -> None:
    weight = torch.tensor([[127.0, 0.5, 1.5, -2.5]])
    assert Rows(percentile=1.0).quantize(weight)["integers"].tolist() == [[127, 0, 2, -2]]


def test_rows_clip_at_the_percentile() -> None:
    weight = torch.arange(101.0).reshape(1, 101)
    arrays = Rows(percentile=0.5).quantize(weight)
    assert arrays["steps"][0] == np.float16(50 / 127)
    assert arrays["integers"][0, 50] == 127
    assert arrays["integers"][0, 100] == 127
    assert arrays["integers"][0, 25] in (63, 64)


def test_rows_clip_also_where_the_floor_sets_the_step() -> None:
    weight = torch.tensor([[0.01, 0.02, 0.03, 0.04, 0.05]])  # in steps of 1/127: 1.27, 2.54, 3.81, 5.08, 6.35
    assert Rows(percentile=0.5, floor="absolute").quantize(weight)["integers"].tolist() == [[1, 3, 4, 4, 4]]


@pytest.mark.parametrize("magnitude", [0.0, 1e-38, 1e-9, 1.0])
def test_no_step_is_zero(magnitude: float) -> None:
    steps = Rows().quantize(torch.tensor([[1.0, -1.0], [0.0, 0.0]]) * magnitude)["steps"]
    assert (steps >= np.float16(2**-20)).all()
    assert magnitude == 1.0 or (steps == np.float16(2**-20)).all()


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("floor", ["relative", "absolute"])
def test_rows_use_their_bits_and_no_more(bits: int, floor: str) -> None:
    largest = 2 ** (bits - 1) - 1
    integers = Rows(bits=bits, percentile=1.0).but(floor=floor).quantize(10 * sample((4, 500)))["integers"]
    assert integers.max() == largest or integers.min() == -largest
    assert np.abs(integers.astype(int)).max() == largest


def test_more_bits_err_less() -> None:
    weight = sample((16, 200))
    errors = [(restored(Rows(bits=bits), weight) - weight).norm().item() for bits in range(2, 9)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.01 * weight.norm()
    assert errors[3] / errors[4] == pytest.approx(2.0, rel=0.1), "half the step, half the error"


def test_steps_may_keep_full_precision() -> None:
    weight = torch.tensor([[3.1, -1.0, 0.49]])
    arrays = Rows(bits=6, percentile=1.0, steps="float32").quantize(weight)
    assert arrays["steps"].dtype == np.float32
    assert arrays["steps"][0] == np.float32(3.1) / np.float32(31)
    assert arrays["integers"].tolist() == [[31, -10, 5]]


def test_the_relative_floor_bounds_the_smallest_step() -> None:
    weight = torch.tensor([[127.0, 1.0], [1e-6, 1e-7]])
    steps = Rows(percentile=1.0).quantize(weight)["steps"]
    assert steps[0] == 1.0
    assert steps[1] == 1 / 1024


def test_a_model_of_small_weights_survives_the_relative_floor_alone() -> None:
    model = build(GPT(vocabulary=64, width=64, depth=1, skips=None), seed=0)
    weights = [weight.detach() for weight in model.parameters() if weight.ndim == 2 and weight.unique().numel() > 2]
    assert len(weights) >= 4
    for weight in weights:
        small = weight * (1e-3 / weight.abs().max())
        absolute, relative = restored(Rows(floor="absolute"), small), restored(Rows(), small)
        assert not absolute.any(), "the scripts' floor leaves nothing"
        assert (relative - small).norm() < 0.02 * small.norm()
        assert (restored(Rows(), weight) - weight).norm() < 0.02 * weight.norm()


# The public script


@dataclass(frozen=True)
class Golden:
    """Matrices and what the script made of them."""

    inputs: dict[str, Tensor]
    results: dict[str, Tensor]


@pytest.fixture(scope="module")
def golden(parity: Path) -> Golden:
    folder = parity / "components" / "quantisation"
    return Golden(load_file(folder / "matrices.safetensors"), load_file(folder / "row_quantisers.safetensors"))


MATRICES = ["gauss", "heavy_tailed", "large_with_zero_row", "low_rank_like_trained", "outliers", "tiny_rows"]


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize(("prefix", "bits"), [("base_int8", 8), ("s001_int8", 8), ("s001_int6", 6)])
def test_rows_agree_with_the_public_scripts(golden: Golden, name: str, prefix: str, bits: int) -> None:
    quantizer = Rows(bits=bits, floor="absolute")
    weight = golden.inputs[name]
    arrays = quantizer.quantize(weight)
    expected, steps = golden.results[f"{prefix}.{name}.q"], golden.results[f"{prefix}.{name}.scale"]
    assert arrays["integers"].tobytes() == expected.numpy().tobytes()
    assert arrays["steps"].tobytes() == steps.numpy().tobytes()
    back = quantizer.dequantize(arrays, tuple(weight.shape))
    assert torch.equal(back, expected * steps.float()[:, None])
    if f"{prefix}.{name}.dequantised" in golden.results:
        assert torch.equal(back, golden.results[f"{prefix}.{name}.dequantised"])


@pytest.mark.parametrize(("prefix", "bits"), [("base_int8", 8), ("s001_int6", 6)])
def test_a_vector_agrees_but_for_its_step_in_half_precision(golden: Golden, prefix: str, bits: int) -> None:
    """The scripts keep the one step of a vector in float32; here it is rounded like every other step."""
    arrays = Rows(bits=bits, floor="absolute").quantize(golden.inputs["vector"])
    assert arrays["integers"].tobytes() == golden.results[f"{prefix}.vector.q"].numpy().tobytes()
    assert arrays["steps"].tobytes() == golden.results[f"{prefix}.vector.scale"].half().numpy().tobytes()


def test_the_vector_of_the_scripts_agrees_with_full_steps(golden: Golden) -> None:
    arrays = Rows(floor="absolute", steps="float32").quantize(golden.inputs["vector"])
    assert arrays["integers"].tobytes() == golden.results["base_int8.vector.q"].numpy().tobytes()
    assert arrays["steps"].tobytes() == golden.results["base_int8.vector.scale"].numpy().tobytes()


@pytest.mark.parametrize("name", ["outliers", "tiny_rows"])
def test_the_weights_seen_in_training_agree_with_1559(golden: Golden, name: str) -> None:
    seen = Rows(floor="absolute").fake(golden.inputs[name])
    assert torch.equal(seen, golden.results[f"s001_qat.{name}.fake_quantised_8bit"])


@pytest.mark.parametrize("name", ["large_with_zero_row", "outliers", "tiny_rows"])
def test_the_weights_seen_in_training_agree_with_649(golden: Golden, name: str) -> None:
    seen = Rows(bits=6, percentile=1.0, floor="absolute", steps="float32").fake(golden.inputs[name])
    assert torch.equal(seen, golden.results[f"s002_late_qat.{name}.effective_weight_transposed"].mT)


def test_the_relative_floor_errs_less_where_the_scripts_floor_bites(golden: Golden) -> None:
    for name in MATRICES:
        weight = golden.inputs[name]
        theirs = (restored(Rows(floor="absolute"), weight) - weight).norm()
        ours = (restored(Rows(), weight) - weight).norm()
        assert ours <= theirs * 1.01, name
    tiny = golden.inputs["tiny_rows"]
    assert (restored(Rows(), tiny) - tiny).norm() < 0.1 * (restored(Rows(floor="absolute"), tiny) - tiny).norm()
