"""Averages of the weights: hand-computed means, those of the public scripts, and the contract of every average."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import matches, tensors
from torch import Tensor

from caddie.config import variants
from caddie.config.schedules import Budget, TrainProgress
from caddie.train.averaging import EMA, SWA, Average, Averaging, ProgressEMA, TailEMA

quick = settings(derandomize=True, deadline=None, max_examples=40)

AVERAGES: dict[str, Averaging] = {
    "EMA": EMA(decay=0.9),
    "ProgressEMA": ProgressEMA(fraction=0.2),
    "SWA": SWA(fraction=0.5, snapshots=4),
    "TailEMA": TailEMA(begin=0.4, steps=3.0),
}
"""One of each; a new average needs one here."""


def at(step: int, of: int = 10) -> TrainProgress:
    """The moment after this step of a run of so many."""
    return TrainProgress(step, 0.0, Budget(steps=of))


def one(value: float) -> dict[str, Tensor]:
    return {"w": torch.tensor([value])}


def follow(averaging: Averaging, values: dict[int, float], of: int, lr_scale: dict[int, float] | None = None) -> float:
    """The average at the end of a run from 0 whose weight after each step is given."""
    average = Average(averaging, one(0.0))
    for step, value in values.items():
        average.update(one(value), at(step, of), (lr_scale or {}).get(step, 1.0))
    return average.weights["w"].item()


def squares(steps: int) -> dict[int, float]:
    return {step: float(step * step) for step in range(1, steps + 1)}


# Exponential


def test_the_average_agrees_with_the_scripts(parity: Path) -> None:
    data = tensors(parity / "components" / "schedules" / "ema")
    weights = [data[match[0]] for match in sorted(matches(data, r"weights\.step(\d+)"), key=lambda m: int(m[1]))]
    for match in matches(data, rf"ema_decay_(.+)\.after_step{len(weights) - 1}"):
        decay, expected = float(match[1]), data[match[0]]
        average = Average(EMA(decay=decay), {"w": weights[0]})
        # Memory of the same number of steps in a run of 400, of which these are the first.
        in_progress = Average(ProgressEMA(fraction=-1 / (400 * math.log(decay))), {"w": weights[0]})
        for step, weight in enumerate(weights[1:], 1):
            average.update({"w": weight}, at(step, 400), 1.0)
            in_progress.update({"w": weight}, at(step, 400), 1.0)
        torch.testing.assert_close(average.weights["w"], expected, rtol=2e-6, atol=1e-6)
        torch.testing.assert_close(in_progress.weights["w"], expected, rtol=2e-6, atol=2e-6)
        assert (weights[-1] - expected).abs().max() > 1e-2


def test_the_exponential_average_by_hand() -> None:
    average = Average(EMA(decay=0.75), one(8.0))
    average.update(one(0.0), at(1), 1.0)
    assert average.weights["w"].item() == 6.0
    average.update(one(2.0), at(2), 1.0)
    assert average.weights["w"].item() == 5.0


def test_the_average_of_progress_forgets_by_what_was_spent() -> None:
    fraction = 0.25 / math.log(2)  # half of what was is forgotten in a quarter of the budget
    average = Average(ProgressEMA(fraction=fraction), one(8.0))
    average.update(one(0.0), at(1, 4), 1.0)
    assert average.weights["w"].item() == pytest.approx(4.0)
    average.update(one(2.0), at(3, 4), 1.0)  # half of the budget: 3/4 of the way
    assert average.weights["w"].item() == pytest.approx(2.5)
    average.update(one(100.0), at(2, 4), 1.0)  # a larger budget takes progress back
    assert average.weights["w"].item() == pytest.approx(2.5)
    average.update(one(4.5), at(3, 4), 1.0)
    assert average.weights["w"].item() == pytest.approx(3.5)


@pytest.mark.long
def test_the_average_of_progress_means_the_same_on_every_machine() -> None:
    found = []
    for steps in (100, 10_000):
        average = Average(ProgressEMA(fraction=0.05), {"w": torch.zeros(1)})
        for step in range(1, steps + 1):
            average.update(one(step / steps), at(step, steps), 1.0)
        found.append(average.weights["w"].item())
    # ∫ p·exp((p - 1)/f)/f dp = 1 - f + f·exp(-1/f) in the limit of many steps
    assert found[1] == pytest.approx(0.95, abs=2e-4)
    assert found[0] == pytest.approx(found[1], abs=0.006)  # half a step


def test_the_tail_average_mixes_in_the_last_weights() -> None:
    """The last four of ten steps: 36, then halfway to 49, 64, 81 and 100; of the end 0.25 is the average's."""
    tail = TailEMA(begin=0.6, steps=2.0, weight=0.25)
    e = 36.0
    for value in (49.0, 64.0, 81.0, 100.0):
        e += (value - e) / 2
    assert follow(tail, squares(10), 10) == pytest.approx(0.75 * 100 + 0.25 * e)
    assert follow(tail, {step: value for step, value in squares(10).items() if step < 6}, 10) == 25.0


