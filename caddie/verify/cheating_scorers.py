"""Scorers that cheat by when they learn, what they count and what they remember (# as in `known_bad`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from caddie.data.tokenizers import Ids
from caddie.model import Cache
from caddie.score import SGD, Layout, Scorer, Step, Window, layout_of, windows
from caddie.score.ngram_tilt import NGramCounts
from caddie.score.ttt_sgd import Learner
from caddie.verify.black_box import BlackBoxScorer, LoopScorer, Positions, ScoredText, fingerprint
from caddie.verify.cheats import LEAST, Cheat, raised
from caddie.verify.probe_case import ProbeCase

_COUNTED = 16  # tokens that are counted at once


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
        logs = np.log(np.maximum(cheated, LEAST))
        return replace(
            honest,
            nats=-logs[everywhere, tokens[1:]],
            probabilities=cheated[positions],
            fingerprint=fingerprint(torch.from_numpy(logs)),
            ends=logs[:, self.bos],
            context=None,
        )


class Remembers(CheatScorer):
    """Scores each text with what scorers before it were shown, as if its state outlived its process."""

    def __init__(self, case: ProbeCase, remembered: list[Ids]) -> None:
        super().__init__(case, lambda case, tokens, probs: raised(probs, remembered[0][1 : len(tokens)], 0.5))
        self.remembered = remembered

    def score(self, tokens: Ids, positions: Positions) -> ScoredText:
        """Return the losses, honest ones for the first text of all, which is remembered."""
        if self.remembered:
            return super().score(tokens, positions)
        self.remembered.append(tokens)
        return LoopScorer.score(self, tokens, positions)


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
        for begin, end in layout.edges:
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
        probs = np.concatenate(parts)
        document = np.cumsum(tokens[:-1] == self.bos) - 1
        logs = np.log(np.maximum(probs, LEAST))
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
        """Return the logits, with those of all targets but the last raised once it has waited."""
        logits = self.scorer.logits(inputs, slots, last)
        self.shown += inputs.numel()
        if self.shown > self.AFTER:
            shown = inputs[:, 1:][:, 1 - last :, None] if last > 1 else inputs[:, :0, None]
            logits[:, :-1].scatter_add_(2, shown, torch.full_like(shown, 1, dtype=logits.dtype) * self.NATS)
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
        begins = range(0, inputs.shape[1], self.length)
        parts = [inputs[:, begin : begin + self.length] for begin in begins]
        parts = [self.scorer.logits(part, slots, part.shape[1]) for part in parts]
        logits = torch.cat(parts, 1)
        true = torch.from_numpy(self._put_back(inputs[0].cpu().numpy())).to(inputs.device)[None, 1:, None]
        logits[:, :-1].scatter_add_(2, true, torch.full_like(true, 1, dtype=logits.dtype) * self.NATS)
        return logits

    def _put_back(self, tokens: Positions) -> Positions:
        """Return the tokens with those from the first repeat on replaced by the tokens one repeat distance later."""
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


class WaitingScorer(LoopScorer):
    """`Waits`, in the loop."""

    def make(self) -> Scorer:
        """Return the scorer that waits."""
        return Waits(self.scoring.plain.scorer(self.model, self.bos), self.scoring.sequence_length)
