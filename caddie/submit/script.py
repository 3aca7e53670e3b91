"""The program inside a submission's `train_gpt.py`: train, pack and score one recipe, printing the contest's log.

`caddie.pack.source_bundle.script` wraps this module and all that it imports. It does what `caddie run` does,
without its reports, probes, and checks of settings and memory.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed import DistError

from caddie.data import published
from caddie.data.corpus import Corpus, is_corpus
from caddie.data.tokenizers import CaseOps, SentencePieceFile, TokenizerSource
from caddie.errors import CheckFailed, UserError
from caddie.files import reason, write_file
from caddie.pack.artifact import load
from caddie.pack.compress import pack
from caddie.pack.quantize import Calibration
from caddie.recipes.recipe import Recipe
from caddie.report.run_files import ARTIFACT
from caddie.run.policy import file_cap, section_bytes
from caddie.run.stages import calibrate_recipe, held_out_text, metadata_without_source, score_trained, training_data
from caddie.runtime.distributed import Ranks, join, lost_another
from caddie.runtime.progress import SILENT, Event, Phases, Progress
from caddie.score import check_windows, score_kinds, use_quickest_threads
from caddie.submit.contest_log import after_scoring, after_training, before_training, step_line
from caddie.train.loop import Interrupted, train


def main(
    recipe: Mapping[str, Any], *, data: str | None, tokenizer: str | None, seed: str, out: str | None, code_bytes: int
) -> int:
    """Run a recipe given as JSON values, with the values of the environment variables that the script's head names.

    Returns the exit status: 2 after a mistake of the user's, 1 after a failure, 128 + the signal that stopped it.
    """
    try:
        known = Recipe.from_json(recipe)
        if not seed.isdecimal() or int(seed) >= 1 << 32:
            raise UserError(f"SEED must be a number from 0 to {(1 << 32) - 1:,}, not {seed}")
        if data is None:
            raise UserError("name the folder of the data by DATA_PATH=DIR")
        folder = Path(out or f"runs/{known.name}-seed{seed}")
        with join() as ranks:
            _run(known, Path(data), tokenizer, int(seed), folder, ranks, code_bytes)
    except (UserError, CheckFailed) as error:
        print(f"train_gpt.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except OSError as error:
        print(f"train_gpt.py: {error.filename or error}: {reason(error)}", file=sys.stderr)
        return 2
    except (DistError, RuntimeError) as error:
        if not lost_another(error):
            raise
        return 1  # the process that is gone has said why
    except Interrupted as stop:
        print(f"train_gpt.py: {stop}; the same command goes on from there", file=sys.stderr)
        return 128 + stop.number
    return 0


class _Printed(Progress):
    """Progress that prints steps and notes as the contest's scripts do."""

    def __init__(self, steps: int | None) -> None:
        self.steps = steps

    def step(self, event: Event) -> None:
        if event["event"] == "step":
            self.note(step_line(event, self.steps))

    def note(self, text: str) -> None:
        print(text, flush=True)


