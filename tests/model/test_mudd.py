"""Dense connections: the scripts' numbers, passes that are left out, and coefficients in the places of constants."""

from pathlib import Path
from typing import Any

import pytest
import torch
from parity import facts, tensors
from samples import noisy
from torch import Tensor
from variations import BASE, VOCABULARY

from caddie.config.schedules import PiecewiseConstant
from caddie.errors import UserError
from caddie.model import GPT, MUDD, HashedNGrams, LastLayerMUDD, Model, Recurrence, RoutedStreams, ValueEmbedding, build
from caddie.model.block import BlockModule
from caddie.model.context import Context
from caddie.model.mudd import Coefficients, MixedOutputs
from caddie.model.parameters import assign, declarations
from caddie.ops import rms_norm
from caddie.pack.calibrate import calibrate
from caddie.pack.quantize import Float16, Gptq
from caddie.recipes.catalog import find
from caddie.train.optim import AdamW

PLAIN = BASE.but({"block.attention.key_value_heads": 4, "skips": None})
LOOPED = PLAIN.but(recurrence=Recurrence(first=1, last=1, passes=PiecewiseConstant(values=(1, 3), begins=(0.5,))))
RICH = PLAIN.but(
    {
        "depth": 4,
        "embedding.bigrams": HashedNGrams(buckets=61, dims=8),
        "value_embedding": ValueEmbedding(layers=(1, 3), dims=8),
        "layers": {"3": {"parallel": True}},
    }
)
IDS = torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))


def random_model(gpt: GPT) -> Model:
    """The model with no weight at zero, in float64."""
    return noisy(build(gpt, 0), 0.2).double()


def mixed_outputs(model: Model, number: int) -> MixedOutputs:
    part = model.get_submodule(f"dense_connections.after.{number}")
    assert isinstance(part, MixedOutputs)
    return part


def coefficients(model: Model, name: str) -> Coefficients:
    part = model.get_submodule(f"dense_connections.{name}")
    assert isinstance(part, Coefficients)
    return part


def near(found: Tensor, expected: Tensor, scale: float = 0.0) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * max(scale, float(expected.abs().max())))


# The scripts' numbers


def test_mixtures_agree_with_the_script(frontier: Path) -> None:
    config, data = facts(frontier / "config")["mudd"], tensors(frontier / "mudd")
    assert config["cases"]
    for number, case in enumerate(config["cases"]):
        index, window = case["index"], case["window"]
        own = {key.partition(".")[2]: value for key, value in data.items() if key.startswith(f"{number}.")}
        connections = MUDD(
            after=(index,),
            values=(index,) if case["ways"] == 2 and not case["last"] else (),
            windows=((index, window),) if window else (),
        )
        depth = index + (1 if case["last"] else 2)
        made = connections.build(config["dim"], range(depth), [PLAIN.block] * depth, PLAIN.embedding, None)
        part = made.get_submodule(f"after.{index}")
        assert isinstance(part, MixedOutputs)
        assert (part.sources, part.channels) == (case["sources"], case["channels"])
        names = {"w1.weight": "up.weight", "w2.weight": "down.weight", "w2.bias": "bias", "scale": "scale"}
        part.load_state_dict({ours: own[name].view_as(part.get_parameter(ours)) for name, ours in names.items()})
        outputs = own["hiddens"].requires_grad_()
        mixed = part(outputs.unbind())
        near(part.weights(outputs[-1]).permute(2, 0, 1, 3), own["weights"])
        near(mixed, own["mixed"])
        inputs = {"hiddens": outputs, **{name: part.get_parameter(ours) for name, ours in names.items()}}
        found = torch.autograd.grad((mixed * own["upstream"]).sum(), list(inputs.values()))
        # Those of the weights of one source alone, which is normalized, are zero but for rounding.
        scale = float(own["grad.hiddens"].abs().max())
        for name, gradient in zip(inputs, found, strict=True):
            near(gradient.view_as(own[f"grad.{name}"]), own[f"grad.{name}"], scale)
        reached = [place for place, gradient in enumerate(found[0]) if gradient.abs().max() > 0]
        assert reached == sorted(set(case["used"]) | {len(outputs) - 1})


