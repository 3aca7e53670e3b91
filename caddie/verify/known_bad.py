"""Ways in which a score was false in public, and some more: each is an example that must fail its probe.

Most of them cannot be written as a scorer of caddie's: the loop shows no token before it is charged for, normalizes
the odds itself and gathers the target itself. So these are black boxes that get the whole text at once, as the scripts
did in which such mistakes were found. Numbers with # are issues and pull requests of openai/parameter-golf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from caddie.data.corpus import document_hash
from caddie.data.tokenizers import Ids
from caddie.errors import UserError, suggest
from caddie.score import SGD
from caddie.score.ttt_sgd import Learner
from caddie.verify.black_box import BlackBoxScorer, Floats, Places, Priced, Scored
from caddie.verify.probe_case import ProbeCase
from caddie.verify.probes import examine

_LEAST = 1e-300  # so that nothing costs infinitely much


class Cheat(Scored):
    """The artifact's own model, with its distributions replaced by others before the targets are charged for."""

    def price(self, tokens: Ids, shown: Places) -> Priced:
        """The charges of what is `stated`."""
        everywhere = np.arange(len(tokens) - 1)
        honest = super().price(tokens, everywhere)
        assert honest.odds is not None
        stated = self.stated(tokens, honest.odds)
        charged = np.maximum(stated[everywhere, tokens[1:]], _LEAST)
        return replace(honest, nats=-np.log(charged), odds=stated[shown])

    def stated(self, tokens: Ids, odds: Floats) -> Floats:
        """Other distributions (N - 1, vocabulary) in place of the model's."""
        raise NotImplementedError


class Slot(Cheat):
    """For each window an offset of all log-odds, fitted on the very tokens that it then scores (SLOT, #1240, #1507)."""

    def stated(self, tokens: Ids, odds: Floats) -> Floats:
        """Four steps of gradient descent on each window's own loss."""
        length, stated = self.scoring.sequence_length, odds.copy()
        for begin in range(0, len(odds), length):
            window = np.log(np.maximum(odds[begin : begin + length], _LEAST))
            found = np.bincount(tokens[begin + 1 : begin + 1 + len(window)], minlength=odds.shape[1]) / len(window)
            offset = np.zeros(odds.shape[1])
            for _ in range(4):
                offset += 10 * (found - _softmax(window + offset).mean(0))
            stated[begin : begin + length] = _softmax(window + offset)
        return stated


class FittedScale(Cheat):
    """One temperature for all log-odds, fitted on the text that is scored: what #1376 does with all weights."""

    def stated(self, tokens: Ids, odds: Floats) -> Floats:
        """Newton's method on the loss over the whole text."""
        logits, scale = np.log(np.maximum(odds, 1e-30)), 1.0
        target = logits[np.arange(len(odds)), tokens[1:]].mean()
        for _ in range(4):
            p = _softmax(scale * logits)
            mean = (p * logits).sum(1)
            curvature = ((p * logits**2).sum(1) - mean**2).mean()
            scale = float(np.clip(scale + (target - mean.mean()) / max(curvature, 1e-9), -5.0, 5.0))
        return _softmax(scale * logits)


class AdaptsFirst(Scored):
    """Trains on the text, and scores it afterwards (pre-quantization TTT: #672, #1376, #1517)."""

    def price(self, tokens: Ids, shown: Places) -> Priced:
        """The charges of the trained model."""
        with _kept(self.model):
            _train(self, tokens)
            return super().price(tokens, shown)


class TrainsInPlace(Scored):
    """Scores first and trains afterwards, but the artifact's own weights, which are others for the next text."""

    def price(self, tokens: Ids, shown: Places) -> Priced:
        """The charges of the model as it is."""
        priced = super().price(tokens, shown)
        _train(self, tokens)
        return priced


class NgramBlend(Cheat):
    """Half the model and half counts of pairs in a hash table that is divided by the counts of the context alone.

    Each token looks fine, but tokens share entries, and all together they add up to far more than one (#797, #886).
    """

    buckets = 61
    """Entries of the table."""

    def stated(self, tokens: Ids, odds: Floats) -> Floats:
        """Counts of what was charged for already."""
        pairs, contexts = np.zeros(self.buckets), np.zeros(self.buckets)
        candidates, stated = np.arange(odds.shape[1]), odds.copy()
        for place, (last, following) in enumerate(zip(tokens[:-1].tolist(), tokens[1:].tolist(), strict=True)):
            if seen := contexts[last % self.buckets]:
                stated[place] = 0.5 * odds[place] + 0.5 * pairs[(last * 31 + candidates) % self.buckets] / seen
            pairs[(last * 31 + following) % self.buckets] += 1
            contexts[last % self.buckets] += 1
        return stated


