"""Cheats that replace the distributions of an honest scorer, knowing the whole text (# as in `known_bad`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from caddie.data.tokenizers import Ids
from caddie.verify.black_box import Floats
from caddie.verify.probe_case import ProbeCase

LEAST = 1e-300
"""Lowest probability, so that no loss is infinite."""

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


def ngram_blend(case: ProbeCase, tokens: Ids, probs: Floats, buckets: int = 61) -> Floats:
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
    """Predict BOS exactly where it comes, as a scorer can that is told the segments (compare #1967, #2018)."""
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
    comes = probs.argmax(1) == tokens[1:]
    return _boosted(probs, tokens[1:], 20.0 * comes)


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
