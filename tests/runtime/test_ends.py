"""Tests of the end of one of several processes. Closing NCCL waits for the others; closing gloo does not."""

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from caddie.cli import exits
from caddie.errors import CheckFailed
from caddie.runtime import distributed
from caddie.runtime.distributed import join, lost_another


@pytest.fixture
def one_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is one that was started with others, all of which have joined."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")


@pytest.mark.parametrize(
    ("device", "fails", "expected"), [("cuda", 0, 1), ("cuda", 1, 0), ("cpu", 0, 1), ("cpu", 1, 1)]
)
def test_a_process_that_fails_does_not_wait_for_nccl(
    device: str, fails: bool, expected: int, one_of: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    destroyed = []
    monkeypatch.setattr(distributed, "local_device", lambda: torch.device(device))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *given, **named: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: destroyed.append(True))
    try:
        with join():
            if fails:
                raise CheckFailed("it diverged")
    except CheckFailed:
        assert fails
    assert len(destroyed) == expected


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (dist.DistBackendError("NCCL communicator was aborted on rank 1."), True),
        (dist.DistBackendError("ncclRemoteError: A call failed possibly due to a network error"), True),
        (dist.DistBackendError("[1] retrieving ncclUniqueId from [0] via c10d key-value store by key '0'"), True),
        (dist.DistBackendError("ncclInvalidUsage: Duplicate GPU detected : rank 0 and rank 1"), False),
        (dist.DistBackendError("ncclSystemError: Error while creating shared memory segment"), False),
        (dist.DistNetworkError("connection reset"), True),
        (RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (RuntimeError("a shape"), False),
    ],
)
def test_what_nccl_itself_cannot_do_is_told_and_not_taken_for_a_lost_process(error: Exception, lost: bool) -> None:
    assert lost_another(error) is lost


@pytest.mark.parametrize("error", [ValueError("a bug"), RuntimeError("a bug")])
def test_an_error_that_nobody_foresaw_ends_one_of_several_at_once(
    error: Exception, one_of: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        raise error

    monkeypatch.setattr(exits, "_leave", sys.exit)
    with pytest.raises(SystemExit) as ended:
        exits.end(command)
    assert ended.value.code == 1
    told = capsys.readouterr().err
    assert told.startswith("Traceback")
    assert told.endswith(f"{type(error).__name__}: a bug\n")
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(type(error), match="a bug"):
        exits.end(command)


@pytest.mark.parametrize(
    ("said", "status", "told"),
    [
        ("no data", 1, "caddie: no data\n"),
        (ValueError("no data"), 1, "caddie: no data\n"),
        (3, 3, ""),
        (None, 0, ""),
    ],
)
def test_what_a_library_says_when_it_ends_the_program_is_told(
    said: object, status: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        exits.end(lambda: sys.exit(said))  # type: ignore[arg-type]
    assert (ended.value.code, capsys.readouterr().err) == (status, told)


class Ended(SimpleNamespace):
    """A process that ended with a status."""

    def poll(self) -> int:
        return int(self.returncode)

    def kill(self) -> None:
        pass


@pytest.mark.parametrize(
    ("statuses", "cause"),
    [
        ([0, 0], (0, 0)),
        ([1, 2, -signal.SIGABRT], (1, 2)),
        ([1, -signal.SIGABRT, -signal.SIGKILL], (2, -signal.SIGKILL)),
        ([2, 1, -signal.SIGSEGV], (2, -signal.SIGSEGV)),
        ([0, 1], (1, 1)),
    ],
)
def test_the_cause_is_not_a_process_that_lost_another(
    statuses: list[int], cause: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    processes: list[Any] = [Ended(returncode=status) for status in statuses]
    assert distributed._first_failure(processes) == cause


@pytest.mark.long
def test_a_mistake_that_every_process_meets_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "empty.bin").touch()
    command = [sys.executable, "-m", "caddie", "score", "empty.bin", "--gpus", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.count("caddie: ") == 1, done.stderr