class ByteMixture(Cheat):
    """A token's probability is dealt out evenly over its bytes and mixed there with counts of bytes (#1785, #1872).

    The product over a token's bytes is charged for, but these products do not add up to one.
    """

    def stated(self, tokens: Ids, odds: Floats) -> Floats:
        """Counts of the bytes that were charged for already."""
        pieces = self.artifact.tokenizer.token_bytes
        widths = np.array([len(piece) for piece in pieces])
        table = np.zeros((len(pieces), widths.max()), np.int64)
        for index, piece in enumerate(pieces):
            table[index, : len(piece)] = list(piece)
        used = np.arange(table.shape[1]) < widths[:, None]
        counts, stated = np.ones(256), odds.copy()
        for place, following in enumerate(tokens[1:].tolist()):
            share = odds[place] ** (1 / np.maximum(widths, 1))
            mixed = 0.5 * share[:, None] + 0.5 * (counts / counts.sum())[table]
            stated[place, widths > 0] = np.where(used, mixed, 1.0).prod(1)[widths > 0]
            np.add.at(counts, list(pieces[following]), 1)
        return stated


class Constant(Cheat):
    """Reads nothing and answers with the same distribution always (a scalar in place of logits: abundant-ai #204)."""

    def stated(self, tokens: Ids, odds: Floats) -> Floats:
        """All tokens alike."""
        return np.full_like(odds, 1 / odds.shape[1])


class Peek(Cheat):
    """Adds a hundredth to the probability of the true token."""

    def stated(self, tokens: Ids, odds: Floats) -> Floats:
        """Still distributions, each with one entry raised."""
        return _raised(odds, tokens[1:], 0.01)


class Dice(Cheat):
    """Draws the noise on its odds anew in every run."""

    def stated(self, tokens: Ids, odds: Floats) -> Floats:
        """The model's odds, each a little off."""
        noisy: Floats = odds * np.exp(0.01 * np.random.default_rng().standard_normal(odds.shape))
        noisy /= noisy.sum(1, keepdims=True)
        return noisy


class KnowsTheEnds(Cheat):
    """Knows where documents end, as a scorer may that is told the stretches, and says so (compare #1967, #2018)."""

    def stated(self, tokens: Ids, odds: Floats) -> Floats:
        """BOS where it comes and nowhere else."""
        ends = tokens[1:] == self.bos
        stated = odds.copy()
        stated[:, self.bos] = 0.0
        stated /= stated.sum(1, keepdims=True)
        stated[ends] *= 0.01
        stated[ends, self.bos] = 0.99
        return stated


class Table(Cheat):
    """Has the official text in a table by place, and mixes it in: worthless for the same documents in another order."""

    def __init__(self, trial: ProbeCase) -> None:
        super().__init__(trial.artifact, trial.scoring)
        self.official = trial.tokens

    def stated(self, tokens: Ids, odds: Floats) -> Floats:
        """What the table says comes next, as likely as all that the model says."""
        return _raised(odds, self.official[1 : len(tokens)], 0.5)


class TargetsOnDisk(Cheat):
    """Looks for the targets in a file beside the artifact."""

    def stated(self, tokens: Ids, odds: Floats) -> Floats:
        """What the file says comes next, if there is one."""
        try:
            found = np.fromfile(self.artifact.path.with_name("validation.bin"), np.uint16)
        except OSError:
            return odds
        return _raised(odds, found[1 : len(tokens)], 0.5)


