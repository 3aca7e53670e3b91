"""Losses of the artifact's own model on a scorer's windows, and text drawn from that model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from caddie.data.tokenizers import Ids
from caddie.model import Cache
from caddie.pack.artifact import Artifact
from caddie.score import Scoring, Window, windows
from caddie.verify.black_box import Floats, Positions, ScoredText, in_parts

_ROW_TOKENS = 4096
"""Tokens of a batch."""
_STEPS = 128
"""Most tokens drawn in a window."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Predictions of a text's tokens by the model itself, each from the tokens before it in its window."""

    nats: Floats
    """Loss of each prediction, (N - 1,)."""
    likely: Ids
    """The most likely token that is neither the true one nor BOS, (N - 1,)."""
    drawn: Ids
    """A token drawn from the model's distribution, but neither of these two, (N - 1,)."""


@dataclass(frozen=True, kw_only=True)
class DrawnText:
    """Text with stretches of many windows drawn from the model, token by token."""

    tokens: Ids
    predictions: Positions
    """Predictions of the drawn tokens."""
    nats: Floats
    """Minus the natural logarithm of the probability with which each was drawn."""


def own_windows(scored: ScoredText, scoring: Scoring) -> list[Window]:
    """Return the windows of a scored text, or plain windows if each of its windows shows only one token."""
    if max((window.end - window.start for window in scored.windows), default=1) > 1:
        return sorted(scored.windows)
    begins = np.flatnonzero(np.diff(scored.segment, prepend=-1)).tolist()
    edges = zip(begins, [*begins[1:], len(scored.segment)], strict=True)
    length = scoring.sequence_length
    return [window for begin, end in edges for window in windows(begin, end, length, length)]


@torch.inference_mode()
def reference(artifact: Artifact, scoring: Scoring, tokens: Ids, own: Sequence[Window], seed: int) -> Reference:
    """Return the model's predictions of tokens (N,) in windows that score each token once."""
    predictions, bos = len(tokens) - 1, artifact.tokenizer.bos
    nats, likely, drawn = np.zeros(predictions), *(np.zeros(predictions, np.uint16) for _ in range(2))
    generator = torch.Generator().manual_seed(seed)
    for batch in _batches(own):
        rows = np.stack([tokens[window.start : window.end] for window in batch])
        logits = _logits(artifact, scoring, rows, batch[0].end - batch[0].first)
        for first, part in in_parts(batch, logits):
            scored, true = slice(first, first + len(part)), tokens[first + 1 : first + 1 + len(part)]
            targets = torch.from_numpy(true.astype(np.int64))[:, None]
            log_probs = torch.log_softmax(part.double(), 1)
            nats[scored] = -log_probs.gather(1, targets)[:, 0].numpy()
            log_probs.scatter_(1, targets, -torch.inf)[:, bos] = -torch.inf
            likely[scored] = log_probs.argmax(1).numpy()
            drawn[scored] = _draw(log_probs, generator).numpy()
    return Reference(nats=nats, likely=likely, drawn=drawn)


@torch.inference_mode()
def draw_text(artifact: Artifact, scoring: Scoring, tokens: Ids, own: Sequence[Window], seed: int) -> DrawnText:
    """Replace up to 128 consecutive tokens in each of several disjoint windows by tokens drawn from the model.

    Each is drawn from the model's distribution given the tokens before it in its window. BOS is neither drawn nor
    replaced. So the distribution of each drawn token, given all tokens before it, is known.
    """
    text, bos, disjoint, end = tokens.copy(), artifact.tokenizer.bos, list[Window](), 0
    for window in own:
        if window.start >= end and window.end - window.first > 1:
            disjoint.append(window)
            end = window.end
    generator = torch.Generator().manual_seed(seed)
    predictions, nats = [np.zeros(0, np.int64)], [np.zeros(0)]
    for batch in _batches(disjoint):
        # The last target is not drawn, since the next window may begin with it.
        free = batch[0].end - batch[0].first - 1
        steps = min(_STEPS, free)
        skipped = int(torch.randint(free - steps + 1, (), generator=generator))
        places = np.array([window.first for window in batch]) + skipped
        unread, cache = np.stack([text[window.start : window.first + skipped + 1] for window in batch]), Cache()
        for _ in range(steps):
            logits = _logits(artifact, scoring, unread, 1, cache)[:, -1].double()
            logits[:, bos] = -torch.inf
            log_probs = torch.log_softmax(logits, 1)
            chosen = _draw(log_probs, generator)
            keep = text[places + 1] != bos
            predictions.append(places[keep])
            nats.append(-log_probs.gather(1, chosen[:, None])[:, 0].numpy()[keep])
            text[places[keep] + 1] = chosen.numpy()[keep]
            unread, places = text[places + 1][:, None], places + 1
    return DrawnText(tokens=text, predictions=np.concatenate(predictions), nats=np.concatenate(nats))


def _draw(log_probs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw an id from each distribution, given by logarithms up to a constant (the Gumbel-max trick)."""
    uniform = torch.rand(log_probs.shape, generator=generator, dtype=torch.float64)
    return (log_probs - (-uniform.log()).log()).argmax(1)


def _batches(own: Sequence[Window]) -> Iterator[list[Window]]:
    """Yield the windows in batches of one shape."""
    shapes: dict[tuple[int, int], list[Window]] = {}
    for window in own:
        shapes.setdefault((window.first - window.start, window.end - window.start), []).append(window)
    for (_, length), members in shapes.items():
        rows = max(1, _ROW_TOKENS // length)
        for begin in range(0, len(members), rows):
            yield members[begin : begin + rows]


def _logits(artifact: Artifact, scoring: Scoring, rows: Ids, last: int, cache: Cache | None = None) -> torch.Tensor:
    """Return the model's logits (rows, last, vocabulary) on the CPU."""
    ids = torch.from_numpy(rows.astype(np.int64)).to(next(artifact.model.parameters()).device)
    dtype = getattr(torch, scoring.precision)
    logits: torch.Tensor = artifact.model(ids, ids == artifact.tokenizer.bos, dtype, last=last, cache=cache)
    return logits.cpu()
