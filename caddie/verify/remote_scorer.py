"""User's scorer in a sandboxed process of its own, which gets windows or tokens step by step and returns logits.

The judge holds the text, the targets and the loss. So the scorer gains nothing from stack frames, garbage collector,
patched modules, files, clocks or the length of the text.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from caddie.config.userfile import read_source, split_name
from caddie.errors import CheckFailed, UserError
from caddie.files import absolute
from caddie.model import Cache
from caddie.pack.artifact import Artifact
from caddie.report.tables import one_line
from caddie.score import Layout, ScoredPrefix, Scorer, ScoringBatch, Step, Window
from caddie.verify import channel
from caddie.verify.sandbox import open_sandbox
from caddie.verify.scorer_process import allow_debuggers

MEMORY_BYTES, ANSWER_SECONDS = 8 << 30, 300.0
"""Limits of a scorer's process: its resident memory, and the time for one answer."""
LONGEST_WINDOW, LONGEST_CONTEXTS = 1024, 4
"""Longest window of a user's scorer: this many tokens or, if more, this many times the artifact's sequence length."""
OPEN_END = 1 << 40
"""End of a text whose length a scorer is not told."""
_TEXT_BYTES = 1 << 16  # of an answer in words
_CHECK_SECONDS = 1.0
_TAIL_LINES = 20
_COMMAND = "import sys; from caddie.verify.scorer_process import main; main(*sys.argv[1:])"


class ScorerServer:
    """A process in a sandbox that loads an artifact and forks a process for each scorer; it ends with this object."""

    def __init__(self, artifact: Path, sha256: str, parts: tuple[Path, ...] = ()) -> None:
        paths, stack = [artifact, *parts], ExitStack()
        self._control, theirs = socket.socketpair()
        stack.callback(self._control.close)
        with theirs:
            sandbox = open_sandbox(_COMMAND, *paths, readable=paths, stdin=theirs.fileno())
            self.sandboxed = stack.enter_context(sandbox)
        self.close = weakref.finalize(self, stack.close)
        """End all its processes."""
        if not self.sandboxed.isolated:  # then a scorer may see this process
            allow_debuggers(False)
        errors, self._tail = self.sandboxed.process.stderr, deque[bytes](maxlen=_TAIL_LINES)
        assert errors is not None
        threading.Thread(target=_drain, args=(os.dup(errors.fileno()), self._tail), daemon=True).start()
        if (loaded := self._control.recv(64).decode()) != sha256:
            why = "it has changed" if loaded else self.last_words()
            self.close()
            raise UserError(f"{artifact} could not be loaded in a sandbox: {why}")

    def connect(self) -> socket.socket:
        """Return a socket to a new process, which knows the artifact alone and shares no pipe with an earlier one."""
        ours, theirs = socket.socketpair()
        reading, writing = os.pipe()
        threading.Thread(target=_drain, args=(reading, self._tail), daemon=True).start()
        with theirs, open(writing, "wb"):
            socket.send_fds(self._control, [b"+"], [theirs.fileno(), writing])
        return ours

    def last_words(self) -> str:
        """Return the last line that its processes wrote."""
        time.sleep(0.1)  # for the thread that reads them
        lines = [line for line in self._tail if line.strip()]
        return one_line(lines[-1].decode(errors="replace")) if lines else "without a message"


def _drain(number: int, tail: deque[bytes]) -> None:
    with open(number, "rb") as pipe:
        while line := pipe.readline(4096):
            tail.append(line)


def scorer_server(artifact: Artifact, new: bool = False) -> ScorerServer:
    """Return a running server of an artifact; the last artifact's server is kept, as it takes seconds to start."""
    given = absolute(artifact.path), artifact.sha256, tuple(absolute(file.path) for file in artifact.parts)
    if not new and _server(*given).sandboxed.process.poll() is not None:
        _server.cache_clear()
    return (ScorerServer if new else _server)(*given)


_server = lru_cache(maxsize=1)(ScorerServer)


