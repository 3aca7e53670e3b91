"""Probes: each tests for one way in which a score could be false, with the scorer as a black box.

A probe takes a case and returns a result and its evidence, or None if it does not apply.
"""

import lzma
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from caddie.data.tokenizers import MARK
from caddie.errors import UserError, count
from caddie.report.verification import OUTCOMES
from caddie.runtime.progress import SILENT, Event, Progress
from caddie.verify.changes import must_not_change, power
from caddie.verify.probe_case import ProbeCase
from caddie.verify.whole_text import audit


@dataclass(frozen=True)
class Check:
    """Result of one check, with its evidence."""

    name: str
    passed: bool | None
    """None if nothing was found, but too little was tried to decide."""
    evidence: str

    @property
    def outcome(self) -> str:
        """A word for the result: pass, FAIL or inconclusive."""
        return OUTCOMES[self.passed]


Found = tuple[bool | None, str]
"""Result of a check, None if it is not decided, and its evidence."""
Probe = Callable[[ProbeCase], Found | None]

_LUCK = math.log(1e6)
"""Nats by which an honest predictor beats the entropy of noise once in a million times (Ville's inequality)."""
_DRAWN = 1024
"""Fewest tokens to draw from the model, if there is time."""
_DEVIATIONS = 5.0
"""Standard deviations beyond which a mean rank is not chance: once in three million times."""
_MOST_LOST = 0.1
"""Bits per byte that a lossy tokenizer may lose. The contest's lose 0.05 on FineWeb; lower case alone loses 0.34."""
_TEXT_BYTES = 16
"""Bytes allowed on top of `_MOST_LOST`, for what xz itself adds."""
_SPACES = b"a b  c   d\n e\t f \xc3\xa9 \xe4\xbd\xa0 \xe2\x98\x83 \xf0\x9d\x92\xb3 \xef\xbc\x91 .\n"
DRAWN = "drawn text is not predicted"
FAR, LOOK_AHEAD = "no look-ahead far into a text", "no look-ahead"
HELD_OUT = "held-out text was not trained on"
_ISOLATED = 1e-5
"""Relative change of the total loss that another order of isolated documents may cause: rounding."""
_ORDER = 0.05
"""Relative rise of the total loss that another order of documents may cause."""


def probe_event(name: str) -> Event:
    """Return what `run_probes` reports when the probe of this name begins."""
    return {"event": "doing", "text": f"probe {list(PROBES).index(name) + 1} of {len(PROBES)}: {name}"}


def run_probes(case: ProbeCase, progress: Progress = SILENT) -> list[Check]:
    """Run all probes on a case. A probe that raises fails; a `UserError` is raised again unless `case.touched`."""
    checks: list[Check] = []
    for name, probe in PROBES.items():
        if checks and not checks[0].passed and probe is not _reads:
            continue  # without losses there is nothing to probe
        progress.step(probe_event(name))
        try:
            found = probe(case)
        except UserError as error:
            if not case.touched:  # if it did use files, one was missing in the sandbox
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


def _look_ahead(case: ProbeCase) -> Found:
    """Change tokens at random places: the distribution of a changed token, and all before it, must stay the same."""
    passed, evidence = _search(case)
    if passed is False or case.long is None:
        return passed, evidence
    passed_long, found = _search(case.long)
    if passed_long is False:
        return False, found
    return passed and passed_long, f"{evidence}. In a text of {len(case.long.tokens):,} tokens: {found}"


def _search(case: ProbeCase) -> Found:
    """Look for a leak in the text of one case."""
    base, places, earlier, later, begin = case.base, 0, 0, 0, time.perf_counter()
    for change, scored in case.changes():
        places += len(change.places)
        before, differs = must_not_change(base, change.changed), case.differ(base.nats, scored.nats)
        wrong = differs & before
        if base.fingerprint is not None and scored.fingerprint is not None:
            stated = must_not_change(base, change.changed, own=1)
            wrong |= case.differ(base.fingerprint, scored.fingerprint) & stated
        earlier, later = earlier + int(before.sum()), later + int((differs & ~before).sum())
        if wrong.any():
            place = int(np.flatnonzero(wrong)[0])
            after = change.changed[change.changed > place]
            token = int(after[0]) if len(after) else int(change.changed[-1])
            other = ", or with other documents, which needs `update`" if base.isolated and not base.learns else ""
            what = f"settled losses and distributions changed with later tokens{other}: {int(wrong.sum()):,}"
            return False, f"{what}, such as that of token {place + 1} after a change from token {token} on"
    settled_before = f"none of {earlier:,} losses settled before them changed, nor a distribution; {later:,} others did"
    if case.base.scored_alone:
        return True, f"{places:,} places of changes: {settled_before}; the scorer is shown scored tokens alone"
    passed, found = power(case.found_with(places), time.perf_counter() - begin, case.users)
    return passed, f"{places:,} places of changes: {settled_before}; {found}"


