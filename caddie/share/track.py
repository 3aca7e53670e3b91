"""Trackers: a run's log, recipe and result in trackio, Weights & Biases or TensorBoard.

A run that is going on is followed by a process of its own, which reads `log.jsonl` as it grows: no tracker can slow the
training down, stop it, or write to its standard output.
"""

import shlex
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from caddie.errors import UserError, first_line
from caddie.files import reason
from caddie.lab.executors import why_it_died
from caddie.report.charts import is_finite
from caddie.report.read import leaves, parse_events, parse_finite, pick, read_json, read_result
from caddie.report.run_files import LOG, RECIPE, RESULT
from caddie.runtime.child_process import child_environment
from caddie.runtime.progress import Event, Progress

PROJECT = "caddie"
"""Project that the runs of trackio and Weights & Biases are in."""
POLL_SECONDS = 1.0
"""Time between two looks at a log that grows."""
PATIENCE_SECONDS = 30.0
"""Time that a tracker has after the run to send the rest."""
_CURVES = {"step": "train", "held_out": "held_out", "forecast": "forecast"}
"""Kind of event to the prefix of its numbers' names."""
_RESULT = ("bits_per_byte", "artifact_bytes", "cap_bytes", "under_cap", "verified", "scores", "seconds")
"""Fields of `result.json` that a tracker gets."""


class Trackio:
    """Tracker on this machine, or in a Space of the hub (https://github.com/gradio-app/trackio)."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        trackio = import_module("trackio")
        self._run = trackio.init(
            project=PROJECT, name=folder.name, config=config, auto_log_cpu=False, auto_log_gpu=False
        )
        self._end = trackio.finish
        self.place = f"trackio show --project {PROJECT}"

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add a point to each curve named."""
        self._run.log(dict(numbers), step=step)

    def finish(self, step: int, result: Mapping[str, float]) -> None:
        """Add the result as points at the last step, for trackio has no other place for it."""
        self._run.log(dict(result), step=step)
        self._end()


class Wandb:
    """Weights & Biases (https://docs.wandb.ai); WANDB_MODE=offline keeps all on disk."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        wandb = import_module("wandb")
        settings = wandb.Settings(console="off")
        self._run = wandb.init(project=PROJECT, name=folder.name, config=config, settings=settings)
        self._run.define_metric("*", step_metric="step")  # its own steps must rise, and a forecast may come late
        self.place = self._run.url or f"wandb sync {Path(self._run.dir).parent}"

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add a point to each curve named."""
        self._run.log({**numbers, "step": step})

    def finish(self, step: int, result: Mapping[str, float]) -> None:
        """Add the result to the run's summary and send all."""
        self._run.summary.update(dict(result))
        self._run.finish()


class TensorBoard:
    """Event files in the folder `tensorboard` of the run, in place of those of an earlier call."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        own = folder / "tensorboard"
        for left in own.glob("events.out.tfevents.*"):
            left.unlink()
        self._writer = import_module("torch.utils.tensorboard").SummaryWriter(str(own))
        text = "\n".join(f"    {name} = {value}" for name, value in leaves(config))  # Markdown: four spaces for code
        self._writer.add_text("recipe", text, 0)
        self.place = f"tensorboard --logdir {folder.parent}"

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add a point to each curve named."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, step: int, result: Mapping[str, float]) -> None:
        """Add the result as points at the last step and close the file."""
        self.log(step, result)
        self._writer.close()


Tracker = Trackio | Wandb | TensorBoard
"""One run in a tracker; `place` is its address there, or the command that shows it."""
TRACKERS: dict[str, type[Tracker]] = {one.__name__.lower(): one for one in (Trackio, Wandb, TensorBoard)}
"""Name of a tracker's library to its adapter."""


def check_installed(kind: str) -> None:
    """Raise `UserError` if the library of a tracker is missing."""
    if find_spec(kind) is None:
        raise UserError(f"{kind} is not installed; install it with: pip install {kind}")


def open_tracker(kind: str, folder: Path, end: threading.Event) -> Tracker:
    """Begin the run of a tracker as soon as the run in `folder` has a log; `UserError` if it has none at the `end`."""
    check_installed(kind)
    while not (folder / LOG).is_file():
        if end.wait(POLL_SECONDS) and not (folder / LOG).is_file():
            raise UserError(f"{folder / LOG} is missing; name the folder of a run that has trained")
    begun = read_json(folder / RECIPE)
    recipe = pick(begun, "recipe")
    with _errors(kind):
        settings = recipe if isinstance(recipe, dict) else {}
        return TRACKERS[kind](folder.resolve(), {**settings, "seed": pick(begun, "seed")})


