"""Recipe and text to a scored file and its result."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from caddie.config import Seed, coerce, show
from caddie.data.corpus import Corpus
from caddie.errors import CheckFailed, UserError, check_kind
from caddie.model.parameters import assign
from caddie.pack.artifact import SOURCE, Artifact, Metadata, check_readable, load, most_parameters
from caddie.pack.compress import Pack, pack
from caddie.pack.quantize import Calibration
from caddie.pack.source_bundle import source_needed
from caddie.recipes.recipe import AS_RECIPE, Recipe
from caddie.report.documents import BITS, write_documents
from caddie.report.run_files import ARTIFACT, DOCUMENTS
from caddie.run.cap import cap_of_recipe, files_to_score
from caddie.run.contest_sets import identify
from caddie.run.dead_settings import check_settings_matter
from caddie.run.resolve_corpus import check_source, describe, open_corpus
from caddie.run.result import describe_run, describe_scores, write_result
from caddie.run.run_folder import begin_run, hold_folder, load_packed, run_folder
from caddie.run.stages import calibrate_recipe, held_out_text, metadata_without_source, score_trained, training_data
from caddie.runtime.child_process import child_environment
from caddie.runtime.distributed import SHARES_CORES, Ranks, local_device
from caddie.runtime.interrupt import SIGKILL
from caddie.runtime.progress import SILENT, Phases, Progress, relay
from caddie.score import KINDS, ChunkSGD, Scoring, Text, check_windows, score_kinds, use_quickest_threads
from caddie.train.loop import Trained, train
from caddie.train.size_forecast import Forecaster
from caddie.train.stage_memory import check_stages
from caddie.verify import verify
from caddie.verify.audited_score import score_audited


def run(
    recipe: Recipe,
    source: str | Path | None,
    *,
    seed: int = 1337,
    folder: str | Path | None = None,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
    command: str = "",
    study: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Train, pack, score and verify a recipe; return the result, also in `result.json`, or None on all but rank 0.

    Progress is shown on standard error, as by `caddie run`, unless `progress` is given, such as `SILENT`. `study` is
    what a study adds to the result of its run. A study's run of one process scores its artifact in this process, not in
    a new one: the score is the same, and a short run takes less time.

    Raises `UserError` before training for every mistake that can be found by then. Finished stages stay in the folder.
    """
    check_kind(recipe, Recipe, "the recipe", AS_RECIPE)
    check_source(source)
    check_recipe(recipe, ranks.world if ranks else 1)
    seed = coerce(seed, Seed, "seed")  # JSON cannot hold an integer of NumPy's
    ranks, folder = ranks or Ranks(device=local_device()), Path(folder or run_folder(recipe, seed))
    with hold_folder(folder, recipe, ranks, progress, alone=study is None) as phases:
        progress = phases.progress
        with phases("prepare"):
            corpus = open_corpus(recipe, source, progress, ranks=ranks)
            text = held_out_text(corpus)
            check_windows(recipe.score.sequence_length, recipe.score.stride, len(text.tokens) - 1)
            corpus.check_disjoint()
            check_stages(recipe.model, recipe.pack, recipe.score, len(text.tokens) - 1, ranks)
        progress.note(describe(corpus))
        if ranks.first and study is None:  # `lab/job.py` checks those of a study
            check_settings_matter(recipe)
        phases.begin("train")
        trained = train_recipe(recipe, corpus, folder, seed, ranks, progress)
        phases.seconds |= {"train_warmup": trained.warmup_seconds, "train": trained.seconds}
        calibrations: Mapping[str, Calibration] = {}
        if recipe.pack.calibrated:
            with phases("calibrate"):
                calibrations = calibrate_recipe(recipe, trained.weights, corpus, ranks, progress)
        with phases("score"):
            scores = score_trained(recipe, trained, text, ranks, progress)
        if not ranks.first:
            return None
        with phases("pack"):
            metadata = metadata_of(recipe, seed, corpus)
            cap = cap_of_recipe(recipe, metadata)
            packing = recipe.pack.but(cap_bytes=cap.file_bytes)
            compressed = pack(metadata, trained.weights, packing, folder / ARTIFACT, calibrations, progress)
            progress.note(f"packed into {(folder / ARTIFACT).stat().st_size:,} bytes of {cap.file_bytes:,}")
        with phases("score"):
            artifact, scored = score_packed(folder, corpus, text, ranks, progress, new_process=study is None)
        with phases("verify"):
            verdict = verify(artifact, cap.file_bytes, corpus=corpus, progress=progress)
        result = describe_run(recipe, corpus, trained, compressed, artifact, cap, ranks)
        result |= describe_scores(scores, scored, verdict, phases.seconds)
        result |= {"command": command, "seed": seed, **({"study": dict(study)} if study is not None else {})}
        return write_result(folder, result)


