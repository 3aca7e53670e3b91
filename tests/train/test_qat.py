"""Quantization-aware training: what a layer sees of its weight, its gradient, and that a compiled model notices."""

import copy
import math
import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import quick, sample
from torch import Tensor, nn

from caddie.config import coerce, variants
from caddie.config.schedules import Budget, Ramp, TrainProgress
from caddie.errors import UserError
from caddie.model import GPT, build
from caddie.model.linear import Linear
from caddie.model.parameters import FanIn, declarations, initialize
from caddie.pack.quantize import (
    BestPercentile,
    Binary,
    Float8,
    Float16,
    Gptq,
    Percentile,
    Quantizer,
    Rotated,
    Rows,
    SigmaClip,
    Ternary,
)
from caddie.train.qat import QAT, Noisy, SoftRound, StraightThrough, View, Views, noise, soft_round

often = settings(quick, max_examples=60)
CPU = torch.device("cpu")
COARSE = Rows(bits=3)
ABSOLUTE = Rows(scale=Percentile(floor="absolute", fraction=0.9))
EVERY: list[QAT] = [cls(quantizer=COARSE) for cls in variants(QAT).values()]
every_kind = pytest.mark.parametrize("config", EVERY, ids=repr)


def at(progress: float) -> TrainProgress:
    return TrainProgress(step=7, seconds=100 * progress, budget=Budget(seconds=100))


def on(config: QAT, strength: float = 1.0) -> View:
    """A view with this strength."""
    view = View(config.but(strength=strength), CPU)
    view.set(at(0.9))
    return view


