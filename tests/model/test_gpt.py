"""Contract of every model, whatever its parts: visibility, learning, and the ways to run it.

The models are all one-step variations of a small one, all of them packed into a few, and every shipped recipe's.
"""

import inspect
import math
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from samples import noisy
from torch import Tensor
from variations import (
    ALONE,
    BASE,
    LENGTH,
    MODELS,
    ROWS,
    SHIPPED,
    TOGETHER,
    UNFIT,
    VOCABULARY,
    different,
    some_ids,
    some_starts,
)

import caddie.model
from caddie.config import Config, field_types, variants
from caddie.model import GPT, Cache, Linear, Model, build, parameter_count
from caddie.model.parameters import Initial, declarations
from caddie.recipes.catalog import shipped

QUICK = ("longer_warmdown", "gold6", "parallel_muon")
"""Recipes that are tested in full every time; the others are beside them where it takes long."""


def models(alone: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """All models as `name`: those of several variations each, which hold all of them, every time, one-step variations
    by themselves as marked, and most recipes only where there is time."""
    marks = dict.fromkeys(ALONE, alone) | dict.fromkeys(set(SHIPPED) - {*QUICK}, pytest.mark.slow)
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks.get(name, ())) for name in MODELS])


every_model = pytest.mark.parametrize("name", MODELS)
every_variation, every_mix = models(pytest.mark.long), models(pytest.mark.slow)


@cache
def random_model(name: str) -> Model:
    """The model of that name with no weight at zero; not to be changed."""
    return noisy(build(MODELS[name], seed=0), 0.2)


@cache
@torch.no_grad()
def whole_forward(name: str) -> Tensor:
    """The logits of that random model for `some_ids` and `some_starts`, in float64; not to be changed."""
    logits: Tensor = random_model(name)(some_ids(), some_starts(), torch.float64)
    return logits


def settings_of_attention(gpt: GPT, setting: str) -> set[Any]:
    """The values that a setting of attention has in the layers."""
    return {getattr(gpt.blocks[layer].attention, setting, None) for layer in range(gpt.depth)}


# What is tested


def test_every_class_of_the_model_is_among_the_variations() -> None:
    def classes(node: Config) -> Iterator[type[Config]]:
        yield type(node)
        for name in field_types(type(node)):
            if isinstance(inner := getattr(node, name), Config):
                yield from classes(inner)

    starts = {cls for cls in variants(Initial).values() if cls.__module__.startswith("caddie.")} - {*UNFIT}
    parts = {cls for cls in vars(caddie.model).values() if isinstance(cls, type) and issubclass(cls, Config)}
    used = {cls for gpt in ALONE.values() for cls in classes(gpt)}
    assert {cls for cls in parts | starts if not inspect.isabstract(cls)} <= used


def test_the_variations_are_alone_and_together() -> None:
    assert len(ALONE) > 50
    assert len(TOGETHER) < 10
    assert len(SHIPPED) == len(shipped())


# What may be seen


@every_model
@torch.no_grad()
def test_neither_the_future_nor_another_document_reaches_an_output(name: str) -> None:
    gpt, model = MODELS[name], random_model(name)
    positions = (0, 4, 5, 9, 10, 15)
    ids = some_ids()[:1].repeat(1 + len(positions), 1)
    for row, position in enumerate(positions, 1):
        ids[row, position] = (ids[row, position] + 5) % VOCABULARY
    starts = torch.zeros_like(ids, dtype=torch.bool)
    starts[:, [5, 11]] = True
    document = starts[0].cumsum(0)
    streams: list[Tensor] = []
    hook = model.embedding.register_forward_hook(lambda module, inputs, output: streams.append(output))
    plain, apart = model(ids, None, torch.float64), model(ids, starts, torch.float64)
    hook.remove()
    scopes, windows = settings_of_attention(gpt, "scope"), settings_of_attention(gpt, "window")
    windows |= settings_of_attention(gpt, "longest")
    for row, position in enumerate(positions, 1):
        same, later = document == document[position], torch.arange(LENGTH) >= position
        for logits in (plain, apart):
            moved = (logits[row] - logits[0]).abs().amax(-1) > 1e-10
            assert not moved[~later].any()
            assert moved[position], "its own output does change"
            if None not in scopes and windows == {None}:
                assert moved[same & later].all(), "all of the past of a document is seen"
        entered = (streams[1][row] - streams[1][0]).abs().amax(-1) > 1e-10
        assert not entered[~same].any(), "what is shifted stays in its document"
        assert entered[position]
        if "row" not in scopes:
            assert not moved[~same].any()
        elif scopes == {"row"} and windows == {None}:
            assert moved[later].all(), "with the scope of a row, later documents see it"


