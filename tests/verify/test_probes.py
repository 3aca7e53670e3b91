"""The probes: every shipped scorer passes them, and every known-bad example fails its own."""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recording import RecordedProgress
from torch import Tensor, nn

from caddie.data.corpus import Corpus
from caddie.data.tokenizers import MARK, ByteTokenizer, Ids
from caddie.errors import UserError
from caddie.model import build
from caddie.pack.artifact import Artifact, load
from caddie.runtime.progress import json_line
from caddie.score import SGD, ChunkSGD, DocumentLoRA, GlobalSGD, Layout, Scorer, Scoring, Step, windows
from caddie.score.ngram_tilt import NGramTilt
from caddie.verify import cheats
from caddie.verify.black_box import BlackBoxScorer, LoopScorer, ScoredText, fingerprint
from caddie.verify.changes import Change, must_not_change
from caddie.verify.cheats import CheatScorer
from caddie.verify.held_out import COMES_BACK
from caddie.verify.known_bad import KNOWN_BAD, Caught, known_bad
from caddie.verify.probe_case import Effort, ProbeCase, probe_case_of
from caddie.verify.probe_text import (
    DOCUMENTS,
    draw_noise,
    excerpts,
    fit_to_text,
    library,
    long_enough,
    probe_text,
    with_other_tokens,
)
from caddie.verify.probes import FAR, HELD_OUT, PROBES, Check, check_disjoint, probe_event, run_probes
from caddie.verify.sandbox import Outcome

verification = import_module("caddie.verify.verify")

DOCS = Path(__file__).parent.parent.parent / "docs"
quick = settings(derandomize=True, deadline=None, max_examples=20)


@pytest.fixture(scope="module")
def artifact(tiny_run: Any) -> Artifact:
    """A packed artifact whose weights matter: those of two steps are nearly what they began as."""

    loaded = load(tiny_run.artifact)
    return replace(loaded, model=stirred(loaded))


def stirred(loaded: Artifact, **diff: object) -> nn.Module:
    """A model of the same kind with random weights, so that all that it computes shows in what it says.

    It has one layer: the probes see a model from outside, and price many texts with it.
    """
    model = build(loaded.model.config.but({"depth": 1, **diff}), 0)
    chance = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.requires_grad_(False).add_(0.2 * torch.randn(parameter.shape, generator=chance))
    return model


def case(artifact: Artifact, scoring: Scoring | None = None, *, seed: int = 1, **given: Any) -> ProbeCase:
    """A case with a short text and little effort."""
    chosen = scoring or artifact.scoring
    made = probe_case_of(artifact, chosen, excerpts(library(), chosen, seed), seed=seed, **given)
    return replace(made, effort=Effort(places=12, found=0.0))


def failed(on: ProbeCase) -> set[str]:
    """Names of the probes that fail."""
    return {check.name for check in run_probes(on) if check.passed is False}


def seen(on: ProbeCase, name: str) -> str:
    """What a probe saw."""
    return next(check.evidence for check in run_probes(on) if check.name == name)


