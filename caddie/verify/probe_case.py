"""A probe case: a scorer, the text that it is tried on, and the results that several probes share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count

import numpy as np
import numpy.typing as npt

from caddie.data.tokenizers import Ids
from caddie.pack.artifact import Artifact
from caddie.score import Scorer, Scoring
from caddie.verify import probe_text
from caddie.verify.audit_hook import watch_reads
from caddie.verify.black_box import BlackBoxScorer, Floats, LoopScorer, Mask, Positions, ScoredText, differ
from caddie.verify.changes import Change, draw_change, found_with
from caddie.verify.own_model import DrawnText, Reference, draw_text, own_windows, reference
from caddie.verify.remote_scorer import open_scorer
from caddie.verify.whole_text import WholeText

_SCORING_SECONDS = 0.4
"""Seconds that one scoring of a probe text may take, unless the shortest allowed text takes longer."""
LONG_TOKENS = 32_768
"""Most tokens of a long text."""
_LONG_SECONDS, _USER_SECONDS = 0.8, 6.0
"""Seconds that one scoring of a long text may take, by caddie's own scorer and by a user's."""
_WHOLE_SECONDS = 10.0
"""Seconds that one scoring of a whole text may take, unless `LEAST_WHOLE` tokens take longer."""
LEAST_WHOLE = 65_536
"""Fewest tokens of a whole text for a user's scorer or an example, however slow, unless there is less text."""
_MOST_PROBABILITIES = 1 << 22
"""Most numbers in the distributions of one text."""
_MOST_DRAWN = 32
"""Most texts that are drawn from the model."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Goals of the search for leaks. It ends when `places` and `found` are both reached, or after `seconds`."""

    places: int = 100
    """Fewest places of changes."""
    found: float = 0.99
    """Probability with which a leak of `changes.GAIN` must be found."""
    seconds: float = 20.0


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
    """The beginnings of the documents and two copied passages, (N,), each begun by BOS: see `probe_text`."""
    seed: int
    """Random seed, unknown to the author of the scorer."""
    held_out: frozenset[bytes] = frozenset()
    """Hashes of the documents that are scored."""
    trained_on: frozenset[bytes] | None = None
    """Hashes of the training documents, if known."""
    document_tokens: tuple[int, ...] = ()
    """Approximate lengths of the held-out documents, in tokens; if empty, those of the probe text are used."""
    users: bool = False
    """True if the scorer is a user's: its searches must be likely enough to find a leak (see `changes.DECIDES`)."""
    effort: Effort = Effort()
    long_text: Ids | None = None
    """Held-out text in its own order, for leaks that wait or are rare; None if scoring takes long or there is none."""
    whole: WholeText | None = None
    """Held-out text, scored with the settings of the real score, if the scorer could wait for a late token of it."""
    _changed: dict[int, tuple[Change, ScoredText]] = field(default_factory=dict, init=False)
    touched: list[str] = field(default_factory=list, init=False)
    """Files, connections and processes that the scorer used beyond the artifact while it scored its first text."""

    @cached_property
    def long(self) -> ProbeCase | None:
        """The same scorer on the long text; None if there is none, or if the scorer is shown scored tokens alone."""
        if self.long_text is None or self.base.scored_alone:
            return None
        return replace(self, tokens=self.long_text, long_text=None)

    @property
    def bos(self) -> int:
        """Id that begins every document."""
        return self.artifact.tokenizer.bos

    @property
    def vocabulary(self) -> int:
        """Number of ids."""
        return self.artifact.tokenizer.vocabulary

    def differ(self, a: Floats, b: Floats) -> Mask:
        """Return where two results differ: see `black_box.differ`."""
        return differ(self.artifact.model, a, b)

    @cached_property
    def positions(self) -> Positions:
        """Predictions of the probe text whose distributions are looked at."""
        return self._spread(len(self.tokens) - 1, 48)

    def _spread(self, predictions: int, most: int) -> Positions:
        count = max(8, min(most, _MOST_PROBABILITIES // self.vocabulary))
        return np.unique(np.linspace(0, predictions - 1, count, dtype=np.int64))

    @cached_property
    def base(self) -> ScoredText:
        """The probe text, scored as it is."""
        with watch_reads([self.artifact.path]) as touched:
            scorer = self.open()
            try:
                return scorer.score(self.tokens, self.positions)
            finally:
                # If the scorer has its own process, this one runs none of its code, and reads /proc for its memory.
                self.touched.extend(touched if scorer.reads is None else scorer.reads)

    @cached_property
    def reference(self) -> Reference:
        """Predictions of the artifact's own model on the scorer's windows."""
        own = own_windows(self.base, self.scoring)
        return reference(self.artifact, self.scoring, self.tokens, own, self.seed)

    def changed(self, index: int) -> tuple[Change, ScoredText]:
        """Return a change of the text, drawn by the seed, and its scores; odd ones replace all that is scored later."""
        if index not in self._changed:
            generator = np.random.default_rng([self.seed, 1, index])
            everywhere = np.flatnonzero(self.tokens != self.bos)
            other = probe_text.with_other_tokens(self.tokens, everywhere, self.bos, self.vocabulary, generator)
            ends = np.flatnonzero(self.tokens[1:] == self.bos)
            other[ends + 1] = self.reference.drawn[ends]
            later = index % 2 == 1
            change = draw_change(self.tokens, self.base, self.reference, other, self.bos, generator, all_later=later)
            self._changed[index] = change, self.open().score(change.tokens, np.zeros(0, np.int64))
        return self._changed[index]

    def changes(self) -> Iterator[tuple[Change, ScoredText]]:
        """Yield changes until the effort is done."""
        begin, places = time.perf_counter(), 0
        for index in count():
            change, scored = self.changed(index)
            yield change, scored
            places += len(change.places)
            done = places >= self.effort.places and self.found_with(places) >= self.effort.found
            if done or self.base.scored_alone or time.perf_counter() - begin > self.effort.seconds:
                return

    def found_with(self, places: int) -> float:
        """Return the probability that this many places find a leak of `changes.GAIN` in this text."""
        text_bytes = int(self.artifact.tokenizer.byte_lengths(self.tokens).sum())
        return found_with(self.base, self.reference, text_bytes, places)

    def drawn(self) -> Iterator[tuple[DrawnText, ScoredText]]:
        """Yield texts drawn from the artifact's own model in windows of the scorer, and their scores, in the time."""
        begin, own = time.perf_counter(), own_windows(self.base, self.scoring)
        for index in range(_MOST_DRAWN):
            seed = int(np.random.default_rng([self.seed, 4, index]).integers(1 << 62))
            text = draw_text(self.artifact, self.scoring, self.tokens, own, seed)
            yield text, self.open().score(text.tokens, self.positions)
            if time.perf_counter() - begin > self.effort.seconds:
                return

    def flip(self, places: Positions) -> ScoredText:
        """Score the text with other tokens at these positions."""
        generator = np.random.default_rng([self.seed, 3])
        changed = probe_text.with_other_tokens(self.tokens, places, self.bos, self.vocabulary, generator)
        return self.open().score(changed, self.positions)

    @cached_property
    def noise_text(self) -> probe_text.Noise:
        """Random tokens; more than in the probe text if the scorer knows where documents end and documents are long."""
        begins = np.flatnonzero(np.append(self.tokens, self.bos) == self.bos)
        documents, length = self.document_tokens or tuple(np.diff(begins).tolist()), len(self.tokens)
        if self.long_text is not None and self.base.ends_known:
            length = max(length, min(len(self.long_text), int(probe_text.ENDS * np.mean(documents))))
        generator = np.random.default_rng([self.seed, 2])
        return probe_text.draw_noise(documents, length, self.vocabulary, self.bos, generator)

    @cached_property
    def noise(self) -> tuple[Ids, Positions, ScoredText]:
        """Random tokens, the predictions whose distributions are compared, and their scores."""
        tokens = self.noise_text.tokens
        positions = self._spread(len(tokens) - 1, len(tokens))
        return tokens, positions, self.open().score(tokens, positions)


def probe_case_of(
    artifact: Artifact,
    scoring: Scoring,
    documents: Sequence[bytes],
    *,
    seed: int,
    scorer: str | None = None,
    length: int = probe_text.SHORT,
) -> ProbeCase:
    """Make a case for the scorer of `scoring`, or for a user's own, FILE.py:NAME, with a text of `length` tokens."""
    tokens = probe_text.probe_text(artifact.tokenizer, documents, length)
    fitting = probe_text.fit_to_text(scoring, len(tokens) - 1)
    return ProbeCase(
        artifact=artifact,
        scoring=fitting,
        open=lambda: LoopScorer(artifact, fitting, scorer),
        count=artifact.tokenizer.byte_lengths,
        documents=tuple(documents[: int((tokens == artifact.tokenizer.bos).sum()) - 2]),
        tokens=tokens,
        seed=seed,
        users=scorer is not None,
    )


def sized_case(
    artifact: Artifact,
    scoring: Scoring,
    documents: Sequence[bytes],
    *,
    seed: int,
    scorer: str | None = None,
    in_order: Sequence[bytes] = (),
) -> ProbeCase:
    """Make a case whose text holds at least three windows of its scorer, and more if scoring it takes little time.

    Its long text holds the documents `in_order`, if more of their tokens can be scored in time than a probe text may
    have.
    """
    length = probe_text.SHORT if scorer else scoring.sequence_length + max(256, 2 * scoring.stride)
    longest = probe_text.longest_text(scoring)
    while True:
        case = probe_case_of(artifact, scoring, documents, seed=seed, scorer=scorer, length=length)
        begin = time.perf_counter()
        try:
            scored = case.open().score(case.tokens, case.positions)
        except Exception:
            return case  # the probes will tell why
        per_second = len(case.tokens) / (time.perf_counter() - begin)
        needed = probe_text.WINDOWS * max(window.end - window.start for window in scored.windows)
        if not scorer or needed < len(case.tokens) or length == longest:
            break
        length = min(longest, 2 * needed)
    length = max(length, min(probe_text.MOST_TOKENS, int(_SCORING_SECONDS * per_second)))
    case = probe_case_of(artifact, scoring, documents, seed=seed, scorer=scorer, length=length)
    long = min(LONG_TOKENS, int((_USER_SECONDS if scorer else _LONG_SECONDS) * per_second))
    tokens_per_byte = len(case.tokens) / max(1, int(case.count(case.tokens).sum()))
    lengths = tuple(1 + round(tokens_per_byte * len(document)) for document in in_order)
    text = probe_text.text_in_order(artifact.tokenizer, in_order, long)
    is_long = len(text) > max(probe_text.MOST_TOKENS, len(case.tokens))
    case = replace(case, document_tokens=lengths, long_text=text if is_long else None)
    if not scorer and scored.context is not None and not scored.learns:
        return case  # caddie's own code that remembers nothing

    def open() -> AbstractContextManager[Scorer]:
        if scorer:
            return closing(open_scorer(artifact, scorer, own_sandbox=True))
        return nullcontext(scoring.scorer(artifact.model, artifact.tokenizer.bos))

    return with_whole_text(case, scoring, in_order, per_second, open, LEAST_WHOLE if scorer else 0)


def with_whole_text(
    case: ProbeCase,
    scoring: Scoring,
    documents: Sequence[bytes],
    per_second: float,
    open: Callable[[], AbstractContextManager[Scorer]],
    least: int,
) -> ProbeCase:
    """Return the case with a whole text: as many tokens of the documents as can be scored in time, or `least`."""
    tokenizer = case.artifact.tokenizer
    tokens = probe_text.text_in_order(tokenizer, documents, max(least, int(_WHOLE_SECONDS * per_second)))
    if len(tokens) <= scoring.sequence_length:
        return case
    spelled = int(tokenizer.byte_lengths(tokens).sum())
    model, bos = case.artifact.model, tokenizer.bos
    whole = WholeText(model=model, bos=bos, scoring=scoring, open=open, tokens=tokens, text_bytes=spelled)
    return replace(case, whole=whole)
