"""Round-trip audit: list the rules by which a tokenizer changes text, each with an example and its bytes.

Every character of a document is decoded on its own. Where this and the rules of spaces predict the decoded document,
changed bytes are attributed to rules exactly; the rest goes to "other".
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from caddie.data.tokenizers import MARK, Ids, Tokenizer

_FRONT, _LEADING, _REPEATED, _TRAILING = "space put in front", "leading spaces", "repeated spaces", "trailing spaces"
_COMPATIBLE, _UNKNOWN, _OTHER = "other compatibility characters", "characters without a piece", "other"
_NAMED = {
    **dict.fromkeys("\n\r\x85\u2028\u2029", "line breaks"),
    **{"\t": "tabs", "\0": "NUL", MARK: "SentencePiece's mark", "\ufffd": "replacement characters"},
    **{"Zs": "spaces beyond ASCII", "Cf": "zero-width characters", "Cc": "control characters"},
    **{"Co": "private-use characters", "Cs": "bytes that are not UTF-8", "<fraction>": "fractions"},
    **dict.fromkeys(("<super>", "<sub>"), "superscripts and subscripts"),
    **dict.fromkeys(("<wide>", "<narrow>"), "full and half width"),
}
"""Rule by character, by Unicode category, or by the tag of a Unicode decomposition."""
_EXAMPLES: dict[str, tuple[str, ...]] = {
    _FRONT: ("a",),
    _LEADING: (" a",),
    _REPEATED: ("a  b",),
    _TRAILING: ("a ",),
    "line breaks": ("a\nb", "a\r\nb", "a\u2028b", "a\x85b"),
    "tabs": ("a\tb",),
    "spaces beyond ASCII": ("a\xa0b", "a\u3000b"),
    "zero-width characters": ("a\u200bb", "a\ufeffb", "a\u200db", "a\xadb"),
    "NUL": ("a\x00b",),
    "control characters": ("a\x07b",),
    "SentencePiece's mark": ("a\u2581b",),
    "private-use characters": ("a\ue001b",),
    "replacement characters": ("a\ufffdb",),
    "bytes that are not UTF-8": ("a\udcffb",),
    "canonical equivalents": ("e\u0301", "\xe9"),
    "ligatures": ("\ufb01ne", "\u0133"),
    "fractions": ("\xbd",),
    "superscripts and subscripts": ("x\xb2", "\u2122"),
    "full and half width": ("\uff11", "\uff76\uff9e"),
    _COMPATIBLE: ("\u2026", "\u2460"),
    "capitals": ("Ab",),
    _UNKNOWN: ("\xf8", "\u4e2d", "\U0001f600"),
}
"""Rule by which a tokenizer may change text to texts that it would change; the audit has this order."""
_SURROGATES = "\udc80-\udcff"  # bytes that are not UTF-8, from surrogateescape


@dataclass(frozen=True)
class Rule:
    """One way to change text, and a tokenizer's changes by it."""

    name: str
    before: bytes
    """An example."""
    after: bytes
    """The same after encoding and decoding."""
    lost_bytes: int = 0
    """Bytes of the documents that were replaced or dropped."""
    net_bytes: int = 0
    """Bytes by which the documents became shorter; below 0 where they became longer."""

    @property
    def lossy(self) -> bool:
        """True if the tokenizer changes text by this rule."""
        return self.before != self.after

    def to_json(self) -> dict[str, object]:
        """Return the rule as JSON values."""
        shown = {name: getattr(self, name).decode(errors="backslashreplace") for name in ("before", "after")}
        return asdict(self) | shown

    def __str__(self) -> str:
        """Return one line: the example and the bytes lost."""
        line = f"{self.name}: {_shown(self.before)} comes back as {_shown(self.after)}"
        if self.lost_bytes or self.net_bytes:
            line += f"; {self.lost_bytes:,} bytes lost, {-self.net_bytes:+,} in length"
        return line


def audit(tokenizer: Tokenizer, documents: Iterable[bytes] = (), encoded: Sequence[Ids] | None = None) -> list[Rule]:
    """Return every rule in a fixed order, `lossy` or not, and last "other" if documents change in other ways.

    `encoded` are the ids of the documents, if they are known already. The `net_bytes` of all rules sum to the length of
    the documents minus the length of the decoded documents. In each document, "other" has all bytes from the first to
    the last difference that no rule predicts.
    """
    documents = list(documents)
    decoded = map(tokenizer.decode, tokenizer.encode_many(documents) if encoded is None else encoded)
    changed = [(_text(a), _text(b)) for a, b in zip(documents, decoded, strict=True) if a != b]
    behavior = _Behavior(tokenizer, {unit for before, _ in changed for unit in _units(before)})
    seen: dict[str, list[tuple[bytes, bytes]]] = {}
    for before, after in changed:
        for name, a, b in _changes(before, after, behavior):
            seen.setdefault(name, []).append((_bytes(a), _bytes(b)))
    rules = []
    for name, examples in [*_EXAMPLES.items(), *([(_OTHER, ())] if _OTHER in seen else [])]:
        tried = list(map(_bytes, examples))
        front = b"" if name == _FRONT else _bytes(behavior.front)
        pairs = [(a, b.removeprefix(front)) for a, b in zip(tried, _round_trip(tokenizer, tried), strict=True)]
        found = seen.get(name, [])
        shown = next((pair for pair in pairs if pair[0] != pair[1]), [*found[:1], *pairs][0])
        before_bytes, after_bytes = (sum(len(pair[side]) for pair in found) for side in (0, 1))
        rules.append(Rule(name, *shown, before_bytes, before_bytes - after_bytes))
    return rules


