"""Measure what a finished run's model gains by tokens further back: `python bench/context.py RUN ...`.

Each token is predicted twice: where its row begins with the text before it (plain windows), and with at least three
quarters of a row before it (windows a quarter of a row apart). A model that copies from its past gains by the tokens
further back also late in a row; one that only counts pairs of tokens does not. One line for each run: nats per token
that tokens at some places of their row gain.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from caddie.errors import UserError
from caddie.pack.artifact import load
from caddie.run.run_folder import read_run
from caddie.run.stages import held_out_text

PLACES = ((0, 8), (8, 32), (32, 64), (64, 128), (128, 192))
"""First place in a row, and the place after the last."""


@torch.inference_mode()
def losses(model: nn.Module, tokens: Tensor, bos: int, length: int, stride: int) -> np.ndarray:
    """Return nats of each token but the first, in windows of `length` tokens `stride` apart; NaN after the last."""
    found = np.full(len(tokens) - 1, np.nan)
    for begin in range(0, len(tokens) - length, stride):
        inputs, targets = tokens[begin : begin + length], tokens[begin + 1 : begin + length + 1]
        logits = model(inputs[None], inputs[None] == bos)[0].float()
        new = length - stride if begin else 0
        found[begin + new : begin + length] = functional.cross_entropy(logits, targets, reduction="none")[new:].numpy()
    return found


def gains(model: nn.Module, tokens: Tensor, bos: int, length: int) -> list[float]:
    """Return what the tokens at each of `PLACES` gain by all that is further back; NaN beyond the row."""
    gain = losses(model, tokens, bos, length, length) - losses(model, tokens, bos, length, length // 4)
    place = np.arange(len(gain)) % length
    # The last quarter of a row has the same past in both, and the first row has none.
    known = np.isfinite(gain) & (place < length - length // 4) & (np.arange(len(gain)) >= length)
    chosen = [gain[known & (place >= first) & (place < last)] for first, last in PLACES]
    return [float(each.mean()) if len(each) else float("nan") for each in chosen]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a finished run")
    parser.add_argument("--tokens", type=int, default=40_000, help="tokens of the held-out text, from its beginning")
    arguments = parser.parse_args()
    try:
        found = [(run, *read_run(run)) for run in arguments.runs]
    except UserError as error:
        parser.exit(2, f"context.py: {error}\n")
    print("nats per token gained by what is further back, by place in the row")
    print("recipe", *(f"{first}-{last - 1}" for first, last in PLACES), sep="\t", flush=True)
    for run, recipe, _, corpus in found:
        model, text = load(run / "artifact.caddie").model.eval(), held_out_text(corpus)
        tokens = torch.from_numpy(text.tokens[: arguments.tokens].astype(np.int64))
        gained = gains(model, tokens, text.bos, recipe.train.longest_row)
        print(recipe.name, *(f"{gain:.4f}" for gain in gained), sep="\t", flush=True)


if __name__ == "__main__":
    main()
