"""Scorers as the probes see them: black boxes that score a text, made anew for every trial.

A `caddie.score.Scorer` runs in its loop and is recorded from outside; known-bad examples get the whole text at once.
"""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from caddie.data.tokenizers import Ids
from caddie.model import Cache, Model
from caddie.pack.artifact import Artifact
from caddie.score import Layout, ScoredPrefix, Scorer, Scoring, ScoringBatch, Step, Window, layout_of, load_scorer, run
from caddie.score.loop import Losses

Floats = npt.NDArray[np.float64]
Positions = npt.NDArray[np.int64]


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
    """Distributions at the requested positions, (k, vocabulary); None if the scorer has none."""
    isolated: bool = False
    """True if the scorer claims that no document influences another."""
    learns: bool = False
    """True if the scorer learns from tokens that it has scored."""


class BlackBoxScorer(ABC):
    """Scores text with a copy of an artifact's model."""

    def __init__(self, artifact: Artifact, scoring: Scoring) -> None:
        self.artifact, self.scoring = artifact, scoring
        self.model: Model = copy.deepcopy(artifact.model)
        self.bos = artifact.tokenizer.bos

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
            scorer = self.scoring.scorer(self.model, self.bos)
        else:
            scorer = load_scorer(self._scorer, self.model, self.artifact.tokenizer)
        recording = _RecordingScorer(scorer, positions)
        layout = layout_of(tokens, self.bos, recording.per_document)
        predictions = len(tokens) - 1
        nats, step = np.zeros(predictions), np.zeros(predictions, np.int64)

        def record(window: Window, losses: Losses) -> None:
            nats[window.first : window.end] = losses
            step[window.first : window.end] = recording.step
            recording.keep(window)

        run(recording, tokens, layout, self.scoring.rows, record, next(self.model.parameters()).device)
        gpt = self.model.config
        scopes = {getattr(gpt.blocks[layer].attention, "scope", None) for layer in range(gpt.depth)}
        return ScoredText(
            nats=nats,
            step=step,
            segment=np.searchsorted(layout.begins, np.arange(predictions), side="right") - 1,
            probabilities=recording.probabilities,
            isolated=scorer.per_document or (self._scorer is None and scopes == {"document"}),
            learns=type(scorer).update is not Scorer.update,
        )


class _RecordingScorer(Scorer):
    """Records the step that a scorer is in, and some of its distributions."""

    def __init__(self, scorer: Scorer, positions: Positions) -> None:
        self.scorer, self.per_document = scorer, scorer.per_document
        self.step = -1
        self.probabilities: Floats = np.empty((0, 0))
        self._positions = positions
        self._rows: Iterator[Tensor] = iter(())

    def plan(self, layout: Layout, rows: int) -> Iterator[Step]:
        """Yield the scorer's own steps and count them."""
        for step in self.scorer.plan(layout, rows):
            self.step += 1
            yield step

    def logits(self, inputs: Tensor, slots: Sequence[int], last: int, cache: Cache | None = None) -> Tensor:
        """Return the scorer's own logits, kept until the loop has scored their windows."""
        logits = self.scorer.logits(inputs, slots, last, cache)
        self._rows = iter(logits.detach())
        return logits

    def keep(self, window: Window) -> None:
        """Keep the requested distributions of the next row of the last logits."""
        row = next(self._rows)
        begin, end = np.searchsorted(self._positions, (window.first, window.end))
        if begin < end:
            if not self.probabilities.size:
                self.probabilities = np.zeros((len(self._positions), row.shape[1]))
            wanted = torch.from_numpy(self._positions[begin:end] - window.first).to(row.device)
            self.probabilities[begin:end] = torch.softmax(row[wanted].double(), -1).cpu().numpy()

    def update(self, batches: Sequence[ScoringBatch], past: ScoredPrefix) -> None:
        """Update the scorer."""
        self.scorer.update(batches, past)
