"""The folder of a run: its files, and which runs may begin or go on there."""

import hashlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from caddie.config.userfile import UserFile, read_stated, user_files
from caddie.data.corpus import Corpus
from caddie.data.loaders import TrainingData
from caddie.errors import CheckFailed, UserError
from caddie.files import file_sha256, reason, write_file, write_json
from caddie.pack.artifact import Artifact, load
from caddie.pack.compress import Pack
from caddie.pack.source_bundle import describe_source, with_parts
from caddie.recipes.recipe import Recipe
from caddie.recipes.recipe_file import read_start
from caddie.report.display import Display
from caddie.report.read import pick, read_json, read_scored_result
from caddie.report.run_files import ARTIFACT, CHECKPOINT, ERROR, LOG, PARTS, RECIPE, RESULT, WEIGHTS
from caddie.report.tables import one_line
from caddie.run.cap import files_to_score
from caddie.run.policy import code_bytes, file_cap
from caddie.run.run_lock import is_lock, locked
from caddie.runtime.distributed import Ranks, lost_another
from caddie.runtime.memory import out_of_memory
from caddie.runtime.progress import SILENT, Phases, Progress
from caddie.train.checkpoint import checkpoint_identity, earlier_budgets, load_weights, restore, weights_identity
from caddie.train.memory import enough_memory
from caddie.verify.sandbox import run_in_sandbox

_RUN_FILES = (
    "import sys; from pathlib import Path; from caddie.config.userfile import execute; "
    "[execute(Path(path)) for path in sys.argv[1:]]"
)
_CHECK_BYTES, _CHECK_SECONDS = 4 << 30, 120.0


def run_folder(recipe: Recipe, seed: int) -> Path:
    """Return the folder of a run unless another is named."""
    return Path("runs") / f"{recipe.name}-{recipe.key()}-s{seed}"


def check_folder(folder: Path) -> None:
    """Raise `UserError` for a folder in which no run can begin or go on, such as one with other files."""
    try:
        place = next(place for place in (folder, *folder.parents) if place.exists())
        held = _held(folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); name another folder") from None
    if not place.is_dir():
        raise UserError(f"{place} is a file; name a folder")
    if folder.is_symlink() and not folder.exists():
        raise UserError(f"{folder} is a link to no folder; name another folder")
    if held and not held & {RECIPE, LOG, CHECKPOINT, WEIGHTS, RESULT, ERROR}:
        raise UserError(f"{folder} holds other files, such as {min(held)}; name an empty folder, or that of a run")


def _held(folder: Path) -> set[str]:
    """Return the names in a folder, without locks and unfinished files of a killed run."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return {name for name in names if not (is_lock(name) or name.startswith(".caddie-"))}


def _state(folder: Path) -> dict[str, tuple[int, int]]:
    """Return name to size (bytes) and modification time (ns) of what is in a folder, without `error.json`."""
    found = {}
    for name in _held(folder) - {ERROR}:
        with suppress(FileNotFoundError):
            state = (folder / name).lstat()
            found[name] = state.st_size, state.st_mtime_ns
    return found


class Pruned(Exception):
    """End of a search's run before its budget, which is no failure."""


@contextmanager
def failure_recorded(folder: Path, phases: Phases, first: bool) -> Iterator[None]:
    """Write why the block failed to `error.json` in a run folder; the `first` process removes an old one at the start.

    The first reason stays, since failures of other processes may follow from it. Nothing is written for an interrupted
    run, or by a process that only lost another: the lost one gives the reason, or is started again. A user's mistake
    that is found before anything was written leaves the folder as it was.
    """
    before, earlier = _state(folder), (folder / ERROR).read_bytes() if (folder / ERROR).is_file() else None
    if first:
        (folder / ERROR).unlink(missing_ok=True)
    begin = time.monotonic()
    try:
        yield
    except Pruned:
        raise
    except Exception as error:
        cause = error.__context__
        memory = cause is not None and out_of_memory(cause)  # no user's mistake, though a `UserError`
        refused = isinstance(error, UserError) and not memory and _state(folder) == before
        with suppress(OSError, UserError):  # what failed may be the disk
            if refused and first and earlier is not None:
                (folder / ERROR).write_bytes(earlier)
            elif not (refused or lost_another(error) or (folder / ERROR).exists()):
                write_error(folder, error, phases.current, time.monotonic() - begin)
        raise


@contextmanager
def hold_folder(
    folder: Path, recipe: Recipe, ranks: Ranks, progress: Progress | None, *, alone: bool
) -> Iterator[Phases]:
    """Hold a run folder during its run: refuse a foreign or a finished one, lock it, and record why the block failed.

    The block runs in `enough_memory`. Yields the clock of the phases, which shows them on standard error of each
    machine unless `progress` is given. `alone` is false for a run of a study: the study has checked and locked the
    folder itself.
    """
    with Display() if progress is None and ranks.first_here else nullcontext(progress) as shown:
        phases = Phases(shown if shown is not None and ranks.first_here else SILENT)
        if alone:
            check_folder(folder)
        if (folder / RESULT).exists():
            raise UserError(f"{folder} holds a finished run; name another folder with --out or remove it")
        with locked(folder) if alone and ranks.first else nullcontext(), failure_recorded(folder, phases, ranks.first):
            ranks.wait()
            with enough_memory(recipe.model, recipe.train, ranks, phases):
                yield phases


