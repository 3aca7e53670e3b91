"""Optimizers: the public scripts' steps, PyTorch's own Muon, and what every optimizer must keep."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch
from parity import facts as read_facts
from parity import matches, tensors
from torch import Tensor, nn

from caddie.config import field_types, variants
from caddie.config.schedules import Budget, Ramp, StepRamp, TrainProgress
from caddie.errors import UserError
from caddie.runtime.distributed import Ranks
from caddie.train.optim import AdamW, Muon, Optimizer, SoapMuon, TrustGate, Updater, newton_schulz
from caddie.train.optim.muon import COEFFICIENTS, Coefficients, adapt_rows, equalize_rows, floor_rows

SETTINGS: list[Optimizer] = [
    *(cls(lr=0.05) for cls in variants(Optimizer).values()),
    AdamW(lr=0.05, weight_decay=0.1, beta1=0.8, beta2=0.99),
    Muon(lr=0.05, weight_decay=0.1, precision="float32"),
    Muon(lr=0.05, momentum=StepRamp(start=0.5, end=0.9, steps=3), precision="float32"),
    Muon(lr=0.05, coefficients="polar_express", normalize_rows=True),
    Muon(lr=0.05, normalize_rows=True, precision="float32", communication="all_reduce"),
    Muon(lr=0.05, beta2=0.9, weight_decay=0.1, precision="float32"),
    Muon(lr=0.05, coefficients="turbo", steps=4, weight_decay=0.1, precision="float32"),
    Muon(lr=0.05, coefficients="polar_express", normalize_rows=True, beta2=0.95, communication="all_reduce"),
    Muon(lr=0.05, group_rows=2, row_floor=0.4, cautious_decay=0.3, precision="float32"),
    SoapMuon(lr=0.05, precision="float32", sides="smaller", refresh=2, communication="all_reduce"),
    SoapMuon(lr=0.05, precision="float32", trust=TrustGate(), weight_decay=0.1, cautious_decay=0.0),
    Muon(lr=0.05, weight_decay=0.1, decay_clamp=0.5, row_floor=0.4, communication="all_reduce", precision="float32"),
]
"""Every variant as it comes, and a few with other settings."""
every_optimizer = pytest.mark.parametrize("optimizer", SETTINGS, ids=repr)

SHAPES = {"a": (6, 10), "b": (10, 6), "c": (6, 10), "d": (8, 8), "e": (6, 10)}


def moment(step: int, steps: int = 100) -> TrainProgress:
    return TrainProgress(step, 0.0, Budget(steps=steps))


def some_parameters(shapes: Mapping[str, tuple[int, ...]] = SHAPES, seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def set_gradients(parameters: Mapping[str, nn.Parameter], step: int) -> None:
    """Gradients that depend on the step and the name alone."""
    for name, parameter in parameters.items():
        generator = torch.Generator().manual_seed(1000 * step + ord(name[0]))
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def run(updater: Updater, parameters: Mapping[str, nn.Parameter], steps: range, lr_scale: float = 1.0) -> None:
    for step in steps:
        set_gradients(parameters, step)
        updater.step(moment(step), lr_scale)


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


# Contracts of every optimizer


@every_optimizer
def test_steps_are_deterministic_and_move_everything(optimizer: Optimizer) -> None:
    ends = []
    for noise in (0, 1):
        torch.manual_seed(noise)
        parameters = some_parameters()
        run(optimizer.build(parameters, Ranks()), parameters, range(5))
        ends.append(copies(parameters))
    start = some_parameters()
    for name in SHAPES:
        assert torch.equal(ends[0][name], ends[1][name])
        assert torch.isfinite(ends[0][name]).all()
        assert (ends[0][name] != start[name]).all()


@every_optimizer
def test_a_quadratic_is_descended(optimizer: Optimizer) -> None:
    torch.manual_seed(0)
    parameters = some_parameters()
    targets = some_parameters(seed=1)
    updater = optimizer.but(weight_decay=0.0).build(parameters, Ranks())

    def loss() -> Tensor:
        return torch.stack([(parameters[name] - targets[name]).square().sum() for name in parameters]).sum() / 2

    losses = [loss().item()]
    for step in range(40):
        for parameter in parameters.values():
            parameter.grad = None
        loss().backward()
        updater.step(moment(step, 40), 8.0 * (1.0 - step / 40))
        losses.append(loss().item())
    assert losses[10] < 0.95 * losses[0]
    # SoapMuon's steps are no shorter than its floor, however near the target is. By bfloat16 of an Intel Xeon 0.1006.
    assert losses[-1] < (0.11 if isinstance(optimizer, SoapMuon) else 0.05) * losses[0]


@every_optimizer
def test_a_restart_goes_on_exactly(optimizer: Optimizer) -> None:
    parameters = some_parameters()
    updater = optimizer.build(parameters, Ranks())
    run(updater, parameters, range(3))
    saved, weights = copies(updater.state()), copies(parameters)
    run(updater, parameters, range(3, 6))

    resumed = some_parameters(seed=9)
    other = optimizer.build(resumed, Ranks())
    assert {name: (x.shape, x.dtype) for name, x in other.state().items()} == {
        name: (x.shape, x.dtype) for name, x in saved.items()
    }, "what is saved has its place before the first step"
    run(other, resumed, range(50, 52))  # whatever it did before is forgotten
    with torch.no_grad():
        for name, parameter in resumed.items():
            parameter.copy_(weights[name])
    for key, tensor in other.state().items():
        tensor.copy_(saved[key])
    run(other, resumed, range(3, 6))
    for name in SHAPES:
        assert torch.equal(parameters[name], resumed[name]), name
    for name, tensor in updater.state().items():
        assert torch.equal(tensor, other.state()[name]), name


@every_optimizer
def test_a_lost_state_would_show(optimizer: Optimizer) -> None:
    """The test above can fail: without its state an optimizer goes elsewhere."""
    parameters = some_parameters()
    updater = optimizer.build(parameters, Ranks())
    run(updater, parameters, range(3))
    weights = copies(parameters)
    run(updater, parameters, range(3, 6))
    forgetful = {name: nn.Parameter(weight) for name, weight in weights.items()}
    run(optimizer.build(forgetful, Ranks()), forgetful, range(3, 6))
    assert any(not torch.allclose(parameters[name], forgetful[name], atol=1e-3) for name in SHAPES)


@every_optimizer
def test_state_is_the_tensors_themselves(optimizer: Optimizer) -> None:
    parameters = some_parameters()
    updater = optimizer.build(parameters, Ranks())
    run(updater, parameters, range(2))
    first = updater.state()
    again = updater.state()
    assert first
    assert all(first[name].data_ptr() == again[name].data_ptr() for name in first)
    assert all(isinstance(tensor, Tensor) and not tensor.requires_grad for tensor in first.values())


@every_optimizer
def test_together_is_one_at_a_time(optimizer: Optimizer) -> None:
    together = some_parameters()
    run(optimizer.build(together, Ranks()), together, range(4))
    for name in SHAPES:
        alone = {name: some_parameters()[name]}
        run(optimizer.build(alone, Ranks()), alone, range(4))
        exact = not isinstance(optimizer, Muon) or optimizer.precision == "float32"
        torch.testing.assert_close(together[name], alone[name], rtol=0, atol=2e-6 if exact else 2e-3)


@every_optimizer
def test_the_rate_is_scaled(optimizer: Optimizer) -> None:
    still = some_parameters()
    before = copies(still)
    run(optimizer.build(still, Ranks()), still, range(3), lr_scale=0.0)
    assert all(torch.equal(still[name], before[name]) for name in SHAPES), "at a rate of zero nothing moves"
    halved, scaled = some_parameters(), some_parameters()
    run(optimizer.but(lr=0.025).build(halved, Ranks()), halved, range(3))
    run(optimizer.build(scaled, Ranks()), scaled, range(3), lr_scale=0.5)
    for name in SHAPES:
        torch.testing.assert_close(halved[name], scaled[name], rtol=0, atol=1e-7)


@every_optimizer
def test_the_rate_may_be_a_schedule(optimizer: Optimizer) -> None:
    scheduled, stepped = some_parameters(), some_parameters()
    run(optimizer.but(lr=Ramp(start=0.1, end=0.0)).build(scheduled, Ranks()), scheduled, range(0, 60, 20))
    updater = optimizer.but(lr=0.1).build(stepped, Ranks())
    for step in range(0, 60, 20):  # of 100
        set_gradients(stepped, step)
        updater.step(moment(step), 1 - step / 100)
    for name in SHAPES:
        torch.testing.assert_close(scheduled[name], stepped[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("cls", variants(Optimizer).values())
def test_weight_decay_by_hand(cls: type[Optimizer]) -> None:
    assert "weight_decay" in field_types(cls)
    parameters = some_parameters()
    before = copies(parameters)
    updater = cls.from_json({"kind": cls.__name__, "lr": 0.5, "weight_decay": 0.2}).build(parameters, Ranks())
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    updater.step(moment(0), 0.5)
    for name in SHAPES:  # 1 - 0.5 · 0.5 · 0.2
        torch.testing.assert_close(parameters[name].detach(), before[name] * 0.95)


@every_optimizer
def test_zero_and_missing_gradients_do_no_harm(optimizer: Optimizer) -> None:
    parameters = some_parameters()
    updater = optimizer.but(weight_decay=0.0).build(parameters, Ranks())
    before = copies(parameters)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    parameters["d"].grad = None
    updater.step(moment(0), 1.0)
    for name in SHAPES:
        assert torch.equal(parameters[name], before[name])
    run(updater, parameters, range(1, 3))
    assert all(torch.isfinite(parameter).all() for parameter in parameters.values())


@every_optimizer
def test_gradients_are_read_only(optimizer: Optimizer) -> None:
    parameters = some_parameters()
    updater = optimizer.build(parameters, Ranks())
    set_gradients(parameters, 0)
    before = {name: parameter.grad.clone() for name, parameter in parameters.items() if parameter.grad is not None}
    updater.step(moment(0), 1.0)
    assert len(before) == len(SHAPES)
    for name, gradient in before.items():
        assert torch.equal(gradient, parameters[name].grad)


@every_optimizer
def test_the_squares_are_those_of_the_gradient(optimizer: Optimizer) -> None:
    parameters = some_parameters({"a": (2, 2), "b": (2, 1), "c": (2, 2)})
    updater = optimizer.build(parameters, Ranks())
    parameters["a"].grad = torch.tensor([[1.0, -2.0], [0.0, 0.0]])
    parameters["b"].grad = torch.tensor([[3.0], [0.5]])  # and none for c
    updater.launch()
    found = updater.squares()
    assert (found.ndim, found.dtype) == (0, torch.float32)
    assert found.item() == pytest.approx(14.25)
    assert updater.squares().item() == pytest.approx(14.25), "asked again"


@every_optimizer
def test_the_gradient_is_scaled_first(optimizer: Optimizer) -> None:
    scaled, by_hand = some_parameters(), some_parameters()
    updater, other = optimizer.build(scaled, Ranks()), optimizer.build(by_hand, Ranks())
    for step, scale in enumerate([1.0, 0.25, 0.5]):
        for parameters in (scaled, by_hand):
            set_gradients(parameters, step)
        updater.launch()
        updater.step(moment(step), 1.0, torch.tensor(scale))
        for parameter in by_hand.values():
            assert parameter.grad is not None
            parameter.grad.mul_(scale)
        other.step(moment(step), 1.0)
    plain = some_parameters()
    run(optimizer.build(plain, Ranks()), plain, range(3))
    for name in SHAPES:
        assert torch.equal(scaled[name], by_hand[name])
    assert any(not torch.allclose(plain[name], scaled[name], atol=1e-4) for name in SHAPES)


@every_optimizer
def test_a_step_may_be_left_out(optimizer: Optimizer) -> None:
    """The trainer leaves steps out when the gradient is not finite."""
    parameters, undisturbed = some_parameters(), some_parameters()
    updater, other = optimizer.build(parameters, Ranks()), optimizer.build(undisturbed, Ranks())
    run(updater, parameters, range(2))
    run(other, undisturbed, range(2))
    parameters["b"].grad = torch.full_like(parameters["b"], torch.nan)
    updater.launch()
    assert not torch.isfinite(updater.squares())
    set_gradients(parameters, 2)
    set_gradients(undisturbed, 2)
    updater.launch()
    assert torch.isfinite(updater.squares())
    updater.step(moment(2), 1.0)
    other.step(moment(2), 1.0)
    for name in SHAPES:
        assert torch.equal(parameters[name], undisturbed[name])


# Several ranks


class Exchange:
    """Exchange between several ranks of one process."""

    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world, timeout=30)
        self.left: dict[int, list[Tensor]] = {}


@dataclass(frozen=True)
class ThreadRanks(Ranks):
    """Ranks that are threads."""

    exchange: Exchange = field(default_factory=lambda: Exchange(1))

    def everybodys(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Tensors of each rank, in the order of the ranks."""
        self.exchange.left[self.rank] = [tensor.clone() for tensor in tensors]
        self.exchange.barrier.wait()
        found = [self.exchange.left[rank] for rank in range(self.world)]
        assert all([x.shape for x in one] == [x.shape for x in tensors] for one in found), "not the same call"
        self.exchange.barrier.wait()
        return found

    def begin_sum(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        for tensor, *shares in zip(tensors, *self.everybodys(tensors), strict=True):
            tensor.copy_(torch.stack(shares).sum(0))
        return lambda: None

    def begin_reduce_scatter(self, stack: Tensor) -> Callable[[], Tensor]:
        total = torch.stack([one for (one,) in self.everybodys([stack])]).sum(0)
        return lambda: total[self.share(len(total))]

    def begin_all_gather(self, mine: Tensor) -> Callable[[], Tensor]:
        stack = torch.cat([one for (one,) in self.everybodys([mine])])
        return lambda: stack


def set_part(parameters: Mapping[str, nn.Parameter], step: int, rank: int, world: int) -> None:
    """A rank's part of gradients that do not depend on `world`: binary fractions, so their sum is exact."""
    set_gradients(parameters, step)
    for name, parameter in parameters.items():
        assert parameter.grad is not None
        parameter.grad.mul_(64).round_().div_(64)
        for other in range(1, world):
            generator = torch.Generator().manual_seed(100 * step + 10 * other + ord(name[0]))
            noise = torch.randint(-64, 65, parameter.shape, generator=generator) / 64
            if other == rank:
                parameter.grad.copy_(noise)
            elif rank == 0:
                parameter.grad.sub_(noise)


def journey(optimizer: Optimizer, ranks: Ranks) -> dict[str, Tensor]:
    """Clipped steps with a restart between them, as the trainer makes them: all that is to be equal."""
    parameters = some_parameters()
    updater = optimizer.build(parameters, ranks)
    seen: dict[str, Tensor] = {}
    for step in range(6):
        if step == 3:
            saved = copies(updater.state())
            seen.update({f"saved/{name}": tensor for name, tensor in saved.items()})
            parameters = {name: nn.Parameter(tensor) for name, tensor in copies(parameters).items()}
            updater = optimizer.build(parameters, ranks)
            for name, tensor in updater.state().items():
                tensor.copy_(saved[name])
        set_part(parameters, step, ranks.rank, ranks.world)
        if step == 1:
            updater.step(moment(step), 1.0)  # launches itself
            continue
        updater.launch()
        squares = updater.squares()
        seen[f"squares/{step}"] = squares
        if step != 2:  # left out
            updater.step(moment(step), 1.0, 5.0 / squares.sqrt() if step == 4 else None)
    seen.update({f"weights/{name}": tensor for name, tensor in copies(parameters).items()})
    seen.update({f"state/{name}": tensor for name, tensor in copies(updater.state()).items()})
    return seen


def assert_alike(alone: Mapping[str, Tensor], replicas: Sequence[Mapping[str, Tensor]], optimizer: Optimizer) -> None:
    """Replicas are equal to the bit, and one rank alone gets there too, up to rounding."""
    exact = not isinstance(optimizer, Muon) or optimizer.precision == "float32"
    for replica in replicas:
        assert replica.keys() == alone.keys()
    for name, tensor in alone.items():
        for replica in replicas:
            assert torch.equal(replica[name], replicas[0][name]), f"{name} is not the same on all ranks"
        difference = (replicas[0][name] - tensor).abs()
        assert (difference <= (3e-6 if exact else 4e-3) + 1e-5 * tensor.abs()).all(), (name, difference.max())


@every_optimizer
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_several_ranks_are_one(optimizer: Optimizer, world: int) -> None:
    exchange = Exchange(world)

    def work(rank: int) -> dict[str, Tensor]:
        try:
            return journey(optimizer, ThreadRanks(rank=rank, world=world, exchange=exchange))
        except BaseException:
            exchange.barrier.abort()
            raise

    with ThreadPoolExecutor(world) as pool:
        replicas = list(pool.map(work, range(world)))
    alone = journey(optimizer, Ranks())
    assert_alike(alone, replicas, optimizer)
    start = some_parameters()
    assert all(not torch.allclose(alone[f"weights/{name}"], start[name], atol=1e-2) for name in SHAPES)


@pytest.mark.parametrize("communication", ["all_reduce", "reduce_scatter"])
def test_each_rank_works_on_its_share(
    communication: Literal["all_reduce", "reduce_scatter"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five matrices on two ranks: three each, one of them filling; gradients and updates once per bank."""
    counts: list[int] = []

    def counted(matrices: Tensor, *rest: object, **more: object) -> Tensor:
        counts.append(len(matrices))
        return matrices

    monkeypatch.setattr("caddie.train.optim.muon.newton_schulz", counted)
    exchange = Exchange(2)
    optimizer = Muon(lr=0.1, communication=communication)

    def work(rank: int) -> None:
        parameters = some_parameters(dict.fromkeys("abcde", (2, 3)))
        ranks = ThreadRanks(rank=rank, world=2, exchange=exchange)
        run(optimizer.build(parameters, ranks), parameters, range(1))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    assert counts == [3, 3]


# Newton-Schulz


@pytest.fixture(scope="module")
def matrices(parity: Path) -> dict[str, Tensor]:
    return tensors(parity / "components" / "optimiser" / "newton_schulz")


ITERATIONS = r"(?:batched_)?(?P<coefficients>classic|polar_express)(?P<steps>\d+)"
"""The scripts' names of an iteration and its number of steps."""


@pytest.mark.usefixtures("brain_products")
def test_newton_schulz_agrees_with_the_scripts(matrices: dict[str, Tensor]) -> None:
    for match in matches(matrices, rf"{ITERATIONS}\.fp32\.(?P<name>.+)"):
        steps, coefficients = int(match["steps"]), cast(Coefficients, match["coefficients"])
        matrix, expected = matrices[f"in.{match['name']}"], matrices[match[0].replace(".fp32.", ".bf16.")]
        exact = newton_schulz(matrix, steps, coefficients)
        assert (exact - matrices[match[0]]).abs().max() < 1e-4, match[0]
        rounded = newton_schulz(matrix.bfloat16(), steps, coefficients)
        assert rounded.dtype == torch.bfloat16
        # both lie around what is exact; we round less often than the scripts
        assert (rounded.float() - exact).norm() < 1.5 * (expected.float() - exact).norm(), match[0]


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
def test_newton_schulz_takes_stacks(coefficients: Coefficients) -> None:
    stack = torch.randn(3, 12, 30, generator=torch.Generator().manual_seed(0))
    for found, matrix in zip(newton_schulz(stack, 5, coefficients), stack, strict=True):
        assert (found - newton_schulz(matrix, 5, coefficients)).abs().max() < 1e-5


def test_newton_schulz_keeps_directions_and_evens_out_sizes() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(12, 30, generator=generator)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    found = newton_schulz(matrix, 5)
    inside = u.mT @ found @ v.mT
    sizes = inside.diagonal()
    assert (inside - torch.diag(sizes)).abs().max() < 1e-4
    assert sizes.min() > 0.65
    assert sizes.max() < 1.25
    assert (newton_schulz(matrix.mT, 5) - found.mT).abs().max() < 1e-5, "tall and wide alike"
    assert (newton_schulz(1000 * matrix, 5) - found).abs().max() < 1e-4, "size does not matter"
    assert not newton_schulz(torch.zeros(3, 5), 5).any()


def test_one_newton_schulz_step_by_hand() -> None:
    # diag(3, 4) has norm 5; x = 0.6: 3.4445·0.6 - 4.7750·0.6³ + 2.0315·0.6⁵, and the same for 0.8.
    found = newton_schulz(torch.diag(torch.tensor([3.0, 4.0])), 1)
    expected = [3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5 for x in (0.6, 0.8)]
    assert found.diagonal().tolist() == pytest.approx(expected, rel=1e-5)


def test_the_last_coefficients_serve_all_further_steps() -> None:
    lengths = {name: len(triples) for name, triples in COEFFICIENTS.items()}
    assert lengths == {"classic": 1, "polar_express": 5, "turbo": 4, "convergent": 1}
    x = 0.6
    for a, b, c in [*COEFFICIENTS["polar_express"], *COEFFICIENTS["polar_express"][-1:] * 2]:
        x = a * x + b * x**3 + c * x**5
    found = newton_schulz(torch.diag(torch.tensor([3.0, 4.0])), 7, "polar_express")
    assert found[0, 0].item() == pytest.approx(x, rel=1e-4)


def test_polar_express_comes_nearer_to_orthogonal() -> None:
    matrix = torch.randn(20, 30, generator=torch.Generator().manual_seed(0))
    spread = {}
    for name in COEFFICIENTS:
        sizes = torch.linalg.svdvals(newton_schulz(matrix, 5, name))
        spread[name] = (sizes - 1).abs().max().item()
    assert spread["polar_express"] < 0.15 < 0.25 < spread["classic"]


def test_a_preconditioned_step_by_hand() -> None:
    """The rows are orthogonal, so both begin at length 1; the first triple is left out."""
    found = newton_schulz(torch.diag(torch.tensor([3.0, 4.0])), 1, "turbo")
    assert found.diagonal().tolist() == pytest.approx([sum(COEFFICIENTS["polar_express"][1])] * 2, rel=1e-5)
    rows = [[1.0, 2.0, 2.0], [0.0, 3.0, 4.0]]  # products 9, 14 and 25: divided by √23 and √39
    scaled = torch.tensor(
        [[value / length for value in row] for row, length in zip(rows, (23**0.5, 39**0.5), strict=True)]
    )
    a, b, c = COEFFICIENTS["polar_express"][1]
    gram = scaled @ scaled.mT
    expected = a * scaled + (b * gram + c * gram @ gram) @ scaled
    torch.testing.assert_close(newton_schulz(torch.tensor(rows), 1, "turbo"), expected)


@pytest.mark.parametrize("shape", [(20, 30), (30, 20), (64, 192)])
def test_with_a_preconditioner_four_steps_end_as_near_to_orthogonal_as_five(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def farthest(steps: int, coefficients: Coefficients) -> float:
        sizes: Tensor = (torch.linalg.svdvals(newton_schulz(matrix, steps, coefficients)) - 1).abs().max()
        return sizes.item()

    assert farthest(4, "turbo") < 1.1 * farthest(5, "polar_express") < 0.5 * farthest(4, "polar_express")
    assert not newton_schulz(torch.zeros(shape), 4, "turbo").any()


# Rows


def test_equalized_rows_by_hand() -> None:
    found = equalize_rows(torch.tensor([[3.0, 4.0], [0.0, 0.0], [-0.5, 0.0]]))
    torch.testing.assert_close(found, torch.tensor([[0.6, 0.8], [0.0, 0.0], [-1.0, 0.0]]))


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_with_equalized_rows_their_sizes_do_not_matter(shape: tuple[int, int]) -> None:
    ends = []
    for factors in (torch.ones(shape[0], 1), torch.linspace(0.1, 10.0, shape[0])[:, None]):
        parameters = some_parameters({"w": shape})
        set_gradients(parameters, 0)
        assert parameters["w"].grad is not None
        parameters["w"].grad.mul_(factors)
        Muon(lr=0.1, normalize_rows=True, precision="float32").build(parameters, Ranks()).step(moment(0), 1.0)
        ends.append(parameters["w"].detach())
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-6)


def test_adapted_rows_by_hand() -> None:
    mean_squares = torch.zeros(1, 3, 1)
    first = torch.tensor([[[3.0, 4.0], [0.0, 0.5], [0.0, 0.0]]])
    found = adapt_rows(first, mean_squares, 0.75)
    # a quarter of the mean squares 12.5, 0.125 and 0; rows of zeros aside all have one length, and 25.25 is kept
    torch.testing.assert_close(mean_squares.flatten(), torch.tensor([3.125, 0.03125, 0.0]))
    length = (25.25 / 2) ** 0.5
    torch.testing.assert_close(found, length * torch.tensor([[[0.6, 0.8], [0.0, 1.0], [0.0, 0.0]]]))
    second = torch.tensor([[[1.0, 1.0], [1.0, -1.0], [2.0, 0.0]]])
    found = adapt_rows(second, mean_squares, 0.75)
    means = torch.tensor([0.75 * 3.125 + 0.25, 0.75 * 0.03125 + 0.25, 0.5])
    torch.testing.assert_close(mean_squares.flatten(), means)
    rows = second / means.sqrt()[:, None]
    torch.testing.assert_close(found, rows * (8.0 / rows.square().sum()).sqrt())


def test_normuon_evens_out_the_rows_over_time() -> None:
    """Rows that always get little catch up with the others; the whole moves as far as with Muon."""
    moved = {}
    for beta2 in (None, 0.9):
        parameters = some_parameters({"w": (12, 8)})
        before = copies(parameters)["w"]
        updater = Muon(lr=0.1, momentum=0.0, beta2=beta2, precision="float32").build(parameters, Ranks())
        set_gradients(parameters, 0)
        assert parameters["w"].grad is not None
        parameters["w"].grad[:6] *= 0.1
        updater.step(moment(0), 1.0)
        moved[beta2] = parameters["w"].detach() - before
    lengths = {beta2: change.norm(dim=1) for beta2, change in moved.items()}
    assert lengths[None].max() > 3 * lengths[None].min()
    torch.testing.assert_close(lengths[0.9], lengths[0.9].mean().expand(12), rtol=1e-4, atol=0)
    assert moved[0.9].norm() == pytest.approx(moved[None].norm().item(), rel=1e-4)


def test_huber_decay_agrees_with_the_script(frontier: Path) -> None:
    config, data = read_facts(frontier / "config")["huber"], tensors(frontier / "huber_decay")
    parameters = {"w": nn.Parameter(data["before"].clone())}
    parameters["w"].grad = torch.zeros_like(data["before"])
    muon = Muon(lr=config["lr"], weight_decay=config["wd"], decay_clamp=config["delta"])
    muon.build(parameters, Ranks()).step(moment(0), 1.0)
    torch.testing.assert_close(parameters["w"].detach(), data["after"], rtol=1e-5, atol=1e-7)
    assert not torch.allclose(data["before"] * (1 - config["lr"] * config["wd"]), data["after"], atol=1e-5)


def test_soap_muon_agrees_with_the_script(frontier: Path) -> None:
    config, data = read_facts(frontier / "config")["soap"], tensors(frontier / "soap_muon")
    constants = config["constants"]
    soap = SoapMuon(
        lr=config["lr"],
        momentum=config["mu"],
        beta2=constants["SOAP_BETA2"],
        refresh=constants["SOAP_PRECONDITION_FREQUENCY"],
        outward=constants["RADIAL_OUTWARD_SCALE"],
        row_floor=constants["TARGET_UW"],
        cautious_decay=constants["CWD"],
        precision="float32",
    )
    trust = TrustGate(
        floor=constants["ATTN_EARLY_TRUST_FLOOR"],
        cap=constants["ATTN_EARLY_TRUST_CAP"],
        agreement=constants["ATTN_TRUST_MIN_AGREE"],
    )
    for name in config["matrices"]:
        parameters = {name: nn.Parameter(data[f"{name}.start"].clone())}
        chosen = soap.but(trust=trust) if ".attn.proj." in name else soap
        updater = chosen.build(parameters, Ranks())
        for step in range(1 if name in config["first_step_only"] else config["steps"]):
            parameters[name].grad = data[f"{name}.grad{step}"].clone()
            updater.step(moment(step), 1.0)
            torch.testing.assert_close(parameters[name].detach(), data[f"{name}.after{step}"], rtol=1e-4, atol=1e-4)
        state = updater.state()
        if name not in config["first_step_only"]:
            kept = {"momentum": "momentum", "mean_squares": "exp_avg_sq"}
            kept |= {"row_gram": "row_gg", "column_gram": "col_gg"}
            for ours, script in kept.items():
                (found,) = [tensor for key, tensor in state.items() if key.startswith(f"{ours}/")]
                torch.testing.assert_close(found[0], data[f"{name}.{script}"], rtol=1e-4, atol=1e-5)


def test_a_trust_gate_needs_its_floor_below_its_cap() -> None:
    with pytest.raises(UserError, match="above its cap"):
        TrustGate(floor=0.9)
    TrustGate(floor=0.85)


def test_floored_rows_by_hand() -> None:
    updates = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    weights = torch.tensor([[0.0, 8.0], [6.0, 8.0], [6.0, 8.0]])
    found = floor_rows(updates, weights, 0.5)
    torch.testing.assert_close(found, torch.tensor([[3.0, 4.0], [3.0, 4.0], [0.0, 0.0]]))


@pytest.mark.parametrize("shape", [(12, 3), (3, 12)])
def test_the_least_length_of_a_row_is_that_of_the_step(shape: tuple[int, int]) -> None:
    parameters = some_parameters({"w": shape})
    before = copies(parameters)["w"]
    set_gradients(parameters, 0)
    Muon(lr=0.1, row_floor=20.0, precision="float32").build(parameters, Ranks()).step(moment(0), 1.0)
    lengths = (parameters["w"].detach() - before).norm(dim=1)
    torch.testing.assert_close(lengths, 0.1 * 20.0 * before.norm(dim=1))


def test_cautious_decay_is_of_weights_that_shrink_anyway() -> None:
    found = {}
    for cautious in (0.0, 0.5):
        parameters = some_parameters({"w": (6, 10)})
        before = copies(parameters)["w"]
        set_gradients(parameters, 0)
        Muon(lr=0.1, cautious_decay=cautious, precision="float32").build(parameters, Ranks()).step(moment(0), 0.5)
        found[cautious] = parameters["w"].detach()
    shrinking = (before - found[0.0]) * before > 0
    assert 10 < shrinking.sum() < 50
    torch.testing.assert_close(found[0.5], torch.where(shrinking, found[0.0] * (1 - 0.05 * 0.5), found[0.0]))


@pytest.mark.parametrize("columns", [10, 3])
def test_groups_of_rows_are_matrices_of_their_own(columns: int) -> None:
    whole, parts = some_parameters({"w": (12, columns)}), {}
    set_gradients(whole, 0)
    assert whole["w"].grad is not None
    for name, rows in {"a": slice(0, 4), "b": slice(4, 8), "c": slice(8, 12)}.items():
        parts[name] = nn.Parameter(whole["w"].detach()[rows].clone())
        parts[name].grad = whole["w"].grad[rows].clone()
    muon = Muon(lr=0.1, precision="float32")
    muon.but(group_rows=4).build(whole, Ranks()).step(moment(0), 1.0)
    muon.build(parts, Ranks()).step(moment(0), 1.0)
    torch.testing.assert_close(whole["w"].detach(), torch.cat([part.detach() for part in parts.values()]))
    with pytest.raises(UserError, match=r"12 rows of w do not divide into groups of 5"):
        muon.but(group_rows=5).build(whole, Ranks())


@pytest.mark.parametrize("cls", [Muon, AdamW])
def test_the_taper_of_weight_decay(cls: type[Muon | AdamW]) -> None:
    """Constant until 0.7 of the run, then in a straight line to half."""
    optimizer = cls(lr=0.5, weight_decay=Ramp(start=0.2, end=0.1, begin=0.7, finish=1.0))
    for step, decay in [(0, 0.2), (70, 0.2), (85, 0.15), (100, 0.1)]:
        parameters = some_parameters()
        before = copies(parameters)
        for parameter in parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.build(parameters, Ranks()).step(moment(step), 1.0)
        for name in SHAPES:
            torch.testing.assert_close(parameters[name].detach(), before[name] * (1 - 0.5 * decay))


# The public scripts' steps


@pytest.fixture(scope="module")
def facts(parity: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_facts(parity / "components" / "optimiser" / "info")
    return found


def constants(facts: dict[str, Any], name: str) -> dict[str, Any]:
    """The settings of a group, wherever they stand."""
    for value in [facts, *facts.values()]:
        if isinstance(value, dict) and name in value:
            return dict(value[name]) if isinstance(value[name], dict) else {"rows": value[name]}
    raise AssertionError(f"no {name}")


@pytest.mark.parametrize("recipe", ["BASE", "S001", "S002", "L3", "TERN", "ARG_banks", "TOP_banks"])
@pytest.mark.parametrize("warmup", ["short_warmup", "recipe_warmup"])
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.25)])
def test_muon_agrees_with_the_scripts(
    parity: Path,
    facts: dict[str, Any],
    recipe: str,
    warmup: str,
    precision: Literal["float32", "bfloat16"],
    tolerance: float,
) -> None:
    """The tolerance is in units of the learning rate, about that of an element of the update."""
    data = tensors(parity / "components" / "optimiser" / "muon_steps")
    chosen, rows = constants(facts, recipe), constants(facts, f"{recipe}.{warmup}")["rows"]
    first, second = rows[0]["momentum"], rows[1]["momentum"]
    steps = round((chosen["momentum"] - first) / (second - first))  # of the momentum's linear warm-up
    optimizer = Muon(
        lr=chosen["lr"],
        momentum=StepRamp(start=first, end=chosen["momentum"], steps=steps),
        steps=chosen["backend steps"],
        coefficients="polar_express" if recipe == "TOP_banks" else "classic",
        normalize_rows=chosen.get("row normalize", recipe == "TERN"),
        weight_decay=chosen.get("weight decay", chosen.get("wd", 0.0)),
        precision=precision,
    )
    kind = "_bank" if "banks" in recipe else ""
    start = {name.partition(".")[2]: tensor for name, tensor in data.items() if name.startswith(f"start{kind}.")}
    if not kind:
        start = {index: tensor[None] for index, tensor in start.items()}
    parameters = {index: [nn.Parameter(one.clone()) for one in stack] for index, stack in start.items()}
    updater = optimizer.build({f"{i}.{j}": p for i, stack in parameters.items() for j, p in enumerate(stack)}, Ranks())

    def compare(prefix: str, found: Mapping[str, Tensor], limit: float) -> int:
        compared = [index for index in start if f"{prefix}.{index}" in data]
        for index in compared:
            expected = data[f"{prefix}.{index}"].view_as(start[index])
            last_bits = 4 * torch.finfo(torch.float32).eps * expected.abs().max()
            assert (found[index] - expected).abs().max() < limit + last_bits, index
        return len(compared)

    compared, named = 0, f"{recipe}.{warmup}.{ {'float32': 'fp32', 'bfloat16': 'bf16'}[precision] }"
    for step, row in enumerate(rows):
        for index, matrices in parameters.items():
            gradients = data[f"grad{kind}.step{step}.{index}"].view_as(start[index])
            for parameter, gradient in zip(matrices, gradients, strict=True):
                parameter.grad = gradient.clone()
        updater.step(moment(step), row["learning_rate"] / chosen["lr"])
        weights = {index: torch.stack([p.detach() for p in matrices]) for index, matrices in parameters.items()}
        compared += compare(f"{named}.after_step{step}", weights, tolerance * chosen["lr"])
    assert compared >= 2 * len(start)
    banks = {
        stack.shape[1:]: updater.state()["momentum/" + "x".join(map(str, stack.shape[1:]))] for stack in start.values()
    }
    buffers = dict[str, Tensor]()
    for index, stack in start.items():  # those of one shape stand in one bank
        bank = banks[stack.shape[1:]]
        buffers[index], banks[stack.shape[1:]] = bank.split([len(stack), len(bank) - len(stack)])
    # the scripts with banks keep gradients and momentum in bfloat16, we in float32
    rounding = 2**-7 if kind and precision == "bfloat16" else 1e-6
    largest = max(tensor.abs().max().item() for tensor in buffers.values())
    compare(f"{named}.momentum_buffer_after_step{len(rows) - 1}", buffers, rounding * largest)


def adamw(chosen: dict[str, Any]) -> AdamW:
    return AdamW(
        lr=chosen["lr"],
        beta1=chosen["betas"][0],
        beta2=chosen["betas"][1],
        epsilon=chosen["eps"],
        weight_decay=chosen.get("weight decay", 0.0),
    )


@pytest.mark.parametrize(
    "name",
    [
        "BASE_tied_embedding",
        "BASE_scalars",
        "S001_tied_embedding",
        "ARG_scalars",
        "L3_tied_embedding",
        "L3_scalars",
        "TOP_tied_embedding",
        "TOP_scalars",
        "TOP_adapters",
    ],
)
def test_adamw_agrees_with_the_scripts(parity: Path, facts: dict[str, Any], name: str) -> None:
    data = tensors(parity / "components" / "optimiser" / "adam_sgd_steps")
    chosen = constants(facts, name)
    parameter = nn.Parameter(data["start"].clone())
    updater = adamw(chosen).build({"w": parameter}, Ranks())
    for step, scale in enumerate([1.0, 1.0, 0.5, 0.1]):
        parameter.grad = data[f"grad.step{step}"].clone()
        updater.step(moment(step), scale)
    expected = data[f"{name}.after_step3"]
    assert (parameter.detach() - expected).abs().max() < 1e-4 * chosen["lr"] + 1e-6
    assert (data["start"] - expected).abs().max() > chosen["lr"]


def test_adamw_agrees_with_the_scripts_in_half_precision(parity: Path, facts: dict[str, Any]) -> None:
    data = tensors(parity / "components" / "optimiser" / "adam_sgd_steps")
    chosen = constants(facts, "BASE_tied_embedding")
    parameter = nn.Parameter(data["start"].bfloat16())
    updater = adamw(chosen).build({"w": parameter}, Ranks())
    for step, scale in enumerate([1.0, 1.0, 0.5, 0.1]):  # the README's
        parameter.grad = data[f"grad.step{step}"].bfloat16()
        updater.step(moment(step), scale)
    expected = data["BASE_tied_embedding_kept_in_bfloat16.after_step3"]
    assert (parameter.float() - expected).abs().max() <= 2**-8 * expected.abs().max()


# PyTorch's own


@pytest.mark.long
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_muon_is_that_of_pytorch(weight_decay: float) -> None:
    """PyTorch averages the momentum where we sum it; Newton-Schulz divides the factor out."""
    ours, theirs = some_parameters(), some_parameters()
    updater = Muon(lr=0.05, momentum=0.9, weight_decay=weight_decay).build(ours, Ranks())
    reference = torch.optim.Muon(
        theirs.values(), lr=0.05, momentum=0.9, weight_decay=weight_decay, adjust_lr_fn="original"
    )
    for step in range(4):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        updater.step(moment(step), 1.0)
        reference.step()
    start = some_parameters()
    for name in SHAPES:
        moved = (theirs[name] - start[name]).norm()
        assert (ours[name] - theirs[name]).norm() < 0.05 * moved  # bfloat16 and another order of products


def test_adamw_first_step_by_hand() -> None:
    parameter = nn.Parameter(torch.tensor([[1.0, -2.0]]))
    parameter.grad = torch.tensor([[0.5, -0.1]])
    AdamW(lr=0.1, weight_decay=0.5).build({"w": parameter}, Ranks()).step(moment(0), 1.0)
    # decay: 1 - 0.1·0.5 = 0.95; then the first step is lr times the sign of the gradient
    assert parameter.detach().flatten().tolist() == pytest.approx([0.95 - 0.1, -1.9 + 0.1], rel=1e-6)


@pytest.mark.parametrize("name", ["beta1", "beta2"])
def test_a_mean_that_nothing_enters_is_refused(name: str) -> None:
    """The first step would divide zero by zero."""
    with pytest.raises(UserError, match=f"{name} must be from 0 to 0.999999, not 1$"):
        AdamW(lr=0.1, **{name: 1.0})


def test_muon_first_step_by_hand() -> None:
    # A diagonal gradient stays diagonal: buffer = g, u = g + 0.9·g; a tall matrix moves by sqrt(4/2) more.
    parameter = nn.Parameter(torch.zeros(4, 2))
    gradient = torch.zeros(4, 2)
    gradient[0, 0], gradient[1, 1] = 3.0, 4.0
    parameter.grad = gradient
    Muon(lr=0.1, momentum=0.9, steps=1, precision="float32").build({"w": parameter}, Ranks()).step(moment(0), 1.0)
    x, y = (3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5 for s in (0.6, 0.8))
    expected = torch.zeros(4, 2)
    expected[0, 0], expected[1, 1] = -0.1 * 2**0.5 * x, -0.1 * 2**0.5 * y
    torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-7)


def test_muon_is_for_matrices() -> None:
    for shape in [(3,), (), (2, 3, 4)]:
        with pytest.raises(UserError, match=r"give w, of shape .*, to AdamW"):
            Muon(lr=0.1).build({"w": nn.Parameter(torch.zeros(shape))}, Ranks())


@pytest.mark.long
@every_optimizer
def test_a_step_reads_no_number_of_the_device(optimizer: Optimizer) -> None:
    """The host would wait for a GPU's earlier steps. Tensors without data, on `meta`, have no number to be read."""
    parameters = {name: nn.Parameter(torch.empty(shape, device="meta")) for name, shape in SHAPES.items()}
    updater = optimizer.build(parameters, Ranks(device=torch.device("meta")))
    for step in range(3):
        for parameter in parameters.values():
            parameter.grad = torch.empty_like(parameter)
        updater.launch()
        updater.squares()
        updater.step(moment(step), 1.0, torch.ones((), device="meta"))
