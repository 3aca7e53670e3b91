"""The verb that hands a run to a tracker: track."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

import click

from caddie.cli.options import TRACKERS, options, path_argument, tell
from caddie.runtime.interrupt import ends_on_interrupt


@click.command()
@path_argument("folder", metavar="RUN")
@click.option("--to", "kind", type=click.Choice(TRACKERS), required=True, help="The tracker.")
@click.option("--follow", is_flag=True, hidden=True, help="Follow a run until standard input ends.")
@options("json")
@ends_on_interrupt
def track(folder: Path, kind: str, follow: bool, as_json: bool) -> int:
    """Send the log, recipe and result of the run in the folder RUN to a tracker.

    Its library is an extra: pip install 'caddie[wandb]'. `caddie run --track` does the same while a run goes on.
    """
    from caddie.share.track import open_tracker, send

    end = threading.Event()
    if follow:
        threading.Thread(target=_wait_for_end, args=(end,), daemon=True).start()
    else:
        end.set()
    tracker = open_tracker(kind, folder, end)
    if follow:
        print(tracker.place, flush=True)
    events = send(kind, tracker, folder, end)
    if not follow:
        facts = {"tracker": kind, "events": events, "place": tracker.place}
        tell(facts, as_json, f"{events:,} events of {folder} sent; look with: {tracker.place}")
    return 0


def _wait_for_end(end: threading.Event) -> None:
    """Set `end` when the process that started this one closes its end of the pipe, or is gone."""
    with suppress(OSError):
        while os.read(0, 1):
            continue
    end.set()
