"""Operations with several implementations: what a CPU runs against the references, and who is picked where."""

import copy
import sys
from collections.abc import Callable
from inspect import signature
from types import ModuleType, SimpleNamespace

import kernels
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import noisy
from torch import Tensor
from variations import BASE, VOCABULARY

from caddie import ops
from caddie.errors import UserError
from caddie.model import LeakyReluSquared, build
from caddie.ops import IMPLEMENTATIONS, Softcap, choose, manual_backward, plain, products, use_implementations
from caddie.ops import dispatch as choice
from caddie.train.optim import muon

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PRECISE = {"rtol": 2e-5, "atol": 2e-6}
BRAIN = {"rtol": 2**-7, "atol": 1e-4}
"""Two roundings to bfloat16."""


def some_logits(
    rows: int, columns: int, dtype: torch.dtype = torch.float32, size: float = 8.0
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + 100 * columns)
    logits = (8.0 * torch.randn(rows, columns, generator=generator)).to(dtype)
    return logits, torch.randint(0, columns, (rows,), generator=generator)


@pytest.mark.usefixtures("brain_products")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_dtype(dtype: torch.dtype) -> None:
    """Also where they are imitated: inputs, weight, output and slopes are rounded to it, sums are float32's."""
    x, weight, slopes = torch.randn(3, 5, 40), torch.randn(30, 40), torch.randn(3, 5, 30)
    leaves = x.to(dtype).requires_grad_(), weight.requires_grad_()
    y = ops.linear(*leaves)
    assert y.dtype == dtype
    exact = leaves[0].detach().double().requires_grad_(), weight.detach().to(dtype).double().requires_grad_()
    right = exact[0] @ exact[1].mT
    near = {"rtol": 2**-7, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(y.double(), right, **near)
    torch.testing.assert_close(ops.matmul(leaves[0], weight.mT), y, **near)
    (y * slopes.to(dtype)).sum().backward()
    (right * slopes.to(dtype).double()).sum().backward()
    for mine, other in zip(leaves, exact, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert mine.grad.dtype == mine.dtype
        torch.testing.assert_close(mine.grad.double(), other.grad, **near)


def test_many_rows_are_multiplied_by_onednn_where_nothing_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the order of sums changes, whatever the layout; all else is PyTorch's own product."""
    calls = []

    def counted(x: Tensor, weight: Tensor, *rest: object) -> Tensor:
        calls.append(x.shape)
        assert rest == (None, "none", [], "")
        return x @ weight.mT if quick is None else quick(x, weight, *rest)

    quick = products._ONEDNN_LINEAR
    monkeypatch.setattr(products, "_ONEDNN_LINEAR", counted)
    weights = torch.randn(70, 33), torch.randn(33, 70).mT, torch.randn(140, 33)[::2], torch.randn(70, 33).bfloat16()
    for x in (torch.randn(4, 64, 33), torch.randn(300, 33), torch.randn(33, 256).mT):
        for weight in weights:
            expected = torch.nn.functional.linear(x, weight.float())
            assert torch.equal(ops.linear(x, weight), expected), "outside inference mode"
            assert not calls
            with torch.inference_mode():
                torch.testing.assert_close(ops.linear(x, weight), expected, rtol=1e-5, atol=2e-5)
            assert calls.pop() == x.shape
    with torch.inference_mode():
        few = torch.randn(255, 33)
        assert torch.equal(ops.linear(few, weights[0]), few @ weights[0].mT)
        assert ops.linear(few[:0], weights[0]).shape == (0, 70)
        for other in (torch.float64, torch.bfloat16):
            assert ops.linear(torch.randn(300, 33).to(other), weights[0]).dtype == other
        monkeypatch.setattr(products, "_ONEDNN_LINEAR", None)
        torch.testing.assert_close(ops.linear(x, weights[0]), x @ weights[0].mT)
    assert not calls


# The loss


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(2, 60),
    cap=st.sampled_from([None, 0.5, 10.0, 30.0]),
    form=st.sampled_from(["tanh", "polynomial"]),
    z_loss=st.sampled_from([0.0, 0.3]),
    two=st.booleans(),
    brain=st.booleans(),
    chunk=st.sampled_from([1, 64, 1 << 18]),
)
def test_the_manual_loss_is_the_reference(
    rows: int, columns: int, cap: float | None, form: Softcap, z_loss: float, two: bool, brain: bool, chunk: int
) -> None:
    logits, targets = some_logits(rows, columns, torch.bfloat16 if brain else torch.float32)
    slopes = torch.linspace(-1.0, 2.0, rows)
    second = (targets.flip(0), torch.linspace(0.0, 0.5, rows)) if two else ()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manual_backward, "CHUNK", chunk)
        mine = logits.clone().requires_grad_()
        descended, entropies = manual_backward.cross_entropy(mine, targets, cap, form, z_loss, *second)
        (descended * slopes).sum().backward()
    # A polynomial cap is the reference's own, in the dtype of the logits.
    exact = logits.to(torch.float64 if cap is None or form == "tanh" else logits.dtype).requires_grad_()
    right, right_entropies = plain.cross_entropy(exact, targets, cap, form, z_loss, *second)
    (right * slopes).sum().backward()
    assert descended.dtype == entropies.dtype == torch.float32
    assert not entropies.requires_grad
    torch.testing.assert_close(descended, right.float(), **PRECISE)
    torch.testing.assert_close(entropies, right_entropies.float(), **PRECISE)
    assert mine.grad is not None
    assert mine.grad.dtype == logits.dtype
    assert exact.grad is not None
    # A slope may be a small difference of terms as large as its row's largest, which the loss of the denominator makes
    # large; in bfloat16 that is within the rounding.
    largest = 1.0 if brain else exact.grad.abs().amax(-1, keepdim=True).clamp_min(1.0)
    near = BRAIN if brain else PRECISE
    torch.testing.assert_close((mine.grad / largest).float(), (exact.grad / largest).float(), **near)


