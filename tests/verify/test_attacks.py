"""Scorers that attack their judge: in its own process they win, and in a process of their own they gain nothing."""

import copy
import gc
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from caddie.errors import CheckFailed
from caddie.model import Cache
from caddie.pack.artifact import Artifact, load
from caddie.score import Layout, Score, Scorer, Scoring, Step, Text, TokenScorer, Window, load_scorer, score
from caddie.verify.remote_scorer import open_scorer

COUNT = 18
"""Tokens of the text."""
HONEST = (COUNT - 1) * math.log(257)
"""Nats of the text when all tokens are equally likely, which is all that the scorers here know."""

TOKENS = """
import ctypes, gc, os, sys, time
import numpy as np, torch
from caddie.score import TokenScorer

class Cheat(TokenScorer):
    def __init__(self, model, tokenizer):
        self.seen, self.start = [], time.perf_counter_ns()

    def update(self, token):
        self.seen.append(token)

    def predict(self):
        logits = np.zeros(257)
        for candidate in self.candidates():
            following = self.following(candidate)
            if following is not None:
                logits[following] += 20.0
                break
        return logits

    def following(self, candidate):
        # What comes after the last tokens seen, in an array of tokens that goes on.
        try:
            numbers = np.asarray(candidate).ravel()
            if numbers.dtype.kind not in "iu" or not len(self.seen) < len(numbers) < 10000:
                return None
            if len(self.seen) < 3:  # too little to know the text by
                return None
            places = np.flatnonzero(numbers[:-1] == self.seen[-1])
            for place in places.tolist():
                if place + 1 >= len(self.seen) and numbers[place + 1 - len(self.seen):place + 1].tolist() == self.seen:
                    return int(numbers[place + 1])
        except Exception:
            return None
"""
WAYS = {
    "frames": """
    def candidates(self):
        frame = sys._getframe()
        while frame is not None:
            for value in frame.f_locals.values():
                yield value
                yield from vars(value).values() if hasattr(value, "__dict__") else ()
            frame = frame.f_back
""",
    "objects": """
    def candidates(self):
        for found in gc.get_objects():
            if isinstance(found, dict):
                yield from (value for value in list(found.values()) if isinstance(value, np.ndarray))
            elif (type(found).__module__, type(found).__name__) == ("caddie.score.scorer", "Stream"):
                yield found._tokens
""",
    "files and memory": """
    def candidates(self):
        import glob
        for name in [*glob.glob("/proc/*/fd/*"), *glob.glob("/proc/*/cwd/*"), *glob.glob("/proc/*/root/" + "tmp/*")]:
            try:
                if os.path.isfile(name):
                    yield np.fromfile(name, np.uint16)
            except OSError:
                continue
        for ids in glob.glob("/proc/[0-9]*"):
            try:
                with open(ids + "/mem", "rb") as memory:
                    memory.read(1)
            except OSError:
                continue
        yield from ()
""",
    "the clock": """
    def candidates(self):
        yield [time.perf_counter_ns() - self.start, time.time_ns()]
""",
}
"""Ways to look for the text."""
PATCHES = {
    "cross_entropy": """
        import torch.nn.functional as F
        F.cross_entropy = lambda logits, targets, **named: torch.zeros(len(targets))
""",
    "the loop": """
        import caddie.score.loop as loop
        loop.nats = lambda logits, targets: torch.zeros(targets.shape)
""",
    "numpy": """
        np.stack = lambda arrays, *given, stack=np.stack: stack(arrays, *given) * 0
""",
}
"""Ways to change what the judge does."""


class InProcess(Scorer):
    """A `TokenScorer` in the judge's own process, as it was run before."""

    def __init__(self, scorer: TokenScorer) -> None:
        self.scorer = scorer

    def plan(self, layout: Layout, rows: int) -> Iterator[Step]:
        for position in range(int(layout.ends[0])):
            yield Step([Window(position, position, position + 1)], [0])

    def logits(self, inputs: Tensor, slots: Sequence[int], last: int, cache: Cache | None = None) -> Tensor:
        self.scorer.update(int(inputs[0, 0]))
        return torch.as_tensor(self.scorer.predict())[None, None]


