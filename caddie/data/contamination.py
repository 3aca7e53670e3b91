"""Held-out text that is in the training text too, found by n-grams of tokens (Brown et al. 2020, appendix C).

Document hashes find only equal documents; one changed letter changes a few n-grams of a thousand.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from caddie.data.shards import Tokens, read
from caddie.runtime.progress import SILENT, Progress

_ALL_TOKENS = 1 << 26
"""Most tokens of both texts together for which every n-gram is checked; of longer texts a sample is."""
_FIRST = 3
"""Number of first tokens of an n-gram, whose hash decides if the n-gram is in the sample."""
_CHUNK = 1 << 17
_FILTER_BITS = 24
_FILTER_SHIFT = np.uint64(64 - _FILTER_BITS)

Counts = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]


class Shared(NamedTuple):
    """Number of n-grams of each held-out document, (documents,): all checked, and those also in training text."""

    counted: Counts
    shared: Counts


def shared_ngrams(
    held_out: Tokens, shards: Sequence[Tokens], bos: int, length: int, seed: int, progress: Progress = SILENT
) -> Shared:
    """Count the n-grams of `length` tokens of held-out documents, and those that training shards have too.

    N-grams begin and end in one document. Of long texts a sample is checked. `seed` draws it by an n-gram's first
    tokens, so both texts give the same sample. Memory holds the held-out text, its n-grams and a chunk.
    """
    total = sum(map(len, shards))
    part = (len(held_out) + total) // _ALL_TOKENS + 1
    factors = np.random.default_rng(seed).integers(1 << 63, size=length, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    places, hashes = _ngrams(held_out, factors, part)
    document = np.cumsum(np.append(False, held_out[1:] == bos), dtype=np.int64)
    inside = document[places] == document[places + length - 1]
    owners, documents = document[places[inside]], int(document[-1]) + 1
    known, which = np.unique(hashes[inside], return_inverse=True)
    found, maybe = np.zeros(len(known) + 1, bool), np.zeros(1 << _FILTER_BITS, bool)
    maybe[known >> _FILTER_SHIFT] = True
    padded = np.append(known, np.uint64(0))  # NumPy would turn a plain 0 into floats, of 53 bits
    done = 0
    for chunk in _chunks(shards, length):
        met = _ngrams(chunk, factors, part)[1]
        met = met[maybe[met >> _FILTER_SHIFT]]  # drops most at once; the search takes longer
        at = np.searchsorted(known, met)
        found[at[padded[at] == met]] = True
        done += len(chunk)
        share = min(done / total, 1.0)
        progress.step({"event": "doing", "text": f"looking for held-out text in training text, {share:.0%}"})
    counted, shared = (np.bincount(of, minlength=documents) for of in (owners, owners[found[which]]))
    return Shared(counted, shared)


def _ngrams(tokens: Tokens, factors: Hashes, part: int) -> tuple[Counts, Hashes]:
    """Return places and 64-bit hashes of the n-grams of which one in `part` is drawn."""
    count = max(0, len(tokens) - len(factors) + 1)
    columns = [tokens[offset : offset + count] for offset in range(len(factors))]
    if part == 1:
        return np.arange(count), _hash(columns, factors)
    places = np.flatnonzero(_hash(columns[:_FIRST], factors) < np.uint64(2**64 // part))
    return places, _hash([column[places] for column in columns], factors)


def _hash(columns: Sequence[Tokens], factors: Hashes) -> Hashes:
    """Return the sum of columns of tokens, each times a random odd number, modulo 2^64."""
    hashes = np.zeros(len(columns[0]), np.uint64)
    for column, factor in zip(columns, factors, strict=False):
        hashes += column.astype(np.uint64) * factor
    return hashes


def _chunks(shards: Sequence[Tokens], length: int) -> Iterator[Tokens]:
    """Yield the shards in pieces that overlap, so that each n-gram is in one of them."""
    for shard in shards:
        for begin in range(0, len(shard), _CHUNK):
            yield read(shard, begin, min(begin + _CHUNK + length - 1, len(shard)))
