"""What is put to the probes: a black box that charges for a text, opened anew for every trial.

A scorer of caddie's becomes one by running in the loop of `caddie.score`, which is watched from outside. The
known-bad examples are black boxes, too: they get the whole text at once, as public scripts do, and may cheat with it.
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
Places = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Priced:
    """What a text of N tokens was charged; prediction p is that of token p + 1."""

    nats: Floats
    """The charge for each prediction, (N - 1,)."""
    step: Places
    """In which step each was charged, (N - 1,); in a step, a stretch is charged for from left to right."""
    stretch: Places
    """Number of the stretch that each belongs to, (N - 1,): a document, or 0 for all where the text is one."""
    odds: Floats | None
    """The distributions that were asked for, (k, vocabulary), as the subject states them; none if it cannot."""
    isolated: bool = False
    """Whether the subject says that no document matters to another."""
    learns: bool = False
    """Whether it says that it learns from what it has charged for."""


class BlackBoxScorer(ABC):
    """Charges for text with the model of an artifact, of which it has a copy of its own.

    Whatever a subject keeps from one text to the next shows when it is opened anew.
    """

    def __init__(self, artifact: Artifact, scoring: Scoring) -> None:
        self.artifact, self.scoring = artifact, scoring
        self.model: Model = copy.deepcopy(artifact.model)
        self.bos = artifact.tokenizer.bos

    @abstractmethod
    def price(self, tokens: Ids, shown: Places) -> Priced:
        """Charge for tokens (N,), the first being context; state the distributions of predictions `shown`, sorted."""

    def state(self) -> str:
        """A hash of all weights and buffers."""
        digest = hashlib.sha256()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


class Scored(BlackBoxScorer):
    """A scorer in the loop: that of the scoring, or a user's own by the name that `--scorer` takes."""

    def __init__(self, artifact: Artifact, scoring: Scoring, scorer: str | None = None) -> None:
        super().__init__(artifact, scoring)
        self._scorer = scorer

    def price(self, tokens: Ids, shown: Places) -> Priced:
        """What the loop charges; order and distributions are seen from outside, not told by the scorer."""
        watched = _Watched(self._made(), shown)
        layout = layout_of(tokens, self.bos, watched.per_document)
        predictions = len(tokens) - 1
        nats, step = np.zeros(predictions), np.zeros(predictions, np.int64)

        def tell(window: Window, losses: Losses) -> None:
            nats[window.first : window.end] = losses
            step[window.first : window.end] = watched.step
            watched.note(window)

        device = next(self.model.parameters()).device
        run(watched, tokens, layout, self.scoring.rows, tell, device)
        return Priced(
            nats=nats,
            step=step,
            stretch=np.searchsorted(layout.begins, np.arange(predictions), side="right") - 1,
            odds=watched.odds,
            isolated=watched.per_document or self._documents_apart(),
            learns=type(watched.scorer).update is not Scorer.update,
        )

    def _made(self) -> Scorer:
        if self._scorer is not None:
            return load_scorer(self._scorer, self.model, self.artifact.tokenizer)
        return self.scoring.scorer(self.model, self.bos)

    def _documents_apart(self) -> bool:
        gpt = self.model.config
        scopes = {getattr(gpt.block_of(layer).attention, "scope", None) for layer in range(gpt.depth)}
        return self._scorer is None and scopes == {"document"}


class _Watched(Scorer):
    """A scorer with a note of the step it is in, and of some of its answers."""

    def __init__(self, scorer: Scorer, shown: Places) -> None:
        self.scorer, self.per_document = scorer, scorer.per_document
        self.step = -1
        self.odds: Floats = np.empty((0, 0))
        self._shown = shown
        self._answer: Iterator[Tensor] = iter(())

    def plan(self, layout: Layout, rows: int) -> Iterator[Step]:
        """The scorer's own, counted."""
        for step in self.scorer.plan(layout, rows):
            self.step += 1
            yield step

    def logits(self, inputs: Tensor, slots: Sequence[int], last: int, cache: Cache | None = None) -> Tensor:
        """The scorer's own, kept until the loop has told of its windows."""
        answer = self.scorer.logits(inputs, slots, last, cache)
        self._answer = iter(answer.detach())
        return answer

    def note(self, window: Window) -> None:
        """Keep what was asked for of the next row of the last answer."""
        row = next(self._answer)
        begin, end = np.searchsorted(self._shown, (window.first, window.end))
        if begin < end:
            if not self.odds.size:
                self.odds = np.zeros((len(self._shown), row.shape[1]))
            wanted = torch.from_numpy(self._shown[begin:end] - window.first).to(row.device)
            self.odds[begin:end] = torch.softmax(row[wanted].double(), -1).cpu().numpy()

    def update(self, batches: Sequence[ScoringBatch], past: ScoredPrefix) -> None:
        """The scorer's own."""
        self.scorer.update(batches, past)