@pytest.fixture(scope="module")
def artifact(tiny_run: Any) -> Artifact:
    return load(tiny_run.artifact)


@pytest.fixture
def text() -> Text:
    tokens = np.random.default_rng(7).integers(0, 256, COUNT).astype(np.uint16)
    return Text(tokens, 256, 1, 1, 1)


@pytest.fixture
def remote(artifact: Artifact, text: Text, tmp_path: Path) -> Callable[[str], Score]:
    """The score of the text under the scorer of a source, in a process of its own."""

    def scored(source: str) -> Score:
        (tmp_path / "cheat.py").write_text(source)
        scorer = open_scorer(artifact, str(tmp_path / "cheat.py"))
        try:
            return score(artifact.model, text, Scoring(sequence_length=8, stride=8), scorer=scorer)
        finally:
            scorer.close()

    return scored


@pytest.fixture
def in_process(
    artifact: Artifact, text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Score]:
    """The same in this process; what it patches is put right afterwards."""
    import caddie.score.loop as loop

    for owner, name in ((F, "cross_entropy"), (loop, "nats"), (np, "stack")):
        monkeypatch.setattr(owner, name, getattr(owner, name))

    def scored(source: str) -> Score:
        (tmp_path / "cheat.py").write_text(source)
        made = load_scorer(str(tmp_path / "cheat.py"), copy.deepcopy(artifact.model), artifact.tokenizer)
        scorer = InProcess(made) if isinstance(made, TokenScorer) else made
        return score(artifact.model, text, Scoring(sequence_length=8, stride=8), scorer=scorer)

    return scored


@pytest.mark.parametrize("way", ["frames", pytest.param("objects", marks=pytest.mark.long)])
def test_who_shares_a_process_with_the_judge_finds_the_text(way: str, in_process: Callable[[str], Score]) -> None:
    """So that the next test shows something."""
    gc.collect()
    assert in_process(TOKENS + WAYS[way]).nats < HONEST / 2


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_in_a_process_of_its_own_there_is_no_text_to_find(way: str, remote: Callable[[str], Score]) -> None:
    assert remote(TOKENS + WAYS[way]).nats == pytest.approx(HONEST, rel=1e-6)


def patching(patch: str) -> str:
    return TOKENS.replace("        self.seen, self.start", f"{patch}        self.seen, self.start") + WAYS["the clock"]


@pytest.mark.parametrize("name", ["cross_entropy", "the loop"])
def test_who_shares_a_process_with_the_judge_can_change_it(name: str, in_process: Callable[[str], Score]) -> None:
    assert in_process(patching(PATCHES[name])).nats == 0.0


@pytest.mark.parametrize("name", PATCHES)
def test_in_a_process_of_its_own_there_is_no_judge_to_change(name: str, remote: Callable[[str], Score]) -> None:
    assert remote(patching(PATCHES[name])).nats == pytest.approx(HONEST, rel=1e-6)


