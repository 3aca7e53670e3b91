"""Checks of a text alone: what a tokenizer loses of it, and whether it was trained on."""

import lzma
from collections.abc import Sequence

Found = tuple[bool | None, str]
"""Result of a check, None if it is not decided, and its evidence."""
_MOST_LOST = 0.1
"""Bits per byte that a lossy tokenizer may lose. The contest's lose 0.05 of FineWeb; lower case alone loses 0.34."""
_TEXT_BYTES = 16
"""Bytes allowed on top of `_MOST_LOST`, for what xz itself adds."""


def check_loss(changed: Sequence[tuple[bytes, bytes]], total: int, slack: int = _TEXT_BYTES) -> tuple[bool, str]:
    """Check the loss of texts of `total` bytes; `changed` has (source, decoded text) of those that differ."""
    if not changed:
        return True, ""
    lossy = f"{len(changed)} documents do" if len(changed) > 1 else "1 document does"
    evidence = f"; lossy tokenizer: {lossy} not round-trip (the score counts the source's bytes)"
    lost = _restoring_bytes(changed)
    per_byte = f"{8 * lost / total:.3f} bits per byte beside the score to restore them"
    if lost <= _MOST_LOST / 8 * total + slack:
        return True, f"{evidence}; it takes some {per_byte}"
    other = f"and {_MOST_LOST} are allowed: this scores another text; SentencePieceBPE loses none"
    return False, f"{evidence}; it takes {per_byte}, {other}"


def _restoring_bytes(changed: Sequence[tuple[bytes, bytes]]) -> int:
    """Return the bytes that xz needs for the sources, the first of each pair, once it has seen the decoded texts."""
    sources, back = (b"".join(texts) for texts in zip(*changed, strict=True))
    return len(lzma.compress(back + sources)) - len(lzma.compress(back))


def check_disjoint(trained_on: frozenset[bytes], held_out: frozenset[bytes]) -> Found:
    """Check that no held-out document is among the training documents, by their hashes."""
    both = len(trained_on & held_out)
    documents = f"{len(held_out):,} held-out documents, by their hashes, among {len(trained_on):,} training documents"
    return not both, f"{both or 'none'} of {documents}"
