"""Texts that a scorer is tried on: beginnings of documents, documents in their order, other tokens, random tokens."""

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from caddie.data.tokenizers import Ids, Tokenizer
from caddie.errors import UserError
from caddie.report.read import pick
from caddie.score import Scoring
from caddie.verify.black_box import Floats, Positions
from caddie.verify.remote_scorer import LONGEST_CONTEXTS, LONGEST_WINDOW

DOCUMENTS = 6
"""Fewest documents of a probe text."""
SHORT = 384
"""Tokens of a short probe text."""
MOST_TOKENS = 4096
"""Tokens of a probe text that is scored quickly: it has a leak at one place in a thousand with a chance of 98 %."""
WHOLE_BYTES = 1 << 22
"""Most bytes of a whole text."""
WINDOWS = 3
"""Length that a probe text must exceed, in windows of a user's scorer."""
_LONG = 5 / 8
"""Share of the first document in a probe text; the others divide what is left."""
_PIECES = 24
"""Most pieces of which a probe text is made."""
_TEXTS = ("argparse.py", "textwrap.py", "calendar.py", "shlex.py", "heapq.py", "csv.py")
_LEAST_TOKENS = 8
"""Fewest tokens of a document."""
_COPIED_TOKENS = 24
"""Fewest tokens of a copied passage, if the long document has so many: it then holds nine n-grams of 16."""
_TOKEN_BYTES = 8
"""Bytes to encode for each token: more than a token stands for on average."""
ENDS = 12
"""Fewest ends of documents in a random text on average. Each known one gains five nats or more; the bound allows 14."""
_LENGTHS = 64
"""Quantiles of the document lengths that a random text uses."""


def text_in_order(tokenizer: Tokenizer, documents: Sequence[bytes], length: int) -> Ids:
    """Return the first `length` tokens of documents, each begun by BOS."""
    parts, tokens = list[Ids](), 0
    for document in documents:
        if tokens >= length:
            break
        ids = tokenizer.encode(document[: (length - tokens) * _TOKEN_BYTES])
        parts.append(np.append(np.uint16(tokenizer.bos), ids))
        tokens += len(parts[-1])
    return np.concatenate(parts)[:length] if parts else np.zeros(0, np.uint16)


def longest_text(scoring: Scoring) -> int:
    """Return the most tokens that a probe text for `scoring` may have."""
    return max(MOST_TOKENS, 2 * WINDOWS * max(LONGEST_WINDOW, LONGEST_CONTEXTS * scoring.sequence_length))


