"""Rate by lattices and trellises on a Gaussian source, at equal entropy.

    python bench/gaussian_source.py [--count N]

Rounding to the nearest step and an entropy coder need a quarter of a bit more than theory (1.53 dB). Trellis-coded
quantization has steps of half the size, of which only even or only odd ones may be used, as a machine of a few states
says that the integers before have moved (M. W. Marcellin and T. R. Fischer, IEEE Trans. Communications 38(1), 1990;
with an entropy coder T. R. Fischer and M. Wang, IEEE Trans. Information Theory 38(1), 1992; the machines are codes of
rate 1/2 by G. Ungerboeck, IEEE Trans. Information Theory 28(1), 1982, table I). An integer costs the bits of a whole
step; the best path, found by Viterbi's algorithm, has smaller errors. E8 is the lattice of eight dimensions (J. H.
Conway and N. J. A. Sloane, IEEE Trans. Information Theory 28(2), 1982), its points coded by their entries' frequencies.

The table says by how many dB the mean squared error is below that of rounding with as many bits. A slope weighs the
bits of each choice; 1 is what the entropy implies.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from caddie.report.tables import table

Floats = npt.NDArray[np.float32]
Array = npt.NDArray[Any]

CHECKS = {4: (0o5, 0o2), 8: (0o13, 0o4), 16: (0o23, 0o4), 32: (0o45, 0o10), 64: (0o103, 0o24)}
"""Parity checks of the codes by their number of states."""
CHAIN = 256
"""Integers that follow one another."""
_REMAINDERS = np.arange(4, dtype=np.float32)[:, None, None]


class Machine(NamedTuple):
    """States, whose lowest bit is the parity of the next integer, and branches, which are remainders of four."""

    followers: Array
    """State after an integer, by the state before and the integer's second bit, (states, 2)."""
    before: Array
    """The two states before each, (states, 2)."""
    branches: Array
    """Remainder of four of the integer that leads from there, (states, 2)."""


@cache
def machine(states: int) -> Machine:
    """The machine of a code."""
    first, second = CHECKS[states]
    numbers, bits = np.arange(states)[:, None], np.arange(2)
    followers = (numbers >> 1) ^ (first >> 1) * (numbers & 1) ^ (second >> 1) * bits
    into: list[list[tuple[int, int]]] = [[] for _ in range(states)]
    for (state, bit), after in np.ndenumerate(followers):
        into[after].append((state, (state & 1) + 2 * bit))
    both = np.array(into)
    return Machine(followers, both[..., 0], both[..., 1])


def best_path(costs: Floats, states: int = 8) -> Array:
    """The cheapest branches of chains, (length, chains), by costs (length, 4, chains), from state 0 on."""
    _, before, branches = machine(states)
    length, _, chains = costs.shape
    so_far = np.full((states, chains), np.float32(1e9))
    so_far[0] = 0
    second = np.empty((length, states, chains), np.int8)
    for place, here in enumerate(costs):
        both = so_far[before] + here[branches]
        np.less(both[:, 1], both[:, 0], out=second[place].view(bool))
        so_far = np.minimum(both[:, 0], both[:, 1])
    state, every = so_far.argmin(0), np.arange(chains)
    found = np.empty((length, chains), np.int64)
    for place in range(length - 1, -1, -1):
        taken = second[place, state, every]
        found[place] = branches[state, taken]
        state = before[state, taken]
    return found


def entropy(integers: Array, odd: Array) -> tuple[float, Floats]:
    """Bits of an integer whose parity is known, and of each magnitude by parity, (2, 256)."""
    lengths, total = np.full((2, 256), np.float32(30)), 0.0
    for parity in (0, 1):
        magnitudes = np.abs(integers[odd == parity])
        if magnitudes.size:
            counts = np.bincount(np.minimum(magnitudes, 255), minlength=256) + 1e-3
            counts[1:] /= 2
            lengths[parity] = -np.log2(counts / (2 * counts.sum() - counts[0]))
            total += float(lengths[parity][np.minimum(magnitudes, 255)].sum())
    return total / integers.size, lengths