@every_mix
@torch.no_grad()
def test_rows_are_independent(name: str) -> None:
    model, ids, starts, together = random_model(name), some_ids(), some_starts(), whole_forward(name)
    for row in range(ROWS):
        alone = model(ids[row : row + 1], starts[row : row + 1], torch.float64)
        torch.testing.assert_close(alone[0], together[row], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "name", [name for name, gpt in MODELS.items() if settings_of_attention(gpt, "scope") == {"document"}]
)
@torch.no_grad()
def test_a_document_alone_is_a_document_in_a_row(name: str) -> None:
    model, ids, starts, together = random_model(name), some_ids(), some_starts(), whole_forward(name)[0, 5:11]
    alone = model(ids[:1, 5:11], starts[:1, 5:11], torch.float64)[0]
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)  # the tables of rotations are float32's


# What is learned


@every_variation
def test_every_parameter_gets_a_gradient_and_moves(name: str) -> None:
    """Within four steps, of which most models need two: a map that starts at zero hides the ones before it at first."""
    model, ids, starts = build(MODELS[name], seed=0), some_ids(), some_starts()
    parameters = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
    assert [key for key, parameter in model.named_parameters() if not parameter.requires_grad] in ([], ["head.caps"])
    before = {key: parameter.detach().clone() for key, parameter in parameters.items()}
    still, losses = {key for key, parameter in parameters.items() if parameter.numel()}, []
    while (still and len(losses) < 4) or len(losses) < 2:
        model.zero_grad()
        loss = F.cross_entropy(model(ids[:, :-1], starts[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for key, parameter in parameters.items():
                assert parameter.grad is not None, key
                assert torch.isfinite(parameter.grad).all(), key
                parameter.sub_(0.005 * parameter.grad.sign())
        still = {key for key in still if torch.equal(before[key], parameters[key])}
    assert not still
    assert losses[-1] < losses[0]


@every_mix
def test_first_values_depend_on_the_seed_and_the_name_alone(name: str) -> None:
    first, pass_index, base = build(MODELS[name], seed=3), build(MODELS[name], seed=3), build(BASE, seed=3)
    declared, of_base, shared = declarations(first), declarations(base), dict(base.named_parameters())
    for (key, parameter), other in zip(first.named_parameters(), pass_index.parameters(), strict=True):
        assert torch.equal(parameter, other), key
        like = shared.get(key)
        if like is not None and like.shape == parameter.shape and declared[key] == of_base[key]:
            assert torch.equal(parameter, like), key


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in different(SHIPPED)]
)
@torch.no_grad()
def test_the_first_loss_of_a_recipe_is_that_of_knowing_nothing(name: str) -> None:
    ids = some_ids()
    loss = F.cross_entropy(build(SHIPPED[name], 0)(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(VOCABULARY), rel=0.02)


# In which ways it runs


def compiled_twice(model: Model, backend: str) -> None:
    """One graph, which gives what the model gives, and serves for other documents too."""
    torch.compiler.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    found, expected = compiled(some_ids(), some_starts()), model(some_ids(), some_starts())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=3e-5)  # sums that nearly cancel are normed in MUDD
    with torch.compiler.set_stance("fail_on_recompile"):
        ids, starts = some_ids(1), some_starts(12)
        torch.testing.assert_close(compiled(ids, starts), model(ids, starts))
    if len(model.stages) > 1:
        torch.testing.assert_close(compiled(ids, starts, stage=0), model(ids, starts, stage=0))


@pytest.mark.long
@pytest.mark.parametrize("name", [*TOGETHER][:1])
@torch.no_grad()
def test_it_is_one_compiled_graph(name: str) -> None:
    compiled_twice(random_model(name), "eager")


@pytest.mark.slow
@every_model
def test_it_is_one_compiled_graph_forward_and_backward(name: str) -> None:
    model = build(MODELS[name], seed=0)
    model.load_state_dict(random_model(name).state_dict())
    compiled_twice(model, "aot_eager")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)):
        loss = run(some_ids(), some_starts()).square().mean()
        gradients.append(torch.autograd.grad(loss, trained))
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@every_mix
@pytest.mark.usefixtures("brain_products")
@torch.no_grad()
def test_half_precision_is_close_and_is_used(name: str) -> None:
    model, ids, starts = random_model(name), some_ids(), some_starts()
    single, half = model(ids, starts), model(ids, starts, torch.bfloat16)
    assert single.dtype == torch.float32
    assert half.dtype == torch.float32, "logits are not rounded, whatever the layers multiply in"
    assert model(ids, starts, torch.bfloat16, capped=False).dtype == torch.bfloat16
    assert (half - single).norm() < 0.1 * single.norm()
    assert not torch.equal(half, single)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


@every_variation
@torch.no_grad()
def test_a_model_is_what_its_config_and_weights_say(name: str) -> None:
    gpt, model, ids = MODELS[name], random_model(name), some_ids()
    read = GPT.from_json(gpt.to_json())
    assert read == gpt
    other, logits = build(read, seed=9), model(ids)
    other.load_state_dict({key: parameter.detach() for key, parameter in model.named_parameters()})
    assert torch.equal(logits, other(ids))
    assert torch.equal(logits, model(ids)), "no chance, no memory"
    assert parameter_count(gpt) == sum(parameter.numel() for parameter in model.parameters())


