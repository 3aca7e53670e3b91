"""Scorers as the probes see them: black boxes that score a text, made anew for every trial.

A `caddie.score.Scorer` runs in its loop and is recorded from outside; known-bad examples get the whole text at once.
"""

import copy
import hashlib
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from caddie.data.tokenizers import Ids
from caddie.model import Cache, Model
from caddie.pack.artifact import Artifact
from caddie.score import Layout, ScoredPrefix, Scorer, Scoring, ScoringBatch, Step, Window, run_text
from caddie.verify.remote_scorer import RemoteTokens, open_scorer

Floats = npt.NDArray[np.float64]
Positions = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
_LEAST_LOG = -1e4
"""Lowest logarithm of a probability in a fingerprint, which has to be finite."""
_PART = 128
"""Predictions whose distributions are in memory at once."""


@dataclass(frozen=True, kw_only=True)
class ScoredText:
    """Losses of a text of N tokens; prediction p is that of token p + 1."""

    nats: Floats
    """Loss of each prediction, (N - 1,)."""
    step: Positions
    """Step in which each was scored, (N - 1,); within a step, a segment is scored from left to right."""
    segment: Positions
    """Segment that each belongs to, (N - 1,): the number of its document, or 0 if the text is one segment."""
    probabilities: Floats | None
    """Distributions at the requested positions, (k, vocabulary); None where only losses were kept."""
    isolated: bool = False
    """True if the scorer claims that no document influences another."""
    learns: bool = False
    """True if the scorer learns from tokens that it has scored."""
    fingerprint: Floats | None = None
    """One number for each distribution, (N - 1,), which differs if the distributions differ: see `fingerprint`."""
    ends: Floats | None = None
    """Logarithm of the probability of BOS in each prediction, (N - 1,)."""
    windows: tuple[Window, ...] = ()
    """Windows of the text, if it was scored in windows."""
    ends_known: bool = False
    """True if the scorer is told where documents end, even of a text that has only one."""
    scored_alone: bool = False
    """True if the loop sends the scorer tokens that it has scored and no others, whatever the scorer plans."""
    context: Positions | None = None
    """First token that each prediction may depend on, (N - 1,), besides what was learnt in earlier steps. Set if the
    scorer claims that windows or documents are independent; None if all tokens scored before may matter."""


def fingerprint(log_probabilities: Tensor) -> Floats:
    """Return a random projection of distributions (n, vocabulary) as (n,): equal distributions have equal ones."""
    weights = _weights(log_probabilities.shape[1]).to(log_probabilities.device)
    return (log_probabilities.clamp_min(_LEAST_LOG) * weights).sum(1).cpu().numpy()


@cache
def _weights(vocabulary: int) -> Tensor:
    """Return weights that are drawn anew in every process, so that no scorer can balance its changes."""
    return torch.rand(vocabulary, generator=torch.Generator().manual_seed(secrets.randbits(60)), dtype=torch.float64)


def differ(model: Model, a: Floats, b: Floats) -> Mask:
    """Return where two results of a model differ: at all on a CPU, by more than rounding elsewhere."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    return ~np.isclose(a, b, rtol=0.0, atol=0.0 if on_cpu else 1e-3)


class BlackBoxScorer(ABC):
    """Scores text with a copy of an artifact's model."""

    def __init__(self, artifact: Artifact, scoring: Scoring) -> None:
        self.artifact, self.scoring = artifact, scoring
        self.model: Model = copy.deepcopy(artifact.model)
        self.bos = artifact.tokenizer.bos
        self.reads: list[str] | None = None
        """Files, connections and processes that the scorer's own process used; None if it has no process of its own."""

    @abstractmethod
    def score(self, tokens: Ids, positions: Positions) -> ScoredText:
        """Score tokens (N,), the first being context. Return the distributions of predictions `positions`, sorted."""

    def state(self) -> str:
        """Return a hash of all weights and buffers."""
        digest = hashlib.sha256()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


