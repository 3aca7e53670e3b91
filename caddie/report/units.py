"""Bits per byte, nats per byte, nats per token: the cost of a text in three units, and conversions between them.

Each is the same sum of nats (minus the natural logarithm of every token's probability), divided by another length. Bits
per byte compares models of any tokenizer; nats per token is a training script's loss and depends on the tokenizer.
"""

import math
from typing import Literal, get_args

Unit = Literal["bits-per-byte", "nats-per-byte", "nats-per-token"]
"""Unit of a cost."""
UNITS: tuple[Unit, ...] = get_args(Unit)


def bits_per_byte(nats: float, source_bytes: int) -> float:
    """nats / ln 2 / bytes."""
    return nats / math.log(2) / source_bytes


def nats_per_byte(nats: float, source_bytes: int) -> float:
    """nats / bytes, which is bits per byte * ln 2."""
    return nats / source_bytes


def nats_per_token(nats: float, tokens: int) -> float:
    """nats / tokens, which is bits per byte * ln 2 * bytes / tokens."""
    return nats / tokens


def whole_bytes(nats: float) -> float:
    """nats / ln 2 / 8: bytes that an ideal compressor needs for a text of that cost."""
    return nats / math.log(2) / 8


def convert(cost: float, unit: Unit, to: Unit, *, tokens: int, source_bytes: int) -> float:
    """Convert a cost, or a difference of costs, of a text with this many scored tokens and source bytes.

    cost * (nats of the whole text per `unit`) / (nats of the whole text per `to`).
    """
    nats = {"bits-per-byte": math.log(2) * source_bytes, "nats-per-byte": source_bytes, "nats-per-token": tokens}
    return cost if unit == to else cost * nats[unit] / nats[to]
