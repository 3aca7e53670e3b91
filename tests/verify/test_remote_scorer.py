"""A user's scorer in a process of its own: what it is told, what it may answer, and how it may fail."""

import ctypes
import math
import os
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from caddie.errors import CheckFailed, UserError
from caddie.pack.artifact import Artifact, load
from caddie.score import Layout, Score, Scorer, Scoring, Step, Text, Window, score
from caddie.verify import channel, scorer_process
from caddie.verify import remote_scorer as module
from caddie.verify.remote_scorer import OPEN_END, RemoteLearner, RemoteScorer, RemoteTokens, open_scorer, scorer_server

BOS = 256
COUNTS = """
import math, os, sys
from caddie.score import TokenScorer

class Counts(TokenScorer):
    def __init__(self, model, tokenizer):
        self.counts = [[1] * 257 for _ in range(257)]  # without a word to the base class
        self.last = None

    def predict(self):
        return [math.log(count) for count in self.counts[self.last]]

    def update(self, token):
        if self.last is not None:
            self.counts[self.last][token] += 1
        self.last = token
"""
WINDOWS = """
import os, torch
from caddie.score import Scorer, Step, Window, windows

class Plain(Scorer):
    def __init__(self, model, tokenizer):
        self.model, self.bos = model, tokenizer.bos
    def plan(self, layout, rows):
        for begin, end in zip(layout.begins.tolist(), layout.ends.tolist()):
            for window in windows(begin, end, 16, 16):
                yield Step([window], [0])
    @torch.no_grad()
    def logits(self, inputs, slots, last, cache=None):
        return self.model(inputs, inputs == self.bos, last=last)
"""
INFINITE = """
from caddie.verify import scorer_process
scorer_process.json.dumps = lambda claims: '{"tokens": false, "learns": false, "together": 1e400}'
"""


@pytest.fixture(scope="module")
def artifact(tiny_run: Any) -> Artifact:
    return load(tiny_run.artifact)


@pytest.fixture
def scored(artifact: Artifact, tmp_path: Path) -> Callable[..., Score]:
    """The score of a text under the scorer of a source."""

    def scored(source: str, tokens: Any = (0, 1, 2, 1, 2, 1, 1), name: str = "") -> Score:
        (tmp_path / "mine.py").write_text(source)
        scorer = open_scorer(artifact, f"{tmp_path / 'mine.py'}{name}")
        try:
            text = Text(np.array(tokens, np.uint16), BOS, 100, 100, 100)
            return score(artifact.model, text, Scoring(sequence_length=3, stride=3), scorer=scorer)
        finally:
            scorer.close()

    return scored


def random_tokens(count: int) -> np.ndarray:
    tokens = np.random.default_rng(0).integers(0, 256, count).astype(np.uint16)
    tokens[::40] = BOS
    return tokens


# What it is told


@pytest.mark.long
@pytest.mark.parametrize("name", ["", ":Counts", ":"])
def test_a_scorer_pays_what_it_promises(name: str, scored: Callable[..., Score]) -> None:
    found = scored(COUNTS, name=name)
    # 0>1, 1>2 and 2>1 are new; 1>2 and 2>1 have been seen once, at 2/258; 1>1 comes after two of 1>2, at 1/259
    assert found.nats == pytest.approx(3 * math.log(257) + 2 * math.log(258 / 2) + math.log(259), rel=1e-12)
    assert found.ttt is None


def test_it_is_told_every_token_but_the_last_and_no_sooner(scored: Callable[..., Score]) -> None:
    source = COUNTS.replace("self.last = token", "self.last = token; self.told.append(token)")
    source = source.replace("self.last = None", "self.last = None; self.told = []")
    source = source.replace("return [", "self.told.append('?'); assert len(self.told) < 6, self.told; return [")
    with pytest.raises(UserError, match=r"AssertionError: \[0, '\?', 1, '\?', 2, '\?'\]$"):
        scored(source, (0, 1, 2, 3))


