"""caddie beside what a user would pick instead, at equal seconds and equal bytes: rows for `docs/images/rivals.svg`.

    python studies/demo/text.py packages.jsonl
    python bench/rivals.py --nanogpt DIR --nanochat DIR --search packages.jsonl --rows FILE

DIR are checkouts of github.com/karpathy/nanoGPT and github.com/karpathy/nanochat, left as they are
(`rival_models.py`). First each contender's trials are made on the text of `--search`, one after the other: the settings
with the fewest bits per byte so far, changed as `TRIALS` says. Then the settings that were best at a cap are trained on
the text of `--data`, the demo's, with other random numbers, and each file is scored on its held-out documents. Every
training is packed into every cap that wants it. Rows are kept in FILE: what is there is not run again, whatever ended
the last attempt. `--plan` says what is left, and about how long it takes.

All cores are used, so nothing else should run; a row has the share of them that training had. Seconds are those of
training without its warm-up; packing, scoring and compiling count for nobody.
"""

import argparse
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch
from laps import apart
from rival_models import TRAINING_ONLY, Settings
from rival_programs import CONTENDERS

from caddie.cli.exits import end
from caddie.doctor.host import processor
from caddie.errors import CheckFailed, UserError
from caddie.files import write_file
from caddie.report.display import Display, clock
from caddie.run.stages import held_out_text
from caddie.score import score, use_quickest_threads
from caddie.score.ngram_tilt import NGramTilt

Row = dict[str, Any]
TRIALS: Mapping[str, Sequence[Settings]] = {
    "caddie": ({},),
    "nanoGPT": (
        {},
        {"block_size": 256, "batch_size": 8},
        {"n_layer": 2},
        {"learning_rate": 3e-3},
        {"batch_size": 4},
        {"learning_rate": 2e-3},
        {"n_embd": 192, "n_head": 6},
        {"n_embd": 96, "n_head": 3},
        {"compile": True},
    ),
    "nanochat": (
        {},
        {"max_seq_len": 256, "total_batch_size": 2048},
        {"depth": 2},
        {"dtype": "bfloat16"},
        {"matrix_lr": 0.06, "embedding_lr": 0.9, "unembedding_lr": 0.024},
        {"matrix_lr": 0.2, "embedding_lr": 3.0, "unembedding_lr": 0.08},
        {"aspect_ratio": 96},
        {"total_batch_size": 1024},
        {"compile": True},
    ),
}
"""Changes in turn; each is tried on the best settings so far, the first on none. caddie has `tiny` as it is."""
LONG_SECONDS = 300.0
LONG_TRIALS: Mapping[str, Sequence[Settings]] = {
    "caddie": ({}, {"recipe": "small"}),
    "nanoGPT": (
        {},
        {"block_size": 256, "batch_size": 8},
        {"n_embd": 192, "n_head": 6},
        {"block_size": 512, "batch_size": 4},
        {"n_layer": 4},
        {"block_size": 1024, "batch_size": 2},
        {"learning_rate": 1e-3},
        {"n_layer": 3},
    ),
    "nanochat": (
        {},
        {"max_seq_len": 512},
        {"aspect_ratio": 96},
        {"max_seq_len": 1024},
        {"depth": 4},
        {"depth": 3},
        {"matrix_lr": 0.1, "embedding_lr": 1.5, "unembedding_lr": 0.04},
        {"aspect_ratio": 128},
    ),
}
"""Changes for trials of `LONG_SECONDS` or more. The first is tried on the best settings of shorter trials. The others
have as many as chose `small` (`docs/log.md`)."""
CAPS = (300_000, 1_000_000, 4_000_000)
MAIN_CAP = 1_000_000
"""Cap by which trials are judged. Another cap gets settings of its own where they gain more than `MARGIN` there."""
MARGIN = 0.01
"""Bits per byte; less may be chance."""
SEARCH_SEED, SEED = 1, 2
"""Seed of all trials, and of the finals unless named."""
TILT = NGramTilt(order=6, boost=3.5)
"""That of `make demo`. Finals are scored with it too: it is no matter of training, and would serve anyone."""
BESIDE_SECONDS = 50.0
"""Guess for what a training takes besides its budget: two processes, calibration, packing and scoring."""