WINDOWS = """
import numpy as np, torch
from caddie.score import Scorer, Step, Window, windows

class Cheat(Scorer):
    def __init__(self, model, tokenizer):
        self.known = {}

    def plan(self, layout, rows):
        for window in windows(0, int(layout.ends[0]), 8, 8):
            yield Step([window], [0])

    def logits(self, inputs, slots, last, cache=None):
        return torch.zeros(len(inputs), last, 257)
"""
METHODS = """
    def logits(self, inputs, slots, last, cache=None):
        logits = torch.zeros(len(inputs), last, 257)
        class Free(torch.Tensor):
            @classmethod
            def __torch_function__(cls, function, types, given=(), named=None):
                if function is torch.nn.functional.cross_entropy:
                    return torch.zeros(given[1].shape)
                return super().__torch_function__(function, types, given, named or {})
        for name in ("detach", "flatten", "to"):
            setattr(logits, name, lambda *given, **named: torch.zeros(len(inputs), last, 257).as_subclass(Free))
        return logits
"""
SUBCLASS = METHODS.replace("        return logits\n", "        return logits.as_subclass(Free)\n")
LYING = """
    def update(self, batches, prefix):
        class Liar(int):
            yes = lambda self, *others: True
            __lt__ = __le__ = __gt__ = __ge__ = __eq__ = yes
            __hash__ = int.__hash__
        prefix.tokens(Liar(0), Liar(COUNT))
""".replace("COUNT", str(COUNT))
PRIVATE = """
    def update(self, batches, prefix):
        ahead = prefix._tokens[batches[0].windows[-1].end + 1:]
        assert not ahead.any(), "the rest of the text is here"
"""
OVERLAPPING = """
    def plan(self, layout, rows):
        both = list(windows(0, PREDICTIONS, 8, 1))
        yield Step(both[:1], [0])
        for begin in range(1, len(both), 16):
            step = both[begin:begin + 16]
            yield Step(step, [0] * len(step))

    def logits(self, inputs, slots, last, cache=None):
        # Each row's target is the last input of the row after it.
        logits = torch.zeros(len(inputs), last, 257)
        for row in range(len(inputs) - 1):
            logits[row, -1, inputs[row + 1, -1]] = 20.0
        return logits
""".replace("PREDICTIONS", str(COUNT - 1))


@pytest.mark.parametrize("where", ["remote", "in_process"])
def test_methods_of_a_tensor_change_no_loss(where: str, request: pytest.FixtureRequest) -> None:
    assert request.getfixturevalue(where)(WINDOWS + METHODS).nats == pytest.approx(HONEST, rel=1e-6)


@pytest.mark.parametrize("where", ["remote", "in_process"])
@pytest.mark.parametrize(
    ("source", "message"),
    [
        (SUBCLASS, "returned a Free instead of a plain"),
        (LYING, "which have not all been scored"),
        (OVERLAPPING, "shows it targets before they are scored: window 2 to 10 reads targets of another window"),
    ],
    ids=["a subclass", "numbers that lie", "overlapping windows"],
)
def test_attacks_on_the_loop_are_refused(source: str, message: str, where: str, request: pytest.FixtureRequest) -> None:
    with pytest.raises(CheckFailed, match=message) as error:
        request.getfixturevalue(where)(WINDOWS + source)
    assert "\n" not in str(error.value)


def test_what_is_private_to_the_prefix_is_not_there(remote: Callable[[str], Score]) -> None:
    assert remote(WINDOWS + PRIVATE).nats == pytest.approx(HONEST, rel=1e-6)


def test_overlapping_windows_one_after_the_other_show_no_target(remote: Callable[[str], Score]) -> None:
    """What it remembers of all inputs so far is never a target to come."""
    source = OVERLAPPING.replace("+ 16", "+ 1").replace("len(both), 16", "len(both), 1")
    source = (
        source.replace("for row in range(len(inputs) - 1):", "for row in ():")
        + """
    def remembered(self):
        return self.known
"""
    )
    remembers = WINDOWS + source.replace(
        "        # Each row's target is the last input of the row after it.\n",
        "        place = self.place = getattr(self, 'place', -1) + 1\n"
        "        for offset, token in enumerate(inputs[0].tolist()):\n"
        "            assert place + offset not in self.known or self.known[place + offset] == token\n"
        "            self.known[place + offset] = token\n"
        "        assert place + 8 not in self.known, 'a target was shown'\n",
    )
    assert remote(remembers).nats == pytest.approx(HONEST, rel=1e-6)


def test_the_judge_cannot_be_reached(namespaces: None, remote: Callable[[str], Score]) -> None:
    """Its process is not even visible."""
    source = TOKENS + WAYS["the clock"]
    seen = f"[int(name) for name in os.listdir('/proc') if name.isdigit() and int(name) == {os.getpid()}]"
    remote(source.replace("logits = np.zeros(257)", f"logits = np.zeros(257); assert not {seen}"))
