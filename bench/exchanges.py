"""What small exchanges between two processes of this machine take over gloo, one by one and together.

python bench/exchanges.py [RECIPE]

The gradients are those of RECIPE's optimizers but for Muon, as zeros. Ten rounds of a hundred, each way in turn; the
least mean of a round is printed. Needs two free cores; a GPU is not used.
"""

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from caddie.model.parameters import assign
from caddie.recipes.catalog import find
from caddie.runtime.distributed import Ranks
from caddie.train.optim import Muon

ROUNDS, TIMES = 10, 100


def microseconds(work: Callable[[], object]) -> float:
    """Of one call, the mean of a round."""
    began = time.perf_counter()
    for _ in range(TIMES):
        work()
    return (time.perf_counter() - began) / TIMES * 1e6


def measure(rank: int, store: str, name: str) -> None:
    """What one of the two processes does; the first prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    ranks, recipe = Ranks(rank=rank, world=2), find(name)
    with torch.device("meta"):
        model = recipe.model.build()
    rules = assign({rule: rule for rule in recipe.train.optimizers}, model, "train.optimizers")
    groups: dict[str, list[torch.Tensor]] = {"loss": [torch.zeros(())]}
    for one, parameter in model.named_parameters():
        if not isinstance(recipe.train.optimizers[rules[one]], Muon) and rules[one] != "embedding":
            groups.setdefault(rules[one], []).append(torch.zeros(parameter.shape))

    def apart() -> None:
        for finish in [ranks.begin_sum(tensors) for tensors in groups.values()]:
            finish()

    def together() -> None:
        with ranks.together():
            ends = [ranks.begin_sum(tensors) for tensors in groups.values()]
        for finish in ends:
            finish()

    ways: dict[str, Callable[[], object]] = {
        "clock and signals": lambda: ranks.maximum(1.0, 0.0),
        f"{len(groups)} sums, one by one": apart,
        f"{len(groups)} sums together": together,
    }
    rounds = [[microseconds(work) for work in ways.values()] for _ in range(ROUNDS)]
    if ranks.first:
        for way, *found in zip(ways, *rounds, strict=True):
            print(f"{way}: {min(found):,.0f} microseconds")
    dist.destroy_process_group()


def main() -> None:
    """Start the two processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="baseline", metavar="RECIPE")
    find(name := parser.parse_args().recipe)  # a mistake is told before the processes begin
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=measure, args=(rank, f"{folder}/store", name)) for rank in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
