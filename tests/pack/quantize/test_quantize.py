"""Quantizers: the public script's integers, and what every quantizer must keep."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import matches, tensors
from samples import quick, restored, sample
from torch import Tensor

from caddie.config import variants
from caddie.errors import UserError
from caddie.model import GPT, build
from caddie.pack.quantize import (
    Arrays,
    BestPercentile,
    Binary,
    Calibration,
    Float8,
    Float16,
    Float32,
    Gptq,
    LowRank,
    Percentile,
    Protected,
    Quantizer,
    Rotated,
    Rows,
    SigmaClip,
    Ternary,
    Trellis,
    Waterfilling,
    WaterfillingSteps,
)
from caddie.pack.quantize.rotated import rotated
from caddie.pack.quantize.rows import _pack, _unpack, half
from caddie.pack.quantize.scales import _quantile

few = settings(quick, max_examples=12)

SETTINGS: list[Quantizer] = [
    *(cls() for cls in variants(Quantizer).values() if cls.__module__.startswith("caddie.")),
    Rows(bits=2),
    Rows(bits=4),
    Rows(bits=6, scale=Percentile(fraction=1.0)),
    Rows(scale=Percentile(floor="absolute")),
    Rows(bits=6, scale=Percentile(floor="absolute")),
    Rows(bits=6, scale=Percentile(fraction=1.0, floor="absolute"), steps="float32"),
    Rows(bits=4, steps="float32"),
    Rows(bits=6, packed=True),
    Rows(bits=6, scale=BestPercentile()),
    Rows(bits=6, scale=BestPercentile(floor="absolute")),
    Rows(bits=6, scale=SigmaClip()),
    Rows(bits=7, scale=SigmaClip(k=14.0, importance=0.2), steps="float32"),
    Gptq(of=Rows(bits=5, scale=BestPercentile())),
    Rotated(of=Gptq(of=Rows(bits=4, packed=True))),
    LowRank(of=Rows(bits=3), rank=2, form="symmetric"),
    LowRank(of=Rotated()),
    Protected(of=Gptq(of=Rows(bits=4)), start=2, columns=3, bits=6),
    Ternary(group=5, packed=True),
    Ternary(group=8, keep_mean=True),
    Binary(group=5),
    Waterfilling(step=0.3, damping=0.5),
    LowRank(of=Waterfilling(step=0.2), rank=2),
    Trellis(step=0.1, states=32),
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
every_symmetric = pytest.mark.parametrize("quantizer", [q for q in SETTINGS if not isinstance(q, LowRank)], ids=repr)
every_fake = pytest.mark.parametrize("quantizer", [q for q in SETTINGS if can_be_faked(q)], ids=repr)

SHAPES = [(8, 32), (1, 32), (32, 1), (1, 1), (1,), (17,), (3, 4, 5), (0, 4), (0,), ()]


def through_bytes(quantizer: Quantizer, weight: Tensor) -> Arrays:
    """The arrays as an artifact gives them back: from bytes and the layout alone."""
    arrays = quantizer.quantize(weight)
    found = {}
    for key, (dtype, shape) in quantizer.layout(tuple(weight.shape)).items():
        data = arrays[key].tobytes()
        found[key] = np.frombuffer(data, dtype, math.prod(shape)).reshape(shape)
    return found


def bound(quantizer: Quantizer, weight: Tensor) -> Tensor:
    """The largest error that a quantizer may make at each element, where nothing is known of the inputs."""
    weight = weight.float()
    if isinstance(quantizer, Float32):
        return torch.zeros_like(weight)
    if isinstance(quantizer, Float16):
        return (weight.abs() * 2**-11).clamp_min(2**-25) + (weight.abs() - 65_504).clamp_min(0)
    if isinstance(quantizer, Float8):
        return (weight.abs() * 2**-4).clamp_min(2**-10) + (weight.abs() - 448).clamp_min(0)
    if isinstance(quantizer, Gptq):
        return bound(quantizer.of, weight)
    if isinstance(quantizer, Protected):
        coarse, fine = (bound(rows, weight) for rows in (quantizer.of.of, quantizer.of.of.but(bits=quantizer.bits)))
        columns = torch.arange(weight.shape[-1] if weight.ndim else 1).reshape(weight.shape[-1:])
        return torch.where((columns >= quantizer.start) & (columns < quantizer.start + quantizer.columns), fine, coarse)
    if isinstance(quantizer, Rotated):
        turned = bound(quantizer.of, rotated(weight)).double() + rotated(weight).double().abs() * 1e-5
        return (turned.norm(dim=-1, keepdim=True) if weight.ndim else turned).expand(weight.shape).float()
    if isinstance(quantizer, LowRank):
        within = bound(quantizer.of, weight)
        return within + 1.5 * quantizer.rank * float(within.double().norm())  # A and B err by a third at most
    if isinstance(quantizer, WaterfillingSteps):
        return _bound_of_waterfilling(quantizer, weight)
    steps = torch.from_numpy(quantizer.quantize(weight)["steps"].astype(np.float32))
    if isinstance(quantizer, Ternary | Binary):
        return _bound_in_groups(quantizer, weight, steps)
    assert isinstance(quantizer, Rows), "a new variant needs its bound here"
    step = steps.reshape((*weight.shape[:-1], 1) if weight.ndim else ()).expand(weight.shape)
    # The public scripts choose the integers by the step before it is rounded to half precision.
    unrounded = isinstance(quantizer.scale, Percentile) and quantizer.scale.floor == "absolute"
    halves = 0.5 + quantizer.largest * 2**-11 * unrounded
    return step * halves * (1 + 1e-4) + (weight.abs() - step * quantizer.largest).clamp_min(0)


def _bound_of_waterfilling(quantizer: WaterfillingSteps, weight: Tensor) -> Tensor:
    arrays = quantizer.quantize(weight)
    rows, columns = (2.0 ** (torch.from_numpy(arrays[f"{of}_steps"]) / 4) for of in ("row", "column"))
    steps = (rows[:, None] * columns * float(arrays["step"][0])).reshape(weight.shape)
    chosen = 1.0 if isinstance(quantizer, Trellis) else 0.5  # a branch has every second integer
    within = steps * chosen * (1 + 1e-4) + (weight.abs() - steps * 32_767).clamp_min(0)
    vanished = torch.from_numpy(arrays["integers"]) == 0
    return torch.where(vanished, weight.abs() + 0.25 * steps * isinstance(quantizer, Trellis), within)


def _bound_in_groups(quantizer: Ternary | Binary, weight: Tensor, steps: Tensor) -> Tensor:
    if not weight.numel():
        return weight
    rows = weight.reshape(-1, weight.shape[-1] if weight.ndim else 1)
    step = steps.reshape(len(rows), -1).repeat_interleave(quantizer.group, 1)[:, : rows.shape[1]].reshape(weight.shape)
    if isinstance(quantizer, Binary):
        return torch.maximum((weight.abs() - step).abs(), step)
    kept = restored(quantizer, weight).abs() if quantizer.keep_mean else 0
    return (step * 0.5 * (1 + 1e-6) + (weight.abs() - step).clamp_min(0) + kept).clamp_min(2**-25)


# Contracts of every quantizer


@every_quantizer
def test_layout_and_shape_are_kept_and_the_error_is_bounded(quantizer: Quantizer) -> None:
    for shape in SHAPES:
        weight = sample(*shape)
        arrays = quantizer.quantize(weight)
        assert {key: (array.dtype, array.shape) for key, array in arrays.items()} == quantizer.layout(shape), shape
        assert list(arrays) == list(quantizer.layout(shape)), "sections are written in this order"
        assert all(array.dtype.byteorder in "<|=" for array in arrays.values())
        back = restored(quantizer, weight)
        assert back.shape == weight.shape
        assert back.dtype == torch.float32
        assert torch.equal(quantizer.dequantize(through_bytes(quantizer, weight), shape), back)
        assert ((back - weight).abs() <= bound(quantizer, weight)).all(), shape


@pytest.mark.long
@every_quantizer
@few
@given(
    st.integers(0, 1000),
    st.sampled_from([(1, 7), (5, 3), (4, 33), (2, 1), (9,)]),
    st.floats(-6, 6),
    st.sampled_from(["plain", "outlier", "zero row", "constant", "rows of many sizes"]),
)
def test_the_error_is_bounded_for_any_magnitude(
    quantizer: Quantizer, seed: int, shape: tuple[int, ...], exponent: float, kind: str
) -> None:
    weight = sample(*shape, seed=seed) * 10**exponent
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
def test_no_magnitude_gives_what_is_not_finite(quantizer: Quantizer) -> None:
    for magnitude in (1e-38, 1e-12, 1e12, 1e30, 3e38):
        weight = torch.tensor([[1.0, -0.5], [0.25, 0.0]]) * magnitude
        back = restored(quantizer, weight)
        assert torch.isfinite(back).all(), magnitude
        assert (back.sign() * weight.sign() >= 0).all(), f"a sign turns at {magnitude}"


@every_symmetric
def test_signs_do_not_matter(quantizer: Quantizer) -> None:
    weight = sample(6, 40)
    assert torch.equal(restored(quantizer, -weight), -restored(quantizer, weight))


@pytest.mark.parametrize(
    "quantizer", [q for q in SETTINGS if isinstance(q, Rows) and isinstance(q.scale, Percentile)], ids=repr
)
@few
@given(st.integers(0, 1000), st.sampled_from([(1, 1), (1, 50), (6, 40), (3, 2), (11,)]), st.floats(-3, 3))
def test_quantizing_again_changes_nothing_much(
    quantizer: Rows, seed: int, shape: tuple[int, ...], exponent: float
) -> None:
    quantizer = quantizer.but(packed=False)
    first = quantizer.quantize(sample(*shape, seed=seed) * 10**exponent)
    second = quantizer.quantize(quantizer.dequantize(first, shape))
    assert np.abs(first["integers"].astype(int) - second["integers"].astype(int)).max() <= 1


@every_quantizer
def test_what_is_not_finite_is_refused(quantizer: Quantizer) -> None:
    for wrong in (torch.nan, torch.inf, -torch.inf):
        weight = sample(4, 8)
        weight[1, 2] = wrong
        with pytest.raises(UserError, match="a weight that is not finite cannot be quantized"):
            quantizer.quantize(weight)


def inputs_of(columns: int) -> Tensor:
    """Second moments of correlated inputs, one of which is always 0."""
    x = sample(4 * columns, columns, seed=1) @ (torch.eye(columns) + 0.3 * sample(columns, columns, seed=2))
    x[:, 3] = 0
    return x.T @ x / len(x)


@every_quantizer
def test_calibration_is_used_where_it_is_said_to_be(quantizer: Quantizer) -> None:
    weight = sample(6, 40)
    plain = quantizer.quantize(weight)
    known = Calibration(inputs=inputs_of(40), rows=torch.logspace(-3, 0, 6), columns=inputs_of(40))
    told = quantizer.quantize(weight, known)
    assert {key: (array.dtype, array.shape) for key, array in told.items()} == quantizer.layout((6, 40))
    assert quantizer.calibrated == any(not np.array_equal(array, told[key]) for key, array in plain.items())
    assert torch.isfinite(quantizer.dequantize(told, (6, 40))).all()


@every_quantizer
def test_the_reader_reads(quantizer: Quantizer) -> None:
    weight = sample(6, 40)
    arrays = quantizer.quantize(weight)
    dequantizer = Quantizer.from_json(quantizer.dequantizer.to_json())
    assert dequantizer.layout((6, 40)) == quantizer.layout((6, 40))
    assert torch.equal(dequantizer.dequantize(arrays, (6, 40)), quantizer.dequantize(arrays, (6, 40)))
    assert dequantizer.dequantizer == dequantizer
    assert dequantizer.quantize(weight).keys() == arrays.keys()


@every_quantizer
def test_the_weight_is_left_alone_and_may_be_any_tensor(quantizer: Quantizer) -> None:
    weight = sample(6, 8)
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
def test_fake_is_what_the_arrays_stand_for(quantizer: Quantizer) -> None:
    for shape in SHAPES:
        for exponent in (-30, -7, -2, 0, 3, 37):
            weight = sample(*shape) * 10.0**exponent
            assert torch.equal(quantizer.fake(weight), restored(quantizer, weight)), (shape, exponent)
        assert quantizer.fake(weight.bfloat16()).dtype == torch.float32


@pytest.mark.long
@every_fake
@few
@given(st.integers(0, 1000), st.integers(1, 9), st.integers(1, 300), st.floats(-6, 6))
def test_fake_of_any_matrix(quantizer: Quantizer, seed: int, rows: int, columns: int, exponent: float) -> None:
    weight = sample(rows, columns, seed=seed) * 10**exponent
    assert torch.equal(quantizer.fake(weight), restored(quantizer, weight))


@every_fake
def test_fake_hands_its_rounding_counts_of_steps_and_a_gradient(quantizer: Quantizer) -> None:
    weight = sample(4, 30).requires_grad_()
    assert (quantizer.fake(weight, lambda y: y) - weight).abs().max() < weight.abs().max(), "nothing is rounded"
    seen = quantizer.fake(weight, lambda y: 2 * y)
    (gradient,) = torch.autograd.grad(seen.sum(), weight)
    if isinstance(quantizer, Ternary) and quantizer.keep_mean:  # then a 1 stands for more than a step
        assert (gradient >= 2).all()
        return
    torch.testing.assert_close(gradient, torch.full_like(gradient, 2.0), rtol=2e-3, atol=0)  # a step may be rounded


def test_what_is_turned_is_not_turned_again() -> None:
    with pytest.raises(UserError, match="Rotated cannot be of Rotated; choose Rows or Gptq"):
        Rotated(of=Rotated())
    with pytest.raises(UserError, match="LowRank cannot be of LowRank; raise its rank"):
        LowRank(of=LowRank())


def test_a_quantizer_without_fake_says_so() -> None:
    with pytest.raises(UserError, match="Float16 cannot be taken into training; choose Rows"):
        Float16().fake(torch.ones(2, 2))


@few
@given(st.integers(0, 1000), st.integers(1, 400), st.sampled_from([0.5, 0.7, 0.99, 0.999, 0.9999984, 1.0]))
def test_quantiles_are_those_of_torch(seed: int, columns: int, fraction: float) -> None:
    rows = sample(3, columns, seed=seed).abs()
    torch.testing.assert_close(_quantile(rows, fraction), torch.quantile(rows, fraction, dim=1), rtol=1e-6, atol=1e-9)


def test_halves_are_those_of_torch() -> None:
    halves = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).float()  # all that are finite, from zero on
    assert torch.equal(half(halves), halves)
    between = torch.cat([(halves[1:] + halves[:-1]) / 2, torch.logspace(-8, 4.8, 20_000)])
    for values in (between, torch.nextafter(between, torch.tensor(0.0)), torch.nextafter(between, torch.tensor(1e9))):
        assert torch.equal(half(values), values.half().float())


# Rows by hand


def test_rows_by_hand() -> None:
    weight = torch.tensor([[3.0, -1.0, 0.49], [0.0, 6.0, -7.0]])
    arrays = Rows(bits=3, scale=Percentile(fraction=1.0)).quantize(weight)  # integers from -3 to 3
    assert arrays["steps"].tolist() == pytest.approx([1.0, 7 / 3], rel=1e-3)
    assert arrays["integers"].tolist() == [[3, -1, 0], [0, 3, -3]]
    back = Rows(bits=3).dequantize(arrays, (2, 3))
    assert back[0].tolist() == [3.0, -1.0, 0.0]


def test_rows_round_half_to_even() -> None:
    weight = torch.tensor([[127.0, 0.5, 1.5, -2.5]])
    assert Rows(scale=Percentile(fraction=1.0)).quantize(weight)["integers"].tolist() == [[127, 0, 2, -2]]


def test_rows_clip_at_the_percentile() -> None:
    weight = torch.arange(101.0).reshape(1, 101)
    arrays = Rows(scale=Percentile(fraction=0.5)).quantize(weight)
    assert arrays["steps"][0] == np.float16(50 / 127)
    assert arrays["integers"][0, 50] == 127
    assert arrays["integers"][0, 100] == 127
    assert arrays["integers"][0, 25] in (63, 64)


def test_rows_clip_also_where_the_floor_sets_the_step() -> None:
    weight = torch.tensor([[0.01, 0.02, 0.03, 0.04, 0.05]])  # in steps of 1/127: 1.27, 2.54, 3.81, 5.08, 6.35
    assert Rows(scale=Percentile(fraction=0.5, floor="absolute")).quantize(weight)["integers"].tolist() == [
        [1, 3, 4, 4, 4]
    ]


@pytest.mark.parametrize("magnitude", [0.0, 1e-38, 1e-9, 1.0])
def test_no_step_is_zero(magnitude: float) -> None:
    steps = Rows().quantize(torch.tensor([[1.0, -1.0], [0.0, 0.0]]) * magnitude)["steps"]
    assert (steps >= np.float16(2**-20)).all()
    assert magnitude == 1.0 or (steps == np.float16(2**-20)).all()


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("floor", ["relative", "absolute"])
def test_rows_use_their_bits_and_no_more(bits: int, floor: str) -> None:
    largest = 2 ** (bits - 1) - 1
    integers = (
        Rows(bits=bits, scale=Percentile(fraction=1.0))
        .but({"scale.floor": floor})
        .quantize(10 * sample(4, 500))["integers"]
    )
    assert integers.max() == largest or integers.min() == -largest
    assert np.abs(integers.astype(int)).max() == largest


def test_more_bits_err_less() -> None:
    weight = sample(16, 200)
    errors = [(restored(Rows(bits=bits), weight) - weight).norm().item() for bits in range(2, 9)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.01 * weight.norm()
    assert errors[3] / errors[4] == pytest.approx(2.0, rel=0.1), "half the step, half the error"


def test_steps_may_keep_full_precision() -> None:
    weight = torch.tensor([[3.1, -1.0, 0.49]])
    arrays = Rows(bits=6, scale=Percentile(fraction=1.0), steps="float32").quantize(weight)
    assert arrays["steps"].dtype == np.float32
    assert arrays["steps"][0] == np.float32(3.1) / np.float32(31)
    assert arrays["integers"].tolist() == [[31, -10, 5]]


def test_the_relative_floor_bounds_the_smallest_step() -> None:
    weight = torch.tensor([[127.0, 1.0], [1e-6, 1e-7]])
    steps = Rows(scale=Percentile(fraction=1.0)).quantize(weight)["steps"]
    assert steps[0] == 1.0
    assert steps[1] == 1 / 1024


def test_a_model_of_small_weights_survives_the_relative_floor_alone() -> None:
    model = build(GPT(vocabulary=64, width=64, depth=1, skips=None), seed=0)
    weights = [weight.detach() for weight in model.parameters() if weight.ndim == 2 and weight.unique().numel() > 2]
    assert len(weights) >= 4
    for weight in weights:
        small = weight * (1e-3 / weight.abs().max())
        absolute, relative = restored(Rows(scale=Percentile(floor="absolute")), small), restored(Rows(), small)
        assert not absolute.any(), "the scripts' floor leaves nothing"
        assert (relative - small).norm() < 0.02 * small.norm()
        assert (restored(Rows(), weight) - weight).norm() < 0.02 * weight.norm()


@few
@given(st.integers(2, 8), st.integers(0, 50), st.integers(0, 1000))
def test_what_is_packed_takes_its_bits_and_comes_back(bits: int, count: int, seed: int) -> None:
    largest = 2 ** (bits - 1) - 1
    integers = np.random.default_rng(seed).integers(-largest, largest + 1, count)
    packed = _pack(integers, bits)
    assert np.array_equal(_unpack(packed, bits, count), integers)
    assert count * bits <= 8 * len(packed) < count * bits + 8 * bits


# Other scales by hand


def test_of_five_percentiles_the_one_that_errs_least_is_taken() -> None:
    weight = 0.1 * sample(4, 5000)
    weight[:, 0] = 1.0
    kept = Rows(bits=6, scale=BestPercentile())
    one_each = [Rows(bits=6, scale=BestPercentile(fractions=(f,))) for f in BestPercentile().fractions]
    errors = [float((restored(q, weight) - weight).square().mean()) for q in one_each]
    assert len(set(errors)) > 2
    assert torch.equal(restored(kept, weight), restored(one_each[int(np.argmin(errors))], weight))
    assert min(errors) < errors[-1], "the largest are clipped"


def test_sigma_clip_by_hand() -> None:
    weight = torch.tensor([[1.0, -1.0, 1.0, -1.0], [0.0, 0.0, 0.0, 2.0], [3.0, 3.0, 3.0, 3.0]])
    arrays = Rows(bits=3, scale=SigmaClip(k=1.5)).quantize(weight)  # up to 3
    deviations = [math.sqrt(4 / 3), 1.0]
    assert arrays["steps"].tolist() == pytest.approx([*(d / 2 for d in deviations), 1.0], rel=1e-3)
    assert arrays["integers"].tolist() == [[2, -2, 2, -2], [0, 0, 0, 3], [3, 3, 3, 3]], "constant rows survive"


def test_rows_that_matter_more_have_wider_clips() -> None:
    weight = torch.tensor([[1.0, -1.0, 3.0, -3.0], [3.0, -3.0, 1.0, -1.0]])
    inputs = torch.diag(torch.tensor([1.0, 1.0, 3.0, 3.0]))  # i = 2.5 and 1.5 over 2
    plain, told = (
        Rows(bits=6, scale=SigmaClip(importance=0.2), steps="float32").quantize(weight, Calibration(inputs=known))
        for known in (None, inputs)
    )
    assert (told["steps"] / plain["steps"]).tolist() == pytest.approx([1 + 0.2 * 0.25, 1 - 0.2 * 0.25])


# The public script


@dataclass(frozen=True)
class Golden:
    """Matrices and what the script made of them."""

    inputs: dict[str, Tensor]
    results: dict[str, Tensor]

    def matrices(self, prefix: str) -> list[str]:
        """Names of the matrices that the set has integers of."""
        found = [match[1] for match in matches(self.results, rf"{prefix}\.(.+)\.q")]
        return [name for name in found if self.inputs[name].ndim == 2]


@pytest.fixture(scope="module")
def golden(parity: Path) -> Golden:
    folder = parity / "components" / "quantisation"
    return Golden(tensors(folder / "matrices"), tensors(folder / "row_quantisers"))


@pytest.mark.parametrize(("prefix", "bits"), [("base_int8", 8), ("s001_int8", 8), ("s001_int6", 6)])
def test_rows_agree_with_the_public_scripts(golden: Golden, prefix: str, bits: int) -> None:
    quantizer = Rows(bits=bits, scale=Percentile(floor="absolute"))
    for name in golden.matrices(prefix):
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
    arrays = Rows(bits=bits, scale=Percentile(floor="absolute")).quantize(golden.inputs["vector"])
    assert arrays["integers"].tobytes() == golden.results[f"{prefix}.vector.q"].numpy().tobytes()
    assert arrays["steps"].tobytes() == golden.results[f"{prefix}.vector.scale"].half().numpy().tobytes()


def test_the_vector_of_the_scripts_agrees_with_full_steps(golden: Golden) -> None:
    arrays = Rows(scale=Percentile(floor="absolute"), steps="float32").quantize(golden.inputs["vector"])
    assert arrays["integers"].tobytes() == golden.results["base_int8.vector.q"].numpy().tobytes()
    assert arrays["steps"].tobytes() == golden.results["base_int8.vector.scale"].numpy().tobytes()


def test_the_best_of_five_percentiles_agrees_with_649(golden: Golden) -> None:
    """Its script takes the largest element of a vector, without a floor, which the relative floor is for them."""
    of_matrices, of_vectors = BestPercentile(floor="absolute"), Percentile(fraction=1.0)
    for name in [*golden.matrices("s002_int6"), "vector"]:
        quantizer = Rows(bits=6, scale=of_vectors if name == "vector" else of_matrices)
        weight = golden.inputs[name]
        arrays = quantizer.quantize(weight)
        assert arrays["integers"].tobytes() == golden.results[f"s002_int6.{name}.q"].numpy().tobytes()
        assert arrays["steps"].tobytes() == golden.results[f"s002_int6.{name}.scale"].numpy().tobytes()
        if f"s002_int6.{name}.dequantised" in golden.results:
            back = quantizer.dequantize(arrays, tuple(weight.shape))
            assert torch.equal(back, golden.results[f"s002_int6.{name}.dequantised"])


def test_six_bits_are_packed_as_in_1559(golden: Golden) -> None:
    for match in matches(golden.results, r"(s001_pack6\.len(\d+))\.values"):
        values, packed = (golden.results[f"{match[1]}.{what}"].numpy() for what in ("values", "packed"))
        integers = values.astype(np.int16) - 32  # one of them is -32, which no row has
        assert _pack(integers, 6).tobytes() == packed.tobytes()
        assert np.array_equal(_unpack(packed, 6, int(match[2])), integers)


def test_packed_rows_agree_with_1559(golden: Golden) -> None:
    for match in matches(golden.results, r"s001_pack6\.(.+)_plus32\.packed"):
        arrays = Rows(bits=6, scale=Percentile(floor="absolute"), packed=True).quantize(golden.inputs[match[1]])
        assert arrays["packed"].tobytes() == golden.results[match[0]].numpy().tobytes()


def test_the_weights_seen_in_training_agree_with_1559(golden: Golden) -> None:
    for match in matches(golden.results, r"s001_qat\.(.+)\.fake_quantised_(\d)bit"):
        seen = Rows(bits=int(match[2]), scale=Percentile(floor="absolute")).fake(golden.inputs[match[1]])
        assert torch.equal(seen, golden.results[match[0]])


def test_the_weights_seen_in_training_agree_with_649(golden: Golden) -> None:
    quantizer = Rows(bits=6, scale=Percentile(fraction=1.0, floor="absolute"), steps="float32")
    for match in matches(golden.results, r"s002_late_qat\.(.+)\.effective_weight_transposed"):
        assert torch.equal(quantizer.fake(golden.inputs[match[1]]), golden.results[match[0]].mT)


def test_the_relative_floor_errs_less_where_the_scripts_floor_bites(golden: Golden) -> None:
    ratios = []
    for name in golden.matrices("base_int8"):
        weight = golden.inputs[name]
        theirs = (restored(Rows(scale=Percentile(floor="absolute")), weight) - weight).norm()
        ours = (restored(Rows(), weight) - weight).norm()
        assert ours <= theirs * 1.01, name
        ratios.append(float(ours / theirs))
    assert min(ratios) < 0.1, "one of the matrices has tiny rows"
