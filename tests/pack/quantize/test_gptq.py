"""GPTQ: its linear algebra by hand and by other means, what it promises, and the public scripts' integers."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parity import facts, matches, tensors
from samples import quick, sample
from torch import Tensor

from caddie.errors import UserError
from caddie.pack.quantize import BestPercentile, Calibration, Gptq, Percentile, Quantizer, Rows, Scale, SigmaClip
from caddie.pack.quantize.gptq import _upper_factor_of_inverse

WHOLE = Rows(bits=4, scale=Percentile(fraction=1.0), steps="float32")


def moments(columns: int, seed: int = 0, mixing: float = 1.0) -> Tensor:
    """Second moments of correlated inputs of unequal size."""
    mixed = torch.eye(columns) + mixing * sample(columns, columns, seed=seed) / columns**0.5
    x = sample(8 * columns, columns, seed=seed + 1) @ mixed * torch.logspace(-1, 0, columns)
    return x.T @ x / len(x)


def loss(quantizer: Quantizer, weight: Tensor, inputs: Tensor, told: Tensor | None) -> float:
    """Mean square of what the outputs lose."""
    shape = tuple(weight.shape)
    error = quantizer.dequantize(quantizer.quantize(weight, Calibration(inputs=told)), shape) - weight
    return float(((error @ inputs) * error).sum())


# By hand


def test_an_error_is_made_good_by_the_column_that_follows() -> None:
    """Two inputs that are nearly the same: what the first column loses, the second must bring.

    Steps are 1 (7 is the largest). With H = [[2, 1.9], [1.9, 1.9]] the minimum over w2 of the loss, given an error e in
    w1, is at w2 + e · 1.9 / 1.9: 0.4 rounds to 0, and 2.2 + 0.4 = 2.6 to 3, where plain rounding has 2.
    """
    weight = torch.tensor([[0.4, 2.2, 7.0]])
    inputs = torch.tensor([[2.0, 1.9, 0.0], [1.9, 1.9, 0.0], [0.0, 0.0, 9.0]])
    told = Gptq(of=WHOLE, damping=1e-6).quantize(weight, Calibration(inputs=inputs))
    assert WHOLE.quantize(weight)["integers"].tolist() == [[0, 2, 7]]
    assert told["integers"].tolist() == [[0, 3, 7]]
    assert told["steps"].tolist() == [1.0]


def test_columns_go_by_falling_activation() -> None:
    """With the sizes of the inputs exchanged, the second is rounded first and the first makes good: 0.4 + 0.2."""
    weight = torch.tensor([[0.4, 2.2, 7.0]])
    inputs = torch.tensor([[1.9, 1.9, 0.0], [1.9, 2.0, 0.0], [0.0, 0.0, 9.0]])
    told = Gptq(of=WHOLE, damping=1e-6).quantize(weight, Calibration(inputs=inputs))
    assert told["integers"].tolist() == [[1, 2, 7]]


def test_a_dead_column_is_zero() -> None:
    inputs = moments(6)
    inputs[2], inputs[:, 2] = 0, 0
    told = Gptq(of=WHOLE).quantize(sample(5, 6), Calibration(inputs=inputs))["integers"]
    assert not told[:, 2].any()
    assert told[:, [0, 1, 3, 4, 5]].any(0).all()
    assert not Gptq().quantize(sample(5, 6), Calibration(inputs=torch.zeros(6, 6)))["integers"].any()


@quick
@given(st.integers(1, 40), st.integers(0, 100))
def test_the_upper_factor_is_that_of_the_inverse(columns: int, seed: int) -> None:
    inputs = moments(columns, seed) + 0.01 * torch.eye(columns)
    upper = _upper_factor_of_inverse(inputs).double()
    assert torch.equal(upper, upper.triu())
    assert (upper.diagonal() > 0).all()
    expected = torch.linalg.cholesky(torch.linalg.inv(inputs.double()), upper=True)
    torch.testing.assert_close(upper, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_the_usual_loop_over_columns_gives_the_same_integers() -> None:
    """The textbook's loop in double precision, without blocks, beside this one."""
    weight, inputs = sample(7, 50), moments(50)
    quantizer = Gptq(of=Rows(bits=4), block=8)
    found = quantizer.quantize(weight, Calibration(inputs=inputs))
    steps = torch.from_numpy(found["steps"].astype(np.float64))
    damped = inputs.double() + 0.01 * inputs.double().diagonal().mean() * torch.eye(50)
    order = torch.argsort(damped.diagonal(), descending=True)
    upper = torch.linalg.cholesky(torch.linalg.inv(damped[order][:, order]), upper=True)
    rest, integers = weight.double()[:, order].clone(), torch.zeros(7, 50, dtype=torch.float64)
    for j in range(50):
        integers[:, j] = (rest[:, j] / steps).round().clamp(-7, 7)
        error = (rest[:, j] - integers[:, j] * steps) / upper[j, j]
        rest[:, j:] -= error[:, None] * upper[j, j:]
    assert np.array_equal(found["integers"][:, order.numpy()], integers.numpy())


# Promises


@quick
@given(st.integers(0, 100), st.integers(2, 7), st.sampled_from([(1, 16), (12, 40), (40, 12)]))
def test_outputs_lose_less_than_by_plain_rounding(seed: int, bits: int, shape: tuple[int, int]) -> None:
    weight, inputs = sample(*shape, seed=seed), moments(shape[1], seed, mixing=3.0)
    quantizer = Gptq(of=Rows(bits=bits, scale=SigmaClip(k=3.0 if bits < 4 else 6.0)))
    plain = loss(quantizer, weight, inputs, None)
    told = loss(quantizer, weight, inputs, inputs)
    assert told <= plain * (1.0 if shape[0] > 1 else 1.3)
    if shape == (12, 40):
        assert told < 0.9 * plain


