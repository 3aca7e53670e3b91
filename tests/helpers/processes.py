"""Real processes, joined by gloo, for the tests of what several do together."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from caddie.runtime.distributed import Ranks

Work = Callable[[Ranks, Path], None]

CONTEXT = multiprocessing.get_context("forkserver")
"""Makes processes of their own, which know nothing of this one; what they import is imported once for all."""
CONTEXT.set_forkserver_preload(
    [
        "pytest",
        "safetensors.torch",
        "torch.distributed",
        "caddie.pack.calibrate",
        "caddie.train.optim",
        "caddie.train.loop",
        "caddie.run.run",
        "caddie.cli",
        "caddie.report.display",
    ]
)


def together(work: Work, world: int, folder: Path) -> None:
    """Let `world` processes do this work, a function of a module, with a folder for what they have to say."""
    folder.mkdir(exist_ok=True)
    processes = [CONTEXT.Process(target=_one, args=(work, rank, world, folder)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    statuses = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert statuses == [0] * world


def _one(work: Work, rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world)
    work(Ranks(rank=rank, world=world), folder)
    dist.destroy_process_group()
