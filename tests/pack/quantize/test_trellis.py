"""Trellis-coded quantization: its paths against all paths, its errors against theory, its bytes by the real coder."""

from itertools import product

import numpy as np
import pytest
import torch
from samples import sample

from caddie.pack.calibrate import predicted_loss
from caddie.pack.coding import Smallest
from caddie.pack.quantize import Arrays, Calibration, Trellis, Waterfilling, WaterfillingSteps, trellis
from caddie.pack.quantize.waterfilling import _steps

WEIGHT = sample(300, 24)
FAINT = torch.ones(300, 24)
FAINT[40:50] = FAINT[:, 7] = 1e-4
"""Rows and a column of next to no bits."""


def in_steps(arrays: Arrays, first: int, second: int) -> np.ndarray:
    """Values of the integers, one at a time, by the parity checks of the code."""
    rows, columns = arrays["integers"].shape
    found = arrays["integers"].astype(np.float64)
    along = [i for i in range(rows) if arrays["chained"][i]]
    apart = -(-len(along) // 128)
    for column in range(columns):
        for begin in range(apart if arrays["chained"][rows + column] else 0):
            state = 0
            for row in along[begin::apart]:
                integer = int(arrays["integers"][row, column])
                found[row, column] = -(integer + 0.25) if state % 2 else integer + 0.25
                state = state // 2 ^ (first // 2 if state % 2 else 0) ^ (second // 2 if integer % 2 else 0)
    return found


@pytest.mark.parametrize("states", [4, 8])
def test_the_path_is_the_cheapest_of_all(states: int) -> None:
    costs = np.random.default_rng(states).random((6, 4, 3)).astype(np.float32)
    found = trellis.best_path(costs, states)
    for chain in range(3):
        sums = []
        for bits in product((0, 1), repeat=6):
            state, total = 0, 0.0
            for place, bit in enumerate(bits):
                total += float(costs[place, (state & 1) + 2 * bit, chain])
                state = int(trellis.convolutional_code(states).followers[state, bit])
            sums.append(total)
        assert float(costs[np.arange(6), found[:, chain], chain].sum()) == pytest.approx(min(sums), rel=1e-5)


@pytest.mark.parametrize(("states", "decibels"), [(4, 0.99), (8, 1.09), (32, 1.22)])
def test_errors_at_high_rate_are_as_published(states: int, decibels: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gains on a uniform source by Marcellin and Fischer, 1990."""
    monkeypatch.setattr(trellis, "CHAIN", 512)
    source = np.random.default_rng(0).uniform(-40, 40, 100_000).astype(np.float32)
    error = ((Trellis(states=states)._nearest_path(source) - source) ** 2).mean()
    assert 10 * np.log10(1 / 12 / error) == pytest.approx(decibels, abs=0.06)


@pytest.mark.parametrize("weight", [WEIGHT, WEIGHT[:140], WEIGHT * FAINT], ids=["long", "one chain and a bit", "faint"])
@pytest.mark.parametrize(("states", "checks"), [(8, (0o13, 0o4)), (64, (0o103, 0o24))])
def test_integers_stand_for_what_is_documented(weight: torch.Tensor, states: int, checks: tuple[int, int]) -> None:
    quantizer = Trellis(step=0.2, states=states)
    arrays = quantizer.quantize(weight)
    steps = _steps(*(torch.from_numpy(arrays[f"{of}_steps"]).int() for of in ("row", "column")), arrays["step"][0])
    found = quantizer.dequantize(arrays, tuple(weight.shape))
    assert torch.equal(found, torch.from_numpy(in_steps(arrays, *checks)).float() * steps)
    assert (found - weight).square().mean() < 0.9 * (0.2**2 / 12) * weight.square().mean()


def test_rows_and_columns_of_few_bits_are_rounded_to_the_nearest_step() -> None:
    arrays = Trellis(step=0.2).quantize(WEIGHT * FAINT)
    in_chains = arrays["chained"].astype(bool)
    assert (~in_chains).nonzero()[0].tolist() == [*range(40, 50), 307]
    assert not arrays["integers"][40:50].any()
    assert not arrays["integers"][:, 7].any()
    few = Trellis(step=0.2).quantize(WEIGHT[:15])
    assert not few["chained"].any()
    assert np.array_equal(few["integers"], Waterfilling(step=0.2).quantize(WEIGHT[:15])["integers"])


@pytest.mark.parametrize("small", [0.0, 1e-4])
def test_a_row_whose_only_value_stands_in_an_empty_column_stays_near(small: float) -> None:
    """Values were shrunk beyond zero where they are larger than their row and column say; no other row follows them."""
    weight = 0.02 * sample(256, 32)
    weight[:, 5] = weight[7] = small
    weight[7, 5] = 0.09
    plain, found = (
        quantizer.dequantize(quantizer.quantize(weight), (256, 32))
        for quantizer in (Waterfilling(step=1.0), Trellis(step=1.0))
    )
    assert (found - weight).square().mean() < (plain - weight).square().mean()
    assert (found - weight).abs().max() < 0.09 + (plain - weight).abs().max()


@pytest.mark.long
@pytest.mark.parametrize(("step", "decibels"), [(0.2, 1.0), (0.8, 1.2)])
def test_errors_are_smaller_at_equal_bytes(step: float, decibels: float) -> None:
    """Chains of 128 gain 1.1 dB at high rate; where bits are few, shrinking gains as well."""
    weight = sample(1024, 48)

    def measured(quantizer: WaterfillingSteps) -> tuple[int, float]:
        arrays = quantizer.quantize(weight)
        size = sum(len(Smallest().encode(array)) for array in arrays.values())
        return size, predicted_loss(Calibration(), weight, quantizer.dequantize(arrays, tuple(weight.shape)))

    ours, error = measured(Trellis(step=step))
    curve = np.array([measured(Waterfilling(step=step * factor)) for factor in (0.8, 1, 1.25, 1.6)])
    theirs = np.interp(ours, curve[::-1, 0], 10 * np.log10(curve[::-1, 1]))
    assert theirs - 10 * np.log10(error) > decibels


def test_more_states_have_smaller_errors() -> None:
    weight, errors = sample(1024, 24), []
    for states in (4, 64):
        quantizer = Trellis(step=0.2, states=states)
        assert quantizer.dequantizer == Trellis(states=states)
        found = quantizer.dequantizer.dequantize(quantizer.quantize(weight), tuple(weight.shape))
        errors.append(float((found - weight).square().mean()))
    assert errors[1] < 0.98 * errors[0]


def test_integers_never_leave_their_range() -> None:
    weight = sample(30, 40)
    weight[3, 5] = 1000.0
    arrays = Trellis(step=1e-12).quantize(weight)
    assert arrays["chained"].all()
    assert np.abs(arrays["integers"].astype(int)).max() < 32_767
    assert (Trellis().dequantize(arrays, (30, 40)) - weight).abs().max() < 0.2
