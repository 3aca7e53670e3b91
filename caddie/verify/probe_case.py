"""A probe case: a scorer, the text that it is tried on, and the results that several probes share."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from caddie.data.tokenizers import Ids, Tokenizer
from caddie.errors import UserError
from caddie.pack.artifact import Artifact
from caddie.score import Scoring
from caddie.verify.audit_hook import watch_reads
from caddie.verify.black_box import BlackBoxScorer, Floats, LoopScorer, Positions, ScoredText

DOCUMENTS = 6
"""Documents of a probe text."""
SHORT = 64
"""Tokens of a document in a short probe text."""
_TEXTS = ("argparse.py", "textwrap.py", "calendar.py", "shlex.py", "heapq.py", "csv.py")
_LEAST_TOKENS = 8
"""Fewest tokens of a document."""
_TOKEN_BYTES = 8
"""More bytes than a token stands for in the mean."""
_MOST_PROBABILITIES = 1 << 22
"""Most numbers in the distributions of one text."""
_END = 1 / 16
"""Probability of each random token to be BOS."""


@dataclass(frozen=True, kw_only=True)
class ProbeCase:
    """A scorer with a probe text. Each variant of the text is scored once for all probes."""

    artifact: Artifact
    scoring: Scoring
    """The scoring, fitted to so short a text: see `fit_to_text`."""
    open: Callable[[], BlackBoxScorer]
    """Make a new scorer, which has seen nothing."""
    count: Callable[[Ids], npt.NDArray[np.int64]]
    """Bytes that each token of a document counts for."""
    documents: tuple[bytes, ...]
    tokens: Ids
    """The beginnings of the documents, (N,), each begun by BOS."""
    seed: int
    """Random seed, unknown to the author of the scorer."""
    held_out: frozenset[bytes] = frozenset()
    """Hashes of the documents that are scored."""
    trained_on: frozenset[bytes] | None = None
    """Hashes of the training documents, if known."""
    may_read: tuple[Path, ...] = ()
    """Files that the scorer consists of."""
    touched: list[str] = field(default_factory=list, init=False)
    """Files, connections and processes that the scorer used beyond `may_read` while it scored its first text."""

    @property
    def bos(self) -> int:
        """Id that begins every document."""
        return self.artifact.tokenizer.bos

    @property
    def vocabulary(self) -> int:
        """Number of ids."""
        return self.artifact.tokenizer.vocabulary

    def differ(self, a: Floats, b: Floats) -> npt.NDArray[np.bool_]:
        """Return where two results differ: at all on a CPU, by more than rounding elsewhere."""
        on_cpu = next(self.artifact.model.parameters()).device.type == "cpu"
        return ~np.isclose(a, b, rtol=0.0, atol=0.0 if on_cpu else 1e-3)

    @cached_property
    def _flipped(self) -> list[Positions]:
        """Positions of the tokens to change in turn: two single ones, one half, one document."""
        places = np.flatnonzero(self.tokens != self.bos)
        last = int(np.flatnonzero(self.tokens == self.bos)[-1])
        single = [places[[len(places) // 4]], places[[3 * len(places) // 5]]]
        return [*single, places[places >= len(self.tokens) // 2], places[places > last]]

    @cached_property
    def positions(self) -> Positions:
        """Predictions of the probe text whose distributions are compared, with those at the single tokens."""
        predictions, single = len(self.tokens) - 1, np.concatenate(self._flipped[:2])
        next_ones = single[single < predictions]
        return np.unique(np.concatenate((single - 1, next_ones, self._spread(predictions, 48))))

    def _spread(self, predictions: int, most: int) -> Positions:
        count = max(8, min(most, _MOST_PROBABILITIES // self.vocabulary))
        return np.unique(np.linspace(0, predictions - 1, count, dtype=np.int64))

    @cached_property
    def base(self) -> ScoredText:
        """The probe text, scored as it is."""
        with watch_reads(self.may_read) as touched:
            try:
                return self.open().score(self.tokens, self.positions)
            finally:
                self.touched.extend(touched)

    @cached_property
    def flips(self) -> list[tuple[Positions, ScoredText]]:
        """Positions of changed tokens, and the changed text scored: two single tokens, one half, one document."""
        return [(flipped, self.flip(flipped)) for flipped in self._flipped]

    def flip(self, places: Positions) -> ScoredText:
        """Score the text with other tokens at these positions."""
        generator = np.random.default_rng([self.seed, 1])
        changed = with_other_tokens(self.tokens, places, self.bos, self.vocabulary, generator)
        return self.open().score(changed, self.positions)

    @cached_property
    def noise(self) -> tuple[Ids, Positions, ScoredText]:
        """A random text, the predictions whose distributions are compared, and its scores.

        Every token is BOS with probability `_END`, otherwise uniform over the other ids.
        """
        generator, length = np.random.default_rng([self.seed, 2]), len(self.tokens)
        others = np.delete(np.arange(self.vocabulary), self.bos)
        tokens = np.where(generator.random(length) < _END, self.bos, generator.choice(others, length)).astype(np.uint16)
        tokens[0] = self.bos
        positions = self._spread(length - 1, length)
        return tokens, positions, self.open().score(tokens, positions)

    def noise_nats(self, tokens: Ids) -> tuple[Floats, Floats]:
        """Return the lowest expected loss on `noise` for each token, and its part for predicting BOS or not."""
        bos_or_not = np.where(tokens == self.bos, -np.log(_END), -np.log1p(-_END))
        return bos_or_not + np.where(tokens == self.bos, 0.0, np.log(self.vocabulary - 1)), bos_or_not


def probe_case_of(
    artifact: Artifact,
    scoring: Scoring,
    documents: Sequence[bytes],
    *,
    seed: int,
    scorer: str | None = None,
    short: bool = False,
) -> ProbeCase:
    """Make a case for the scorer of `scoring`, or for a user's own, FILE.py:NAME.

    The text holds several windows unless it is `short`; for a user's scorer, which may score single tokens, it always
    is.
    """
    length = SHORT if short or scorer else _document_tokens(scoring)
    tokens = probe_text(artifact.tokenizer, documents, length)
    fitting = fit_to_text(scoring, len(tokens) - 1)
    own = Path(scorer.rpartition(":")[0] or scorer) if scorer else None
    files = [own, Path(cache_from_source(str(own)))] if own else []  # Python looks for its bytecode
    return ProbeCase(
        artifact=artifact,
        scoring=fitting,
        open=lambda: LoopScorer(artifact, fitting, scorer),
        count=artifact.tokenizer.byte_lengths,
        documents=tuple(documents),
        tokens=tokens,
        seed=seed,
        may_read=(artifact.path, *files),
    )


def _document_tokens(scoring: Scoring) -> int:
    """Return the tokens of a document, so that the text holds several windows, even if these overlap much."""
    more = 768 if scoring.ttt else min(max(256, 4 * scoring.stride), 768)
    return (scoring.sequence_length + more) // DOCUMENTS


def probe_text(tokenizer: Tokenizer, documents: Sequence[bytes], length: int) -> Ids:
    """Return at most `length` tokens of each document, each after BOS; lengths differ if the documents allow it."""
    ids = tokenizer.encode_many([document[: length * _TOKEN_BYTES] for document in documents])
    cut = [own[: length - 3 * index] for index, own in enumerate(ids)]
    if min(map(len, cut), default=0) < _LEAST_TOKENS:
        raise UserError("the held-out text is too short to be probed with; leave out --data or name another text")
    return np.concatenate([np.append(np.uint16(tokenizer.bos), own) for own in cut])


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
    most = {"chunk_tokens": chunk, "documents": 2, "phases.chunk_tokens": chunk, "phases.documents": 4}
    diff: dict[str, object] = {}
    for path, limit in most.items():
        value = reduce(lambda node, name: getattr(node, name, None), path.split("."), cast(Any, scoring.ttt))
        if value is not None and value > limit:
            diff[f"ttt.{path}"] = limit
    return scoring.but(diff)


def excerpts(documents: Sequence[bytes], scoring: Scoring) -> list[bytes]:
    """Return `DOCUMENTS` pieces of the longest documents, as long as the probe text of `scoring` needs them."""
    size = max(SHORT, _document_tokens(scoring)) * _TOKEN_BYTES
    longest = sorted(documents, key=len)[::-1]
    starts = range(0, DOCUMENTS * size, size)
    pieces = [document[start : start + size] for start in starts for document in longest[:DOCUMENTS]]
    # Beginnings come first, pieces too short for a document of the text last.
    best = sorted(pieces, key=lambda piece: len(piece) < size // 4)[:DOCUMENTS]
    return [piece.decode(errors="ignore").encode() for piece in best]


def library() -> list[bytes]:
    """Return some sources of Python's library, the default probe text."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [path.read_bytes() for path in map(root.joinpath, _TEXTS) if path.is_file()]
    if not found:
        raise UserError(f"{root}: this Python has no library sources; name a text with --data")
    return found
