"""Speed of a recipe: twenty training steps that are timed, rates of known machines, and what a run would come to.

The steps take random tokens, and the trainer, warm-up and loader of a real run, in a process of their own, which may be
killed by its time limit or by the system for its memory.
"""

import json
import os
import re
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
from caddie.config.schedules import IntSchedule, PiecewiseConstant, TrainProgress, all_values, int_at, value_at
from caddie.data.shards import Tokens
from caddie.errors import CheckFailed, UserError
from caddie.model import GPT, build
from caddie.model.flops import flops_per_token
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
"""On a CPU, if the steps and their warm-up would take longer, single rows are timed in their place."""
LONGEST_SECONDS = 600.0
"""Time limit, after which the process is killed."""
_POLL_SECONDS = 1.5
_CHOICES = 9  # most steps that the warm-up takes to choose threads and number format
_BOS = 1
_DOCUMENT_TOKENS = 600  # mean length of the random documents, about that of web pages
_CELLS = 1000  # parts of the budget that an estimate adds up


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
            with suppress(OSError, AttributeError):  # it has ended, and with it those that compile for it; or Windows
                os.killpg(process.pid, SIGKILL)
            process.kill()


def _read(status: int, out: bytes, err: bytes) -> Pace | str:
    """Return what the last line of output says; libraries may have printed before it."""
    if status == 0:
        try:
            found = json.loads(out.splitlines()[-1])
            if isinstance(found, str):
                return found
            return Pace(**{**found, "seconds_per_token": tuple(map(tuple, found["seconds_per_token"]))})
        except (ValueError, TypeError, KeyError, IndexError):
            pass
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
    """Run in the other process: measure the recipe that the command line names and print one line of JSON."""
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
        torch.set_num_threads(max(1, torch.get_num_threads() // processes))  # as when so many are started
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
    documents, count = [_documents(gpt.vocabulary, 8 * trainer.micro_tokens)], trainer.micro_tokens
    stream = train.loader.build(documents, tokens=count, sequence_length=train.longest_row, seed=0, bos=_BOS)
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


@dataclass(frozen=True)
class Reference:
    """A measured training rate."""

    device: str
    """Pattern of the device name."""
    recipe: str
    tokens_per_second: float
    """Rate of one process, before depth recurrence begins."""
    source: str
    date: str


_LOGS = "openai/parameter-golf, records/track_10min_16mb/"
_AVX2 = "docs/results/2026-11-22-two-cores-avx2.md"
_AVX512 = "docs/results/2026-11-22-two-cores-avx512.md"


def _record(device: str, recipe: str, tokens: int, milliseconds: float, folder: str) -> Reference:
    """Return the rate of one of eight GPUs in a public log, given a step's tokens and milliseconds."""
    return Reference(device, recipe, tokens / milliseconds * 1e3 / 8, f"{_LOGS}{folder}, 8 GPUs", folder[:10])


REFERENCES = (
    _record("H100", "baseline", 524_288, 43.54, "2026-03-17_NaiveBaseline"),
    _record("H200", "lower_lr", 524_288, 41.60, "2026-03-18_LowerLR"),
    Reference("H100", "single_gpu", 524_288 / 338e-3, "public system 001, one GPU, FlashAttention 3", "2026-03"),
    _record("H100", "exclusive_everywhere", 786_432, 86.63, "2026-03-25_ValCalib_GPTQ_XSA_BigramHash3072"),
    _record("H100", "three_layer_recurrence", 786_432, 102.0, "2026-04-09_SP8192_3LayerRecur_ParResid_QK525_LegalTTT"),
    _record("H100", "document_attention", 786_432, 95.8, "2026-04-10_VarLenAttn"),
    _record("H100", "longer_warmdown", 786_432, 96.3, "2026-04-27_SP8192_LQER_SparseGate_BOSSmearFix_9HpStack_1.0611"),
    Reference("AMD EPYC, 2 cores,.*bf16", "baseline_mini", 21_070, f"{_AVX512}, a shared host", "2026-11-22"),
    Reference("AMD EPYC, 2 cores, avx2$", "tiny", 29_700, f"{_AVX2}, a shared host", "2026-11-22"),
)
"""Public logs of eight GPUs include their exchanges, so one process alone should be a little faster."""


@dataclass(frozen=True)
class Expected:
    """The rate to expect of a machine."""

    tokens_per_second: float
    reference: Reference
    scaled: bool
    """True if the reference is of another model, scaled by FLOPs per token."""


def expected(device: str, recipe: Recipe) -> Expected | None:
    """Return the rate to expect of one process on a device of this name, or None if there is no reference for it.

    A GPU goes by its name, a CPU by `NAME, N cores, INSTRUCTION SETS`. The rate of the same model is taken as it is.
    Otherwise that of the model nearest in FLOPs per token is scaled by their ratio, right to a factor of about two.
    """
    known = [(one, find(one.recipe)) for one in REFERENCES if re.search(rf"\b{one.device}\b", device)]
    for reference, other in known:
        if other.model == recipe.model and other.train.sequence_length == recipe.train.sequence_length:
            return Expected(reference.tokens_per_second, reference, False)
    if not known:
        return None
    ratios = {reference: _flops(other) / _flops(recipe) for reference, other in known}
    nearest = min(ratios, key=lambda reference: max(ratios[reference], 1 / ratios[reference]))
    return Expected(nearest.tokens_per_second * ratios[nearest], nearest, True)


def _flops(recipe: Recipe) -> float:
    return flops_per_token(recipe.model, recipe.train.sequence_length, 0.0)


@dataclass(frozen=True)
class Estimate:
    """Steps, tokens and seconds of training, without warm-up, packing and scoring."""

    steps: int
    tokens: int
    seconds: float | None
    """None for a budget of steps at an unknown pace."""


def estimate(train: Train, processes: int, pace: Sequence[tuple[float, float]] | None) -> Estimate | None:
    """Estimate a training run at a pace: pairs of progress, and seconds per token of a process from there on.

    None for a budget of seconds at an unknown pace. A step at progress p uses max(1 / steps, seconds(p) / budget) of
    the budget, so the steps are the integral of its inverse over progress.
    """
    budget = train.budget
    if pace is None and budget.seconds is not None:
        return None
    steps = tokens = seconds = 0.0
    for cell in range(_CELLS):
        part = (cell + 0.5) / _CELLS
        progress = TrainProgress(round(part * (budget.steps or 0)), part * (budget.seconds or 0.0), budget)
        batch = int_at(train.batch_tokens, progress)
        step = [each for begin, each in pace or ((0.0, 0.0),) if begin <= part][-1] * batch / processes
        used = max(1 / budget.steps if budget.steps else 0.0, step / budget.seconds if budget.seconds else 0.0)
        count = 1 / _CELLS / used
        steps, tokens, seconds = steps + count, tokens + count * batch, seconds + count * step
    return Estimate(round(steps), round(tokens), None if pace is None else seconds)
