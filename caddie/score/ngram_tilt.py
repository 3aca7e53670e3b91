"""N-gram tilt: raise the probability of the token that followed the same n-gram before, in text already scored."""

from collections.abc import Iterator, Sequence
from typing import Annotated
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from caddie.config import Config, Fraction, NonNegative, Range
from caddie.model import Cache
from caddie.runtime.distributed import Ranks
from caddie.score.scorer import Layout, Positions, ScoredPrefix, Scorer, ScoringBatch, Step

Keys = npt.NDArray[np.uint64]

# fmt: off
_FACTORS = np.array([
    36313, 27191, 51647, 81929, 131071, 196613, 262147, 393241, 524309, 655373, 786433, 917521, 1048583, 1179653,
    1310729, 1441801, 1572869, 1703941, 1835017, 1966087, 2097169, 2228243, 2359319, 2490389, 2621471, 2752549, 2883617,
    3014687, 3145757, 3276833, 3407903, 3538973,
], np.uint64)
# fmt: on
"""Factor of the id at each place of a context, as in openai/parameter-golf #1514, so that keys equal those there."""
_PAIR_FACTOR = np.uint64(1000003)
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio (Knuth): near keys land far apart


class NGramTilt(Config):
    """Token n-gram tilt: p'(t) = p(t)·e^(boost·[t = h]) / Z, h the most frequent token after this context so far.

    Only scored tokens are counted: counts are updated between the scorer's steps, in the order of scoring. The records
    count in the order of the file while documents are scored by length, so a hint may come from a document that is
    scored later. A context is the last order - 1 ids, also across documents if the scorer reads the text as a whole.
    """

    order: Annotated[int, Range(2, len(_FACTORS))] = 16
    """Length of the n-gram: the context and the token."""
    threshold: Fraction = 0.8
    """Least share of the most frequent next token for a boost; a context seen once has share 1."""
    boost: NonNegative = 2.625
    """Nats added to the logit of that token."""

    def build(self, scorer: Scorer) -> Scorer:
        """Return the scorer with tilted logits; it keeps its own plan and its own learning."""
        return _Tilted(self, scorer)


class NGramCounts:
    """Counts of contexts, each with its most frequent next token and that token's count, in tables that grow.

    On a tie, the token that reached the count first is kept. A new context takes about 50 bytes.
    """

    def __init__(self, order: int) -> None:
        self.context = order - 1
        """Number of ids in a context."""
        self.contexts, self.pairs = _Table(), _Table()
        self.totals, self.top_counts, self.top_ids = (np.zeros(0, np.int64) for _ in range(3))
        """Facts of each context, in the order of `contexts.keys`."""
        self.pair_counts = np.zeros(0, np.int64)

    def keys(self, ids: Positions) -> Keys:
        """Return the key of the context that ends at each of the ids (..., n), from the first whole context on."""
        found = np.zeros((*ids.shape[:-1], max(0, ids.shape[-1] - self.context + 1)), np.uint64)
        for place in range(self.context):
            found ^= ids[..., place : place + found.shape[-1]].astype(np.uint64) * _FACTORS[place]
        return found

    def look_up(self, keys: Keys) -> tuple[Positions, npt.NDArray[np.float32]]:
        """Return the most frequent next id of each context and its share, both 0 for an unknown context."""
        rows = self.contexts.find(keys)
        known = rows >= 0
        ids, shares = np.zeros(keys.shape, np.int64), np.zeros(keys.shape, np.float32)
        ids[known] = self.top_ids[rows[known]]
        shares[known] = self.top_counts[rows[known]].astype(np.float32) / self.totals[rows[known]].astype(np.float32)
        return ids, shares

    def count(self, keys: Keys, ids: Positions) -> None:
        """Count ids (n,) after contexts (n,); the result is the same as counting them one by one in this order."""
        if not len(keys):
            return
        contexts, numbers = np.unique(keys, return_counts=True)
        rows = self.contexts.find_or_add(contexts)
        for facts in (self.totals, self.top_counts, self.top_ids):
            facts.resize(len(self.contexts.keys), refcheck=False)  # with zeros
        self.totals[rows] += numbers
        mixed = (keys * _PAIR_FACTOR) ^ (ids.astype(np.uint64) * _FACTORS[self.context])
        # A pair reaches its count at its last event, which is the first of the reversed events.
        pairs, reversed_last, numbers = np.unique(mixed[::-1], return_index=True, return_counts=True)
        last = len(mixed) - 1 - reversed_last
        pair_rows = self.pairs.find_or_add(pairs)
        self.pair_counts.resize(len(self.pairs.keys), refcheck=False)
        self.pair_counts[pair_rows] += numbers
        counts, of_pair = self.pair_counts[pair_rows], self.contexts.find(keys[last])
        order = np.lexsort((last, -counts, of_pair))
        best = order[np.diff(of_pair[order], prepend=-1) != 0]  # of each context
        best = best[counts[best] > self.top_counts[of_pair[best]]]
        self.top_counts[of_pair[best]], self.top_ids[of_pair[best]] = counts[best], ids[last[best]]


