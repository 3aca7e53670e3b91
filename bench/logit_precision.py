"""The cost of rounding logits to bfloat16 on their way to a score, as the contest's records do, in nats per token.

    python bench/logit_precision.py RUN [--tokens 16384] [--lift 0 14] [--eager]

The model of a finished run reads its held-out text in bfloat16; the normed stream and the table of the head are the
same for all. From there on `records` has the product, the division by the cap, the tanh and the product with the cap in
bfloat16; `two caps` takes them for logits above zero and below apart, as AsymLogit does, with both caps at the cap;
`caddie` is what a reported score takes. All end in a log-softmax of float32. Losses are compared, token by token, with
float64 of the same stream and table. A lift is added to all logits by the product itself, before the cap: without a cap
it would change nothing, and with one it shows what logits near the cap cost.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from caddie.cli.exits import end
from caddie.errors import UserError
from caddie.model import Model
from caddie.ops import asymmetric_softcap, float32_linear, linear, softcap
from caddie.report.tables import table
from caddie.run.run_folder import load_packed, read_run
from caddie.run.stages import held_out_text

ROWS = 512
"""Positions whose logits live at once."""
Losses = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Losses (N,) of normed stream (N, width), table (vocabulary, width) and targets (N,) under a cap."""


def exact(h: Tensor, weight: Tensor, targets: Tensor, cap: float) -> Tensor:
    """Losses in float64 throughout."""
    return F.cross_entropy(softcap(h.double() @ weight.double().mT, cap), targets, reduction="none")


def caddie(h: Tensor, weight: Tensor, targets: Tensor, cap: float) -> Tensor:
    """Losses of logits that are float32 from the product on."""
    return F.cross_entropy(softcap(float32_linear(h, weight), cap), targets, reduction="none")


def records(h: Tensor, weight: Tensor, targets: Tensor, cap: float) -> Tensor:
    """Losses of logits in bfloat16 up to the log-softmax."""
    return F.cross_entropy((cap * torch.tanh(linear(h, weight) / cap)).float(), targets, reduction="none")


def two_caps(h: Tensor, weight: Tensor, targets: Tensor, cap: float) -> Tensor:
    """The same with a cap for logits above zero and one for those below, as the records write it."""
    caps = torch.full((2,), cap, dtype=h.dtype)
    return F.cross_entropy(asymmetric_softcap(linear(h, weight), *caps).float(), targets, reduction="none")


PATHS: dict[str, Losses] = {"caddie": caddie, "records": records, "two caps": two_caps}


def lifted(h: Tensor, weight: Tensor, lift: float) -> tuple[Tensor, Tensor]:
    """Stream and table with a channel more, whose product is the lift for every id."""
    return torch.cat([h, h.new_ones(len(h), 1)], 1), torch.cat([weight, weight.new_full((len(weight), 1), lift)], 1)


def costs(
    h: Tensor, weight: Tensor, targets: Tensor, cap: float, lifts: Sequence[float], compile_too: bool = True
) -> Iterator[dict[str, Any]]:
    """A row for each lift, path and compilation: nats per token and how far from float64, its mean and deviation."""
    for lift in lifts:
        x, w = lifted(h, weight, lift)
        true = _losses(exact, x, w, targets, cap)
        yield _row(lift, "float64", False, true, true)
        for compiled in (False, True) if compile_too else (False,):
            for name, path in PATHS.items():
                found = _losses(torch.compile(path, dynamic=True) if compiled else path, x, w, targets, cap)
                yield _row(lift, name, compiled, found.double(), true)


def _row(lift: float, path: str, compiled: bool, found: Tensor, true: Tensor) -> dict[str, Any]:
    error = found - true
    return {
        "lift": lift,
        "path": path,
        "compiled": "yes" if compiled else "no",
        "nats": float(found.mean()),
        "mean": float(error.mean()),
        "deviation": float(error.std()),
    }


def _losses(path: Losses, h: Tensor, weight: Tensor, targets: Tensor, cap: float) -> Tensor:
    parts = zip(h.split(ROWS), targets.split(ROWS), strict=True)
    with torch.no_grad():
        return torch.cat([path(part, weight, right, cap) for part, right in parts])


def stream_of(model: Model, ids: Tensor, bos: int) -> tuple[Tensor, Tensor]:
    """Return the factors of the head in bfloat16: normed stream (rows · positions, width) and table."""
    seen: list[tuple[Tensor, Tensor]] = []

    def product(h: Tensor, weight: Tensor) -> Tensor:
        seen.append((h.flatten(0, -2), weight))
        return linear(h, weight)

    model.head.product = product
    with torch.no_grad():
        for row in ids:
            model(row[None], row[None] == bos, torch.bfloat16, capped=False)
    return torch.cat([h for h, _ in seen]), seen[0][1].bfloat16()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--lift", type=float, nargs="+", default=[0.0, 14.0])
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    text, artifact = held_out_text(read_run(options.run)[2]), load_packed(options.run)
    model, cap = artifact.model, artifact.model.config.head.softcap
    if cap is None or artifact.model.config.head.softcap_form != "tanh":
        raise UserError("the records' path has a softcap of the form tanh, and this model has not")
    length = artifact.scoring.sequence_length
    count = min(options.tokens, len(text.tokens) - 1) // length
    if not count:
        raise UserError(f"the held-out text has less than the {length:,} tokens of one row")
    ids = torch.from_numpy(text.tokens[: count * length + 1].astype("int64"))
    h, weight = stream_of(model, ids[:-1].view(count, length), text.bos)
    found = list(costs(h, weight, ids[1:], cap, options.lift, not options.eager))
    print(f"{count * length:,} tokens, {len(weight):,} ids, softcap {cap:g}; nats per token")
    rows = [
        [
            row["lift"],
            row["path"],
            row["compiled"],
            f"{row['nats']:.6f}",
            f"{row['mean']:+.7f}",
            f"{row['deviation']:.7f}",
        ]
        for row in found
    ]
    print(table(rows, ["lift", "path", "compiled", "loss", "less float64, mean", "deviation"]))


if __name__ == "__main__":
    end(main)
