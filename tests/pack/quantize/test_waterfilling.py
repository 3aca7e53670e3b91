"""Waterfilling: what high-rate theory says of it, what it does at the edges, and that it beats GPTQ at equal bytes."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import quick, sample
from torch import Tensor

from caddie.errors import UserError
from caddie.pack.calibrate import predicted_loss
from caddie.pack.quantize import Arrays, Calibration, Gptq, Quantizer, Rows, SigmaClip, Waterfilling
from caddie.pack.quantize.waterfilling import _steps


def columns_of(width: int, seed: int = 0) -> Tensor:
    """C of correlated inputs of unequal size; its mean diagonal is 1."""
    mixed = torch.eye(width) + sample(width, width, seed=seed) / width**0.5
    x = sample(8 * width, width, seed=seed + 1) @ mixed * torch.logspace(-1, 0, width)
    moments = x.T @ x
    return moments * (width / moments.trace())


def known(rows: int, width: int, seed: int = 0) -> Calibration:
    """R and C, both uneven."""
    moments = columns_of(width, seed)
    return Calibration(inputs=moments, rows=torch.logspace(-3, 0, rows), columns=moments)


def loss(quantizer: Quantizer, weight: Tensor, calibration: Calibration) -> float:
    """1/2 tr(R E C E^T)."""
    shape = tuple(weight.shape)
    return predicted_loss(calibration, weight, quantizer.dequantize(quantizer.quantize(weight, calibration), shape))


def entropy(arrays: Arrays) -> float:
    """Bits per integer of the whole matrix, columns coded apart: what a coder that knows their scales comes to."""
    bits = 0.0
    for column in arrays["integers"].T:
        counts = np.unique(column, return_counts=True)[1]
        bits -= float((counts * np.log2(counts / counts.sum())).sum())
    return bits / arrays["integers"].size


# Theory


@pytest.mark.parametrize(("rows", "width"), [(64, 48), (200, 16), (16, 150)])
def test_at_small_steps_each_weight_costs_a_24th_of_the_squared_step(rows: int, width: int) -> None:
    """Errors are uniform in their cells: a 12th of the squared step, half of which times R_i D_j they cost.

    D_j is what is left of C_jj where the columns after j are known: one over the first entry of the inverse of C from j
    on. Steps stand in whole quarters of an octave, so that what each weight costs is the same within 2^(1/2).
    """
    weight, calibration = sample(rows, width), known(rows, width)
    importance, moments = calibration.rows, calibration.columns
    assert importance is not None
    assert moments is not None
    left = torch.stack([1 / torch.linalg.inv(moments[j:, j:].double())[0, 0] for j in range(width)])
    for step in (1e-2, 1e-3):
        quantizer = Waterfilling(step=step, damping=0.0)
        arrays = quantizer.quantize(weight, calibration)
        steps = _steps(*(torch.from_numpy(arrays[f"{of}_steps"]).int() for of in ("row", "column")), arrays["step"][0])
        costs = steps.double() ** 2 * importance[:, None] * left / 24
        assert loss(quantizer, weight, calibration) == pytest.approx(float(costs.sum()), rel=0.05)
        assert ((costs / (step**2 / 24)).log2().abs() < 0.501).all()


def test_halving_the_step_takes_three_quarters_of_the_loss_for_a_bit_per_weight() -> None:
    weight = sample(2000, 12)
    calibration = Calibration(rows=torch.ones(2000), columns=columns_of(12))
    steps = [0.4 / 2**number for number in range(4)]
    losses = [loss(Waterfilling(step=step), weight, calibration) for step in steps]
    bits = [entropy(Waterfilling(step=step).quantize(weight, calibration)) for step in steps]
    for before, after in pairwise(losses):
        assert after == pytest.approx(before / 4, rel=0.05)
    for before, after in pairwise(bits):
        assert after - before == pytest.approx(1.0, abs=0.1)
    assert [Waterfilling(step=step).coarser(0.5) for step in steps[:-1]] == [Waterfilling(step=x) for x in steps[1:]]


def test_a_pivot_of_two_inputs_by_hand() -> None:
    """C = [[1, 3/4], [3/4, 1]] is U D U^T with D = (7/16, 1) and U = [[1, 3/4], [0, 1]].

    The first column is rounded first. Step 0.5 for rows of importance 1 and D_2 = 1, and 0.5 / sqrt(7/16) = 0.756 for
    the first: 2^(-2/4) is 0.707, the nearest size (2^(-1/4) is 0.841). So 1.0 rounds to 0.707; the second column takes
    up 3/4 of what is lost, 0.293: 0.1 + 0.22 = 0.32, more than half a step.
    """
    calibration = Calibration(rows=torch.ones(1), columns=torch.tensor([[1.0, 0.75], [0.75, 1.0]]))
    arrays = Waterfilling(step=0.5, damping=0.0).quantize(torch.tensor([[1.0, 0.1]]), calibration)
    assert arrays["row_steps"].tolist() == [-4]
    assert arrays["column_steps"].tolist() == [2, 0]
    assert arrays["integers"].tolist() == [[1, 1]]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("k", "share"), [(30.0, 0.92), (120.0, 0.8)])
def test_it_loses_less_than_gptq_at_equal_entropy(seed: int, k: float, share: float) -> None:
    """Equal steps cost the mean of the pivots at a rate where these cost their geometric mean."""
    weight, moments = sample(800, 24, seed=seed), columns_of(24, seed)
    calibration = Calibration(moments, torch.ones(800), moments)
    gptq = Gptq(of=Rows(bits=8, scale=SigmaClip(k=k), steps="float32"))
    bits, theirs = entropy(gptq.quantize(weight, calibration)), loss(gptq, weight, calibration)
    low, high = 1e-3, 10.0
    for _ in range(10):
        middle = math.sqrt(low * high)
        finer = entropy(Waterfilling(step=middle).quantize(weight, calibration)) > bits
        low, high = (middle, high) if finer else (low, middle)
    assert loss(Waterfilling(step=high), weight, calibration) < share * theirs


# Steps


def test_steps_are_products_of_what_is_stored_to_the_bit() -> None:
    weight, calibration = sample(40, 70), known(40, 70)
    quantizer = Waterfilling(step=3e-3)
    arrays = quantizer.quantize(weight, calibration)
    octaves = arrays["row_steps"].astype(int)[:, None] + arrays["column_steps"].astype(int)
    quarters = np.array([1.0, 2**0.25, 2**0.5, 2**0.75], np.float32)
    steps = np.ldexp(quarters[octaves % 4], octaves // 4).astype(np.float32) * arrays["step"]
    expected = arrays["integers"].astype(np.float32) * steps
    assert quantizer.dequantize(arrays, (40, 70)).numpy().tobytes() == expected.tobytes()
    again = Waterfilling(step=3e-3).quantize(weight.clone(), calibration)
    assert {key: array.tobytes() for key, array in again.items()} == {key: a.tobytes() for key, a in arrays.items()}


def test_the_table_of_steps_is_exact_from_end_to_end() -> None:
    octaves = torch.arange(-127, 128, dtype=torch.int32)
    found = _steps(octaves, octaves, 1.0).double()
    ideal = 2.0 ** ((octaves[:, None] + octaves[None]).double() / 4)
    assert bool(torch.isfinite(found).all())
    assert (found / ideal - 1).abs().max() < 2**-24
    whole = (octaves[:, None] + octaves[None]) % 4 == 0
    assert torch.equal(found[whole], ideal[whole])


def test_autocast_does_not_reach_it() -> None:
    weight, calibration = sample(20, 70), known(20, 70)
    expected = Waterfilling().quantize(weight, calibration)
    with torch.autocast("cpu", torch.bfloat16):
        found = Waterfilling().quantize(weight, calibration)
    assert all(np.array_equal(array, found[key]) for key, array in expected.items())


def test_the_reader_needs_no_settings() -> None:
    odd = Waterfilling(step=0.7, damping=3.0)
    arrays = odd.quantize(sample(6, 9), known(6, 9))
    assert odd.dequantizer == Waterfilling()
    assert torch.equal(Waterfilling().dequantize(arrays, (6, 9)), odd.dequantize(arrays, (6, 9)))


# Edges


def test_rows_that_are_never_used_vanish() -> None:
    importance = torch.ones(6)
    importance[[1, 4]] = 0
    arrays = Waterfilling().quantize(sample(6, 20), Calibration(rows=importance, columns=columns_of(20)))
    assert arrays["integers"].any(1).tolist() == [True, False, True, True, False, True]
    assert set(arrays["row_steps"][[1, 4]]) <= set(arrays["row_steps"][[0, 2, 3, 5]]), "they send no step of their own"
    gone = Waterfilling().quantize(sample(6, 20), Calibration(rows=torch.zeros(6), columns=columns_of(20)))
    assert not gone["integers"].any()


def test_a_column_whose_input_is_dead_gets_the_coarsest_step() -> None:
    moments = columns_of(20)
    moments[7], moments[:, 7] = 0, 0
    arrays = Waterfilling(step=0.01).quantize(sample(9, 20), Calibration(rows=torch.ones(9), columns=moments))
    assert arrays["column_steps"].argmax() == 7
    assert np.abs(arrays["integers"][:, 7]).max() < 0.5 * np.abs(arrays["integers"]).max()
    nothing = Calibration(rows=torch.ones(9), columns=torch.zeros(20, 20))
    assert torch.isfinite(Waterfilling().dequantize(Waterfilling().quantize(sample(9, 20), nothing), (9, 20))).all()


@pytest.mark.parametrize("exponent", [-30, -12, -3, 3, 12, 30])
def test_scales_far_from_one(exponent: int) -> None:
    """Without a calibration steps follow the weights as far as they reach, from 2^-32 to 2^32; nothing is infinite."""
    weight = sample(8, 16) * 10.0**exponent
    arrays = Waterfilling(step=0.01).quantize(weight)
    back = Waterfilling().dequantize(arrays, (8, 16))
    assert bool(torch.isfinite(back).all())
    assert (back.abs() <= weight.abs() * 2 + 1e-9).all()
    if abs(exponent) < 9:
        assert ((back - weight).norm() / weight.norm()).item() == pytest.approx(0.01 / 12**0.5, rel=0.2)


@quick
@given(st.integers(0, 1000), st.integers(-20, 20), st.integers(1, 30), st.integers(1, 30))
def test_any_scale_of_a_calibration_is_taken(seed: int, exponent: int, rows: int, width: int) -> None:
    calibration = Calibration(rows=torch.rand(rows) * 10.0**exponent, columns=columns_of(width, seed))
    weight = sample(rows, width, seed=seed)
    back = Waterfilling().dequantize(Waterfilling().quantize(weight, calibration), (rows, width))
    assert bool(torch.isfinite(back).all())
    assert predicted_loss(calibration, weight, back) <= 1.5 * predicted_loss(calibration, weight, 0 * weight)


def test_integers_never_leave_their_range() -> None:
    """However small the step: it grows where integers would be cut, because that would cost more, not less."""
    weight, calibration = sample(30, 40), known(30, 40)
    weight[3, 5] = 1000.0
    errors = []
    for step in (1e-5, 1e-6, 1e-8, 1e-12):
        arrays = Waterfilling(step=step).quantize(weight, calibration)
        assert np.abs(arrays["integers"].astype(int)).max() < 32_767
        back = Waterfilling().dequantize(arrays, (30, 40))
        assert (back - weight).abs().max() < 1.0
        errors.append(predicted_loss(calibration, weight, back))
    assert max(errors[1:]) < 1.2 * errors[0]  # the smallest steps differ by less than a quarter of an octave
    alone = Waterfilling(step=1e-12).quantize(weight)
    assert torch.allclose(Waterfilling().dequantize(alone, (30, 40)), weight, atol=0.05)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (17,), (0, 4), (1, 9), (3, 4, 5)])
def test_what_is_no_common_matrix(shape: tuple[int, ...]) -> None:
    """A calibration has a row for each element of a vector, and for each first index of what has three."""
    weight = sample(*shape)
    rows = shape[0] if shape else 1
    for calibration in (Calibration(), Calibration(rows=torch.full((rows,), 0.1))):
        arrays = Waterfilling(step=1e-3).quantize(weight, calibration)
        assert {key: (array.dtype, array.shape) for key, array in arrays.items()} == Waterfilling().layout(shape)
        back = Waterfilling().dequantize(arrays, shape)
        assert back.shape == weight.shape
        assert torch.allclose(back, weight, atol=0.02)


@pytest.mark.parametrize("width", [150, 64])
def test_a_single_row_is_rounded_like_one_of_several(width: int) -> None:
    """Longer than what is fed back at once: errors are those of the weight as it came, which stays as it is."""
    row, moments = sample(1, width), columns_of(width)
    before = row.clone()
    alone = Waterfilling(step=0.05).quantize(row, Calibration(rows=torch.ones(1), columns=moments))
    assert torch.equal(row, before)
    both = Waterfilling(step=0.05).quantize(row.repeat(2, 1), Calibration(rows=torch.ones(2), columns=moments))
    for key in ("integers", "column_steps"):
        found = both[key] if key == "column_steps" else both[key][:1]
        assert np.array_equal(alone[key], found), key


def test_a_constant_comes_back() -> None:
    for value in (1.0, -0.3):
        weight = torch.full((5, 12), value)
        back = Waterfilling(step=1e-3).dequantize(Waterfilling(step=1e-3).quantize(weight), (5, 12))
        assert torch.allclose(back, weight, rtol=2e-3)


def test_what_cannot_be_is_said_in_one_line() -> None:
    weight = sample(4, 6)
    for wrong in (Calibration(columns=torch.eye(5)), Calibration(rows=torch.ones(5))):
        with pytest.raises(UserError, match="calibration is not for a weight of 4 rows and 6 columns; calibrate again"):
            Waterfilling().quantize(weight, wrong)
    for wrong in (Calibration(columns=torch.full((6, 6), torch.nan)), Calibration(rows=torch.full((4,), torch.inf))):
        with pytest.raises(UserError, match="calibration met values that are not finite; the model diverged"):
            Waterfilling().quantize(weight, wrong)
    with pytest.raises(UserError, match="not positive definite; raise the damping of Waterfilling"):
        Waterfilling(damping=0.0).quantize(sample(4, 2), Calibration(columns=torch.tensor([[1.0, 2.0], [2.0, 1.0]])))
