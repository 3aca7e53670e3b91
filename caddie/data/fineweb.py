"""Download the contest's published FineWeb shards into one folder and describe them as a corpus.

Complete files are not fetched again, so the same command continues a download that was interrupted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from caddie.data import published
from caddie.data.corpus import Corpus
from caddie.data.shards import open_shard
from caddie.data.tokenizers import SentencePieceFile
from caddie.errors import UserError, first_line, suggest
from caddie.runtime.progress import Progress

REPOSITORY, ROOT, DATASET = "willdepueoai/parameter-golf", "datasets", "fineweb10B_"


def fetch_fineweb(
    variant: str,
    train_shards: int,
    folder: Path,
    progress: Progress,
    *,
    endpoint: str | None = None,
    bars: bool = False,
) -> Corpus:
    """Return the corpus of the first `train_shards` shards (100 million tokens, 200 MB each) and all validation shards.

    `variant` names the tokenizer, as in sp1024. `endpoint` replaces huggingface_hub's default server. `bars` shows that
    library's progress bars. Raises `UserError` if huggingface_hub is not installed, a file cannot be fetched, or the
    variant has fewer shards.
    """
    if train_shards < 1:
        raise UserError(f"at least one training shard is needed, not {train_shards}")
    folder = folder.expanduser().resolve()

    def fetch(name: str, which: str = "") -> Path:
        path = folder / name
        if not _complete(path):
            path.unlink(missing_ok=True)  # huggingface_hub keeps an existing file of any length
            with _contained(folder, bars):
                _fetch(name, folder, endpoint)
            if path.suffix == ".bin":
                open_shard(path)
            progress.note(f"{path.name}: {path.stat().st_size:,} bytes{which}")
        return path

    listings = _listings(fetch(f"{ROOT}/manifest.json"))
    if variant not in listings:
        raise UserError(f"{REPOSITORY} has {', '.join(sorted(listings))}, not {variant}{suggest(variant, listings)}")
    model, all_train, all_validation = listings[variant]
    if train_shards > all_train:
        raise UserError(f"{variant} has {all_train} training shards, not {train_shards}")
    source = SentencePieceFile(path=str(fetch(model)))
    stem = f"{ROOT}/{ROOT}/{DATASET}{variant}/fineweb"
    names = [f"{stem}_val_{number:06d}.bin" for number in range(all_validation)]
    names += [f"{stem}_train_{number:06d}.bin" for number in range(train_shards)]
    for number, name in enumerate(names, 1):
        fetch(name, f" ({number} of {len(names)})")
    shards = (folder / names[0]).parent
    return published.describe(shards, folder, source, int(variant[2:]), progress, train_shards=train_shards)


def _fetch(name: str, folder: Path, endpoint: str | None) -> None:
    """Download a file of the repository to the same path below `folder`."""
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    except ImportError:
        raise UserError("fetching FineWeb needs huggingface_hub; run: pip install 'caddie[hub]'") from None
    options: Any = {"local_dir": folder, "cache_dir": folder / ".cache", "endpoint": endpoint, "token": False}
    try:
        hf_hub_download(REPOSITORY, name, repo_type="dataset", **options)
    except Exception as error:  # whichever the HTTP library below it raises
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            raise UserError(f"{REPOSITORY} has no file {name}") from error
        reason = first_line(error)
        raise UserError(f"cannot fetch {name} ({reason}); the same command continues where it stopped") from error


@contextmanager
def _contained(folder: Path, bars: bool) -> Iterator[None]:
    """Keep huggingface_hub and its transfer library from writing to the home folder or calling home.

    They read these settings only from the environment, in part when they are first imported.
    """
    home = str(folder / ".cache" / "home")
    wanted = {
        "HF_HOME": home,
        "HF_XET_CACHE": f"{home}/xet",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "0" if bars else "1",
    }
    before = {name: os.environ[name] for name in wanted if name in os.environ}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in wanted:
            del os.environ[name]
        os.environ.update(before)


def _complete(path: Path) -> bool:
    """True if a file is there; a shard must be as long as its header says."""
    if path.suffix != ".bin":
        return path.is_file() and path.stat().st_size > 0
    with suppress(UserError):
        return len(open_shard(path)) > 0
    return False


def _listings(path: Path) -> dict[str, tuple[str, int, int]]:
    """Parse the manifest: path of the SentencePiece model, training and validation shards of each variant."""
    try:
        manifest: Any = json.loads(path.read_text())
        models = {entry["name"]: entry.get("model_path") for entry in manifest["tokenizers"]}
        found = {str(entry["name"]).removeprefix(DATASET): entry for entry in manifest["datasets"]}
        listings = {}
        for name in (name for name in found if name[:2] == "sp" and name[2:].isdigit()):
            model, stats = PurePosixPath(models[found[name]["tokenizer_name"]]), found[name]["stats"]
            if model.is_absolute() or ".." in model.parts:
                raise ValueError(f"{model} leads out of the repository")
            listings[name] = (f"{ROOT}/{model}", int(stats["files_train"]), int(stats["files_val"]))
        return listings
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: not the manifest this program knows ({error!r}); delete it and try again") from None
