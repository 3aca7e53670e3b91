"""CaseOps: write capitals as marks before small letters, so that "The", "THE" and "the" share their pieces.

The marks are four private-use characters. A word, a longest run of ASCII letters, begins with TITLE if its first letter
is a capital, or with ALLCAPS if all of two or more are; CAPNEXT precedes any other capital, and ESC a mark that is part
of the text. Letters beyond ASCII are unchanged.

The transform accepts any bytes: neither an ASCII letter nor a mark can begin inside another character of UTF-8. Strings
and byte counts are those of the "lossless caps" transform of the contest's records (#1729).
"""

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

SYMBOLS = ("\ue001", "\ue002", "\ue003", "\ue004")
"""TITLE, ALLCAPS, CAPNEXT and ESC."""
TITLE, ALLCAPS, CAPNEXT, ESC = (symbol.encode() for symbol in SYMBOLS)

_MARK = rb"\xee\x80[\x81-\x84]"
_CAPITAL = re.compile(rb"[A-Z]")
_PLAIN = re.compile(rb"(?<![A-Za-z])[a-z]*+[A-Z][A-Za-z]*|%b" % _MARK)  # rewritten by `encode`
_CODED = re.compile(  # rewritten by `decode`
    rb"%(esc)b(%(mark)b)|%(allcaps)b((?:(?:%(capnext)b)?[A-Za-z])++)|(?:%(title)b|%(capnext)b)([A-Za-z])|%(mark)b"
    % {b"esc": ESC, b"mark": _MARK, b"allcaps": ALLCAPS, b"title": TITLE, b"capnext": CAPNEXT}
)
_UNCOUNTED = re.compile(rb"(?:%b)?%b" % (ESC, _MARK))  # its first three bytes are no text


def encode(text: bytes) -> bytes:
    """Return the text with marks in place of its capitals; `decode` restores every byte."""
    return _PLAIN.sub(lambda match: _marked(match[0]), text)


def decode(encoded: bytes) -> bytes:
    """Return the text that was encoded; a mark that `encode` cannot have written applies to the letters after it."""
    return _CODED.sub(_unmarked, encoded)


def byte_lengths(pieces: Sequence[bytes]) -> npt.NDArray[np.int64]:
    """Return the bytes of text of each piece of encoded text, int64 (pieces,); their sum is the length of the text.

    Marks count 0 bytes, except after ESC. Pieces may end anywhere, even within a mark.
    """
    encoded = b"".join(pieces)
    counted = np.ones(len(encoded), np.bool_)
    uncounted = np.array([match.start() for match in _UNCOUNTED.finditer(encoded)], np.int64)
    counted[uncounted[:, None] + np.arange(3)] = False
    before = np.concatenate([[0], np.cumsum(counted, dtype=np.int64)])
    ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
    return np.diff(before[ends], prepend=0)


def _marked(word: bytes) -> bytes:
    """Encode a mark, or a word with a capital."""
    if not word.isalpha():
        return ESC + word
    if len(word) > 1 and word.isupper():
        return ALLCAPS + word.lower()
    first = TITLE + word[:1].lower() if word[:1].isupper() else word[:1]
    return first + _CAPITAL.sub(lambda capital: CAPNEXT + capital[0].lower(), word[1:])


def _unmarked(match: re.Match[bytes]) -> bytes:
    literal, word, letter = match.groups(b"")
    return literal or (word or letter).replace(CAPNEXT, b"").upper()
