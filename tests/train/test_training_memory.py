"""Memory of training: its estimate, the refusal of what does not fit, and the line when memory runs out after all."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from recording import RecordedProgress

from caddie.data.loaders import PackedDocuments
from caddie.errors import UserError
from caddie.model import GPT
from caddie.recipes.catalog import find
from caddie.run.run import run
from caddie.runtime import memory as runtime_memory
from caddie.runtime.distributed import Ranks
from caddie.runtime.memory import GIB, Memory
from caddie.runtime.progress import Phases
from caddie.train import memory
from caddie.train.averaging import EMA
from caddie.train.memory import MemoryEstimate, bound_memory, enough_memory, estimate_memory, judge_memory, shortage
from caddie.train.settings import Train

SMALL = GPT(vocabulary=256, width=64, depth=2)
LEAST = Train(steps=10, batch_tokens=256, micro_batches=2, sequence_length=128)
TRAIN = Train(steps=10, batch_tokens=4096, micro_batches=2, sequence_length=128)


@pytest.mark.long
def test_the_state_is_that_of_the_optimizers_twice_for_the_warm_up() -> None:
    found = estimate_memory(SMALL, TRAIN)
    averaged = estimate_memory(SMALL, TRAIN.but(averaging=EMA(decay=0.9)))
    with torch.device("meta"):
        weights = sum(parameter.nbytes for parameter in SMALL.build().parameters())
    assert 2 * 2 * weights <= found.state < 2 * 3.1 * weights  # momentum for matrices, two moments for the rest
    assert averaged.state - found.state == pytest.approx(2 * weights, rel=0.01)


@pytest.mark.long  # imports the compiler
def test_fake_tensors_give_the_bytes_of_real_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    real = estimate_memory(SMALL, TRAIN)
    monkeypatch.setattr(memory, "_REAL_FLOPS", 0)
    fake = estimate_memory(SMALL, TRAIN)
    assert fake.state == real.state
    assert fake.step == pytest.approx(real.step, abs=3 << 20)  # real tensors count the buffers of the loss


def test_a_loader_that_reads_rows_in_groups_is_estimated() -> None:
    assert estimate_memory(SMALL, TRAIN.but(loader=PackedDocuments(group=100))).step > 0


@pytest.mark.long
def test_more_micro_batches_need_less() -> None:
    steps = [estimate_memory(SMALL, TRAIN.but(micro_batches=count)).step for count in (2, 4, 8)]
    assert steps[0] > 1.5 * steps[1] > 2 * steps[2]


@pytest.mark.parametrize(
    ("micro_batches", "rows", "world", "counts"),
    [(1, 8, 1, [2, 4, 8]), (1, 12, 1, [2, 4, 12]), (3, 12, 1, [6, 12]), (1, 12, 2, [2, 4, 12]), (8, 8, 1, [])],
)
def test_each_larger_number_of_micro_batches_is_about_twice_the_one_before(
    micro_batches: int, rows: int, world: int, counts: list[int]
) -> None:
    train = TRAIN.but(batch_tokens=rows * TRAIN.sequence_length, micro_batches=micro_batches)
    assert list(memory._more_micro_batches(train, world)) == counts


@pytest.mark.long
@pytest.mark.parametrize("name", ["tiny", "ternary_mini", "random_maps_mini"])
def test_the_bound_is_above_the_estimate_but_not_far(name: str) -> None:
    """The first needs the most bytes per weight, the others per product, and for weights that are not learned."""
    recipe = find(name)
    found, bound = (function(recipe.model, recipe.train) for function in (estimate_memory, bound_memory))
    assert found.state <= bound.state
    assert found.state + found.step <= bound.state + bound.step < 5 * (found.state + found.step)


@pytest.mark.long
def test_a_step_is_traced_only_near_the_memory_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = bound_memory(SMALL, TRAIN)
    progress = RecordedProgress()
    monkeypatch.setattr(memory, "free_bytes", lambda device, processes=1: 3 * bound.total)
    assert not judge_memory(SMALL, TRAIN, Ranks(), progress)[0].traced
    assert not progress.phases
    monkeypatch.setattr(memory, "free_bytes", lambda device, processes=1: int(1.5 * bound.total))
    found, text = judge_memory(SMALL, TRAIN, Ranks(), progress)
    assert found.traced
    assert found.total < bound.total
    assert not text
    assert progress.phases == ["estimate memory"]
    monkeypatch.setattr(memory, "free_bytes", lambda device, processes=1: found.total // 2)
    assert "training needs about" in judge_memory(SMALL, TRAIN, Ranks())[1]


@pytest.mark.long
def test_blocks_of_the_heap_leave_holes_and_larger_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    found = estimate_memory(SMALL, TRAIN)
    monkeypatch.setattr(memory, "_HOLES", 0.0)
    assert found.step == pytest.approx(1.65 * estimate_memory(SMALL, TRAIN).step, rel=0.1)
    assert found.state == estimate_memory(SMALL, TRAIN).state
    monkeypatch.setattr(memory, "_HOLES", 0.65)
    monkeypatch.setattr(memory, "MMAP_THRESHOLD", 0)
    assert found.step > 1.5 * estimate_memory(SMALL, TRAIN).step


def test_what_started_processes_hold_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    two, held = Ranks(0, 2, torch.device("cpu")), 3 * GIB
    estimate = MemoryEstimate(held, GIB, GIB)
    monkeypatch.setattr(runtime_memory, "memory", lambda: Memory(16 * GIB, 5 * GIB))
    monkeypatch.setattr(runtime_memory.psutil.Process, "memory_info", lambda self: SimpleNamespace(rss=held))
    assert "needs about 10.0 GiB, and this machine has 8.0 GiB" in shortage(estimate, SMALL, LEAST, two)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    assert shortage(estimate, SMALL, LEAST, two) == ""


def test_what_does_not_fit_is_refused_with_the_setting_that_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def estimated(gpt: GPT, train: Train, ranks: Ranks = Ranks()) -> MemoryEstimate:
        return MemoryEstimate(GIB, GIB, 96 * GIB // train.micro_batches)

    monkeypatch.setattr(memory, "estimate_memory", estimated)
    monkeypatch.setattr(memory, "bound_memory", estimated)
    monkeypatch.setattr(memory, "free_bytes", lambda device, processes=1: 6 * GIB)
    assert shortage(estimated(SMALL, TRAIN), SMALL, TRAIN) == (
        "training needs about 50.0 GiB, and this machine has 6.0 GiB free; train.micro_batches=32 needs about 5.0 GiB"
    )
    least = shortage(estimated(SMALL, TRAIN), SMALL, TRAIN.but(batch_tokens=1024))
    assert "even train.micro_batches=8 14.0 GiB; take a smaller model" in least
    folder = tmp_path / "run"
    with pytest.raises(UserError, match=r"this machine has 6\.0 GiB free"):
        run(find("tiny"), None, folder=folder)
    assert not folder.exists(), "nothing was begun"


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")]
)
@pytest.mark.parametrize(
    ("phase", "line"),
    [
        (
            "",
            r"phase train: training needs less than [\d.]+ GiB by the estimate; raise train.micro_batches \(2\), take",
        ),
        ("calibrate", "phase calibrate; lower pack.calibration.batch_tokens, take a smaller model"),
        ("score", "phase score; lower score.batch_tokens, or with adapters score.ttt.documents, take a smaller model"),
        ("pack", "phase pack; take a smaller model, or end what else uses memory"),
    ],
)
def test_memory_that_runs_out_is_one_line(error: Exception, phase: str, line: str) -> None:
    phases = Phases()
    inside = phases(phase) if phase else nullcontext()
    with pytest.raises(UserError, match=line), enough_memory(SMALL, TRAIN, Ranks(), phases), inside:
        raise error


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes"), enough_memory(SMALL, TRAIN, Ranks(), Phases()):
        raise RuntimeError("shapes do not match")