@every_variation
def test_every_matrix_is_the_one_linear_layer(name: str) -> None:
    """So that a view or a delta set on every `Linear` misses nothing."""
    model = random_model(name)
    inside = {id(layer.weight) for layer in model.modules() if isinstance(layer, Linear)}
    for key, declaration in declarations(model).items():
        assert declaration.role != "matrix" or id(model.get_parameter(key)) in inside, key


def in_pieces(model: Model, ids: Tensor, starts: Tensor | None, cuts: list[int], stage: int = -1) -> Tensor:
    """The logits of a forward that is made piece by piece, in float64."""
    cache, found = Cache(), []
    for piece in (slice(*pair) for pair in pairwise([0, *cuts, ids.shape[1]])):
        begins = None if starts is None else starts[:, piece]
        found.append(model(ids[:, piece], begins, torch.float64, cache=cache, stage=stage))
    assert cache.length == ids.shape[1]
    return torch.cat(found, 1)


@every_variation
@torch.no_grad()
def test_one_token_after_the_other_is_the_whole_forward(name: str) -> None:
    model, ids, starts = random_model(name), some_ids(), some_starts()
    found = in_pieces(model, ids, starts, list(range(6, 14)))  # in both rows a document begins among the single ones
    torch.testing.assert_close(found, whole_forward(name), rtol=0, atol=1e-10)


@every_mix
@torch.no_grad()
def test_pieces_are_the_whole_forward(name: str) -> None:
    model, ids = random_model(name), some_ids()
    unmarked = model(ids, None, torch.float64, stage=0)
    for starts, cuts, stage, whole in (
        (some_starts(), [4, 9], -1, whole_forward(name)),
        (None, [1, 8], 0, unmarked),
    ):
        torch.testing.assert_close(in_pieces(model, ids, starts, cuts, stage), whole, rtol=0, atol=1e-10)


@every_mix
@torch.no_grad()
def test_the_last_logits_alone_are_the_last_logits(name: str) -> None:
    model, ids, starts, whole = random_model(name), some_ids(), some_starts(), whole_forward(name)
    for last in (LENGTH + 3, LENGTH, 9, 1, 0):
        found = model(ids, starts, torch.float64, last=last)
        torch.testing.assert_close(found, whole[:, max(0, LENGTH - last) :], rtol=0, atol=1e-10)
    cache = Cache()
    model(ids[:, :11], starts[:, :11], torch.float64, last=1, cache=cache)
    found = model(ids[:, 11:], starts[:, 11:], torch.float64, last=3, cache=cache)
    torch.testing.assert_close(found, whole[:, -3:], rtol=0, atol=1e-10)


@torch.no_grad()
def test_a_cache_belongs_to_its_rows_alone() -> None:
    model, ids, starts = random_model("longer_warmdown"), some_ids(), some_starts()
    apart, together = [Cache() for _ in range(ROWS)], Cache()
    for piece in (slice(0, 9), slice(9, LENGTH)):
        rows = [
            model(ids[row : row + 1, piece], starts[row : row + 1, piece], torch.float64, cache=apart[row])
            for row in range(ROWS)
        ]
        found = model(ids[:, piece], starts[:, piece], torch.float64, cache=together)
        torch.testing.assert_close(found, torch.cat(rows), rtol=0, atol=1e-10)


# Sizes


COUNTED = {"baseline": 17_059_912, "fp16_embedding": 16_765_000, "lower_lr": 17_059_912, "tiny": 4_424_323}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in (*QUICK, *COUNTED) else pytest.mark.long) for name in sorted(shipped())],
)
def test_parameters_are_counted_without_memory(name: str) -> None:
    gpt = shipped()[name].model
    real = gpt.build()
    assert parameter_count(gpt) == sum(parameter.numel() for parameter in real.parameters())
    assert next(real.parameters()).device.type == "cpu"
    if name in COUNTED:
        assert parameter_count(gpt) == COUNTED[name]


def test_the_baselines_parameters_by_hand() -> None:
    # table; four layers' skips; per layer: query and output, key and value, two of the MLP, mix and two scales, gains
    width = 512
    layer = 2 * width * width + 2 * width * 256 + 2 * width * 1024 + 4 * width + 8
    assert parameter_count(GPT()) == 1024 * width + 4 * width + 9 * layer == 17_059_912


def test_layers_may_differ() -> None:
    gpt = BASE.but({"depth": 4, "layers.1-2": {"mlp.hidden": 8}, "layers.3": {"attention.key_value_heads": 1}})
    model = build(gpt, 0)
    assert [model.blocks[layer].mlp.up.weight.shape[0] for layer in range(4)] == [40, 8, 8, 40]
    assert [model.blocks[layer].attention.key.weight.shape[0] for layer in range(4)] == [16, 16, 16, 8]
    assert model(some_ids()).shape == (ROWS, LENGTH, VOCABULARY)
