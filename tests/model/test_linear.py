"""The one linear layer: what views and deltas do to it, to a block, to the head."""

import pytest
import torch
import torch.nn.functional as F
from samples import noisy
from torch import Tensor
from variations import BASE, DEPTH, LENGTH, ROWS, VOCABULARY, WIDTH, some_ids, some_starts

from caddie import ops
from caddie.model import Linear, LowRankDelta, Model, build
from caddie.model.context import Context
from caddie.model.parameters import FanIn, initialize


def random_model() -> Model:
    """A model with no weight at zero."""
    return noisy(build(BASE, seed=0), 0.2)


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
    model, ids = random_model(), some_ids()
    folded = random_model()
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
        assert model(ids, None, torch.bfloat16, capped=False).dtype == torch.bfloat16


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
    model, ids, starts = random_model(), some_ids(), some_starts()
    layers = [name for name, layer in model.named_modules() if isinstance(layer, Linear)]
    folded = [random_model() for _ in range(ROWS)]
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
            assert not torch.allclose(expected, random_model()(ids, starts, torch.float64)[row : row + 1], atol=0.1)


def test_the_deltas_of_a_block_add_to_attention_and_mlp() -> None:
    block = random_model().blocks[0].double()
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
    model, ids = random_model(), some_ids()
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0)).double()
    a, b = factors(ROWS, WIDTH, VOCABULARY)
    model.head.delta = LowRankDelta(a, b, 2.0)
    h = ops.rms_norm(x)
    uncapped = h @ model.embedding.weight.double().mT + 2 * h @ a.double().mT @ b.double().mT
    torch.testing.assert_close(model.head(x, model.embedding), 30 * torch.tanh(uncapped / 30), rtol=0, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, None, torch.float64, last=4), model(ids, None, torch.float64)[:, -4:])


def test_deltas_with_second_factors_of_zero_change_not_a_bit() -> None:
    model, ids, starts = random_model(), some_ids(), some_starts()
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
