"""Download the contest's published FineWeb shards and describe them as a corpus.

Nothing is written outside the given folder. Complete files are not fetched again, so the same command continues a
download that was interrupted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from caddie.data import published
from caddie.data.corpus import Corpus
from caddie.data.shards import open_shard
from caddie.data.tokenizers import SentencePieceFile
from caddie.errors import UserError, first_line, suggest
from caddie.runtime.progress import Progress

REPOSITORY = "willdepueoai/parameter-golf"
ROOT = "datasets"
DATASET = "fineweb10B_"


@dataclass(frozen=True)
class Listing:
    """Files of one variant, from the repository's manifest."""

    model: str
    """Path of the SentencePiece model in the repository."""
    train_shards: int
    validation_shards: int


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
    fetch = _Fetch(folder, endpoint, progress, bars)
    listings = _listings(fetch(f"{ROOT}/manifest.json"))
    if variant not in listings:
        raise UserError(f"{REPOSITORY} has {', '.join(sorted(listings))}, not {variant}{suggest(variant, listings)}")
    listing = listings[variant]
    if train_shards > listing.train_shards:
        raise UserError(f"{variant} has {listing.train_shards} training shards, not {train_shards}")
    model = fetch(listing.model)
    stem = f"{ROOT}/{ROOT}/{DATASET}{variant}/fineweb"
    names = [f"{stem}_val_{number:06d}.bin" for number in range(listing.validation_shards)]
    names += [f"{stem}_train_{number:06d}.bin" for number in range(train_shards)]
    for number, name in enumerate(names, 1):
        fetch(name, f" ({number} of {len(names)})")
    source = SentencePieceFile(path=str(model))
    return published.describe(
        (folder / names[0]).parent, folder, source, int(variant[2:]), progress, train_shards=train_shards
    )


class _Fetch:
    """Fetches a file of the repository to the same path below `folder`, unless it is there."""

    def __init__(self, folder: Path, endpoint: str | None, progress: Progress, bars: bool) -> None:
        self.folder, self.endpoint, self.progress, self.bars = folder, endpoint, progress, bars

    def __call__(self, name: str, which: str = "") -> Path:
        path = self.folder / name
        if _complete(path):
            return path
        path.unlink(missing_ok=True)  # huggingface_hub keeps an existing file of any length
        with _contained(self.folder, self.bars):
            self._download(name)
        if path.suffix == ".bin":
            open_shard(path)
        self.progress.note(f"{path.name}: {path.stat().st_size:,} bytes{which}")
        return path

    def _download(self, name: str) -> None:
        try:
            from huggingface_hub import hf_hub_download
            from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
        except ImportError:
            raise UserError("fetching FineWeb needs huggingface_hub; run: pip install 'caddie[hub]'") from None
        try:
            hf_hub_download(
                REPOSITORY,
                name,
                repo_type="dataset",
                local_dir=self.folder,
                cache_dir=self.folder / ".cache",
                token=False,
                endpoint=self.endpoint,
            )
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
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _complete(path: Path) -> bool:
    """True if a file is there; a shard must be as long as its header says."""
    if path.suffix != ".bin":
        return path.is_file() and path.stat().st_size > 0
    try:
        open_shard(path)
    except UserError:
        return False
    return True


def _listings(path: Path) -> dict[str, Listing]:
    """Parse a manifest: the listing of each variant."""
    try:
        manifest: Any = json.loads(path.read_text())
        models = {entry["name"]: entry.get("model_path") for entry in manifest["tokenizers"]}
        found = {str(entry["name"]).removeprefix(DATASET): entry for entry in manifest["datasets"]}
        return {
            name: Listing(
                model=f"{ROOT}/{_inside(models[entry['tokenizer_name']])}",
                train_shards=int(entry["stats"]["files_train"]),
                validation_shards=int(entry["stats"]["files_val"]),
            )
            for name, entry in found.items()
            if name[:2] == "sp" and name[2:].isdigit()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: not the manifest this program knows ({error!r}); delete it and try again") from None


def _inside(path: str) -> PurePosixPath:
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise ValueError(f"{path} leads out of the repository")
    return PurePosixPath(path)
