"""Memory of packing and scoring: its estimate, and the refusal before training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from caddie.errors import UserError
from caddie.model import GPT
from caddie.pack.compress import Pack
from caddie.pack.quantize import Float16
from caddie.recipes.catalog import find
from caddie.run.run import run
from caddie.runtime.distributed import Ranks
from caddie.runtime.memory import GIB
from caddie.score import DocumentLoRA, Scoring
from caddie.score.ngram_tilt import NGramTilt
from caddie.train import stage_memory
from caddie.train.stage_memory import check_stages, estimate_stages

SMALL = GPT(vocabulary=256, width=64, depth=2)
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
    with pytest.raises(UserError, match=r"packing needs about .*; take a smaller model, or NAME_mini in place of NAME"):
        run(find("tiny"), None, folder=tmp_path / "run")
    assert not list((tmp_path / "run").glob("*.caddie"))
    assert not (tmp_path / "run" / "log.jsonl").exists()
    monkeypatch.setattr(stage_memory, "free_bytes", lambda device, processes=1: 1 << 50)
    check_stages(SMALL, Pack(), large, 0, Ranks())
