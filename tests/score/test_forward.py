"""The forward of scoring is compiled on a GPU once a shape has taken as long as compiling, and never in the way."""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from variations import BASE

from caddie.model import Cache, Recurrence, build
from caddie.ops import attention
from caddie.score import SGD, ChunkSGD, DocumentLoRA, GlobalSGD, Scoring, TestTimeTraining, Text, score
from caddie.score import forward as module
from caddie.score.forward import COMPILE_SECONDS, Forward
from caddie.score.ttt_lora import _Adapters

IDS = torch.arange(2 * 8).reshape(2, 8) % 60


class Clock:
    """Each look at it is so many seconds later."""

    def __init__(self, step: float) -> None:
        self.step, self.now = step, 0.0

    def perf_counter(self) -> float:
        self.now += self.step
        return self.now


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes that were given to the compiler and run by what it made; a look at the clock takes 10 s."""
    shapes: list[tuple[int, ...]] = []

    def compile_(function: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
        assert options == {"dynamic": False}

        def run(ids: Tensor, starts: Tensor) -> Tensor:
            shapes.append(tuple(ids.shape))
            return function(ids, starts)

        return run

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(module, "allow_graphs", lambda count: None)  # which imports the compiler
    monkeypatch.setattr(module, "time", Clock(COMPILE_SECONDS / 3))
    return shapes


def on_gpu(forward: Forward) -> Forward:
    forward._compiling = True  # as if the model were on one
    return forward


def test_a_shape_is_compiled_when_it_has_taken_long(
    compiled: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed: list[int] = []
    monkeypatch.setattr(module, "allow_graphs", allowed.append)
    model = build(BASE, 0)
    forward = on_gpu(Forward(model, 0, torch.float32))
    with torch.inference_mode():
        plain = model(IDS, IDS == 0, torch.float32)
        for call in range(5):
            assert torch.equal(forward(IDS), plain)
            assert torch.equal(forward(IDS[:1], 3), plain[:1, -3:])
            assert len(compiled) == (0 if call < 3 else 2 * call - 4), "after 30 s of each, three calls of 10 s"
        assert compiled[:2] == [(2, 8), (1, 8)]
        assert allowed == [8, 16], "both are of one function to PyTorch"
        before = len(compiled)
        assert torch.equal(forward(IDS, None, Cache()), plain)
        assert len(compiled) == before, "what goes on where it ended has a new shape each time"


def test_on_a_cpu_nothing_is_compiled(compiled: list[tuple[int, ...]]) -> None:
    forward = Forward(build(BASE, 0), 0, torch.float32)
    for _ in range(9):
        forward(IDS)
    assert not compiled


def test_kernels_that_take_the_documents_are_told_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without their number none is chosen on a GPU, and the one that is left is compiled for each shape."""
    counted: list[bool] = []
    choose = attention.choose

    def watched(*given: Any) -> str:
        counted.append(given[-1])
        return choose(*given)

    monkeypatch.setattr(attention, "choose", watched)
    model = build(BASE.but({"block.attention.scope": "document"}), 0)
    ids = IDS.where(IDS % 3 > 0, 0)
    plain = model(ids, ids == 0, torch.float32)
    assert set(counted) == {False}
    forward = Forward(model, 0, torch.float32)
    forward._counts = True  # as on a GPU
    counted.clear()
    assert torch.equal(forward(ids), plain)
    assert set(counted) == {True}
    counted.clear()
    forward(ids, None, Cache())
    assert set(counted) == {False}, "what goes on where it ended has keys of its own"
    counted.clear()
    monkeypatch.setattr(Tensor, "sum", Mock(side_effect=AssertionError("a GPU would be waited for")))
    assert torch.equal(forward(ids, begun=len(ids)), plain), "whose windows are known is not counted"
    assert set(counted) == {True}


def test_a_broken_compiler_is_left(compiled: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[object] = []

    def broken(function: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
        def fail(*inputs: Tensor) -> Tensor:
            batches.append(function)
            raise RuntimeError("no C compiler")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    model = build(BASE, 0)
    forward = on_gpu(Forward(model, 0, torch.float32))
    with pytest.warns(RuntimeWarning, match="goes on uncompiled: no C compiler") as told:
        answers = [forward(IDS) for _ in range(9)]
    assert len(batches) == len(told) == 1
    assert all(torch.equal(answer, model(IDS, IDS == 0, torch.float32)) for answer in answers)


LORA = DocumentLoRA(
    rank=2, documents=4, chunk_tokens=8, phases=GlobalSGD(documents=6, phases=1, chunk_tokens=32, sgd=SGD(epochs=1))
)


@pytest.mark.long
@pytest.mark.parametrize("ttt", [None, ChunkSGD(chunk_tokens=64, sgd=SGD(epochs=1)), LORA])
def test_scores_stay_what_they_are(
    ttt: TestTimeTraining | None, compiled: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain and sliding windows and training at test time go through it, and learning sees the weights as they are."""
    model = build(BASE, 0)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, 60, (240,), generator=generator).numpy().astype("uint16")
    tokens[::24] = 1
    text = Text(tokens=tokens, bos=1, source_bytes=800, normalized_bytes=800, table_bytes=800)
    chosen = Scoring(sequence_length=16, stride=8, batch_tokens=32, ttt=ttt)
    expected = score(model, text, chosen)
    assert not compiled
    init = Forward.__init__

    def patched(self: Forward, *given: Any) -> None:
        init(self, *given)
        on_gpu(self)

    monkeypatch.setattr(Forward, "__init__", patched)
    assert score(model, text, chosen).nats == pytest.approx(expected.nats, abs=1e-9)
    assert len(compiled) > 8


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which the compiler looks at, and hides
def test_adapters_are_in_one_compiled_graph_for_all_groups() -> None:
    torch.compiler.reset()
    model = build(BASE.but({"recurrence": Recurrence(first=1, last=1, passes=2)}), 0).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(0))
    adapters = _Adapters(LORA.but(targets=("query", "mlp", "head")), model)
    starts = IDS == 0

    def eager(ids: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = model(ids, starts, torch.float32, last=4)
        return answer

    from torch._dynamo.testing import CompileCounter  # which takes a second to import

    traced = CompileCounter()
    compiled = torch.compile(eager, backend=traced, fullgraph=True, dynamic=False)
    for group in range(2):
        adapters.begin(group)
        found = []
        for function in (eager, compiled):
            for factor in adapters.second:
                factor.normal_(generator=torch.Generator().manual_seed(group))
            adapters.forget()
            adapters.use([0, 3])
            logits = function(IDS, starts)
            logits.square().sum().backward()  # type: ignore[no-untyped-call]
            ((_, copies),) = adapters._taken
            found.append([logits.detach(), *(copy.grad for copy in copies[len(adapters.first) :])])
        for one, other in zip(*found, strict=True):
            assert one.any()
            assert (one - other).norm() < 1e-4 * one.norm()  # graphs norm by PyTorch's operations
    assert traced.frame_count == 1, "each group has new factors, and the graph stays"
