"""The process pool: the same bytes as by one process, whatever becomes of the others."""

import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from multiprocessing.connection import Pipe
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from caddie.errors import UserError
from caddie.pack.codecs import Stored
from caddie.pack.coding import ArrayCodec, DecodeJob, EncodeJob, Packed, ProcessPool, Smallest, decode, process_pool
from caddie.pack.coding.array_codec import Array

CHANCE = np.random.default_rng(0)
ARRAYS: list[Array] = [
    np.rint(CHANCE.laplace(size=(30, 20)) * 3).astype("<i2"),
    np.array(3.5, "<f4"),
    np.arange(24, dtype="<i4").reshape(4, 6).T,
    np.zeros((0, 5), np.int8),
    np.rint(CHANCE.normal(size=(70, 60)) * 9).astype(np.int8),  # too large for all that `Smallest` can try
    CHANCE.standard_normal(300).astype("<f2"),
]
JOBS = [EncodeJob(array) for array in ARRAYS]
STREAMS = [Smallest().encode(array) for array in ARRAYS]
CODED = [DecodeJob(stream, array.dtype, array.shape) for stream, array in zip(STREAMS, ARRAYS, strict=True)]


@pytest.fixture(autouse=True)
def worthwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_pool, "_WORTH", 1)


@pytest.fixture(scope="module")
def two() -> Iterator[ProcessPool]:
    """Two processes, once they have been started."""
    with ProcessPool(2) as pool:
        yield pool


