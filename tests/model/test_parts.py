"""The parts of the model one by one, with numbers computed by hand and those of the public scripts."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from packed_models import stirred, write_artifact
from parity import facts, matches, tensors
from samples import sample
from torch import Tensor
from variations import BASE, VOCABULARY

from caddie import ops
from caddie.config.schedules import PiecewiseConstant
from caddie.errors import UserError
from caddie.model import (
    GPT,
    Dense,
    DenseGate,
    DepthScaledNorm,
    GatedUNet,
    GatedValueResidual,
    GroupedQueryAttention,
    LeakyReluSquared,
    MixedValueResidual,
    NarrowGate,
    NTKRoPE,
    PhaseMix,
    PlainRoPE,
    RandomMap,
    Recurrence,
    ReluSquared,
    RMSNorm,
    RoPE,
    RoutedStreams,
    SeparateStreams,
    SparseGate,
    StreamMix,
    SwiGLU,
    TiedHead,
    TokenEmbedding,
    UNet,
    UntiedHead,
    ValueEmbedding,
    YaRNRoPE,
    build,
)
from caddie.model.block import BlockModule
from caddie.model.context import Cache, Context
from caddie.model.head import Head
from caddie.model.parameters import Part, RowConstants, draw_constants, initialize
from caddie.model.values import ValueTable
from caddie.pack.compress import Pack
from caddie.pack.quantize import Float32
from caddie.score.scorer import nats

FUNCTIONS = Path("components") / "functions" / "functions"


def made(part: Part, **values: object) -> Part:
    """The module with its first values, and some parameters (dots as two underscores) set."""
    initialize(part, 0)
    with torch.no_grad():
        for name, value in values.items():
            part.get_parameter(name.replace("__", ".")).copy_(torch.as_tensor(value))
    return part


def surroundings(ids: Tensor, starts: Tensor | None = None, cache: Cache | None = None) -> Context:
    return Context(ids, starts, torch.float64, cache)


# Functions


def test_functions_agree_with_the_public_scripts(parity: Path) -> None:
    data = tensors(parity / FUNCTIONS)
    near = {"rtol": 0, "atol": 1e-5}
    torch.testing.assert_close(ops.rms_norm(data["rmsnorm.in"]), data["rmsnorm.default_eps"], **near)
    for match in matches(data, r"rmsnorm\.eps_(.+)"):
        torch.testing.assert_close(ops.rms_norm(data["rmsnorm.in"], float(match[1])), data[match[0]], **near)
        assert (data["rmsnorm.default_eps"] - data[match[0]]).abs().max() > 1e-4
    for softcap, name in ((ops.softcap, "tanh"), (ops.polynomial_softcap, "tern_poly")):
        for match in matches(data, rf"softcap\.{name}(\d+)"):
            torch.testing.assert_close(softcap(data["softcap.in"], float(match[1])), data[match[0]], **near)
    logits = data["fused_ce.logits_before_cap"].requires_grad_()
    losses = F.cross_entropy(ops.softcap(logits, 30.0), data["fused_ce.targets"].long(), reduction="none")
    torch.testing.assert_close(losses, data["fused_ce.loss"], **near)
    (gradient,) = torch.autograd.grad(losses.mean(), logits)
    torch.testing.assert_close(gradient, data["fused_ce.grad_of_mean"], **near)
    for match in matches(data, r"xsa\.(.+)\.y"):
        y, v, out = (data[f"xsa.{match[1]}.{name}"].transpose(1, 2) for name in ("y", "v", "out"))
        torch.testing.assert_close(ops.xsa(y.contiguous(), v), out, **near)
    for match in matches(data, r"rope\.(?:full|partial)_(\d+)_of_\d+"):
        positions = torch.zeros(1, data["rope.x"].shape[1])
        tables = Context(positions, None, torch.float32).rope(PlainRoPE().as_text(), int(match[1]))
        turned = ops.rotate(data["rope.x"].transpose(1, 2), *tables).transpose(1, 2)
        torch.testing.assert_close(turned, data[match[0]], **near)


def test_raised_bases_turn_like_those_of_the_scripts(parity: Path) -> None:
    data = tensors(parity / FUNCTIONS)
    for match in matches(data, r"ntk\.cos\.(r(\d+)\.L(\d+)\.T(\d+)\.last_row)"):
        dims, native, length = map(int, match.groups()[1:])
        rope = NTKRoPE(native_length=native, length=length)
        tables = Context(torch.zeros(1, length), None, torch.float32).rope(rope.as_text(), dims)
        for table, name in zip(tables, ("cos", "sin"), strict=True):
            expected = data[f"ntk.{name}.{match[1]}"]
            torch.testing.assert_close(table[-1], expected, rtol=0, atol=2e-4)  # 2,047 turns in float32


def test_frequencies_are_those_of_the_scripts(parity: Path) -> None:
    bases = facts(parity / "components" / "functions" / "rotary_bases")
    cpu = torch.device("cpu")
    for case in bases["base rescaling"]:
        rope = NTKRoPE(native_length=case["length_constant"], length=case["length"])
        expected = torch.tensor(case["angle_per_position"])
        torch.testing.assert_close(rope.frequencies(case["rotary_dims"], cpu, torch.float32), expected)
    for case in bases["per-frequency interpolation (ternary record)"]:
        yarn = YaRNRoPE(base=case["base"], native_length=case["training_length"], length=case["maximum_length"])
        expected = torch.tensor(case["inverse_frequencies"])
        torch.testing.assert_close(yarn.frequencies(case["head_dim"], cpu, torch.float32), expected)


@pytest.mark.parametrize("rope", [NTKRoPE, YaRNRoPE])
def test_rows_shorter_than_the_native_length_keep_its_frequencies(rope: type[NTKRoPE | YaRNRoPE]) -> None:
    native, shorter = (
        rope(native_length=1024, length=length).frequencies(8, torch.device("cpu"), torch.float32)
        for length in (1024, 512)
    )
    assert torch.equal(native, shorter)


def test_activations_are_those_of_the_scripts(parity: Path) -> None:
    data = tensors(parity / FUNCTIONS)
    for mlp, name in ((ReluSquared(hidden=1), "relu2"), (LeakyReluSquared(hidden=1), "leaky_half_squared")):
        part = made(mlp.build(1), up__weight=1.0, down__weight=1.0)
        x = data["act.in"].reshape(-1, 1).requires_grad_()
        torch.testing.assert_close(part(x).flatten(), data[f"act.{name}"])
    (gradient,) = torch.autograd.grad(part(x).sum(), x)
    torch.testing.assert_close(gradient.flatten(), data["act.leaky_half_squared_grad"])


def test_a_gated_mlp_by_hand() -> None:
    part = made(SwiGLU(hidden=1).build(2), up__weight=[[1.0, 0]], gate__weight=[[0, 1.0]], down__weight=[[2.0], [-1.0]])
    half = 1 / (1 + math.exp(-3.0))
    torch.testing.assert_close(part(torch.tensor([5.0, 3.0])), torch.tensor([2.0, -1.0]) * 5 * 3 * half)


def test_norms_by_hand() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    unit = torch.tensor([[3.0, 4.0], [0.0, 0.0]]) / math.sqrt(12.5)
    torch.testing.assert_close(RMSNorm().build(3)(x), unit)
    torch.testing.assert_close(DepthScaledNorm().build(3)(x), unit / 2)
    torch.testing.assert_close(RMSNorm(epsilon=12.5).build(0)(x), unit / math.sqrt(2))
    torch.testing.assert_close(DepthScaledNorm(epsilon=12.5).build(8)(x), unit / math.sqrt(2) / 3)


def test_mixes_by_hand() -> None:
    assert StreamMix().initial(4, 9) == RowConstants(values=(1.0, 0.0))
    first, middle, last = (PhaseMix().initial(layer, 9) for layer in (0, 4, 8))
    assert isinstance(first, RowConstants)
    assert isinstance(last, RowConstants)
    assert middle == RowConstants(values=(0.5, 0.5))
    assert first.values == pytest.approx((0.18242552, 0.81757448))
    assert last.values == pytest.approx((0.81757448, 0.18242552))
    PhaseMix().initial(0, 1)  # a single layer divides by nothing


# Positions


def test_rotation_by_hand() -> None:
    cosine, sine = Context(torch.zeros(1, 3), None, torch.float64).rope(PlainRoPE().as_text(), 2)
    turned = ops.rotate(torch.tensor([[1.0, 0.0, 7.0]] * 3).double(), cosine, sine)
    expected = torch.tensor([[math.cos(p), -math.sin(p), 7.0] for p in range(3)])
    torch.testing.assert_close(turned, expected.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("channels", "half"), [(16, 8), (8, 2), (2, 1)])
def test_flipped_halves_turn_as_halves_apart_to_the_bit(channels: int, half: int, dtype: torch.dtype) -> None:
    def apart(x: Tensor) -> Tensor:
        u, w, rest = x.split((half, half, channels - 2 * half), dim=-1)
        return torch.cat((u * cosine + w * sine, w * cosine - u * sine, rest), dim=-1)

    x, y = (torch.randn(2, 3, 5, channels, dtype=dtype) for _ in range(2))
    cosine, sine = (torch.randn(5, half, dtype=dtype) for _ in range(2))
    results = []
    for function in (apart, lambda x: ops.rotate(x, cosine, sine)):
        leaf = x.clone().requires_grad_()
        turned = function(leaf)
        turned.backward(y)
        results.append((turned, leaf.grad))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_rows_no_longer_than_native_turn_as_before() -> None:
    plain = PlainRoPE().frequencies(8, torch.device("cpu"), torch.float32)
    for positions in (NTKRoPE(native_length=64, length=64), YaRNRoPE(native_length=64, length=64)):
        assert torch.equal(positions.frequencies(8, torch.device("cpu"), torch.float32), plain)
    assert torch.equal(NTKRoPE(native_length=64, length=32).frequencies(8, torch.device("cpu"), torch.float32), plain)
    two = NTKRoPE(native_length=8, length=64).frequencies(2, torch.device("cpu"), torch.float32)
    assert two.tolist() == [1.0]


@pytest.mark.parametrize("dims", [3, 10])
def test_channels_that_cannot_turn_are_a_mistake(dims: int) -> None:
    with pytest.raises(UserError, match=f"rope.dims must be even and at most 8, the size of a head, not {dims}"):
        BASE.but({"block.attention.rope.dims": dims}).build()
    assert RoPE.rotated_dims(PlainRoPE(dims=6), 8) == 6
    assert PlainRoPE().rotated_dims(8) == 8


# Attention


def test_exclusive_outputs_have_nothing_along_their_own_value() -> None:
    y, v = torch.tensor([[[[3.0, 4.0]], [[1.0, 1.0]]]]), torch.tensor([[[[2.0, 0.0]]]])
    assert ops.xsa(y, v).tolist() == [[[[0.0, 4.0]], [[0.0, 1.0]]]]
    assert torch.equal(ops.xsa(y, 0 * v), y)


def attention(**settings: Any) -> tuple[Part, Part]:
    """A plain attention of two heads on one, and another with these settings and, where it has them, its weights."""
    plain = GroupedQueryAttention(heads=2, key_value_heads=1)
    parts = []
    for config in (plain, plain.but(settings)):
        part = made(config.build(8, 1)).double()
        with torch.no_grad():
            for name, parameter in part.named_parameters():
                if name in ("query.weight", "key.weight", "value.weight", "output.weight"):
                    parameter.copy_(sample(*parameter.shape, seed=len(name)))
        parts.append(part)
    return parts[0], parts[1]


H = sample(1, 6, 8, seed=9).double()
IDS = torch.zeros(1, 6, dtype=torch.long)


def test_one_matrix_is_the_three_one_above_the_other() -> None:
    plain, fused = attention(fused=True)
    together = torch.cat([plain.get_parameter(f"{name}.weight") for name in ("query", "key", "value")])
    with torch.no_grad():
        fused.get_parameter("query_key_value.weight").copy_(together)
        fused.get_parameter("output.weight").copy_(plain.get_parameter("output.weight"))
    torch.testing.assert_close(fused(H, surroundings(IDS)), plain(H, surroundings(IDS)), rtol=0, atol=1e-12)


def test_attention_is_that_of_one_query_at_a_time() -> None:
    """The whole of it, grouped heads, norm, rotation and gain included, in the window and from the start of a piece."""
    starts = torch.tensor([[False, False, True, False, False, False]])
    for settings, sees in (
        ({}, lambda query, key: True),
        ({"window": 2}, lambda query, key: query - key < 2),
        ({"window": PiecewiseConstant(values=(2, 3), begins=(0.5,))}, lambda query, key: query - key < 3),
        ({"scope": "document"}, lambda query, key: (query < 2) == (key < 2)),
        # the document of four positions is cut into pieces of three and one
        ({"scope": "document", "longest": 3}, lambda query, key: (query < 2, query < 5) == (key < 2, key < 5)),
    ):
        _, part = attention(**settings)
        found = part(H, surroundings(IDS, starts))
        q, k, v = (H[0] @ part.get_parameter(f"{name}.weight").T for name in ("query", "key", "value"))
        angles = torch.arange(6.0).double()[:, None] * torch.tensor([1.0, 0.01]).double()

        def turned(x: Tensor, angles: Tensor = angles) -> Tensor:
            x = x / x.square().mean(-1, keepdim=True).sqrt()
            u, w = x[:, :2], x[:, 2:]
            return torch.cat((u * angles.cos() + w * angles.sin(), w * angles.cos() - u * angles.sin()), 1)

        heads = []
        for head in range(2):
            logits = 1.5 * turned(q[:, 4 * head : 4 * head + 4]) @ turned(k).T / 2.0
            seen = torch.tensor([[key <= query and sees(query, key) for key in range(6)] for query in range(6)])
            heads.append(logits.masked_fill(~seen, -torch.inf).softmax(-1) @ v)
        expected = torch.cat(heads, 1) @ part.get_parameter("output.weight").T
        torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-6)


def test_exclusive_attention_brings_nothing_of_the_position_itself() -> None:
    """At the first position, which sees itself alone, nothing is left."""
    plain, part = attention(xsa=True)
    assert plain(H, surroundings(IDS))[:, 0].abs().max() > 0.1
    found = part(H, surroundings(IDS))
    assert found[:, 0].abs().max() < 1e-12
    assert found[:, 1:].abs().amax(-1).min() > 1e-3


def test_gated_exclusive_attention_agrees_with_the_script(frontier: Path) -> None:
    data = tensors(frontier / "gated_xsa")
    y, v = (data[name].transpose(1, 2).contiguous().requires_grad_() for name in ("y", "v"))
    alpha = data["alpha"].requires_grad_()
    found = ops.xsa(y, v, alpha.tanh()).transpose(1, 2)
    torch.testing.assert_close(found, data["out"], rtol=1e-5, atol=1e-6)
    gradients = torch.autograd.grad((found * data["upstream"]).sum(), (y, v, alpha))
    for gradient, name in zip(gradients, ("grad_y", "grad_v", "grad_alpha"), strict=True):
        expected = data[name] if name == "grad_alpha" else data[name].transpose(1, 2)
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)


def test_gated_exclusive_attention_begins_where_it_is_told() -> None:
    plain, exclusive = attention(xsa=True)
    for initial, expected in ((0.0, plain), (20.0, exclusive)):
        _, part = attention(xsa=True, xsa_gate=initial)
        assert part.get_parameter("xsa_gate").tolist() == [initial, initial]
        torch.testing.assert_close(part(H, surroundings(IDS)), expected(H, surroundings(IDS)))
    _, half = attention(xsa=True, xsa_gate=math.atanh(0.5))
    mean = (plain(H, surroundings(IDS)) + exclusive(H, surroundings(IDS))) / 2
    torch.testing.assert_close(half(H, surroundings(IDS)), mean, rtol=1e-5, atol=1e-6)


def test_gates_by_hand() -> None:
    h = torch.zeros(1, 1, 16)
    h[0, 0, [0, 11, 12]] = torch.tensor([1.0, 2.0, 100.0])
    sigma = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    weight = torch.zeros(2, 12)
    weight[0, 0], weight[1, 11] = 3.0, -1.0
    for gate, first, then in (
        (NarrowGate(), [1.0, 1.0], [2 * sigma(3), 2 * sigma(-2)]),
        (NarrowGate(height=1.0), [0.5, 0.5], [sigma(3), sigma(-2)]),
        (SparseGate(), [0.5, 0.5], [sigma(1.5), sigma(-1)]),
        (SparseGate(scale=2.0), [0.5, 0.5], [sigma(6), sigma(-4)]),
    ):
        assert made(gate.build(16, 2))(h).flatten().tolist() == first
        assert made(gate.build(16, 2), logits__weight=weight)(h).flatten().tolist() == pytest.approx(then)
    assert made(DenseGate().build(16, 2))(h).flatten().tolist() == pytest.approx([sigma(4)] * 2)
    part = made(DenseGate(std=0.005).build(512, 64))
    assert part.get_parameter("logits.weight").std().item() == pytest.approx(0.005, rel=0.02)
    part = made(DenseGate(bias=None).build(16, 2), logits__weight=F.pad(weight, (0, 4), value=0.01))
    assert part(h).flatten().tolist() == pytest.approx([sigma(4.0), sigma(-1.0)])
    assert [name for name, _ in part.named_parameters()] == ["logits.weight"]
    assert NarrowGate(channels=99).build(16, 2).get_parameter("logits.weight").shape == (2, 16)


def test_a_gate_is_a_factor_on_each_head() -> None:
    plain, gated = attention(gate=SparseGate())
    torch.testing.assert_close(gated(H, surroundings(IDS)), plain(H, surroundings(IDS)) / 2, rtol=0, atol=1e-12)
    with torch.no_grad():
        gated.get_parameter("gate.logits.weight")[0] = (
            1e6 * H[0, 0]
        )  # the first head open at position 0, the other half
        plain.get_parameter("output.weight")[:, 4:] /= 2
    torch.testing.assert_close(gated(H, surroundings(IDS))[:, 0], plain(H, surroundings(IDS))[:, 0], rtol=0, atol=1e-12)


# Values


def test_values_of_the_first_layer_by_hand() -> None:
    values, first = torch.tensor([1.0, 2.0]), torch.tensor([10.0, -4.0])
    assert made(MixedValueResidual().build())(values, first).tolist() == [5.5, -1.0]
    assert made(MixedValueResidual().build(), shares=[0.1, 2.0])(values, first).tolist() == pytest.approx([3.0, 3.6])
    assert made(GatedValueResidual().build())(values, first).tolist() == [6.0, 0.0]
    assert made(GatedValueResidual().build(), gate=math.log(3.0))(values, first).tolist() == pytest.approx([8.5, -1.0])


def test_only_the_first_layer_hands_its_values_on() -> None:
    model = build(BASE.but({"block.attention.value_residual": "MixedValueResidual"}), 0)
    assert model.blocks[0].attention.value_residual is None
    assert model.blocks[1].attention.value_residual is not None
    context = Context(torch.zeros(1, 4, dtype=torch.long), None, torch.float32)
    h = sample(1, 4, 32)
    model.blocks[0].attention(h, context)
    first = context.first_values
    assert first is not None
    assert torch.equal(first[0, :, 2], model.blocks[0].attention.value(h)[0, 2].view(2, 8))
    model.blocks[1].attention(h, context)
    assert context.first_values is first


def test_values_of_the_tokens_by_hand() -> None:
    part = made(
        ValueTable(ValueEmbedding(layers=(1, 4), dims=2), 3, 2),
        weight=[[0.0, 0.0], [1.0, 2.0], [3.0, 4.0]],
        projection__weight=[[1.0, 0.0], [0.0, -1.0]],
        layer_scales=[10.0, 20.0],
    )
    added = part.by_layer(Context(torch.tensor([[2, 1]]), None, torch.float32))
    torch.testing.assert_close(added[1], torch.tensor([[[3.0, -4.0], [1.0, -2.0]]]))
    torch.testing.assert_close(added[4], torch.tensor([[[6.0, -8.0], [2.0, -4.0]]]))
    plain, other = attention()
    context = surroundings(IDS)
    context.values = {1: sample(1, 6, 4).double()}
    with torch.no_grad():
        value = plain.get_parameter("value.weight")
        value.zero_()
        other.get_parameter("value.weight").zero_()
    assert not plain(H, surroundings(IDS)).any()
    alone = other(H, context)[0, 0]
    twice = context.values[1][0, 0].repeat(2) @ other.get_parameter("output.weight").T
    torch.testing.assert_close(alone, twice, rtol=0, atol=1e-12)


# Matrices


def test_matrices_that_write_may_norm_what_they_read() -> None:
    x = torch.tensor([[3.0, 4.0]])
    for normed in (False, True):
        part = made(Dense(normed=normed).build_output(2, 2), weight=[[1.0, 0.0], [0.0, 2.0]])
        expected = torch.tensor([[3.0, 8.0]]) / (math.sqrt(12.5) if normed else 1.0)
        torch.testing.assert_close(part(x), expected)
        reading = made(Dense(normed=normed).build(2, 2), weight=[[1.0, 0.0], [0.0, 2.0]])
        assert reading(x).tolist() == [[3.0, 8.0]]
    assert not made(Dense().build_output(4, 4)).get_parameter("weight").any()


def test_a_random_map_is_fixed_and_learns_beside() -> None:
    part = made(RandomMap(rank=2).build_output(6, 4))
    x = sample(3, 6)
    fixed = part.get_buffer("fixed")
    assert torch.equal(part(x), x @ fixed.T)
    assert fixed.std().item() == pytest.approx(1 / math.sqrt(18), rel=0.4)
    with torch.no_grad():
        part.get_parameter("up.weight").copy_(sample(4, 2))
    low = part.get_parameter("up.weight") @ part.get_parameter("down.weight")
    torch.testing.assert_close(part(x), x @ (fixed + low).T)
    assert list(part.state_dict()) == ["down.weight", "up.weight"]


def test_constants_are_the_same_wherever_the_model_is_made_and_are_not_stored() -> None:
    gpt = BASE.but({"block.mlp.linear": RandomMap(rank=4)})
    one, other = build(gpt, 1), build(gpt, 2)
    with torch.device("meta"):
        loaded = gpt.build()
    loaded.load_state_dict(one.state_dict(), assign=True)
    draw_constants(loaded)
    constants = dict(one.named_buffers())
    assert len(constants) == 2 * gpt.depth
    assert not set(constants) & set(one.state_dict())
    for name, constant in constants.items():
        assert torch.equal(constant, other.get_buffer(name))
        assert torch.equal(constant, loaded.get_buffer(name))
    assert not torch.equal(constants["blocks.0.mlp.up.fixed"], constants["blocks.1.mlp.up.fixed"])
    ids = torch.arange(12).view(1, 12)
    assert torch.equal(loaded(ids), one(ids))


def test_an_artifact_has_the_constants_without_storing_them(tmp_path: Path) -> None:
    gpt = GPT(vocabulary=257, width=16, depth=1).but(
        {"block.attention.heads": 2, "block.attention.key_value_heads": 1, "block.mlp.hidden": 24}
    )
    gpt = gpt.but({"block.mlp.linear": RandomMap(rank=2), "block.attention.linear": RandomMap(rank=2)})
    model = build(gpt, 7)
    model.load_state_dict(stirred(gpt))
    quantizers = {role: Float32() for role in ("embedding", "matrix", "scalar")}
    loaded = write_artifact(tmp_path / "a", gpt, Pack(quantizers=quantizers))
    assert not any("fixed" in name for name in loaded.tensor_bytes)
    ids = torch.arange(12).view(1, 12)
    assert torch.equal(loaded.model(ids), model(ids))


# Lanes


def block_of(first: float, second: float) -> BlockModule:
    """A block with a mix (2, 3), whose attention is `first` times and whose MLP is `second` times what it reads."""
    block = BASE.block.but({"attention.heads": 1, "attention.key_value_heads": 1, "attention_norm": "RMSNorm"})
    part = BlockModule(block, 4, 0, 1, 0)
    initialize(part, 0)
    with torch.no_grad():
        part.mix.copy_(torch.tensor([2.0, 3.0])[:, None].expand(2, 4))  # type: ignore[union-attr]
    part.attention_output = lambda x, context: first * x  # type: ignore[method-assign, assignment]
    part.mlp_output = lambda x, context: second * x  # type: ignore[method-assign, assignment]
    return part


def stepped(lanes: Any, a: float = 1.0, b: float = 10.0, x0: float = 100.0, **values: object) -> list[float]:
    """Both lanes behind one block, and what they become in the end."""
    part = made(lanes.build(3), **values)
    one = torch.ones(1, 1, 4)
    after = part.step(2, block_of(0.5, 4.0), (a * one, b * one), x0 * one, Context(IDS, None, torch.float32))
    return [lane[0, 0, 0].item() for lane in (*after, part.merge(after))]


def test_lanes_by_hand() -> None:
    # attention reads 2·1 + 3·100 = 302 and says 151; the MLP reads 10 and says 40
    assert stepped(SeparateStreams(first=2)) == [302 + 151, 50, (453 + 50) / 2]
    assert stepped(SeparateStreams(first=2), share=0.25)[2] == pytest.approx(453 / 4 + 50 * 3 / 4)
    assert stepped(RoutedStreams(first=2)) == pytest.approx([1.1 + 191, 11 + 191, 191 + 6.05])
    routes, gains = torch.ones(3, 2, 2), torch.ones(3, 2)
    routes[2], gains[2] = torch.tensor([[0.1, 0.2], [3.0, 0.5]]), torch.tensor([2.0, -1.0])
    found = stepped(RoutedStreams(first=2), routes=routes, gains=gains)
    assert found[:2] == pytest.approx([2 * 1 + 15.1 + 120, -10 + 30.2 + 20])
    # attention's step with gain 2 makes 2·1 + 15.1 and 2·10 + 30.2; the MLP reads 2·50.2 + 300 and says 1601.6
    found = stepped(RoutedStreams(first=2, sequential=True), routes=routes, gains=gains)
    assert found[:2] == pytest.approx([-17.1 + 3 * 1601.6, -50.2 + 0.5 * 1601.6], rel=1e-5)


# Recurrence and skips


def test_layers_run_in_the_order_of_the_scripts(parity: Path) -> None:
    orders = facts(parity / "components" / "schedules" / "learning_rate_momentum_loops")["loop order"]
    assert orders
    for case in orders:
        passes = case["extra_passes"] + 1
        recurrence = Recurrence(first=case["loop_start"], last=case["loop_end"], passes=passes)
        gpt = BASE.but({"depth": case["layers"], "recurrence": recurrence})
        order = gpt.order()
        assert order == recurrence.order(case["layers"], passes) == case["encoder"] + case["decoder"]
        assert len(order) // 2 == len(case["encoder"])
        with torch.device("meta"):
            assert gpt.build().connections == case["skip_rows"]


def test_passes_may_change_over_the_run() -> None:
    gpt = BASE.but(
        {"recurrence": Recurrence(first=1, last=1, passes=PiecewiseConstant(values=(1, 3, 2), begins=(0.3, 0.6)))}
    )
    assert gpt.stages == (0.0, 0.3, 0.6)
    assert [gpt.order(progress) for progress in (0.0, 0.3, 0.9)] == [[0, 1, 2], [0, 1, 1, 1, 2], [0, 1, 1, 2]]
    model = build(gpt, 0)
    assert model.orders == [[0, 1, 2], [0, 1, 1, 1, 2], [0, 1, 1, 2]]
    assert model.connections == 2
    assert [model.stage(progress) for progress in (0.0, 0.29, 0.3, 0.6, 1.0)] == [0, 0, 1, 2, 2]
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        for layer in model.blocks:
            layer.mlp.down.weight.normal_(generator=torch.Generator().manual_seed(0))
    outputs = [model(ids, stage=stage) for stage in (0, 1, 2, -1)]
    assert not torch.allclose(outputs[0], outputs[1], atol=1e-3)
    assert torch.equal(outputs[2], outputs[3])
    once = build(gpt.but(recurrence=None), 0)
    once.load_state_dict(dict(model.state_dict()) | {"skips.weight": model.state_dict()["skips.weight"][:1]})
    assert torch.equal(once(ids), outputs[0])


class Tracer(torch.nn.Module):
    """In the place of a block: its layer's digit behind the stream, in base 10."""

    def __init__(self, layer: int, seen: list[int]) -> None:
        super().__init__()
        self.layer, self.seen = layer, seen

    def forward(self, x: Tensor, x0: Tensor, context: Context) -> Tensor:
        self.seen.append(context.pass_index)
        return torch.full_like(x, self.layer + 1.0)


