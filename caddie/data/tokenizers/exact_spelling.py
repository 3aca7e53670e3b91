"""Encode any bytes losslessly, even with a tokenizer that normalizes text, as the contest's models do."""

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise

import numpy as np

from caddie.data.tokenizers import CaseOpsTokenizer, Ids, Tokenizer, caseops
from caddie.errors import UserError

# Words with one space between them, or white space that is not part of such a run.
_STRETCH = re.compile(rb" ?\S+(?: \S+)*|\s+?(?= ?\S|\Z)")
_WORD = re.compile(rb" ?\S+|\s+")


def exact_ids(tokenizer: Tokenizer, data: bytes) -> Ids:
    """Return ids, uint16 without BOS, that `tokenizer.decode` turns into exactly `data`, taken as one document.

    A stretch of text keeps the tokenizer's own ids if they reproduce it. In other stretches a word gets the ids that
    the tokenizer gives it elsewhere, or else the longest pieces that match, if need be single bytes. Raises `UserError`
    for a tokenizer without an id for some byte.
    """
    ids = tokenizer.encode(data)
    if tokenizer.decode(ids) == data:
        return ids
    if isinstance(tokenizer, CaseOpsTokenizer):
        return exact_ids(tokenizer.of, caseops.encode(data))
    stretches = _STRETCH.findall(data)
    own = dict(zip(distinct := list(dict.fromkeys(stretches)), tokenizer.encode_many(distinct), strict=True))
    words = {word: part for ids in own.values() for word, part in _words(tokenizer, ids)}
    # If pieces have the same bytes the last one wins: byte ids come first.
    pieces = {piece: index for index, piece in enumerate(tokenizer.token_bytes) if piece}
    longest = max(map(len, pieces), default=0)
    for stretch, ids in own.items():
        if tokenizer.decode(ids) != stretch:
            for word in _WORD.findall(stretch):
                if word not in words:
                    words[word] = np.array(list(_spelled(word, pieces, longest)), np.uint16)
            own[stretch] = np.concatenate([words[word] for word in _WORD.findall(stretch)])
    ids = np.concatenate([own[stretch] for stretch in stretches])
    if tokenizer.decode(ids) != data:
        raise UserError("this tokenizer's pieces do not give back the bytes that they stand for; use another model")
    return ids


def _words(tokenizer: Tokenizer, ids: Ids) -> Iterator[tuple[bytes, Ids]]:
    """Yield bytes and ids of the parts of an encoded text; each part but the first begins with a space."""
    pieces = [tokenizer.token_bytes[index] for index in ids.tolist()]
    starts = [0, *(place for place, piece in enumerate(pieces) if place and piece[:1] == b" "), len(pieces)]
    for start, end in pairwise(starts):
        yield b"".join(pieces[start:end]), ids[start:end]


def _spelled(data: bytes, pieces: Mapping[bytes, int], longest: int) -> Iterator[int]:
    """Yield the ids of the longest pieces that match, from left to right."""
    start = 0
    while start < len(data):
        ends = range(min(start + longest, len(data)), start, -1)
        end = next((end for end in ends if data[start:end] in pieces), None)
        if end is None:
            raise UserError(f"this tokenizer has no id for the byte {data[start]:#04x}; use a model with byte ids")
        yield pieces[data[start:end]]
        start = end
