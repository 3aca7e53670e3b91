"""Recorded micro-batches: to the bit what is done without recording, whatever changes over a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import taped
import torch
from test_compiling import Pair
from test_train import GROWING, SHARDS, STEPS, TINY, equal, made
from torch import nn

from caddie import rehearsal
from caddie.averaging import ProgressEMA
from caddie.cuda_graphs import Recordings, recorder
from caddie.display import start_line
from caddie.distributed import Ranks
from caddie.errors import UserError
from caddie.fake_quantize import Noisy, StraightThrough
from caddie.model import GPT, Recurrence
from caddie.ops import IMPLEMENTATIONS, asking
from caddie.optim import AdamW
from caddie.schedules import Budget, Moment, Ramp, Stairs
from caddie.train import Event, Trained, train
from caddie.trainer import Train, Trainer

CHANGING = GROWING.but(
    {"optimizers.matrix": AdamW(lr=0.01, weight_decay=0.1)},
    averaging=ProgressEMA(),
    clip_norm=0.5,
    float8=("head", "mlp"),
    fake_quantize={
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
        "recurrence": Recurrence(first=1, last=1, passes=Stairs(values=(1, 2), begins=(0.5,)), own_mlps=True),
    }
)
"""The MLP of the second pass has no gradient in the first half of a run."""


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    with asking(**dict.fromkeys(IMPLEMENTATIONS, "plain")):
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
    monkeypatch.setattr(rehearsal, "recorder", lambda device: found)
    monkeypatch.setattr(rehearsal, "quickest", lambda choices, work: choices[0])
    return found


@pytest.mark.parametrize(("gpt", "config"), [(LOOPED, CHANGING), (TINY, CHANGING.but(rehearsal_steps=0))])
def test_a_recorded_run_is_the_run_to_the_bit(gpt: GPT, config: Train, tmp_path: Path, record: Counted) -> None:
    def run(name: str, config: Train) -> Trained:
        return train(gpt, config, SHARDS, bos=1, seed=7, folder=made(tmp_path / name), watch=events.append)

    events: list[Event] = []
    right, found = run("right", config), run("found", config.but(cuda_graphs="auto"))
    assert record.recorded >= 3, "one for each shape"
    assert record.replayed > record.recorded
    assert equal(found, right)
    assert found.final_loss == right.final_loss
    assert [event["cuda_graphs"] for event in events if event["event"] == "start"] == [False, True]


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


def rehearsed(config: Train) -> Trainer:
    trainer = Trainer(TINY, config, 7, Ranks())
    rehearsal.rehearse(trainer, Budget(steps=8), (4, 32))
    assert all(parameter.grad is None for parameter in trainer.parameters.values())
    return trainer


@pytest.mark.parametrize("slower", [False, True])
def test_auto_takes_the_faster(slower: bool, record: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def quickest(choices: list[Any], work: Callable[[Any], None]) -> Any:
        for choice in choices if len(choices) == 2 else ():
            work(choice)
            tried.append((choice is not None, record.replayed))
        return choices[-1] if slower else choices[0]

    monkeypatch.setattr(rehearsal, "quickest", quickest)
    trainer = rehearsed(STEPS.but(cuda_graphs="auto"))
    (first, replayed), (second, still) = tried
    assert (first, second, replayed) == (True, False, still)
    assert (trainer.recordings is None) is slower
    assert trainer.notes == []


def test_what_cannot_be_recorded_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "recorder", lambda device: taped.record)
    with asking(cross_entropy="by hand"):  # whose backward reads a number
        trainer = rehearsed(STEPS.but(cuda_graphs="auto"))
        assert trainer.recordings is None
        why = "operation not permitted when stream is capturing"
        assert trainer.notes == [f"recording CUDA graphs failed, so every kernel is launched: {why}"]
        with pytest.raises(UserError, match=rf"^train\.cuda_graphs=always: recording failed, leave it out: {why}$"):
            rehearsed(STEPS.but(cuda_graphs="always"))


@pytest.mark.parametrize("here", [False, True])
def test_a_rank_whose_recording_failed_is_followed_by_all(here: bool, record: Counted) -> None:
    """Before they exchange anything but that."""
    ranks = Pair(other=1.0)
    trainer = Trainer(TINY, STEPS.but(cuda_graphs="auto"), 7, ranks)
    with asking(cross_entropy="by hand" if here else "plain"):
        rehearsal._choose_recording(trainer, Moment(0, 0.0, STEPS.budget), (4, 32))
    assert ranks.told == [float(here)]
    assert trainer.recordings is None
    why = "operation not permitted when stream is capturing" if here else "in another process"
    assert trainer.notes == [f"recording CUDA graphs failed, so every kernel is launched: {why}"]


def test_a_cpu_waits_for_each_kernel_anyway() -> None:
    assert recorder(torch.device("cpu")) is None
    assert rehearsed(STEPS.but(cuda_graphs="auto")).recordings is None
    with pytest.raises(UserError, match=r"^train\.cuda_graphs=always needs a GPU"):
        rehearsed(STEPS.but(cuda_graphs="always"))


def test_the_choice_is_shown() -> None:
    event = {"precision": "bfloat16", "threads": 1, "compiled": True, "cuda_graphs": True, "attention": ""}
    assert start_line(event) == "bfloat16, 1 thread, compiled, CUDA graphs"
