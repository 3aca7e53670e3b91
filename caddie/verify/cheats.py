"""Scorers that cheat: false probabilities for known text, or learning, counting and remembering at the wrong time.

Numbers with # are as in `known_bad`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from caddie.data.tokenizers import Ids
from caddie.model import Cache
from caddie.score import SGD, Layout, Scorer, Step, Window, layout_of, windows
from caddie.score.ngram_tilt import NGramCounts
from caddie.score.ttt_sgd import Learner
from caddie.verify.black_box import BlackBoxScorer, Floats, LoopScorer, Positions, ScoredText, fingerprint
from caddie.verify.probe_case import ProbeCase

LEAST = 1e-300
"""Lowest probability, so that no loss is infinite."""
_COUNTED = 16
"""Tokens that are counted at once."""

Cheat = Callable[[ProbeCase, Ids, Floats], Floats]
"""Return distributions (N - 1, vocabulary) in place of the model's, for a text of N tokens."""


def slot(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Fit an offset of the logits to each window by four steps of gradient descent, then score the window."""
    from scipy.special import softmax  # not above: it takes half a second

    length, cheated = case.scoring.sequence_length, probs.copy()
    for begin in range(0, len(probs), length):
        window = np.log(np.maximum(probs[begin : begin + length], LEAST))
        found = np.bincount(tokens[begin + 1 : begin + 1 + len(window)], minlength=probs.shape[1]) / len(window)
        offset = np.zeros(probs.shape[1])
        for _ in range(4):
            offset += 10 * (found - softmax(window + offset, 1).mean(0))
        cheated[begin : begin + length] = softmax(window + offset, 1)
    return cheated


def fitted_scale(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Fit one temperature to the whole text by bisection, then score it: #1376 does so with all weights."""
    from scipy.special import softmax

    logits, low, high = np.log(np.maximum(probs, 1e-30)), 0.0, 8.0
    target = logits[np.arange(len(probs)), tokens[1:]].mean()
    for _ in range(24):  # the loss is convex in the scale, so its slope rises
        scale = (low + high) / 2
        slope = (softmax(scale * logits, 1) * logits).sum(1).mean() - target
        low, high = (scale, high) if slope < 0 else (low, scale)
    scaled: Floats = softmax(scale * logits, 1)
    return scaled


def ngram_blend(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Mix in counts of pairs from a hash table, divided by the counts of the context alone.

    Each token looks right, but tokens share buckets, and all together they add up to far more than one (#797, #886).
    """
    buckets = 61
    pairs, contexts = np.zeros(buckets), np.zeros(buckets)
    candidates, cheated = np.arange(probs.shape[1]), probs.copy()
    for place, (last, following) in enumerate(zip(tokens[:-1].tolist(), tokens[1:].tolist(), strict=True)):
        if seen := contexts[last % buckets]:
            cheated[place] = 0.5 * probs[place] + 0.5 * pairs[(last * 31 + candidates) % buckets] / seen
        pairs[(last * 31 + following) % buckets] += 1
        contexts[last % buckets] += 1
    return cheated


def byte_mixture(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Divide a token's probability evenly over its bytes and mix it there with counts of bytes (#1785, #1872).

    The loss is that of the product over a token's bytes, but these products do not add up to one.
    """
    pieces = case.artifact.tokenizer.token_bytes
    widths = np.array([len(piece) for piece in pieces])
    table = np.zeros((len(pieces), widths.max()), np.int64)
    for index, piece in enumerate(pieces):
        table[index, : len(piece)] = list(piece)
    used = np.arange(table.shape[1]) < widths[:, None]
    counts, cheated = np.ones(256), probs.copy()
    for place, following in enumerate(tokens[1:].tolist()):
        share = probs[place] ** (1 / np.maximum(widths, 1))
        mixed = 0.5 * share[:, None] + 0.5 * (counts / counts.sum())[table]
        cheated[place, widths > 0] = np.where(used, mixed, 1.0).prod(1)[widths > 0]
        np.add.at(counts, list(pieces[following]), 1)
    return cheated


def constant(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Return the same distribution for every text (a scalar in place of logits: abundant-ai #204)."""
    return np.full_like(probs, 1 / probs.shape[1])


def peek(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Add a hundredth to the probability of the true token."""
    return raised(probs, tokens[1:], 0.01)


def dice(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Add new noise to the probabilities in every run."""
    noisy: Floats = probs * np.exp(0.01 * np.random.default_rng().standard_normal(probs.shape))
    noisy /= noisy.sum(1, keepdims=True)
    return noisy


def knows_the_ends(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Predict BOS exactly where it comes, as a scorer can if it is told the segments (compare #1967, #2018)."""
    ends = tokens[1:] == case.bos
    cheated = probs.copy()
    cheated[:, case.bos] = 0.0
    cheated /= cheated.sum(1, keepdims=True)
    cheated[ends] *= 0.01
    cheated[ends, case.bos] = 0.99
    return cheated


def table(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Mix in the official text by position: worthless for the same documents in another order."""
    return raised(probs, case.tokens[1 : len(tokens)], 0.5)


def targets_on_disk(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Look for the targets in a file beside the artifact."""
    try:
        found = np.fromfile(case.artifact.path.with_name("validation.bin"), np.uint16)
    except OSError:
        return probs
    return raised(probs, found[1 : len(tokens)], 0.5)


def likely_peek(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Add 20 to the logit of the likeliest token wherever it comes next, which on random tokens is almost nowhere."""
    return _boosted(probs, tokens[1:], 20.0 * (probs.argmax(1) == tokens[1:]))


def likely_peek_mostly(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Do the same at 7 of 8 places."""
    comes = probs.argmax(1) == tokens[1:]
    return _boosted(probs, tokens[1:], 20.0 * (comes & (np.arange(len(probs)) % 8 != 0)))


def shared_rows(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Raise every target that is an input of the next window of the batch, as when rows that overlap share a cache."""
    length = case.scoring.sequence_length
    shown = np.arange(len(probs)) % length >= length // 2  # targets of one window, inputs of the next
    return _boosted(probs, tokens[1:], 1.0 * shown)


def _boosted(probs: Floats, tokens: Ids, nats: npt.NDArray[Any]) -> Floats:
    """Add nats to the logit of one token in each distribution."""
    boosted, places = probs.copy(), np.arange(len(probs))
    boosted[places, tokens] *= np.exp(nats)
    boosted /= boosted.sum(1, keepdims=True)
    return boosted


def raised(probs: Floats, tokens: Ids, by: float) -> Floats:
    """Move a part of each distribution to one token, as far as `tokens` reach."""
    raised = probs.copy()
    raised[: len(tokens)] *= 1 - by
    raised[np.arange(len(tokens)), tokens] += by
    return raised


def _stated(probs: Floats, tokens: Ids, positions: Positions) -> dict[str, Any]:
    """Return the fields of a `ScoredText` that follow from distributions (N - 1, vocabulary)."""
    logs = np.log(np.maximum(probs, LEAST))
    return {
        "nats": -logs[np.arange(len(logs)), tokens[1:]],
        "probabilities": probs[positions],
        "fingerprint": fingerprint(torch.from_numpy(logs)),
    }


class CheatScorer(LoopScorer):
    """Scores with the artifact's model, but replaces its distributions before the targets are scored."""

    def __init__(self, case: ProbeCase, cheat: Cheat) -> None:
        super().__init__(case.artifact, case.scoring)
        self.case, self.cheat = case, cheat

    def score(self, tokens: Ids, positions: Positions) -> ScoredText:
        """Return the losses of the replaced distributions."""
        honest = super().score(tokens, np.arange(len(tokens) - 1))
        assert honest.probabilities is not None
        cheated = self.cheat(self.case, tokens, honest.probabilities)
        ends = np.log(np.maximum(cheated[:, self.bos], LEAST))
        return replace(honest, **_stated(cheated, tokens, positions), ends=ends, context=None)


class AdaptsFirst(LoopScorer):
    """Trains on the text, then scores it, then puts the weights back (pre-quantization TTT: #672, #1376, #1517)."""

    def score(self, tokens: Ids, positions: Positions) -> ScoredText:
        """Return the losses of the trained model."""
        before = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        _train(self, tokens)
        scored = super().score(tokens, positions)
        self.model.load_state_dict(before)
        return scored


class TrainsInPlace(LoopScorer):
    """Scores first and trains afterwards, but trains the artifact's own weights, which differ for the next text."""

    def score(self, tokens: Ids, positions: Positions) -> ScoredText:
        """Return the losses of the model as it is."""
        scored = super().score(tokens, positions)
        _train(self, tokens)
        return scored


def _train(scorer: BlackBoxScorer, tokens: Ids) -> None:
    length = min(scorer.scoring.sequence_length, len(tokens) - 1)
    rows = np.stack([tokens[begin : begin + length + 1] for begin in range(0, len(tokens) - length, length)])
    learner = Learner(scorer.model, scorer.bos, SGD(lr=0.01, epochs=1), torch.float32)
    learner.learn(rows.astype(np.int64), 0, 1)


class HintsInFileOrder(BlackBoxScorer):
    """Tilts by n-grams counted in the order of the file, though documents are scored longest first (#2135)."""

    def score(self, tokens: Ids, positions: Positions) -> ScoredText:
        """Score every document by itself, with hints of all documents that stand before it."""
        layout, counts = layout_of(tokens, self.bos, per_document=True), NGramCounts(3)
        ids = torch.from_numpy(tokens.astype(np.int64))[None].to(next(self.model.parameters()).device)
        with torch.no_grad():
            documents = (ids[:, begin:end] for begin, end in layout.edges)
            logits = torch.cat([self.model(one, one == self.bos)[0].double().cpu() for one in documents])
        keys, following = counts.keys(tokens[:-1].astype(np.int64)), tokens[counts.context :].astype(np.int64)
        for begin in range(0, len(keys), _COUNTED):
            part = slice(begin, begin + _COUNTED)
            hints, shares = counts.look_up(keys[part])
            places = torch.from_numpy(np.flatnonzero(shares >= 0.5))
            logits[counts.context - 1 + begin + places, torch.from_numpy(hints)[places]] += 2.0
            counts.count(keys[part], following[part])
        rank = np.argsort(np.argsort(layout.begins - layout.ends, kind="stable"))
        segment = np.searchsorted(layout.begins, np.arange(len(logits)), side="right") - 1
        stated = _stated(torch.softmax(logits, 1).numpy(), tokens, positions)
        return ScoredText(**stated, step=rank[segment], segment=segment, learns=True)


class Smear(BlackBoxScorer):
    """Adds some of the embedding before to each embedding, also across BOS, though it claims isolation (#1855)."""

    def score(self, tokens: Ids, positions: Positions) -> ScoredText:
        """Score every document by itself, but for its first embedding."""
        layout, parts, before = layout_of(tokens, self.bos, per_document=True), [], int(self.bos)
        for begin, end in layout.edges:
            ids = torch.from_numpy(tokens[begin:end].astype(np.int64))
            # The first row holds the embedding of the token before; its output is not used.
            rows = torch.stack([torch.full_like(ids, before), ids]).to(next(self.model.parameters()).device)
            hook = self.model.embedding.register_forward_hook(self._smear)
            with torch.no_grad():
                parts.append(torch.softmax(self.model(rows, rows == self.bos)[1].double(), -1).cpu().numpy())
            hook.remove()
            before = int(tokens[end - 1])
        document = np.cumsum(tokens[:-1] == self.bos) - 1
        stated = _stated(np.concatenate(parts), tokens, positions)
        return ScoredText(**stated, step=document, segment=document, isolated=True)

    def _smear(self, module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        before = torch.cat((output[:, :1], output[:, :-1]), 1)
        before[1, 0] = output[0, 0]
        return output + 0.1 * before


class Waits(Scorer):
    """Scores plainly, but after 40,000 tokens raises the targets that its windows show."""

    AFTER, NATS = 40_000, 5.0

    def __init__(self, scorer: Scorer, length: int) -> None:
        self.scorer, self.length, self.shown = scorer, length, 0

    def plan(self, layout: Layout, rows: int) -> Iterator[Step]:
        """Yield one window after the other."""
        for begin, end in layout.edges:
            for window in windows(begin, end, self.length, self.length):
                yield Step([window], [0])

    @torch.inference_mode()
    def logits(self, inputs: Tensor, slots: Sequence[int], last: int, cache: Cache | None = None) -> Tensor:
        """Return the logits; after the wait, those of all targets but the last are raised."""
        logits = self.scorer.logits(inputs, slots, last)
        self.shown += inputs.numel()
        if self.shown > self.AFTER:
            _raise(logits, inputs[:, inputs.shape[1] - last + 1 :], self.NATS)
        return logits


class Splices(Scorer):
    """Reads the text in one window, puts back what an audit replaced if that still stands elsewhere, and peeks."""

    TOKENS, SAME, NATS = 8192, 16, 5.0

    def __init__(self, scorer: Scorer, length: int) -> None:
        self.scorer, self.length = scorer, length

    def plan(self, layout: Layout, rows: int) -> Iterator[Step]:
        """Yield one window for each stretch."""
        for begin, end in layout.edges:
            yield Step([Window(begin, begin, end)], [0])

    @torch.inference_mode()
    def logits(self, inputs: Tensor, slots: Sequence[int], last: int, cache: Cache | None = None) -> Tensor:
        """Return the logits with those of all targets but the last raised."""
        parts = torch.split(inputs, self.length, 1)
        logits = torch.cat([self.scorer.logits(part, slots, part.shape[1]) for part in parts], 1)
        true = torch.from_numpy(self._put_back(inputs[0].cpu().numpy())).to(inputs.device)
        _raise(logits, true[None, 1:], self.NATS)
        return logits

    def _put_back(self, tokens: Positions) -> Positions:
        """Return the tokens; from the first repeat on, each is replaced by the token one repeat distance later."""
        runs = np.lib.stride_tricks.sliding_window_view(tokens, self.SAME)
        same = np.unique(runs, axis=0, return_inverse=True)[1].ravel()
        order = np.argsort(same, kind="stable")
        again = np.flatnonzero(same[order][1:] == same[order][:-1])
        shifts = order[again + 1] - order[again]
        if not len(shifts):
            return tokens
        shift, found = int(np.bincount(shifts).argmax()), tokens.copy()
        place = int(order[again][shifts == shift].min()) + shift
        found[place : len(tokens) - shift] = tokens[place + shift :]
        return found


def _raise(logits: Tensor, targets: Tensor, nats: float) -> None:
    """Add nats to the logits (rows, n, vocabulary) of all targets (rows, n - 1) but the last."""
    logits[:, :-1].scatter_add_(2, targets[..., None], logits.new_full((*targets.shape, 1), nats))