def checked(on: ProbeCase, name: str) -> Check:
    """Return what that probe alone finds in a case whose scorer can score a text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("caddie.verify.probes.PROBES", {one: PROBES[one] for one in ("scores a text", name)})
        scored, found = run_probes(on)
    assert scored.passed
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("factor", "isolated", "passes"),
    [(0.9, False, True), (1.04, False, True), (1.06, False, False), (0.9999, True, False), (1.0001, True, False)],
)
def test_another_order_of_documents_may_cost_little_more_or_any_less(
    factor: float, isolated: bool, passes: bool, artifact: Artifact
) -> None:
    on = case(artifact, artifact.scoring.plain)
    documents = np.cumsum(on.tokens == on.bos)[:-1] if isolated else np.zeros(len(on.tokens) - 1)
    base = replace(on.base, nats=np.ones(len(on.tokens) - 1), segment=documents, isolated=isolated, learns=False)
    other = SimpleNamespace(score=lambda *_: SimpleNamespace(nats=factor * base.nats))
    on = replace(on, open=lambda: other)
    vars(on)["base"] = base
    assert PROBES["document order does not matter"](on)[0] == passes


# What is shipped passes

SHIPPED = {
    "sliding": None,
    "plain": None,
    "chunks": ChunkSGD(sgd=SGD(epochs=1)),
    "documents": DocumentLoRA(rank=2, lr=0.01, chunk_tokens=32, targets=("query", "head")),
    "documents and all weights": DocumentLoRA(
        rank=2, lr=0.01, chunk_tokens=32, targets=("query", "head"), warm_start=False, phases=GlobalSGD()
    ),
}


SLOW = {"chunks": pytest.mark.long, "documents and all weights": pytest.mark.long, "documents": pytest.mark.slow}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=SLOW.get(name, ())) for name in SHIPPED],
)
@pytest.mark.parametrize("tilt", [None, pytest.param(NGramTilt(order=3), marks=pytest.mark.long)], ids=["", "tilt"])
def test_what_is_shipped_passes(name: str, tilt: NGramTilt | None, artifact: Artifact) -> None:
    scoring = artifact.scoring.but(ttt=SHIPPED[name])
    on = case(artifact, (scoring.plain if name == "plain" else scoring).but(tilt=tilt))
    checks = run_probes(on)
    assert [check.name for check in checks if not check.passed] == []
    assert {check.name for check in checks} == set(PROBES) - {HELD_OUT, FAR}
    assert on.base.learns == (SHIPPED[name] is not None or tilt is not None)
    if on.base.learns:  # else nothing was probed of it
        frozen = case(artifact, on.scoring.but(ttt=None, tilt=None))
        assert on.differ(on.base.nats, frozen.base.nats).any()


@pytest.mark.long
def test_documents_that_the_model_keeps_apart(artifact: Artifact) -> None:
    apart = replace(artifact, model=stirred(artifact, **{"block.attention.scope": "document"}))
    on = case(apart)
    assert on.base.isolated
    assert not failed(on)
    assert ": 0 of " in seen(on, "documents are isolated")

    def smear(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return output + 0.1 * torch.cat((output[:, :1], output[:, :-1]), 1)

    apart.model.embedding.register_forward_hook(smear)
    assert failed(case(apart)) == {"documents are isolated"}


@pytest.mark.long
def test_half_precision_passes(artifact: Artifact) -> None:
    assert not failed(case(artifact, artifact.scoring.but(precision="bfloat16")))


# What is known to be bad is caught


CAUSES = {
    "ngram_blend": "add up to",
    "double_space": "a leading space is counted twice",
    "three_byte_space": "a space by itself is counted as three bytes",
    "targets_on_disk": "validation.bin",
    "trained_on": "held-out documents, by their hashes",
    "constant": "the scorer reads no text",
}


@pytest.mark.parametrize("name", [name for name in KNOWN_BAD if KNOWN_BAD[name].probe != FAR])  # in test_whole_text.py
def test_a_known_bad_example_fails_its_probe(name: str, artifact: Artifact) -> None:
    on = known_bad(name).install(case(artifact, artifact.scoring.plain))
    found = checked(on, KNOWN_BAD[name].probe)
    assert not found.passed
    assert CAUSES.get(name, "") in found.evidence


def test_every_probe_has_an_example() -> None:
    assert {example.probe for example in KNOWN_BAD.values()} == set(PROBES) - {"scores a text"}


@pytest.mark.long
def test_the_seed_does_not_matter(artifact: Artifact) -> None:
    honest = case(artifact, artifact.scoring.plain)
    for seed in range(2):
        again = replace(honest, seed=seed)
        assert not failed(again)
        for name in ("peek", "knows_the_ends"):
            assert not checked(known_bad(name).install(again), KNOWN_BAD[name].probe).passed


@pytest.mark.long
def test_hints_of_documents_scored_later_are_found_with_every_seed(artifact: Artifact) -> None:
    example = known_bad("hints_in_file_order")
    for seed in range(10):
        honest = case(artifact, artifact.scoring.plain, seed=seed)
        assert not checked(example.install(honest), example.probe).passed


@pytest.mark.long
def test_a_weak_model_is_drawn_from_until_a_gain_shows(tiny_run: Any) -> None:
    """Its likeliest token comes once in 200 times, so one text holds two such places."""
    loaded = load(tiny_run.artifact)
    example = known_bad("likely_peek")
    for seed in range(5):
        honest = case(loaded, loaded.scoring.plain, seed=seed)
        assert checked(honest, example.probe).passed
        assert not checked(example.install(honest), example.probe).passed


def test_every_second_change_reaches_all_that_is_scored_later(artifact: Artifact) -> None:
    on = known_bad("hints_in_file_order").install(case(artifact, artifact.scoring.plain))
    for index in range(6):
        change, _ = on.changed(index)
        first = on.base.step[change.changed - 1].min()
        later = np.flatnonzero((on.base.step > first) & (on.tokens[1:] != on.bos)) + 1
        reached = np.isin(later, change.changed).mean() if len(later) else 1.0
        assert reached > 0.9 if index % 2 else reached < 0.9


@pytest.mark.long
def test_the_evidence_says_what_was_changed_and_found(artifact: Artifact) -> None:
    on = case(artifact, artifact.scoring.plain)
    changed = sum(len(on.changed(index)[0].changed) for index in (0, 2))
    assert seen(on, "context matters").startswith(f"{changed:,} tokens changed: ")
    assert "; the true token ranks above 0." in seen(on, "random tokens are not predicted")


@pytest.mark.parametrize(("wrong", "changed", "named"), [(3, [1, 2, 3], 3), (0, [2, 3, 4], 2), (1, [1, 3, 4], 3)])
def test_the_evidence_names_the_next_change_or_the_last(
    wrong: int, changed: list[int], named: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two documents of three tokens is scored first, so it may not depend on the first one's tokens."""
    base = scored([1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1])
    change = Change(tokens=np.zeros(7, np.uint16), changed=np.array(changed), places=np.array(changed[:1]))
    monkeypatch.setattr("caddie.verify.probes.must_not_change", lambda base, changed, own=0: np.ones(6, np.bool_))
    other = replace(base, nats=np.where(np.arange(6) == wrong, 1.0, 0.0))
    on: Any = SimpleNamespace(base=base, changes=lambda: [(change, other)], differ=lambda a, b: a != b)
    passed, evidence = PROBES["no look-ahead"](on)
    assert not passed
    assert evidence.endswith(f"such as that of token {wrong + 1} after a change from token {named} on")


