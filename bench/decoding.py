"""How long the weights of a large model take to encode and to decode, and in how many bytes and how much memory.

    python bench/decoding.py [MILLIONS] [--run RUN [--step 5e-4]] [--trellis] [--file FILE]

The matrices are those of `longer_warmdown`, 35.9 million weights, with more or fewer rows for other MILLIONS. Their
integers are drawn: Laplace numbers whose scales differ by row and by column, or, with `--run`, Gaussian ones with the
scales that rows and columns of this trained run's integers have under `Waterfilling`. They are coded by the product's
own choice and read by `decompress` in `caddie.pack.artifact`, down to float32 weights, in processes that may use one
core and two. Beside it stands Brotli at its best layout for the same integers, in 8 bits each if they fit. With
`--trellis` all integers are taken for those of `Trellis`. With `--file` the coded weights are kept there and only read
the next time.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from laps import peak_bytes
from weight_coding import entropy

from caddie.model.parameters import Constant, Part
from caddie.pack import container
from caddie.pack.coding import EncodeJob, Packed, ProcessPool, Smallest
from caddie.pack.container import Section
from caddie.pack.decompress import LENGTH_BYTES, PREFIX, decompress
from caddie.pack.quantize import Trellis, Waterfilling, WaterfillingSteps
from caddie.recipes.catalog import find
from caddie.report.tables import table

Shapes = dict[str, tuple[int, int]]
Scales = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]
"""Mean magnitude of an integer by row, and by column in parts of the mean."""

_FACTS = "facts"
_LEAST = 4096  # elements
MIB = 1 << 20
_MEAN, _ROWS, _COLUMNS = 1.6, 0.3, 0.5  # of magnitudes, and deviations of their logarithms by row and column


class Stack(Part):
    """Matrices and nothing else."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, self.declare(name, shape, "matrix", Constant(value=0.0)))


def shapes_of(recipe: str, millions: float | None) -> Shapes:
    """The recipe's matrices, with rows by one factor more or fewer."""
    with torch.device("meta"):
        model = find(recipe).model.build()
    found = {
        name.replace(".", "_"): (parameter.shape[0], parameter.shape[1])
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and parameter.numel() >= _LEAST
    }
    factor = 1.0 if millions is None else 1e6 * millions / sum(math.prod(shape) for shape in found.values())
    return {name: (max(1, round(factor * rows)), columns) for name, (rows, columns) in found.items()}


def scales_of(run: Path, step: float) -> list[tuple[str, Scales]]:
    """Name and scales of each matrix of a trained run."""
    from caddie.run.run_folder import read_run, run_weights
    from caddie.run.stages import calibrate_recipe

    recipe, _, corpus = read_run(run)
    weights = run_weights(run, recipe, corpus)
    known = calibrate_recipe(recipe, weights, corpus)
    found = []
    for name, weight in weights.items():
        if weight.ndim == 2 and weight.numel() >= _LEAST:
            integers = Waterfilling(step=step).quantize(weight, known[name])["integers"]
            magnitudes = np.abs(integers.astype(np.float64))
            mean = max(magnitudes.mean(), 1e-9)
            found.append((name.replace(".", "_"), (magnitudes.mean(1), magnitudes.mean(0) / mean)))
    return found


def drawn(name: str, shape: tuple[int, int], known: list[tuple[str, Scales]], chance: np.random.Generator) -> Any:
    """Integers of the shape, int16, with the scales of one of the `known` that has most of its name, if any."""
    rows, columns = shape
    if not known:
        row = _MEAN * np.exp(chance.normal(0, _ROWS, rows))
        column = np.exp(chance.normal(0, _COLUMNS, columns))
        values = chance.laplace(size=shape) * row[:, None] * column
    else:
        # Parts of the name in common, numbers apart; of several one by chance.
        alike = [len(_words(name) & _words(other)) for other, _ in known]
        nearest = [scales for (_, scales), same in zip(known, alike, strict=True) if same == max(alike)]
        by_row, by_column = nearest[chance.integers(len(nearest))]
        row, column = chance.choice(by_row, rows), chance.choice(by_column, columns)
        values = chance.standard_normal(shape) * math.sqrt(math.pi / 2) * row[:, None] * column
    return np.rint(values.clip(-32_767, 32_767)).astype("<i2")


