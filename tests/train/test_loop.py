"""Training: the budget, the warm-up, interruption and resumption, several processes."""

import json
import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from processes import CONTEXT, together
from recording import RecordedProgress, Recorder

from caddie.config.schedules import Budget, PiecewiseConstant, Ramp, StepRamp, TrainProgress, Warmdown
from caddie.data.loaders import Batch, Loader, PackedDocuments, TrainingData
from caddie.errors import CheckFailed, UserError
from caddie.model import GPT, Block, GroupedQueryAttention, HashedNGrams, Recurrence, ReluSquared, build
from caddie.model.parameters import Constant
from caddie.pack.quantize import Rows
from caddie.report.read import read_steps
from caddie.report.run_files import CHECKPOINT, LOG
from caddie.runtime.cpu_share import CpuShare
from caddie.runtime.distributed import Ranks
from caddie.runtime.progress import Event
from caddie.train import hooks
from caddie.train import loop as module
from caddie.train.averaging import EMA
from caddie.train.checkpoint import position_in, restore, save_tensors
from caddie.train.hooks import BackgroundJobs, Checkpoint
from caddie.train.loop import Interrupted, Trained, train
from caddie.train.prefetch import AsyncScalar
from caddie.train.qat import StraightThrough
from caddie.train.settings import Train
from caddie.train.trainer import Trainer
from caddie.train.warmup import _WarmUp, warm_up, warmup_steps

TINY = GPT(
    vocabulary=64,
    width=32,
    depth=2,
    block=Block(attention=GroupedQueryAttention(heads=2, key_value_heads=1), mlp=ReluSquared(hidden=48)),
)
STEPS = Train(steps=8, batch_tokens=256, micro_batches=2, sequence_length=32, averaging=EMA(decay=0.9), warmup_steps=2)
ONE_STEP = STEPS.but(steps=1, warmup_steps=0)
SHARDS = [np.random.default_rng(0).integers(0, 64, 5000).astype(np.uint16)]
DATA = TrainingData(SHARDS, 1)


def go(
    folder: Path, config: Train = STEPS, gpt: GPT = TINY, data: TrainingData = DATA, seed: int = 7, **keywords: Any
) -> Trained:
    folder.mkdir(exist_ok=True)
    return train(gpt, config, data, seed=seed, folder=folder, **keywords)


def told(folder: Path, config: Train = STEPS, **keywords: Any) -> list[dict[str, Any]]:
    """The events of a training, notes included."""
    events: list[dict[str, Any]] = []
    go(folder, config, progress=Recorder(events.append), **keywords)
    return events


def finite_checkpoint(folder: Path, config: Train) -> dict[str, str]:
    """Return the metadata of a checkpoint, all of whose tensors are finite."""
    kept = Trainer(TINY, config, 7, Ranks()).state()
    words = restore(folder / CHECKPOINT, kept, {})
    assert all(bool(torch.isfinite(tensor).all()) for tensor in kept.values())
    return words


def stop_at_five(event: Event) -> None:
    """Ask the run to stop while it logs step 5."""
    if event.get("step") == 5 and event["event"] == "step":
        os.kill(os.getpid(), signal.SIGTERM)


def equal(a: Trained, b: Trained) -> bool:
    pairs = [(x[name], y[name]) for x, y in ((a.last, b.last), (a.weights, b.weights)) for name in a.last]
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return go(tmp_path_factory.mktemp("unbroken"))


@pytest.mark.long
def test_steps_mode_repeats_to_the_bit(unbroken: Trained, tmp_path: Path) -> None:
    again = go(tmp_path)
    assert equal(unbroken, again)
    assert again.steps == 8
    assert again.tokens == 8 * 256


def test_warm_up_leaves_no_trace(unbroken: Trained, tmp_path: Path) -> None:
    assert equal(unbroken, go(tmp_path, STEPS.but(warmup_steps=0)))


def test_seed_decides_weights_and_order(tmp_path: Path) -> None:
    one, other = (go(tmp_path / str(seed), ONE_STEP, seed=seed) for seed in (7, 8))
    assert not equal(one, other)


def test_interrupted_run_resumes_to_the_bit(unbroken: Trained, tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match="after step 6") as caught:
        go(tmp_path, progress=Recorder(stop_at_five))
    assert caught.value.number == signal.SIGTERM
    assert isinstance(caught.value, KeyboardInterrupt), "a loop that goes on after every Exception ends"
    shown = RecordedProgress()
    assert equal(unbroken, go(tmp_path, progress=shown))
    start = next(event for event in shown.events if event["event"] == "start")
    assert start["step"] == 6  # the signal came while step 5 was logged
    assert start["seconds"] > 0