class Remembers(Scorer):
    """Scores each document by itself, but expects tokens that it was shown in any."""

    per_document = True

    def __init__(self, artifact: Artifact) -> None:
        self.model, self.bos = artifact.model, artifact.tokenizer.bos
        self.counts = torch.ones(artifact.tokenizer.vocabulary)

    def plan(self, layout: Layout, rows: int) -> Iterator[Step]:
        for begin, end in layout.edges:
            for window in windows(begin, end, 64, 64):
                yield Step([window], [0])

    @torch.no_grad()
    def logits(self, inputs: Tensor, slots: Any, last: int, cache: Any = None) -> Tensor:
        logits = self.model(inputs, inputs == self.bos) + self.counts.log()
        self.counts += torch.bincount(inputs[0], minlength=len(self.counts))
        return logits[:, -last:]


class Learns(Remembers):
    """Says that it remembers."""

    def update(self, batches: Any, prefix: Any) -> None:
        return


class Peeks(Remembers):
    """Looks ahead."""

    def logits(self, inputs: Tensor, slots: Any, last: int, cache: Any = None) -> Tensor:
        logits = self.model(inputs, inputs == self.bos)
        logits[:, :-1].scatter_add_(2, inputs[:, 1:, None], torch.full((1, inputs.shape[1] - 1, 1), 5.0))
        return logits[:, -last:]


