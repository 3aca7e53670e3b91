"""The environment of child processes: where they find modules."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from caddie.runtime.child_process import child_environment


def test_a_child_imports_nothing_from_the_working_folder(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("open('ran', 'w')\n")
    command = [sys.executable, "-m", "caddie", "--version"]
    subprocess.run(command, cwd=tmp_path, env=child_environment(), check=True, capture_output=True)
    assert not (tmp_path / "ran").exists()


def test_a_child_finds_the_package_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"first{os.pathsep}")
    first, *others = child_environment()["PYTHONPATH"].split(os.pathsep)
    assert (first, others) == ("first", [str(Path(__file__).parents[2])])
    assert child_environment({"A": "b"})["A"] == "b"