@pytest.mark.parametrize("implementation", ["plain", "manual"])
def test_the_loss_in_numbers(implementation: str) -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1000.0, -1000.0, -1000.0, -1000.0]], requires_grad=True)
    with use_implementations(cross_entropy=implementation):
        others = torch.tensor([3, 0]), torch.tensor([0.5, 0.0])
        descended, entropies = ops.cross_entropy(logits, torch.tensor([1, 1]), 2.0, "tanh", 0.1, *others)
    denominators = torch.tensor([4.0, 2.718281828**2 + 3 / 2.718281828**2]).log()
    right = denominators - torch.tensor([0.0, -2.0])
    torch.testing.assert_close(entropies, right)
    of_others = torch.tensor([0.5, 0.0]) * denominators
    torch.testing.assert_close(descended, right + 0.1 * denominators**2 + of_others)
    descended[0].backward()
    assert logits.grad is not None
    more, ids = 1 + 0.2 * float(denominators[0]) + 0.5, torch.eye(4)
    torch.testing.assert_close(logits.grad[0], 0.25 * torch.ones(4) * more - ids[1] - 0.5 * ids[3])
    assert not logits.grad[1].any()


def test_the_loss_of_hopeless_targets_is_finite() -> None:
    """The loss takes no logarithm of the target's probability, which may be zero in float32."""
    logits = torch.tensor([[0.0, 500.0], [500.0, 0.0]])
    with use_implementations(cross_entropy="manual"):
        assert ops.cross_entropy(logits, torch.tensor([0, 0]))[0].tolist() == [500.0, 0.0]
        with torch.inference_mode():
            assert ops.cross_entropy(logits, torch.tensor([1, 1]))[1].tolist() == [0.0, 500.0]


