"""Steps that are looked at one step late, as on a GPU: run here on a CPU that is told to be late."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from itertools import count, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from recording import RecordedProgress, Recorder
from test_loop import GROWING, ONE_STEP, SHARDS, STEPS, TINY, equal, finite_checkpoint, go, stop_at_five

from caddie.config.schedules import Budget, PiecewiseConstant, TrainProgress, progress_at
from caddie.data.loaders import Batch, SequentialStream
from caddie.errors import CheckFailed
from caddie.recipes.catalog import find
from caddie.report.run_files import CHECKPOINT
from caddie.runtime.distributed import Ranks
from caddie.runtime.progress import Event
from caddie.train import hooks
from caddie.train import trainer as trainer_module
from caddie.train.averaging import ProgressEMA, TailEMA
from caddie.train.loop import Interrupted, Trained
from caddie.train.prefetch import AsyncScalar, Uploads, prefetch
from caddie.train.trainer import Trainer

GROWS = GROWING.but(steps=12, averaging=ProgressEMA(), warmup_steps=0, micro_batches=2)
WILD = STEPS.but(
    steps=12, micro_batches=1, lr_schedule=PiecewiseConstant(values=(1, 10**30), begins=(0.5,)), warmup_steps=0
)


def be_late(patch: pytest.MonkeyPatch) -> None:
    """Whatever a trainer finds, its steps are late."""
    patch.setattr(Trainer, "asynchronous", property(lambda self: True, lambda self, value: None), raising=False)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    be_late(monkeypatch)


@pytest.fixture(scope="module")
def in_time(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return go(tmp_path_factory.mktemp("in time"), GROWS)


@pytest.mark.usefixtures("late")
def test_the_average_sees_the_end_where_a_checkpoint_takes_the_clock_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An average may mix in the last weights at progress 1, so a run does not end before it was told of that."""
    seen: list[float] = []
    update, clock = Trainer.update_average, count()

    def watched(self: Trainer, at: TrainProgress, lr_scale: float) -> None:
        seen.append(at.progress)
        update(self, at, lr_scale)

    monkeypatch.setattr(Trainer, "update_average", watched)
    monkeypatch.setattr("caddie.train.loop.time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    trained = go(tmp_path, STEPS.but(steps=None, seconds=5.0, checkpoint_seconds=0.5, warmup_steps=0))
    assert seen[-6:] == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0], "after steps of the warm-up"
    assert trained.steps == 6


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("when", [0.4, 0.6])
def test_the_average_sees_the_end_that_a_signal_finds(
    when: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss that is read when the run is interrupted may be that of the last step."""

    def stop(event: Event) -> None:
        if event["event"] == "step" and event["progress"] == pytest.approx(when):
            os.kill(os.getpid(), signal.SIGTERM)

    train = STEPS.but(steps=None, seconds=5.0, warmup_steps=0, averaging=TailEMA(begin=0.1, steps=50.0, weight=0.0))
    for told in (stop, lambda event: None):
        clock = count()
        monkeypatch.setattr("caddie.train.loop.time", SimpleNamespace(perf_counter=partial(next, clock)))
        with contextlib.suppress(Interrupted):
            trained = go(tmp_path, train, progress=Recorder(told))
    assert all(torch.equal(trained.weights[name], last) for name, last in trained.last.items())


@pytest.mark.long
@pytest.mark.usefixtures("late")
def test_late_steps_are_the_same_steps(in_time: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step before is looked at when the next was launched, and each once."""
    order: list[str] = []

    class Watched(AsyncScalar):
        made = 0

        def __init__(self, number: torch.Tensor) -> None:
            super().__init__(number)
            self.name, Watched.made = str(Watched.made), Watched.made + 1
            order.append(f"launch {self.name}")

        def read(self) -> float:
            order.append(f"read {self.name}")
            return super().read()

    monkeypatch.setattr(trainer_module, "AsyncScalar", Watched)
    shown = RecordedProgress()
    found = go(tmp_path, GROWS, progress=shown)
    assert equal(found, in_time)
    assert (found.steps, found.tokens, found.final_loss) == (in_time.steps, in_time.tokens, in_time.final_loss)
    expected = ["launch 0"]
    for step in range(1, 12):
        expected += [f"launch {step}", f"read {step - 1}"]
    assert order == [*expected, "read 11"]
    logged = [event for event in shown.events if event["event"] == "step"]
    assert [event["step"] for event in logged if event["step"] != 11] == [*range(1, 11), 12]
    assert [event["tokens"] for event in logged[:8]] == [128 * n for n in range(1, 7)] + [768 + 256, 768 + 512]


@pytest.mark.usefixtures("late")
def test_threads_that_wait_for_a_device_are_not_crowded(tmp_path: Path) -> None:
    assert go(tmp_path, ONE_STEP).cpu_share is None


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("often", [0.0001, 60.0])
def test_what_is_not_finite_stops_one_step_later_and_is_not_saved(
    often: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[int] = []
    before = Trainer.launch

    def launch(self: Trainer, batches: Any, moment: TrainProgress, *rest: Any) -> AsyncScalar:
        launched.append(moment.step)
        return before(self, batches, moment, *rest)

    monkeypatch.setattr(Trainer, "launch", launch)
    config = WILD.but(checkpoint_seconds=often)
    with pytest.raises(CheckFailed, match="was nan at step") as caught:
        go(tmp_path, config)
    step = int(str(caught.value).split("at step ")[1].split(";")[0])
    assert launched[-1] in (step, step + 1)
    words = finite_checkpoint(tmp_path, config)
    assert f"weights of step {words['step']} are" in str(caught.value)
    assert (int(words["step"]) > 0) == (often < 1.0)


@pytest.mark.long
@pytest.mark.usefixtures("late")
def test_a_late_run_is_interrupted_and_goes_on_to_the_bit(in_time: Trained, tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match="after step 7") as caught:  # 6 was under way, 7 had to be launched to see it
        go(tmp_path, GROWS, progress=Recorder(stop_at_five))
    assert caught.value.number == signal.SIGTERM
    shown = RecordedProgress()
    assert equal(in_time, go(tmp_path, GROWS, progress=shown))
    assert next(event for event in shown.events if event["event"] == "start")["step"] == 7


@pytest.mark.long
def test_no_step_waits_for_a_checkpoint(tmp_path: Path) -> None:
    """One is not written until six more steps are done; what it holds is nevertheless what was when it was due."""
    config = STEPS.but(steps=12, warmup_steps=0, micro_batches=1, checkpoint_seconds=1e-6)
    go_on = threading.Event()

    def written(name: str, waits_at: int) -> dict[int, torch.Tensor]:
        found: dict[int, torch.Tensor] = {}

        def write(path: Path, tensors: dict[str, torch.Tensor], words: dict[str, str]) -> None:
            if path.name != CHECKPOINT:
                return
            step = int(words["step"])
            if step == waits_at:
                assert go_on.wait(10)
            found[step] = tensors["weights/embedding.weight"].detach().clone()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hooks, "save_tensors", write)
            let_go = Recorder(lambda event: go_on.set() if event.get("step") == 8 else None)
            go(tmp_path / name, config, progress=let_go)
        return found

    every = written("in time", -1)
    go_on.clear()
    with pytest.MonkeyPatch.context() as patch:
        be_late(patch)
        some = written("late", 2)
    assert list(every) == [*range(13)]
    assert list(some) == [0, 2, 4, 6, 8, 10, 12]
    assert all(torch.equal(weights, every[step]) for step, weights in some.items())


@pytest.mark.usefixtures("late")
def test_a_checkpoint_that_cannot_be_written_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*rest: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(hooks, "save_tensors", full)
    with pytest.raises(OSError, match="No space"):
        go(tmp_path, STEPS.but(warmup_steps=0, micro_batches=1))


# Batches ahead


@pytest.mark.parametrize("on_a_stream", [False, True])
def test_batches_arrive_in_order_and_are_waited_for_by_the_device(
    on_a_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for CUDA's streams: a copy is marked on its own stream, and the user's waits for the mark."""
    said: list[tuple[str, ...]] = []

    class Event:
        def record(self, stream: str) -> None:
            said.append(("record", stream, threading.current_thread().name.split("_")[0]))

    class User:
        def wait_event(self, event: Event) -> None:
            said.append(("wait", threading.current_thread().name))

    @contextlib.contextmanager
    def said_around(before: str, after: str) -> Iterator[None]:
        said.append((before,))
        yield
        said.append((after,))

    if on_a_stream:
        monkeypatch.setattr(
            Uploads, "__init__", lambda self, device, bos: self.__dict__.update(_device=device, _bos=bos, _stream="s")
        )
        monkeypatch.setattr(torch.cuda, "device", lambda device: said_around("on", "off"))
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: said_around("begin", "end"))
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: User())
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: said.append(("keep",)))
    stream = SequentialStream().build(SHARDS, tokens=64, sequence_length=32, seed=0, bos=1)
    with prefetch(stream, range(3, 9, 2), torch.device("cpu"), 0) as batches:
        found = list(batches)
    for index, batch in zip((3, 5, 7), found, strict=True):
        assert np.array_equal(batch.inputs.numpy(), stream.micro_batch(index).inputs)
        assert np.array_equal(batch.targets.numpy(), stream.micro_batch(index).targets)
    marks = [one for one in said if one[0] == "record"]
    assert marks == [("record", "s", "prefetch")] * (3 * on_a_stream)
    taken = [one for one in said if one[0] in ("wait", "keep")]
    assert taken == [("wait", "MainThread"), ("keep",), ("keep",)] * (3 * on_a_stream)
    sent = [one[0] for one in said if one[0] not in ("wait", "keep")]
    # Leaving a stream sets the stream before, of GPU 0 in a new thread, unless the thread is on its own GPU.
    assert sent == ["on", "begin", "record", "end", "off"] * (3 * on_a_stream)
    assert not said or said[0][0] == "on"


def test_documents_are_counted_on_the_host_for_kernels_that_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """With those that go on in another row, of which shorter rows make more."""
    gpt = TINY.but({"block.attention.scope": "document"})
    config = STEPS.but(sequence_length=PiecewiseConstant(values=(16, 32), begins=(0.5,)))
    trainer = Trainer(gpt, config, 7, Ranks())
    seen: list[int] = []
    forward = trainer.forward

    def watched(*given: Any) -> Any:
        seen.append(given[4])
        return forward(*given)

    trainer.forward = watched
    ids = np.full((4, 32), 2)
    ids[0], ids[1, :27] = 1, 1  # 59 documents begin, in 4 rows of 32 tokens or 8 of 16
    batch = Batch(ids, ids)
    sent = Uploads(torch.device("cpu"), 1).send(batch)
    for kernel, expected in (("FlexAttention", [0, 0, 0, 0]), ("FlashAttention 3 varlen", [128, 64, 128, 64])):
        monkeypatch.setattr(trainer, "attention", lambda length, kernel=kernel: f"SDPA (flash), {kernel}")
        for each in (batch, sent):
            for step in (0, 7):
                trainer.gradients(repeat(each), TrainProgress(step, 0.0, Budget(steps=8)), bos=1)
        assert seen[::2] == seen[1::2] == expected, "each micro-batch, from the host or sent ahead"
        seen.clear()


@pytest.mark.long
@pytest.mark.parametrize("name", ["soap_muon", "ngram_tilt", "ternary", "prefix_targets", "tail_average", "mudd"])
def test_a_step_reads_no_number_of_the_device(name: str) -> None:
    """The host would wait for a GPU's earlier steps. Tensors without data, on `meta`, have no number to be read."""
    recipe = find(f"{name}_mini")
    trainer = Trainer(recipe.model, recipe.train, 7, Ranks(device=torch.device("meta")))
    trainer.asynchronous = True
    ids = np.ones((trainer.micro_tokens // recipe.train.longest_row, recipe.train.longest_row), np.int64)
    for progress in (0.0, 0.4, 0.9):
        at = progress_at(progress, recipe.train.budget)
        trainer.launch(repeat(Batch(ids, ids)), at, bos=1)
        trainer.zero_grad()
        trainer.update_average(at, 0.5)
