"""The benches of rounding by code length and of decoding, on toys: what they compute, not what they found."""

import json
import math
from pathlib import Path

import code_length_rounding as rounding
import decoding
import numpy as np
import pytest
import torch
from samples import sample

from caddie.pack import container
from caddie.pack.calibrate import predicted_loss
from caddie.pack.quantize import Arrays, Calibration, Waterfilling
from caddie.pack.quantize.waterfilling import ldlq

WEIGHT = sample(48, 40) * torch.logspace(-1, 0, 48)[:, None]
INPUTS = sample(200, 40, seed=1) @ (torch.eye(40) + sample(40, 40, seed=2) / 40**0.5)
KNOWN = Calibration(rows=torch.logspace(-2, 0, 48), columns=INPUTS.T @ INPUTS / 200)
COARSE = Waterfilling(step=0.4)


def bits_of(arrays: Arrays) -> float:
    """Under the frequencies of the whole."""
    integers = torch.from_numpy(arrays["integers"])
    bits, places = rounding.code_lengths(integers, "tensor")
    return float(bits[places, integers.abs().long()].sum())


def anew(way: rounding.Way) -> Arrays:
    return rounding.rounded(COARSE.quantize(WEIGHT, KNOWN), WEIGHT, KNOWN, COARSE, way)


def loss(arrays: Arrays) -> float:
    return predicted_loss(KNOWN, WEIGHT, COARSE.dequantize(arrays, (48, 40)))


def test_code_lengths_of_a_tensor_are_its_frequencies() -> None:
    integers = torch.tensor([[0, 0, 0, 0], [1, -1, 1, 3]])
    bits, places = rounding.code_lengths(integers, "tensor")
    assert not bool(places.any())
    # half a count for each of 511 integers
    assert bits[0, 0] == pytest.approx(-math.log2(4.5 / (8 + 255.5)))
    assert bits[0, 1] == pytest.approx(-math.log2((1.5 + 0.5) / (8 + 255.5)))
    assert bits[0, 3] == pytest.approx(-math.log2((0.5 + 0.5) / (8 + 255.5)))


def test_code_lengths_by_scale_are_odds_and_tell_rows_apart() -> None:
    integers = (sample(64, 64) * torch.logspace(-1, 1.5, 64)[:, None]).round().to(torch.int16)
    bits, places = rounding.code_lengths(integers, "scale")
    odds = 2.0**-bits
    torch.testing.assert_close(odds[:, 0] + 2 * odds[:, 1:].sum(1), torch.ones(len(bits)), rtol=1e-3, atol=0)
    zeros = bits[places, 0].mean(1)
    assert zeros[0] < 0.3
    assert zeros[-1] > 4
    by_scale = float(bits[places, integers.abs().long().clamp_max(255)].sum())
    assert by_scale < 0.8 * bits_of({"integers": integers.numpy()})


def test_a_slope_of_nothing_is_plain_rounding() -> None:
    upper = torch.triu(sample(40, 40), 1) / 8 + torch.eye(40)
    steps = torch.logspace(-1, 0, 48)[:, None].expand(48, 40)
    bits, places = torch.rand(1, 256), torch.zeros(48, 40, dtype=torch.long)
    assert torch.equal(rounding.feed_back(WEIGHT, steps, upper, bits, places, 0.0), ldlq(WEIGHT, steps, upper))


def test_without_feedback_each_integer_is_the_cheapest_of_three() -> None:
    bits = torch.tensor([[1.0, 4.0, 9.0, 16.0]]).repeat(1, 64)
    slope = 0.8
    unit, rows = torch.eye(40), 1.5 * sample(48, 40)
    places = torch.zeros(48, 40, dtype=torch.long)
    found = rounding.feed_back(rows, torch.ones(48, 40), unit, bits[:, :256], places, slope)
    for target, integer in zip(rows.flatten().tolist(), found.flatten().tolist(), strict=True):
        below = math.floor(abs(target))
        cost = {q: (abs(target) - q) ** 2 + slope * math.log(2) / 6 * bits[0, q].item() for q in (below, below + 1, 0)}
        assert abs(integer) == min(cost, key=lambda q: cost[q])
        assert integer * target >= 0


