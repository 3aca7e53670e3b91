"""Artifacts on the Hugging Face hub: `hf:USER/NAME[@REVISION]` is fetched to a file here, and its hash is checked.

Nothing that is fetched is run.
"""

import re
import shlex
from pathlib import Path

from caddie.data.hub import HUB, list_files, on_hub
from caddie.errors import UserError, first_line
from caddie.files import file_sha256
from caddie.report.read import pick, read_object
from caddie.report.run_files import ARTIFACT, PARTS, RESULT, WEIGHTS
from caddie.runtime.progress import SILENT

DOWNLOADS = Path("data") / "models"
"""Folder of artifacts from the hub, below the working directory: USER--NAME/COMMIT, as the repository is laid out."""
_PLACE = re.compile(r"hf:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_MOST_PARTS = 16


def split_place(place: str) -> tuple[str, str]:
    """Return repository and revision of `hf:USER/NAME[@REVISION]`; the revision is `main` unless it is named."""
    if not (match := _PLACE.fullmatch(place)):
        raise UserError(f"{place} is no place on the hub; write {HUB}USER/NAME or {HUB}USER/NAME@REVISION")
    return match[1], match[2] or "main"


def artifact_file(place: Path) -> Path:
    """Return the file that ARTIFACT means: the file itself, that of a run folder, or that of `hf:USER/NAME`, fetched.

    Raises `UserError` as `pull` does, and for a folder without artifact; a missing file is an error when it is read.
    """
    if (name := place.as_posix()).startswith(HUB) and not place.exists():
        return pull(name)
    if place.is_dir() and not (place / ARTIFACT).exists():
        if others := sorted(path.name for path in place.glob(f"*{Path(ARTIFACT).suffix}")):
            raise UserError(f"{place} has no {ARTIFACT}, but {others[0]}; name {place / others[0]}")
        trained = (place / WEIGHTS).exists()
        pack = f"make it with: caddie pack {shlex.quote(str(place))}"
        raise UserError(f"{place} has no {ARTIFACT}; {pack if trained else 'name the folder of a finished run'}")
    return place / ARTIFACT if place.is_dir() else place


def pull(place: str) -> Path:
    """Return the path of the artifact at `hf:USER/NAME[@REVISION]`, fetched below `DOWNLOADS` unless it is there.

    The result beside it states its SHA-256, which must be that of the file. A branch is resolved anew each time; a
    commit that was fetched before needs no network. Raises `UserError` if repository or revision are missing, private
    or out of reach, if there is no artifact with its result or more than one, and for a changed or damaged file.
    """
    repository, revision = split_place(place)
    home = DOWNLOADS / repository.replace("/", "--")
    named = re.fullmatch(r"[0-9a-f]{40}", revision)
    commit = revision if named else list_files(repository, revision, home, "model")[0].commit
    snapshot = on_hub(repository, commit, home / commit, kind="model")
    artifacts = [name for name in snapshot.sizes if name.endswith(Path(ARTIFACT).suffix)]
    if len(artifacts) != 1 or RESULT not in snapshot.sizes:
        held = ", ".join(artifacts[:4]) or "none"
        raise UserError(f"{place} must hold one artifact (*.caddie), beside the {RESULT} that scored it; it has {held}")
    parts = [name for name in snapshot.sizes if re.fullmatch(rf"{PARTS}/[^/]+\.py", name)]
    names = [RESULT, *artifacts, *parts[:_MOST_PARTS]]
    snapshot.check_room(names)
    result, artifact, *_ = (snapshot.fetch(name, SILENT) for name in names)
    try:
        stated = pick(read_object(result), "sha256", "artifact")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{place}: its {RESULT} cannot be read ({first_line(error)})") from None
    if file_sha256(artifact) != stated:
        raise UserError(
            f"{place}: {artifacts[0]} is not the file whose SHA-256 its {RESULT} states; it was changed or damaged"
            f" (delete {artifact.parent} to fetch it again)"
        )
    return artifact
