"""Probes: each tests for one way in which a score could be false, with the scorer as a black box.

A probe takes a case and returns a result and its evidence, or None if it does not apply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from caddie.data.tokenizers import MARK
from caddie.errors import UserError
from caddie.verify.black_box import Positions, ScoredText
from caddie.verify.probe_case import ProbeCase


@dataclass(frozen=True)
class Check:
    """Result of one check, with its evidence."""

    name: str
    passed: bool
    evidence: str


Found = tuple[bool, str]
Probe = Callable[[ProbeCase], Found | None]

_LUCK = math.log(1e6)
"""Nats by which an honest predictor beats the entropy of noise once in a million times (Ville's inequality)."""
_DEVIATIONS = 5.0
"""Standard deviations beyond which a mean rank is not chance: once in three million times."""
_SPACES = b"a b  c   d\n e\t f \xc3\xa9 \xe4\xbd\xa0 \xe2\x98\x83 \xf0\x9d\x92\xb3 \xef\xbc\x91 .\n"
HELD_OUT = "held-out text was not trained on"
_ORDER = 0.05
"""Relative change of the total loss that another order of documents may cause."""


def run_probes(case: ProbeCase) -> list[Check]:
    """Run all probes on a case. A probe that raises fails; a `UserError` is raised as it is."""
    checks: list[Check] = []
    for name, probe in PROBES.items():
        if checks and not checks[0].passed and probe is not _reads:
            continue  # without losses there is nothing to probe
        try:
            found = probe(case)
        except UserError as error:
            if not case.touched:  # otherwise it failed because a file was missing in the sandbox
                raise
            found = False, str(error)
        except Exception as error:
            found = False, f"{type(error).__name__}: {error}"
        if found is not None:
            checks.append(Check(name, *found))
    return checks


# Losses, and the order in which they were made


def _finite_losses(case: ProbeCase) -> Found:
    nats = case.base.nats
    return bool(np.isfinite(nats).all()), f"{len(nats):,} tokens, {float(nats.mean()):.3f} nats each"


def _scored_before(base: ScoredText, changed: Positions, own: int = 0) -> npt.NDArray[np.bool_]:
    """Return the predictions scored before any changed token; with `own=1` also that of the first changed one."""
    targets, places = changed - 1, np.arange(len(base.step))
    first = base.step[targets].min()
    beside = base.step == first
    for target in targets[base.step[targets] == first]:
        beside &= (base.segment != base.segment[target]) | (places < target + own)
    settled: npt.NDArray[np.bool_] = (base.step < first) | beside
    return settled


def _look_ahead(case: ProbeCase) -> Found:
    """Change tokens: no loss or distribution from before may change."""
    base, earlier, later, moved = case.base, 0, 0, list[tuple[int, int]]()
    for changed, scored in case.flips:
        settled, differs = _scored_before(base, changed), case.differ(base.nats, scored.nats)
        wrong = np.flatnonzero(differs & settled)
        if base.probabilities is not None and scored.probabilities is not None:
            stated_before = _scored_before(base, changed, own=1)[case.positions]
            other = case.differ(base.probabilities, scored.probabilities).any(1)
            wrong = np.union1d(wrong, case.positions[other & stated_before])
        moved += [(int(changed[0]), place) for place in wrong.tolist()]
        earlier, later = earlier + int(settled.sum()), later + int((differs & ~settled).sum())
    tried = f"{len(case.flips)} changes of later tokens"
    if moved:
        token, place = moved[0]
        where = f"such as that of token {place + 1} after a change from token {token} on"
        return False, f"{tried}: {len(moved):,} losses or distributions from before them changed, {where}"
    return True, f"{tried}: none of {earlier:,} losses from before them changed; {later:,} from after did"


def _own_target(case: ProbeCase) -> Found:
    """Score random tokens: an honest scorer cannot beat their own distribution or rank the true token high.

    It beats the distribution of the noise by a factor of a million once in a million times, however it learns. And the
    rank of a uniformly drawn token, in any distribution made without knowing it, is uniform.
    """
    tokens, positions, scored = case.noise
    least = case.noise_nats(tokens[1:])[0]
    loss, lowest = float(scored.nats.mean()), float(least.mean())
    evidence = f"{len(least):,} random tokens cost {loss:.3f} nats each, their own distribution gives {lowest:.3f}"
    if not float(scored.nats.sum()) >= float(least.sum()) - _LUCK:
        return False, f"{evidence}: an honest scorer cannot go below it"
    if scored.probabilities is None:
        return True, evidence
    drawn = tokens[positions + 1] != case.bos
    probs = np.delete(scored.probabilities[drawn], case.bos, axis=1)
    target = scored.probabilities[drawn, tokens[positions + 1][drawn]][:, None]
    rank = ((probs < target).sum(1) + 0.5 * (probs == target).sum(1)) / probs.shape[1]
    deviation = _DEVIATIONS / math.sqrt(12 * len(rank))
    evidence += f"; the true token ranks above {rank.mean():.3f} of all, by chance 0.500 ± {deviation:.3f}"
    return bool(rank.mean() <= 0.5 + deviation), evidence


def _ends(case: ProbeCase) -> Found | None:
    """The same for document ends, which a scorer that is told the segments beforehand could give away."""
    tokens, positions, scored = case.noise
    if scored.probabilities is None:
        return None
    ends = tokens[positions + 1] == case.bos
    predicted = np.clip(scored.probabilities[:, case.bos], 1e-300, 1.0)
    loss = float(-np.log(np.where(ends, predicted, np.maximum(1.0 - predicted, 1e-16))).sum())
    lowest = float(case.noise_nats(tokens[positions + 1])[1].sum())
    evidence = f"{int(ends.sum())} random document ends cost {loss:.1f} nats, their own distribution gives {lowest:.1f}"
    return loss >= lowest - _LUCK, evidence


def _past_matters(case: ProbeCase) -> Found:
    """Change one token: losses or distributions of later tokens must change."""
    base, behind, moved = case.base, 0, 0
    for changed, scored in case.flips[:2]:
        later, differs = np.arange(len(base.nats)) >= changed[0], case.differ(base.nats, scored.nats)
        if base.probabilities is not None and scored.probabilities is not None:
            differs[case.positions] |= case.differ(base.probabilities, scored.probabilities).any(1)
        behind, moved = behind + int(later.sum()), moved + int((differs & later).sum())
    if not moved:
        return False, f"2 tokens changed: none of {behind:,} later predictions changed; the scorer reads no text"
    return True, f"2 tokens changed: {moved:,} of {behind:,} later predictions changed"


def _sums(case: ProbeCase) -> Found:
    """Sum each distribution over the vocabulary, and compare the target's probability with its loss."""
    probs = case.base.probabilities
    if probs is None or probs.shape != (len(case.positions), case.vocabulary):
        return False, f"the scorer has no probabilities for all {case.vocabulary:,} tokens"
    if not (np.isfinite(probs).all() and (probs >= 0).all()):
        return False, "some probabilities are negative or not finite"
    sums = probs.sum(1)
    worst = float(sums[np.abs(sums - 1).argmax()])
    if abs(worst - 1) > 1e-4:
        return False, f"the probabilities of all {probs.shape[1]:,} tokens add up to {worst:.6g} at one position"
    target = probs[np.arange(len(probs)), case.tokens[case.positions + 1]]
    scored = np.exp(-case.base.nats[case.positions])
    evidence = f"at {len(probs)} positions the probabilities of {probs.shape[1]:,} tokens add up to 1"
    if not np.allclose(scored, target, rtol=1e-3, atol=1e-9):
        apart = float(np.abs(scored - target).max())
        return False, f"{evidence}, but the loss and the probability of the target differ by {apart:.3g}"
    return True, f"{evidence}, within {abs(worst - 1):.0e}, and the loss is that of the target"


# Repetition and order


def _repeats(case: ProbeCase) -> Found:
    again = case.open().score(case.tokens, case.positions)
    moved = int(case.differ(case.base.nats, again.nats).sum())
    return not moved, f"{moved:,} of {len(again.nats):,} losses differ between two runs"


def _state(case: ProbeCase) -> Found:
    """Score another text first: neither weights nor losses may change."""
    scorer = case.open()
    before = scorer.state()
    scorer.score(case.noise[0], case.positions)
    again = scorer.score(case.tokens, case.positions)
    moved = int(case.differ(case.base.nats, again.nats).sum())
    same = before == scorer.state()
    found = "the weights are the same afterwards" if same else "scoring changed the weights (copy a model to train it)"
    return same and not moved, f"{found}; after another text {moved:,} of {len(again.nats):,} losses differ"


def _documents_apart(case: ProbeCase) -> Found:
    """If documents are claimed to be isolated: change every second one, and compare the others."""
    base = case.base
    if not base.isolated:
        return True, "not claimed: the whole text before a token is legal context here"
    document = np.cumsum(case.tokens == case.bos) - 1
    changed = np.flatnonzero((case.tokens != case.bos) & (document % 2 == 0))
    others = document[:-1] % 2 == 1
    moved = case.differ(base.nats, case.flip(changed).nats) & others
    figures = f"{int(moved.sum()):,} of {int(others.sum()):,}"
    evidence = f"every second document changed: {figures} losses in the others changed"
    if moved.any() and base.learns and not (moved & _scored_before(base, changed)).any():
        return True, f"{evidence}, by design: it learns from documents scored before"
    return not moved.any(), evidence


def _document_order(case: ProbeCase) -> Found:
    """Reverse the order of documents: the total loss may change a little, but not if documents are isolated."""
    documents = np.split(case.tokens, np.flatnonzero(case.tokens == case.bos)[1:])
    reordered = np.concatenate(documents[::-1])
    other = case.open().score(reordered, case.positions)
    # Without BOS, because the last document has no prediction of its end.
    before = float(case.base.nats[case.tokens[1:] != case.bos].sum())
    after = float(other.nats[reordered[1:] != case.bos].sum())
    change = after / before - 1
    one_each = len(np.unique(case.base.segment)) == len(documents)
    most = 1e-5 if one_each and case.base.isolated and not case.base.learns else _ORDER
    evidence = f"documents in reverse order: the loss changes by {change:+.2%}, at most {most:.2%} is allowed"
    return bool(abs(change) <= most), evidence


def _reads(case: ProbeCase) -> Found:
    """Report what the first scoring read."""
    if case.touched:
        return False, f"while it scored a text it {'; '.join(case.touched[:3])}"
    return True, "no other file, no network and no process while it scored a text"


# The text


def _bytes(case: ProbeCase) -> Found:
    """Count the bytes of texts by token, and compare with the bytes that the tokens decode to."""
    tokenizer, documents = case.artifact.tokenizer, [_SPACES, *case.documents]
    counted = actual = table = double = triple = marks = lossy = 0
    for document, ids in zip(documents, tokenizer.encode_many(documents), strict=True):
        text = tokenizer.decode(ids)
        counted += int(case.count(ids).sum())
        actual += len(text)
        table += tokenizer.table_bytes(np.append(np.uint16(tokenizer.bos), ids))
        pieces = [tokenizer.token_bytes[index] for index in ids.tolist()]
        double += sum(piece.startswith(b" ") for piece in pieces)
        triple += 2 * pieces.count(b" ")
        marks |= MARK.encode() in text and MARK.encode() not in document
        lossy += text != document
    if counted != actual:
        cause = {double: "; a leading space is counted twice", triple: "; a space by itself is counted as three bytes"}
        return False, f"{actual:,} bytes of text are counted as {counted:,}{cause.get(counted - actual, '')}"
    if marks:
        return False, "a space decodes to the three bytes of U+2581: the tokenizer has no piece for it"
    evidence = f"{actual:,} bytes in {len(documents)} texts, by token as by decoding"
    if lossy:
        plural = "s do" if lossy > 1 else " does"
        evidence += f"; lossy tokenizer: {lossy} document{plural} not round-trip (the score counts the source's bytes)"
    if table != actual:
        evidence += f"; the contest's table would count {table:,}"
    return True, evidence


def _held_out(case: ProbeCase) -> Found | None:
    return None if case.trained_on is None else check_disjoint(case.trained_on, case.held_out)


def check_disjoint(trained_on: frozenset[bytes], held_out: frozenset[bytes]) -> Found:
    """Check that no held-out document is among the training documents, by their hashes."""
    both = len(trained_on & held_out)
    documents = f"{len(held_out):,} held-out documents, by their hashes, among {len(trained_on):,} training documents"
    return not both, f"{both or 'none'} of {documents}"


PROBES: dict[str, Probe] = {
    "scores a text": _finite_losses,
    "reads nothing else": _reads,
    "no look-ahead": _look_ahead,
    "random tokens are not predicted": _own_target,
    "document ends are not predicted": _ends,
    "distributions sum to one": _sums,
    "context matters": _past_matters,
    "two runs agree": _repeats,
    "weights are unchanged by scoring": _state,
    "documents are isolated": _documents_apart,
    "document order does not matter": _document_order,
    "bytes are counted once": _bytes,
    HELD_OUT: _held_out,
}
"""Name to probe, in the order of the report."""


def missing_probes(checks: Sequence[Check]) -> list[str]:
    """Return the names of the probes that always answer and are missing in `checks`."""
    works = bool(checks) and checks[0].passed
    optional = _ends, _held_out  # they do not apply to some texts
    expected = [name for name, probe in PROBES.items() if probe not in optional] if works else list(PROBES)[:2]
    return [name for name in expected if name not in {check.name for check in checks}]