def test_a_checkpoint_can_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    save_tensors(tmp_path / "checkpoint", {"x": torch.zeros(2)})
    assert (tmp_path / "checkpoint").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.long
def test_a_run_that_goes_on_with_another_budget_says_so(tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match="after step 6"):
        go(tmp_path, progress=Recorder(stop_at_five))
    with pytest.raises(UserError, match=r"has trained for 6 steps in .* seconds; train.steps=6 leaves nothing"):
        go(tmp_path, STEPS.but(steps=6))
    assert go(tmp_path / "other", STEPS).earlier_budgets == ()
    longer = RecordedProgress()
    assert go(tmp_path, STEPS.but(steps=7), progress=longer).earlier_budgets == ("train.steps=8",)
    assert "its first 6 steps had the schedules of train.steps=8" in longer.notes
    assert go(tmp_path, STEPS.but(steps=7)).earlier_budgets == ("train.steps=8",), "it was done before"
    assert go(tmp_path, STEPS.but(steps=9)).earlier_budgets == ("train.steps=8", "train.steps=7")


@pytest.mark.long
def test_the_cpu_share_is_that_of_all_of_an_interrupted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuShare, "share", 0.25)
    with pytest.raises(Interrupted):
        go(tmp_path, progress=Recorder(stop_at_five))
    monkeypatch.setattr(CpuShare, "share", 1.0)
    share = go(tmp_path).cpu_share
    assert share is not None
    assert 0.25 < share < 1.0
    again = RecordedProgress()
    assert go(tmp_path, progress=again).cpu_share == pytest.approx(share, abs=0.2), "it was done before"
    assert "training was done before: 8 steps" in again.notes


@pytest.mark.parametrize("saving", [False, True])
def test_a_signal_in_the_last_step_or_its_save_is_heeded(
    saving: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(path: Path, *rest: Any) -> None:
        before(path, *rest)
        saved.append(path)
        if len(saved) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    def launch(trainer: Trainer, *rest: Any) -> AsyncScalar:
        os.kill(os.getpid(), signal.SIGTERM)
        return launched(trainer, *rest)

    before, launched, saved = hooks.save_tensors, Trainer.launch, list[Path]()
    with monkeypatch.context() as patch:
        if saving:
            patch.setattr(hooks, "save_tensors", stop)
        else:
            patch.setattr(Trainer, "launch", launch)
        with pytest.raises(Interrupted, match=r"stopped after step 1$"):
            go(tmp_path, ONE_STEP)
    assert go(tmp_path, ONE_STEP).steps == 1, "it goes on from its end"


@pytest.mark.long
def test_time_before_a_resume_counts(tmp_path: Path) -> None:
    config = STEPS.but(steps=None, seconds=60.0)  # more than a busy machine takes for two steps

    def interrupted() -> list[dict[str, Any]]:
        steps: list[dict[str, Any]] = []

        def stop(event: dict[str, Any]) -> None:
            if event["event"] == "step":
                steps.append(event)
                if len(steps) == 1:  # a second signal would act as usual
                    os.kill(os.getpid(), signal.SIGINT)

        with pytest.raises(Interrupted):
            go(tmp_path, config, progress=Recorder(stop))
        return steps

    before, after = interrupted(), interrupted()
    assert after[0]["step"] == before[-1]["step"] + 1
    assert after[0]["seconds"] > before[-1]["seconds"]
    assert after[0]["progress"] > before[-1]["progress"]


def slowly(folder: Path, steps: Connection) -> None:
    """Work of the process that is killed; it prints its steps."""

    def tell(event: dict[str, Any]) -> None:
        steps.send(event.get("step"))
        time.sleep(0.05)

    go(folder, STEPS.but(checkpoint_seconds=0.001), progress=Recorder(tell))


@pytest.mark.long
@pytest.mark.parametrize(("share", "warned"), [(0.5, True), (0.9, False)])
def test_a_busy_machine_is_told_in_the_first_seconds(
    share: float, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "BUSY_SECONDS", 0.0)
    monkeypatch.setattr(CpuShare, "share", share)
    go(tmp_path)
    events = map(json.loads, (tmp_path / LOG).read_text().splitlines())
    notes = [event["text"] for event in events if event["event"] == "note"]
    assert len(notes) == warned
    assert all(said.startswith("this machine is busy: training gets 50% of its threads' time; end ") for said in notes)


@pytest.mark.long
def test_killed_process_resumes_to_the_bit(unbroken: Trained, tmp_path: Path) -> None:
    """SIGKILL leaves whatever checkpoint was written last."""
    steps, told = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=slowly, args=(tmp_path, told))
    process.start()
    told.close()
    while steps.recv() != 4:
        pass
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    shown = RecordedProgress()
    assert equal(unbroken, go(tmp_path, STEPS.but(checkpoint_seconds=0.001), progress=shown))
    assert next(event for event in shown.events if event["event"] == "start")["step"] >= 3


