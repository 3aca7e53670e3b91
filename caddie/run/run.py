"""A run: the straight line from recipe and text to one verified, scored file."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from caddie.config import show
from caddie.config.schedules import Clock
from caddie.data.corpus import Corpus
from caddie.errors import CheckFailed, UserError
from caddie.files import replacing
from caddie.model import build
from caddie.model.parameters import assign
from caddie.pack import artifact as artifacts
from caddie.pack import container
from caddie.pack.artifact import Artifact, Manifest
from caddie.pack.calibrate import calibrate
from caddie.pack.candidates import Candidate
from caddie.pack.compress import Compressed, Dequantizers, Pack, compress
from caddie.pack.container import Section
from caddie.pack.quantize import Calibration
from caddie.pack.source_bundle import source_needed
from caddie.recipes.recipe import Recipe
from caddie.report.page import write_report
from caddie.run.contest_sets import identify
from caddie.run.dead_settings import check_settings_matter
from caddie.run.policy import state
from caddie.run.resolve_corpus import describe, held_out_text, open_corpus
from caddie.run.result import bits_per_nat, describe_run, rounding_loss
from caddie.run.run_folder import (
    ARTIFACT,
    LOG,
    RECIPE,
    RESULT,
    WEIGHTS,
    check_folder,
    end_line,
    identity,
    read_run,
    run_folder,
    run_weights,
)
from caddie.runtime.distributed import SHARES_CORES, Ranks, local_device
from caddie.score import Score, Scoring, Text, check_windows, load_scorer, score, use_quickest_threads
from caddie.train.checkpoint import save_tensors
from caddie.train.loop import Event, Trained, train
from caddie.train.size_forecast import Forecaster
from caddie.verify import verify

KINDS = ("plain", "sliding", "adaptive", "user")
"""Scores of an artifact, from the simplest to the one that counts."""
Watch = Callable[[Event], None]


def check_whole_run(recipe: Recipe, world: int = 1) -> None:
    """Raise now the `UserError` that would else come after hours of preparing and training."""
    with torch.device("meta"):
        model = recipe.model.build()
    assign(recipe.train.optimizers, model, "train.optimizers")
    assign(recipe.pack.quantizers, model, "pack.quantizers")
    check_windows(recipe.score.sequence_length, recipe.score.stride)
    _ = recipe.train.budget
    recipe.train.micro_tokens(world)


def open_together(recipe: Recipe, source: str | None, ranks: Ranks, note: Callable[[str], None]) -> Corpus:
    """The corpus, which the first process prepares if need be and the others then read."""
    if not ranks.first:
        ranks.wait()
    corpus = open_corpus(recipe, source, note)
    if ranks.first:
        ranks.wait()
    return corpus


def score_artifact(
    artifact: Artifact,
    corpus: Corpus,
    scoring: Scoring | None = None,
    scorer: str | None = None,
    phase: Callable[[str], None] = lambda name: None,
    report: Callable[[int, int], None] = lambda done, total: None,
    ranks: Ranks = Ranks(),
) -> dict[str, Any]:
    """The artifact's scores on the corpus; `bits_per_byte` is that of its own scoring.

    `scoring` takes the place of the artifact's own, and `scorer` (`FILE.py:NAME`) is a user's that does: figures of
    another kind, which the result says. `ranks` score together.
    """
    own, text, model = scoring or artifact.scoring, held_out_text(corpus), artifact.model
    clock = Clock()
    with clock.phase("warm_up"):
        use_quickest_threads(model, text, own, ranks)
    kinds = {"plain": own.plain}
    if own.stride < own.sequence_length:
        kinds["sliding"] = own.but(ttt=None)
    if own.ttt is not None:
        kinds["adaptive"] = own
    scores = {}
    for kind, setting in kinds.items():
        phase(kind)
        scores[kind] = score(model, text, setting, report, ranks=ranks)
    if scorer is not None:
        phase(scorer)
        loaded = load_scorer(scorer, model, artifact.tokenizer)
        scores["user"] = score(model, text, own.plain, report, scorer=loaded, ranks=ranks)
    counted, held_out = list(scores.values())[-1], corpus.manifest.validation
    trip = corpus.manifest.tokenizer.round_trip
    return {
        "bits_per_byte": counted.bits_per_byte,
        "seconds": {"load": artifact.load_seconds, **clock.seconds, "score": counted.seconds},
        "artifact_bytes": artifact.file_bytes,
        **{kind: scores[kind].to_json() if kind in scores else None for kind in KINDS},
        "scoring": show(own),
        "own_scoring": own == artifact.scoring and scorer is None,
        "byte_source": corpus.manifest.byte_source,
        "changed_documents": trip and trip.changed_documents,
        "validation_set": identify(
            held_out.tokens, held_out.source_bytes, held_out.documents, corpus.manifest.tokenizer.vocabulary
        ),
        "artifact_sha256": artifact.sha256,
        "validation_documents_sha256": held_out.document_set_sha256,
    }


def train_run(recipe: Recipe, corpus: Corpus, folder: Path, seed: int, ranks: Ranks, watch: Watch) -> Trained:
    """Train into the run folder: recipe, log, checkpoint and weights."""
    if ranks.first:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder}: cannot be written ({error.strerror}); name another folder") from None
        end_line(folder / LOG)
    ranks.wait()
    told = {"recipe": recipe.to_json(), "seed": seed, "corpus": str(corpus.folder.resolve())}
    split, per_nat = corpus.manifest.train, bits_per_nat(corpus)
    assert split is not None
    with open(folder / LOG if ranks.first else os.devnull, "a", buffering=1) as log:

        def tell(event: Event) -> None:
            if ranks.first:
                if "loss" in event:
                    event = {**event, "bits_per_byte": event["loss"] * per_nat}
                if "gap" in event:
                    event = {**event, "gap_bits_per_byte": event["gap"] * per_nat}
                if event["event"] == "start":  # whatever stands in the folder was found to be of this run
                    _dump(folder / RECIPE, told)
                log.write(json.dumps(event) + "\n")
                watch(event)

        around = metadata_sections(recipe, seed, corpus)
        forecaster = Forecaster(
            recipe.model,
            recipe.pack,
            lambda readers, sections: len(container.pack([*around(readers), *sections])),
        )
        trained = train(
            recipe.model,
            recipe.train,
            corpus.train_shards(),
            bos=corpus.manifest.tokenizer.bos,
            seed=seed,
            folder=folder,
            data=split.document_set_sha256 + corpus.manifest.tokenizer.sha256,
            ranks=ranks,
            watch=tell,
            forecaster=forecaster,
        )
        tell({"event": "end", "step": trained.steps, "seconds": trained.seconds, "loss": trained.final_loss})
    if ranks.first:
        save_tensors(folder / WEIGHTS, trained.weights, identity(recipe, corpus))
    return trained


def pack_run(
    folder: Path,
    config: Pack | None = None,
    path: Path | None = None,
    phase: Callable[[str], None] = lambda name: None,
    on_candidate: Callable[[Candidate], None] = lambda draft: None,
    known: Mapping[str, Calibration] | None = None,
) -> Compressed:
    """Quantize, code and pack the weights of a run folder into its artifact.

    `config` takes the place of the recipe's own, and `path` that of the run's artifact. `phase` is told what begins,
    and `on_candidate` of every draft of the weights. What is `known` of their use already is not measured again.
    """
    recipe, seed, corpus = read_run(folder)
    recipe = recipe.but(pack=config or recipe.pack)
    weights = run_weights(folder, recipe, corpus)
    around = metadata_sections(recipe, seed, corpus)

    def calibrations() -> Mapping[str, Calibration]:
        if known is not None:
            return known
        phase("calibrate")
        found = calibrated(recipe, weights, corpus, Ranks(device=local_device()))
        phase("fit")
        return found

    compressed = compress(
        recipe.model,
        weights,
        recipe.pack,
        calibrations,
        lambda readers, sections: len(container.pack([*around(readers), *sections])),
        on_candidate,
    )
    container.write(path or folder / ARTIFACT, [*around(compressed.readers), *compressed.sections])
    return compressed


def metadata_sections(recipe: Recipe, seed: int, corpus: Corpus) -> Callable[[Dequantizers], list[Section]]:
    """What an artifact of the run has beside its weights, from the quantizers that read them."""
    split = corpus.manifest.train
    assert split is not None
    tokenizer = corpus.tokenizer()
    manifest = Manifest(
        caddie=version("caddie"),
        recipe=recipe.name,
        recipe_sha256=recipe.sha256,
        seed=seed,
        parameters=recipe.parameters,
        tokenizer=tokenizer.kind,
        tokenizer_sha256=tokenizer.sha256,
        train_documents_sha256=split.document_set_sha256,
        validation_fraction=corpus.manifest.validation_fraction,
    )
    source = source_needed().section(artifacts.SOURCE) if recipe.pack.carry_source else None
    return lambda readers: artifacts.around(recipe.model, readers, tokenizer, recipe.score, manifest, source)


def calibrated(
    recipe: Recipe, weights: Mapping[str, Tensor], corpus: Corpus, ranks: Ranks = Ranks()
) -> dict[str, Calibration]:
    """What training text, or text of the model's own, tells all processes together of the use of each weight."""
    model = build(recipe.model, 0, ranks.device)
    model.load_state_dict(dict(weights))
    bos, length = corpus.manifest.tokenizer.bos, recipe.score.sequence_length
    batches = recipe.pack.calibration.batches(model, corpus.train_shards(), length=length, bos=bos, ranks=ranks)
    return calibrate(model, batches, bos=bos, ranks=ranks)


