"""Measure how soon Ctrl-C ends each long verb: python bench/interrupts.py FOLDER [--times 3] [--verbs run pack]

FOLDER gets a run of `tiny` first, unless it holds one. Each verb is begun anew for every signal, which comes at a
random moment of up to three seconds after a phase has shown itself on standard error. Prints, for each phase, the
seconds from the signal to the end of the process, with the load of the machine.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAM = (sys.executable, "-m", "caddie")
LONG_SECONDS = 3.0
"""Most seconds that a signal waits after its phase has begun."""
FIRST = ("tiny", "train.seconds=none", "train.steps=30")
VERBS = {
    "compress": ("compress run/artifact.caddie text --out made/text.cz", ("compress",)),
    "decompress": ("decompress run/artifact.caddie text.cz --out made/text", ("decompress",)),
    "sample": ("sample run/artifact.caddie --tokens 100000", ("",)),
    "score": ("score run/artifact.caddie", ("plain", "sliding")),
    "verify": ("verify run/artifact.caddie", ("",)),
    "data": ("data --out made/corpus", ("",)),
    "pack": ("pack run --out made/packed.caddie", ("calibrate", "pack")),
    "run": (
        f"run {' '.join(FIRST)} --out made/run",
        ("prepare", "train", "calibrate", "pack", "plain", "verify"),
    ),
}
"""Verb to its command and the phases in which it is interrupted; the phase "" begins with the process."""


def make_inputs(folder: Path) -> None:
    """Make a run, a text of some megabytes and a compressed text in a folder, unless they are there."""
    if not (folder / "run" / "result.json").exists():
        subprocess.run([*PROGRAM, "run", *FIRST, "--out", "run", "--quiet"], cwd=folder, check=True)
    pieces = sorted(path.read_bytes() for path in Path(os.__file__).parent.glob("*.py"))
    (folder / "text").write_bytes(b"".join(pieces)[: 4 << 20])
    if not (folder / "text.cz").exists():
        (folder / "part").write_bytes(b"".join(pieces)[: 60 << 10])
        compress = [*PROGRAM, "compress", "run/artifact.caddie", "part", "--out", "text.cz", "--quiet"]
        subprocess.run(compress, cwd=folder, check=True)


@contextmanager
def begun(folder: Path, command: str, phase: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command and yield its process when the phase has begun, or when the command has ended."""
    shutil.rmtree(folder / "made", ignore_errors=True)
    (folder / "made").mkdir()
    default = signal.signal(signal.SIGINT, signal.default_int_handler)  # else a background job's child ignores it
    with subprocess.Popen(
        [*PROGRAM, *command.split()], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        while phase and (line := process.stderr.readline()):
            if line.strip() == phase.encode():
                break
        yield process
        process.kill()
    signal.signal(signal.SIGINT, default)


def seconds_to_end(folder: Path, command: str, phase: str, wait: float) -> float | None:
    """Return the seconds from Ctrl-C in a phase to the end of the process, None if it had ended before."""
    with begun(folder, command, phase) as process:
        time.sleep(wait)
        if process.poll() is not None:
            return None
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        process.stderr.read()
        process.wait()
        return time.monotonic() - begin


def main() -> None:
    """Measure all verbs and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--verbs", nargs="*", choices=list(VERBS), default=list(VERBS))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    make_inputs(given.folder)
    chance = random.Random(given.seed)
    print("| verb | phase | seconds to the end | load |\n|---|---|---|---|")
    for verb in given.verbs:
        command, phases = VERBS[verb]
        for phase in phases:
            waits = [chance.uniform(0, LONG_SECONDS) + (0.0 if phase else 1.0) for _ in range(given.times)]
            took = [seconds_to_end(given.folder, command, phase, wait) for wait in waits]
            found = ", ".join("ended before" if one is None else f"{one:.2f}" for one in took)
            print(f"| `{verb}` | {phase or 'any'} | {found} | {os.getloadavg()[0]:.0f} |", flush=True)


if __name__ == "__main__":
    main()