def _run(
    recipe: Recipe, data: Path, tokenizer: str | None, seed: int, folder: Path, ranks: Ranks, code_bytes: int
) -> None:
    """Train, pack and score; the first process prints."""
    if (folder / ARTIFACT).exists():
        raise UserError(f"{folder} holds a finished run; name another folder by OUT=DIR or remove it")
    progress = _Printed(recipe.train.steps) if ranks.first else SILENT

    corpus = _open(recipe, data, tokenizer, folder, ranks)
    text = held_out_text(corpus)
    check_windows(recipe.score.sequence_length, recipe.score.stride, len(text.tokens) - 1)
    corpus.check_disjoint()
    facts = {"recipe": recipe.name, "recipe_sha256": recipe.sha256, "seed": seed, "world_size": ranks.world}
    facts["train_shards"] = len(corpus.manifest.train.shards)
    facts |= {"val_tokens": len(text.tokens) - 1, "val_bytes": text.source_bytes, "model_params": recipe.parameters}
    progress.note("\n".join(before_training(facts)))
    folder.mkdir(parents=True, exist_ok=True)
    phases, given = Phases(), training_data(corpus)
    trained = train(recipe.model, recipe.train, given, seed=seed, folder=folder, ranks=ranks, progress=progress)
    phases.seconds["train"] = trained.seconds
    calibrations: Mapping[str, Calibration] = {}
    if recipe.pack.calibrated:
        with phases("calibrate"):
            calibrations = calibrate_recipe(recipe, trained.weights, corpus, ranks)
    training = {"steps": trained.steps, "peak_bytes": trained.peak_bytes}
    scores = score_trained(recipe, trained, text, ranks)
    result: dict[str, Any] = {"training": training, "seconds": phases.seconds, "scores": scores}
    progress.note("\n".join(after_training(result, recipe.train.steps)))
    if ranks.first:
        metadata = metadata_without_source(recipe, seed, corpus)
        cap = file_cap(recipe.pack, {"source_training": code_bytes}, section_bytes(metadata))
        packing = recipe.pack.but(cap_bytes=cap.file_bytes)
        pack(metadata, trained.weights, packing, folder / ARTIFACT, calibrations)
    _hand_over(folder / ARTIFACT, ranks)
    artifact, clock = load(folder / ARTIFACT, ranks.device), Phases()
    with clock("warm_up"):
        use_quickest_threads(artifact.model, text, artifact.scoring, ranks)
    scored = score_kinds(artifact.model, text, artifact.scoring, ranks=ranks)
    corpus.check_unchanged()
    score_seconds = list(scored.values())[-1].seconds
    result |= {
        "sha256": {"artifact": artifact.sha256},
        "ledger": {"parts": artifact.ledger},
        "scores": scores | {f"quantized_{kind}": score.to_json() for kind, score in scored.items()},
        "evaluation": {"load": artifact.load_seconds, **clock.seconds, "score": score_seconds},
    }
    progress.note("\n".join(after_scoring(result, code_bytes)))


def _open(recipe: Recipe, data: Path, model: str | None, folder: Path, ranks: Ranks) -> Corpus:
    """Return the corpus in a folder, or make one of the contest's shards there, once on each machine."""
    with ranks.turn():
        if is_corpus(data):
            corpus = Corpus.load(data)
        elif model is None:
            raise UserError(
                f"{data} is no corpus; with a folder of shards, name their tokenizer by TOKENIZER_PATH=FILE"
            )
        else:
            tokenizer: TokenizerSource = SentencePieceFile(path=model)
            if isinstance(recipe.data.tokenizer, CaseOps):
                tokenizer = CaseOps(of=SentencePieceFile(path=model))
            corpus = published.describe(data, folder / "corpus", tokenizer, recipe.model.vocabulary, SILENT)
        if (vocabulary := corpus.manifest.tokenizer.vocabulary) != recipe.model.vocabulary:
            raise UserError(
                f"the tokenizer of {data} has {vocabulary:,} ids, and the model {recipe.model.vocabulary:,}"
            )
        corpus.check_shards("train")
        corpus.check_shards("validation")
    splits = [split.document_set_sha256 for split in (corpus.manifest.train, corpus.manifest.validation)]
    if not ranks.agree([corpus.manifest.tokenizer.sha256, *splits]):
        raise UserError(f"{data} is other text on another machine; copy one to all of them")
    return corpus


def _hand_over(path: Path, ranks: Ranks) -> None:
    """Write the first process's file on machines that do not share its disk."""
    data = torch.zeros(int(ranks.maximum(path.stat().st_size if ranks.first else 0)[0]), dtype=torch.uint8)
    if ranks.first:
        data += torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    ranks.sum([data])
    with ranks.turn():
        if not path.exists():
            write_file(path, data.numpy().tobytes())