@pytest.mark.parametrize("ids", ["token by token", "in windows"])
def test_it_is_not_told_where_the_text_ends(ids: str, scored: Callable[..., Score]) -> None:
    ends = f"assert layout.ends.tolist() == [{OPEN_END}]"
    source = (
        WINDOWS.replace("for begin, end in", f"{ends}\n        for begin, end in")
        + """
    def update(self, batches, prefix):
        assert not prefix.is_last(batches[0].windows[-1])
"""
    )
    assert scored(source if ids == "in windows" else COUNTS, random_tokens(50)).tokens == 49


@pytest.mark.long
@pytest.mark.parametrize("documents", [False, True])
def test_a_window_that_could_hold_the_whole_text_is_refused(documents: bool, scored: Callable[..., Score]) -> None:
    source = WINDOWS.replace("(Scorer):", "(Scorer):\n    per_document = True") if documents else WINDOWS
    source = source.replace("end, 16, 16)", "end, LENGTH, LENGTH)")
    tokens = random_tokens(1100)
    tokens[1:] %= 200  # one document
    assert scored(source.replace("LENGTH", "1024"), tokens).tokens == 1099
    for start, length in ((0, 1025), (0, 1 << 40), (-1099, 1024), (-(1 << 63), (1 << 63) - 1)):
        refused = source.replace("[window]", f"[Window({start}, 0, {length})]").replace("LENGTH", "1025")
        with pytest.raises(CheckFailed, match=r"mine\.py: the scorer's plan has a window from .* longest has 1,024 to"):
            scored(refused, tokens)


def test_windows_are_scored_as_in_this_process(
    artifact: Artifact, scored: Callable[..., Score], tmp_path: Path
) -> None:
    tokens = random_tokens(100)
    text = Text(tokens, BOS, 100, 100, 100)
    expected = score(artifact.model, text, Scoring(sequence_length=16, stride=16)).nats
    assert scored(WINDOWS, tokens).nats == pytest.approx(expected, rel=1e-6)
    documents = WINDOWS.replace("class Plain(Scorer):", "class Plain(Scorer):\n    per_document = True")
    assert scored(documents, tokens).nats != pytest.approx(expected, rel=1e-6), "windows begin with documents"


def test_one_that_learns_gets_what_was_scored_and_nothing_else(scored: Callable[..., Score]) -> None:
    source = (
        WINDOWS
        + """
    def update(self, batches, prefix):
        (batch,) = batches
        (window,) = batch.windows
        seen = prefix.tokens(0, window.end + 1)
        assert seen[window.start:window.end].tolist() == batch.inputs[0].tolist()
        assert prefix.targets(batch.windows)[0].tolist() == seen[window.first + 1:].tolist()
        if window.end > 40:
            print("what it prints does not matter")
            raise ValueError(seen.tolist())
"""
    )
    tokens = random_tokens(100)
    with pytest.raises(UserError, match=r"mine\.py: update failed with ValueError: \[256, ") as error:
        scored(source, tokens)
    assert str(error.value).startswith(str(error.value).split(" [")[0] + " " + str(tokens[:49].tolist()))
    ahead = source.replace("prefix.tokens(0, window.end + 1)", "prefix.tokens(0, window.end + 2)")
    with pytest.raises(CheckFailed, match=r"which have not all been scored$"):
        scored(ahead, tokens)


def test_each_kind_has_its_side_here(artifact: Artifact, tmp_path: Path) -> None:
    learner = WINDOWS + "    def update(self, batches, prefix):\n        pass\n"
    for source, kind in ((COUNTS, RemoteTokens), (WINDOWS, RemoteScorer), (learner, RemoteLearner)):
        (tmp_path / "mine.py").write_text(source)
        scorer = open_scorer(artifact, str(tmp_path / "mine.py"))
        assert type(scorer) is kind
        assert not scorer.stateless
        assert not scorer.fixed_between_updates, "whatever it claims"
        scorer.close()


# What it may answer


