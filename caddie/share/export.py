"""Formats that an artifact is exported to; each function takes the artifact's path and a new path, which it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from caddie.errors import UserError, suggest
from caddie.share.html_page import write_page
from caddie.share.pull import HUB, artifact_file
from caddie.share.to_safetensors import to_safetensors
from caddie.share.to_transformers import to_transformers

FORMATS: Mapping[str, Callable[[Path, Path], Path]] = {
    "html": write_page,
    "safetensors": to_safetensors,
    "transformers": to_transformers,
}


def export(place: Path, form: str, out: Path | None = None) -> Path:
    """Write the artifact at `place`, a file, a run folder or `hf:USER/NAME`, in one of `FORMATS`; return the path.

    It is NAME-FORMAT, and NAME.html for a page, unless `out` names another: beside the artifact, or in the working
    directory for one of the hub. Raises `UserError` for an unknown format, a folder or file of weights that exists, the
    artifact itself, and an artifact that cannot be read.
    """
    if form not in FORMATS:
        raise UserError(f"no format {form}; there are {', '.join(FORMATS)}{suggest(form, FORMATS)}")
    artifact = artifact_file(place)
    if out is None:
        of_hub = place.as_posix().startswith(HUB)
        base = Path(place.name.partition("@")[0]) if of_hub else artifact.with_suffix("")
        out = base.with_name(f"{base.name}.html" if form == "html" else f"{base.name}-{form}")
    if out.exists() and out.samefile(artifact):
        raise UserError(f"{out} is the artifact itself; name another path with --out")
    return FORMATS[form](artifact, out)
