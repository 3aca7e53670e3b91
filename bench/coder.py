"""Arithmetic coding: `caddie.inference.range_coder` against the library constriction, time and bytes, in one run.

python bench/coder.py

Both code the same symbols under the same weights, the library's as float64 and with one stream for all rows, which
suits it best. Times are with the making of the weights, and for our encoder with the search for logits that are close
to a border. Bytes are with the end of the stream and the luck of the draw, so they say something of many symbols only.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import constriction
import numpy as np
import numpy.typing as npt

from caddie.inference import range_coder as coder
from caddie.inference.range_coder import Decoder, Encoder

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
ROWS = 64


class Library:
    """Encoder and decoder of constriction behind the same methods."""

    def __init__(self, data: bytes | None = None, **options: Any) -> None:
        queue = constriction.stream.queue
        self.model = constriction.stream.model.Categorical(**options)
        self.stream = queue.RangeEncoder() if data is None else queue.RangeDecoder(np.frombuffer(data, np.uint32))

    def encode(self, symbols: Integers, logits: Floats) -> None:
        """Append the symbols."""
        for rows in coder._blocks(logits):
            self.stream.encode(symbols[rows].astype(np.int32), self.model, weights(logits[rows]))

    def decode(self, logits: Floats) -> Integers:
        """The next symbols."""
        blocks = [self.stream.decode(self.model, weights(logits[rows])) for rows in coder._blocks(logits)]
        return np.concatenate(blocks)

    def finish(self) -> bytes:
        """The stream."""
        return bytes(self.stream.get_compressed().tobytes())


def weights(logits: Floats) -> Floats:
    """The integers of `caddie.inference.range_coder`, without their sums."""
    steps = np.floor(coder._places(logits))
    below = (steps.max(axis=1, keepdims=True) - steps).astype(np.intp)
    return coder._weights().take(below, mode="clip").astype(np.float64)


def drawn(rng: np.random.Generator, vocabulary: int) -> tuple[Integers, Floats, float]:
    """Symbols under odds as a language model gives, the logits, and their ideal cost in nats."""
    logits = -1.4 * np.log(rng.permuted(np.tile(np.arange(1, vocabulary + 1.0), (ROWS, 1)), axis=1))
    logits += rng.normal(0, 2, (ROWS, vocabulary))
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    odds /= odds.sum(axis=1, keepdims=True)
    symbols = (odds.cumsum(axis=1) < rng.random((ROWS, 1))).sum(axis=1).clip(max=vocabulary - 1)
    return symbols, logits, -float(np.log(odds[np.arange(ROWS), symbols]).sum())


def compare(vocabulary: int, steps: int, variants: dict[str, dict[str, Any] | None]) -> None:
    """Print a table of time and bytes for some coders, the first of which is the measure."""
    rng = np.random.default_rng(0)
    make: dict[str, Callable[..., Any]] = {
        name: (Encoder if options is None else lambda options=options: Library(**options))
        for name, options in variants.items()
    }
    encoders = {name: make[name]() for name in make}
    took = {(name, way): 0.0 for name in make for way in ("encode", "decode")}
    nats = 0.0
    parts = []
    for _ in range(steps):
        symbols, logits, cost = drawn(rng, vocabulary)
        parts.append((symbols, logits))
        nats += cost
        for name, encoder in encoders.items():
            begin = time.perf_counter()
            encoder.encode(symbols, logits)
            took[name, "encode"] += time.perf_counter() - begin
    data = {name: encoder.finish() for name, encoder in encoders.items()}
    for name, options in variants.items():
        decoder = Decoder(data[name]) if options is None else Library(data[name], **options)
        for symbols, logits in parts:
            begin = time.perf_counter()
            found = decoder.decode(logits)
            took[name, "decode"] += time.perf_counter() - begin
            assert np.array_equal(found, symbols)
    print(f"{vocabulary:,} symbols in the vocabulary, {steps * ROWS:,} coded, {nats / steps / ROWS:.2f} nats each")
    first = next(iter(variants))
    for name in variants:
        times = " ".join(
            f"{way} {1e6 * took[name, way] / steps / ROWS:7.1f} us (x {took[name, way] / took[first, way]:6.2f}),"
            for way in ("encode", "decode")
        )
        over = len(data[name]) / (nats / math.log(256)) - 1
        print(f"  {name:22} {times} {len(data[name]):7,} bytes, {100 * over:+.4f} %")


def main() -> None:
    """Print the tables."""
    fast = {"caddie": None, "constriction, lazy": {"perfect": False}}
    compare(1_024, 1_024, fast)
    compare(8_192, 128, fast)
    compare(65_536, 16, fast)
    compare(1_024, 8, {**fast, "constriction, perfect": {"perfect": True}})


if __name__ == "__main__":
    main()