def open_scorer(artifact: Artifact, name: str, *, own_sandbox: bool = False) -> RemoteScorer:
    """Return the scorer `FILE.py:NAME` in a new process, made with the artifact's model and tokenizer.

    With `own_sandbox` that process is alone in a new sandbox, where no earlier scorer can have left anything. Raises
    `UserError` if it cannot be made. It runs on the CPU with as many threads as PyTorch has here.
    """
    job = {"name": name, "source": read_source(split_name(name)[0]).hex(), "threads": torch.get_num_threads()}
    server = scorer_server(artifact, own_sandbox)
    longest = max(LONGEST_WINDOW, LONGEST_CONTEXTS * artifact.scoring.sequence_length)
    given = job, artifact.tokenizer.vocabulary, longest
    try:
        return _begin(_Link(server, name, own_sandbox), *given)
    except (_Ended, OSError):  # an earlier scorer may have killed the server
        server.close()
        return _begin(_Link(scorer_server(artifact, own_sandbox), name, own_sandbox), *given)


def _begin(link: _Link, job: dict[str, Any], vocabulary: int, longest: int) -> RemoteScorer:
    with ExitStack() as stack:
        stack.callback(link.close)
        answer = link.ask(channel.JOB, json.dumps(job).encode(), _TEXT_BYTES)[1]
        try:
            claims: dict[str, Any] = dict(json.loads(answer))
            kind = RemoteTokens if claims["tokens"] else RemoteLearner if claims["learns"] else RemoteScorer
            per_document, together = bool(claims.get("per_document")), max(0, int(claims.get("together", 0)))
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):  # 1e400 is infinite
            raise link.malformed("what it claims") from None
        stack.pop_all()
    return kind(link, vocabulary, per_document, together, longest)


class _Ended(UserError):
    """The process has ended."""


class _Link:
    """Questions to a scorer's process and their answers, within its limits; errors begin with the scorer's name."""

    def __init__(self, server: ScorerServer, name: str, own_sandbox: bool) -> None:
        self.server, self.name, self._own_sandbox = server, name, own_sandbox
        self._channel = channel.Channel(server.connect(), self._check)
        self._until = self._next_check = 0.0

    def ask(self, kind: bytes, payload: bytes, most: int) -> tuple[bytes, bytearray]:
        """Return the answer to a question, at most `most` bytes; raise it if it is an error."""
        now = time.monotonic()
        self._until = now + ANSWER_SECONDS
        try:
            if now > self._next_check:
                self._check()
            self._channel.send(kind, payload)
            answer, data = self._channel.receive(max(most, _TEXT_BYTES))
        except (EOFError, OSError):
            raise _Ended(f"{self.name}: its process ended: {self.server.last_words()}") from None
        except UserError:  # it was stopped at a limit
            raise
        except ValueError as error:
            raise self.malformed(str(error)) from None
        if answer in (channel.WRONG, channel.REFUSED):
            raise (UserError if answer == channel.WRONG else CheckFailed)(one_line(data.decode(errors="replace")))
        if len(data) > most:
            raise self.malformed(f"{len(data):,} bytes, at most {most:,} were due")
        return answer, data

    def malformed(self, what: str) -> UserError:
        """Return the error for a malformed answer."""
        return UserError(f"{self.name}: its process sent a malformed answer: {what}")

    def close(self) -> None:
        """Close the socket, which ends the process; end its sandbox too if no other scorer is in it."""
        self._channel.close()
        if self._own_sandbox:
            self.server.close()

    def _check(self) -> None:
        now = time.monotonic()
        self._next_check = now + _CHECK_SECONDS
        limit = ""
        if self.server.sandboxed.resident_bytes() > MEMORY_BYTES:
            limit = f"took more than {MEMORY_BYTES >> 20:,} MiB of memory"
        elif now > self._until:
            limit = f"gave no answer for {ANSWER_SECONDS:,.0f} seconds"
        if limit:
            self.server.close()
            raise UserError(f"{self.name} was stopped because it {limit}")