def trellis_of_source(source: Floats, step: float, states: int, slope: float) -> tuple[float, float]:
    """Bits and squared error of chains (length, chains) of one trellis each."""
    lengths, error, price = np.zeros((2, 256), np.float32), 0.0, 0.0
    for _ in range(4 if slope else 1):
        near = source[None] / step
        near = 4 * np.rint((near - _REMAINDERS) / 4) + _REMAINDERS
        smaller = near - 4 * np.sign(near)
        odd = np.arange(4)[:, None, None] % 2

        def cost(integers: Floats) -> Floats:
            found = np.minimum(np.abs(integers), 255).astype(np.int64)
            return (source / step - integers) ** 2 + price * lengths[odd, found]  # noqa: B023

        theirs, costs = cost(smaller), cost(near)
        near, costs = np.where(theirs < costs, smaller, near), np.minimum(theirs, costs)
        taken = best_path(np.ascontiguousarray(costs.transpose(1, 0, 2), np.float32), states)
        integers = np.take_along_axis(near, taken[None], 0)[0].astype(np.int64)
        bits, lengths = entropy(integers, taken % 2)
        error = float(((source - integers * step) ** 2).mean())
        price = slope * 2 * math.log(2) * error / step**2
    return bits, error


def e8_of_source(source: Floats, step: float) -> tuple[float, float]:
    """Bits and squared error of vectors of eight in E8: D8, entries with an even sum, and D8 moved by halves."""
    vectors = source.reshape(-1, 8) / step

    def nearest(points: Floats) -> Floats:
        found = np.rint(points)
        apart = points - found
        worst, every = np.abs(apart).argmax(1), np.arange(len(points))
        other = found.copy()
        other[every, worst] += np.where(apart[every, worst] >= 0, 1, -1)
        return np.where((found.sum(1) % 2 != 0)[:, None], other, found)

    whole, halves = nearest(vectors), nearest(vectors - 0.5) + 0.5
    moved = ((vectors - halves) ** 2).sum(1) < ((vectors - whole) ** 2).sum(1)
    points, bits = np.where(moved[:, None], halves, whole), 0.0
    for coset in (False, True):
        entries = np.rint(points[moved == coset] - 0.5 * coset).astype(np.int64)
        if len(entries):
            values, counts = np.unique(entries, return_counts=True)
            shares = counts / counts.sum()
            even = 0.5 * (1 + (shares[values % 2 == 0].sum() - shares[values % 2 != 0].sum()) ** 8)
            each = -8 * (shares * np.log2(shares)).sum() + math.log2(even)  # a last entry's parity is known
            bits += len(entries) * (each - math.log2(len(entries) / len(points)))
    return bits / source.size, float(((vectors - points) ** 2).mean()) * step**2


def plain_of_source(source: Floats, step: float) -> tuple[float, float]:
    """Bits and squared error of rounding to the nearest step."""
    integers = np.rint(source / step).astype(np.int64)
    return entropy(integers, np.zeros_like(integers))[0], float(((source - integers * step) ** 2).mean())


def source_table(count: int, rates: tuple[float, ...] = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5)) -> str:
    """Decibels below rounding at equal bits."""
    drawn = np.random.default_rng(0).standard_normal((CHAIN, count // (CHAIN))).astype(np.float32)

    def curve(way: Callable[[float], tuple[float, float]], steps: Array) -> tuple[Array, Array]:
        points = np.array(sorted(way(step) for step in steps))
        return points[:, 0], 10 * np.log10(points[:, 1])

    base = curve(lambda step: plain_of_source(drawn, step), np.geomspace(0.1, 4, 30))
    ways: dict[str, Callable[[float], tuple[float, float]]] = {"E8": lambda step: e8_of_source(drawn, step)}
    for states in CHECKS:
        for slope in (0.0, 1.0):
            ways[f"{states} states, slope {slope:g}"] = lambda step, states=states, slope=slope: trellis_of_source(
                drawn, step / 2, states, slope
            )
    lines = []
    for name, way in ways.items():
        bits, decibels = curve(way, np.geomspace(0.2, 3, 12))
        inside = [rate for rate in rates if bits[0] <= rate <= bits[-1]]
        gains = {rate: np.interp(rate, *base) - np.interp(rate, bits, decibels) for rate in inside}
        lines.append([name, *(f"{gains[rate]:.2f}" if rate in gains else "-" for rate in rates)])
    bound = [f"{np.interp(rate, *base) + 20 * math.log10(2) * rate:.2f}" for rate in rates]
    return table([["theory's bound", *bound], *lines], ["dB below rounding, at bits", *(f"{rate:g}" for rate in rates)])


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200_000, help="numbers that are drawn")
    print(source_table(parser.parse_args().count))


if __name__ == "__main__":
    main()
