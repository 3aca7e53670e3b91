"""Tests on a GPU of all that ships for one: pytest -m gpu. Elsewhere it is interpreted or pretended."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import attention_backends, fused_kernels

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="no GPU on this machine")]
SETTINGS = (
    *("train.seconds=none", "train.steps=40", "train.batch_tokens=4096", "train.sequence_length=128"),
    *("model.vocabulary=512", "pack.fit=none", "pack.coding=Packed", "pack.calibration.tokens=4096"),
    *("score.sequence_length=128", "score.stride=128"),
)


def trained(text: Path, out: Path, *given: str) -> tuple[dict[str, Any], str]:
    """Return the result and the log of a run of 40 steps in processes of its own."""
    command = [sys.executable, "-m", "caddie", "run", "tiny", *SETTINGS, *given, "--data", text, "--out", out, "--json"]
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=text.parent, timeout=600)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout), (out / "log.jsonl").read_text()


@pytest.fixture(scope="module")
def text(tiny_run: Any) -> Path:
    return Path(tiny_run.text)


@pytest.fixture(scope="module")
def plain(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run that the others differ from in one setting."""
    return trained(text, tmp_path_factory.mktemp("plain") / "run", "train.cuda_graphs=never")[0]


def test_recorded_steps_train_as_launched_ones_do(text: Path, plain: dict[str, Any], tmp_path: Path) -> None:
    result, log = trained(text, tmp_path / "run", "train.cuda_graphs=always")
    assert '"cuda_graphs": true' in log
    assert result["bits_per_byte"] == pytest.approx(plain["bits_per_byte"], abs=0.02)


@pytest.mark.skipif(GPUS and torch.cuda.get_device_capability() < (8, 9), reason="this GPU does not multiply float8")
def test_products_in_float8_train_nearly_as_well(text: Path, plain: dict[str, Any], tmp_path: Path) -> None:
    result, _ = trained(text, tmp_path / "run", 'train.float8=["head","mlp"]')
    assert result["bits_per_byte"] == pytest.approx(plain["bits_per_byte"], abs=0.1)


@pytest.mark.skipif(GPUS < 2, reason="fewer than two GPUs")
def test_two_ranks_on_nccl_train_as_one_does(text: Path, plain: dict[str, Any], tmp_path: Path) -> None:
    result, _ = trained(text, tmp_path / "run", "train.cuda_graphs=never", "--gpus", "2")
    assert result["bits_per_byte"] == pytest.approx(plain["bits_per_byte"], abs=0.05)


def test_attention_backends_are_their_reference() -> None:
    rows = attention_backends(toy=True)
    able = [row for row in rows if row["equal"] is not None]
    assert any("Flash" in row["name"] or "varlen" in row["name"] or "cuDNN" in row["name"] for row in able), rows
    assert all(row["equal"] for row in able), [row for row in able if not row["equal"]]


def test_kernels_are_their_references() -> None:
    rows = fused_kernels()
    assert any(row["name"] == "Triton" and row["equal"] for row in rows), rows
    wrong = [row for row in rows if row["equal"] is False]
    assert not wrong, wrong
