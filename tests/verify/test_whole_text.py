"""Audits of a whole scoring: scorers that wait are found however long they do, and honest ones are not accused."""

import json
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from waiting_scorer import WAITS

from caddie.data.corpus import Corpus
from caddie.data.documents import find
from caddie.pack.artifact import Artifact, load
from caddie.score import SGD, ChunkSGD, DocumentLoRA, Layout, Scorer, Scoring, Step, Text, windows
from caddie.score.ngram_tilt import NGramTilt
from caddie.verify import readable_text
from caddie.verify.audited_score import _gain_at_ends, _use_of_lengths
from caddie.verify.black_box import ScoredText
from caddie.verify.changes import GAIN
from caddie.verify.cheats import Waits
from caddie.verify.known_bad import KNOWN_BAD, catch, known_bad
from caddie.verify.probe_case import Effort, probe_case_of, sized_case, with_whole_text
from caddie.verify.probe_text import excerpts, in_order_from, library, text_in_order
from caddie.verify.probes import FAR, PROBES
from caddie.verify.readable_text import is_readable
from caddie.verify.remote_scorer import scorer_server
from caddie.verify.whole_text import WholeText, another_text, audit

BOS = 256
ALL_SOURCES = readable_text._library_texts


@pytest.fixture(autouse=True)
def few_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `score` look for the held-out text in six modules; in all that are installed it takes seconds."""
    monkeypatch.setattr("caddie.verify.readable_text._library_texts", library)


def whole_of(
    artifact: Artifact, length: int, scoring: Scoring | None = None, make: Callable[[Scorer], Scorer] = lambda own: own
) -> WholeText:
    chosen, tokens = scoring or artifact.scoring.plain, text_in_order(artifact.tokenizer, library(), length)
    return WholeText(
        model=artifact.model,
        bos=BOS,
        scoring=chosen,
        open=lambda: nullcontext(make(chosen.scorer(artifact.model, BOS))),
        tokens=tokens,
        text_bytes=int(artifact.tokenizer.byte_lengths(tokens[tokens != BOS]).sum()),
    )


def audited(whole: WholeText, seed: int = 1, seconds: float = 0.0) -> tuple[bool, str]:
    return audit(whole, whole.scored(), whole.plain_nats(), seed=seed, seconds=seconds)


def waiting(artifact: Artifact, length: int) -> WholeText:
    return whole_of(artifact, length, make=lambda own: Waits(own, artifact.scoring.sequence_length))


# Scorers that wait


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 10))])
def test_a_scorer_that_waits_is_found_by_one_more_scoring(
    seed: int, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Waits, "AFTER", 1000)
    passed, evidence = audited(waiting(artifact, 1500), seed)
    assert not passed
    assert "it uses tokens before they are scored" in evidence


def test_a_scorer_without_a_seed_is_called_random(artifact: Artifact) -> None:
    chance = np.random.default_rng(0)

    class Dice(Waits):
        def logits(self, *given: Any, **settings: Any) -> torch.Tensor:
            found: torch.Tensor = super().logits(*given, **settings)
            return found + 0.01 * torch.from_numpy(chance.standard_normal(found.shape))

    passed, evidence = audited(whole_of(artifact, 700, make=lambda own: Dice(own, 64)))
    assert not passed
    assert evidence.endswith("losses differ between two runs on the same text: it is random; give it a fixed seed")


@pytest.mark.parametrize(("tries", "counted"), [(1, 2.0), (2, 1.0), (5, 6 / 5)])
def test_the_seconds_that_an_audit_asks_for_are_those_of_the_places_that_count(
    tries: int, counted: float, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = whole_of(artifact, 700)
    given = whole, whole.scored(), whole.plain_nats()
    clock = iter([0.0, *np.repeat(np.arange(1.0, 99.0), 1)])
    seconds: list[float] = []
    monkeypatch.setattr("caddie.verify.whole_text.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr("caddie.verify.whole_text._FOUND", 2.0)
    monkeypatch.setattr(
        "caddie.verify.whole_text.power", lambda found, spent, decides: (True, str(seconds.append(spent)))
    )
    audit(*given, seed=1, seconds=tries - 0.5, decides=True)
    assert seconds == [pytest.approx((tries + 1) * counted)], "the clock is read once more"


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_the_example_that_waits_for_40000_tokens_is_found_with_every_seed(seed: int, artifact: Artifact) -> None:
    plain = artifact.scoring.plain
    honest = probe_case_of(artifact, plain, excerpts(library(), plain, seed), seed=seed)
    whole = whole_of(artifact, 60_000)
    assert len(whole.tokens) > Waits.AFTER
    installed = known_bad("waits").install(replace(honest, whole=whole, effort=Effort(places=12, found=0.0)))
    assert not PROBES[FAR](installed)[0]
    assert PROBES["no look-ahead"](installed)[0]  # short texts are over before it begins


@pytest.mark.long
def test_an_example_that_cannot_wait_so_long_is_inconclusive(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("caddie.verify.known_bad.KNOWN_BAD", {"waits": KNOWN_BAD["waits"]})
    monkeypatch.setattr("caddie.verify.probes.PROBES", {name: PROBES[name] for name in ("scores a text", FAR)})
    plain = artifact.scoring.plain
    case = probe_case_of(artifact, plain, excerpts(library(), plain, 1), seed=1)
    case = replace(case, effort=Effort(places=1, found=0.0))
    for whole in (None, whole_of(artifact, 1500)):
        assert [one.outcome for one in catch(replace(case, whole=whole))] == ["inconclusive"]
    monkeypatch.setattr(Waits, "AFTER", 1000)
    assert [one.outcome for one in catch(replace(case, whole=whole_of(artifact, 1500)))] == ["pass"]


class Plans(Scorer):
    """Scores plainly, and makes its windows shorter where the text that it has been shown goes on with an even id."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer, self.even = scorer, False

    def plan(self, layout: Any, rows: int) -> Any:
        begin, end = 0, int(layout.ends[-1])
        while begin < end:
            stop = min(end, begin + (32 if self.even else 64))
            yield next(iter(self.scorer.plan(type(layout)(np.array([begin]), np.array([stop])), 1)))
            begin = stop

    def logits(self, inputs: Any, slots: Any, last: int, cache: Any = None) -> Any:
        self.even = bool(inputs[0, 16] % 2 == 0)
        return self.scorer.logits(inputs, slots, last)