def test_connections_follow_the_order_in_which_layers_run() -> None:
    """Runs 0, 1, 2, 1 save, runs 2, 1, 2, 3 take the last one left: skip 0 that of the second run of layer 1."""
    model = build(BASE.but({"depth": 4, "recurrence": Recurrence(first=1, last=2, passes=3)}), 0)
    seen: list[int] = []
    for layer in range(4):
        model.blocks[layer] = Tracer(layer, seen)
    taken: list[tuple[int, float]] = []

    def skip(number: int, x: Tensor, saved: Tensor) -> Tensor:
        taken.append((number, saved.flatten()[0].item()))
        return x

    assert model.skips is not None
    model.skips.forward = skip  # type: ignore[assignment]
    model(torch.zeros(1, 2, dtype=torch.long))
    assert model.orders[-1] == [0, 1, 2, 1, 2, 1, 2, 3]
    assert seen == [0, 0, 0, 1, 1, 2, 2, 0]
    assert taken == [(0, 2.0), (1, 3.0), (2, 2.0), (3, 1.0)]


def test_passes_have_vectors_and_mlps_of_their_own() -> None:
    gpt = BASE.but({"recurrence": Recurrence(first=1, last=1, passes=3, embeddings=True, own_mlps=True)})
    model = build(gpt, 0)
    assert [len(block.later_mlps) for block in model.blocks] == [0, 2, 0]
    assert model.passes is not None
    assert model.passes.weight.shape == (3, 32)
    with torch.no_grad():
        model.passes.weight.copy_(torch.arange(3.0)[:, None].expand(3, 32))
    assert model.passes(2, torch.ones(1, 1, 32)).unique().tolist() == [3.0]
    context = Context(IDS, None, torch.float32)
    block, x, said = model.blocks[1], sample(1, 6, 32), list[Tensor]()
    with torch.no_grad():
        for number, mlp in enumerate((block.mlp, *block.later_mlps)):
            mlp.down.weight.fill_(float(number))
    for pass_index in range(3):
        context.pass_index = pass_index
        said.append(block.mlp_output(x, context))
    assert not said[0].any()
    expected = [mlp(block.mlp_norm(x)) for mlp in block.later_mlps]
    assert torch.equal(said[1], expected[0])
    assert torch.equal(said[2], expected[1])
    assert not torch.allclose(said[1], said[2], atol=1e-2)
    assert gpt.but({"recurrence.own_mlps": False}).own_mlps(1) == 0


