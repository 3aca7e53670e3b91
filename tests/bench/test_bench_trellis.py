"""The benches of lattices and trellises, on toys: paths against all paths, errors by theory, bytes by the coder."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from samples import sample

from caddie.pack.calibrate import predicted_loss
from caddie.pack.coding import EntropyModel
from caddie.pack.quantize import Calibration, Waterfilling

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "bench"))
import gaussian_source as gaussian
import trellis

WEIGHT = sample(256, 24)
KNOWN = Calibration(rows=torch.ones(256), columns=torch.eye(24))


@pytest.mark.parametrize("states", [4, 8])
def test_the_path_is_the_cheapest_of_all(states: int) -> None:
    costs = np.random.default_rng(states).random((6, 4, 3)).astype(np.float32)
    found = gaussian.best_path(costs, states)
    for chain in range(3):
        sums = []
        for bits in product((0, 1), repeat=6):
            state, total = 0, 0.0
            for place, bit in enumerate(bits):
                total += float(costs[place, (state & 1) + 2 * bit, chain])
                state = int(gaussian.machine(states).followers[state, bit])
            sums.append(total)
        assert float(costs[np.arange(6), found[:, chain], chain].sum()) == pytest.approx(min(sums), rel=1e-5)


@pytest.mark.parametrize(("states", "decibels"), [(4, 0.99), (8, 1.09), (32, 1.22)])
def test_a_trellis_is_as_good_at_high_rate_as_published(states: int, decibels: float) -> None:
    """Gains on a uniform source by Marcellin and Fischer, 1990; a chain begins in one state, which costs a little."""
    source = np.random.default_rng(0).uniform(-40, 40, (256, 200)).astype(np.float32)
    _, error = gaussian.trellis_of_source(source, 1.0, states, 0.0)
    assert 10 * np.log10(4 / 12 / error) == pytest.approx(decibels, abs=0.08)


def test_e8_is_as_good_at_high_rate_as_published() -> None:
    """Second moments for each dimension: 0.07168 of E8, whose cells have a volume of 1, for a twelfth."""
    source = np.random.default_rng(0).uniform(-40, 40, (80, 1000)).astype(np.float32)
    bits, error = gaussian.e8_of_source(source, 1.0)
    assert error == pytest.approx(0.07168, rel=0.01)
    assert bits == pytest.approx(np.log2(80), rel=0.02)


@pytest.mark.parametrize("slope", [0.0, 0.5])
def test_odd_integers_stand_where_the_trellis_has_them(slope: float) -> None:
    arrays = trellis.Trellis(step=0.2, slope=slope, least=0.0).quantize(WEIGHT, KNOWN)
    integers = arrays["integers"].astype(np.int64)
    odd = trellis.parities(integers)
    assert 0.3 < odd.mean() < 0.7
    assert ((integers % 2 == odd) | (integers == 0)).all()
    assert slope or (integers % 2 == odd).all()


def test_rows_and_columns_of_few_bits_take_no_part() -> None:
    weight = WEIGHT.clone()
    weight[100:], weight[:, 20:] = weight[100:] / 100, weight[:, 20:] / 100
    arrays = trellis.Trellis(step=0.2).quantize(weight, KNOWN)
    assert arrays["along"].nonzero()[0].tolist() == list(range(100))
    assert arrays["across"].nonzero()[0].tolist() == list(range(20))
    assert not (arrays["integers"][100:] % 2).any()
    assert not (arrays["integers"][:, 20:] % 2).any()


def test_errors_are_smaller_at_equal_bytes() -> None:
    """About 0.9 dB at four bits by the coder's count of both."""

    def both(quantizer: Waterfilling) -> tuple[float, float]:
        arrays = quantizer.quantize(WEIGHT, KNOWN)
        loss = predicted_loss(KNOWN, WEIGHT, Waterfilling().dequantize(arrays, tuple(WEIGHT.shape)))
        mask = np.ones(256, bool), np.ones(24, bool)
        along, across = (arrays.get(key, default) for key, default in zip(("along", "across"), mask, strict=True))
        if "along" not in arrays:
            return float(len(EntropyModel().encode(arrays["integers"]))), loss
        return trellis.trellis_bytes(arrays["integers"].astype(np.int64), along, across), loss

    (plain, worse), (ours, better) = both(Waterfilling(step=0.2)), both(trellis.Trellis(step=0.2))
    assert ours < 1.03 * plain
    assert better < 0.85 * worse


def test_even_integers_cost_what_the_product_takes_for_whole_ones() -> None:
    integers = Waterfilling(step=0.2).quantize(WEIGHT, KNOWN)["integers"]
    none, size = (np.zeros(256, bool), np.zeros(24, bool)), len(EntropyModel().encode(integers))
    assert trellis.trellis_bytes(2 * integers.astype(np.int64), *none) == pytest.approx(size, rel=0.02)


def test_the_table_has_each_way_at_each_rate_that_its_steps_reach() -> None:
    def row(way: str, bits: float, loss: float) -> dict[str, object]:
        fields = {"gap": loss, "divergence": loss, "predicted": loss}
        return {"run": "toy", "way": way, "parameters": 8000, "bytes": 1000 * bits, **fields}

    bits = (1.0, 2.0, 4.0)
    rows = [row("plain", each, 4.0**-each) for each in bits] + [row("trellis", each, 0.8 * 4.0**-each) for each in bits]
    lines = [line.split() for line in trellis.summary(rows, (2.0, 3.0, 5.0)).splitlines()]
    ratios = {(line[1], line[2]): line[-1] for line in lines if line and line[0] == "toy"}
    assert ratios == {
        (rate, way): each for rate in ("2", "3") for way, each in (("plain", "1.00"), ("trellis", "0.80"))
    }