class LoopScorer(BlackBoxScorer):
    """A scorer in the loop: that of `scoring`, or a user's own, FILE.py:NAME."""

    def __init__(self, artifact: Artifact, scoring: Scoring, scorer: str | None = None) -> None:
        super().__init__(artifact, scoring)
        self._scorer = scorer

    def score(self, tokens: Ids, positions: Positions) -> ScoredText:
        """Score in the loop. Steps and distributions are recorded from outside, not reported by the scorer."""
        if self._scorer is None:
            return self._recorded(self.scoring.scorer(self.model, self.bos), tokens, positions)
        with closing(open_scorer(self.artifact, self._scorer)) as remote:
            try:
                return self._recorded(remote, tokens, positions)
            finally:
                self.reads = remote.reads()

    def _recorded(self, scorer: Scorer, tokens: Ids, positions: Positions) -> ScoredText:
        counting, predictions, gpt = CountingScorer(scorer), len(tokens) - 1, self.model.config
        (nats, prints, ends), windows = np.zeros((3, predictions)), list[Window]()
        starts = np.zeros(predictions, np.int64)
        probabilities = np.zeros((len(positions), gpt.vocabulary))

        def record(window: Window, losses: Floats) -> None:
            nats[window.first : window.end] = losses
            starts[window.first : window.end] = window.start
            windows.append(window)

        def keep(batch: Sequence[Window], logits: Tensor) -> None:
            for first, part in in_parts(batch, logits):
                log_probs, end = torch.log_softmax(part.double(), -1), first + len(part)
                prints[first:end] = fingerprint(log_probs)
                ends[first:end] = log_probs[:, self.bos].cpu().numpy()
                begin, stop = np.searchsorted(positions, (first, end))
                wanted = torch.from_numpy(positions[begin:stop] - first).to(part.device)
                probabilities[begin:stop] = log_probs[wanted].exp().cpu().numpy()

        run_text(counting, self.model, tokens, self.bos, self.scoring, record, on_logits=keep)
        scopes = {getattr(gpt.blocks[layer].attention, "scope", None) for layer in range(gpt.depth)}
        scored, learns, context = counting.scored(nats), type(scorer).update is not Scorer.update, None
        if scorer.stateless or scorer.fixed_between_updates:
            context = starts
        elif scorer.per_document and not learns:
            context = counting.layout.begins[scored.segment]
        return replace(
            scored,
            probabilities=probabilities,
            isolated=bool(scorer.per_document) or (self._scorer is None and scopes == {"document"}),
            learns=learns,
            fingerprint=prints,
            ends=ends,
            windows=tuple(windows),
            scored_alone=isinstance(scorer, RemoteTokens),
            context=context,
        )


def in_parts(batch: Sequence[Window], logits: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield a few predictions at a time: number of the first, and their logits. So few distributions are in memory."""
    for window, row in zip(batch, logits, strict=True):
        yield from zip(range(window.first, window.end, _PART), row.split(_PART), strict=True)


class StepsDone(Exception):
    """The last step that was wanted has been scored."""


class CountingScorer(Scorer):
    """Wrapper that runs a scorer unchanged in the loop and records the layout and the step of each prediction.

    Raises `StepsDone` when `last_step` has been scored.
    """

    def __init__(self, scorer: Scorer, last_step: int | None = None) -> None:
        self.scorer, self.last_step = scorer, last_step
        for claim in ("per_document", "in_order", "stateless", "fixed_between_updates", "together"):
            setattr(self, claim, getattr(scorer, claim))

    def scored(self, nats: Floats) -> ScoredText:
        """Return the losses of the text that it has scored, with the segment and step of each."""
        segment = np.searchsorted(self.layout.begins, np.arange(len(nats)), side="right") - 1
        ends_known = bool(self.per_document)
        return ScoredText(nats=nats, step=self.step, segment=segment, probabilities=None, ends_known=ends_known)

    def plan(self, layout: Layout, rows: int) -> Iterator[Step]:
        self.layout, self.step = layout, np.zeros(layout.predictions, np.int64)
        for number, step in enumerate(self.scorer.plan(layout, rows)):
            if self.last_step is not None and number > self.last_step:
                raise StepsDone
            for window in step.windows:
                self.step[window.first : window.end] = number
            yield step

    def logits(self, inputs: Tensor, slots: Sequence[int], last: int, cache: Cache | None = None) -> Tensor:
        return self.scorer.logits(inputs, slots, last, cache)

    def update(self, batches: Sequence[ScoringBatch], prefix: ScoredPrefix) -> None:
        self.scorer.update(batches, prefix)
