"""A system without `fcntl`, `resource`, forks and half of the signals, as Windows is: pretended, not tried there."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY

SYSTEM = """
import os, signal, subprocess, sys
import psutil, torch.distributed  # which on this system need what is taken away

for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("fork", "getuid", "getgid", "killpg", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "sched_getaffinity"):
    if name in vars(os):
        delattr(os, name)
for name in ("SIGKILL", "SIGUSR1", "SIGUSR2", "SIGHUP"):
    delattr(signal, name)
"""


@pytest.fixture
def windows(tmp_path: Path) -> dict[str, str]:
    """The environment of such a system, for Python and all its children."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SYSTEM)
    return {**os.environ, "PYTHONPATH": str(tmp_path / "site")}


def caddie(folder: Path, environment: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "caddie", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.long
def test_all_but_the_sandbox_works(tiny_run: Any, tmp_path: Path, windows: dict[str, str]) -> None:
    helped = caddie(tmp_path, windows, "--help")
    assert (helped.returncode, helped.stderr) == (0, "")
    done = caddie(tmp_path, windows, "run", "tiny", *TINY, "--data", tiny_run.text, "--out", "run", "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    why = "this system has no sandbox; verify the file on Linux or macOS, or in WSL"
    assert f"Not verified: {why}." in " ".join(done.stdout.split())
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["verified"], result["not_verified_because"]) == (None, why)
    assert result["training"]["peak_bytes"] > 1 << 20
    verified = caddie(tmp_path, windows, "verify", "run/artifact.caddie", "--quiet")
    assert verified.returncode == 2
    assert verified.stderr == f"caddie: not verified, because the probes could not be run in a sandbox: {why}\n"
