"""Random tokens in documents as long as the held-out ones, with the losses of their own distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from caddie.data.tokenizers import Ids
from caddie.verify.black_box import Floats

ENDS = 12
"""Ends of documents in the mean, at least. One that is known gains five nats or more, and the bound allows 14."""
_LENGTHS = 64
"""Lengths of documents that stand for all."""


@dataclass(frozen=True)
class Noise:
    """Random tokens (N,), and the lowest expected loss of each prediction, (N - 1,)."""

    tokens: Ids
    nats: Floats
    bos_or_not: Floats
    """Part of the loss for predicting BOS or not."""


def draw_noise(
    documents: Sequence[int], length: int, vocabulary: int, bos: int, generator: np.random.Generator
) -> Noise:
    """Return so many random tokens in documents of about the given lengths, shorter ones if there were too few ends.

    The length of each document is geometric; its mean is one of the lengths. All other tokens are uniform.
    """
    means = np.quantile(documents, (np.arange(_LENGTHS) + 0.5) / _LENGTHS)
    means = np.clip(means, 2.0, max(2.0, length / ENDS))
    tokens = generator.choice(np.delete(np.arange(vocabulary), bos), length).astype(np.uint16)
    begins = np.cumsum(generator.geometric(1 / generator.choice(means, length)))
    tokens[[0, *begins[begins < length]]] = bos
    places, is_end = np.arange(length - 1), tokens[1:] == bos
    age = places - np.maximum.accumulate(np.where(tokens[:-1] == bos, places, 0))
    chance = 1 / means[:, None]
    lasts = np.maximum((1 - chance) ** np.arange(age.max() + 1), 1e-300)  # so many tokens, for each mean
    end = ((chance * lasts).mean(0) / lasts.mean(0))[age]
    bos_or_not = np.where(is_end, -np.log(end), -np.log1p(-end))
    return Noise(tokens, bos_or_not + np.where(is_end, 0.0, np.log(vocabulary - 1)), bos_or_not)
