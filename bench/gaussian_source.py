"""Rate by lattices and trellises on a Gaussian source, at equal entropy.

    python bench/gaussian_source.py [--count N]

Rounding to the nearest step and an entropy coder need a quarter of a bit more than theory (1.53 dB). The trellises are
those of `caddie.pack.quantize.Trellis`, in its chains. E8 is the lattice of eight dimensions (J. H. Conway and
N. J. A. Sloane, IEEE Trans. Information Theory 28(2), 1982), its points coded by their entries' frequencies.

The table says by how many dB the mean squared error is below that of rounding with as many bits. Values are shrunk
towards 0 before the trellis as `Trellis` does, or not.
"""

import argparse
import math
from collections.abc import Callable

import numpy as np
from weight_coding import entropy

from caddie.pack.quantize.trellis import _ERROR, CHAIN, CHECKS, Array, Floats, Trellis
from caddie.report.tables import table


def trellis_of_source(source: Floats, step: float, states: int, shrunk: bool) -> tuple[float, float]:
    """Bits and squared error of chains."""
    values = source / np.float32(step)
    moved = _ERROR / values.std() * np.clip(values / values.std(), -1, 1) if shrunk else 0
    points = Trellis(states=states)._nearest_path(values - moved)
    integers = np.where(points % 1 == 0.25, np.floor(points), -np.ceil(points))
    return 8 * entropy(integers) / integers.size, float(((source - points * step) ** 2).mean())


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
    return 8 * entropy(integers) / integers.size, float(((source - integers * step) ** 2).mean())


def source_table(count: int, rates: tuple[float, ...] = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5)) -> str:
    """Decibels below rounding at equal bits."""
    drawn = np.random.default_rng(0).standard_normal(count // CHAIN * CHAIN).astype(np.float32)

    def curve(way: Callable[[float], tuple[float, float]], steps: Array) -> tuple[Array, Array]:
        points = np.array(sorted(way(step) for step in steps))
        return points[:, 0], 10 * np.log10(points[:, 1])

    base = curve(lambda step: plain_of_source(drawn, step), np.geomspace(0.1, 4, 30))
    ways: dict[str, Callable[[float], tuple[float, float]]] = {"E8": lambda step: e8_of_source(drawn, step)}
    for states in CHECKS:
        for name, shrunk in ((f"{states} states", False), (f"{states} states, shrunk", True)):
            ways[name] = lambda step, states=states, shrunk=shrunk: trellis_of_source(drawn, step, states, shrunk)
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
