"""Score a user's scorer, audit that scoring, and test the scorer on text drawn from the model."""

import secrets
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace

import numpy as np

from caddie.data.corpus import Corpus
from caddie.data.tokenizers import Ids
from caddie.errors import CheckFailed
from caddie.pack.artifact import Artifact
from caddie.report.units import bits_per_byte
from caddie.runtime.distributed import Ranks
from caddie.runtime.progress import Progress
from caddie.score import Score, Scoring, Text, Window, score_kinds
from caddie.score.loop import Losses
from caddie.verify.black_box import CountingScorer, LoopScorer
from caddie.verify.changes import GAIN
from caddie.verify.probe_case import ProbeCase
from caddie.verify.probes import DRAWN, PROBES
from caddie.verify.readable_text import is_readable
from caddie.verify.remote_scorer import RemoteTokens, open_scorer, scorer_server
from caddie.verify.whole_text import WholeText, audit

_READABLE = "The scorer can read this text in its sandbox, so the score says nothing; name another text."
_DRAWN_TOKENS, _DRAWN_SECONDS, _WINDOWS = 4096, 2.0, 3
"""Size of a text with drawn stretches: most tokens, and seconds to score it; but at least `_WINDOWS` windows."""

_NEAR_END, _DEVIATIONS = 8, 4.0
"""Last tokens of a document, where a scorer that knows its end may gain, and the standard deviations above which such a
gain is not chance."""
_OCTAVES, _MOST_NATS = 40, 100.0
"""Octaves (powers of two) of document lengths, and a cap in nats on the loss of a token called impossible."""


def score_audited(
    artifact: Artifact,
    corpus: Corpus,
    text: Text,
    scoring: Scoring,
    name: str,
    progress: Progress,
    ranks: Ranks,
    seconds: float | None = None,
) -> tuple[dict[str, Score], bool, str]:
    """Return the scores of an artifact, the user's scorer `name` among them, and its audit's result and evidence.

    The result is False if the scorer could read files or the text, or if a leak may have gained more than
    `changes.GAIN`.

    The audit takes about as long as the scorer did, or `seconds` if that is more. Raises `CheckFailed` if the scorer
    uses tokens too early or gives a token no probability. A scorer that gets only scored tokens is not audited.
    """
    predictions = len(text.tokens) - 1
    losses = {kind: np.zeros(predictions) for kind in ("plain", "user")}
    longest = 0

    def keep(kind: str, window: Window, found: Losses) -> None:
        nonlocal longest
        if kind in losses:
            losses[kind][window.first : window.end] = found
        if kind == "user":
            longest = max(longest, window.end - window.start)
            if not np.isfinite(found).all():
                token = window.first + 1 + int(np.flatnonzero(~np.isfinite(found))[0])
                raise CheckFailed(f"{name}: its logits give token {token:,} no probability, so there is no score")

    with closing(open_scorer(artifact, name)) as own:
        sandboxed = scorer_server(artifact).sandboxed
        isolated, isolation = sandboxed.isolated, f"The scorer ran with {sandboxed.isolation}."
        progress.note(f"The scorer runs with {sandboxed.isolation}.")
        progress.step({"event": "doing", "text": "looking for the text in files that the scorer can read"})
        if ranks.first and is_readable(corpus):
            isolated, isolation = False, f"{isolation} {_READABLE}"
            progress.note(_READABLE)  # before the minutes that the score may take
        counting = CountingScorer(own)
        scores = score_kinds(artifact.model, text, scoring, counting, progress, ranks, keep)
    if isinstance(own, RemoteTokens):
        return scores, isolated, f"The scorer was shown scored tokens alone. {isolation}"
    if not ranks.first:
        return scores, True, ""
    progress.phase("audit")
    took = scores["user"].seconds
    length = max(_WINDOWS * longest + 1, min(_DRAWN_TOKENS, int(_DRAWN_SECONDS * predictions / max(took, 1e-9))))
    drawn = _drawn(artifact, scoring.plain, name, text, length)
    whole = WholeText(
        model=artifact.model,
        bos=text.bos,
        scoring=scoring.plain,
        open=lambda: closing(open_scorer(artifact, name, own_sandbox=True)),
        tokens=text.tokens,
        text_bytes=text.source_bytes,
    )
    base = counting.scored(losses["user"])
    seed, seconds = secrets.randbits(32), max(took, seconds or 0.0)
    passed, evidence = audit(whole, base, losses["plain"], seed=seed, seconds=seconds, decides=True, progress=progress)
    if passed is False:
        raise CheckFailed(f"{name}: {evidence}")
    said = [f"Audit of the scorer: {evidence}.", drawn]
    little, found = _use_of_lengths(whole, losses, text, seed) if own.per_document else (True, "")
    return scores, isolated and passed is not None and little, " ".join([*filter(None, [*said, found]), isolation])