def test_a_tail_average_that_goes_on_with_a_larger_budget_starts_anew() -> None:
    """At the end of ten steps it is no average but a mixture; then 121 is its start, and it goes on to 144."""
    average = Average(TailEMA(begin=0.6, steps=2.0, weight=0.25), {"w": torch.zeros(1)})
    for step in range(1, 13):
        average.update(one(float(step**2)), at(step, 10 if step <= 10 else 12), 1.0)
    assert average.weights["w"].item() == pytest.approx(0.75 * 144 + 0.25 * (121 + 144) / 2)


# Uniform


def test_snapshots_stand_at_equal_distances_up_to_the_end() -> None:
    # 40 steps: the last 4 of distance 0.1 are steps 28, 32, 36 and 40.
    mean = (28**2 + 32**2 + 36**2 + 40**2) / 4
    assert follow(SWA(fraction=0.4, snapshots=4), squares(40), 40) == pytest.approx(mean)
    assert follow(SWA(fraction=0.4, snapshots=1), squares(40), 40) == 1600
    every = sum(step**2 for step in range(1, 41)) / 40
    assert follow(SWA(fraction=1.0, snapshots=40), squares(40), 40) == pytest.approx(every)
    # Steps longer than the distance: one snapshot for each, from 0.7 on.
    assert follow(SWA(fraction=0.4, snapshots=400), squares(10), 10) == pytest.approx((49 + 64 + 81 + 100) / 4)


def test_the_tight_average_waits_for_a_low_learning_rate() -> None:
    lr_scale = {step: (40 - step) / 40 for step in range(1, 41)}  # below 0.2 from step 33 on
    tight = SWA(fraction=1.0, snapshots=20, lr_below=0.2)  # every other step
    mean = (34**2 + 36**2 + 38**2 + 40**2) / 4
    assert follow(tight, squares(40), 40, lr_scale) == pytest.approx(mean)
    assert follow(tight.but(lr_below=None), squares(40), 40, lr_scale) != pytest.approx(mean)


@quick
@given(st.integers(1, 12), st.integers(1, 8), st.integers(0, 30))
def test_it_is_the_mean_of_the_last_checkpoints(last: int, every: int, before: int) -> None:
    steps = last * every + before
    kept = [float(step * step) for step in range(1, steps + 1) if (steps - step) % every == 0][-last:]
    averaging = SWA(fraction=last * every / steps, snapshots=last)
    assert follow(averaging, squares(steps), steps) == pytest.approx(sum(kept) / last, rel=1e-5)


@pytest.mark.parametrize("averaging", [SWA(fraction=0.4, snapshots=2), SWA(fraction=1.0, snapshots=10, lr_below=0.5)])
def test_before_the_first_snapshot_the_weights_are_handed_on(averaging: Averaging) -> None:
    average = Average(averaging, one(7.0))
    assert average.weights["w"].item() == 7.0
    for step in range(1, 7):
        average.update(one(float(step)), at(step), 1.0)
        assert average.weights["w"].item() == step