class Net(nn.Module):
    """Two linear layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Linear(12, 16, FanIn())
        self.second = Linear(16, 5, FanIn())
        initialize(self, seed=0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).relu())
        return y.square().mean()


def number(loss: Tensor) -> float:
    return float(loss.detach())


# What is seen


@every_kind
def test_the_ends_are_exact(config: QAT) -> None:
    weight = sample(6, 40)
    assert torch.equal(on(config, 0.0)(weight), weight)
    full = on(config)(weight)
    if isinstance(config, StraightThrough):
        assert torch.equal(full, COARSE.dequantize(COARSE.quantize(weight), (6, 40)))
    half = on(config, 0.5)(weight)
    torch.testing.assert_close(half, (weight + full) / 2)
    assert not torch.equal(half, weight)


@every_kind
def test_the_default_acts_in_the_last_part_alone(config: QAT) -> None:
    view, weight = View(config, CPU), sample(4, 9)
    assert torch.equal(view(weight), weight), "before the first moment too"
    strengths = []
    for progress in (0.0, 0.5, 0.8499, 0.85, 0.9, 1.0):
        view.set(at(progress))
        strengths.append(float(view.strength))
    assert strengths == [0, 0, 0, 1, 1, 1]


def test_strength_may_ramp() -> None:
    view = View(StraightThrough(strength=Ramp(start=0.0, end=1.0, begin=0.5, finish=0.9)), CPU)
    for progress, strength in [(0.4, 0.0), (0.6, 0.25), (0.7, 0.5), (0.9, 1.0)]:
        view.set(at(progress))
        assert float(view.strength) == pytest.approx(strength)


@pytest.mark.parametrize("kind", [StraightThrough, Noisy])
@pytest.mark.parametrize("strength", [0.0, 0.3, 1.0])
def test_the_gradient_passes_as_if_nothing_happened(kind: type[QAT], strength: float) -> None:
    weight = sample(6, 40).requires_grad_()
    direction = sample(6, 40, seed=1)
    (gradient,) = torch.autograd.grad((on(kind(quantizer=COARSE), strength)(weight) * direction).sum(), weight)
    torch.testing.assert_close(gradient, direction, rtol=0 if kind is StraightThrough else 1e-3, atol=0)


def test_soft_rounding_has_the_gradient_of_its_stair() -> None:
    quantizer = Rows(bits=4, scale=Percentile(fraction=1.0), steps="float32")
    weight = sample(6, 40).requires_grad_()
    view = on(SoftRound(quantizer=quantizer, sharpness=5.0))
    (gradient,) = torch.autograd.grad(view(weight).sum(), weight)
    step = weight.detach().abs().amax(1, keepdim=True) / 7
    moved = [
        view.config.quantizer.fake(weight.detach(), lambda y, d=d: soft_round(y + d, torch.tensor(5.0)))
        for d in (-1e-3, 1e-3)
    ]
    torch.testing.assert_close(gradient, (moved[1] - moved[0]) / (2e-3 * step), rtol=2e-2, atol=5e-3)
    largest = weight.detach().abs().argmax(1, keepdim=True)
    assert (gradient.gather(1, largest) > 0).all(), "what is clipped goes on learning"


# Noise


def test_noise_is_as_wide_as_a_step_and_new_at_every_step_of_the_run() -> None:
    weight = sample(6, 400)
    view = View(Noisy(quantizer=Rows(bits=4, scale=Percentile(fraction=1.0)), strength=1.0), CPU)
    seen = []
    for number in (7, 8, 7):
        view.set(TrainProgress(step=number, seconds=90.0, budget=Budget(seconds=100)))
        seen.append((view(weight) - weight) / (weight.abs().amax(1, keepdim=True) / 7))
    assert torch.equal(seen[0], seen[2])
    assert abs(float((seen[0] * seen[1]).mean())) < 0.01
    for errors in seen:
        assert errors.abs().max() <= 0.501
        assert errors.abs().max() > 0.49
        assert float(errors.square().mean()) == pytest.approx(1 / 12, rel=0.1)


@pytest.mark.parametrize("y", [sample(200, 300), torch.zeros(200, 300), torch.ones(300, 200)], ids=["y", "0", "1"])
def test_noise_is_uniform_and_neighbours_know_nothing_of_each_other(y: Tensor) -> None:
    found, later = noise(y, torch.tensor(3)), noise(y, torch.tensor(4))
    counts = torch.histc(found, 20, -0.5, 0.5)
    assert counts.sum() == 60_000
    assert float(((counts - 3000) ** 2 / 3000).sum()) < 43.8, "chi squared, 19 degrees: one in a thousand"
    others = [found.roll(1, 0), found.roll(1, 1), later, y]
    for other in others[: 4 if y.std() > 0 else 3]:
        pair = torch.stack([found.flatten(), other.flatten()])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 4 / 60_000**0.5


# The stair


def test_soft_rounding_by_hand() -> None:
    y = torch.tensor([-1.0, 0.0, 2.0, 0.5, -1.5, 0.25, 0.75, -0.75])
    found = soft_round(y, torch.tensor(4.0))
    quarter = 0.5 - 0.5 * math.tanh(1.0) / math.tanh(2.0)  # 0.1050
    assert quarter == pytest.approx(0.1050, abs=1e-4)
    expected = [-1.0, 0.0, 2.0, 0.5, -1.5, quarter, 1 - quarter, quarter - 1]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


@often
@given(st.floats(-100, 100), st.floats(0.01, 1000))
def test_whole_and_half_numbers_stay_and_order_is_kept(y: float, sharpness: float) -> None:
    alpha = torch.tensor(sharpness, dtype=torch.float64)
    fixed = torch.tensor([math.floor(y), math.floor(y) + 0.5], dtype=torch.float64)
    torch.testing.assert_close(soft_round(fixed, alpha), fixed)
    line = y + torch.linspace(0, 3, 301, dtype=torch.float64)
    stair = soft_round(line, alpha)
    assert (stair.diff() >= -1e-12).all()
    assert ((stair - line).abs() <= 0.5 + 1e-9).all()


def test_the_stair_goes_from_the_line_to_the_steps() -> None:
    y = torch.linspace(-3.45, 3.45, 100, dtype=torch.float64)
    y = y[(y - y.floor() - 0.5).abs() > 0.05]  # half numbers stay whatever the sharpness
    errors = [float((soft_round(y, torch.tensor(float(a))) - y.round()).abs().max()) for a in (1, 4, 16, 64, 256)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-3
    torch.testing.assert_close(soft_round(y, torch.tensor(0.01)), y, rtol=0, atol=1e-5)
    torch.testing.assert_close(soft_round(y.float(), torch.tensor(0.01)), y.float(), rtol=0, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 8.0])
def test_the_gradient_of_the_stair(sharpness: float) -> None:
    y = torch.tensor([-1.3, -0.6, 0.1, 0.49, 2.8], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y: soft_round(y, torch.tensor(sharpness, dtype=torch.float64)), y)


def test_sharpness_rises_from_a_straight_line() -> None:
    view = View(SoftRound(strength=1.0, sharpness=Ramp(start=0.01, end=16.0)), CPU)
    view.set(at(0.0))
    weight = sample(3, 5)
    torch.testing.assert_close(view(weight), weight, rtol=0, atol=1e-2)
    view.set(at(1.0))
    assert float(view.sharpness) == 16.0


# Alive when compiled


@pytest.fixture
def one_graph_each() -> Iterator[None]:
    """A second compilation of the same code is an error."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch.compiler.reset()


