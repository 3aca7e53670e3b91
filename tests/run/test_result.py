"""What a result says of compression, worked out by hand and from a run."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from run_folder import make_result
from torch import nn

from caddie.run.result import describe_compression, rounding_loss
from caddie.run.stages import bits_per_nat

CORPUS: Any = SimpleNamespace(manifest=SimpleNamespace(train=SimpleNamespace(tokens=1000, source_bytes=2500)))
PER_NAT = 0.4 / math.log(2)
"""Bits per byte of a nat per token, at 0.4 tokens per byte."""


def describe(loss: float | None, curve: list[tuple[int, float]], file_bytes: int = 300_000) -> dict[str, Any]:
    compressed: Any = SimpleNamespace(candidate=SimpleNamespace(predicted_loss=loss), curve=curve)
    model = nn.ParameterDict({"matrix": torch.zeros(100, 300), "gains": torch.zeros(50)})
    ledger = {"weights": 15_025, "tokenizer": 7}
    artifact: Any = SimpleNamespace(file_bytes=file_bytes, ledger=ledger, model=model)
    return describe_compression(compressed, artifact, CORPUS)


def test_bits_per_nat() -> None:
    assert bits_per_nat(CORPUS) == pytest.approx(PER_NAT)


def test_one_step_more_follows_the_line_through_the_nearest_point() -> None:
    # 100,000 bytes halve the loss; what lies within 1 % of the size, or further away, tells nothing
    found = describe(0.02, [(150_000, 9.0), (200_000, 0.04), (299_999, 0.5), (300_000, 0.02), (500_000, 1e-9)])
    assert found["bits_per_weight"] == pytest.approx(4.0)
    assert found["predicted_bits_per_byte"] == pytest.approx(0.02 * PER_NAT)
    assert found["curve"][1] == {"bytes": 200_000, "bits_per_byte": pytest.approx(0.04 * PER_NAT)}
    assert found["step_bytes"] == 100_000
    assert found["step_more_bits_per_byte"] == pytest.approx(-0.01 * PER_NAT)
    assert found["step_fewer_bits_per_byte"] == pytest.approx(0.02 * PER_NAT)


@pytest.mark.parametrize(
    ("file_bytes", "step"), [(9, 1), (150_000, 10_000), (458_079, 100_000), (15_999_000, 1_000_000)]
)
def test_the_step_is_less_than_the_file(file_bytes: int, step: int) -> None:
    assert describe(0.1, [], file_bytes)["step_bytes"] == step


@pytest.mark.parametrize(
    ("loss", "curve"),
    [
        (None, []),
        (0.02, []),
        (0.02, [(300_000, 0.02)]),
        (0.02, [(300_000, 0.02), (301_000, 0.019)]),
        (0.02, [(200_000, 0.04), (500_000, 0.01)]),
        (0.0, [(200_000, 0.04), (300_000, 0.0)]),
    ],
)
def test_without_another_point_nothing_is_said_of_other_sizes(
    loss: float | None, curve: list[tuple[int, float]]
) -> None:
    found = describe(loss, curve)
    assert found["step_more_bits_per_byte"] is None
    assert found["step_fewer_bits_per_byte"] is None


def test_the_steepest_curve_overflows_nothing() -> None:
    found = describe(1e-9, [(296_000, 1e300), (300_000, 1e-9)])
    assert found["step_more_bits_per_byte"] == pytest.approx(-1e-9 * PER_NAT)
    assert math.isfinite(found["step_fewer_bits_per_byte"])


def test_rounding_is_measured_from_the_weights_that_were_packed() -> None:
    scores = make_result()["scores"]
    assert rounding_loss(scores) == pytest.approx(0.00116)
    assert rounding_loss(scores | {"averaged_plain": None}) == pytest.approx(-0.00653)


def test_a_run_says_what_the_page_reads(tiny_run: Any) -> None:
    found, made = tiny_run.printed, make_result()
    assert set(found["compression"]) == set(made["compression"])
    assert set(found["tensors"][0]) == set(made["tensors"][0])
    assert found["compression"]["measured_bits_per_byte"] == pytest.approx(rounding_loss(found["scores"]))
    losses = [entry["predicted_bits_per_byte"] for entry in found["tensors"]]
    assert sum(losses) == pytest.approx(found["compression"]["predicted_bits_per_byte"])
