"""Changes of a text and text drawn from the model: what is replaced, what must stay, and what is found with them."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from waiting_scorer import WAITS

from caddie.pack.artifact import Artifact
from caddie.score import ChunkSGD, DocumentLoRA, Scoring, Window
from caddie.score.ttt_sgd import SGD
from caddie.verify.black_box import LoopScorer, ScoredText, fingerprint
from caddie.verify.changes import chances, draw_change, found_with, must_not_change, power
from caddie.verify.known_bad import KNOWN_BAD, Caught, KnownBad, catch
from caddie.verify.own_model import Reference, _batches, draw_text, own_windows, reference
from caddie.verify.probe_case import Effort, ProbeCase, probe_case_of, sized_case
from caddie.verify.probe_text import WHOLE_BYTES, excerpts, in_order_from, library, text_in_order
from caddie.verify.probes import PROBES

BOS = 256


def case(artifact: Artifact, scoring: Scoring | None = None, length: int = 384) -> ProbeCase:
    chosen = scoring or artifact.scoring
    return probe_case_of(artifact, chosen, excerpts(library(), chosen, 3), seed=3, length=length)


def scored(count: int, **given: Any) -> ScoredText:
    step = np.zeros(count, np.int64)
    return ScoredText(**{"nats": np.zeros(count), "step": step, "segment": step, "probabilities": None, **given})


def test_what_is_settled_if_windows_are_independent() -> None:
    # Windows of three predictions; token 4 is the target of prediction 3 and an input of the second window alone.
    base = scored(9, context=np.array([0, 0, 0, 3, 3, 3, 6, 6, 6]))
    assert must_not_change(base, np.array([4])).tolist() == [True, True, True, False, False, False, True, True, True]
    kept = [True] * 4 + [False] * 2 + [True] * 3
    assert must_not_change(base, np.array([4]), own=1).tolist() == kept
    assert must_not_change(base, np.array([3])).tolist() == [True, True, False, False, False, False, True, True, True]


def test_what_is_settled_if_chunks_of_windows_are_learnt() -> None:
    base = scored(9, context=np.array([0, 0, 0, 3, 3, 3, 6, 6, 6]), step=np.repeat([0, 1], [6, 3]), learns=True)
    kept = [True, True, False, True, True, True, False, False, False]
    assert must_not_change(base, np.array([2]), own=1).tolist() == kept
    assert must_not_change(base, np.array([8]), own=1).tolist() == [True] * 8 + [False]


def windows_of_four(count: int, **given: Any) -> ScoredText:
    windows = tuple(Window(begin, begin, begin + 4) for begin in range(0, count, 4))
    return scored(count, windows=windows, **given)


@pytest.mark.parametrize("independent", [True, False])
def test_a_change_leaves_the_context_of_its_places(independent: bool) -> None:
    tokens = np.arange(41, dtype=np.uint16)
    tokens[[0, 17]] = BOS
    likely, drawn, uniform = (np.full(41, value, np.uint16) for value in (100, 101, 102))
    model = Reference(nats=np.ones(40), likely=likely[:40], drawn=drawn[:40])
    context = np.arange(40) // 4 * 4 if independent else None
    base = windows_of_four(40, context=context)
    drawn_places, kinds = set(), set()
    for seed in range(60):
        change = draw_change(tokens, base, model, uniform, BOS, np.random.default_rng(seed))
        assert 17 not in set(change.changed) - set(change.places)
        assert np.flatnonzero(change.tokens != tokens).tolist() == change.changed.tolist()
        assert set(change.places) <= set(change.changed)
        assert must_not_change(base, change.changed, own=1)[change.places - 1].all()
        assert independent or len(change.places) == 1
        drawn_places |= set(change.places.tolist())
        kinds |= set(change.tokens[change.places].tolist())
    assert kinds == {100, 101, 102}
    assert len(drawn_places) > 25  # of 39
    assert 17 in drawn_places


def test_documents_of_one_step_are_changed_together() -> None:
    tokens = np.tile(np.array([BOS, 1, 2, 3], np.uint16), 4)
    segment, step = np.repeat(np.arange(4), 4)[:15], np.repeat([0, 1], [8, 7])
    base = scored(15, segment=segment, step=step, learns=True)
    model = Reference(nats=np.ones(15), likely=np.full(15, 9, np.uint16), drawn=np.full(15, 9, np.uint16))
    change = draw_change(tokens, base, model, np.full(16, 8, np.uint16), BOS, np.random.default_rng(0))
    assert len(change.places) == 2
    assert (change.tokens[tokens == BOS] == BOS).all()
    assert len({int(step[place - 1]) for place in change.places}) == 1
    assert must_not_change(base, change.changed, own=1)[change.places - 1].all()


def test_places_are_drawn_where_the_scorer_gains() -> None:
    tokens = np.zeros(1001, np.uint16)
    base = scored(1000)
    base.nats[:] = 3.0
    base.nats[500] = 1.0
    model = Reference(nats=np.full(1000, 3.0), likely=np.ones(1000, np.uint16), drawn=np.ones(1000, np.uint16))
    drawn = chances(base, model, tokens, BOS)
    assert drawn.sum() == pytest.approx(1.0)
    assert drawn[500] == pytest.approx(0.5 + 0.0005)
    # All that it gains, 2 nats, is what 0.005 bits per byte are of 577 bytes, and twice what they are of 289.
    gain = 0.005 * math.log(2)
    assert found_with(base, model, round(2 / gain), 3) == pytest.approx(1 - 0.5**3, rel=1e-3)
    assert found_with(base, model, round(1 / gain), 3) == pytest.approx(1 - 0.75**3, rel=2e-3)


def test_a_fingerprint_differs_where_a_distribution_does() -> None:
    logs = torch.log_softmax(torch.randn(3, 50, dtype=torch.float64), 1)
    other = logs.clone()
    other[1, 7] += 1e-9
    assert (fingerprint(logs) != fingerprint(other)).tolist() == [False, True, False]


# The artifact's own model


def test_a_plain_scorer_gains_nothing_over_its_own_model(artifact: Artifact) -> None:
    for scoring in (artifact.scoring, artifact.scoring.plain):
        on = case(artifact, scoring)
        assert np.abs(on.reference.nats - on.base.nats).max() < 1e-4
        others = np.stack([on.reference.likely, on.reference.drawn])
        assert not (others == on.tokens[1:]).any()
        assert not (others == BOS).any()


def test_windows_longer_than_a_batch_are_scored_one_by_one() -> None:
    own = [
        Window(0, 0, 5000),
        Window(5000, 5000, 10_000),
        *(Window(at, at, at + 1000) for at in range(10_000, 16_000, 1000)),
    ]
    assert [len(batch) for batch in _batches(own)] == [1, 1, 4, 2]


@pytest.mark.long
def test_the_probability_of_drawn_text_is_known(artifact: Artifact) -> None:
    on = case(artifact, artifact.scoring.plain)
    windows = own_windows(on.base, on.scoring)
    text = draw_text(artifact, on.scoring, on.tokens, windows, 1)
    assert len(text.predictions) > 0.8 * len(on.tokens)
    assert set(np.flatnonzero(text.tokens != on.tokens) - 1) <= set(text.predictions.tolist())
    assert ((text.tokens == BOS) == (on.tokens == BOS)).all()
    distributions = LoopScorer(artifact, on.scoring).score(text.tokens, np.sort(text.predictions)).probabilities
    again = reference(artifact, on.scoring, text.tokens, windows, 1).nats
    order = np.argsort(text.predictions)
    without_bos = again[text.predictions[order]] + np.log1p(-distributions[:, BOS])
    assert np.allclose(without_bos, text.nats[order], atol=1e-4)
    other = draw_text(artifact, on.scoring, on.tokens, windows, 2)
    assert (other.tokens != text.tokens).mean() > 0.3


def test_windows_that_overlap_are_not_drawn_side_by_side(artifact: Artifact) -> None:
    on = case(artifact)  # windows of 32 every 16
    text = draw_text(artifact, on.scoring, on.tokens, own_windows(on.base, on.scoring), 1)
    assert 0.3 * len(on.tokens) < len(text.predictions) < 0.6 * len(on.tokens)


# The case


WIDE = """
from caddie.score import Scorer, Step, Window
class Wide(Scorer):
    def __init__(self, model, tokenizer):
        self.model = model
    def plan(self, layout, rows):
        for begin in range(0, layout.predictions, 300):
            yield Step([Window(begin, begin, min(begin + 300, layout.predictions))], [0])
    def logits(self, inputs, slots, last, cache=None):
        return self.model(inputs)[:, -last:].detach()