@pytest.mark.parametrize(
    ("scorer", "outcome", "says"),
    [
        (Remembers, "FAIL", "changed with later tokens, or with other documents, which needs `update`: "),
        (Learns, "pass", "nor a distribution"),
        (Peeks, "FAIL", "settled losses and distributions changed with later tokens"),
    ],
)
def test_a_scorer_that_remembers_without_saying_so_is_told_that_and_not_that_it_looks_ahead(
    scorer: type[Remembers], outcome: str, says: str, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = LoopScorer._recorded
    monkeypatch.setattr(LoopScorer, "_recorded", lambda self, _, *text: recorded(self, scorer(self.artifact), *text))
    found = checked(replace(case(artifact), effort=Effort(places=8, found=0.0)), "no look-ahead")
    assert (found.outcome, says in found.evidence) == (outcome, True), found.evidence


def test_the_smear_scores_a_text_that_ends_where_a_document_begins(artifact: Artifact) -> None:
    on = known_bad("smear").install(case(artifact))
    scored = on.open().score(np.append(on.tokens, np.uint16(on.bos)), on.positions)
    assert len(scored.nats) == len(on.tokens)
    assert np.isfinite(scored.nats).all()


def test_an_unknown_example_is_a_mistake() -> None:
    with pytest.raises(UserError, match=r"^no known-bad example slut \(did you mean slot\?"):
        known_bad("slut")


# Probes by hand


def scored(step: list[int], segment: list[int]) -> ScoredText:
    nats = np.zeros(len(step))
    return ScoredText(nats=nats, step=np.array(step), segment=np.array(segment), probabilities=None)


def test_what_was_charged_before_by_hand() -> None:
    one = scored([0, 0, 0, 1, 1, 1], [0] * 6)
    # Token 5 is the target of prediction 4: what came before it in its step and all of the step before is settled.
    assert must_not_change(one, np.array([5])).tolist() == [True, True, True, True, False, False]
    assert must_not_change(one, np.array([5, 2])).tolist() == [True, False, False, False, False, False]
    assert must_not_change(one, np.array([5]), own=1).tolist() == [True, True, True, True, True, False]
    # Two documents side by side, the second charged for in the same steps: it must not notice, nor may step 1.
    two = scored([0, 0, 1, 0, 0, 1], [0, 0, 0, 1, 1, 1])
    assert must_not_change(two, np.array([2])).tolist() == [True, False, False, True, True, False]
    assert must_not_change(two, np.array([3])).tolist() == [True, True, False, True, True, True]


class Fixed(BlackBoxScorer):
    """States what a function of the text says, and charges for it."""

    def __init__(self, artifact: Artifact, say: Callable[[Ids], np.ndarray], charge: float = 1.0) -> None:
        super().__init__(artifact, artifact.scoring)
        self.say, self.charge = say, charge

    def score(self, tokens: Ids, positions: np.ndarray) -> ScoredText:
        probabilities = self.say(tokens)
        place = np.arange(len(tokens) - 1)
        nats = -np.log(self.charge * probabilities[place, tokens[1:]])
        return ScoredText(
            nats=nats,
            step=place,
            segment=np.zeros_like(place),
            probabilities=probabilities[positions],
            fingerprint=fingerprint(torch.from_numpy(probabilities).log()),
            ends=np.log(probabilities[:, self.bos]),
        )


def after_last(tokens: Ids) -> np.ndarray:
    """A predictor that expects the last token again."""
    probabilities = np.full((len(tokens) - 1, 257), 0.5 / 257)
    probabilities[np.arange(len(probabilities)), tokens[:-1]] += 0.5
    return probabilities


KNOWS_THE_NEXT = {
    "drawn text is not predicted",
    "no look-ahead",
    "random tokens are not predicted",
    "document ends are not predicted",
    "context matters",
}


@pytest.mark.parametrize(
    ("say", "charge", "fails"),
    [
        (after_last, 1.0, set()),
        (after_last, 1.01, {"distributions sum to one"}),
        (lambda tokens: after_last(tokens) * 1.001, 1.0, {"distributions sum to one"}),
        (lambda tokens: np.roll(after_last(tokens), -1, axis=0), 1.0, KNOWS_THE_NEXT),
        (lambda tokens: after_last(tokens[::-1]), 1.0, {"no look-ahead", "context matters"}),
    ],
    ids=["honest", "charges less", "sums to more", "one ahead", "backwards"],
)
def test_probes_on_a_predictor_known_by_hand(
    say: Callable[[Ids], np.ndarray], charge: float, fails: set[str], artifact: Artifact
) -> None:
    on = replace(case(artifact), open=lambda: Fixed(artifact, say, charge))
    assert failed(on) == fails


@pytest.mark.long
def test_noise_costs_what_chance_says(artifact: Artifact) -> None:
    """The best predictor of noise pays its entropy; whoever knows how it is made is not accused."""

    def best(tokens: Ids) -> np.ndarray:
        probabilities = np.full((len(tokens) - 1, 257), 19 / 20 / 256)
        probabilities[:, artifact.tokenizer.bos] = 1 / 20
        probabilities[np.arange(len(probabilities)), tokens[:-1]] *= 1 + 1e-9  # so that the past matters
        return probabilities / probabilities.sum(1, keepdims=True)

    on = replace(case(artifact), open=lambda: Fixed(artifact, best), document_tokens=(20,))
    assert not failed(on)
    tokens, _, charged = on.noise
    ends = int((tokens[1:] == artifact.tokenizer.bos).sum())
    others = len(tokens) - 1 - ends
    expected = ends * math.log(20) + others * (math.log(20 / 19) + math.log(256))
    assert charged.nats.sum() == pytest.approx(expected, rel=1e-6)
    assert on.noise_text.nats.sum() == pytest.approx(expected)


def test_documents_of_noise_are_as_long_as_those_of_the_held_out_text() -> None:
    noise = draw_noise([4] * 32 + [100] * 32, 200_000, 8, 5, np.random.default_rng(0))
    ends = np.flatnonzero(noise.tokens == 5)
    assert np.diff(ends).mean() == pytest.approx(52, rel=0.05)
    age = np.arange(len(noise.nats)) - ends[np.searchsorted(ends, np.arange(len(noise.nats)), side="right") - 1]
    for low, high in ((0, 1), (1, 4), (4, 12), (12, 40), (40, 200)):  # the longer one lasts, the longer it will
        here = (age >= low) & (age < high)
        stated = np.where(noise.tokens[1:] == 5, np.exp(-noise.bos_or_not), -np.expm1(-noise.bos_or_not))[here]
        seen = (noise.tokens[1:] == 5)[here]
        assert seen.sum() == pytest.approx(stated.sum(), abs=5 * math.sqrt(stated.sum()))
    assert noise.nats.mean() == pytest.approx(noise.bos_or_not.mean() + math.log(7), abs=0.1)
    few = draw_noise([10_000], 1200, 8, 5, np.random.default_rng(0))
    assert 3 < np.count_nonzero(few.tokens == 5) < 30


def test_ends_are_found_where_only_long_documents_have_them_known(artifact: Artifact) -> None:
    def cheat(on: ProbeCase, tokens: Ids, probs: np.ndarray) -> np.ndarray:
        if len(tokens) < 40 * np.count_nonzero(tokens == on.bos):
            return probs
        return cheats.knows_the_ends(on, tokens, probs)

    for seed in range(3):
        on = replace(case(artifact, artifact.scoring.plain, seed=seed, length=1200), document_tokens=(90, 100, 2000))
        bad = replace(on, open=lambda on=on: CheatScorer(on, cheat))
        assert not checked(bad, "document ends are not predicted").passed
        assert checked(on, "document ends are not predicted").passed


def test_the_rest_of_a_short_document_is_left_out_of_a_long_probe_text() -> None:
    """A text of 7,682 bytes is cut into pieces of 320, the last of which has two bytes."""
    pieces = excerpts([b"It is one document. " * 384 + b"ab"], Scoring(sequence_length=128, stride=128), 1)
    assert min(map(len, pieces)) == 2
    tokens = probe_text(ByteTokenizer(), pieces, 16_384)
    begins = np.flatnonzero(tokens == ByteTokenizer().bos)
    assert len(begins) > 6
    assert min(np.diff([*begins, len(tokens)])) >= 8


def test_noise_is_long_enough_for_a_scorer_that_knows_long_documents(artifact: Artifact) -> None:
    scoring = artifact.scoring.but(ttt=SHIPPED["documents"])
    on = replace(case(artifact, scoring), document_tokens=(60,), long_text=np.zeros(3000, np.uint16))
    assert on.base.ends_known
    assert len(on.noise_text.tokens) == 720
    assert len(replace(on, document_tokens=(900,)).noise_text.tokens) == 3000
    assert len(replace(on, long_text=None).noise_text.tokens) == len(on.tokens)


class Folding(ByteTokenizer):
    """Gives a text back with some bytes replaced by others."""

    def __init__(self, folds: bytes) -> None:
        super().__init__()
        self.folds = folds

    def decode(self, ids: Any) -> bytes:
        return super().decode(ids).translate(self.folds)


def table(*pairs: tuple[int, int]) -> bytes:
    return bytes(dict(pairs).get(byte, byte) for byte in range(256))


@pytest.mark.long
@pytest.mark.parametrize(
    ("folds", "passes"),
    [
        (table((ord("Q"), ord("q"))), True),
        (table((ord("\n"), ord(" "))), False),  # in code the line breaks say much
        (bytes(range(256)).lower(), False),
        (bytes([ord("e")]) * 256, False),
    ],
)
def test_a_tokenizer_that_loses_what_makes_the_score_is_found(folds: bytes, passes: bool, artifact: Artifact) -> None:
    documents = [text[:4000] for text in library()[:4]]
    on = replace(case(replace(artifact, tokenizer=Folding(folds))), documents=documents)
    evidence = seen(on, "bytes are counted once")
    assert ("bytes are counted once" not in failed(on)) == passes
    assert "not round-trip" in evidence
    assert ("this scores another text" in evidence) != passes


def test_what_is_lost_of_short_documents_counts_as_well(artifact: Artifact) -> None:
    lower = replace(artifact, tokenizer=Folding(bytes(range(256)).lower()))
    on = replace(case(lower), documents=[text[:500] for text in library()[:24]])
    assert "this scores another text" in checked(on, "bytes are counted once").evidence


def test_windows_of_one_token_do_not_spare_a_scorer_the_later_probes(artifact: Artifact) -> None:
    """It may plan longer ones later; only the loop of a `TokenScorer` shows charged tokens alone."""
    single = case(artifact, artifact.scoring.but(sequence_length=1, stride=1))
    assert max(window.end - window.start for window in single.base.windows) == 1
    assert "scored tokens alone" not in checked(single, "no look-ahead").evidence


def test_one_that_breaks_fails_and_says_how(artifact: Artifact) -> None:
    def broken(tokens: Ids) -> np.ndarray:
        raise ZeroDivisionError("by zero")

    on = replace(case(artifact), open=lambda: Fixed(artifact, broken))
    assert [(check.name, check.passed) for check in run_probes(on)] == [
        ("scores a text", False),
        ("reads nothing else", True),
    ]
    assert seen(on, "scores a text") == "ZeroDivisionError: by zero"


@pytest.mark.long
def test_a_space_without_a_piece_is_named(artifact: Artifact) -> None:
    class Marks(ByteTokenizer):
        def decode(self, ids: Any) -> bytes:
            return super().decode(ids).replace(b" ", MARK.encode())

    marks = Marks()
    marked = replace(artifact, tokenizer=marks)
    on = replace(case(marked), count=lambda ids: np.where(np.asarray(ids) == 32, 3, 1))
    assert "three bytes of U+2581" in seen(on, "bytes are counted once")
    assert "bytes are counted once" in failed(on)


def test_documents_in_both_sets_are_counted() -> None:
    assert check_disjoint(frozenset([b"a", b"b"]), frozenset([b"c"]))[0]
    passed, evidence = check_disjoint(frozenset([b"a", b"b"]), frozenset([b"b", b"c"]))
    assert not passed
    assert evidence == "1 of 2 held-out documents, by their hashes, among 2 training documents"


# The case


@quick
@given(st.integers(0, 2**32 - 1), st.integers(3, 300), st.data())
def test_changed_tokens_are_others_and_none_is_bos(seed: int, vocabulary: int, data: st.DataObject) -> None:
    bos = data.draw(st.integers(0, vocabulary - 1))
    tokens = np.array(data.draw(st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=30)), np.uint16)
    places = np.flatnonzero(tokens != bos)[:: data.draw(st.integers(1, 3))]
    changed = with_other_tokens(tokens, places, bos, vocabulary, np.random.default_rng(seed))
    assert np.flatnonzero(changed != tokens).tolist() == places.tolist()
    assert (changed[places] != bos).all()
    assert int(changed.max()) < vocabulary