def test_answers_may_be_tensors_and_arrays(scored: Callable[..., Score]) -> None:
    sums = []
    for shape in (
        "torch.tensor({})",
        "np.array({})",
        "{}",
        "torch.tensor({}, requires_grad=True)",
        "np.array({}, 'f4')",
    ):
        answer = shape.format("[0.5, 0.0, -1.0, *[float('-inf')] * 254]")
        source = COUNTS.replace("import math", "import math, torch, numpy as np")
        sums.append(scored(source.replace("[math.log(count) for count in self.counts[self.last]]", answer)).nats)
    assert sums == pytest.approx([sums[0]] * 5, rel=1e-6)


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        (COUNTS, ":Count", r"mine\.py has no scorer Count \(did you mean Counts\?\); write FILE\.py:NAME"),
        (COUNTS + "class Other(Counts): pass", "", r"mine\.py has 2 scorers; write FILE\.py:NAME"),
        ("x = 1", "", r"mine\.py has 0 scorers; write FILE\.py:NAME"),
        ("from caddie.score import TokenScorer", ":TokenScorer", "has no scorer TokenScorer"),
        ("x = 1", ":x", r"has no scorer x; write"),
        ("def f(:", "", "does not run: SyntaxError"),
        ("import no_such_module_at_all", "", "does not run: ModuleNotFoundError"),
        (COUNTS.replace("self.last = None", "1 / 0"), "", r"mine\.py:Counts cannot be made: ZeroDivisionError"),
        (COUNTS.replace("model, tokenizer", "model"), "", "mine.py:Counts cannot be made: TypeError"),
        (COUNTS.replace("def predict", "def guess"), "", "cannot be made: TypeError: .*abstract"),
        (COUNTS.replace("self.counts[self.last]]", "[1] * 3]"), "", r"predict must return 257 logits.* shape \(3,\)$"),
        (
            COUNTS.replace("[math", "[[math").replace("]\n\n    def up", "]]\n\n    def up"),
            "",
            r"the shape \(1, 257\)$",
        ),
        (COUNTS.replace("math.log(count)", "count * math.nan"), "", "predict must return finite logits"),
        (COUNTS.replace("math.log(count)", "-count * math.inf"), "", "predict must return finite logits"),
        (COUNTS.replace("math.log(count)", "count * math.inf"), "", "predict must return finite logits"),
        (COUNTS.replace("math.log(count)", "str(count)"), "", r"mine\.py: predict failed with \w+Error: "),
        (COUNTS.replace("return [", "return None; ["), "", r"mine\.py: predict failed with \w+Error: "),
        (COUNTS.replace("return [", "[][1]; ["), "", "mine.py: predict failed with IndexError: list index"),
        (COUNTS.replace("return [", "sys.exit(); ["), "", "mine.py: predict failed with SystemExit"),
        (COUNTS.replace("+= 1", "+= 1 / 0"), "", r"mine\.py: update failed with ZeroDivisionError: division"),
        (COUNTS.replace("return [", "os._exit(3); ["), "", "mine.py: its process ended: "),
        pytest.param(
            COUNTS.replace("return [", "import time; os.kill(os.getppid(), 9); time.sleep(60); ["),
            "",
            "mine.py: its process ended: ",
            marks=pytest.mark.long,  # a new process loads the artifact for the next
        ),
        (WINDOWS.replace("return self", "1 / 0; return self"), "", r"mine\.py: logits failed with ZeroDivisionError"),
        (WINDOWS.replace("yield Step", "1 / 0; yield Step"), "", r"mine\.py: plan failed with ZeroDivisionError"),
        (WINDOWS.replace("yield Step([window], [0])", "yield 3"), "", r"mine\.py: plan failed with AttributeError"),
        (WINDOWS.replace("yield Step([window]", "yield Step([]"), "", r"mine\.py: plan failed with ValueError"),
        (WINDOWS.replace("[0])", "[1 << 70])"), "", r"mine\.py: plan failed with OverflowError"),
        (WINDOWS + INFINITE, "", r"mine\.py: its process sent a malformed answer: what it claims$"),
    ],
)
def test_what_is_wrong_with_a_scorer_is_said_in_one_line(
    source: str, name: str, message: str, scored: Callable[..., Score]
) -> None:
    with pytest.raises(UserError, match=message) as error:
        scored(source, name=name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("last=last)[..., :200]", r"mine\.py: the scorer returned logits of shape \(1, \d+, 200\) instead of"),
        ("last=last).long()", r"mine\.py: the scorer returned logits of torch\.int64"),
        ("last=last).tolist()", r"mine\.py: the scorer returned a list instead of a plain torch\.Tensor"),
    ],
)
def test_logits_of_windows_are_checked_too(change: str, message: str, scored: Callable[..., Score]) -> None:
    with pytest.raises(CheckFailed, match=message):
        scored(WINDOWS.replace("last=last)", change))