def check_recipe(recipe: Recipe, world: int = 1) -> None:
    """Raise `UserError` for mistakes that would otherwise be found after hours of preparing and training."""
    model = recipe.model.outline()
    assign(recipe.train.optimizers, model, "train.optimizers")
    quantizers = assign(recipe.pack.quantizers, model, "pack.quantizers")
    if recipe.pack.fit is not None:
        recipe.pack.fit.check(quantizers.values())
    if recipe.pack.protection is not None:
        recipe.pack.protection.check(quantizers.values())
    if recipe.pack.correction is not None:
        recipe.pack.correction.eligible(dict(model.named_parameters()), quantizers)
    check_windows(recipe.score.sequence_length, recipe.score.stride)
    check_readable(model, recipe.score)
    if recipe.parameters > (most := most_parameters(cap := recipe.pack.cap_bytes)):
        raise UserError(
            f"a file of {cap:,} bytes may hold {most:,} parameters, and the model has {recipe.parameters:,}; make it "
            "smaller, its tables first, or raise pack.cap_bytes"
        )
    if not files_to_score(recipe):  # a user's own scorer may need weights
        recipe.score.scorer(model, bos=0)
    _ = recipe.train.budget
    recipe.train.micro_tokens(world)


def train_recipe(
    recipe: Recipe, corpus: Corpus, folder: Path, seed: int, ranks: Ranks, progress: Progress = SILENT
) -> Trained:
    """Train into a run folder, which keeps recipe, log, checkpoint and weights."""
    data, metadata = training_data(corpus), metadata_of(recipe, seed, corpus)
    cap = cap_of_recipe(recipe, metadata)
    if cap.policy:
        progress.note(str(cap))
    begin_run(folder, recipe, seed, corpus, data, ranks, progress)
    forecaster = Forecaster(recipe.model, recipe.pack.but(cap_bytes=cap.file_bytes), metadata.file_bytes)
    return train(
        recipe.model,
        recipe.train,
        data,
        seed=seed,
        folder=folder,
        ranks=ranks,
        progress=progress,
        forecaster=forecaster,
    )


def metadata_of(recipe: Recipe, seed: int, corpus: Corpus) -> Metadata:
    """Return everything in the artifact of a run except its weights."""
    if recipe.pack.carry_source and (files := files_to_score(recipe)):
        names = " and ".join(file.path.name for file in files)
        raise UserError(f"an artifact carries caddie's own source alone, and not {names}; set pack.carry_source=false")
    metadata = metadata_without_source(recipe, seed, corpus)
    return replace(metadata, source=source_needed().section(SOURCE)) if recipe.pack.carry_source else metadata


def score_packed(
    folder: Path, corpus: Corpus, text: Text, ranks: Ranks, progress: Progress, new_process: bool
) -> tuple[Artifact, dict[str, Any]]:
    """Load the artifact of a run folder and score it: in new processes if `new_process` or with several `ranks`."""
    artifact, documents = load_packed(folder), folder / DOCUMENTS
    parts = [file.path for file in artifact.parts]
    if new_process or ranks.world > 1:
        return artifact, score_in_new_process(artifact.path, corpus.folder, ranks.world, progress, parts, documents)
    there = artifact if ranks.device.type == "cpu" else load(artifact.path, ranks.device, parts)
    return artifact, score_artifact(there, corpus, text, progress=progress, documents=documents)


