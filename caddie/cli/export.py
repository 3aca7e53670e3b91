"""The verb that writes an artifact for other programs: export."""

from __future__ import annotations

from pathlib import Path

import click

from caddie.cli.options import options, path_argument, tell
from caddie.runtime.interrupt import ends_on_interrupt


@click.command()
@path_argument("artifact")
@click.option("--to", "form", metavar="FORMAT", required=True, help="html, safetensors or transformers.")
@click.option(
    "--out",
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="Path, else NAME.html or NAME-FORMAT beside ARTIFACT.",
)
@options("json")
@ends_on_interrupt
def export(artifact: Path, form: str, out: Path | None, as_json: bool) -> int:
    """Write ARTIFACT for other programs.

    ARTIFACT is a file, the folder of a run, or hf:USER/NAME[@REVISION], whose export goes to the working directory.
    html is a page with the model inside, which runs in a browser without a network; safetensors is a folder of
    dequantized weights by name, with their settings; transformers is a folder that AutoModelForCausalLM and
    AutoTokenizer load without caddie, given trust_remote_code=True, by which the code in that folder is run.
    """
    from caddie.share.export import export as write

    written = write(artifact, form, out)
    tell({"path": str(written), "format": form}, as_json, str(written))
    return 0