def test_coefficients_agree_with_the_script(frontier: Path) -> None:
    data = tensors(frontier / "mudd_coefficients")
    x, total = data["x"].requires_grad_(), torch.zeros(())
    parts = []
    for number, name in enumerate(("first", "second")):
        count = data[name].shape[-1]
        part = Coefficients(x.shape[-1], data["w1"].shape[1], dict.fromkeys(map(str, range(count)), 0.0))
        part.load_state_dict(
            {
                "up.weight": data["w1"][number],
                "down.weight": data["w2"][number, :count],
                "bias": data["b2"][number, :count],
            }
        )
        named = part.named(x)
        assert [*named] == [*map(str, range(count))]
        found = torch.cat([*named.values()], -1)
        near(found, data[name])
        total = total + (found * data[f"up{number}"]).sum()
        parts.append(part)
    keys = {"up.weight": "grad_w1", "down.weight": "grad_w2", "bias": "grad_b2"}
    weights = [(number, name) for number in range(2) for name in keys]
    inputs = [x, *(parts[number].get_parameter(name) for number, name in weights)]
    grad_x, *gradients = torch.autograd.grad(total, inputs)
    near(grad_x, data["grad_x"])
    for (number, name), gradient in zip(weights, gradients, strict=True):
        near(gradient, data[keys[name]][number, : len(gradient)])


@pytest.mark.parametrize(("dtype", "slope"), [(torch.float32, 2**11.5), (torch.bfloat16, 2**3.5)])
def test_the_first_gradient_depends_on_the_number_format(dtype: torch.dtype, slope: float) -> None:
    """The norm of nothing has the slope of one over the root of the format's epsilon: 2,896 or 11."""
    part = mixed_outputs(build(PLAIN.but(dense_connections=MUDD(after=(1,), values=(), windows=())), 0), 1)
    outputs = torch.zeros(3, 1, 1, 32, dtype=dtype)
    outputs[0, ..., 0], outputs[2, ..., 1] = 1.0, 1.0
    assert part(outputs.unbind()).abs().max() == 0
    (gradient,) = torch.autograd.grad(part(outputs.unbind())[..., 0].float().sum(), [part.bias])
    torch.testing.assert_close(gradient, torch.tensor([slope * 0.01, 0.0, 0.0]), rtol=0.01, atol=0)


# Passes


@pytest.mark.parametrize("stage", [0, -1])
def test_passes_that_are_left_out_are_handed_on_and_mixed(stage: int) -> None:
    """Five passes, the third and fourth of which the first stage leaves out: 0, 1, 1, 1, 2 against 0, 1, 2."""
    connections = MUDD(after=(0, 2, 3, 4), values=(0, 3), windows=((2, 2),))
    model = random_model(LOOPED.but(dense_connections=connections))
    assert model.config.longest_order == [0, 1, 1, 1, 2]
    assert model.config.places(0.0) == [range(1), range(1, 4), range(4, 5)]
    assert model.config.places() == [range(n, n + 1) for n in range(5)]
    context = Context(IDS, None, torch.float64)
    outputs, value_input = [model.embedding(context)], None
    x = outputs[0]
    for number, layer in enumerate(model.config.longest_order):
        if stage == -1 or number not in (2, 3):
            block = model.blocks[layer]
            assert isinstance(block, BlockModule)
            context.value_input = value_input
            x = block(x, outputs[0], context)
        outputs.append(x)
        value_input = None
        if number in connections.after:
            mixed = mixed_outputs(model, number)(outputs)
            assert len(mixed) == 1 + (number in connections.values)
            value_input = rms_norm(x) + mixed[1] if number in connections.values else None
            x = x + mixed[0]
    torch.testing.assert_close(model(IDS, dtype=torch.float64, stage=stage), model.head(x, model.embedding))


