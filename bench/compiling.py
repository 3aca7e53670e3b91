"""Whether compiling a training step on a CPU pays: what it takes, what it gains, and how long a run must be for that.

python bench/compiling.py [RECIPE ...] [--set PATH=VALUE ...] [--threads N ...] [--seconds S]

Each way has a process of its own; first the compiler with an empty cache, then again with what that left, both beside
what the same recipe takes to be made without one. Steps then take turns. The break-even is the budget in which a
compiled run gains as many seconds' worth of steps as the compiler took before it, with an empty cache.
"""

import argparse
import os
import tempfile
import time

import torch
from contenders import OurSteps
from laps import WHOLE, Apart, in_turns, medians, ratio

from caddie.cli.exits import end
from caddie.doctor.host import processor
from caddie.report.tables import table

HEADER = ("", "threads", "format", "ms uncompiled", "ms compiled", "times", "compiler s", "again s", "break-even s")


def made(name: str, settings: tuple[str, ...], threads: int) -> tuple[Apart, float]:
    """Steps that are ready to be timed, and the seconds until they were."""
    start = time.perf_counter()
    contender = Apart(OurSteps, name, settings, threads)
    return contender, time.perf_counter() - start


def measure(name: str, settings: tuple[str, ...], threads: int, seconds: float, rounds: int) -> list[str]:
    """A row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        plain, apart = made(name, (*settings, "train.compile=never"), threads)
        same = (*settings, f"train.precision={plain.facts['precision']}", "train.compile=always")
        first, cold = made(name, same, threads)
        first.close()
        compiled, kept = made(name, same, threads)
        ours, theirs = in_turns([compiled, plain], seconds, rounds)
        for contender in (compiled, plain):
            contender.close()
    gain = ratio(ours, theirs)
    even = f"{(cold - apart) / (gain - 1):,.0f}" if gain > 1 else "never"
    return [
        name,
        str(plain.facts["threads"]),
        plain.facts["precision"],
        f"{1e3 * medians(theirs)[WHOLE]:.1f}",
        f"{1e3 * medians(ours)[WHOLE]:.1f}",
        f"{gain:.2f}",
        f"{cold - apart:.0f}",
        f"{kept - apart:.0f}",
        even,
    ]


def main() -> None:
    """Measure each recipe with each number of threads, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = ["baseline_mini", "tiny"]
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", default=usual, help=f"else {', '.join(usual)}")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="a setting of all recipes")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, torch.get_num_threads()}), metavar="N")
    parser.add_argument("--seconds", type=float, default=6.0, help="for each way of each row; %(default)s")
    given = parser.parse_args()
    rows = [
        measure(name, tuple(given.set), threads, given.seconds, rounds=10)
        for name in given.recipes
        for threads in given.threads
    ]
    print(f"{processor().name}, {os.cpu_count()} cores, torch {torch.__version__}")
    print(table(rows, HEADER))


if __name__ == "__main__":
    end(main)
