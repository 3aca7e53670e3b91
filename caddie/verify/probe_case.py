"""A trial: a subject, the text that it is tried on, and what all probes look at together."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from caddie.data.tokenizers import Ids, Tokenizer
from caddie.errors import UserError
from caddie.pack.artifact import Artifact
from caddie.score import Scoring
from caddie.verify.audit_hook import watch_reads
from caddie.verify.black_box import BlackBoxScorer, Floats, Places, Priced, Scored

DOCUMENTS = 6
"""Documents of a probe text."""
SHORT = 64
"""Tokens of a document where the text is short."""
_TEXTS = ("argparse.py", "textwrap.py", "calendar.py", "shlex.py", "heapq.py", "csv.py")
_LEAST_TOKENS = 8  # of a document
_TOKEN_BYTES = 8  # more than a token stands for, in the mean
_ODDS = 1 << 22  # numbers in the distributions that are looked at together
_ENDS = 1 / 16  # chance of each token of a random text to be the last of its document


@dataclass(frozen=True, kw_only=True)
class ProbeCase:
    """A subject with a probe text; what is priced is priced once for all probes that want it."""

    artifact: Artifact
    scoring: Scoring
    """As it is tried: see `fitted`."""
    open: Callable[[], BlackBoxScorer]
    """A subject that has seen nothing."""
    count: Callable[[Ids], npt.NDArray[np.int64]]
    """The bytes that each token of a document is said to account for."""
    documents: tuple[bytes, ...]
    tokens: Ids
    """The beginnings of the documents, (N,), each begun by BOS."""
    seed: int
    """Of all chance; unknown to whoever made the subject."""
    held_out: frozenset[bytes] = frozenset()
    """Hashes of the documents that are scored."""
    trained_on: frozenset[bytes] | None = None
    """Hashes of those that were trained on, where they are known."""
    may_read: tuple[Path, ...] = ()
    """Files that the subject is made of."""
    touched: list[str] = field(default_factory=list, init=False)
    """What else a subject reached for while it was opened and priced its first text."""

    @property
    def bos(self) -> int:
        """Id that begins every document."""
        return self.artifact.tokenizer.bos

    @property
    def vocabulary(self) -> int:
        """Number of ids."""
        return self.artifact.tokenizer.vocabulary

    def chance(self, purpose: int) -> np.random.Generator:
        """A generator of its own for each purpose."""
        return np.random.default_rng([self.seed, purpose])

    def moved(self, a: Floats, b: Floats) -> npt.NDArray[np.bool_]:
        """Where two charges differ: at all on a CPU, by more than rounding elsewhere."""
        on_cpu = next(self.artifact.model.parameters()).device.type == "cpu"
        return ~np.isclose(a, b, rtol=0.0, atol=0.0 if on_cpu else 1e-3)

    @cached_property
    def _flipped(self) -> list[Places]:
        """Which tokens are changed in turn: two single ones, one half, one document."""
        places = np.flatnonzero(self.tokens != self.bos)
        last = int(np.flatnonzero(self.tokens == self.bos)[-1])
        single = [places[[len(places) // 4]], places[[3 * len(places) // 5]]]
        return [*single, places[places >= len(self.tokens) // 2], places[places > last]]

    @cached_property
    def shown(self) -> Places:
        """Predictions of the probe text whose distributions are looked at, also those of the single tokens and next."""
        predictions, single = len(self.tokens) - 1, np.concatenate(self._flipped[:2])
        next_ones = single[single < predictions]
        return np.unique(np.concatenate((single - 1, next_ones, self._spread(predictions, 48))))

    def _spread(self, predictions: int, most: int) -> Places:
        return np.unique(np.linspace(0, predictions - 1, max(8, min(most, _ODDS // self.vocabulary)), dtype=np.int64))

    @cached_property
    def base(self) -> Priced:
        """The probe text as it is."""
        with watch_reads(self.may_read) as touched:
            try:
                return self.open().price(self.tokens, self.shown)
            finally:
                self.touched.extend(touched)

    @cached_property
    def flips(self) -> list[tuple[Places, Priced]]:
        """Tokens that were changed, and the text with the change: two single tokens, one half, one document."""
        return [(flipped, self.flip(flipped)) for flipped in self._flipped]

    def flip(self, places: Places) -> Priced:
        """The text with other tokens at these places."""
        changed = altered(self.tokens, places, self.bos, self.vocabulary, self.chance(1))
        return self.open().price(changed, self.shown)

    @cached_property
    def noise(self) -> tuple[Ids, Places, Priced]:
        """A text of pure chance, the predictions whose distributions are looked at, and what was charged.

        Every token is BOS with probability `_ENDS`, and else any other id alike.
        """
        chance, length = self.chance(2), len(self.tokens)
        others = np.delete(np.arange(self.vocabulary), self.bos)
        tokens = np.where(chance.random(length) < _ENDS, self.bos, chance.choice(others, length)).astype(np.uint16)
        tokens[0] = self.bos
        shown = self._spread(length - 1, length)
        return tokens, shown, self.open().price(tokens, shown)

    def noise_nats(self, tokens: Ids) -> tuple[Floats, Floats]:
        """What whoever knows how `noise` is made pays for each token, and the part of it for whether that is BOS."""
        whether = np.where(tokens == self.bos, -np.log(_ENDS), -np.log1p(-_ENDS))
        return whether + np.where(tokens == self.bos, 0.0, np.log(self.vocabulary - 1)), whether


def probe_case_of(
    artifact: Artifact,
    scoring: Scoring,
    documents: Sequence[bytes],
    *,
    seed: int,
    scorer: str | None = None,
    short: bool = False,
) -> ProbeCase:
    """A scorer put on trial: that of `scoring`, or a user's own by the name that `--scorer` takes.

    The text holds several windows, unless it is to be short; for a user's scorer, which may be asked for one token at a
    time, it always is.
    """
    length = SHORT if short or scorer else _document_tokens(scoring)
    tokens = probe_text(artifact.tokenizer, documents, length)
    fitting = fitted(scoring, len(tokens) - 1)
    own = Path(scorer.rpartition(":")[0] or scorer) if scorer else None
    files = [own, Path(cache_from_source(str(own)))] if own else []  # Python looks for what it compiled before
    return ProbeCase(
        artifact=artifact,
        scoring=fitting,
        open=lambda: Scored(artifact, fitting, scorer),
        count=artifact.tokenizer.byte_lengths,
        documents=tuple(documents),
        tokens=tokens,
        seed=seed,
        may_read=(artifact.path, *files),
    )


def _document_tokens(scoring: Scoring) -> int:
    """Tokens of a document, so that the text holds several windows, also where these overlap much."""
    more = 768 if scoring.ttt else min(max(256, 4 * scoring.stride), 768)
    return (scoring.sequence_length + more) // DOCUMENTS


def probe_text(tokenizer: Tokenizer, documents: Sequence[bytes], length: int) -> Ids:
    """At most `length` tokens of each document, BOS before each; no two documents are equally long if they can."""
    ids = tokenizer.encode_many([document[: length * _TOKEN_BYTES] for document in documents])
    cut = [own[: length - 3 * index] for index, own in enumerate(ids)]
    if min(map(len, cut), default=0) < _LEAST_TOKENS:
        raise UserError("the held-out text is too short to be probed with; leave out --data or name another text")
    return np.concatenate([np.append(np.uint16(tokenizer.bos), own) for own in cut])


def altered(tokens: Ids, places: Places, bos: int, vocabulary: int, chance: np.random.Generator) -> Ids:
    """The text with any other token at each of the places; no place may hold BOS, and none gets it."""
    drawn = chance.integers(0, vocabulary - 2, len(places))
    taken = np.sort(np.stack([tokens[places], np.full(len(places), bos)]).astype(np.int64), axis=0)
    for ids in taken:  # the lower first, so that every other id is as likely
        drawn += drawn >= ids
    changed = tokens.copy()
    changed[places] = drawn
    return changed


def fitted(scoring: Scoring, predictions: int) -> Scoring:
    """The scoring with an adaptation that acts in so short a text: its chunks and its groups of documents cut down."""
    chunk = max(scoring.sequence_length, predictions // 4)
    most = {"chunk_tokens": chunk, "documents": 2, "phases.chunk_tokens": chunk, "phases.documents": 4}
    diff: dict[str, object] = {}

    def visit(node: Mapping[str, Any], path: str) -> None:
        for name, value in node.items():
            if isinstance(value, Mapping):
                visit(value, f"{path}{name}.")
            elif path + name in most and value > most[path + name]:
                diff[f"ttt.{path}{name}"] = most[path + name]

    if scoring.ttt is not None:
        visit(scoring.ttt.to_json(), "")
    return scoring.but(diff)


def excerpts(documents: Sequence[bytes], scoring: Scoring) -> list[bytes]:
    """`DOCUMENTS` pieces of the longest documents, as long as the probe text of `scoring` needs them."""
    size = max(SHORT, _document_tokens(scoring)) * _TOKEN_BYTES
    longest = sorted(documents, key=len)[::-1]
    starts = range(0, DOCUMENTS * size, size)
    pieces = [document[start : start + size] for start in starts for document in longest[:DOCUMENTS]]
    # Beginnings come first; what is too short for a document of the text comes last.
    best = sorted(pieces, key=lambda piece: len(piece) < size // 4)[:DOCUMENTS]
    return [piece.decode(errors="ignore").encode() for piece in best]


def library() -> list[bytes]:
    """Some sources of Python's library, the probe text where no other is named."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [path.read_bytes() for path in map(root.joinpath, _TEXTS) if path.is_file()]
    if not found:
        raise UserError(f"{root}: this Python has no library sources; name a text with --data")
    return found
