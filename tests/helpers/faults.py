"""Commands in processes of their own that meet a fault: they are killed, sent a signal, or refused what they write."""

import gzip
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, reduce
from importlib import import_module
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from conftest import TINY, probe_nothing, score_here
from processes import CONTEXT
from safetensors import safe_open

PHASES = {
    "caddie.run.run.open_corpus": "prepare",
    "caddie.run.resolve_corpus.open_corpus": "prepare",
    "caddie.run.run.check_settings_matter": "check",
    "caddie.train.loop.warm_up": "warm-up",
    "caddie.train.loop.TimedRun.to_the_end": "train",
    "caddie.run.run.calibrate_recipe": "calibrate",
    "caddie.run.stages.calibrate_recipe": "calibrate",
    "caddie.run.run.score_trained": "score weights",
    "caddie.run.run.pack": "pack",
    "caddie.pack.compress.pack": "pack",
    "caddie.run.run.score_in_new_process": "score file",
    "caddie.run.run.verify": "verify",
    "caddie.run.run.describe_run": "result",
    "caddie.inference.text_codec.compress": "compress",
    "caddie.inference.sample.sample": "sample",
}
"""Function that begins a phase, to the phase's name."""
SMALL = (*(setting for setting in TINY if setting != "train.steps=2"), "train.checkpoint_seconds=0.001")
"""Settings of a recipe that is trained, packed and scored in a second."""


@dataclass(frozen=True)
class Ended:
    """Outcome of a command: exit status (negative after a signal), both outputs, seconds since its start."""

    status: int
    out: str
    err: str
    seconds: float


class Command:
    """`caddie ARGUMENTS` in a process of its own, begun in a folder, that tells its phases.

    A run scores its artifact in this process and probes no scorer, which saves starting two others.
    `prepare` is a function of a module that is called in the process first.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: object,
        prepare: Callable[..., object] | None = None,
        given: Sequence[object] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        pipes = [CONTEXT.Pipe(duplex=False) for _ in range(3)]  # a pipe has room even where a disk is full
        (self._told, *self._printed), ends = zip(*pipes, strict=True)
        self.phases: list[tuple[str, float]] = []
        """Phases begun, and when, in seconds since the first."""
        words = [*map(str, arguments)]
        self.process = CONTEXT.Process(target=_work, args=(folder, words, ends, prepare, given))
        self.process.start()
        self._began = time.monotonic()
        for one in ends:
            one.close()

    def wait_for(self, phase: str) -> None:
        """Wait until a phase begins; if there is none of this name, until the command ends."""
        while self._listen(None) not in (phase, None):
            pass

    def wait(self, seconds: float) -> None:
        """Wait that long, or until the command ends."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self._listen(left) is not None:
            pass

    @property
    def phase(self) -> str:
        """The last phase that has begun."""
        return self.phases[-1][0] if self.phases else "begin"

    def signal(self, number: int) -> None:
        """Send a signal unless the command has ended."""
        if self.process.is_alive() and self.process.pid:
            with suppress(ProcessLookupError):  # it may end meanwhile
                os.kill(self.process.pid, number)

    def end(self, seconds: float = 120.0) -> Ended:
        """Wait for the command and return what it left."""
        while self._listen(seconds) is not None:
            pass
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError(f"still in {self.phase} after {seconds} s")
        out, err = (os.read(one.fileno(), 1 << 20).decode() for one in self._printed)
        return Ended(self.process.exitcode, out, err, time.monotonic() - self._began)

    def _listen(self, seconds: float | None) -> str | None:
        """Take the next phase, or "" if none comes in time, or None if the command has ended."""
        try:
            if not self._told.poll(seconds):
                return ""
            phase = str(self._told.recv())
        except (EOFError, OSError):
            return None
        self.phases.append((phase, time.monotonic() - self._began))
        return phase


def _work(
    folder: Path,
    arguments: list[str],
    ends: tuple[Connection, Connection, Connection],
    prepare: Callable[..., object] | None,
    given: Sequence[object],
) -> None:
    tell, *printed = ends
    for number, one in zip((1, 2), printed, strict=True):
        os.dup2(one.fileno(), number)
        one.close()
    sys.stdout, sys.stderr = (open(number, "w", buffering=1) for number in (1, 2))  # noqa: SIM115
    os.chdir(folder)
    patch = pytest.MonkeyPatch()
    score_here(patch)
    probe_nothing(patch)
    for place, phase in PHASES.items():
        _announce(patch, place, phase, tell)
    if prepare is not None:
        prepare(folder, *given)
    sys.argv = ["caddie", *arguments]
    from caddie.cli import main

    main()


def _announce(patch: pytest.MonkeyPatch, place: str, phase: str, tell: Connection) -> None:
    """Let a function send its phase when it is called."""
    names = place.split(".")
    owner: Any = reduce(getattr, names[3:-1], import_module(".".join(names[:3])))
    before = getattr(owner, names[-1])

    def announced(*arguments: Any, **named: Any) -> Any:
        tell.send(phase)
        return before(*arguments, **named)

    patch.setattr(owner, names[-1], announced)


def durations(command: Command, seconds: float) -> dict[str, float]:
    """Return the seconds of each phase of an undisturbed command that took `seconds` in all."""
    begins = [*command.phases, ("", seconds)]
    found: dict[str, float] = {}
    for (phase, begin), (_, end) in pairwise(begins):
        found[phase] = found.get(phase, 0.0) + end - begin
    return found