def test_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    go(tmp_path, ONE_STEP)
    with pytest.raises(UserError, match="another recipe, text or seed"):
        go(tmp_path, STEPS.but(batch_tokens=128))
    with pytest.raises(UserError, match="another recipe, text or seed"):
        go(tmp_path, seed=8)


def test_checkpoint_of_other_data_is_refused(tmp_path: Path) -> None:
    one, another = (replace(DATA, documents_sha256=name) for name in ("one", "another"))
    go(tmp_path, ONE_STEP, data=one)
    with pytest.raises(UserError, match="another recipe, text or seed"):
        go(tmp_path, data=another)


def test_a_finished_run_keeps_its_last_loss(tmp_path: Path) -> None:
    config = ONE_STEP.but(steps=2)
    first = go(tmp_path, config)
    assert go(tmp_path, config).final_loss == first.final_loss


def test_one_optimizer_under_two_rules_updates_each_parameter_once(tmp_path: Path) -> None:
    shared = STEPS.optimizers["embedding"].but(lr=0.01)
    rules = {**STEPS.optimizers, "embedding": shared, "scalar": shared}
    trainer = Trainer(TINY, STEPS.but({"optimizers": rules}), 7, Ranks())
    owned = [name for updater in trainer.updaters.values() for name in updater.state() if "exp_avg_sq" in name]
    assert len(owned) == len(set(owned)) > 2


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    trainer = Trainer(TINY, STEPS, 7, Ranks())
    before = {name: tensor.clone() for name, tensor in trainer.state().items()}
    trainer.model.embedding.weight.register_hook(lambda gradient: gradient * math.inf)
    ids = np.zeros((2, 32), np.int64)
    batch = Batch(ids, ids)
    assert math.isnan(trainer.step(iter([batch] * 4), TrainProgress(0, 0.0, STEPS.budget), bos=1))
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.state().items())


def test_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / CHECKPOINT).write_bytes(b"not a checkpoint")
    with pytest.raises(UserError, match="not a readable checkpoint"):
        go(tmp_path)


