"""The way out as a newcomer goes it: run, submit, review, replay."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SETTINGS = ("train.steps=20", "train.seconds=none", "model.width=32", "model.depth=2", "--data", "stdlib")


@pytest.mark.slow
def test_a_run_is_submitted_reviewed_and_replayed(tmp_path: Path) -> None:
    def caddie(*words: str) -> dict[str, object]:
        command = [sys.executable, "-m", "caddie", *words, "--json"]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        return dict(json.loads(ended.stdout))

    caddie("run", "tiny", *SETTINGS, "--out", "run")
    caddie("submit", "run", "--out", "submission", "--author", "Ada", "--github-id", "ada")
    assert (tmp_path / "submission" / "train_gpt.py").is_file()
    findings = caddie("review", "submission")["findings"]
    assert isinstance(findings, list)
    assert {finding["rule"] for finding in findings if finding["severity"] != "note"} <= {"validation-own"}, findings
    replayed = caddie("replay", "run")
    assert replayed["identity_promised"]
    assert replayed["identical"]
