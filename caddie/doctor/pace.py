"""Time twenty training steps of a recipe on random tokens, with the trainer, warm-up and loader of a real run.

They run in a process of their own, because its time limit, or the system when memory is short, may kill it.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from caddie.config import assignments
from caddie.config.schedules import IntSchedule, PiecewiseConstant, all_values, int_at, value_at
from caddie.data.shards import Tokens
from caddie.errors import CheckFailed, UserError
from caddie.model import GPT, build
from caddie.pack import container
from caddie.recipes.catalog import find, supply_parts
from caddie.recipes.recipe import Recipe
from caddie.report.tables import one_line
from caddie.run.cap import cap_of_recipe
from caddie.run.result import device_name
from caddie.runtime.child_process import child_environment
from caddie.runtime.distributed import Ranks, local_device
from caddie.runtime.interrupt import SIGKILL
from caddie.runtime.memory import peak_bytes
from caddie.train.prefetch import prefetch
from caddie.train.settings import Train
from caddie.train.size_forecast import Forecaster
from caddie.train.trainer import Trainer
from caddie.train.warmup import warm_up, warmup_seconds, warmup_steps

STEPS = 20
PATIENCE_SECONDS = 120.0
"""Time limit of the steps and their warm-up on a CPU; if they would take longer, single rows are timed instead."""
LONGEST_SECONDS = 600.0
"""Time limit, after which the process is killed."""
_POLL_SECONDS = 1.5
_CHOICES = 9  # most steps that the warm-up takes to choose threads and number format
_BOS = 1
_DOCUMENT_TOKENS = 600  # mean length of the random documents, about that of web pages


@dataclass(frozen=True)
class Pace:
    """Measured speed of one process of a run."""

    seconds_per_token: tuple[tuple[float, float], ...]
    """Progress at which a shape of the graph begins, and seconds per token from there on."""
    steps: int
    """Steps timed; 0 if only rows were."""
    warmup_seconds: float
    device: str
    precision: str
    threads: int
    attention: str
    peak_bytes: int
    """Peak memory of the process: GPU memory if it has a GPU."""
    artifact_bytes: int
    """Packed size of untrained weights, without tokenizer and source."""

    @property
    def tokens_per_second(self) -> float:
        """Rate at the start of the run."""
        return 1.0 / self.seconds_per_token[0][1]


def measured(
    name: str, settings: Sequence[str], parts: Sequence[Path], processes: int, poll: Callable[[], object]
) -> Pace | str:
    """Return the pace of a recipe on this machine, or the reason why there is none.

    `poll` is called every 1.5 seconds meanwhile.
    """
    job = json.dumps([name, list(settings), list(map(str, parts)), processes])
    command = [sys.executable, "-c", "from caddie.doctor import pace; pace.main()", job]
    deadline, pipe, nothing = time.monotonic() + LONGEST_SECONDS, subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(
        command, stdin=nothing, stdout=pipe, stderr=pipe, start_new_session=True, env=child_environment()
    ) as process:
        try:
            while time.monotonic() <= deadline:
                with suppress(subprocess.TimeoutExpired):
                    out, err = process.communicate(timeout=_POLL_SECONDS)
                    return _read(process.returncode, out, err)
                poll()
            return f"it took more than {LONGEST_SECONDS:,.0f} seconds"
        finally:
            with suppress(OSError, AttributeError):  # it has ended with its compiler processes, or this is Windows
                os.killpg(process.pid, SIGKILL)
            process.kill()


def _read(status: int, out: bytes, err: bytes) -> Pace | str:
    """Return what the last line of output says; libraries may have printed before it."""
    if status == 0:
        with suppress(ValueError, TypeError, KeyError, IndexError):
            found = json.loads(out.splitlines()[-1])
            if isinstance(found, str):
                return found
            return Pace(**{**found, "seconds_per_token": tuple(map(tuple, found["seconds_per_token"]))})
    if status < 0:
        cause = ", as the system does when memory is short" * (status == -SIGKILL)
        return f"its process was ended by signal {-status}{cause}"
    last = err.decode("utf-8", "replace").strip().splitlines()[-1:]
    return one_line(f"its process failed with status {status}: {' '.join(last)}")


def named(name: str, settings: Sequence[str], parts: Sequence[Path] = ()) -> Recipe:
    """Return the recipe of this name with settings of the form PATH=VALUE; `parts` are the users' files it needs."""
    supply_parts([name], parts)
    return find(name).but(assignments(settings))


