"""Parallel Muon on several real processes, joined by gloo."""

from pathlib import Path

import pytest
import torch
from processes import together
from safetensors.torch import load_file, save_file
from test_optim import assert_alike, journey

from caddie.config.schedules import Ramp
from caddie.runtime.distributed import Ranks
from caddie.train.optim import Muon, Optimizer

OPTIMIZERS: list[Optimizer] = [
    Muon(lr=0.05, normalize_rows=True, beta2=0.9, weight_decay=0.1, precision="float32"),
    Muon(lr=0.05, coefficients="polar_express", momentum=Ramp(start=0.85, end=0.95, finish=0.05)),
    Muon(lr=0.05, precision="float32", communication="all_reduce"),
]


def journeys(ranks: Ranks, folder: Path) -> None:
    """Work of one process, which writes its results to a file for each optimizer."""
    rank, world = ranks.rank, ranks.world
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


@pytest.mark.long
@pytest.mark.parametrize("world", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_processes_are_one(world: int, tmp_path: Path) -> None:
    """With numbers of matrices that two and three processes cannot share equally; a restart lies between the steps."""
    together(journeys, world, tmp_path)
    for number, optimizer in enumerate(OPTIMIZERS):
        replicas = [load_file(tmp_path / f"{number}.{rank}.safetensors") for rank in range(world)]
        assert_alike(journey(optimizer, Ranks()), replicas, optimizer)