@pytest.mark.parametrize("odds", ["tensor", "scale"])
def test_a_slope_saves_bits_and_costs_loss(odds: str) -> None:
    found = [anew(rounding.Way(odds, slope)) for slope in (0.0, 0.5, 2.0)]
    bits = [bits_of(arrays) for arrays in found]
    assert bits[0] > 1.02 * bits[1] > 1.02**2 * bits[2]
    losses = [loss(arrays) for arrays in found]
    assert losses[0] < losses[1] < losses[2]


def test_moving_the_step_keeps_the_energy_or_makes_the_error_least() -> None:
    still, energy, least = (anew(rounding.Way("scale", 1.0, move)) for move in (None, "energy", "least"))
    assert np.array_equal(still["integers"], energy["integers"])
    assert loss(least) < loss(still)
    columns = KNOWN.columns
    assert columns is not None
    columns = columns + COARSE.damping * columns.diagonal().mean() * torch.eye(40)
    assert KNOWN.rows is not None
    wanted, back = (
        float(((one @ columns) * one * KNOWN.rows[:, None]).sum())
        for one in (WEIGHT, COARSE.dequantize(energy, (48, 40)))
    )
    assert back == pytest.approx(wanted, rel=1e-4)


def test_zeros_stay_as_they_are() -> None:
    plain = COARSE.quantize(torch.zeros(4, 40), Calibration())
    assert rounding.rounded(plain, torch.zeros(4, 40), Calibration(), COARSE, rounding.Way("tensor", 1.0)) is plain


def test_points_are_on_a_curve() -> None:
    rows = [
        {"way": way, "bytes": size, "gap": 2 * cost, "divergence": cost, "predicted": cost}
        for way, factor in (("plain", 1.0), ("tensor, slope 1", 1.25))
        for size, cost in ((400, factor * 0.01), (100, factor * 0.16), (200, factor * 0.05))
    ]
    plain = rows[:3]
    assert rounding.at(plain, 200, "divergence") == pytest.approx(0.05)
    assert rounding.at(plain, 200, "gap") == pytest.approx(0.1)
    octave = math.log2(0.05 / 0.16), math.log2(0.01 / 0.05)
    halfway = 0.16 * 2 ** (octave[0] / 2 - (octave[1] - octave[0]) / 8)
    assert rounding.at(plain, 100 * 2**0.5, "divergence") == pytest.approx(halfway)
    assert rounding.at(plain, 401, "gap") is None
    assert rounding.at(plain[:2], 200, "gap") is None
    assert "1.250 ± 0.000" in rounding.summary(rows)


@pytest.mark.long
def test_what_was_coded_is_decoded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = {"blocks_0_attention_query_weight": (40, 32), "embedding_weight": (96, 32)}
    sections, facts = decoding.encoded(shapes, [])
    assert facts["elements"] == 136 * 32
    assert facts["bytes"] == sum(len(section.data) for section in sections) < facts["brotli_bytes"] + 500
    path = tmp_path / "weights"
    container.write(path, [*sections, container.Section("facts", json.dumps(facts).encode())])
    found = decoding.read(path, 1)
    assert 0 < found["before"] <= found["peak"]
    weights = decoding.decoded(shapes, {section.name: section.data for section in sections})
    assert {name: weight.shape for name, weight in weights.items()} == shapes
    assert "2.00" in decoding.summary(facts, {1: [found | {"seconds": 2.0}], 2: [found | {"seconds": 3.0}]})


def test_integers_are_drawn_with_the_scales_of_the_nearest_name() -> None:
    quiet, loud = (np.full(5, 0.01), np.ones(5)), (np.full(5, 50.0), np.ones(5))
    known = [("embedding_weight", quiet), ("blocks_1_mlp_up_weight", loud)]
    chance = np.random.default_rng(0)
    table = decoding.drawn("embedding_weight", (64, 64), known, chance)
    matrix = decoding.drawn("blocks_7_mlp_up_weight", (64, 64), known, chance)
    assert not np.abs(table).any()
    assert np.abs(matrix).mean() == pytest.approx(50, rel=0.05)


def test_other_sizes_have_more_or_fewer_rows() -> None:
    sizes = {millions: decoding.shapes_of("longer_warmdown", millions) for millions in (None, 3.6)}
    whole, less = (sum(math.prod(shape) for shape in shapes.values()) for shapes in sizes.values())
    assert whole == pytest.approx(35.9e6, rel=0.01)
    assert less == pytest.approx(3.6e6, rel=0.01)
