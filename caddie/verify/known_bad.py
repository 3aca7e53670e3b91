"""Known-bad examples: false ways to score that were seen in public, and some more. Each must fail its probe.

They are black boxes that get the whole text at once, as in the scripts where such mistakes were found; most cannot be
written as a `caddie.score.Scorer`. Numbers with # are issues and pull requests of openai/parameter-golf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import softmax
from torch import Tensor, nn

from caddie.data.corpus import document_hash
from caddie.data.tokenizers import Ids
from caddie.errors import UserError, suggest
from caddie.score import SGD, layout_of
from caddie.score.ngram_tilt import NGramCounts
from caddie.score.ttt_sgd import Learner
from caddie.verify.black_box import BlackBoxScorer, Floats, LoopScorer, Positions, ScoredText, fingerprint
from caddie.verify.probe_case import ProbeCase
from caddie.verify.probes import run_probes

_LEAST = 1e-300  # so that no loss is infinite
_COUNTED = 16  # tokens that are counted at once

Cheat = Callable[[ProbeCase, Ids, Floats], Floats]
"""Return distributions (N - 1, vocabulary) in place of the model's, for a text of N tokens."""


def _slot(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Fit an offset of the logits to each window by four steps of gradient descent, then score the window."""
    length, cheated = case.scoring.sequence_length, probs.copy()
    for begin in range(0, len(probs), length):
        window = np.log(np.maximum(probs[begin : begin + length], _LEAST))
        found = np.bincount(tokens[begin + 1 : begin + 1 + len(window)], minlength=probs.shape[1]) / len(window)
        offset = np.zeros(probs.shape[1])
        for _ in range(4):
            offset += 10 * (found - softmax(window + offset, 1).mean(0))
        cheated[begin : begin + length] = softmax(window + offset, 1)
    return cheated


def _fitted_scale(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Fit one temperature to the whole text by bisection, then score it: #1376 does so with all weights."""
    logits, low, high = np.log(np.maximum(probs, 1e-30)), 0.0, 8.0
    target = logits[np.arange(len(probs)), tokens[1:]].mean()
    for _ in range(24):  # the loss is convex in the scale, so its slope rises
        scale = (low + high) / 2
        slope = (softmax(scale * logits, 1) * logits).sum(1).mean() - target
        low, high = (scale, high) if slope < 0 else (low, scale)
    scaled: Floats = softmax(scale * logits, 1)
    return scaled


def _ngram_blend(case: ProbeCase, tokens: Ids, probs: Floats, buckets: int = 61) -> Floats:
    """Mix in counts of pairs from a hash table, divided by the counts of the context alone.

    Each token looks right, but tokens share buckets, and all together they add up to far more than one (#797, #886).
    """
    pairs, contexts = np.zeros(buckets), np.zeros(buckets)
    candidates, cheated = np.arange(probs.shape[1]), probs.copy()
    for place, (last, following) in enumerate(zip(tokens[:-1].tolist(), tokens[1:].tolist(), strict=True)):
        if seen := contexts[last % buckets]:
            cheated[place] = 0.5 * probs[place] + 0.5 * pairs[(last * 31 + candidates) % buckets] / seen
        pairs[(last * 31 + following) % buckets] += 1
        contexts[last % buckets] += 1
    return cheated


def _byte_mixture(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
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


def _constant(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Return the same distribution for every text (a scalar in place of logits: abundant-ai #204)."""
    return np.full_like(probs, 1 / probs.shape[1])


def _peek(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Add a hundredth to the probability of the true token."""
    return _raised(probs, tokens[1:], 0.01)


def _dice(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Add new noise to the probabilities in every run."""
    noisy: Floats = probs * np.exp(0.01 * np.random.default_rng().standard_normal(probs.shape))
    noisy /= noisy.sum(1, keepdims=True)
    return noisy


def _knows_the_ends(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Predict BOS exactly where it comes, as a scorer can that is told the segments (compare #1967, #2018)."""
    ends = tokens[1:] == case.bos
    cheated = probs.copy()
    cheated[:, case.bos] = 0.0
    cheated /= cheated.sum(1, keepdims=True)
    cheated[ends] *= 0.01
    cheated[ends, case.bos] = 0.99
    return cheated


def _table(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Mix in the official text by position: worthless for the same documents in another order."""
    return _raised(probs, case.tokens[1 : len(tokens)], 0.5)


def _targets_on_disk(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Look for the targets in a file beside the artifact."""
    try:
        found = np.fromfile(case.artifact.path.with_name("validation.bin"), np.uint16)
    except OSError:
        return probs
    return _raised(probs, found[1 : len(tokens)], 0.5)


def _likely_peek(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Add 20 to the logit of the likeliest token wherever it comes next, which on random tokens is almost nowhere."""
    comes = probs.argmax(1) == tokens[1:]
    return _boosted(probs, tokens[1:], 20.0 * comes)


def _likely_peek_mostly(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Do the same at 7 of 8 places."""
    comes = probs.argmax(1) == tokens[1:]
    return _boosted(probs, tokens[1:], 20.0 * (comes & (np.arange(len(probs)) % 8 != 0)))


def _shared_rows(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
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


def _raised(probs: Floats, tokens: Ids, by: float) -> Floats:
    """Move a part of each distribution to one token, as far as `tokens` reach."""
    raised = probs.copy()
    raised[: len(tokens)] *= 1 - by
    raised[np.arange(len(tokens)), tokens] += by
    return raised


# Scorers


class CheatScorer(LoopScorer):
    """Scores with the artifact's model, but replaces its distributions before the targets are scored."""

    def __init__(self, case: ProbeCase, cheat: Cheat) -> None:
        super().__init__(case.artifact, case.scoring)
        self.case, self.cheat = case, cheat

    def score(self, tokens: Ids, positions: Positions) -> ScoredText:
        """Return the losses of the replaced distributions."""
        everywhere = np.arange(len(tokens) - 1)
        honest = super().score(tokens, everywhere)
        assert honest.probabilities is not None
        cheated = self.cheat(self.case, tokens, honest.probabilities)
        logs = np.log(np.maximum(cheated, _LEAST))
        return replace(
            honest,
            nats=-logs[everywhere, tokens[1:]],
            probabilities=cheated[positions],
            fingerprint=fingerprint(torch.from_numpy(logs)),
            context=None,
        )


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
        logits = []
        for begin, end in zip(layout.begins.tolist(), layout.ends.tolist(), strict=True):
            ids = torch.from_numpy(tokens[begin:end].astype(np.int64))[None].to(next(self.model.parameters()).device)
            with torch.no_grad():
                logits.append(self.model(ids, ids == self.bos)[0].double().cpu())
        keys, following = counts.keys(tokens[:-1].astype(np.int64)), tokens[counts.context :].astype(np.int64)
        together = torch.cat(logits)
        for begin in range(0, len(keys), _COUNTED):
            part = slice(begin, begin + _COUNTED)
            hints, shares = counts.look_up(keys[part])
            places = torch.from_numpy(np.flatnonzero(shares >= 0.5))
            together[counts.context - 1 + begin + places, torch.from_numpy(hints)[places]] += 2.0
            counts.count(keys[part], following[part])
        log_probs = torch.log_softmax(together, 1)
        rank = np.empty(len(layout.begins), np.int64)
        rank[np.argsort(layout.begins - layout.ends, kind="stable")] = np.arange(len(rank))
        segment = np.searchsorted(layout.begins, np.arange(len(log_probs)), side="right") - 1
        return ScoredText(
            nats=-log_probs[np.arange(len(log_probs)), tokens[1:].astype(np.int64)].numpy(),
            step=rank[segment],
            segment=segment,
            probabilities=log_probs[positions].exp().numpy(),
            learns=True,
            fingerprint=fingerprint(log_probs),
        )


class Smear(BlackBoxScorer):
    """Adds some of the embedding before to each embedding, also across BOS, though it claims isolation (#1855)."""

    def score(self, tokens: Ids, positions: Positions) -> ScoredText:
        """Score every document by itself, but for its first embedding."""
        begins = np.flatnonzero(tokens == self.bos)
        ends = np.append(begins[1:], len(tokens) - 1)
        parts, before = [], int(self.bos)
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            ids = torch.from_numpy(tokens[begin:end].astype(np.int64))
            # The first row holds the embedding of the token before; its output is not used.
            rows = torch.stack([torch.full_like(ids, before), ids]).to(next(self.model.parameters()).device)
            hook = self.model.embedding.register_forward_hook(self._smear)
            with torch.no_grad():
                parts.append(torch.softmax(self.model(rows, rows == self.bos)[1].double(), -1).cpu().numpy())
            hook.remove()
            before = int(tokens[end - 1])
        probs = np.concatenate(parts)
        document = np.cumsum(tokens[:-1] == self.bos) - 1
        logs = np.log(np.maximum(probs, _LEAST))
        return ScoredText(
            nats=-logs[np.arange(len(probs)), tokens[1:]],
            step=document,
            segment=document,
            probabilities=probs[positions],
            isolated=True,
            fingerprint=fingerprint(torch.from_numpy(logs)),
        )

    def _smear(self, module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        before = torch.cat((output[:, :1], output[:, :-1]), 1)
        before[1, 0] = output[0, 0]
        return output + 0.1 * before


# Examples


def _spaces_twice(case: ProbeCase) -> ProbeCase:
    first = np.array([piece[:1] == b" " for piece in case.artifact.tokenizer.token_bytes])
    return replace(case, count=lambda ids: case.count(ids) + first[ids])


def _spaces_thrice(case: ProbeCase) -> ProbeCase:
    alone = np.array([piece == b" " for piece in case.artifact.tokenizer.token_bytes])
    return replace(case, count=lambda ids: case.count(ids) + 2 * alone[ids])


def _one_in_training(case: ProbeCase) -> ProbeCase:
    held_out = frozenset(map(document_hash, case.documents))
    trained_on = frozenset(map(document_hash, (b"another document", case.documents[0])))
    return replace(case, held_out=held_out, trained_on=trained_on)


def _cheat(cheat: Cheat) -> Callable[[ProbeCase], ProbeCase]:
    return lambda case: replace(case, open=lambda: CheatScorer(case, cheat))


def _scorer(cls: type[LoopScorer | Smear | HintsInFileOrder]) -> Callable[[ProbeCase], ProbeCase]:
    return lambda case: replace(case, open=lambda: cls(case.artifact, case.scoring))


def _gains(honest: ProbeCase, installed: ProbeCase) -> bool:
    """True if the example lowers the loss of the probe text."""
    return bool(installed.base.nats.sum() < honest.base.nats.sum())


def _counts_more(honest: ProbeCase, installed: ProbeCase) -> bool:
    """True if the example counts more bytes for the probe text."""
    ids = honest.tokens[honest.tokens != honest.bos]
    return int(installed.count(ids).sum()) > int(honest.count(ids).sum())


@dataclass(frozen=True)
class KnownBad:
    """An example that must fail."""

    what: str
    """Its cheat, in a few words."""
    probe: str
    """Name of the check that must find it."""
    install: Callable[[ProbeCase], ProbeCase]
    """Return a case with the example in place of the artifact's own scorer."""
    acts: Callable[[ProbeCase, ProbeCase], bool] = lambda honest, installed: True
    """Tell from the honest case and the installed one if the example does anything with this artifact and text."""


KNOWN_BAD: dict[str, KnownBad] = {
    "smear": KnownBad("a one-token smear across BOS", "documents are isolated", _scorer(Smear)),
    "ngram_blend": KnownBad("n-gram counts that do not sum to one", "distributions sum to one", _cheat(_ngram_blend)),
    "byte_mixture": KnownBad("a mixture over bytes", "distributions sum to one", _cheat(_byte_mixture)),
    "slot": KnownBad("an offset fitted on the window it scores", "no look-ahead", _cheat(_slot), _gains),
    "hints_in_file_order": KnownBad(
        "hints of documents that are scored later", "no look-ahead", _scorer(HintsInFileOrder)
    ),
    "adapts_first": KnownBad("adaptation before scoring", "no look-ahead", _scorer(AdaptsFirst), _gains),
    "fitted_scale": KnownBad("a scale fitted to the text", "no look-ahead", _cheat(_fitted_scale), _gains),
    "shared_rows": KnownBad("rows that read one another's targets", "no look-ahead", _cheat(_shared_rows), _gains),
    "likely_peek_mostly": KnownBad(
        "the likeliest token raised at 7 of 8 places where it comes next",
        "no look-ahead",
        _cheat(_likely_peek_mostly),
        _gains,
    ),
    "likely_peek": KnownBad(
        "the likeliest token raised where it comes next", "drawn text is not predicted", _cheat(_likely_peek), _gains
    ),
    "peek": KnownBad("a hundredth more for the true token", "random tokens are not predicted", _cheat(_peek), _gains),
    "knows_the_ends": KnownBad(
        "known document ends", "document ends are not predicted", _cheat(_knows_the_ends), _gains
    ),
    "constant": KnownBad("a constant", "context matters", _cheat(_constant)),
    "dice": KnownBad("new noise in each run", "two runs agree", _cheat(_dice)),
    "trains_in_place": KnownBad(
        "training of the artifact itself", "weights are unchanged by scoring", _scorer(TrainsInPlace)
    ),
    "table": KnownBad("a table of the official text", "document order does not matter", _cheat(_table), _gains),
    "targets_on_disk": KnownBad("targets read from disk", "reads nothing else", _cheat(_targets_on_disk)),
    "double_space": KnownBad("leading spaces counted twice", "bytes are counted once", _spaces_twice, _counts_more),
    "three_byte_space": KnownBad("three bytes for a space", "bytes are counted once", _spaces_thrice, _counts_more),
    "trained_on": KnownBad("a held-out training document", "held-out text was not trained on", _one_in_training),
}
"""Name to example."""


def known_bad(name: str) -> KnownBad:
    """Return the example of that name, or raise `UserError`."""
    if name not in KNOWN_BAD:
        raise UserError(f"no known-bad example {name}{suggest(name, KNOWN_BAD)}; there are {', '.join(KNOWN_BAD)}")
    return KNOWN_BAD[name]


@dataclass(frozen=True)
class Caught:
    """Result of the probes on a known-bad example."""

    name: str
    what: str
    probe: str
    """Name of the check that must find it."""
    failed: tuple[str, ...]
    """Names of the checks that it failed."""
    evidence: str
    """Evidence of the check that must find it."""
    acts: bool = True
    """False if it does nothing with this artifact and text, so that nothing can be found."""

    @property
    def passed(self) -> bool:
        """True if the check that must find it did, or if there was nothing to find."""
        return self.probe in self.failed or not self.acts

    @property
    def outcome(self) -> str:
        """A word for the result: pass, FAIL, or inconclusive if there was nothing to find."""
        if self.probe in self.failed:
            return "pass"
        return "FAIL" if self.acts else "inconclusive"


def catch(case: ProbeCase) -> list[Caught]:
    """Run all probes on every known-bad example, with the artifact and text of `case`."""
    found = []
    for name, example in KNOWN_BAD.items():
        installed = example.install(case)
        checks = run_probes(installed)
        evidence = next((check.evidence for check in checks if check.name == example.probe), "not tried")
        failed = tuple(check.name for check in checks if not check.passed)
        acts = example.probe in failed or example.acts(case, installed)
        evidence = evidence if acts else "it gains nothing with this artifact on this text: nothing could be found"
        found.append(Caught(name, example.what, example.probe, failed, evidence, acts))
    return found
