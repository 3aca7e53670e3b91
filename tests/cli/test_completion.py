"""Completion by the shell: verbs, recipes, choices and paths, without PyTorch."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from caddie.recipes.catalog import shipped
from caddie.recipes.names import ALIASES, names

PROGRAM = (
    "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr));"
    "from caddie.cli import main; main()"
)
"""The command line, which says in the end if it has imported PyTorch."""


def completed(line: str) -> list[str]:
    """Return what a shell is told when TAB is pressed at the end of a line."""
    words = line.split(" ")
    asked = {"_CADDIE_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, **asked}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "False\n")
    return done.stdout.splitlines()


def test_the_names_are_those_of_the_recipes() -> None:
    assert sorted(names()) == sorted({**shipped(), **ALIASES})


@pytest.mark.long
@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("caddie ve", ["plain,verify"]),
        ("caddie run ti", ["plain,tiny"]),
        ("caddie run best", ["plain,best_record"]),
        ("caddie ablate best_record", ["plain,best_record", "plain,best_record_mini"]),
        ("caddie diff baseline champion_", ["plain,champion_mini"]),
        ("caddie run ./mine", ["file,./mine"]),
        ("caddie run tiny --data te", ["file,te"]),
        ("caddie run tiny --track w", ["plain,wandb"]),
        ("caddie track runs", ["file,runs"]),
    ],
)
def test_a_line_is_completed(line: str, found: list[str]) -> None:
    assert completed(line) == found


@pytest.mark.long
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_a_script_that_it_can_read(shell: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "caddie"],
        env={**os.environ, "_CADDIE_COMPLETE": f"{shell}_source"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "_CADDIE_COMPLETE" in done.stdout
    if (program := shutil.which(shell)) is None:
        pytest.skip(f"no {shell}")
    script = tmp_path / "script"
    script.write_text(done.stdout)
    subprocess.run([program, "-n", script], check=True)


def test_bash_completes_by_the_script_of_the_docs(tmp_path: Path) -> None:
    (tmp_path / "caddie").write_text(f'#!/bin/sh\nexec {sys.executable} -m caddie "$@"\n')
    (tmp_path / "caddie").chmod(0o755)
    lines = (
        'eval "$(_CADDIE_COMPLETE=bash_source caddie)"',
        "COMP_WORDS=(caddie run ti) COMP_CWORD=2 COMPREPLY=()",
        "_caddie_completion caddie",
        'echo "${COMPREPLY[@]}"',
    )
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("tiny\n", "")