@pytest.fixture
def idle_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is coded in this process."""
    monkeypatch.setattr(Smallest, "encode", lambda *given: pytest.fail("encoded here"))
    monkeypatch.setattr(process_pool, "decode", lambda *given: pytest.fail("decoded here"))


@pytest.mark.long
@pytest.mark.usefixtures("idle_here")
def test_processes_give_the_same(two: ProcessPool) -> None:
    assert two.encode(Smallest(), JOBS) == STREAMS
    for array, found in zip(ARRAYS, two.decode(CODED), strict=True):
        assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
        assert found.flags.writeable


@pytest.mark.long
def test_an_array_is_coded_like_the_one_named(two: ProcessPool) -> None:
    first, other = ARRAYS[4], ARRAYS[4][:, ::-1].copy()
    like = STREAMS[4]
    found = two.encode(Smallest(), [EncodeJob(other, like), EncodeJob(first, like)])
    assert found == [Smallest().encode(other, like), Smallest().encode(first, like)]


@pytest.mark.long
@pytest.mark.usefixtures("idle_here")
def test_errors_are_those_of_one_process(two: ProcessPool) -> None:
    wrong = DecodeJob(b"\xff", ARRAYS[0].dtype, ARRAYS[0].shape)
    with pytest.raises(UserError) as alone:
        decode(*wrong)
    with pytest.raises(UserError) as found:
        list(two.decode([*CODED, wrong]))
    assert str(found.value) == str(alone.value)
    with pytest.raises(UserError, match="cannot be coded"):
        two.encode(Smallest(), [*JOBS, EncodeJob(np.zeros(3, complex))])


@pytest.mark.usefixtures("idle_here")
def test_an_error_leaves_the_processes_to_the_next(two: ProcessPool) -> None:
    with pytest.raises(UserError):
        list(two.decode([DecodeJob(b"", np.dtype(np.int8), (3,)), *CODED]))
    assert two.encode(Smallest(), JOBS) == STREAMS


def test_few_are_coded_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", lambda *given, **options: pytest.fail("a process is started"))
    for one in (ProcessPool(), ProcessPool(1)):
        assert one.processes == 1
        assert one.encode(Smallest(), JOBS) == STREAMS
    assert ProcessPool(2).encode(Smallest(), JOBS[:1]) == STREAMS[:1]
    # Whoever is started could take over all but the largest, or half.
    saved = sum(job.elements for job in JOBS[1:4])
    monkeypatch.setattr(process_pool, "_WORTH", saved + 1)
    assert ProcessPool(2).encode(Smallest(), JOBS[:4]) == STREAMS[:4]
    monkeypatch.setattr(process_pool, "_WORTH", saved)
    with pytest.raises(pytest.fail.Exception, match="a process is started"):
        ProcessPool(2).encode(Smallest(), JOBS[:4])


@pytest.mark.usefixtures("idle_here")
def test_an_interrupt_leaves_the_processes_to_the_one_that_started_them(two: ProcessPool) -> None:
    assert two.encode(Smallest(), JOBS) == STREAMS  # so that both have begun to serve
    for process in two._started:
        process.send_signal(signal.SIGINT)
    assert [array.tobytes() for array in two.decode(CODED)] == [array.tobytes() for array in ARRAYS]
    assert [process.poll() for process in two._started] == [None, None]


def test_a_closed_pool_has_ended_its_processes_and_may_be_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with ProcessPool(2) as pool:
        process, (near_end, far_end) = subprocess.Popen(["sleep", "60"]), Pipe()
        pool._started.append(process)
        pool._idle.put(near_end)
    assert process.returncode == -signal.SIGKILL
    assert near_end.closed
    far_end.close()
    monkeypatch.setattr(process_pool, "_WORTH", 1 << 40)
    assert pool.encode(Smallest(), JOBS) == STREAMS


def test_the_work_of_an_array_without_and_with_a_similar_one() -> None:
    """Trials go through a small array eight times, through 2^18 elements of a large one and three times through all."""
    small, large = np.zeros(10, np.int8), np.broadcast_to(np.int8(0), (1 << 10, 1 << 12))
    assert [EncodeJob(small).elements, EncodeJob(small, b"like").elements] == [90, 10]
    assert [EncodeJob(large).elements, EncodeJob(large, b"like").elements] == [(4 << 22) + (1 << 18), 1 << 22]
    assert DecodeJob(b"", np.dtype(np.int8), (3, 50_000, 70_000)).elements == 10_500_000_000


class Unheard(ArrayCodec):
    """A codec that no other process knows."""

    def encode(self, array: Array, like: bytes = b"") -> bytes:
        return Packed(codec=Stored()).encode(array)


@pytest.mark.long
def test_what_only_this_process_knows_is_done_here() -> None:
    with ProcessPool(2) as pool:
        assert pool.encode(Unheard(), JOBS) == [Unheard().encode(array) for array in ARRAYS]


def test_a_job_whose_process_ends_is_done_here() -> None:
    def ends(connection: Any, job: int) -> int:
        raise EOFError

    pool = ProcessPool(2)
    pool._started, pool._idle = [Any], SimpleQueue()  # type: ignore[list-item]
    pool._idle.put(Any)  # type: ignore[arg-type]
    jobs = [DecodeJob(b"", np.dtype(np.int8), (size,)) for size in (3, 1, 2)]
    assert list(pool._map(jobs, ends, lambda job: job.elements)) == [3, 1, 2]


def test_an_error_ends_what_is_done_beside_it() -> None:
    done = []

    def fails(connection: Any, job: DecodeJob) -> None:
        if job.elements == 99:
            raise UserError("no")
        time.sleep(0.02)
        done.append(job)

    pool = ProcessPool(2)
    pool._started = [Any, Any]  # type: ignore[list-item]
    for connection in pool._started:
        pool._idle.put(connection)  # type: ignore[arg-type]
    jobs = [DecodeJob(b"", np.dtype(np.int8), (99 - size,)) for size in range(40)]
    with pytest.raises(UserError, match="no"):
        list(pool._map(jobs, fails, lambda job: None))
    begun = len(done)
    assert begun < len(jobs) - 1, "those that had not begun are cancelled"
    time.sleep(0.1)
    assert len(done) == begun, "and those that had begun are waited for"


@pytest.mark.long
def test_processes_that_end_are_done_without() -> None:
    with ProcessPool(2) as pool:
        assert pool.encode(Smallest(), JOBS) == STREAMS
        started = list(pool._started)
        assert len(started) == 2
        started[0].kill()
        started[0].wait()
        assert pool.encode(Smallest(), JOBS) == STREAMS
        started[1].kill()
        assert [array.tobytes() for array in pool.decode(CODED)] == [array.tobytes() for array in ARRAYS]
    assert all(process.returncode is not None for process in started)


def test_where_no_process_can_be_started_one_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with ProcessPool(2) as pool:
        assert pool.encode(Smallest(), JOBS) == STREAMS


def test_a_process_finds_the_package_where_this_one_did(monkeypatch: pytest.MonkeyPatch) -> None:
    environments = []

    def refuse(command: list[str], **options: Any) -> None:
        environments.append(options["env"])
        raise OSError

    monkeypatch.setattr("subprocess.Popen", refuse)
    with ProcessPool(2) as pool:
        assert pool.encode(Smallest(), JOBS) == STREAMS
    folders = [*environments[0]["PYTHONPATH"].split(os.pathsep), sysconfig.get_path("purelib")]
    files = [Path(folder, "caddie", "pack", "coding", "process_pool.py") for folder in folders]
    assert Path(process_pool.__file__) in files
    assert environments[0]["PYTHONSAFEPATH"] == "1"


USES = """
import numpy as np
from caddie.pack.coding import ProcessPool, EncodeJob, Smallest, process_pool

process_pool._WORTH = 1
pool = ProcessPool(2)
pool.encode(Smallest(), [EncodeJob(np.zeros((8, 8), np.int8))] * 2)
print(*(process.pid for process in pool._started), flush=True)
pool.encode(Smallest(), [EncodeJob(np.random.default_rng(0).integers(-90, 90, (2000, 2000)))] * 8)
"""


@pytest.mark.long
def test_no_process_outlives_the_one_that_started_it() -> None:
    with subprocess.Popen([sys.executable, "-c", USES], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        pids = [int(word) for word in started.stdout.readline().split()]
        assert len(pids) == 2
        for pid in pids:
            os.kill(pid, 0)
        started.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(_lives(pid) for pid in pids):
        assert time.monotonic() < deadline, "still there"
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    """True unless the process has ended; whoever adopts it may not have waited for it yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"