@pytest.mark.parametrize("fused", [False, True])
def test_values_are_computed_from_an_input_of_their_own(fused: bool) -> None:
    """At the first position, which sees itself alone, the output is that of the values."""
    block = random_model(PLAIN.but({"block.attention.fused": fused})).blocks[0]
    assert isinstance(block, BlockModule)
    attention = block.attention
    assert attention is not None
    h, other = (torch.randn(2, 12, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (0, 1))
    context = Context(IDS, None, torch.float64)
    context.value_input = other
    name = "query_key_value.weight" if fused else "value.weight"
    values = other @ attention.get_parameter(name)[-32:].T
    expected = values @ attention.get_parameter("output.weight").T
    torch.testing.assert_close(attention(h, context)[:, 0], expected[:, 0])


def test_light_mudd_starts_as_nothing_and_is_the_adamw_group_s() -> None:
    connections = MUDD(after=(0, 2), values=(0,), windows=((2, 3),))
    plain, model = build(PLAIN, 3), build(PLAIN.but(dense_connections=connections), 3)
    assert torch.equal(plain(IDS), model(IDS))
    own = {name: found for name, found in declarations(model).items() if name.startswith("dense_connections")}
    shapes = {name.removeprefix("dense_connections.after."): tuple(model.get_parameter(name).shape) for name in own}
    assert {found.role for found in own.values()} == {"scalar"}
    assert shapes == {
        **{"0.up.weight": (4, 32), "0.down.weight": (4, 4), "0.bias": (4,), "0.scale": (2, 32)},
        **{"2.up.weight": (3, 32), "2.down.weight": (3, 3), "2.bias": (3,), "2.scale": (1, 32)},
    }
    assert model.get_parameter("dense_connections.after.0.up.weight").std().item() == pytest.approx(0.006, rel=0.2)
    assert model.get_parameter("dense_connections.after.0.scale").flatten().tolist() == pytest.approx([0.01] * 64)


def test_inputs_of_its_maps_are_calibrated() -> None:
    model = random_model(PLAIN.but(dense_connections=MUDD(after=(1,), values=(), windows=()))).float()
    seen: list[Tensor] = []
    part = mixed_outputs(model, 1)
    hook = part.register_forward_pre_hook(lambda module, given: seen.append(rms_norm(given[0][-1])))
    found = calibrate(model, [IDS], bos=0)["dense_connections.after.1.up.weight"]
    hook.remove()
    x = seen[-1].detach().flatten(0, 1)
    assert found.inputs is not None
    torch.testing.assert_close(found.inputs, x.T @ x / len(x), rtol=1e-4, atol=1e-5)


# The last layer


def test_the_last_layer_starts_as_it_would_without() -> None:
    """But for the early output, half of which is taken out behind it."""
    for gpt in (PLAIN, RICH, LOOPED.but(depth=4)):
        plain = build(gpt, 3)
        for backout in (0.0, 0.5):
            model = build(gpt.but(dense_connections=LastLayerMUDD(hidden=8, early=1, first=0, backout=backout)), 3)
            outputs: list[Tensor] = []
            hook = plain.blocks[1].register_forward_hook(lambda module, given, output: outputs.append(output))  # noqa: B023
            x: list[Tensor] = []
            behind = plain.head.register_forward_pre_hook(lambda module, given: x.append(given[0]))  # noqa: B023
            plain(IDS)
            hook.remove()
            behind.remove()
            expected = plain.head(x[0] - backout * outputs[0], plain.embedding)
            torch.testing.assert_close(model(IDS), expected)


def test_the_last_layer_by_hand() -> None:
    model = random_model(RICH.but(dense_connections=LastLayerMUDD(hidden=8, early=1, first=0)))
    before, behind = coefficients(model, "before"), coefficients(model, "behind")
    assert before.names == (
        *("values.embedded", "values.early", "values.stream", "stream.embedded", "stream.early", "stream.stream"),
        *("values.first_half", "values.second_half", "attention.stream", "attention.written", "attention.embedded"),
        *("attention.bigrams", "mlp.stream", "mlp.written"),
    )
    assert behind.names == ("embedded", "early", "before", "first", "values")
    context = Context(IDS, None, torch.float64)
    x0 = model.embedding(context)
    assert model.value_embedding is not None
    context.values = model.value_embedding.by_layer(context)
    table = context.values[3]
    outputs, last = [x0], model.blocks[3]
    assert isinstance(last, BlockModule)
    for block in list(model.blocks)[:3]:
        outputs.append(block(outputs[-1], x0, context))
    h0, h1, h2 = outputs[1:]
    k = [*before.named(h2).values()]
    assert context.bigrams is not None
    halves = torch.cat((k[6] * table[..., :16], k[7] * table[..., 16:]), -1)
    context.values[3] = k[0] * x0 + k[1] * h1 + k[2] * h2 + halves
    x = last.mixed(h2 + k[3] * x0 + k[4] * h1 + k[5] * h2, x0)
    y = k[8] * x + k[9] * last.attention_output(x, context) + k[10] * x0 + k[11] * context.bigrams
    y = k[12] * y + k[13] * last.mlp_output(x, context)
    c = [*behind.named(y).values()]
    y = y + c[0] * x0 + c[1] * h1 + c[2] * h2 + c[3] * h0 + c[4] * table
    torch.testing.assert_close(model(IDS, dtype=torch.float64), model.head(y, model.embedding))


def test_coefficients_are_those_of_what_the_model_has() -> None:
    model = build(PLAIN.but(dense_connections=LastLayerMUDD(hidden=8, early=1, first=0)), 0)
    assert len(coefficients(model, "before").names) == 11
    assert coefficients(model, "behind").names == ("embedded", "early", "before", "first")
    assert {found.role for name, found in declarations(model).items() if "dense" in name} == {"scalar"}


# Settings


@pytest.mark.parametrize(
    ("diff", "message"),
    [
        ({"dense_connections": MUDD()}, "after must name passes from 0 to 2, each once"),
        ({"dense_connections": MUDD(after=())}, "after must name passes from 0 to 2"),
        ({"dense_connections": MUDD(after=(1, 1), values=(), windows=())}, "after must name passes"),
        ({"dense_connections": MUDD(after=(1,), values=(0,), windows=())}, "values must name passes of `after`"),
        ({"dense_connections": MUDD(after=(2,), values=(2,), windows=())}, "but the last"),
        ({"dense_connections": MUDD(after=(1,), values=(), windows=((0, 2),))}, "windows must name passes of `after`"),
        ({"dense_connections": MUDD(after=(1,), values=(), windows=((1, 4),))}, "after pass 1 there are 3 outputs"),
        (
            {"dense_connections": MUDD(after=(0,), values=(0,), windows=()), "layers": {"1": {"attention": None}}},
            "the pass behind 0 has no attention",
        ),
        (
            {"dense_connections": MUDD(after=(0,), values=(), windows=()), "parallel_streams": RoutedStreams(first=2)},
            "set parallel_streams to none",
        ),
        ({"dense_connections": LastLayerMUDD(), "depth": 1}, "set model.depth to 2 or more"),
        ({"dense_connections": LastLayerMUDD()}, "early and .first must be at most 1, before the last pass"),
        (
            {"dense_connections": LastLayerMUDD(), "block.attention.key_value_heads": 2},
            "set layers.2.attention.key_value_heads to the number of heads",
        ),
        (
            {"dense_connections": LastLayerMUDD(), "recurrence": Recurrence(first=2, last=2, passes=2)},
            "a last layer that runs once",
        ),
    ],
)
def test_connections_that_do_not_fit_are_a_mistake(diff: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        PLAIN.but(diff).build()
    assert "\n" not in str(caught.value)


def test_passes_are_renumbered_for_a_model_with_fewer() -> None:
    halved = MUDD().renumbered(lambda number: round(number * 8 / 16))
    assert halved == MUDD(after=(1, 2, 3, 4, 5, 6, 8), values=(6,), windows=((1, 2), (3, 2), (5, 2)))
    assert MUDD().renumbered(lambda number: number) == MUDD()
    assert LastLayerMUDD().renumbered(lambda number: number // 2) == LastLayerMUDD(early=3, first=1)


@pytest.mark.parametrize("name", ["mudd", "last_layer_mudd"])
def test_recipes_keep_the_connections_out_of_muon_and_round_their_first_maps_to_six_bits(name: str) -> None:
    recipe = find(name)
    model = recipe.model.outline()
    optimizers = assign(recipe.train.optimizers, model, "train.optimizers")
    quantizers = assign(recipe.pack.quantizers, model, "pack.quantizers")
    own = [parameter for parameter in quantizers if parameter.startswith("dense_connections")]
    assert len(own) == {"mudd": 4 * 8, "last_layer_mudd": 3 * 2}[name]
    for parameter in own:
        quantizer: Any = quantizers[parameter]
        assert isinstance(optimizers[parameter], AdamW), parameter
        assert isinstance(quantizer, Gptq if parameter.endswith("up.weight") else Float16), parameter
        assert not isinstance(quantizer, Gptq) or quantizer.of.bits == 6
