"""Files of one commit of a repository on the Hugging Face hub, or of a copy on disk.

Complete files are not fetched again, so the same command continues a download that was interrupted.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from caddie.data.shards import open_shard
from caddie.errors import UserError, first_line
from caddie.files import expanded, write_json
from caddie.runtime.progress import Progress

HUB = "hf:"
"""Beginning of a place on the hub, as users write it."""
SOURCE = "source.json"
"""File in a download's folder that states repository, revision, commit, and the bytes of each of its files."""
Kind = Literal["dataset", "model"]
"""Kinds of repositories."""
TOKEN = {"dataset": False, "model": None}
"""Argument `token` of huggingface_hub: False sends no token, None the user's token, if there is one."""
ABSENT = {
    "dataset": "check repository and revision",
    "model": "check name and revision; a private one needs a token, HF_TOKEN or `hf auth login`",
}
OFFLINE = {
    "dataset": "the same command continues; "
    "without a network, copy the files and name their folder (--fineweb: --local DIR)",
    "model": "the same command continues; without a network, copy the file from elsewhere and name its path",
}


@dataclass(frozen=True)
class Origin:
    """The repository on the Hugging Face hub that files were fetched from."""

    repository: str
    revision: str
    """Branch, tag or commit that was asked for."""
    commit: str
    """Commit that the revision resolved to."""


@dataclass(frozen=True)
class Snapshot:
    """The files of a repository in a folder: `fetch` downloads a file that is not there yet."""

    folder: Path
    sizes: Mapping[str, int | None]
    """Path below the folder to size in bytes; None where the hub states none."""
    name: str
    """Repository, or folder on disk, for messages."""
    origin: Origin | None
    """Repository and commit of the files; None for a copy on disk, whose origin is not known."""
    download: Callable[[str], None] | None = field(default=None, compare=False)
    """Fetches a file; None for a copy on disk."""

    def fetch(self, name: str, progress: Progress, which: str = "") -> Path:
        """Return the path of a file, fetched unless it is there whole; `UserError` if that fails or it is damaged.

        A token shard (.bin) must be as long as its header says, any file as long as the hub says.
        """
        path = self.folder / name
        if self.download and not self._complete(name):
            path.unlink(missing_ok=True)  # huggingface_hub keeps an existing file of any length
            self.download(name)
            progress.note(f"{path.name}: {path.stat().st_size:,} bytes{which}")
        if path.suffix == ".bin":
            open_shard(path)
        return path

    def check_room(self, names: list[str]) -> None:
        """Raise `UserError` if the disk has no room for the files that must still be fetched."""
        if self.download is None:
            return
        left = [name for name in names if not self._complete(name)]
        wanted, free = sum(self.sizes[name] or 0 for name in left), shutil.disk_usage(self.folder).free
        if wanted > free:
            raise UserError(f"{self.folder} has {free / 1e9:,.1f} GB free, and the files take {wanted / 1e9:,.1f} GB")

    def _complete(self, name: str) -> bool:
        path, size = self.folder / name, self.sizes.get(name)
        if not path.is_file() or (path.stat().st_size != size if size is not None else path.stat().st_size == 0):
            return False
        try:
            return path.suffix != ".bin" or len(open_shard(path)) > 0
        except UserError:
            return False


def on_disk(folder: Path) -> Snapshot:
    """Return the snapshot of a copy on disk, laid out as the repository is; `UserError` if there is no such folder."""
    folder = expanded(folder).resolve()
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name one that holds the repository's files")
    files = (path for path in folder.rglob("*") if path.is_file())
    return Snapshot(folder, {path.relative_to(folder).as_posix(): None for path in sorted(files)}, str(folder), None)


