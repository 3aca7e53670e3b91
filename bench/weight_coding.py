"""Weight coding: `caddie.pack.coding` and general compressors side by side on the same integers, bytes and time.

python bench/weight_coding.py RUN [--sigmas 12.85] [--spread 0.5] [--slow]

RUN is a run's folder, an artifact, a file of weights (.safetensors), or one of integer arrays (.npz), which are taken
as they are. Weights are rounded in two ways, one table for each: steps of sigmas / 31 standard deviations of each row
(int6, as the records' SDClip), and steps that differ by column too, by a factor exp(N(0, spread)), as a quantizer sets
them that weighs errors by the inputs. The measure is the sum of the arrays' own entropies, without any cost of telling
them. Where the program lrzip is, it is given all arrays of a role together, as the per-group records do; with `--slow`
rows are sorted too.
"""

import argparse
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from caddie.pack.codecs import Brotli, Lzma, Zlib, Zstd
from caddie.pack.coding import ArrayCodec, EntropyModel, Packed, Smallest, decode

Arrays = dict[str, npt.NDArray[Any]]
Way = Callable[[Arrays], tuple[int, float, float]]
"""Arrays to bytes, seconds of encoding, seconds of decoding."""


def weights(path: Path) -> Arrays:
    """Matrices by name."""
    if path.is_dir():
        path = path / "weights.safetensors"
    if path.suffix == ".safetensors":
        found = load_file(path)
    else:
        from caddie.pack import artifact

        found = {name: value.float().numpy() for name, value in artifact.load(path).model.state_dict().items()}
    return {name: value for name, value in found.items() if value.ndim == 2 and len(value) > 8}


def rounded(matrices: Arrays, sigmas: float, spread: float) -> Arrays:
    """Integers of each matrix, int8."""
    chance = np.random.default_rng(0)
    result = {}
    for name, matrix in matrices.items():
        steps = sigmas / 31 * matrix.std(axis=1, keepdims=True) + 1e-12
        steps = steps * np.exp(chance.normal(0, spread, (1, matrix.shape[1])))
        largest = 127 if spread else 31
        result[name] = np.clip(np.rint(matrix / steps), -largest, largest).astype(np.int8)
    return result


def entropy(array: npt.NDArray[Any]) -> float:
    """Bytes of an array coded at the frequencies of its values."""
    counts = np.unique(array, return_counts=True)[1]
    return float((counts * np.log2(array.size / counts)).sum()) / 8


def ours(codec: ArrayCodec) -> Way:
    """Each array by itself."""

    def measure(arrays: Arrays) -> tuple[int, float, float]:
        begin = time.perf_counter()
        streams = {name: codec.encode(array) for name, array in arrays.items()}
        middle = time.perf_counter()
        back = {name: decode(streams[name], array.dtype, array.shape) for name, array in arrays.items()}
        end = time.perf_counter()
        assert all(np.array_equal(back[name], array) for name, array in arrays.items())
        return sum(map(len, streams.values())), middle - begin, end - middle

    return measure


def grouped_lrzip(columns: bool) -> Way:
    """All arrays of a role in one file, by the program lrzip; without -T it stores what its first test finds hard."""

    def measure(arrays: Arrays) -> tuple[int, float, float]:
        groups: dict[str, bytes] = {}
        for name, array in arrays.items():
            role = re.sub(r"\d+", "#", name)
            groups[role] = groups.get(role, b"") + np.ascontiguousarray(array.T if columns else array).tobytes()
        size, seconds = 0, [0.0, 0.0]
        with tempfile.TemporaryDirectory() as folder:
            source, target, back = (Path(folder) / name for name in ("source", "target", "back"))
            for data in groups.values():
                source.write_bytes(data)
                for index, options in enumerate(
                    (["-z", "-T", "-L9", source, "-o", target], ["-d", target, "-o", back])
                ):
                    begin = time.perf_counter()
                    subprocess.run(["lrzip", "-q", "-f", *map(str, options)], check=True, capture_output=True)
                    seconds[index] += time.perf_counter() - begin
                assert back.read_bytes() == data
                size += target.stat().st_size
        return size, seconds[0], seconds[1]

    return measure


def ways(slow: bool) -> Iterator[tuple[str, Way]]:
    """What is compared."""
    yield "EntropyModel", ours(EntropyModel())
    yield "Smallest", ours(Smallest())
    for codec in (Brotli(), Zstd(), Lzma(), Zlib()):
        for columns in (False, True):
            where = "columns" if columns else "rows"
            yield f"{type(codec).__name__}, {where}", ours(Packed(codec=codec, columns=columns))
    if slow:
        yield "Brotli, sorted columns", ours(Packed(columns=True, sort_rows=True))
    if shutil.which("lrzip"):
        yield "lrzip -z by role, rows", grouped_lrzip(False)
        yield "lrzip -z by role, columns", grouped_lrzip(True)


def table(title: str, arrays: Arrays, slow: bool) -> None:
    """Print a table in Markdown."""
    count, ideal = sum(array.size for array in arrays.values()), sum(map(entropy, arrays.values()))
    print(f"\n{title}: {len(arrays)} arrays, {count:,} integers, entropy {8 * ideal / count:.3f} bits each\n")
    print("| codec | bytes | against entropy | encode, M/s | decode, M/s |\n|---|---:|---:|---:|---:|")
    for name, way in ways(slow):
        size, encode, decoding = way(arrays)
        rates = f"{count / encode / 1e6:.2f} | {count / decoding / 1e6:.2f}"
        print(f"| {name} | {size:,} | {100 * (size / ideal - 1):+.2f} % | {rates} |", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, metavar="RUN")
    parser.add_argument("--sigmas", type=float, default=12.85)
    parser.add_argument("--spread", type=float, default=0.5)
    parser.add_argument("--slow", action="store_true")
    arguments = parser.parse_args()
    if arguments.path.suffix == ".npz":
        with np.load(arguments.path, allow_pickle=False) as found:
            table(arguments.path.name, dict(found), arguments.slow)
        return
    matrices = weights(arguments.path)
    for name, spread in (("steps by row", 0.0), ("steps by row and column", arguments.spread)):
        table(f"{arguments.path.name}, {name}", rounded(matrices, arguments.sigmas, spread), arguments.slow)


if __name__ == "__main__":
    main()
