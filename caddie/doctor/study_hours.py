"""Core hours that a study would take on this machine, before it runs: short timings, and the rest by FLOPs."""

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from caddie.data.corpus import Corpus
from caddie.doctor import estimates, pace
from caddie.errors import count
from caddie.lab.job import Run
from caddie.lab.modelled import flops_per_step
from caddie.lab.runner import training_of
from caddie.lab.study import BASE
from caddie.model import build
from caddie.recipes.recipe import Recipe
from caddie.report.tables import table
from caddie.run.result import processor_name
from caddie.run.stages import held_out_text
from caddie.runtime.progress import SILENT, Progress
from caddie.score import score_kinds

SCORED_TOKENS = 8192
"""Held-out tokens that are scored for a timing, in whole documents."""


@dataclass(frozen=True)
class LabelHours:
    """Core seconds of one run of a label, and the runs that are left."""

    runs: int
    steps: int | None
    train_seconds: float
    """Core seconds of training; 0 for a label that reuses another label's training."""
    score_seconds: float
    trained_with: str | None
    """Label whose training it reuses."""

    @property
    def core_seconds(self) -> float:
        """Core seconds of all runs left."""
        return self.runs * (self.train_seconds + self.score_seconds)


@dataclass(frozen=True)
class StudyHours:
    """Estimate of a study."""

    study: str
    processor: str
    labels: dict[str, LabelHours]

    @property
    def runs(self) -> int:
        """Runs left."""
        return sum(one.runs for one in self.labels.values())

    @property
    def core_hours(self) -> float:
        """Core hours of all runs left."""
        return sum(one.core_seconds for one in self.labels.values()) / 3600

    def to_json(self) -> dict[str, Any]:
        """Return the estimate as JSON values."""
        return {**asdict(self), "runs": self.runs, "core_hours": self.core_hours}

    def __str__(self) -> str:
        minutes = [(one.train_seconds / 60, one.score_seconds / 60) for one in self.labels.values()]
        rows = [
            [one.runs, one.steps, f"{train:.1f}", f"{score:.1f}", f"{one.core_seconds / 3600:.2f}", label]
            for (label, one), (train, score) in zip(self.labels.items(), minutes, strict=True)
        ]
        head = ["runs", "steps", "train, min", "score, min", "core hours", "label"]
        total = f"{count(self.runs, 'run')} left, {self.core_hours:,.1f} core hours without packing"
        return f"{table(rows, head)}\n\n{self.study}: {total}, by {self.processor}"


def study_hours(name: str, planned: list[Run], progress: Progress = SILENT) -> StudyHours:
    """Estimate the runs of a study that are not over; `planned` is what `plan` returns.

    Twenty steps of the base are timed with one thread. Scoring is timed on a few documents, once for each setting of
    `score`, with the model of the first label that has it. Times are CPU times of this process, so other work of the
    machine does not count. Training of the other labels is scaled by FLOPs per step.
    """
    first: dict[str, Run] = {}
    for run in planned:
        first.setdefault(run.label, run)
    base, threads = first[BASE], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        progress.step({"event": "doing", "text": "timing the base's steps"})
        per_flop = _seconds_per_flop(base.recipe)
        scored: dict[str, float] = {}
        for run in first.values():
            if (key := run.recipe.score.key()) not in scored:
                progress.step({"event": "doing", "text": f"timing the scoring of {run.label}"})
                scored[key] = _scoring_seconds(run)
    finally:
        torch.set_num_threads(threads)
    trained: dict[object, str] = {}
    labels = {}
    for label, run in first.items():
        other = trained.setdefault(training_of(run), label)
        train, steps = run.recipe.train, run.recipe.train.steps
        seconds = train.seconds if train.seconds is not None else per_flop * flops_per_step(run.recipe) * (steps or 0)
        labels[label] = LabelHours(
            runs=sum(not one.over for one in planned if one.label == label),
            steps=steps,
            train_seconds=seconds if other == label else 0.0,
            score_seconds=scored[run.recipe.score.key()],
            trained_with=None if other == label else other,
        )
    return StudyHours(name, processor_name(), labels)


def _seconds_per_flop(recipe: Recipe) -> float:
    """Return core seconds for each FLOP of training."""
    began, cores = time.perf_counter(), time.process_time()
    found = pace.measure(recipe, 1)
    share = (time.process_time() - cores) / (time.perf_counter() - began)
    expected = estimates.estimate(recipe.train.but(seconds=None, steps=1000), 1, found.seconds_per_token)
    assert expected is not None
    seconds = expected.seconds or 0.0
    return share * seconds / expected.steps / flops_per_step(recipe)


def _scoring_seconds(run: Run) -> float:
    """Return core seconds of scoring the whole held-out text as a run does, with an untrained model."""
    text = held_out_text(Corpus.load(run.corpus))
    model = build(run.recipe.model, 0, torch.device("cpu")).eval()
    begins = (text.tokens == text.bos).nonzero()[0]
    end = next((int(one) for one in begins if one >= SCORED_TOKENS), len(text.tokens) - 1)
    stretch = replace(text, tokens=text.tokens[: end + 1])
    began = time.process_time()
    score_kinds(model, stretch, run.recipe.score)
    return (time.process_time() - began) * len(text.tokens) / len(stretch.tokens)