def test_the_gradient_of_the_loss_is_there_once_and_only_where_wanted() -> None:
    logits, targets = some_logits(3, 5)
    assert not manual_backward.cross_entropy(logits, targets, 30.0)[0].requires_grad
    with torch.no_grad():
        assert not manual_backward.cross_entropy(logits.requires_grad_(), targets, 30.0)[0].requires_grad
    losses = manual_backward.cross_entropy(logits, targets, 30.0)[0]
    losses.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):  # rather than a second gradient that is wrong
        losses.sum().backward()
    with pytest.raises(RuntimeError, match="no second derivative"):  # rather than none
        torch.autograd.grad(manual_backward.cross_entropy(logits, targets, 30.0)[0].sum(), logits, create_graph=True)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")  # which is PyTorch's, too
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("cap", "z_loss", "two"), [(None, 0.0, False), (30.0, 0.0, True), (10.0, 0.3, False)])
def test_the_manual_loss_is_one_operation_of_a_compiled_graph(
    dtype: torch.dtype, cap: float | None, z_loss: float, two: bool
) -> None:
    torch.compiler.reset()
    logits, targets = some_logits(12, 40, dtype)
    slopes = torch.linspace(-1.0, 2.0, 12)
    second = (targets.flip(0), slopes.abs()) if two else (None, None)
    torch.library.opcheck(manual_backward._cross_entropy, (logits, targets, cap, z_loss, *second, True))

    def descend(logits: Tensor) -> Tensor:
        return (ops.cross_entropy(2.0 * logits, targets, cap, "tanh", z_loss, *second)[0] * slopes).sum()

    from torch._dynamo.testing import AotEagerAndRecordGraphs  # which takes a second to import

    kept = AotEagerAndRecordGraphs()
    compiled = torch.compile(descend, backend=kept, fullgraph=True)
    found = []
    for function in (descend, compiled):
        leaf = logits.clone().requires_grad_()
        value = function(leaf)
        value.backward()
        found.append((value.detach(), leaf.grad))
        with torch.no_grad():
            torch.testing.assert_close(function(logits), value.detach())
    assert "caddie.cross_entropy_manual" in kept.fw_graphs[0].code
    torch.testing.assert_close(found[1][0], found[0][0])
    torch.testing.assert_close(found[1][1], found[0][1], **BRAIN if dtype == torch.bfloat16 else PRECISE)


# The activation and the products


@pytest.mark.parametrize("slope", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_manual_activation_is_the_reference_to_the_bit(slope: float, dtype: torch.dtype) -> None:
    u = torch.tensor([[-3.0, -0.0, 0.0, 0.7, 2.0, torch.inf]]).to(dtype)
    u = torch.cat((u, torch.randn(5, 6, generator=torch.Generator().manual_seed(0)).to(dtype)))
    weight = torch.linspace(-1, 1, u.numel()).view_as(u).to(dtype)
    found = []
    for function in (plain.squared, manual_backward.squared):
        leaf = u.clone().requires_grad_()
        y = function(leaf, slope)
        (y * weight).sum().backward()
        found.append((y, leaf.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])  # type: ignore[arg-type]
    assert found[1][0][0, :5].tolist() == plain.squared(u[0, :5], slope).tolist()
    assert manual_backward.squared(torch.tensor([-2.0, 3.0]), 0.5).tolist() == [1.0, 9.0]


def test_references_of_the_kernels_in_the_bench_by_hand() -> None:
    x, up, down = torch.tensor([[1.0, -2.0]]), torch.eye(2), torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    assert kernels.squared_mlp(x, up, down, 0.5).tolist() == [[2.0, 1.0]]
    assert kernels.squared_mlp(x, up, down).tolist() == [[1.0, 0.0]]
    matrix = torch.tensor([[1.0, 2.0], [0.0, 3.0]])
    assert muon.gram(matrix).tolist() == [[5.0, 6.0], [6.0, 9.0]]
    assert muon.gram_polynomial(torch.tensor([[[1.0, 2.0], [2.0, 0.0]]]), 10.0, -1.0).tolist() == [
        [[5.0, 18.0], [18.0, -4.0]]
    ]


# Who is picked


def test_the_choice_by_device_dtype_and_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "has_triton", lambda: True)
    for dtype in (torch.float32, torch.bfloat16):
        assert choose("cross_entropy", CPU, dtype) == choose("squared", CPU, dtype) == "manual"
        assert choose("cross_entropy", CPU, dtype, compiling=True) == "manual"
        assert choose("squared", CPU, dtype, compiling=True) == "plain"
        assert choose("cross_entropy", CUDA, dtype) == "Triton"
        assert choose("cross_entropy", CUDA, dtype, compiling=True) == "Triton"
    assert choose("squared", CUDA, torch.bfloat16) == "manual", "of one tensor that is kept for two"
    assert choose("squared", CUDA, torch.bfloat16, compiling=True) == "plain"
    assert choose("cross_entropy", CPU, torch.float64) == choose("cross_entropy", CUDA, torch.float64) == "plain"
    assert choose("cross_entropy", torch.device("mps"), torch.float32) == "plain"