def test_skips_by_hand() -> None:
    x, saved = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    weight = [[0.0, 0.0], [1.0, -1.0]]
    assert made(UNet().build(2, 2), weight=weight)(1, x, saved).tolist() == [11.0, -18.0]
    gated = made(GatedUNet().build(2, 2), weight=weight)
    assert gated(1, x, saved).tolist() == [5.5, -9.0]
    gated = made(gated, weight=weight, gate=[[0.0, 0.0], [math.log(3.0), -math.log(3.0)]])
    assert gated(1, x, saved).tolist() == pytest.approx([0.75 + 2.5, 0.5 - 15.0])


# Head


def head_of(diff: dict[str, Any]) -> Any:
    return build(BASE.but(diff), 0)


def test_heads_by_hand() -> None:
    x = torch.zeros(1, 1, 32)
    x[..., 0] = 5.0  # normed: √32 in the first channel
    model = head_of({"head": TiedHead(bias=True, softcap=None)})
    with torch.no_grad():
        model.head.bias.copy_(torch.arange(float(VOCABULARY)))
    logits = model.embedding.weight[:, 0] * math.sqrt(32) + torch.arange(float(VOCABULARY))
    torch.testing.assert_close(model.head(x, model.embedding)[0, 0], logits)
    model = head_of({"head": UntiedHead()})
    assert not model.head(x, model.embedding).any()
    with torch.no_grad():
        model.head.table.weight[:, 0] = torch.linspace(-20, 20, VOCABULARY)
    logits = torch.linspace(-20, 20, VOCABULARY) * math.sqrt(32)
    torch.testing.assert_close(model.head(x, model.embedding)[0, 0], 30 * torch.tanh(logits / 30))
    model.head.config = UntiedHead(softcap=10.0, softcap_form="polynomial")
    capped = model.head(x, model.embedding)[0, 0]
    u = (logits / 10).clamp(-2, 2)
    torch.testing.assert_close(capped, 10 * (u - u**3 / 3 + u**5 / 15).clamp(-1, 1))


