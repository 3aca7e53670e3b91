"""Parallel Muon on several real processes, joined by gloo."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from test_optim import assert_alike, journey

from caddie.distributed import Ranks
from caddie.optim import Muon, Optimizer
from caddie.schedules import Ramp

OPTIMIZERS: list[Optimizer] = [
    Muon(lr=0.05, normalize_rows=True, beta2=0.9, weight_decay=0.1, precision="float32"),
    Muon(lr=0.05, coefficients="polar_express", momentum=Ramp(start=0.85, end=0.95, finish=0.05)),
    Muon(lr=0.05, precision="float32", communication="all_reduce"),
]


def journeys(rank: int, world: int, folder: Path) -> None:
    """What one process does; all that it saw goes into a file for each optimizer."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world)
    ranks = Ranks(rank=rank, world=world)
    for number, optimizer in enumerate(OPTIMIZERS):
        save_file(journey(optimizer, ranks), folder / f"{number}.{rank}.safetensors")
    some = [torch.full((2, 3), rank + 1.0), torch.full((5,), rank, dtype=torch.bfloat16), torch.tensor(2.0)]
    finish = ranks.begin_sum(some)
    finish()
    finish()  # once is enough, twice does no harm
    total = world * (world - 1) / 2
    assert [tensor.unique().item() for tensor in some] == [total + world, total, 2.0 * world]
    shared = ranks.begin_reduce_scatter(torch.arange(2.0 * world)[:, None].expand(-1, 3).contiguous())
    expected = world * torch.arange(2.0 * world)[ranks.share(2 * world)]
    assert torch.equal(shared()[:, 0], expected)
    gathered = ranks.begin_all_gather(shared().mT[:1])  # whose elements do not lie one behind the other
    assert torch.equal(gathered().flatten(), world * torch.arange(2.0 * world))
    dist.destroy_process_group()


def test_processes_are_one(tmp_path: Path) -> None:
    """With numbers of matrices that two and three processes cannot share equally; a restart lies between the steps."""
    context = multiprocessing.get_context("forkserver")  # which imports once for all five processes
    context.set_forkserver_preload(["pytest", "safetensors.torch", "torch.distributed", "caddie.optim"])
    for world in (2, 3):
        folder = tmp_path / str(world)
        folder.mkdir()
        processes = [context.Process(target=journeys, args=(rank, world, folder)) for rank in range(world)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        statuses = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        assert statuses == [0] * world
        for number, optimizer in enumerate(OPTIMIZERS):
            replicas = [load_file(folder / f"{number}.{rank}.safetensors") for rank in range(world)]
            assert_alike(journey(optimizer, Ranks()), replicas, optimizer)