def write_error(folder: Path, error: Exception | str, phase: str = "", seconds: float | None = None) -> None:
    """Write the reason why a run has no result: an exception, or a text. `seconds` is the time since the run began."""
    known = isinstance(error, (str, UserError, CheckFailed, Pruned))
    what = str(error) if known else f"{type(error).__name__}: {error}"
    found = {"state": "pruned" if isinstance(error, Pruned) else "failed", "error": one_line(what), "phase": phase}
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    write_json(folder / ERROR, {**found, "when": when, "seconds": seconds and round(seconds, 1)})


def read_run(folder: Path, parts: Sequence[Path] = ()) -> tuple[Recipe, int, Corpus]:
    """Return recipe, seed and corpus of a run folder; `UserError` if it is none.

    `parts` are the users' files that its recipe needs; they are executed. The copies in the folder are executed only if
    `parts` names them: the folder may be a stranger's.
    """
    if folder.is_file():
        of_run = f", as {folder.parent}" if (folder.parent / RECIPE).exists() else ""
        raise UserError(f"{folder} is a file; name the folder of a run{of_run}")
    start = read_start(folder, parts)
    return start.recipe, start.seed, Corpus.load(start.corpus)


def read_finished(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return result and `recipe.json` of a finished run; `UserError` if it is none, or its artifact is another file."""
    result, about = read_scored_result(folder / RESULT), read_json(folder / RECIPE)
    if not isinstance(pick(about, "recipe"), dict):
        raise UserError(f"{folder / RECIPE} is missing or damaged; run the recipe again")
    check_artifact(folder, result)
    return result, about


def check_artifact(folder: Path, result: Mapping[str, Any]) -> None:
    """Raise `UserError` unless the artifact in a run folder is the file of its result."""
    if not (folder / ARTIFACT).is_file() or file_sha256(folder / ARTIFACT) != pick(result, "sha256", "artifact"):
        raise UserError(f"{folder / ARTIFACT} is not the file that {folder / RESULT} scored; run the recipe again")


def finished_result(folder: Path, recipe: Recipe, seed: int, corpus: Corpus) -> dict[str, Any]:
    """Return the result of a finished run; `UserError` if it is of other settings, another seed or another text."""
    result = read_scored_result(folder / RESULT)
    other = pick(result, "sha256", "recipe") != recipe.sha256
    if other or pick(result, "seed") != seed:
        what = "other settings" if other else f"seed {pick(result, 'seed')}, not {seed}"
        raise UserError(f"{folder} holds a finished run of {what}; name another folder with --out or remove it")
    check_text(folder, result, corpus)
    return result


def check_text(folder: Path, result: Mapping[str, Any], corpus: Corpus) -> None:
    """Raise `UserError` unless a corpus has the hashes that are in the result of the run in `folder`."""
    hashes = {
        "training documents": ("train_documents", corpus.manifest.train.document_set_sha256),
        "held-out documents": ("validation_documents", corpus.manifest.validation.document_set_sha256),
        "tokenizer": ("tokenizer", corpus.manifest.tokenizer.sha256),
    }
    for what, (name, now) in hashes.items():
        if (then := pick(result, "sha256", name)) != now:
            raise UserError(
                f"{corpus.folder} is not the text of {folder}: the SHA-256 of its {what} is {now[:12]}, "
                f"not {str(then)[:12]}; name that text with --data, or another folder with --out"
            )


def cap_of(artifact: Artifact) -> int | None:
    """Return the bytes that an artifact may have, from the result beside it, or from its name and recipe; else None.

    No user's file is executed: files that only training needs are counted from the copies in the folder. Raises
    `UserError` if a copy is another file.
    """
    folder, name = artifact.path.parent, artifact.path.name
    named = re.fullmatch(r"artifact-(\d{1,12})(?:-[0-9a-f]+)?\.caddie", name)
    if not named and name != ARTIFACT:
        return None
    if not named and isinstance(kept := pick(read_json(folder / RESULT), "cap_bytes"), int):
        return kept
    about, cap = read_json(folder / RECIPE), int(named[1]) if named else None
    if not isinstance(pick(about, "recipe", "pack"), Mapping):  # the file stands alone, and its name proves nothing
        return None if cap is None else min(cap, Pack().cap_bytes)
    sources = {}
    for one in read_stated(pick(about, PARTS) or []):
        with suppress(OSError):
            sources[one] = (folder / PARTS / one.name).read_bytes()
        if one not in sources or hashlib.sha256(sources[one]).hexdigest() != one.sha256:
            raise UserError(
                f"{folder / PARTS / one.name} is not the file that {folder / RECIPE} needs, and its code counts; "
                "copy it there again, or name the cap by cap=N"
            )
    recipe = about["recipe"]
    if cap is not None:
        recipe = {**recipe, "pack": {**recipe["pack"], "cap_bytes": cap}}
    pack = Pack(**{name: recipe["pack"][name] for name in ("cap_bytes", "policy") if name in recipe["pack"]})
    needed = [file.source for file in artifact.parts]
    source = with_parts(describe_source(recipe), needed, [*sources.values()]) if pack.policy else {}
    return file_cap(pack, code_bytes(source), artifact.ledger).file_bytes


def is_file_of_result(artifact: Artifact) -> bool:
    """Return False if the result beside an artifact of a run is that of another file."""
    scored = pick(read_json(artifact.path.parent / RESULT), "sha256", "artifact")
    return artifact.path.name != ARTIFACT or scored in (None, artifact.sha256)


def run_weights(folder: Path, recipe: Recipe, corpus: Corpus) -> dict[str, Tensor]:
    """Return the weights of a run folder; `UserError` if they are not those of this model and text."""
    documents = corpus.manifest.train.document_set_sha256
    return load_weights(folder / WEIGHTS, weights_identity(recipe.model, recipe.train, documents))


def begin_run(
    folder: Path,
    recipe: Recipe,
    seed: int,
    corpus: Corpus,
    data: TrainingData,
    ranks: Ranks,
    progress: Progress = SILENT,
) -> None:
    """Make the folder and write `recipe.json`, with copies of the users' files that the recipe needs.

    Raises `UserError` for a checkpoint of another run there, for users' files that have changed since it was written,
    and for a user's file that does not run in the sandbox, which verification needs.
    """
    identity = checkpoint_identity(recipe.model, recipe.train, data, seed)
    files = user_files(recipe)
    _check_agreement(
        folder, [identity, corpus.manifest.validation.document_set_sha256, [f.source for f in files]], ranks
    )
    if (folder / CHECKPOINT).exists():
        earlier_budgets(folder / CHECKPOINT, restore(folder / CHECKPOINT, {}, identity), recipe.train.budget)
        before = pick(read_json(folder / RECIPE), PARTS) or []
        for file in files:
            if before and asdict(file.stated) not in before:
                kept = folder / PARTS / file.path.name
                raise UserError(
                    f"{file.path} has changed since {folder} was begun; go on with {kept}, or name another --out"
                )
    if ranks.first:
        run = {"recipe": recipe.to_json(), "seed": seed, "corpus": str(corpus.folder.resolve())}
        if files:
            run[PARTS] = [asdict(file.stated) for file in files]
        try:
            for file in files:
                (folder / PARTS).mkdir(parents=True, exist_ok=True)
                write_file(folder / PARTS / file.path.name, file.source)
            write_json(folder / RECIPE, run)
        except OSError as error:
            raise UserError(f"{folder}: cannot be written ({reason(error)}); name another folder") from None
        if needed := files_to_score(recipe):
            names = " and ".join(file.path.name for file in needed)
            progress.step({"event": "doing", "text": f"running {names} in a sandbox, as verification will"})
            _check_alone(folder, needed)
    ranks.wait()


def _check_agreement(folder: Path, facts: object, ranks: Ranks) -> None:
    """Raise `UserError` if processes of several machines have different `facts`, or only some have the checkpoint."""
    if not ranks.agree(facts):
        raise UserError(
            "the processes do not agree on recipe, seed or text; type the same command on every machine, "
            "and prepare the text once and copy that folder where the disk is not shared"
        )
    found = (folder / CHECKPOINT).exists()
    if ranks.any(found) and not found:
        raise UserError(f"{folder / CHECKPOINT} is on another machine and not here; copy it to the same place")


def _check_alone(folder: Path, files: Sequence[UserFile]) -> None:
    """Raise `UserError` for a user's file that does not run in a sandbox, as verification requires."""
    paths = [(folder / PARTS / file.path.name).absolute() for file in files]
    ended = run_in_sandbox(_RUN_FILES, *paths, readable=paths, memory_bytes=_CHECK_BYTES, seconds=_CHECK_SECONDS)
    if ended.returncode or ended.stopped:
        lines = ended.stderr.decode(errors="replace").strip().splitlines() or [f"status {ended.returncode}"]
        why = ended.stopped or lines[-1].rpartition("UserError: ")[2]
        raise UserError(f"what the artifact needs must run without other files of yours and without writing: {why}")


def load_packed(folder: Path) -> Artifact:
    """Return the artifact of a run whose classes this process has loaded; its parts are the copies in the folder."""
    artifact = load(folder / ARTIFACT)
    return replace(artifact, parts=tuple(replace(f, path=folder / PARTS / f.path.name) for f in artifact.parts))