class RemoteScorer(Scorer):
    """A user's `Scorer` that learns nothing, in its own process; only the claims that are kept here are trusted."""

    def __init__(self, link: _Link, vocabulary: int, per_document: bool, together: int, longest: int) -> None:
        self._link, self._vocabulary, self._longest = link, vocabulary, longest
        self.per_document, self.together = per_document, together

    def plan(self, layout: Layout, rows: int) -> Iterator[Step]:
        """Yield the scorer's steps; `CheckFailed` for a window that is too long.

        A scorer that does not score documents by themselves learns where the text ends only from its last window,
        which is cut there.
        """
        begins, ends = layout.begins, layout.ends
        shown = ends if self.per_document else np.array([OPEN_END])
        self._link.ask(channel.PLAN, np.concatenate([[rows, len(begins)], begins, shown]).tobytes(), 0)
        while True:
            kind, data = self._link.ask(channel.NEXT, b"", max(_TEXT_BYTES, 32 * len(begins)))
            if kind == channel.END:
                return
            if len(data) % 32:
                raise self._link.malformed(f"{len(data):,} bytes in place of rows of 4 numbers")
            numbers = np.frombuffer(data, np.int64).reshape(-1, 4)
            for start, _, end, _ in numbers.tolist():
                if not 0 <= start <= end <= start + self._longest:
                    given = f"a window from {start:,} to {end:,}, of which the longest has {self._longest:,} tokens"
                    raise CheckFailed(f"{self._link.name}: the scorer's plan has {given}")
            if not self.per_document:
                if (numbers[:, 1] >= ends[0]).any():
                    return
                numbers[:, 2] = np.minimum(numbers[:, 2], ends[0])
            yield Step([Window(*edges) for edges in numbers[:, :3].tolist()], numbers[:, 3].tolist())

    def logits(self, inputs: Tensor, slots: Sequence[int], last: int, cache: Cache | None = None) -> Tensor:
        """Return the scorer's logits, float32 or float64, on the device of the inputs."""
        shape = (len(inputs), last, self._vocabulary)
        numbers = np.concatenate([np.array([len(inputs), last, *slots]), inputs.cpu().numpy().ravel()])
        return self._logits(channel.LOGITS, numbers.tobytes(), shape).to(inputs.device)

    def _logits(self, kind: bytes, payload: bytes, shape: tuple[int, ...]) -> Tensor:
        count = math.prod(shape)
        answer, data = self._link.ask(kind, payload, 8 * count)
        dtype = {channel.SINGLE: torch.float32, channel.DOUBLE: torch.float64}.get(answer)
        if dtype is None or len(data) != count * dtype.itemsize:
            raise self._link.malformed(f"{len(data):,} bytes in place of {count:,} logits")
        return torch.frombuffer(data, dtype=dtype).view(shape)

    def reads(self) -> list[str]:
        """Return phrases for what the process used beside the artifact and Python's own files; [] if it has ended."""
        with suppress(UserError, CheckFailed, ValueError, TypeError, RecursionError):
            phrases = json.loads(self._link.ask(channel.READS, b"", _TEXT_BYTES)[1])
            return [one_line(str(phrase)) for phrase in phrases]
        return []

    def close(self) -> None:
        """End the scorer's process."""
        self._link.close()


class RemoteLearner(RemoteScorer):
    """A user's `Scorer` that learns."""

    def update(self, batches: Sequence[ScoringBatch], prefix: ScoredPrefix) -> None:
        """Send the windows and targets of a step, now that they have been scored."""
        parts = [
            np.concatenate([np.array(batch.windows, np.int64).ravel(), prefix.targets(batch.windows).ravel()])
            for batch in batches
        ]
        self._link.ask(channel.UPDATE, np.concatenate(parts).tobytes() if parts else b"", 0)


class RemoteTokens(RemoteScorer):
    """A user's `TokenScorer`, which is sent token after token."""

    def plan(self, layout: Layout, rows: int) -> Iterator[Step]:
        """Yield one prediction after the other."""
        for begin, end in layout.edges:
            for position in range(begin, end):
                yield Step([Window(position, position, position + 1)], [0])

    def logits(self, inputs: Tensor, slots: Sequence[int], last: int, cache: Cache | None = None) -> Tensor:
        """Send the previous token, which has been scored, and return the logits of the next."""
        token = int(inputs[0, 0]).to_bytes(8, "little")
        logits = self._logits(channel.TOKEN, token, (1, 1, self._vocabulary))
        if not logits.logsumexp(-1).isfinite():
            raise UserError(f"{self._link.name}: predict must return finite logits, or minus infinity for some tokens")
        return logits.to(inputs.device)

    def update(self, batches: Sequence[ScoringBatch], prefix: ScoredPrefix) -> None:
        """Do nothing: the token goes with the next question. The last token of the text is never sent."""