def test_a_narrow_table_is_projected_there_and_back() -> None:
    model = head_of({"embedding": TokenEmbedding(dims=12), "head.softcap": None})
    assert model.embedding.weight.shape == (VOCABULARY, 12)
    ids = torch.arange(6).view(1, 6)
    x = model.embedding(Context(ids, None, torch.float32))
    torch.testing.assert_close(x, ops.rms_norm(model.embedding.weight[ids] @ model.embedding.projection.weight.T))
    expected = ops.rms_norm(x) @ model.head.projection.weight.T @ model.embedding.weight.T
    torch.testing.assert_close(model.head(x, model.embedding), expected)
    untied = head_of({"embedding": TokenEmbedding(dims=12), "head": UntiedHead()})
    assert untied.head.table.weight.shape == (VOCABULARY, 32)


# Settings that do not fit each other


@pytest.mark.parametrize(
    ("diff", "message"),
    [
        ({"width": 36, "block.attention.heads": 8}, "a width of 36 does not divide into 8 heads of even size"),
        ({"block.attention.heads": 32}, "a width of 32 does not divide into 32 heads of even size"),
        ({"block.attention.key_value_heads": 3}, "4 heads cannot share 3"),
        ({"block.attention.key_value_heads": 8}, "4 heads cannot share 8"),
        ({"block.attention.window": PiecewiseConstant(values=(1.5, 2), begins=(0.5,))}, "window"),
        ({"recurrence": Recurrence(first=1, last=3)}, "recurrence.last must be at most 2, not 3"),
        ({"parallel_streams": RoutedStreams(first=3)}, "parallel_streams.first must be at most 2, not 3"),
        (
            {"parallel_streams": RoutedStreams(first=1), "recurrence": Recurrence(first=0, last=1)},
            "behind recurrence.last",
        ),
        (
            {"parallel_streams": RoutedStreams(first=1), "layers": {"2": {"attention": None}}},
            "parallel_streams need attention in every layer",
        ),
        ({"value_embedding": ValueEmbedding(layers=(1, 3))}, "value_embedding.layers must name layers from 0 to 2"),
        ({"value_embedding": ValueEmbedding(layers=(1, 1))}, "each once"),
        (
            {"value_embedding": ValueEmbedding(layers=(0, 2)), "layers": {"2": {"attention.key_value_heads": 1}}},
            "with values of one width",
        ),
        (
            {"value_embedding": ValueEmbedding(layers=(0, 2)), "layers": {"2": {"attention": None}}},
            "must have attention",
        ),
        ({"layers": {"1-5": {"parallel": True}}}, "layers.1-5 names no layers"),
        ({"layers": {"1": True}}, "layers.1 must be a mapping"),
        ({"layers.1.attention.value_residual": "GatedValueResidual"}, "takes up the values of layer 0"),
        (
            {"block.attention.value_residual": "GatedValueResidual", "layers.1.attention.key_value_heads": 1},
            "with equal heads",
        ),
        ({"depth": 1024, "recurrence": Recurrence(first=0, last=63, passes=64)}, "over the limit of 1,024"),
        ({"block.mlp.linear": {"kind": "RandomMap", "initial": "Overtone"}}, "takes too long"),
        ({"embedding.initial": {"kind": "Normal", "std": -1}}, "std must be at least 0"),
        ({"embedding.bigrams": {"kind": "HashedNGrams", "dims": 1 << 40}}, "dims must be from 1 to 65,536"),
    ],
)
def test_settings_that_do_not_fit_are_a_mistake(diff: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        BASE.but(diff).build()
    assert "\n" not in str(caught.value)


def test_an_exception_may_be_a_path() -> None:
    gpt = BASE.but({"layers.1.parallel": True, "layers.0-1.attention.xsa": True})
    assert gpt.layers == {"1": {"parallel": True}, "0-1": {"attention.xsa": True}}
    assert [(block.parallel, block.attention.xsa) for block in gpt.blocks] == [  # type: ignore[union-attr]
        (False, True),
        (True, True),
        (False, False),
    ]
    assert gpt.but({"layers.1.attention.query_gain": 2.0}).layers["1"] == {
        "parallel": True,
        "attention.query_gain": 2.0,
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"first": 4, "last": 3}, r"first \(4\) must be at most last \(3\)"),
        ({"passes": 65}, "passes must be at most 64, not 65"),
        ({"passes": 0}, "passes must be from 1"),
        ({"passes": PiecewiseConstant(values=(1, 2.5), begins=(0.5,))}, "passes"),
    ],
)
def test_recurrences_that_make_no_sense_are_a_mistake(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Recurrence(**settings)


def test_a_layer_may_be_without_attention() -> None:
    model = build(BASE.but({"layers": {"1": {"attention": None, "residual_mix": None}}}), 0)
    names = {name for name, _ in model.blocks[1].named_parameters()}
    assert names == {"mlp.up.weight", "mlp.down.weight", "mlp_scale"}
    assert isinstance(model.config, GPT)


def test_a_parallel_block_reads_one_stream_twice() -> None:
    one, x, x0 = 0.5, torch.tensor(1.0), torch.tensor(100.0)
    block = block_of(one, 4.0)
    context = Context(IDS, None, torch.float32)
    full = torch.ones(1, 1, 4)
    assert block(x * full, x0 * full, context).unique().tolist() == [(302 + 151) * 5]
    block.parallel = True
    assert block(x * full, x0 * full, context).unique().tolist() == [302 + 151 + 4 * 302]


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_scores_in_half_precision_are_those_of_the_same_stream_in_double(tied: bool, compiled: bool) -> None:
    """Logits near the cap, where rounding them to bfloat16 would cost a thousandth."""
    width, vocabulary = 64, 512
    head: Head = TiedHead() if tied else UntiedHead()
    embedding = made(TokenEmbedding().build(vocabulary, width))
    part = made(head.build(embedding, vocabulary, width))
    table = embedding.weight if tied else part.table.weight  # type: ignore[union-attr]
    with torch.no_grad():
        table.copy_(sample(vocabulary, width, seed=1))
        table[0] += 3.0 * sample(1, width, seed=2)[0].abs()
    x = (sample(4, 512, width, seed=3) + sample(1, 1, width, seed=2).abs()).bfloat16()
    targets = torch.randint(0, vocabulary, (4, 512), generator=torch.Generator().manual_seed(4))
    call = torch.compile(part) if compiled else part
    with torch.no_grad():
        logits = call(x, embedding)
        factors = [(ops.rms_norm(x).double(), table.bfloat16().double())]
        if compiled:  # the compiler may leave out roundings to bfloat16 between its operations
            factors.append((ops.rms_norm(x.double()), table.double()))
        exact = [30.0 * torch.tanh(stream @ weight.T / 30.0) for stream, weight in factors]
        rounded = part.uncapped(x, embedding)
        rounded = (30.0 * torch.tanh(rounded / 30.0)).float()
    assert logits.dtype == torch.float32
    assert rounded.abs().max() > 20
    losses = {name: nats(chosen, targets).double() for name, chosen in (("ours", logits), ("rounded", rounded))}
    true = min((nats(one, targets) for one in exact), key=lambda one: float((losses["ours"] - one).abs().max()))
    assert abs(float((losses["ours"] - true).mean())) < 1e-6
    assert float((losses["ours"] - true).abs().max()) < 1e-4
    assert float((losses["rounded"] - true).abs().max()) > 1e-2


def test_the_float32_product_has_the_gradients_of_the_plain_one() -> None:
    x = sample(3, 5, 8, seed=1).bfloat16().requires_grad_()
    weight = sample(7, 8, seed=2).requires_grad_()
    upstream = sample(3, 5, 7, seed=3)
    gradients = [
        torch.autograd.grad((product(x, weight).float() * upstream.bfloat16().float()).sum(), (x, weight))
        for product in (ops.float32_linear, ops.linear)
    ]
    for ours, plain in zip(*gradients, strict=True):
        assert ours.dtype == plain.dtype
        torch.testing.assert_close(ours, plain, rtol=2e-2, atol=2e-2)
    assert ops.float32_linear(x, weight).dtype == torch.float32
    assert torch.equal(ops.float32_linear(x.float(), weight), ops.linear(x.float(), weight))


def test_learned_caps_agree_with_the_script(frontier: Path) -> None:
    config, data = facts(frontier / "config")["asym_logit"], tensors(frontier / "asym_logit")
    logits, positive, negative = (
        tensor.requires_grad_()
        for tensor in (data["logits"], torch.tensor([config["pos"]]), torch.tensor([config["neg"]]))
    )
    capped = ops.asymmetric_softcap(logits, positive, negative)
    torch.testing.assert_close(capped, data["capped"], rtol=1e-5, atol=1e-6)
    losses = F.cross_entropy(capped, data["targets"], reduction="none")
    torch.testing.assert_close(losses, data["nll"], rtol=1e-5, atol=1e-6)
    gradients = torch.autograd.grad(losses.mean(), (logits, positive, negative))
    for gradient, name in zip(gradients, ("grad_logits", "grad_pos", "grad_neg"), strict=True):
        torch.testing.assert_close(gradient, data[name], rtol=1e-5, atol=1e-7)
    thirty = torch.tensor([30.0])
    same = ops.asymmetric_softcap(data["logits"][: len(data["capped_symmetric_30"])], thirty, thirty)
    torch.testing.assert_close(same, data["capped_symmetric_30"], rtol=1e-6, atol=1e-6)  # tanh is each processor's own
    assert torch.equal(same, 30.0 * torch.tanh(data["logits"][: len(same)] / 30.0))


@pytest.mark.parametrize("caps", ["trained", "untrained"])
def test_learned_caps_begin_as_the_softcap_and_learn_if_they_are_trained(caps: str) -> None:
    plain, model = build(BASE, 0), build(BASE.but({"head.learned_caps": caps}), 0)
    ids = torch.arange(12)[None]
    torch.testing.assert_close(model(ids), plain(ids))
    objective, _ = model.head.losses(model(ids, capped=False), ids)
    expected, _ = plain.head.losses(plain(ids, capped=False), ids)
    torch.testing.assert_close(objective, expected)
    objective.sum().backward()
    (moving,) = [parameter for name, parameter in model.named_parameters() if name == "head.caps"]
    assert (moving.grad is not None) == (caps == "trained")
    with pytest.raises(UserError, match="learned_caps needs a softcap"):
        build(BASE.but({"head.learned_caps": caps, "head.softcap": None}), 0)