class _Behavior:
    """A tokenizer's observed treatment of spaces, and of characters one by one."""

    def __init__(self, tokenizer: Tokenizer, units: Iterable[str]) -> None:
        distinct = sorted(units)
        tries = ["q", " q", "q  q", "q ", *(f"q{unit}q" for unit in distinct)]  # q combines with no accent
        alone, leading, repeated, trailing, *backs = map(_text, _round_trip(tokenizer, map(_bytes, tries)))
        self.front = alone.removesuffix("q")
        self.drops_leading, self.drops_trailing = leading == alone, trailing == alone
        self.drops_repeated = repeated == f"{alone} q"
        self.images = {
            unit: back[len(alone) : -1] if back.startswith(alone) and back.endswith("q") else unit
            for unit, back in zip(distinct, backs, strict=True)
        }

    def outputs(self, units: Sequence[str]) -> list[str]:
        """Predict the decoded text of each unit of a document."""
        outputs, drops = [], self.drops_leading
        for unit in units:
            outputs.append(image := self.images[unit].lstrip(" " if drops else ""))
            if image:
                drops = self.drops_repeated and image[-1] == " "
        for index in range(len(outputs) - 1, -1, -1) if self.drops_trailing else ():
            outputs[index] = outputs[index].rstrip(" ")
            if outputs[index]:
                break
        return outputs


def _changes(before: str, after: str, behavior: _Behavior) -> Iterator[tuple[str, str, str]]:
    """Yield rule, text before and text after of every change in a document."""
    units = _units(before)
    outputs = behavior.outputs(units)
    filled = [index for index, output in enumerate(outputs) if output]
    nothing = len(units) if behavior.drops_leading else -1
    first, last = (filled[0], filled[-1]) if filled else (nothing, nothing)
    predicted = behavior.front + "".join(outputs)
    begins = _common_prefix(predicted, after)
    ends = len(predicted) - _common_prefix(predicted[begins:][::-1], after[begins:][::-1])
    place, unexplained = 0, ""
    for index, (unit, output) in enumerate(zip(["", *units], [behavior.front, *outputs], strict=True), -1):
        here, place = place, place + len(output)
        if place > begins and here < ends:
            unexplained, begins, ends = unexplained + unit, min(begins, here), max(ends, place)
        elif unit != output:
            yield _name(unit, behavior.images.get(unit, ""), (index > last) - (index < first)), unit, output
    if predicted != after:
        yield _OTHER, unexplained, after[begins : len(after) - len(predicted) + ends]


def _name(unit: str, image: str, side: int) -> str:
    """Return the rule of a unit's change; `side` is -1 before all text that is kept, 1 after it and else 0."""
    if unit == "":
        return _FRONT
    if unit == " ":
        return (_REPEATED, _TRAILING, _LEADING)[side]
    if rule := _NAMED.get(unit[0]) or _NAMED.get(unicodedata.category(unit[0])):
        return rule
    if unicodedata.normalize("NFC", unit) == unicodedata.normalize("NFC", image):
        return "canonical equivalents"
    if unicodedata.normalize("NFKC", unit) == unicodedata.normalize("NFKC", image):
        ligature = "ligatures" if "LIGATURE" in unicodedata.name(unit[0], "") else _COMPATIBLE
        return _NAMED.get(unicodedata.decomposition(unit[0]).partition(" ")[0], ligature)
    return "capitals" if unit.casefold() == image.casefold() else _UNKNOWN


def _units(text: str) -> list[str]:
    """Return the characters, each with its accents; bytes that are not UTF-8 stay together."""
    accents = "".join(
        c for c in set(text) if unicodedata.category(c)[0] == "M" or "\u1160" <= c <= "\u11ff" or c in "\uff9e\uff9f"
    )
    accented = f"[^ {accents}{_SURROGATES}]?[{accents}]+|" if accents else ""
    return re.findall(f"{accented}[{_SURROGATES}]+|.", text, re.DOTALL)


def _common_prefix(a: str, b: str) -> int:
    """Return the length of the common prefix of two texts."""
    if a == b:
        return len(a)
    return next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _round_trip(tokenizer: Tokenizer, documents: Iterable[bytes]) -> list[bytes]:
    return [tokenizer.decode(ids) for ids in tokenizer.encode_many(list(documents))]


def _text(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def _shown(data: bytes) -> str:
    text = _text(data)
    if re.search(f"[{_SURROGATES}]", text):
        return repr(data)
    return "".join(ascii(c)[1:-1] if unicodedata.category(c)[0] == "M" else c for c in repr(text))