def _use_of_lengths(whole: WholeText, losses: Mapping[str, Losses], text: Text, seed: int) -> tuple[bool, str]:
    """Return True if a scorer gains at most `GAIN` from knowing the lengths of documents, and the evidence.

    The gain is at most the code length of the lengths: an honest scorer could average its predictions over all lengths.
    If documents are so short that this exceeds `GAIN`, the text is scored again with the tails of documents exchanged
    in pairs, so that each document has another's length.
    """
    begins = np.append(0, np.flatnonzero(text.tokens[1:] == text.bos) + 1)
    documents = np.split(text.tokens, begins[1:])
    lengths, count = np.array(list(map(len, documents))), len(documents)
    octaves = np.frexp(lengths)[1]
    rarity = (count + _OCTAVES) / (1 + np.bincount(octaves)[octaves])
    worth = bits_per_byte(float((np.log(2.0) * (octaves - 1) + np.log(rarity)).sum()), text.source_bytes)
    known = f"It knows the lengths of {count:,} documents, which is worth at most {worth:.4f} bits per byte"
    if worth <= GAIN:
        return True, f"{known}."
    if count <= _DEVIATIONS**2:
        return False, f"{known}; so few cannot show if it uses them: score more text."
    partner, drawn = np.arange(count), np.random.default_rng([seed, 6]).permutation(count)[: count // 2 * 2]
    partner[drawn] = np.roll(drawn, count // 2)
    kept = np.minimum(lengths, lengths[partner]) * 2 // 3
    mixed = [np.append(documents[n][: kept[n]], documents[partner[n]][kept[n] :]) for n in range(count)]
    again = np.minimum(replace(whole, tokens=np.concatenate(mixed)).scored().nats, _MOST_NATS)
    moved = np.cumsum(lengths[partner]) - lengths[partner]
    lost = [
        float((again[new : new + more] - losses["user"][begin : begin + more]).sum())
        for new, begin, more in zip(moved, begins, np.maximum(kept - 1, 0), strict=True)
    ]
    at_ends, before = _gain_at_ends(losses, text), bits_per_byte(_certain(np.array(lost)), text.source_bytes)
    if max(at_ends, 0.0) + before <= GAIN:
        return True, f"{known}; no gain above {GAIN} was found."
    there = f"gains {at_ends:.4f} bits per byte over the plain scoring there and just before"
    without = f"Told other lengths, it lost {before:.4f} more on the tokens before."
    return False, f"It knows where documents end, and {there}. {without}"


def _certain(gains: Losses) -> float:
    """Return the sum of the gains in all documents, or 0 where it may be chance."""
    return float(gains.sum()) if gains.sum() > _DEVIATIONS * np.linalg.norm(gains) else 0.0


def _gain_at_ends(losses: Mapping[str, Losses], text: Text) -> float:
    """Return the bits per byte that the scorer gains over the plain scoring where documents end, and just before.

    The gain just before an end counts only above chance and above the trend of the tokens before it: a scorer that
    learns gains more and more towards the end.
    """
    gain, ends = losses["plain"] - losses["user"], np.flatnonzero(text.tokens[1:] == text.bos)
    stops = np.append(ends, len(gain))  # the last document ends with the text
    near = np.minimum(_NEAR_END, (stops - np.append(0, ends + 1)) // 3)
    until = np.append(0.0, np.cumsum(gain))
    last, before, earlier = (until[stops - k * near] - until[stops - (k + 1) * near] for k in range(3))
    more = last - before
    if before.sum() > earlier.sum():
        more -= before - earlier
    return bits_per_byte(float(gain[ends].sum()) + _certain(more), text.source_bytes)


def _drawn(artifact: Artifact, scoring: Scoring, name: str, text: Text, length: int) -> str:
    """Score an excerpt that begins at a secret document, with stretches drawn from the model; return the evidence."""
    seed = secrets.randbits(32)
    begins = np.flatnonzero(text.tokens[: max(1, len(text.tokens) - length)] == text.bos)
    first = int(np.random.default_rng(seed).choice(begins)) if len(begins) else 0
    tokens: Ids = text.tokens[first : first + length]
    case = ProbeCase(
        artifact=artifact,
        scoring=scoring,
        open=lambda: LoopScorer(artifact, scoring, name),
        count=artifact.tokenizer.byte_lengths,
        documents=(),
        tokens=tokens,
        seed=seed,
        users=True,
    )
    found = PROBES[DRAWN](case)
    if found is None:
        return ""
    passed, evidence = found
    if not passed:
        raise CheckFailed(f"{name}: {evidence}; it uses tokens before they are scored")
    return f"{evidence}."
