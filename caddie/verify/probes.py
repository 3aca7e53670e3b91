"""The probes: each tries one way in which a score could be false, on a subject of which it knows nothing else.

A probe takes a trial and gives whether the subject passed and what was seen, or None where there is nothing to try.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from caddie.data.tokenizers import MARK
from caddie.errors import UserError
from caddie.verify.black_box import Places, Priced
from caddie.verify.checks import Check
from caddie.verify.probe_case import ProbeCase

Found = tuple[bool, str]
Probe = Callable[[ProbeCase], Found | None]

_LUCK = math.log(1e6)
"""Nats by which an honest predictor beats the best one on noise once in a million times (Ville's inequality)."""
_DEVIATIONS = 5.0
"""Standard deviations beyond which a mean rank is no chance: once in three million times."""
_SPACES = b"a b  c   d\n e\t f \xc3\xa9 \xe4\xbd\xa0 \xe2\x98\x83 \xf0\x9d\x92\xb3 \xef\xbc\x91 .\n"
HELD_OUT = "held-out text was not trained on"
_ORDER = 0.05
"""Part of the whole charge that the order of the documents may make."""


def examine(trial: ProbeCase) -> list[Check]:
    """All probes on one subject; that on which it breaks, it fails. What is asked wrongly is a `UserError`."""
    checks: list[Check] = []
    for name, probe in PROBES.items():
        if checks and not checks[0].passed and probe is not _reads:
            continue  # without a price there is nothing to try
        try:
            found = probe(trial)
        except UserError as error:
            if not trial.touched:  # else it broke because it could not read what it reached for
                raise
            found = False, str(error)
        except Exception as error:
            found = False, f"{type(error).__name__}: {error}"
        if found is not None:
            checks.append(Check(name, *found))
    return checks


# What was charged, and when


def _prices(trial: ProbeCase) -> Found:
    nats = trial.base.nats
    return bool(np.isfinite(nats).all()), f"{len(nats):,} tokens, {float(nats.mean()):.3f} nats each"


def _settled(base: Priced, changed: Places, own: int = 0) -> npt.NDArray[np.bool_]:
    """Predictions that were charged before any of the changed tokens; with `own` also that of the first of them."""
    targets, places = changed - 1, np.arange(len(base.step))
    first = base.step[targets].min()
    beside = base.step == first
    for target in targets[base.step[targets] == first]:
        beside &= (base.stretch != base.stretch[target]) | (places < target + own)
    settled: npt.NDArray[np.bool_] = (base.step < first) | beside
    return settled


def _look_ahead(trial: ProbeCase) -> Found:
    """Change tokens: no charge that was made before may move, and no distribution that was stated before."""
    base, earlier, later = trial.base, 0, 0
    moved: list[tuple[int, int]] = []
    for changed, priced in trial.flips:
        settled, differs = _settled(base, changed), trial.moved(base.nats, priced.nats)
        wrong = np.flatnonzero(differs & settled)
        if base.odds is not None and priced.odds is not None:
            other = trial.moved(base.odds, priced.odds).any(1) & _settled(base, changed, own=1)[trial.shown]
            wrong = np.union1d(wrong, trial.shown[other])
        moved += [(int(changed[0]), place) for place in wrong.tolist()]
        earlier, later = earlier + int(settled.sum()), later + int((differs & ~settled).sum())
    tried = f"{len(trial.flips)} changes of later tokens"
    if moved:
        token, place = moved[0]
        where = f"such as for token {place + 1} after a change from token {token} on"
        return False, f"{tried}: {len(moved):,} charges or odds settled before them moved, {where}"
    return True, f"{tried}: none of {earlier:,} charges made before them moved; {later:,} made after did"


def _own_target(trial: ProbeCase) -> Found:
    """Price noise, which none can know: nobody honest pays less than chance, or ranks the true token high.

    An honest predictor's odds beat those by which the noise was drawn by a factor of a million once in a million times,
    whatever it is and however it learns. And where the true token is drawn from all alike, its rank in a distribution
    that was stated without knowing it is uniform, however well or badly calibrated that distribution is.
    """
    tokens, shown, priced = trial.noise
    least = trial.noise_nats(tokens[1:])[0]
    paid, chance = float(priced.nats.mean()), float(least.mean())
    evidence = f"{len(least):,} tokens of noise cost {paid:.3f} nats each, where knowing nothing costs {chance:.3f}"
    if not float(priced.nats.sum()) >= float(least.sum()) - _LUCK:
        return False, f"{evidence}: less than any honest predictor can pay"
    if priced.odds is None:
        return True, evidence
    drawn = tokens[shown + 1] != trial.bos
    odds = np.delete(priced.odds[drawn], trial.bos, axis=1)
    true = priced.odds[drawn, tokens[shown + 1][drawn]][:, None]
    rank = ((odds < true).sum(1) + 0.5 * (odds == true).sum(1)) / odds.shape[1]
    deviation = _DEVIATIONS / math.sqrt(12 * len(rank))
    evidence += f"; the true one ranks above {rank.mean():.3f} of all, where chance gives 0.500 ± {deviation:.3f}"
    return bool(rank.mean() <= 0.5 + deviation), evidence


def _ends(trial: ProbeCase) -> Found | None:
    """The same for where documents end, which whoever is told of the stretches beforehand could give away."""
    tokens, shown, priced = trial.noise
    if priced.odds is None:
        return None
    ends = tokens[shown + 1] == trial.bos
    stated = np.clip(priced.odds[:, trial.bos], 1e-300, 1.0)
    paid = float(-np.log(np.where(ends, stated, np.maximum(1.0 - stated, 1e-16))).sum())
    chance = float(trial.noise_nats(tokens[shown + 1])[1].sum())
    evidence = f"{int(ends.sum())} ends of documents at random places cost {paid:.1f} nats, a good guess {chance:.1f}"
    return paid >= chance - _LUCK, evidence


def _past_matters(trial: ProbeCase) -> Found:
    """Change one token, and see whether charges or distributions for the tokens behind it move."""
    base, behind, moved = trial.base, 0, 0
    for changed, priced in trial.flips[:2]:
        later, differs = np.arange(len(base.nats)) >= changed[0], trial.moved(base.nats, priced.nats)
        if base.odds is not None and priced.odds is not None:
            differs[trial.shown] |= trial.moved(base.odds, priced.odds).any(1)
        behind, moved = behind + int(later.sum()), moved + int((differs & later).sum())
    if not moved:
        return (
            False,
            f"2 tokens changed: nothing stated for the {behind:,} behind them moved; the subject reads no text",
        )
    return True, f"2 tokens changed: what was stated for {moved:,} of {behind:,} behind them moved"


def _sums(trial: ProbeCase) -> Found:
    """Add up what the subject states over the whole vocabulary, and compare it with what it charged."""
    odds = trial.base.odds
    if odds is None or odds.shape != (len(trial.shown), trial.vocabulary):
        return False, f"the subject cannot state the probabilities of all {trial.vocabulary:,} tokens"
    sums = odds.sum(1)
    if not (np.isfinite(odds).all() and (odds >= 0).all()):
        return False, "there are probabilities that are negative or no numbers"
    worst = float(sums[np.abs(sums - 1).argmax()])
    true = odds[np.arange(len(odds)), trial.tokens[trial.shown + 1]]
    charged = np.exp(-trial.base.nats[trial.shown])
    apart = float(np.abs(charged - true).max())
    evidence = f"at {len(odds)} places the probabilities of {odds.shape[1]:,} tokens add up to 1"
    if abs(worst - 1) > 1e-4:
        return False, f"the probabilities of all {odds.shape[1]:,} tokens add up to {worst:.6g} at one place"
    if not np.allclose(charged, true, rtol=1e-3, atol=1e-9):
        return False, f"{evidence}, but what was charged differs from what was stated by {apart:.3g}"
    return True, f"{evidence}, {abs(worst - 1):.0e} off at most, and the true one's was charged"


# What stays the same


def _repeats(trial: ProbeCase) -> Found:
    again = trial.open().price(trial.tokens, trial.shown)
    moved = int(trial.moved(trial.base.nats, again.nats).sum())
    return not moved, f"{moved:,} of {len(again.nats):,} charges differ between two runs"


def _state(trial: ProbeCase) -> Found:
    """Price another text before, and see whether weights or charges moved."""
    subject = trial.open()
    before = subject.state()
    subject.price(trial.noise[0], trial.shown)
    again = subject.price(trial.tokens, trial.shown)
    moved = int(trial.moved(trial.base.nats, again.nats).sum())
    same = before == subject.state()
    weights = "the weights are the same after use" if same else "the weights changed by use (copy a model to train it)"
    return same and not moved, f"{weights}; after another text {moved:,} of {len(again.nats):,} charges differ"


def _documents_apart(trial: ProbeCase) -> Found:
    """Where documents are said not to matter to one another: change every second one, and look at the others."""
    base = trial.base
    if not base.isolated:
        return True, "not claimed: what came before in the text is a legal context here"
    document = np.cumsum(trial.tokens == trial.bos) - 1
    changed = np.flatnonzero((trial.tokens != trial.bos) & (document % 2 == 0))
    others = document[:-1] % 2 == 1
    moved = trial.moved(base.nats, trial.flip(changed).nats) & others
    evidence = (
        f"every second document changed: {int(moved.sum()):,} of {int(others.sum()):,} charges in the others moved"
    )
    if moved.any() and base.learns and not (moved & _settled(base, changed)).any():
        return True, f"{evidence}, by design: learnt from documents that were scored before"
    return not moved.any(), evidence


def _document_order(trial: ProbeCase) -> Found:
    """Put the documents in another order: the tokens must cost about the same, or exactly where documents are apart."""
    begins = np.flatnonzero(trial.tokens == trial.bos)
    documents = np.split(trial.tokens, begins[1:])
    reordered = np.concatenate(documents[::-1])
    other = trial.open().price(reordered, trial.shown)
    # The prediction of BOS is left out: that of the last document's end is not made.
    before = float(trial.base.nats[trial.tokens[1:] != trial.bos].sum())
    after = float(other.nats[reordered[1:] != trial.bos].sum())
    change = after / before - 1
    one_each = len(np.unique(trial.base.stretch)) == len(documents)
    most = 1e-5 if one_each and trial.base.isolated and not trial.base.learns else _ORDER
    return bool(
        abs(change) <= most
    ), f"the last document first: the text costs {change:+.2%}, at most {most:.2%} is allowed"


def _reads(trial: ProbeCase) -> Found:
    """What the first pricing reached for."""
    if trial.touched:
        return False, f"while it priced a text it {'; '.join(trial.touched[:3])}"
    return True, "no other file, no network and no process while it priced a text"


# What the text is


def _bytes(trial: ProbeCase) -> Found:
    """Count the bytes of texts token by token, and from what the tokens decode to."""
    tokenizer, documents = trial.artifact.tokenizer, [_SPACES, *trial.documents]
    counted = actual = table = double = triple = 0
    marks = False
    lossless = True
    for document, ids in zip(documents, tokenizer.encode_many(documents), strict=True):
        text = tokenizer.decode(ids)
        counted += int(trial.count(ids).sum())
        actual += len(text)
        table += tokenizer.table_bytes(np.append(np.uint16(tokenizer.bos), ids))
        pieces = [tokenizer.token_bytes[index] for index in ids.tolist()]
        double += sum(piece.startswith(b" ") for piece in pieces)
        triple += 2 * pieces.count(b" ")
        marks |= MARK.encode() in text and MARK.encode() not in document
        lossless &= text == document
    if counted != actual:
        cause = {double: "; a leading space is counted twice", triple: "; a space by itself is counted as three bytes"}
        named = cause.get(counted - actual, "")
        return False, f"{actual:,} bytes of text are counted as {counted:,}{named}"
    if marks:
        return False, "a space comes back as the three bytes of U+2581: the tokenizer has no piece for it"
    kind = "the source" if lossless else "the normalized text (the score takes the source's)"
    evidence = f"{actual:,} bytes in {len(documents)} texts, token by token the same as {kind}"
    if table != actual:
        evidence += f"; the contest's table would count {table:,}"
    return True, evidence


def _held_out(trial: ProbeCase) -> Found | None:
    if trial.trained_on is None:
        return None
    return disjoint(trial.trained_on, trial.held_out)


def disjoint(trained_on: frozenset[bytes], held_out: frozenset[bytes]) -> Found:
    """Whether no document that is scored was trained on, by their hashes."""
    both = len(trained_on & held_out)
    counts = f"{len(held_out):,} held-out documents, by their hashes, among {len(trained_on):,} training documents"
    return not both, f"{both or 'none'} of {counts}"


PROBES: dict[str, Probe] = {
    "prices a text": _prices,
    "reads nothing else": _reads,
    "no look-ahead": _look_ahead,
    "noise is not known": _own_target,
    "ends of documents are not known": _ends,
    "distributions sum to one": _sums,
    "the past matters": _past_matters,
    "two runs agree": _repeats,
    "weights are unchanged by use": _state,
    "documents keep apart": _documents_apart,
    "order of documents": _document_order,
    "bytes are counted once": _bytes,
    HELD_OUT: _held_out,
}
"""Name to probe, in the order of the report."""


def unanswered(checks: Sequence[Check]) -> list[str]:
    """Names of the probes that always answer and are not among the checks of a subject."""
    priced = bool(checks) and checks[0].passed
    always = [
        name for name, probe in PROBES.items() if (priced or probe in (_prices, _reads)) and probe not in _ABSTAIN
    ]
    return [name for name in always if name not in {check.name for check in checks}]


_ABSTAIN = _ends, _held_out
"""Probes that have nothing to say of some texts."""
