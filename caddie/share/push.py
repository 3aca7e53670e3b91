"""Publish a finished run on the Hugging Face hub, in one commit: artifact, result, page, recipe and model card."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

from caddie.config.userfile import read_stated
from caddie.data.hub import ABSENT, hub_library
from caddie.errors import UserError
from caddie.files import reason
from caddie.report.read import pick, read_regular, result_errors
from caddie.report.run_files import ARTIFACT, PARTS, RECIPE, REPORT, RESULT
from caddie.run.run_folder import read_finished
from caddie.share.card import card_data, card_text
from caddie.share.pull import split_place

CARD = "README.md"
_MOST_BYTES = 1 << 32
_ADVICE = "check token, name and network; the same command tries again"


def push(
    run: Path, place: str, *, license_name: str | None = None, private: bool = False, bars: bool = False
) -> dict[str, Any]:
    """Upload a finished run to the repository `hf:USER/NAME`, which is made if it is missing; return what was done.

    All files are of one commit on `main`. Text files of the same name are replaced. The recipe goes without the path of
    its corpus. `license_name` is an identifier of the hub's, such as mit. Raises `UserError` for a run that is not
    finished, files that are not those of its result, a missing token, and whatever the hub refuses.
    """
    repository, revision = split_place(place)
    if revision != "main":
        raise UserError(f"push goes to the branch main; leave out @{revision}")
    files = run_files(run)
    result = json.loads(files[RESULT])
    with (
        tempfile.TemporaryDirectory() as home,
        hub_library(Path(home), bars, f"to {repository}", ABSENT["model"], _ADVICE, doing="push") as library,
    ):
        if library.get_token() is None:
            raise UserError("pushing needs a token that may write: set HF_TOKEN, or log in by `hf auth login`")
        with result_errors(run / RESULT, "a model card"):
            data = card_data(library, result, repository, license_name)
            files[CARD] = f"---\n{data}\n---\n\n{card_text(result, repository, sorted(files))}".encode()
        client = library.HfApi()
        client.create_repo(repository, private=private or None, exist_ok=True)
        additions = [library.CommitOperationAdd(name, content) for name, content in sorted(files.items())]
        score = f"{result['bits_per_byte']:.4f} bits per byte"
        commit = client.create_commit(repository, additions, commit_message=f"{result['recipe']}: {score}")
    return {
        "repository": repository,
        "commit": commit.oid,
        "url": str(commit.commit_url),
        "files": {name: len(content) for name, content in sorted(files.items())},
    }


def run_files(run: Path) -> dict[str, bytes]:
    """Return path in the repository to content, of a finished run; `UserError` if it is none or its files disagree.

    Links are not followed, and of `parts` only what the recipe states is taken: somebody else may have made the folder.
    """
    _, about = read_finished(run)
    if not (run / REPORT).is_file():
        raise UserError(f"{run / REPORT} is missing; make it by: caddie report {run}")
    parts = {f"{PARTS}/{one.name}": one.sha256 for one in read_stated(pick(about, PARTS) or [])}
    files = {}
    for name in (ARTIFACT, RESULT, REPORT, *parts):
        try:
            files[name] = read_regular(run / name, _MOST_BYTES)
        except OSError as error:
            raise UserError(f"{run / name}: cannot be read ({reason(error)}); push a folder of your own") from None
        if name in parts and hashlib.sha256(files[name]).hexdigest() != parts[name]:
            raise UserError(f"{run / name} is not the file that {run / RECIPE} names; run the recipe again")
    files[RECIPE] = (json.dumps(about["recipe"], indent=1) + "\n").encode()
    return files