def test_without_a_triton_that_compiles_the_reference_is_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    def triton(find: Callable[[], str]) -> ModuleType:
        module = ModuleType("triton")
        active = SimpleNamespace(get_current_target=find)
        vars(module).update(jit=None, runtime=SimpleNamespace(driver=SimpleNamespace(active=active)))
        return module

    def fail() -> str:
        raise RuntimeError("Python.h: No such file or directory")

    left_behind = ModuleType("triton")
    for module, expected in (None, "plain"), (triton(fail), "plain"), (left_behind, "plain"), (triton(str), "plain"):
        monkeypatch.setitem(sys.modules, "triton", module)  # None: importing it is an error
        choice.has_triton.cache_clear()
        assert choose("cross_entropy", CUDA, torch.bfloat16) == expected
    monkeypatch.setitem(sys.modules, "triton", triton(lambda: "sm_90"))
    choice.has_triton.cache_clear()
    assert choose("cross_entropy", CUDA, torch.bfloat16) == "Triton"
    choice.has_triton.cache_clear()


def test_an_implementation_is_asked_for_by_name() -> None:
    with use_implementations(cross_entropy="plain", scaled_product="scaled_mm"):
        assert choose("cross_entropy", CPU, torch.float32) == "plain"
        with use_implementations(cross_entropy="manual"):
            assert choose("cross_entropy", CPU, torch.float64) == "manual"
            assert choose("scaled_product", CPU, torch.float32) == "scaled_mm"
        assert choose("cross_entropy", CPU, torch.float32) == "plain"
    assert choose("cross_entropy", CPU, torch.float32) == "manual"
    for wrong in ({"squared": "Triton"}, {"nothing": "plain"}):
        with pytest.raises(UserError, match="there is no"), use_implementations(**wrong):
            pass


def test_the_manual_cap_is_the_reference() -> None:
    logits, _ = some_logits(7, 33)
    assert torch.equal(manual_backward.softcap(logits, 30.0), plain.softcap(logits, 30.0)), "not in inference mode"
    with torch.inference_mode():
        kept, found = logits.clone(), manual_backward.softcap(logits, 30.0)
        torch.testing.assert_close(found, plain.softcap(logits, 30.0), rtol=0, atol=8e-6)
        assert not torch.equal(found, plain.softcap(logits, 30.0)), "another way"
        assert torch.equal(logits, kept), "the caller's logits stay as they are"
        for exact in (logits.double(), logits.bfloat16()):
            assert torch.equal(manual_backward.softcap(exact, 30.0), plain.softcap(exact, 30.0))


def test_every_implementation_has_the_signature_of_its_reference() -> None:
    for operation, names in IMPLEMENTATIONS.items():
        for name in set(names) - {"Triton"}:  # which only `interpreted_kernels.py` imports
            found = signature(choice.implementation(operation, name))
            assert found == signature(getattr(plain, operation)) == signature(getattr(ops, operation))


# In the model


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, VOCABULARY, (2, 17), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1], ids[:, 1:]


def test_a_training_loss_through_the_head_is_that_of_its_capped_logits(batch: tuple[Tensor, Tensor]) -> None:
    model, (inputs, targets) = noisy(build(BASE.but({"block.mlp": LeakyReluSquared()}), 0), 0.1), batch
    found = []
    for name in ("plain", "manual"):
        twin = copy.deepcopy(model)
        with use_implementations(cross_entropy=name, squared=name):
            descended, entropies = twin.head.losses(twin(inputs, capped=False), targets, 0.01)
            descended.mean().backward()
        found.append((descended, entropies, [parameter.grad for parameter in twin.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)
    capped = model(inputs).flatten(0, 1)
    right = torch.nn.functional.cross_entropy(capped, targets.flatten(), reduction="none")
    torch.testing.assert_close(found[0][1], right.detach())


@pytest.mark.long
def test_a_compiled_graph_is_whole(batch: tuple[Tensor, Tensor]) -> None:
    """On a CPU; traced without a backend, which takes a second less than to compile it."""
    logits, targets = some_logits(4, 9)

    def loss(x: Tensor) -> Tensor:
        return ops.cross_entropy(ops.squared(ops.rms_norm(x)), targets, 30.0)[0].mean()

    graph = torch.compile(loss, backend="eager", fullgraph=True)
    torch.testing.assert_close(graph(logits), loss(logits))
    many, weight = torch.randn(512, 9), torch.randn(7, 9)  # so many rows that they would be oneDNN's, were it inference
    torch.testing.assert_close(
        torch.compile(ops.linear, backend="eager", fullgraph=True)(many, weight), many @ weight.mT
    )
