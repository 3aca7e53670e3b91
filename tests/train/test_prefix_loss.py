"""The prefix-token loss: the arithmetic by hand, its schedule, its graphs, and where its table comes from."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from caddie.config.schedules import Ramp, TrainProgress
from caddie.data.loaders import Batch, Integers, TrainingData
from caddie.errors import UserError
from caddie.model import GPT, Block, GroupedQueryAttention, ReluSquared
from caddie.recipes.catalog import find
from caddie.runtime.distributed import Ranks
from caddie.train import memory
from caddie.train.loop import train
from caddie.train.memory import estimate_memory
from caddie.train.settings import Train
from caddie.train.trainer import Trainer

TINY = GPT(
    vocabulary=8,
    width=16,
    depth=1,
    block=Block(attention=GroupedQueryAttention(heads=2, key_value_heads=1), mlp=ReluSquared(hidden=16)),
)
BOS = 1
PREFIXES = np.array([-1, -1, -1, 2, 3, 3, 2, -1])
SCHEDULE = Ramp(start=0.25, end=0.0, begin=1 / 3, finish=2 / 3)
STEPS = Train(steps=9, batch_tokens=32, micro_batches=1, sequence_length=16, warmup_steps=0, prefix_loss=SCHEDULE)
IDS = np.random.default_rng(0).integers(0, 8, (2, 2, 16))


def trainer(config: Train, gpt: GPT = TINY, prefixes: Integers = PREFIXES) -> Trainer:
    made = Trainer(gpt, config, 7, Ranks(), prefixes)
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters.values()):
            parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(number))
    return made


def at(step: int, config: Train = STEPS) -> TrainProgress:
    return TrainProgress(step, 0.0, config.budget)


def gradients(made: Trainer, step: int) -> tuple[float, dict[str, Tensor]]:
    """The loss that is reported, and the gradients of the step."""
    loss = made.gradients(iter([Batch(*IDS)]), at(step), BOS)
    return float(loss), {name: parameter.grad.clone() for name, parameter in made.parameters.items()}  # type: ignore[union-attr]


def by_hand(made: Trainer, factor: float) -> tuple[float, dict[str, Tensor]]:
    """The same by plain operations, position by position."""
    made.zero_grad()
    inputs, targets = map(torch.from_numpy, IDS)
    logs = F.log_softmax(made.model(inputs, inputs == BOS), -1)
    right = of_prefixes = logs.new_zeros(())
    for row, column in np.ndindex(2, 16):
        target = int(targets[row, column])
        right = right - logs[row, column, target]
        if (prefix := int(PREFIXES[target])) >= 0:
            of_prefixes = of_prefixes - logs[row, column, prefix]
    ((right + factor * of_prefixes) / 32).backward()  # type: ignore[no-untyped-call]
    return float(right.detach()) / 32, {name: parameter.grad.clone() for name, parameter in made.parameters.items()}  # type: ignore[union-attr]


@pytest.mark.parametrize("scope", ["row", "document"])
@pytest.mark.parametrize(("step", "factor"), [(0, 0.25), (3, 0.25), (4, 0.25 * 2 / 3), (6, 0.0), (8, 0.0)])
def test_the_loss_by_hand(step: int, factor: float, scope: str) -> None:
    """Descended is CE(T) + λ CE(T'), reported CE(T) alone; whatever attention sees of other documents."""
    made = trainer(STEPS, TINY.but({"block.attention.scope": scope}))
    loss, found = gradients(made, step)
    expected_loss, expected = by_hand(made, factor)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    if factor:
        _, plain = gradients(trainer(STEPS.but(prefix_loss=0.0), made.model.config), step)
        assert any((found[name] - plain[name]).abs().max() > 1e-3 for name in plain)


def test_learned_caps_and_other_losses_go_with_it() -> None:
    config = STEPS.but(z_loss=0.1, prefix_loss=0.5)
    for caps in (None, "trained"):
        made = trainer(config, TINY.but({"head.learned_caps": caps}))
        if made.model.head.caps is not None:
            with torch.no_grad():
                made.model.head.caps.fill_(20.0)
        _, found = gradients(made, 0)
        made.zero_grad()
        inputs, targets = map(torch.from_numpy, IDS)
        logits = made.model(inputs, inputs == BOS).flatten(0, 1)
        prefixes = torch.from_numpy(PREFIXES)[targets.flatten()]
        second = F.cross_entropy(logits, prefixes, ignore_index=-1, reduction="sum") / len(prefixes)
        squared = logits.logsumexp(-1).square().mean()
        (F.cross_entropy(logits, targets.flatten()) + 0.1 * squared + 0.5 * second).backward()
        for name, parameter in made.parameters.items():
            assert parameter.grad is not None
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-6)


def test_steps_with_and_without_it_have_graphs_of_their_own_which_are_warmed_up() -> None:
    made = trainer(STEPS)
    assert [shape.prefixed for shape in made.shapes()] == [True, False]
    assert [made.shape(at(step)).prefixed for step in range(9)] == [True] * 6 + [False] * 3
    assert [shape.prefixed for shape in trainer(STEPS.but(prefix_loss=0.0)).shapes()] == [False]


def test_a_last_third_is_trained_as_without_it() -> None:
    """To the bit, so that nothing of it is left where its factor is zero."""
    ends = []
    for factor in (SCHEDULE, 0.0):
        made = trainer(STEPS.but(prefix_loss=factor))
        made.step(iter([Batch(*IDS)]), at(7), BOS)
        ends.append({name: parameter.detach().clone() for name, parameter in made.parameters.items()})
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_compiled_it_is_the_same_and_a_new_factor_needs_no_new_graph() -> None:
    torch._dynamo.reset()
    plain, compiled = trainer(STEPS), trainer(STEPS.but(compile="always"))
    assert compiled.compiled
    graphs = []
    for step in (0, 4, 5, 7):
        (loss, found), (expected_loss, expected) = gradients(compiled, step), gradients(plain, step)
        graphs.append(compiled.graphs())
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5)
        compiled.zero_grad()
        plain.zero_grad()
    assert graphs[0] == graphs[1] == graphs[2] < graphs[3], "one with it, one without"


def test_a_run_takes_the_table_of_its_tokenizer(tmp_path: Path) -> None:
    shards = [np.random.default_rng(0).integers(0, 8, 500).astype(np.uint16)]
    weights = []
    for number, prefixes in enumerate((PREFIXES, np.full(8, -1))):
        data = TrainingData(shards, BOS, prefixes=lambda table=prefixes: table)  # type: ignore[misc]
        (folder := tmp_path / str(number)).mkdir()
        weights.append(train(TINY, STEPS.but(steps=2), data, seed=7, folder=folder).last)
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    with pytest.raises(UserError, match=r"train\.prefix_loss needs the tokenizer"):
        train(TINY, STEPS, TrainingData(shards, BOS), seed=7, folder=tmp_path)
    (folder := tmp_path / "off").mkdir()
    train(TINY, STEPS.but(prefix_loss=0.0, steps=1), TrainingData(shards, BOS), seed=7, folder=folder)


@pytest.mark.long  # imports the compiler
def test_its_memory_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = find("tiny")
    real = [estimate_memory(recipe.model, recipe.train.but(prefix_loss=factor)) for factor in (0.0, 0.25)]
    monkeypatch.setattr(memory, "_REAL_FLOPS", 0)
    fake = estimate_memory(recipe.model, recipe.train.but(prefix_loss=0.25))
    assert real[0].step <= real[1].step == pytest.approx(fake.step, rel=0.1)