def _whole_text(case: ProbeCase) -> Found | None:
    """Score a whole text again with other tokens from a secret place on: no loss up to there may change."""
    if case.whole is None or case.base.scored_alone:
        return None
    begin = time.perf_counter()
    base = case.whole.scored()
    seconds, plain = time.perf_counter() - begin, case.whole.plain_nats()
    if case.users:
        seconds = max(seconds, case.effort.seconds)
    return audit(case.whole, base, plain, seed=case.seed, seconds=seconds, decides=case.users)


def _drawn(case: ProbeCase) -> Found | None:
    """Score text drawn from the artifact's model: no scorer can beat the distribution that a text is drawn from.

    More texts are drawn until there are enough tokens, and as long as the scorer gains: the bound holds for all of them
    together, whenever one stops.
    """
    loss = entropy = 0.0
    tokens = texts = 0
    for drawn, scored in case.drawn():
        loss, entropy = loss + float(scored.nats[drawn.predictions].sum()), entropy + float(drawn.nats.sum())
        tokens, texts = tokens + len(drawn.predictions), texts + 1
        if not tokens:
            return None
        if not loss >= entropy - _LUCK or (tokens >= _DRAWN and loss >= entropy):
            break
    figures = f"cost {loss / tokens:.4f} nats each and were drawn with {entropy / tokens:.4f}"
    drawn_in = f"{tokens:,} tokens drawn from the model in {count(texts, 'text')}"
    evidence = f"{drawn_in} {figures}; honestly it gains at most"
    return loss >= entropy - _LUCK, f"{evidence} {_LUCK:.1f} nats in all"


def _own_target(case: ProbeCase) -> Found:
    """Score random tokens: an honest scorer cannot beat their own distribution or rank the true token high.

    It beats the distribution of the noise by a factor of a million once in a million times, however it learns. The rank
    of a uniformly drawn token is uniform in any distribution that was made without knowing the token.
    """
    tokens, positions, scored = case.noise
    least = case.noise_text.nats
    loss, lowest = float(scored.nats.mean()), float(least.mean())
    evidence = f"{len(least):,} random tokens cost {loss:.3f} nats each, their own distribution gives {lowest:.3f}"
    if not float(scored.nats.sum()) >= float(least.sum()) - _LUCK:
        return False, f"{evidence}: an honest scorer cannot go below it"
    assert scored.probabilities is not None
    drawn = tokens[positions + 1] != case.bos
    probs = np.delete(scored.probabilities[drawn], case.bos, axis=1)
    target = scored.probabilities[drawn, tokens[positions + 1][drawn]][:, None]
    rank = ((probs < target).sum(1) + 0.5 * (probs == target).sum(1)) / probs.shape[1]
    deviation = _DEVIATIONS / math.sqrt(12 * len(rank))
    evidence += f"; the true token ranks above {rank.mean():.3f} of all, by chance 0.500 ± {deviation:.3f}"
    return bool(rank.mean() <= 0.5 + deviation), evidence


def _ends(case: ProbeCase) -> Found | None:
    """Score random document ends: a scorer that is told the segments beforehand could predict them."""
    tokens, _, scored = case.noise
    ends = tokens[1:] == case.bos
    if scored.ends is None or not ends.any():
        return None
    no_end = np.log(np.maximum(-np.expm1(np.minimum(scored.ends, 0.0)), 1e-16))
    loss, lowest = float(-np.where(ends, scored.ends, no_end).sum()), float(case.noise_text.bos_or_not.sum())
    evidence = f"{int(ends.sum())} random document ends cost {loss:.1f} nats, their own distribution gives {lowest:.1f}"
    return loss >= lowest - _LUCK, evidence


def _past_matters(case: ProbeCase) -> Found:
    """Change tokens: losses or distributions of later tokens must change."""
    base, behind, moved, tokens = case.base, 0, 0, 0
    for change, scored in map(case.changed, (0, 2)):  # odd ones also change all that is scored later
        later = np.arange(len(base.nats)) >= change.changed[0]
        later[change.changed - 1] = False  # their losses are now of other tokens
        assert base.fingerprint is not None
        assert scored.fingerprint is not None
        differs = case.differ(base.fingerprint, scored.fingerprint)
        tokens, behind, moved = tokens + len(change.changed), behind + later.sum(), moved + (differs & later).sum()
    found = f"{tokens:,} tokens changed"
    if not moved:
        return False, f"{found}: none of {behind:,} later predictions changed; the scorer reads no text"
    return True, f"{found}: {moved:,} of {behind:,} later predictions changed"


