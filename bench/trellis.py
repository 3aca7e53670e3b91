"""Trellis-coded quantization against `Waterfilling` at equal bytes, on trained weights.

    python bench/trellis.py RUN... --rows FILE [--steps 1e-4 ...] [--ways NAME ...]

The trellises of `gaussian_source.py` with eight states run down the columns of each matrix, in chains of 64 rows that
lie as far apart as their number, so that all chains of a column go side by side. Columns take up the errors of those
before as in `Waterfilling`, exactly, and steps are the same (half as large, by an octave of a row's stored size). The
bits of a choice, weighed by the slope, are those of the entropy model's priors at the row's and column's scale; 0 may
be chosen among odd integers. Rows and columns of few bits take no part: there a trellis is worse than rounding.

Bytes are those of the entropy model's loop with contexts for even and odd integers apart, in the better of both
orientations, by its own count of code lengths; for `plain` those of the product, or of this loop where it takes fewer.
`chosen` takes for each matrix whichever of `plain` and the trellis has less predicted loss plus bytes at the price that
the step implies. `sdclip` is GPTQ on rows with steps of k standard deviations and Brotli. The gap is in bits per byte
of held-out text, and so is the divergence (Kullback-Leibler) from the weights before. `--rows` keeps what was measured
and is not measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from code_length_rounding import Reader, at
from compression import records
from gaussian_source import Array, Floats, best_path, machine
from torch import Tensor

from caddie.model import build
from caddie.model.parameters import assign
from caddie.pack.calibrate import predicted_loss
from caddie.pack.coding import entropy_model as coder
from caddie.pack.coding import priors
from caddie.pack.coding.symbols import Meter
from caddie.pack.compress import Pack
from caddie.pack.quantize import Arrays, Calibration, Quantizer, Waterfilling
from caddie.pack.quantize.quantizer import as_rows, plain
from caddie.pack.quantize.waterfilling import _BLOCK, _PER_OCTAVE, _arrays, _steps, _upper
from caddie.report.tables import table
from caddie.run.run_folder import read_run, run_weights
from caddie.run.stages import bits_per_nat, calibrate_recipe, held_out_text

CHAIN = 64
"""Rows that follow one another in a column, at most."""
RATES = (2.0, 3.0, 3.5)
STEPS = (1e-4, 2e-4, 4e-4, 8e-4)
SLOPES = (0.0, 0.5, 1.0)
WAYS = ("plain", *(f"trellis, slope {slope:g}" for slope in SLOPES), "chosen", "sdclip")
CHOSEN = 0.5
"""Slope of the trellis that `chosen` may take."""
_TRIAL = 1 << 14  # elements on which the coder's beliefs are chosen
_ERROR = 0.27  # squared error of a trellis's choice, in its own (half) steps: 0.9 dB below 4/12
_OCTAVE = 4  # contexts
_REMAINDERS = np.arange(4, dtype=np.float32)[:, None]


def parities(integers: Array, stride: int | None = None) -> Array:
    """1 where an integer of a matrix is one of the odd ones; rows at a distance of `stride` follow one another."""
    followers, stride = machine(8).followers, stride or -(-len(integers) // CHAIN)
    found = np.zeros((len(integers) + stride, integers.shape[1]), np.uint8)
    for top in range(0, len(integers), stride):
        block = integers[top : top + stride]
        after = slice(top + stride, top + stride + len(block))
        found[after] = followers[found[top : top + len(block)], block >> 1 & 1]
    return found[: len(integers)] & 1


# Trained weights


class Trellis(Waterfilling):
    """`Waterfilling` whose integers, in half steps, are a trellis's."""

    slope: float = 0.0
    """Weight of the bits of each choice."""
    least: float = 0.25
    """Mean magnitude, after plain rounding, of a row or column that takes part; others are rounded to even integers."""

    def quantize(self, weight: Tensor, calibration: Calibration = Calibration()) -> Arrays:
        """The arrays of `Waterfilling`, with row steps an octave finer and integers twice as large."""
        arrays, rows = super().quantize(weight, calibration), as_rows(plain(weight))
        if weight.ndim != 2 or not arrays["integers"].any():
            return arrays
        _, columns = self._costs(rows, calibration)
        factor, step = _upper(columns), float(arrays["step"][0])
        row_steps, column_steps = (torch.from_numpy(arrays[f"{of}_steps"]).int() for of in ("row", "column"))
        row_steps -= _PER_OCTAVE
        steps = _steps(row_steps, column_steps, step)
        before = np.abs(arrays["integers"].astype(np.int64))
        along = before.mean(1) >= self.least
        across = before[along].mean(0) >= self.least if along.any() else np.zeros(before.shape[1], bool)
        lengths, places = code_lengths(priors.width(*before.shape)), scales(2 * before)[along].T.copy()
        price, chosen = np.float32(self.slope * 2 * math.log(2) * _ERROR), torch.from_numpy(along)

        def rounded(column: int, values: Tensor) -> Tensor:
            found = 2 * (values / 2).round()
            if across[column]:
                ours = along_trellis(values[chosen].numpy(), places[column], price, lengths)
                found[chosen] = torch.from_numpy(ours)
            return found

        integers = feed_back(rows, steps, factor / factor.diagonal(), rounded)
        return {**_arrays(integers, row_steps, column_steps, step, weight), "along": along, "across": across}