def test_a_larger_budget_starts_the_snapshots_anew() -> None:
    average = Average(SWA(fraction=0.5, snapshots=2), one(0.0))
    for step in range(1, 11):
        average.update(one(float(step)), at(step, 10), 1.0)
    assert average.weights["w"].item() == (8 + 10) / 2  # 0.75 is crossed at step 8
    for step in range(11, 41):
        average.update(one(float(step)), at(step, 40), 1.0)
    assert average.weights["w"].item() == (30 + 40) / 2


def test_a_slightly_larger_budget_starts_the_snapshots_anew_as_well() -> None:
    """Progress falls, and is still within the part that is averaged."""
    average = Average(SWA(fraction=0.5, snapshots=5), one(0.0))
    for step in range(1, 11):
        average.update(one(float(step)), at(step, 10), 1.0)
    assert average.weights["w"].item() == (6 + 7 + 8 + 9 + 10) / 5
    average.update(one(11.0), at(11, 12), 1.0)
    assert average.weights["w"].item() == 11.0
    average.update(one(12.0), at(12, 12), 1.0)
    assert average.weights["w"].item() == 11.5


# Every average


def rows(seed: int, count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {"w": torch.randn(4, 3, generator=generator), "v": torch.randn(5, generator=generator).bfloat16()}
        for _ in range(count)
    ]


def copied(average: Average) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in average.state().items()}


@pytest.mark.parametrize("name", sorted(variants(Averaging)))
def test_every_average_of_a_constant_is_the_constant(name: str) -> None:
    constant = {"a": torch.full((3, 2), 0.1), "b": torch.tensor(7.0)}
    average = Average(AVERAGES[name], constant)
    for step in range(51):
        for key, value in constant.items():
            assert torch.allclose(average.weights[key], value, rtol=1e-6)
        average.update(constant, at(step + 1, 51), 1.0)


@pytest.mark.parametrize("name", sorted(variants(Averaging)))
def test_every_average_is_applied(name: str) -> None:
    seen = rows(0, 11)
    average = Average(AVERAGES[name], seen[0])
    for step, weights in enumerate(seen[1:], 1):
        average.update(weights, at(step), 1.0)
    for key, last in seen[-1].items():
        assert (average.weights[key] - last.float()).abs().max() > 0.05
        stacked = torch.stack([weights[key].float() for weights in seen])
        assert (average.weights[key] <= stacked.amax(0)).all()
        assert (average.weights[key] >= stacked.amin(0)).all()


@pytest.mark.parametrize("name", sorted(variants(Averaging)))
@pytest.mark.parametrize("stop", range(11))
def test_every_average_keeps_its_own_numbers_and_resumes_to_the_bit(name: str, stop: int) -> None:
    seen = rows(1, 11)
    first = {key: value.clone() for key, value in seen[0].items()}
    average = Average(AVERAGES[name], first)
    first["w"].fill_(100.0)
    assert torch.equal(average.weights["w"], seen[0]["w"]), "not a view of the weights"
    for step in range(1, stop + 1):
        average.update(seen[step], at(step), 1.0)
    saved = copied(average)
    resumed = Average(AVERAGES[name], seen[5])
    held = resumed.state()
    resumed.update(seen[7], at(1, 1), 0.0)  # as a warm-up may
    assert held.keys() == saved.keys()
    for key, tensor in held.items():
        tensor.copy_(saved[key])
    for step in range(stop + 1, 11):
        average.update(seen[step], at(step), 1.0)
        resumed.update(seen[step], at(step), 1.0)
    for key, tensor in average.state().items():
        assert torch.equal(tensor, resumed.state()[key])
        assert isinstance(tensor, Tensor)
        assert not tensor.requires_grad
    for key in seen[0]:
        assert torch.equal(average.weights[key], resumed.weights[key])
        assert average.weights[key].dtype == torch.float32