def _sums(case: ProbeCase) -> Found:
    """Sum each distribution over the vocabulary, and compare the target's probability with its loss."""
    probs = case.base.probabilities
    assert probs is not None
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
    """Change every second document and compare the others, if documents are claimed to be isolated."""
    base = case.base
    if not base.isolated:
        return True, "not claimed: the whole text before a token is legal context here"
    document = np.cumsum(case.tokens == case.bos) - 1
    changed = np.flatnonzero((case.tokens != case.bos) & (document % 2 == 0))
    others = document[:-1] % 2 == 1
    moved = case.differ(base.nats, case.flip(changed).nats) & others
    figures = f"{int(moved.sum()):,} of {int(others.sum()):,}"
    evidence = f"every second document changed: {figures} losses in the others changed"
    if moved.any() and base.learns and not (moved & must_not_change(base, changed)).any():
        return True, f"{evidence}, by design: it learns from documents scored before"
    return not moved.any(), evidence


def _document_order(case: ProbeCase) -> Found:
    """Reverse the order of documents: the total loss may rise a little, but not change if documents are isolated.

    It may fall by any amount: a scorer that learns does better when a long document comes last, here the first one. A
    scorer that has memorized the order does worse in any other.
    """
    documents = np.split(case.tokens, np.flatnonzero(case.tokens == case.bos)[1:])
    reordered = np.concatenate(documents[::-1])
    other = case.open().score(reordered, case.positions)
    # Without BOS, because the last document has no prediction of its end.
    before = float(case.base.nats[case.tokens[1:] != case.bos].sum())
    after = float(other.nats[reordered[1:] != case.bos].sum())
    change = after / before - 1
    one_each = len(np.unique(case.base.segment)) == len(documents)
    evidence = f"documents in reverse order: the loss changes by {change:+.2%}, at most"
    if one_each and case.base.isolated and not case.base.learns:
        return bool(abs(change) <= _ISOLATED), f"{evidence} {_ISOLATED:.3%} is allowed"
    return bool(change <= _ORDER), f"{evidence} {_ORDER:+.2%} is allowed"


def _reads(case: ProbeCase) -> Found:
    """Report what the first scoring read."""
    if case.touched:
        return False, f"while it scored a text it {'; '.join(case.touched[:3])}"
    return True, "no other file, no network and no process while it scored a text"


# The text


def _bytes(case: ProbeCase) -> Found:
    """Count the bytes of texts by token, and compare with the bytes that the tokens decode to."""
    tokenizer, documents = case.artifact.tokenizer, [_SPACES, *case.documents]
    counted = actual = table = double = triple = marks = 0
    changed: list[tuple[bytes, bytes]] = []
    for document, ids in zip(documents, tokenizer.encode_many(documents), strict=True):
        text = tokenizer.decode(ids)
        counted += int(case.count(ids).sum())
        actual += len(text)
        table += tokenizer.table_bytes(np.append(np.uint16(tokenizer.bos), ids))
        pieces = [tokenizer.token_bytes[index] for index in ids.tolist()]
        double += sum(piece.startswith(b" ") for piece in pieces)
        triple += 2 * pieces.count(b" ")
        marks |= MARK.encode() in text and MARK.encode() not in document
        if text != document and document != _SPACES:
            changed.append((document, text))
    if counted != actual:
        cause = {double: "; a leading space is counted twice", triple: "; a space by itself is counted as three bytes"}
        return False, f"{actual:,} bytes of text are counted as {counted:,}{cause.get(counted - actual, '')}"
    if marks:
        return False, "a space decodes to the three bytes of U+2581: the tokenizer has no piece for it"
    evidence = f"{actual:,} bytes in {len(documents)} texts, by token as by decoding"
    if table != actual:
        evidence += f"; the contest's table would count {table:,}"
    passed, loss = check_loss(changed, sum(map(len, case.documents)))
    return passed, evidence + loss


def check_loss(changed: Sequence[tuple[bytes, bytes]], total: int, slack: int = _TEXT_BYTES) -> Found:
    """Check the loss of texts of `total` bytes; `changed` has (source, decoded text) of those that differ."""
    if not changed:
        return True, ""
    lossy = f"{len(changed)} documents do" if len(changed) > 1 else "1 document does"
    evidence = f"; lossy tokenizer: {lossy} not round-trip (the score counts the source's bytes)"
    sources, back = (b"".join(texts) for texts in zip(*changed, strict=True))
    lost = len(lzma.compress(back + sources)) - len(lzma.compress(back))  # for xz, which has seen the decoded text
    per_byte = f"{8 * lost / total:.3f} bits per byte beside the score to restore them"
    if lost <= _MOST_LOST / 8 * total + slack:
        return True, f"{evidence}; it takes some {per_byte}"
    other = f"and {_MOST_LOST} are allowed: this scores another text; SentencePieceBPE loses none"
    return False, f"{evidence}; it takes {per_byte}, {other}"


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
    LOOK_AHEAD: _look_ahead,
    FAR: _whole_text,
    DRAWN: _drawn,
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
    works = bool(checks) and bool(checks[0].passed)
    optional = _whole_text, _drawn, _ends, _held_out  # they do not apply to some texts
    expected = [name for name, probe in PROBES.items() if probe not in optional] if works else list(PROBES)[:2]
    return [name for name in expected if name not in {check.name for check in checks}]