def feed_back(rows: Tensor, steps: Tensor, unit: Tensor, rounded: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The integers of `Waterfilling`'s feedback, each column by `rounded`."""
    left, steps = rows.T.clone(memory_format=torch.contiguous_format), steps.T.contiguous()
    integers = torch.empty_like(left)
    for begin in range(0, len(left), _BLOCK):
        end = min(begin + _BLOCK, len(left))
        errors = torch.zeros(end - begin, len(rows))
        for j in range(begin, end):
            integers[j] = rounded(j, (left[j] + unit[begin:j, j] @ errors[: j - begin]) / steps[j])
            errors[j - begin] = rows[:, j] - integers[j] * steps[j]
        if end < len(left):
            left[end:] += unit[begin:end, end:].T @ errors
    return integers.T.contiguous()


def along_trellis(values: Floats, places: Array, price: np.float32, lengths: Floats) -> Floats:
    """Integers near one column's values: squared error plus `price` times bits is least along each chain."""
    stride = -(-len(values) // CHAIN)
    length = -(-len(values) // stride)
    padded, at_scale = np.zeros(length * stride, np.float32), np.zeros(length * stride, np.int64)
    padded[: len(values)], at_scale[: len(values)] = values, places
    near = 4 * np.rint((padded - _REMAINDERS) / 4) + _REMAINDERS
    odd = np.arange(4)[:, None] % 2

    def cost(integers: Floats) -> Floats:
        squares: Floats = (padded - integers) ** 2
        magnitudes = np.minimum(np.abs(integers), priors.LARGEST - 1).astype(np.int64)
        return squares + price * lengths[odd, at_scale, magnitudes] if price else squares

    costs = cost(near)
    if price:
        smaller = near - 4 * np.sign(near)
        smaller = np.where(np.abs(smaller) < np.abs(near), smaller, near)
        theirs = cost(smaller)
        near, costs = np.where(theirs < costs, smaller, near), np.minimum(costs, theirs)
        theirs = padded**2 + price * lengths[1, at_scale, 0]
        near[1], costs[1] = np.where(theirs < costs[1], 0, near[1]), np.minimum(costs[1], theirs)
    costs[:, len(values) :] = 0
    taken = best_path(np.ascontiguousarray(costs.reshape(4, length, stride).transpose(1, 0, 2)))
    found: Floats = np.take_along_axis(near, taken.reshape(1, -1), 0)[0, : len(values)]
    return found


@cache
def priors_of() -> Array:
    """Prior of each magnitude: even integers as those of whole steps, odd ones between them, and 0 half as often there.

    By parity, width and context, (2, widths, contexts, 256).
    """
    whole = np.roll(priors.priors(), _OCTAVE, axis=1)  # contexts are of magnitudes twice as large
    whole[:, :_OCTAVE] = priors.priors()[:, :1]
    found = np.zeros((2, *whole.shape), np.int64)
    half = whole.shape[2] // 2
    found[0, ..., ::2] = whole[..., :half]
    found[1, ..., 1::2] = whole[..., :half] + whole[..., 1 : half + 1] >> 1
    found[1, ..., 0] = whole[..., 0] >> 1
    return found


@cache
def code_lengths(width: int) -> Floats:
    """Bits of each magnitude of even integers, and of odd ones and 0, by the priors: (2, contexts, 256)."""
    shares = priors_of()[:, width]
    totals = 2 * shares.sum(2) - shares[..., 0]
    return -np.log2(np.maximum(shares / totals[..., None], 1e-12)).astype(np.float32)


def scales(integers: Array, trust: int = 4) -> Array:
    """The context of each integer, by the scale of its row and its column."""
    sums = np.abs(integers).astype(np.float64)
    mean = max(float(sums.mean()), 2.0**-priors.FRACTION_BITS)
    ratios = (sums.sum(0) + trust * mean) / ((len(sums) + trust) * mean)
    by_row = (sums.sum(1) + trust * mean) / (ratios.sum() + trust)
    return priors.contexts(priors.log2((by_row[:, None] * ratios * 2**priors.FRACTION_BITS).round()))


def trellis_bytes(integers: Array, along: Array, across: Array) -> float:
    """Bytes of integers of which rows `along` and columns `across` are a trellis's, and of which these are.

    The least over the coder's beliefs in rows and columns, chosen on the first rows.
    """
    odd = np.zeros(integers.shape, np.int64)
    odd[np.ix_(along, across)] = parities(integers[np.ix_(along, across)]) if along.any() else 0
    stride = -(-int(along.sum()) // CHAIN) if across.any() else integers.size
    found = math.inf
    for values, of, limits in ((integers, odd, (stride, integers.size)), (integers.T, odd.T, (integers.size, stride))):
        high = max(1, _TRIAL // values.shape[1])
        choices = [(4, 4), (16, 4), (4, 16)]
        best = min(choices, key=lambda trust: metered(values[:high], of[:high], *limits, *trust))
        found = min(found, metered(values, of, *limits, *best))
    return found + 8 + sum(map(_mask_bytes, (along, across)))  # 8: first byte, settings, checksum


def _mask_bytes(mask: Array) -> float:
    share = float(mask.mean())
    return -len(mask) / 8 * sum(part * math.log2(part) for part in (share, 1 - share) if part)


def metered(integers: Array, odd: Array, most_rows: int, most_columns: int, column_trust: int, row_trust: int) -> float:
    """Bytes of integers by the loop of the entropy model, whose contexts are of even and of odd integers.

    Those beyond the largest are cut by whole fours, which leaves their places in the trellis, and counted beside.
    """
    beyond = np.maximum(np.abs(integers) - priors.LARGEST + 3, 0) // 4
    values = (integers - 4 * np.sign(integers) * beyond).astype(np.int64)
    most = int(np.abs(values).max())
    if not most:
        return 0.0
    symbols = np.arange(-most, most + 1)
    (rows, columns), prior, meter = values.shape, coder._PRIOR_COUNT * priors_of()[..., np.abs(symbols)], Meter()
    counts, totals = (np.zeros((2 * priors.CONTEXTS, *more), np.int64) for more in ((len(symbols),), ()))
    column_sums, above, fraction = np.zeros(columns, np.int64), 0, priors.FRACTION_BITS
    recent, recent_rows = 4 * coder._mean(coder._mean_code(values.astype(np.int32))), 4
    for top, bottom, borders in blocks(rows, columns, most_rows, most_columns):
        usual = recent // recent_rows
        expected = column_trust * usual
        ratios = ((column_sums << fraction) + expected << fraction) // max(above + expected, 1)
        log_ratios = priors.log2(ratios) - fraction * priors.PER_OCTAVE
        row_sums, passed = np.zeros(bottom - top, np.int64), np.concatenate([[0], ratios.cumsum()])
        for left, right in pairwise(borders):
            beside = passed[left] + (row_trust << fraction)
            by_row = ((row_sums << fraction) + row_trust * usual << fraction) // beside
            found = 2 * priors.contexts(priors.log2(by_row)[:, None] + log_ratios[left:right]).astype(np.int64)
            places, tile = (found + odd[top:bottom, left:right]).reshape(-1), values[top:bottom, left:right]
            order, present = places.argsort(kind="stable"), np.bincount(places, minlength=2 * priors.CONTEXTS)
            used = present.nonzero()[0]
            shares = prior[used & 1, priors.width(top + column_trust, left + row_trust), used >> 1]
            flat = tile.reshape(-1)[order] + most
            meter.code(flat.astype(np.int32), coder._weights(shares, counts[used], 0), present[used])
            np.add.at(counts.reshape(-1), places[order] * len(symbols) + flat, 1)
            row_sums += np.abs(tile).sum(axis=1)
            totals += present
            for context in (totals > coder._MOST_COUNT).nonzero()[0]:
                counts[context] >>= 1
                totals[context] = counts[context].sum()
        column_sums += np.abs(values[top:bottom]).sum(axis=0)
        block = (int(row_sums.sum()) << fraction) // columns
        above, recent, recent_rows = above + block, recent + block, recent_rows + bottom - top
        if recent_rows > coder._RECENT_ROWS:
            recent, recent_rows = recent * coder._RECENT_ROWS // recent_rows, coder._RECENT_ROWS
    size = (int(beyond.max()).bit_length() + 7) // 8
    return meter.size / priors.PER_OCTAVE / 8 + size * int((np.abs(values) > priors.LARGEST - 4).sum())


def blocks(rows: int, columns: int, most_rows: int, most_columns: int) -> Iterator[tuple[int, int, list[int]]]:
    """The entropy model's blocks and tiles, none so large that a state follows from integers of the same tile."""
    top = 0
    for _, bottom, _ in coder._tiles(rows, columns):
        while top < bottom:
            high = min(most_rows, bottom - top)
            yield top, top + high, _borders(high, columns, most_columns)
            top += high


def _borders(height: int, columns: int, most: int) -> list[int]:
    """Borders of the tiles of a block, as in the entropy model."""
    borders = [0]
    while (left := borders[-1]) < columns:
        wide = max(coder._LEAST_COLUMNS, -(-coder._LEAST_TILE // height), left // coder._GROWTH)
        right = left + min(wide, most, max(1, coder._LARGEST_TILE // height))
        borders.append(columns if columns - right < min(wide // 2, most - wide) else min(right, columns))
    return borders


class Stored(NamedTuple):
    """A weight as one way has it."""

    restored: Tensor
    bytes: float
    loss: float


class Weights:
    """The weights of a run and what reads them."""

    def __init__(self, run: Path, tokens: int) -> None:
        recipe, _, corpus = read_run(run)
        self.weights, text = run_weights(run, recipe, corpus), held_out_text(corpus)
        self.model, length = build(recipe.model, 0), recipe.score.sequence_length
        self.model.load_state_dict(self.weights)
        rows = max(1, 2048 // length)
        batches = min(tokens, len(text.tokens) - 1) // (rows * length)
        starts = torch.arange(batches * rows)[:, None] * length + torch.arange(length + 1)
        ids = torch.from_numpy(np.asarray(text.tokens).astype(np.int64))[starts].reshape(batches, rows, length + 1)
        self.reader, self.per_nat = Reader(self.model, ids, text.bos), bits_per_nat(corpus)
        self.calibrations = calibrate_recipe(recipe.but(pack=Pack()), self.weights, corpus)
        self.codings = {"sdclip": records(20.0).coding}
        self._known: dict[tuple[str, str, float], Stored] = {}

    def quantizers(self, way: str, step: float) -> dict[str, Quantizer]:
        """The quantizer of each weight."""
        config = records(20.0) if way == "sdclip" else Pack()
        for_all = assign(config.quantizers, self.model, "pack.quantizers")
        if way == "sdclip":
            return {name: one.coarser(step / STEPS[0] / 2) for name, one in for_all.items()}
        slope = float(way.split()[-1]) if way.startswith("trellis") else None
        steps = Waterfilling(step=step) if slope is None else Trellis(step=step, slope=slope)
        return {name: steps if isinstance(one, Waterfilling) else one for name, one in for_all.items()}

    def stored(self, way: str, step: float) -> dict[str, Stored]:
        """All weights."""
        if way == "chosen":
            price = (
                2 * math.log(2) * step**2 / 24 * 8
            )  # of a byte, in nats: the slope of losses that fall by 6 dB a bit
            each = zip(
                *(self.stored(one, step).items() for one in ("plain", f"trellis, slope {CHOSEN:g}")), strict=True
            )
            return {name: min(a, b, key=lambda one: one.loss + price * one.bytes) for (name, a), (_, b) in each}
        for name, quantizer in self.quantizers(way, step).items():
            if (way, name, step) not in self._known:
                self._known[way, name, step] = self._store(way, name, quantizer)
        return {name: self._known[way, name, step] for name in self.weights}

    def _store(self, way: str, name: str, quantizer: Quantizer) -> Stored:
        weight, calibration = self.weights[name].float(), self.calibrations.get(name, Calibration())
        arrays, shape = quantizer.quantize(weight, calibration), tuple(weight.shape)
        restored = quantizer.dequantize(arrays, shape)
        coding, size = self.codings.get(way, Pack().coding), 0.0
        if "along" in arrays:
            size += trellis_bytes(arrays["integers"].astype(np.int64), arrays.pop("along"), arrays.pop("across"))
            del arrays["integers"]
        elif way == "plain" and "column_steps" in arrays:
            integers = arrays.pop("integers")
            none = (np.zeros(of, bool) for of in as_rows(weight).shape)
            whole = as_rows(torch.from_numpy(integers)).numpy().astype(np.int64)
            size += min(len(coding.encode(integers)), trellis_bytes(2 * whole, *none))
        size += sum(len(coding.encode(array)) for array in arrays.values())
        return Stored(restored, size, predicted_loss(calibration, weight, restored))


def measure(run: Path, steps: Iterable[float], ways: Iterable[str], tokens: int, done: set[str]) -> Iterator[Any]:
    """A row for each step and way that is not `done`."""
    wanted = [(way, step) for step in steps for way in ways if f"{run.name} {step:.3g} {way}" not in done]
    weights = Weights(run, tokens) if wanted else None
    for way, step in wanted:
        assert weights is not None
        begin = time.perf_counter()
        stored = weights.stored(way, step)
        seconds = time.perf_counter() - begin
        gap, divergence = weights.reader.read({name: one.restored for name, one in stored.items()})
        size, count = sum(one.bytes for one in stored.values()), sum(one.numel() for one in weights.weights.values())
        yield {
            "key": f"{run.name} {step:.3g} {way}",
            "run": run.name,
            "way": way,
            "step": step,
            "parameters": count,
            "bytes": size,
            "bits": 8 * size / count,
            "gap": gap * weights.per_nat,
            "divergence": divergence * weights.per_nat,
            "predicted": sum(one.loss for one in stored.values()) * weights.per_nat,
            "seconds": seconds,
        }


def summary(rows: list[dict[str, Any]], rates: Iterable[float]) -> str:
    """The table: each run and way at each rate, from a curve through its steps; the last column is against plain."""
    points: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        points.setdefault((row["run"], row["way"]), []).append(row)
    lines = []
    for (run, way), ours in points.items():
        for rate in rates:
            size = rate * ours[0]["parameters"] / 8
            found = [at(ours, size, field) for field in ("gap", "divergence", "predicted")]
            theirs = at(points.get((run, "plain"), []), size, "divergence")
            if found[1] is not None:
                parts = [
                    *(f"{one:.6f}" for one in found if one is not None),
                    f"{found[1] / theirs:.2f}" if theirs else "-",
                ]
                lines.append([run, f"{rate:g}", way, *parts])
    lines.sort(key=lambda line: line[:2])
    return table(lines, ["weights", "bits a weight", "rounding", "gap", "KL", "predicted", "KL : plain"])


def main() -> None:
    """The tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--steps", nargs="*", type=float, default=STEPS)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--tokens", type=int, default=16_384, help="held-out tokens that are read")
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, help="bits a weight in the table")
    parser.add_argument("--rows", type=Path)
    arguments = parser.parse_args()
    kept = arguments.rows
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept and kept.exists() else []
    for run in arguments.runs:
        done = {row["key"] for row in rows}
        for row in measure(run, arguments.steps, arguments.ways, arguments.tokens, done):
            rows.append(row)
            print(json.dumps(row), flush=True)
            if kept:
                with kept.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    print(summary(rows, arguments.rates))


if __name__ == "__main__":
    main()
