"""Trellis-coded quantization, and GPTQ with SDClip, against `Waterfilling` at equal bytes, on trained weights.

    python bench/trellis.py RUN... --rows FILE [--steps 1e-4 ...] [--ways NAME ...]

GPTQ has the records' steps of `bench/quantization_gap.py`, times each of `--steps` over the step of `Waterfilling()`.
Bytes are those of all coded weights, as an artifact stores them. The gap is in bits per byte of held-out text, and so
is the divergence (Kullback-Leibler) from the weights before, which shows the same with less chance in it. Both are
taken at equal rates from curves through the points of each way, of which there must be three. Saved are the bits a
weight that plain rounding needs more for the same divergence. Seconds are processor time of quantizing and coding.
`--rows` keeps what was measured and is not measured again.
"""

import argparse
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from code_length_rounding import Row, Trained, at, measured, row_key
from quantization_gap import records

from caddie.model.parameters import assign
from caddie.pack.compress import Pack
from caddie.pack.quantize import Quantizer, Trellis, Waterfilling
from caddie.report.tables import table

PLAIN = "plain"


def _trellis(states: int) -> dict[str, Quantizer]:
    chosen = Pack().quantizers
    return {role: Trellis(states=states) if one == Waterfilling() else one for role, one in chosen.items()}


WAYS = {
    PLAIN: Pack().quantizers,
    **{f"{states} states": _trellis(states) for states in (8, 32, 64)},
    "GPTQ + SDClip": records(20.0).quantizers,
}
"""Quantizers by role, with the default step of `Waterfilling`."""
RATES = (2.0, 3.0, 3.5)
STEPS = (5e-5, 1e-4, 2e-4, 4e-4, 8e-4)


def measure(run: Path, steps: Sequence[float], ways: Sequence[str], tokens: int, done: set[str]) -> Iterator[Row]:
    """A row for each step and way that is not `done`."""
    wanted = [(step, way) for step in steps for way in ways if row_key(run, step, way) not in done]
    if not wanted:
        return
    trained = Trained(run, tokens)
    weights = trained.weights
    for step, way in wanted:
        candidates = trained.candidates()
        chosen = assign(WAYS[way], trained.reader.model, "ways")
        quantizers = {name: chosen[name].coarser(step / Waterfilling().step) for name in weights}
        begin = time.process_time()
        found = candidates.make(quantizers)
        seconds = time.process_time() - begin
        yield {
            "key": row_key(run, step, way),
            "run": run.name,
            "way": way,
            "step": step,
            "parameters": sum(weight.numel() for weight in weights.values()),
            **trained.costs(found),
            "seconds": seconds,
        }


def saved(ours: Sequence[Row], plain: Sequence[Row], size: float) -> float:
    """Bytes more that `plain` needs for the divergence of `ours` at `size`; infinite beyond its files."""
    wanted = at(ours, size, "divergence")
    low, high = (extreme(row["bytes"] for row in plain) for extreme in (min, max))
    if wanted is None or at(plain, high, "divergence") > wanted:
        return math.inf
    if at(plain, low, "divergence") < wanted:
        return -math.inf
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if at(plain, middle, "divergence") > wanted else (low, middle)
    return high - size


def summary(rows: Sequence[Row], rates: Iterable[float]) -> str:
    """The table: each run and way at each rate in bits a weight."""
    points: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        points.setdefault((row["run"], row["way"]), []).append(row)
    lines = []
    for (run, way), ours in points.items():
        plain = points.get((run, PLAIN), [])
        for rate in rates:
            count = ours[0]["parameters"]
            size = rate * count / 8
            gap, divergence, predicted = (at(ours, size, field) for field in ("gap", "divergence", "predicted"))
            theirs = [at(plain, size, field) for field in ("divergence", "predicted")]
            if None in (gap, divergence, predicted, *theirs):
                continue
            ratios = [f"{divergence / theirs[0]:.3f}", f"{predicted / theirs[1]:.3f}"]
            fewer = 8 * saved(ours, plain, size) / count
            lines.append([run, f"{rate:g}", way, f"{gap:.6f}", f"{divergence:.6f}", *ratios, f"{fewer:.3f}"])
    lines.sort(key=lambda line: line[:2])
    heads = ["weights", "bits", "rounding", "gap", "KL", "KL : plain", "predicted : plain", "bits saved"]
    return table(lines, heads)


def main() -> None:
    """The tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--steps", nargs="*", type=float, default=STEPS)
    parser.add_argument("--ways", nargs="+", default=[*WAYS], choices=[*WAYS])
    parser.add_argument("--tokens", type=int, default=65_536, help="held-out tokens that are read")
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, help="bits a weight in the table")
    parser.add_argument("--rows", type=Path)
    arguments = parser.parse_args()
    *_, (_, rows) = measured(arguments, measure)  # the table is of all runs
    print(summary(rows, arguments.rates))


if __name__ == "__main__":
    main()
