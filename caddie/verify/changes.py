"""Changes of a text that tell whether a scorer knew a token before it was scored.

A place is a token that is replaced, alone or with tokens after it. The distribution stated for it, and all that is
settled before it, must stay the same. Places are random: half of them uniform, half in proportion to the scorer's gain
there over the artifact's own model, because a leak that lowers the score gains somewhere.
"""

import math
from dataclasses import dataclass

import numpy as np

from caddie.data.tokenizers import Ids
from caddie.verify.black_box import Floats, Mask, Positions, ScoredText
from caddie.verify.own_model import Reference

GAIN = 0.005
"""Gain of a leak, in bits per byte, for which the probability of finding it is stated."""
DECIDES = 0.5
"""Least chance of finding a leak of `GAIN` in a user's scorer; with less, a search that finds none is inconclusive."""
_LONGEST = 3.5
"""Longest change, in windows."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A text with some tokens replaced."""

    tokens: Ids
    changed: Positions
    """Tokens that differ, sorted."""
    places: Positions
    """Tokens where a change begins: no token in the context of their own prediction was changed."""


def must_not_change(base: ScoredText, changed: Positions, own: int = 0) -> Mask:
    """Return the predictions that may not depend on the changed tokens; with `own=1` also those of changed ones.

    If windows or documents are independent, these are the predictions without a changed token in their context; if the
    scorer learns, only those up to the first step that scores a changed token. Otherwise they are all before that step
    and, in it, those of other segments or left of the changed tokens.
    """
    predictions, targets = np.arange(len(base.step)), changed - 1
    first = base.step[targets].min()
    if base.context is not None:
        before = np.concatenate([[0], np.cumsum(np.bincount(changed, minlength=len(predictions) + 1))])
        same = before[predictions + 2 - own] == before[base.context]
        return np.asarray(same & (base.step <= first) if base.learns else same)
    beside = base.step == first
    for target in targets[base.step[targets] == first]:
        beside &= (base.segment != base.segment[target]) | (predictions < target + own)
    return np.asarray((base.step < first) | beside)


def may_change_ends(base: ScoredText) -> bool:
    """True if BOS may be replaced or added: the text is one stretch to the scorer, which is told of no documents."""
    return not (base.ends_known or base.segment.any())


def chances(base: ScoredText, reference: Reference, tokens: Ids, bos: int) -> Floats:
    """Return each prediction's probability of being the first place of a change, (N - 1,)."""
    free = (tokens[1:] != bos) | may_change_ends(base)
    gain = np.where(free, np.maximum(reference.nats - base.nats, 0.0), 0.0)
    even = free / free.sum()
    drawn: Floats = 0.5 * even + 0.5 * (gain / gain.sum() if gain.sum() > 0 else even)
    return drawn


def found_with(base: ScoredText, reference: Reference, text_bytes: int, places: int) -> float:
    """Return the probability that `places` places find a leak that gains `GAIN` bits per byte of this text.

    Such a leak is a share of the scorer's total gain over the model itself. A place hits it with a probability of at
    least half that share: see `chances`.
    """
    most = float(np.maximum(reference.nats - base.nats, 0.0).sum())
    share = 0.5 * min(1.0, GAIN * math.log(2) * text_bytes / max(most, 1e-9))
    return float(1.0 - (1.0 - share) ** places)


def power(found: float, seconds: float, decides: bool) -> tuple[bool | None, str]:
    """Return None if a search that `decides` finds a leak of `GAIN` too rarely, else True; and its power in words."""
    percent = min(math.floor(1000 * found) / 10, 99.9)  # rounded down, and never a hundred
    said = f"a leak of {GAIN} bits per byte in this text is found with {percent:.1f} %"
    if found >= DECIDES or not decides:
        return True, said
    needed = seconds * math.log1p(-DECIDES) / math.log1p(-max(found, 1e-6))
    return None, f"{said}, too little to decide: set --audit-seconds={math.ceil(needed)} or so"


def draw_change(
    tokens: Ids,
    base: ScoredText,
    reference: Reference,
    uniform: Ids,
    bos: int,
    generator: np.random.Generator,
    all_later: bool = False,
) -> Change:
    """Draw as many places as one scoring can test; `uniform` (N,) has a random other token for each.

    A replaced token is a random one, the likeliest other one or one drawn from the model's distribution; half of the
    places are changed alone, the others to the end of their window or up to 3.5 windows on. A BOS is changed only as
    the first token of a change, and only if `chances` allow it; none is inserted. With `all_later`, all tokens that are
    scored in later steps are replaced too, wherever they stand, unless windows or documents are independent anyway.
    """
    predictions, weights = len(tokens) - 1, chances(base, reference, tokens, bos)
    ends = np.full(predictions, predictions)
    for window in base.windows:
        ends[window.first : window.end] = window.end
    longest = max((window.end - window.start for window in base.windows), default=predictions)
    with np.errstate(divide="ignore"):
        order = np.argsort(-np.log(generator.random(predictions)) / weights)[: int((weights > 0).sum())]
    kinds = generator.integers(3, size=predictions)
    lengths = generator.random(predictions)
    spans = np.where(lengths < 0.5, 1, ends - np.arange(predictions))
    spans = np.where(lengths < 0.9, spans, (lengths * 10 - 9) * _LONGEST * longest + 1).astype(np.int64)
    text, places, used = tokens.copy(), list[int](), set[int]()
    is_changed, is_context = np.zeros(len(tokens), np.bool_), np.zeros(len(tokens), np.bool_)
    one_step = base.context is None or base.learns
    for prediction in order.tolist():
        place, segment = prediction + 1, int(base.segment[prediction])
        end = min(place + int(spans[prediction]), len(tokens))
        if places and one_step and base.step[prediction] != base.step[places[0] - 1]:
            continue
        if base.context is not None:
            begin = int(base.context[prediction])
            if is_changed[begin:place].any() or is_context[place:end].any() or is_changed[place]:
                continue
            is_context[begin:place] = True
        else:
            if segment in used:
                continue
            end = min(end, int(np.searchsorted(base.segment, segment, side="right")) + 1)
            used.add(segment)
        where = np.arange(place, end)[tokens[place:end] != bos]
        text[where] = (uniform[where], reference.drawn[where - 1])[int(kinds[prediction] > 0)]
        where = np.union1d(where, place)
        text[place] = (uniform[place], reference.likely[prediction], reference.drawn[prediction])[kinds[prediction]]
        is_changed[where] = True
        places.append(place)
    if all_later and one_step:
        later = (base.step > base.step[places[0] - 1]) & (tokens[1:] != bos) & ~is_context[1:]
        where = np.flatnonzero(later) + 1
        text[where] = (uniform[where], reference.drawn[where - 1])[int(kinds[places[0] - 1] > 0)]
    return Change(tokens=text, changed=np.flatnonzero(text != tokens), places=np.sort(np.array(places)))