class Writes:
    """Counts what a process writes below a folder: opened for writing, made, renamed."""

    def __init__(self, folder: Path, first: int | None = None, refuse: Callable[[str], None] | None = None) -> None:
        """Call `refuse` with the path at write number `first`, from 1, and at all that follow."""
        self.folder, self.first, self.refuse = str(folder.resolve()) + "/", first, refuse
        self.paths: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            changes = arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        else:
            changes = event in ("os.rename", "os.mkdir", "os.truncate")
        if not changes or not isinstance(arguments[0], (str, os.PathLike)):
            return
        path = os.path.abspath(arguments[0])
        if not path.startswith(self.folder):
            return
        self.paths.append(f"{event} {path}")
        if self.first is not None and self.refuse is not None and len(self.paths) >= self.first:
            self.refuse(path)


def count_writes(folder: Path, note: Path) -> None:
    """Write the paths that this process writes to into `note` when it ends."""
    import atexit
    import multiprocessing.util

    writes = Writes(folder)
    save = lambda: note.write_text("\n".join(writes.paths))  # noqa: E731
    multiprocessing.util.Finalize(None, save, exitpriority=0)
    atexit.register(save)


def refuse_writes(folder: Path, first: int, code: int) -> None:
    """Let every write below `folder` fail with an error number, from write number `first` on."""
    import safetensors.torch

    import caddie.train.checkpoint as checkpoint

    def refuse(path: str) -> None:
        raise OSError(code, os.strerror(code), path)

    writes = Writes(folder, first, refuse)
    before = safetensors.torch.save_file

    def save_file(tensors: Any, path: Path, metadata: Any) -> None:  # it is written in another language, unheard
        try:
            writes._hook("open", (path, "w", os.O_WRONLY))
        except OSError as error:
            raise checkpoint.SafetensorError(f"Error while serializing: I/O error: {error.strerror}") from None
        before(tensors, path, metadata)

    checkpoint.save_file = save_file  # type: ignore[assignment]


def fill_disk(folder: Path, first: int) -> None:
    """Let every write of bytes fail from write number `first` on, where only the system refuses them."""

    def fill(path: str) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

    Writes(folder, first, fill)


def with_jobs_here(folder: Path, prepare: Callable[..., object], *given: object) -> None:
    """Let a study do its jobs in this process, whose writes are looked at, as `caddie trial` does them in another."""
    from contextlib import redirect_stderr, redirect_stdout, suppress
    from io import StringIO

    from caddie.cli.exits import end
    from caddie.lab.executors import Local, why_it_died
    from caddie.lab.job import run_job
    from caddie.report.run_files import OUTPUT

    def run(self: Local, jobs: Sequence[Path]) -> Iterator[tuple[Path, str | None]]:
        for job in jobs:
            said = StringIO()
            with redirect_stdout(said), redirect_stderr(said):
                try:
                    end(partial(run_job, job))
                except SystemExit as ended:
                    status = ended.code
            with suppress(OSError), (job.parent / OUTPUT).open("a") as output:  # a process that cannot write it goes on
                output.write(said.getvalue())
            yield job, why_it_died(int(status or 0))

    Local.run = run  # type: ignore[method-assign]
    prepare(folder, *given)


def tensors(path: Path) -> dict[str, bytes]:
    """Return the bits of each tensor of a file; the order of its metadata is another each time."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name).numpy().tobytes() for name in file.keys()}  # noqa: SIM118


def check_files(folder: Path, temporary: bool = False) -> None:
    """Read every file below a folder by its reader; none may be half written. Some may be `temporary`."""
    for path in sorted(folder.rglob("*")):
        inside = any(part.startswith(".caddie-") for part in path.relative_to(folder).parts)
        assert temporary or not inside, f"{path} was left"
        if path.is_file() and not inside and path.parent.name != "__pycache__":
            _read(path)


def _read(path: Path) -> None:
    from caddie.data.shards import open_shard
    from caddie.pack import artifact

    if path.suffix == ".json":
        json.loads(path.read_text())
    elif path.suffix == ".jsonl":
        whole = path.read_text().split("\n")[:-1]  # what follows the last line end is skipped by every reader
        assert all(isinstance(json.loads(line), dict) for line in whole), path
    elif path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            assert all(file.get_tensor(name).numel() >= 0 for name in file.keys())  # noqa: SIM118
    elif path.suffix == ".caddie":
        artifact.load(path)
    elif path.suffix == ".bin" and path.name != "tokenizer.bin":
        open_shard(path)
    elif path.suffix == ".npz":
        with np.load(path) as arrays:
            assert all(arrays[name].size >= 0 for name in arrays)
    elif path.suffix == ".zst":
        zstandard.ZstdDecompressor().stream_reader(path.read_bytes()).read()
    elif path.suffix == ".gz":
        gzip.decompress(path.read_bytes())
    elif path.suffix == ".html":
        assert path.read_text().rstrip().endswith("</html>"), path
    else:
        known = path.name in (".lock", "output.txt", "tokenizer.bin", "study.py", "study.csv", "command.txt")
        assert known or path.suffix in (".txt", ".cz", ".lock", ".md", ".csv", ".svg", ".model"), f"what is {path}?"


def kill_at(command: Command, phase: str, seconds: float) -> str:
    """Kill a command that long after a phase has begun. Return the phase in which it was."""
    command.wait_for(phase)
    command.wait(seconds)
    command.signal(signal.SIGKILL)
    return command.phase