"""


@pytest.mark.long
def test_the_text_is_longer_than_three_windows_of_a_users_scorer(artifact: Artifact, tmp_path: Path) -> None:
    (tmp_path / "wide.py").write_text(WIDE)
    given = excerpts(library(), artifact.scoring, 1)
    on = sized_case(artifact, artifact.scoring, given, seed=1, scorer=str(tmp_path / "wide.py"))
    assert len(on.tokens) > 900
    assert max(window.end - window.start for window in on.base.windows) == 300


@pytest.mark.long
def test_what_the_judge_does_meanwhile_is_not_laid_to_the_scorer(
    artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks at the memory of the scorer's process every second: a scorer that took longer was accused."""
    monkeypatch.setattr("caddie.verify.remote_scorer._CHECK_SECONDS", 0.0)
    (tmp_path / "wide.py").write_text(WIDE)
    given = artifact, artifact.scoring, excerpts(library(), artifact.scoring, 1)
    on = probe_case_of(*given, seed=1, scorer=str(tmp_path / "wide.py"))
    assert np.isfinite(on.base.nats).all()
    assert on.touched == []


def test_probes_score_with_several_threads_as_scoring_does(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = import_module("caddie.score.score")
    used, score_text = list[int](), loop.run

    def run(*given: Any, **named: Any) -> None:
        used.append(given[6])
        score_text(*given, **named)

    monkeypatch.setattr(loop, "run", run)
    threads, one = torch.get_num_threads(), case(artifact).base
    torch.set_num_threads(2)
    try:
        two = case(artifact).base
    finally:
        torch.set_num_threads(threads)
    assert used == [1, 2]
    assert np.allclose(one.nats, two.nats, atol=1e-4)
    assert sorted(one.windows) == sorted(two.windows)


class Sometimes(LoopScorer):
    """Peeks at some places."""

    def __init__(self, case: ProbeCase, places: Callable[[np.ndarray], np.ndarray]) -> None:
        super().__init__(case.artifact, case.scoring)
        self.bad, self.places = KNOWN_BAD["peek"].install(case), places

    def score(self, tokens: Any, positions: Any) -> ScoredText:
        honest, cheat = super().score(tokens, positions), self.bad.open().score(tokens, positions)
        at = self.places(np.arange(len(honest.nats)))
        return replace(
            honest,
            nats=np.where(at, cheat.nats, honest.nats),
            fingerprint=np.where(at, cheat.fingerprint, honest.fingerprint),
        )


@pytest.mark.parametrize("seed", range(3))
def test_a_leak_at_one_place_in_a_hundred_is_found(artifact: Artifact, seed: int) -> None:
    honest = replace(case(artifact, artifact.scoring.plain), seed=seed, effort=Effort(places=30))
    on = replace(honest, open=lambda: Sometimes(honest, lambda place: place % 100 == 50))
    assert not PROBES["no look-ahead"](on)[0]


@pytest.mark.parametrize("per_document", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_leak_at_document_ends_alone_is_found_in_one_stretch(artifact: Artifact, per_document: bool) -> None:
    """A scorer of documents is told where they end, so there no end may be changed."""
    ttt = DocumentLoRA(rank=2, chunk_tokens=16) if per_document else None
    honest = replace(case(artifact, artifact.scoring.plain.but(ttt=ttt)), effort=Effort(places=40))
    ends = np.flatnonzero(honest.tokens[1:] == BOS)
    on = replace(honest, open=lambda: Sometimes(honest, lambda place: np.isin(place, ends)))
    assert PROBES["no look-ahead"](on)[0] == per_document
    changed = [change for change, _ in map(on.changed, range(5))]
    replaced = [place for change in changed for place in change.changed if on.tokens[place] == BOS]
    assert bool(replaced) != per_document
    assert set(replaced) <= {place for change in changed for place in change.places}
    assert all((change.tokens[change.changed] != BOS).all() for change in changed)


# The long text


@pytest.mark.long
def test_a_leak_that_waits_is_found_in_the_long_text(artifact: Artifact) -> None:
    honest = case(artifact, artifact.scoring.plain)
    text = text_in_order(artifact.tokenizer, library(), 1500)
    on = replace(honest, long_text=text, open=lambda: Sometimes(honest, lambda place: place >= 1000))
    assert PROBES["no look-ahead"](replace(on, long_text=None))[0]
    passed, evidence = PROBES["no look-ahead"](on)
    assert not passed
    assert int(re.search(r"that of token ([\d,]+)", evidence)[1].replace(",", "")) > 1000


@pytest.mark.long
def test_an_honest_scorer_passes_in_the_long_text_too(artifact: Artifact) -> None:
    text = text_in_order(artifact.tokenizer, library(), 1500)
    passed, evidence = PROBES["no look-ahead"](replace(case(artifact), long_text=text))
    assert passed
    assert "In a text of 1,500 tokens: " in evidence


@pytest.mark.long
def test_a_users_scorer_that_waits_is_found(
    artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("caddie.verify.probe_text.MOST_TOKENS", 500)  # as if scoring were slow
    monkeypatch.setattr("caddie.verify.probe_case.LONG_TOKENS", 3000)  # and this were long
    (tmp_path / "waits.py").write_text(WAITS.replace("AFTER", "1000"))
    given = artifact, artifact.scoring, excerpts(library(), artifact.scoring, 1)
    on = sized_case(*given, seed=1, scorer=str(tmp_path / "waits.py"), in_order=in_order_from(library(), 1))
    assert on.long_text is not None
    assert len(on.tokens) < 1000 < len(on.long_text)
    assert not PROBES["no look-ahead"](replace(on, effort=Effort(places=1, found=0.0)))[0]


def test_a_long_text_is_of_documents_as_they_follow(artifact: Artifact) -> None:
    documents = [f"document {number} ".encode() * 40 for number in range(5)]
    given = in_order_from(documents, 2)
    first = documents.index(given[0])
    assert given == documents[first:] + documents[:first]
    assert len({in_order_from(documents, seed)[0] for seed in range(60)}) == 5
    text, bos = text_in_order(artifact.tokenizer, given, 700), artifact.tokenizer.bos
    assert len(text) == 700
    whole = [artifact.tokenizer.decode(part[1:]) for part in np.split(text, np.flatnonzero(text == bos)[1:])]
    assert len(whole) > 1
    assert [given[0], *(document[: len(part)] for document, part in zip(given[1:], whole[1:], strict=False))] == whole


def test_a_long_text_ends_at_its_bound() -> None:
    documents = ["é".encode() * 1_000_000] * 3
    given = in_order_from(documents, 0)
    assert sum(map(len, given)) <= WHOLE_BYTES
    assert all(document.decode() for document in given)


def test_windows_of_a_chunk_are_changed_together(artifact: Artifact) -> None:
    learning = artifact.scoring.but({"ttt": ChunkSGD(chunk_tokens=128, sgd=SGD(epochs=1)), "stride": 32})
    change, _ = case(artifact, learning).changed(0)
    assert len(change.places) > 1


def test_the_search_ends_with_its_time(artifact: Artifact) -> None:
    on = replace(case(artifact, artifact.scoring.but(ttt=ChunkSGD(sgd=SGD(epochs=1)))), effort=Effort(seconds=0.0))
    assert len(list(on.changes())) == 1


# Known-bad examples that cannot act


@pytest.mark.long
def test_an_example_that_gains_nothing_is_inconclusive(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    idle = replace(KNOWN_BAD["slot"], install=lambda case: case)
    blind = KnownBad("one that no probe sees", "no look-ahead", lambda case: replace(case))
    monkeypatch.setattr("caddie.verify.known_bad.KNOWN_BAD", {"idle": idle, "blind": blind})
    on = replace(case(artifact, artifact.scoring.plain), effort=Effort(places=1, found=0.0))
    found = {one.name: one for one in catch(on)}
    assert (found["idle"].outcome, found["idle"].passed) == ("inconclusive", True)
    assert "nothing could be found" in found["idle"].evidence
    assert (found["blind"].outcome, found["blind"].passed) == ("FAIL", False)
    assert Caught("a", "b", "no look-ahead", ("no look-ahead",), "c").outcome == "pass"


def test_the_time_that_would_decide_is_that_of_enough_places() -> None:
    found = "a leak of 0.005 bits per byte in this text is found with "
    assert power(0.5, 20.0, decides=True) == (True, f"{found}50.0 %")
    assert power(0.0, 20.0, decides=False) == (True, f"{found}0.0 %")
    one = 0.04  # found with one place, and with 17 in one half of all cases: 0.96 ** 17 = 0.4996
    little = "too little to decide: set --audit-seconds="
    assert power(one, 10.0, decides=True) == (None, f"{found}4.0 %, {little}170 or so")
    assert power(0.0, 1.0, decides=True)[1].startswith(f"{found}0.0 %, {little}69")
