"""Process that runs a user's scorer: it knows the artifact, the user's source, and the messages that it gets.

A first process loads the artifact, which takes seconds, and never runs the scorer's code. It forks one process for each
scorer, with a socket of its own, so no scorer knows what another was shown.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import numpy as np
import psutil
import torch

from caddie.errors import CheckFailed, UserError
from caddie.pack.artifact import Artifact, load
from caddie.score import Layout, ScoredPrefix, Scorer, ScoringBatch, Step, TokenScorer, Window, load_scorer
from caddie.score.loop import plain_logits
from caddie.score.scorer import Positions, as_int
from caddie.verify import channel
from caddie.verify.audit_hook import watch_reads

Answer = tuple[bytes, bytes]
_DUMPABLE, _SUBREAPER = 4, 36  # of prctl(2)


def main(path: str, *parts: str) -> None:
    """Load the artifact at `path` with the users' files that it needs, send its SHA-256, and fork for each socket.

    Sockets arrive on standard input, each with a pipe for what its scorer prints; `main` returns when the input ends.
    Processes that a scorer leaves running are killed before the next scorer starts.
    """
    control = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # parts of an artifact may print
    _prctl(_SUBREAPER, 1)
    allow_debuggers(False)
    torch.set_num_threads(1)  # a thread pool would not survive the fork
    artifact = load(path, parts=parts)
    control.sendall(artifact.sha256.encode())
    while True:
        message, connections, _, _ = socket.recv_fds(control, 1, 2)
        if not message:
            return
        _end_children()
        connection, printed = connections
        if not os.fork():
            control.close()
            # The server's own streams would show a later scorer the flags that this one set on them.
            with open(os.devnull, "rb") as nothing:
                os.dup2(nothing.fileno(), 0)
            for output in (1, 2):
                os.dup2(printed, output)
            os.close(printed)
            allow_debuggers(True)
            with suppress(EOFError, OSError):  # the judge is done
                _serve(channel.Channel(socket.socket(fileno=connection)), artifact)
            os._exit(0)
        os.close(connection)
        os.close(printed)


def allow_debuggers(allow: bool) -> None:
    """Let other processes of this user read and change this process's memory, or, on Linux, forbid it."""
    _prctl(_DUMPABLE, int(allow))


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end_children() -> None:
    """Kill all that an earlier scorer left, orphans too."""
    with suppress(ChildProcessError):
        while True:
            for child in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    child.kill()
            os.waitpid(-1, 0)


def _serve(judge: channel.Channel, artifact: Artifact) -> None:
    """Make the scorer that the first message names, and answer questions to it until the other end closes."""
    _, payload = judge.receive()
    job = json.loads(payload)
    torch.set_num_threads(job["threads"])
    np.random.seed()  # else all forks would draw the same numbers, and two runs of a random scorer agree
    with watch_reads([artifact.path, *(file.path for file in artifact.parts)]) as touched:
        answers: dict[bytes, Callable[[bytearray], Answer]] = {}
        answers[channel.READS] = lambda _: (channel.DONE, json.dumps(touched).encode())

        def begin(_: bytearray) -> Answer:
            scorer = load_scorer(job["name"], artifact.model, artifact.tokenizer, bytes.fromhex(job["source"]))
            tokens, learns = isinstance(scorer, TokenScorer), type(scorer).update is not Scorer.update
            claims: dict[str, object] = {"tokens": tokens, "learns": learns}
            vocabulary = artifact.tokenizer.vocabulary
            if isinstance(scorer, TokenScorer):
                torch.set_num_threads(1)  # a second thread does not help with one token at a time
                answers[channel.TOKEN] = partial(_answer_token, scorer, vocabulary)
            else:
                windows = _Windows(scorer, vocabulary, artifact.tokenizer.bos)
                answers.update({channel.PLAN: windows.plan, channel.NEXT: windows.next})
                answers.update({channel.LOGITS: windows.logits, channel.UPDATE: windows.update})
                claims |= {"per_document": bool(scorer.per_document), "together": as_int(scorer.together)}
            return channel.DONE, json.dumps(claims).encode()

        answers[channel.JOB] = begin
        kind = channel.JOB
        while True:
            try:
                answer = answers[kind](payload)
            except CheckFailed as error:
                answer = channel.REFUSED, f"{job['name']}: {error}".encode()
            except UserError as error:
                answer = channel.WRONG, str(error).encode()
            except _Failed as error:
                answer = channel.WRONG, f"{job['name']}: {error}".encode()
            judge.send(*answer)
            kind, payload = judge.receive()


class _Failed(Exception):
    """A method of the user's raised an error."""


@contextmanager
def _blamed(method: str) -> Iterator[None]:
    try:
        yield
    except CheckFailed:
        raise
    except (Exception, SystemExit) as error:
        raise _Failed(f"{method} failed with {type(error).__name__}: {error}") from error


