"""The verb that publishes a run: push."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from caddie.cli.options import options, path_argument, tell
from caddie.runtime.interrupt import ends_on_interrupt


@click.command()
@path_argument("run")
@click.argument("place", metavar="hf:USER/NAME")
@click.option("--license", "license_name", metavar="ID", help="Licence that you give it, as the hub writes it: mit.")
@click.option("--private", is_flag=True, help="Make a new repository private.")
@options("json", "quiet")
@ends_on_interrupt
def push(run: Path, place: str, license_name: str | None, private: bool, as_json: bool, quiet: bool) -> int:
    """Publish the finished run in the folder RUN on the Hugging Face hub.

    One commit holds artifact, result, page, recipe and a model card. The token is that of HF_TOKEN or of `hf auth
    login`. Every ARTIFACT argument takes hf:USER/NAME and hf:USER/NAME@REVISION then.
    """
    from caddie.share.push import push as publish

    bars = not quiet and sys.stderr is not None and sys.stderr.isatty()
    facts = publish(run, place, license_name=license_name, private=private, bars=bars)
    sizes = ", ".join(f"{name} {size:,}" for name, size in facts["files"].items())
    lines = [facts["url"], f"bytes: {sizes}", f"check it with: caddie verify {place}"]
    tell(facts, as_json, "\n".join(lines))
    return 0