@dataclass(frozen=True)
class Job:
    """A training of a contender on a text, with the caps that it is packed into."""

    contender: str
    settings: Settings
    source: str
    seconds: float
    seed: int
    caps: tuple[int, ...]
    trial: int | None = None
    """Number of the trial in a search, None in a final."""

    def made(self, row: Row) -> bool:
        """True if `row` is of this training."""
        wanted = (self.contender, self.settings, text_name(self.source), self.seconds, self.seed, self.trial)
        return wanted == tuple(row[key] for key in ("contender", "settings", "text", "budget", "seed", "trial"))

    def left(self, rows: Iterable[Row]) -> tuple[int, ...]:
        """Return the caps that have no row yet."""
        there = {row["cap_bytes"] for row in rows if self.made(row)}
        return tuple(cap for cap in self.caps if cap not in there)


def text_name(source: str) -> str:
    """Return the name of a text in rows, the same on every machine."""
    return Path(source).name.partition(".")[0]


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file, none if it is not there; `UserError` if it holds anything else."""
    try:
        lines = path.read_text().splitlines() if path.exists() else []
        rows = [json.loads(line) for line in lines]
        assert all({"contender", "settings", "cap_bytes", "bits_per_byte"} <= set(row) for row in rows)
    except (OSError, ValueError, TypeError, AssertionError):
        raise UserError(f"{path} does not hold rows of bench/rivals.py; name another file with --rows") from None
    return rows


# Choosing


def judged(rows: Sequence[Row], contender: str, cap: int) -> list[Row]:
    """Return the trials of a contender at a cap, the best first, without those that failed."""
    found = [row for row in rows if row["contender"] == contender and row["cap_bytes"] == cap]
    sound = [row for row in found if row["trial"] is not None and row["bits_per_byte"] is not None]
    return sorted(sound, key=lambda row: (row["bits_per_byte"], row["trial"]))


def chosen(rows: Sequence[Row], contender: str, cap: int, seconds: float) -> Settings | None:
    """Return the settings for a cap by the longest trials in `rows` of at most `seconds`, or None without any."""
    budgets = [row["budget"] for row in judged(rows, contender, MAIN_CAP) if row["budget"] <= seconds]
    rows = [row for row in rows if row["budget"] == max(budgets, default=None)]
    best, here = judged(rows, contender, MAIN_CAP), judged(rows, contender, cap)
    if not best:
        return dict(here[0]["settings"]) if here else None
    usual = next((row for row in here if row["trial"] == best[0]["trial"]), None)
    if usual and usual["bits_per_byte"] - here[0]["bits_per_byte"] <= MARGIN:
        here = [usual]
    return dict((here or best)[0]["settings"])


def trials(contender: str, seconds: float) -> Sequence[Settings]:
    """Return the changes to try in trials of `seconds`."""
    return (LONG_TRIALS if seconds >= LONG_SECONDS else TRIALS)[contender]


def next_trial(rows: Sequence[Row], contender: str, source: str, seconds: float, caps: tuple[int, ...]) -> Job | None:
    """Return the first trial that `rows` lack, or None after the last."""
    here = [row for row in rows if row["text"] == text_name(source)]
    mine = [row for row in here if row["budget"] == seconds]
    shorter = [row for row in here if row["budget"] < seconds]
    for number, change in enumerate(trials(contender, seconds)):
        before = [row for row in mine if row["trial"] is not None and row["trial"] < number]
        settings = {**(chosen(before or shorter, contender, MAIN_CAP, seconds) or {}), **change}
        job = Job(contender, settings, source, seconds, SEARCH_SEED, caps, trial=number)
        if job.left(mine):
            return job
    return None


def finals(
    rows: Sequence[Row], contender: str, source: str, seconds: float, caps: tuple[int, ...], seed: int = SEED
) -> list[Job]:
    """Return a job for each of the settings that are chosen for any cap."""
    found: list[Job] = []
    for cap in caps:
        settings = chosen(rows, contender, cap, seconds)
        if settings is None:
            continue
        same = next((job for job in found if job.settings == settings), None)
        if same:
            found.remove(same)
        found.append(Job(contender, settings, source, seconds, seed, (*(same.caps if same else ()), cap)))
    return found


# Running


def run_job(job: Job, checkout: Path | None, caps: Sequence[int]) -> list[Row]:
    """Train in a process of its own, pack and score in another; return the rows.

    A training that diverges has rows without a score, as a file has that does not fit.
    """
    with tempfile.TemporaryDirectory(prefix="rivals-") as folder:
        load = os.getloadavg()[0]
        try:
            facts = apart(train_job, job, checkout, Path(folder))
            measured = apart(judge_job, job, checkout, Path(folder), caps)
        except CheckFailed as error:
            facts, measured = {}, [{"cap_bytes": cap, "bits_per_byte": None, "failed": str(error)} for cap in caps]
    row = {
        "contender": job.contender,
        "settings": dict(job.settings),
        "text": text_name(job.source),
        "budget": job.seconds,
        "trial": job.trial,
        "seed": job.seed,
        **facts,
        "load": round(load, 1),
        "machine": processor().name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "version": commit(checkout) if checkout else version("caddie"),
    }
    return [row | one for one in measured]


def commit(checkout: Path) -> str | None:
    """Return the commit of a checkout, or None where git does not know it."""
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    return None


def train_job(job: Job, checkout: Path | None, folder: Path) -> dict[str, Any]:
    """Train, leave the weights in `folder`, and return the facts."""
    contender = CONTENDERS[job.contender](job.settings, checkout)
    with Display() as display:
        display.phase("prepare")
        corpus = contender.corpus(job.source, display)
        display.phase("train")
        outcome = contender.train(corpus, job.seconds, job.seed, folder, display)
    torch.save(outcome.weights, folder / "weights.pt")
    return outcome.facts


def judge_job(job: Job, checkout: Path | None, folder: Path, caps: Sequence[int]) -> list[dict[str, Any]]:
    """Pack the weights in `folder` into each cap, and score the held-out text by what each file holds."""
    settings = {name: value for name, value in job.settings.items() if name not in TRAINING_ONLY}
    contender = CONTENDERS[job.contender](settings, checkout)
    weights = torch.load(folder / "weights.pt", weights_only=True)
    found = []
    with Display() as display:
        corpus = contender.corpus(job.source)
        text = held_out_text(corpus)
        display.phase("calibrate")
        known = contender.calibrate(weights, corpus, display)
        for cap in caps:
            display.phase(f"pack {cap / 1e6:g} MB")
            packed = contender.pack(weights, known, cap, corpus, folder / "file.caddie")
            if packed.file_bytes > cap:
                too_long = f"the file has {packed.file_bytes:,} bytes"
                found.append({"cap_bytes": cap, "bits_per_byte": None, "failed": too_long})
                continue
            use_quickest_threads(packed.model, text, packed.scoring)
            display.phase("score")
            row: Row = {"cap_bytes": cap, "file_bytes": packed.file_bytes, "held_out_bytes": text.source_bytes}
            row["bits_per_byte"] = score(packed.model, text, packed.scoring, display).bits_per_byte
            if job.trial is None:
                tilted = packed.scoring.but(tilt=TILT)
                row["tilted_bits_per_byte"] = score(packed.model, text, tilted, display).bits_per_byte
            found.append(row)
    return found


def jobs(given: argparse.Namespace, rows: list[Row]) -> Iterator[Job]:
    """Yield what is left, the search first; each is chosen by the rows that are there when it is asked for."""
    caps = tuple(given.caps)
    for contender in given.contenders if given.search else ():
        while job := next_trial(rows, contender, given.search, given.search_seconds, tuple(sorted({*caps, MAIN_CAP}))):
            yield job
    for seed, seconds, contender in product(given.seeds, given.seconds, given.contenders):
        yield from (job for job in finals(rows, contender, given.data, seconds, caps, seed) if job.left(rows))


def plan(given: argparse.Namespace, rows: Sequence[Row]) -> str:
    """Return what is left, and about how long it takes; how many finals differ is known after the search."""
    planned, left, known = 0, 0.0, True
    caps = tuple(given.caps)
    for contender in given.contenders:
        made = {
            row["trial"]
            for row in rows
            if (row["contender"], row["text"], row["budget"])
            == (contender, text_name(given.search), given.search_seconds)
        }
        missing = len(trials(contender, given.search_seconds)) - len(made - {None})
        planned, known = planned + missing, known and not missing
        for seed, seconds in product(given.seeds, given.seconds):
            wanted = finals(rows, contender, given.data, seconds, caps, seed)
            count = len(caps) if missing else len([job for job in wanted if job.left(rows)])
            left += count * (seconds + BESIDE_SECONDS)
    search = planned * (given.search_seconds + BESIDE_SECONDS)
    return f"{planned} trials, about {clock(search)}; finals, {'about' if known else 'at most'} {clock(left)}"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, metavar="DIR", help="a checkout of nanoGPT")
    parser.add_argument("--nanochat", type=Path, metavar="DIR", help="a checkout of nanochat")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--search", required=True, metavar="TEXT", help="text that settings are chosen on")
    parser.add_argument("--search-seconds", type=float, default=60.0, metavar="N", help="of a trial; 60 unless named")
    parser.add_argument("--data", default="stdlib", metavar="TEXT", help="text of the finals: stdlib, the demo's")
    parser.add_argument("--seconds", type=float, nargs="+", default=[60.0, 300.0], metavar="N", help="of the finals")
    parser.add_argument("--seeds", type=int, nargs="+", default=[SEED], metavar="N", help=f"of the finals; {SEED}")
    parser.add_argument("--caps", type=int, nargs="+", default=list(CAPS), metavar="BYTES")
    parser.add_argument("--rows", type=Path, required=True, metavar="FILE", help="JSON lines, kept and added to")
    parser.add_argument("--plan", action="store_true", help="say what is left, and run nothing")
    given = parser.parse_args(arguments)
    if min(given.search_seconds, *given.seconds) <= 0 or min(given.caps) < 1:
        parser.error("seconds and bytes are above 0")
    if text_name(given.search) == text_name(given.data):
        parser.error("--search and --data are one text: settings would be chosen on what they are judged by")
    return given


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is left, and keep its rows."""
    given = parsed(arguments)
    rows = read_rows(given.rows)
    checkouts = {name: getattr(given, name.lower(), None) for name in CONTENDERS}
    for name in given.contenders:
        CONTENDERS[name]({}, checkouts[name])
    print(plan(given, rows), flush=True)
    for job in () if given.plan else jobs(given, rows):
        kind = "final" if job.trial is None else f"trial {job.trial + 1} of {len(trials(job.contender, job.seconds))}"
        print(f"{job.contender}, {kind}: {json.dumps(job.settings)}, {job.seconds:g} s on {job.source}", flush=True)
        found = run_job(job, checkouts[job.contender], job.left(rows))
        rows += found
        write_file(given.rows, "".join(json.dumps(row) + "\n" for row in rows).encode())
        for row in found:
            if row["bits_per_byte"] is None:
                print("", f"{row['cap_bytes']:,}", row["failed"], sep="\t", flush=True)
                continue
            cells = [
                f"{row['cap_bytes']:,}",
                f"{row['file_bytes']:,}",
                f"{row['bits_per_byte']:.4f}",
                f"{row['steps']:,}",
            ]
            print("", *cells, sep="\t", flush=True)


if __name__ == "__main__":
    end(main)