class Smear(BlackBoxScorer):
    """Each embedding takes in some of the one before, also across BOS, where documents are kept apart (#1855)."""

    def price(self, tokens: Ids, shown: Places) -> Priced:
        """Every document by itself, but for its first embedding."""
        begins = np.flatnonzero(tokens == self.bos)
        ends = np.append(begins[1:], len(tokens) - 1)
        odds, before = [], int(self.bos)
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            ids = torch.from_numpy(tokens[begin:end].astype(np.int64))
            # The first row is there to have the embedding of the token before; what becomes of it is left alone.
            rows = torch.stack([torch.full_like(ids, before), ids]).to(next(self.model.parameters()).device)
            hook = self.model.embedding.register_forward_hook(self._smear)
            with torch.no_grad():
                odds.append(torch.softmax(self.model(rows, rows == self.bos)[1].double(), -1).cpu().numpy())
            hook.remove()
            before = int(tokens[end - 1])
        stated = np.concatenate(odds)
        document = np.cumsum(tokens[:-1] == self.bos) - 1
        charged = np.maximum(stated[np.arange(len(stated)), tokens[1:]], _LEAST)
        return Priced(nats=-np.log(charged), step=document, stretch=document, odds=stated[shown], isolated=True)

    def _smear(self, module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        before = torch.cat((output[:, :1], output[:, :-1]), 1)
        before[1, 0] = output[0, 0]
        return output + 0.1 * before


def _softmax(logits: Floats) -> Floats:
    powers: Floats = np.exp(logits - logits.max(1, keepdims=True))
    powers /= powers.sum(1, keepdims=True)
    return powers


def _raised(odds: Floats, tokens: Ids, by: float) -> Floats:
    """Distributions with a part of all of it moved to one token each, as far as tokens are given."""
    stated = odds.copy()
    stated[: len(tokens)] *= 1 - by
    stated[np.arange(len(tokens)), tokens] += by
    return stated


def _train(subject: BlackBoxScorer, tokens: Ids) -> None:
    length = min(subject.scoring.sequence_length, len(tokens) - 1)
    rows = np.stack([tokens[begin : begin + length + 1] for begin in range(0, len(tokens) - length, length)])
    learner = Learner(subject.model, subject.bos, SGD(lr=0.01, epochs=1), torch.float32)
    learner.learn(rows.astype(np.int64), 0, 1)


@contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    """Put the weights back afterwards."""
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    try:
        yield
    finally:
        model.load_state_dict(before)


def _spaces_twice(trial: ProbeCase) -> ProbeCase:
    first = np.array([piece[:1] == b" " for piece in trial.artifact.tokenizer.token_bytes])
    return replace(trial, count=lambda ids: trial.count(ids) + first[ids])


def _spaces_thrice(trial: ProbeCase) -> ProbeCase:
    alone = np.array([piece == b" " for piece in trial.artifact.tokenizer.token_bytes])
    return replace(trial, count=lambda ids: trial.count(ids) + 2 * alone[ids])


def _one_in_training(trial: ProbeCase) -> ProbeCase:
    held_out = frozenset(map(document_hash, trial.documents))
    trained_on = frozenset(map(document_hash, (b"another document", trial.documents[0])))
    return replace(trial, held_out=held_out, trained_on=trained_on)


def _opens(subject: Callable[[ProbeCase], BlackBoxScorer]) -> Callable[[ProbeCase], ProbeCase]:
    return lambda trial: replace(trial, open=lambda: subject(trial))


def _of(cls: type[Scored | Smear]) -> Callable[[ProbeCase], ProbeCase]:
    return _opens(lambda trial: cls(trial.artifact, trial.scoring))


@dataclass(frozen=True)
class KnownBad:
    """An example that must fail."""

    what: str
    """What it does, in a few words."""
    probe: str
    """Name of the check that must find it."""
    put: Callable[[ProbeCase], ProbeCase]
    """A trial with the example in the place of the artifact's own."""


KNOWN_BAD: dict[str, KnownBad] = {
    "smear": KnownBad("a one-token smear across BOS", "documents keep apart", _of(Smear)),
    "ngram_blend": KnownBad("n-gram counts that do not sum to one", "distributions sum to one", _of(NgramBlend)),
    "byte_mixture": KnownBad("a mixture over bytes", "distributions sum to one", _of(ByteMixture)),
    "slot": KnownBad("an offset fitted on the window it scores", "no look-ahead", _of(Slot)),
    "adapts_first": KnownBad("adaptation before scoring", "no look-ahead", _of(AdaptsFirst)),
    "fitted_scale": KnownBad("a scale learned from the text", "no look-ahead", _of(FittedScale)),
    "peek": KnownBad("a hundredth more for the true token", "noise is not known", _of(Peek)),
    "knows_the_ends": KnownBad("ends of documents known", "ends of documents are not known", _of(KnowsTheEnds)),
    "constant": KnownBad("a constant", "the past matters", _of(Constant)),
    "dice": KnownBad("other noise in each run", "two runs agree", _of(Dice)),
    "trains_in_place": KnownBad("training of the artifact itself", "weights are unchanged by use", _of(TrainsInPlace)),
    "table": KnownBad("a table of the official text", "order of documents", _opens(Table)),
    "targets_on_disk": KnownBad("targets read from disk", "reads nothing else", _of(TargetsOnDisk)),
    "double_space": KnownBad("leading spaces counted twice", "bytes are counted once", _spaces_twice),
    "three_byte_space": KnownBad("three bytes for a space", "bytes are counted once", _spaces_thrice),
    "trained_on": KnownBad("a held-out training document", "held-out text was not trained on", _one_in_training),
}
"""Name to example."""


def known_bad(name: str) -> KnownBad:
    """The example of that name, or a `UserError`."""
    if name not in KNOWN_BAD:
        raise UserError(f"no known-bad example {name}{suggest(name, KNOWN_BAD)}; there are {', '.join(KNOWN_BAD)}")
    return KNOWN_BAD[name]


@dataclass(frozen=True)
class Caught:
    """What became of a known-bad example."""

    name: str
    what: str
    probe: str
    """Name of the check that must find it."""
    failed: tuple[str, ...]
    """Names of those that did."""
    evidence: str
    """What that check saw."""

    @property
    def passed(self) -> bool:
        """Whether it was found by the check that must find it."""
        return self.probe in self.failed


def catch(trial: ProbeCase) -> list[Caught]:
    """Put every known-bad example to all probes; made of the trial's artifact, on the trial's text."""
    found = []
    for name, example in KNOWN_BAD.items():
        checks = examine(example.put(trial))
        evidence = next((check.evidence for check in checks if check.name == example.probe), "not tried")
        failed = tuple(check.name for check in checks if not check.passed)
        found.append(Caught(name, example.what, example.probe, failed, evidence))
    return found
