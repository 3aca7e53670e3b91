"""CaseOps: text whose capitals are marks before small letters, so that "The", "THE" and "the" share their pieces.

Four private-use characters are the marks. A word, that is a longest run of ASCII letters, begins with TITLE where its
first letter is a capital, or with ALLCAPS where all of two or more are; any other capital follows a CAPNEXT. ESC stands
before a mark that is itself in the text. Letters beyond ASCII stay as they are.

It works on bytes and takes any: neither an ASCII letter nor a mark can begin inside another character of UTF-8.
After the "lossless caps" transform of the contest's records (#1729), whose strings and byte counts it reproduces.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from caddie.errors import UserError

SYMBOLS = ("\ue001", "\ue002", "\ue003", "\ue004")
"""TITLE, ALLCAPS, CAPNEXT and ESC."""
TITLE, ALLCAPS, CAPNEXT, ESC = (symbol.encode() for symbol in SYMBOLS)

_MARK = rb"\xee\x80[\x81-\x84]"
_CAPITAL = re.compile(rb"[A-Z]")
_PLAIN = re.compile(rb"(?<![A-Za-z])[a-z]*+[A-Z][A-Za-z]*|%b" % _MARK)  # what `encode` rewrites
_CODED = re.compile(  # what `decode` rewrites
    rb"%(esc)b(%(mark)b)|%(allcaps)b((?:(?:%(capnext)b)?[A-Za-z])++)|(?:%(title)b|%(capnext)b)([A-Za-z])|%(mark)b"
    % {b"esc": ESC, b"mark": _MARK, b"allcaps": ALLCAPS, b"title": TITLE, b"capnext": CAPNEXT}
)
_STRAY = re.compile(  # its group is a mark that nothing follows which it could apply to
    rb"%(esc)b%(mark)b|(?<![A-Za-z])(?:%(title)b|%(allcaps)b)(?=[A-Za-z])|%(capnext)b(?=[A-Za-z])|(%(mark)b)"
    % {b"esc": ESC, b"mark": _MARK, b"allcaps": ALLCAPS, b"title": TITLE, b"capnext": CAPNEXT}
)
_UNCOUNTED = re.compile(rb"(?:%b)?%b" % (ESC, _MARK))  # its first three bytes stand for nothing


def encode(text: bytes) -> bytes:
    """The text with marks in place of its capitals; `decode` gives back every byte."""
    return _PLAIN.sub(lambda match: _marked(match[0]), text)


def decode(encoded: bytes, *, strict: bool = True) -> bytes:
    """The text that `encode` was given.

    A mark that cannot come from `encode`, because nothing that it applies to follows or because it would begin a word
    in the middle, is a `UserError`; unless `strict`, it applies to what letters follow, and else vanishes.
    """
    if strict:
        _check(encoded)
    return _CODED.sub(_unmarked, encoded)


def byte_lengths(pieces: Sequence[bytes], *, strict: bool = True) -> npt.NDArray[np.int64]:
    """Bytes of the text that each piece of the encoded text stands for, int64; their sum is the length of the text.

    Marks count nothing, except after ESC. Pieces may cut the encoded text anywhere; a mark that is cut counts byte by
    byte. `strict` is as in `decode`.
    """
    encoded = b"".join(pieces)
    if strict:
        _check(encoded)
    counted = np.ones(len(encoded), np.bool_)
    uncounted = np.array([match.start() for match in _UNCOUNTED.finditer(encoded)], np.int64)
    counted[uncounted[:, None] + np.arange(3)] = False
    before = np.concatenate([[0], np.cumsum(counted, dtype=np.int64)])
    ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
    return np.diff(before[ends], prepend=0)


def _marked(found: bytes) -> bytes:
    """A mark, or a word with a capital, as `encode` writes it."""
    if not found.isalpha():
        return ESC + found
    if len(found) > 1 and found.isupper():
        return ALLCAPS + found.lower()
    first = TITLE + found[:1].lower() if found[:1].isupper() else found[:1]
    return first + _CAPITAL.sub(lambda capital: CAPNEXT + capital[0].lower(), found[1:])


def _unmarked(match: re.Match[bytes]) -> bytes:
    literal, word, letter = match.groups(b"")
    return literal or (word or letter).replace(CAPNEXT, b"").upper()


def _check(encoded: bytes) -> None:
    stray = next((match for match in _STRAY.finditer(encoded) if match[1]), None)
    if stray:
        name = ("TITLE", "ALLCAPS", "CAPNEXT", "ESC")[SYMBOLS.index(stray[1].decode())]
        raise UserError(f"not text that CaseOps has encoded: a stray {name} mark at byte {stray.start():,}")