class _Table:
    """Hash table with open addressing, in NumPy, that numbers distinct 64-bit keys in the order of arrival."""

    def __init__(self) -> None:
        self.keys: Keys = np.zeros(0, np.uint64)
        self._bits = 12
        self._rows = np.full(1 << self._bits, -1, np.int64)

    def find(self, keys: Keys) -> Positions:
        """Return the number of each key, or -1."""
        slots, found = self._slots(keys.ravel()), np.empty(keys.size, np.int64)
        waiting = np.arange(keys.size)
        while len(waiting):
            rows = self._rows[slots]
            other = rows >= 0
            other[other] = self.keys[rows[other]] != keys.ravel()[waiting[other]]
            found[waiting[~other]] = rows[~other]
            waiting, slots = waiting[other], self._after(slots[other])
        return found.reshape(keys.shape)

    def find_or_add(self, keys: Keys) -> Positions:
        """Return the numbers of distinct keys; new keys get the next numbers."""
        found = self.find(keys)
        new = found < 0
        found[new] = np.arange(len(self.keys), len(self.keys) + int(new.sum()))
        self.keys = np.concatenate([self.keys, keys[new]])
        if 2 * len(self.keys) > len(self._rows):
            self._bits = (4 * len(self.keys)).bit_length()
            self._rows = np.full(1 << self._bits, -1, np.int64)
            self._insert(np.arange(len(self.keys)))
        else:
            self._insert(found[new])
        return found

    def _insert(self, rows: Positions) -> None:
        slots = self._slots(self.keys[rows])
        while len(rows):
            free = self._rows[slots] < 0
            self._rows[slots[free]] = rows[free]  # of several that want one slot, the last gets it
            left = self._rows[slots] != rows
            rows, slots = rows[left], self._after(slots[left])

    def _slots(self, keys: Keys) -> Positions:
        return ((keys * _SPREAD) >> np.uint64(64 - self._bits)).astype(np.int64)

    def _after(self, slots: Positions) -> Positions:
        return (slots + 1) & (len(self._rows) - 1)


class _Tilted(Scorer):
    """Adds the boost to the logits of another scorer, which never sees it."""

    def __init__(self, config: NGramTilt, scorer: Scorer) -> None:
        self.per_document, self.together = scorer.per_document, scorer.together
        self.in_order = not scorer.per_document
        self.fixed_between_updates = scorer.stateless or scorer.fixed_between_updates
        self._config, self._scorer, self._counts = config, scorer, NGramCounts(config.order)
        self._earlier: WeakKeyDictionary[Cache, Positions] = WeakKeyDictionary()
        """The last ids of each row that a cache holds."""

    def plan(self, layout: Layout, rows: int) -> Iterator[Step]:
        """Yield the scorer's own steps; a stateless one plans 1 row, so that steps do not depend on the batch size."""
        return self._scorer.plan(layout, 1 if self._scorer.stateless else rows)

    def share(self, ranks: Ranks) -> bool:
        """Share the work as the scorer does; every process counts all scored tokens."""
        return self._scorer.share(ranks)

    def owners(self, batches: Sequence[ScoringBatch], world: int) -> list[int]:
        return self._scorer.owners(batches, world)

    def logits(self, inputs: Tensor, slots: Sequence[int], last: int, cache: Cache | None = None) -> Tensor:
        """Return the scorer's logits with the boost added where a context is known well enough."""
        ids = inputs.cpu().numpy()  # first, so that it waits for no work queued on the GPU
        logits = self._scorer.logits(inputs, slots, last, cache)
        if cache is not None:
            if cache in self._earlier:
                ids = np.concatenate([self._earlier[cache], ids], 1)
            self._earlier[cache] = ids[:, -self._counts.context :]
        keys = self._counts.keys(ids[:, -(last + self._counts.context - 1) :])
        hints, shares = self._counts.look_up(keys)
        boosts = np.where(shares >= self._config.threshold, self._config.boost, 0.0)
        boosts[shares == 0.0] = 0.0  # an unknown context, whatever the threshold
        if not boosts.any():
            return logits
        index, boost = (torch.from_numpy(array).to(logits.device)[..., None] for array in (hints, boosts))
        tilted = logits.clone()
        tilted[:, tilted.shape[1] - keys.shape[1] :].scatter_add_(2, index, boost.to(logits.dtype))
        return tilted

    def update(self, batches: Sequence[ScoringBatch], prefix: ScoredPrefix) -> None:
        """Count the scored tokens, window after window, and let the scorer learn."""
        keys, ids = [], []
        for window in sorted(window for batch in batches for window in batch.windows):
            begin = int(prefix.layout.begins[prefix.stretch(window.start)])
            first = max(begin, window.first + 1 - self._counts.context)
            tokens = prefix.tokens(first, window.end + 1)
            if len(tokens) > self._counts.context:
                keys.append(self._counts.keys(tokens[:-1]))
                ids.append(tokens[self._counts.context :])
        if keys:
            self._counts.count(np.concatenate(keys), np.concatenate(ids))
        self._scorer.update(batches, prefix)
