"""Recorded micro-batches: to the bit what is done without recording, whatever changes over a run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import taped
import torch
from recording import RecordedProgress
from test_compiling import Pair
from test_loop import GROWING, STEPS, TINY, equal, go
from torch import nn

from caddie.config.schedules import PiecewiseConstant, Ramp, TrainProgress
from caddie.errors import UserError
from caddie.model import GPT, Recurrence
from caddie.ops import IMPLEMENTATIONS, use_implementations
from caddie.report.display import start_line
from caddie.runtime.distributed import Ranks
from caddie.train import warmup as warmup
from caddie.train.averaging import ProgressEMA
from caddie.train.cuda_graphs import Recordings, recorder
from caddie.train.optim import AdamW
from caddie.train.qat import Noisy, StraightThrough, View
from caddie.train.settings import Train
from caddie.train.trainer import Trainer

CHANGING = GROWING.but(
    {"optimizers.matrix": AdamW(lr=0.01, weight_decay=0.1)},
    steps=6,
    warmup_steps=1,
    averaging=ProgressEMA(),
    clip_norm=0.5,
    float8=("head", "mlp"),
    qat={
        "matrix": StraightThrough(strength=Ramp(start=0.0, end=1.0, begin=0.5)),
        "*.mlp.up.weight": Noisy(strength=Ramp(start=0.0, end=1.0, begin=0.5)),
    },
)
"""Batches and rows grow, then weights are seen quantized, more and more, and with noise of the step.

Other than Muon, AdamW moves what has a gradient of zeros and leaves what has none.
"""
LOOPED = TINY.but(
    {
        "block.attention.scope": "document",
        "recurrence": Recurrence(
            first=1, last=1, passes=PiecewiseConstant(values=(1, 2), begins=(0.5,)), own_mlps=True
        ),
    }
)
"""The MLP of the second pass has no gradient in the first half of a run."""


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    with use_implementations(**dict.fromkeys(IMPLEMENTATIONS, "plain")):
        yield


class Counted:
    """The stand-in, and how often it recorded and replayed."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, work: Callable[[], object]) -> Callable[[], object]:
        replay = taped.record(work)
        self.recorded += 1

        def counted() -> None:
            self.replayed += 1
            replay()

        return counted


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """There is something that records, and it is always found to be the faster."""
    found = Counted()
    monkeypatch.setattr(warmup, "recorder", lambda device: found)
    monkeypatch.setattr(warmup, "quickest", lambda choices, work, *seconds: choices[0])
    return found


@pytest.mark.long
@pytest.mark.parametrize(("gpt", "config"), [(LOOPED, CHANGING), (TINY, CHANGING.but(warmup_steps=0))])
def test_a_recorded_run_is_the_run_to_the_bit(gpt: GPT, config: Train, tmp_path: Path, record: Counted) -> None:
    shown = RecordedProgress()
    right = go(tmp_path / "right", config, gpt, progress=shown)
    found = go(tmp_path / "found", config.but(cuda_graphs="auto"), gpt, progress=shown)
    assert record.recorded >= 3, "one for each shape"
    assert record.replayed > record.recorded
    assert equal(found, right)
    assert found.final_loss == right.final_loss
    assert [event["cuda_graphs"] for event in shown.events if event["event"] == "start"] == [False, True]


def test_what_is_recorded_has_no_effect_and_reads_no_number() -> None:
    """The stand-in keeps the rules of CUDA graphs, or the tests above would show nothing."""
    total, number = torch.zeros(3), torch.ones(3)
    replay = taped.record(lambda: total.add_(2 * number))
    assert total.tolist() == [0.0] * 3
    number.fill_(4.0)
    replay()
    assert total.tolist() == [8.0] * 3
    with pytest.raises(RuntimeError, match="not permitted"):
        taped.record(lambda: float(total.sum()))


def test_keys_have_recordings_of_their_own_and_gradients_one_place(record: Counted) -> None:
    weight = nn.Parameter(torch.ones(2))
    recordings = Recordings([weight, nn.Parameter(torch.ones(2))], record)

    def work(factor: float, x: torch.Tensor) -> None:
        (factor * weight * x).sum().backward()

    places = []
    for key, size, expected in (("a", 3.0, 6.0), ("a", 1.0, 2.0), ("b", 1.0, 5.0), ("a", 1.0, 2.0), ("b", 2.0, 10.0)):
        weight.grad = None
        recordings.run(key, (torch.full((2,), size),), partial(work, {"a": 2.0, "b": 5.0}[key]))
        assert weight.grad.tolist() == [expected] * 2
        places.append(weight.grad.data_ptr())
    recordings.run("a", (torch.ones(2),), partial(work, 2.0))
    assert weight.grad.tolist() == [12.0] * 2, "nothing was forgotten, so it is added"
    assert len(set(places)) == 1
    assert (record.recorded, record.replayed) == (2, 4)


