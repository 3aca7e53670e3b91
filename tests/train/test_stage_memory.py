"""Memory of packing and scoring: its estimate, and the refusal before training."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import write_text

from caddie.errors import UserError
from caddie.model import GPT
from caddie.pack.calibrate import CalibrationText, SelfGenerated, TrainingText
from caddie.pack.compress import Pack
from caddie.pack.quantize import Float16
from caddie.recipes.catalog import find
from caddie.run.run import run
from caddie.runtime.distributed import Ranks
from caddie.runtime.memory import GIB
from caddie.score import DocumentLoRA, Scoring
from caddie.score.ngram_tilt import NGramTilt
from caddie.score.score import rows_and_workers
from caddie.score.ttt_sgd import TestTimeTraining
from caddie.train import stage_memory
from caddie.train.stage_memory import check_stages, estimate_stages

SMALL = GPT(vocabulary=256, width=64, depth=2)
WIDE = GPT(vocabulary=256, width=512, depth=4)
MIB = 1 << 20
SCORING = Scoring(sequence_length=128, stride=64)
LORA = DocumentLoRA(rank=8, chunk_tokens=32, documents=16)


def test_the_tilt_counts_contexts_and_adapters_count_documents() -> None:
    plain = estimate_stages(SMALL, Pack(), SCORING, 10**6).scoring
    tilted = estimate_stages(SMALL, Pack(), SCORING.but(tilt=NGramTilt()), 10**6).scoring
    assert tilted - plain == 50 * 10**6
    few, many = (
        estimate_stages(SMALL, Pack(), SCORING.but(ttt=LORA.but(documents=number))).scoring for number in (16, 32)
    )
    assert plain < few < many < 2 * few


def test_scoring_counts_the_windows_that_the_scorer_holds_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 16 threads holds 4 windows of 1,024 tokens, each of 24 threads holds 2."""
    scoring, estimates = Scoring(), {}
    for threads, windows in ((16, 64), (24, 48), (48, 48)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        rows, workers = rows_and_workers(True, scoring, torch.device("cpu"))
        assert rows * workers == windows
        estimates[threads] = estimate_stages(SMALL, Pack(), scoring).scoring
    assert estimates[16] > estimates[24] == estimates[48]


def test_calibrations_and_candidates_count() -> None:
    rounded = Pack(quantizers={name: Float16() for name in Pack().quantizers}, fit=None)
    least, most = (estimate_stages(SMALL, pack, SCORING).packing for pack in (rounded, Pack()))
    with torch.device("meta"):
        widths = [weight.shape[1] for weight in SMALL.build().parameters() if weight.ndim == 2]
    assert most - least > 4 * sum(width**2 for width in widths)


def test_what_will_not_fit_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = SCORING.but(ttt=LORA.but(documents=4096))
    need = estimate_stages(SMALL, Pack(), large)
    monkeypatch.setattr(stage_memory, "free_bytes", lambda device, processes=1: need.process + need.scoring // 2)
    with pytest.raises(UserError, match=r"scoring needs about .* GiB free; score\.ttt\.documents=\d+ needs about"):
        check_stages(SMALL, Pack(), large, 0, Ranks())
    monkeypatch.setattr(stage_memory, "free_bytes", lambda device, processes=1: GIB // 64)
    monkeypatch.chdir(tmp_path)  # where the corpus of a text goes
    with pytest.raises(UserError, match=r"packing needs about .*; take a smaller model, or NAME_mini in place of NAME"):
        run(find("tiny"), str(write_text(tmp_path / "text.txt")), folder=tmp_path / "run")
    assert not list((tmp_path / "run").glob("*.caddie"))
    assert not (tmp_path / "run" / "log.jsonl").exists()
    monkeypatch.setattr(stage_memory, "free_bytes", lambda device, processes=1: 1 << 50)
    check_stages(SMALL, Pack(), large, 0, Ranks())


def test_classes_of_a_user_are_estimated_as_a_row_and_a_forward() -> None:
    """Of their settings nothing is known."""

    class OwnText(CalibrationText):
        def batches(self, *given: Any, **named: Any) -> Iterator[torch.Tensor]:
            raise NotImplementedError

    class OwnTraining(TestTimeTraining):
        def build(self, *given: Any) -> Any:
            raise NotImplementedError

    own = estimate_stages(SMALL, Pack(calibration=OwnText()), SCORING.but(ttt=OwnTraining()))
    row = estimate_stages(SMALL, Pack(calibration=SelfGenerated(batch=1)), SCORING)
    assert (own.calibrating, own.packing, own.scoring) == (row.calibrating, row.packing, row.scoring)


class Machine:
    """A machine with so much free memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def has(self, free: int) -> None:
        self.monkeypatch.setattr(stage_memory, "free_bytes", lambda device, processes=1: free)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr("psutil.Process", lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=MIB)))
    return Machine(monkeypatch)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (TrainingText(batch_tokens=1 << 16), r"pack\.calibration\.batch_tokens=(\d+) needs about"),
        (SelfGenerated(batch=512), r"pack\.calibration\.batch=(\d+) needs about"),
    ],
)
def test_the_refusal_of_packing_names_the_batch_that_fits(text: CalibrationText, named: str, machine: Machine) -> None:
    pack, name = Pack(calibration=text), "batch" if isinstance(text, SelfGenerated) else "batch_tokens"
    quarter = pack.but({f"calibration.{name}": getattr(text, name) // 4})
    machine.has(estimate_stages(SMALL, quarter, SCORING).needed("packing"))
    with pytest.raises(UserError, match=named) as error:
        check_stages(SMALL, pack, SCORING, 0, Ranks())
    found = re.search(named, str(error.value))
    assert found is not None
    assert int(found[1]) == getattr(text, name) // 4
    check_stages(SMALL, quarter, SCORING, 0, Ranks())


def test_it_names_the_search_for_the_cap_where_candidates_take_the_memory(machine: Machine) -> None:
    small = TrainingText(batch_tokens=128)
    machine.has(estimate_stages(WIDE, Pack(calibration=small, fit=None), SCORING).needed("packing"))
    with pytest.raises(UserError, match=r"; pack\.fit=none needs about"):
        check_stages(WIDE, Pack(calibration=small), SCORING, 0, Ranks())
    with pytest.raises(UserError, match=r"; pack\.calibration\.batch_tokens=128 pack\.fit=none needs about"):
        check_stages(WIDE, Pack(calibration=TrainingText(batch_tokens=1 << 15)), SCORING, 0, Ranks())


def test_processes_of_one_machine_calibrate_together(machine: Machine) -> None:
    pack = Pack(calibration=TrainingText(batch_tokens=1024), fit=None)
    one = estimate_stages(SMALL, pack, SCORING)
    assert one.needed("packing", 3) == 3 * (one.process + one.calibrating)
    assert one.needed("scoring", 3) == 3 * one.needed("scoring")
    machine.has(one.needed("packing"))
    check_stages(SMALL, pack, SCORING, 0, Ranks(), {"packing": 1})
    refused = r"packing in 64 processes needs about .* GiB free; one process needs about"
    with pytest.raises(UserError, match=refused):
        check_stages(SMALL, pack, SCORING, 0, Ranks(), {"packing": 64})


@pytest.mark.parametrize(
    ("verb", "stage"), [(["pack", "cap=900000", "--out", "new.caddie"], "packing"), (["score"], "scoring")]
)
def test_the_verbs_refuse_what_a_run_would(
    verb: list[str],
    stage: str,
    tiny_run: Any,
    caddie: Callable[..., Any],
    machine: Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    machine.has(GIB // 1024)
    data = ["--data", tiny_run.corpus] if verb == ["score"] else []
    ended = caddie(verb[0], tiny_run.folder, *verb[1:], *data, "--quiet")
    assert ended.status == 2
    assert re.fullmatch(rf"caddie: {stage} needs about .* GiB, and this machine has 0\.0 GiB free; .*\n", ended.err)
    assert not list(tmp_path.iterdir())
