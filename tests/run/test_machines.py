"""Training by processes of several machines, as torchrun starts them: who does what, and what must be there."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY

from caddie.cli import exits
from caddie.errors import UserError
from caddie.run.run_folder import _check_agreement
from caddie.runtime import distributed
from caddie.runtime.distributed import Ranks


def test_each_machine_has_its_turn_and_its_first_process_before_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here four threads are the processes of two machines."""
    done, barrier = list[int](), threading.Barrier(4)
    monkeypatch.setattr(Ranks, "wait", lambda ranks: barrier.wait(30))

    def work(rank: int) -> None:
        ranks = Ranks(rank, 4, local_rank=rank % 2)
        with ranks.turn():
            done.append(rank)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in reversed(range(4))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (done[:2], sorted(done[2:])) == ([0, 2], [1, 3])


def test_machines_that_differ_are_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def agree(text: str, other: str, checkpoint: bool = False) -> None:
        """Check with the other process's values, which are those that it gives itself."""
        given = list[tuple[float, ...]]()
        monkeypatch.setattr(Ranks, "maximum", lambda ranks, *values: given.append(values) or list(values))
        _check_agreement(tmp_path, other, Ranks())
        of_facts, _ = given  # of the facts, then of the checkpoint
        others = iter([of_facts, (float(checkpoint),)])
        monkeypatch.setattr(
            Ranks, "maximum", lambda ranks, *values: [*map(max, zip(values, next(others), strict=True))]
        )
        _check_agreement(tmp_path, text, Ranks())

    agree("text", "text")
    with pytest.raises(UserError, match="do not agree on recipe, seed or text"):
        agree("text", "another text")
    with pytest.raises(UserError, match=r"checkpoint\.safetensors is on another machine and not here"):
        agree("text", "text", checkpoint=True)


def test_a_command_that_goes_on_begins_as_it_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "CADDIE_LAUNCHED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.argv", ["caddie", "run", "a b"])
    assert (exits.typed_command(), distributed.world_size(3)) == ("caddie run 'a b'", 3)
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert (exits.typed_command(), distributed.world_size(3)) == ("torchrun … -m caddie run 'a b'", 16)
    monkeypatch.setenv("CADDIE_LAUNCHED", "1")
    assert exits.typed_command() == "caddie run 'a b'"
    monkeypatch.setattr("sys.argv", ["/a/.venv/bin/caddie", "run"])
    for found, typed in (("/usr/bin/caddie", "caddie"), (None, "/a/.venv/bin/caddie")):
        monkeypatch.setattr(exits, "which", lambda name, found=found: found)
        assert exits.typed_command() == f"{typed} run"
    monkeypatch.setenv("WORLD_SIZE", "many")
    assert distributed.world_size(3) == 3


def on_two_machines(folders: Sequence[Path], processes: int, *arguments: str) -> list[tuple[int, str, str]]:
    """Exit status and output of a command by two agents on this machine, each in a folder of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    agents = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={processes}"),
                *(f"--node-rank={number}", "--master-addr=127.0.0.1", f"--master-port={port}"),
                *("-m", "caddie", *arguments),
            ],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=(folder / "out.txt").open("w"),
            stderr=(folder / "err.txt").open("w"),
        )
        for number, folder in enumerate(folders)
    ]
    for agent in agents:
        agent.wait(600)
    texts = [[(folder / name).read_text() for name in ("out.txt", "err.txt")] for folder in folders]
    return [(agent.returncode, out, err) for agent, (out, err) in zip(agents, texts, strict=True)]


@pytest.fixture
def machines(tiny_run: Any, tmp_path: Path) -> list[Path]:
    """Two folders with the same text, as of machines that share no disk."""
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
        shutil.copy(tiny_run.text, folder / "text.txt")
    return folders


RUN = (*TINY, "train.micro_batches=4", "--data", "text.txt", "--out", "run")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_two_machines_train_one_model(machines: Sequence[Path]) -> None:
    """Two processes each; the text is prepared once on each machine, and the first process alone writes the run."""
    first, second = on_two_machines(machines, 2, "run", "tiny", *RUN, "--json")
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    result = json.loads(first[1])
    assert (result["world"], result["verified"]) == (4, True)
    assert result["command"].startswith("torchrun … -m caddie run tiny")
    assert (machines[0] / "run" / "result.json").exists()
    assert not (machines[1] / "run").exists()
    assert second[1] == ""
    for folder, ended in zip(machines, (first, second), strict=True):
        assert len(list((folder / "data").iterdir())) == 1
        assert ended[2].count("reading ") == 1, "each machine prepares the text once, and says so"
        assert "step 2" in ended[2], "who waits sees how far it is"
    assert "process 2 of 4: process 0 writes the run folder" in second[2]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_another_text_on_the_second_machine_is_refused(machines: Sequence[Path]) -> None:
    with (machines[1] / "text.txt").open("a") as text:
        text.write("\n\nOne more paragraph, long enough to matter.")
    for status, _, said in on_two_machines(machines, 1, "train", "tiny", *RUN, "--quiet"):
        assert status != 0
        assert "do not agree on recipe, seed or text" in said