def _answer_token(scorer: TokenScorer, vocabulary: int, payload: bytearray) -> Answer:
    """Update a scorer with a token and return its prediction of the next."""
    with _blamed("update"):
        scorer.update(int.from_bytes(payload, "little"))
    with _blamed("predict"):
        logits = torch.as_tensor(scorer.predict(), dtype=torch.float64, device="cpu").detach()
    if logits.shape != (vocabulary,):
        wanted = f"{vocabulary:,} logits, one for each token"
        raise _Failed(f"predict must return {wanted}, not the shape {tuple(logits.shape)}")
    return channel.DOUBLE, logits.contiguous().numpy().tobytes()


class _Windows:
    """Answers for a `Scorer` that gets the inputs of its windows and, after each step, its targets."""

    def __init__(self, scorer: Scorer, vocabulary: int, bos: int) -> None:
        self._scorer, self._vocabulary, self._bos = scorer, vocabulary, bos
        self._steps: Iterator[Step] = iter(())
        self._prefix: _Prefix | None = None
        self._asked: list[tuple[Positions, list[int]]] = []  # inputs and slots of the batches of this step

    def plan(self, payload: bytearray) -> Answer:
        rows, count, *edges = np.frombuffer(payload, np.int64).tolist()
        layout = Layout(np.array(edges[:count]), np.array(edges[count:]))
        self._prefix = _Prefix(layout, self._bos if self._scorer.per_document else None)
        with _blamed("plan"):
            self._steps = iter(self._scorer.plan(layout, rows))
        return channel.DONE, b""

    def next(self, _: bytearray) -> Answer:
        """Return the windows and slots of the next step, int64 (windows, 4)."""
        self._asked = []  # not in `update`, which a scorer that learns nothing never gets
        with _blamed("plan"):
            step = next(self._steps, None)
            if step is None:
                return channel.END, b""
            pairs = zip(step.windows, step.slots, strict=True)
            numbers = [[window.start, window.first, window.end, slot] for window, slot in pairs]
            return channel.DONE, np.array(numbers, np.int64).reshape(-1, 4).tobytes()

    def logits(self, payload: bytearray) -> Answer:
        rows, last, *rest = np.frombuffer(payload, np.int64).tolist()
        slots, inputs = rest[:rows], np.array(rest[rows:], np.int64).reshape(rows, -1)
        self._asked.append((inputs.copy(), slots))
        with _blamed("logits"):
            answer = self._scorer.logits(torch.from_numpy(inputs), slots, last)
        logits = plain_logits(answer, (rows, last, self._vocabulary), torch.device("cpu"))
        if logits.dtype == torch.float64:
            return channel.DOUBLE, logits.contiguous().numpy().tobytes()
        return channel.SINGLE, logits.float().contiguous().numpy().tobytes()

    def update(self, payload: bytearray) -> Answer:
        """Give the scorer the batches of the step and their targets."""
        numbers, batches = np.frombuffer(payload, np.int64), []
        assert self._prefix is not None
        for inputs, slots in self._asked:
            rows, cut = len(slots), 3 * len(slots)
            windows = [Window(*edges) for edges in numbers[:cut].reshape(rows, 3).tolist()]
            scored = windows[0].end - windows[0].first
            targets = numbers[cut : cut + rows * scored].reshape(rows, scored)
            numbers = numbers[cut + rows * scored :]
            batches.append(ScoringBatch(windows, slots, inputs, windows[0].first - windows[0].start))
            self._prefix.reveal(windows, inputs, targets)
        with _blamed("update"):
            self._scorer.update(batches, self._prefix)
        return channel.DONE, b""


class _Prefix(ScoredPrefix):
    """The scored part of a text whose rest is not in this process."""

    def __init__(self, layout: Layout, bos: int | None) -> None:
        super().__init__(np.zeros(1024, np.int64), layout, layout.begins.copy())
        if bos is not None:  # documents are known to begin with it
            self._reserve(int(layout.ends[-1]))
            self._tokens[layout.begins] = bos

    def reveal(self, windows: Sequence[Window], inputs: Positions, targets: Positions) -> None:
        """Add scored windows of one shape."""
        self._reserve(max(window.end for window in windows))
        for window, row, following in zip(windows, inputs, targets, strict=True):
            self._tokens[window.start : window.end] = row
            self._tokens[window.first + 1 : window.end + 1] = following
            self._done[self.stretch(window.start)] = window.end

    def _reserve(self, end: int) -> None:
        if (more := end + 1 - len(self._tokens)) > 0:
            self._tokens = np.append(self._tokens, np.zeros(max(more, len(self._tokens)), np.int64))
