"""Fuzz every file that caddie reads: `python tests/fuzz/fuzz.py --cases N`, or `make fuzz N=10000`.

Each case is one damaged file, made from a good one by a seed. It must be read or refused by a `UserError` or
`CheckFailed`, within 10 s of processor time and 2 GB, and no weight that was read may be other than finite. Cases run
in a process of their own, which is ended and begun anew when one of them does not end within a minute.
"""

import argparse
import json
import multiprocessing
import random
import resource
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

DEADLINE_SECONDS, MOST_BYTES = 10.0, 2 << 30
_HANG_SECONDS, _START_SECONDS = 60.0, 240.0  # by the clock, on a machine that may be busy
CONTEXT = multiprocessing.get_context("spawn")


@dataclass
class Found:
    """Outcome of the cases of one format."""

    format: str
    cases: int = 0
    read: int = 0
    refused: int = 0
    slowest_seconds: float = 0.0
    slowest_case: str = ""
    most_bytes: int = 0
    """Most memory of a process that ran cases, with all that it had imported."""
    findings: dict[str, list[Any]] = field(default_factory=dict)
    """Failure to its first case and its count."""

    def wrong(self, what: str, case: str) -> None:
        """Count a finding."""
        first = self.findings.setdefault(what, [case, 0])
        first[1] += 1

    def __str__(self) -> str:
        head = f"{self.format:<11}{self.cases:>9,} cases {self.read:>8,} read {self.refused:>9,} refused"
        head += f"  slowest {self.slowest_seconds:5.2f} s ({self.slowest_case})  {self.most_bytes / 2**20:,.0f} MiB"
        return "\n".join([head, *(f"    {what}: case {case}, {n} times" for what, (case, n) in self.findings.items())])


def fuzz(kind: str, cases: int, run: Path, seed: int = 0, first: int = 0, seconds: float = 1e9) -> Found:
    """Run cases `first` to `first + cases` of a format, or fewer in `seconds`, made from a finished run's files."""
    found, number, end, until = Found(kind), first, first + cases, time.monotonic() + seconds
    while number < end and time.monotonic() < until:
        with tempfile.TemporaryDirectory(prefix="fuzz") as work:
            here, there = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_work, args=(there, kind, run, Path(work), seed, number, end), daemon=True)
            process.start()
            there.close()
            number = _watch(here, found, number, seed, until)
            process.kill()
            process.join()
    return found


def _watch(here: Connection, found: Found, number: int, seed: int, until: float) -> int:
    """Collect what a process reports until it ends or the time is over; return the next case."""
    limit = _START_SECONDS
    while time.monotonic() < until:
        begin = time.monotonic()
        try:
            said = here.recv() if here.poll(limit) else None
        except EOFError:
            return _ended(found, number, seed, f"the process ended; {time.monotonic() - begin:.1f} s")
        if said is None:
            return _ended(found, number, seed, f"longer than {limit:.0f} s")
        if said == "end":
            return number
        if isinstance(said, int):  # it begins this case
            number, limit = said, _HANG_SECONDS
            continue
        what, seconds, memory = said
        found.cases += 1
        number, limit = number + 1, _HANG_SECONDS
        found.most_bytes = max(found.most_bytes, memory)
        if seconds > found.slowest_seconds:
            found.slowest_seconds, found.slowest_case = round(seconds, 3), f"{seed}:{number - 1}"
        if seconds > DEADLINE_SECONDS:
            what = f"longer than {DEADLINE_SECONDS:.0f} s"
        if what in ("read", "refused"):
            setattr(found, what, getattr(found, what) + 1)
        else:
            found.wrong(what, f"{seed}:{number - 1}")
        if memory > MOST_BYTES:
            return _ended(found, number - 1, seed, f"more than {MOST_BYTES >> 20:,} MiB", counted=True)
    return number


def _ended(found: Found, number: int, seed: int, what: str, counted: bool = False) -> int:
    found.cases += not counted
    found.wrong(what, f"{seed}:{number}")
    return number + 1


def _work(there: Connection, kind: str, run: Path, work: Path, seed: int, first: int, end: int) -> None:
    """Run cases and report each: how it ended, its seconds and the most memory so far."""
    import torch
    from formats import FORMATS, Good

    from caddie.errors import CheckFailed, UserError

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (3 * MOST_BYTES, 3 * MOST_BYTES))  # more is not this machine's to lose
    make = FORMATS[kind](Good(run, work))
    for number in range(first, end):
        case = make(random.Random(f"{seed} {kind} {number}"))
        there.send(number)
        begin = time.process_time()
        try:
            case()
            what = "read"
        except (UserError, CheckFailed):
            what = "refused"
        except Exception as error:
            place = next(
                f for f in reversed(traceback.extract_tb(error.__traceback__)) if "site-packages" not in f.filename
            )
            name = place.filename.rpartition("caddie/")[2]
            what = f"{type(error).__name__} at {name}:{place.lineno} ({str(error)[:80]!r})"
        seconds = time.process_time() - begin
        there.send((what, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
    there.send("end")


def small_run(folder: Path) -> Path:
    """Make the smallest finished run, of made-up text, in a folder unless it is there; return its folder."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from conftest import TINY

    run, text = folder / "run", folder / "text.txt"
    if not (run / "result.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        chance = random.Random(0)
        words = ["".join(chance.choices("abcdefghij", k=chance.randint(2, 9))) for _ in range(300)]
        text.write_text("\n\n".join(" ".join(chance.choices(words, k=80)) for _ in range(200)))
        command = [sys.executable, "-m", "caddie", "run", "tiny", *TINY, "--data", str(text), "--out", str(run)]
        subprocess.run([*command, "--quiet", "--json"], cwd=folder, check=False, stdout=subprocess.DEVNULL)
    return run


def main() -> int:
    """Run the fuzzer from the command line and print a line for each format."""
    from formats import FORMATS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(".tmp/fuzz"), help="folder of the run to damage files of")
    parser.add_argument("--cases", type=int, default=2000, help="cases of each format")
    parser.add_argument("--formats", nargs="*", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case, to repeat it alone")
    parser.add_argument("--seconds", type=float, default=1e9, help="most seconds of each format")
    parser.add_argument("--json", type=Path, help="file that gets a line of JSON for each format and batch")
    given = parser.parse_args()
    failed, run = False, small_run(given.folder.absolute())
    for kind in given.formats:
        found = fuzz(kind, given.cases, run, given.seed, given.first, given.seconds)
        print(found, flush=True)
        if given.json:
            with given.json.open("a") as file:
                file.write(json.dumps(asdict(found)) + "\n")
        failed = failed or bool(found.findings)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