def test_every_other_token_is_as_likely() -> None:
    tokens = np.full(6000, 2, np.uint16)
    changed = with_other_tokens(tokens, np.arange(6000), 4, 5, np.random.default_rng(0))
    counts = np.bincount(changed, minlength=5)
    assert counts[[2, 4]].tolist() == [0, 0]
    assert min(counts[[0, 1, 3]]) > 1850


def test_adaptations_are_cut_to_the_text() -> None:
    scoring = Scoring(sequence_length=32, stride=16, ttt=DocumentLoRA(chunk_tokens=16, phases=GlobalSGD()))
    cut = fit_to_text(scoring, 400).ttt
    assert isinstance(cut, DocumentLoRA)
    assert (cut.chunk_tokens, cut.documents, cut.rank) == (16, 2, 80)
    assert cut.phases is not None
    assert (cut.phases.chunk_tokens, cut.phases.documents) == (100, 4)
    assert fit_to_text(scoring.but(ttt=None), 400) == scoring.but(ttt=None)


def test_a_probe_text_is_of_several_documents_whatever_there_is() -> None:
    scoring = Scoring(sequence_length=32, stride=16)
    long = bytes(range(32, 127)) * 200
    for documents in ([long], [b"short", long, long[::-1]], [b"%d" % index * 400 for index in range(9)]):
        pieces = excerpts(documents, scoring, 1)
        assert len(pieces) >= DOCUMENTS
        assert all(piece in b"\n".join(documents) for piece in pieces)
        assert pieces != excerpts(documents, scoring, 2)
        tokens = probe_text(ByteTokenizer(), pieces, 400)
        before, first, *short, behind = np.split(tokens, np.flatnonzero(tokens == 256)[1:])
        lengths = list(map(len, (first, *short)))
        assert lengths[0] == 250
        assert len(set(lengths)) == len(lengths) >= DOCUMENTS
        assert before[1:].tolist() == first[1:25].tolist()
        assert behind[1:].tolist() == first[126:150].tolist()
    with pytest.raises(UserError, match="too short to be probed with"):
        probe_text(ByteTokenizer(), excerpts([b"abc"], scoring, 1), 64)
    assert not long_enough(ByteTokenizer(), excerpts([b"abc"], scoring, 1)), "then it is of Python's library"
    assert long_enough(ByteTokenizer(), excerpts([long], scoring, 1))