inductor = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler"),
    pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning"),
]
BACKENDS = [
    "aot_eager",
    pytest.param("inductor", marks=inductor),
]


@pytest.mark.long
@pytest.mark.usefixtures("one_graph_each")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("kind", "quantizer"),
    [
        (StraightThrough, COARSE),
        (SoftRound, ABSOLUTE),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in ((StraightThrough, ABSOLUTE), (SoftRound, COARSE), (Noisy, COARSE), (Noisy, ABSOLUTE))
        ),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else repr(value),
)
def test_the_switch_changes_the_loss_of_a_compiled_model(kind: type[QAT], quantizer: Rows, backend: str) -> None:
    net, x = Net(), sample(4, 12)
    plain = number(net(x))
    views = Views({"matrix": kind(quantizer=quantizer, strength=Ramp(start=0.0, end=1.0))}, net)
    views.attach(True)
    compiled = torch.compile(net, backend=backend, fullgraph=True, dynamic=False)
    assert number(compiled(x)) == pytest.approx(plain, rel=1e-6)
    for progress in (0.5, 1.0):
        views.set(at(progress))
        loss = compiled(x)
        assert number(loss) == pytest.approx(number(net(x)), rel=1e-6)
        assert abs(number(loss) - plain) > 1e-5 * plain
        loss.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in net.parameters())
    if kind is StraightThrough:
        with torch.no_grad():
            for weight in net.parameters():
                weight.copy_(quantizer.dequantize(quantizer.quantize(weight), tuple(weight.shape)))
        views.attach(False)
        assert number(loss) == pytest.approx(number(net(x)), rel=1e-6)


@pytest.mark.parametrize(
    "quantizer",
    [
        Rows(bits=6, scale=BestPercentile()),
        Gptq(of=Rows(bits=6, scale=SigmaClip())),
        Rotated(of=COARSE),
        Ternary(group=5),
        Ternary(keep_mean=True),
        Binary(group=5),
        Float8(),
    ],
    ids=repr,
)
@pytest.mark.slow
@pytest.mark.usefixtures("one_graph_each")
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_quantizer_can_be_compiled(quantizer: Quantizer, backend: str) -> None:
    weight = sample(8, 12)
    compiled = torch.compile(quantizer.fake, backend=backend, fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(weight), quantizer.fake(weight), rtol=1e-6, atol=0)


@pytest.mark.long
@pytest.mark.usefixtures("one_graph_each")
def test_a_switch_that_is_a_python_number_is_caught() -> None:
    class Folded:
        strength = 0.0

        def __call__(self, weight: Tensor) -> Tensor:
            return weight + self.strength * (COARSE.fake(weight) - weight)

    net, x = Net(), sample(4, 12)
    view = net.first.view = Folded()
    compiled = torch.compile(net, backend="eager", fullgraph=True, dynamic=False)  # whatever the backend
    before = number(compiled(x))
    view.strength = 1.0
    with pytest.raises((torch._dynamo.exc.RecompileError, AssertionError)):  # compiled anew, or the number folded away
        assert number(compiled(x)) != before


@pytest.mark.long
def test_there_are_two_graphs() -> None:
    torch.compiler.reset()
    graphs = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        nonlocal graphs
        graphs += 1
        return graph.forward

    net, x = Net(), sample(4, 12)
    rules = {
        "first.*": StraightThrough(quantizer=COARSE, strength=Ramp(start=0.0, end=1.0, begin=0.3)),
        "second.*": SoftRound(quantizer=COARSE),
    }
    views = Views(rules, net)
    compiled = torch.compile(net, backend=backend, fullgraph=True, dynamic=False)
    losses = []
    for progress in (0.0, 0.3, 0.5, 0.8, 0.9, 1.0, 0.1):
        views.set(at(progress))
        losses.append(number(compiled(x)))
        assert losses[-1] == pytest.approx(number(net(x)), rel=1e-6)
    assert graphs == 2
    assert losses[0] == losses[1] == losses[-1]
    assert len(set(losses)) == 5
    torch.compiler.reset()