def test_a_file_that_is_not_there_is_a_mistake(artifact: Artifact) -> None:
    for name in ("nothing.py", "nothing.py:Name", ":Name", ""):
        with pytest.raises(UserError, match=r"as FILE\.py or FILE\.py:NAME$|write FILE\.py:NAME$"):
            open_scorer(artifact, name)


@pytest.mark.long
def test_an_artifact_that_has_changed_is_named(artifact: Artifact, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(COUNTS)
    with pytest.raises(UserError, match=r"could not be loaded in a sandbox: it has changed$"):
        module.ScorerServer(artifact.path, "0" * 64)


@pytest.mark.parametrize(
    "code",
    ["b'garbage' * 9", "b'f' + (1 << 60).to_bytes(8, 'little')", "b'f' + (8).to_bytes(8, 'little') + bytes(8)"],
    ids=["garbage", "too long", "too short"],
)
def test_bytes_that_are_no_answer_are_refused(code: str, scored: Callable[..., Score]) -> None:
    """Whatever it finds to write to."""
    write = f"""
        for number in range(3, 64):
            try:
                os.write(number, {code})
            except OSError:
                pass
        return ["""
    with pytest.raises(UserError, match=r"mine\.py: its process sent a malformed answer: "):
        scored(COUNTS.replace("return [", write))


# Limits


@pytest.mark.long
def test_memory_and_time_have_limits(scored: Callable[..., Score], monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps = COUNTS.replace("return [", "import time; time.sleep(60); [")
    with monkeypatch.context() as patch:
        patch.setattr(module, "ANSWER_SECONDS", 0.5)
        with pytest.raises(UserError, match=r"^[^:]*mine\.py was stopped because it gave no answer for 0 seconds$"):
            scored(sleeps)
    with monkeypatch.context() as patch:
        patch.setattr(module, "MEMORY_BYTES", 1 << 20)
        with pytest.raises(UserError, match=r"^[^:]*mine\.py was stopped because it took more than 1 MiB of memory$"):
            scored(COUNTS)
    assert scored(COUNTS).tokens == 6, "a new process was started"


def test_nothing_of_one_scorer_is_left_for_the_next(artifact: Artifact, scored: Callable[..., Score]) -> None:
    """Neither its process nor those that it starts, also if these have a session of their own."""
    fork = "self.last = None\n        if not os.fork():\n            os.setsid()\n            while True: pass"
    scored(COUNTS)
    server = scorer_server(artifact)
    (family,) = [psutil.Process(server.sandboxed.process.pid)]
    before = len(family.children(recursive=True))
    scored(COUNTS.replace("self.last = None", fork))
    assert len(family.children(recursive=True)) > before
    scored(COUNTS)
    assert len(family.children(recursive=True)) <= before


MARKS = """
import ctypes, os, torch
from caddie.score import TokenScorer

def segment():
    library = ctypes.CDLL(None)
    library.shmat.restype = ctypes.c_void_p
    place = library.shmat(library.shmget(0x51AB, 4096, 0o1666), None, 0)
    if place in (None, ctypes.c_void_p(-1).value):
        return 0
    count = ctypes.cast(place, ctypes.POINTER(ctypes.c_int))
    count[0] += 1
    return count[0]

class Marks(TokenScorer):
    def __init__(self, model, tokenizer):
        super().__init__(model, tokenizer)
        found = [segment(), *(os.stat(number).st_mtime < 1000 for number in (1, 2))]
        os.utime(1, (5, 5))
        self.found = torch.tensor([*found, *[0] * 300]).double()[: tokenizer.vocabulary]
    def predict(self):
        return self.found
    def update(self, token):
        pass
"""


def marks(artifact: Artifact, path: Path, **settings: bool) -> list[float]:
    """Traces of earlier processes that a new one finds, in shared memory and on its two outputs."""
    scorer = open_scorer(artifact, str(path), **settings)
    try:
        return scorer.logits(torch.tensor([[1]]), [0], 1)[0, 0, :3].tolist()
    finally:
        scorer.close()


def test_neither_shared_memory_nor_an_open_file_outlives_a_scorer(artifact: Artifact, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MARKS)
    assert [marks(artifact, tmp_path / "mine.py") for _ in range(2)] == [[0, 0, 0]] * 2


@pytest.mark.long
def test_without_seccomp_a_sandbox_of_its_own_keeps_state_apart(
    artifact: Artifact, tmp_path: Path, refuse: Callable[..., None]
) -> None:
    refuse("_REFUSED", "{}")
    (tmp_path / "mine.py").write_text(MARKS)
    scorer_server(artifact).close()
    try:
        if "Linux namespaces" not in (isolation := scorer_server(artifact).sandboxed.isolation):
            pytest.skip(isolation)
        assert [marks(artifact, tmp_path / "mine.py")[0] for _ in range(2)] == [1, 2]
        processes = len(psutil.Process().children(recursive=True))
        assert [marks(artifact, tmp_path / "mine.py", own_sandbox=True)[0] for _ in range(2)] == [1, 1]
        assert len(psutil.Process().children(recursive=True)) <= processes, "a sandbox did not end with its scorer"
    finally:
        scorer_server(artifact).close()


def test_two_runs_throw_other_dice(scored: Callable[..., Score]) -> None:
    dice = COUNTS.replace("return [math.log(count)", "import numpy\n        return [numpy.random.random()")
    assert scored(dice).nats != scored(dice).nats


@pytest.mark.parametrize("threads", [1, 2])
def test_it_has_the_threads_of_its_judge(threads: int, scored: Callable[..., Score]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        scored(WINDOWS.replace("return self", f"assert torch.get_num_threads() == {threads}; return self"))
    finally:
        torch.set_num_threads(before)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such setting")
def test_where_there_is_no_sandbox_the_judge_hides_its_memory(artifact: Artifact, refuse: Callable[..., None]) -> None:
    refuse("_unshare")
    server, get_dumpable = module.ScorerServer(artifact.path, artifact.sha256), 3
    try:
        server.connect().close()
        assert server.sandboxed.isolation.startswith("plain subprocess")
        assert ctypes.CDLL(None).prctl(get_dumpable) == 0
    finally:
        server.close()
        scorer_process.allow_debuggers(True)
    assert ctypes.CDLL(None).prctl(get_dumpable) == 1


@pytest.mark.long
def test_it_ends_with_its_judge(artifact: Artifact) -> None:
    server = module.ScorerServer(artifact.path, artifact.sha256)
    server.connect().close()
    process = server.sandboxed.process
    del server
    assert process.poll() is not None
    assert not psutil.pid_exists(process.pid) or os.getpid() != psutil.Process(process.pid).ppid()


def test_inputs_of_a_scorer_that_learns_nothing_are_not_kept() -> None:
    """Else a long text with windows that overlap would end at the limit of memory."""

    class Even(Scorer):
        def plan(self, layout: Layout, rows: int) -> Iterator[Step]:
            return (Step([Window(place, place, place + 1000)], [0]) for place in range(0, 100_000, 1000))

        def logits(self, inputs: torch.Tensor, slots: Sequence[int], last: int, cache: Any = None) -> torch.Tensor:
            return torch.zeros(1, last, 3)

    windows = scorer_process._Windows(Even(), 3, 0)
    windows.plan(bytearray(np.array([1, 1, 0, OPEN_END]).tobytes()))
    question = bytearray(np.array([1, 1000, 0, *[1] * 1000]).tobytes())
    tracemalloc.start()
    try:
        while windows.next(bytearray())[0] != channel.END:
            windows.logits(question)
            windows.logits(question)
        assert tracemalloc.get_traced_memory()[0] < 10 * len(question)
    finally:
        tracemalloc.stop()
