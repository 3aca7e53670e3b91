"""What comes after training: scoring, compression, and opening the file, each timed on made-up weights and tokens."""

import tempfile
import time
from dataclasses import replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contenders import BOS, documents
from laps import peak_bytes

from caddie.data.tokenizers import SentencePieceBPE, Tokenizer
from caddie.doctor.pace import named
from caddie.model import Model, build
from caddie.pack import artifact as artifacts
from caddie.pack.calibrate import calibrate
from caddie.pack.compress import pack
from caddie.recipes.recipe import Recipe
from caddie.runtime.distributed import local_device
from caddie.score import Scoring, Text, score, use_quickest_threads

CALIBRATION_TOKENS = 8192
"""For the calibration of a bench, fewer than a run takes."""
VERBS = ("calibrate", "compress", "open")
"""Stages of packing, each timed."""
_SPREAD = 0.02


def model_of(recipe: Recipe) -> Model:
    """A model with its first weights, and noise where they are zero, lest a matrix pack to nothing."""
    model = build(recipe.model, 0, local_device())
    generator = torch.Generator(local_device()).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2 and not bool(parameter.any()):
                parameter.normal_(0.0, _SPREAD, generator=generator)
    return model


def scoring_rates(
    name: str, settings: tuple[str, ...], threads: int | None, seconds: float, rounds: int
) -> list[dict[str, Any]]:
    """Tokens per second of plain and sliding scoring in turns; as many tokens as take about `seconds` each."""
    recipe = _begin(name, settings, threads)
    model = model_of(recipe)
    ways = {"plain": recipe.score.plain, "sliding": recipe.score.but(ttt=None)}
    if ways["sliding"] == ways["plain"]:  # what the contest's later records slide by
        ways["sliding"] = ways["plain"].but(stride=max(1, recipe.score.sequence_length // 16))
    tokens = documents(recipe.model.vocabulary, 1 << 22, BOS)
    text = Text(tokens, BOS, len(tokens), len(tokens), len(tokens))
    use_quickest_threads(model, text, ways["plain"])
    lengths = {way: _length(model, text, scoring, seconds / rounds) for way, scoring in ways.items()}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, scoring in ways.items():
            times[way].append(_seconds(model, text, scoring, lengths[way]))
    return [
        {
            "way": way,
            "stride": scoring.stride,
            "sequence_length": scoring.sequence_length,
            "precision": scoring.precision,
            "threads": torch.get_num_threads(),
            "tokens": lengths[way],
            "tokens_per_second": lengths[way] / float(np.median(times[way])),
            "peak_bytes": peak_bytes(local_device()),
        }
        for way, scoring in ways.items()
    ]


def packing(name: str, settings: tuple[str, ...], threads: int | None) -> dict[str, Any]:
    """Seconds of calibration, compression and opening, and the bytes of the file."""
    recipe = _begin(name, settings, threads)
    model, config = model_of(recipe), recipe.pack
    shards = [documents(recipe.model.vocabulary, 1 << 20, BOS)]
    tokenizer = tokenizer_of(recipe.model.vocabulary)
    short = hasattr(config.calibration, "tokens")
    text = config.calibration.but(tokens=CALIBRATION_TOKENS) if short else config.calibration
    manifest = artifacts.Manifest(
        caddie=version("caddie"),
        recipe=recipe.name,
        recipe_sha256=recipe.sha256,
        seed=0,
        parameters=recipe.parameters,
        tokenizer=tokenizer.kind,
        tokenizer_sha256=tokenizer.sha256,
        train_documents_sha256="",
        validation_fraction=None,
    )
    weights = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    metadata = artifacts.Metadata(recipe.model, tokenizer, recipe.score, manifest)
    known, times = {}, [time.perf_counter()]
    if config.calibrated:
        batches = text.batches(model, shards, length=recipe.score.sequence_length, bos=BOS)
        known = calibrate(model, batches, bos=BOS)
    times.append(time.perf_counter())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "artifact.caddie")
        compressed = pack(metadata, weights, config, path, known)
        times.append(time.perf_counter())
        opened = artifacts.load(path, local_device())
        times.append(time.perf_counter())
    spent = {verb: after - before for verb, (before, after) in zip(VERBS, pairwise(times), strict=True)}
    return {
        "bytes": opened.file_bytes,
        "parameters": recipe.parameters,
        "calibration_tokens": CALIBRATION_TOKENS if short and config.calibrated else None,
        "drafts": max(1, len(compressed.curve)),
        **{f"{verb}_seconds": seconds for verb, seconds in spent.items()},
        "threads": torch.get_num_threads(),
        "peak_bytes": peak_bytes(local_device()),
    }


def tokenizer_of(vocabulary: int) -> Tokenizer:
    """A tokenizer with so many ids, learned from made-up words."""
    chance = np.random.default_rng(0)
    letters = chance.integers(97, 123, (4000, 12), dtype=np.uint8)
    lengths = chance.integers(3, 12, 4000)
    words = [bytes(row[:length]) for row, length in zip(letters, lengths, strict=True)]
    sample = [b" ".join(words[i] for i in chance.integers(0, len(words), 60)) for _ in range(vocabulary // 2 + 200)]
    return SentencePieceBPE().build(vocabulary, lambda: sample)


def _begin(name: str, settings: tuple[str, ...], threads: int | None) -> Recipe:
    if threads is not None:
        torch.set_num_threads(threads)
    return named(name, settings)


def _seconds(model: Model, text: Text, scoring: Scoring, length: int) -> float:
    return score(model, replace(text, tokens=text.tokens[: length + 1]), scoring).seconds


def _length(model: Model, text: Text, scoring: Scoring, seconds: float) -> int:
    """Predictions, in whole batches of windows, that take about so long; the first batches do not count."""
    least = scoring.rows * scoring.stride + scoring.sequence_length
    most = len(text.tokens) - 1
    _seconds(model, text, scoring, min(least, most))
    pace = min(least, most) / _seconds(model, text, scoring, min(least, most))
    return int(min(most, max(least, seconds * pace)))