def send(kind: str, tracker: Tracker, folder: Path, end: threading.Event) -> int:
    """Send the log of a run while it grows, and the rest and the result at the `end`; return the number of events."""
    offset, sent, last, count, over = 0, dict[str, int](), 0, 0, False
    with _errors(kind):
        while not over:
            over = end.wait(POLL_SECONDS)  # then one last read gets all that was written
            with (folder / LOG).open("rb") as file:
                file.seek(offset)  # a resumed run writes a new file that begins with the old one
                chunk = file.read()
            whole = chunk[: chunk.rfind(b"\n") + 1]
            offset += len(whole)
            for event in latest(parse_events(whole.split(b"\n"), parse_finite), sent):
                last, count = max(last, event["step"]), count + 1
                tracker.log(event["step"], numbers(event))
        result = read_result(folder / RESULT) if (folder / RESULT).exists() else {}
        found = leaves({name: result.get(name) for name in _RESULT})
        tracker.finish(last, {f"result/{name}": float(value) for name, value in found if is_finite(value)})
    return count


def latest(events: Iterable[dict[str, Any]], sent: dict[str, int]) -> list[dict[str, Any]]:
    """Return the events that make points of curves; those of a resumed run replace its earlier ones.

    `sent` holds the last step of each kind that was returned before. It is updated, and no such step comes again.
    """
    kept: dict[str, list[dict[str, Any]]] = {kind: [] for kind in _CURVES}
    for event in events:
        kind, step = event.get("event"), event.get("step")
        if kind in kept and isinstance(step, int) and step > sent.get(kind, -1):
            while kept[kind] and kept[kind][-1]["step"] >= step:
                kept[kind].pop()
            kept[kind].append(event)
    sent.update({kind: found[-1]["step"] for kind, found in kept.items() if found})
    return sorted((event for found in kept.values() for event in found), key=lambda event: event["step"])


def numbers(event: Event) -> dict[str, float]:
    """Return the numbers of an event by the names that a tracker shows, as `train/bits_per_byte`."""
    prefix = _CURVES[event["event"]]
    return {f"{prefix}/{name}": value for name, value in event.items() if name != "step" and is_finite(value)}


@contextmanager
def tracked(kind: str | None, folder: Path, progress: Progress) -> Iterator[None]:
    """Follow the run in `folder` with a tracker while the block trains it. Its failures become notes."""
    if kind is None:
        yield
        return
    command = [sys.executable, "-m", "caddie", "track", str(folder), "--to", kind, "--follow"]
    with ExitStack() as stack:
        try:
            said = stack.enter_context(TemporaryFile("w+", encoding="utf-8", errors="replace"))
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env=child_environment(),
                start_new_session=True,
            )  # a session of its own, so that Ctrl-C is for the run alone
        except OSError as error:
            progress.note(f"{kind}: {reason(error)}; the run goes on without it")
            yield
            return
        late = threading.Event()
        watch = threading.Thread(target=_watch, args=(kind, folder, process, said, progress, late), daemon=True)
        watch.start()
        try:
            yield
        finally:
            assert process.stdin
            process.stdin.close()
            progress.step({"event": "doing", "text": f"waiting for {kind}"})
            watch.join(PATIENCE_SECONDS)
            if watch.is_alive():
                late.set()
                process.kill()
                watch.join(1.0)


def _watch(
    kind: str,
    folder: Path,
    process: subprocess.Popen[str],
    said: IO[str],
    progress: Progress,
    late: threading.Event,
) -> None:
    """Show where the tracker's run is, and the reason if its process fails, or is killed for being `late`."""
    assert process.stdout
    with process.stdout as places:
        for line in places:
            progress.note(f"followed by {kind}; look with: {line.strip()}")
    if (status := process.wait()) and (folder / LOG).is_file():  # without a log the run itself says what failed
        said.seek(0)
        lines = said.read().strip().splitlines() or [f"it ended with status {status}"]
        why = (status < 0 and why_it_died(status)) or lines[-1].removeprefix("caddie: ")
        why = f"took more than {PATIENCE_SECONDS:.0f} s to end" if late.is_set() else why
        again = shlex.join(["caddie", "track", str(folder), "--to", kind])
        progress.note(f"{kind}: {why}; the run's own files are complete, and `{again}` sends it again")


@contextmanager
def _errors(kind: str) -> Iterator[None]:
    """Turn any exception of a tracker into a `UserError`, and send its standard output to standard error."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{kind} failed: {first_line(error)}") from None