def on_hub(repository: str, revision: str, folder: Path, *, kind: Kind = "dataset", bars: bool = False) -> Snapshot:
    """Return the snapshot of a repository, to be fetched into `folder`.

    The first call resolves the revision to a commit and keeps it in the folder, so that all files are of one commit,
    and a later call needs no network for files that are there. `bars` shows huggingface_hub's progress bars. Raises
    `UserError` if that library is not installed, the repository cannot be reached, or the folder holds files of another
    repository or commit.
    """
    folder = expanded(folder).resolve()
    held = _held(folder / SOURCE)
    if held is None:
        held = list_files(repository, revision, folder, kind)
        write_json(folder / SOURCE, {**asdict(held[0]), "files": held[1]})
    origin, sizes = held
    if origin.repository != repository or revision not in (origin.revision, origin.commit):
        raise UserError(
            f"{folder} holds files of {origin.repository} at {origin.revision} ({origin.commit[:12]}), not of"
            f" {repository} at {revision}; name another folder by --out, or delete this one"
        )

    def download(name: str) -> None:
        options: Any = {"local_dir": folder, "cache_dir": folder / ".cache", "repo_type": kind}
        with hub_library(folder, bars, f"{name} of {repository}", ABSENT[kind], OFFLINE[kind]) as library:
            library.hf_hub_download(repository, name, revision=origin.commit, token=TOKEN[kind], **options)

    return Snapshot(folder, sizes, repository, origin, download)


def list_files(repository: str, revision: str, folder: Path, kind: Kind) -> tuple[Origin, dict[str, int | None]]:
    """Ask the hub for the commit of a revision and for the bytes of its files; `folder` is the library's home."""
    what = f"the list of files of {repository} at {revision}"
    with hub_library(folder, False, what, ABSENT[kind], OFFLINE[kind]) as library:
        client = library.HfApi(token=TOKEN[kind])
        info = client.repo_info(repository, repo_type=kind, revision=revision, files_metadata=True)
    sizes = {file.rfilename: file.size for file in info.siblings or []}
    for name in sizes:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise UserError(f"{repository} lists {name}, which leads out of the repository")
    if not info.sha:
        raise UserError(f"{repository} names no commit for {revision}; try again later")
    return Origin(repository, revision, info.sha), sizes


def _held(path: Path) -> tuple[Origin, dict[str, int | None]] | None:
    """Return origin and file sizes from a folder's `source.json`; None if nothing was fetched into it yet."""
    try:
        value: Any = json.loads(path.read_text())
        origin = Origin(*(str(value[name]) for name in ("repository", "revision", "commit")))
        return origin, {str(name): None if size is None else int(size) for name, size in value["files"].items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)}); delete it and try again") from None


@contextmanager
def hub_library(folder: Path, bars: bool, what: str, absent: str, advice: str, doing: str = "fetch") -> Iterator[Any]:
    """Yield huggingface_hub, without telemetry and without files in the home folder; `what` names what it fetches.

    It and its transfer library read these settings only from the environment, in part when they are first imported.
    The user's token is read from its usual place. Errors of these libraries, and of the HTTP library below, become a
    one-line `UserError` that ends in `absent` if the hub has no such thing, else in `advice`.
    """
    home = str(folder / ".cache" / "home")
    usual = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    wanted = {
        "HF_HOME": home,
        "HF_XET_CACHE": f"{home}/xet",
        "HF_TOKEN_PATH": os.environ.get(
            "HF_TOKEN_PATH", str(expanded(Path(os.environ.get("HF_HOME", usual), "token")))
        ),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "0" if bars else "1",
    }
    before = {name: os.environ[name] for name in wanted if name in os.environ}
    os.environ.update(wanted)
    errors: Any = None
    try:
        import huggingface_hub
        from huggingface_hub import errors

        yield huggingface_hub
    except UserError:
        raise
    except ImportError:
        raise UserError("this needs huggingface_hub; run: pip install huggingface_hub") from None
    except Exception as error:
        missing = errors and (errors.EntryNotFoundError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError)
        if missing and isinstance(error, missing) and not isinstance(error, errors.LocalEntryNotFoundError):
            raise UserError(f"the hub does not have {what}; {absent}") from error
        reason = first_line(error.__cause__ or error)  # for a failed upload, the error itself only names the file
        raise UserError(f"cannot {doing} {what} ({reason}); {advice}") from error
    finally:
        for name in wanted:
            del os.environ[name]
        os.environ.update(before)