@pytest.mark.parametrize("floor", [pytest.param(floor, marks=inductor) for floor in ("relative", "absolute")])
def test_compiled_code_rounds_as_the_quantizer_does(floor: str) -> None:
    """Inductor leaves out conversions to half precision and back, unless they are written as arithmetic."""
    torch.compiler.reset()
    quantizer, weight = Rows().but({"scale.floor": floor}), 5 * sample(64, 96)
    compiled = torch.compile(quantizer.fake, fullgraph=True)
    torch.testing.assert_close(compiled(weight), quantizer.fake(weight), rtol=1e-6, atol=0)
    torch.compiler.reset()


# Where views hang


@pytest.fixture
def model() -> nn.Module:
    return build(GPT(vocabulary=64, width=32, depth=2, skips=None), seed=0)


def test_views_change_no_name_and_no_state(model: nn.Module) -> None:
    names, state, declared = [*dict(model.named_parameters())], [*model.state_dict()], declarations(model)
    modules = [name for name, _ in model.named_modules()]
    views = Views({"matrix": StraightThrough(), "blocks.1.*": SoftRound(quantizer=COARSE)}, model)
    views.attach(True)
    assert [*dict(model.named_parameters())] == names
    assert [*model.state_dict()] == state
    assert declarations(model) == declared
    assert [name for name, _ in model.named_modules()] == modules
    linears = {f"{name}.weight": m for name, m in model.named_modules() if isinstance(m, Linear)}
    assert views.by_name.keys() == {name for name in linears if declared[name].role == "matrix"}
    assert len(views.by_name) >= 8
    for name, view in views.by_name.items():
        assert linears[name].view is view
        assert isinstance(view.config, SoftRound if name.startswith("blocks.1.") else StraightThrough)
    copied = copy.deepcopy(model)
    views.attach(False)
    assert all(linear.view is None for linear in linears.values())
    held = [m.view for m in copied.modules() if isinstance(m, Linear) and m.view is not None]
    assert len(held) == len(views.by_name)
    assert not {*map(id, held)} & {*map(id, views.by_name.values())}


def test_views_are_attached_while_they_act(model: nn.Module) -> None:
    views = Views({"matrix": StraightThrough(quantizer=COARSE)}, model)
    ids = torch.randint(0, 64, (1, 16), generator=torch.Generator().manual_seed(0))
    starts = torch.zeros(1, 16, dtype=torch.bool)

    def loss(progress: float) -> float:
        views.set(at(progress))
        assert views.active(at(progress)) == (progress >= 0.85)
        assert all((m.view is not None) == (progress >= 0.85) for m in model.modules() if isinstance(m, Linear))
        return float(F.cross_entropy(model(ids, starts, torch.float32).flatten(0, 1), ids.flatten()))

    with torch.no_grad():
        for parameter in model.parameters():  # what writes to the stream starts at zero
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        before, during, after = loss(0.2), loss(0.9), loss(0.3)
        assert before == after != during
        for name in views.by_name:
            weight = dict(model.named_parameters())[name]
            weight.copy_(COARSE.dequantize(COARSE.quantize(weight), tuple(weight.shape)))
        assert loss(0.0) == pytest.approx(during, rel=1e-6)


def test_no_rules_no_views(model: nn.Module) -> None:
    views = Views({}, model)
    views.set(at(1.0))
    assert not views.by_name
    assert not views.active(at(1.0))


@pytest.mark.parametrize("rule", ["embedding", "scalar", "embedding.*"])
def test_a_rule_that_reaches_no_linear_layer_is_an_error(model: nn.Module, rule: str) -> None:
    with pytest.raises(UserError, match=rf"train\.qat: {rule[:5]}.*reaches no linear layer"):
        Views({rule: StraightThrough()}, model)


def test_a_misspelt_rule_is_an_error(model: nn.Module) -> None:
    with pytest.raises(UserError, match=r"blocs.* matches no parameter"):
        Views({"blocs.*": StraightThrough()}, model)


def test_settings_are_checked() -> None:
    with pytest.raises(UserError, match="Float16 cannot be taken into training"):
        StraightThrough(quantizer=Float16())
    with pytest.raises(UserError, match="strength must be from 0 to 1"):
        StraightThrough(strength=1.5)
    with pytest.raises(UserError, match=r"sharpness must be from 0\.01"):
        SoftRound(sharpness=0.0)
    with pytest.raises(UserError, match=r"sharpness, a Ramp, must be from 0\.01 to 10,000, not 100000"):
        SoftRound(sharpness=Ramp(start=1.0, end=1e5))
    config = SoftRound(quantizer=COARSE, sharpness=3)
    assert coerce(config.to_json(), QAT, "") == config
