"""What the GPUs of a run tell one another in each step, and how long the wires take at least.

python bench/communication.py [RECIPE] [PATH=VALUE]...

Nothing is measured: the bytes are counted from the recipe as `caddie.communication` describes (a test counts those that
processes really exchange), and the rates are assumptions: 450 GB/s one way for each GPU within a machine (NVLink of
H100 and H200) and a network card of 400 Gb/s for each GPU. Real rates are lower, 70 to 90 % of these for large
tensors, and every operation takes some 10 to 50 microseconds to start.
"""

from __future__ import annotations

import sys

from caddie.communication import Cluster, exchanges, sent_bytes
from caddie.config import parse_assignment
from caddie.recipe import find
from caddie.tables import table

CLUSTERS = (Cluster(1, 1), Cluster(1, 2), Cluster(1, 4), Cluster(1, 8), Cluster(2, 8), Cluster(4, 8))


def main() -> None:
    """Print a table for one recipe."""
    name, *settings = sys.argv[1:] or ["baseline"]
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