@pytest.mark.parametrize("scale", [Percentile(), BestPercentile(), SigmaClip(), SigmaClip(k=2.0)], ids=repr)
def test_without_correlation_it_is_plain_rounding(scale: Scale) -> None:
    of, weight = Rows(bits=5, scale=scale), sample(9, 33)
    plain = of.quantize(weight)
    for calibration in (Calibration(), Calibration(inputs=torch.eye(33)), Calibration(inputs=0.1 * torch.eye(33))):
        told = Gptq(of=of).quantize(weight, calibration)
        assert all(np.array_equal(array, told[key]) for key, array in plain.items())


def test_neither_blocks_nor_the_size_of_inputs_nor_rows_beside_change_anything() -> None:
    weight, inputs = sample(20, 70), moments(70)
    expected = Gptq().quantize(weight, Calibration(inputs=inputs))["integers"]
    for block in (1, 7, 64, 70, 1000):
        assert np.array_equal(expected, Gptq(block=block).quantize(weight, Calibration(inputs=inputs))["integers"])
    large = Gptq().quantize(weight, Calibration(inputs=1024 * inputs))["integers"]
    assert np.array_equal(expected, large)
    fractions = Rows(scale=SigmaClip())
    all_rows = Gptq(of=fractions).quantize(weight, Calibration(inputs=inputs))["integers"]
    assert np.array_equal(all_rows[:5], Gptq(of=fractions).quantize(weight[:5], Calibration(inputs=inputs))["integers"])


def test_autocast_does_not_reach_it() -> None:
    weight, inputs = sample(20, 70), moments(70)
    expected = Gptq().quantize(weight, Calibration(inputs=inputs))["integers"]
    with torch.autocast("cpu", torch.bfloat16):
        assert np.array_equal(expected, Gptq().quantize(weight, Calibration(inputs=inputs))["integers"])


def test_inputs_of_few_samples_and_of_any_memory_layout_are_enough() -> None:
    x = sample(3, 64)  # rank 3 of 64
    inputs = x.T @ x / 3
    told = Gptq(of=Rows(bits=4)).quantize(sample(10, 64).mT.contiguous().mT, Calibration(inputs=inputs.mT.double()))
    again = Gptq(of=Rows(bits=4)).quantize(sample(10, 64), Calibration(inputs=inputs.requires_grad_()))
    assert np.array_equal(told["integers"], again["integers"])
    assert loss(Gptq(of=Rows(bits=4)), sample(10, 64), inputs.detach(), inputs) < 0.2 * loss(
        Rows(bits=4), sample(10, 64), inputs.detach(), None
    )


def test_what_cannot_be_is_said_in_one_line() -> None:
    with pytest.raises(UserError, match="calibration is for 5 inputs, the weight has 6"):
        Gptq().quantize(sample(4, 6), Calibration(inputs=torch.eye(5)))
    with pytest.raises(UserError, match="calibration met inputs that are not finite"):
        Gptq().quantize(sample(4, 6), Calibration(inputs=torch.full((6, 6), torch.nan)))
    with pytest.raises(UserError, match="not positive definite; raise the damping"):
        Gptq().quantize(sample(4, 2), Calibration(inputs=torch.tensor([[1.0, 2.0], [2.0, 1.0]])))


# The public scripts


def of_the_script(case: str) -> Gptq:
    if case.startswith("arg"):
        return Gptq(of=Rows(bits=6, scale=BestPercentile(floor="absolute")))
    match = re.search(r"(?:block_(\d+)_)?k([\d.]+)(?:_int(\d))?$", case)
    assert match
    return Gptq(of=Rows(bits=int(match[3] or 6), scale=SigmaClip(k=float(match[2]))), block=int(match[1] or 128))


def test_integers_are_those_of_the_public_scripts(parity: Path) -> None:
    folder = parity / "components" / "quantisation"
    golden = tensors(folder / "gptq")
    info = facts(folder / "info")["gptq"]
    matrices = [match[1] for match in matches(golden, r"W\.(.+)")]
    for match in matches(golden, rf"(.+)\.({'|'.join(map(re.escape, matrices))})\.q"):
        case, matrix = match.groups()
        quantizer, inputs = of_the_script(case), golden["H_after_arg_collector_damping" if "as_used" in case else "H"]
        weight, expected = golden[f"W.{matrix}"], golden[f"{case}.{matrix}.q"].numpy()
        arrays = quantizer.quantize(weight, Calibration(inputs=inputs))
        assert arrays["steps"].tobytes() == golden[f"{case}.{matrix}.scale"].numpy().tobytes()
        assert (arrays["integers"] == expected).mean() >= 0.995
        back = quantizer.dequantize(arrays, tuple(weight.shape))
        script = torch.from_numpy(expected).float() * golden[f"{case}.{matrix}.scale"].float()[:, None]
        if f"{case}.{matrix}.dequantised" in golden:
            assert torch.equal(script, golden[f"{case}.{matrix}.dequantised"])
        ours, theirs = (float((((w - weight) @ inputs) * (w - weight)).sum()) for w in (back, script))
        assert ours == pytest.approx(theirs, rel=0.01)
        assert float((back - weight).square().mean()) == pytest.approx(info[f"{case}.{matrix}"]["plain_mse"], rel=0.01)