def score_artifact(
    artifact: Artifact,
    corpus: Corpus,
    text: Text,
    scoring: Scoring | None = None,
    scorer: str | None = None,
    progress: Progress = SILENT,
    ranks: Ranks = Ranks(),
    documents: Path | None = None,
    audit_seconds: float | None = None,
) -> dict[str, Any]:
    """Score an artifact on the held-out `text` of a corpus.

    `bits_per_byte` is the score of the last kind: the user's scorer, else adaptive, sliding or plain. `scoring`
    replaces the artifact's own settings, and `scorer` (`FILE.py:NAME`) is a user's class; the result says so. `ranks`
    score together; the first writes the bytes and bits of each document to the file `documents`, if given. A scorer of
    whole windows is audited, for `audit_seconds` or as long as its score took, whichever is more: `CheckFailed` if it
    uses tokens before they are scored; `audited` is False if the audit could decide too little, or if the scorer read
    the text.
    """
    chosen, clock = scoring or artifact.scoring, Phases()
    predictions = len(text.tokens) - 1
    check_windows(chosen.sequence_length, chosen.stride, predictions)
    check_stages(artifact.model.config, Pack(), chosen, predictions, ranks, {"scoring": ranks.world})
    progress.step({"event": "doing", "text": "choosing the number of threads"})
    with clock("warm_up"):
        use_quickest_threads(artifact.model, text, chosen, ranks)
    notes, audited = _cautions(corpus, chosen, predictions), None
    if scorer is None:
        scores = score_kinds(artifact.model, text, chosen, None, progress, ranks)
    else:
        scores, audited, evidence = score_audited(
            artifact, corpus, text, chosen, scorer, progress, ranks, audit_seconds
        )
        notes.append(evidence)
    corpus.check_unchanged()
    counted, held_out = list(scores.values())[-1], corpus.manifest.validation
    if documents is not None and ranks.first:
        sizes = corpus.document_bytes(text.tokens)[: len(counted.document_nats)]
        write_documents(documents, sizes, {BITS: counted.document_nats / math.log(2)})
    trip = corpus.manifest.tokenizer.round_trip
    return {
        "bits_per_byte": counted.bits_per_byte,
        "seconds": {"load": artifact.load_seconds, **clock.seconds, "score": counted.seconds},
        "artifact_bytes": artifact.file_bytes,
        **{kind: scores[kind].to_json() if kind in scores else None for kind in KINDS},
        "scoring": show(chosen),
        "notes": notes,
        "audited": audited,
        "own_scoring": chosen == artifact.scoring and scorer is None,
        "byte_source": corpus.manifest.byte_source,
        "changed_documents": trip and trip.changed_documents,
        "validation_set": identify(
            held_out.tokens, held_out.source_bytes, held_out.documents, corpus.manifest.tokenizer.vocabulary
        ),
        "artifact_sha256": artifact.sha256,
        "validation_documents_sha256": held_out.document_set_sha256,
    }


def _cautions(corpus: Corpus, scoring: Scoring, predictions: int) -> list[str]:
    """Return the limits of what a score means, as far as they are known before scoring."""
    notes = []
    if corpus.manifest.validation.documents == 1:
        notes.append("The held-out text is a single document: other texts may score quite differently.")
    if isinstance(scoring.ttt, ChunkSGD) and predictions <= (chunk := scoring.ttt.chunk_tokens):
        said = f"Test-time training makes no update: the text has {predictions:,} predictions, a chunk {chunk:,}"
        notes.append(f"{said}; set score.ttt.chunk_tokens below {predictions:,}.")
    return notes


def score_in_new_process(
    artifact: Path,
    corpus: Path,
    world: int = 1,
    progress: Progress = SILENT,
    parts: Sequence[Path] = (),
    documents: Path | None = None,
) -> dict[str, Any]:
    """Return the result of `caddie score ARTIFACT --json` in a new process, which has the file and no other weights.

    Its progress is shown here. `documents` is the file to write bytes and bits of each document to, if given.
    """
    progress.step({"event": "doing", "text": "starting a new process that reads and scores the file"})
    gpus = max(1, min(world, torch.cuda.device_count()))  # of this machine
    hidden = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC"]  # the new process starts its own ranks, if any
    if SHARES_CORES in os.environ:  # the new process may use all cores
        hidden += [SHARES_CORES, "OMP_NUM_THREADS"]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(tuple(hidden))}
    command = [sys.executable, "-m", "caddie", "score", str(artifact), "--data", str(corpus)]
    command += [word for path in parts for word in ("--parts", str(path))]
    command += ["--documents", str(documents)] if documents is not None else []
    with (
        subprocess.Popen(
            [*command, "--gpus", str(gpus), "--events", "--json"],
            env=child_environment(kept),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
        ThreadPoolExecutor(1) as reader,
    ):
        try:
            assert process.stdout
            assert process.stderr
            printed = reader.submit(process.stdout.read)
            said = [line for line in process.stderr if line.strip() and not relay(line, progress)]
            result = printed.result()
        except BaseException:
            process.kill()
            raise
    try:
        return dict(json.loads(result))
    except ValueError:
        last = said[-1].strip() if said else f"exit status {process.returncode}"
        if process.returncode == -SIGKILL or "not enough memory" in last:  # the system kills for memory
            raise MemoryError from None
        wrong = UserError if process.returncode == 2 else CheckFailed  # a full disk, not a wrong file
        raise wrong(f"score in a fresh process failed: {last}") from None