@pytest.mark.long
def test_a_held_out_text_too_short_is_replaced_and_the_evidence_says_so(
    tiny_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = import_module("caddie.verify.verify")
    corpus: Any = SimpleNamespace(check_counts=lambda: None)
    monkeypatch.setattr(module, "check_held_out", lambda *given: [])
    for documents, replaced in (([b"abc"], True), ([bytes(range(32, 127)) * 200], False)):
        monkeypatch.setattr(module, "held_out_documents", lambda _, held=documents: held)
        verdict = module.verify(load(tiny_run.artifact), 10**6, corpus=corpus)
        (sandbox,) = [check for check in verdict.checks if check.name == "runs in a sandbox"]
        assert ("Python's library took its place" in sandbox.evidence) == replaced
        assert sandbox.passed


# A user's own


def scorers(page: Path) -> Iterator[tuple[str, str, set[str]]]:
    """File name, code and what must fail, of each scorer on a page."""
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        name, says = re.match(r"# (\w+\.py): (.*)\n", code).groups()
        yield name, code, set(re.findall(r'"([^"]+)"', says))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "code", "fails"), [pytest.param(*case, id=case[0]) for case in scorers(DOCS / "scorers.md")]
)
def test_the_scorers_on_the_page(name: str, code: str, fails: set[str], artifact: Artifact, tmp_path: Path) -> None:
    (tmp_path / name).write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        on = case(artifact, scorer=str(tmp_path / name), length=200)
        patch.setattr("sys.dont_write_bytecode", True)  # as in the sealed process
        found = failed(on)
    assert fails <= found
    assert fails or not found


def test_the_page_shows_every_example_and_probe() -> None:
    page = (DOCS / "metric.md").read_text()
    rows = re.findall(r"^\| `known_bad:(\w+)` \|.*\| `([^`]+)` \|$", page, flags=re.MULTILINE)
    assert dict(rows) == {name: example.probe for name, example in KNOWN_BAD.items()}
    for probe in PROBES:
        assert f"`{probe}`" in page


def test_the_page_of_attacks_names_tests_that_there_are() -> None:
    named = set(re.findall(r"`(test_\w+)`", (DOCS / "results" / "probes.md").read_text()))
    sources = [
        path.read_text()
        for folder in ("verify", "score")
        for path in (DOCS.parent / "tests" / folder).glob("test_*.py")
    ]
    assert len(named) > 10
    assert named <= {name for source in sources for name in re.findall(r"^def (test_\w+)\(", source, re.MULTILINE)}


# From the command line, in a sealed process