@pytest.mark.parametrize(("capability", "precision"), [((7, 5), "float32"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")])
def test_a_gpu_without_products_of_bfloat16_trains_in_float32(
    capability: tuple[int, int], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's compiler refuses bfloat16 there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    trainer = Trainer(TINY, STEPS.but(precision="auto"), 7, Ranks())
    trainer.ranks = Ranks(device=torch.device("cuda"))
    (execution,) = _WarmUp(trainer, (4, 32)).executions()
    assert execution.precision == precision


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the order of waiting for the background (`written`) and all processes (`together`), and of an `error`."""
    order, wait, diverged = list[str](), BackgroundJobs.wait, Checkpoint.diverged
    monkeypatch.setattr(Checkpoint, "diverged", lambda *given: (order.append("error"), diverged(*given))[1])
    monkeypatch.setattr(BackgroundJobs, "wait", lambda jobs: (wait(jobs), order.append("written"))[0])
    monkeypatch.setattr(Ranks, "wait", lambda ranks: order.append("together"))
    return order


def test_loss_that_is_not_finite_stops_and_keeps_the_last_good_state(tmp_path: Path, waits: list[str]) -> None:
    wild = STEPS.but({"optimizers.matrix.lr": 1e30, "optimizers.scalar.lr": 1e30})
    with pytest.raises(CheckFailed, match="the loss or its gradient was nan at step"):
        go(tmp_path, wild)
    assert waits[: waits.index("error")][-2:] == ["written", "together"], (
        "else the first process is ended while it writes"
    )
    finite_checkpoint(tmp_path, wild)


def test_first_weights_that_are_not_finite_end_the_run_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Trainer.__init__

    def begin(self: Trainer, *given: Any, **named: Any) -> None:
        before(self, *given, **named)
        self.model.embedding.weight.data[3, 0] = math.inf

    monkeypatch.setattr(Trainer, "__init__", begin)
    with pytest.raises(CheckFailed, match=r"embedding.weight was not finite before the first step; give it"):
        go(tmp_path, STEPS)


@pytest.mark.long
@pytest.mark.parametrize("often", [1e-9, 60.0])
def test_an_update_that_breaks_a_weight_is_not_saved(
    often: float, tmp_path: Path, waits: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, last = Trainer.launch, STEPS.budget.steps

    def launch(self: Trainer, batches: Any, at: TrainProgress, *rest: Any) -> Any:
        loss = before(self, batches, at, *rest)
        if at.step == last - 1:
            self.model.embedding.weight.data[3, 0] = math.nan
        return loss

    monkeypatch.setattr(Trainer, "launch", launch)
    config = STEPS.but(checkpoint_seconds=often)
    with pytest.raises(
        CheckFailed, match=f"embedding.weight was not finite after step {last}, .*; the weights of step "
    ):
        go(tmp_path, config)
    assert waits[: waits.index("error")][-2:] == ["written", "together"]
    assert finite_checkpoint(tmp_path, config)["step"] == str(last - 1 if often < 1 else 0)


def test_clipping_is_of_the_whole_gradient() -> None:
    def scale(clip: float | None) -> tuple[float, float]:
        """Return the factor of gradient clipping, and the norm of the whole gradient."""
        trainer = Trainer(TINY, STEPS.but(clip_norm=clip), 7, Ranks())
        told: list[Any] = []
        for updater in trainer.updaters.values():
            updater.step = lambda moment, lr, scale=None: told.append(scale)  # type: ignore[method-assign]
        ids = np.random.default_rng(0).integers(0, 64, (2, 2, 32))
        trainer.step(iter([Batch(*ids)] * 4), TrainProgress(0, 0.0, STEPS.budget), bos=1)
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in trainer.parameters.values() if p.grad is not None))
        assert len(told) > 1
        assert all(one is told[0] for one in told)
        return 1.0 if told[0] is None else float(told[0]), norm

    factor, norm = scale(0.01)
    assert factor * norm == pytest.approx(0.01, rel=1e-3)
    assert scale(1000.0)[0] == 1.0
    assert scale(None)[0] == 1.0


GROWING = STEPS.but(
    micro_batches=4,
    batch_tokens=PiecewiseConstant(values=(128, 256), begins=(0.5,)),
    sequence_length=PiecewiseConstant(values=(16, 32), begins=(0.25,)),
    lr_schedule=Warmdown(fraction=0.5),
)


@pytest.mark.long
def test_steps_and_rows_grow_and_resume_to_the_bit(tmp_path: Path) -> None:
    shapes: list[tuple[int, ...]] = []

    def note(self: Trainer, batch: Batch, length: int, bos: int) -> Any:
        tensors = before(self, batch, length, bos)
        shapes.append(tuple(tensors[0].shape))
        return tensors

    before = Trainer._tensors
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_tensors", note)
        whole = go(tmp_path / "a", GROWING.but(warmup_steps=0))
    assert whole.tokens == 4 * 128 + 4 * 256
    assert shapes == [(4, 16)] * 4 + [(2, 32)] * 4 + [(2, 32)] * 16

    with pytest.raises(Interrupted):
        go(tmp_path / "b", GROWING, progress=Recorder(stop_at_five))
    assert equal(whole, go(tmp_path / "b", GROWING))


def test_every_shape_of_a_run_is_warmed_up() -> None:
    gpt = TINY.but({"recurrence": Recurrence(first=1, last=1, passes=PiecewiseConstant(values=(1, 2), begins=(0.4,)))})
    view = StraightThrough(strength=Ramp(start=0.0, end=1.0, begin=0.8, finish=0.9))
    trainer = Trainer(gpt, GROWING.but(qat={"matrix": view}, seconds=10.0, steps=None), 7, Ranks())
    shapes = trainer.shapes()
    assert [(s.stage, s.sequence_length, s.quantized) for s in shapes] == [
        (0, 16, False),
        (0, 32, False),
        (1, 32, False),
        (1, 32, True),
    ]
    assert all(trainer.shape(moment) == shape for shape, moment in shapes.items())


def test_caps_that_the_recipe_leaves_untrained_are_named_and_stay(tmp_path: Path) -> None:
    shown, steps = RecordedProgress(), STEPS.but(steps=3, warmup_steps=3)
    untrained, trained = (TINY.but({"head.learned_caps": word}) for word in ("untrained", "trained"))
    found = go(tmp_path / "a", steps, untrained, progress=shown)
    assert found.last["head.caps"].tolist() == [30.0, 30.0]
    assert "not trained, as the recipe says: head.caps (1 in all)" in shown.notes
    found = go(tmp_path / "b", steps, trained)
    assert all(cap != 30.0 for cap in found.last["head.caps"].tolist())


def test_a_parameter_that_no_gradient_reaches_is_refused(tmp_path: Path) -> None:
    """Both factors of a hashed embedding at zero never train."""
    dead = TINY.but({"embedding.bigrams": HashedNGrams(buckets=10, dims=4, initial=Constant(value=0.0))})
    alive = TINY.but({"embedding.bigrams": HashedNGrams(buckets=10, dims=4)})
    once = STEPS.but(steps=1, warmup_steps=3)
    with pytest.raises(UserError, match=r"no gradient reaches embedding\.bigrams"):
        go(tmp_path, once, dead)
    assert not list(tmp_path.iterdir())
    go(tmp_path, once, alive)


@pytest.mark.long
@pytest.mark.parametrize("path", ["lr_schedule", "optimizers.matrix.lr"])
def test_a_rate_that_starts_at_zero_is_no_dead_parameter(path: str, tmp_path: Path) -> None:
    rising = {path: Ramp(start=0.0, end=0.1, finish=0.5)}
    assert go(tmp_path, STEPS.but({"steps": 4, "warmup_steps": 3, **rising})).steps == 4


@pytest.mark.long
def test_a_rate_that_rises_by_steps_is_no_dead_parameter_where_seconds_are_the_budget(tmp_path: Path) -> None:
    rising = {"optimizers.matrix.lr": StepRamp(start=0.0, end=0.1, steps=100)}
    assert go(tmp_path, STEPS.but({"steps": None, "seconds": 0.5, "warmup_steps": 3, **rising})).steps > 0


def test_a_parameter_that_never_moves_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gain, .*never move: look at the rates"):
        go(tmp_path, STEPS.but({"warmup_steps": 3, "optimizers.scalar.lr": 0.0}))


def test_matrices_that_never_move_are_named_and_not_what_they_keep_from_a_gradient(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"blocks\.\S+ .*never move: look at the rates"):
        go(tmp_path, STEPS.but({"warmup_steps": 3, "optimizers.matrix.lr": 0.0}))


def test_the_warm_up_is_a_tenth_of_the_steps_and_says_how_far_it_is(tmp_path: Path) -> None:
    shown = RecordedProgress()
    trained = go(tmp_path, progress=shown)
    assert trained.warmup_steps == 1  # of eight steps a tenth is less than one, but every shape runs once
    assert shown.events[0] == {"event": "doing", "text": "warm-up, step 1 of 1"}
    start = next(event for event in shown.events if event["event"] == "start")
    assert start["warmup_steps"] == 1
    assert start["warmup_seconds"] > 0
    assert warmup_steps(STEPS.but(steps=400, warmup_steps=20), 2) == 20
    assert warmup_steps(STEPS.but(steps=200, warmup_steps=20), 2) == 10


def test_the_warm_up_counts_its_steps_out_of_those_it_will_make() -> None:
    shown = RecordedProgress()
    trainer = Trainer(TINY, STEPS.but(steps=300, warmup_steps=12), 7, Ranks())
    warm_up(trainer, (4, 32), shown)
    assert [event["text"] for event in shown.events] == [f"warm-up, step {step} of 12" for step in range(1, 13)]


def test_the_warm_up_looks_on_until_every_parameter_has_moved(tmp_path: Path) -> None:
    """The factor behind one that starts at zero gets its first gradient in the second step."""
    shown = RecordedProgress()
    assert go(tmp_path, STEPS.but(warmup_steps=20), progress=shown).warmup_steps == 2
    assert [event["text"] for event in shown.events[:2]] == ["warm-up, step 1 of 1", "warm-up, step 2"]


@pytest.mark.long
def test_the_warm_up_stops_at_a_tenth_of_the_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = Trainer.launch

    def slow(trainer: Trainer, *rest: Any) -> AsyncScalar:
        time.sleep(0.1)
        return launched(trainer, *rest)

    monkeypatch.setattr(Trainer, "launch", slow)
    trained = go(tmp_path, STEPS.but(steps=None, seconds=1.0, warmup_steps=50))
    assert trained.warmup_steps < 5


def test_compiling_needs_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UserError, match="compile=always needs a compiler"):
        go(tmp_path, STEPS.but(compile="always"))


@pytest.mark.long
def test_quantized_weights_change_the_loss_from_when_they_are_switched_on(tmp_path: Path) -> None:
    def losses(name: str, config: Train) -> list[float]:
        return [event["loss"] for event in told(tmp_path / name, config) if event["event"] == "step"]

    view = StraightThrough(quantizer=Rows(bits=2), strength=PiecewiseConstant(values=(0, 1), begins=(0.5,)))
    plain, seen = losses("plain", STEPS), losses("seen", STEPS.but(qat={"matrix": view}))
    assert plain[:4] == seen[:4]
    apart = [abs(a - b) for a, b in zip(plain[4:], seen[4:], strict=True)]
    assert min(apart) > 0.0, "two losses may be close by chance"
    assert sorted(apart)[len(apart) // 2] > 1e-4


def test_z_loss_changes_what_is_descended_and_not_what_is_reported() -> None:
    ids = np.random.default_rng(0).integers(0, 64, (2, 2, 32))
    ends = []
    for z_loss in (0.0, 0.1):
        trainer = Trainer(TINY, STEPS.but(z_loss=z_loss), 7, Ranks())
        first = trainer.step(iter([Batch(*ids)] * 4), TrainProgress(0, 0.0, STEPS.budget), bos=1)
        ends.append((first, trainer.parameters["embedding.weight"].detach().clone()))
    assert ends[0][0] == ends[1][0]
    assert not torch.equal(ends[0][1], ends[1][1])


def test_graphs_that_were_compiled_on_the_clock_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = iter([3, 3, 5, 5])
    monkeypatch.setattr(Trainer, "graphs", lambda self: next(compiled))
    events = told(tmp_path, STEPS.but(steps=3))
    kinds = [(event["event"], event.get("text", "").split(";")[0]) for event in events]
    at = kinds.index(("note", "recompiled 2 graphs on the clock"))
    assert [kind for kind, _ in kinds].count("note") == 1
    assert (events[at - 1]["step"], events[at + 1]["step"]) == (1, 2)


def test_graphs_of_another_process_are_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = iter([0, 1, 1])
    together = Ranks.maximum

    def maximum(self: Ranks, *values: float) -> list[float]:
        found = together(self, *values)
        return [*found[:2], max(found[2], next(others))] if len(found) == 3 else found

    monkeypatch.setattr(Ranks, "maximum", maximum)
    shown = RecordedProgress()
    go(tmp_path, STEPS.but(steps=3), progress=shown)
    assert [note.split(";")[0] for note in shown.notes] == ["recompiled 1 graphs on the clock"]


def test_the_clock_starts_when_all_processes_have_their_first_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that stands still but for what comes first: the checkpoint, the first batch, and other processes."""
    now, order = [0.0], list[str]()
    monkeypatch.setattr("caddie.train.loop.time", SimpleNamespace(perf_counter=lambda: now[0]))
    save, wait, ready = hooks.save_tensors, Ranks.wait, module.prefetch

    def first(name: str) -> None:
        if name not in order:
            order.append(name)
            now[0] += 100.0

    def slow_save(*given: Any) -> None:
        first("checkpoint")
        save(*given)

    def slow_wait(self: Ranks) -> None:
        first("others")
        wait(self)

    @contextmanager
    def slow_batches(*given: Any) -> Iterator[Iterator[Any]]:
        with ready(*given) as batches:
            yield (first("batch") or batch for batch in batches)

    monkeypatch.setattr(hooks, "save_tensors", slow_save)
    monkeypatch.setattr(Ranks, "wait", slow_wait)
    monkeypatch.setattr(module, "prefetch", slow_batches)
    events = told(tmp_path, STEPS.but(warmup_steps=0))
    assert order == ["checkpoint", "batch", "others"]
    assert {event["seconds"] for event in events if event["event"] == "step"} == {0.0}


@pytest.mark.long
def test_the_warm_up_has_room_for_as_many_documents_as_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that take the documents' starts are compiled for their number, rounded up; the warm-up has no text."""
    rooms: list[int] = []
    plain = Trainer._losses
    # As on a GPU. Its precision, and so its kernels, are chosen in the warm-up.
    monkeypatch.setattr(Trainer, "asynchronous", property(lambda self: True, lambda self, value: None), raising=False)
    kernels = {torch.float32: "SDPA", torch.bfloat16: "FlashAttention 3 varlen"}
    monkeypatch.setattr(Trainer, "attention", lambda self, length: kernels[self.dtype])

    def watched(self: Trainer, *given: Any) -> Any:
        rooms.append(given[4])
        return plain(self, *given)

    monkeypatch.setattr(Trainer, "_losses", watched)
    text = np.random.default_rng(0).integers(2, 64, 5000).astype(np.uint16)
    text[::4] = 1  # documents of four tokens
    config = STEPS.but(batch_tokens=1024, micro_batches=2, warmup_steps=1, steps=10, precision="bfloat16")
    gpt = TINY.but({"block.attention.scope": "document"})
    go(tmp_path, config, gpt, TrainingData([text], 1))
    assert rooms == [512] * len(rooms), "2 x 128 documents, and 16 rows of which each begins in the middle of one"
    assert len(rooms) > 20


@pytest.mark.parametrize("length", [16, 32])
@pytest.mark.parametrize("loader", [None, *Loader.__subclasses__()])
def test_rows_have_the_strides_of_their_shape_for_which_the_warm_up_compiled(
    loader: type[Loader] | None, length: int
) -> None:
    """Of every loader, and of rows that a user's loader cut from a longer text; a packed row has always been one."""
    trainer = Trainer(TINY, ONE_STEP.but(micro_batches=8, batch_tokens=256), 7, Ranks())
    if loader is None:
        text = SHARDS[0][:132].astype(np.int64).reshape(4, 33)
        batches = [Batch(text[:rows, :-1], text[:rows, 1:]) for rows in (1, 4)]
    else:
        stream = loader().build(SHARDS, tokens=32, sequence_length=32, seed=7, bos=1)
        batches = [stream.micro_batch(0)]
    for batch in batches:
        for tensor, ids in zip(trainer._tensors(batch, length, 1), (batch.inputs, batch.targets), strict=False):
            assert tensor.stride() == (length, 1)
            assert torch.equal(tensor.flatten(), torch.from_numpy(ids.reshape(-1).copy()))


@pytest.mark.long
def test_a_shape_that_was_not_warmed_up_is_compiled_on_the_clock_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = torch.compile
    monkeypatch.setattr("shutil.which", lambda name: name)  # this backend needs none
    # As the backend "eager", without all the others, which take long to import.
    monkeypatch.setattr(torch, "compile", lambda f, **o: compiled(f, backend=lambda graph, inputs: graph, **o))
    config = GROWING.but(compile="always", warmup_steps=1, steps=4)
    shallow = TINY.but(depth=1)

    def notes(name: str, config: Train = config) -> list[str]:
        torch._dynamo.reset()
        shown = RecordedProgress()
        go(tmp_path / name, config, shallow, progress=shown)
        return shown.notes

    assert notes("warmed up") == []
    assert notes("packed", config.but(loader=PackedDocuments(), sequence_length=32)) == []
    first = Trainer.shapes
    monkeypatch.setattr(Trainer, "shapes", lambda self: dict(list(first(self).items())[:1]))
    assert [text.split(";")[0] for text in notes("not")] == ["recompiled 1 graphs on the clock"]


def test_the_start_of_the_log_says_how_attention_is_computed(tmp_path: Path) -> None:
    only_trained = PiecewiseConstant(values=(8, 12), begins=(1.0,))  # the model is scored with windows of 12
    gpt = TINY.but({"layers": {"1": {"attention.window": only_trained}}})
    events = told(tmp_path, STEPS.but(steps=1, precision="float32"), gpt=gpt)
    start = next(event for event in events if event["event"] == "start")
    assert start["attention"].split(", ")[0] == "SDPA"
    assert "bands" in start["attention"]


RANKS = STEPS.but({"micro_batches": 4, "clip_norm": 1.0, "steps": 4, "optimizers.matrix.precision": "float32"})


def _rank(ranks: Ranks, folder: Path) -> None:
    torch.save(go(folder, RANKS, ranks=ranks).last, folder / f"rank{ranks.rank}.pt")


@pytest.mark.slow
def test_two_ranks_equal_one_with_twice_the_micro_batches(tmp_path: Path) -> None:
    together(_rank, 2, tmp_path / "two")
    one = go(tmp_path / "one", RANKS).last
    ranks = [torch.load(tmp_path / "two" / f"rank{rank}.pt") for rank in (0, 1)]
    for name, weight in one.items():
        assert torch.equal(ranks[0][name], ranks[1][name])
        assert (ranks[0][name] - weight).norm() <= 1e-4 * weight.norm().clamp_min(1e-3)


@pytest.mark.long
def test_time_budget_ends_the_run(tmp_path: Path) -> None:
    begin = time.perf_counter()
    trained = go(tmp_path, STEPS.but(steps=None, seconds=0.2))
    assert 0.2 <= trained.seconds < time.perf_counter() - begin
    assert trained.precision in ("float32", "bfloat16")
    assert json.dumps(trained.final_loss) != "NaN"


@pytest.mark.parametrize("words", [{}, {"step": "nan"}, {"step": "-1"}, {"seconds": "inf"}, {"position": "x"}])
def test_a_checkpoint_that_does_not_say_where_it_was_is_refused(words: dict[str, str]) -> None:
    good = {"step": "3", "position": "3", "seconds": "0.5", "loss": "nan"}
    assert position_in(Path("a"), good)[:3] == (3, 3, 0.5)
    with pytest.raises(UserError, match="a is not a readable checkpoint"):
        position_in(Path("a"), good | words if words else {})


HELD = STEPS.but(held_out_tokens=400)
"""Twelve rows of 32 tokens, and the target of the last."""


def test_held_out_text_is_measured_and_changes_nothing_else(tmp_path: Path) -> None:
    shown = RecordedProgress()
    measured = go(tmp_path / "a", HELD, data=replace(DATA, bits_per_nat=0.5), progress=shown)
    events = [event for event in shown.events if event["event"] == "held_out"]
    assert events == read_steps(tmp_path / "a" / LOG, "held_out")
    assert [events[0]["step"], events[-1]["step"], events[0]["tokens"]] == [0, 8, 384]
    assert events[-1]["bits_per_byte"] == 0.5 * events[-1]["loss"]
    model = build(TINY, 0)
    ids = torch.from_numpy(SHARDS[0][-400:-15].astype(np.int64))
    for event, weights in ((events[0], build(TINY, 7).state_dict()), (events[-1], measured.last)):
        model.load_state_dict(weights)
        with torch.no_grad():
            logits = model(ids[:-1].view(12, 32), ids[:-1].view(12, 32) == 1)
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[1:])
        assert event["loss"] == pytest.approx(float(expected), rel=1e-4)
    shorter = replace(DATA, shards=[SHARDS[0][:-400]])
    assert equal(measured, go(tmp_path / "b", data=shorter))


def test_held_out_text_is_quantized_as_in_a_step_there() -> None:
    """The warm-up may leave the views at another strength."""
    view = StraightThrough(quantizer=Rows(bits=2), strength=Ramp(start=0.0, end=1.0, begin=0.5))
    trainer, batches = Trainer(TINY, STEPS.but(qat={"matrix": view}), 7, Ranks()), hooks.held_out_batches(SHARDS[0], 32)
    first, late = (TrainProgress(step, 0.0, trainer.config.budget) for step in (0, 7))
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # matrices that write to the stream are zero at first
    before = trainer.loss(batches[:1], first, 1)
    trainer.views.set(late)
    assert trainer.loss(batches[:1], first, 1) == before
    assert trainer.loss(batches[:1], late, 1) != before


def test_held_out_text_takes_a_hundredth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, written = [0.0], list[dict[str, Any]]()

    def loss(*rest: object) -> float:
        clock[0] += 0.5
        return 2.0

    monkeypatch.setattr(hooks.time, "perf_counter", lambda: clock[0])
    trainer: Any = SimpleNamespace(ranks=Ranks(), loss=loss)
    log: Any = SimpleNamespace(write=written.append)
    held_out = hooks.HeldOut(trainer, log, hooks.held_out_batches(SHARDS[0], 32), 1)
    for step in range(10_001):
        at = TrainProgress(step, clock[0], Budget(steps=10_000))
        (held_out.after_step if 0 < step < 10_000 else held_out.off_the_clock)(at)
        clock[0] += 0.1
    places = [event["step"] for event in written]
    assert places == sorted(set(places))
    assert [places[0], places[-1]] == [0, 10_000]
    spent = 0.5 * (len(places) - 2)  # before and after training the clock stands still
    assert 0.008 * clock[0] < spent <= 0.01 * clock[0]
    assert len({place // 200 for place in places}) == len(places), "at most one in each fiftieth"


def test_held_out_text_shorter_than_a_row_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train\.held_out_tokens must be more than the 32 tokens of a row, not 32"):
        go(tmp_path, STEPS.but(held_out_tokens=32))
    assert not list(tmp_path.iterdir())


def test_held_out_rows_are_the_longest(tmp_path: Path) -> None:
    events = told(tmp_path, GROWING.but(held_out_tokens=400, steps=2))
    assert {event["tokens"] for event in events if event["event"] == "held_out"} == {384}