def test_a_plan_that_looks_at_shown_tokens_only_is_honest(artifact: Artifact) -> None:
    scoring = artifact.scoring.plain.but(sequence_length=64, stride=64)
    assert all(audited(whole_of(artifact, 800, scoring, Plans), seed)[0] for seed in range(3))


def test_a_leak_that_gains_nothing_is_looked_for_evenly(artifact: Artifact) -> None:
    class Lowers(Waits):
        """Is worse off by what it knows."""

        AFTER, NATS = 0, -5.0

    whole = whole_of(artifact, 600, make=lambda own: Lowers(own, artifact.scoring.sequence_length))
    assert not audited(whole, seconds=60.0)[0]


@pytest.mark.long
def test_a_users_scorer_is_followed_however_slow_it_is(
    artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("caddie.verify.probe_case._WHOLE_SECONDS", 0.0)
    monkeypatch.setattr("caddie.verify.probe_case.LEAST_WHOLE", 3000)
    (tmp_path / "waits.py").write_text(WAITS.replace("AFTER", "2500"))
    given = artifact, artifact.scoring, excerpts(library(), artifact.scoring, 1)
    case = sized_case(*given, seed=1, scorer=str(tmp_path / "waits.py"), in_order=in_order_from(library(), 1))
    assert case.whole is not None
    assert len(case.whole.tokens) == 3000
    assert not PROBES[FAR](case)[0]


@pytest.mark.parametrize(("per_second", "tokens"), [(100.0, 3000), (400.0, 4000)])
def test_a_whole_text_is_what_ten_seconds_score_and_never_less_than_the_least(
    per_second: float, tokens: int, artifact: Artifact
) -> None:
    plain = artifact.scoring.plain
    case = probe_case_of(artifact, plain, excerpts(library(), plain, 1), seed=1)
    given = with_whole_text(case, plain, in_order_from(library(), 1), per_second, nullcontext, 3000)
    assert given.whole is not None
    assert len(given.whole.tokens) == tokens


# Honest scorers

HONEST = {
    "plain": {"stride": 64},
    "sliding": {"stride": 16},
    "chunks": {"ttt": ChunkSGD(chunk_tokens=128, sgd=SGD(epochs=1))},
    "documents": {"ttt": DocumentLoRA(rank=2, lr=0.01, chunk_tokens=32, targets=("query", "head"))},
    "tilt": {"stride": 64, "tilt": NGramTilt(order=3)},
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_scorers_are_not_accused(name: str, artifact: Artifact) -> None:
    scoring = artifact.scoring.but(sequence_length=64, stride=64, ttt=None, tilt=None).but(HONEST[name])
    passed, evidence = audited(whole_of(artifact, 700, scoring), seconds=0.2)
    assert passed, evidence
    assert "a leak of 0.005 bits per byte in this text is found with " in evidence


@pytest.mark.parametrize("name", ["plain", "documents"])
def test_a_scorer_that_knows_documents_is_given_no_new_ones(name: str, artifact: Artifact) -> None:
    scoring = artifact.scoring.but(sequence_length=64, stride=64, ttt=None, tilt=None).but(HONEST[name])
    whole = whole_of(artifact, 700, scoring)
    base, ends = whole.scored(), whole.tokens == BOS
    assert np.count_nonzero(ends) == 1
    chance = np.random.default_rng(0)
    texts = [another_text(whole.tokens, base, place, BOS, 257, chance) for place in range(300, 690, 10)]
    assert any(np.count_nonzero(text == BOS) > 1 for text in texts) == (name == "plain")


def test_an_audit_that_would_seldom_find_a_leak_decides_nothing(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = artifact.scoring.plain.but(sequence_length=64, stride=64)
    whole = whole_of(artifact, 700, plain)  # gains nothing over the model, so that any leak is all of its gain
    assert audit(whole, whole.scored(), whole.plain_nats(), seed=1, seconds=0.0, decides=True)[0]
    whole = whole_of(artifact, 700, plain.but(tilt=NGramTilt(order=3)))
    given = whole, whole.scored(), whole.plain_nats()
    monkeypatch.setattr("caddie.verify.whole_text.GAIN", 1e-6)
    passed, evidence = audit(*given, seed=1, seconds=0.0, decides=True)
    assert passed is None
    assert "0.0 %, too little to decide: set --audit-seconds=" in evidence
    assert audit(*given, seed=1, seconds=0.0)[0]


@pytest.mark.long
def test_a_case_has_a_whole_text_unless_its_scorer_remembers_nothing(artifact: Artifact) -> None:
    given = excerpts(library(), artifact.scoring, 1)
    learns = artifact.scoring.but(ttt=ChunkSGD(chunk_tokens=512, sgd=SGD(epochs=1)))
    for scoring, there in ((artifact.scoring, False), (learns, True)):
        case = sized_case(artifact, scoring, given, seed=1, in_order=in_order_from(library(), 1))
        assert (case.whole is not None) == there
        assert (
            PROBES[FAR](replace(case, whole=case.whole and replace(case.whole, tokens=case.whole.tokens[:800])))
            is not None
        ) == there
    assert case.whole is not None
    assert case.whole.scoring == learns  # not fitted to a short text


# The other text


def scored(step: list[int], segment: list[int]) -> ScoredText:
    return ScoredText(nats=np.zeros(len(step)), step=np.array(step), segment=np.array(segment), probabilities=None)


def test_another_text_goes_on_as_the_text_before_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caddie.verify.whole_text._LEAST_STOCK", 1)
    tokens = np.array([9, 1, 2, 3, 4, 1, 5, 6, 7, 1, 2, 8], np.uint16)
    text = another_text(tokens, scored([*range(11)], [0] * 11), 6, 9, 10, np.random.default_rng(0))
    # token 5 follows a 1; the 1 before was followed by a 2, and what came then comes again
    assert text.tolist() == [9, 1, 2, 3, 4, 1, 2, 3, 4, 1, 9, 1]


@pytest.mark.parametrize("place", [1, 2, 40, 300, 599])
def test_nothing_that_is_replaced_stands_anywhere_in_another_text(place: int) -> None:
    tokens = np.arange(600, dtype=np.uint16)  # each token once, so that it can be seen where it comes from
    for seed in range(5):
        text = another_text(tokens, scored([*range(599)], [0] * 599), place, 0, 1000, np.random.default_rng(seed))
        assert text[:place].tolist() == tokens[:place].tolist()
        if place >= 256:
            assert set(text[place:].tolist()) <= set(range(place))
        else:  # some are drawn among all ids
            assert len(set(text[place:].tolist())) > 100
            assert not (np.diff(text[place:].astype(int)) == 1)[place:].all()
        assert text[place] != tokens[place]


def test_another_text_changes_what_is_scored_later_and_no_document_end() -> None:
    tokens = np.array([9, 1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 5, 6], np.uint16)
    # documents of four tokens: the second is scored first, then the first and the third in one step
    base = scored([1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1], [0] * 4 + [1] * 4 + [2] * 4)
    text = another_text(tokens, base, 2, 9, 10, np.random.default_rng(0))
    assert text[4:].tolist() == tokens[4:].tolist()  # scored before, or beside it
    assert text[0] == 9
    assert text[1] == 1
    assert text[2] != 2
    text = another_text(tokens, base, 6, 9, 10, np.random.default_rng(0))
    assert (text == 9).tolist() == (tokens == 9).tolist()
    assert text[4:6].tolist() == [9, 1]
    assert text[6] != 2
    assert (text[[1, 2, 3]] != tokens[[1, 2, 3]]).any()


@pytest.mark.parametrize("seed", [*(pytest.param(seed, marks=pytest.mark.long) for seed in range(4)), 4])
def test_a_scorer_that_puts_back_what_was_spliced_is_found(seed: int, artifact: Artifact) -> None:
    case = probe_case_of(artifact, artifact.scoring.plain, excerpts(library(), artifact.scoring, 1), seed=seed)
    installed = known_bad("splices").install(replace(case, whole=whole_of(artifact, 3000)))
    passed, evidence = PROBES[FAR](installed)
    assert not passed, evidence


# A user's scorer, as `caddie score` runs it


@pytest.fixture
def score(tiny_run: Any, caddie: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """`caddie score` of an artifact and its own held-out text, with a user's scorer of which the source is given."""

    def score(source: str, *options: str, data: Path = tiny_run.corpus) -> Any:
        (tmp_path / "mine.py").write_text(source)
        given = ("--data", data, "--scorer", tmp_path / "mine.py", "--quiet", *options)
        return caddie("score", tiny_run.artifact, *given)

    return score


CHARGED = """
from caddie.score import TokenScorer
class Even(TokenScorer):
    def predict(self):
        return [0.0] * self.tokenizer.vocabulary
    def update(self, token):
        pass
"""


@pytest.mark.long
@pytest.mark.parametrize(("after", "status"), [(500, 1), (10**9, 0)])
def test_a_score_of_a_users_scorer_is_audited(
    after: int, status: int, score: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if status:  # else drawn text would find it first
        monkeypatch.setattr("caddie.verify.audited_score._drawn", lambda *given: "")
    ended = score(WAITS.replace("AFTER", str(after)), "--json")
    assert ended.status == status, ended.err
    if status:
        assert "mine.py: with another text from token" in ended.err
        assert "it uses tokens before they are scored" in ended.err
        assert not ended.out
    else:
        result = json.loads(ended.out)
        assert "none of" in result["notes"][-1]
        assert "drawn from the model in" in result["notes"][-1]
        assert result["audited"] is True


HASHES = """
import numpy as np
from caddie.score import TokenScorer
class Hashes(TokenScorer):
    def __init__(self, model, tokenizer):
        super().__init__(model, tokenizer)
        self.table, self.at = np.zeros((64, tokenizer.vocabulary)), 0
    def predict(self):
        return self.table[self.at]
    def update(self, token):
        self.table[self.at, token] += 0.1
        self.at = hash(str(token)) % 64
"""


@pytest.mark.long
def test_hashes_of_texts_are_the_same_in_every_process(tiny_run: Any, score: Callable[..., Any]) -> None:
    scores = []
    for _ in range(2):
        ended = score(HASHES, "--json")
        assert ended.status == 0, ended.err
        scores.append(json.loads(ended.out)["bits_per_byte"])
        scorer_server(load(tiny_run.artifact)).close()
    assert scores[0] == scores[1]


REMEMBERS = """
import ctypes, numpy as np, torch
from caddie.score import Scorer, Step, windows
SIZE = 100_000
def segment():
    library = ctypes.CDLL(None)
    library.shmat.restype = ctypes.c_void_p
    place = library.shmat(library.shmget(0x51AB, SIZE * 2, 0o1666), None, 0)
    assert place not in (None, ctypes.c_void_p(-1).value)
    return np.ctypeslib.as_array(ctypes.cast(place, ctypes.POINTER(ctypes.c_uint16)), (SIZE,))
class Remembers(Scorer):
    def __init__(self, model, tokenizer):
        self.model, self.bos, self.kept = model, tokenizer.bos, segment()
        self.first = not self.kept[0]
    def plan(self, layout, rows):
        for window in windows(0, int(layout.ends[0]), 64, 64):
            self.at = window.start
            yield Step([window], [0])
    @torch.no_grad()
    def logits(self, inputs, slots, last, cache=None):
        logits, place = self.model(inputs, inputs == self.bos), slice(self.at, self.at + inputs.shape[1])
        if self.first:
            self.kept[place] = inputs[0].numpy()
        true = torch.from_numpy(self.kept[place].astype(np.int64))[None, 1:, None]
        logits[:, :-1].scatter_add_(2, true, torch.full(true.shape, 5.0))
        return logits[:, -last:]
"""


@pytest.mark.long
def test_a_score_says_that_its_audit_decided_nothing(
    score: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("caddie.verify.whole_text.power", lambda found, seconds, decides: (None, "too little"))
    ended = score(WAITS.replace("AFTER", str(10**9)))
    assert ended.status == 0, ended.err
    line = [line for line in ended.out.splitlines() if line.startswith("bits per byte  ")][-1]
    assert line.endswith("  (not audited; the last lines say why)")
    assert "pass" not in ended.out


@pytest.mark.long
def test_a_score_is_followed_by_text_drawn_from_the_model(
    score: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("caddie.verify.audited_score.audit", lambda *given, **settings: (True, "audited"))
    ended = score(WAITS.replace("AFTER", "0"))
    assert ended.status == 1, ended.out
    assert "drawn from the model in" in ended.err
    assert ended.err.endswith("it uses tokens before they are scored\n")


@pytest.mark.long
def test_a_scorer_whose_memory_outlives_its_process_has_no_score(
    tiny_run: Any, score: Callable[..., Any], refuse: Callable[..., None]
) -> None:
    for said in ("cannot be made: AssertionError", "it uses tokens before they are scored"):
        scorer_server(load(tiny_run.artifact)).close()
        ended = score(REMEMBERS)
        assert ended.status, ended.out
        assert said in ended.err
        refuse("_REFUSED", "{}")
    scorer_server(load(tiny_run.artifact)).close()


@pytest.mark.long
def test_a_scorer_that_is_shown_charged_tokens_alone_is_not_audited(
    tiny_run: Any, score: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = score(CHARGED, "--json")
    assert ended.status == 0, ended.err
    result = json.loads(ended.out)
    assert result["notes"][-1].startswith("The scorer was shown scored tokens alone. The scorer ran with ")
    monkeypatch.setattr("caddie.verify.readable_text.runtime_paths", lambda: (str(tiny_run.text.parent),))
    readable = json.loads(score(CHARGED, "--json").out)
    assert readable["bits_per_byte"] == result["bits_per_byte"]
    assert (result["audited"], readable["audited"]) == ("no writable disk" in result["notes"][-1], False)
    assert "The scorer can read this text in its sandbox" in readable["notes"][-1]


KNOWS_ENDS = """
import torch
from caddie.score import Scorer, Step, windows
class Ends(Scorer):
    per_document = True
    def __init__(self, model, tokenizer):
        self.model, self.bos = model, tokenizer.bos
    def plan(self, layout, rows):
        for begin, end in layout.edges:
            for window in windows(begin, end, 32, 32):
                self.over = window.end == end < layout.ends.max()
                yield Step([window], [0])
    @torch.no_grad()
    def logits(self, inputs, slots, last, cache=None):
        logits = self.model(inputs, inputs == self.bos)
        logits[:, -1, self.bos] += HEIGHT * self.over
        return logits[:, -last:]
"""


@pytest.mark.long
@pytest.mark.parametrize("height", [0.0, 9.0])
def test_a_score_that_gains_where_documents_end_is_not_called_audited(
    height: float, tiny_run: Any, caddie: Callable[..., Any], score: Callable[..., Any], tmp_path: Path
) -> None:
    words = tiny_run.text.read_text().split()
    short = [" ".join(words[begin : begin + 8]) for begin in range(0, 800, 8)]
    (tmp_path / "short.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in short))
    known = ("--tokenizer", tiny_run.artifact, "--against", tiny_run.corpus)
    caddie("data", tmp_path / "short.jsonl", *known, "--out", tmp_path / "short", "--quiet")
    ended = score(KNOWS_ENDS.replace("HEIGHT", str(height)), "--json", data=tmp_path / "short")
    assert ended.status == 0, ended.err
    result = json.loads(ended.out)
    said = any("bits per byte over the plain scoring there and just before." in note for note in result["notes"])
    assert (said, result["audited"]) == (bool(height), not height)


def test_texts_that_the_sandbox_holds_are_known(tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = Corpus.load(tiny_run.corpus)

    def of(source: str) -> Corpus:
        return Corpus(corpus.folder, replace(corpus.manifest, source=source))

    assert is_readable(of(find(None).description))
    assert is_readable(of(torch.__file__))
    assert not is_readable(of("/texts/web.jsonl.xz"))
    assert not is_readable(of("owner/name at 0123abc, train"))
    (tmp_path / "link").symlink_to(tiny_run.corpus)
    monkeypatch.setattr("caddie.verify.readable_text.runtime_paths", lambda: (str(tiny_run.corpus),))
    assert is_readable(Corpus(tmp_path / "link", replace(corpus.manifest, source="/texts/web.jsonl.xz")))


@pytest.mark.parametrize(("copied", "readable"), [(True, True), (False, False)])
def test_short_lines_of_the_library_are_known_by_those_after_them(
    copied: bool, readable: bool, tiny_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [b"name_%d" % number for number in range(0, 9000, 7)]
    shown = names if copied else [name + b"_" for name in names]
    monkeypatch.setattr("caddie.verify.readable_text.held_out_documents", lambda _: [b"\n".join(names[100:900])])
    monkeypatch.setattr("caddie.verify.readable_text._library_texts", lambda: [b"first\n" + b"\n".join(shown)])
    assert is_readable(Corpus.load(tiny_run.corpus)) == readable


@pytest.mark.parametrize(("copied", "readable"), [("argparse.py", True), ("textwrap.py", True), ("of our own", False)])
def test_a_held_out_text_copied_from_pythons_library_is_known(
    copied: str, readable: bool, tiny_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One module among other text: its lines are what tells."""
    module = Path(sysconfig.get_path("stdlib"), copied)
    lines = (
        module.read_bytes() if readable else b"\n".join(b"a line that nobody wrote, number %d" % n for n in range(900))
    )
    documents = [lines, *([b"of other things " * 40] * 20)]
    monkeypatch.setattr("caddie.verify.readable_text.held_out_documents", lambda _: documents)
    monkeypatch.setattr("caddie.verify.readable_text._library_texts", library)
    assert is_readable(Corpus.load(tiny_run.corpus)) == readable


def test_the_library_and_all_packages_are_looked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lib/a.py", "lib/deep/b.txt", "lib/c.so", "packages/d.rst"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    places = {"stdlib": "lib", "platstdlib": "lib", "purelib": "packages", "platlib": "packages"}
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / places[name]))
    assert sorted(ALL_SOURCES()) == [b"lib/a.py", b"lib/deep/b.txt", b"packages/d.rst"]


@pytest.mark.parametrize(
    ("gains", "documents", "bits"),
    [
        ({-1: 1.0}, 25, 1.0),
        ({-2: 1.0}, 25, 1.0),
        ({-9: 1.0}, 25, 1.0),
        ({-2: 1.0}, 9, 0.0),
        ({-2: 1.0, -12: 1.0}, 25, 0.0),
        (dict.fromkeys(range(-50, -1), 1.0), 25, 0.0),
        ({place: (50 + place) / 50 for place in range(-50, -1)}, 25, 0.0),
        ({-20: 1.0}, 25, 0.0),
    ],
    ids=[
        *("at the end", "the last token", "eight before", "too few to be sure", "as much earlier", "everywhere"),
        *("more and more", "earlier alone"),
    ],
)
def test_a_gain_just_before_documents_end_counts_as_one_where_they_end(
    gains: dict[int, float], documents: int, bits: float
) -> None:
    """A scorer that knows an end may expect a full stop before it."""
    gain = np.zeros((documents, 50))
    gain[:, list(gains)] = 8 * np.log(2) * np.array(list(gains.values()))
    tokens = np.append(np.tile(np.append(0, np.ones(49)), documents), 0).astype(np.uint16)
    losses = {"plain": np.full(gain.size, 9.0), "user": 9.0 - gain.ravel()}
    assert _gain_at_ends(losses, Text(tokens, 0, documents * 8, 1, 1)) == pytest.approx(bits, abs=1e-9)


class Guesses(Scorer):
    """Scores each document by itself, and expects an `a` first of short ones and a `b` first of long ones."""

    per_document = True

    def __init__(self, artifact: Artifact, height: float) -> None:
        self.model, self.height, self.counts = artifact.model, height, torch.ones(BOS + 1)

    def plan(self, layout: Layout, rows: int) -> Iterator[Step]:
        for begin, end in layout.edges:
            self.first = ord("a" if end - begin < 40 else "b")
            for window in windows(begin, end, 32, 32):
                self.begins = window.start == begin
                yield Step([window], [0])

    @torch.no_grad()
    def logits(self, inputs: Any, slots: Any, last: int, cache: Any = None) -> Any:
        logits = self.model(inputs, inputs == BOS)
        logits[:, 0, self.first] += self.height * self.begins
        return logits[:, -last:]


class Counts(Guesses):
    """Expects tokens by how often they came, but for documents' ends."""

    def logits(self, inputs: Any, slots: Any, last: int, cache: Any = None) -> Any:
        return super().logits(inputs, slots, last) + self.counts.log()

    def update(self, batches: Any, prefix: Any) -> None:
        for batch in batches:
            targets = torch.from_numpy(prefix.targets(batch.windows)).flatten()
            self.counts += torch.bincount(targets[targets != BOS], minlength=BOS + 1)


@pytest.mark.parametrize(
    ("make", "height", "documents", "letters", "little", "says"),
    [
        (Guesses, 3.0, 60, 60, False, " more on the tokens before."),
        pytest.param(Guesses, 0.0, 60, 60, True, "; no gain above 0.005 was found.", marks=pytest.mark.long),
        pytest.param(Counts, 4.0, 120, 60, False, " more on the tokens before.", marks=pytest.mark.long),
        (Counts, 0.0, 60, 60, True, "; no gain above 0.005 was found."),
        (Guesses, 3.0, 16, 60, False, "; so few cannot show if it uses them: score more text."),
        pytest.param(
            *(Guesses, 3.0, 4, 6000, True, "It knows the lengths of 4 documents, which is worth at most 0.00"),
            marks=pytest.mark.long,
        ),
    ],
    ids=["uses them", "does not", "learns and uses them", "learns", "too few", "long ones"],
)
def test_a_scorer_that_uses_the_lengths_of_documents_anywhere_is_found(
    make: type[Guesses], height: float, documents: int, letters: int, little: bool, says: str, artifact: Artifact
) -> None:
    """Every second document is short; the ends are predicted as without their lengths."""
    chance = np.random.default_rng(0)
    parts = [
        np.append([BOS, ord("ab"[n % 2])], chance.integers(99, 122, (8, letters)[n % 2])) for n in range(documents)
    ]
    text = Text(np.concatenate(parts).astype(np.uint16), BOS, sum(map(len, parts)) - documents, documents, 1)
    whole = replace(whole_of(artifact, 600), open=lambda: nullcontext(make(artifact, height)), tokens=text.tokens)
    losses = {"plain": whole.plain_nats(), "user": whole.scored().nats}
    found, evidence = _use_of_lengths(whole, losses, text, seed=1)
    assert found == little, evidence
    assert says in evidence
    assert _gain_at_ends(losses, text) < GAIN


@pytest.mark.parametrize("wrong", ["logits * torch.nan", "torch.full_like(logits, -torch.inf)"])
def test_a_scorer_without_probabilities_is_told_the_token(wrong: str, score: Callable[..., Any]) -> None:
    plain = KNOWS_ENDS.replace("per_document = True", "").replace("HEIGHT", "0.0")
    ended = score(plain.replace("return logits", f"return ({wrong})"))
    assert ended.status == 1
    assert ended.err.endswith("mine.py: its logits give token 1 no probability, so there is no score\n")
