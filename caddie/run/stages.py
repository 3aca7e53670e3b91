"""Stages of a run that the single script of a submission shares with it (`caddie/submit/script.py`)."""

import gc
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from caddie.data.corpus import Corpus
from caddie.data.loaders import TrainingData
from caddie.errors import UserError
from caddie.model import build
from caddie.pack.artifact import Manifest, Metadata
from caddie.pack.calibrate import calibrate
from caddie.pack.quantize import Calibration
from caddie.recipes.recipe import Recipe
from caddie.report.units import convert
from caddie.runtime.distributed import Ranks
from caddie.runtime.progress import SILENT, Progress
from caddie.score import Text, score
from caddie.train.loop import Trained


def training_data(corpus: Corpus) -> TrainingData:
    """Return the training shards of a corpus; `UserError` if it has none."""
    split, tokenizer = corpus.manifest.train, corpus.manifest.tokenizer
    return TrainingData(
        shards=corpus.train_shards(),
        bos=tokenizer.bos,
        documents_sha256=split.document_set_sha256,
        tokenizer_sha256=tokenizer.sha256,
        bits_per_nat=bits_per_nat(corpus),
        check_unchanged=corpus.check_unchanged,
        prefixes=lambda: corpus.tokenizer().prefixes,
    )


def bits_per_nat(corpus: Corpus) -> float:
    """Return the bits per byte of training text that equal one nat per token."""
    split = corpus.manifest.train
    if not split.source_bytes:
        raise UserError(f"{corpus.folder}: the manifest states no bytes of training text; prepare the data again")
    return convert(1.0, "nats-per-token", "bits-per-byte", tokens=split.tokens, source_bytes=split.source_bytes)


def held_out_text(corpus: Corpus) -> Text:
    """Return the held-out text of a corpus for scoring; its bytes and documents are counted once a process.

    Raises `UserError` if the tokens cannot spell the text.
    """
    corpus.check_counts()
    corpus.check_spelled()
    split = corpus.manifest.validation
    return Text(
        tokens=corpus.validation_tokens(),
        bos=corpus.manifest.tokenizer.bos,
        source_bytes=split.source_bytes,
        normalized_bytes=split.normalized_bytes,
        table_bytes=split.table_bytes,
    )


def metadata_without_source(recipe: Recipe, seed: int, corpus: Corpus) -> Metadata:
    """Return everything in the artifact of a run except its weights and the source that it may carry."""
    tokenizer = corpus.tokenizer()
    manifest = Manifest(
        caddie=version("caddie"),
        recipe=recipe.name,
        recipe_sha256=recipe.sha256,
        seed=seed,
        parameters=recipe.parameters,
        tokenizer=tokenizer.kind,
        tokenizer_sha256=tokenizer.sha256,
        train_documents_sha256=corpus.manifest.training_set,
        validation_fraction=corpus.manifest.validation_fraction,
    )
    return Metadata(recipe.model, tokenizer, recipe.score, manifest)


def calibrate_recipe(
    recipe: Recipe, weights: Mapping[str, Tensor], corpus: Corpus, ranks: Ranks = Ranks(), progress: Progress = SILENT
) -> dict[str, Calibration]:
    """Measure the use of each weight on the recipe's calibration text, all processes together."""
    model = build(recipe.model, 0, ranks.device)
    model.load_state_dict(dict(weights))
    bos, length = corpus.manifest.tokenizer.bos, recipe.score.sequence_length
    batches = recipe.pack.calibration.batches(model, corpus.train_shards(), length=length, bos=bos, ranks=ranks)
    return calibrate(model, batches, bos=bos, ranks=ranks, progress=progress)


def score_trained(
    recipe: Recipe, trained: Trained, text: Text, ranks: Ranks, progress: Progress = SILENT
) -> dict[str, Any]:
    """Score the weights before they are packed, without overlap: those of the last step, and their average if any."""
    weights = {"trained_plain": trained.last}
    if recipe.train.averaging is not None:
        weights["averaged_plain"] = trained.weights
    found: dict[str, Any] = {"trained_plain": None, "averaged_plain": None}
    for name, state in weights.items():
        model = build(recipe.model, 0, ranks.device)
        model.load_state_dict(dict(state))
        found[name] = score(model, text, recipe.score.plain, progress, ranks=ranks).to_json()
    if ranks.device.type == "cuda":
        gc.collect()  # the trainer is a reference cycle: it holds its forward, a bound method
        torch.cuda.empty_cache()  # the processes that score the artifact want the memory
    return found