def main() -> None:
    """Run in the child process: measure the recipe that the command line names and print one line of JSON."""
    name, settings, parts, processes = json.loads(sys.argv[1])
    result: dict[str, Any] | str
    try:
        result = asdict(measure(named(name, settings, list(map(Path, parts))), processes))
    except (UserError, CheckFailed, MemoryError, RuntimeError) as error:
        result = one_line(str(error) or "not enough memory")
    print(f"\n{json.dumps(result)}")


def measure(recipe: Recipe, processes: int, steps: int = STEPS) -> Pace:
    """Time steps of one of `processes` processes, without their exchanges."""
    ranks, train = Ranks(device=local_device()), _share(recipe.train, processes)
    packing = recipe.pack.but(cap_bytes=cap_of_recipe(recipe).file_bytes)
    forecaster = Forecaster(recipe.model, packing, lambda readers, sections: len(container.pack(sections)))
    weights = dict(build(recipe.model, 0, torch.device("cpu")).named_parameters())
    artifact_bytes = forecaster.forecast(weights, anew=True).file_bytes  # as a run does before its first step
    if ranks.device.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // processes))  # as if that many shared the cores
        rows = train.but(batch_tokens=train.longest_row, micro_batches=1, warmup_steps=1, compile="never")
        rough = _timed(recipe.model, rows, ranks, 0, artifact_bytes)
        shapes = len(rough.seconds_per_token)
        before = _CHOICES + shapes * warmup_steps(train, shapes)
        most = max(all_values(train.batch_tokens)) * max(seconds for _, seconds in rough.seconds_per_token)
        if (before + max(steps, shapes)) * most > PATIENCE_SECONDS:
            return replace(rough, warmup_seconds=warmup_seconds(train, shapes, most))
    return _timed(recipe.model, train, ranks, steps, artifact_bytes)


def _timed(gpt: GPT, train: Train, ranks: Ranks, steps: int, artifact_bytes: int) -> Pace:
    """Time `steps` steps, divided among the shapes that the run goes through, at least one for each."""
    trainer = Trainer(gpt, train, 0, ranks)
    stream = train.stream([_documents(gpt.vocabulary, 8 * trainer.micro_tokens)], 0, _BOS)
    rows = stream.micro_batch(0).inputs.shape
    began = time.perf_counter()
    execution, _ = warm_up(trainer, rows)
    warmed = time.perf_counter() - began
    found = []
    shapes = trainer.shapes().values()
    each = ceil(steps / len(shapes)) or 1
    with prefetch(stream, trainer.indices(0), ranks.device, _BOS) as batches:
        for train_progress in shapes:
            lr_scale = value_at(train.lr_schedule, train_progress)
            _wait(ranks)
            began = time.perf_counter()
            for _ in range(each):
                trainer.launch(batches, train_progress, _BOS)
                trainer.zero_grad()
                trainer.update_average(train_progress, lr_scale)
            _wait(ranks)
            tokens = each * int_at(train.batch_tokens, train_progress)
            found.append((train_progress.progress, (time.perf_counter() - began) / tokens))
    return Pace(
        seconds_per_token=tuple(found),
        steps=each * len(shapes) if steps else 0,
        warmup_seconds=warmed,
        device=device_name(ranks.device, execution.threads),
        precision=execution.precision,
        threads=execution.threads,
        attention=trainer.attention(rows[1]),
        peak_bytes=peak_bytes(ranks.device),
        artifact_bytes=artifact_bytes,
    )


def _wait(ranks: Ranks) -> None:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)


def _share(train: Train, processes: int) -> Train:
    tokens: IntSchedule = train.batch_tokens
    if isinstance(tokens, PiecewiseConstant):
        tokens = replace(tokens, values=tuple(value // processes for value in tokens.values))
    else:
        tokens //= processes
    return train.but(batch_tokens=tokens, micro_batches=train.micro_batches // processes)


def _documents(vocabulary: int, count: int) -> Tokens:
    """Return random tokens, in documents of random lengths."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(_BOS + 1, vocabulary, count, dtype=np.uint16)
    tokens[generator.random(count) < 1 / _DOCUMENT_TOKENS] = _BOS
    tokens[0] = _BOS
    return tokens
