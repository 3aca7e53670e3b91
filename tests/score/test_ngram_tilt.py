"""The n-gram tilt: equal to the public script's tables, causal in scoring order, and the same for any batch size."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import zip_longest
from operator import xor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity import facts, tensors
from rich_models import TINY
from torch import Tensor

from caddie.model import Cache, Model, build
from caddie.runtime.distributed import Ranks
from caddie.score import (
    ChunkSGD,
    DocumentLoRA,
    Layout,
    Scoring,
    ScoringBatch,
    Step,
    Text,
    Window,
    layout_of,
    run,
    score,
    windows,
)
from caddie.score.ngram_tilt import NGramCounts, NGramTilt, _Table
from caddie.score.scorer import Scorer, Stream

BOS = 0


def small_model() -> Model:
    """A small model whose predictions differ from token to token."""
    return build(TINY.but({"vocabulary": 64, "depth": 2}), seed=1)


def scripts_stream(frontier: Path) -> np.ndarray:
    """The ids that the script goes through: its window begins with the first target in place of the first token."""
    tokens = tensors(frontier / "tilt")["tokens"].numpy().astype(np.int64)
    return np.concatenate([tokens[1:2], tokens[1:]])


def hints(stream: np.ndarray, order: int, most: int | None = None) -> tuple[NGramCounts, np.ndarray, np.ndarray]:
    """Counts, and before each of them the hint and its share, 0 where the window is not full.

    As many as `most` are counted at once, as far as their contexts differ, so that none is a hint of another.
    """
    counts, n = NGramCounts(order), len(stream) - 1
    ids, shares, keys = np.zeros(n, np.int64), np.zeros(n, np.float32), counts.keys(stream[:-1])
    begin = 0
    while begin < len(keys):
        seen, end = set[int](), begin
        while end < len(keys) and int(keys[end]) not in seen and len(seen) != most:
            seen.add(int(keys[end]))
            end += 1
        target = slice(counts.context - 1 + begin, counts.context - 1 + end)
        ids[target], shares[target] = counts.look_up(keys[begin:end])
        counts.count(keys[begin:end], stream[target.start + 1 : target.stop + 1])
        begin = end
    return counts, ids, shares


def test_tables_and_hints_of_the_public_script(frontier: Path) -> None:
    cases, found = facts(frontier / "config")["tilt"]["cases"], tensors(frontier / "tilt")
    stream = scripts_stream(frontier)
    assert cases
    for case, config in enumerate(cases):
        compare_tables(case, config, found, stream)


def compare_tables(case: int, config: dict[str, Any], found: dict[str, Tensor], stream: np.ndarray) -> None:
    counts, ids, shares = hints(stream, config["order"])
    expected = {name: found[f"case{case}.{name}"].numpy() for name in ("top_token", "top_probability", "gate", "hint")}
    np.testing.assert_array_equal(ids, expected["top_token"])
    np.testing.assert_array_equal(shares, expected["top_probability"])
    gate = shares >= config["threshold"]
    np.testing.assert_array_equal(gate, expected["gate"])
    np.testing.assert_array_equal(np.where(gate, ids, 0), expected["hint"])
    assert (int(gate.sum()), int((gate & (ids == stream[1:])).sum())) == (config["gated"], config["hits"])
    assert len(counts.contexts.keys) == config["contexts"]
    assert int(counts.totals.sum()) == config["context_total"]
    assert int(counts.contexts.keys.sum()) % 2**63 == config["context_key_sum_mod_2_63"]
    assert len(counts.pairs.keys) == config["pairs"]
    assert int(counts.pair_counts.sum()) == config["pair_count_sum"]
    assert int(counts.pairs.keys.sum()) % 2**63 == config["pair_key_sum_mod_2_63"]
    rows = np.stack([counts.contexts.keys.astype(np.int64), counts.totals, counts.top_counts, counts.top_ids], 1)
    repeated = rows[counts.totals > 1]
    np.testing.assert_array_equal(repeated[np.argsort(repeated[:, 0])], found[f"case{case}.contexts_repeated"].numpy())


def test_the_tilted_distribution_is_the_script_s(frontier: Path) -> None:
    tilt = facts(frontier / "config")["tilt"]
    case, found = tilt["cases"][tilt["probability_case"]], tensors(frontier / "tilt_probabilities")
    expected = tensors(frontier / "tilt")
    gate, hint = (expected[f"case{tilt['probability_case']}.{name}"][found["positions"]] for name in ("gate", "hint"))
    logits = found["logits"].double()
    tilted = logits.scatter_add(1, hint.long()[:, None], torch.where(gate, case["boost"], 0.0).double()[:, None])
    for values, kind in ((logits, "before"), (tilted, "after")):
        nll = -torch.log_softmax(values, 1).gather(1, found["targets"][:, None])[:, 0]
        torch.testing.assert_close(nll, found[f"nll_{kind}"].double(), rtol=1e-5, atol=1e-6)
        first = found[f"p_{kind}_first_rows"]
        torch.testing.assert_close(torch.softmax(values[: len(first)], 1).float(), first.float(), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(nll.float(), found["nll_after_float32"], rtol=1e-5, atol=1e-5)
    # the script divides by Z = 1 + p(h)(e^β - 1), which a softmax of tilted logits makes by itself
    of_hint = torch.log_softmax(logits, 1).gather(1, hint.long()[:, None])[:, 0]
    torch.testing.assert_close(of_hint.float(), found["log_p_hint"].float(), rtol=1e-5, atol=1e-5)
    total = (tilted.logsumexp(1) - logits.logsumexp(1)).exp()
    torch.testing.assert_close(total.float(), found["normalizer"].float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 20))])
def test_counting_at_once_is_counting_one_by_one(seed: int) -> None:
    random = np.random.default_rng(seed)
    stream = random.integers(0, 3, 400)
    counts, order = NGramCounts(3), 3
    keys, targets = counts.keys(stream[:-1]), stream[order - 1 :]
    cuts = np.sort(random.integers(0, len(keys), 6))
    for part in np.split(np.arange(len(keys)), cuts):
        counts.count(keys[part], targets[part])
    one, _, _ = hints(stream, order, most=1)
    for key in np.unique(keys):
        (a, b), (c, d) = counts.look_up(np.array([key])), one.look_up(np.array([key]))
        assert (a, b) == (c, d)
    seen = Counter(zip(keys.tolist(), targets.tolist(), strict=True))
    assert int(counts.pair_counts.sum()) == sum(seen.values()) == len(keys)
    assert len(counts.pairs.keys) == len(seen)


def test_the_table_numbers_keys_in_the_order_in_which_they_come() -> None:
    random, table = np.random.default_rng(0), _Table()
    keys = np.unique(random.integers(0, 2**63, 30_000).astype(np.uint64))
    random.shuffle(keys)
    for part in np.array_split(keys, 7):  # it grows several times
        table.find_or_add(part)
    np.testing.assert_array_equal(table.find(keys), np.arange(len(keys)))
    assert (table.find(keys + np.uint64(1)) == -1).all()
    np.testing.assert_array_equal(table.find_or_add(keys[::-1]), np.arange(len(keys))[::-1])


@pytest.mark.parametrize(("count", "step"), [(4096, 1), (2048, 2)])
def test_a_table_is_never_so_full_that_the_search_for_an_unknown_key_does_not_end(count: int, step: int) -> None:
    """Add as many keys as the first table has slots, or one for every other slot."""
    table, random = _Table(), np.random.default_rng(0)
    keys = np.unique(random.integers(0, 2**63, 20_000).astype(np.uint64))
    random.shuffle(keys)
    keys = keys[table._slots(keys) % step == 0]
    known, unknown = keys[:count], keys[count : count + 100]
    table.find_or_add(known)
    assert table.find(unknown).tolist() == [-1] * 100
    np.testing.assert_array_equal(table.find(known), np.arange(count))


def repeated_text(length: int = 400, vocabulary: int = 64) -> Text:
    """Documents of random ids that come again and again."""
    random = np.random.default_rng(5)
    documents = [np.concatenate([[BOS], random.integers(1, vocabulary, size)]) for size in (37, 23, 51)]
    ids = np.concatenate([documents[number] for number in random.integers(0, 3, length // 30)])
    return Text(ids.astype(np.uint16), BOS, len(ids), len(ids), len(ids))


TTT: dict[str, Any] = {
    "none": None,
    "documents": DocumentLoRA(rank=2, chunk_tokens=8, documents=2, lr=0.01),
    "chunks": ChunkSGD(chunk_tokens=32),
}
TILT = NGramTilt(order=4)


def losses(scorer: Scorer, tokens: np.ndarray, rows: int = 4) -> np.ndarray:
    found = np.zeros(len(tokens) - 1)

    def keep(window: Any, nats: np.ndarray) -> None:
        found[window.first : window.end] = nats

    run(scorer, tokens, layout_of(tokens, BOS, scorer.per_document), rows, keep, vocabulary=64)
    return found


@pytest.mark.parametrize("ttt", [pytest.param(name, marks=[pytest.mark.long] * (name != "none")) for name in TTT])
def test_repeated_text_scores_better_whatever_the_size_of_a_batch(ttt: str) -> None:
    model, text = small_model(), repeated_text()
    scoring = Scoring(sequence_length=32, stride=16, ttt=TTT[ttt])
    before, after = score(model, text, scoring), score(model, text, scoring.but(tilt=TILT))
    assert after.nats < before.nats - 50
    for batch_tokens in (32, 512):
        other = score(model, text, scoring.but(tilt=TILT, batch_tokens=batch_tokens))
        assert other.nats == pytest.approx(after.nats, rel=1e-5)
    assert score(model, text, scoring.but(tilt=TILT.but(boost=0.0))).nats == before.nats


@pytest.mark.parametrize("ttt", [pytest.param(name, marks=[pytest.mark.long] * (name == "chunks")) for name in TTT])
def test_no_loss_depends_on_what_is_scored_later(ttt: str) -> None:
    """Of the document that is scored last, tokens are changed: no loss of another document moves."""
    model, text = small_model(), repeated_text()
    scoring = Scoring(sequence_length=32, stride=16, ttt=TTT[ttt], tilt=TILT)
    before = losses(scoring.scorer(model, BOS), text.tokens)
    layout = layout_of(text.tokens, BOS, TTT[ttt] is not None and ttt == "documents")
    lengths = layout.ends - layout.begins
    last = int(np.flatnonzero(lengths == lengths.min())[0]) if len(lengths) > 1 else 0  # the longest come first
    begin = int(layout.ends[last]) - 5
    changed = text.tokens.copy()
    changed[begin + 1 : begin + 6] = 1 + (changed[begin + 1 : begin + 6] + 7) % 60
    after = losses(scoring.scorer(model, BOS), changed)
    of_others = np.ones(len(before), bool)
    if len(lengths) > 1:
        same_group = lengths == lengths.min()
        for document in np.flatnonzero(same_group):
            of_others[layout.begins[document] : layout.ends[document]] = False
    else:
        of_others[begin:] = False
    assert of_others.sum() > 100
    np.testing.assert_array_equal(before[of_others], after[of_others])
    assert not np.array_equal(before, after)


def test_the_hint_is_of_the_scored_text_alone() -> None:
    """The first time a document comes nothing is known; the second time its own continuation is."""
    random = np.random.default_rng(1)
    document = np.concatenate([[BOS], random.integers(1, 64, 30)])
    tokens = np.concatenate([document, document, [BOS]]).astype(np.uint16)
    plain = Scoring(sequence_length=16, stride=8)
    model = small_model()
    without, with_tilt = (
        losses(scoring.scorer(model, BOS), tokens)
        for scoring in (plain, plain.but(tilt=NGramTilt(order=4, boost=20.0)))
    )
    np.testing.assert_array_equal(without[:30], with_tilt[:30])
    assert (with_tilt[36:60] < 1e-3).all()


def test_a_cache_gives_the_same_hints() -> None:
    model, text = small_model(), repeated_text()
    scorer = Scoring(sequence_length=32, stride=16, tilt=TILT, precision="float64").scorer(model.double(), BOS)
    stream = Stream(text.tokens, layout_of(text.tokens, BOS, False))
    steps = list(scorer.plan(stream.layout, 4))
    for step in steps[:-3]:
        for window in step.windows:
            batch = ScoringBatch([window], [0], stream.inputs([window]), window.first - window.start)
            scorer.logits(torch.from_numpy(batch.inputs), [0], window.end - window.first)
            stream.mark(window)
            scorer.update([batch], stream.prefix)
    window = steps[-3].windows[0]
    ids = torch.from_numpy(stream.inputs([window]))
    whole = scorer.logits(ids, [0], ids.shape[1])
    assert (whole != model(ids, ids == BOS, torch.float64)).any()
    cache, parts = Cache(), list[Tensor]()
    for begin, end in ((0, 7), *((place, place + 1) for place in range(7, ids.shape[1]))):
        parts.append(scorer.logits(ids[:, begin:end], [0], 1, cache))
    torch.testing.assert_close(torch.cat(parts, 1), whole[:, 6:])


class Planned(Scorer):
    """Scorer with given answers to `stateless`, `together` and the like."""

    def __init__(self, **promises: Any) -> None:
        for name, value in promises.items():
            setattr(self, name, value)

    def plan(self, layout: Layout, rows: int) -> Any:
        yield rows

    def logits(self, inputs: Tensor, slots: Sequence[int], last: int, cache: Cache | None = None) -> Tensor:
        return torch.zeros(len(inputs), last, 2)

    def share(self, ranks: Ranks) -> Any:
        return "shared", ranks

    def owners(self, batches: Sequence[ScoringBatch], world: int) -> Any:
        return ["owners", world]


def test_settings() -> None:
    scoring = Scoring(tilt=TILT, ttt=ChunkSGD())
    assert scoring.plain.tilt is None
    text = repeated_text()
    found = score(small_model(), text, Scoring(sequence_length=32, stride=16, tilt=TILT))
    assert found.tilt is not None
    assert "order=4" in found.tilt
    assert math.isfinite(found.nats)


# fmt: off
FACTORS = [
    36313, 27191, 51647, 81929, 131071, 196613, 262147, 393241, 524309, 655373, 786433, 917521, 1048583, 1179653,
    1310729, 1441801, 1572869, 1703941, 1835017, 1966087, 2097169, 2228243, 2359319, 2490389, 2621471, 2752549, 2883617,
    3014687, 3145757, 3276833, 3407903, 3538973,
]
# fmt: on


@pytest.mark.parametrize("order", [2, 3, 16, 32])
def test_keys_are_those_of_the_public_script(order: int) -> None:
    ids = np.array([5, 7, 11, 13] * 10)
    expected = []
    for end in range(order - 1, len(ids) + 1):
        products = [int(token) * factor for token, factor in zip(ids[end - order + 1 : end], FACTORS, strict=False)]
        expected.append(reduce(xor, products))
    counts = NGramCounts(order)
    assert counts.keys(ids).tolist() == expected
    assert counts.keys(np.stack([ids, ids])).tolist() == [expected] * 2
    assert counts.keys(ids[: order - 2]).tolist() == []
    counts.count(np.array(expected[:1], np.uint64), np.array([3]))
    assert counts.pairs.keys.tolist() == [(expected[0] * 1000003 ^ 3 * FACTORS[order - 1]) % 2**64]


def most_frequent(seen: dict[tuple[int, ...], list[int]], context: tuple[int, ...]) -> tuple[int, float]:
    """The token that most often followed a context, first by the time at which it reached its number, and its share."""
    numbers, best = Counter[int](), (0, 0)
    for token in seen.get(context, []):
        numbers[token] += 1
        if numbers[token] > best[1]:
            best = token, numbers[token]
    return best[0], best[1] / max(1, sum(numbers.values()))


@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.6, 1.0])
@pytest.mark.parametrize("per_document", [False, True])
def test_the_tilt_by_hand(per_document: bool, threshold: float) -> None:
    """Of a model that finds all of 6 ids equally likely, whose windows of 8 tokens advance by 3."""
    tokens = np.random.default_rng(0).choice(6, 200, p=[0.1, 0.4, 0.2, 0.1, 0.1, 0.1]).astype(np.uint16)
    layout = layout_of(tokens, BOS, per_document)
    stretches = [
        list(windows(*edges, 8, 3)) for edges in zip(layout.begins.tolist(), layout.ends.tolist(), strict=True)
    ]
    steps = [[window for window in column if window] for column in zip_longest(*stretches)]

    class Uniform(Scorer):
        def plan(self, layout: Layout, rows: int) -> Iterator[Step]:
            yield from (Step(step, range(len(step))) for step in steps)

        def logits(self, inputs: Tensor, slots: Sequence[int], last: int, cache: Cache | None = None) -> Tensor:
            return torch.zeros(len(inputs), last, 6, dtype=torch.float64)

    tilt, found = NGramTilt(order=3, threshold=threshold, boost=2.0), dict[Window, list[float]]()
    run(
        *(tilt.build(Uniform()), tokens, layout, 3, lambda window, losses: found.update({window: losses.tolist()})),
        vocabulary=6,
    )
    seen: dict[tuple[int, ...], list[int]] = {}
    tilted, ids = 0, tokens.tolist()
    for step in steps:
        for window in step:
            expected = []
            for place in range(window.first, window.end):
                known = place > window.start
                hint, share = most_frequent(seen, tuple(ids[place - 1 : place + 1])) if known else (0, 0.0)
                boosted = share > 0 and share >= threshold
                hit = boosted and hint == ids[place + 1]
                expected.append(math.log(5 + math.exp(2)) - 2 * hit if boosted else math.log(6))
                tilted += boosted
            assert found[window] == pytest.approx(expected)
        for begin, window in sorted(
            (stretch[0].start, window) for stretch in stretches for window in stretch if window in step
        ):
            for place in range(max(window.first, begin + 1), window.end):
                seen.setdefault(tuple(ids[place - 1 : place + 1]), []).append(ids[place + 1])
    assert tilted > 5


@pytest.mark.parametrize("of", [Planned(), Planned(stateless=True), Planned(per_document=True, together=3)])
def test_the_tilt_keeps_what_its_scorer_promises(of: Planned) -> None:
    scorer = TILT.build(of)
    assert (scorer.per_document, scorer.together) == (of.per_document, of.together)
    assert scorer.in_order is not of.per_document
    assert scorer.fixed_between_updates is of.stateless
    assert not scorer.stateless
    layout = Layout(np.array([0]), np.array([9]))
    assert list(scorer.plan(layout, 5)) == [1 if of.stateless else 5]
    assert scorer.share(Ranks(1, 2)) == ("shared", Ranks(1, 2))
    assert scorer.owners([], 2) == ["owners", 2]
