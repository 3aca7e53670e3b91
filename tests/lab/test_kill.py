"""A study whose driver is killed again and again loses no finished run and does none twice."""

import json
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tiny_study import begin_study, events, write_study

from caddie.lab.executors import GRACE_SECONDS

KILLS, RUNS, WORKERS = 10, 30, min(2, os.cpu_count() or 1)
RATES = {f"rate {rate}": {"train.optimizers.matrix.lr": rate} for rate in (0.01, 0.02, 0.03, 0.05)}
HALVES = {f"{label}, halves": diff | {"pack.quantizers.matrix": "Float16"} for label, diff in RATES.items()}
ENTRIES = {**RATES, "halves": {"pack.quantizers.matrix": "Float16"}, **HALVES}
"""With the base ten labels, of five trainings."""


class Watched:
    """What is known of the runs of a study's folder, and must not change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results: dict[Path, tuple[int, int]] = {}
        self.rows: set[tuple[str, int]] = set()

    def look(self) -> None:
        """Note what is finished, and see that what was finished still is, and is the same file."""
        for path in self.folder.glob("runs/tiny/*/result.json"):
            self.results.setdefault(path, (path.stat().st_ino, path.stat().st_mtime_ns))
        for path, file in self.results.items():
            assert (path.stat().st_ino, path.stat().st_mtime_ns) == file, f"{path} was written again"
        rows = self.read_rows()
        assert self.rows <= rows, f"{self.rows - rows} were lost"
        self.rows = rows

    def read_rows(self) -> set[tuple[str, int]]:
        """Finished rows of the results."""
        path = self.folder / "results.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        assert all(row["state"] == "finished" for row in rows), rows
        found = {(row["label"], row["seed"]) for row in rows}
        assert len(found) == len(rows), "a run counts twice"
        return found

    def at_work(self) -> list[int]:
        """Processes that do a job of the study."""
        found = []
        for name in os.listdir("/proc"):
            with suppress(OSError):
                words = Path("/proc", name, "cmdline").read_bytes().decode().split("\0")
                if name.isdigit() and "trial" in words and os.readlink(f"/proc/{name}/cwd") == str(self.folder):
                    found.append(int(name))
        return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="reads /proc")
def test_a_driver_that_is_killed_again_and_again(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print(f"random moments of seed {seed}")
    chance = random.Random(seed)
    write_study(tmp_path, ENTRIES, seeds=3, steps=3)
    watched, killed, grace = Watched(tmp_path), 0, []
    while True:
        driver = begin_study(tmp_path, "--workers", str(WORKERS), "--quiet")
        left = chance.uniform(0.0, 5.0) if killed < KILLS else 600.0
        begun = killed % 3 == 2  # now and then it is killed before it has begun a run
        while driver.poll() is None and left > 0:
            begin = time.monotonic()
            watched.look()
            time.sleep(0.05)
            begun = begun or bool(watched.at_work())
            left -= (time.monotonic() - begin) * begun
        if driver.poll() is not None:
            break
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        killed += 1
        if killed % 2:  # every other time the next driver meets what the last has left
            begin = time.monotonic()
            while watched.at_work():
                assert time.monotonic() - begin < GRACE_SECONDS + 5
                watched.look()
                time.sleep(0.05)
            grace.append(time.monotonic() - begin)
    assert driver.returncode == 0, (tmp_path / "printed.txt").read_text()
    print(f"{killed} kills; orphans were gone after {', '.join(f'{seconds:.1f}' for seconds in grace)} s")
    assert killed == KILLS, "the study was over too soon: kill sooner"
    watched.look()
    assert len(watched.rows) == len(watched.results) == RUNS
    assert not watched.at_work()
    for path in watched.results:
        check_log(path.parent)


def check_log(run: Path) -> None:
    """Every start of a run goes on from where it was saved, alone, and the last one goes to the end."""
    log = events(run)
    starts = [index for index, event in enumerate(log) if event["event"] == "start"]
    for begin, end in zip(starts, [*starts[1:], len(log)], strict=True):
        steps = [event["step"] for event in log[begin:end] if event["event"] == "step"]
        assert steps == list(range(log[begin]["step"] + 1, log[begin]["step"] + 1 + len(steps))), f"two at once: {run}"
    assert [event["event"] for event in log[starts[-1] :]].count("end") == 1
    assert log[-1]["event"] == "end"
    finished = (run / "result.json").stat().st_mtime
    assert (run / "log.jsonl").stat().st_mtime <= finished, f"{run} went on after it was finished"