def run(
    recipe: Recipe,
    source: str | None,
    *,
    seed: int = 1337,
    folder: Path | None = None,
    ranks: Ranks | None = None,
    watch: Watch = lambda event: None,
    phase: Callable[[str], None] = lambda name: None,
    on_candidate: Callable[[Candidate], None] = lambda draft: None,
    command: str = "",
    study: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """The whole line; the result, also in `result.json`, or None on every process but the first.

    A run of a `study` has what that says of it in its result; this process reads the packed artifact back and scores
    it, instead of a fresh one, which gives the same number and would cost many short runs more than their training.

    Raises `UserError` before training for whatever can be known before, and leaves what was finished in the folder.
    """
    ranks = ranks or Ranks(device=local_device())
    folder = folder or run_folder(recipe, seed)
    if study is None:  # which keeps files of its own in the folder before its runs begin
        check_folder(folder)
    if (folder / RESULT).exists():
        raise UserError(f"{folder} holds a finished run; name another folder with --out or remove it")
    if ranks.first:
        check_settings_matter(recipe)
    clock = Clock()

    def note(text: str) -> None:
        if ranks.first:
            watch({"event": "note", "text": text})

    phase("prepare")
    with clock.phase("prepare"):
        corpus = open_together(recipe, source, ranks, note)
        text = held_out_text(corpus)
        check_windows(recipe.score.sequence_length, recipe.score.stride, len(text.tokens) - 1)
        corpus.check_disjoint()
    note(describe(corpus))
    phase("train")
    trained = train_run(recipe, corpus, folder, seed, ranks, watch)
    clock.seconds |= {"train_warmup": trained.warmup_seconds, "train": trained.seconds}
    known = None
    if recipe.pack.calibrated:  # by all processes together
        phase("calibrate")
        with clock.phase("calibrate"):
            known = calibrated(recipe, trained.weights, corpus, ranks)
    phase("score")
    with clock.phase("score"):
        scores = _live_scores(recipe, trained, text, ranks)
    if not ranks.first:
        return None
    phase("compress")
    with clock.phase("compress"):
        compressed = pack_run(folder, on_candidate=on_candidate, known=known)
    phase("score")
    with clock.phase("score"):
        if study is None:
            gpus = max(1, min(ranks.world, torch.cuda.device_count()))  # of this machine
            alone = "--data", str(corpus.folder), "--gpus", str(gpus), "--quiet"
            scored = _fresh("score", folder / ARTIFACT, *alone)
        else:
            scored = score_artifact(artifacts.load(folder / ARTIFACT, ranks.device), corpus)
    phase("verify")
    with clock.phase("verify"):
        artifact = artifacts.load(folder / ARTIFACT)
        verdict = verify(artifact, recipe.pack.cap_bytes)
    scores |= {f"quantized_{kind}": scored[kind] for kind in ("plain", "sliding", "adaptive")}
    result = describe_run(recipe, corpus, trained, compressed, artifact, ranks)
    result |= {
        "command": command,
        "seed": seed,
        "bits_per_byte": scored["bits_per_byte"],
        "verified": verdict.passed,
        "checks": [asdict(check) for check in verdict.checks],
        "scores": scores,
        "seconds": {**clock.seconds, "total": sum(clock.seconds.values())},
        "evaluation": scored["seconds"],
    }
    if study is not None:
        result["study"] = dict(study)
    result["compression"]["measured_bits_per_byte"] = rounding_loss(scores)
    result["policies"] = state(result)
    _dump(folder / RESULT, result)
    write_report(folder)
    return result


def _live_scores(recipe: Recipe, trained: Trained, text: Text, ranks: Ranks) -> dict[str, Any]:
    """Plain scores of the weights before they were packed: of the last step, and averaged where there is an average."""
    found: dict[str, Any] = {
        "trained_plain": _score_weights(recipe, trained.last, text, recipe.score.plain, ranks).to_json()
    }
    found["averaged_plain"] = None
    if recipe.train.averaging is not None:
        found["averaged_plain"] = _score_weights(recipe, trained.weights, text, recipe.score.plain, ranks).to_json()
    if ranks.device.type == "cuda":
        gc.collect()  # what trained is a cycle: it holds its forward, a method of its own
        torch.cuda.empty_cache()  # the processes that score the artifact want the memory
    return found


def _score_weights(recipe: Recipe, weights: Mapping[str, Tensor], text: Text, scoring: Scoring, ranks: Ranks) -> Score:
    model = build(recipe.model, 0, ranks.device)
    model.load_state_dict(dict(weights))
    return score(model, text, scoring, ranks=ranks)


def _fresh(verb: str, artifact: Path, *arguments: str) -> dict[str, Any]:
    """What `caddie VERB ARTIFACT --json` says in a process of its own, which knows nothing of this one's weights."""
    ours = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC"]  # that process starts others of its own, if any
    if SHARES_CORES in os.environ:  # and has all cores for itself
        ours += [SHARES_CORES, "OMP_NUM_THREADS"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(tuple(ours))}
    command = [sys.executable, "-m", "caddie", verb, str(artifact), *arguments, "--json"]
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise CheckFailed(f"{verb} in a fresh process failed: {last[0]}") from None


def _dump(path: Path, value: object) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n")
