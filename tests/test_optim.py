"""Optimizers: the public scripts' steps, PyTorch's own Muon, and what every optimizer must keep."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from caddie.config import field_types, variants
from caddie.distributed import Ranks
from caddie.errors import UserError
from caddie.optim import AdamW, Muon, Optimizer, Updater, newton_schulz
from caddie.schedules import Budget, Moment, Ramp, StepRamp

SETTINGS: list[Optimizer] = [
    *(cls(lr=0.05) for cls in variants(Optimizer).values()),
    AdamW(lr=0.05, weight_decay=0.1, beta1=0.8, beta2=0.99),
    Muon(lr=0.05, weight_decay=0.1, precision="float32"),
    Muon(lr=0.05, momentum=StepRamp(start=0.5, end=0.9, steps=3), precision="float32"),
]
"""Every variant as it comes, and a few with other settings."""
every_optimizer = pytest.mark.parametrize("optimizer", SETTINGS, ids=repr)

SHAPES = {"a": (6, 10), "b": (10, 6), "c": (6, 10), "d": (8, 8), "e": (6, 10)}


def moment(step: int, steps: int = 100) -> Moment:
    return Moment(step, 0.0, Budget(steps=steps))


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
    for step in range(120):
        for parameter in parameters.values():
            parameter.grad = None
        loss().backward()
        updater.step(moment(step, 120), 4.0 * (1.0 - step / 120))
        losses.append(loss().item())
    assert losses[10] < 0.95 * losses[0]
    assert losses[-1] < 0.05 * losses[0]


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


@dataclass
class Exchange:
    """What several ranks of one process add up."""

    world: int
    barrier: threading.Barrier = field(init=False)
    shares: dict[int, list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.world, timeout=30)


@dataclass(frozen=True)
class ThreadRanks(Ranks):
    """Ranks that are threads; only sums are exchanged."""

    exchange: Exchange = field(default_factory=lambda: Exchange(1))

    def sum(self, tensors: Sequence[Tensor]) -> None:
        self.exchange.shares[self.rank] = [tensor.clone() for tensor in tensors]
        self.exchange.barrier.wait()
        totals = [torch.stack(parts).sum(0) for parts in zip(*self.exchange.shares.values(), strict=True)]
        self.exchange.barrier.wait()
        for tensor, total in zip(tensors, totals, strict=True):
            tensor.copy_(total)


@every_optimizer
@pytest.mark.parametrize("world", [2, 4])
def test_several_ranks_are_one(optimizer: Optimizer, world: int) -> None:
    alone = some_parameters()
    run(optimizer.build(alone, Ranks()), alone, range(3))
    exchange = Exchange(world)
    replicas = [some_parameters() for _ in range(world)]

    def work(rank: int) -> None:
        ranks = ThreadRanks(rank=rank, world=world, exchange=exchange)
        run(optimizer.build(replicas[rank], ranks), replicas[rank], range(3))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    exact = not isinstance(optimizer, Muon) or optimizer.precision == "float32"
    for name in SHAPES:
        for replica in replicas:
            assert torch.equal(replica[name], replicas[0][name]), "all ranks hold the same weights"
        torch.testing.assert_close(replicas[0][name], alone[name], rtol=0, atol=2e-6 if exact else 2e-3)


# Newton-Schulz


@pytest.fixture(scope="module")
def matrices(parity: Path) -> dict[str, Tensor]:
    return load_file(parity / "components" / "optimiser" / "newton_schulz.safetensors")


MATRICES = ["m12x20", "m16x16", "m20x12", "lowrank12x20", "lowrank16x16", "lowrank20x12"]


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize(("result", "steps"), [("classic5", 5), ("classic3", 3), ("batched_classic5", 5)])
def test_newton_schulz_agrees_with_the_scripts(matrices: dict[str, Tensor], name: str, result: str, steps: int) -> None:
    matrix = matrices[f"in.{name}"]
    exact = newton_schulz(matrix, steps)
    assert (exact - matrices[f"{result}.fp32.{name}"]).abs().max() < 1e-4
    rounded = newton_schulz(matrix.bfloat16(), steps)
    assert rounded.dtype == torch.bfloat16
    expected = matrices[f"{result}.bf16.{name}"]
    # the batched script multiplies c(AA) where we multiply (cA)A, which half precision rounds differently
    assert (rounded.float() - expected).norm() < (0.2 if "batched" in result else 2e-2) * expected.norm()


def test_newton_schulz_takes_stacks(matrices: dict[str, Tensor]) -> None:
    stack = matrices["in.stack"]
    found = newton_schulz(stack, 5)
    assert (found - matrices["batched_classic5.fp32.stack"]).abs().max() < 1e-4
    for one, matrix in zip(found, stack, strict=True):
        assert (one - newton_schulz(matrix, 5)).abs().max() < 1e-5


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


# The public scripts' steps


@pytest.fixture(scope="module")
def facts(parity: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((parity / "components" / "optimiser" / "info.json").read_text())
    return found


def constants(facts: dict[str, Any], name: str) -> dict[str, Any]:
    """The settings of a group, wherever they stand."""
    for value in [facts, *facts.values()]:
        if isinstance(value, dict) and name in value:
            return dict(value[name]) if isinstance(value[name], dict) else {"rows": value[name]}
    raise AssertionError(f"no {name}")


@pytest.mark.parametrize("recipe", ["BASE", "S001", "S002"])
@pytest.mark.parametrize("warmup", ["short_warmup", "recipe_warmup"])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 0.1)])
def test_muon_agrees_with_the_scripts(
    parity: Path, facts: dict[str, Any], recipe: str, warmup: str, precision: str, tolerance: float
) -> None:
    """The tolerance is in units of the learning rate, about that of an element of the update."""
    data = load_file(parity / "components" / "optimiser" / "muon_steps.safetensors")
    chosen, rows = constants(facts, recipe), constants(facts, f"{recipe}.{warmup}")["rows"]
    start = rows[0]["momentum"]
    optimizer = Muon(
        lr=chosen["lr"],
        momentum=StepRamp(start=start, end=chosen["momentum"], steps=2)
        if warmup == "short_warmup"
        else StepRamp(start=start, end=chosen["momentum"], steps=500 if start == 0.85 else 1500),
        steps=chosen["backend steps"],
        weight_decay=chosen.get("weight decay", 0.0),
        precision={"fp32": "float32", "bf16": "bfloat16"}[precision],
    )
    parameters = {str(index): nn.Parameter(data[f"start.{index}"].clone()) for index in range(3)}
    updater = optimizer.build(parameters, Ranks())
    compared = 0
    for step, row in enumerate(rows):
        for index, parameter in parameters.items():
            parameter.grad = data[f"grad.step{step}.{index}"].clone()
        updater.step(moment(step), row["learning_rate"] / chosen["lr"])
        for index, parameter in parameters.items():
            expected = data.get(f"{recipe}.{warmup}.{precision}.after_step{step}.{index}")
            if expected is not None:
                assert (parameter.detach() - expected).abs().max() < tolerance * chosen["lr"]
                compared += 1
    assert compared >= 6
    for index, parameter in parameters.items():
        expected = data.get(f"{recipe}.{warmup}.{precision}.momentum_buffer_after_step2.{index}")
        if expected is not None:
            found = updater.state()[f"momentum/{parameter.shape[0]}x{parameter.shape[1]}"]
            assert (found[0] - expected).abs().max() < 1e-5


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
    data = load_file(parity / "components" / "optimiser" / "adam_sgd_steps.safetensors")
    chosen = constants(facts, name)
    optimizer = AdamW(
        lr=chosen["lr"],
        beta1=chosen["betas"][0],
        beta2=chosen["betas"][1],
        epsilon=chosen["eps"],
        weight_decay=chosen.get("weight decay", 0.0),
    )
    parameter = nn.Parameter(data["start"].clone())
    updater = optimizer.build({"w": parameter}, Ranks())
    for step, scale in enumerate([1.0, 1.0, 0.5, 0.1]):
        parameter.grad = data[f"grad.step{step}"].clone()
        updater.step(moment(step), scale)
    expected = data[f"{name}.after_step3"]
    assert (parameter.detach() - expected).abs().max() < 1e-4 * chosen["lr"] + 1e-6
    assert (data["start"] - expected).abs().max() > chosen["lr"]


def test_adamw_agrees_with_the_scripts_in_half_precision(parity: Path, facts: dict[str, Any]) -> None:
    data = load_file(parity / "components" / "optimiser" / "adam_sgd_steps.safetensors")
    chosen = constants(facts, "BASE_tied_embedding")
    parameter = nn.Parameter(data["start"].bfloat16())
    updater = AdamW(lr=chosen["lr"]).build({"w": parameter}, Ranks())
    for step, scale in enumerate([1.0, 1.0, 0.5, 0.1]):
        parameter.grad = data[f"grad.step{step}"].bfloat16()
        updater.step(moment(step), scale)
    expected = data["BASE_tied_embedding_kept_in_bfloat16.after_step3"]
    assert (parameter.float() - expected).abs().max() <= 2**-8 * expected.abs().max()


# PyTorch's own


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