@pytest.mark.long
@pytest.mark.parametrize(
    "examples",
    [("peek", "targets_on_disk", "three_byte_space"), pytest.param(tuple(KNOWN_BAD), marks=pytest.mark.slow)],
    ids=["three examples", "all examples"],
)
def test_verify_tries_everything_on_held_out_text(
    examples: tuple[str, ...],
    tiny_run: Any,
    caddie: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a copy of the artifact, and of a corpus without its training shards; every example fails here above."""
    others = [name for name in KNOWN_BAD if name not in examples]
    forget = f"from caddie.verify.known_bad import KNOWN_BAD; [KNOWN_BAD.pop(name) for name in {others}]; "
    monkeypatch.setattr(verification, "_COMMAND", forget + verification._COMMAND)
    artifact, corpus = shutil.copy(tiny_run.artifact, tmp_path / "copy.caddie"), tmp_path / "corpus"
    shutil.copytree(tiny_run.corpus, corpus, ignore=shutil.ignore_patterns("train_*"))
    ended = caddie("verify", artifact, "--data", corpus, "--known-bad", "--json")
    assert ended.status == 0, ended.err
    facts = json.loads(ended.out)
    assert facts["passed"] is True
    names = [check["name"] for check in facts["checks"]]
    assert set(names) == {
        *PROBES.keys() - {FAR},
        *("file is intact", "file is under the cap", "parameter count is as stated", "runs in a sandbox"),
        COMES_BACK,
    }
    held_out = next(check for check in facts["checks"] if check["name"] == "held-out text was not trained on")
    documents = Corpus.load(tiny_run.corpus).manifest
    assert held_out["evidence"].startswith(f"none of {documents.validation.documents} held-out documents")
    assert {bad["name"]: bad["probe"] for bad in facts["known_bad"]} == {
        name: KNOWN_BAD[name].probe for name in examples
    }
    assert all(bad["passed"] for bad in facts["known_bad"])
    idle = {bad["name"] for bad in facts["known_bad"] if bad["probe"] not in bad["failed"]}
    assert idle == {"waits"} & set(examples), "the text is too short for it"


def test_examples_stand_in_the_verdict_on_a_users_scorer(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    missed = Caught("idle", "nothing", "no look-ahead", (), "")
    monkeypatch.setattr(verification, "_run_job", lambda job, progress: ([], [missed]))
    server = SimpleNamespace(sandboxed=SimpleNamespace(isolation="a wall"))
    monkeypatch.setattr(verification, "scorer_server", lambda artifact: server)
    verdict = verification.verify(artifact, 16_000_000, scorer="s.py:S", examples=True)
    assert (verdict.caught, verdict.passed) == ((missed,), False)


def test_a_given_corpus_needs_no_library(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> list[bytes]:
        raise UserError("this Python has no library sources")

    monkeypatch.setattr(verification, "library", absent)
    with pytest.raises(UserError, match="no library sources"):
        verification.verify(artifact, 16_000_000)
    asked: Any = SimpleNamespace()
    with pytest.raises(AttributeError, match="check_counts"):
        verification.verify(artifact, 16_000_000, corpus=asked)


@pytest.mark.long
def test_an_example_in_place_of_the_scorer(artifact: Artifact) -> None:
    batches = {
        "artifact": str(artifact.path),
        "parts": [],
        "score": artifact.scoring.to_json(),
        "audit_seconds": None,
        "scorer": "known_bad:slot",
        "documents": [piece.decode("latin-1") for piece in excerpts(library(), artifact.scoring, 1)],
        "in_order": [],
        "seed": 1,
        "examples": False,
        "lossless": [],
    }
    assert KNOWN_BAD["slot"].probe in {check.name for check in verification._run_job(batches)[0] if not check.passed}


ANSWERED = [{"name": name, "passed": True, "evidence": ""} for name in PROBES if name != HELD_OUT]
ENDED = Outcome(
    returncode=0,
    stdout=json.dumps({"checks": ANSWERED}).encode(),
    stderr=b"",
    stopped=None,
    isolated=True,
    isolation="S",
    peak_bytes=0,
)


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        (ENDED, None),
        (
            replace(ENDED, stopped="it was stopped because it ran for more than 600 seconds"),
            "S; it was stopped because",
        ),
        (replace(ENDED, stdout=b"", stderr=b"first\nlast\n", returncode=3), "S; it ended with status 3: last"),
        (replace(ENDED, stdout=b"", returncode=137), "S; it ended with status 137: without an error message"),
        *(
            (replace(ENDED, stdout=text), "S; its answer cannot be read")
            for text in (
                b"[1]",
                b"3",
                b'{"checks": 3}',
                b'{"checks": [{"name": 1}]}',
                b'{"caught": [{}]}',
                b"[" * 99_999,
            )
        ),
        (replace(ENDED, stdout=b'{"checks": []}'), "S; 2 probes gave no result, such as: scores a text"),
        (
            replace(ENDED, stdout=json.dumps({"checks": ANSWERED[:2]}).encode()),
            "S; 9 probes gave no result, such as: no look-ahead",
        ),
    ],
)
def test_a_sealed_process_that_does_not_end_well_fails(
    outcome: Outcome, says: str | None, tiny_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "run_in_sandbox", lambda *given, **limits: outcome)
    verdict = verification.verify(load(tiny_run.artifact), 16_000_000)
    assert verdict.passed == (says is None)
    (ran,) = (check for check in verdict.checks if check.name == "runs in a sandbox")
    assert ran.evidence.startswith(says or "S; 0 of 8,192 MiB, ")


def test_what_too_little_was_tried_for_is_no_pass(
    tiny_run: Any, caddie: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = (Check("first", True, "seen"), Check("second", None, "little was seen"))
    verdict = verification.Verdict(checks=checks)
    assert verdict.passed is None
    assert verification.Verdict(checks=(*checks, Check("third", False, "seen"))).passed is False
    monkeypatch.setattr("caddie.verify.verify", lambda *given, **settings: verdict)
    ended = caddie("verify", tiny_run.artifact)
    assert ended.status == 0, ended.err
    assert ended.out.splitlines() == [
        "pass  first: seen",
        "inconclusive  second: little was seen",
        "1 of 2 checks passed",
    ]
    facts = json.loads(caddie("verify", tiny_run.artifact, "--json").out)
    assert (facts["passed"], [check["passed"] for check in facts["checks"]]) == (None, [True, None])


@pytest.mark.parametrize(("users", "power", "outcome"), [(True, 0.04, None), (True, 0.6, True), (False, 0.04, True)])
def test_a_search_of_a_users_scorer_that_would_seldom_find_a_leak_decides_nothing(
    users: bool, power: float, outcome: bool | None, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProbeCase, "found_with", lambda self, places: power)
    on = replace(case(artifact, artifact.scoring.plain), users=users, effort=Effort(places=1, found=0.0))
    passed, evidence = PROBES["no look-ahead"](on)
    assert passed is outcome
    assert (", too little to decide: set --audit-seconds=" in evidence) == (outcome is None)
    long = replace(on, long_text=on.tokens[:300])
    assert PROBES["no look-ahead"](long)[0] is outcome
    assert probe_case_of(artifact, on.scoring, on.documents, seed=1, scorer="mine.py").users


def test_the_probe_that_runs_is_shown_and_nothing_else_that_a_scorer_writes(
    tiny_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*given: object, watch: Callable[[bytes], object], **limits: object) -> Outcome:
        begun = json_line("step", probe_event("no look-ahead")).encode() + b"\n"
        false = json_line("step", {"event": "doing", "text": "all is well"}).encode() + b"\nverified\n"
        for stderr in (b"", begun, begun + false):
            watch(stderr)
        return ENDED

    monkeypatch.setattr(verification, "run_in_sandbox", end)
    progress = RecordedProgress()
    verification.verify(load(tiny_run.artifact), 16_000_000, progress=progress)
    shown = ["starting the probes", f"probe 3 of {len(PROBES)}: no look-ahead"]
    assert progress.events == [{"event": "doing", "text": text} for text in shown]
    assert progress.phases == progress.notes == []


@pytest.mark.long
def test_every_probe_is_named_as_it_begins(artifact: Artifact) -> None:
    progress = RecordedProgress()
    run_probes(case(artifact, artifact.scoring.plain), progress)
    assert progress.events == [probe_event(name) for name in PROBES]


def test_an_artifact_that_changes_meanwhile_fails(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy.caddie"
    copy.write_bytes(tiny_run.artifact.read_bytes())

    def write(*given: object, **limits: object) -> Outcome:
        copy.write_bytes(b"another")
        return ENDED

    monkeypatch.setattr(verification, "run_in_sandbox", write)
    verdict = verification.verify(load(copy), 16_000_000)
    (ran,) = (check for check in verdict.checks if check.name == "runs in a sandbox")
    assert ran.evidence == "S; the artifact file has changed"
    assert not verdict.passed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--scorer", "known_bad:slut"], "did you mean slot?"),
        (["--audit-seconds=9"], "--audit-seconds is for a scorer of your own"),
        (["--audit-seconds=9", "--scorer", "known_bad:slot"], "--audit-seconds is for a scorer of your own"),
        (["score.strid=8"], "no setting score.strid"),
        (["score.stride=800"], "score.stride must be from 1 to score.sequence_length"),
        (["model.depth=2"], "verify takes pack.cap_bytes=N and settings of score, not model.depth"),
    ],
)
def test_what_is_asked_wrongly_is_said_at_once(
    arguments: list[str], says: str, tiny_run: Any, caddie: Callable[..., Any]
) -> None:
    ended = caddie("verify", tiny_run.artifact, *arguments)
    assert ended.status == 2
    assert says in ended.err


NO_SCORERS = {
    "": "Invalid value for '--scorer': it is empty; name a class in a Python file, as FILE.py:NAME;",
    "/dev/null": "/dev/null is not a regular file; name a Python file, as FILE.py or FILE.py:NAME",
    "missing.py:Mine": "no file missing.py in ",
}


@pytest.mark.parametrize(
    ("verb", "scorer", "says"),
    [
        *((verb, *given) for verb in ("score", "verify") for given in NO_SCORERS.items()),
        ("verify", "known_bad:slut", "no known-bad example slut (did you mean slot?); there are "),
        ("verify", "known_bad:", "known_bad: names no example; there are smear, "),
        ("score", "known_bad:slot", "Invalid value for '--scorer': known_bad:NAME is for verify alone; name a class"),
    ],
)
def test_a_scorer_that_there_is_not_is_told_before_the_artifact_is_read(
    verb: str, scorer: str, says: str, caddie: Callable[..., Any]
) -> None:
    ended = caddie(verb, "nowhere.caddie", "--scorer", scorer)
    assert ended.status == 2
    assert says in ended.err
