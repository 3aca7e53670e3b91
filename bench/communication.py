"""What the GPUs of a run tell one another in each step, and how long the wires take at least.

python bench/communication.py [RECIPE] [PATH=VALUE]...

Nothing is measured: the bytes are counted from the recipe as `exchanges` says below (a test counts those that
processes really exchange), and the rates are assumptions: 450 GB/s one way for each GPU within a machine (NVLink of
H100 and H200) and a network card of 400 Gb/s for each GPU. Real rates are lower, 70 to 90 % of these for large
tensors, and every operation takes some 10 to 50 microseconds to start.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from caddie.config import parse_assignment
from caddie.model import GPT
from caddie.model.parameters import assign
from caddie.recipes.catalog import find
from caddie.report.tables import table
from caddie.train.optim import AdamW, Muon
from caddie.train.settings import Train

Kind = Literal["all_reduce", "reduce_scatter", "all_gather"]


@dataclass(frozen=True)
class Exchange:
    """One collective operation of a step."""

    what: str
    kind: Kind
    whole_bytes: int
    """Bytes of the tensor that is summed, or that is whole in the end."""

    def sent_bytes(self, world: int) -> float:
        """What each of `world` processes sends, and receives, in a ring, which no other way undercuts for large ones.

        Each sends all but one of `world` parts once; to sum and then to have it all it does so twice (Patarasu and
        Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations).
        """
        return (2 if self.kind == "all_reduce" else 1) * self.whole_bytes * (world - 1) / world


@dataclass(frozen=True)
class Cluster:
    """Machines that are alike, and what one GPU can send within its machine and out of it, in bytes per second."""

    machines: int
    gpus: int
    """In each machine."""
    link_rate: float = 450e9
    """NVLink of an H100 or H200, one way."""
    network_rate: float = 50e9
    """A card of 400 Gb/s for each GPU."""

    @property
    def world(self) -> int:
        """GPUs in all."""
        return self.machines * self.gpus

    def seconds(self, sent_bytes: float) -> float:
        """The least time in which each GPU sends so much, without what an operation takes to start.

        There are as many rings as a machine has GPUs, each of which leaves it by a card of its own.
        """
        out = sent_bytes / self.gpus / self.network_rate if self.machines > 1 else 0.0
        return max(sent_bytes / self.link_rate if self.gpus > 1 else 0.0, out)


def exchanges(gpt: GPT, train: Train, world: int) -> list[Exchange]:
    """All exchanges of a step between `world` processes, in the order in which they begin; none for one."""
    if world == 1:
        return []
    with torch.device("meta"):
        model = gpt.build()
    parameters = dict(model.named_parameters())
    rules = assign({rule: rule for rule in train.optimizers}, model, "train.optimizers")
    loss_bytes = 4
    first, norms, last, together = [], [], [], loss_bytes
    for rule, optimizer in train.optimizers.items():
        members = [parameter for name, parameter in parameters.items() if rules[name] == rule]
        if isinstance(optimizer, AdamW):
            together += sum(parameter.nbytes for parameter in members)
        elif members:
            assert isinstance(optimizer, Muon)
            norms.append(Exchange("square of the gradient's norm", "all_reduce", 4))
            update = getattr(torch, optimizer.precision).itemsize
            for shape, count in Counter(parameter.shape for parameter in members).items():
                elements = (count + -count % world) * shape.numel()
                if optimizer.communication == "all_reduce":
                    together += elements * 4
                    last.append(Exchange("updates of matrices", "all_reduce", elements * update))
                else:
                    first.append(Exchange("gradients of matrices", "reduce_scatter", elements * 4))
                    last.append(Exchange("updates of matrices", "all_gather", elements * update))
    rest = [Exchange("gradients of all else, and the loss", "all_reduce", together), *norms]
    return [*first, *rest, *last, Exchange("clock and signals, between the hosts", "all_reduce", 16)]


def sent_bytes(found: Sequence[Exchange], world: int) -> dict[str, float]:
    """What each process sends in a step, by what it is for."""
    sums: dict[str, float] = {}
    for one in found:
        sums[one.what] = sums.get(one.what, 0.0) + one.sent_bytes(world)
    return sums


CLUSTERS = (Cluster(1, 1), Cluster(1, 2), Cluster(1, 4), Cluster(1, 8), Cluster(2, 8), Cluster(4, 8))


def main() -> None:
    """Print a table for one recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="baseline", metavar="RECIPE")
    parser.add_argument("settings", nargs="*", default=[], metavar="PATH=VALUE")
    asked = parser.parse_args()
    name, settings = asked.recipe, asked.settings
    recipe = find(name).but(dict(map(parse_assignment, settings)))
    whats = [what for what, sent in sent_bytes(exchanges(recipe.model, recipe.train, 2), 2).items() if sent > 1000]
    rows = []
    for cluster in CLUSTERS:
        found = exchanges(recipe.model, recipe.train, cluster.world)
        sent = sent_bytes(found, cluster.world)
        total = sum(sent.get(what, 0.0) for what in whats)
        rows.append(
            [
                f"{cluster.machines} x {cluster.gpus}",
                max(len(found) - 1, 0),
                *(f"{sent.get(what, 0.0) / 1e6:,.2f}" for what in whats),
                f"{total / 1e6:,.1f}",
                f"{total / cluster.gpus / 1e6 if cluster.machines > 1 else 0.0:,.1f}",
                f"{1e3 * cluster.seconds(total):.3f}",
            ]
        )
    print(f"{' '.join([name, *settings])}: {recipe.parameters:,} parameters; megabytes that one GPU sends in a step")
    print(table(rows, ["machines x GPUs", "operations", *whats, "in all", "by its network card", "ms at least"]))


if __name__ == "__main__":
    main()
