"""Check that the tokenizer has no part in the held-out text: it drops none of it, and its ids are those of other text.

The probes see excerpts; a tokenizer may treat whole documents otherwise.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from caddie.data.corpus import Corpus
from caddie.data.shards import Tokens, read, split_documents
from caddie.data.tokenizers import Tokenizer
from caddie.errors import UserError, count
from caddie.verify.probes import Check, check_loss

VOCABULARY = "held-out text is not in the vocabulary"
COMES_BACK = "whole held-out documents come back"
_TEXT_BYTES, _LONGEST = 1 << 20, 4 << 20
"""Bytes of text to decode, the last document whole, and bytes at which a longer document is cut."""
_MOST_DROPPED = 0.1
"""Most bytes of the held-out text that its tokens may not decode to; the contest's tokenizers leave out 0.02 %."""
_SLACK_BYTES = 512
"""Bytes that may be lost on top of the share that the probe allows: xz spends more on the first words."""
_DOCUMENTS, _LEAST_TOKENS = 2000, 32
"""Documents of each kind whose tokens are measured, and tokens that each has."""
_LONGER, _CHANCE = 1.25, 1e-6
"""The check fails above this ratio of mean bytes a token, if such ranks are also less probable than `_CHANCE`."""
_DOUBTFUL, _UNUSED, _TIMES = 0.01, 0.05, 4
"""Shares of held-out bytes in ids that training text never uses: doubtful above the first, a cheat above the second,
and only above `_TIMES` times the expected share."""
_LONG = 2
"""An id is long above this many times the mean bytes of a token; shorter ids make no text cheap."""
_TOKENS = 1 << 24
"""Training tokens whose ids are looked up."""


def check_comes_back(tokenizer: Tokenizer, documents: Sequence[bytes], seed: int, dropped: float = 0.0) -> Check:
    """Check how much of whole documents their tokens lose, as the probe does with excerpts.

    Documents are drawn with chances in proportion to their bytes. `dropped` is the part of all held-out bytes that its
    tokens do not decode to.
    """
    drawn = _by_bytes(documents, seed)
    size, back = sum(map(len, drawn)), map(tokenizer.decode, tokenizer.encode_many(drawn))
    changed = [pair for pair in zip(drawn, back, strict=True) if pair[0] != pair[1]]
    passed, evidence = check_loss(changed, size, _SLACK_BYTES)
    if dropped > _MOST_DROPPED:
        passed, evidence = False, f"{evidence}; of all held-out bytes, its tokens leave out {dropped:.1%}"
    return Check(COMES_BACK, passed, f"{size:,} bytes in {count(len(drawn), 'document')}{evidence}")


def _by_bytes(documents: Sequence[bytes], seed: int) -> list[bytes]:
    """Draw documents, the longer the likelier, until they have `_TEXT_BYTES` (Efraimidis and Spirakis 2006)."""
    chance, drawn, size = random.Random(seed), list[bytes](), 0
    keys = [chance.random() ** (1 / max(1, len(document))) for document in documents]
    for place in sorted(range(len(documents)), key=lambda place: -keys[place]):
        if size >= _TEXT_BYTES:
            break
        drawn.append(documents[place][:_LONGEST])
        size += len(drawn[-1])
    return drawn


def check_vocabulary(tokenizer: Tokenizer, corpus: Corpus) -> list[Check]:
    """Check that held-out text is not spelled in ids of its own, nor in longer ones than training text.

    A random split makes documents of both alike, so their mean bytes a token are compared by rank (Mann and Whitney
    1947). The means must differ by a quarter too, since a split need not be random. The share of held-out bytes in long
    ids that training text never uses should be about the share of training bytes in long ids that only one training
    document uses (Good 1953). Without training shards there is no check.
    """
    try:
        train_shards = corpus.train_shards()
    except UserError:  # scoring needs the held-out part alone, and only that may be here
        return []
    held_out = corpus.validation_tokens()
    sizes = np.array([len(piece) for piece in tokenizer.token_bytes])
    unused, expected = _unused(held_out, train_shards, sizes, tokenizer.bos)
    passed: bool | None = True
    if unused > max(_DOUBTFUL, _TIMES * expected):
        passed = None if unused <= _UNUSED else False
    evidence = (
        f"{unused:.1%} of the held-out bytes in long ids that training text does not use, {expected:.1%} expected"
    )
    found, usual = (_mean_lengths(shards, sizes, tokenizer.bos) for shards in ([held_out], train_shards))
    if found and usual:
        from scipy.stats import mannwhitneyu  # not above: it takes half a second

        means = statistics.fmean(found), statistics.fmean(usual)
        p = float(mannwhitneyu(found, usual, alternative="greater").pvalue)
        least = 1 / math.comb(len(found) + len(usual), len(found))  # of few documents p is an approximation
        if means[0] > _LONGER * means[1] and max(p, least) < _CHANCE:
            passed = False
        documents = f"{len(found):,} held-out documents, {means[1]:.2f} in {len(usual):,} others"
        evidence = f"{means[0]:.2f} bytes a token in {documents}; {evidence}"
    return [Check(VOCABULARY, passed, evidence)]


def _mean_lengths(shards: Sequence[Tokens], sizes: npt.NDArray[np.int64], bos: int) -> list[float]:
    documents = islice(split_documents(shards, bos), _DOCUMENTS)
    return [float(sizes[ids[1:]].mean()) for ids in documents if len(ids) > _LEAST_TOKENS]


def _unused(
    held_out: Tokens, train_shards: Sequence[Tokens], sizes: npt.NDArray[np.int64], bos: int
) -> tuple[float, float]:
    """Return the share of held-out bytes in long ids of no training document, and of training bytes in those of one.

    Of the training tokens the first `_TOKENS` are read.
    """
    first, last, counts = (np.zeros(len(sizes), np.int64) for _ in range(3))  # documents are numbered from 1
    seen, begun = 0, 1
    for shard in train_shards:
        tokens = read(shard, 0, min(len(shard), _TOKENS - seen))
        seen += len(tokens)
        if len(tokens) and int(tokens.max()) >= len(sizes):
            raise UserError(f"a training shard holds ids over {len(sizes) - 1:,}; prepare the data again")
        numbers = np.cumsum(tokens == bos, dtype=np.int32) + np.int32(begun)
        begun = int(numbers[-1]) if len(numbers) else begun
        here = np.zeros_like(first)
        here[tokens[::-1]] = numbers[::-1]  # of equal indices the last one counts
        first = np.where(first, first, here)
        last[tokens] = numbers
        counts += np.bincount(tokens, minlength=len(sizes))
    spelled, other = (held * sizes for held in (counts, np.bincount(held_out, minlength=len(sizes))))
    long = sizes > _LONG * spelled.sum() / max(1, seen)
    unused, lone = long & (last == 0), long & (first == last) & (last > 0)
    return float(other[unused].sum() / max(1, other.sum())), float(spelled[lone].sum() / max(1, spelled.sum()))