def probe_text(tokenizer: Tokenizer, documents: Sequence[bytes], length: int) -> Ids:
    """Return about `length` tokens: the beginnings of a long document and of at least five short ones, each after BOS.

    The short ones have different lengths if the documents allow it. One more document comes first and one last, each a
    copy of a different short passage of the long one: they show what is learnt from a document that is scored later,
    whether long or short documents are scored first.
    """
    first, other = int(_LONG * length), int((1 - _LONG) * length) // (DOCUMENTS - 1)
    parts, tokens = list[Ids](), 0
    for index, document in enumerate(documents):
        if tokens >= length and len(parts) >= DOCUMENTS:
            break
        most = first if index == 0 else max(_LEAST_TOKENS, other - 2 * index)
        ids = tokenizer.encode(document[: most * _TOKEN_BYTES])[: most - 1]
        if len(ids) + 1 < _LEAST_TOKENS and len(parts) >= DOCUMENTS:  # the rest of a document, and there are enough
            continue
        parts.append(np.append(np.uint16(tokenizer.bos), ids))
        tokens += len(parts[-1])
    if min(map(len, parts), default=0) < _LEAST_TOKENS:
        raise UserError("the held-out text is too short to be probed with; leave out --data or name another text")
    long, size = parts[0], max(_COPIED_TOKENS, min(map(len, parts)))
    before, behind = (np.append(long[:1], long[begin : begin + size]) for begin in (1, 1 + len(long) // 2))
    return np.concatenate([before, *parts, behind])


def with_other_tokens(tokens: Ids, places: Positions, bos: int, vocabulary: int, generator: np.random.Generator) -> Ids:
    """Return the text with a random other token at each place. No place may hold BOS, and none gets it."""
    drawn = generator.integers(0, vocabulary - 2, len(places))
    taken = np.sort(np.stack([tokens[places], np.full(len(places), bos)]).astype(np.int64), axis=0)
    for ids in taken:  # the lower first, so that all other ids are equally likely
        drawn += drawn >= ids
    changed = tokens.copy()
    changed[places] = drawn
    return changed


def fit_to_text(scoring: Scoring, predictions: int) -> Scoring:
    """Return the scoring with smaller chunks and groups of documents, so that it adapts in so short a text."""
    chunk = max(scoring.sequence_length, predictions // 4)
    most = {"ttt.chunk_tokens": chunk, "ttt.documents": 2, "ttt.phases.chunk_tokens": chunk, "ttt.phases.documents": 4}
    stated = scoring.to_json()
    return scoring.but({path: limit for path, limit in most.items() if (pick(stated, *path.split(".")) or 0) > limit})


def excerpts(documents: Sequence[bytes], scoring: Scoring, seed: int) -> list[bytes]:
    """Return random pieces of the documents, a long one first, for the longest probe text of `scoring`."""
    generator, size = np.random.default_rng(seed), longest_text(scoring) * _TOKEN_BYTES
    several, everything = len(documents) > 1, sum(map(len, documents))
    small = max(1, min(int((1 - _LONG) * size) // (DOCUMENTS - 1), everything // _PIECES))
    tried = generator.choice(len(documents), 2 * DOCUMENTS)
    first = max(tried.tolist(), key=lambda index: len(documents[index]))
    long = min(int(_LONG * size), len(documents[first]) if several else everything // 2)
    begin = int(generator.integers(len(documents[first]) - long + 1))
    blocks = [
        (index, start)
        for index, document in enumerate(documents)
        for start in range(0, len(document), small)
        if index != first or not begin - small < start < begin + long
    ]
    chosen = [blocks[index] for index in generator.permutation(len(blocks))[:_PIECES]]
    pieces = [documents[index][start : start + small] for index, start in chosen]
    pieces.sort(key=lambda piece: len(piece) < small // 4)  # those too short for a document come last
    return [piece.decode(errors="ignore").encode() for piece in [documents[first][begin : begin + long], *pieces]]


def in_order_from(documents: Sequence[bytes], seed: int) -> list[bytes]:
    """Return the documents in their order from a random one on, enough for a whole text."""
    first, bytes_left, found = int(np.random.default_rng(seed).integers(len(documents))), WHOLE_BYTES, []
    for document in [*documents[first:], *documents[:first]]:
        if bytes_left <= 0:
            break
        found.append(document[:bytes_left].decode(errors="ignore").encode())
        bytes_left -= len(document)
    return found


def long_enough(tokenizer: Tokenizer, pieces: Sequence[bytes]) -> bool:
    """True if a probe text can be made of these pieces, at least a short one."""
    try:
        probe_text(tokenizer, pieces, SHORT)
    except UserError:
        return False
    return True


def library() -> list[bytes]:
    """Return some sources of Python's library, the default probe text."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [path.read_bytes() for path in map(root.joinpath, _TEXTS) if path.is_file()]
    if not found:
        raise UserError(f"{root}: this Python has no library sources; name a text with --data")
    return found


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
    """Return `length` random tokens in documents of about the given lengths, shorter ones if there were too few ends.

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
    lasts = np.maximum((1 - chance) ** np.arange(age.max() + 1), 1e-300)  # probability of no end yet, for each mean
    end = ((chance * lasts).mean(0) / lasts.mean(0))[age]
    bos_or_not = np.where(is_end, -np.log(end), -np.log1p(-end))
    return Noise(tokens, bos_or_not + np.where(is_end, 0.0, np.log(vocabulary - 1)), bos_or_not)