def warmed(config: Train) -> Trainer:
    trainer = Trainer(TINY, config, 7, Ranks())
    warmup.warm_up(trainer, (4, 32))
    assert all(parameter.grad is None for parameter in trainer.parameters.values())
    return trainer


@pytest.mark.long
@pytest.mark.parametrize("slower", [False, True])
def test_auto_takes_the_faster(slower: bool, record: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def quickest(choices: list[Any], work: Callable[[Any], None], *seconds: float) -> Any:
        for choice in choices if len(choices) == 2 else ():
            work(choice)
            tried.append((choice is not None, record.replayed))
        return choices[-1] if slower else choices[0]

    monkeypatch.setattr(warmup, "quickest", quickest)
    trainer = warmed(STEPS.but(cuda_graphs="auto"))
    (first, replayed), (second, still) = tried
    assert (first, second, replayed) == (True, False, still)
    assert (trainer.recordings is None) is slower
    assert trainer.notes == []


@pytest.mark.long
@pytest.mark.parametrize("asked", ["auto", "always"])
def test_what_cannot_be_recorded_ends_the_run_before_its_clock(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver has broken off in the middle; a shape that comes late in the run is no different."""
    monkeypatch.setattr(warmup, "recorder", lambda device: taped.record)
    why = "operation not permitted when stream is capturing"
    message = rf"^train\.cuda_graphs={asked}: recording failed; set never: {why}$"
    with (
        use_implementations(cross_entropy="manual"),
        pytest.raises(UserError, match=message),
    ):  # whose backward reads a number
        warmed(STEPS.but(cuda_graphs=asked))

    monkeypatch.setattr(View, "__call__", lambda view, weight: weight * float(view.strength))
    late = {"matrix": Noisy(strength=Ramp(start=0.0, end=1.0, begin=0.5))}
    with pytest.raises(UserError, match=message):
        warmed(STEPS.but(cuda_graphs=asked, qat=late, warmup_steps=0))


@pytest.mark.parametrize("here", [False, True])
def test_a_rank_whose_recording_failed_ends_all(here: bool, record: Counted) -> None:
    """Before they exchange anything but that."""
    ranks = Pair(other=1.0)
    trainer = Trainer(TINY, STEPS.but(cuda_graphs="auto"), 7, ranks)
    why = "operation not permitted when stream is capturing" if here else "in another process"
    warming = warmup._WarmUp(trainer, (4, 32))
    warming.points = [TrainProgress(0, 0.0, STEPS.budget)]
    loss = "manual" if here else "plain"
    with use_implementations(cross_entropy=loss), pytest.raises(UserError, match=f"set never: {why}$"):
        warming.choose_recording()
    assert ranks.told == [float(here)]


def test_no_memory_for_both_ways_is_told(record: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    def quickest(choices: list[Any], work: Callable[[Any], None], *seconds: float) -> Any:
        if len(choices) == 2:
            raise torch.OutOfMemoryError
        return choices[0]

    monkeypatch.setattr(warmup, "quickest", quickest)
    with pytest.raises(UserError, match="no memory to try both ways; set always or never"):
        warmed(STEPS.but(cuda_graphs="auto"))


def test_why_a_recording_failed_is_not_hidden_by_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch ends a recording that the driver has broken off with an error of its own."""

    @contextmanager
    def graph(graph: object, **settings: Any) -> Iterator[None]:
        assert settings == {"pool": "pool", "capture_error_mode": "thread_local"}
        try:
            yield
        finally:
            if state["broken"]:
                raise RuntimeError("failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay="replay"))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    make = recorder(torch.device("cuda"))
    assert make is not None

    def work() -> None:
        raise RuntimeError("why")

    state = {"broken": False}
    assert make(lambda: None) == "replay"
    for state["broken"] in (False, True):
        with pytest.raises(RuntimeError, match=r"^why$"):
            make(work)
    with pytest.raises(RuntimeError, match="previous error"):
        make(lambda: None)


def test_a_cpu_waits_for_each_kernel_anyway() -> None:
    assert recorder(torch.device("cpu")) is None
    assert warmed(STEPS.but(cuda_graphs="auto")).recordings is None
    with pytest.raises(UserError, match=r"^train\.cuda_graphs=always needs a GPU"):
        warmed(STEPS.but(cuda_graphs="always"))


def test_the_choice_is_shown() -> None:
    event = {"precision": "bfloat16", "threads": 1, "compiled": True, "cuda_graphs": True, "attention": ""}
    assert start_line(event) == "bfloat16, 1 thread, compiled, CUDA graphs"
