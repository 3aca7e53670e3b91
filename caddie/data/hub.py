"""Files of a data set on the Hugging Face hub, of one commit, or of a copy of it on disk.

Complete files are not fetched again, so the same command continues a download that was interrupted.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from caddie.data.shards import open_shard
from caddie.errors import UserError, first_line
from caddie.files import write_json
from caddie.runtime.progress import Progress

SOURCE = "source.json"
"""File of a download's folder: repository, revision, commit, and the bytes of all its files."""
OFFLINE = "the same command continues; without a network, copy the files and name their folder (--fineweb: --local DIR)"


@dataclass(frozen=True)
class Origin:
    """The repository on the Hugging Face hub that files were fetched from."""

    repository: str
    revision: str
    """Branch, tag or commit that was asked for."""
    commit: str
    """Commit that it was."""


@dataclass(frozen=True)
class Snapshot:
    """The files of a data set in a folder: `fetch` brings one that is not there yet."""

    folder: Path
    sizes: Mapping[str, int | None]
    """Path below the folder to bytes, where the hub states them."""
    name: str
    """Repository, or folder on disk, for messages."""
    origin: Origin | None
    """None for a copy on disk, of which nothing says where it is from."""
    download: Callable[[str], None] | None = field(default=None, compare=False)
    """Fetches a file; None for a copy on disk."""

    def fetch(self, name: str, progress: Progress, which: str = "") -> Path:
        """Return the path of a file, fetched unless it is there whole; `UserError` if that fails or it is damaged.

        A token shard (.bin) must be as long as its header says, any file as long as the hub says.
        """
        path = self.folder / name
        if self.download and not self._complete(path, self.sizes.get(name)):
            path.unlink(missing_ok=True)  # huggingface_hub keeps an existing file of any length
            self.download(name)
            progress.note(f"{path.name}: {path.stat().st_size:,} bytes{which}")
        if path.suffix == ".bin":
            open_shard(path)
        return path

    def check_room(self, names: list[str]) -> None:
        """Raise `UserError` if the disk has no room for those of the files that must be fetched."""
        if self.download is None:
            return
        left = [name for name in names if not self._complete(self.folder / name, self.sizes.get(name))]
        wanted, free = sum(self.sizes[name] or 0 for name in left), shutil.disk_usage(self.folder).free
        if wanted > free:
            raise UserError(f"{self.folder} has {free / 1e9:,.1f} GB free, and the files take {wanted / 1e9:,.1f} GB")

    @staticmethod
    def _complete(path: Path, size: int | None) -> bool:
        if not path.is_file() or path.stat().st_size != (size or path.stat().st_size or None):
            return False
        try:
            return path.suffix != ".bin" or len(open_shard(path)) > 0
        except UserError:
            return False


def on_disk(folder: Path) -> Snapshot:
    """Return the snapshot of a copy on disk, laid out as the repository is; `UserError` if there is no such folder."""
    folder = folder.expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name one that holds the repository's files")
    files = (path for path in folder.rglob("*") if path.is_file())
    return Snapshot(folder, {path.relative_to(folder).as_posix(): None for path in sorted(files)}, str(folder), None)


def on_hub(
    repository: str, revision: str, folder: Path, *, endpoint: str | None = None, bars: bool = False
) -> Snapshot:
    """Return the snapshot of a repository of data sets, to be fetched into `folder`.

    The first call resolves the revision to a commit and keeps it in the folder, so that all files are of one commit,
    and a later call needs no network for files that are there. `endpoint` replaces huggingface_hub's default server.
    `bars` shows that library's progress bars. Raises `UserError` if huggingface_hub is not installed, the repository
    cannot be reached, or the folder holds files of another repository or commit.
    """
    folder = folder.expanduser().resolve()
    held = _held(folder / SOURCE)
    if held is None:
        held = _list(repository, revision, folder, endpoint, bars)
        write_json(folder / SOURCE, {**asdict(held[0]), "files": held[1]})
    origin, sizes = held
    if origin.repository != repository or revision not in (origin.revision, origin.commit):
        raise UserError(
            f"{folder} holds files of {origin.repository} at {origin.revision} ({origin.commit[:12]}), not of"
            f" {repository} at {revision}; name another folder by --out, or delete this one"
        )

    def download(name: str) -> None:
        options: Any = {"local_dir": folder, "cache_dir": folder / ".cache", "endpoint": endpoint, "token": False}
        with _library(folder, bars, f"{name} of {repository}") as library:
            library.hf_hub_download(repository, name, repo_type="dataset", revision=origin.commit, **options)

    return Snapshot(folder, sizes, repository, origin, download)


def _list(
    repository: str, revision: str, folder: Path, endpoint: str | None, bars: bool
) -> tuple[Origin, dict[str, int | None]]:
    """Ask the hub for the commit of a revision and for the bytes of its files."""
    with _library(folder, bars, f"the list of files of {repository} at {revision}") as library:
        client = library.HfApi(endpoint=endpoint, token=False)
        info = client.dataset_info(repository, revision=revision, files_metadata=True)
    sizes = {file.rfilename: file.size for file in info.siblings or []}
    for name in sizes:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise UserError(f"{repository} lists {name}, which leads out of the repository")
    if not info.sha:
        raise UserError(f"{repository} names no commit for {revision}; try again later")
    return Origin(repository, revision, info.sha), sizes


def _held(path: Path) -> tuple[Origin, dict[str, int | None]] | None:
    """Return what a folder says of its files; None if nothing was fetched into it yet."""
    try:
        value: Any = json.loads(path.read_text())
        origin = Origin(*(str(value[name]) for name in ("repository", "revision", "commit")))
        return origin, {str(name): None if size is None else int(size) for name, size in value["files"].items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)}); delete it and try again") from None


@contextmanager
def _library(folder: Path, bars: bool, what: str) -> Iterator[Any]:
    """Yield huggingface_hub, which must neither write to the home folder nor call home; `what` is fetched by it.

    It and its transfer library read these settings only from the environment, in part when they are first imported.
    Every error of theirs, and of the HTTP library below, becomes one line.
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
        import huggingface_hub
        from huggingface_hub import errors

        yield huggingface_hub
    except ImportError:
        raise UserError("fetching needs huggingface_hub; run: pip install 'caddie[hub]'") from None
    except Exception as error:
        absent = (errors.EntryNotFoundError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError)
        if isinstance(error, absent) and not isinstance(error, errors.LocalEntryNotFoundError):
            raise UserError(f"the hub does not have {what}; check repository and revision") from error
        raise UserError(f"cannot fetch {what} ({first_line(error)}); {OFFLINE}") from error
    finally:
        for name in wanted:
            del os.environ[name]
        os.environ.update(before)