def encoded(
    shapes: Shapes, known: list[tuple[str, Scales]], quantizer: WaterfillingSteps = Waterfilling()
) -> tuple[list[Section], dict[str, Any]]:
    """The artifact's sections of weights, and bytes and seconds: ours by one process, and by one for each core."""
    chance = np.random.default_rng(0)
    arrays: list[dict[str, npt.NDArray[Any]]] = []
    entropy_bytes, brotli_bytes, brotli_seconds = 0.0, 0, 0.0
    for name, shape in shapes.items():
        integers = drawn(name, shape, known, chance)
        arrays.append(
            {
                "row_steps": chance.integers(-12, 0, shape[0], np.int8),
                "column_steps": chance.integers(-4, 4, shape[1], np.int8),
                "integers": integers,
                "step": np.array([1e-3], "<f4"),
                "chained": np.ones(sum(shape), np.uint8),
            }
        )
        small = integers.astype(np.int8) if np.abs(integers).max(initial=0) < 128 else integers
        begin = time.perf_counter()
        brotli_bytes += min(len(Packed(columns=way, shuffle=True).encode(small)) for way in (False, True))
        brotli_seconds += time.perf_counter() - begin
        entropy_bytes += entropy(integers)
    layouts = [list(quantizer.layout(shape)) for shape in shapes.values()]
    jobs = [EncodeJob(found[key]) for found, layout in zip(arrays, layouts, strict=True) for key in layout]
    seconds = {}
    for processes in (1, len(os.sched_getaffinity(0))):
        begin = time.perf_counter()
        with ProcessPool(processes) as pool:
            streams = iter(pool.encode(Smallest(), jobs))
        seconds[processes] = time.perf_counter() - begin
    data = [[next(streams) for _ in layout] for layout in layouts]
    sections = [
        Section(PREFIX + name, b"".join(len(one).to_bytes(LENGTH_BYTES, "little") + one for one in found))
        for name, found in zip(shapes, data, strict=True)
    ]
    return sections, {
        "shapes": shapes,
        "trellis": isinstance(quantizer, Trellis),
        "elements": sum(math.prod(shape) for shape in shapes.values()),
        "entropy_bytes": entropy_bytes,
        "bytes": sum(len(section.data) for section in sections),
        "seconds": [*seconds.items()],
        "brotli_bytes": brotli_bytes,
        "brotli_seconds": brotli_seconds,
    }


def decoded(shapes: Shapes, sections: Mapping[str, bytes], trellis: bool = False) -> dict[str, npt.NDArray[Any]]:
    """The weights, by the product's own way."""
    quantizer = Trellis() if trellis else Waterfilling()
    with torch.device("meta"):
        stack = Stack(shapes)
    weights = decompress(stack, {"matrix": quantizer}, sections)
    return {name: weight.numpy() for name, weight in weights.items()}


def read(path: Path, cores: int) -> dict[str, float]:
    """Seconds and mebibytes of decoding a file in this process, on so many cores."""
    torch.set_num_threads(cores)
    contents = container.read(path).sections
    facts = json.loads(contents.pop(_FACTS))
    shapes = {name: (rows, columns) for name, (rows, columns) in facts["shapes"].items()}
    cpu = torch.device("cpu")
    before = peak_bytes(cpu) / MIB
    begin = time.perf_counter()
    decoded(shapes, contents, facts["trellis"])
    return {"seconds": time.perf_counter() - begin, "peak": peak_bytes(cpu) / MIB, "before": before}


def timed(path: Path, cores: int) -> dict[str, float]:
    """`read` in a process of its own, which may use so many cores of those that this one may."""
    chosen = sorted(os.sched_getaffinity(0))[:cores]
    command = [sys.executable, __file__, "--file", str(path), "--cores", str(cores)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, preexec_fn=lambda: os.sched_setaffinity(0, chosen)
    )
    return dict(json.loads(done.stdout))


def summary(facts: Mapping[str, Any], times: Mapping[int, list[dict[str, float]]]) -> str:
    """The tables."""
    count, ideal = facts["elements"], facts["entropy_bytes"]
    coders = [
        [name, f"{size:,}", f"{100 * (size / ideal - 1):+.2f} %", f"{8 * size / count:.3f}", f"{seconds:.1f}"]
        for name, size, seconds in (
            *((f"ours, {processes} at once", facts["bytes"], seconds) for processes, seconds in facts["seconds"]),
            ("Brotli 11, better layout, both tried", facts["brotli_bytes"], facts["brotli_seconds"]),
        )
    ]
    decodings = []
    for cores, found in times.items():
        best = min(found, key=lambda one: one["seconds"])
        rate = f"{count / best['seconds'] / 1e6:.1f}"
        peak = f"{best['peak']:,.0f} ({best['before']:,.0f} before)"
        decodings.append([str(cores), f"{best['seconds']:.2f}", rate, peak])
    return "\n\n".join(
        [
            f"{count:,} integers in {len(facts['shapes'])} matrices, entropy {8 * ideal / count:.3f} bits each",
            table(coders, ["coder", "bytes", "against entropy", "bits each", "encode, s"]),
            table(decodings, ["cores", "decode, s", "million/s", "peak memory, MiB"]),
        ]
    )


def _words(name: str) -> set[str]:
    return {word for word in re.split(r"[_\d]+", name) if word}


def main() -> None:
    """The tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("millions", nargs="?", type=float)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--step", type=float, default=5e-4)
    parser.add_argument("--trellis", action="store_true")
    parser.add_argument("--file", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cores", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cores:
        print(json.dumps(read(arguments.file, arguments.cores)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.file or Path(folder) / "weights"
        if not path.exists():
            torch.set_num_threads(1)
            known = scales_of(arguments.run, arguments.step) if arguments.run else []
            quantizer = Trellis() if arguments.trellis else Waterfilling()
            sections, facts = encoded(shapes_of("longer_warmdown", arguments.millions), known, quantizer)
            container.write(path, [*sections, Section(_FACTS, json.dumps(facts).encode())])
        facts = json.loads(container.read(path).sections[_FACTS])
        cores = sorted({1, min(2, len(os.sched_getaffinity(0)))})
        times: dict[int, list[dict[str, float]]] = {count: [] for count in cores}
        for _ in range(arguments.repeats):
            for count in cores:
                times[count].append(timed(path, count))
    print(summary(facts, times))


if __name__ == "__main__":
    main()
