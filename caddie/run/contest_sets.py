"""Totals of the contest's validation sets, to tell whether a text is one of them, a part of one, or another text.

Only totals can be compared, because no hash of the texts was published. Bytes are known to about 10 kB, from the losses
and bits per byte in merged logs. Tokens are the predictions in those logs, cut to whole sequences of up to 2,048, so a
file holds up to 2,048 tokens more.
"""

from dataclasses import dataclass

_BYTES_KNOWN_TO = 10_000


@dataclass(frozen=True)
class OfficialSet:
    """A validation set of the contest."""

    name: str
    documents: int | None
    """None where it was not published."""
    bytes: int
    """Bytes of the text, known to about 10 kB."""
    tokens: dict[str, int]
    """Predictions by tokenizer, whose name ends with its vocabulary size."""

    def fits(self, bytes_: int, documents: int) -> bool:
        """Return True if a text of so many bytes and documents can be this set."""
        return abs(bytes_ - self.bytes) <= _BYTES_KNOWN_TO and documents == (self.documents or documents)


CURRENT = OfficialSet(
    name="the contest's validation set",
    documents=50_000,
    bytes=151_080_000,
    tokens={"SP 1024": 62_021_632, "SP 4096": 45_508_608, "SP 8192": 40_540_160, "CaseOps 8192": 47_851_520},
)
"""Validation set of every record but the first. Public counts, not repeated here, agree on 151,080,645 bytes of text
(#1578) and on 151,080,891 after the normalization of the SentencePiece models (#1314)."""
FIRST = OfficialSet(
    name="the contest's first validation set, which no later result was scored on",
    documents=None,
    bytes=155_770_000,
    tokens={"SP 1024": 63_779_840},
)
"""Validation set of the baseline's published 1.2244 (#837)."""


def identify(tokens: int, bytes_: int, documents: int, vocabulary: int) -> str | None:
    """Return one sentence if a text can be an official validation set, or part of one, by its totals; else None.

    `tokens` include the BOS of every document, `bytes_` are those of the text, and `vocabulary` is the number of ids.
    """
    for known in (CURRENT, FIRST):
        if known.fits(bytes_, documents):
            held = [name for name, count in known.tokens.items() if 0 <= tokens - count <= 2_048]
            names = [name for name in held if name.endswith(f" {vocabulary}")]
            under = f"tokenized by {names[0]}" if names else "under another tokenizer"
            size = f"{known.bytes / 1e6:,.2f} MB known to {_BYTES_KNOWN_TO / 1e3:.0f} kB"
            totals = f"{known.documents:,} documents, {size}" if known.documents else size
            return f"By its totals this is {known.name}, {under}: {totals}."
    for name, count in CURRENT.tokens.items():
        # Below 1 % of the bytes, any text may have these bytes per token by chance.
        smaller = documents < (CURRENT.documents or 0) and 0.01 * CURRENT.bytes <= bytes_ < CURRENT.bytes
        whole = CURRENT.bytes * tokens  # beside count * bytes_: bytes per token within 10 % of the whole's
        if name.endswith(f" {vocabulary}") and smaller and abs(count * bytes_ - whole) <= 0.1 * whole:
            return (
                f"By its totals this may be a part of {CURRENT.name}, {bytes_ / CURRENT.bytes:.1%} of its bytes, and is"
                " not the whole: its score compares with no official one."
            )
    return None
