"""The verb that serves run folders to a browser on this machine: board."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import click

from caddie.cli.options import options, tell


@click.command()
@click.argument("folder", metavar="[FOLDER]", default="runs", type=click.Path(path_type=Path))
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8765, show_default=True, help="Port to listen on; 0 for any."
)
@options("json")
def board(folder: Path, port: int, as_json: bool) -> None:
    """Show the runs below FOLDER in a browser while they go on. FOLDER is runs unless named.

    Only this machine is answered, and nothing is ever written. Ctrl-C ends it.
    """
    from caddie.board import Board

    with Board(folder, port) as served, suppress(KeyboardInterrupt):
        facts = {"url": served.url, "port": served.server_port, "folder": str(folder)}
        tell(facts, as_json, f"{served.url} shows {folder}; Ctrl-C ends it")
        sys.stdout.flush()
        served.serve_forever()
