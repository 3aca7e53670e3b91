"""Every variant of every socket of the model, put into a tiny GPT: what it may see, what it learns, how it is built."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from caddie import ops
from caddie.config import Config, field_types, variants
from caddie.distributed import Ranks
from caddie.errors import UserError
from caddie.model import (
    GPT,
    MLP,
    Attention,
    Cache,
    Embedding,
    GroupedQueryAttention,
    HashedNGrams,
    Head,
    Linear,
    LowRankDelta,
    Model,
    Skips,
    Smear,
    TiedHead,
    UNet,
    build,
    parameter_count,
)
from caddie.model.context import Context
from caddie.optim import AdamW
from caddie.parameters import FanIn, initialize
from caddie.recipe import shipped
from caddie.schedules import Budget, Moment

VOCABULARY, WIDTH, DEPTH, ROWS, LENGTH = 48, 32, 4, 2, 24
TINY = GPT(vocabulary=VOCABULARY, width=WIDTH, depth=DEPTH).but({"block.mlp.hidden": 40})

SOCKETS: dict[str, type[Config]] = {
    "block.attention": Attention,
    "block.mlp": MLP,
    "embedding": Embedding,
    "embedding.smear": Smear,
    "head": Head,
    "skips": Skips,
}
SETTINGS: dict[str, list[Any]] = {
    "block.attention": [GroupedQueryAttention(heads=4, key_value_heads=4)],
    "embedding.bigrams": [HashedNGrams(buckets=64, dims=8)],
    "embedding.trigrams": [HashedNGrams(buckets=64)],
    "head": [TiedHead(softcap=None)],
    "skips": [None],
    "depth": [1, 3],
}
"""More settings than the variants as they come. A variant that has no defaults, or none that fit, needs a line here."""


def _cases() -> Iterator[tuple[str, GPT]]:
    """Label and model, each different model once."""
    yield "as it comes", TINY
    for path, socket in SOCKETS.items():
        for name, variant in variants(socket).items():
            yield f"{path}={name}", TINY.but({path: name})
            if "scope" in field_types(variant):
                yield f"{path}={name}, document", TINY.but({path: name, f"{path}.scope": "document"})
    for path, values in SETTINGS.items():
        for value in values:
            yield f"{path}={value!r}", TINY.but({path: value})


CASES: dict[str, GPT] = {}
for _label, _gpt in _cases():
    if _gpt not in CASES.values():
        CASES[_label] = _gpt
every_model = pytest.mark.parametrize("gpt", CASES.values(), ids=CASES)


def some_ids(seed: int = 0) -> Tensor:
    return torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


def some_starts() -> Tensor:
    """Documents begin at 0, 7 and 15 in the first row and at 10 in the second, whose first document goes on."""
    starts = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    starts[0, [0, 7, 15]] = True
    starts[1, 10] = True
    return starts


def random_model(gpt: GPT) -> Model:
    """A model with no weight at zero, so that whatever can reach an output does."""
    model = build(gpt, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def shallow(gpt: GPT) -> GPT:
    """The same with at most two layers, for what takes long."""
    return gpt.but({"depth": min(gpt.depth, 2)})


def sees_only_documents(gpt: GPT) -> bool:
    """Whether no part of the model looks beyond its document."""
    return getattr(gpt.block.attention, "scope", "row") == "document"


# Contracts of every variant


def test_every_variant_is_covered() -> None:
    assert len(CASES) >= 6
    for path, socket in SOCKETS.items():
        for variant in variants(socket).values():
            used = [gpt for gpt in CASES.values() if isinstance(_at(gpt, path), variant)]
            assert used, f"{path}: {variant.__name__}"
    assert any(sees_only_documents(gpt) for gpt in CASES.values())


def _at(gpt: GPT, path: str) -> object:
    value: object = gpt
    for name in path.split("."):
        value = getattr(value, name)
    return value


@every_model
def test_no_future_token_reaches_an_output(gpt: GPT) -> None:
    model, ids, starts = random_model(gpt), some_ids(), some_starts()
    with torch.no_grad():
        before = model(ids, starts)
        assert before.shape == (ROWS, LENGTH, VOCABULARY)
        for position in (0, 6, 7, 12, LENGTH - 1):
            changed = ids.clone()
            changed[:, position] = (changed[:, position] + 5) % VOCABULARY
            after = model(changed, starts)
            torch.testing.assert_close(after[:, :position], before[:, :position], rtol=0, atol=1e-6)
            assert ((after - before)[:, position].abs().amax(-1) > 1e-3).all(), "its own output does change"
            torch.testing.assert_close(
                model(ids[:, : position + 1], starts[:, : position + 1]), before[:, : position + 1]
            )


@every_model
def test_no_gradient_flows_back_from_the_past_to_the_future(gpt: GPT) -> None:
    model, ids = random_model(gpt), some_ids()
    streams: list[Tensor] = []

    def keep(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        output = output.detach().requires_grad_()
        streams.append(output)
        return output

    model.embedding.register_forward_hook(keep)
    logits = model(ids)
    for position in (0, 7, LENGTH - 1):
        (gradient,) = torch.autograd.grad(logits[:, position].square().sum(), streams[0], retain_graph=True)
        size = gradient.abs().amax(-1)
        assert (size[:, position + 1 :] == 0).all()
        assert (size[:, : position + 1] > 0).all(), "all of the past is seen"


@every_model
def test_no_other_document_reaches_an_output_where_the_scope_is_the_document(gpt: GPT) -> None:
    model, ids, starts = random_model(gpt), some_ids(), some_starts()
    documents = starts.cumsum(1)
    with torch.no_grad():
        before = model(ids, starts)
        for row, position in [(0, 0), (0, 6), (0, 7), (0, 14), (0, 15), (1, 3), (1, 9), (1, 10)]:
            changed = ids.clone()
            changed[row, position] = (changed[row, position] + 5) % VOCABULARY
            moved = (model(changed, starts) - before).abs().amax(-1) > 1e-6
            same = documents[row] == documents[row, position]
            assert moved[row, position]
            assert moved[row][same & (torch.arange(LENGTH) > position)].any() or position in (6, 14, 9)
            elsewhere = moved[row][~same]
            if sees_only_documents(gpt):
                assert not elsewhere.any()
            elif documents[row, position] < documents[row, -1]:
                assert elsewhere.any(), "with the scope of a row, later documents see it"


@pytest.mark.parametrize("gpt", [gpt for gpt in CASES.values() if sees_only_documents(gpt)], ids=lambda gpt: gpt.key())
def test_a_document_alone_is_a_document_in_a_row(gpt: GPT) -> None:
    model, ids, starts = random_model(gpt), some_ids(), some_starts()
    with torch.no_grad():
        together = model(ids, starts)[0, 7:15]
        alone = model(ids[:1, 7:15], starts[:1, 7:15])[0]
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


@every_model
def test_rows_are_independent(gpt: GPT) -> None:
    model, ids, starts = random_model(gpt), some_ids(), some_starts()
    with torch.no_grad():
        together = model(ids, starts)
        for row in range(ROWS):
            alone = model(ids[row : row + 1], starts[row : row + 1])
            torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-5)
        changed = ids.clone()
        changed[0] = some_ids(seed=5)[0]
        after = model(changed, starts)
    torch.testing.assert_close(after[1], together[1], rtol=0, atol=1e-6)
    assert not torch.allclose(after[0], together[0], atol=1e-2)


@every_model
def test_every_parameter_gets_a_gradient_and_moves(gpt: GPT) -> None:
    """Within three steps: a projection that starts at zero hides the ones before it at first."""
    model, ids, starts = build(gpt, seed=0), some_ids(), some_starts()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    updater = AdamW(lr=0.01).build(dict(model.named_parameters()), Ranks())
    present = {name for name, parameter in model.named_parameters() if parameter.numel()}
    seen: set[str] = set()
    losses = []
    for step in range(3):
        model.zero_grad()
        loss = F.cross_entropy(model(ids[:, :-1], starts[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        losses.append(loss.item())
        for name in present:
            parameter = model.get_parameter(name)
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name
            if parameter.grad.any():
                seen.add(name)
        updater.step(Moment(step, 0.0, Budget(steps=3)), 1.0)
    assert seen == present
    for name in present:
        assert not torch.equal(before[name], model.get_parameter(name)), name
    assert losses[-1] < losses[0]


@every_model
def test_it_is_one_compiled_graph(gpt: GPT) -> None:
    torch.compiler.reset()
    depth = 1 if gpt.skips == TINY.skips and gpt != TINY else 2  # layers are alike, and this takes long
    model, ids, starts = random_model(gpt.but({"depth": depth})), some_ids(), some_starts()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids, starts), model(ids, starts))


@every_model
def test_half_precision_is_close_and_is_used(gpt: GPT) -> None:
    model, ids, starts = random_model(gpt), some_ids(), some_starts()
    with torch.no_grad():
        single, half = model(ids, starts), model(ids, starts, torch.bfloat16)
    assert single.dtype == torch.float32
    assert half.dtype == torch.bfloat16
    assert (half.float() - single).norm() < 0.05 * single.norm()
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


@every_model
def test_a_model_is_what_its_config_and_weights_say(gpt: GPT) -> None:
    model, ids = random_model(gpt), some_ids()
    other = build(GPT.from_json(gpt.to_json()), seed=9)
    other.load_state_dict({name: parameter.detach() for name, parameter in model.named_parameters()})
    with torch.no_grad():
        assert torch.equal(model(ids), other(ids))
        assert torch.equal(model(ids), model(ids)), "no chance, no memory"
    assert parameter_count(gpt) == sum(parameter.numel() for parameter in model.parameters())


@every_model
def test_the_first_loss_is_that_of_knowing_nothing(gpt: GPT) -> None:
    ids = some_ids()
    with torch.no_grad():
        loss = F.cross_entropy(build(gpt, 0)(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(VOCABULARY), rel=0.02)


# Sizes


@pytest.mark.parametrize("name", sorted(shipped()))
def test_parameters_are_counted_without_memory(name: str) -> None:
    gpt = shipped()[name].model
    real = gpt.build()
    assert parameter_count(gpt) == sum(parameter.numel() for parameter in real.parameters())
    assert next(real.parameters()).device.type == "cpu"
    known = {"baseline": 17_059_912, "fp16_embedding": 16_765_000, "lower_lr": 17_059_912, "tiny": 4_555_913}
    if name in known:
        assert parameter_count(gpt) == known[name]


def test_the_baselines_parameters_by_hand() -> None:
    # table; four layers' skips; per layer: query and output, key and value, two of the MLP, mix and two scales, gains
    width = 512
    layer = 2 * width * width + 2 * width * 256 + 2 * width * 1024 + 4 * width + 8
    assert parameter_count(GPT()) == 1024 * width + 4 * width + 9 * layer == 17_059_912


def test_layers_may_differ() -> None:
    gpt = TINY.but({"layers.1-2": {"mlp.hidden": 8}, "layers.3": {"attention.key_value_heads": 1}})
    model = build(gpt, 0)
    assert [model.blocks[layer].mlp.up.weight.shape[0] for layer in range(4)] == [40, 8, 8, 40]
    assert [model.blocks[layer].attention.key.weight.shape[0] for layer in range(4)] == [16, 16, 16, 4]
    assert model(some_ids()).shape == (ROWS, LENGTH, VOCABULARY)


@pytest.mark.parametrize(
    ("diff", "message"),
    [
        ({"width": 36}, "a width of 36 does not divide into 8 heads"),
        ({"width": 8}, "a width of 8 does not divide into 8 heads of even size"),
        ({"block.attention.key_value_heads": 3}, "8 heads cannot share 3"),
        ({"block.attention.key_value_heads": 16}, "8 heads cannot share 16"),
    ],
)
def test_heads_that_do_not_divide_are_a_mistake(diff: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(TINY.but(diff), 0)


# In pieces, with a cache


quick = settings(derandomize=True, deadline=None, max_examples=6)


def in_pieces(model: Model, ids: Tensor, starts: Tensor | None, cuts: Sequence[int]) -> Tensor:
    """The logits of a forward that is made piece by piece, in float64."""
    cache = Cache()
    pieces = [slice(*pair) for pair in pairwise([0, *cuts, ids.shape[1]])]
    found = [
        model(ids[:, piece], None if starts is None else starts[:, piece], torch.float64, cache=cache)
        for piece in pieces
    ]
    assert cache.length == ids.shape[1]
    return torch.cat(found, 1)


@every_model
@torch.no_grad()
def test_one_token_after_the_other_is_the_whole_forward(gpt: GPT) -> None:
    model, ids = random_model(shallow(gpt)), some_ids()
    for first, starts in ((1, some_starts()), (8, some_starts()), (7, None)):
        found = in_pieces(model, ids, starts, range(first, LENGTH))
        torch.testing.assert_close(found, model(ids, starts, torch.float64), rtol=0, atol=1e-10)


@every_model
@quick
@given(
    cuts=st.sets(st.integers(1, LENGTH - 1)).map(sorted),
    begins=st.lists(st.sets(st.integers(0, LENGTH - 1)), min_size=ROWS, max_size=ROWS),
    seed=st.integers(0, 9),
)
@torch.no_grad()
def test_pieces_of_any_size_are_the_whole_forward(gpt: GPT, cuts: list[int], begins: list[set[int]], seed: int) -> None:
    model, ids = random_model(shallow(gpt)), some_ids(seed)
    starts = torch.tensor([[position in row for position in range(LENGTH)] for row in begins])
    whole = model(ids, starts, torch.float64)
    torch.testing.assert_close(in_pieces(model, ids, starts, cuts), whole, rtol=0, atol=1e-10)


@every_model
@torch.no_grad()
def test_no_later_id_changes_an_earlier_logit_of_a_forward_in_pieces(gpt: GPT) -> None:
    model, ids, starts = random_model(shallow(gpt)), some_ids(), some_starts()
    for cuts in ((5, 12), (7,), (10, 11, 12)):
        before = in_pieces(model, ids, starts, cuts)
        for position in (6, 7, 12, LENGTH - 1):
            changed = ids.clone()
            changed[:, position] = (changed[:, position] + 5) % VOCABULARY
            after = in_pieces(model, changed, starts, cuts)
            torch.testing.assert_close(after[:, :position], before[:, :position], rtol=0, atol=1e-12)
            assert ((after - before)[:, position].abs().amax(-1) > 1e-3).all(), "its own output does change"


@every_model
@torch.no_grad()
def test_the_last_logits_alone_are_the_last_logits(gpt: GPT) -> None:
    model, ids, starts = random_model(gpt), some_ids(), some_starts()
    whole = model(ids, starts, torch.float64)
    for last in (LENGTH, 9, 1, 0):
        found = model(ids, starts, torch.float64, last=last)
        torch.testing.assert_close(found, whole[:, LENGTH - last :], rtol=0, atol=1e-10)
    cache = Cache()
    model(ids[:, :15], starts[:, :15], torch.float64, last=1, cache=cache)
    found = model(ids[:, 15:], starts[:, 15:], torch.float64, last=3, cache=cache)
    torch.testing.assert_close(found, whole[:, -3:], rtol=0, atol=1e-10)


@torch.no_grad()
def test_a_cache_belongs_to_its_rows_alone() -> None:
    model, ids, starts = random_model(TINY), some_ids(), some_starts()
    apart, together = [Cache() for _ in range(ROWS)], Cache()
    for piece in (slice(0, 9), slice(9, LENGTH)):
        rows = [
            model(ids[row : row + 1, piece], starts[row : row + 1, piece], torch.float64, cache=apart[row])
            for row in range(ROWS)
        ]
        found = model(ids[:, piece], starts[:, piece], torch.float64, cache=together)
        torch.testing.assert_close(found, torch.cat(rows), rtol=0, atol=1e-10)


# Context


def test_a_context_goes_on_where_its_cache_ended() -> None:
    ids = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])
    starts = torch.tensor([[True, False, True, False], [False, False, False, True]])
    whole = Context(ids, starts, torch.float64)
    stream = torch.stack([ids, 10 * ids], dim=-1).double()
    for cuts in ((1, 2, 3), (2,), (3,)):
        cache = Cache()
        found = []
        for begin, end in pairwise([0, *cuts, 4]):
            context = Context(ids[:, begin:end], starts[:, begin:end], torch.float64, cache)
            assert context.documents is not None
            assert cache.length == end
            previous = (context.previous(ids[:, begin:end]), context.previous(stream[:, begin:end]))
            tables = [table[None].expand(2, -1, -1) for table in context.rotary(4, 100.0)]
            found.append((context.documents, *previous, *tables))
            mask, full = context.mask("document"), whole.mask("document")
            assert mask is not None
            assert full is not None
            assert torch.equal(mask, full[:, :, begin:end, :end])
            assert context.mask("row") is None
        expected = (whole.documents, whole.previous(ids), whole.previous(stream), *whole.rotary(4, 100.0))
        for pieces, value in zip(zip(*found, strict=True), expected, strict=True):
            assert value is not None
            assert torch.equal(
                torch.cat(pieces, 1),
                value.expand(2, *value.shape[-2:]) if value.is_floating_point() and value.ndim == 2 else value,
            )


def test_keys_and_values_stand_behind_those_before() -> None:
    k, v = torch.randn(2, 2, 3, 6, 4, generator=torch.Generator().manual_seed(0))
    ids, cache = torch.zeros(2, 6, dtype=torch.long), Cache()
    for begin, end in ((0, 4), (4, 5), (5, 6)):
        context = Context(ids[:, begin:end], None, torch.float32, cache)
        keys, values = context.keys_and_values(k[:, :, begin:end], v[:, :, begin:end])
        assert torch.equal(keys, k[:, :, :end])
        assert torch.equal(values, v[:, :, :end])
    keys, values = Context(ids, None, torch.float32).keys_and_values(k, v)
    assert keys is k
    assert values is v


def test_previous_is_masked_where_documents_begin() -> None:
    ids = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])
    starts = torch.tensor([[True, False, True, False], [False, False, False, True]])
    context = Context(ids, starts, torch.float32)
    assert context.previous(ids).tolist() == [[0, 5, 0, 7], [0, 1, 2, 0]]
    stream = torch.stack([ids, 10 * ids], dim=-1).float()
    assert context.previous(stream).tolist() == [
        [[0, 0], [5, 50], [0, 0], [7, 70]],
        [[0, 0], [1, 10], [2, 20], [0, 0]],
    ]
    assert Context(ids, None, torch.float32).previous(ids).tolist() == [[0, 5, 6, 7], [0, 1, 2, 3]]


def test_documents_are_numbered_within_their_row() -> None:
    starts = torch.tensor([[True, False, True, False], [False, False, False, True]])
    ids = torch.zeros(2, 4, dtype=torch.long)
    documents = Context(ids, starts, torch.float32).documents
    assert documents is not None
    assert documents.tolist() == [[1, 1, 2, 2], [0, 0, 0, 1]]
    assert Context(ids, None, torch.float32).documents is None


# The one linear layer


def linear(inputs: int = 6, outputs: int = 4) -> Linear:
    layer = Linear(inputs, outputs, FanIn())
    initialize(layer, 0)
    return layer


def test_a_linear_layer_without_view_and_delta_is_a_linear_layer() -> None:
    layer, x = linear(), torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    assert layer.view is None
    assert layer.delta is None
    assert torch.equal(layer(x), F.linear(x, layer.weight))
    plain = torch.tensor([[1.0, 0, 0, 0, 0, 2.0]])
    with torch.no_grad():
        layer.weight.copy_(torch.arange(24.0).reshape(4, 6))
    assert layer(plain).tolist() == [[10.0, 28.0, 46.0, 64.0]]


def test_a_view_is_what_the_forward_sees_and_the_gradient_passes() -> None:
    layer, x = linear(), torch.ones(1, 6)
    plain = layer(x)
    layer.view = lambda weight: 3 * weight
    torch.testing.assert_close(layer(x), 3 * plain)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, torch.full((4, 6), 3.0))
    layer.view = None
    assert torch.equal(layer(x), plain)


def test_a_delta_adds_to_the_output() -> None:
    layer, x = linear(), torch.ones(1, 6)
    plain = layer(x)
    layer.delta = lambda y: y[..., :4] * 2
    torch.testing.assert_close(layer(x), plain + 2)
    layer.delta = None
    assert torch.equal(layer(x), plain)


def test_view_and_delta_are_no_parameters() -> None:
    layer = linear()
    layer.view = lambda weight: weight
    layer.delta = LowRankDelta(torch.zeros(2, 6), torch.zeros(4, 2))
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    assert list(layer.state_dict()) == ["weight"]


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_a_low_rank_delta_is_a_change_of_the_weight(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    model, ids = random_model(TINY), some_ids()
    folded = random_model(TINY)
    plain = model(ids).detach()
    for (name, layer), other in zip(model.named_modules(), folded.modules(), strict=True):
        if isinstance(layer, Linear) and isinstance(other, Linear):
            outputs, inputs = layer.weight.shape
            a, b = (0.1 * torch.randn(shape, generator=generator) for shape in ((3, inputs), (outputs, 3)))
            layer.delta = LowRankDelta(a, b, scale)
            with torch.no_grad():
                other.weight.add_(scale * b @ a)
            assert name
    with torch.no_grad():
        torch.testing.assert_close(model(ids), folded(ids), rtol=1e-4, atol=1e-4)
        assert not torch.allclose(model(ids), plain, atol=1e-2)
        assert model(ids, None, torch.bfloat16).dtype == torch.bfloat16


def factors(rows: int, inputs: int, outputs: int, rank: int = 3) -> tuple[Tensor, Tensor]:
    """Factors of one delta for each row: a (rows, rank, inputs) and b (rows, outputs, rank)."""
    generator = torch.Generator().manual_seed(inputs + outputs)
    return tuple(  # type: ignore[return-value]
        0.2 * torch.randn(shape, generator=generator) for shape in ((rows, rank, inputs), (rows, outputs, rank))
    )


def test_a_low_rank_delta_by_hand() -> None:
    x = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
    a, b = torch.tensor([[1.0, 10.0]]), torch.tensor([[2.0], [0.0], [-1.0]])
    assert LowRankDelta(a, b, 0.5)(x).tolist() == [[[21.0, 0.0, -10.5]], [[43.0, 0.0, -21.5]]]
    two = LowRankDelta(torch.stack([a, 2 * a]), torch.stack([b, -b]), 0.5)
    assert two(x).tolist() == [[[21.0, 0.0, -10.5]], [[-86.0, 0.0, 43.0]]]


def test_factors_for_each_row_are_a_weight_for_each_row() -> None:
    model, ids, starts = random_model(TINY), some_ids(), some_starts()
    layers = [name for name, layer in model.named_modules() if isinstance(layer, Linear)]
    folded = [random_model(TINY) for _ in range(ROWS)]
    for name in layers:
        layer = model.get_submodule(name)
        assert isinstance(layer, Linear)
        a, b = factors(ROWS, layer.weight.shape[1], layer.weight.shape[0])
        layer.delta = LowRankDelta(a, b, 1.5)
        with torch.no_grad():
            for row in range(ROWS):
                folded[row].get_parameter(f"{name}.weight").add_(1.5 * b[row] @ a[row])
    assert len(layers) == 6 * DEPTH
    with torch.no_grad():
        found = model(ids, starts, torch.float64)
        for row in range(ROWS):
            expected = folded[row](ids[row : row + 1], starts[row : row + 1], torch.float64)
            torch.testing.assert_close(found[row : row + 1], expected, rtol=1e-5, atol=1e-5)
            assert not torch.allclose(expected, random_model(TINY)(ids, starts, torch.float64)[row : row + 1], atol=0.1)


def test_the_deltas_of_a_block_add_to_attention_and_mlp() -> None:
    block = random_model(TINY).blocks[0].double()
    x, x0 = torch.randn(2, ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0)).double()
    context = Context(some_ids(), some_starts(), torch.float64)
    a, b = factors(ROWS, WIDTH, WIDTH)
    block.attention_delta = LowRankDelta(a, b, 2.0)
    block.mlp_delta = LowRankDelta(2 * a, b, 1.0)
    mixed = block.mix[0] * x + block.mix[1] * x0
    h = ops.rms_norm(mixed)
    after = mixed + block.attention_scale * (block.attention(h, context) + 2 * h @ a.double().mT @ b.double().mT)
    h = ops.rms_norm(after)
    expected = after + block.mlp_scale * (block.mlp(h) + 2 * h @ a.double().mT @ b.double().mT)
    torch.testing.assert_close(block(x, x0, context), expected, rtol=0, atol=1e-12)


def test_the_delta_of_the_head_adds_before_the_cap() -> None:
    model, ids = random_model(TINY), some_ids()
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0)).double()
    a, b = factors(ROWS, WIDTH, VOCABULARY)
    model.head.delta = LowRankDelta(a, b, 2.0)
    h = ops.rms_norm(x)
    uncapped = h @ model.embedding.weight.double().mT + 2 * h @ a.double().mT @ b.double().mT
    torch.testing.assert_close(model.head(x, model.embedding), 30 * torch.tanh(uncapped / 30), rtol=0, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, None, torch.float64, last=4), model(ids, None, torch.float64)[:, -4:])


def test_deltas_with_second_factors_of_zero_change_not_a_bit() -> None:
    model, ids, starts = random_model(TINY), some_ids(), some_starts()
    with torch.no_grad():
        before = model(ids, starts)
        for part in model.modules():
            if isinstance(part, Linear):
                a, b = factors(ROWS, part.weight.shape[1], part.weight.shape[0])
                part.delta = LowRankDelta(a, 0 * b)
        for block in model.blocks:
            a, b = factors(ROWS, WIDTH, WIDTH)
            block.attention_delta = block.mlp_delta = LowRankDelta(a, 0 * b)
        a, b = factors(ROWS, WIDTH, VOCABULARY)
        model.head.delta = LowRankDelta(a, 0 * b)
        assert torch.equal(model(ids, starts), before)


def test_every_matrix_of_the_model_is_the_one_linear_layer() -> None:
    """So that a view or a delta set on every `Linear` misses nothing."""
    for gpt in CASES.values():
        model = build(gpt, 0)
        inside = {id(layer.weight) for layer in model.modules() if isinstance(layer, Linear)}
        for name, parameter in model.named_parameters():
            owner = model.get_submodule(name.rpartition(".")[0])
            if owner.declarations[name.rpartition(".")[2]].role == "matrix":
                assert id(parameter) in inside, name


# Skips and head


def test_the_u_returns_what_was_saved_last_first() -> None:
    skips = UNet().build(5, 1)
    initialize(skips, 0)
    with torch.no_grad():
        skips.weight.copy_(torch.tensor([[10.0], [100.0]]))
    saved: list[Tensor] = []
    entered = []
    for layer in range(5):  # layers 0 and 1 save 1 and 2; layers 2 and 3 add 10·2 and 100·1; layer 4 finds nothing
        x = skips.enter(layer, torch.zeros(1), saved)
        entered.append(x.item())
        skips.leave(layer, torch.full((1,), layer + 1.0), saved)
    assert entered == [0.0, 0.0, 20.0, 100.0, 0.0]
    assert saved == []


def test_the_head_is_the_table_and_is_capped() -> None:
    gpt = TINY.but({"head.softcap": 2.0})
    model, ids = random_model(gpt), some_ids()
    uncapped = random_model(TINY.but({"head.softcap": None}))(ids)
    with torch.no_grad():
        capped = model(ids)
    assert capped.abs().max() < 2.0
    assert uncapped.abs().max() > 2.0
    torch.testing.assert_close(capped, 2 * torch.tanh(uncapped / 2))


# Functions


def test_the_norm_has_no_gain() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    expected = torch.tensor([[3.0, 4.0], [0.0, 0.0]]) / math.sqrt(12.5)
    torch.testing.assert_close(ops.rms_norm(x), expected)


def test_rotation_by_hand() -> None:
    cosine, sine = ops.rotary_tables(torch.tensor([0, 1, 2]), 2, 10_000.0, torch.float32)
    turned = ops.rotate(torch.tensor([[1.0, 0.0]] * 3), cosine, sine)
    torch.testing.assert_close(turned, torch.tensor([[math.cos(p), -math.sin(p)] for p in range(3)]))
    # only the distance counts
    q, k = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    tables = ops.rotary_tables(torch.arange(6), 8, 100.0, torch.float32)
    same_q, same_k = ops.rotate(q[:1].expand(6, 8), *tables), ops.rotate(k[:1].expand(6, 8), *tables)
    products = same_q @ same_k.mT
    for distance in range(-5, 6):
        diagonal = products.diagonal(distance)
        assert (diagonal - diagonal[0]).abs().max() < 1e-4


def slow_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    """One query at a time; the queries are those of the last positions, the keys and values those of all."""
    y, first = torch.empty_like(q), k.shape[2] - q.shape[2]
    for b, h, t in [(b, h, t) for b in range(q.shape[0]) for h in range(q.shape[1]) for t in range(q.shape[2])]:
        group = h // (q.shape[1] // k.shape[1])
        seen = [s for s in range(first + t + 1) if documents is None or documents[b, s] == documents[b, first + t]]
        weights = torch.softmax(k[b, group, seen] @ q[b, h, t] / math.sqrt(q.shape[-1]), 0)
        y[b, h, t] = weights @ v[b, group, seen]
    return y


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("queries", [9, 4, 1])
def test_attention_is_that_of_one_query_at_a_time(groups: int, with_documents: bool, queries: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, queries, 6, generator=generator)
    k, v = torch.randn(2, 2, groups, 9, 6, generator=generator)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0] * 9]) if with_documents else None
    expected = slow_attention(q, k, v, documents)
    mask = None
    if documents is not None:
        same = documents[:, None, 9 - queries :, None] == documents[:, None, None, :]
        mask = same & ops.causal_mask(queries, 9, q.device)
    torch.testing.assert_close(ops.attention(q, k, v, mask), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("short_row", [0, 9])
def test_half_precision_attends_the_same_on_both_paths(
    groups: int, short_row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "SHORT_ROW", short_row)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 9, 6, generator=generator).bfloat16()
    k, v = torch.randn(2, 2, groups, 9, 6, generator=generator).bfloat16()
    found = ops.attention(q, k, v)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(
        found.float(), slow_attention(q.float(), k.float(), v.float(), None), rtol=0.02, atol=0.02
    )


def test_a_causal_mask_by_hand() -> None:
    assert ops.causal_mask(2, 4, torch.device("cpu")).tolist() == [[True, True, True, False], [True] * 4]
    assert ops.causal_mask(2, 2, torch.device("cpu")).tolist() == [[True, False], [True, True]]


def test_functions_agree_with_the_public_scripts(parity: Path) -> None:
    data = load_file(parity / "components" / "functions" / "functions.safetensors")
    assert (ops.rms_norm(data["rmsnorm.in"]) - data["rmsnorm.default_eps"]).abs().max() < 1e-6
    assert (ops.softcap(data["softcap.in"], 30.0) - data["softcap.tanh30"]).abs().max() < 1e-5
    x = data["rope.x"].transpose(1, 2)
    tables = ops.rotary_tables(torch.arange(x.shape[-2]), x.shape[-1], 10_000.0, torch.float32)
    assert (ops.rotate(x, *tables).transpose(1, 2) - data["rope.full_16_of_16"]).abs().max() < 1e-5
